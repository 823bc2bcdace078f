"""An MLP, or one feed-forward block, as a Program: Affine → Attention → Affine, with hidden units as tokens.

Unit j with p keys is p tokens. Token (j, k) carries key (a_k, c_k) and value v_k + V_k·z_j. Token (j, 0) also carries
the query (z_j, 1), and the result is read there. A mask lets unit j see only its own keys.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from attnc.certifying import certify
from attnc.constructions.built import Built, Progress
from attnc.converting.activations import KnownActivation, Solved, exact_number, key_arrays
from attnc.converting.measuring import numbers
from attnc.converting.modules import DTYPES, HALVES, AttentionActivation, AttentionPReLU, AttentionSoftsign
from attnc.converting.walking import convert_module
from attnc.errors import InputError
from attnc.ir.building import AffineBuilder, Attending
from attnc.ir.layers import Attention, Layer, Mask
from attnc.ir.program import Program
from attnc.ir.spec import check
from attnc.network import Network
from attnc.numerics.arrays import Float
from attnc.numerics.rounding import up
from attnc.proofs.certificate import Certificate
from attnc.proofs.leaves_prover import FEW_VARIABLES
from attnc.targets.box import Box, BoxLike
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.expression import Expression
from attnc.targets.linear import ReLUNetwork, WeightedTarget, feature_box

if TYPE_CHECKING:
    from attnc.targets.target import Points, Values

MAX_LINKS = 2**24
"""Maximum number of entries of all affine maps together. An entry takes 24 bytes with its index: 400 MB in all."""
FINEST_PROOF = 1e-9
"""The smallest eps for a proof. With exact gates the bound is the remainder of the proof alone. A smaller eps takes
more time and shows nothing new about the gates."""
LAYERED_PROOF_SECONDS = 1.0
"""Counted seconds of a proof through several layers that are not ReLUs. Its enclosures are wide, so more time helps
little."""
LOOSE_BOUND = 10.0
"""The certified bound of a deep network is dropped if it exceeds the proven error in exact arithmetic by more than this
factor. That error is then more useful."""
MAX_PROVED_UNITS = 16
"""Maximum number of hidden units of a network that is proved as one expression. Every unit is a function of all inputs,
and the time of the proof grows with the number of units."""
CHANNELS = ("z", "one", "slope", "offset", "value")


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """f(W·y + b), with y the outputs of the stage before, or the input. The last stage may have no activation f.

    One gate, `solved`, computes f for all units. Its carried parts may differ from unit to unit.
    """

    W: Float[np.ndarray, "units inputs"]
    b: Float[np.ndarray, " units"]
    solved: Solved | None = None
    carried: Float[np.ndarray, "units p"] | None = None


def mlp_network(
    module: nn.Module, box: BoxLike | tuple[float, float], eps: float, progress: Progress | None
) -> Network:
    """Compile a module, as `attnc.mlp_network` describes."""
    dtype = _dtype(in_a_row(module))
    converted, _ = convert_module(module, eps, True, None)
    parts = in_a_row(converted)
    stages = as_stages(parts)
    domain, error = feature_box(box, stages[0].W.shape[1]), composed_error(stages)
    gates = (stage.solved for stage in stages if stage.solved is not None)
    described = ", ".join(f"{solved.activation} ({solved.num_anchors})" for solved in gates)
    built = Built(_program(stages, dtype), "feed_forward", None, parameters=(("gates", described), ("error", error)))
    finest = max(4 * error, FINEST_PROOF)
    known = expression_target(stages, domain)
    if known is not None:
        return certify(built, known, finest, progress=progress)
    relus = relu_target(stages, domain)
    if relus is not None:
        network = certify(built, relus, finest, progress=progress)
    else:
        target = ModuleTarget(in_a_row(copy.deepcopy(module).double().eval()), stages, domain)
        network = certify(built, target, error, progress=progress, seconds=LAYERED_PROOF_SECONDS)
    claim = network.certificate
    if claim.bound is None or claim.bound <= LOOSE_BOUND * max(error, claim.observed or 0.0):
        return network
    bare = Certificate(None, claim.observed, (), claim.assumptions, claim.dtype, "estimate")
    return dataclasses.replace(network, certificate=bare)


def in_a_row(module: nn.Module) -> list[Any]:
    """Return the linear maps and activations of a module in the order in which they run.

    An activation may be a function.
    """
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        return [module.linear1, module.activation, module.linear2]
    if isinstance(module, nn.Sequential):
        parts = (in_a_row(child) if isinstance(child, nn.Sequential) else [child] for child in module)
        return [part for row in parts for part in row if not isinstance(part, nn.Dropout | nn.Identity)]
    raise InputError(
        f"give nn.Sequential(first_linear, activation, second_linear): a program is made from an nn.Sequential "
        f"or from the block of a transformer layer; found {type(module).__name__}"
    )


def _dtype(chain: Sequence[Any]) -> str:
    found = {part.weight.dtype for part in chain if isinstance(part, nn.Linear)}
    if len(found) != 1 or found & set(HALVES):
        raise InputError("a program computes in float64 or float32: give linear maps of one of these dtypes")
    return DTYPES[found.pop()]


def composed_error(stages: Iterable[Stage]) -> float:
    """Return a bound of |converted − original| over all inputs, in exact arithmetic.

    Proof.  A linear map turns an error e into |W|·e. An activation of Lipschitz constant L and error δ turns it into
            L·e + δ for every input, since gates are within δ of f everywhere.
    """
    off = np.zeros(1)
    for stage in stages:
        if off.any():
            off = up(np.abs(stage.W) @ np.broadcast_to(off, stage.W.shape[1]), stage.W.shape[1] + 1)
        if stage.solved is not None:
            off = up(stage.solved.lipschitz * off + stage.solved.error, 3)
    return float(off.max())


def as_stages(parts: Sequence[nn.Module]) -> list[Stage]:
    found: list[Stage] = []
    for part in parts:
        is_complete = not found or found[-1].solved is not None
        if isinstance(part, AttentionSoftsign):
            raise InputError(
                "softsign takes two layers of attention, and a program of this kind has one per activation"
            )
        if isinstance(part, nn.Linear):
            if not is_complete:
                raise InputError("two linear maps follow one another: multiply them first")
            bias = np.zeros(part.out_features) if part.bias is None else numbers(part.bias)
            found.append(Stage(numbers(part.weight), bias))
        elif isinstance(part, AttentionActivation) and not is_complete:
            solved = part.solved.as_one_head()
            carried = np.tile(key_arrays(solved.keys)["carried"], (len(found[-1].b), 1))
            if isinstance(part, AttentionPReLU):  # keys 0 and 1 carry weight·z and z
                carried[:, 0] = numbers(part.weight)
            found[-1] = dataclasses.replace(found[-1], solved=solved, carried=carried)
        else:
            raise InputError(
                f"{type(part).__name__}: a program of this kind has linear maps, and an activation behind each"
            )
    return found


def expression_target(stages: Sequence[Stage], box: Box) -> ExpressionTarget | None:
    """Return the module as an expression if it is small enough for a proof: one hidden layer, few units and inputs."""
    first, *rest = stages
    if len(rest) > 1 or any(stage.solved is not None for stage in rest):
        return None
    if first.solved is None or len(first.b) > MAX_PROVED_UNITS or box.d > FEW_VARIABLES:
        return None
    assert first.carried is not None
    outputs = []
    for row, constant, carried in zip(first.W, first.b, first.carried, strict=True):
        given = first.solved.activation
        if given.name == "prelu":
            given = KnownActivation("leaky_relu", (("slope", float(carried[0])),))
        affine = " + ".join(f"{exact_number(w)}*{name}" for w, name in zip(row, box.names, strict=True))
        argument = f"({affine} + {exact_number(constant)})"
        outputs.append("(" + re.sub(r"\bx\b", argument, given.expression(first.solved.dtypes[0])) + ")")
    for last in rest:
        outputs = [
            " + ".join([*(f"{exact_number(w)}*{unit}" for w, unit in zip(row, outputs, strict=True)), exact_number(b)])
            for row, b in zip(last.W, last.b, strict=True)
        ]
    return ExpressionTarget(Expression.parse(outputs[0] if len(outputs) == 1 else f"({', '.join(outputs)})"), box)


def relu_target(stages: Sequence[Stage], box: Box) -> ReLUNetwork | None:
    """Return the module as a ReLU network, or None if it has another activation. The proof works for any size."""
    if any(stage.solved is not None and stage.solved.activation.name != "relu" for stage in stages):
        return None
    linear = [*stages, *_last_affine(stages)]
    return ReLUNetwork([stage.W for stage in linear], [stage.b for stage in linear], box)


def _last_affine(stages: Sequence[Stage]) -> list[Stage]:
    """Return the identity if the last stage has an activation. Programs and ReLU networks end with an affine map."""
    units = len(stages[-1].b)
    return [] if stages[-1].solved is None else [Stage(np.eye(units), np.zeros(units))]


class ModuleTarget(WeightedTarget):
    """The function that the parts of the torch module compute in float64, one after the other."""

    def __init__(self, parts: Sequence[Any], stages: Sequence[Stage], box: Box) -> None:
        self.parts, self.stages, self.box = parts, stages, box
        self.input_shapes = ((box.d,),)
        self.output_shape = (len(stages[-1].b),)

    def __call__(self, points: Points) -> Values:
        with torch.no_grad():
            x = torch.tensor(np.asarray(points, np.float64))
            for part in self.parts:
                x = part(x)
        return np.asarray(x.numpy())

    def _through(self, reach: Points, size: Points) -> tuple[Values, Values, int]:
        """Use the Lipschitz constants of linear maps and activations. Rounding at the centres is not counted."""
        for stage in self.stages:
            reach = up(reach @ np.abs(stage.W).T, stage.W.shape[1] + 1)
            if stage.solved is not None:
                reach = up(reach * stage.solved.lipschitz)
        return reach, np.zeros_like(reach), 0

    def describe(self) -> str:
        return "a torch module of " + " → ".join(str(len(stage.b)) for stage in self.stages)


def _program(stages: Sequence[Stage], dtype: str) -> Program:
    width = stages[0].W.shape[1]
    most = max((stage.solved.keys.num_keys for stage in stages if stage.solved is not None), default=0)
    links = sum(stage.W.size * (1 + most) for stage in stages)
    if links > MAX_LINKS:
        raise InputError(f"take a smaller block: the program would have {links:,} links, more than {MAX_LINKS:,}")
    channels: Sequence[str] = [f"in.{i}" for i in range(width)]
    made: list[Layer] = []
    tokens, results = 1, np.zeros(1, int)  # `results` are the tokens that the next stage reads
    for number, stage in enumerate([*stages, *_last_affine(stages)], start=1):
        m = len(stage.b)
        if stage.solved is None:
            builder = AffineBuilder(tokens, channels, 1, [f"out.{i}" for i in range(m)])
            for i, name in enumerate(builder.channels_out):
                _link(builder, np.zeros(1, int), name, results, stage.W[[i]], stage.b[[i]])
            made.append(builder.build("read", dtype))
            break
        assert stage.carried is not None
        keys, p = stage.solved.keys, stage.solved.keys.num_keys
        units, each, carried = np.arange(m) * p, np.arange(m * p), stage.carried.reshape(-1)
        builder = AffineBuilder(tokens, channels, m * p, CHANNELS)
        _link(builder, units, "z", results, stage.W, stage.b)
        values = carried * np.repeat(stage.b, p) + np.tile(keys.values[:, 0], m)
        _link(builder, each, "value", results, carried[:, None] * np.repeat(stage.W, p, axis=0), values)
        builder.set(units, "one", 1.0)
        builder.set(each, "slope", np.tile(keys.slopes[:, 0], m))
        builder.set(each, "offset", np.tile(keys.offsets, m))
        made += [builder.build(f"units{number}", dtype), _attention(f"gate{number}", m, p, dtype)]
        tokens, channels, results = m * p, ["out"], units
    return check(Program(tuple(made), ((width,),), (m,)))


def _link(
    builder: AffineBuilder, tokens: np.ndarray, channel: str, results: np.ndarray, W: np.ndarray, b: np.ndarray
) -> None:
    """Write W·y + b into a channel of the tokens. y holds all inputs of one token, or one channel of several tokens."""
    for name, columns in zip(builder.channels_in, np.split(W, len(builder.channels_in), axis=1), strict=True):
        builder.link(tokens[:, None], channel, results, name, columns)
    builder.set(tokens, channel, b)


def _attention(name: str, units: int, p: int, dtype: str) -> Attention:
    segments = np.repeat(np.arange(units), p).astype(np.int32)
    queries = {("z", "by_z"): 1.0, ("one", "constant"): 1.0}
    keys = {("slope", "by_z"): 1.0, ("offset", "constant"): 1.0}
    head = Attending(CHANNELS, CHANNELS, dtype, Mask(segments, segments)).head(queries, keys, {("value", "mean"): 1.0})
    return Attention(name, (head,), ("out",))
