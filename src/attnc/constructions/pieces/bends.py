"""Where a function given by samples bends: second differences that do not fall like the square of the step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attnc.constructions.unary.keys import Function

CELLS = 2048
SMOOTH = 1.7
"""Second differences of a smooth function fall like t²."""


def bends(f: Function, lo: float, hi: float) -> Iterator[tuple[float, float]]:
    """(x, α) where second differences stand out among their neighbours and fall with the step t like t^α, α < 1.7."""
    x = np.linspace(lo, hi, CELLS + 1)
    values = f(x)
    scale = float(np.abs(values).max()) or 1.0
    bend = np.abs(values[2:] - 2 * values[1:-1] + values[:-2]).max(axis=1)
    noise = 2.0**-46 * scale
    h = (hi - lo) / CELLS
    for i in range(len(bend)):
        around = bend[max(0, i - 12) : i + 13]
        if bend[i] > noise and bend[i] == around.max() and bend[i] > 6 * np.median(around):
            place = _zoom(f, float(x[i]), float(x[i + 2]), noise)
            if not lo + h / 4 <= place <= hi - h / 4:
                continue  # the ends are asked about below
            order = _order(f, (place, -1.0, 1.0), h, noise)
            if order < SMOOTH:
                yield place, order
    for place, first, last in ((lo, 0.0, 2.0), (hi, -2.0, 0.0)):
        order = _order(f, (place, first, last), h, noise)
        if order < SMOOTH:
            yield place, order


def _zoom(f: Function, lo: float, hi: float, noise: float) -> float:
    """The middle of the smallest interval that still bends more than rounding does."""
    for _ in range(40):
        x = np.linspace(lo, hi, 17)
        values = f(x)
        bend = np.abs(values[2:] - 2 * values[1:-1] + values[:-2]).max(axis=1)
        i = int(np.argmax(bend))
        if bend[i] <= 4 * noise or not x[i] < x[i + 1] < x[i + 2]:
            break
        lo, hi = float(x[i]), float(x[i + 2])
    return 0.5 * (lo + hi)


def _order(f: Function, where: tuple[float, float, float], h: float, noise: float) -> float:
    """α of |second difference| ~ t^α as t → 0, between x + first·t and x + last·t; 2 where it is lost in rounding."""
    x, first, last = where
    t = h * 4.0 ** -np.arange(1.0, 8.0)
    size = np.abs(f(x + first * t) - 2 * f(x + 0.5 * (first + last) * t) + f(x + last * t)).max(axis=1)
    count = int(np.argmin(np.append(size > 64 * noise, False)))
    return float(np.polyfit(np.log(t[:count]), np.log(size[:count]), 1)[0]) if count >= 3 else 2.0
