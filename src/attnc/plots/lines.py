"""Lines through the box along which a network is drawn: a variable, a cut, the input of a truncation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from attnc.plots.style import number
from attnc.plots.subject import Clip, PlotSubject
from attnc.wording import one_line

if TYPE_CHECKING:
    from jaxtyping import Float

    from attnc.targets.box import Box

BEYOND = 0.3
"""A truncation to [a, b] is shown this share of b − a beyond both ends."""
MANY_VARIABLES = 64
"""Variables, from the first on, among which a cut is chosen: each costs 33 evaluations."""
NAMED_VARIABLES = 5
"""Most other variables whose values the note on a cut lists: more would not fit on its line."""
SHOWN_REACH = 8.0
"""Length of an infinite range that is shown on either side of 0: the usual activations are straight beyond it."""
ELSEWHERE, LITTLE = 0.75, 0.02
"""If the output changes along cuts through the middle of the box by less than the share LITTLE of its spread, cuts
through the share ELSEWHERE of each interval are tried."""


@dataclass(frozen=True, eq=False)
class PlotLine:
    """The points origin + t·direction for t from lo to hi, inside the box; the axis goes from shown[0] to shown[1]."""

    name: str  # of t
    lo: float
    hi: float
    origin: Float[np.ndarray, " d"]
    direction: Float[np.ndarray, " d"]
    box: Box
    note: str = ""  # which part of the box the picture leaves out, if any
    shown: tuple[float, float] | None = None

    def at(self, t: Float[np.ndarray, " points"]) -> Float[np.ndarray, "points d"]:
        return np.clip(self.origin + t[:, None] * self.direction, self.box.lo, self.box.hi)

    def share(self, s: Float[np.ndarray, " points"]) -> Float[np.ndarray, "points d"]:
        """The points at shares of the line, from s = 0 at lo to s = 1 at hi."""
        return self.at(self.lo + s * (self.hi - self.lo))

    @property
    def axis(self) -> tuple[float, float]:
        return self.shown or (self.lo, self.hi)


def along_variable(box: Box, variable: int, note: str = "", share: float = 0.5) -> PlotLine:
    """The line along one variable; the others stay in the middle of their intervals, or at another share of them."""
    if not box.is_bounded:  # only boxes of one variable are infinite, and a part is drawn
        line = along_variable(box.core(SHOWN_REACH), 0)
        return replace(line, note=f"drawn from {number(line.lo)} to {number(line.hi)}, a part of {box}")
    origin, direction = (1 - share) * box.lo + share * box.hi, np.zeros(box.d)
    origin[variable], direction[variable] = 0.0, 1.0
    lo, hi = float(box.lo[variable]), float(box.hi[variable])
    return PlotLine(one_line(box.names[variable]), lo, hi, origin, direction, box, note)


def cut(subject: PlotSubject) -> PlotLine:
    """The line along the variable that changes the shown outputs most."""
    box = subject.network.box
    corners = np.random.default_rng(0).random((33, box.d))
    spread = np.ptp(subject.network_at(box.lo + corners * box.widths)[:, subject.shown_outputs], axis=0).max()
    for share in (0.5, ELSEWHERE):
        lines = [along_variable(box, i, share=share) for i in range(min(box.d, MANY_VARIABLES))]
        points = np.concatenate([line.at(np.linspace(line.lo, line.hi, 33)) for line in lines])
        values = subject.network_at(points)[:, subject.shown_outputs].reshape(len(lines), 33, -1)
        changes = np.ptp(values, axis=1).max(axis=1)
        if changes.max() > LITTLE * spread:
            break
    best = int(np.argmax(changes > changes.max() * (1 - 1e-6)))
    others = [
        f"{one_line(name)} = {number(place)}"
        for i, (name, place) in enumerate(zip(box.names, lines[best].origin, strict=True))
        if i != best
    ]
    left_out = f", … ({len(others) - NAMED_VARIABLES} more)" if len(others) > NAMED_VARIABLES else ""
    at = ", ".join(others[:NAMED_VARIABLES]) + left_out
    unread = subject.network.construction.startswith("truncated_linear") and subject.clip is None
    why = "   (w·x + t cannot be read from these weights: give target=)" if unread else ""
    return replace(lines[best], note=f"a cut along {one_line(box.names[best])} at {at}{why}")


def ridge_lines(subject: PlotSubject) -> list[tuple[int, PlotLine]] | None:
    """(output, line) of every shown output that is a truncated linear function; None if the chosen one is not."""
    if subject.clip is None:
        return None
    found = [(output, _ridge(subject, subject.clip, output)) for output in subject.shown_outputs]
    lines = [(output, line) for output, line in found if line is not None]
    return lines if any(output == subject.output for output, _ in lines) else None


def _ridge(subject: PlotSubject, clip: Clip, output: int) -> PlotLine | None:
    """The line of t = w·x + t_i, from the corner of the box where it is least to the one where it is largest."""
    box, w = subject.network.box, clip.W[output]
    middle = box.lo / 2 + box.hi / 2
    corner = np.sign(w) * (box.hi - middle)
    reach, centre = float(w @ corner), float(w @ middle + clip.t[output])
    if not reach > 0:
        return None
    wanted = clip.a - BEYOND * (clip.b - clip.a), clip.b + BEYOND * (clip.b - clip.a)
    lo, hi = max(wanted[0], centre - reach), min(wanted[1], centre + reach)
    if lo >= hi:  # the box does not touch the range
        lo, hi, wanted = centre - reach, centre + reach, (centre - reach, centre + reach)
    is_one = subject.num_outputs == 1
    moved = "x goes" if is_one else "each output over its own w·x + t; x goes"
    beyond = "" if (lo, hi) == wanted else "; grey: what the box does not reach"
    name = "u = w·x + t" if is_one else f"u = w·x + t of {subject.entry(output)}"
    origin, direction = middle - centre / reach * corner, corner / reach
    return PlotLine(name, lo, hi, origin, direction, box, f"{moved} from corner to corner of the box{beyond}", wanted)
