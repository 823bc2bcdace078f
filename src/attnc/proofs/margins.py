"""The room that the prover leaves for the checker, one number for each difference between the two.

The contract: the checker, whose roundings and subdivisions differ, must find at most the bound that the prover claims.
Each number here is the room that one such difference needs. A claim with this room is as true as one without; a number
that is too small makes a checker refuse a true certificate, and never makes it accept a false one.
"""

STAGE_ROUNDING = 1.01
"""Factor on the rounding of an engine over a cell.

Prover and checker use the same theorem, but group its sums differently and cut a cell into other parts to look for the
largest rounding. Each grouping changes a γ_n by n·u relative to itself, far below 1e-3, and the parts of a cell agree
with those of the prover to a few parts in a thousand. 1 % covers both.
"""

POINT_ROUNDING = 1.5
"""Factor on the rounding of an engine at a point of a table.

At a point the prover counts the roundings of big keys only (those with a weight above u/8), and the checker counts all
additions of the tree in which the engine sums. For the trees that engines use, the second count is at most 1.5 times
the first. Rounding is a small part of a bound at a point, so the factor costs little.
"""

AXIS_LEAKS = 1.5
"""Factor on the leaks and on the rounding of heads that are proved axis by axis.

The checker looks at the intervals between the stated cuts as they are, where the prover cuts a wide one once more; it
counts leaks over these longer intervals, and counts one rounding more for each score. Both are below 1.5 times the
numbers of the prover, and both are small beside the distance of f from the selected value.
"""

AXIS_DISTANCE = 1 + 2.0**-12
"""Factor on the distance of f from the values that can be selected.

The checker encloses f in balls whose radii have 30 bits, and an expression of up to some hundred operations adds up
that many roundings of 2^−30 of the size of f: below 2^−22 of it, and below 2^−12 of any distance that exceeds 2^−10 of
the size of f.
"""

NORM_LEAVES = 1 + 2.0**-12
"""Factor on every leaf of an L_p norm that is proved axis by axis.

For the largest error only the worst leaf counts, but in a norm all leaves count. The checker divides near keys from far
ones at other places, which moves the bound of a leaf by at most the leaks, below 2^−12 of it.
"""
