"""A program as plain transformer blocks: one residual stream, no norm, no positions, bidirectional attention.

    positions   rest | key 1 … key T | query
    block       Z ← Z + Σ_h softmax(Z W_Q (Z W_K)ᵀ) Z W_V W_O,   with biases on the queries alone

The stages of the normal form become blocks. The query position holds the variables: channel `1`, the inputs, and one
channel for every entry that a stage writes. Key position k holds the k-th key and value of every head, each in channels
of its own, which nothing else reads. A variable is a combination of channels, so an affine map between two stages is
part of the projections that read it, and a residual costs nothing.

Idle positions rest.  Every head has one more dimension. There the query is −L at the query position and L elsewhere,
and the key is 2 at the position `rest`, 1 at the positions that are not keys of this head, and 0 at its keys. L is so
large (REST_SCORES) that the exponentials of all other scores underflow to zero exactly: the query position sees the
keys of its head and nothing else, and all other positions see `rest`, whose values are zero. Scores of visible keys
have no term with L.

Carried values.  The value of a key may depend on the variables. The part that the inputs make is embedded. The part
that earlier heads make is copied first, by a block before the stage: positions whose value carries the same combination
of variables see the query position with weight 1, and a head writes the combination into their value channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.errors import InputError
from attnc.ir.normal_form import AttentionStage, FloatForm, FoldedHead, SoftmaxStage, normal_form, pruned
from attnc.ir.program import Program
from attnc.ir.reference import softmax
from attnc.numerics.arrays import Float

if TYPE_CHECKING:
    from scipy.sparse import csr_array

REST_SCORES = {"float64": 2.0**900, "float32": 2.0**100}
"""L. Scores of keys are far smaller for inputs below 1e30 in float32 and 1e250 in float64, and 8·L is finite."""
MAX_STREAM_BYTES = 2**28
"""Limit, in bytes, of the weights, and of the attention maps of one point. A float64 map of 5,790 keys takes as much,
and TransformerLens makes about six arrays of this size."""
ONE_CHANNEL = 0
"""The channel that is 1 at the query position and 0 elsewhere."""


@dataclass(frozen=True, eq=False)
class StreamHead:
    """One head of a block. The last column of W_Q, b_Q and W_K decides who rests."""

    name: str
    W_Q: Float[np.ndarray, "d_model d_k"]
    b_Q: Float[np.ndarray, " d_k"]
    W_K: Float[np.ndarray, "d_model d_k"]
    W_V: Float[np.ndarray, "d_model d_v"]
    W_O: Float[np.ndarray, "d_v d_model"]


@dataclass(frozen=True, eq=False)
class StreamBlock:
    """A stage of the program, or the copies that it needs."""

    name: str
    heads: tuple[StreamHead, ...]


@dataclass(frozen=True, eq=False)
class ResidualStream:
    """The blocks, and the maps into and out of the stream."""

    channels: tuple[str, ...]
    positions: tuple[str, ...]
    blocks: tuple[StreamBlock, ...]
    embedding: Float[np.ndarray, "positions d_model"]
    entering: csr_array  # (positions·d_model, inputs): the part of the inputs in the embedding
    unembed: Float[np.ndarray, "d_model outputs"]

    @property
    def d_head(self) -> int:
        heads = [head for block in self.blocks for head in block.heads]
        return max((max(head.W_Q.shape[1], head.W_V.shape[1]) for head in heads), default=1)

    @property
    def num_heads(self) -> int:
        """The number of heads of the widest block."""
        return max((len(block.heads) for block in self.blocks), default=1)

    @property
    def num_scores(self) -> int:
        """The number of scores of one point."""
        return sum(len(block.heads) for block in self.blocks) * len(self.positions) ** 2

    def embed(self, flat: Float[np.ndarray, "batch inputs"]) -> Float[np.ndarray, "batch positions d_model"]:
        """Return the first state for each point."""
        moved: np.ndarray = (self.entering @ flat.T).T.reshape(len(flat), *self.embedding.shape)
        moved += self.embedding
        return moved

    def __call__(self, flat: Float[np.ndarray, "batch inputs"]) -> Float[np.ndarray, "batch outputs"]:
        """Run the blocks in numpy."""
        state = self.embed(flat)
        for block in self.blocks:
            out = state.copy()
            for head in block.heads:
                scores = (state @ head.W_Q + head.b_Q) @ (state @ head.W_K).transpose(0, 2, 1)
                out += softmax(scores) @ (state @ head.W_V) @ head.W_O
            state = out
        return state[:, -1] @ self.unembed


def residual_stream(
    program: Program,
    inputs: Sequence[str] = (),
    meanings: Mapping[str, str] | None = None,
    outputs: Sequence[str] = (),
) -> ResidualStream:
    """Return the program as blocks, or raise InputError with the reason if it has no such form.

    Parameters
    ----------
    program : Program
        The program.
    inputs : sequence of str
        The names of the inputs.
    meanings : mapping, optional
        Channel of the program → the expression that it holds, for the names of the channels.
    outputs : sequence of str
        The expression of each output, which names a channel that is an output.
    """
    return _Builder(program, tuple(inputs), meanings or {}).build(outputs)


@dataclass
class _PlannedHead:
    """A head before the channels of its keys and values have numbers."""

    name: str
    queries: csr_array  # (d_k, stream channels)
    keys: Float[np.ndarray, "keys d_k"]
    values: Float[np.ndarray, "keys d_v"]
    gains: csr_array  # (keys·d_v, stream channels): the values
    W_O: Float[np.ndarray, "d_v written"]
    written: list[int]  # stream channels


@dataclass
class _PlannedBlock:
    name: str
    heads: list[_PlannedHead] = field(default_factory=list)


class _Builder:
    """The construction, in two passes: the variables and the heads first, then channels for keys and values."""

    def __init__(self, program: Program, inputs: tuple[str, ...], meanings: Mapping[str, str]) -> None:
        self.form, self.dtype, self.meanings = pruned(normal_form(program)), program.dtype, meanings
        names = inputs or tuple(f"input{i}" for i in range(self.form.num_inputs))
        self.channels = ["1", *names]
        self.num_stream = 1 + self.form.num_inputs + sum(self._num_new(stage) for stage in self.form.stages)

    @staticmethod
    def _num_new(stage: Any) -> int:
        return len(stage.written) if isinstance(stage, SoftmaxStage) else len(_written_by_heads(stage))

    def build(self, texts: Sequence[str]) -> ResidualStream:
        self._require_room()
        blocks, variables = [], self._rows([(1 + i, 1.0) for i in range(self.form.num_inputs)])
        for stage in self.form.stages:
            if isinstance(stage, SoftmaxStage):
                block, variables = self._softmax(stage, variables)
            else:
                block, variables = self._attention(stage, variables)
            blocks.append(block)
        outputs = self._through(self.form.output, variables)
        if len(texts) == outputs.shape[0]:
            for row, text in enumerate(texts):
                used = outputs[[row]].tocoo()
                if used.nnz == 1 and used.data[0] == 1 and used.coords[1][0] > self.form.num_inputs:
                    self.channels[used.coords[1][0]] = text
        return self._laid_out(blocks, outputs)

    def _require_room(self) -> None:
        """Refuse programs whose stack would be too large, before anything large is made."""
        keys, channels, most_heads, widest = 0, self.num_stream + 1, 1, 1
        for stage in self.form.stages:
            rows = stage.logits.shape[0] if isinstance(stage, SoftmaxStage) else stage.heads[0].queries.shape[0]
            if isinstance(stage, SoftmaxStage):
                heads = [(stage.logits.shape[1], stage.num_variables + 1, stage.logits.shape[1])]
            else:
                heads = [
                    (
                        head.keys.shape[0] if head.mask is None else int(head.mask.num_visible().max()),
                        head.keys.shape[1] if head.keys.is_constant else stage.num_variables + 1,
                        head.values.shape[1],
                    )
                    for head in stage.heads
                ]
            keys = max([keys, *(count for count, _, _ in heads)])
            channels += rows * sum(d_k + d_v for _, d_k, d_v in heads)
            most_heads = max(most_heads, rows * len(heads))
            widest = max([widest, *(max(d_k + 1, d_v) for _, d_k, d_v in heads)])
        maps = most_heads * (keys + 2) ** 2 * self.dtype.itemsize
        weights = 4 * len(self.form.stages) * most_heads * widest * channels * self.dtype.itemsize
        if max(maps, weights) > MAX_STREAM_BYTES:
            large, size = ("attention maps of one point", maps) if maps >= weights else ("weights", weights)
            raise InputError(
                f"the network has up to {keys:,} keys and {most_heads:,} heads per layer. As transformer blocks, whose "
                f"positions all see each other, its {large} would take {size / 2**20:,.0f} MiB, more than "
                f"{MAX_STREAM_BYTES / 2**20:,.0f} MiB. Compile with a larger eps or construction='compose', or use "
                "net.run(points, cache=True)."
            )

    def _rows(self, entries: Sequence[tuple[int, float]]) -> csr_array:
        """Return forms over the stream, each one coefficient of one channel."""
        from scipy.sparse import coo_array

        columns = np.array([column for column, _ in entries], np.int64)
        values = np.array([value for _, value in entries], self.dtype)
        return coo_array((values, (np.arange(len(columns)), columns)), (len(columns), self.num_stream)).tocsr()

    def _through(self, form: FloatForm, variables: csr_array) -> csr_array:
        """Return the entries of an affine form of the variables as forms over the stream. Constants read channel 1."""
        from scipy.sparse import coo_array, csr_array

        constant = form.constant.reshape((-1, 1)).tocoo()
        shape = (form.linear.shape[0], self.num_stream)
        places = (constant.coords[0], np.full(constant.nnz, ONE_CHANNEL, np.int64))
        return csr_array(form.linear @ variables + coo_array((constant.data, places), shape).tocsr())

    def _name(self, channel: str, entry: str) -> str:
        return self.meanings.get(channel, entry)

    def _attention(self, stage: AttentionStage, variables: csr_array) -> tuple[_PlannedBlock, csr_array]:
        from scipy.sparse import vstack

        width, block = len(stage.channels), _PlannedBlock(stage.name)
        places: dict[int, int] = {}
        for entry in _written_by_heads(stage):
            places[entry] = len(self.channels)
            row, column = divmod(entry, width)
            name, token = stage.channels[column], int(stage.tokens[row])
            self.channels.append(self._name(name, name if token == 0 else f"{name}@{token}"))
        for row in range(stage.heads[0].queries.shape[0]):
            columns = [column for column in range(width) if row * width + column in places]
            for number, head in enumerate(stage.heads):
                kept = [column for column in columns if (head.W_O[:, column] != 0).any()]
                if not kept:
                    continue
                name = f"{stage.name}.head{number}" + (f"@{stage.tokens[row]}" if len(stage.tokens) > 1 else "")
                queries, keys = self._scores(stage, head, row, variables)
                seen = head.seen(row)
                values = head.values.rows(seen)
                gains = values.linear @ variables
                constants, W_O = values.constant.toarray(), head.W_O[:, kept]
                written = [places[row * width + column] for column in kept]
                block.heads.append(_PlannedHead(name, queries, keys, constants, gains, W_O, written))
        after = self._rows([(places.get(int(entry), ONE_CHANNEL), float(entry in places)) for entry in stage.written])
        if stage.residual is not None:
            after = after + self._through(stage.residual, variables)[stage.written]
        return block, vstack([after, variables[stage.carried]], format="csr")

    def _scores(
        self, stage: AttentionStage, head: FoldedHead, row: int, variables: csr_array
    ) -> tuple[csr_array, np.ndarray]:
        """Return queries over the stream and constant keys, whose products are the scores of one query."""
        if head.keys.is_constant:
            return self._through(head.queries.rows(np.array([row])), variables), head.keys.rows(
                head.seen(row)
            ).constant.toarray()
        soft = head.soft_head(row)
        if soft is None:
            raise InputError(
                f"layer {stage.name} multiplies queries and keys that both depend on the input. Transformer blocks "
                "with constant keys cannot compute such scores. Use net.to_torch() and net.run(points, cache=True)."
            )
        return self._affine_scores(soft.slopes, soft.offsets, variables)

    def _affine_scores(self, slopes: Any, offsets: np.ndarray, variables: csr_array) -> tuple[csr_array, np.ndarray]:
        """Return queries (used variables, 1) and keys (slopes, offsets)."""
        from scipy.sparse import csr_array, vstack

        slopes = csr_array(slopes)
        used = np.unique(slopes.indices)
        keys = np.column_stack([slopes[:, used].toarray(), offsets]).astype(self.dtype)
        return vstack([variables[used], self._rows([(ONE_CHANNEL, 1.0)])], format="csr"), keys

    def _softmax(self, stage: SoftmaxStage, variables: csr_array) -> tuple[_PlannedBlock, csr_array]:
        from scipy.sparse import csr_array, vstack

        block, (rows, width) = _PlannedBlock(stage.name), stage.logits.shape
        first = len(self.channels)
        for row in range(rows):
            token = int(stage.tokens[row])
            names = [name if token == 0 else f"{name}@{token}" for name in stage.channels]
            self.channels += [self._name(name, entry) for name, entry in zip(stage.channels, names, strict=True)]
            soft = stage.soft_head(row)
            queries, keys = self._affine_scores(soft.slopes, soft.offsets, variables)
            unit = np.eye(width, dtype=self.dtype)
            gains = csr_array((width * width, self.num_stream), dtype=self.dtype)
            written = [first + row * width + column for column in range(width)]
            name = f"{stage.name}.row{token}" if rows > 1 else stage.name
            block.heads.append(_PlannedHead(name, queries, keys, unit, gains, unit, written))
        after = self._rows([(first + i, 1.0) for i in range(rows * width)])
        return block, vstack([after, variables[stage.carried]], format="csr")

    def _laid_out(self, blocks: list[_PlannedBlock], outputs: csr_array) -> ResidualStream:
        from scipy.sparse import coo_array

        num_keys = max((len(head.keys) for block in blocks for head in block.heads), default=0)
        last = num_keys + 1  # the query position
        embedded: list[tuple[int, int, float]] = [(last, ONE_CHANNEL, 1.0)]
        entering: list[tuple[int, int, int, float]] = [(last, 1 + i, i, 1.0) for i in range(self.form.num_inputs)]
        channels = list(self.channels)

        def new(name: str, entries: Sequence[tuple[int, float]]) -> int:
            channels.append(name)
            embedded.extend((position, len(channels) - 1, value) for position, value in entries if value != 0)
            return len(channels) - 1

        rest = new("rest", [(0, 1.0)])
        idle: dict[int, int] = {}
        for count in sorted({len(head.keys) for block in blocks for head in block.heads}):
            # With all keys in use, only the query position is idle, and that is channel 1.
            beyond = [(position, 1.0) for position in range(count + 1, last + 1)]
            idle[count] = ONE_CHANNEL if count == num_keys else new(f"not among {count} keys", beyond)
        made: list[tuple[str, Sequence[_Wired | _WiredCopy]]] = []
        for block in blocks:
            copies, wired = _Copies(), list[_Wired]()
            for head in block.heads:
                key_channels = [
                    new(f"{head.name}.key{i}", [(1 + k, float(key)) for k, key in enumerate(column)])
                    for i, column in enumerate(head.keys.T)
                ]
                value_channels = [
                    new(f"{head.name}.value{i}", [(1 + k, float(value)) for k, value in enumerate(column)])
                    for i, column in enumerate(head.values.T)
                ]
                self._carry(head, value_channels, embedded, entering, copies)
                wired.append(_Wired(head, key_channels, value_channels, idle[len(head.keys)]))
            if copies.by_positions:
                made.append((f"{block.name}.copy", copies.wired(f"{block.name}.copy", new)))
            made.append((block.name, wired))
        width = len(channels)
        shape = (last + 1, width)
        embedding = np.zeros(shape, self.dtype)
        for position, channel, value in embedded:
            embedding[position, channel] += value
        where = [(position * width + channel, i) for position, channel, i, _ in entering]
        moved = coo_array(
            (
                np.array([value for *_, value in entering], self.dtype),
                tuple(np.array(where, np.int64).reshape(-1, 2).T),
            ),
            (shape[0] * width, self.form.num_inputs),
        ).tocsr()
        unembed = np.zeros((width, outputs.shape[0]), self.dtype)
        unembed[: self.num_stream] = outputs.toarray().T
        positions = ("rest", *(f"key {k}" for k in range(1, num_keys + 1)), "query")
        finished = tuple(
            StreamBlock(name, tuple(each.head_of(width, rest, self.dtype) for each in wired)) for name, wired in made
        )
        return ResidualStream(tuple(channels), positions, finished, embedding, moved, unembed)

    def _carry(
        self,
        head: _PlannedHead,
        value_channels: list[int],
        embedded: list[tuple[int, int, float]],
        entering: list[tuple[int, int, int, float]],
        copies: _Copies,
    ) -> None:
        """Embed the constants and inputs that the values carry, and plan copies of the rest."""
        for number in np.flatnonzero(np.diff(head.gains.indptr)):
            key, column = divmod(int(number), head.values.shape[1])
            entries = slice(head.gains.indptr[number], head.gains.indptr[number + 1])
            copied = []
            for channel, gain in zip(head.gains.indices[entries], head.gains.data[entries], strict=True):
                if gain == 0:
                    continue
                if channel == ONE_CHANNEL:
                    embedded.append((1 + key, value_channels[column], float(gain)))
                elif channel <= self.form.num_inputs:
                    entering.append((1 + key, value_channels[column], int(channel) - 1, float(gain)))
                else:
                    copied.append((int(channel), float(gain)))
            if copied:
                copies.add(1 + key, tuple(sorted(copied)), value_channels[column])


def _written_by_heads(stage: AttentionStage) -> list[int]:
    """Return the entries of the next u to which a head writes."""
    is_written = np.zeros(stage.heads[0].W_O.shape[1], bool)
    for head in stage.heads:
        is_written |= (head.W_O != 0).any(axis=0)
    return [int(entry) for entry in stage.written if is_written[entry % len(is_written)]]


@dataclass
class _Wired:
    """A head with the channels that its keys and values are read from."""

    planned: _PlannedHead
    key_channels: list[int]
    value_channels: list[int]
    idle: int

    def head_of(self, width: int, rest: int, dtype: np.dtype[Any]) -> StreamHead:
        planned, d_k = self.planned, len(self.key_channels)
        W_Q, W_K = np.zeros((width, d_k + 1), dtype), np.zeros((width, d_k + 1), dtype)
        W_Q[: planned.queries.shape[1], :d_k] = planned.queries.toarray().T
        W_K[self.key_channels, np.arange(d_k)] = 1
        W_Q[ONE_CHANNEL, d_k], W_K[rest, d_k], W_K[self.idle, d_k] = -2 * REST_SCORES[dtype.name], 2, 1
        b_Q = np.zeros(d_k + 1, dtype)
        b_Q[d_k] = REST_SCORES[dtype.name]
        W_V = np.zeros((width, len(self.value_channels)), dtype)
        W_V[self.value_channels, np.arange(len(self.value_channels))] = 1
        W_O = np.zeros((len(self.value_channels), width), dtype)
        W_O[:, planned.written] = planned.W_O
        return StreamHead(planned.name, W_Q, b_Q, W_K, W_V, W_O)


Terms = tuple[tuple[int, float], ...]
"""A combination of stream channels."""


class _Copies:
    """The combinations of variables that positions need in their values, one head for each set of positions."""

    def __init__(self) -> None:
        self._positions: dict[tuple[Terms, int], list[int]] = {}

    def add(self, position: int, terms: Terms, channel: int) -> None:
        self._positions.setdefault((terms, channel), []).append(position)

    @property
    def by_positions(self) -> dict[tuple[int, ...], list[tuple[Terms, int]]]:
        found: dict[tuple[int, ...], list[tuple[Terms, int]]] = {}
        for copied, positions in self._positions.items():
            found.setdefault(tuple(positions), []).append(copied)
        return found

    def wired(self, name: str, new: Callable[[str, Sequence[tuple[int, float]]], int]) -> list[_WiredCopy]:
        """Return the heads. `new` adds a channel with these (position, value) entries."""
        made = []
        for number, (positions, copied) in enumerate(self.by_positions.items()):
            flag = new(f"{name}.head{number}.takes", [(position, 1.0) for position in positions])
            made.append(_WiredCopy(f"{name}.head{number}", flag, copied))
        return made


@dataclass
class _WiredCopy:
    """A head by which the positions that have `flag` see the query position, and all others see `rest`."""

    name: str
    flag: int
    copied: list[tuple[Terms, int]]

    def head_of(self, width: int, rest: int, dtype: np.dtype[Any]) -> StreamHead:
        W_Q, W_K = np.zeros((width, 1), dtype), np.zeros((width, 1), dtype)
        W_Q[self.flag], W_K[ONE_CHANNEL], W_K[rest] = 2 * REST_SCORES[dtype.name], 1, -1
        combinations = {terms: i for i, terms in enumerate(dict.fromkeys(terms for terms, _ in self.copied))}
        W_V, W_O = np.zeros((width, len(combinations)), dtype), np.zeros((len(combinations), width), dtype)
        for terms, i in combinations.items():
            for channel, gain in terms:
                W_V[channel, i] = gain
        for terms, channel in self.copied:
            W_O[combinations[terms], channel] = 1
        return StreamHead(self.name, W_Q, np.full(1, -REST_SCORES[dtype.name], dtype), W_K, W_V, W_O)
