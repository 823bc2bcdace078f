"""Predictions for tokens of the memory: the last layers of programs that answer queries.

After the last step, the state with the weights w is copied once for each query x. Each copy attends to its query and to
the sink, with the difference heads of `differences`, whose score is w·x and whose value is 1. So it gets w·x. A mean
e^{w·x} takes one head of score w·x beside a sink.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from attnc.incontext.differences import Sizes, choose, sink_score
from attnc.incontext.prompt import ONE, SINK, Prompt
from attnc.ir.building import AffineBuilder, Attending, reading
from attnc.ir.layers import EVERY_QUERY, Attention, Head, Layer, Mask

ASKED = "asked"
"""The channel that is 1 in every token of the memory for which a prediction may be read."""
PREDICTION_HEADS = 8
"""Number of pairs of heads of a prediction, as in `newton`."""


def ask(
    prompt: Prompt,
    before: tuple[int, Sequence[str]],
    weights: tuple[np.ndarray, str],
    keys: tuple[np.ndarray, int],
    memory: tuple[int, Sequence[str]],
    reach: float,
    *,
    is_exponential: bool = False,
) -> tuple[Layer, ...]:
    """Return the layers that predict the tokens `asked` of the memory.

    Parameters
    ----------
    prompt : Prompt
        The sizes of the prompt.
    before : tuple of int and sequence of str
        The number of tokens and the channels of the state before.
    weights : tuple of array of int and str
        The tokens with the weights, one for each target, or one for each token that is asked; and their prefix.
    keys : tuple of array of int and int
        The tokens of the memory that are asked, and the sink.
    memory : tuple of int and sequence of str
        The number of tokens and the channels of the memory.
    reach : float
        A bound of |w·x|.
    is_exponential : bool
        Whether the prediction is e^{w·x}.
    """
    (states, iterate), (asked, sink) = weights, keys
    is_own = len(states) == len(asked) and prompt.targets == 1
    outputs = 1 if is_own else len(states)
    count = len(asked) * outputs
    slots = (*(f"v.{c}" for c in prompt.weight_names), ONE, "prediction")
    copy = AffineBuilder(*before, count, slots)
    sources = states if is_own else np.tile(states, len(asked))
    for c in prompt.weight_names:
        copy.link(np.arange(count), f"v.{c}", sources, f"{iterate}.{c}")
    copy.set(np.arange(count), ONE, 1.0)
    seen = np.full(memory[0], len(asked), np.int32)
    seen[asked], seen[sink] = np.arange(len(asked)), EVERY_QUERY
    mask = Mask(np.repeat(np.arange(len(asked), dtype=np.int32), outputs), seen)
    attending = Attending(slots, memory[1], "float64", mask)
    score = {(f"v.{w}", c): 1.0 for w, c in zip(prompt.weight_names, prompt.regressors, strict=True)}
    same = {(c, c): 1.0 for c in prompt.regressors}
    heads: tuple[Head, ...]
    if is_exponential:
        C = sink_score(2, reach, "float64")
        values, written = {(ASKED, ASKED): 1.0}, {(ASKED, "prediction"): math.exp(C)}
        heads = (attending.head(score | {(ONE, SINK): 1.0}, same | {(SINK, SINK): C}, values, written),)
    else:
        found = choose(Sizes(1, prompt.num_weights, 1.0, reach, reach), PREDICTION_HEADS, "float64")
        C = found.sink(2, reach, "float64")
        heads = found.sum_heads(attending, C, score, same, [(ASKED, "prediction")])
    predict = Attention("predict", heads, slots, residual=True, cross=True)
    answer = reading("answer", count, slots, np.arange(count), {"prediction": "prediction"}, "float64")
    return (copy.build("copy"), predict, answer)
