"""An MLP, or one feed-forward block, as a Program: Affine → Attention → Affine, hidden units as tokens.

Unit j with p keys is p tokens. Token (j, k) carries key (a_k, c_k) and value v_k + u_k·z_j; token (j, 0) also carries
the query (z_j, 1), and is where the result is read. A mask by segments lets unit j see its own keys and no others.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from attnc.certifying import certify
from attnc.constructions.built import Built, Progress
from attnc.converting.chains import Linear, ModuleTarget, Units, chain_error, expression_target, relu_target
from attnc.converting.modules import DTYPES, HALVES, AttentionActivation, AttentionPReLU, AttentionSoftsign
from attnc.converting.walking import convert_module
from attnc.errors import InputError
from attnc.ir.building import AffineBuilder, projection
from attnc.ir.layers import Attention, Head, Layer, Mask
from attnc.ir.program import Program
from attnc.ir.spec import check
from attnc.network import Network
from attnc.proofs.certificate import Certificate
from attnc.targets.box import BoxLike
from attnc.targets.linear import feature_box

MAX_ENTRIES = 2**24
"""Links of all affine maps together; each is stored."""
FINE = 1e-9
"""Where gates are exact, what is left is the remainder of the proof; it need not be finer than this."""
OTHER_SECONDS, LOOSE = 1.0, 10.0
"""Enclosures through several layers are wide: a proof by them is given up early, and dropped if it is so loose."""
CHANNELS = ("z", "one", "slope", "offset", "value")


def mlp_network(
    module: nn.Module, box: BoxLike | tuple[float, float], eps: float, progress: Progress | None
) -> Network:
    """`attnc.mlp_network`."""
    chain = in_a_row(module)
    converted, _ = convert_module(nn.Sequential(*chain), eps, True, None)
    assert isinstance(converted, nn.Sequential)
    layers = _layers(converted)
    dtype = _dtype(chain)
    width = layers[0].W.shape[1]
    domain = feature_box(box, width)
    original = nn.Sequential(*(copy.deepcopy(part) for part in chain)).double().eval()
    error = chain_error(layers)
    program = _program(layers, width, dtype)
    gates = [units.solved for units in layers if isinstance(units, Units)]
    told = ", ".join(f"{solved.activation} ({solved.num_anchors})" for solved in gates)
    built = Built(program, "feed_forward", None, parameters=(("gates", told), ("error", error)))
    known, relus = expression_target(layers, domain), relu_target(layers, domain)
    if known is not None:
        return certify(built, known, math.inf, max(4 * error, FINE), None, progress)
    if relus is not None:
        network = certify(built, relus, math.inf, max(4 * error, FINE), None, progress)
    else:
        other = ModuleTarget(original, layers, domain)
        network = certify(built, other, math.inf, error, None, progress, OTHER_SECONDS)
    claim = network.certificate
    if claim.bound is None or claim.bound <= LOOSE * max(error, claim.observed or 0.0):
        return network
    bare = Certificate(None, claim.observed, (), claim.assumptions, claim.dtype, "estimate")
    return dataclasses.replace(network, certificate=bare)


def in_a_row(module: nn.Module) -> list[nn.Module]:
    """Linear maps and activations, in the order in which they run."""
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        activation = module.activation
        kept = activation if isinstance(activation, nn.Module) else _Called(activation)
        return [module.linear1, kept, module.linear2]
    if isinstance(module, nn.Sequential):
        parts = [
            part for child in module for part in (in_a_row(child) if isinstance(child, nn.Sequential) else [child])
        ]
        return [part for part in parts if not isinstance(part, nn.Dropout | nn.Identity)]
    raise InputError(
        f"a program is made of an nn.Sequential, or of the block of a transformer layer; found "
        f"{type(module).__name__}. Give nn.Sequential(first_linear, activation, second_linear) of its parts."
    )


class _Called(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def _dtype(chain: Sequence[nn.Module]) -> str:
    found = {part.weight.dtype for part in chain if isinstance(part, nn.Linear)}
    if len(found) != 1 or found & set(HALVES):
        raise InputError("a program computes in float64 or float32: give linear maps of one of these dtypes")
    return DTYPES[found.pop()]


def _layers(converted: nn.Sequential) -> list[Any]:
    """Linear and Units in turn."""
    found: list[Any] = []
    for part in converted:  # not children(), which names a shared activation once
        gate = part.function if isinstance(part, _Called) else part
        if isinstance(gate, AttentionSoftsign):
            raise InputError("softsign takes two layers of attention, and is not part of a program of this kind")
        if isinstance(gate, nn.Linear):
            bias = np.zeros(gate.out_features) if gate.bias is None else gate.bias.detach().double().cpu().numpy()
            found.append(Linear(gate.weight.detach().double().cpu().numpy(), bias))
        elif isinstance(gate, AttentionActivation) and found and isinstance(found[-1], Linear):
            found.append(Units(gate.solved, _carried(gate, len(found[-1].b))))
        else:
            raise InputError(
                f"{type(part).__name__}: a program of this kind has linear maps, and an activation behind each"
            )
    if not found or not isinstance(found[0], Linear):
        raise InputError("there is no linear map to begin with")
    return found


def _carried(gate: AttentionActivation, units: int) -> np.ndarray:
    carried = np.tile(gate.solved.keys.carried, (units, 1))
    if isinstance(gate, AttentionPReLU):  # keys 0 and 1 carry weight·z and z
        carried[:, 0] = gate.weight.detach().double().cpu().numpy()
    return carried


def _program(layers: Sequence[Any], width: int, dtype: str) -> Program:
    channels: Sequence[str] = [f"in.{i}" for i in range(width)]
    made: list[Layer] = []
    sources = [(0, name) for name in channels]  # where the inputs of the next linear map are
    tokens, number, place = 1, 0, 0
    keys = max((layer.solved.keys.p for layer in layers if isinstance(layer, Units)), default=0)
    entries = sum(layer.W.size * (1 + keys) for layer in layers if isinstance(layer, Linear))
    if entries > MAX_ENTRIES:
        raise InputError(f"the program would have {entries:,} links, more than {MAX_ENTRIES:,}; take a smaller block")
    while place < len(layers):
        linear = layers[place]
        units = layers[place + 1] if place + 1 < len(layers) and isinstance(layers[place + 1], Units) else None
        place += 1 if units is None else 2
        if units is None and place < len(layers):
            raise InputError("two linear maps follow one another: multiply them first")
        if units is None:
            read = AffineBuilder(tokens, channels, 1, [f"out.{i}" for i in range(len(linear.b))])
            for i, name in enumerate(read.channels_out):
                _link(read, 0, name, sources, linear.W[i], linear.b[i])
            made.append(read.build("read", dtype))
            return check(Program(tuple(made), ((width,),), (len(linear.b),)))
        keys, m, p = units.solved.keys, len(linear.b), units.solved.keys.p
        builder = AffineBuilder(tokens, channels, m * p, CHANNELS)
        for j in range(m):
            _link(builder, j * p, "z", sources, linear.W[j], linear.b[j])
            for k in range(p):
                _link(
                    builder, j * p + k, "value", sources, linear.W[j], linear.b[j], units.carried[j, k], keys.values[k]
                )
        every = np.arange(m * p)
        builder.set(np.arange(m) * p, "one", 1.0)
        builder.set(every, "slope", np.tile(keys.slopes, m))
        builder.set(every, "offset", np.tile(keys.offsets, m))
        number += 1
        made += [builder.build(f"units{number}", dtype), _attention(f"gate{number}", m, p, dtype)]
        tokens, channels = m * p, ["out"]
        sources = [(j * p, "out") for j in range(m)]
    read = AffineBuilder(tokens, channels, 1, [f"out.{i}" for i in range(len(sources))])
    for i, (token, name) in enumerate(sources):
        read.link(0, f"out.{i}", token, name)
    made.append(read.build("read", dtype))
    return check(Program(tuple(made), ((width,),), (len(sources),)))


def _link(
    builder: AffineBuilder,
    token: int,
    channel: str,
    sources: Sequence[tuple[int, str]],
    row: np.ndarray,
    constant: float,
    factor: float = 1.0,
    added: float = 0.0,
) -> None:
    """factor·(row·sources + constant) + added."""
    by_name: dict[str, tuple[list[int], list[float]]] = {}
    for (source, name), weight in zip(sources, row, strict=True):
        tokens, weights = by_name.setdefault(name, ([], []))
        tokens.append(source)
        weights.append(factor * weight)
    for name, (tokens, weights) in by_name.items():
        builder.link(token, channel, np.array(tokens), name, np.array(weights))
    builder.set(token, channel, factor * constant + added)


def _attention(name: str, units: int, p: int, dtype: str) -> Attention:
    scores = ("by_z", "constant")
    segments = np.repeat(np.arange(units), p).astype(np.int32)
    head = Head(
        projection(CHANNELS, scores, {("z", "by_z"): 1.0, ("one", "constant"): 1.0}, dtype),
        projection(CHANNELS, scores, {("slope", "by_z"): 1.0, ("offset", "constant"): 1.0}, dtype),
        projection(CHANNELS, ("mean",), {("value", "mean"): 1.0}, dtype),
        projection(("mean",), ("out",), {("mean", "out"): 1.0}, dtype),
        Mask(segments, segments),
    )
    return Attention(name, (head,), ("out",))
