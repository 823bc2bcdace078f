"""The room that the prover leaves for the checker, one number for each difference between the two.

The contract: the checker, whose roundings and subdivisions differ, must find at most the bound that the prover claims.
Each number here is the room that one such difference needs. A claim with this room is as true as one without; a number
that is too small makes a checker refuse a true certificate, and never makes it accept a false one.

"The corpus" is `benchmarks/corpus_cases.py`: 87 cases proved by leaves, 45 head by head, ten tables. A number was
measured by proving these cases without it and checking them. `tests/proofs/test_margins.py` compares the bounds that
are found with those that are claimed.
"""

LEAF_ROOM = 2.0**-13
"""The bound of a leaf is stated larger by this share, before rounding is added.

The prover finds the largest |p| of a polynomial, or the largest distance of f from a value, exactly where it is
attained at an end of a cell. The checker halves cells up to ten times and each time leaves a dozen coefficients below
2^−20 of the bound aside, 120·2^−20 < 2^−13 in all. Measured: without it, leaves of 7 cases of the corpus are found up
to 2.4·10^−6 above their claims, and single leaves of a norm up to 3 %; 3 of 4 compositions are refused.
"""

SMALL_LEAVES = 2.0**-21
"""The share that leaves which hardly count may add to the integral of an L_p norm: a leaf is stated at no less than the
error that would add this share if it were everywhere.

Where f is constant, a leaf is rounding and leaks alone, and the two sides choose leaks differently. Measured on
`floor(3*x - 3)` in L_2, with a norm of 0.012: leaves of 3·10^−9 are found three times as large.
"""

STAGE_ROUNDING = 1.01
"""Factor on the rounding of an engine over a cell.

Prover and checker add up the same terms, γ_{near+3+n} of the sizes and γ_near of the average, in other groups: the
checker divides by 1 − γ_near where the prover multiplies by 1 + γ_near. The two differ by terms of second order, at
most keys·u of the first ones, and keys·u is below 1 % for up to 10^5 keys in float32. Measured: no case of the corpus
needs it.
"""

ANY_ORDER_ROUNDING = 1.1
"""Factor on the rounding of an engine over a cell, if sums over keys are in any order in float32.

Then the keys with a weight above u/8 are counted, and not the additions in a tree of blocks. A key may be near for the
checker and far for the prover, as in `POINT_ROUNDING`, but here weights are bounded over a cell, and the rounding of
sums is a part of all rounding. Measured on 21 stock checkpoints: without it one is refused, by 0.6 % of a leaf.
"""

SLOPE_ROUNDING = 1.25
"""Factor on the rounding of a gradient over a cell. Prover and checker use the same theorem, and bound the weights, the
number of keys that count and the distances of values over a cell in their own ways."""

AXIS_ROUNDING = 1.52
"""Factor on the rounding of sums of a head that is proved axis by axis, with all keys near on both sides.

For a softmax over p features the prover counts 2p + 3 + n roundings: p additions of weights, and p of the map that
reads the features. The checker counts the latter twice, as additions over keys and as roundings after them: 3p + 3 + n.
The 1 % of `STAGE_ROUNDING` comes on top. Measured: without it the checker finds 1.48 times the prover's rounding for
attention_softmax in float32.
"""

POINT_ROUNDING = 1.42
"""Factor on the rounding of an engine at a point of a table.

Keys with a weight above u/8 are counted as near, and a weight close to u/8 may be near for the checker and far for the
prover. With one near key more the roundings, near + 3 + n of products and near of the sum of weights, grow by the
factor (2·near + 5 + n)/(2·near + 3 + n) ≤ 7/5. The 1 % of `STAGE_ROUNDING` comes on top. Measured: without it 2 of ten
tables are refused, and a factor of 1.03 is enough for both.
"""

STATE_ROOM = 2.0**-16
"""Inputs of a last head that a stage before it wrote may be wider for the checker, by this share of their reach.

The certificate states the gap from which both sides leave out rows. The checker must need no row that the prover left
out, because the prover did not compare f with the value of such a row. The checker encloses a stage on a larger
interval where it changes by less than 2^−20 of a reach that is 2 to 5 times the prover's. So centres are apart by up to
2^−19 of it and radii by 2^−20, in all 3·5·2^−20 < 2^−16 of the prover's. Besides, the checker does not cut the box of
the head along an input that changes scores by less than 2^−20: four inputs, and twice that each, are below 2^−16. Where
a row is behind by the gap plus this room, times the slopes of the scores, the checker leaves it out too. Its other
enclosures are the narrower ones: prover and checker have the same gaps between keys, and the checker takes the largest
mean that they allow.
"""

AXIS_FARTHEST = 2.0
"""Factor on the cost of rows that are left out: their weight times the largest distance of f from any value.

The checker has that distance from the plain range of f, the prover from a sharper one. The range of f itself is at most
as wide as the distance; so the factor covers a checker whose range is twice as wide. Measured over 92 leaves of a norm:
the checker's distance is up to 1.02 times the prover's.
"""

PARTITION_SCORES = {"float64": 1.25, "float32": 1.01}
"""Factor on the errors of scores of a partition, which make the weight of rows that are left out larger.

In float32 both sides count the roundings of queries, products and sums apart, and alike; they differ by terms of second
order. In float64 the checker counts all roundings of a score for each of its terms, folded maps included. Measured over
43 partitions of one to six variables: the checker's errors are at most 1.18 times the prover's in float64, where they
are below 10^−5 in scores, and 1.0000 times in float32.
"""

AXIS_DISTANCE = 1 + 2.0**-12
"""Factor on the distance of f from the values that can be selected.

The checker encloses f in balls whose radii have 30 bits. Every operation enlarges a radius by 2^−30 of itself at most,
and radii are no larger than the distance; so expressions of up to 2^18 operations stay within 2^−12 of it. Measured:
without it 1 of 11 cases of the corpus is refused, and leaves are found up to 4·10^−6 above their claims.
"""

RANGE_ROOM = 2.0**-44
"""The interval of an argument is stated wider by this share of its larger end. Both sides enclose the range of the same
expression; the prover's outward rounding costs some 2^−52 per operation, and so does the conversion of the checker's
ends to floats. 2^−44 covers 256 such roundings. It is all the room that an argument without errors has."""
ARGUMENT_ROOM = 1.125
"""The error of an argument is taken larger by this factor R where it widens the interval of t.

Both sides find this error from the slopes of earlier functions: e' = own + G·e, the prover with slopes on 128 pieces,
the checker on 256. The change |G|·e that the checker finds is at most (1 + ρ) times that of the prover, because it
encloses some slopes by other formulas. R ≥ 1 + ρ is enough for any number of stages: the prover takes R·e for e, so if
the checker finds at most R·e, its next error is at most own + (1 + ρ)·G·R·e ≤ R·(own + G·R·e).
`tests/proofs/staged/test_margins.py` compares the two for the functions of the language: ρ is below 0.05 for errors up
to 1 % of the interval, and below 0.01 for errors up to 0.1 % of it. The room costs nothing at the outputs, where the
error itself counts. Measured: without it 1 of 21 random compositions leaves its interval.
"""
ROUNDING_ROOM = 1.01
"""Rounding is claimed larger by this factor where the box is taken as a whole. Both sides count the same roundings, on
sizes that each encloses by itself, and differ by terms of second order, as in `STAGE_ROUNDING`. Measured: without it
none of the 48 certificates of the corpus is refused, and of 6 others in float32 one is, by 10^−6 of a leaf that is
rounding alone."""
DIVIDED_ROOM = 2.0**-6
"""The sum of errors over parts of a box is stated larger by this share. The checker has slopes of its own on each part.
They exceed the prover's by at most 2^−6 of the largest slope of the function, for errors up to 0.1 % of the interval:
`tests/proofs/staged/test_margins.py` compares them. Where this is not enough, the checker halves the part. Where a
slope is infinite, both sides take the range of the function over pieces of the same size, so that nothing more is
needed. Measured: with 2^−22 instead, 1 of 14 random compositions is refused, one with a root, by 5·10^−4."""
WHOLE_ROOM = 2.0**-22
"""The sum of errors over a whole box is stated larger by this share. There both sides have the same slopes, those of
relu and clip, and differ by the rounding of sums over up to 1,000 heads: 1000·2^−52 per stage. Measured: none
of 9 needs it, though their claims are used up to 1 − 10^−6."""
MAX_AXES = 128
"""Number of axes along which the checker may halve the box in turn: the most that it accepts. The first are those of
the prover. The others are for a checker whose ranges are wider on the prover's parts. Measured: without them, and
without DIVIDED_ROOM, 2 of 22 random compositions are refused."""
