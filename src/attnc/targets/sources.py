"""Sources of targets: text, callables and torch modules become a Target."""

from __future__ import annotations

import math
from typing import Any

from attnc.errors import DomainError, InputError
from attnc.targets.box import Box, BoxLike
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.expression import Expression
from attnc.targets.function_target import CallableTarget
from attnc.targets.linear import ReLUNetwork
from attnc.targets.target import Target


def as_target(
    source: Any,
    box: BoxLike | None = None,
    lipschitz: float | None = None,
    p: float = math.inf,
    hessian_bound: float | None = None,
) -> Target:
    """Return the target that `attnc.compile` makes from a source.

    Parameters
    ----------
    source : str, callable, torch.nn.Sequential or Target
        An expression; Python code that maps (batch, d) to (batch,) or (batch, k); or Linear and ReLU layers in turn.
    box : mapping or sequence
        The range of every variable, {name: (lo, hi)} or pairs in the order of the variables. A Target has its own.
    lipschitz, hessian_bound : float, optional
        Constants of a callable, taken on trust: a Lipschitz constant from the 2-norm of all inputs to the largest
        output, and a bound of every |∂²f/∂x_i²|. For other sources they are derived.
    p : float
        The norm of the error: ∞, or a number ≥ 1, which allows jumps.

    Returns
    -------
    Target
        The function with its box.

    Raises
    ------
    InputError
        If the source, the box and the constants do not fit each other.
    ExpressionError
        If the text of an expression cannot be read.
    DomainError
        If the expression may jump and p is ∞.

    Examples
    --------
    >>> import attnc
    >>> attnc.as_target("sin(x)", {"x": (-1, 1)}).describe()
    'sin(x)'
    """
    given = {"lipschitz": lipschitz, "hessian_bound": hessian_bound}
    stated = [name for name, value in given.items() if value is not None]
    if isinstance(source, Target):
        for name in [*(["box"] if box is not None else []), *stated]:
            raise InputError(
                f"{name}: the target has its own; omit this argument, or state it when you make the target"
            )
        return source
    if not isinstance(source, str) and not callable(source):
        raise InputError(f"cannot compile a {type(source).__name__}: give an expression, a callable or a Target")
    if box is None:
        raise InputError("box: state the domain, e.g. box={'x': (-3, 3)}")
    if ("torch.nn.modules.container", "Sequential") in [
        (kind.__module__, kind.__name__) for kind in type(source).__mro__
    ]:
        if stated:
            raise InputError(f"{stated[0]}: a network's constants are derived, not given; leave it out")
        return ReLUNetwork.of_torch(source, box)
    if not isinstance(source, str):
        return CallableTarget(source, Box.parse(box), lipschitz, hessian_bound)
    if stated:
        raise InputError(f"{stated[0]}: an expression's constants are derived, not given; leave it out")
    expression = Expression.parse(source)
    if not expression.variables:
        raise InputError(f"{source!r} has no variables: it is a constant, and there is nothing to compile")
    if expression.discontinuous and p == math.inf:
        jumps = " and ".join(expression.discontinuous)
        raise DomainError(
            f"{source!r} uses {jumps}, which may jump: no continuous network is close to a jump everywhere. "
            "Measure the error in an L_p norm instead: norm=2 (on the command line: --norm 2)."
        )
    return ExpressionTarget(expression, Box.parse(box, expression.variables))
