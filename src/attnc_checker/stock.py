"""Stock checkpoints: a decoder of transformers, read from its own config.json and model.safetensors as a program.

A sequence has the prefix first, then query tokens and padding. The stream of a query token is the sum of its embedding,
of the directions of the variables times their values, and of the outputs of heads. These are its pins, all checked:

  norms      One channel holds M = 2^m in every token, and nothing writes or reads it. The width is D = 4^w. The squares
             of all other channels add up to less than 2^−26·M², for every token and after every layer. A partial sum
             that includes M² then rounds to M²: the spacing above M² is 2^−23·M². So the mean square is M²/D, up to
             `rms_norm_eps`, which is below half its spacing, its inverse root is 2^(w−m), and the norm's weights
             2^(m−w) undo it. A number times 2^(w−m) is exact unless it underflows. This costs `flush` at most.
  attention  No rotary positions, biases or windows. Scores are divided by a power of two. No channel that W_K or W_V
             reads is ever written, or depends on a variable: keys and values of every token are constants.
  silence    For each head, the query and padding tokens have one and the same key, and values 0; so have all tokens of
             the prefix with that key. In every state that a query can have, this key is more than SILENCE behind a key
             of the head. Its weight is below e^−80, and counts like weights that engines may lose (`Head.silent`).
  others     Feed-forward weights are 0. Embeddings are tied.

The causal mask hides nothing from a query but later tokens, which are silent. So the rest is a program of attention
layers, each with a residual, in which a head sees its own keys; sums over keys are in any order.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from flint import arb, fmpq

from attnc_checker.claims import ByLeaves, Claim
from attnc_checker.files import BadFile, Object, Refused, Tensor, are_sizes, require
from attnc_checker.forms import ONE, SMALLEST, Form, Terms, span
from attnc_checker.network import Reduction
from attnc_checker.program import (
    MAX_LAYERS,
    SEEN_BY_ALL,
    AffineLayer,
    AttentionLayer,
    Constants,
    HeadWeights,
    Mask,
    Matrix,
    Program,
    Stream,
    exact,
)
from attnc_checker.rounding import Arithmetic
from attnc_checker.vectors import most, total

FAMILY, FORMAT = "attnc.stock/", "attnc.stock/1"
NAMES = {"format", "expression", "box", "channels", "words", "heads", "prefix", "query", "pad", "variables", "outputs"}
"""The fields of `attnc` in config.json."""
SILENCE = 81
"""Weights of keys that are behind by 80 may be lost. One more makes up for the rounding of the difference of scores."""
ENERGY = fmpq(1, 2**26)
GROWTH = 1 + fmpq(1, 2**10)
"""Channels and their squares, as computed, are larger than the exact ones by less than this factor."""
MOST_TOKENS, LARGEST_M = 2**20, 50
"""The longest context: sums of as many terms are covered. The largest m: M² is far from overflow."""
D_HEADS = {16: 4, 256: 16}
"""d_head: √d_head. Its root is a power of two, too: kernels may multiply queries and keys by d_head^(−1/4)."""
OTHER = 1
"""The segment of keys that no query sees."""

Rows = list[dict[int, fmpq]]
"""A matrix by rows: the non-zero entries of each, by column."""


def is_stock(config: object) -> bool:
    """Whether this is the config.json of a stock checkpoint, of any number."""
    return isinstance(config, dict) and str(_format(config)).startswith(FAMILY)


def _format(config: Object) -> object:
    names = config.get("attnc")
    return names.get("format") if isinstance(names, dict) else None


class StockProgram(Program):
    """The checkpoint as a program of one query token. Token 0 is the query, and the prefix follows."""

    has_silent_keys = True

    def __init__(self, config: Any, tensors: dict[str, Tensor], d: int) -> None:
        try:
            self._read_config(config, d)
            self._read_tensors(dict(tensors))
            self._require_pinned_structure()
            self._build()
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise BadFile(
                f"config.json does not describe a stock checkpoint: a field is missing or is of another kind ({error})"
            ) from None

    def _read_config(self, config: Any, d: int) -> None:
        names = config["attnc"]
        layers, width, heads = (config[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
        _need(are_sizes([layers, width, heads]) and 1 <= layers <= MAX_LAYERS - 2 and heads >= 1, "its sizes")
        _need(any(width == 4**w for w in range(2, 7)), f"a width of {width} is no power of 4 from 16 to 4096")
        _need(config["head_dim"] in D_HEADS and type(config["head_dim"]) is int, "head_dim is neither 16 nor 256")
        words, context = config["vocab_size"], config["max_position_embeddings"]
        _need(are_sizes([words, context, config["intermediate_size"]]), "its sizes")
        _need(context <= MOST_TOKENS, f"a context of more than {MOST_TOKENS:,} tokens")
        expected: dict[str, object] = {
            "architectures": ["SmolLM3ForCausalLM"],
            "model_type": "smollm3",
            "dtype": "float32",
            "vocab_size": words,
            "hidden_size": width,
            "intermediate_size": config["intermediate_size"],
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": config["head_dim"],
            "hidden_act": "silu",
            "max_position_embeddings": context,
            "rms_norm_eps": config["rms_norm_eps"],
            "use_cache": False,
            "pad_token_id": names["pad"],
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
            "attnc": names,
        }
        wrong = [
            key for key in expected.keys() | config.keys() if not _is_same(config.get(key, ...), expected.get(key))
        ]
        _need(not wrong and set(config) == set(expected), f"its fields {sorted(wrong)[:3]}")
        _need(set(names) == NAMES, "the fields of attnc")
        self.width, self.num_layers, self.num_slots, self.d_head = width, layers, heads, config["head_dim"]
        self.num_words, self.context, self.norm_eps = words, context, config["rms_norm_eps"]
        self.intermediate = config["intermediate_size"]
        _need(type(self.norm_eps) is float and self.norm_eps > 0, "rms_norm_eps")
        self.prefix, self.query, self.pad = names["prefix"], names["query"], names["pad"]
        self.variables, self.output_words = names["variables"], names["outputs"]
        _need(are_sizes([self.prefix, self.query, self.pad]) and are_sizes(self.variables), "its words")
        used = [*range(self.prefix), self.query, self.pad, *self.variables, *self.output_words]
        _need(are_sizes(self.output_words) and used == list(range(words)), "its words")
        _need(1 <= self.prefix < context and len(self.variables) == d and len(self.output_words) >= 1, "its words")
        channels, texts = names["channels"], names["words"]
        are_texts = all(type(text) is str for text in (*channels, *texts))
        _need(are_texts and len(set(channels)) == len(channels) <= width and "pinned" in channels, "its channels")
        keys, variables, outputs = range(self.prefix), [*names["box"]], range(len(self.output_words))
        known = [*(f"<key{k}>" for k in keys), "<query>", "<pad>", *(f"<variable {name}>" for name in variables)]
        _need(texts == [*known, *(f"<output {j}>" for j in outputs)], "the names of its words")
        self.channel_names = [*channels, *(f"unnamed.{i}" for i in range(len(channels), width))]
        _need(len(set(self.channel_names)) == width, "its channels")
        self.pinned, self.described = channels.index("pinned"), names["heads"]

    def _read_tensors(self, tensors: dict[str, Tensor]) -> None:
        D, slots, hidden = self.width, self.num_slots * self.d_head, self.intermediate

        def taken(name: str, *shape: int) -> Sequence[float]:
            _need(name in tensors, f"the tensor {name!r} is missing")
            found = tensors.pop(name)
            fits = found.dtype == "F32" and found.shape == shape
            _need(fits, f"the tensor {name!r} is {found.dtype} of shape {found.shape}, not F32 of {shape}")
            return found.values

        def rows(name: str, count: int, width: int) -> Rows:
            values = taken(name, count, width)
            parts = (values[i * width : (i + 1) * width] for i in range(count))
            return [{c: exact(x) for c, x in enumerate(part) if x} for part in parts]

        self.E = rows("model.embed_tokens.weight", self.num_words, D)
        norms = {*taken("model.norm.weight", D)}
        self.W_Q, self.W_K, self.W_V, self.W_O = list[Rows](), list[Rows](), list[Rows](), list[Rows]()  # by layer
        for i in range(self.num_layers):
            where = f"model.layers.{i}"
            for W, name in ((self.W_Q, "q"), (self.W_K, "k"), (self.W_V, "v")):
                W.append(rows(f"{where}.self_attn.{name}_proj.weight", slots, D))
            self.W_O.append(rows(f"{where}.self_attn.o_proj.weight", D, slots))
            for name, shape in (("gate", (hidden, D)), ("up", (hidden, D)), ("down", (D, hidden))):
                is_zero = not any(taken(f"{where}.mlp.{name}_proj.weight", *shape))
                require(is_zero, f"the feed-forward weights of layer {i} are not 0")
            for name in ("input", "post_attention"):
                norms |= {*taken(f"{where}.{name}_layernorm.weight", D)}
        _need(not tensors, f"the tensors {sorted(tensors)[:3]} belong to no layer")
        require(len(norms) == 1, "the weights of the norms are not all equal")
        (self.norm,) = map(exact, norms)

    def _require_pinned_structure(self) -> None:
        """Check all pins that do not depend on the size of the inputs."""
        tokens = [*range(self.prefix), self.query, self.pad]
        values = {self.E[word].get(self.pinned, fmpq(0)) for word in tokens}
        require(len(values) == 1, "the tokens do not all hold the same number in the pinned channel")
        (self.M,) = values
        m = int(self.M.p).bit_length() - 1
        require(2**m == self.M and 0 < m <= LARGEST_M, f"the pinned channel holds {self.M}, no power of two up to 2^50")
        root = fmpq(2) ** ((self.width.bit_length() - 1) // 2)
        require(self.norm * root == self.M, "the weights of the norms do not undo the division by M/√D")
        least = self.M**2 / self.width / 2**25
        require(exact(self.norm_eps) < least, "rms_norm_eps does not vanish beside the mean square")
        smallest = self.norm * fmpq(1, 2**126)
        for word in tokens:
            tiny = any(abs(x) < smallest for x in self.E[word].values())
            require(not tiny, f"a number of token {word} underflows in a norm")
        written = {c for W in self.W_O for c, row in enumerate(W) if row}
        keyed = {c for W in (*self.W_K, *self.W_V) for row in W for c in row}
        asked = {c for W in self.W_Q for row in W for c in row}
        moved = {c for word in self.variables for c in self.E[word]}
        read = {c for word in self.output_words for c in self.E[word]}
        require(self.pinned not in written | keyed | asked | moved | read, "the pinned channel is read or written")
        require(not keyed & (written | moved), "keys or values depend on a channel that heads or variables write")
        self.scales = {c: fmpq(1) for c in range(self.width)}
        self.inputs: dict[int, int] = {}
        for i, word in enumerate(self.variables):
            ((c, scale),) = self.E[word].items() if len(self.E[word]) == 1 else ((-1, fmpq(0)),)
            is_alone = c >= 0 and c not in written and c not in self.E[self.query] and c not in self.inputs
            is_power = scale > 0 and int(scale.p).bit_count() == 1 and int(scale.q).bit_count() == 1
            require(is_alone and is_power, f"variable {i} is not embedded in a channel of its own, by a power of two")
            self.inputs[c], self.scales[c] = i, scale
        # A number loses 2^−150 when it is divided by M/√D, and an input as much when it is scaled; all of it in units
        # of the inputs, and with room for both.
        self.flush = arb(self.norm) * arb(2) ** -147 / arb(min(self.scales.values()))

    def _numbers(self, W: Rows, slot: int, word: int) -> dict[int, fmpq]:
        """Return the numbers of a token that make its key or its value in a head. Equal numbers make equal keys."""
        read = {c for row in W[slot * self.d_head : (slot + 1) * self.d_head] for c in row}
        return {c: x for c, x in self.E[word].items() if c in read}

    def _silent_part(self, row: dict[int, fmpq]) -> Form:
        """Return one component of the key of silent tokens."""
        terms = [x * self.E[self.query][c] for c, x in row.items() if c in self.E[self.query]]
        return Form({ONE: sum(terms, fmpq(0))}, {ONE: arb(sum(map(abs, terms), fmpq(0)))}, len(terms))

    def _build(self) -> None:
        N, D, d = self.context, self.width, len(self.variables)
        self.dtype, self.memory = "float32", Stream(d, [], [(0, 0)])
        self.main = Stream(0, [], [(1, d)])
        self.names = ["embed", *(f"attend{i + 1}" for i in range(self.num_layers)), "read"]
        self.num_outputs = len(self.output_words)
        outputs = [f"out.{j}" for j in range(self.num_outputs)]
        self.channels = [*[self.channel_names] * (1 + self.num_layers), outputs]
        rows = {(0, c): [((0, i), fmpq(1))] for c, i in self.inputs.items()}
        places, values = array("q"), array("d")
        for c in range(D):
            for token, word in enumerate((self.query, *range(self.prefix))):
                if c in self.E[word]:
                    places.append(c * N + token)
                    values.append(float(self.E[word][c].p) / float(self.E[word][c].q))
        self._add(AffineLayer("embed", rows, Constants(N, D, places, values)), N, D)
        self.live: dict[tuple[int, int], int] = {}
        self.silent_keys: dict[tuple[int, int], dict[int, Form]] = {}  # by layer and number of a head in a reduction
        for i in range(self.num_layers):
            heads = [self._head_at(i, slot) for slot in range(self.num_slots) if self._writes(i, slot)]
            self._add(AttentionLayer(f"attend{i + 1}", heads, residual=True, cross=False), N, D)
        read = {
            (0, j): [((0, c), x * self.scales[c]) for c, x in self.E[word].items()]
            for j, word in enumerate(self.output_words)
        }
        self._add(AffineLayer("read", read, Constants(1, self.num_outputs, array("q"), array("d"))), 1, len(outputs))
        self._require_described()

    def _add(self, layer: AffineLayer | AttentionLayer, tokens: int, width: int) -> None:
        self.main.layers.append(layer)
        self.main.shapes.append((tokens, width))

    def _writes(self, layer: int, slot: int) -> set[int]:
        """Return the channels that a head writes."""
        own = range(slot * self.d_head, (slot + 1) * self.d_head)
        return {c for c, row in enumerate(self.W_O[layer]) if any(e in row for e in own)}

    def _head_at(self, layer: int, slot: int) -> HeadWeights:
        """Return a head. It sees the tokens of the prefix whose keys differ from that of the query token."""
        where, first = f"head {slot} of layer {layer}", slot * self.d_head
        W_Q, W_K, W_V = (W[layer] for W in (self.W_Q, self.W_K, self.W_V))
        silent = self._numbers(W_K, slot, self.query)
        is_alike = self._numbers(W_K, slot, self.pad) == silent
        require(is_alike, f"in {where} the query and padding tokens have different keys")
        quiet = [word for word in range(self.prefix) if self._numbers(W_K, slot, word) == silent]
        for word in (self.query, self.pad, *quiet):
            require(not self._numbers(W_V, slot, word), f"in {where} a silent token has a value other than 0")
        require(len(quiet) < self.prefix, f"{where} has no keys")
        keys = array("b", [OTHER]) * self.context
        hidden = {*quiet}
        for word in range(self.prefix):
            keys[1 + word] = OTHER if word in hidden else SEEN_BY_ALL
        number = len([s for s in range(slot) if self._writes(layer, s)])
        self.live[layer, slot] = self.prefix - len(quiet)
        self.silent_keys[layer + 2, number] = {j: self._silent_part(W_K[first + j]) for j in range(self.d_head)}
        root = D_HEADS[self.d_head]

        def columns(W: Rows, scaled: bool) -> Matrix:
            own = (W[first + j] for j in range(self.d_head))
            return [[(c, x * self.scales[c] / root if scaled else x) for c, x in row.items()] for row in own]

        W_O: Matrix = [
            [(e - first, x) for e, x in row.items() if first <= e < first + self.d_head] for row in self.W_O[layer]
        ]
        mask = Mask(bytes(self.context), keys)
        return HeadWeights(columns(W_Q, scaled=True), columns(W_K, scaled=False), columns(W_V, scaled=False), W_O, mask)

    def _require_described(self) -> None:
        """Check the description of the heads in config.json."""
        found = {}
        for layer, slot in self.live:
            own = range(slot * self.d_head, (slot + 1) * self.d_head)
            reads = {c for j in own for c in self.W_Q[layer][j]}
            found[layer, slot] = (
                self.live[layer, slot],
                {self.channel_names[c] for c in reads} | {"one"},
                {self.channel_names[c] for c in self._writes(layer, slot)},
            )
        said = {
            (head["layer"], head["slot"]): (head["keys"], {*head["reads"], "one"}, {*head["writes"]})
            for head in self.described
        }
        names = [head["name"] for head in self.described]
        are_names = all(type(name) is str for name in names) and len(set(names)) == len(names)
        require(said == found and are_names, "config.json describes other heads than the weights have")

    def require_pinned(self, claim: Claim, reduction: Reduction) -> None:
        """Check the pins that depend on the sizes of inputs: the energy of all channels, and the silence of heads.

        The reduction has met all heads that outputs depend on, and the largest absolute values of their inputs.
        """
        sizes = [fmpq(0)] * self.width
        for word in (*range(self.prefix), self.query, self.pad):
            for c, x in self.E[word].items():
                sizes[c] = max(sizes[c], abs(x))
        for c, i in self.inputs.items():
            sizes[c] += self.scales[c] * exact(max(map(abs, claim.ends[i])))
        for layer in range(self.num_layers):
            words = (*range(self.prefix), self.query, self.pad)
            largest = [
                max(sum(abs(x * self.E[word].get(c, 0)) for c, x in row.items()) for word in words)
                for row in self.W_V[layer]
            ]
            for c, row in enumerate(self.W_O[layer]):
                sizes[c] += sum(abs(x) * largest[e] for e, x in row.items())
        energy = sum(((GROWTH * x) ** 2 for c, x in enumerate(sizes) if c != self.pinned), fmpq(0)) * GROWTH
        require(energy < ENERGY * self.M**2, "the channels are too large for the norms to be the identity")
        lost = most(self.flush * total(abs(arb(x)) for x in self.E[word].values()) for word in self.output_words)
        require(
            lost <= claim.truncation, f"the truncation {claim.truncation} does not cover underflow in the last norm"
        )
        for i, h in reduction.heads_met:
            self._require_silent(i, h, claim, reduction)

    def _require_silent(self, i: int, h: int, claim: Claim, reduction: Reduction) -> None:
        layer = self.main.layers[i - 1]
        assert isinstance(layer, AttentionLayer)
        arithmetic = Arithmetic(self.dtype)
        q = reduction._projected(self.main, i - 1, 0, layer.heads[h].W_Q)
        mask, silent = layer.heads[h].mask, self.silent_keys[i, h]
        assert mask is not None
        keys = (reduction._projected(self.main, i - 1, token, layer.heads[h].W_K) for token in mask.seen_by(0))
        least = (self._ahead(q, key, silent, claim, reduction, arithmetic) for key in keys)
        is_silent = any(bool(x > SILENCE) for x in least)
        require(is_silent, f"silent tokens may be heard by head {h} of layer {i - 2}: they are not 80 behind its keys")

    def _ahead(
        self,
        q: dict[int, Form],
        key: dict[int, Form],
        silent: dict[int, Form],
        claim: Claim,
        reduction: Reduction,
        arithmetic: Arithmetic,
    ) -> arb:
        """Return a lower bound of the computed score of a key less that of silent tokens, over all states."""
        terms: Terms = {}
        size, n = arb(0), 0
        for j, form in q.items():
            for sign, other in ((1, key.get(j)), (-1, silent.get(j))):
                if other is None or not other.sizes:
                    continue
                factor = other.terms.get(ONE, fmpq(0))
                for name, x in form.terms.items():
                    terms[name] = terms.get(name, fmpq(0)) + sign * factor * x
                size += span(form.sizes, reduction.reach) * span(other.sizes, reduction.reach)
                n = max(n, form.n + other.n + self.d_head + 2)
        found = arb(0)
        for name, x in terms.items():
            reach = reduction.reach[name]
            ball = arb(0, 1) * reach
            if isinstance(name, int) and name >= 0:
                lo, hi = map(arb, claim.ends[name])
                ball = lo.union(hi) + arithmetic.cast_error(reach) * arb(0, 1)
            found += arb(x) * (arb(1) if name == ONE else ball)
        return (found - arithmetic.gamma(n + 1) * size - SMALLEST[self.dtype] - self.flush * size).lower()


def require_kind(claim: Claim, config: Object) -> None:
    """Refuse other formats, and claims that are not about the largest error in float32 on a bounded box."""
    if _format(config) != FORMAT:
        raise BadFile(
            f"config.json has the format {_format(config)!r:.40}, not {FORMAT!r}: check it with the version of attnc "
            "that wrote it"
        )
    require(claim.dtype == "float32", f"the dtype of a stock checkpoint is float32, not {claim.dtype!r:.40}")
    require(not claim.sides and claim.norm == "inf", "a stock checkpoint has a bound at every point of a bounded box")
    is_grid = isinstance(claim.evidence, ByLeaves) and claim.evidence.encloses
    require(not is_grid, "enclosure leaves are not for stock checkpoints")


def _is_same(found: object, wanted: object) -> bool:
    """Return whether two JSON values are equal, and of one type: True is not 1."""
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(_is_same, found, wanted))
    return type(found) is type(wanted) and found == wanted


def _need(holds: bool, where: str) -> None:
    if not holds:
        raise Refused(f"config.json and model.safetensors are no stock checkpoint that is known here: {where}")
