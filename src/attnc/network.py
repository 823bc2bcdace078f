"""A network: a program with its certificate, ready to run, save and export."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attnc.engines.numpy_engine import NumpyEngine, Progress
from attnc.errors import InputError, ProgramError, real_number
from attnc.exports.directory import save_network
from attnc.ir.program import Program, split_columns
from attnc.ir.reference import evaluate_recorded
from attnc.ir.rounding import evaluation_error
from attnc.ir.spec import check
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.proofs.certificate import Certificate
from attnc.proofs.observed import observed_error, sample_points
from attnc.proofs.prover import ProofRequest
from attnc.proofs.provers import best_proof
from attnc.proofs.staged.claims import stated_derivation
from attnc.targets.box import Box, BoxLike
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.expression import Expression

if TYPE_CHECKING:
    from jaxtyping import Float

NOT_CERTIFIED = "not certified"
OUTSIDE = ("raise", "clamp", "allow")
PART_TOLERANCE = 0.003  # the bound of a part of the box is sought to within this part of the error seen there


class Run(NamedTuple):
    """Outputs, and every named activation and attention map (empty unless asked for)."""

    outputs: Float[np.ndarray, "batch ..."]
    cache: Mapping[str, np.ndarray]


class Parity(NamedTuple):
    """How far an exported file is from the reference on a sample, and how far rounding allows two evaluations to be."""

    num_points: int
    difference: float
    allowed: float
    is_within: bool  # at every point of the sample


@dataclass(frozen=True, eq=False, repr=False)
class Network:
    """A program with its certificate, as `attnc.compile` returns it."""

    program: Program
    certificate: Certificate
    box: Box
    construction: str
    expression: str | None = None
    eps: float | None = None
    parameters: Mapping[str, float | int | str] = field(default_factory=dict)
    command: str | None = None
    also: Mapping[str, Certificate] = field(default_factory=dict)
    """Certificates for the weights rounded to another dtype, and evaluated in it, by that dtype."""
    definitions: str | None = None
    """The definitions of a target that takes some to state, and its outputs in their names. Files have them in place of
    the expression."""

    def __repr__(self) -> str:
        """One line: weights and leaves may be millions of numbers."""
        from attnc.wording import ceiling, one_line, plural, without_expression

        bound = self.certificate.bound
        facts = (
            self.construction,
            plural(self.num_anchors, "anchor"),
            plural(self.num_parameters, "parameter"),
            self.dtype,
            "no bound" if bound is None else f"bound {ceiling(bound)}",
        )
        return f"<Network: {one_line(self.expression or without_expression(self))[:80]}; {', '.join(facts)}>"

    @property
    def variables(self) -> tuple[str, ...]:
        return self.box.names

    @property
    def dtype(self) -> str:
        return str(self.program.dtype)

    @property
    def num_anchors(self) -> int:
        return self.program.num_anchors

    @property
    def num_parameters(self) -> int:
        return self.program.num_parameters

    @property
    def work_per_point(self) -> int:
        """Scores that one point costs, summed over heads and layers: queries × keys, or fewer on a grid."""
        return self._engine.work_per_point

    @property
    def truncation(self) -> float:
        """How far the engine may be from the full softmax besides rounding, in any output."""
        return self._engine.truncation

    def bound(self, box: BoxLike | None = None, *, seconds: float = 30.0) -> float | None:
        """The proven bound, or that of a part of the box, which may be smaller: proved anew, for the stored weights.

        It is None where nothing was proved, and for a part of a table's box. A part of a network that has no expression
        has the bound of the whole, and so has one that cannot be proved in `seconds`.
        """
        if box is None or self.certificate.bound is None:
            return self.certificate.bound
        if isinstance(box, Mapping) and set(box) <= set(self.variables):  # in any order; of the others all
            box = {name: box.get(name, ends) for name, ends in self.box.as_dict().items()}
        part = Box.parse(box, self.variables)
        if part.names != self.variables or (part.lo < self.box.lo).any() or (part.hi > self.box.hi).any():
            raise InputError(f"box: {part} is not a part of the network's box, {self.box}")
        if real_number("seconds", seconds) < 0:
            raise InputError(f"seconds must be at least 0, found {seconds!r}")
        if self.certificate.is_of_table:
            return None
        if self.expression is None:
            return self.certificate.bound
        target = ExpressionTarget(Expression.parse(self.expression), part)
        proof = None
        with np.errstate(all="ignore"), suppress(ProgramError):  # the stated functions of heads may be unreadable
            proof = best_proof(self.program, target, self._request(target, seconds))
        return self.certificate.bound if proof is None else min(self.certificate.bound, proof.bound)

    def _request(self, target: ExpressionTarget, seconds: float) -> ProofRequest:
        """A proof on the box of the target, with the functions of the heads that the certificate states.

        They are not trusted. ProgramError where they cannot be read.
        """
        claim, heads = self.certificate, self.certificate.by_heads
        derivation = None if heads is None else stated_derivation(heads.heads, heads.outputs, self.variables)
        p = float(claim.norm)

        def evaluate(points: Float[np.ndarray, "points d"]) -> Float[np.ndarray, "points outputs"]:
            return self(*target.split(points)).reshape(len(points), -1)

        return ProofRequest(
            p=p,
            observed=observed_error(evaluate, target, self.work_per_point, p),
            tolerance=PART_TOLERANCE,
            truncation=self.truncation,
            seconds=seconds,
            derivation=derivation,
            has_theorem=claim.by_leaves is not None and bool(claim.by_leaves.cuts),
        )

    def certified_in(self, dtype: str) -> Certificate | None:
        """The certificate for an arithmetic; None where the network is not certified in it."""
        if dtype not in UNIT_ROUNDOFF:
            raise InputError(f"dtype must be one of {', '.join(UNIT_ROUNDOFF)}; found {dtype!r}")
        claim = self.certificate if dtype == self.dtype else self.also.get(dtype)
        return None if claim is None or claim.bound is None else claim

    def astype(self, dtype: str) -> Network:
        """The network with its weights rounded to another dtype, and the certificate for that, if there is one."""
        claim = self.certified_in(dtype)
        if dtype == self.dtype:
            return self
        if claim is None:
            claim = Certificate(None, None, (), (), dtype, NOT_CERTIFIED, self.certificate.norm)
        return dataclasses.replace(self, program=check(self.program.astype(dtype)), certificate=claim, also={})

    @cached_property
    def _engine(self) -> NumpyEngine:
        """The engine, without grids where the bound has no room for the anchors that these leave out."""
        engine, claim = NumpyEngine(self.program), self.certificate
        is_covered = claim.bound is None or engine.truncation <= claim.truncation
        return engine if is_covered else NumpyEngine(self.program, with_grids=False)

    def __call__(
        self, *inputs: Float[np.ndarray, "batch ..."], outside: str = "raise", progress: Progress | None = None
    ) -> Float[np.ndarray, "batch ..."]:
        """The outputs. Points outside the box raise; outside="clamp" moves them to it, "allow" lets them through."""
        return self._evaluated(self._checked(inputs, outside), outside, progress)

    def run(
        self,
        *inputs: Float[np.ndarray, "batch ..."],
        cache: bool = False,
        outside: str = "raise",
        max_bytes: int = 2**30,
    ) -> Run:
        """The outputs, and with `cache` every array on the way, made by the unfolded reference.

        `layer.channel` is (batch, tokens), `layer.head0.scores` and `layer.head0.pattern` are (batch, queries, keys);
        tokens and queries that nothing reads are left out.
        """
        checked = self._checked(inputs, outside)
        if not cache:
            return Run(self._evaluated(checked, outside), {})
        return Run(*evaluate_recorded(self.program, checked, max_bytes))

    def _evaluated(
        self, checked: tuple[np.ndarray, ...], outside: str, progress: Progress | None = None
    ) -> Float[np.ndarray, "batch ..."]:
        """The outputs; far out on an infinite range, or outside the box, scores may overflow, and there are none."""
        if self.box.is_bounded and outside != "allow":
            return self._engine(*checked, progress=progress)
        with np.errstate(over="ignore", invalid="ignore"):
            outputs = self._engine(*checked, progress=progress)
        lost = np.flatnonzero(~np.isfinite(outputs).reshape(len(outputs), -1).all(axis=1))
        if len(lost):
            row = int(lost[0])
            at = np.concatenate([array[row].ravel() for array in checked])
            most = int(np.abs(at).argmax())
            raise InputError(
                f"point {row} has no value in {self.dtype}: its scores overflow, with {self.variables[most]} = "
                f"{at[most]:.6g}. Choose points closer to 0."
            )
        return outputs

    def _checked(self, inputs: tuple[Any, ...], outside: str) -> tuple[np.ndarray, ...]:
        if outside not in OUTSIDE:
            raise InputError(f"outside must be one of {', '.join(OUTSIDE)}; found {outside!r}")
        shapes = self.program.input_shapes
        if len(inputs) != len(shapes):
            raise InputError(f"the network takes {len(shapes)} input(s), {len(inputs)} given")
        checked, start = [], 0
        for given, shape in zip(inputs, shapes, strict=True):
            array = _as_floats(given)
            wanted = ", ".join(["batch", *map(str, shape)])
            if array.ndim == 0 or array.shape[1:] != shape:
                names = f" (columns {', '.join(self.variables)})" if len(shape) == 1 else ""
                raise InputError(f"points of shape {array.shape}: the network takes ({wanted}){names}")
            size = int(np.prod(shape))
            flat = array.reshape(len(array), size)
            checked.append(self._inside(flat, slice(start, start + size), outside).reshape(array.shape))
            start += size
        return tuple(checked)

    def _inside(self, flat: np.ndarray, columns: slice, outside: str) -> np.ndarray:
        if np.isnan(flat).any():
            row, column = np.argwhere(np.isnan(flat))[0]
            raise InputError(f"point {row} is NaN in {self.variables[columns][column]}")
        lo, hi = self.box.lo[columns], self.box.hi[columns]
        if outside == "clamp":
            flat = np.clip(flat, lo, hi)
        elif outside == "raise":
            beyond = (flat < lo) | (flat > hi)
            if beyond.any():
                row, column = np.argwhere(beyond)[0]
                name = self.variables[columns][column]
                raise InputError(
                    f"point {row} has {name} = {flat[row, column]:.6g}, outside [{lo[column]:.6g}, {hi[column]:.6g}]; "
                    'nothing is claimed there. Use outside="clamp" or outside="allow" to go on.'
                )
        if not np.isfinite(flat).all():
            row, column = np.argwhere(~np.isfinite(flat))[0]
            name = self.variables[columns][column]
            raise InputError(f"points must be finite: point {row} has {name} = {flat[row, column]:g}")
        return flat

    def with_observed(self, observed: float) -> Network:
        """The same network, with the error that a sample showed written beside its bound."""
        return dataclasses.replace(self, certificate=dataclasses.replace(self.certificate, observed=observed))

    def plot(self, path: str | Path, target: Any = None, *, output: int = 0) -> None:
        """Draws the network as SVG, PDF or PNG, by the ending of `path`; `target` adds the wanted function."""
        from attnc.plots import plot

        plot(self, path, target, output=output)

    def plot_certificate(self, path: str | Path) -> None:
        """Draws the ledger of the bound, and where on the domain the error sits: by leaves, or head by head."""
        from attnc.plots import plot_certificate

        plot_certificate(self, path)

    def to_torch(self) -> Any:
        """A torch.nn.Module in the program's dtype: same inputs, same outputs, differentiable in its inputs."""
        from attnc.engines.torch_engine import to_torch

        return to_torch(self.program)

    def export_onnx(self, path: str | Path) -> Parity:
        """Writes an ONNX file and runs it against the reference on a sample."""
        from attnc.exports.onnx_file import export_onnx, run_onnx

        facts = {
            "expression": self.expression,
            "construction": self.construction,
            "bound": self.certificate.bound,
            "arithmetic of the bound": self.certificate.dtype,
        }
        export_onnx(self.program, path, metadata={name: str(fact) for name, fact in facts.items() if fact is not None})
        flat = sample_points(self.box, int(max(16, min(200, 2**24 // max(1, self.num_anchors)))))
        inputs = split_columns(flat, self.program.input_shapes)
        differences = np.abs(run_onnx(path, inputs) - self.program(*inputs))
        allowed = 2 * evaluation_error(self.program, inputs)
        is_within = bool((differences <= allowed).all())
        return Parity(len(flat), float(differences.max()), float(allowed.max()), is_within)

    def save(self, path: str | Path) -> None:
        """Writes config.json, model.safetensors, certificate.json and README.md, whole or not at all.

        A certificate for a second dtype is certificate.<dtype>.json.
        """
        from attnc.model_card import model_card

        if not isinstance(path, str | os.PathLike):
            raise InputError(f"a saved network is named by its folder, found {path!r:.80}")
        stated = self.expression or self.definitions
        config = {
            "construction": self.construction,
            "expression": stated,
            "variables": list(self.variables),
            "box": self.box.as_json(),
            "eps": self.eps,
            "parameters": dict(self.parameters),
            "command": self.command,
        }
        claims = {"certificate.json": self.certificate}
        claims |= {f"certificate.{dtype}.json": claim for dtype, claim in self.also.items()}
        certificates = {name: claim.to_json(stated, self.box) for name, claim in claims.items()}
        save_network(Path(path), self.program, config, certificates, model_card(self))


def _as_floats(given: Any) -> np.ndarray:
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise InputError(f"points do not form an array: {error}") from None
    if array.dtype.kind not in "fiub":
        raise InputError(f"points must be real numbers, found an array of {array.dtype}")
    return array.astype(np.float64)
