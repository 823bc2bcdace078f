"""Claims about heads of stock layers hold at every sampled query, are close to them, and bad files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import attnc
from attnc.errors import AttncError, FileError, InputError
from attnc.heads import certify_heads
from attnc.heads.selecting import leaked, longest
from heads.models import HEADS, KINDS, WIDTH, attention, config_of, make, weights_of, write

RADIUS = 1e-2


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp(kind), kind)


def states(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, WIDTH)).astype(np.float32).astype(np.float64)


def sampled(kind: str, layer: int, keys: np.ndarray, queries: np.ndarray, dtype: str, radius: float) -> np.ndarray:
    """The largest leak of each head over some queries of the balls, most of them on the surface."""
    rng, worst = np.random.default_rng(1), np.zeros(HEADS)
    for query in queries:
        for turn in range(12):
            step = rng.normal(size=WIDTH)
            moved = query + (turn > 0) * radius * step / np.linalg.norm(step)
            weights = attention(kind, layer, np.vstack([keys, moved]), dtype).astype(np.float64)
            worst = np.maximum(worst, 1 - weights.max(axis=1))
    return worst


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_sampled_query_leaks_more(kind: str, folder: Path, layer: int, dtype: str) -> None:
    keys, queries = states(12, 0), states(3, 1)
    report = certify_heads(folder, layer, keys=keys, queries=queries, radius=RADIUS, dtype=dtype)
    claimed = np.array([head.leaks[dtype] for head in report.heads])
    assert (sampled(kind, layer, keys, queries, dtype, RADIUS) <= claimed).all()
    assert all(head.leak <= head.leaks[dtype] for head in report.heads)
    assert all(head.margins[dtype] <= head.gap for head in report.heads)


def test_claims_at_a_point_are_close(kind: str, folder: Path) -> None:
    """In float64 without a radius, the gap is that of the scores up to rounding, and the leak that of the softmax."""
    keys, queries = states(12, 0), states(1, 1)
    report = certify_heads(folder, 1, keys=keys, queries=queries, dtype="float64")
    for head, weights in zip(report.heads, attention(kind, 1, np.vstack([keys, queries])), strict=True):
        ordered = np.sort(weights)
        gap = np.log(ordered[-1] / ordered[-2])
        assert head.selected == (int(weights.argmax()),)
        assert 0 <= gap - head.margins["float64"] <= 0.03
        assert abs(head.gap - gap) <= 1e-4  # the norm and the angles of the reference are in float32
        assert 1 - ordered[-1] <= head.leaks["float64"] <= 1.05 * (1 - ordered[-1])


def vertex_softmax(lo: np.ndarray, hi: np.ndarray, values: np.ndarray) -> float:
    """The largest Σ p_k v_k over all scores in a box: scores of large values are high, and those of small ones low."""
    order = np.argsort(values)
    found = -np.inf
    for first in range(len(values) + 1):
        scores = np.where(np.arange(len(values)) >= first, hi[order], lo[order])
        weights = np.exp(scores - scores.max())
        found = max(found, float(weights @ values[order] / weights.sum()))
    return found


def test_the_leak_lies_between_samples_and_vertex_softmax(tmp_path: Path) -> None:
    """Vertex-Softmax is the tightest bound from intervals of scores alone. Differences of scores must do better."""
    folder, keys, query = make(tmp_path, "bert"), states(12, 0), states(1, 1)
    report = certify_heads(folder, 0, keys=keys, queries=query, radius=0.2)
    weights = {name: array.astype(np.float64) for name, array in weights_of("bert", 3.0).items()}
    at = "encoder.layer.0.attention.self"
    W_Q, W_K = (weights[f"{at}.{name}.weight"].reshape(HEADS, -1, WIDTH) for name in ("query", "key"))
    b_Q, b_K = (weights[f"{at}.{name}.bias"].reshape(HEADS, -1) for name in ("query", "key"))
    observed = sampled("bert", 0, keys, query, "float64", 0.2)
    for claim in report.heads:
        h = claim.head
        k = (keys @ W_K[h].T + b_K[h]) * W_Q.shape[1] ** -0.5
        centre, spread = k @ (W_Q[h] @ query[0] + b_Q[h]), 0.2 * np.linalg.norm(k @ W_Q[h], axis=1)
        others = (np.arange(12) != claim.selected[0]).astype(float)
        by_intervals = vertex_softmax(centre - spread, centre + spread, others)
        assert observed[h] <= claim.leak <= by_intervals
        assert claim.leak <= (len(keys) - 1) * np.exp(-claim.gap)


def test_a_box_covers_its_points(tmp_path: Path) -> None:
    folder, keys, query = make(tmp_path, "smollm3"), states(12, 0), states(1, 1)[0]
    widths = np.zeros(WIDTH)
    widths[:3] = 0.3
    report = certify_heads(folder, 0, keys=keys, box=(query - widths, query + widths))
    wide = certify_heads(folder, 0, keys=keys, queries=[query], radius=float(np.linalg.norm(widths)))
    rng, worst = np.random.default_rng(0), np.zeros(HEADS)
    for _ in range(50):
        at = np.vstack([keys, query + widths * rng.choice([-1, 1], WIDTH)])
        worst = np.maximum(worst, 1 - attention("smollm3", 0, at, "float32").max(axis=1))
    for claim, around in zip(report.heads, wide.heads, strict=True):
        assert worst[claim.head] <= claim.leaks["float32"]
        assert claim.gap >= around.gap


def test_tokens_are_rows_of_the_embedding(tmp_path: Path) -> None:
    for name, table in (("llama", "embed_tokens.weight"), ("gpt2", "wte.weight")):
        folder, weights = make(tmp_path / name, name), weights_of(name, 3.0)
        rows, query = weights[table][[3, 5, 9]].astype(np.float64), weights[table][[7]].astype(np.float64)
        if name == "gpt2":
            rows, query = rows + weights["wpe.weight"][:3], query + weights["wpe.weight"][3]
        by_tokens = certify_heads(folder, 0, keys=[3, 5, 9], queries=[7])
        by_rows = certify_heads(folder, 0, keys=rows, queries=query)
        assert [head.gap for head in by_tokens.heads] == [head.gap for head in by_rows.heads]
        assert any("embeddings of the tokens" in each for each in by_tokens.assumptions)
        assert not any("embeddings of the tokens" in each for each in by_rows.assumptions)


def test_bfloat16_and_a_single_file(tmp_path: Path) -> None:
    """bfloat16 numbers are read exactly."""
    weights = weights_of("bert", 3.0)
    shortened = {name: (array.view(np.uint32) >> 16).astype(np.uint16) for name, array in weights.items()}
    whole = {name: (array.astype(np.uint32) << 16).view(np.float32) for name, array in shortened.items()}
    header: dict[str, Any] = {}
    end = 0
    for name, array in shortened.items():
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": [begin, end]}
    first = json.dumps(header).encode()
    file = tmp_path / "short" / "some.safetensors"
    write(tmp_path / "short", config_of("bert"), {"x": np.zeros(1, np.float32)})
    data = b"".join(array.tobytes() for array in shortened.values())
    file.write_bytes(len(first).to_bytes(8, "little") + first + data)
    write(tmp_path / "whole", config_of("bert"), whole)
    keys, queries = states(5, 0), states(1, 1)
    found, wanted = (certify_heads(path, 0, keys=keys, queries=queries) for path in (file, tmp_path / "whole"))
    assert found.heads == wanted.heads


def test_leak_and_length_follow_from_the_gap() -> None:
    assert leaked(np.full(9, 5.0)) <= 9 * np.exp(-5.0)
    assert leaked(np.array([-1e4])) == 1.0
    assert leaked(np.zeros(0)) == 0.0
    for gap in (0.0, 3.0, 20.0):
        count = longest(gap, 0.01)
        assert (count - 1) * np.exp(-gap) <= 0.01 < (count + 1) * np.exp(-gap)
    assert longest(-5.0, 0.01) == 1
    assert longest(100.0, 0.01) is None


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_any_size(kind: str, tmp_path: Path) -> None:
    """Entries from 1e-6 to 1e5, far from 0 or around it, and weights that saturate the softmax."""
    rng, turns = np.random.default_rng(2), 0
    for gain in (0.5, 20.0):
        folder = make(tmp_path / str(gain), kind, gain)
        for exponent in (-6, -2, 2, 5):
            size, offset = 10.0**exponent, rng.choice([0.0, 1.0, 100.0]) * 10.0 ** rng.uniform(-2, 3)
            drawn = size * rng.normal(size=(int(rng.integers(2, 30)), WIDTH)) + offset
            at, layer = drawn.astype(np.float32).astype(np.float64), int(rng.integers(2))
            report = certify_heads(folder, layer, keys=at[:-1], queries=at[-1:])
            for dtype in ("float32", "float64"):
                with np.errstate(over="ignore", invalid="ignore"):
                    weights = attention(kind, layer, at, dtype, gain).astype(np.float64)
                for head in report.heads:
                    others = np.delete(weights[head.head], head.selected[0]).sum()
                    assert not others > head.leaks[dtype]  # NaN where float32 overflows
                    turns += 1
    assert turns == 64


def test_nothing_is_claimed_where_float32_overflows(tmp_path: Path) -> None:
    folder = make(tmp_path, "llama")
    for size in (1e17, 1e25, 1e37):
        report = certify_heads(folder, 0, keys=size * states(5, 0), queries=states(1, 1))
        assert all(head.margins["float32"] == -np.inf and head.leaks["float32"] >= 1 for head in report.heads)
    near = certify_heads(folder, 0, keys=1e15 * states(5, 0), queries=states(1, 1))
    assert all(np.isfinite(head.margins["float32"]) for head in near.heads)


def test_a_pinned_norm_costs_no_margin(tmp_path: Path) -> None:
    """A channel that holds 2^16 makes RMSNorm the identity. A key that is behind by far stays behind in float32."""
    width, weights = 16, weights_of("smollm3", 0.0)
    made = {name: np.zeros_like(array) for name, array in weights.items()}
    config = config_of("smollm3") | {"hidden_size": width, "num_attention_heads": 1, "num_key_value_heads": 1}
    for name in ("q", "k"):
        made[f"layers.0.self_attn.{name}_proj.weight"] = np.eye(width, dtype=np.float32) * (np.arange(width) == 1)
    made["layers.0.self_attn.q_proj.weight"] *= 4.0  # the scale is 1/4
    made["layers.0.input_layernorm.weight"] = np.full(width, 2.0**14, np.float32)
    keys = np.zeros((3, width))
    keys[:, 0], keys[:, 1] = 2.0**16, [0.0, 1.0, 20.0]
    query = np.zeros(width)
    query[:2] = 2.0**16, 1.0
    report = certify_heads(write(tmp_path, config, made), 0, keys=keys, queries=[query], leak=1e-6)
    (head,) = report.heads
    assert head.selected == (2,)
    assert 18.999 <= head.margins["float32"] <= head.gap <= 19.0
    assert report.is_safe
    corner = query.copy()
    corner[1] = -1.0
    assert not certify_heads(tmp_path, 0, keys=keys, box=(corner, query), leak=1e-6).is_safe
    corner[1] = 0.75
    assert 14.24 <= certify_heads(tmp_path, 0, keys=keys, box=(corner, query)).heads[0].gap <= 14.25


def test_a_stock_checkpoint_of_attnc(tmp_path: Path) -> None:
    """Its prefix tokens are the keys. A hard head selects in float32, and a soft one shares its weight."""
    for construction, is_hard in (("max_affine", True), ("compose", False)):
        folder = tmp_path / construction
        attnc.compile("sin(x)", {"x": (0, 1)}, 0.05, construction=construction).export_hf(folder)
        stated = json.loads((folder / "config.json").read_text())["attnc"]
        table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].astype(np.float64)
        at = [table[stated["query"]] + x * table[stated["variables"][0]] for x in (0.30, 0.31)]
        keys = table[: stated["prefix"]]
        report = certify_heads(folder, 0, keys=range(stated["prefix"]), box=(np.minimum(*at), np.maximum(*at)))
        assert report.is_safe == is_hard
        assert certify_heads(folder, 0, keys=keys, queries=at).is_safe == is_hard
        if is_hard:  # padding is silent
            padded = certify_heads(folder, 0, keys=[*range(stated["prefix"]), stated["pad"]], queries=at)
            assert padded.heads[0].selected == report.heads[0].selected
            assert padded.is_safe


def broken(**changes: Any) -> dict[str, Any]:
    return config_of("llama") | changes


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another type": (broken(model_type="mamba"), r"model_type is 'mamba'.*bert, gpt2"),
    "another rotation": (broken(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), "type 'yarn'"),
    "half a rotation": (broken(partial_rotary_factor=0.5), "partial_rotary_factor"),
    "no base": (broken(rope_parameters={}), "rope_theta"),
    "no eps": (broken(rms_norm_eps=None), "rms_norm_eps"),
    "heads that do not divide": (broken(num_key_value_heads=3), "4 heads of queries and 3 of keys"),
    "another width": (broken(hidden_size=64), r"has the shape \(32, 32\).*implies"),
    "a text": (broken(num_attention_heads="4"), "num_attention_heads"),
    "very many heads": (broken(num_attention_heads=2**30), "heads"),
    "a window": (broken(sliding_window=8), "a window of 8"),
    "code": (broken(auto_map={"AutoModel": "x.py"}), "auto_map"),
    "very many layers": (broken(num_hidden_layers=10**9), "num_hidden_layers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_whose_scores_are_not_known_are_refused(name: str, tmp_path: Path) -> None:
    config, message = REFUSED[name]
    folder = write(tmp_path, config, weights_of("llama", 3.0))
    with pytest.raises(AttncError, match=message):
        certify_heads(folder, 0, keys=states(12, 0), queries=states(1, 1))


def test_hostile_files_are_refused(tmp_path: Path) -> None:
    folder, asked = make(tmp_path, "llama"), {"keys": states(3, 0), "queries": states(1, 1)}
    weights, file = weights_of("llama", 3.0), folder / "model.safetensors"

    def refused(message: str, **more: Any) -> None:
        with pytest.raises(AttncError, match=message):
            certify_heads(folder, 0, **(asked | more))

    write(folder, config_of("llama"), weights | {"layers.0.self_attn.q_norm.weight": np.ones(8, np.float32)})
    refused("norms its queries")
    write(folder, config_of("llama"), {n: a for n, a in weights.items() if n != "layers.0.self_attn.k_proj.weight"})
    refused("there is no tensor that ends in 'layers.0.self_attn.k_proj.weight'")
    write(folder, config_of("llama"), weights | {"a.layers.0.self_attn.k_proj.weight": np.ones((2, 2), np.float32)})
    refused("2 tensors have a name")
    nan = weights["layers.0.self_attn.q_proj.weight"].copy()
    nan[0, 0] = np.nan
    write(folder, config_of("llama"), weights | {"layers.0.self_attn.q_proj.weight": nan})
    refused("not finite")
    name = "layers.0.self_attn.q_proj.weight"
    for entry in (
        {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 2**40]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": 3},
    ):
        header = json.dumps({name: entry}).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        with pytest.raises(FileError):
            certify_heads(file, 0, **asked)
    file.write_bytes(b"\xff" * 100)
    refused("not a safetensors file")
    (folder / "config.json").unlink()
    with pytest.raises(FileError, match=r"no config\.json beside it"):
        certify_heads(file, 0, **asked)


def test_arguments_are_checked(tmp_path: Path) -> None:
    folder, asked = make(tmp_path, "llama"), {"keys": states(3, 0), "queries": states(1, 1)}
    wrong: dict[str, dict[str, Any]] = {
        "layer 7": {"layer": 7},
        "queries, or a box": {"queries": None},
        "belongs to queries": {"queries": None, "box": (np.zeros(WIDTH), np.ones(WIDTH)), "radius": 1.0},
        "above the upper": {"queries": None, "box": (np.ones(WIDTH), np.zeros(WIDTH))},
        "rows of 32 numbers": {"keys": np.zeros((3, 5))},
        "row 1 is not finite": {"keys": np.array([[0.0] * WIDTH, [np.inf] * WIDTH])},
        "99 is not a row": {"keys": [1, 99]},
        "head 4": {"heads": [4]},
        "leak must be": {"leak": 0.0},
        "radius must be": {"radius": -1.0},
        "dtype must be": {"dtype": "bfloat16"},
        "real numbers": {"keys": [["a"] * WIDTH]},
    }
    for message, change in wrong.items():
        given = {"layer": 0} | asked | change
        with pytest.raises(InputError, match=message):
            certify_heads(folder, **given)
    with pytest.raises(InputError, match="normed before the first layer"):
        certify_heads(make(tmp_path / "bert", "bert"), 0, keys=[1, 2], queries=[3])


@pytest.mark.models
@pytest.mark.filterwarnings("ignore")
def test_the_reference_and_the_claims_are_those_of_transformers(kind: str, folder: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    keys, query = states(12, 0), states(1, 1)
    report = certify_heads(folder, 1, keys=keys, queries=query)
    at = np.vstack([keys, query])
    hidden = torch.tensor(at, dtype=torch.float32)[None]
    hide = torch.zeros(1, 1, 13, 13)
    hide[..., 12] = -1e30  # the query does not see itself
    with torch.no_grad():
        if kind == "gpt2":
            layer = model.h[1]
            _, weights = layer.attn(layer.ln_1(hidden), attention_mask=hide)
        elif kind == "bert":
            _, weights = model.encoder.layer[1].attention.self(hidden, attention_mask=hide)
        else:
            layer, angles = model.layers[1], model.rotary_emb(hidden, torch.arange(13)[None])
            normed = layer.input_layernorm(hidden)
            _, weights = layer.self_attn(normed, position_embeddings=angles, attention_mask=hide)
    found = weights[0, :, -1, :12].double().numpy()
    assert np.abs(found - attention(kind, 1, at, "float32")).max() <= 1e-5
    assert (1 - found.max(axis=1) <= [head.leaks["float32"] for head in report.heads]).all()
