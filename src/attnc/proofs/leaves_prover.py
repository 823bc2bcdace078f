"""Programs of one attention stage, proved by leaves over dyadic cells: the largest error, or an L_p norm of it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from attnc.errors import InputError, ProgramError
from attnc.ir.program import Program
from attnc.numerics.arrays import Int
from attnc.numerics.bisection import least
from attnc.numerics.limits import time_share
from attnc.numerics.rounding import up
from attnc.proofs.cells.branching import Covering, branch_and_bound
from attnc.proofs.cells.dyadic import GradedBox, cell_boxes
from attnc.proofs.cells.integral import bound_integral
from attnc.proofs.cells.intervals import cells_within
from attnc.proofs.cells.kind import Bounds, Goal, Kind
from attnc.proofs.kinds.rounded import RoundedKind, StageRounding
from attnc.proofs.kinds.selection import SelectionKind
from attnc.proofs.kinds.tail import TailBound, tail_bound
from attnc.proofs.kinds.taylor import DEGREES, MEAN_VALUE_ORDER, InterpolantKind, TaylorKind, choose_order
from attnc.proofs.proof import Beyond, Proof, proof_by_leaves
from attnc.proofs.prover import ProofRequest, Prover, num_softmaxes, require_same_shapes
from attnc.proofs.rounding.program import Roundings, roundings
from attnc.proofs.stages.extraction import OneStage, stages
from attnc.targets.box import Box
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.kinks import jumps_across
from attnc.targets.target import Target

MAX_VARIABLES, FEW_VARIABLES = 4, 3
"""Largest numbers of variables: of Taylor leaves of an expression and of selection leaves, and of proofs that take more
leaves than these, for interpolants of code, L_p norms and gradients."""
LEAST_TOLERANCE = 0.003
"""Smallest tolerance if eps is close to the observed error, or if rounding takes up the rest of the tolerance.
Measured: with 0.03 one case of the corpus misses its eps by 2 %. Between 0 and 0.01 bounds differ by 1 %, and the
numbers of leaves are the same."""
SELECTED = (1.0, 1.1, 1.2, 1.2)
"""Multiples of the error that was seen, in one to four variables. If keys are selected, no bound below the
multiple is sought unless eps is smaller: it would take many times as many leaves."""
FAR_BELOW = 1e-3
"""The part of eps below which no bound is sought in several variables, where leaves are many. Measured on 15 cases:
with 1e-2 one bound is 47 % larger, with 1e-5 one is 6 % smaller."""
CHECK_SECONDS, LEAF_SECONDS, LEAF_KEY_SECONDS = 30.0, {"float64": 6e-4, "float32": 2e-3}, 3e-7
"""The time in which a check of the leaves of a norm should end, and the time of a leaf: for itself, and for each key of
the network. Measured in two variables in float64: 0.8 ms with 612 keys, and 4.7 ms with 14,155 keys. Measured in
float32 with 2 keys: 1.9 ms."""
PEAK = 3.0
"""The ratio of the largest error to the mean error that is assumed when the order for a norm is chosen. Measured on 15
norms: with 1 the norm of x*y takes 4 times as many leaves, with 10 nothing changes."""
ROUNDING_TOLERANCE = 1.2
"""The bound of rounding over a cell that is aimed at, relative to the largest rounding at points. Measured: with 2
bounds in float32 grow by up to 10 %, with 1.05 they fall by 1 %."""
FEW_KEYS = 64
"""Up to this number of keys both kinds of leaf are tried on every cell: a gate is hard in one place and soft in
another."""
CLEARLY = 1.01
"""A computed bound from below that is larger by this factor is larger in exact numbers, too."""
SAMPLED = 64
"""Number of random points at which rounding is sampled, besides the corners, and of random cells on which Taylor and
selection leaves are compared. Measured: with 16 cells one proof has 64 leaves instead of 14, with 256 proofs take 10 %
longer. Between 32 and 2,048 points nothing changes but the time."""
REACHES = (4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, *(2.0**n for n in (7, 8, 9, 10, 12, 14, 17, 20)))
"""The distances from 0 at which the tails of an infinite box may begin."""
JUMP_LINES, JUMP_OCTAVES = 16, 500
"""Number of lines across a jump, and largest number of octaves of distances from it, on which the end of its layer is
sought. Floats have 1,022 octaves below 1; half of them are left for products."""
GRADED_ROUNDINGS = 2.0**21
"""Least near end of a cell beside a jump at 0, in roundings of its far end. Selection leaves take scores to be off by
2^7 roundings of the largest in up to 2^8 times as large cells, and 2^6 times these errors tell scores apart."""


KindMaker = Callable[[OneStage, Target], Kind]
"""A function that makes a kind for a stage and a target, with bounds for exact arithmetic. Rounding is added later."""


class LeavesProver(Prover):
    """Proves by Taylor, interpolant and selection leaves. The kinds of further makers are also tried on every cell."""

    name = "leaves"

    def __init__(self, *makers: KindMaker) -> None:
        self.makers = makers

    def accepts(self, program: Program, target: Target, request: ProofRequest) -> bool:
        if num_softmaxes(program) != 1:
            return False
        if _has_local_model(target, request.p):
            return True
        return request.has_theorem and request.p == math.inf and target.box.d <= MAX_VARIABLES

    def proves_intervals_of(self, program: Program) -> bool:
        """Return whether weights may also be intervals: a program of one softmax has leaves for these, too."""
        return num_softmaxes(program) == 1

    def prove(self, program: Program, target: Target, request: ProofRequest) -> Proof:
        """Prove a bound. Raise ProgramError if the program is not one attention stage over the inputs of the target.

        The search stops at a bound that is within the tolerance of the error that was seen, or at the rounding of
        engines, or in several variables far below eps. If only values of the target and a bound of its slopes are
        known, there are many leaves, and the search stops at eps.
        """
        return self.prepared(program, target, request)(request)

    def prepared(self, program: Program, target: Target, request: ProofRequest) -> Callable[[ProofRequest], Proof]:
        """Return a function that proves this request, also for parts of its box: the kinds of leaves are chosen once.

        Raise what `prove` raises.
        """
        found, rounds = stages(program), roundings(program)
        by_local_models = _has_local_model(target, request.p)
        if by_local_models and len(found) != 1:
            raise ProgramError(f"the outputs are read from {len(found)} query tokens; these leaves prove only one")
        require_same_shapes(program, target)
        if not by_local_models:
            return functools.partial(_by_selection, found, rounds, target)
        stage, outputs = found[0]
        whole = target.box if target.box.is_bounded else None
        rounding = StageRounding.of(stage, rounds[0], request.truncation, box=whole)
        # The level of rounding is a little above the largest rounding at sampled points and at the corners.
        box = target.box.core(REACHES[0])
        places = np.random.default_rng(0).random((SAMPLED, box.d))
        corners = np.array(list(itertools.product((0.0, 1.0), repeat=box.d)))
        at_points = rounding.at(box.lo + np.concatenate([places, corners]) * box.widths)
        rounding = dataclasses.replace(rounding, level=ROUNDING_TOLERANCE * float(at_points.max()))
        return _StageTask(stage, rounding, _with_outputs(target, outputs), self.makers).prove


def _has_local_model(target: Target, p: float) -> bool:
    """Return whether the target has polynomials on cells, in few enough variables, and its input is one vector."""
    most = MAX_VARIABLES if target.expression is not None and p == math.inf else FEW_VARIABLES
    is_known = target.expression is not None or target.interpolated is not None
    return is_known and target.box.d <= most and target.input_shapes == ((target.box.d,),)


def _by_selection(
    found: Sequence[tuple[OneStage, np.ndarray]], rounds: Sequence[Roundings], target: Target, request: ProofRequest
) -> Proof:
    """Prove any target that has enclosures over cells: sequences, two inputs, code with a constant, four variables.

    There may be any number of query tokens, also with cross-attention. The outputs of each token are proved by
    selection leaves of their own, on the same cells.
    """
    goal = max(request.eps, (1 + request.tolerance) * request.observed)
    parts = []
    for (stage, outputs), rounding in zip(found, rounds, strict=True):
        kind = SelectionKind(stage, target, rounding, outputs)
        parts.append(
            (RoundedKind(kind, StageRounding.of(stage, rounding, request.truncation, box=target.box)), outputs)
        )
    per_query = parts[0][0] if len(parts) == 1 else _PerQuery(tuple(parts), target.num_outputs)
    return proof_by_leaves(branch_and_bound([per_query], target.box, goal=goal, budget=request))


def _with_jumps(target: Target, found: Covering) -> dict[str, float]:
    """Return the terms of an L_p norm. The share of cells in layers about jumps becomes the term "jump".

    These are the cells across which the target jumps, and with knots all cells between the two knots beside a jump.
    """
    if target.expression is None or target.is_continuous or found.shares is None:
        return found.ledger
    cells = cells_within(target.box, *cell_boxes(found.box, found.cells.level, found.cells.index))
    slopes = target.expression.ranges_and_gradients(cells, violations="infinite")[1]
    is_layer = ~np.isfinite(slopes.mag).all(axis=(1, 2))
    knots = found.box.knots if isinstance(found.box, GradedBox) else ()
    for axis, (inner, jumps) in enumerate(zip(knots, jumps_across(target.expression, target.box) or (), strict=False)):
        points = np.array([-np.inf, *inner, np.inf])
        after = np.searchsorted(points, jumps)
        is_within = (cells.lo[:, axis, None] >= points[after - 1]) & (cells.hi[:, axis, None] <= points[after])
        is_layer |= is_within.any(axis=1)
    share = float(found.shares[is_layer].sum())
    jump = float(up(share * found.bound, 16))
    return {name: float(up((1 - share) * value, 16)) for name, value in found.ledger.items()} | {"jump": jump}


def _graded(least: float, most: float, ratio: float) -> Iterator[float]:
    """Yield distances from `least` on, each a multiple of the one before, below `most`."""
    while least < most:
        yield least
        least *= ratio


def _with_outputs(target: Target, outputs: np.ndarray) -> Target:
    """Return the target with its outputs in the order of those of the stage."""
    if np.array_equal(outputs, np.arange(target.num_outputs)):
        return target
    if target.expression is None:
        raise ProgramError(f"the stage makes the outputs in the order {outputs.tolist()}, not in that of the target")
    chosen = copy.copy(target)
    trees = tuple(target.expression.outputs[i] for i in outputs)
    chosen.expression = dataclasses.replace(target.expression, outputs=trees)
    return chosen


@dataclass(frozen=True, eq=False)
class _PerQuery(Kind):
    """One kind for each query token, on the same cells. Together they bound all outputs."""

    parts: tuple[tuple[Kind, Int[np.ndarray, " outputs"]], ...]
    num_outputs: int

    @property
    def name(self) -> str:
        return self.parts[0][0].name

    def bounds(self, centres: np.ndarray, radii: np.ndarray, goal: Goal) -> Bounds:
        upper, floor = np.zeros((2, len(centres), self.num_outputs))
        terms: dict[str, np.ndarray] = {}
        for kind, outputs in self.parts:
            found = kind.bounds(centres, radii, goal)
            upper[:, outputs], floor[:, outputs] = found.upper, found.floor
            for name, term in found.terms.items():
                terms.setdefault(name, np.zeros_like(upper))[:, outputs] = term
        return Bounds(upper, terms, 0.0, floor)


@dataclass(frozen=True, eq=False)
class _Way:
    """Kinds of leaves to try, and the level of the first cells, if it was chosen."""

    kinds: tuple[Kind, ...]
    start_level: int | None
    selects: bool = False


@dataclass(frozen=True, eq=False)
class _StageTask:
    """A stage with the rounding of its program, against a target."""

    stage: OneStage
    rounding: StageRounding
    target: Target
    makers: tuple[KindMaker, ...] = ()
    known: dict[tuple[str, float], tuple[_Way, ...]] = field(default_factory=dict)  # for proofs of several regions

    def prove(self, request: ProofRequest) -> Proof:
        p, eps, observed, d = request.p, request.eps, request.observed, self.target.box.d
        floor, tolerance = max(FAR_BELOW * eps if d > 1 else 0.0, self.rounding.level), request.tolerance
        if observed > 0:
            tolerance = max(min(tolerance, LEAST_TOLERANCE), tolerance - self.rounding.level / observed)
        if 0 < observed < eps:
            tolerance = min(tolerance, max(LEAST_TOLERANCE, 0.9 * ((eps - floor) / observed - 1)))
        least = 0.0 if self.target.interpolated is None else eps
        goal = max(least, (1 + tolerance) * observed + floor)
        if p < math.inf:
            return self._prove_norm(max(goal, request.goal_in_norm(d)), request)
        task, tails, beyond = self._without_tails(goal)
        ways = self._once("largest", goal, task._ways)
        best = None
        for number, way in enumerate(ways):
            with time_share(1 / (len(ways) - number)):
                proof = branch_and_bound(
                    way.kinds,
                    task.target.box,
                    observed=observed,
                    tolerance=tolerance,
                    floor=floor,
                    goal=max(least, min(eps, SELECTED[d - 1] * observed) if way.selects else 0.0),
                    start_level=way.start_level or 0,
                    budget=request,
                )
            best = proof if best is None or proof.bound < best.bound else best
            if best.complete:
                break
        assert best is not None
        return proof_by_leaves(best, tails=tails, beyond=beyond)

    def _prove_norm(self, goal: float, request: ProofRequest) -> Proof:
        p, level = request.p, PEAK * goal / math.prod(width ** (1 / request.p) for width in self.target.box.widths)
        if request.region is not None:  # the integral is shared by volume
            goal *= request.region.share(self.target.box.d) ** (1 / p)
        (way,) = self._once("norm", level, lambda at: (self._way_of_norm(at),))
        box = self._graded_box(FAR_BELOW * goal, p)
        budget = dataclasses.replace(request, cells=self._most_norm_cells(request.cells))
        found = bound_integral(way.kinds, box, p, goal=goal, start_level=way.start_level, budget=budget)
        return proof_by_leaves(found, ledger=_with_jumps(self.target, found))

    def _most_norm_cells(self, most: int) -> int:
        """Return the number of cells that can be checked in time, at most `most`. Python code is not checked."""
        if self.target.expression is None:
            return most
        keys = sum(head.num_keys for head in self.stage.heads)
        leaf = LEAF_SECONDS[self.rounding.roundings.dtype] + keys * LEAF_KEY_SECONDS
        return min(most, int(CHECK_SECONDS / leaf))

    def _graded_box(self, level: float, p: float) -> Box:
        """Return the box with knots about the places where f jumps, for cells that are narrow across a jump only."""
        expression, box = self.target.expression, self.target.box
        places = None if expression is None or self.target.is_continuous else jumps_across(expression, box)
        if places is None or not any(places):
            return box
        return GradedBox.of(box, tuple(self._knots(axis, jumps, level, p) for axis, jumps in enumerate(places)))

    def _knots(self, axis: int, jumps: Sequence[float], level: float, p: float) -> tuple[float, ...]:
        """Return 2^k − 1 points: the ends of the layers about jumps, and middles of the widest intervals between them.

        The layer about a jump ends where selection leaves enclose the network to within the level. It need not be so
        narrow that its share of the L_p norm is far below the level.
        """
        box = self.target.box
        ends = [float(box.lo[axis]), *jumps, float(box.hi[axis])]
        lines = box.lo + np.random.default_rng(0).random((JUMP_LINES, box.d)) * box.widths
        selection, found = SelectionKind(self.stage, self.target, self.rounding.roundings), {ends[0], ends[-1]}
        size = max(level, float(np.abs(self.target(lines)).max()))
        octaves = min(JUMP_OCTAVES, 1 + p * math.log2(size / level))

        def is_selected(x: float, room: float, octave: float) -> bool:
            """Whether the network is enclosed between x + z and x + 2z, z = room·2^octave, on all lines."""
            z, centres, radii = room * 2.0 ** round(octave), lines.copy(), np.zeros_like(lines)
            centres[:, axis], radii[:, axis] = x + 1.5 * z, abs(z) / 2
            return bool((selection.ranges(centres, radii).width <= level).all())

        for x, side in itertools.product(jumps, (-1.0, 1.0)):
            room = min((side * (end - x) for end in ends if side * (end - x) > 0), default=0.0) / 8
            octave = least(-octaves, 0.0, functools.partial(is_selected, x, side * room), 1.0)
            width = max(room * 2.0 ** round(octave), 2 * math.ulp(x))
            distances = _graded(width, 4 * room, 1 / (GRADED_ROUNDINGS * self.rounding.roundings.unit))
            found |= {x + side * z for z in distances if z == width or z > abs(x)}
        knots = sorted(found)
        while (len(knots) - 1).bit_count() > 1:
            widest = int(np.argmax(np.diff(knots)))
            knots.insert(widest + 1, knots[widest] / 2 + knots[widest + 1] / 2)
        return tuple(knots[1:-1])

    def _without_tails(self, goal: float) -> tuple[_StageTask, dict[int, float], Beyond | None]:
        """Split an infinite box: return the task on a finite core, and the bounds of the tails beyond it, by side.

        The core is the smallest one whose tails meet the goal, or are below the rounding at its ends. If there is none,
        it is the core with the smallest bounds of tails. Raise InputError if no core has bounds of its tails. The first
        cores may have none: those of gelu(x − 20), for example, begin beyond 16.
        """
        box, expression = self.target.box, self.target.expression
        if box.is_bounded or expression is None:
            return self, {}, None
        refusal, found = None, None
        cores = [box.core(reach) for reach in REACHES]
        ends = np.array([[core.lo, core.hi] for core in cores]).reshape(-1, 1)
        rounding = self.rounding.at(ends).max(axis=1).reshape(len(cores), 2).max(axis=1)
        for core, at_ends in zip(cores, rounding, strict=True):
            try:
                tails, beyond = self._tails(core, expression)
            except InputError as error:
                refusal = error
                continue
            if found is None or max(tails.values()) < max(found[1].values()):
                found = core, tails, beyond
            if max(tails.values()) <= max(goal, at_ends):
                break
        if found is None:
            assert refusal is not None
            raise refusal
        target = copy.copy(self.target)
        target.box, tails, beyond = found
        return dataclasses.replace(self, target=target), tails, beyond

    def _tails(self, core: Box, expression: Expression) -> tuple[dict[int, float], Beyond | None]:
        """Bounds beyond a core by side, and the rounding there; bounds in exact arithmetic where it is not bounded."""
        ends, sides, roundings = (
            {-1: -core.lo[0], 1: core.hi[0]},
            self.target.box.infinite_sides,
            self.rounding.roundings,
        )

        def tails(computed: Roundings | None) -> dict[int, TailBound]:
            return {side: tail_bound(self.stage, expression, side, float(ends[side]), computed) for side in sides}

        def largest(found: dict[int, TailBound]) -> dict[int, float]:
            return {side: float(up(tail.constant.max() + self.rounding.truncation)) for side, tail in found.items()}

        exact, reach = tails(None), roundings.reach
        try:
            found = tails(roundings)
        except InputError:
            return largest(exact), None
        relative = max(float(tail.slope.max()) for tail in found.values())
        is_bounded = all(math.isfinite(tail.constant.max()) for tail in found.values()) and math.isfinite(relative)
        if not is_bounded or reach <= core.magnitude.max():
            return largest(exact), None
        return largest(found), Beyond(relative, reach)

    def _once(self, name: str, goal: float, choose: Callable[[float], tuple[_Way, ...]]) -> tuple[_Way, ...]:
        """Return the ways for a goal. They are chosen once, and do not depend on the region."""
        if (name, goal) not in self.known:
            self.known[name, goal] = choose(goal)
        return self.known[name, goal]

    def _ways(self, goal: float) -> tuple[_Way, ...]:
        """Return the ways to try, the best one first: Taylor leaves with mean values at kinks, or selection leaves."""
        degrees = None if self.target.interpolated is None else DEGREES
        order, level = choose_order(self._local, self.target.box, goal, orders=degrees)
        taylor, selection = self._rounded(self._local(order)), self._selection
        selects = all(self._selects(taylor, at) for at in (level + 1, level))  # Taylor leaves win on small cells first
        if self._num_keys <= FEW_KEYS:
            both = (selection, taylor) if selects else (taylor, selection)
            return (_Way((*both, *self._at_kinks, *self._more), None if selects else level),)
        by_taylor = _Way((taylor, *self._at_kinks, *self._more), level)
        return (_Way((selection, *self._more), None, selects=True), by_taylor) if selects else (by_taylor,)

    def _way_of_norm(self, goal: float) -> _Way:
        """Return the kinds for an L_p norm. They are compared on cells of about the size that belongs to one key.

        `goal` is about the error that is wanted at points. Cells across a jump never reach it.
        """
        taylor, selection, level = self._rounded(self._local(MEAN_VALUE_ORDER)), self._selection, None
        if self._num_keys > FEW_KEYS:
            size_of_keys = math.ceil(math.log2(8 * self._num_keys) / self.target.box.d)
            if self._selects(taylor, size_of_keys):
                return _Way((selection, *self._more), None)
        if self.target.expression is not None and self.target.is_continuous:
            order, level = choose_order(self._local, self.target.box, goal)
            taylor = self._rounded(self._local(order))
        # Coarse cells have no Taylor bound at all: a finite bound is needed to choose the cells to halve.
        return _Way((taylor, selection, *self._at_kinks, *self._more), level)

    def _selects(self, taylor: Kind, level: int) -> bool:
        """Return whether selection leaves have the smaller bounds on a few random cells of the level.

        One level is not enough to decide: cells may be too coarse for Taylor leaves, and those half as wide easy.
        """
        index = np.random.default_rng(0).integers(0, 2**level, (SAMPLED, self.target.box.d))
        cells, goal = cell_boxes(self.target.box, level, index), Goal(np.inf, 1.0)
        selection = SelectionKind(self.stage, self.target, self.rounding.roundings)
        most = np.median(taylor.bounds(*cells, goal).upper.max(axis=1))
        if np.median(selection.least(cells[0])) > CLEARLY * most:
            return False
        return bool(np.median(self._rounded(selection).bounds(*cells, goal).upper.max(axis=1)) < most)

    @property
    def _num_keys(self) -> int:
        return max((head.num_keys for head in self.stage.heads), default=1)

    @property
    def _selection(self) -> Kind:
        return self._rounded(SelectionKind(self.stage, self.target, self.rounding.roundings))

    @property
    def _at_kinks(self) -> tuple[Kind, ...]:
        """Mean value forms, if the target is an expression."""
        expression, box = self.target.expression, self.target.box
        return () if expression is None else (self._rounded(TaylorKind.at_kinks(self.stage, expression, box)),)

    @property
    def _more(self) -> tuple[Kind, ...]:
        return tuple(self._rounded(make(self.stage, self.target)) for make in self.makers)

    def _local(self, order: int) -> Kind:
        """Return the kind with Taylor polynomials or interpolants of the target."""
        if self.target.expression is not None:
            return TaylorKind.of(self.stage, self.target.expression, order)
        assert self.target.interpolated is not None
        return InterpolantKind.at_corners(self.stage, self.target.interpolated, order)

    def _rounded(self, kind: Kind) -> Kind:
        return RoundedKind(kind, self.rounding)
