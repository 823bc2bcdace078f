"""nnsight, as installed by `make test-lens`, wraps the torch modules of attnc."""

from __future__ import annotations

import numpy as np
import pytest

import attnc

torch = pytest.importorskip("torch")


def modules() -> dict[str, tuple[torch.nn.Module, torch.Tensor]]:
    net = attnc.compile("sin(x*y)+tanh(sin(x))", {"x": (-1, 1), "y": (-1, 1)}, 1e-4)
    points = torch.tensor(np.random.default_rng(0).uniform(-1, 1, (5, 2)))
    mlp = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.GELU(), torch.nn.Linear(3, 1)).double()
    unfolded = net.to_torch(form="unfolded")
    return {
        "folded": (net.to_torch(), points),
        "unfolded": (unfolded, points),
        "converted": (attnc.convert(mlp, eps=1e-4)[0], points),
    }


@pytest.mark.parametrize("name", ["folded", "unfolded", "converted"])
def test_no_submodule_has_a_name_of_nnsight(name: str) -> None:
    module, _ = modules()[name]
    taken = {"input", "inputs", "output", "source", "trace", "scan", "save", "skip", "next"}
    names = {part for full, _ in module.named_modules() for part in full.split(".")}
    assert not names & taken


@pytest.mark.lens
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["folded", "unfolded", "converted"])
def test_nnsight_traces_a_module(name: str) -> None:
    from nnsight import NNsight

    module, points = modules()[name]
    wanted = module(points)
    wrapped = NNsight(module)
    with wrapped.trace(points):
        outputs = wrapped.output.save()
    assert (outputs == wanted).all()


@pytest.mark.lens
@pytest.mark.filterwarnings("ignore")
def test_nnsight_sees_and_changes_a_stage() -> None:
    from nnsight import NNsight

    module, points = modules()["folded"]
    wrapped = NNsight(module)
    first, last = (getattr(wrapped.stages, name) for name in list(module.stages))
    with wrapped.trace(points):
        seen = first.output.save()
        last.output[:] = 0
        outputs = wrapped.output.save()
    assert seen.shape[1] == len(points)
    assert (outputs == module.readout.constant).all()
