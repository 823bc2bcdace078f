"""Knots: cells that end beside a jump. They cover the box exactly, and a certificate with other knots is refused."""

from __future__ import annotations

import itertools
import random

import pytest
from flint import fmpq

import attnc
from attnc_checker.proving import place
from checker.tampering import changes, proved, reproved, saved_once

SQUARE = {"x": (-1, 1), "y": (-1, 1)}
saved = saved_once(lambda path: attnc.compile("sign(x)*y", SQUARE, eps=0.3, norm=3.5).save(path))


def test_proved_again_with_knots(net):
    assert "affine_cells" in (net / "config.json").read_text(encoding="utf-8")
    assert proved(net, processes=1).reproved <= 0.3


@pytest.mark.parametrize(
    ("expression", "box", "p", "eps", "dtype"),
    [
        ("sign(x)*y", SQUARE, 10, 0.01, "float64"),
        ("sign(x)*y", SQUARE, 1, 0.001, "float64"),
        ("sign(x)*y", SQUARE, 3.5, 0.03, "float32"),
        ("sign(x - 0.3)*y", SQUARE, 10, 0.1, "float64"),
        ("floor(3*x)*y", SQUARE, 2, 0.03, "float64"),
        ("sign(x - 0.3)*floor(2*y)", SQUARE, 4, 0.1, "float64"),
        ("sign(x - 0.1), floor(x)", {"x": (-2, 2)}, 3, 0.01, "float64"),
        ("floor(x)*sin(3*x)", {"x": (-2, 2)}, 7, 0.03, "float64"),
        ("sign(sin(5*x))*exp(x)", {"x": (0, 2)}, 1, 0.05, "float32"),
        ("floor(x)*x*z + sign(y - 0.1)", {"x": (0, 2), "y": (-1, 1), "z": (0, 1)}, 2, 0.3, "float64"),
    ],
)
def test_jumps_in_large_norms_are_proved_again(tmp_path, expression, box, p, eps, dtype):
    net = attnc.compile(expression, box, eps, norm=p, dtype=dtype)
    assert net.certificate.by_leaves.knots
    assert reproved(tmp_path / "net", net).reproved <= eps


def test_cells_between_knots_cover_a_side_without_gaps():
    rng = random.Random(0)
    for _ in range(50):
        points = sorted({rng.uniform(-1, 1) * 10.0 ** -rng.randrange(30) for _ in range(rng.randrange(2, 9))})
        for level in range(6):
            ends = [place(points, fmpq(i, 2**level)) for i in range(2**level + 1)]
            assert (ends[0], ends[-1]) == tuple(fmpq(*points[i].as_integer_ratio()) for i in (0, -1))
            assert all(lo < hi for lo, hi in itertools.pairwise(ends))
            if level:
                assert ends[::2] == [place(points, fmpq(i, 2 ** (level - 1))) for i in range(2 ** (level - 1) + 1)]


def _knot(number, value):
    """Change a knot along x; a function makes it of the old ones."""

    def change(data):
        knots = data["knots"][0]
        knots[number] = value(knots) if callable(value) else value

    return change


def _beside(data, side):
    """The number of the last knot before the jump at 0, or of the first one after it."""
    knots = data["knots"][0]
    return next(n for n, x in enumerate(knots) if x > 0) - (side < 0)


def _across_the_jump(data):
    first = _beside(data, 1)
    data["knots"][0][first - 1] = data["knots"][0][first] / 2


def _wide(data):
    first = _beside(data, 1)
    data["knots"][0][first - 1 : first + 1] = [-0.01, 0.01]


def _halved(data):
    """A half of the last leaf as one more leaf, which overlaps it."""
    kind, *rest = data["leaves"][-1]
    order, (level, *index) = (rest[:1], rest[1:]) if kind == "taylor" else ([], rest)
    data["leaves"].append([kind, *order, level + 1, *(2 * i for i in index)])
    data["leaf_bounds"].append(data["leaf_bounds"][-1])


def _enclosed(data):
    data["leaves"] = [["enclosure", *leaf[-3:]] for leaf in data["leaves"]]


NOT_INSIDE = "the knots do not lie inside of the box, in ascending order"
test_other_knots_and_leaves_are_refused = changes(
    {
        ("certificate.json", 1): [
            (_knot(0, -2.0), NOT_INSIDE),
            (_knot(0, -1.0), NOT_INSIDE),
            (_knot(-1, 1.0), NOT_INSIDE),
            (_knot(-1, 1.5), NOT_INSIDE),
            (_knot(0, lambda knots: knots[1]), NOT_INSIDE),
            (lambda data: data["knots"][0].reverse(), NOT_INSIDE),
            (lambda data: data["knots"][0].append(data["knots"][0][-1]), NOT_INSIDE),
            (lambda data: data["knots"].pop(), "there are knots for 1 variables of 2"),
            (lambda data: data["knots"].append([]), "there are knots for 3 variables of 2"),
            (lambda data: data["knots"].clear(), "there are knots for 0 variables of 2"),
            (lambda data: data["knots"].reverse(), "is not re-proved to"),
            (lambda data: data.pop("knots"), "is not re-proved to"),
            (lambda data: data["knots"][0].pop(0), "is not re-proved to"),
            (_across_the_jump, "is not re-proved to"),
            (_wide, "the leaves add up to the norm"),
            (lambda data: (data["leaves"].pop(), data["leaf_bounds"].pop()), "do not cover the box"),
            (lambda data: data["leaves"].__setitem__(0, data["leaves"][1]), "a cell is stated twice"),
            (_halved, "a cell lies within another"),
            (_enclosed, "enclosure leaves have no knots"),
        ],
        ("certificate.json", 2): [
            (_knot(0, float("nan")), ""),
            (_knot(0, float("inf")), ""),
            (_knot(0, float("-inf")), ""),
            (_knot(0, "0.5"), "knots[0][0] is '0.5', not a number"),
            (_knot(0, None), "knots[0][0] is None, not a number"),
            (_knot(0, True), "knots[0][0] is True, not a number"),
            (lambda data: data.update(knots=[1.0, 2.0]), "knots[0] is 1.0, not a list"),
            (lambda data: data.update(knots={}), "knots is {}, not a list"),
        ],
    }
)
