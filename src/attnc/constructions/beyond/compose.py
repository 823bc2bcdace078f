"""Any expression as a deep attention-only program, whose size is linear in the size of the expression."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from attnc.constructions.beyond.graded import graded_keys
from attnc.constructions.built import Built, Progress, require_resolution, too_many_anchors
from attnc.constructions.construction import (
    EXPRESSION,
    LEAST_MAGNITUDE,
    MAX_ANCHORS,
    MAX_BYTES,
    Construction,
    Request,
    for_eps,
)
from attnc.constructions.fitting.axis import MAX_VALUE, AxisSections, grid_head, value_limit
from attnc.constructions.fitting.circuit import PartFit, build_parts
from attnc.constructions.fitting.gate import MAX_EXPONENT, OutOfReach, function_gate, product_gate, square_gate
from attnc.constructions.fitting.kinks import Kink, find_kinks
from attnc.constructions.fitting.minimax import Function
from attnc.constructions.fitting.quotient import even_scores, graded_scores, quotient, unit_function
from attnc.constructions.fitting.search import fewest, tightened
from attnc.errors import AttncError, BoundNotMet
from attnc.functions.gate_recipes import Decay, ExactKeys, GateRecipe, has_two_keys, is_economical, may_carry
from attnc.functions.registry import FUNCTIONS
from attnc.ir.soft_head import SoftHead
from attnc.numerics.arrays import Float
from attnc.numerics.intervals import Interval
from attnc.numerics.limits import check_time
from attnc.numerics.rounding import UNIT_ROUNDOFF
from attnc.numerics.threads import one_thread
from attnc.targets.box import Box
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.tree import Call, Node, Product, to_text
from attnc.targets.parts.constant_keys import with_constant_keys
from attnc.targets.parts.lowering import SQUARE, Lowering
from attnc.targets.parts.part import Combination, Multiply, Part, Source, T, Unary, function_of_t, in_order, operands_of
from attnc.targets.parts.part_ranges import PartRanges, sub_boxes
from attnc.targets.target import Target

NAME = "compose"
MOST_FUSED = 72
"""Largest number of anchors of one head for a function of several operations. A function that needs more is taken
apart, which costs layers. Measured with six expressions: with 36, sin(20x)·exp(−x²) + y takes 81 anchors instead of 54;
144 changes nothing."""
MAX_SHARINGS = 8
"""Maximum number of times that eps is shared over the heads. One time is enough, unless errors grow faster than in
proportion: √t at 0 takes several."""
ROUNDINGS_OF_HEADS = 4
"""Least eps that a head can reach, in roundings of max |f|. The four are a cast, a product, a sum and a division."""
COMPOSED_SHARE = 0.95
"""The share of eps for the sum of the errors of the heads. The rest is for rounding. If the certificate still misses
eps, `compile` retries with a smaller one. Measured with six expressions: with 0.9 or 0.975, √x to 1e-4 takes 20 anchors
instead of 16, and the others take at most one more."""
MOST_EXCESS = 2.0
"""Largest ratio of a proved to an observed error that a finer fit corrects. A larger ratio is attributed to rounding.
So a finer fit is asked for δ/2 at the least."""


@one_thread()
def compose(
    target: Target,
    *,
    eps: float,
    dtype: str = "float64",
    max_anchors: int = MAX_ANCHORS,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
    constant_keys: bool = False,
    max_value: float = MAX_VALUE,
) -> Built:
    """A deep program: affine maps compute sums, and one head computes each function of one part and each product.

    Weights.  The head of a function has soft anchors with solved values, or is a gate. In the head of a product C·g(A)
              the keys carry C, and the weights compute g at A. For A·B, g is the identity.
    Errors.   err_out ≤ Lip(g)·err_in + δ_g, on the range of the argument enlarged by err_in. An error of g moves the
              output by at most λ_g per unit. eps is shared so that Σ λ_g δ_g = eps with few anchors: keys grow with
              log 1/δ, so the shares λ_g δ_g are equal, and small for gates, whose size is fixed. A head has a whole
              number of keys, so its error is below its share. Then heads give up keys while the sum allows it, first
              where the sum grows least. δ_g is the error on samples. If the certificate misses eps, δ_g is the error
              that the certificate proved (`Built.again`).
    Size.     Heads and layers are linear in the size of the expression, whatever the number of variables.

    Parameters
    ----------
    target : Target
        A continuous expression on a finite box.
    eps : float
        The largest error allowed.
    dtype : str
        The arithmetic of the program: "float64" or "float32".
    max_anchors, max_bytes : int
        Limits on the number of anchors and on the memory for the program, in bytes.
    progress : callable, optional
        Called during the search, with the current step and the fraction of it that is done.
    constant_keys : bool, optional
        Whether keys and values must be the same for every input, as in a stock checkpoint. Then products are computed
        from squares, and kinks by keys that are dense there. Every head writes numbers of a size of at most 1.
    max_value : float, optional
        Largest ratio of the values of fitted keys to those of the function. With a smaller one, heads take more keys,
        and errors of their weights have less effect.

    Returns
    -------
    Built
        The program. Its `parameters` are the sum of the errors of its heads. It has no bound: the certificate proves
        one head by head, from the parts in `derivation`.

    Raises
    ------
    InputError
        If the target is not an expression, or may jump.
    BoundNotMet
        If the heads do not reach eps, or if they need more than `max_anchors` anchors.

    Examples
    --------
    >>> import attnc
    >>> target = attnc.as_target("sin(x) * y", {"x": (-3, 3), "y": (-1, 1)})
    >>> built = attnc.constructions.compose(target, eps=1e-6)
    >>> built.program.num_anchors
    7
    """
    request = Request(eps, dtype, max_anchors=max_anchors, max_bytes=max_bytes, progress=progress)
    COMPOSE.accept(target, request)
    assert target.expression is not None
    found = _ledger(target, target.expression, request, constant_keys, max_value).composed(progress, excess={})
    if found.num_anchors > max_anchors:
        needed = f"{found.num_anchors:,} anchors"
        raise too_many_anchors(target, eps, NAME, needed, f"max_anchors={max_anchors:,}")
    return found.build(dtype)


def _ledger(
    target: Target,
    expression: Expression,
    request: Request,
    constant_keys: bool = False,
    max_value: float = MAX_VALUE,
) -> Ledger:
    """Return the ledger of the parts of the expression. One head can compute each part."""
    eps, dtype = request.goal, request.dtype
    ranges = PartRanges(sub_boxes(target.box), expression.variables)

    @functools.cache
    def fits_in_one_head(lo: float, hi: float, tree: Node) -> bool:
        return HeadsOf(tree, lo, hi, dtype, max_value=max_value).is_within_reach(eps / 8)

    def can_fit(base: Part, tree: Node) -> bool:
        recipe = _recipe(tree)
        is_gate = has_two_keys(recipe) and not (constant_keys and may_carry(recipe))
        return is_gate or fits_in_one_head(*ranges(base), tree)

    gates = [name for name, function in FUNCTIONS.items() if is_economical(function.gate) and not constant_keys]
    outputs = Lowering(expression.variables, can_fit, gates).lower(expression.outputs)
    if constant_keys:
        outputs = with_constant_keys(outputs, ranges)
    ledger = Ledger(target, outputs, ranges, eps, dtype, constant_keys, max_value)
    if ledger.heads:
        level = ROUNDINGS_OF_HEADS * UNIT_ROUNDOFF[dtype] * max(map(ranges.size, ledger.outputs))
        require_resolution(target, eps, dtype, level)
    return ledger


@dataclass(frozen=True, eq=False)
class Composition:
    """Parts with their fits, ready to be built."""

    ledger: Ledger
    fits: dict[int, PartFit]
    error: float

    @property
    def num_anchors(self) -> int:
        return sum(fit.num_anchors for fit in self.fits.values())

    def build(self, dtype: str) -> Built:
        ledger = self.ledger
        program, derivation = build_parts(ledger.target, ledger.outputs, ledger.factors, self.fits, dtype)

        def again(proved: Mapping[str, float], bound: float) -> Built:
            excess: dict[int, float] = {}
            for channel, error in proved.items():
                part = derivation.heads[channel].part
                key = id(ledger.factors[id(part)][0]) if isinstance(part, Multiply) else id(part)
                excess[key] = min(MOST_EXCESS, max(1.0, error / max(self.fits[key].error, 1e-300)))
            expected = ledger.total(self.fits, ledger.deltas(self.fits, excess))
            return ledger.composed(None, excess, min(1.0, expected / max(bound, 1e-300))).build(dtype)

        parameters = (("composed error", self.error),)
        return Built(program, NAME, None, None, parameters, derivation, again, observed=self.error)


HEAD_ROUNDINGS = 6
"""Expected rounding of a head as proofs bound it, in roundings of its largest value. In 20 heads it is 3 to 23. With 16
some heads keep keys that they do not need."""
COMPOSING = "composing"
"""The name of this search in progress reports and in the message that the time ran out."""
SHARING_PASSES = 6
"""Number of passes of a fixed-point iteration between the shares and the enlarged ranges. Measured with six
expressions: 3 passes change one bound, by 2 %; 12 change none."""
EXACT_SHARE = 1e-9
"""The share of eps for a function that is already a softmax, such as sigmoid(t), tanh(t) and silu(t). It has no error,
so any small share is enough."""
GATE_SHARE = 0.02
"""The share of eps for a gate with two keys, in units of the share of a head whose keys grow with 1/δ. It is small,
since a larger β costs no key."""
MODULUS_PIECES = 512
"""Number of pieces of a range on which the slope of a function is enclosed. Measured with six expressions: with 256 or
1024 the anchors are the same, and bounds change by less than 1 %."""


class Ledger:
    """Shares eps over the heads, and adds up their errors.

    For a function g of one part, err_out ≤ ω_g(err_in) + δ_g. Here ω_g is the modulus of continuity of g on the range
    of the argument enlarged by err_in. For a product A·B, err_out ≤ (|A| + e_A)(|B| + e_B) − |A||B|. For an affine
    combination, err_out ≤ Σ |c| err. A product is C·g(A): the weights of its head compute g at A. If neither factor is
    absorbed, g is the identity.
    """

    def __init__(
        self,
        target: Target,
        outputs: Sequence[Part],
        ranges: PartRanges,
        eps: float,
        dtype: str,
        constant_keys: bool = False,
        max_value: float = MAX_VALUE,
    ) -> None:
        self.target, self.outputs, self.ranges, self.eps, self.dtype = target, outputs, ranges, eps, dtype
        self.constant_keys, self.max_value = constant_keys, max_value
        self.factors = _factors(outputs)
        self.absorbed = {id(function) for function, _ in self.factors.values()}
        self.order = in_order(outputs, lambda part: self.factors.get(id(part)) or operands_of(part))
        self.heads = [part for part in self.order if isinstance(part, Unary)]
        self.known: dict[tuple[Node, float, float, bool], HeadsOf] = {}
        self._slopes: dict[tuple[int, Node, float], float] = {}
        ranges.require_bounded(self.order)

    def composed(self, progress: Progress | None, excess: Mapping[int, float], share: float = 1.0) -> Composition:
        """Return fits with few keys whose errors on samples add up to at most share·COMPOSED_SHARE·eps.

        `excess` is the factor by which the proved error of a head exceeds its error on samples. `share` is less than 1
        if a proof adds up the errors of heads less sharply than this ledger.
        """
        within = share * COMPOSED_SHARE * self.eps

        def attempt(goal: float, failed: Sequence[Composition]) -> Composition:
            check_time(COMPOSING)
            if progress is not None:
                progress(COMPOSING, len(failed) / MAX_SHARINGS)
            fits = self.fit(goal, excess)
            return Composition(self, fits, self.total(fits, self.deltas(fits, excess)))

        def less(goal: float, last: Composition) -> float:
            return goal * (0.7 * within / last.error if math.isfinite(last.error) else 0.1)

        sharings = tightened(within, attempt, less, within, MAX_SHARINGS)
        if sharings.met is not None:
            return self.thinned(sharings.met, within, excess)
        found = sharings.failed[-1]
        raise BoundNotMet(
            f"cannot compose {self.target.describe()} on {self.target.box} to eps={self.eps:g}: the errors of its "
            f"parts add up to {found.error:.3g}. Choose a larger eps or a smaller box.",
            eps=self.eps,
            build=lambda: found.build(self.dtype),
        )

    def thinned(self, found: Composition, within: float, excess: Mapping[int, float]) -> Composition:
        """Take keys away from heads, one head after the other, while the sum of the errors is at most `within`.

        The next head is the one with which the sum grows least for each key. The sum includes the expected rounding.
        """

        def expected(key: int, fit: PartFit) -> float:
            """Return the error of a head as a proof will find it."""
            values = fit.keys.values if fit.keys.carried is None else fit.keys.carried
            rounding = HEAD_ROUNDINGS * UNIT_ROUNDOFF[self.dtype] * float(np.abs(values).max())
            return fit.error * excess[key] if key in excess else fit.error + rounding

        deltas = {key: expected(key, fit) for key, fit in found.fits.items()}
        while True:
            errors = self.forwards(deltas)
            room = within - max(errors[id(part)] for part in self.outputs)
            costs, smaller = self.backwards(errors), list[tuple[float, int, PartFit]]()
            for part in self.heads:
                key, fit = id(part), found.fits[id(part)]
                cost = max(costs[key] * excess.get(key, 1.0), 1e-300)
                less = self._heads_of(part, fit.lo, fit.hi).fewer(fit, fit.error + room / cost) if room > 0 else None
                if less is not None:
                    grown = cost * (expected(key, less) - deltas[key]) / (fit.num_anchors - less.num_anchors)
                    smaller.append((grown, key, replace(less, lo=fit.lo, hi=fit.hi)))
            for _, key, less in sorted(smaller, key=lambda each: each[0]):
                fits, new = {**found.fits, key: less}, {**deltas, key: expected(key, less)}
                if self.total(fits, new) <= within:
                    deltas, found = new, Composition(self, fits, self.total(fits, self.deltas(fits, excess)))
                    break
            else:
                return found

    def shares(self, eps: float) -> dict[int, float]:
        """Return δ of every head, such that Σ λδ = eps."""
        weights = {id(part): self._weight(_recipe(part.tree)) for part in self.heads}
        total = sum(weights.values())
        deltas = {key: eps * weight / max(total, 1e-300) for key, weight in weights.items()}
        for _ in range(SHARING_PASSES):  # λ depends on the errors through the enlarged ranges
            errors = self.forwards(deltas)
            costs = self.backwards(errors)
            for part in self.heads:
                key = id(part)
                most = self.ranges.size(part) or eps  # for a part that is 0 everywhere an error of eps is allowed
                deltas[key] = min(most, eps * weights[key] / total / max(costs[key], 1e-300))
        return deltas

    def _weight(self, recipe: GateRecipe | None) -> float:
        """Return the share of eps of a head, in units of the share of a head whose keys grow with 1/δ."""
        if self.constant_keys and may_carry(recipe):
            return 1.0
        return EXACT_SHARE if isinstance(recipe, ExactKeys) else GATE_SHARE if has_two_keys(recipe) else 1.0

    def fit(self, eps: float, excess: Mapping[int, float]) -> dict[int, PartFit]:
        """Return a fit for every head, each within its share of eps."""
        deltas = self.shares(eps)
        errors = self.forwards(deltas)
        fits: dict[int, PartFit] = {}
        for part in self.heads:
            check_time(COMPOSING)
            lo, hi = self._enlarged(part.base, errors[id(part.base)], part.tree)
            delta = deltas[id(part)] / excess.get(id(part), 1.0)
            fitted = self._heads_of(part, lo, hi).within(delta)
            if fitted is None:
                raise BoundNotMet(
                    f"cannot compose {self.target.describe()} on {self.target.box}: {self.ranges.describe(part)} is "
                    f"too hard for one head, {to_text(part.tree)} for t in [{lo:.4g}, {hi:.4g}] to within {delta:.2g}. "
                    "Choose a larger eps or a smaller box.",
                    eps=self.eps,
                )
            fits[id(part)] = replace(fitted, lo=lo, hi=hi)
        return fits

    def _heads_of(self, part: Unary, lo: float, hi: float) -> HeadsOf:
        """Return the heads of a function on an interval. Equal functions on equal intervals share them."""
        key = part.tree, lo, hi, not self.constant_keys and id(part) not in self.absorbed
        if key not in self.known:
            self.known[key] = HeadsOf(part.tree, lo, hi, self.dtype, key[-1], self.max_value)
        return self.known[key]

    def total(self, fits: Mapping[int, PartFit], deltas: Mapping[int, float]) -> float:
        """Return the error of the worst output, given δ of every head.

        It is infinite if the argument of a head may leave the interval on which the head was fitted.
        """
        errors = self.forwards(deltas)
        for part in self.heads:
            lo, hi = self.ranges(part.base)
            error, fit = errors[id(part.base)], fits[id(part)]
            is_enlarged = fit.lo < lo or hi < fit.hi
            if is_enlarged and not (fit.lo <= lo - error and hi + error <= fit.hi):
                return math.inf
        return max(errors[id(part)] for part in self.outputs)

    @staticmethod
    def deltas(fits: Mapping[int, PartFit], excess: Mapping[int, float]) -> dict[int, float]:
        """Return the errors of the fits on samples, times `excess`."""
        return {key: fit.error * excess.get(key, 1.0) for key, fit in fits.items()}

    def forwards(self, deltas: Mapping[int, float]) -> dict[int, float]:
        """Return a bound on |computed − exact| for every part, given δ of every head."""
        errors: dict[int, float] = {}
        for part in self.order:
            match part:
                case Source(_):
                    error = 0.0
                case Combination(terms, _):
                    error = math.fsum(c.size * errors[id(inner)] for inner, c in terms)
                case Unary(base, tree):
                    error = self._modulus(base, tree, errors[id(base)]) + deltas[id(part)]
                case _:
                    function, carrier = self.factors[id(part)]
                    own, other = errors[id(function)], errors[id(carrier)]
                    error = self.ranges.size(carrier) * own + (self.ranges.size(function) + own) * other
            errors[id(part)] = error
        return errors

    def backwards(self, errors: Mapping[int, float]) -> dict[int, float]:
        """Return λ of every part: the largest change of an output per unit of error of the part."""
        costs: dict[int, float] = {id(part): 0.0 for part in self.order}
        for output in self.outputs:
            of_output = {id(part): 0.0 for part in self.order}
            of_output[id(output)] = 1.0
            for part in reversed(self.order):
                own = of_output[id(part)]
                match part:
                    case Combination(terms, _):
                        for inner, c in terms:
                            of_output[id(inner)] += own * c.size
                    case Unary(base, tree):
                        error = max(errors[id(base)], 1e-15 * self.ranges.size(base), 1e-300)
                        of_output[id(base)] += own * self._modulus(base, tree, error) / error
                    case Multiply():
                        factors = self.factors[id(part)]
                        for factor, other in (factors, reversed(factors)):
                            of_output[id(factor)] += own * (self.ranges.size(other) + errors[id(other)])
                costs[id(part)] = max(costs[id(part)], own)
        return costs

    def _enlarged(self, base: Part, error: float, tree: Node) -> tuple[float, float]:
        """Return the range of the argument, enlarged by its error if the function is defined there.

        The error is rounded up to a power of two if it may be. So heads can be used again for a slightly larger error.
        """
        lo, hi = self.ranges(base)
        for wider in _wider(error) if error > 0 else ():
            whole = Interval(np.array([[lo - wider]]), np.array([[hi + wider]]))
            if np.isfinite(function_of_t(tree).ranges(whole, violations="infinite").hi).all():
                return lo - wider, hi + wider
        return lo, hi

    def _modulus(self, base: Part, tree: Node, error: float) -> float:
        """Return max |g(t + s) − g(t)| over |s| ≤ error, from the slope if the slope is bounded."""
        if error == 0:
            return 0.0
        for wider in _wider(error):
            steepest = self._steepest(base, tree, wider)
            if math.isfinite(steepest):
                return steepest * error
        # For a function that is steep at an end (√t at 0), take differences at points that are dense at both ends.
        f, (lo, hi) = function_of_one(tree), self.ranges(base)
        steps = np.concatenate([[0.0], np.geomspace(min(error, hi - lo) / 8, hi - lo, 2000)])
        starts = np.clip(np.concatenate([lo + steps, hi - steps]), lo, hi)
        return float(np.abs(f(np.clip(starts + error, lo, hi)) - f(starts)).max())

    def _steepest(self, base: Part, tree: Node, error: float) -> float:
        """Return a bound on |g′| on the range of the argument enlarged by `error`."""
        key = id(base), tree, error
        if key not in self._slopes:
            lo, hi = self.ranges(base)
            lo, hi = lo - error, hi + error
            edges = lo + (hi - lo) * (np.arange(MODULUS_PIECES + 1) / MODULUS_PIECES)
            pieces = Interval(edges[:-1, None], edges[1:, None])
            slopes = function_of_t(tree).ranges_and_gradients(pieces, violations="infinite")[1]
            self._slopes[key] = float(slopes.mag.max())
        return self._slopes[key]


def _wider(error: float) -> tuple[float, ...]:
    """Return the error rounded up to a power of two, and the error itself."""
    return (math.ldexp(1.0, math.frexp(error)[1]), error) if error < 2.0**1000 else (error,)


def _factors(outputs: Sequence[Part]) -> dict[int, tuple[Unary, Part]]:
    """Return, for every product, the factor that its head computes and the factor that its keys carry.

    The head computes a factor that is a function and is used nowhere else. If there is none, the head takes the left
    factor as its query, with the identity as its function.
    """
    order = in_order(outputs)
    uses = Counter(map(id, (*outputs, *(operand for part in order for operand in operands_of(part)))))
    factors: dict[int, tuple[Unary, Part]] = {}
    depth: dict[int, int] = {}
    for part in order:
        below = max((depth[id(operand)] for operand in operands_of(part)), default=0)
        depth[id(part)] = below + isinstance(part, Unary | Multiply)
        if isinstance(part, Multiply):
            once = [f for f in (part.left, part.right) if isinstance(f, Unary) and uses[id(f)] == 1]
            free = [f for f in once if not may_carry(_recipe(f.tree))]
            if free:  # take the deeper one: its head is in the layer of the product
                function = max(free, key=lambda f: depth[id(f)])
                factors[id(part)] = function, part.right if function is part.left else part.left
                depth[id(part)] = below + (len(once) < 2)
            else:
                factors[id(part)] = Unary(part.left, T), part.right
    return factors


# The heads of functions of one number: a gate if there is one, otherwise soft anchors with solved values

EDGE = 1e-7
"""Least distance of an inner sample point from an end, as a share of the interval. Measured with six expressions, two
of them with roots: 1e-8 and 1e-6 give the same networks."""
BETWEEN = 1.01
"""Assumed ratio of the largest error between the points of a sample to the largest error at them. It only guides the
fit: the certificate proves the error of the head."""
NARROW = 1e-9
"""An interval narrower than this share of its larger end is fitted by a constant. Measured with six expressions: 1e-12
and 1e-6 give the same networks."""
MAX_FITS, FINER = 4, 0.5
"""Maximum number of fits of one head, and the share of δ that a further one aims at. Of 320 fits in the corpus three
needed a second fit, and none a third. With 2 or 8 fits, and shares 0.25 or 0.9, six expressions have the same
networks."""


def sample_interval(lo: float, hi: float, count: int = 2001) -> Float[np.ndarray, " points"]:
    """Return equally spaced points, and points that are ever denser towards both ends."""
    edge = (hi - lo) * np.geomspace(EDGE, 0.1, count // 8)
    return np.clip(np.concatenate([np.linspace(lo, hi, count), lo + edge, hi - edge]), lo, hi)


MANY_ANCHORS = 72
"""Largest number of keys before other kinds of keys are tried. At kinks, and for √t at 0 to 1e-6, hundreds of evenly
spaced keys are needed."""
FEW_PART_KEYS = 8
"""Up to this number of keys no others are tried for a function with a kink, since they are hardly fewer and take long
to find."""
NUMBERS_OF_KEYS = (6, 9, 13, 19, 28, 48, MANY_ANCHORS)
"""Numbers of keys that are tried in turn, each about 1.5 times the one before."""
EVEN_KEYS = 1.25
"""Largest ratio of the keys with equally spaced slopes to graded ones. An engine can evaluate all equally spaced keys
with one exponential, so a few more of them are no loss."""
GRADED_TRIAL = 9
"""Number of keys with which graded and equally spaced keys are compared. Measured with 24 functions: where graded keys
have the smaller error, they take fewer keys for errors from 1e-3 to 1e-7, and elsewhere rarely more than one fewer."""
MOST_GRADED = 28
"""Largest number of graded keys whose slopes are fitted. A fit of 28 keys takes up to 0.3 s."""
FALLING = 0.1
"""An error above this share of max |f| does not show how errors fall with the number of keys."""
LEAST_HOPELESS, SLOW, OUT_OF_SIGHT = 19, 4.0, 2.0
"""A search ends early with this number of keys or more, if the error falls more slowly than this power of the keys, and
if it exceeds δ by this factor when it is extrapolated to the most keys. At kinks the power is 1 or 2."""
LEAST_LIMIT = 2.0
"""Least limit on |values|/max|f| of keys with fitted offsets. Measured near the limit of rounding in float32, in three
expressions: 1.5 takes up to a quarter more keys, and 2.5 gives up to 25 % larger best bounds."""
SIMILAR = 1.5
"""Largest ratio of limits on values, and of errors asked for, at which a fit is not repeated."""
FLAT_VALUES = 1.05
"""Largest |value| of constant keys at a kink in float32, relative to max |f|. Keys on one side of a kink have values
that cancel at it, and weights there are off by u·|slope of scores|. Measured for relu(x − y) to 1e-4, in a stock
checkpoint: with 1.05 a bound of 9.6e-5 is proved for 31 keys, with 1.5 it is 1.4e-4 for 9 keys, with 10 it is 4e-3."""
CLOSE_SHARE = 0.05
"""Least error, as a share of δ, at which a large head for another δ is used again. Keys of a smooth function grow with
log 1/δ, so the head has only a few more keys than one made for δ."""


def _recipe(tree: Node) -> GateRecipe | None:
    """Return the gate recipe of f, if the tree is f(t)."""
    return FUNCTIONS[tree.name].gate if isinstance(tree, Call) and tree.arguments == (T,) else None


@dataclass(frozen=True, eq=False)
class _Trial:
    """A fit of p keys for an error of δ, with values up to a limit. None if there are no such values."""

    p: int
    is_even: bool
    delta: float
    limit: float
    fit: PartFit | None

    @property
    def error(self) -> float:
        return math.inf if self.fit is None else self.fit.error

    def has_met(self, delta: float, limit: float) -> bool:
        """Whether this trial is within δ, with values up to this limit."""
        return self.error <= delta and self.limit <= SIMILAR * limit

    def has_missed(self, delta: float, limit: float) -> bool:
        """Whether this trial misses δ, and another with this limit on values would hardly be better."""
        return self.error > delta and self.delta <= SIMILAR * delta and limit <= SIMILAR * self.limit


class HeadsOf:
    """Heads of one function tree(t) on [lo, hi]. Fits are kept, since a composition asks for several errors.

    `is_free` tells whether the keys may carry t.
    """

    def __init__(
        self, tree: Node, lo: float, hi: float, dtype: str, is_free: bool = True, max_value: float = MAX_VALUE
    ) -> None:
        self.tree, self.lo, self.hi, self.dtype, self.is_free = tree, lo, hi, dtype, is_free
        self.max_value = max_value
        self.f = function_of_one(tree)
        self.tried: list[_Trial] = []
        self.large: list[PartFit] = []  # fits with more keys

    def _value_limit(self, delta: float) -> float:
        """Return the largest |values|/size for an error of δ."""
        return min(self.max_value, value_limit(delta, self._points[2], self.dtype))

    def is_within_reach(self, delta: float) -> bool:
        """Whether at most MOST_FUSED equally spaced anchors have an error of at most δ."""
        size = self._points[2]
        if not math.isfinite(size) or max(abs(self.lo), abs(self.hi)) < LEAST_MAGNITUDE[self.dtype]:
            return False
        if self._is_constant:
            return True
        return self._lines.reaches(delta, self._value_limit(delta) * size, MOST_FUSED)

    def within(self, delta: float) -> PartFit | None:
        """Return the cheapest head with an error of at most δ, or None if there is none."""
        if self.tree is T:
            return _identity(self.lo, self.hi, delta)
        if has_two_keys(_recipe(self.tree)) and (self.is_free or not may_carry(_recipe(self.tree))):
            return self._gate(delta)
        few = _fewest(self._smooth(delta, NUMBERS_OF_KEYS), self._gate(delta))
        if few is not None and (few.num_anchors <= FEW_PART_KEYS or not self._kinks):
            return few
        return _fewest(few, self._known(delta) or self._large(delta))

    def _large(self, delta: float) -> PartFit | None:
        """Return a fit that may have many keys."""
        found = self._graded(delta)
        if found is None or found.num_anchors > 2 * MANY_ANCHORS:
            found = _fewest(found, self._many(delta))
        if found is not None:
            self.large.append(found)
        return found

    def fewer(self, fit: PartFit, delta: float) -> PartFit | None:
        """Return a head with fewer keys than `fit` and an error of at most δ, if one is found without a long search."""
        is_large = any(fit.keys is other.keys for other in self.large)
        if has_two_keys(_recipe(self.tree)) or fit.num_anchors <= 1 or is_large:
            return None
        if self.tree is T:
            found: PartFit | None = _identity(self.lo, self.hi, delta)
        else:
            found = _fewest(self._smooth(delta, (fit.num_anchors - 1,)), self._gate(delta))
        return found if found is not None and found.num_anchors < fit.num_anchors else None

    @functools.cached_property
    def _points(self) -> tuple[np.ndarray, np.ndarray, float]:
        """Sample points, the function there, and its size."""
        t = sample_interval(self.lo, self.hi)
        wanted = self.f(t)
        return t, wanted, float(np.abs(wanted).max())

    @property
    def _is_constant(self) -> bool:
        return self.hi - self.lo <= NARROW * max(abs(self.lo), abs(self.hi)) or self._points[2] == 0

    @property
    def _lines(self) -> AxisSections:
        def sections(x: np.ndarray) -> np.ndarray:
            return self.f(x)[:, None]

        return AxisSections(self.lo, self.hi, sections, sections)

    def _smooth(self, delta: float, sizes: Sequence[int]) -> PartFit | None:
        """Return the fewest keys with fitted offsets: some number from `sizes`, or fewer.

        Equally spaced slopes are preferred, unless they take more than EVEN_KEYS times as many keys.
        """
        lo, hi = self.lo, self.hi
        _, wanted, size = self._points
        if not math.isfinite(size):
            return None
        if self._is_constant:
            constant = SoftHead.of_one_variable(np.zeros(1), np.zeros(1), np.array([float(wanted[0])]))
            return PartFit(constant, float(np.abs(wanted - wanted[0]).max()), scale=0.0)
        if max(abs(lo), abs(hi)) < LEAST_MAGNITUDE[self.dtype]:
            return None
        few = tuple(p for p in sizes if p <= MOST_GRADED)
        graded = self._searched(delta, few, is_even=False) if self._is_graded else None
        if graded is not None:
            sizes = (int(EVEN_KEYS * graded.num_anchors),)
        return self._searched(delta, sizes, is_even=True) or graded

    def _searched(self, delta: float, sizes: Sequence[int], is_even: bool) -> PartFit | None:
        """Return the fewest keys of one kind."""

        def gives_up(failed: Sequence[PartFit]) -> bool:
            """Whether the error falls like a power of the number of keys, and too slowly, as at a kink."""
            if len(failed) < 2:
                return False
            (low, before), (high, last) = ((fit.num_anchors, fit.error) for fit in failed[-2:])
            if high < LEAST_HOPELESS or before > FALLING * self._points[2]:
                return False
            rate = math.log(before / last) / math.log(high / low)
            return rate < SLOW and last * (high / sizes[-1]) ** rate > OUT_OF_SIGHT * delta

        return fewest(sizes, lambda p, before: self._quotient(delta, p, is_even), delta, gives_up=gives_up).met

    def _quotient(self, delta: float, p: int, is_even: bool) -> PartFit | None:
        """Return p keys with fitted offsets, or None if as many keys or more are known not to reach δ."""
        t, wanted, size = self._points
        limit = min(self.max_value, max(LEAST_LIMIT, self._value_limit(delta)))
        goal = delta / size / BETWEEN
        for trial in self.tried:
            if trial.is_even == is_even and trial.p == p and trial.has_met(delta, limit):
                return trial.fit
        for trial in self.tried:
            if trial.is_even == is_even and trial.p >= p and trial.has_missed(delta, limit):
                return trial.fit if trial.p == p else None
        found = quotient(lambda x: self.f(x) / size, self.lo, self.hi, p, goal, limit, self.dtype, is_even)
        if found is not None:
            found = replace(found, keys=found.keys.combined(size))
            found = replace(found, error=BETWEEN * float(np.abs(found(t) - wanted).max()))
        self.tried.append(_Trial(p, is_even, delta, limit, found))
        return found

    @functools.cached_property
    def _is_graded(self) -> bool:
        """Whether keys that are denser towards an end fit better than equally spaced ones, before they are moved."""
        size = self._points[2]
        f = unit_function(lambda x: self.f(x) / size, self.lo, self.hi)
        even = even_scores(f, GRADED_TRIAL, 0.0, MAX_VALUE)
        graded = graded_scores(f, GRADED_TRIAL, 0.0, MAX_VALUE)
        return graded[0].error < min([FALLING, *(scores.error for scores in even)])

    def _many(self, delta: float) -> PartFit | None:
        """Return the fewest equally spaced anchors, if MAX_P are enough."""
        t, wanted, size = self._points
        if max(abs(self.lo), abs(self.hi)) < LEAST_MAGNITUDE[self.dtype] or not math.isfinite(size):
            return None
        lines, limit = self._lines, self._value_limit(delta) * size

        def attempt(goal: float, failed: Sequence[PartFit]) -> PartFit | None:
            found = lines.smallest(goal, limit)
            if found is None:
                return None
            on_axis = found.lattice.keys(self.lo, self.hi, "float64")
            head = grid_head([on_axis], found.solve(lines.samples(found.nodes())), "float64")
            fitted = PartFit(head.keys, math.nan, on_axis.scale, on_axis.offset)
            return replace(fitted, error=BETWEEN * float(np.abs(fitted(t) - wanted).max()))

        return tightened(delta, attempt, lambda goal, fit: goal * (FINER * delta / fit.error), delta, MAX_FITS).met

    def _gate(self, delta: float) -> PartFit | None:
        gate = _gate(self.tree, self.lo, self.hi, delta, self.dtype)
        return gate if gate is None or self.is_free or gate.keys.carried is None else None

    def _known(self, delta: float) -> PartFit | None:
        """Return a large head for another δ, if its error is at most δ and at least CLOSE_SHARE·δ."""
        return _fewest(*(fit for fit in self.large if CLOSE_SHARE * delta <= fit.error <= delta))

    @functools.cached_property
    def _kinks(self) -> Sequence[Kink]:
        box = Box(("t",), np.array([self.lo]), np.array([self.hi]))
        return find_kinks(ExpressionTarget(function_of_t(self.tree), box))

    def _graded(self, delta: float) -> PartFit | None:
        """Return a fit whose anchors are dense at kinks, and where the function is singular, such as √t at 0."""
        try:
            most = 10.0 if self.is_free or self.dtype == "float64" else FLAT_VALUES
            keys = graded_keys(self.f, self.lo, self.hi, self._kinks, eps=0.9 * delta, max_value=most)
            fit = PartFit(keys, math.nan)
        except AttncError:
            return None
        t = sample_interval(self.lo, self.hi, 8001)
        error = BETWEEN * float(np.abs(fit(t) - self.f(t)).max())
        return replace(fit, error=error) if error <= delta else None


def _fewest(*fits: PartFit | None) -> PartFit | None:
    return min((fit for fit in fits if fit is not None), key=lambda fit: fit.num_anchors, default=None)


def _identity(lo: float, hi: float, delta: float) -> PartFit | None:
    """Return a head for t on [lo, hi], or None if δ is out of reach: a product's, centred on the interval's middle."""
    middle, size = lo / 2 + hi / 2, max(hi / 2 - lo / 2, 1e-300)
    try:
        gate = product_gate(delta, 1.0, size)
    except OutOfReach:
        return None
    return PartFit(gate.keys.combined(1.0, constant=middle), gate.error, shift=-middle)


def _gate(tree: Node, lo: float, hi: float, delta: float, dtype: str) -> PartFit | None:
    """Return the gate of the function, if it has one that reaches δ with few keys."""
    # δ need not exceed the largest |t|, since relu(t) and |t| do not exceed it.
    delta, recipe = max(min(delta, max(abs(lo), abs(hi))), 1e-300), _recipe(tree)
    is_in_reach = is_economical(recipe) or (isinstance(recipe, Decay) and hi < MAX_EXPONENT)
    try:
        if isinstance(tree, Call) and is_in_reach:
            gate = function_gate(tree.name, delta, hi)
            return PartFit(gate.keys, gate.error)
        if tree in (SQUARE, Product((T, T))) and dtype == "float64":  # its values are ten times as large
            # t² = (t − m)² + 2mt − m² about the middle m. The keys carry t, and the affine function costs nothing.
            middle = lo / 2 + hi / 2
            gate = square_gate(delta, max(hi - middle, middle - lo, 1e-300))
            return PartFit(gate.keys.shifted(-middle).combined(1.0, 2 * middle, -(middle**2)), gate.error)
    except AttncError:
        pass
    return None


def function_of_one(tree: Node) -> Function:
    """Return tree(t) as a function of arrays. It is NaN or inf where it is not defined."""
    f = function_of_t(tree)
    return lambda t: f(t[:, None])[:, 0]


def _suits(target: Target, request: Request) -> bool:
    """Accept continuous functions, unless constants are given for Python code: then there is no expression."""
    return request.is_plain(target) and target.given is None


COMPOSE = Construction(NAME, for_eps(compose), EXPRESSION, _suits, has_own_functions=True)
