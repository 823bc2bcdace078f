"""The room that the prover leaves for the checker, one number for each difference between the two.

The contract: the checker, whose roundings and subdivisions differ, must find at most the bound that the prover claims.
Each number here is the room that one such difference needs. A claim with this room is as true as one without; a number
that is too small makes a checker refuse a true certificate, and never makes it accept a false one.
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
numbers are small parts of a bound. The factor is measured, not derived: the certificates of the tests stay below it.
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
values. The factor is measured: the norms of the tests stay below it.
"""
