"""The peers that attnc is measured against: SciPy's interpolation, and trained networks."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from attnc.targets.target import Target

Peer = Callable[[], tuple[Callable[[np.ndarray], np.ndarray], int, int | None]]
MAX_NODES = 1025


def _axes(target: Target, n: int) -> list[np.ndarray]:
    return [np.linspace(lo, hi, n) for lo, hi in zip(target.box.lo, target.box.hi, strict=True)]


def _samples(target: Target, axes: list[np.ndarray]) -> np.ndarray:
    mesh = np.meshgrid(*axes, indexing="ij")
    return target(np.stack([x.ravel() for x in mesh], axis=1))[:, 0].reshape(mesh[0].shape)


def _smallest(target: Target, eps: float, fit: Callable[[int], Callable[[np.ndarray], np.ndarray]]) -> int | None:
    """The fewest nodes per axis, in steps of a fifth, for which the error at a sample is ≤ eps."""
    points = target.box.lo + np.random.default_rng(1).random((20_000, target.box.d)) * target.box.widths
    wanted = target(points)[:, 0]
    n = 6
    while n <= MAX_NODES:
        if np.abs(fit(n)(points) - wanted).max() <= eps:
            return n
        n = max(n + 1, int(1.2 * n))
    return None


def cubic_grid(target: Target, eps: float) -> Peer | None:
    """RegularGridInterpolator, cubic, on the coarsest uniform grid that reaches eps."""
    from scipy.interpolate import RegularGridInterpolator

    if target.box.d > 3:
        return None

    def fit(n: int) -> Callable[[np.ndarray], np.ndarray]:
        axes = _axes(target, n)
        return RegularGridInterpolator(axes, _samples(target, axes), method="cubic")

    n = _smallest(target, eps, fit)
    return None if n is None else lambda: (fit(n), n**target.box.d, None)


def quintic_spline(target: Target, eps: float) -> Peer | None:
    """RectBivariateSpline, k = 5, in two variables."""
    from scipy.interpolate import RectBivariateSpline

    if target.box.d != 2:
        return None

    def fit(n: int) -> Callable[[np.ndarray], np.ndarray]:
        x, y = _axes(target, n)
        spline = RectBivariateSpline(x, y, _samples(target, [x, y]), kx=5, ky=5)
        return lambda points: spline.ev(points[:, 0], points[:, 1])

    n = _smallest(target, eps, fit)
    return None if n is None else lambda: (fit(n), n**2, None)


def trained_mlp(target: Target, seconds: float) -> tuple[Callable[[np.ndarray], np.ndarray], int, int | None]:
    """Two hidden layers of 64 GELU units, Adam, for as long as given."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    d = target.box.d
    model = nn.Sequential(nn.Linear(d, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    return _trained(target, model, seconds), sum(p.numel() for p in model.parameters()), None


def trained_attention(target: Target, seconds: float) -> tuple[Callable[[np.ndarray], np.ndarray], int, int | None]:
    """One head over 256 keys: slopes, offsets and values are all learned."""
    import torch
    from torch import nn

    torch.manual_seed(0)

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores, self.values = nn.Linear(target.box.d, 256), nn.Linear(256, 1, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.values(torch.softmax(3 * self.scores(x), dim=-1))

    model = Head()
    return _trained(target, model, seconds), sum(p.numel() for p in model.parameters()), 256


def _trained(target: Target, model: object, seconds: float) -> Callable[[np.ndarray], np.ndarray]:
    import torch

    assert isinstance(model, torch.nn.Module)
    lo, widths = target.box.lo, target.box.widths

    def scaled(points: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(2 * (points - lo) / widths - 1, dtype=torch.float32)

    rng = np.random.default_rng(0)
    points = lo + rng.random((50_000, target.box.d)) * widths
    x, y = scaled(points), torch.as_tensor(target(points), dtype=torch.float32)
    mean, size = y.mean(), y.std()
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    start = time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds:
        for group in optimiser.param_groups:
            group["lr"] = 3e-3 * max(0.01, 1 - spent / seconds)
        chosen = torch.as_tensor(rng.integers(0, len(x), 1024))
        loss = ((model(x[chosen]) - (y[chosen] - mean) / size) ** 2).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    def evaluate(points: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return (model(scaled(points)) * size + mean).numpy()[:, 0].astype(np.float64)

    return evaluate
