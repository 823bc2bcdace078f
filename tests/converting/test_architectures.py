"""Architectures of transformers with small random configurations: no nonlinearity is missed silently."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import attnc  # noqa: E402
from converting.trace import traced  # noqa: E402

SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
MIXTURE = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
STATES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
DISENTANGLED = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
SCALAR = {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
CASES = {
    "Bert": (SMALL, {"gelu", "tanh"}, set()),
    "DebertaV2": ({**SMALL, **DISENTANGLED}, {"gelu"}, set()),
    "Llama": (GROUPED, {"silu"}, set()),
    "Gemma2": (GROUPED, {"gelu_tanh", "tanh"}, set()),
    "Nemotron": ({**SMALL, "num_key_value_heads": 2}, {"relu"}, set()),
    "GptOss": (MIXTURE, {"clamp_max(hi=7)", "hardtanh(lo=-7, hi=7)", "sigmoid"}, set()),
    "DeepseekV3": ({**GROUPED, **LATENT}, {"silu", "sigmoid"}, set()),  # its mask follows from the choice of experts
    "T5": ({**T5, "feed_forward_proj": "gated-gelu"}, {"gelu_tanh"}, set()),
    "Mamba2": ({**STATES, **SCALAR}, {"silu", "softplus(beta=1)", "relu"}, {"kernel exp"}),
    "Rwkv": (
        {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 32},
        {"sigmoid", "maximum", "relu"},
        {"kernel exp", "kernel div"},
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_everything_is_converted_kept_or_named(name):
    numbers, activations, left = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**numbers)
    model = getattr(transformers, f"{name}Model")(config).eval()
    ids = torch.randint(3, 90, (2, 12))
    example = {"input_ids": ids} if name in ("Mamba2", "Rwkv") else {"input_ids": ids, "attention_mask": ids > 0}
    if name == "T5":
        example["decoder_input_ids"] = ids
    converted, report = attnc.convert(model, eps=1e-6, example=example, strict=not left)
    assert {entry.activation for entry in report.replaced} == activations
    assert {entry.what for entry in report.left} == left
    assert all("modeling_" in entry.reason for entry in report.left)
    with torch.no_grad():
        _, trace = traced(converted, **example)  # an independent list of kernels
    assert not trace.activations - {"where", "minimum", "clamp"}  # of masks and positions, which are integers
    assert report.end_to_end.noise_floor > 0
    assert report.end_to_end.hidden <= 1e-5
    assert set(report.kept) <= {
        "attention",
        "softmax",
        "normalisation",
        "product",
        "choice of entries",
        "largest entries",
    }
