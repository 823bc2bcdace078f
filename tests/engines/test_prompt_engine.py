"""The prompt engine: heads that share scores, and refusals. Its values are tested in test_agreement."""

from __future__ import annotations

import numpy as np
import pytest

from attnc.engines import prompt
from attnc.errors import InputError
from attnc.ir import Attention, Head, Mask, Program
from attnc.ir.layers import EVERY_QUERY
from attnc.ir.spec import check
from engines.test_agreement import run_prompt
from ir.rounding import assert_agrees


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
def test_heads_that_share_scores_and_values(dtype, scale):
    """Scores α_h·S + T: the forms are found, silent keys are set apart, and every query of a masked group is served."""
    rng = np.random.default_rng(3)
    width, tokens = 5, 40
    W_Q, W_K = rng.normal(size=(width, 3)), rng.normal(size=(width, 3))
    W_K[-1] = W_Q[:, -1] = 0
    extra_q, extra_k = np.zeros((width, 1)), np.zeros((width, 1))
    extra_q[0], extra_k[-1] = 1, 4.0
    W_V, W_O = rng.normal(size=(width, 2)), rng.normal(size=(2, width))
    W_V[-1] = 0
    mask = Mask(
        np.r_[np.zeros(20, np.int32), np.arange(1, 21, dtype=np.int32)],
        np.r_[np.full(9, EVERY_QUERY), np.zeros(11), np.arange(1, 21)].astype(np.int32),
    )
    shared = [a.astype(dtype) for a in (np.hstack([W_K, extra_k]), W_V)]
    heads = tuple(
        Head(np.hstack([alpha * scale * W_Q, extra_q]).astype(dtype), *shared, (alpha * W_O).astype(dtype), which)
        for alpha in (1, -1, 2, -3)
        for which in (None, mask)
    )
    channels = tuple(f"c{i}" for i in range(width))
    for cross in (False, True):
        layer = Attention("attend", heads, channels, residual=True, cross=cross)
        shapes = ((tokens, width),) * (1 + cross)
        program = check(Program((layer,), shapes, (tokens, width)))
        inputs = tuple(rng.normal(size=(1, *shape)).astype(dtype) for shape in shapes)
        inputs[-1][0, 30:, : width - 1] = 0
        assert_agrees(program, inputs, run_prompt(program, inputs))


def test_values_that_are_not_finite_are_refused():
    layer = Attention("a", (Head(*(np.eye(2),) * 4),), ("x", "y"))
    program = check(Program((layer,), ((3, 2),), (3, 2)))
    with pytest.raises(InputError, match="NaN"):
        prompt.run(program, [np.full((3, 2), np.nan)])
