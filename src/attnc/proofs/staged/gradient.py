"""Gradients of deep programs: the slopes of every head proved by leaves, and their errors followed to the outputs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from attnc.errors import ExpressionError, ProgramError
from attnc.ir.program import Program
from attnc.numerics.arrays import Float
from attnc.numerics.intervals import Interval
from attnc.numerics.limits import check_time, is_time_over, time_share
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import up
from attnc.proofs.cells.branching import PROVING, Budget, CellBounds, Covering, branch_and_bound
from attnc.proofs.cells.dyadic import cell_boxes
from attnc.proofs.cells.kind import SHARP, Kind
from attnc.proofs.kinds.gradient import ExcludedKind, GradientKind
from attnc.proofs.neighbourhoods import (
    ALL_OF_BOX,
    MOST_OF_BOX,
    Bands,
    beside,
    beside_strips,
    is_excluded,
    merged,
    neighbourhoods,
    share_of,
)
from attnc.proofs.observed import observed_gradient_error
from attnc.proofs.proof import Excluded, GradientProof, Leaves, SlopeProof
from attnc.proofs.prover import ProofRequest
from attnc.proofs.rounding.growth import num_roundings
from attnc.proofs.rounding.slopes import NEGLIGIBLE_SLOPES, SlopeRounding
from attnc.proofs.staged.claims import NotBoundedError, State
from attnc.proofs.staged.error_flow import SLOPE_PIECES, Deviations, FlowStage, Slopes
from attnc.proofs.staged.lines import (
    LEAST_GOAL,
    LINE_ORDER,
    LOOSE_LEAVES,
    MOST_CELLS,
    leaf_intervals,
)
from attnc.proofs.staged.prover import (
    LEAST_LEVEL,
    LEAST_SHARE,
    WORTH_SIGNS,
    ClaimedHead,
    ProvedGroup,
    StageWalk,
    walked,
)
from attnc.proofs.staged.signed import shifted_slopes, signed_leaves
from attnc.proofs.staged.slope_flow import (
    Sides,
    SlopeOutputs,
    SlopeStage,
    composed_slopes,
    path_rounding,
    require_close,
)
from attnc.proofs.stages.extraction import OneStage, StateForm
from attnc.targets.expressions.derivatives import gradient
from attnc.targets.expressions.expression import Expression
from attnc.targets.parts.part import Combination, Derivation, Source, function_of_t
from attnc.targets.target import Target

SLOPES_FLOOR = 1e-6
"""The part of eps below which no bound of the slopes of a head is sought. Later heads may make it a thousand times
larger, and it is negligible even then."""
SHARPENED, MUCH_SMALLER, WORTH_SHARPENING = 4, 0.8, 0.1
"""Number of times that leaves are halved where a half has a bound below this share of the whole one, and where the
bound is above this share of the largest one."""
SAMPLED = 65  # points of the interval of a head at which rounding is sampled
ROUNDING_TOLERANCE = 1.2  # the rounding over a cell that is aimed at, relative to that at sampled points

STRIP_SHARE, WIDER_STRIPS = 2.0**-3, (2.0**-7, 2.0**-12)
"""The share of eps within which the slopes of a head are beyond its strips, and smaller ones that are tried if errors
add up to more than eps. Errors of gates shrink so fast that a strip is 1.3 times as wide for a 16th of its share."""
STRIP_ROOM = 1.125
"""Factor on the error of t: prover and checker bound it in their own ways."""

Evaluate = Callable[[np.ndarray], np.ndarray]
"""A function from points (points, d) to the partial derivatives of all outputs, (points, outputs·d)."""


@dataclasses.dataclass(frozen=True, eq=False)
class StagedGradient:
    """A deep program against the gradient of a target, and the largest error that was seen at samples."""

    program: Program
    target: Target
    derivation: Derivation
    derivatives: Expression
    eps: float
    evaluate: Evaluate
    work: int
    strips: tuple[Strip, ...]
    observed: float

    @classmethod
    def of(
        cls,
        program: Program,
        target: Target,
        derivation: Derivation | None,
        derivatives: Expression,
        eps: float,
        evaluate: Evaluate,
        work: int,
        has_kinks: bool,
    ) -> StagedGradient:
        """Compare gradients at samples, away from kinks. Raise ProgramError if there is no derivation."""
        if derivation is None:
            raise ProgramError(f"there is no derivation by which the gradient of {target.describe()} could be proved")
        found = cls(program, target, derivation, derivatives, eps, evaluate, work, (), math.inf)
        return found._beyond(found._strips(STRIP_SHARE) if has_kinks else ())

    def _beyond(self, strips: tuple[Strip, ...]) -> StagedGradient:
        """Return the same task with these strips, and with the largest error that is seen outside of them."""
        box, excluded = self.target.box, _excluded(strips)

        def errors_at(points: Float[np.ndarray, "points d"]) -> Float[np.ndarray, " points"]:
            found = np.abs(self.evaluate(points) - self.derivatives(points)).max(axis=1)
            return np.where(np.isfinite(found) & ~is_excluded(excluded, box, points), found, 0.0)

        with quiet():
            seen = observed_gradient_error(errors_at, box, self.work, beside_strips(excluded, box))
        return dataclasses.replace(self, strips=strips, observed=seen)

    def _strips(self, share: float) -> tuple[Strip, ...]:
        """Return the strips beyond which the slopes of all heads are within this share of eps at samples.

        There are none if the range of a part is not known.
        """
        try:
            walk, _ = walked(self.program, self.target, ProofRequest(derivation=self.derivation, eps=self.eps))
            groups = [group for stage in walk.groups for group in stage]
            found = [strip_of(number, group, share * self.eps) for number, group in enumerate(groups)]
        except NotBoundedError:
            return ()
        arguments = walk.claims.arguments()
        named = [dataclasses.replace(strip, argument=arguments[strip.head]) for strip in found if strip is not None]
        whole: dict[str, Bands] = {}  # heads with one argument exclude the same strips
        for strip in named:
            whole[strip.argument] = merged([*whole.get(strip.argument, ()), *strip.outer])
        return tuple(dataclasses.replace(strip, outer=whole[strip.argument]) for strip in named)

    def proof(self, budget: Budget) -> GradientProof:
        """Prove a bound. It is ∞ if the range of a part, or the slope of a head, is not known.

        If errors beside kinks add up to more than eps, the strips are made wider, a few times.
        """
        _require_close_coefficients(self.derivation)
        task, found = self, self._proof(budget)
        for share in WIDER_STRIPS if self.strips else ():
            if found.bound <= self.eps or is_time_over():
                break
            task = task._beyond(task._strips(share))
            wider = task._proof(budget)
            found = min(found, wider, key=lambda proof: proof.bound)
        return found

    def _proof(self, budget: Budget) -> GradientProof:
        request = ProofRequest(derivation=self.derivation, progress=budget.progress, eps=self.eps)
        excluded, empty = _excluded(self.strips), Leaves((), np.zeros(0))
        nothing = GradientProof(self.eps, math.inf, self.observed, (), True, (), empty)
        shares = [share_of(strip, self.target.box) for strip in excluded]
        if max(shares, default=0.0) > MOST_OF_BOX or sum(shares) > ALL_OF_BOX:
            return nothing
        try:
            walk, read = walked(self.program, self.target, request)
            further = num_roundings(self.program)
            found = _slope_stages(walk, self.eps, {strip.head: strip for strip in self.strips}, further)
        except NotBoundedError:
            return nothing
        outputs, proved = _outputs(walk, read), [head for _, heads in found for head in heads]
        stages = [stage for stage, _ in found]
        rounding = path_rounding(self.program, self.target.box)
        box, sides = Interval(self.target.box.lo[None], self.target.box.hi[None]), _sides(self.strips)
        with quiet():
            composed = None
            if not walk.has_signs:
                composed = composed_slopes(
                    walk.flow, stages, outputs, rounding, walk.claims.ranges, box, walk.axes, sides
                )
            if composed is None or WORTH_SIGNS * self.observed < composed.bound < math.inf:
                for head in proved:
                    head.take_signs()
                signed = [stage.with_deviations([head.deviations for head in heads]) for stage, heads in found]
                composed = composed_slopes(walk.flow, signed, outputs, rounding, walk.claims.ranges, box, sides=sides)
        observed, proofs = min(self.observed, composed.bound), tuple(head.proof for head in proved)
        return GradientProof(
            self.eps, composed.bound, observed, composed.terms, walk.is_complete, excluded, empty, proofs, composed.axes
        )


@dataclasses.dataclass(frozen=True)
class Strip:
    """The kinks of the head with this number: neighbourhoods of t as computed, and of t in exact arithmetic.

    The second are wider by the error of t. Heads with one argument have the same ones.
    """

    head: int
    inner: Bands
    outer: Bands
    argument: str = ""


def strip_of(number: int, group: ProvedGroup, limit: float) -> Strip | None:
    """Return the neighbourhoods beyond which the slopes of a head are within the limit; None if g has no kinks."""
    (head,) = group.heads
    if group.held is not None or head.noise:
        return None
    try:
        derivative = gradient(function_of_t(head.claim.function))
    except ExpressionError:
        return None
    size = max(group.size, 0.0)
    stage = OneStage.of_line(group.line.heads)

    def errors(points: np.ndarray) -> np.ndarray:
        return size * np.abs(stage.gradients(points).reshape(len(points), -1) - derivative(points)).max(axis=1)

    with quiet():
        inner = neighbourhoods(derivative, group.box, errors, limit)
    if not inner:
        return None
    farthest = float(group.box.magnitude.max())
    room = STRIP_ROOM * (head.argument_error + 2.0**-46 * farthest)
    return Strip(number, inner, tuple((lo - room, hi + room) for lo, hi in inner))


def _excluded(strips: Sequence[Strip]) -> tuple[Excluded, ...]:
    """Return the strips as the certificate lists them."""
    named = {strip.argument: strip.outer for strip in strips}
    return tuple(Excluded(argument, lo, hi) for argument, bands in named.items() for lo, hi in bands)


def _sides(strips: Sequence[Strip]) -> list[Sides]:
    """Return the heads with kinks, those with one argument together, and the intervals of t between their strips."""
    heads: dict[str, list[int]] = {}
    for strip in strips:
        heads.setdefault(strip.argument, []).append(strip.head)
    named = {strip.argument: strip.outer for strip in strips}
    return [Sides(tuple(numbers), named[argument]) for argument, numbers in heads.items()]


def _require_close_coefficients(derivation: Derivation) -> None:
    """Raise ProgramError unless every coefficient is close to a float, and no part is read twice in a combination."""
    read = [part for claim in derivation.heads.values() for part in (claim.argument, claim.carrier)]
    for part in (*read, *derivation.outputs):
        if isinstance(part, Combination):
            names = {inner.index if isinstance(inner, Source) else f"part {id(inner)}" for inner, _ in part.terms}
            if len(names) < len(part.terms):
                raise ProgramError("a combination of the derivation reads a part twice")
            for _, coefficient in part.terms:
                require_close(coefficient.slack, coefficient.value, repr(coefficient.tree)[:60])


def _slope_stages(
    walk: StageWalk, eps: float, strips: Mapping[int, Strip], further: int
) -> list[tuple[SlopeStage, list[ProvedSlopes]]]:
    """Prove the slopes of all heads. Raise NotBoundedError if those of a head are not known."""
    stages, first = list[tuple[SlopeStage, list[ProvedSlopes]]](), 0
    count = sum(len(groups) for groups in walk.groups)
    for state, groups, flow in zip(walk.states, walk.groups, walk.flow, strict=True):
        columns = _StageColumns(walk, state, first)
        heads, found = list[ClaimedHead](), list[ProvedSlopes]()
        for group in groups:
            check_time(PROVING)
            (head,) = group.heads
            with time_share(1 / max(1, count - first - len(heads))):
                number = first + len(heads)
                found.append(ProvedSlopes(walk.heads[number].name, group, eps, strips.get(number), further))
            heads.append(head)
        stages.append((_stage(heads, found, columns, flow), found))
        first += len(heads)
    return stages


@dataclasses.dataclass(frozen=True, eq=False)
class _StageColumns:
    """The columns of a stage: the variables, and then the heads before it, by the channels of the state."""

    walk: StageWalk
    state: State
    count: int

    def __call__(self, rows: Float[np.ndarray, "rows channels"]) -> Float[np.ndarray, "rows sources"]:
        names = [*self.walk.box.names, *(head.name for head in self.walk.heads[: self.count])]
        places = {name: i for i, name in enumerate(names)}
        found = np.zeros((len(rows), len(places)))
        for name, column in zip(self.state.names, rows.T, strict=True):
            found[:, places[name]] += column
        return up(found, 2) if (rows >= 0).all() else found


def _stage(
    heads: Sequence[ClaimedHead], found: Sequence[ProvedSlopes], columns: _StageColumns, flow: FlowStage
) -> SlopeStage:
    channels, nothing = len(columns.state.names), StateForm(np.zeros(len(columns.state.names)), 0.0)
    forms = [(head.argument.form, None if head.claim.carrier is None else head.claim.carrier.form) for head in heads]
    arguments = StateForm.stacked([argument for argument, _ in forms], channels)
    carriers = StateForm.stacked([carrier or nothing for _, carrier in forms], channels)
    sizes = [head.channel.slope_sizes(*form) for head, form in zip(heads, forms, strict=True)]
    return SlopeStage(
        columns(arguments.weights),
        columns(carriers.weights),
        columns(np.array([each.apart for each in sizes])),
        columns(np.array([each.reach for each in sizes])),
        columns(np.array([each.beside for each in sizes])),
        np.array([each.unsure for each in sizes]),
        Slopes.stacked([head.slopes for head in found]),
        tuple(head.deviations for head in found),
    )


class ProvedSlopes:
    """The slopes of g′, the bounds of the computed slopes against g′, and their leaves."""

    def __init__(self, name: str, group: ProvedGroup, eps: float, strip: Strip | None, further: int) -> None:
        """`further` are the roundings of a product of slopes in all layers."""
        (head,) = group.heads
        if group.held is not None or head.noise:
            raise NotBoundedError
        try:
            self.derivative = gradient(function_of_t(head.claim.function))
        except ExpressionError:
            raise NotBoundedError from None
        box, line, size = group.box, group.line, group.size
        stage, (scaled, own) = OneStage.of_line(line.heads), line.scaled(size)
        rounding = SlopeRounding(stage, own, box, further=further)
        if size > 0:
            rounding = SlopeRounding(scaled, own, box, further=further, unit=size)
        points = np.linspace(box.lo, box.hi, SAMPLED)
        with quiet():
            if strip is not None:
                near = beside(strip.inner, box)
                points = np.concatenate([points, near])
                points = points[~np.any([(points >= lo) & (points <= hi) for lo, hi in strip.inner], axis=0)][:, None]
            seen = np.abs(stage.gradients(points).reshape(len(points), -1) - self.derivative(points)).max()
            if not math.isfinite(seen):
                raise NotBoundedError
            if not float(rounding.whole.max()) <= NEGLIGIBLE_SLOPES * seen:
                level = ROUNDING_TOLERANCE * float(rounding.on(points, np.zeros_like(points)).max())
                rounding = dataclasses.replace(rounding, level=level)
            steepest = max(float(np.abs(each.slopes.mid).max(initial=0.0)) for each in line.heads)
            values = max(float(np.abs(each.values.mid).max(initial=0.0)) for each in line.heads)
            least = LEAST_GOAL * max(float(np.abs(self.derivative(points)).max()), steepest * values)
            self.kind = GradientKind(stage, self.derivative, LINE_ORDER, rounding, is_everywhere=strip is None)
            kinds: list[Kind] = [self.kind, *([] if strip is None else [ExcludedKind(strip.inner, 1)])]
            covering = branch_and_bound(
                kinds,
                box,
                observed=0.0 if strip is None else float(seen),
                tolerance=LOOSE_LEAVES,
                floor=rounding.level + least,
                goal=SLOPES_FLOOR * eps,
                start_level=LEAST_LEVEL,
                budget=Budget(MOST_CELLS),
            )
            if not np.isfinite(covering.cells.upper).all():
                raise NotBoundedError
            covering = _sharper(covering)
        deltas = covering.cells.upper[:, 0]
        deltas = np.maximum(deltas, LEAST_SHARE * float(deltas.max()))
        (tree,) = self.derivative.outputs
        argument, carrier = head.argument, head.claim.carrier
        fixed = 0.0 if carrier is None else line.fixed_slopes(head.channel.fixed_size(carrier.form))
        self.covering = covering
        skipped = () if strip is None else strip.outer
        self.slopes = Slopes.of(tree, argument.lo, argument.hi, head.argument_error, None, SLOPE_PIECES, skipped)
        self.deviations = Deviations(leaf_intervals(covering), _of_claims(covering, deltas), size, fixed, 0.0)
        self.proof = SlopeProof(name, float(deltas.max()), Leaves(covering.leaves, deltas))

    def take_signs(self) -> None:
        """State the errors of the slopes with their signs, on narrow leaves."""

        def differences(points: np.ndarray) -> np.ndarray:
            return self.kind.stage.gradients(points)[:, 0, 0] - self.derivative(points)[:, 0]

        covering, middles = signed_leaves(self.covering, differences, shifted_slopes(self.kind))
        deltas, edges = covering.cells.upper[:, 0], leaf_intervals(covering)
        of_claims = _of_claims(covering, deltas)
        self.deviations = dataclasses.replace(self.deviations, edges=edges, deltas=of_claims, middles=middles)
        leaves = Leaves(covering.leaves, deltas, middles=tuple(middles.tolist()) if middles.any() else ())
        self.proof = dataclasses.replace(self.proof, leaves=leaves)


def _of_claims(covering: Covering, deltas: Float[np.ndarray, " leaves"]) -> Float[np.ndarray, " leaves"]:
    """Return the bounds of leaves, and ∞ for those in which nothing is claimed."""
    is_excluded_kind = np.array([isinstance(kind, ExcludedKind) for kind in covering.kinds])
    return np.where(is_excluded_kind[covering.cells.kind], math.inf, deltas)


def _sharper(proof: Covering) -> Covering:
    """Halve leaves where the bound of a half is much smaller, as near the ends of an interval: errors grow there."""
    cells, kind = proof.cells, proof.kinds[0]
    for _ in range(SHARPENED):
        is_large = cells.upper[:, 0] > WORTH_SHARPENING * cells.upper.max()
        finer = cells.where(is_large).cut(np.ones(np.count_nonzero(is_large), dtype=int))
        finer.improve(
            np.arange(len(finer)), 0, kind, kind.bounds(*cell_boxes(proof.box, finer.level, finer.index), SHARP)
        )
        least = finer.upper[:, 0].reshape(-1, 2).min(axis=1)
        is_steep = least < MUCH_SMALLER * cells.upper[is_large, 0]
        if not is_steep.any():
            break
        is_large[is_large] = is_steep
        cells = CellBounds.joined([cells.where(~is_large), finer.where(np.repeat(is_steep, 2))])
    return dataclasses.replace(proof, cells=cells)


def _outputs(walk: StageWalk, read: StateForm) -> SlopeOutputs:
    goals, _ = zip(*walk.claims.outputs(walk.state), strict=True)
    goal = StateForm.stacked(goals, len(walk.state.names))
    columns = _StageColumns(walk, walk.state, len(walk.heads))
    return SlopeOutputs(columns(read.weights), columns(np.abs(read.weights - goal.weights)))
