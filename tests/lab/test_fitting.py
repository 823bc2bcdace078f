"""Training in one batch of runs is the same as training every run alone; the search and second-order steps help."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from attnc_lab import fitting  # noqa: E402
from attnc_lab.experiment import Effort, Interval, Status, Verdict  # noqa: E402
from attnc_lab.fitting import Budget, fit  # noqa: E402


class Head(torch.nn.Module):
    """A head with free scores and values, and its temperature as a logarithm."""

    def __init__(self, num_keys: int = 6) -> None:
        super().__init__()
        self.slope, self.offset, self.value = (torch.nn.Parameter(torch.randn(num_keys)) for _ in range(3))
        self.log_beta = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return torch.softmax(torch.exp(self.log_beta) * (x * self.slope + self.offset), -1) @ self.value[:, None]


def drawn(shape, generator):
    x = 2 * torch.rand((*shape, 1), generator=generator, dtype=torch.float64) - 1
    return x, torch.sin(3 * x)


def held_out():
    x, y = drawn((1, 400), torch.Generator().manual_seed(99))
    return x[0], y[0]


def test_a_batch_of_runs_is_trained_as_each_run_alone() -> None:
    """Against torch's own Adam, with the same start, batches and schedule."""
    budget, seed = Budget(30, seeds=3, rates=(0.03,), points=16), 4
    found = fit(Head, drawn, held_out(), budget, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    batches = [drawn((3, 16), generator) for _ in range(30)]
    for trial in range(3):
        torch.manual_seed(seed * 1_000_003 + trial)
        model = Head().double()
        adam = torch.optim.Adam(model.parameters(), lr=1.0)
        for step, (x, y) in enumerate(batches):
            rise = min(1.0, (step + 1) / (fitting.WARM_UP * 30))
            adam.param_groups[0]["lr"] = 0.03 * rise * 0.5 * (1 + math.cos(math.pi * step / 30))
            adam.zero_grad()
            ((model(x[trial]) - y[trial]) ** 2).mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), fitting.LARGEST_GRADIENT)
            adam.step()
        x, y = held_out()
        alone = float(((model(x) - y) ** 2).mean().detach())
        assert found.losses[trial] == pytest.approx(alone, rel=1e-4)


def test_the_search_finds_a_rate_and_second_order_steps_help() -> None:
    plain = fit(Head, drawn, held_out(), Budget(200, seeds=2, rates=(1e-6, 3e-2)), seed=1)
    assert plain.rate == 3e-2
    assert plain.searched[3e-2] < plain.searched[1e-6]
    refined = fit(Head, drawn, held_out(), Budget(200, seeds=2, rates=(3e-2,), second_order=50), seed=1)
    assert (refined.losses <= plain.losses * (1 + 1e-9)).all()
    assert refined.losses.min() < 0.05 * plain.losses.min()
    row = refined.row(1)
    assert (row["trial"], row["steps"], row["second_order"], row["weights"]) == (1, 200, 50, 19)
    assert row["loss"] == refined.losses[1]


def test_the_same_seed_gives_the_same_models() -> None:
    budget, seen = Budget(20, seeds=2, rates=(1e-2, 1e-1), second_order=2), []

    def watch(step, models):
        seen.append((step, len(models)))

    first, second = (fit(Head, drawn, held_out(), budget, seed=7, watch=watch, num_watched=4) for _ in range(2))
    assert np.array_equal(first.losses, second.losses)
    assert seen == 2 * [(step, 2) for step in (0, 5, 10, 15, 20)]


def test_a_run_that_diverges_loses() -> None:
    found = fit(Head, drawn, held_out(), Budget(40, seeds=2, rates=(1e-2, 1e300)), seed=0)
    assert found.rate == 1e-2
    assert np.isfinite(found.losses).all()


def test_attention_of_torch_and_labels() -> None:
    """Modules of torch train as well, and any loss of outputs and labels."""

    class Tokens(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)
            self.last = torch.nn.Linear(4, 2)

        def forward(self, x):
            return self.last(self.attention(x, x, x, need_weights=False)[0].mean(-2))

    def labelled(shape, generator):
        x = torch.randn((*shape, 3, 4), generator=generator)
        return x, (x[..., 0].mean(-1) > 0).long()

    x, y = labelled((1, 200), torch.Generator().manual_seed(1))
    found = fit(
        Tokens,
        labelled,
        (x[0], y[0]),
        Budget(150, seeds=2, rates=(3e-2,), points=64),
        seed=0,
        loss=torch.nn.functional.cross_entropy,
    )
    assert (found.losses < 0.4).all()  # chance: 0.69


def test_intervals_and_labels() -> None:
    logs = np.log([1.0, 2.0, 4.0])
    found = Interval.of([1.0, 2.0, 4.0])
    reach = 4.302652729911275 * logs.std(ddof=1) / math.sqrt(3)  # Student's t for two degrees of freedom
    assert found == pytest.approx((2.0, 2 * math.exp(-reach), 2 * math.exp(reach)))
    verdict = Verdict("", Status.NOT_REACHED, "", {}, effort=Effort(4000, 5, 0.0481, "MSE"))
    assert verdict.label == "not reached by this training (4,000 steps, 5 seeds, best MSE 0.0481)"
    for status in (Status.CONSTANT, Status.NOT_REACHED):
        with pytest.raises(AssertionError):
            Verdict("", status, "", {})
