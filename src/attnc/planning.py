"""The costs of all constructions for a target, and their builds in the order in which `compile` tries them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from attnc.constructions.built import Built, Progress, more_time, out_of_time
from attnc.constructions.catalogue import CATALOGUE
from attnc.constructions.construction import (
    DEFAULT_EPS,
    MAX_ANCHORS,
    MAX_BYTES,
    Construction,
    Estimate,
    Request,
    exponent,
)
from attnc.errors import AttncError, BoundNotMet, InputError, ProgramError, positive_number, real_number
from attnc.numerics.limits import OutOfTime, check_time, is_time_over, time_limit, time_share
from attnc.numerics.quiet import quiet
from attnc.numerics.threads import one_thread
from attnc.targets.box import BoxLike
from attnc.targets.sources import as_target
from attnc.targets.target import Target

T = TypeVar("T")
DEFAULT_SECONDS = 60.0
"""The time limit of `compile` and `plan`, in seconds: 18 times the slowest compilation of the corpus, 3.4 s."""
ESTIMATE_SHARE, BUILD_SHARE = 1 / 3, 1 / 2
"""The parts of the time that is left which the estimate of a construction, or its build, may take. After four slow
estimates a fifth of the time is left for builds and proofs."""


def plan(
    source: str | Target | Callable[[np.ndarray], Any],
    box: BoxLike | None = None,
    eps: float = DEFAULT_EPS,
    *,
    dtype: str = "float64",
    criterion: str = "multiply_adds",
    lipschitz: float | None = None,
    hessian_bound: float | None = None,
    norm: float | str = "inf",
    max_anchors: int = MAX_ANCHORS,
    max_bytes: int = MAX_BYTES,
    seconds: float = DEFAULT_SECONDS,
    progress: Progress | None = None,
) -> list[Estimate]:
    """List the cost of every construction for this eps, the cheapest by `criterion` first.

    Compositions, gates, clips, ReLU networks, tables and heads of one variable are fitted, and their costs counted.
    `compile` reuses such a fit. The size of a spectral grid is estimated from sections of the function, and that of the
    papers' grids from its variation. Nothing is certified.

    `compile` tries the constructions in this order. Unless asked for by name, it leaves out binomial, two_layer,
    attention_softmax and truncated_linear_heads, and fits whose proof would need too many cells.

    Parameters
    ----------
    source, box, eps, dtype, criterion, lipschitz, hessian_bound, norm, max_anchors, max_bytes, progress
        The same as for `attnc.compile`.
    seconds
        The time limit. A row whose cost was not found in time has this reason in `why_not`.

    Returns
    -------
    list of Estimate
        One row per construction. Those that cannot be used come last, with the reason in `why_not`.

    Raises
    ------
    InputError
        If an argument is not valid.
    ExpressionError, DomainError
        If the expression cannot be read, or is not defined on the box.

    Examples
    --------
    >>> import attnc
    >>> rows = attnc.plan("tanh(4*x)", {"x": (-2, 2)}, eps=1e-6)
    >>> rows[0].name, rows[0].anchors
    ('compose', 2)
    """
    request = Request(
        real_number("eps", eps),
        dtype,
        exponent(norm),
        max_anchors,
        max_bytes,
        criterion=criterion,
        seconds=positive_number("seconds", seconds),
    )
    target = as_target(source, box, lipschitz, request.p, hessian_bound)
    rows = list[Estimate]()
    with one_thread(), time_limit(request.seconds):
        for done, construction in enumerate(CATALOGUE):
            if progress is not None:
                progress(f"planning {construction.name}", done / len(CATALOGUE))
            rows.append(estimate(construction, target, request))
    return [*cheapest(rows, request.criterion), *(row for row in rows if row.why_not is not None)]


def candidates(target: Target, request: Request) -> Iterator[Callable[[], Built]]:
    """Yield the build of the named construction, or for "auto" those of all that suit the target, cheapest first."""
    if request.construction != "auto":
        yield _build(construction_named(request.construction), target, request)
        return
    suited = [construction for construction in CATALOGUE if construction.suits(target, request)]
    if len(suited) > 1 and not request.options.keys() - {"norm"}:
        for row in cheapest_first(target, request, suited):
            yield _build(construction_named(row.name), target, request, row.build)
        return
    able = [construction for construction in suited if construction.options.issuperset(request.options)]
    yield _build((able or suited)[0], target, request)


def construction_named(name: str) -> Construction:
    """Return the construction of this name; raise InputError that lists all names if there is none."""
    by_name = {construction.name: construction for construction in CATALOGUE}
    if name not in by_name:
        raise InputError(f"construction must be auto or one of {', '.join(by_name)}; found {name!r}")
    return by_name[name]


def _build(
    construction: Construction, target: Target, request: Request, begun: Callable[[], Built] | None = None
) -> Callable[[], Built]:
    """Return the build of one construction; raise InputError if it does not take the target or an option.

    `begun` is a build that goes on from an estimate. If the build takes more than its share of the time, it is refused.
    """
    if begun is None:
        _accept(construction, target, request)

    def build() -> Built:
        try:
            with time_share(BUILD_SHARE):
                return without_overflow(begun or (lambda: construction.build(target, request)), target)
        except OutOfTime as late:
            raise out_of_time(target, request.eps_or_any, request.seconds, construction.name, late) from None
        except InputError as refusal:
            if target.box.is_bounded or request.construction != "auto":
                raise
            raise InputError(
                f"cannot compile {target.describe()} on {target.box}: on an infinite box networks are made of gates, "
                f"which are exact far out. {refusal}"
            ) from None

    return build


def _accept(construction: Construction, target: Target, request: Request) -> None:
    """Raise InputError if the construction does not take the target or an option."""
    if not target.box.is_bounded and target.expression is None:
        raise InputError(
            f"cannot compile {target.describe()} on {target.box}: only expressions can have an infinite box. Write it "
            "as an expression, or choose a finite box."
        )
    for option, value in request.options.items():
        if option not in construction.options:
            able = (each for each in CATALOGUE if option in each.options and each.why_not(target, request) is None)
            others = " or ".join(f"construction={each.name!r}" for each in able)
            advice = f"Leave it out, or use {others}." if others else "Leave it out."
            purpose = "" if target.box.is_bounded else ", which builds the networks on infinite boxes"
            raise InputError(f"{option}={value!r} is not an option of {construction.name}{purpose}. {advice}")
    construction.accept(target, request)


def without_overflow(work: Callable[[], T], target: Target) -> T:
    """Return the result of the work. Raise InputError if the target has too large or too small numbers for it."""
    try:
        with quiet():  # a number that overflows is not finite, and is refused
            return work()
    except (np.linalg.LinAlgError, ProgramError) as failure:
        raise InputError(
            f"the numbers of {target.describe()} on {target.box} are too large or too small for a fit ({failure}): "
            "scale the function or its variables"
        ) from None


def estimate(construction: Construction, target: Target, request: Request) -> Estimate:
    """Return the cost of a construction, or the reason why it cannot be used."""
    reason = construction.why_not(target, request)
    if reason is None:
        try:
            with time_share(ESTIMATE_SHARE):
                check_time("comparing constructions")
                return without_overflow(lambda: construction.estimate(target, request), target)
        except AttncError as refusal:
            reason = str(refusal)
    return Estimate(construction.name, why_not=reason)


def cheapest(rows: Sequence[Estimate], criterion: str) -> list[Estimate]:
    """Return the rows of constructions that can be used, cheapest first. Among equals, fewer layers come first."""
    able = [row for row in rows if row.why_not is None]
    return sorted(able, key=lambda row: (getattr(row, criterion), row.layers, row.multiply_adds, row.parameters))


def cheapest_first(target: Target, request: Request, constructions: Sequence[Construction]) -> Iterator[Estimate]:
    """Yield the rows of constructions that can be used, cheapest first; raise BoundNotMet with all reasons if none can.

    If the criterion is multiply_adds, a construction is first estimated with at most as many anchors as the cheapest
    one has multiply-adds: with more it cannot be cheaper. This avoids counting the many anchors of a grid at a kink.
    """
    rows, able, left = dict[str, Estimate](), list[Estimate](), list(constructions)
    is_any = False
    while left or able:
        for construction in tuple(left):
            most = able[0].multiply_adds if able and request.criterion == "multiply_adds" else request.max_anchors
            capped = replace(request, max_anchors=max(1, min(most, request.max_anchors)))
            row = rows[construction.name] = estimate(construction, target, capped)
            if row.why_not is None or capped == request:
                left.remove(construction)
            able = cheapest([*able, row], request.criterion)
        if able:
            is_any = True
            yield able.pop(0)
    if not is_any:
        reasons = "\n".join(f"{row.name:<24}{row.why_not}" for row in rows.values())
        if is_time_over():
            reasons += f"\n{more_time(request.seconds)}."
        raise BoundNotMet(
            f"no construction brings {target.describe()} on {target.box} to eps={request.eps:g}:\n{reasons}",
            eps=request.goal,
            bound=None,
        )
