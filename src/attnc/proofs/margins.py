"""The room that the prover leaves for the checker, one number for each difference between the two.

The contract: the checker, whose roundings and subdivisions differ, must find at most the bound that the prover claims.
Each number here is the room that one such difference needs. A claim with this room is as true as one without; a number
that is too small makes a checker refuse a true certificate, and never makes it accept a false one.
"""

LEAF_ROOM = 2.0**-13
"""The bound of a leaf is stated larger by this share, before rounding is added.

The prover finds the largest |p| of a polynomial, or the largest distance of f from a value, exactly where it is
attained at an end of a cell. The checker halves cells up to ten times and each time leaves a dozen coefficients below
2^−20 of the bound aside, 120·2^−20 < 2^−13 in all. Measured: without it leaves of abs(sin(3x)) and sqrt(x) are found
up to 2.3·10^−6 above their claims, and 3 of 4 compositions are refused.
"""

STAGE_ROUNDING = 1.01
"""Factor on the rounding of an engine over a cell.

Prover and checker add up the same terms, γ_{near+3+n} of the sizes and γ_near of the average, in other groups: the
checker divides by 1 − γ_near where the prover multiplies by 1 + γ_near. The two differ by terms of second order, at
most keys·u of the first ones, and keys·u is below 1 % for up to 10^5 keys in float32.
"""

POINT_ROUNDING = 1.5
"""Factor on the rounding of an engine at a point of a table.

Keys with a weight above u/8 are counted as near, and a weight close to u/8 may be near for the checker and far for the
prover. With one near key more the roundings, near + 3 + n of products and near of the sum of weights, grow by the
factor (2·near + 5 + n)/(2·near + 3 + n) ≤ 7/5. The 1 % of `STAGE_ROUNDING` comes on top: 1.42 in all.
"""

AXIS_LEAKS = 1.5
"""Factor on the leaks and on the rounding of heads that are proved axis by axis.

Where a stage before the last is flat, the checker encloses it on a longer interval than the cell, found by halving the
whole axis, and so its leaks are those of a longer interval. It takes all keys as near in the rounding of sums. Both
numbers are small parts of a bound. The factor is neither derived nor measured: the tests' certificates pass with it.
"""

AXIS_DISTANCE = 1 + 2.0**-12
"""Factor on the distance of f from the values that can be selected.

The checker encloses f in balls whose radii have 30 bits. Every operation enlarges a radius by 2^−30 of itself at most,
and radii are no larger than the distance; so expressions of up to 2^18 operations stay within 2^−12 of it.
"""

NORM_LEAVES = 1 + 2.0**-12
"""Factor on every leaf of an L_p norm that is proved axis by axis.

For the largest error only the worst leaf counts, but in a norm all leaves count. The checker divides near rows from far
ones by a leak of its own, which moves the bound of a leaf by less than that leak times the distance of f from all
values. The factor is not measured: the tests' norms pass with it.
"""

# Staged proofs. "Measured" is on 13 certificates: 4 compositions, 4 ReLU networks and 5 truncated linear functions, of
# which 6 are in float32, each proved without one margin and then checked.

RANGE_ROOM = 2.0**-44
"""The interval of an argument is stated wider by this share of its larger end. Both sides enclose the range of the same
expression; the prover's outward rounding costs some 2^−52 per operation, and so does the conversion of the checker's
ends to floats. 2^−44 covers 256 such roundings. It is all the room that an argument without errors has."""
ARGUMENT_ROOM = 1.125
"""The error of an argument is taken larger by this factor where it widens the interval of t. The checker adds up this
error from slopes of earlier functions on 256 pieces of their arguments, with balls; the prover has 128 pieces and
intervals. At the outputs the error itself counts, without this room. Measured: without any margin 2 of 4 compositions
leave their intervals; without this one alone none does, as the prover's slopes are the wider ones there."""
ROUNDING_ROOM = 1.25
"""Rounding is claimed larger by this factor where the box is taken as a whole. Both sides count the same roundings, on
sizes that each encloses by itself; on whole boxes no other room absorbs the difference. Measured: without it 1 of 6
float32 certificates is refused, in the sixth digit of a leaf that is rounding alone."""
JUMP_ROOM = 1.25
"""The change of a function where its slope is infinite is taken larger by this factor. There both sides bound it by the
range of the function over the pieces that touch the singularity. With an argument that is off by e, √t changes by up to
√(2e), and e itself is known to within ARGUMENT_ROOM, a factor of 1.06 under the root; the rest is for pieces that end
elsewhere. Measured: none of the 13 needs it; one of them has a root."""
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
