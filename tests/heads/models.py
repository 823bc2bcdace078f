"""Small stock models as files, and their attention weights in plain numpy, written anew from transformers' formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

WIDTH, HEADS, WORDS, LAYERS = 32, 4, 24, 2
KINDS = ("llama", "mistral", "qwen2", "smollm3", "gpt2", "bert")
ROTATES = {"llama": (1, 1), "mistral": (1, 1), "qwen2": (1, 1), "smollm3": (0, 1), "gpt2": (0, 0), "bert": (0, 0)}
KEY_HEADS = {"llama": 2, "mistral": 4, "qwen2": 1, "smollm3": 2}
BASE = 10000.0


def config_of(kind: str) -> dict[str, Any]:
    if kind == "gpt2":
        sizes = {"n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS, "n_positions": 64}
        return {
            "model_type": kind,
            **sizes,
            "vocab_size": WORDS,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu",
        }
    config: dict[str, Any] = {
        "model_type": kind,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 16,
        "vocab_size": WORDS,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if kind == "bert":
        return config | {"layer_norm_eps": 1e-12}
    config |= {"num_key_value_heads": KEY_HEADS[kind], "rms_norm_eps": 1e-5, "hidden_act": "silu"}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": BASE}
    more = {
        "llama": {"attention_bias": True},
        "mistral": {"sliding_window": None},
        "qwen2": {"use_sliding_window": False},
        "smollm3": {"no_rope_layers": list(ROTATES[kind]), "head_dim": 16, "attention_bias": False},
    }
    return config | more[kind]


def weights_of(kind: str, gain: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def random(*shape: int, size: float = gain) -> np.ndarray:
        return rng.normal(0, size * shape[-1] ** -0.5 if len(shape) == 2 else 0.1, shape).astype(np.float32)

    def linear(name: str, out: int, into: int, *, bias: bool) -> dict[str, np.ndarray]:
        return {f"{name}.weight": random(out, into)} | ({f"{name}.bias": random(out)} if bias else {})

    def norm(name: str, *, bias: bool) -> dict[str, np.ndarray]:
        return {f"{name}.weight": 1 + random(WIDTH)} | ({f"{name}.bias": random(WIDTH)} if bias else {})

    if kind == "gpt2":
        found = {"wte.weight": random(WORDS, WIDTH, size=6.0), "wpe.weight": random(64, WIDTH)} | norm(
            "ln_f", bias=True
        )
        for i in range(LAYERS):
            for name, shape in (("attn.c_attn", (WIDTH, 3 * WIDTH)), ("attn.c_proj", (WIDTH, WIDTH))):
                found |= {f"h.{i}.{name}.weight": random(*shape), f"h.{i}.{name}.bias": random(shape[1])}
            for name, shape in (("mlp.c_fc", (WIDTH, 4 * WIDTH)), ("mlp.c_proj", (4 * WIDTH, WIDTH))):
                found |= {f"h.{i}.{name}.weight": random(*shape), f"h.{i}.{name}.bias": random(shape[1])}
            found |= norm(f"h.{i}.ln_1", bias=True) | norm(f"h.{i}.ln_2", bias=True)
        return found
    if kind == "bert":
        found = {f"embeddings.{name}_embeddings.weight": random(count, WIDTH) for name, count in BERT_TABLES.items()}
        found |= norm("embeddings.LayerNorm", bias=True) | linear("pooler.dense", WIDTH, WIDTH, bias=True)
        for i in range(LAYERS):
            at = f"encoder.layer.{i}"
            for name in ("query", "key", "value"):
                found |= linear(f"{at}.attention.self.{name}", WIDTH, WIDTH, bias=True)
            found |= linear(f"{at}.attention.output.dense", WIDTH, WIDTH, bias=True)
            found |= linear(f"{at}.intermediate.dense", 16, WIDTH, bias=True)
            found |= linear(f"{at}.output.dense", WIDTH, 16, bias=True)
            found |= norm(f"{at}.attention.output.LayerNorm", bias=True) | norm(f"{at}.output.LayerNorm", bias=True)
        return found
    config = config_of(kind)
    d_head, bias = config.get("head_dim", WIDTH // HEADS), kind in ("llama", "qwen2")
    found = {"embed_tokens.weight": random(WORDS, WIDTH, size=6.0)} | norm("norm", bias=False)
    for i in range(LAYERS):
        for name, count in (("q", HEADS), ("k", KEY_HEADS[kind]), ("v", KEY_HEADS[kind])):
            found |= linear(f"layers.{i}.self_attn.{name}_proj", count * d_head, WIDTH, bias=bias)
        found |= linear(f"layers.{i}.self_attn.o_proj", WIDTH, HEADS * d_head, bias=kind == "llama")
        for name, shape in (("gate", (16, WIDTH)), ("up", (16, WIDTH)), ("down", (WIDTH, 16))):
            found |= linear(f"layers.{i}.mlp.{name}_proj", *shape, bias=False)
        found |= norm(f"layers.{i}.input_layernorm", bias=False)
        found |= norm(f"layers.{i}.post_attention_layernorm", bias=False)
    return found


BERT_TABLES = {"word": WORDS, "position": 64, "token_type": 2}


def write(folder: Path, config: dict[str, Any], weights: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make(folder: Path, kind: str, gain: float = 3.0) -> Path:
    return write(folder, config_of(kind), weights_of(kind, gain))


def attention(kind: str, layer: int, states: np.ndarray, dtype: str = "float64", gain: float = 3.0) -> np.ndarray:
    """The weights (heads, keys) of the last state, which sees all states before it."""
    weights = {name: array.astype(dtype) for name, array in weights_of(kind, gain).items()}
    config, x = config_of(kind), states.astype(dtype)
    if kind == "gpt2":
        centred = x - x.mean(axis=1, keepdims=True)
        y = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + np.array(1e-5, dtype))
        y = y * weights[f"h.{layer}.ln_1.weight"] + weights[f"h.{layer}.ln_1.bias"]
        W, b = weights[f"h.{layer}.attn.c_attn.weight"], weights[f"h.{layer}.attn.c_attn.bias"]
        q, k = ((y @ W + b)[:, i * WIDTH : (i + 1) * WIDTH] for i in range(2))
    elif kind == "bert":
        at = f"encoder.layer.{layer}.attention.self"
        q, k = (x @ weights[f"{at}.{name}.weight"].T + weights[f"{at}.{name}.bias"] for name in ("query", "key"))
    else:
        at, single = f"layers.{layer}", x.astype(np.float32)
        scaled = single / np.sqrt((single**2).mean(axis=1, keepdims=True) + np.float32(1e-5))
        y = scaled.astype(dtype) * weights[f"{at}.input_layernorm.weight"]
        q, k = (y @ weights[f"{at}.self_attn.{name}_proj.weight"].T for name in "qk")
        if f"{at}.self_attn.q_proj.bias" in weights:
            q, k = q + weights[f"{at}.self_attn.q_proj.bias"], k + weights[f"{at}.self_attn.k_proj.bias"]
    d_head = config.get("head_dim", WIDTH // HEADS)
    q, k = (z.reshape(len(x), -1, d_head).transpose(1, 0, 2) for z in (q, k))
    if ROTATES[kind][layer]:
        q, k = rotated(q), rotated(k)
    k = np.repeat(k, HEADS // len(k), axis=0)
    scores = np.einsum("hd,hkd->hk", q[:, -1], k[:, :-1]) * np.array(d_head**-0.5, dtype)
    exps = np.exp(scores - scores.max(axis=1, keepdims=True))
    return exps / exps.sum(axis=1, keepdims=True)


def rotated(z: np.ndarray) -> np.ndarray:
    half = z.shape[2] // 2
    powers = (np.float32(BASE) ** (np.arange(half, dtype=np.float32) / np.float32(half))).astype(np.float32)
    angles = np.arange(z.shape[1], dtype=np.float32)[:, None] * (np.float32(1) / powers)
    cos, sin = (np.tile(f(angles).astype(np.float32), 2).astype(z.dtype) for f in (np.cos, np.sin))
    return z * cos + np.concatenate([-z[..., half:], z[..., :half]], axis=2) * sin
