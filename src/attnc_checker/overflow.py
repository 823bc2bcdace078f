"""That nothing overflows: no number that an output does not need, either, as engines may multiply it by 0, and 0·∞ is
nan.

Sizes go through the layers, |W|·sizes + |c|; what a head says is at most its largest value. Every variable counts as 1
at least, so that the products of weights that engines fold do not overflow.
"""

from __future__ import annotations

from typing import Any

from flint import arb

from attnc_checker.files import Refused
from attnc_checker.forms import Terms
from attnc_checker.program import Program
from attnc_checker.vectors import most, total

LARGEST = {"float64": arb(2) ** 1000, "float32": arb(2) ** 104}
"""MAX_TOKENS terms below these do not add up to an overflow."""


def require_finite(program: Program, reach: Terms) -> None:
    """`reach`: how large the variables, and what is known of what attention writes, are."""
    _through(program, "layers", reach, _through(program, "memory", reach, []))


def _through(program: Program, stream: str, reach: Terms, memory: list[Any]) -> list[Any]:
    """How large every feature is in the end. On the way there is one size for all tokens, but for some `places`."""
    (tokens, width), first = program.shapes[stream][0], program.firsts[stream]
    places = {divmod(i, width): reach[first + i].max(arb(1)) for i in range(tokens * width)}
    features = [arb(0)] * width

    def size(place: tuple[int, int]) -> Any:
        return places.get(place, features[place[1]])

    for i, layer in enumerate(program.layers[stream], 1):
        width = program.shapes[stream][i][1]
        if layer["kind"] == "affine":
            made = {place: abs(arb(x)) for place, x in layer["constant"].items()}
            for place, row in layer["rows"].items():
                made[place] = made.get(place, arb(0)) + total(abs(arb(x)) * size(at) for at, x in row)
            places, features = made, [arb(0)] * width
        elif layer["kind"] == "softmax":
            places, features = {}, [arb(1)] * width
        else:
            sizes, said = _by_feature(places, features), [arb(0)] * width
            for head in layer["heads"]:
                Q, V = _products(head["W_Q"], sizes), _products(head["W_V"], memory if layer["cross"] else sizes)
                K = _products(head["W_K"], memory if layer["cross"] else sizes)
                _require(program, [total(q * k for q, k in zip(Q, K, strict=True)), *Q, *K, *V])
                said = [x + y for x, y in zip(said, _products(head["W_O"], V), strict=True)]
            places = {place: x + said[place[1]] for place, x in places.items()} if layer["residual"] else {}
            features = [x + y for x, y in zip(features, said, strict=True)] if layer["residual"] else said
            proved = (key for key in reach if isinstance(key, tuple) and key[0] == i and stream == "layers")
            places |= {key[1:]: reach[key] for key in proved}
        _require(program, [arb(0), *places.values(), *features])
    return _by_feature(places, features)


def _products(columns: list[list[tuple[int, Any]]], sizes: list[Any]) -> list[Any]:
    return [total(abs(arb(x)) * sizes[row] for row, x in column) for column in columns]


def _by_feature(places: dict[tuple[int, int], Any], features: list[Any]) -> list[Any]:
    largest = list(features)
    for (_, feature), x in places.items():
        largest[feature] = largest[feature].max(x)
    return largest


def _require(program: Program, sizes: list[Any]) -> None:
    if not most(sizes) < LARGEST[program.dtype]:
        raise Refused(f"the network may overflow in {program.dtype} on the box")
