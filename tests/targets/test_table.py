"""Tables: accepted points, merged points, recognised grids, and every refusal with its row and column."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import attnc
from attnc.numerics.intervals import Interval
from attnc.proofs.observed import observed_error


def grid(*axes) -> np.ndarray:
    return np.stack([x.ravel() for x in np.meshgrid(*axes, indexing="ij")], axis=1)


def test_one_column_may_be_flat():
    table = attnc.TableTarget([3, 1, 2], [9, 1, 4])
    assert table.points.tolist() == [[1], [2], [3]]
    assert table.values.tolist() == [[1], [4], [9]]
    assert table.input_shapes == ((1,),)
    assert table.output_shape == ()
    assert table.box.as_dict() == {"x0": (1.0, 3.0)}
    assert table.text is None
    assert table.describe() == "table of 3 points"
    assert "the table's 3 points" in table.assumptions[0]


def test_several_outputs_keep_their_shape():
    points = np.random.default_rng(0).random((7, 2))
    assert attnc.TableTarget(points, points).output_shape == (2,)
    assert attnc.TableTarget(points, points[:, :1]).output_shape == (1,)
    assert attnc.TableTarget(points, points[:, 0]).output_shape == ()


@pytest.mark.parametrize("counts", [(5,), (4, 3), (2, 3, 4)])
def test_a_grid_is_recognised_in_any_order_of_rows(counts):
    rng = np.random.default_rng(1)
    axes = [np.sort(rng.random(count)) for count in counts]
    points = grid(*axes)
    values = rng.random(len(points))
    order = rng.permutation(len(points))
    table = attnc.TableTarget(points[order], values[order])
    assert table.grid is not None
    assert all((found == axis).all() for found, axis in zip(table.grid, axes, strict=True))
    assert (table.points == points).all()
    assert (table.values[:, 0] == values).all()


def test_a_grid_with_a_hole_is_scattered():
    points = grid(np.arange(4.0), np.arange(3.0))
    assert attnc.TableTarget(points[1:], points[1:, 0]).grid is None
    moved = points.copy()
    moved[5, 1] += 1e-12
    assert attnc.TableTarget(moved, points[:, 0]).grid is None


@settings(max_examples=50)
@given(arrays.arrays(np.int64, st.tuples(st.integers(2, 30), st.integers(1, 3)), elements=st.integers(-3, 3)))
def test_rows_that_agree_are_merged_and_looked_up(points):
    values = points @ np.array([1, 10, 100])[: points.shape[1]]
    if any(len(set(column)) == 1 for column in points.T.tolist()):
        return
    table = attnc.TableTarget(points, values)
    assert table.num_points == len({tuple(row) for row in points.tolist()})
    assert (table(points.astype(float))[:, 0] == values).all()
    assert (table(table.points) == table.values).all()


def test_negative_zero_is_zero():
    assert attnc.TableTarget([0.0, -0.0, 1.0], [1, 1, 2]).num_points == 2


def test_the_claim_is_about_all_points_and_no_other():
    """The one point that is off is found: nothing is sampled."""
    x = np.linspace(0, 1, 100_003)
    table = attnc.TableTarget(x, x)
    seen = []

    def evaluate(points):
        seen.append(len(points))
        return points + (points == x[70_001]) * 0.25

    assert observed_error(evaluate, table, work_per_point=10**9) == pytest.approx(0.25)
    assert seen == [100_003]


def test_other_points_have_no_value():
    table = attnc.TableTarget([0, 1], [0, 1], names=["t"])
    with pytest.raises(attnc.InputError, match=re.escape("has no value at t = 0.5, which is not one of its points")):
        table(np.array([[0.0], [0.5]]))
    cell = Interval(np.zeros((1, 1)), np.ones((1, 1)))
    with pytest.raises(attnc.InputError, match="has no values between its points"):
        table.variation(cell, np.zeros((1, 1)))


def test_values_cannot_be_changed_afterwards():
    table = attnc.TableTarget([0, 1], [0, 1])
    with pytest.raises(ValueError, match="read-only"):
        table.values[0] = 3


GOOD = np.arange(6.0).reshape(3, 2)


@pytest.mark.parametrize(
    ("points", "values", "names", "message"),
    [
        ([[1, 2], [3]], [1, 2], None, "the points of a table do not form an array: rows differ in length"),
        ([["a"], ["b"]], [1, 2], None, "the points of a table must be real numbers; found np.str_('a') in row 0"),
        ([1, 2], [1, 2j], None, "the values of a table must be real numbers; found"),
        ([1.0, None], [1, 2], None, "found None in row 1"),
        (np.zeros((2, 2, 2)), [1, 2], None, "the points of a table have shape (N,) or (N, d); found (2, 2, 2)"),
        ([1, 2], np.zeros((2, 2, 2)), None, "the values of a table have shape (N,) or (N, k); found (2, 2, 2)"),
        (3.0, [1], None, "the points of a table have shape (N,) or (N, d); found ()"),
        (GOOD, [1, 2], None, "a table needs a row of values for each point; found 3 points, 2 rows"),
        (
            np.random.default_rng(0).random((7, 5)),
            np.zeros(7),
            None,
            "a table whose points form no grid has 1 to 4 input columns",
        ),
        (np.zeros((5, 0)), np.zeros(5), None, "a table has 1 to 6 input columns; the points have 0"),
        (GOOD, np.zeros((3, 0)), None, "a table needs at least one column of values"),
        ([], [], None, "a table needs at least two points; found 0"),
        ([1], [1], None, "a table needs at least two points; found 1"),
        ([[0, 0], [1, np.nan], [2, 1]], [1, 2, 3], ["a", "b"], "found nan in row 1, column b. Leave this row out."),
        (GOOD, [1, -np.inf, np.inf], None, "found -inf in row 1, output 0. Leave such rows (there are 2) out."),
        ([[0, 5], [1, 5]], [1, 2], ["t", "p"], "column p is 5 in all 2 rows: nothing depends on it. Leave this column"),
        ([2, 2], [1, 1], None, "column x0 is 2 in all 2 rows"),
        (
            [[0, 1], [2, 3], [0, 1]],
            [0.25, 2, 0.5],
            ["a", "b"],
            "row 0 and row 2 are one point, a = 0, b = 1, with two values, 0.25 and 0.5: no function has both",
        ),
        ([0, 1, 1, 0], [[1, 1], [2, 2], [2, 3], [4, 1]], None, "in output 0 (and 1 more such pair)"),
        ([-1e308, 1e308], [0, 1], None, "is wider than float64 can hold"),
        (GOOD, [1, 2, 3], ["a"], "names: 1 name(s) for 2 column(s) of points"),
        (GOOD, [1, 2, 3], ["a", "a"], "names: every column needs a name of its own; found a, a"),
        (GOOD, [1, 2, 3], ["a", " "], "names: every column of the points needs a name"),
        (GOOD, [1, 2, 3], ["a", 3], "names: every column of the points needs a name"),
    ],
)
def test_what_is_no_table_is_refused(points, values, names, message):
    with pytest.raises(attnc.InputError, match=re.escape(message)):
        attnc.TableTarget(points, values, names)


def test_rows_are_called_as_asked():
    with pytest.raises(attnc.InputError, match="line 10 and line 12 are one point"):
        attnc.TableTarget([1, 2, 1], [1, 2, 3], label=lambda row: f"line {row + 10}")
