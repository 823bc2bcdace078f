"""What each construction would cost for a target and an eps, before anything is built; and the cheapest of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from attnc import constructions
from attnc.constructions.built import Built
from attnc.constructions.compose import estimate_compose
from attnc.constructions.estimate import Estimate, Wanted
from attnc.constructions.partition.choosing import ETA
from attnc.constructions.partition.grid import choose_counts
from attnc.constructions.partition.positions import num_positions
from attnc.constructions.spectral_grid import estimate_spectral_grid
from attnc.constructions.truncation.bumps import STEP_ANCHORS
from attnc.errors import AttncError, BoundNotMet, InputError
from attnc.functions.registry import FUNCTIONS
from attnc.proofs.prover import MAX_VARIABLES
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.tree import Call, walk
from attnc.targets.function_target import FunctionTarget
from attnc.targets.linear import ReLUNetwork, TruncatedLinear
from attnc.targets.table import TableTarget
from attnc.targets.target import Target

MAX_GRID_VARIABLES = 10
ONE_VARIABLE = ("graded", "binomial")
SOFT = ("spectral_grid", *ONE_VARIABLE)
"""Those that make the largest error small, whatever norm is asked for: leaves prove the norm of the network."""
TABLES = ("table_grid", "table_scattered")
CRITERIA = ("multiply_adds", "anchors", "parameters", "layers")

CONSTRUCTIONS: dict[str, Callable[..., Built]] = {
    "spectral_grid": constructions.spectral_grid,
    "compose": constructions.compose,
    "gates": constructions.gates,
    "graded": constructions.graded,
    "binomial": constructions.binomial,
    "max_affine": constructions.max_affine,
    "max_affine_cross": constructions.max_affine_cross,
    "two_layer": constructions.two_layer,
    "attention_softmax": constructions.attention_softmax,
    "truncated_linear": constructions.truncated_linear,
    "truncated_linear_heads": constructions.truncated_linear_heads,
    "relu_network": constructions.relu_network,
    "table_grid": constructions.table_grid,
    "table_scattered": constructions.table_scattered,
}


def plan(target: Target, wanted: Wanted, names: Sequence[str] = tuple(CONSTRUCTIONS)) -> list[Estimate]:
    """A row for every construction; one that cannot serve says why not."""
    rows = []
    for name in names:
        reason = _why_not(name, target, wanted)
        if reason is not None:
            rows.append(Estimate(name, why_not=reason))
            continue
        try:
            with np.errstate(all="ignore"):  # what overflows is not finite, and does not serve
                rows.append(ESTIMATES[name](target, asked_of(name, target, wanted)))
        except AttncError as refusal:
            rows.append(Estimate(name, why_not=str(refusal)))
        except np.linalg.LinAlgError:
            rows.append(Estimate(name, why_not="the numbers are too large or too small for a fit: scale the function"))
    return rows


def asked_of(name: str, target: Target, wanted: Wanted) -> Wanted:
    """What a construction is asked for: by its largest error, if that is all it knows."""
    return wanted.of_largest_error(target.box) if name in SOFT else wanted


def cheapest(rows: Sequence[Estimate], criterion: str) -> list[Estimate]:
    """The rows that can serve, cheapest first; among equals the one with fewer layers."""
    if criterion not in CRITERIA:
        raise InputError(f"criterion must be one of {', '.join(CRITERIA)}; found {criterion!r}")
    able = [row for row in rows if row.why_not is None]
    return sorted(able, key=lambda row: (getattr(row, criterion), row.layers, row.multiply_adds, row.parameters))


def cheapest_first(target: Target, wanted: Wanted, names: Sequence[str], criterion: str) -> Iterator[Estimate]:
    """The rows that can serve; BoundNotMet with the whole plan if there is none.

    By multiply-adds, each is looked for up to the anchors of the cheapest of those before it: at a kink a grid has
    many, and to find how many takes long.
    """
    rows, able, left = dict[str, Estimate](), list[Estimate](), list(names)
    is_any = False
    while left or able:
        for name in tuple(left):
            most = able[0].multiply_adds if able and criterion == "multiply_adds" else wanted.max_anchors
            capped = replace(wanted, max_anchors=max(1, min(most, wanted.max_anchors)))
            (rows[name],) = plan(target, capped, [name])
            if rows[name].why_not is None or capped == wanted:
                left.remove(name)
            able = cheapest([*able, rows[name]], criterion)
        if able:
            is_any = True
            yield able.pop(0)
    if not is_any:
        raise BoundNotMet(
            f"no construction brings {target.describe()} on {target.box} to eps={wanted.eps:g}:\n"
            f"{table([*rows.values()])}",
            eps=wanted.eps,
            bound=None,
        )


def candidates(target: Target, wanted: Wanted) -> tuple[str, ...]:
    """What "auto" chooses from; grids last, which take longest to look for. A claim that needs a proof takes a
    construction that brings one."""
    if not target.box.is_bounded:
        return ("gates",)
    if isinstance(target, TruncatedLinear):
        return ("truncated_linear",)
    if isinstance(target, ReLUNetwork):
        return ("relu_network",)
    if isinstance(target, TableTarget):
        return ("table_scattered",) if target.grid is None else ("table_grid",)
    if len(target.input_shapes) > 1:
        return ("max_affine_cross",)
    if not target.is_continuous:
        return ("max_affine",)
    if wanted.p < math.inf:
        soft = ("graded", "spectral_grid") if target.box.d == 1 else ("spectral_grid",)
        is_soft = _is_summed(target) and (target.box.d == 1 or not _has_kinks(target))
        return ("max_affine", *soft) if is_soft else ("max_affine",)
    if isinstance(target, FunctionTarget) and target.given is not None:
        return ("max_affine", "spectral_grid") if _leaves_needed(target, wanted.eps) <= MAX_LEAVES else ("max_affine",)
    if isinstance(target, ExpressionTarget):
        of_one = ("graded",) if target.box.d == 1 else ()
        return ("compose", "gates", *of_one, "max_affine", "spectral_grid")
    return ("max_affine", "compose", "spectral_grid")


def table(rows: Sequence[Estimate]) -> str:
    """The plan as text, for an error message."""
    lines = [f"{'construction':<24}{'anchors':>12}{'layers':>8}{'multiply-adds':>16}"]
    for row in rows:
        if row.why_not is None:
            lines.append(f"{row.name:<24}{row.anchors:>12,}{row.layers:>8}{row.multiply_adds:>16,}")
        else:
            lines.append(f"{row.name:<24}{row.why_not}")
    return "\n".join(lines)


def _why_not(name: str, target: Target, wanted: Wanted) -> str | None:
    if not target.box.is_bounded and name != "gates":
        return "takes a finite box"
    made_for = {"truncated_linear": TruncatedLinear, "relu_network": ReLUNetwork}
    if isinstance(target, TableTarget) and name not in TABLES:
        return "takes functions; a table says nothing between its points"
    kind = TableTarget if name in TABLES else made_for.get(name.removesuffix("_heads"))
    if kind is not None:
        return None if isinstance(target, kind) else f"takes a {kind.__name__}"
    if name in ONE_VARIABLE and target.box.d > 1:
        return f"takes a function of one variable; the target has {target.box.d}"
    papers = name in ("max_affine", "max_affine_cross", "two_layer", "attention_softmax")
    if len(target.input_shapes) > 1 and name != "max_affine_cross":
        return "takes one input; the target has two"
    if not papers and not target.is_continuous:
        return "approximates continuous functions"
    if not papers and wanted.p < math.inf and name not in SOFT:
        return "measures the largest error"
    if name in SOFT and wanted.p < math.inf and not _is_summed(target):
        return f"L_p norms of it are proved of expressions in up to {MAX_VARIABLES} variables"
    if papers and target.box.d > MAX_GRID_VARIABLES:
        return f"a grid in {target.box.d} variables has too many cells"
    if papers and isinstance(target, FunctionTarget) and target.given is None:
        return "needs a Lipschitz constant (lipschitz=…) or hessian_bound=… of Python code"
    return None


def _is_summed(target: Target) -> bool:
    """Whether the prover finds an L_p norm without the theorem of a construction."""
    return isinstance(target, ExpressionTarget) and target.box.d <= MAX_VARIABLES


def _has_kinks(target: Target) -> bool:
    """A grid is as fine as a kink asks everywhere."""
    return isinstance(target, ExpressionTarget) and any(
        isinstance(node, Call) and FUNCTIONS[node.name].has_kinks for node in walk(target.expression.outputs)
    )


MAX_LEAVES = 100_000
"""Cells of which a proof is expected within half a minute."""


def _leaves_needed(target: FunctionTarget, eps: float) -> float:
    """Cells on which a function is within eps/2 of its interpolant: so many samples a proof about it takes."""
    d, r = target.box.d, 0.0
    if len(target.output_shape) > 1 or d > MAX_VARIABLES:
        return math.inf
    if target.lipschitz is not None:
        r = eps / (2 * max(target.lipschitz, 1e-300) * math.sqrt(d))
    if target.hessian_bound is not None:
        r = max(r, math.sqrt(eps / (max(target.hessian_bound, 1e-300) * d)))
    return math.prod(math.ceil(width / (2 * r)) if width / (2 * r) < 1e9 else math.inf for width in target.box.widths)


def _grid_size(target: Target, wanted: Wanted) -> tuple[int, ...]:
    """Cells of the papers' grids: from the variation of the target along its axes."""
    eps = 0.99 * wanted.eps
    return choose_counts(target, eps, lambda grid: 0.5 + ETA, MAX_CELLS_TRIED, wanted.dtype, wanted.p)


MAX_CELLS_TRIED = 20_000
"""Grids up to this size are tried, larger ones are extrapolated."""


@dataclass(frozen=True)
class _Partition:
    """The papers' constructions on a grid of cells."""

    name: str
    has_steps: bool  # a first layer of bumps

    def __call__(self, target: Target, wanted: Wanted) -> Estimate:
        counts, d, n = _grid_size(target, wanted), target.box.d, num_positions(target)
        G, outputs = math.prod(counts), target.num_outputs // n
        cells = Estimate.one_layer(self.name, G * n, d, outputs, wanted.eps)
        if not self.has_steps:
            return _within(cells, wanted)
        steps = sum(counts) - d
        keys = max(STEP_ANCHORS[0], steps)
        return _within(
            Estimate(
                self.name,
                anchors=G * n + keys,
                heads=2 if self.name == "two_layer" else 1,
                layers=2 if self.name == "two_layer" else 1,
                parameters=G * n * (d + outputs) + 6 * keys,
                multiply_adds=G * n * (d + outputs) + 3 * steps * keys,
                error=wanted.eps,
            ),
            wanted,
        )


def _within(row: Estimate, wanted: Wanted) -> Estimate:
    if row.anchors <= wanted.max_anchors:
        return row
    return Estimate(row.name, why_not=f"needs about {row.anchors:.2g} anchors, the limit is {wanted.max_anchors:,}")


@dataclass(frozen=True)
class _Built:
    """Constructions that are quick: sizes are read off the program."""

    name: str

    def __call__(self, target: Target, wanted: Wanted) -> Estimate:
        limits = {"max_anchors": wanted.max_anchors, "max_bytes": wanted.max_bytes}
        built = CONSTRUCTIONS[self.name](target, eps=wanted.eps, dtype=wanted.dtype, **limits)
        found = dict(built.parameters).get("worst_error")
        return Estimate.of_built(built, found if built.bound is None else built.bound.value)  # type: ignore[arg-type]


ESTIMATES: Mapping[str, Callable[[Target, Wanted], Estimate]] = {
    "spectral_grid": estimate_spectral_grid,
    "compose": estimate_compose,
    "max_affine": _Partition("max_affine", has_steps=False),
    "max_affine_cross": _Partition("max_affine_cross", has_steps=False),
    "two_layer": _Partition("two_layer", has_steps=True),
    "attention_softmax": _Partition("attention_softmax", has_steps=True),
    **{name: _Built(name) for name in ("truncated_linear", "truncated_linear_heads", "relu_network", "gates")},
    **{name: _Built(name) for name in (*ONE_VARIABLE, *TABLES)},
}
