"""The noise of channels: float32 stays within it, a damaged model does not pass, and a proof counts it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from attnc.errors import ProgramError
from attnc.groundtruth.certifying import Original, certify, stages
from attnc.groundtruth.deviations import _Line, weights_error
from attnc.groundtruth.disguises import DISGUISES, Model
from attnc.groundtruth.running import AttentionWeights, softmax
from attnc.targets.expressions.expression import Expression
from attnc.targets.sources import as_target

BOX = {"x": (-1.0, 1.0), "y": (-1.5, 1.5)}


@pytest.fixture(scope="module")
def original() -> Original:
    return Original.of(as_target("sin(tanh(x) + y) + cos(x)", BOX), 1e-3)


def stored(original, name, seed=0):
    disguise, rng = DISGUISES[name], np.random.default_rng(seed)
    structure = disguise.restructured(Model.plain(original.checkpoint), list(BOX), rng)
    return structure, disguise.stored(structure, 2.0**-22, rng)


@pytest.mark.parametrize("name", ["rotated", "combined"])
def test_channels_in_float32_are_within_their_noise(original, name):
    """Each head, run in float32 on the stored numbers, is within its bound of the function of the argument it reads."""
    structure, model = stored(original, name)
    proof, found = certify(original, structure, model)
    points = (
        np.random.default_rng(1).uniform(original.target.box.lo, original.target.box.hi, (200, 2)).astype(np.float32)
    )
    E = model.embedding.astype(np.float32)
    E[:, model.pinned] = 0
    prefix, stream = E[list(model.prefix)], E[model.query] + points @ E[list(model.variables)]
    exact = {name: points[:, i].astype(np.float64) for i, name in enumerate(BOX)}
    heads = {head.channel: head for head in stages(proof).heads}
    for i, of in enumerate(model.layers):
        after = stream.copy()
        hidden = np.triu(np.ones((len(prefix), len(prefix)), bool), 1)
        later = prefix.copy()
        for h in range(of.num_heads):
            W_Q, W_K, W_V, W_O = (W[h].astype(np.float32) for W in (of.W_Q, of.W_K, of.W_V, of.W_O))
            keys, values = prefix @ W_K.T, prefix @ W_V.T
            after = after + softmax((stream @ W_Q.T) @ keys.T / np.float32(4)) @ values @ W_O.T
            scores = np.where(hidden, -np.inf, (prefix @ W_Q.T) @ keys.T / np.float32(4))
            later = later + softmax(scores.astype(np.float32)) @ values @ W_O.T
        prefix, stream = later, after
        assert stream.dtype == np.float32
        for head in original.checkpoint.network.heads:
            if head.layer == i:
                claim = heads[head.writes[0]]
                channel = stream.astype(np.float64) @ model.dual[structure.dimensions[head.writes[0]]]
                names = [*exact]
                argument = np.stack([exact[each] for each in names], axis=1)
                t = Expression.parse(claim.argument).with_variables(names)(argument)
                wanted = Expression.parse(claim.function).with_variables(("t",))(t)[:, 0]
                error = np.abs(channel - wanted).max()
                assert error <= claim.bound + claim.noise + found.output
                exact[claim.name] = channel


def test_a_damaged_model_is_not_certified(original):
    structure, model = stored(original, "rotated")
    before = certify(original, structure, model)[0].bound
    of = model.layers[0]
    W_V = of.W_V.copy()
    W_V[0] *= 1.001
    damaged = replace(model, layers=(AttentionWeights(of.W_Q, of.W_K, W_V, of.W_O), *model.layers[1:]))
    assert certify(original, structure, damaged)[0].bound > before + 1e-4
    broken = replace(model, layers=(AttentionWeights(of.W_Q, of.W_K, 2 * of.W_V, of.W_O), *model.layers[1:]))
    with pytest.raises(ProgramError, match="noise"):
        certify(original, structure, broken)
    E = model.embedding.copy()
    E[model.query] = 0.0
    with pytest.raises(ProgramError, match=r"heard|off by|noise"):
        certify(original, structure, replace(model, embedding=E))


def test_a_head_that_reads_the_pinned_channel_is_refused(original):
    structure, model = stored(original, "plain")
    of = model.layers[0]
    W_Q = of.W_Q.copy()
    W_Q[0, 0, model.pinned] = 1e-9
    damaged = replace(model, layers=(AttentionWeights(W_Q, of.W_K, of.W_V, of.W_O), *model.layers[1:]))
    with pytest.raises(ProgramError, match="pinned"):
        certify(original, structure, damaged)


@pytest.mark.parametrize("steep", [1.0, 50.0, 1000.0])
def test_errors_of_weights_are_bounded_and_the_bound_is_close(steep):
    """Against errors of scores of any sign at many places, and within a factor 3 of the worst that is found."""
    rng = np.random.default_rng(0)
    a, c = steep * np.array([-1.0, 0.2, 1.0]), np.array([0.1, 0.0, -0.2])
    v, eta, shift, theta = np.array([0.5, -1.0, 0.7]), np.array([1e-3, 2e-3, 1e-3]), 1e-4 / steep, 1e-5
    bound = weights_error(_Line(a, c, -1.0, 1.0), v, eta, shift, theta)
    q = np.concatenate([np.linspace(-1, 1, 2001), np.linspace(-5, 5, 2001) / steep]).clip(-1, 1)
    scores = np.outer(q, a) + c
    exact, worst = softmax(scores) @ v, 0.0
    for signs in rng.choice([-1.0, 1.0], (200, 3)):
        for direction in (-1.0, 1.0):
            moved = np.outer(q + direction * shift, a) + c
            off = softmax(moved * (1 + theta * direction) + signs * eta) @ v
            worst = max(worst, float(np.abs(off - exact).max()))
    assert worst <= bound <= 3 * worst


def test_a_dual_that_is_no_inverse_is_refused(original):
    structure, model = stored(original, "plain")
    skewed = replace(model, dual=model.dual * (1 + 1e-3))
    with pytest.raises(ProgramError, match=r"pinned|inverse"):
        certify(original, structure, skewed)
