"""numpy's own expression, numpy's Chebyshev series, and SciPy's interpolation on nodes of a grid or scattered."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from bench_functions import Function
from numpy.polynomial import chebyshev
from protocol import Evaluate, Fitted, Job, serve, smallest
from scipy.interpolate import RBFInterpolator, RectBivariateSpline, RegularGridInterpolator, make_interp_spline

SIZES = [round(6 * 1.2**k) for k in range(30)]
"""Nodes per axis, from 6 to about 1,000: each is a fifth more than the one before."""
SCATTERED = [250 * 2**k for k in range(5)]
"""Scattered nodes: solving for 4,000 takes seconds, and eight times as long for twice as many."""


def fit(job: Job, target: Function) -> Iterator[Fitted]:
    lo, hi = target.ends
    d = len(lo)
    yield Fitted("numpy, the expression", None, 0, 0.0, target, threads=1)

    def values(axes: list[np.ndarray]) -> np.ndarray:
        mesh = np.meshgrid(*axes, indexing="ij")
        return target(np.stack([x.ravel() for x in mesh], axis=1)).reshape(mesh[0].shape)

    def uniform(n: int) -> list[np.ndarray]:
        return [np.linspace(a, b, n) for a, b in zip(lo, hi, strict=True)]

    def series(n: int) -> tuple[Evaluate, int]:
        nodes = np.cos(np.pi * (np.arange(n) + 0.5) / n)
        matrix = np.linalg.inv(chebyshev.chebvander(nodes, n - 1))
        coefficients = values([a + (b - a) * (nodes + 1) / 2 for a, b in zip(lo, hi, strict=True)])
        for _ in range(d):  # the first axis is solved and becomes the last
            coefficients = np.moveaxis(np.tensordot(matrix, coefficients, axes=1), 0, -1)
        scale, evaluate = 2 / (hi - lo), chebyshev.chebval if d == 1 else chebyshev.chebval2d
        return lambda points: evaluate(*((points - lo) * scale - 1).T, coefficients), coefficients.size

    def cubic(n: int) -> tuple[Evaluate, int]:
        axes = uniform(n)
        if d == 1:
            spline = make_interp_spline(axes[0], values(axes), k=3)
            return lambda points: spline(points[:, 0]), n
        return RegularGridInterpolator(axes, values(axes), method="cubic", solver_args={"rtol": 1e-13}), n**d

    def quintic(n: int) -> tuple[Evaluate, int]:
        axes = uniform(n)
        if d == 1:
            spline = make_interp_spline(axes[0], values(axes), k=5)
            return lambda points: spline(points[:, 0]), n
        surface = RectBivariateSpline(*axes, values(axes), kx=5, ky=5)
        return lambda points: surface.ev(points[:, 0], points[:, 1]), n**2

    def scattered(n: int) -> tuple[Evaluate, int]:
        nodes = target.sample(n, seed=2)
        return RBFInterpolator(nodes, target(nodes), kernel="cubic"), n * (d + 1)

    if d > 2:
        yield from smallest("SciPy, radial basis functions", job, target, SCATTERED, scattered)
        return
    series_sizes = [n for n in SIZES if d == 1 or n <= 150]  # chebval2d holds points × n numbers
    yield from smallest("numpy, Chebyshev series", job, target, series_sizes, series)
    yield from smallest("SciPy, cubic", job, target, SIZES, cubic)
    yield from smallest("SciPy, quintic", job, target, SIZES, quintic)


if __name__ == "__main__":
    serve(fit)
