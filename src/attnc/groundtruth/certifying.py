"""Certificates of disguised checkpoints: the staged proof of their program, with the noise of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from attnc.constructions.beyond.compose import compose
from attnc.errors import ProgramError
from attnc.exports.stock_layout import Checkpoint, StockHead, StockNetwork, input_channel, lay_out
from attnc.groundtruth.deviations import INTERVAL_ROOM, ChannelDeviations, deviations
from attnc.groundtruth.disguises import Model
from attnc.proofs.proof import HeadProof, Proof, Stages
from attnc.proofs.prover import ProofRequest
from attnc.proofs.staged.prover import StagedProver
from attnc.stock.heads import stock_network
from attnc.targets.expressions.expression import Expression
from attnc.targets.parts.part import Derivation
from attnc.targets.target import Target

VALUE_RATIO = 1.5
"""Largest values of keys, relative to the function. In other bases the rounding of scores is larger, and it is
multiplied by the distances of values."""


@dataclass(frozen=True, eq=False)
class Original:
    """An expression as a program with constant keys, its plain checkpoint, and its proof in exact arithmetic."""

    target: Target
    derivation: Derivation
    checkpoint: Checkpoint
    proof: Proof

    @classmethod
    def of(cls, target: Target, eps: float) -> Original:
        built = compose(target, eps=eps, dtype="float32", constant_keys=True, max_value=VALUE_RATIO)
        checkpoint = lay_out(with_equal_keys(stock_network(built.program, target.box)))
        derivation = built.derivation
        assert derivation is not None
        return cls(target, derivation, checkpoint, _proof(target, checkpoint, derivation, {}, 0.0))

    @property
    def heads(self) -> tuple[HeadProof, ...]:
        return stages(self.proof).heads

    def noise(self, structure: Model, stored: Model) -> dict[str, float]:
        """Bound the noise of all channels of a stored model."""
        return self.deviations(structure, stored).noise

    def deviations(self, structure: Model, stored: Model) -> ChannelDeviations:
        plain = Model.plain(self.checkpoint)
        return deviations(plain, structure, stored, self.checkpoint, self.query_intervals())

    def query_intervals(self) -> dict[str, tuple[float, float]]:
        """Return the interval of the query component of every head, from the proven interval of its argument."""
        channels = {head.channel: head for head in self.heads}
        names = {head.name: head.channel for head in self.heads}
        names |= {name: input_channel(name) for name in self.target.box.names}
        return {
            head.name: _query_interval(head, channels[head.writes[0]], names) for head in self.checkpoint.network.heads
        }


def stages(proof: Proof) -> Stages:
    """Return the evidence of a proof head by head."""
    assert isinstance(proof.evidence, Stages)
    return proof.evidence


def _query_interval(head: StockHead, proof: HeadProof, names: Mapping[str, str]) -> tuple[float, float]:
    """Return the interval of q = scale·t + shift for t in the proven interval."""
    argument = Expression.parse(proof.argument)
    (query,) = head.queries
    variables = argument.variables
    at_zero = float(argument(np.zeros((1, len(variables))))[0, 0])
    slopes = {
        names[name]: float(argument(row[None])[0, 0]) - at_zero
        for name, row in zip(variables, np.eye(len(variables)), strict=True)
    }
    largest = max(slopes, key=lambda name: abs(slopes[name]))
    scale = query[largest] / slopes[largest]
    shift = query.get("one", 0.0) - scale * at_zero
    ends = sorted(scale * end + shift for end in proof.interval)
    return ends[0], ends[1]


def with_equal_keys(network: StockNetwork) -> StockNetwork:
    """Return the same network, with as many keys in every head as there are tokens in the prefix.

    A key is repeated n times, with log n less in its offset, so that the weights of the copies add up to its weight.
    Then no token of the prefix is silent. The large numbers that silence a token would make the rounding of the keys of
    other heads large, in a basis in which channels are mixed.
    """
    heads = []
    for head in network.heads:
        copies = np.arange(network.prefix) % head.keys.num_keys
        counts = np.bincount(copies)
        keys = head.keys.chosen(copies)
        heads.append(replace(head, keys=replace(keys, offsets=keys.offsets - np.log(counts[copies]))))
    return replace(network, heads=tuple(heads))


def _proof(
    target: Target, checkpoint: Checkpoint, derivation: Derivation, noise: Mapping[str, float], truncation: float
) -> Proof:
    request = ProofRequest(derivation=derivation, noise=noise, truncation=truncation)
    return StagedProver().prove(checkpoint.program().astype("float64"), target, request)


def certify(original: Original, structure: Model, stored: Model) -> tuple[Proof, ChannelDeviations]:
    """Prove a bound of |f − checkpoint|, as transformers computes it in float32 with eager attention."""
    found = original.deviations(structure, stored)
    proof = _proof(original.target, original.checkpoint, original.derivation, found.noise, found.output)
    _require_covered(original, proof)
    if {head.channel: head.noise for head in stages(proof).heads} != found.noise:
        raise ProgramError("the proof does not include the noise of all channels")
    return proof, found


def _require_covered(original: Original, proof: Proof) -> None:
    """Raise ProgramError if noise moves an argument farther than the bounds of the noise allow."""
    for before, after in zip(original.heads, stages(proof).heads, strict=True):
        room = INTERVAL_ROOM / 2 * (before.interval[1] - before.interval[0])
        if not before.interval[0] - room < after.interval[0] <= after.interval[1] < before.interval[1] + room:
            raise ProgramError(f"the noise moves the argument of {before.channel} too far from its interval")
