"""TransformerLens and CircuitsVis, as installed by `make test-lens`."""

from __future__ import annotations

import re
import runpy
import warnings
from pathlib import Path

import numpy as np
import pytest

import attnc
from attnc.ir.program import split_columns
from attnc.ir.rounding import evaluation_error
from exports.streams import CASES, compiled, points_of

pytestmark = [pytest.mark.lens, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def net() -> attnc.Network:
    return compiled("values that carry heads")


@pytest.fixture(scope="module")
def model(net: attnc.Network):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return net.to_transformer_lens()


@pytest.mark.parametrize("name", CASES)
def test_the_model_computes_the_program_within_rounding(name: str) -> None:
    net = compiled(name)
    model = net.to_transformer_lens()
    flat = points_of(net)
    inputs = split_columns(flat, net.program.input_shapes)
    reference = net.program(*inputs)
    outputs = model(model.embed_points(*inputs))[:, -1].numpy().reshape(reference.shape)
    assert outputs.dtype == net.program.dtype
    assert (np.abs(outputs - reference) <= 2 * evaluation_error(net.program, inputs)).all()
    if "construction" not in CASES[name][3] and name != "all of R":
        terms = {term.name: term.value for term in net.certificate.terms}
        assert np.abs(outputs - reference).max() <= 2 * terms.get("rounding", np.inf)


def test_it_is_attention_alone_without_norm_or_positions(model) -> None:
    assert model.cfg.attn_only
    assert model.cfg.normalization_type is None
    assert model.cfg.attention_dir == "bidirectional"
    assert not any("mlp" in name for name, _ in model.named_parameters())
    assert (model.W_pos == 0).all()


def test_the_cache_has_the_names_and_values_of_the_stream(model, net) -> None:
    points = points_of(net)
    outputs, cache = model.run_with_cache(model.embed_points(points))
    assert (cache["blocks.0.hook_resid_pre"] == model.embed_points(points)).all()
    assert cache["resid_post", 2].shape == (len(points), len(model.position_labels), len(model.residual_labels))
    held = dict(zip(model.residual_labels, cache["resid_post", 2][:, -1].T.numpy(), strict=True))
    x, y = points.T
    for label, wanted in {"x": x, "exp(y)": np.exp(y), "sin(x)": np.sin(x)}.items():
        assert np.abs(held[label] - wanted).max() <= 1e-4
    assert (outputs[:, -1, 0].numpy() == held["tanh(sin(x) + y)*exp(y)"]).all()


def test_patterns_are_those_of_the_reference(model, net) -> None:
    points = points_of(net)
    _, cache = model.run_with_cache(model.embed_points(points))
    reference = net.run(points, cache=True).cache
    seen = {name: (b, h) for b, names in enumerate(model.head_labels) for h, name in enumerate(names)}
    for name in ("attend1.head0", "attend1.head1", "attend2.head0"):
        block, head = seen[name]
        pattern = cache["pattern", block][:, head, -1, 1:].numpy()
        wanted = reference[f"{name}.pattern"][:, 0]
        wanted = np.stack([row[row > 0] for row in wanted])  # keys that the mask hides have no position
        assert np.abs(pattern[:, : wanted.shape[1]] - wanted).max() <= 1e-12
        assert (pattern[:, wanted.shape[1] :] == 0).all()


def test_an_ablated_head_takes_its_function_away(model, net) -> None:
    points = points_of(net)
    (block, head) = next((b, n.index("attend1.head1")) for b, n in enumerate(model.head_labels) if "attend1.head1" in n)

    def silence(z, hook):
        z[:, :, head] = 0
        return z

    ablated = model.run_with_hooks(model.embed_points(points), fwd_hooks=[(f"blocks.{block}.attn.hook_z", silence)])[
        :, -1, 0
    ].numpy()
    y = points[:, 1]
    assert np.abs(ablated - np.tanh(y) * np.exp(y)).max() <= 1e-3, "sin(x) is 0 now"
    assert np.abs(ablated - net(points)).max() > 0.1


def test_patched_patterns_move_the_output(model, net) -> None:
    points = points_of(net)
    embedded = model.embed_points(points)
    _, cache = model.run_with_cache(embedded)
    other = model.embed_points(points[::-1].copy())

    def put(pattern, hook):
        pattern[:] = cache[hook.name]
        return pattern

    names = [f"blocks.{b}.attn.hook_pattern" for b in range(3)]
    everything = model.run_with_hooks(other, fwd_hooks=[(name, put) for name in names[:1]])[:, -1]
    assert np.abs((everything - model(other)[:, -1]).numpy()).max() > 0.1


def test_circuitsvis_takes_the_patterns(model, net) -> None:
    from circuitsvis.attention import attention_patterns

    _, cache = model.run_with_cache(model.embed_points(points_of(net)[:1]))
    shown = attention_patterns(tokens=list(model.position_labels), attention=cache["pattern", 0][0])
    assert "query" in str(shown)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/transformer-lens.md").read_text(encoding="utf-8")
    found = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(found) == 4
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(found), "transformer-lens.md", "exec"), {"__name__": "__docs__"})


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(Path(__file__).parents[2] / "examples/with_transformer_lens.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    ablated = lines[lines.index("Mean change of the output without a head:") + 1 :]
    changes = [float(line.split()[-1]) for line in ablated[: ablated.index("")]]
    assert len(changes) == 5
    assert min(changes) > 0.01, "every head has a function"
    assert lines[-3].split() == ["x", "0.0000"], "nothing reads x after the first block"
