"""Gradients of programs of one attention stage, proved by leaves: the largest error of any partial derivative.

A kink of f has a neighbourhood in which no gradient of a network can follow that of f: x·σ(βx) has the slopes
[−0.0998, 1.0998] for every β. In one variable, the smallest such neighbourhoods beyond which samples meet eps are
excluded, and the certificate lists them. The proof is about the rest of the box.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np

from attnc.errors import ExpressionError, InputError, ProgramError
from attnc.ir.layers import Affine
from attnc.ir.program import Program
from attnc.ir.soft_head import Enclosed
from attnc.numerics.arrays import Float
from attnc.numerics.intervals import Interval
from attnc.numerics.limits import is_time_over
from attnc.numerics.quiet import quiet
from attnc.proofs.cells.branching import Budget, branch_and_bound
from attnc.proofs.cells.kind import Kind
from attnc.proofs.kinds.gradient import ExcludedKind, GradientKind
from attnc.proofs.kinds.taylor import choose_order
from attnc.proofs.leaves_prover import FEW_VARIABLES
from attnc.proofs.neighbourhoods import ALL_OF_BOX, beside, kinks, neighbourhoods
from attnc.proofs.observed import observed_gradient_error, sample_points
from attnc.proofs.proof import Excluded, GradientProof, Leaves, proof_by_leaves
from attnc.proofs.prover import num_softmaxes, require_same_shapes
from attnc.proofs.rounding.growth import slope_underflow
from attnc.proofs.rounding.program import Roundings, roundings
from attnc.proofs.rounding.slopes import NEGLIGIBLE_SLOPES, SlopeRounding
from attnc.proofs.staged.gradient import Evaluate, StagedGradient
from attnc.proofs.stages.extraction import OneStage, stages
from attnc.targets.box import Box
from attnc.targets.expressions.derivatives import gradient
from attnc.targets.expressions.expression import Expression
from attnc.targets.parts.part import Derivation
from attnc.targets.target import Target

FAR_BELOW = 1e-3  # the part of eps below which no bound is sought
TOLERANCE = 0.03
"""A bound is close enough if it exceeds the largest error that was seen by this share, as for values."""
WITH_KINKS, FEW_CELLS = (0.2, 0.5), 2**11
"""Shares that are tried next beside kinks, and the number of cells for each but the last. Cells beside a kink are so
narrow that the rounding of the proof itself may be a third of the error."""
ROUNDING_TOLERANCE = 1.2  # the rounding over a cell that is aimed at, relative to that at sampled points
REASONS = {
    "approximation": "the difference of the Taylor polynomials of the slopes of f and of the network on the worst cell",
    "remainder": "the remainders of these polynomials, and the rounding of the proof itself",
    "rounding": "of the slopes as engines compute them on the worst cell",
    "excluded": "cells in neighbourhoods of kinks, where nothing is claimed",
}
"""The reasons of the terms of a bound of gradients."""
SAMPLED = 64  # random points at which rounding is sampled
REFERENCE_POINTS = 256  # points at which the float64 error of the gradient of an expression is enclosed
SEEN_SHARE = 0.9  # beside kinks, samples must be within this share of eps


class NoGradientError(InputError):
    """No gradient of this target can be certified, whatever the network. The message states the remedy."""


def require_gradient(target: Target) -> Expression:
    """Return the partial derivatives of a target. Raise NoGradientError if there is none, or none can be certified."""
    about = f"cannot certify the gradient of {target.describe()}"
    if target.expression is None:
        raise NoGradientError(
            f"{about}: only an expression has derivatives that can be proved; a table or Python code shows values "
            "alone. Write the function as an expression, or use norm='inf'."
        )
    if not target.box.is_bounded:
        raise NoGradientError(f"{about} on {target.box}: the box is infinite. Choose finite ends, or use norm='inf'.")
    if target.box.d > FEW_VARIABLES:
        raise NoGradientError(
            f"{about}: it has {target.box.d} variables, and gradients are proved in 1 to {FEW_VARIABLES}. Fix some "
            "of them, or use norm='inf'."
        )
    try:
        found = gradient(target.expression)
    except ExpressionError as error:
        raise NoGradientError(f"{about}: {error}. Use norm='inf' for it.") from None
    box = target.box
    corners = Interval.point(np.stack([box.lo, box.hi]))
    with quiet():
        at_ends = found.ranges(corners, violations="infinite")
    if not kinks(found, box) and not at_ends.is_bounded.all():
        raise NoGradientError(
            f"{about} on {box}: the derivative is infinite, or not defined, at an end of the box, as that of sqrt at "
            "0. Choose a box that excludes that end, or use norm='inf'."
        )
    return found


def gradient_task(
    program: Program, target: Target, eps: float, derivation: Derivation | None, evaluate: Evaluate
) -> GradientTask | StagedGradient:
    """Return the proof that fits a program: by leaves of the box, or head by head.

    Leaves are for one attention layer, and heads for several. In several variables, a kink needs a strip of the box,
    which would take too many leaves: heads prove it as functions of one variable. Raise ProgramError if no proof fits.
    `evaluate` computes gradients of a program at points.
    """
    derivatives, box = require_gradient(target), target.box
    has_kinks = bool(kinks(derivatives, box))
    if num_softmaxes(program) <= 1 and not (has_kinks and box.d > 1):
        return GradientTask.of(program, target, eps)
    require_same_shapes(program, target)
    work = program.num_anchors * box_work(box.d)
    return StagedGradient.of(program, target, derivation, derivatives, eps, evaluate, work, has_kinks)


@dataclass(frozen=True, eq=False)
class GradientTask:
    """A stage against the gradient of a target, the neighbourhoods of kinks, and the error that was seen elsewhere."""

    stage: OneStage
    gradient: Expression
    rounding: SlopeRounding
    box: Box
    eps: float
    bands: tuple[tuple[float, float], ...]
    observed: float

    @classmethod
    def of(cls, program: Program, target: Target, eps: float) -> GradientTask:
        derivatives = require_gradient(target)
        require_same_shapes(program, target)
        stage, rounds = stage_of(program)
        work, box = program.num_anchors * box_work(target.box.d), target.box
        errors = functools.partial(_errors, stage, derivatives, target.num_outputs)
        bands = neighbourhoods(derivatives, box, errors, SEEN_SHARE * eps) if box.d == 1 else ()

        def errors_at(points: Float[np.ndarray, "points d"]) -> Float[np.ndarray, " points"]:
            found = errors(points)
            for lo, hi in bands:
                found[(points[:, 0] >= lo) & (points[:, 0] <= hi)] = 0.0
            return found

        with quiet():
            observed = observed_gradient_error(errors_at, box, work, beside(bands, box))
        rounding = SlopeRounding(stage, rounds, box, slope_underflow(program, box))
        return cls(stage, derivatives, rounding, box, eps, bands, observed)

    def proof(self, budget: Budget) -> GradientProof:
        """Prove a bound: within TOLERANCE of the error that was seen, or a little above rounding."""
        if sum(hi - lo for lo, hi in self.bands) > ALL_OF_BOX * self.box.widths[0]:
            return GradientProof(self.eps, math.inf, self.observed, (), True, (), Leaves((), np.zeros(0)))
        level = self._level()
        rounding = dataclasses.replace(self.rounding, level=level)

        def taylor(order: int) -> Kind:
            return GradientKind(self.stage, self.gradient, order, rounding, is_everywhere=not self.bands)

        excluded = [ExcludedKind(self.bands, len(self.gradient.outputs))] if self.bands else []
        for tolerance in (TOLERANCE, *WITH_KINKS) if self.bands else (TOLERANCE,):
            goal = max((1 + tolerance) * self.observed + level, FAR_BELOW * self.eps)
            order, start = choose_order(taylor, self.box, goal)
            is_last = not self.bands or tolerance == WITH_KINKS[-1]
            found = branch_and_bound(
                [*excluded, taylor(order)],
                self.box,
                observed=self.observed,
                tolerance=tolerance,
                floor=level,
                goal=FAR_BELOW * self.eps,
                start_level=0 if self.bands else start,
                budget=budget if is_last else dataclasses.replace(budget, cells=min(FEW_CELLS, budget.cells)),
            )
            proof = proof_by_leaves(found)
            if proof.complete or is_time_over():
                break
        assert isinstance(proof.evidence, Leaves)
        name = self.box.names[0]
        return GradientProof(
            self.eps,
            proof.bound,
            self._below(proof.bound),
            tuple(dataclasses.replace(term, reason=REASONS[term.name]) for term in proof.terms),
            proof.complete,
            tuple(Excluded(name, lo, hi) for lo, hi in self.bands),
            proof.evidence,
        )

    def _level(self) -> float:
        """Return a little more than the largest rounding at sampled points, or 0 if rounding is negligible."""
        if float(self.rounding.whole.max()) <= NEGLIGIBLE_SLOPES * self.observed:
            return 0.0
        points = self.box.lo + np.random.default_rng(0).random((SAMPLED, self.box.d)) * self.box.widths
        corners = np.array(list(itertools.product(*zip(self.box.lo, self.box.hi, strict=True))))
        points = np.concatenate([points, corners])
        return ROUNDING_TOLERANCE * float(self.rounding.on(points, np.zeros_like(points)).max())

    def _below(self, bound: float) -> float:
        """Return the error that was seen, if it is no larger than the bound up to the float64 error of the gradient."""
        if self.observed <= bound:
            return self.observed
        points = sample_points(self.box, REFERENCE_POINTS)
        with quiet():
            width = self.gradient.ranges(Interval.point(points), violations="infinite").width
        size = float(np.abs(self.gradient(points)).max())
        if self.observed - float(width[np.isfinite(width)].max(initial=0.0)) - 2.0**-44 * size <= bound:
            return bound
        raise InputError(
            f"the error of the gradient at a sample is {self.observed:.6g}, above the bound {bound:.6g}: this is a "
            "defect of attnc. Please report it with this message."
        )


def stage_of(program: Program) -> tuple[OneStage, Roundings]:
    """Return a program of one attention layer, or an affine map, as a stage with its roundings."""
    if num_softmaxes(program) == 0:
        return _affine_map(program)
    found = stages(program)
    if len(found) > 1:
        raise ProgramError(f"the outputs are read from {len(found)} query tokens; gradients are proved for one")
    ((stage, outputs),), (rounds,) = found, roundings(program)
    if not np.array_equal(outputs, np.arange(len(outputs))):
        raise ProgramError("the network makes its outputs in another order than the target")
    return stage, rounds


def _affine_map(program: Program) -> tuple[OneStage, Roundings]:
    """Return an affine map as a stage without heads."""
    layer, dtype = program.unrolled_layers[0], str(program.dtype)
    if len(program.all_layers) > 1 or not isinstance(layer, Affine):
        raise ProgramError("the network is not one affine map of the variables")
    weight = layer.weight.matrix(2).toarray().astype(np.float64)
    constant = layer.constant.matrix(1).toarray().astype(np.float64).ravel()
    sizes = np.abs(np.concatenate([weight, constant[:, None]], axis=1))
    tiny = float(np.finfo(dtype).smallest_normal)
    stage = OneStage((), Enclosed.exact(constant), Enclosed.exact(weight))
    return stage, Roundings(dtype, (), sizes, weight.shape[1] + 2, tiny)


def box_work(d: int) -> int:
    """Return the numbers that one key costs in a gradient: as many as the variables, and one for the value."""
    return d + 1


def _errors(
    stage: OneStage, derivatives: Expression, outputs: int, points: Float[np.ndarray, "points d"]
) -> Float[np.ndarray, " points"]:
    """Return the largest error of any slope at points; 0 where f has none in float64."""
    found = np.abs(stage.gradients(points).reshape(len(points), -1) - derivatives(points)).max(axis=1)
    return np.where(np.isfinite(found), found, 0.0)
