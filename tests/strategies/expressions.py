"""Random expressions as text: `expressions(names)` draws text that parses and is defined and moderate on [−4, 4]^d."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

SMOOTH = (
    "sin({})",
    "cos({})",
    "tanh({})",
    "atan({})",
    "sigmoid({})",
    "erf({})",
    "gelu({})",
    "silu({})",
    "softplus({})",
)
SAFE = (
    "exp(-abs({}))",
    "exp(tanh({}))",
    "sqrt(1 + ({})**2)",
    "log(2 + sin({}))",
    "1/(1.5 + cos({}))",
    "(2 + tanh({}))**0.5",
    "2**sin({})",
    "asin(0.9*sin({}))",
    "acos(0.9*cos({}))",
    "tan(sin({}))",
    "sinh(tanh({}))",
    "cosh(sin({}))",
    "(2 + cos({}))**-2",
)
KINKED = ("abs({})", "relu({})", "clip({}, -1, 0.75)", "sqrt(abs({}))")
BINARY = ("{} + {}", "{} - {}", "({})*({})", "({} + {})", "({} - {})*0.5", "-({}) + {}")
BINARY_KINKED = ("min({}, {})", "max({}, {}, 0.1)")


def leaves(names: Sequence[str]) -> st.SearchStrategy[str]:
    """Variables mostly, and numbers."""
    numbers = st.one_of(
        st.integers(0, 9).map(str),
        st.floats(0, 5, allow_nan=False).map(lambda x: f"{x:.3f}"),
        st.sampled_from(["pi", "e", "0.1", "1e-3", ".5", "2."]),
    )
    return st.one_of(st.sampled_from(list(names)), st.sampled_from(list(names)), numbers) if names else numbers


@st.composite
def expressions(draw: st.DrawFn, names: Sequence[str] = ("x", "y"), max_depth: int = 4, smooth: bool = False) -> str:
    """Text over the given variables, at most `max_depth` operations deep; without kinks if `smooth`."""
    if max_depth == 0 or draw(st.integers(0, 5)) == 0:
        return draw(leaves(names))
    inner = expressions(names, max_depth - 1, smooth)
    if draw(st.booleans()):
        template = draw(st.sampled_from(BINARY if smooth else BINARY + BINARY_KINKED))
        return template.format(draw(inner), draw(inner))
    template = draw(st.sampled_from(SMOOTH + SAFE if smooth else SMOOTH + SAFE + KINKED))
    if smooth and template == "exp(-abs({}))":
        template = "exp(-({})**2)"
    return template.format(draw(inner))
