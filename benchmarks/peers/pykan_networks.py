"""pykan: Kolmogorov–Arnold networks, in float64, fitted by its own L-BFGS on grids that grow during the training."""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from collections.abc import Iterator

import numpy as np
import torch
from bench_functions import CREASE, RUNGE, TEN, TWISTED, WAVE, Function
from kan import KAN
from protocol import Fitted, Job, serve

GRIDS = (5, 10, 20, 40)
"""Numbers of intervals of a spline, refined one after the other, as pykan's own examples do."""
STARTS = (3, 5, 3, 5)
"""Orders of the splines of the random starts. pykan's default is 3. Many starts end in poor minima with either."""
NUM_TRAINED, NUM_HELD = 2000, 1000
PATIENCE = 300
"""Evaluations of the loss without a gain of a hundredth, after which the training of a grid ends."""
STRUCTURES: dict[str, tuple[list[int | list[int]], int]] = {
    WAVE.text: ([2, 1], 2),
    TWISTED.text: ([2, [0, 1], 1], 2),
    CREASE.text: ([2, 1, 1], 2),
    RUNGE.text: ([1, 1], 2),
    TEN.text: ([10, [0, 4], 1], 3),
}
"""The smallest shape that represents each function, and the number of factors of its products: [a, m] are a sums and
m products. pykan has to be told both."""


def fit(job: Job, target: Function) -> Iterator[Fitted]:
    torch.set_default_dtype(torch.float64)
    d, threads = len(target.box), torch.get_num_threads()
    shapes = {"pykan, shape of the function": STRUCTURES[target.text], "pykan, d–(2d+1)–1": ([d, 2 * d + 1, 1], 2)}
    lo, hi = target.ends
    scale = 2 / (hi - lo)

    def scaled(points: np.ndarray) -> torch.Tensor:
        return torch.as_tensor((points - lo) * scale - 1)

    train, held = (target.sample(count, seed) for count, seed in ((NUM_TRAINED, 2), (NUM_HELD, 4)))
    mean, spread = target(train).mean(), target(train).std()
    data = {
        "train_input": scaled(train),
        "train_label": torch.as_tensor(target(train) - mean)[:, None] / spread,
        "test_input": scaled(held),
        "test_label": torch.as_tensor(target(held) - mean)[:, None] / spread,
    }
    for name, (shape, arity) in shapes.items():
        torch.set_num_threads(1)  # such small products are slower with more
        start = time.perf_counter()
        model = trained(shape, arity, data, job.seconds / len(shapes))
        built = time.perf_counter() - start
        torch.set_num_threads(threads)
        size = sum(each.numel() for each in model.parameters() if each.requires_grad)

        @torch.no_grad()
        def evaluate(points: np.ndarray, model: KAN = model) -> np.ndarray:
            return model(scaled(points)).numpy() * spread + mean

        yield Fitted(name, None, size, built, evaluate, threads)


def trained(shape: list[int | list[int]], arity: int, data: dict[str, torch.Tensor], seconds: float) -> KAN:
    """Return the network with the least error at the held points.

    The coarsest grid starts from several random weights, and the best of them is refined. Every training has the same
    time.
    """
    start, best, least = time.perf_counter(), None, np.inf
    for number in range(num_trainings := len(STARTS) + len(GRIDS) - 1):
        if number < len(STARTS):
            model = KAN(list(shape), GRIDS[0], STARTS[number], arity, seed=number, auto_save=False)
        else:
            best.save_act = True  # `speed` turns it off, and refining starts from the activations
            best.get_act(data["train_input"])
            model = best.refine(GRIDS[number - len(STARTS) + 1])
        model.speed()
        descend(model, data, start + seconds * (number + 1) / num_trainings, update_grid=number < len(STARTS))
        with torch.no_grad():
            error = float((model(data["test_input"]) - data["test_label"]).abs().max())
        if best is None or error < least:
            best, least = model, error
    return best


def descend(model: KAN, data: dict[str, torch.Tensor], end: float, *, update_grid: bool) -> None:
    """Train until the time is over or the loss stays the same, and keep the weights of least loss.

    pykan looks at no clock, so its loss does, and ends the training by StopIteration.
    """
    least, kept, calls, gained = np.inf, model.state_dict(), 0, 0

    def loss(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        nonlocal least, kept, calls, gained
        value = ((found - wanted) ** 2).mean()
        if len(wanted) != NUM_TRAINED:
            return value
        calls += 1
        if (now := float(value.detach())) < least:
            gained = calls if now < 0.99 * least else gained
            least, kept = now, {name: each.clone() for name, each in model.state_dict().items()}
        if time.perf_counter() > end or calls > gained + PATIENCE:
            raise StopIteration
        return value

    quiet = io.StringIO()
    with contextlib.suppress(StopIteration), contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        model.fit(data, opt="LBFGS", steps=10**6, loss_fn=loss, update_grid=update_grid)
    model.load_state_dict(kept)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # pykan writes files where it runs
        serve(fit)
