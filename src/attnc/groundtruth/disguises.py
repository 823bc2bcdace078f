"""Disguises: checkpoints that compute the same function, with weights in which its circuit is harder to see.

A disguise changes the numbers and never the function, up to an error that is proved afterwards from the numbers alone
(`deviations`). Structural disguises act on heads and channels, in the plain basis:
    split        a head becomes two with the same scores, whose random values add up to those of the head
    decoys       pairs of heads with equal scores, equal values and opposite outputs: each writes a lot, and both
                 together nothing
    superposed   a channel that heads write shares its direction with a channel of keys that no later head reads. On the
                 prefix tokens the direction holds the key, on query tokens the result
In all of them heads, prefix tokens and words are permuted.
Then the basis is changed, stream = B·channels: `rotated` by a random orthogonal B, `skewed` by one with singular values
in [1/2, 2], whose reads are those of the dual basis. The pinned channel stays. The query-key and value-output spaces of
every head are changed in the same way. `noisy` adds noise to all weights and embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from attnc.exports.stock_layout import ONE, Checkpoint, input_channel
from attnc.groundtruth.running import AttentionWeights, RunningModel
from attnc.numerics.arrays import Float

PART, DECOY, UNUSED = "circuit", "decoy", "unused"
"""The roles of heads: a part of the circuit, one of a pair that cancels, or a slot whose weights are zero or noise."""
READER, LEAST_SCALE = 64.0, 2.0**-5
"""Where channels are mixed, channels of slopes and values are made smaller by a factor between LEAST_SCALE and 1, so
that the weights that read them are about READER, half of those that read the offsets of silent tokens."""
RESULT_SCALE = 2.0**-2
"""Factor on channels that heads write, where channels are mixed: prefix tokens carry averages of values there,
which no head reads."""
LARGEST_STRETCH = 2.0**0.5
"""Largest singular value of a skewed basis, and the inverse of the smallest one. The rounding of projections, and so
the proven bound, grows with its square."""
LEAST_CHANNELS = 64
"""Least width of a model, so that there are dimensions for the values of split heads and decoys. It is a power of 4."""
DECOY_SIZES = (0.5, 1.5)
"""Sizes of the values of decoys. Those of split heads are about the same, so that lengths of weights tell nothing."""


@dataclass(frozen=True)
class Role:
    """The role of a head, and the head of the plain network of which it is a part or a copy."""

    kind: str
    head: str | None = None


@dataclass(frozen=True, eq=False)
class Model:
    """The tensors of a checkpoint in float64, with the words and the role of every head.

    `basis` has the direction of every dimension of the plain stream as a column, and `dual` its reader as a row.
    `dimensions` has the dimension of the plain stream that holds each channel.
    """

    layers: tuple[AttentionWeights, ...]
    embedding: Float[np.ndarray, "words width"]
    prefix: tuple[int, ...]
    query: int
    pad: int
    variables: tuple[int, ...]
    output: int
    pinned: int  # the dimension of the pinned channel
    keys: tuple[int, ...]  # the key of the plain network that each token of the prefix carries
    roles: tuple[tuple[Role, ...], ...]
    dimensions: Mapping[str, int]
    basis: Float[np.ndarray, "width width"] = field(repr=False)
    dual: Float[np.ndarray, "width width"] = field(repr=False)

    @classmethod
    def plain(cls, checkpoint: Checkpoint) -> Model:
        """Return the model of a checkpoint, without a disguise. Its width is at least LEAST_CHANNELS."""
        checkpoint = _widened(checkpoint)
        d, places = checkpoint.d_head, {place: name for name, place in checkpoint.slots.items()}
        layers = []
        for i in range(checkpoint.num_layers):
            W_Q, W_K, W_V = (
                W[i].T.reshape(-1, d, checkpoint.width).astype(np.float64)
                for W in (checkpoint.W_Q, checkpoint.W_K, checkpoint.W_V)
            )
            W_O = checkpoint.W_O[i].reshape(-1, d, checkpoint.width).transpose(0, 2, 1).astype(np.float64)
            layers.append(AttentionWeights(W_Q, W_K, W_V, W_O))
        roles = tuple(
            tuple(
                Role(PART, places[i, slot]) if (i, slot) in places else Role(UNUSED)
                for slot in range(checkpoint.num_heads)
            )
            for i in range(checkpoint.num_layers)
        )
        unit = np.eye(checkpoint.width)
        return cls(
            tuple(layers),
            checkpoint.embedding.astype(np.float64),
            checkpoint.prefix,
            checkpoint.query,
            checkpoint.pad,
            checkpoint.variables,
            checkpoint.outputs[0],
            checkpoint.columns["pinned"],
            tuple(range(len(checkpoint.prefix))),
            roles,
            dict(checkpoint.columns),
            unit,
            unit,
        )

    @property
    def width(self) -> int:
        return self.embedding.shape[1]

    @property
    def d_head(self) -> int:
        return self.layers[0].d_head

    @property
    def tokens(self) -> list[int]:
        """The words that are tokens: they carry M in the pinned channel."""
        return [*self.prefix, self.query, self.pad]

    @cached_property
    def free(self) -> list[int]:
        """The dimensions that no channel has."""
        return sorted(set(range(self.width)) - set(self.dimensions.values()))

    def heads_of(self, name: str) -> list[tuple[int, int]]:
        """Return (layer, slot) of all parts of a head of the plain network."""
        wanted = Role(PART, name)
        return [(i, h) for i, roles in enumerate(self.roles) for h, role in enumerate(roles) if role == wanted]

    def cast(self) -> Model:
        """Return the model with the float32 numbers that are stored."""
        layers = tuple(AttentionWeights(*(_cast(W) for W in (of.W_Q, of.W_K, of.W_V, of.W_O))) for of in self.layers)
        return replace(self, layers=layers, embedding=_cast(self.embedding))

    def running(self, names: Sequence[str]) -> RunningModel:
        """Return the model in the form that readers run. The pinned channel is left out of the stream."""
        E = self.embedding.copy()
        E[:, self.pinned] = 0.0
        return RunningModel(
            self.layers, E[list(self.prefix)], E[self.query], E[list(self.variables)], E[self.output], names
        )


def _widened(checkpoint: Checkpoint) -> Checkpoint:
    more = LEAST_CHANNELS - checkpoint.width
    if more <= 0:
        return checkpoint
    W_Q, W_K, W_V = (np.pad(W, ((0, 0), (0, more), (0, 0))) for W in (checkpoint.W_Q, checkpoint.W_K, checkpoint.W_V))
    W_O, embedding = (
        np.pad(checkpoint.W_O, ((0, 0), (0, 0), (0, more))),
        np.pad(checkpoint.embedding, ((0, 0), (0, more))),
    )
    return replace(checkpoint, embedding=embedding, W_Q=W_Q, W_K=W_K, W_V=W_V, W_O=W_O)


def _cast(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32).astype(np.float64)


def orthogonal(n: int, rng: np.random.Generator) -> Float[np.ndarray, "n n"]:
    """Return a random orthogonal matrix, uniformly distributed."""
    Q, R = np.linalg.qr(rng.standard_normal((n, n)))
    return np.asarray(Q * np.sign(np.diag(R)))


def stretched(n: int, rng: np.random.Generator) -> Float[np.ndarray, "n n"]:
    """Return a random matrix whose singular values are between 1/LARGEST_STRETCH and LARGEST_STRETCH."""
    sizes = LARGEST_STRETCH ** rng.uniform(-1, 1, n)
    return orthogonal(n, rng) * sizes @ orthogonal(n, rng)


Matrix = Callable[[int, np.random.Generator], np.ndarray]


def change_basis(model: Model, matrix: Matrix, rng: np.random.Generator) -> Model:
    """Change the basis of the stream, but for the pinned channel, and that of every head.

    Channels of slopes and values are first made smaller, and their readers larger: where channels are mixed, the
    rounding of a key grows with the length of its whole token.
    """
    others = [i for i in range(model.width) if i != model.pinned]
    B = np.eye(model.width)
    B[np.ix_(others, others)] = matrix(len(others), rng) * _scales(model)[others]
    R = np.linalg.inv(B)
    R[model.pinned], R[:, model.pinned] = np.eye(model.width)[model.pinned], np.eye(model.width)[model.pinned]
    layers = []
    for of in model.layers:
        W_Q, W_K, W_V, W_O = np.zeros_like(of.W_Q), np.zeros_like(of.W_K), np.zeros_like(of.W_V), np.zeros_like(of.W_O)
        for h in range(of.num_heads):
            G = _mixing(of.W_Q[h].any(axis=1) | of.W_K[h].any(axis=1), matrix, rng)
            S = _mixing(of.W_V[h].any(axis=1) | of.W_O[h].any(axis=0), matrix, rng)
            W_Q[h], W_K[h] = G @ of.W_Q[h] @ R, np.linalg.inv(G).T @ of.W_K[h] @ R
            W_V[h], W_O[h] = S @ of.W_V[h] @ R, B @ of.W_O[h] @ np.linalg.inv(S)
        layers.append(AttentionWeights(W_Q, W_K, W_V, W_O))
    embedding = model.embedding @ B.T
    embedding[model.output] = model.embedding[model.output] @ R  # a covector
    return replace(model, layers=tuple(layers), embedding=embedding, basis=B @ model.basis, dual=model.dual @ R)


def _scales(model: Model) -> Float[np.ndarray, " width"]:
    """Return factors on dimensions that make tokens short, and the weights that read keys and values about equal."""
    on_query = model.embedding[[model.query, model.pad, *model.variables]].any(axis=0)
    written = np.stack([of.W_O.any(axis=(0, 2)) for of in model.layers]).any(axis=0)
    readers = np.max([np.abs(W).max(axis=(0, 1)) for of in model.layers for W in (of.W_K, of.W_V)], axis=0)
    scales = 2.0 ** np.round(np.log2(np.clip(readers / READER, LEAST_SCALE, 1.0)))
    scales = np.where(written, np.where(readers > 0, np.sqrt(RESULT_SCALE * scales), RESULT_SCALE), scales)
    return np.where(on_query | (scales > 1) | ~written & (readers == 0), 1.0, scales)


def _mixing(used: np.ndarray, matrix: Matrix, rng: np.random.Generator) -> np.ndarray:
    """Return a matrix that mixes the used dimensions of a head with each other, and puts them into random places.

    The others stay zero: the rank of a head shows in its singular values in any case, and every product that is not
    zero adds to the rounding of scores.
    """
    places = np.flatnonzero(used)
    mixed = np.eye(len(used))
    if len(places):
        mixed[np.ix_(places, places)] = matrix(len(places), rng)
    return mixed[rng.permutation(len(used))]


def add_noise(model: Model, size: float, rng: np.random.Generator) -> Model:
    """Add noise to embeddings, and to the weights of all dimensions that heads use, but not to the pinned channel.

    Its standard deviation is `size` times the root mean square of the weights of the head, or of the embedding.
    """
    others = np.arange(model.width) != model.pinned

    def noisy(W: np.ndarray, axis: int) -> np.ndarray:
        """Add noise to a matrix whose axis `axis` is the stream. Rows or columns of zeros stay zero."""
        scale = np.sqrt((W**2).sum() / max(1, np.count_nonzero(W)))
        used = W.any(axis=axis, keepdims=True) & np.expand_dims(others, 1 - axis)
        return np.asarray(W + size * scale * rng.standard_normal(W.shape) * used)

    layers = []
    for of in model.layers:
        parts = ((of.W_Q, 1), (of.W_K, 1), (of.W_V, 1), (of.W_O, 0))
        layers.append(AttentionWeights(*(np.stack([noisy(W, axis) for W in Ws]) for Ws, axis in parts)))
    embedding = model.embedding.copy()
    kept = embedding[:, others]
    scale = np.sqrt((kept**2).sum() / max(1, np.count_nonzero(kept)))
    embedding[:, others] = kept + size * scale * rng.standard_normal(kept.shape)
    return replace(model, layers=tuple(layers), embedding=embedding)


class _Editing:
    """The heads of a model as lists, to add heads and channels. `done` returns the edited model."""

    def __init__(self, model: Model) -> None:
        self.model, self.embedding = model, model.embedding.copy()
        self.heads: list[list[tuple[np.ndarray, ...]]] = [
            [(of.W_Q[h], of.W_K[h], of.W_V[h], of.W_O[h]) for h in range(of.num_heads)] for of in model.layers
        ]
        self.roles = [list(roles) for roles in model.roles]
        self.dimensions, self.free = dict(model.dimensions), list(model.free)

    def channel(self, name: str, values: Float[np.ndarray, " prefix"]) -> int:
        """Add a channel that the tokens of the prefix carry."""
        dimension = self.free.pop(0)
        self.dimensions[name] = dimension
        self.embedding[list(self.model.prefix), dimension] = values
        return dimension

    def remove(self, names: Sequence[str]) -> None:
        """Remove channels that no head reads any more."""
        for name in names:
            dimension = self.dimensions.pop(name)
            self.embedding[:, dimension] = 0.0
            self.free.append(dimension)

    def add(self, layer: int, head: tuple[np.ndarray, ...], role: Role) -> None:
        """Add a head, in an unused slot if there is one."""
        if Role(UNUSED) in self.roles[layer]:
            slot = self.roles[layer].index(Role(UNUSED))
            self.heads[layer][slot], self.roles[layer][slot] = head, role
        else:
            self.heads[layer].append(head)
            self.roles[layer].append(role)

    def done(self) -> Model:
        most = max(map(len, self.heads))
        d, width = self.model.d_head, self.model.width
        nothing = (np.zeros((d, width)),) * 3 + (np.zeros((width, d)),)
        layers, roles = [], []
        for heads, of in zip(self.heads, self.roles, strict=True):
            padded = heads + [nothing] * (most - len(heads))
            layers.append(AttentionWeights(*(np.stack(parts) for parts in zip(*padded, strict=True))))
            roles.append((*of, *[Role(UNUSED)] * (most - len(of))))
        return replace(
            self.model,
            layers=tuple(layers),
            roles=tuple(roles),
            embedding=self.embedding,
            dimensions=self.dimensions,
        )


def split_heads(model: Model, rng: np.random.Generator) -> Model:
    """Split heads in two, as long as there are dimensions for their values."""
    editing = _Editing(model)
    places = [(i, h) for i, roles in enumerate(model.roles) for h, role in enumerate(roles) if role.kind == PART]
    for number in rng.permutation(len(places)).tolist():
        i, h = places[number]
        W_Q, W_K, W_V, W_O = editing.heads[i][h]
        if len(editing.free) < 2:
            break
        role = model.roles[i][h]
        values = model.embedding[list(model.prefix)] @ W_V.T @ W_O.T  # the contribution of each token
        (target,) = np.flatnonzero(values.any(axis=0))
        is_key = np.abs(values[:, target]) > 0
        first = np.where(is_key, rng.uniform(-1, 1, len(values)), 0.0)
        editing.remove([name for name, dimension in model.dimensions.items() if W_V[:, dimension].any()])
        for number_of_part, part in enumerate((first, values[:, target] - first)):
            scale = _power_above(part)
            dimension = editing.channel(f"part{number_of_part}.{role.head}", part / scale)
            read, write = np.zeros_like(W_V), np.zeros_like(W_O)
            read[0, dimension], write[target, 0] = scale, 1.0
            head = (W_Q, W_K, read, write)
            if number_of_part == 0:
                editing.heads[i][h] = head
            else:
                editing.add(i, head, role)
    return editing.done()


def _power_above(values: np.ndarray) -> float:
    """Return the smallest power of two that is at least as large as all values."""
    return float(2.0 ** np.ceil(np.log2(np.abs(values).max())))


def permuted(model: Model, rng: np.random.Generator) -> Model:
    """Permute the heads of every layer, the tokens of the prefix, and the words of the vocabulary."""
    layers, roles = [], []
    for of, kinds in zip(model.layers, model.roles, strict=True):
        order = rng.permutation(of.num_heads)
        layers.append(AttentionWeights(of.W_Q[order], of.W_K[order], of.W_V[order], of.W_O[order]))
        roles.append(tuple(kinds[h] for h in order))
    order, words = rng.permutation(len(model.prefix)), rng.permutation(len(model.embedding))
    place = {int(word): new for new, word in enumerate(words)}
    return replace(
        model,
        layers=tuple(layers),
        roles=tuple(roles),
        embedding=model.embedding[words],
        prefix=tuple(place[model.prefix[k]] for k in order),
        keys=tuple(model.keys[k] for k in order),
        query=place[model.query],
        pad=place[model.pad],
        variables=tuple(place[word] for word in model.variables),
        output=place[model.output],
    )


def add_decoys(model: Model, names: Sequence[str], rng: np.random.Generator) -> Model:
    """Add a pair of heads that cancel to every layer, as long as there are dimensions for their values.

    They have the keys of a head of the layer, but read another channel, and write into the channel of some head.
    """
    editing, earlier = _Editing(model), [input_channel(name) for name in names]
    for i, roles in enumerate(model.roles):
        here = [h for h, role in enumerate(roles) if role.kind == PART]
        if not here or not editing.free:
            continue
        copied = int(rng.choice(here))
        W_Q, W_K, _, _ = editing.heads[i][copied]
        source, read = earlier[int(rng.integers(len(earlier)))], np.array(W_Q)
        moving = [model.dimensions[name] for name in earlier]
        for row in read:
            size = min(np.abs(row[moving]).sum(), np.sqrt(model.d_head))  # a query component of at most 1
            row[moving] = 0.0
            row[model.dimensions[source]] = size
        written = [model.dimensions[name] for name in _results(model)]
        target = int(rng.choice(written))
        values = rng.uniform(*DECOY_SIZES) * rng.uniform(-1, 1, len(model.prefix))
        scale = _power_above(values)
        dimension = editing.channel(f"decoy.{i}", values / scale)
        V = np.zeros_like(editing.heads[i][copied][2])
        V[0, dimension] = scale
        for sign in (1.0, -1.0):
            O = np.zeros_like(editing.heads[i][copied][3])  # noqa: E741
            O[target, 0] = sign
            editing.add(i, (read, W_K, V, O), Role(DECOY, roles[copied].head))
        earlier += [name for name in _results(model) if _writer(model, name) == i]
    return editing.done()


def _results(model: Model) -> list[str]:
    """The channels that heads write."""
    written = np.asarray(np.stack([of.W_O.any(axis=(0, 2)) for of in model.layers]).any(axis=0))
    return [name for name, dimension in model.dimensions.items() if written[dimension]]


def _writer(model: Model, name: str) -> int:
    """The first layer whose heads write a channel."""
    return next(i for i, of in enumerate(model.layers) if of.W_O[:, model.dimensions[name]].any())


def superpose(model: Model, rng: np.random.Generator) -> Model:
    """Let channels that heads write share a dimension with channels of keys that are not read any more.

    A result that layer b writes may share with a key that layers up to a ≤ b read, if query tokens do not carry the
    key: until it is written, the dimension of the result is 0 on query tokens, and no key reads it afterwards.
    """
    results = _results(model)
    in_prefix = np.asarray(model.embedding[list(model.prefix)].any(axis=0))
    on_query = np.asarray(model.embedding[[model.query, model.pad, *model.variables]].any(axis=0))
    readers = {
        name: max(
            (i for i, of in enumerate(model.layers) if (of.W_K[..., d].any() or of.W_V[..., d].any())), default=-1
        )
        for name, d in model.dimensions.items()
    }
    keys = [
        name
        for name, d in model.dimensions.items()
        if name not in (*results, ONE) and in_prefix[d] and not on_query[d] and d != model.pinned
    ]
    move: dict[int, int] = {}
    for name in rng.permutation(results).tolist():
        fitting = [key for key in keys if 0 <= readers[key] <= _writer(model, name)]
        if fitting and readers[name] < 0:
            key = fitting[int(rng.integers(len(fitting)))]
            keys.remove(key)
            move[model.dimensions[name]] = model.dimensions[key]
    embedding = model.embedding.copy()
    layers = [AttentionWeights(*(W.copy() for W in (of.W_Q, of.W_K, of.W_V, of.W_O))) for of in model.layers]
    for old, new in move.items():
        parts = [embedding.T, *(W[h].T for of in layers for W in (of.W_Q, of.W_K, of.W_V) for h in range(of.num_heads))]
        parts += [of.W_O[h] for of in layers for h in range(of.num_heads)]
        for rows in parts:
            rows[new] += rows[old]
            rows[old] = 0.0
    dimensions = {name: move.get(d, d) for name, d in model.dimensions.items()}
    return replace(model, layers=tuple(layers), embedding=embedding, dimensions=dimensions)


@dataclass(frozen=True)
class Disguise:
    """The steps of a disguise: the heads and channels, then the basis, then every number by noise."""

    structure: Callable[[Model, Sequence[str], np.random.Generator], Model] | None = None
    matrix: Matrix | None = None
    has_noise: bool = False

    def restructured(self, model: Model, names: Sequence[str], rng: np.random.Generator) -> Model:
        """Return a model with other heads and channels, in the plain basis, in random order."""
        if self == Disguise():
            return model
        return permuted(model if self.structure is None else self.structure(model, names, rng), rng)

    def stored(self, model: Model, noise: float, rng: np.random.Generator) -> Model:
        """Return the restructured model in its new basis, with noise if there is any, as it is stored."""
        model = model if self.matrix is None else change_basis(model, self.matrix, rng)
        return (add_noise(model, noise, rng) if self.has_noise else model).cast()


def _all_structures(model: Model, names: Sequence[str], rng: np.random.Generator) -> Model:
    return superpose(add_decoys(split_heads(model, rng), names, rng), rng)


DISGUISES: Mapping[str, Disguise] = {
    "plain": Disguise(),
    "superposed": Disguise(lambda model, names, rng: superpose(model, rng)),
    "split": Disguise(lambda model, names, rng: split_heads(model, rng)),
    "decoys": Disguise(add_decoys),
    "noisy": Disguise(has_noise=True),
    "rotated": Disguise(matrix=orthogonal),
    "skewed": Disguise(matrix=stretched),
    "combined": Disguise(_all_structures, stretched, has_noise=True),
}
"""The disguises by name, from those with the smallest to those with the largest bounds. The last one combines all."""
