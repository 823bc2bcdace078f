"""Python functions as targets: their values are checked, and their claims are stated."""

from __future__ import annotations

import numpy as np
import pytest

import attnc
from attnc.errors import InputError
from attnc.numerics.intervals import Interval
from attnc.targets.box import Box
from attnc.targets.function_target import CallableTarget, SequenceTarget

BOX = Box.parse([(-1, 1), (0, 2)])


def raises(points):
    raise ValueError("no such luck")


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda p: 1.0, "keep the batch"),
        (lambda p: p[:1, 0], "keep the batch"),
        (lambda p: p[:, :, None], "SequenceTarget"),
        (lambda p: ["a"] * len(p), "real numbers"),
        (lambda p: p[:, 0] * 1j, "real numbers"),
        (lambda p: p[:, :0], "no output"),
        (raises, "raises failed .* ValueError: no such luck"),
    ],
)
def test_functions_that_return_something_else(fn, words):
    with pytest.raises(InputError, match=words):
        CallableTarget(fn, BOX, 1.0)


def test_nan_is_named_with_its_place():
    with pytest.raises(InputError, match=r"returned NaN or inf at x0 = "):
        attnc.compile(lambda p: np.where(p[:, 0] > 0.9, np.nan, 0.0), [(-1, 1)], 0.1, lipschitz=1.0)


def test_a_function_that_changes_its_shape_is_named():
    shapes = iter([3, 1, 1, 1])

    def fickle(points):
        return points[:, 0] if next(shapes) == 3 else points

    target = CallableTarget(fickle, BOX, 1.0)
    with pytest.raises(InputError, match=r"fickle returned shape \(5, 2\) for a batch of 5"):
        target(np.zeros((5, 2)))


def test_functions_cannot_change_the_points():
    def greedy(points):
        points[:] = 7.0
        return points[:, 0]

    points = np.zeros((4, 2))
    CallableTarget(greedy, BOX, 1.0)(points)
    assert (points == 0).all()


def test_integers_lists_and_float32_are_fine():
    for fn in (lambda p: np.ones(len(p), int), lambda p: [1.0] * len(p), lambda p: np.ones(len(p), np.float32)):
        assert CallableTarget(fn, BOX, 0.0)(np.zeros((3, 2))).dtype == np.float64


def test_without_a_lipschitz_constant_nothing_is_proved():
    net = attnc.compile(lambda p: p[:, 0], [(-1, 1)], 0.1)
    assert (net.certificate.bound, net.certificate.method) == (None, "estimate")
    with pytest.raises(InputError, match="needs a Lipschitz constant"):
        attnc.compile(lambda p: p[:, 0], [(-1, 1)], 0.1, construction="max_affine")


@pytest.mark.parametrize("lipschitz", [-1.0, np.nan, np.inf])
def test_bad_lipschitz_constants(lipschitz):
    with pytest.raises(InputError, match="lipschitz"):
        CallableTarget(lambda p: p[:, 0], BOX, lipschitz)


def test_the_assumption_is_stated():
    net = attnc.compile(lambda p: p.sum(axis=1), [(-1, 1)] * 2, 0.5, lipschitz=np.sqrt(2))
    sentence, engine = net.certificate.assumptions
    assert "float64" in engine
    assert sentence.startswith("given, not proved")
    assert "1.41421" in sentence


def test_variation_is_the_distance_times_the_constant():
    target = CallableTarget(lambda p: p[:, 0], BOX, 3.0)
    cells = Interval(np.array([[0.0, 0.0]]), np.array([[0.3, 0.8]]))
    found = target.variation(cells, np.array([[0.0, 0.4]]))[0]
    assert found == pytest.approx(3 * np.hypot(0.3, 0.4))
    assert found >= 1.5
    with_value = target.variation(cells, np.array([[0.0, 0.4]]), np.array([[0.25]]))[0]
    assert with_value == pytest.approx(1.75)


# --- sequences -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda X: X[:, 0], r"returned shape \(batch, 1\); it must return \(batch, 2, k\)"),
        (lambda X: X[:, :1], "one row for each of the 2 tokens"),
        (lambda X: X[:1], "keep the batch"),
        (lambda X: np.concatenate([X, X]), "keep the batch"),
        (raises, "raises failed on inputs of shape"),
    ],
)
def test_sequence_functions_that_return_something_else(fn, words):
    with pytest.raises(InputError, match=words):
        SequenceTarget(fn, tokens=2, width=1, lipschitz=1.0)


def test_sequence_nan_is_named():
    target = SequenceTarget(lambda X: np.where(X > 0.5, np.nan, X) if len(X) > 3 else X, 2, 1, (-1, 1), 1.0)
    with pytest.raises(InputError, match="NaN or inf at x0_0"):
        attnc.compile(target, eps=0.3)


@pytest.mark.parametrize(
    ("tokens", "width"), [(0, 1), (2, -1), ((1, 2), 1), ((1, 2, 3), (1, 1, 1)), (1.5, 1), ("2", 1)]
)
def test_bad_sequence_sizes(tokens, width):
    with pytest.raises(InputError, match=r"tokens|width"):
        SequenceTarget(lambda X: X, tokens, width, lipschitz=1.0)


def test_two_sequences_reach_the_function_in_their_shapes():
    seen = []

    def fn(X, Y):
        seen.append((X.shape[1:], Y.shape[1:]))
        return X * Y.mean(axis=(1, 2), keepdims=True)

    net = attnc.compile(SequenceTarget(fn, tokens=(2, 3), width=(1, 1), box=(-1, 1), lipschitz=1.5), eps=1.5)
    assert set(seen) == {((2, 1), (3, 1))}
    X, Y = np.full((4, 2, 1), 0.5), np.full((4, 3, 1), -0.5)
    assert net(X, Y).shape == (4, 2, 1)
    assert np.abs(net(X, Y) - fn(X, Y)).max() <= net.certificate.bound
    with pytest.raises(InputError, match="takes 2 input"):
        net(X)
    with pytest.raises(InputError, match="batch size"):
        net(X, Y[:3])
