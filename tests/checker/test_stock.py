"""Changed stock checkpoints, with the hash made anew, are refused: every pin, and every number that counts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import attnc
from attnc_checker import check
from checker.tampering import Change, changes, edit, refusal, saved_once

EXPRESSION, BOX = "tanh(sin(x) + y)*y", {"x": (-2, 2), "y": (-1, 1)}
PREFIX, HEAD = "model.layers.0", "model.layers.0.self_attn"
saved = saved_once(lambda path: attnc.compile(EXPRESSION, BOX, 0.02).export_hf(path))


def put(tensor: str, place: tuple[Any, ...], value: float, *, factor: bool = False) -> Change:
    """Set numbers of a tensor, or multiply them."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[tensor][place] = tensors[tensor][place] * value if factor else value

    return change


def config(**fields: Any) -> Change:
    return lambda data: data.update(fields)


def named(**fields: Any) -> Change:
    return lambda data: data["attnc"].update(fields)


def all_norms(value: float) -> Change:
    def change(tensors: dict[str, np.ndarray]) -> None:
        for name, tensor in tensors.items():
            if "norm" in name:
                tensor[:] = value

    return change


def pinned(value: float) -> Change:
    """Another number in the pinned channel, with norms that fit."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        E = tensors["model.embed_tokens.weight"]
        E[:, 0] = np.where(E[:, 0] != 0, value, 0)
        all_norms(value / math.sqrt(E.shape[1]))(tensors)

    return change


def silent(value: float) -> Change:
    """Another bias of silent tokens: the query, padding, or the prefix."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        E = tensors["model.embed_tokens.weight"]
        biases = (E == -1).all(axis=0, where=(E[:, 0] != 0)[:, None] & (np.arange(len(E)) >= len(E) - 5)[:, None])
        E[:, biases] = np.where(E[:, biases] == -1, value, E[:, biases])

    return change


EMBEDDING = "model.embed_tokens.weight"
test_changed_files_are_refused = changes(
    {
        ("config.json", 1): [
            (config(rms_norm_eps=1e3), "rms_norm_eps"),
            (config(no_rope_layers=[0, 1, 0]), "no_rope_layers"),
            (config(no_rope_layers=None), "no_rope_layers"),
            (config(attention_bias=True), "attention_bias"),
            (config(mlp_bias=0), "mlp_bias"),
            (config(tie_word_embeddings=False), "tie_word_embeddings"),
            (config(use_sliding_window=True), "use_sliding_window"),
            (config(sliding_window=4), "sliding_window"),
            (config(layer_types=["sliding_attention"] * 3), "layer_types"),
            (config(model_type="llama"), "model_type"),
            (config(architectures=["LlamaForCausalLM"]), "architectures"),
            (config(dtype="bfloat16"), "dtype"),
            (config(hidden_act="relu"), "hidden_act"),
            (config(num_key_value_heads=1), "num_key_value_heads"),
            (config(head_dim=4), "head_dim"),
            (config(attention_dropout=0.5), "attention_dropout"),
            (config(max_position_embeddings=2**21), "context"),
            (config(quantization_config={"bits": 4}), "quantization_config"),
            (config(auto_map={"AutoModel": "model.Mine"}), "auto_map"),
            (config(attn_implementation="flash_attention_2"), "attn_implementation"),
            (named(expression="tanh(sin(x) + y)"), "differ in the box or the expression"),
            (named(box={"x": [-2.0, 3.0], "y": [-1.0, 1.0]}), "differ in the box"),
            (named(box={"y": [-1.0, 1.0], "x": [-2.0, 2.0]}), "order of the variables"),
            (named(more=1), "the fields of attnc"),
            (named(prefix=1), "its words"),
            (named(heads=[]), "describes other heads"),
            (lambda data: data["attnc"]["heads"][0].update(writes=["input.x"]), "describes other heads"),
            (lambda data: data["attnc"]["words"].reverse(), "the names of its words"),
            (lambda data: data["attnc"]["channels"].__setitem__(0, "other"), "its channels"),
            (lambda data: data["attnc"]["variables"].reverse(), "its words"),
        ],
        ("config.json", 2): [
            (named(format="attnc.stock/2"), "check it with the version of attnc that wrote it"),
            (named(format=1), "format"),
            (lambda data: data.pop("vocab_size"), "a field is missing"),
        ],
        ("tensors", 1): [
            (put(f"{PREFIX}.mlp.down_proj.weight", (0, 0), 1.0), "feed-forward"),
            (put(f"{PREFIX}.mlp.gate_proj.weight", (0, 3), 1e-30), "feed-forward"),
            (put("model.norm.weight", (2,), 1.0), "weights of the norms"),
            (all_norms(1.0), "do not undo"),
            (pinned(1.0), "no power of two"),
            (pinned(2.0**3), "rms_norm_eps does not vanish"),
            (pinned(2.0**12), "too large for the norms"),
            (pinned(3.0 * 2**15), "no power of two"),
            (put(EMBEDDING, (1, 0), 2.0**10), "same number in the pinned channel"),
            (put(f"{HEAD}.o_proj.weight", (0, 0), 2.0**-20), "pinned channel is read or written"),
            (put(f"{HEAD}.q_proj.weight", (0, 0), 2.0**-20), "pinned channel is read or written"),
            (put(EMBEDDING, (-1, 0), 1e-9), "pinned channel is read or written"),
            (put(f"{HEAD}.k_proj.weight", (0, 2), 1.0), "keys or values depend on"),
            (put(f"{HEAD}.v_proj.weight", (0, 4), 1.0), "keys or values depend on"),
            (silent(-0.001), "silent tokens may be heard"),
            (silent(1.0), "silent tokens may be heard"),
            (put(EMBEDDING, (-3, 2), 0.3), "by a power of two"),
            (put(EMBEDDING, (-3, 5), 1e-20), "in a channel of its own"),
            (lambda tensors: tensors.update(more=np.zeros(1, np.float32)), "belong to no layer"),
            (lambda tensors: tensors.update({"lm_head.weight": np.zeros((2, 2), np.float32)}), "belong to no layer"),
            (lambda tensors: tensors.pop(f"{HEAD}.o_proj.weight"), "is missing"),
            (lambda tensors: tensors.update({"model.norm.weight": np.ones(64)}), "not F32"),
            (lambda tensors: tensors.update({"model.norm.weight": np.ones(16, np.float32)}), "of shape"),
        ],
        ("header", 1): [(lambda header: header.update(__metadata__={"format": "flax"}), "metadata")],
        ("certificate.json", 1): [
            (lambda data: data.update(bound=data["observed"]), "add up to"),
            (lambda data: data.update(dtype="float64"), "float32"),
            (lambda data: data.update(truncation=0.0), "underflow"),
        ],
    }
)


def test_an_adapter_beside_the_checkpoint_is_refused(net: Path) -> None:
    (net / "adapter_config.json").write_text("{}")
    assert "which transformers may read" in refusal(net)


def test_numbers_in_the_key_of_a_query_are_refused(net: Path) -> None:
    """A query token that is heard, or that has a value, would disturb later ones."""
    names = json.loads((net / "config.json").read_text())["attnc"]
    value = names["channels"].index("value0.0.0")
    edit(net, "tensors", put(EMBEDDING, (names["query"], value), 1.0))
    assert "a silent token has a value" in refusal(net)


def run(folder: Path, points: np.ndarray) -> np.ndarray:
    """The decoder in float32: norms, causal attention over the prefix and one query token, residuals."""
    tensors, whole = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    names, E, d = whole["attnc"], tensors[EMBEDDING], whole["head_dim"]
    queries = E[names["query"]] + points.astype(np.float32) @ E[names["variables"]]
    prefix = np.broadcast_to(E[: names["prefix"]], (len(points), names["prefix"], E.shape[1]))
    z = np.concatenate([prefix, queries[:, None]], axis=1)
    count = z.shape[1]

    def normed(z: np.ndarray, name: str) -> np.ndarray:
        square = (z * z).mean(axis=-1, keepdims=True, dtype=np.float32) + np.float32(whole["rms_norm_eps"])
        return z / np.sqrt(square) * tensors[name]

    hidden = np.triu(np.ones((count, count), bool), 1)
    for i in range(whole["num_hidden_layers"]):
        x = normed(z, f"model.layers.{i}.input_layernorm.weight")
        Q, K, V = (x @ tensors[f"model.layers.{i}.self_attn.{name}_proj.weight"].T for name in "qkv")
        outs = []
        for h in range(whole["num_attention_heads"]):
            own = slice(h * d, (h + 1) * d)
            scores = Q[..., own] @ K[..., own].transpose(0, 2, 1) / np.float32(math.sqrt(d))
            scores = np.where(hidden, -np.inf, scores)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            outs.append(weights / weights.sum(axis=-1, keepdims=True) @ V[..., own])
        z = z + np.concatenate(outs, axis=-1) @ tensors[f"model.layers.{i}.self_attn.o_proj.weight"].T
    return normed(z, "model.norm.weight")[:, -1] @ E[names["outputs"]].T


def test_the_unchanged_checkpoint_is_within_its_bound(net: Path) -> None:
    verdict = check(net, processes=1)
    assert verdict.proved
    points = np.random.default_rng(0).uniform((-2, -1), (2, 1), (500, 2))
    error = np.abs(run(net, points)[:, 0] - np.tanh(np.sin(points[:, 0]) + points[:, 1]) * points[:, 1])
    assert error.max() <= verdict.bound


def some_changes() -> Iterator[tuple[int, float]]:
    rng = np.random.default_rng(7)
    for factor in (0.0, -1.0, 0.5, 0.999, 1.01, 1.5, 4.0, 1e4):
        for number in rng.integers(0, 2**31, 4).tolist():
            yield number, factor


@pytest.mark.parametrize(("number", "factor"), [*some_changes()])
def test_no_changed_number_is_accepted_beyond_the_bound(net: Path, number: int, factor: float) -> None:
    """Any non-zero number is multiplied. If the checker accepts it, the decoder is within the bound."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        places = [(name, place) for name in sorted(tensors) for place in np.flatnonzero(tensors[name]).tolist()]
        kept = [(name, place) for name, place in places if "norm" not in name]
        name, place = kept[number % len(kept)]
        tensors[name].flat[place] *= factor

    edit(net, "tensors", change)
    verdict = check(net, processes=1)
    if verdict.proved:
        points = np.random.default_rng(0).uniform((-2, -1), (2, 1), (500, 2))
        error = np.abs(run(net, points)[:, 0] - np.tanh(np.sin(points[:, 0]) + points[:, 1]) * points[:, 1])
        assert error.max() <= verdict.bound
