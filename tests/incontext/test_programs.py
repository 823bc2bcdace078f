"""In-context programs travel: they are saved, loaded and exported small, and refuse prompts outside of their domain."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnc.engines.prompt import run
from attnc.errors import FileError, InputError

pytest.importorskip("sklearn")
import attnc
from attnc import incontext as ours

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3))
Y = X @ [1.0, -2.0, 0.5] + 0.1 * RNG.normal(size=40)
MODELS: dict[str, Callable[[], Any]] = {
    "Ridge": lambda: ours.Ridge(method="chebyshev", max_rows=50).fit(X, Y),
    "safeguarded": lambda: ours.Ridge(method="plain", safeguard=True).fit(X, Y),
    "Newton": lambda: ours.Ridge(max_rows=50).fit(X, Y),
    "Lasso": lambda: ours.Lasso(0.1).fit(X, Y),
    "Huber": lambda: ours.Huber().fit(X, Y),
    "Logistic": lambda: ours.LogisticRegression().fit(X, Y > 0),
    "Poisson": lambda: ours.PoissonRegressor().fit(X, np.round(np.exp(Y / 3))),
    "KernelRidge": lambda: ours.KernelRidge().fit(X, Y),
    "neighbours": lambda: ours.KNeighborsRegressor(n_neighbors=3).fit(X, Y),
}
FITTED: dict[str, Any] = {}


def fitted(name: str) -> Any:
    if name not in FITTED:
        FITTED[name] = MODELS[name]()
    return FITTED[name]


def inputs(model: Any) -> list[np.ndarray]:
    first = getattr(model, "start_", np.zeros(model.program_.input_shapes[0]))
    return [first, model.prompt_][-len(model.program_.input_shapes) :]


ALL = pytest.mark.parametrize("name", MODELS)
LIMIT = 1e-9
"""Largest difference of two engines. They round alike, but in another order; difference heads divide roundings by ε."""


@ALL
def test_a_saved_program_is_read_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = fitted(name)
    model.program_.save(tmp_path / "program")  # with its fit, tests/checker/test_fits.py saves it
    again, program = ours.load(tmp_path / "program"), model.program_
    assert (again.domain, again.algorithm, again.limit) == (program.domain, program.algorithm, program.limit)
    assert again.depth == program.depth == program.program.num_attention_layers
    assert [layer.name for layer in again.layers] == [layer.name for layer in program.layers]
    assert (run(again.program, inputs(model)) == run(program.program, inputs(model))).all()
    if program.bound is not None:
        assert again.bound.value == program.bound.value


@ALL
def test_onnx_and_torch_compute_the_same_and_are_small(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    torch = pytest.importorskip("torch")
    from attnc.exports.onnx_file import run_onnx
    from attnc.exports.onnx_layers import OPERATORS

    model = fitted(name)
    wanted = run(model.program_.program, inputs(model))
    model.export_onnx(tmp_path / "program.onnx")
    assert (tmp_path / "program.onnx").stat().st_size < 400_000
    batch = [np.stack([given, given]) for given in inputs(model)]
    for found in run_onnx(tmp_path / "program.onnx", batch):
        assert np.abs(found - wanted).max() <= LIMIT * (1 + np.abs(wanted).max())
    none = [given[:0] for given in batch]
    assert len(run_onnx(tmp_path / "program.onnx", none)) == 0
    import onnx

    def operators(graph: Any) -> set[str]:
        inner = [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]
        return {node.op_type for node in graph.node}.union(*map(operators, inner))

    assert operators(onnx.load(tmp_path / "program.onnx").graph) <= OPERATORS
    module = model.to_torch(trainable=True)
    assert len(module(*map(torch.tensor, none))) == 0
    found = module(*map(torch.tensor, batch))
    assert np.abs(found.detach().numpy() - wanted).max() <= LIMIT * (1 + np.abs(wanted).max())
    found.sum().backward()
    entries = sum(layer.num_parameters for layer in model.program_.program.all_layers)
    assert 0 < sum(parameter.numel() for parameter in module.parameters()) < 20 * entries
    assert all(np.isfinite(p.grad.numpy()).all() for p in module.parameters() if p.grad is not None)


def test_steps_are_stored_once_in_torch() -> None:
    pytest.importorskip("torch")
    lasso = fitted("Lasso")
    assert lasso.n_iter_ == 20
    assert sum(parameter.numel() for parameter in lasso.to_torch().parameters()) < 2_000


@ALL
def test_its_own_prompt_is_in_the_domain_and_a_larger_one_is_not(name: str) -> None:
    program, prompt = fitted(name).program_, fitted(name).prompt_
    program.check(prompt)
    larger = prompt.copy()
    larger[:, : X.shape[1]] *= 3
    with pytest.raises(ours.OutsideDomain, match="is outside of the domain"):
        program.check(larger)


def test_prompts_outside_are_refused_one_by_one() -> None:
    model = fitted("Ridge")
    program, prompt = model.program_, model.prompt_
    steep = prompt.copy()
    row = prompt[:, :3][np.argmax((prompt[:, :3] ** 2).sum(axis=1))]
    steep[:40, :3] = row  # the norms are as before, and the eigenvalue is not
    both, starts = np.stack([prompt, steep]), np.stack([model.start_] * 2)
    with pytest.raises(ours.OutsideDomain, match=r"prompt 1 is outside .*largest eigenvalue"):
        program(starts, both)
    with pytest.warns(UserWarning, match="may diverge"):
        warned = program(starts, both, outside="warn")
    assert (warned == program(starts, both, outside="allow")).all()
    with pytest.raises(InputError, match="raise, warn, allow"):
        program(starts, both, outside="ignore")
    with pytest.raises(ours.OutsideDomain, match="first weights"):
        program.check(prompt, start=np.ones(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p[:-1], "prompt of shape"),
        (lambda p: np.where(p == 1, 0.5, p), "flag m"),
        (lambda p: p * np.nan, "NaN or infinite"),
        (lambda p: np.concatenate([p[:-1], [[1.0, 0.0, 0.0, 0.0, 0.0]]]), "flag 0 is not empty"),
        (lambda p: [["a"]], "array of numbers"),
    ],
)
def test_what_is_no_prompt_is_refused(change: Callable[[np.ndarray], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fitted("Ridge").program_.check(change(fitted("Ridge").prompt_))


@pytest.mark.parametrize("method", ["chebyshev", "heavy_ball", "plain", "nesterov"])
def test_a_safeguarded_program_stays_within_its_limit(method: str) -> None:
    plain, safe = (ours.Ridge(method=method, safeguard=on).fit(X, Y) for on in (False, True))
    assert (plain.trajectory_ == safe.trajectory_).all()  # in the domain, not a bit changes
    domain, limit = safe.program_.domain, safe.program_.limit
    generator = np.random.default_rng(1)
    for _ in range(3):
        direction = generator.normal(size=3)
        rows = np.outer(generator.choice([-1, 1], 40), direction / np.linalg.norm(direction)) * domain.x * 0.999
        targets = generator.normal(size=40)
        prompt = domain.prompt.tokens(rows, targets * domain.y / np.linalg.norm(targets) * 0.999)
        with pytest.raises(ours.OutsideDomain, match="safeguard keeps weights finite"):
            safe.program_.check(prompt)
        assert np.abs(run(safe.program_.program, [safe.start_, prompt])).max() <= limit
        with np.errstate(all="ignore"):
            assert not np.abs(run(plain.program_.program, [plain.start_, prompt])).max() <= 1e6 * limit


def test_a_folder_that_was_changed_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "program"
    fitted("Lasso").save(folder)
    config = json.loads((folder / "config.json").read_text())
    turns = next(layer for layer in config["program"]["layers"] if layer["kind"] == "repeat")
    none = {"layer": 0, "part": "weight", "num_entries": 0, "index_dtype": "int32"}
    for change, message in (
        ({"count": 10**9}, "a program has at most"),
        ({"count": 0}, "has no turn"),
        ({"layers": turns["layers"][:1]}, "no two tensors of one layout"),
        ({"varying": [none, none]}, "a second time"),
        ({"times": 3}, "has the key 'times'"),
    ):
        before = dict(turns)
        turns.update(change)
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(FileError, match=message):
            ours.load(folder)
        turns.clear()
        turns.update(before)
    config["domain"]["x"] *= 2
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileError, match="another domain"):
        ours.load(folder)


def test_other_readers_name_the_remedy(tmp_path: Path) -> None:
    fitted("Ridge").save(tmp_path / "program")
    with pytest.raises(FileError, match=r"attnc\.incontext\.load"):
        attnc.load(tmp_path / "program")
    with pytest.raises(FileError, match="does not exist"):
        ours.load(tmp_path / "none")
