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

STAGE_ROUNDING = 1.01
"""Factor on the rounding of an engine over a cell.

Prover and checker add up the same terms, γ_{near+3+n} of the sizes and γ_near of the average, in other groups: the
checker divides by 1 − γ_near where the prover multiplies by 1 + γ_near. For heads that are proved axis by axis all keys
are near on both sides. The two differ by terms of second order, at most keys·u of the first ones, and keys·u is below
1 % for up to 10^5 keys in float32. Measured: no case of the corpus needs it.
"""

POINT_ROUNDING = 1.42
"""Factor on the rounding of an engine at a point of a table.

Keys with a weight above u/8 are counted as near, and a weight close to u/8 may be near for the checker and far for the
prover. With one near key more the roundings, near + 3 + n of products and near of the sum of weights, grow by the
factor (2·near + 5 + n)/(2·near + 3 + n) ≤ 7/5. The 1 % of `STAGE_ROUNDING` comes on top. Measured: without it 2 of ten
tables are refused, and a factor of 1.03 is enough for both.
"""

AXIS_LEAK_SHARE = 5e-4
"""The share of the goal that the rows which a proof axis by axis leaves out may cost, on each axis.

The checker leaves out rows that cost up to 2·10^−3 of the bound. It must need no row that the prover left out, because
the prover did not compare f with the value of such a row. The checker's limit on the weight of these rows is
2·10^−3·bound/(spread of the values + bound), and the prover's is share·goal/max(spread, goal). With goal ≤ 1.5·bound
the prover's is the smaller one for every share up to 2·10^−3/3. Measured: with a share of 5·10^−3 the checker refuses
two_layer for sqrt(x) to 0.1 in float32. The leaks themselves need no room of their own: in the corpus and in 40 other
certificates the two sides differ by less than 4·10^−5 of the bound, which `AXIS_DISTANCE` covers.
"""

AXIS_DISTANCE = 1 + 2.0**-12
"""Factor on the distance of f from the values that can be selected.

The checker encloses f in balls whose radii have 30 bits. Every operation enlarges a radius by 2^−30 of itself at most,
and radii are no larger than the distance; so expressions of up to 2^18 operations stay within 2^−12 of it. Measured:
without it 1 of 11 cases of the corpus is refused, and leaves are found up to 4·10^−6 above their claims.
"""

NORM_SHARE = 2.0**-28
"""In a norm every leaf is stated with at least the bound that would make up this share of the norm if it held on the
whole box: the share of the sum of p-th powers, so the bound is NORM_SHARE^(1/p) of the mean. Such leaves hardly count,
and near a jump the checker may find more on them than the prover. Measured: without it the checker refuses floor(3*x)
on (0, 2) in L_1, L_2 and L_3 by attention_softmax. It is not always enough: the checker leaves out rows that cost
2·10^−3 of the whole norm, and refuses 2 of 17 random jumps in L_1 by attention_softmax.
"""

RANGE_ROOM = 2.0**-44
"""The interval of an argument is stated wider by this share of its larger end. Both sides enclose the range of the same
expression; the prover's outward rounding costs some 2^−52 per operation, and so does the conversion of the checker's
ends to floats. 2^−44 covers 256 such roundings. It is all the room that an argument without errors has."""
ARGUMENT_ROOM = 1.125
"""The error of an argument is taken larger by this factor where it widens the interval of t. The checker adds up this
error from slopes of earlier functions on 256 pieces of their arguments, with balls; the prover has 128 pieces and
intervals. At the outputs the error itself counts, without this room. Measured: without any margin 2 of 4 compositions
leave their intervals; without this one alone none does, as the prover's slopes are the wider ones there."""
ROUNDING_ROOM = 1.01
"""Rounding is claimed larger by this factor where the box is taken as a whole. Both sides count the same roundings, on
sizes that each encloses by itself, and differ by terms of second order, as in `STAGE_ROUNDING`. Measured: without it
none of the 48 certificates of the corpus is refused, and of 6 others in float32 one is, by 10^−6 of a leaf that is
rounding alone."""
JUMP_ROOM = 1.125
"""The change of a function where its slope is infinite is taken larger by this factor. There both sides bound it by the
range of the function over the pieces that touch the singularity, and the checker's pieces are the smaller ones. With an
argument that is off by e, t^a with a < 1 changes by at most (2e)^a, and e is known to within the factor ARGUMENT_ROOM:
1.125^a < 1.125. Measured: neither of the two certificates with a root needs it."""
DIVIDED_ROOM = 2.0**-6
"""The sum of errors over parts of a box is stated larger by this share. The checker has slopes and ranges of its own on
each part; where its sum is larger it halves farther, along MORE_AXES, and stops at the claim. So this room buys time
of the checker. Measured: without it no composition is refused."""
WHOLE_ROOM = 2.0**-22
"""The sum of errors over a whole box is stated larger by this share. There both sides have the same slopes, those of
relu and clip, and differ by the rounding of sums over up to 1,000 heads: 1000·2^−52 per stage. Measured: none
of 9 needs it, though their claims are used up to 1 − 10^−6."""
MORE_AXES = 20
"""Axes that are stated beyond those that the prover halved along: the checker may need smaller parts. Measured: with
DIVIDED_ROOM no composition needs them."""
