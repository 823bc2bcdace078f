"""A network with constant keys laid out as a stock decoder: embeddings, projections and norms of a SmolLM3 checkpoint.

The residual stream has named channels. Token k of the prefix carries key k of every head, in channels of its own that
no head writes. The query token carries 1 and, through `inputs_embeds`, the variables. A head reads affine combinations
of the channels of the query token, and writes one channel for each of its outputs. The vocabulary has, after the words
of the prefix, one word for the query, one for padding, one for each variable (the direction in which it is embedded)
and one for each output (the direction in which it is read). With tied embeddings, the logit of the last is the output.

    silence   a token that is no key of a head has the score −2^κ there, more than SILENCE below every other softmax
    norm      one channel holds M = 2^m and the width is 4^w. If the other squares add up to less than 2^−26·M², the
              computed mean square is M²/4^w, its inverse root 2^(w−m), and the norm's weight 2^(m−w) undoes it
    scale     scores are divided by √d_head, a power of two for d_head = 4^n; W_Q is multiplied by it
All scales are powers of two, so that every channel but the pinned one is at most about 1, and scaling does not round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from attnc.errors import InputError
from attnc.ir.building import AffineBuilder
from attnc.ir.layers import EVERY_QUERY, Attention, Head, Layer, Mask
from attnc.ir.program import Program
from attnc.ir.soft_head import SoftHead
from attnc.ir.spec import check
from attnc.ir.summing import MOST_KEYS
from attnc.numerics.arrays import Float
from attnc.targets.box import Box

PINNED, ONE = "pinned", "one"
"""The channel that holds M, and the channel of the query token that holds 1."""
CONTEXT = 2**15
"""The longest sequence for which the certificate holds, prefix included: `max_position_embeddings`."""
MOST_PREFIX = 2**14
"""The longest prefix: half of the context is left for queries."""
MOST_CHANNELS = 4**6
"""The largest width. The matrices of a layer of this width and 64 heads take 64 MB."""
MOST_LAYERS = 62
"""The most layers: as many as a program of the checker can have, with the embedding and the read-out."""
D_HEADS = (16, 256)
"""Widths of a head whose √√d_head is a power of two, too: some kernels multiply queries and keys by d_head^(−1/4)."""
SILENCE = 120.0
"""Least distance of a silent score below the largest one: e^−104 is 0 in float32, and 16 are left for rounding."""
ENERGY = 2.0**-26
"""Largest share of M² that the squares of all other channels may have together: a quarter of the rounding's limit."""
NORM_EPS = 1e-6
"""`rms_norm_eps`. It vanishes beside the mean square, and keeps an all-zero embedding finite."""
LEAST_PINNED = 16
"""Least m: with it the mean square of the widest model is 2^20, and 1e-6 is below a 2^24th of its rounding."""
MOST_PINNED = 50
"""Largest m: M² and its sums are far from overflow."""
LEAST_ENTRY = 2.0**-60
"""Smaller entries of embeddings are stored as 0, far below rounding: they could underflow in a norm."""
MOST_BYTES = 2**28
"""The most bytes of tensors that the checker reads."""
QUERY, PAD = "<query>", "<pad>"


@dataclass(frozen=True, eq=False)
class StockHead:
    """Σ_k softmax_k(slopes_k·q + offsets_k)·values_k, where q_i is the combination queries[i] of channels.

    Attributes
    ----------
    name : str
        The name of the head, which no other has.
    layer : int
        The number of its layer, from 0.
    queries : tuple of mappings
        {channel: coefficient} for each component of the query. The channel "one" holds 1.
    keys : SoftHead
        One key for each of the first tokens of the prefix. Its values are constants.
    writes : tuple of str
        The channel of each output.
    """

    name: str
    layer: int
    queries: tuple[Mapping[str, float], ...]
    keys: SoftHead[np.ndarray]
    writes: tuple[str, ...]

    @property
    def key_channels(self) -> tuple[str, ...]:
        """The channels of the prefix tokens that hold its keys: the slopes, and the offset."""
        return (*(f"key{i}.{self.name}" for i in range(len(self.queries))), f"bias.{self.name}")

    @property
    def value_channels(self) -> tuple[str, ...]:
        return tuple(f"value{m}.{self.name}" for m in range(len(self.writes)))


@dataclass(frozen=True, eq=False)
class StockNetwork:
    """The heads of a network with constant keys, and its outputs as combinations of channels."""

    box: Box
    heads: tuple[StockHead, ...]
    outputs: tuple[Mapping[str, float], ...]
    output_shape: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        """A decoder has at least one layer."""
        return max((head.layer + 1 for head in self.heads), default=1)

    @property
    def num_slots(self) -> int:
        """The largest number of heads of a layer."""
        counts = np.bincount([head.layer for head in self.heads], minlength=1)
        return max(1, int(counts.max()))

    @property
    def prefix(self) -> int:
        return max((head.keys.num_keys for head in self.heads), default=1)


def input_channel(name: str) -> str:
    return f"input.{name}"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The tensors of a stock decoder, with the names of its channels, words and heads.

    Attributes
    ----------
    network : StockNetwork
        The heads that were laid out.
    channels : tuple of str
        The names of the residual channels in use. Channel i is column i of the embeddings; later columns are 0.
    words : tuple of str
        The vocabulary.
    embedding : ndarray
        One row per word.
    W_Q, W_K, W_V, W_O : ndarray
        (layers, width, heads·d_head), and for W_O (layers, heads·d_head, width): a row vector is multiplied from the
        left. Head i of a layer has the columns i·d_head to (i + 1)·d_head.
    slots : dict
        The name of a head → (layer, slot).
    pinned : int
        m: the pinned channel holds 2^m.
    """

    network: StockNetwork
    channels: tuple[str, ...]
    words: tuple[str, ...]
    embedding: Float[np.ndarray, "words width"]
    W_Q: Float[np.ndarray, "layers width slots"]
    W_K: Float[np.ndarray, "layers width slots"]
    W_V: Float[np.ndarray, "layers width slots"]
    W_O: Float[np.ndarray, "layers slots width"]
    slots: Mapping[str, tuple[int, int]]
    d_head: int
    pinned: int

    @property
    def width(self) -> int:
        return int(self.embedding.shape[1])

    @property
    def num_heads(self) -> int:
        """The number of heads of each layer. Slots that no head uses are 0."""
        return int(self.W_Q.shape[2]) // self.d_head

    @property
    def num_layers(self) -> int:
        return len(self.W_Q)

    @cached_property
    def columns(self) -> dict[str, int]:
        """The number of each channel."""
        return {name: i for i, name in enumerate(self.channels)}

    def columns_of(self, head: str) -> tuple[int, slice]:
        """Return the layer of a head, and its columns in W_Q, W_K and W_V, which are its rows in W_O."""
        layer, slot = self.slots[head]
        return layer, slice(slot * self.d_head, (slot + 1) * self.d_head)

    @property
    def prefix(self) -> tuple[int, ...]:
        """The words of the prefix, in order."""
        return tuple(range(self.network.prefix))

    @property
    def query(self) -> int:
        return self.words.index(QUERY)

    @property
    def pad(self) -> int:
        return self.words.index(PAD)

    @property
    def variables(self) -> tuple[int, ...]:
        """The words of the variables."""
        return tuple(self.pad + 1 + i for i in range(self.network.box.d))

    @property
    def outputs(self) -> tuple[int, ...]:
        """The words of the outputs."""
        return tuple(self.pad + 1 + self.network.box.d + j for j in range(len(self.network.outputs)))

    def config(self) -> dict[str, Any]:
        """Return config.json, with the names of channels, words and heads under the key "attnc"."""
        layers = self.num_layers
        return {
            "architectures": ["SmolLM3ForCausalLM"],
            "model_type": "smollm3",
            "dtype": "float32",
            "vocab_size": len(self.words),
            "hidden_size": self.width,
            "intermediate_size": 1,
            "num_hidden_layers": layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_heads,
            "head_dim": self.d_head,
            "hidden_act": "silu",
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": NORM_EPS,
            "use_cache": False,
            "pad_token_id": self.pad,
            "bos_token_id": None,
            "eos_token_id": None,
            "no_rope_layers": [0] * layers,
            "no_rope_layer_interval": layers + 1,
            "layer_types": ["full_attention"] * layers,
            "use_sliding_window": False,
            "sliding_window": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "tie_word_embeddings": True,
        }

    def names(self) -> dict[str, Any]:
        """Return the names of channels, words and heads, and the words of each role."""
        return {
            "channels": list(self.channels),
            "words": list(self.words),
            "prefix": self.network.prefix,
            "query": self.query,
            "pad": self.pad,
            "variables": list(self.variables),
            "outputs": list(self.outputs),
            "heads": [
                {
                    "name": head.name,
                    "layer": self.slots[head.name][0],
                    "slot": self.slots[head.name][1],
                    "keys": head.keys.num_keys,
                    "reads": sorted({name for query in head.queries for name in query}),
                    "writes": list(head.writes),
                }
                for head in self.network.heads
            ],
        }

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the tensors under the names that transformers gives them."""
        norm = np.full(self.width, self.norm_weight, np.float32)
        found = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": norm}
        nothing = np.zeros((1, self.width), np.float32)
        for i in range(self.num_layers):
            where = f"model.layers.{i}"
            for name, W in (("q", self.W_Q), ("k", self.W_K), ("v", self.W_V), ("o", self.W_O)):
                found[f"{where}.self_attn.{name}_proj.weight"] = np.ascontiguousarray(W[i].T)
            found[f"{where}.mlp.gate_proj.weight"] = found[f"{where}.mlp.up_proj.weight"] = nothing
            found[f"{where}.mlp.down_proj.weight"] = nothing.T.copy()
            found[f"{where}.input_layernorm.weight"] = found[f"{where}.post_attention_layernorm.weight"] = norm
        return found

    @property
    def norm_weight(self) -> float:
        return 2.0**self.pinned / math.sqrt(self.width)

    @property
    def underflow(self) -> float:
        """A bound of the error of any output by underflow in the last norm, and in the scales of inputs.

        A number loses at most 2^−150 when it is divided by M/√D, which the norm's weights multiply. Eight times that
        leaves room for the checker.
        """
        scale = min(1.0, *map(float, self._embedded.values()))
        read = float(np.abs(self.embedding[list(self.outputs)]).sum(axis=1, dtype=np.float64).max())
        return self.norm_weight * 2.0**-146 / scale * read

    def program(self) -> Program:
        """Return the same computation as layers of attnc, for one query token, with the weights of the tensors.

        Token 0 is the query token, and the prefix follows. A head sees its keys alone; silent tokens are masked. There
        are more tokens than engines sum in blocks, so that a bound on rounding covers sums in any order. The scales of
        the inputs are in the maps that read them: powers of two do not round, wherever they are.
        """
        network, E, columns = self.network, self.embedding, self.columns
        if not network.heads:
            return self._affine_program()
        tokens, prefix = max(1 + network.prefix, MOST_KEYS + 1), np.arange(network.prefix)
        inputs, read_in = [f"in.{i}" for i in range(network.box.d)], [*map(input_channel, network.box.names)]
        moving, layers = tuple(read_in), list[Layer]()  # `moving` are the channels of the query token so far
        for number in range(network.num_layers):
            heads = [head for head in network.heads if head.layer == number]
            own = [name for head in heads for name in (*head.key_channels, *head.value_channels)]
            channels = (*moving, *(name for head in heads for name in head.writes), ONE, *own)
            place = AffineBuilder(tokens if layers else 1, layers[-1].channels if layers else inputs, tokens, channels)
            for channel in own:
                place.set(1 + prefix, channel, E[prefix, columns[channel]])
            place.set(0, ONE, E[self.query, columns[ONE]])
            if layers:
                place.copy(0, 0, moving)
            else:
                for name, channel in zip(inputs, read_in, strict=True):
                    place.link(0, channel, 0, name)
            layers.append(place.build(f"place{number + 1}", np.float32))
            attending = tuple(self._head(head, channels, tokens) for head in heads)
            layers.append(Attention(f"attend{number + 1}", attending, channels, residual=True))
            moving = (*moving, *(name for head in heads for name in head.writes))
        names = [f"out.{j}" for j in range(len(self.outputs))]
        read = AffineBuilder(tokens, layers[-1].channels, 1, names)
        for name, word in zip(names, self.outputs, strict=True):
            read.set(0, name, E[word, columns[ONE]])
            for channel in moving:
                read.link(0, name, 0, channel, E[word, columns[channel]] * self._embedded.get(channel, 1.0))
        layers.append(read.build("read", np.float32))
        return check(Program(tuple(layers), ((network.box.d,),), network.output_shape))

    def _affine_program(self) -> Program:
        """Return the program of a network without heads: one affine map."""
        inputs = [f"in.{i}" for i in range(self.network.box.d)]
        names = [f"out.{j}" for j in range(len(self.outputs))]
        read = AffineBuilder(1, inputs, 1, names)
        for name, word in zip(names, self.outputs, strict=True):
            read.set(0, name, self.embedding[word, self.columns[ONE]])
            for given, (channel, scale) in zip(inputs, self._embedded.items(), strict=True):
                read.link(0, name, 0, given, self.embedding[word, self.columns[channel]] * scale)
        return check(Program((read.build("read", np.float32),), ((len(inputs),),), self.network.output_shape))

    @property
    def _embedded(self) -> dict[str, np.float32]:
        """The scale of each input in its channel."""
        columns = {name: self.columns[input_channel(name)] for name in self.network.box.names}
        pairs = zip(self.variables, columns.items(), strict=True)
        return {input_channel(name): self.embedding[word, column] for word, (name, column) in pairs}

    def _head(self, head: StockHead, channels: Sequence[str], tokens: int) -> Head:
        layer, slot = self.columns_of(head.name)
        rows, first = [self.columns[name] for name in channels], slot.start
        scales = np.array([self._embedded.get(name, 1.0) for name in channels], np.float32)
        scores, values = slice(first, first + len(head.key_channels)), slice(first, first + len(head.writes))
        segments = np.full(tokens, 1, np.int32)
        segments[1 : 1 + head.keys.num_keys] = EVERY_QUERY
        return Head(
            self.W_Q[layer][rows, scores] * (scales / np.float32(math.sqrt(self.d_head)))[:, None],
            self.W_K[layer][rows, scores],
            self.W_V[layer][rows, values],
            self.W_O[layer][values][:, rows],
            Mask(np.zeros(tokens, np.int32), segments),
        )


def lay_out(network: StockNetwork) -> Checkpoint:
    """Return the checkpoint of a network. Raise InputError if it does not fit into a stock decoder."""
    _require_fit(network)
    tensors = _Tensors(network)
    for head in network.heads:
        tensors.add_head(head)
    return tensors.checkpoint()


class _Tensors:
    """The tensors of a checkpoint in float64, while heads are added to them."""

    def __init__(self, network: StockNetwork) -> None:
        self.network, box, heads = network, network.box, network.heads
        keyed = (name for head in heads for name in (*head.key_channels, *head.value_channels))
        written = [name for head in heads for name in head.writes]
        self.channels = (PINNED, ONE, *map(input_channel, box.names), *written, *keyed)
        self.columns = {name: i for i, name in enumerate(self.channels)}
        self.width, self.d_head = _width(self.channels), _d_head(heads)
        _require_small(network, self.width, self.d_head)
        variables, outputs = (f"<variable {name}>" for name in box.names), range(len(network.outputs))
        keys = (f"<key{k}>" for k in range(network.prefix))
        self.words = (*keys, QUERY, PAD, *variables, *(f"<output {j}>" for j in outputs))
        self.query, self.pad = self.words.index(QUERY), self.words.index(PAD)
        layers, rows = network.num_layers, network.num_slots * self.d_head
        self.E = np.zeros((len(self.words), self.width))
        self.W_Q, self.W_K, self.W_V = (np.zeros((layers, self.width, rows)) for _ in range(3))
        self.W_O = np.zeros((layers, rows, self.width))
        self.slots: dict[str, tuple[int, int]] = {}
        self.units = {ONE: 1.0, **dict.fromkeys(written, 1.0)}  # the number that 1 in a channel stands for
        self.ranges = {ONE: (1.0, 1.0)}  # of the numbers that channels stand for
        self._embed_words()

    def _embed_words(self) -> None:
        """Set the embeddings of the query, of the variables and of the outputs."""
        box = self.network.box
        self.E[self.query, self.columns[ONE]] = 1.0
        for i, (name, ends) in enumerate(box.as_dict().items()):
            channel, unit = input_channel(name), _power_above(max(map(abs, ends)))
            self.E[self.pad + 1 + i, self.columns[channel]] = 1 / unit
            self.units[channel], self.ranges[channel] = unit, ends
        for j, output in enumerate(self.network.outputs):
            for name, c in output.items():
                self.E[self.pad + 1 + box.d + j, self.columns[name]] = c * self.units[name]

    def add_head(self, head: StockHead) -> None:
        """Set the projections of a head, and its keys and values in the tokens of the prefix."""
        slot, E, keys = sum(layer == head.layer for layer, _ in self.slots.values()), self.E, head.keys
        self.slots[head.name] = head.layer, slot
        first, root = slot * self.d_head, math.sqrt(self.d_head)
        W_Q, W_K, W_V, W_O = (W[head.layer] for W in (self.W_Q, self.W_K, self.W_V, self.W_O))
        for i, combination in enumerate((*head.queries, {ONE: 1.0})):
            for name, c in combination.items():
                W_Q[self.columns[name], first + i] = root * c * self.units[name]
        silent = max(float(np.abs(keys.offsets).max()), SILENCE - self._least_top(head))
        sizes = (*np.abs(keys.slopes).max(axis=0).tolist(), silent)
        for i, (channel, size) in enumerate(zip(head.key_channels, sizes, strict=True)):
            column, unit = self.columns[channel], _power_above(size)
            W_K[column, first + i] = unit
            E[: keys.num_keys, column] = (keys.offsets if i == len(head.queries) else keys.slopes[:, i]) / unit
        E[keys.num_keys : self.pad + 1, self.columns[head.key_channels[-1]]] = -1.0  # the bias of silent tokens
        for m, (channel, target) in enumerate(zip(head.value_channels, head.writes, strict=True)):
            column, largest = self.columns[channel], float(np.abs(keys.values[:, m]).max())
            W_V[column, first + m] = _power_above(largest)
            W_O[first + m, self.columns[target]] = 1.0
            E[: keys.num_keys, column] = keys.values[:, m] / _power_above(largest)
            self.ranges[target] = (-largest, largest)

    def _least_top(self, head: StockHead) -> float:
        """Return a lower bound, up to rounding, of the largest score of a head over all states."""
        ends = [[(c, *self.ranges[name]) for name, c in combination.items()] for combination in head.queries]
        middle = np.array([sum(c * (lo / 2 + hi / 2) for c, lo, hi in terms) for terms in ends])
        half = np.array([sum(abs(c) * (hi / 2 - lo / 2) for c, lo, hi in terms) for terms in ends])
        keys = head.keys
        return float((keys.slopes @ middle + keys.offsets - np.abs(keys.slopes) @ half).max())

    def checkpoint(self) -> Checkpoint:
        """Pin the norms, and return the checkpoint in float32."""
        tokens = self.E[: self.pad + 1]
        largest = np.abs(tokens).max(axis=0)
        for name, (lo, hi) in self.ranges.items():
            largest[self.columns[name]] = max(abs(lo), abs(hi)) / self.units[name]
        energy = float((largest**2).sum()) * (1 + 2.0**-8)  # the checker multiplies the channels by 1 + 2^−10
        pinned = max(LEAST_PINNED, math.ceil(math.log2(energy / ENERGY) / 2))
        if pinned > MOST_PINNED:
            raise InputError(
                f"the numbers of the network are too large for the norms of a stock checkpoint: a channel holds up to "
                f"{largest.max():.3g}, and about 1e11 fits. Scale the function."
            )
        tokens[np.abs(tokens) < LEAST_ENTRY] = 0.0
        tokens[:, self.columns[PINNED]] = 2.0**pinned
        with np.errstate(over="ignore", under="ignore"):
            E, *W = (array.astype(np.float32) for array in (self.E, self.W_Q, self.W_K, self.W_V, self.W_O))
        if not all(np.isfinite(array).all() for array in (E, *W)):
            raise InputError("a number of the network overflows float32, the arithmetic of a stock checkpoint")
        W_Q, W_K, W_V, W_O = W
        return Checkpoint(
            self.network,
            self.channels,
            self.words,
            embedding=E,
            W_Q=W_Q,
            W_K=W_K,
            W_V=W_V,
            W_O=W_O,
            slots=self.slots,
            d_head=self.d_head,
            pinned=pinned,
        )


def _width(channels: Sequence[str]) -> int:
    """Return the smallest power of 4, from 16 on, that has room for the channels."""
    width = next((4**n for n in range(2, 7) if 4**n >= len(channels)), None)
    if width is None:
        raise InputError(
            f"the network has {len(channels):,} channels, and a stock checkpoint has at most {MOST_CHANNELS:,}: export "
            "an expression with fewer heads, or choose a larger eps"
        )
    return width


def _d_head(heads: Sequence[StockHead]) -> int:
    needed = max((max(len(head.key_channels), len(head.writes)) for head in heads), default=1)
    d_head = next((d for d in D_HEADS if needed <= d), None)
    if d_head is None:
        raise InputError(
            f"a head has {needed - 1:,} inputs or {needed:,} outputs, and a stock checkpoint has at most "
            f"{D_HEADS[-1] - 1}: export a function of fewer variables or outputs"
        )
    return d_head


def _require_fit(network: StockNetwork) -> None:
    if not network.box.is_bounded:
        raise InputError(
            f"the box {network.box} is not bounded, and a stock checkpoint computes on bounded boxes alone"
        )
    if network.prefix > MOST_PREFIX:
        raise InputError(
            f"a head has {network.prefix:,} keys, and the prefix of a stock checkpoint has at most {MOST_PREFIX:,} "
            "tokens: choose a larger eps, or a construction with fewer keys (compose has few)"
        )
    if network.num_layers > MOST_LAYERS:
        raise InputError(f"the network has {network.num_layers} layers, and a stock checkpoint at most {MOST_LAYERS}")


def _require_small(network: StockNetwork, width: int, d_head: int) -> None:
    numbers = network.num_layers * 4 * network.num_slots * d_head * width + (network.prefix + 2) * width
    if 4 * numbers > MOST_BYTES:
        raise InputError(
            f"the checkpoint would take {4 * numbers:,} bytes, and `attnc verify` reads at most {MOST_BYTES:,}: export "
            "an expression with fewer heads"
        )


def _power_above(size: float) -> float:
    """Return the smallest power of two that is at least this size, or 1 for 0."""
    return 2.0 ** math.ceil(math.log2(size)) if size > 0 else 1.0
