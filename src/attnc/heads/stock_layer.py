"""The query and key projections of one attention layer of a stock checkpoint, read from its files without torch.

Only architectures whose scores are known here exactly are read. Everything that would change a score and is not known
(another rotation, another norm, a scale) is refused by name.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnc.converting.model_folder import ModelFolder
from attnc.errors import FileError, InputError
from attnc.exports.safe_files import CONFIG, PathLike, read_json, read_stored, stored_tensors
from attnc.numerics.arrays import Float

MAX_ENTRIES = 2**27
"""The most numbers of a tensor that is read: a projection of 8,192 × 16,384. As float64 it takes 1 GiB."""
MAX_STOCK_HEADS = 2**12
ROTARY = ("llama", "mistral", "qwen2", "smollm3")
"""The model types whose layers are an RMSNorm, projections q_proj and k_proj, and a rotation by position."""

HAS_BIAS = {"mistral": False, "qwen2": True}
"""Whether q_proj and k_proj have a bias, where the architecture decides it. Elsewhere `attention_bias` does."""


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """y = weight·c/√(mean c² + eps) + bias, where c is x, or x − mean x if `is_centred`."""

    weight: Float[np.ndarray, " width"]
    bias: Float[np.ndarray, " width"]
    eps: float
    is_centred: bool
    in_float32: bool  # whether it is computed in float32 whatever the dtype of the model


@dataclass(frozen=True, eq=False)
class StockLayer:
    """The part of an attention layer that makes its scores: scale·(W_Q y + b_Q)·(W_K y′ + b_K), y the normed input.

    With `rotation`, queries and keys are rotated by their positions: the pair (i, i + d_head/2) by
    position·rotation^(−2i/d_head).
    """

    name: str
    W_Q: Float[np.ndarray, "heads d_head width"]
    b_Q: Float[np.ndarray, "heads d_head"]
    W_K: Float[np.ndarray, "key_heads d_head width"]
    b_K: Float[np.ndarray, "key_heads d_head"]
    scale: float
    norm: LayerNorm | None
    rotation: float | None
    window: int | None  # the longest sequence that a query sees

    @property
    def num_heads(self) -> int:
        return len(self.W_Q)

    @property
    def width(self) -> int:
        return int(self.W_Q.shape[2])

    @property
    def d_head(self) -> int:
        return int(self.W_Q.shape[1])

    def key_head(self, head: int) -> int:
        """The number of the head of keys that a head of queries uses."""
        return head // (self.num_heads // len(self.W_K))


class StockModel:
    """The files of a checkpoint: a folder with config.json, or a safetensors file beside one."""

    def __init__(self, path: PathLike) -> None:
        given = os.fspath(path)
        if os.path.isdir(given):
            folder = ModelFolder.read(given)
            self.config, files = folder.config, folder.weight_paths
        else:
            beside = os.path.join(os.path.dirname(given), CONFIG)
            files = (given,)
            if not os.path.isfile(beside):
                raise FileError(f"{given!r} has no {CONFIG} beside it, which states the number of heads and the norm")
            self.config = read_json(beside)
        self.path = given
        self._tensors = {name: (file, stored) for file in files for name, stored in stored_tensors(file).items()}
        self.kind = self.config.get("model_type")
        if self.kind not in READERS:
            known = ", ".join(sorted(READERS))
            raise InputError(f"{given!r}: model_type is {self.kind!r:.60}. Layers of these types are known: {known}.")

    def layer(self, number: int) -> StockLayer:
        """Return the scores of one layer."""
        made = READERS[str(self.kind)](self, number)
        for W, heads in ((made.W_Q, "query"), (made.W_K, "key")):
            if not np.isfinite(W).all():
                raise FileError(
                    f"{self.path!r}: the {heads} projection of layer {number} has numbers that are not finite"
                )
        return made

    def embedding(self, tokens: Sequence[int], positions: Sequence[int]) -> Float[np.ndarray, "tokens width"]:
        """Return the embeddings of some tokens at some positions, as the first layer receives them."""
        if self.kind == "bert":
            raise InputError(
                "the token embeddings of bert are normed before the first layer: give hidden states instead"
            )
        table = self.tensor(
            "wte.weight" if self.kind == "gpt2" else "embed_tokens.weight", max_entries=2**31, rows=tokens
        )
        if self.kind == "gpt2":
            table = table + self.tensor("wpe.weight", rows=positions)
        return table

    def integer(self, *names: str, default: int | None = None) -> int:
        """Return a whole number ≥ 1 of the configuration, under the first of these names that it has."""
        for name in names:
            value = self.config.get(name)
            if value is not None:
                if type(value) is not int or not 1 <= value <= 2**31:
                    raise FileError(f"{self.path!r}: {CONFIG} states {name} = {value!r:.60}, not a whole number ≥ 1")
                return value
        if default is None:
            raise FileError(f"{self.path!r}: {CONFIG} has no {names[0]}")
        return default

    def number(self, name: str) -> float:
        """Return a finite number > 0 of the configuration."""
        value = self.config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise FileError(f"{self.path!r}: {CONFIG} states {name} = {value!r:.60}, not a number > 0")
        return float(value)

    def require(self, **wanted: Any) -> None:
        """Refuse the model if the configuration states anything else than these values, or nothing."""
        for name, value in wanted.items():
            found = self.config.get(name, value)
            if found not in (value, None):
                raise InputError(
                    f"{self.path!r}: {CONFIG} states {name} = {found!r:.60}; scores are known for {value!r}"
                )

    def has(self, ending: str) -> bool:
        return any(_ends(name, ending) for name in self._tensors)

    def tensor(
        self,
        ending: str,
        shape: tuple[int, ...] | None = None,
        *,
        max_entries: int = MAX_ENTRIES,
        rows: Sequence[int] | None = None,
    ) -> np.ndarray:
        """Return the one tensor whose name has this ending, in float64, of a given shape; or some of its rows."""
        found = [name for name in self._tensors if _ends(name, ending)]
        if len(found) != 1:
            what = "there is no tensor" if not found else f"{len(found)} tensors have a name"
            raise FileError(f"{self.path!r}: {what} that ends in {ending!r}")
        file, stored = self._tensors[found[0]]
        if math.prod(stored.shape) > max_entries:
            raise FileError(
                f"{self.path!r}: {found[0]!r} has the shape {stored.shape}, more than {max_entries:,} numbers"
            )
        if shape is not None and stored.shape != shape:
            raise FileError(f"{self.path!r}: {found[0]!r} has the shape {stored.shape}; {CONFIG} implies {shape}")
        if rows is None:
            return read_stored(file, stored).astype(np.float64)
        if len(stored.shape) != 2:
            raise FileError(f"{self.path!r}: {found[0]!r} has the shape {stored.shape}, not that of a table")
        for row in rows:
            if not 0 <= row < stored.shape[0]:
                raise InputError(f"{row} is not a row of {found[0]!r}, which has {stored.shape[0]:,}")
        return np.stack([read_stored(file, stored.row(row)).astype(np.float64) for row in rows])


def _ends(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f".{ending}")


def _heads(model: StockModel, width: int) -> tuple[int, int, int]:
    """Return the numbers of heads of queries and of keys, and the width of a head."""
    heads = model.integer("num_attention_heads", "n_head")
    keys = model.integer("num_key_value_heads", default=heads)
    if heads > MAX_STOCK_HEADS or heads % keys:
        raise FileError(f"{model.path!r}: {CONFIG} states {heads:,} heads of queries and {keys:,} of keys")
    if model.config.get("head_dim") is None and width % heads:
        raise FileError(f"{model.path!r}: {CONFIG} states a width of {width:,} for {heads:,} heads")
    return heads, keys, model.integer("head_dim", default=width // heads)


def _rotary_layer(model: StockModel, number: int) -> StockLayer:
    width = model.integer("hidden_size")
    heads, key_heads, d_head = _heads(model, width)
    _require_number(model, number, model.integer("num_hidden_layers"))
    prefix = f"layers.{number}."
    model.require(partial_rotary_factor=1.0, pretraining_tp=1)
    if model.has(f"{prefix}self_attn.q_norm.weight"):
        raise InputError(f"{model.path!r}: layer {number} norms its queries and keys, which is not known here")

    has_bias = HAS_BIAS.get(str(model.kind), model.config.get("attention_bias") is True)

    def projection(name: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        W = model.tensor(f"{prefix}self_attn.{name}.weight", (count * d_head, width)).reshape(count, d_head, width)
        b = model.tensor(f"{prefix}self_attn.{name}.bias", (count * d_head,)) if has_bias else np.zeros(count * d_head)
        return W, b.reshape(count, d_head)

    (W_Q, b_Q), (W_K, b_K) = projection("q_proj", heads), projection("k_proj", key_heads)
    weight = model.tensor(f"{prefix}input_layernorm.weight", (width,))
    norm = LayerNorm(weight, np.zeros(width), model.number("rms_norm_eps"), is_centred=False, in_float32=True)
    return StockLayer(
        f"{prefix}self_attn", W_Q, b_Q, W_K, b_K, d_head**-0.5, norm, _rotation(model, number), _window(model)
    )


def _rotation(model: StockModel, number: int) -> float | None:
    """Return the base of the angles, or None if the layer does not rotate."""
    if model.kind == "smollm3":
        rotates = model.config.get("no_rope_layers")
        if rotates is None:
            rotates = [(i + 1) % model.integer("no_rope_layer_interval", default=4) != 0 for i in range(number + 1)]
        if not isinstance(rotates, list) or len(rotates) <= number or rotates[number] not in (0, 1):
            raise FileError(f"{model.path!r}: {CONFIG} has no 0 or 1 for layer {number} in no_rope_layers")
        if not rotates[number]:
            return None
    stated = model.config.get("rope_parameters") or model.config.get("rope_scaling") or {}
    if not isinstance(stated, Mapping):
        raise FileError(f"{model.path!r}: {CONFIG} states no parameters of the rotation as an object")
    kind = stated.get("rope_type", stated.get("type", "default"))
    if kind != "default" or stated.get("partial_rotary_factor", 1) != 1:
        raise InputError(
            f"{model.path!r}: the rotation by position is of type {kind!r:.60}; only the default one is known"
        )
    theta = stated.get("rope_theta", model.config.get("rope_theta"))
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 1 <= theta < 2**60:
        raise FileError(f"{model.path!r}: {CONFIG} states rope_theta = {theta!r:.60}, not a number ≥ 1")
    return float(theta)


def _window(model: StockModel) -> int | None:
    window = model.config.get("sliding_window")
    if window is None or model.config.get("use_sliding_window") is False:
        return None
    return model.integer("sliding_window")


def _gpt2_layer(model: StockModel, number: int) -> StockLayer:
    width = model.integer("n_embd")
    heads, _, d_head = _heads(model, width)
    _require_number(model, number, model.integer("n_layer"))
    if heads * d_head != width:
        raise FileError(f"{model.path!r}: {CONFIG} states {heads} heads of width {d_head} for a width of {width}")
    prefix = f"h.{number}."
    W = model.tensor(f"{prefix}attn.c_attn.weight", (width, 3 * width)).T.reshape(3, heads, d_head, width)
    b = model.tensor(f"{prefix}attn.c_attn.bias", (3 * width,)).reshape(3, heads, d_head)
    model.require(scale_attn_weights=True)
    scale = d_head**-0.5
    if model.config.get("scale_attn_by_inverse_layer_idx"):
        scale /= number + 1
    weight, bias = (model.tensor(f"{prefix}ln_1.{part}", (width,)) for part in ("weight", "bias"))
    norm = LayerNorm(weight, bias, model.number("layer_norm_epsilon"), is_centred=True, in_float32=False)
    return StockLayer(f"{prefix}attn", W[0], b[0], W[1], b[1], scale, norm, None, None)


def _bert_layer(model: StockModel, number: int) -> StockLayer:
    width = model.integer("hidden_size")
    heads, _, d_head = _heads(model, width)
    _require_number(model, number, model.integer("num_hidden_layers"))
    model.require(position_embedding_type="absolute")
    prefix = f"encoder.layer.{number}.attention.self."

    def projection(name: str) -> tuple[np.ndarray, np.ndarray]:
        W = model.tensor(f"{prefix}{name}.weight", (heads * d_head, width)).reshape(heads, d_head, width)
        return W, model.tensor(f"{prefix}{name}.bias", (heads * d_head,)).reshape(heads, d_head)

    (W_Q, b_Q), (W_K, b_K) = projection("query"), projection("key")
    return StockLayer(prefix.rstrip("."), W_Q, b_Q, W_K, b_K, d_head**-0.5, None, None, None)


def _require_number(model: StockModel, number: int, count: int) -> None:
    if not 0 <= number < count:
        raise InputError(f"layer {number}: {model.path!r} has the layers 0 to {count - 1}")


READERS: dict[str, Callable[[StockModel, int], StockLayer]] = {
    **dict.fromkeys(ROTARY, _rotary_layer),
    "gpt2": _gpt2_layer,
    "bert": _bert_layer,
}
"""The readers of layers by the `model_type` of config.json."""
