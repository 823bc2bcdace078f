"""A learned network beside a constructed one: keys matched one to one, attention patterns, subspaces, functions.

Scores do not determine W_Q and W_K: any invertible M gives the same scores from W_Q·M and W_K·M^(−T), and a number that
is added to all scores of a query changes no weight. So a key is compared by its scores at the points, less their mean
over the keys. Two such keys have a distance: the root of the mean square of the difference over points and queries. The
keys of two heads are matched one to one, so that the sum of squared distances is the smallest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attnc.errors import InputError
from attnc.ir.layers import Head
from attnc.ir.program import Program
from attnc.ir.reference import MEMORY, evaluate_visited
from attnc.numerics.arrays import Float, Int, real_array
from attnc.retraining import program_with
from attnc.wording import ceiling, plural, shortened

if TYPE_CHECKING:
    pass

MAX_MATCHED_KEYS = 4096
"""Maximum number of keys of a head whose keys are matched: the cost matrix then has 16 million entries, 128 MB."""
RANK = 1e-9
"""Directions whose singular value is below this share of the largest do not count to a subspace."""
MAX_MAPS_BYTES = 2**32
"""Limit of the memory for the attention maps of one network."""


@dataclass(frozen=True, eq=False)
class HeadComparison:
    """A learned head beside a constructed one.

    Attributes
    ----------
    learned, constructed : str
        The names of the heads.
    matches : ndarray
        Pairs (learned key, constructed key), as many as the smaller head has keys.
    num_keys : tuple of int
        The numbers of keys of the two heads.
    key_distance : float
        The root mean square distance of matched keys.
    key_spread : float
        The root mean square of the constructed keys, about their mean: the distance of keys that have nothing in common
        is about √2 times as large.
    pattern_distance : float or None
        Half of the sum of |difference of weights| over matched keys and of the weights of keys without a match, as a
        mean over the points: 0 for equal patterns, 1 for disjoint ones. None for arrays of keys.
    similarity : float or None
        The linear centred kernel alignment of the two z over the points: 1 if they are equal up to a rotation, a scale
        and a constant. None for arrays of keys.
    angles : mapping
        The largest principal angle between the subspaces of each of W_Q, W_K, W_V and W_O, in degrees. Empty if the
        widths differ. For arrays of keys, the angle between their spans.
    overlap : ndarray
        The overlap of learned and constructed keys in [0, 1], (learned, constructed), matched keys first and in the
        order of the constructed ones: Σ min(weights) over the points, divided by the larger sum. For arrays of keys it
        is 1/(1 + distance/spread).

    Examples
    --------
    >>> import attnc
    >>> net = attnc.compile("sin(x)", {"x": (-1, 1)}, eps=1e-3)
    >>> head, = attnc.compare(net, net, [[0.0], [0.5]]).heads
    >>> head.learned, head.key_distance, head.pattern_distance
    ('attend1.head0', 0.0, 0.0)
    """

    learned: str
    constructed: str
    matches: Int[np.ndarray, "matched two"]
    num_keys: tuple[int, int]
    key_distance: float
    key_spread: float
    pattern_distance: float | None
    similarity: float | None
    angles: Mapping[str, float]
    overlap: Float[np.ndarray, "learned constructed"]


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """A learned network beside a constructed one, as `attnc.compare` returns it.

    Attributes
    ----------
    heads : tuple of HeadComparison
        The pairs of heads. Heads of the same names are paired if both networks have the same heads. Otherwise pairs are
        chosen so that the sum of the similarities of their z is the largest.
    largest, mean_square : float or None
        The largest difference of outputs at the points, and the root of the mean of its square. Both are observed.
    bound : float or None
        The proven bound of the constructed network, if it has one.
    num_points : int
        Number of points.
    alone : tuple of str
        The heads without a partner.

    Examples
    --------
    >>> import attnc, numpy as np
    >>> first = attnc.compile("sin(x)", {"x": (-1, 1)}, eps=1e-3)
    >>> second = attnc.compile("sin(x)", {"x": (-1, 1)}, eps=1e-5)
    >>> found = attnc.compare(first, second, np.linspace(-1, 1, 50)[:, None])
    >>> found.largest <= first.certificate.bound + second.certificate.bound
    True
    """

    heads: tuple[HeadComparison, ...]
    largest: float | None
    mean_square: float | None
    bound: float | None
    num_points: int
    alone: tuple[str, ...] = field(default=())

    def __repr__(self) -> str:
        distance = "" if self.largest is None else f", outputs differ by at most {self.largest:.3g} at the points"
        return f"<Comparison: {plural(len(self.heads), 'pair')} of heads{distance}>"

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Return the table as text: one line per pair of heads, then the distance of the functions.

        Returns
        -------
        str
            Lines of equal columns.

        Examples
        --------
        >>> import attnc
        >>> net = attnc.compile("sin(x)", {"x": (-1, 1)}, eps=0.1)
        >>> print(attnc.compare(net, net, [[0.0], [0.5]]).table().splitlines()[0])
        learned        constructed    keys       key distance  of spread  patterns  z alike  largest angle
        """
        lines = [
            ("learned", "constructed", "keys", "key distance", "of spread", "patterns", "z alike", "largest angle")
        ]
        for head in self.heads:
            angle = max(head.angles.items(), key=lambda each: each[1], default=None)
            lines.append(
                (
                    shortened(head.learned, 40),
                    shortened(head.constructed, 40),
                    f"{len(head.matches)} of {head.num_keys[0]}, {head.num_keys[1]}",
                    f"{head.key_distance:.3g}",
                    f"{head.key_distance / head.key_spread:.3g}" if head.key_spread > 0 else "—",
                    "—" if head.pattern_distance is None else f"{head.pattern_distance:.3g}",
                    "—" if head.similarity is None else f"{head.similarity:.4f}",
                    "—" if angle is None else f"{angle[1]:.3g}° {angle[0]}",
                )
            )
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        text = [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        if self.alone:
            text.append(f"without a partner: {', '.join(self.alone)}")
        if self.largest is not None:
            bound = "" if self.bound is None else f"; the bound of the constructed network is {ceiling(self.bound)}"
            text.append(
                f"outputs differ by {self.largest:.3g} at most, {self.mean_square:.3g} in the root mean square, at "
                f"{plural(self.num_points, 'point')}{bound}"
            )
        return "\n".join(text)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain lists and numbers.

        Returns
        -------
        dict
            Plain lists, texts and numbers, as `json.dumps` takes them.

        Examples
        --------
        >>> import attnc
        >>> net = attnc.compile("sin(x)", {"x": (-1, 1)}, eps=0.1)
        >>> attnc.compare(net, net, [[0.0], [0.5]]).to_dict()["num_points"]
        2
        """
        heads = [
            {
                **{name: getattr(head, name) for name in ("learned", "constructed", "key_distance", "key_spread")},
                **{name: getattr(head, name) for name in ("pattern_distance", "similarity")},
                "num_keys": list(head.num_keys),
                "matches": head.matches.tolist(),
                "angles": dict(head.angles),
                "overlap": head.overlap.tolist(),
            }
            for head in self.heads
        ]
        own = {name: getattr(self, name) for name in ("largest", "mean_square", "bound", "num_points")}
        return {"heads": heads, **own, "alone": list(self.alone)}

    def to_json(self) -> str:
        """Return `to_dict()` as JSON.

        Returns
        -------
        str
            One JSON object.

        Examples
        --------
        >>> import attnc, json
        >>> net = attnc.compile("sin(x)", {"x": (-1, 1)}, eps=0.1)
        >>> json.loads(attnc.compare(net, net, [[0.0], [0.5]]).to_json())["largest"]
        0.0
        """
        return json.dumps(self.to_dict(), ensure_ascii=False)

    def plot(self, path: str | os.PathLike[str] | Path) -> None:
        """Draw the overlap of matched keys, a panel for each head, into a .svg, .pdf or .png file.

        It needs matplotlib.

        Parameters
        ----------
        path : path-like
            The file; its ending chooses the format.

        Examples
        --------
        >>> import attnc, pathlib, tempfile
        >>> net = attnc.compile("sin(x)", {"x": (-1, 1)}, eps=0.1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     attnc.compare(net, net, [[0.0], [0.5]]).plot(f"{folder}/keys.svg")
        ...     [path.name for path in pathlib.Path(folder).iterdir()]
        ['keys.svg']
        """
        from attnc.plots.comparing import plot_comparison

        plot_comparison(self, path)


def compare(
    learned: Any, constructed: Any, points: npt.ArrayLike | tuple[npt.ArrayLike, ...] | None = None
) -> Comparison:
    """Compare a learned network with a constructed one at some points.

    Parameters
    ----------
    learned, constructed : Network, torch.nn.Module or array_like
        Networks, unfolded modules of `net.to_torch(form="unfolded")`, or arrays of keys (number of keys, d_k).
    points : array_like
        The points, as for a call of the network; a tuple of two arrays if it takes two inputs. Arrays of keys need no
        points.

    Returns
    -------
    Comparison
        Keys matched one to one, distances of patterns, subspaces and outputs. All are observed at the points: nothing
        of it is proved.

    Raises
    ------
    InputError
        If the points or the inputs of the two do not fit, or the module is folded.

    Examples
    --------
    >>> import attnc, numpy as np
    >>> net = attnc.compile("sin(x) + cos(y)", {"x": (-3, 3), "y": (-3, 3)}, eps=1e-4)
    >>> points = np.random.default_rng(0).uniform(-3, 3, (100, 2))
    >>> found = attnc.compare(net.to_torch(form="unfolded"), net, points)
    >>> found.largest, [len(head.matches) == head.num_keys[0] for head in found.heads]
    (0.0, [True, True])
    >>> attnc.compare([[0.0], [1.0], [2.1]], [[2.0], [0.0]]).heads[0].matches.tolist()
    [[2, 0], [0, 1]]
    """
    if all(_is_array(each) for each in (learned, constructed)):
        return _compared_keys(learned, constructed)
    first, second = (_Subject.of(each, name) for each, name in ((learned, "learned"), (constructed, "constructed")))
    if points is None:
        raise InputError("points are needed to compare networks: pass the points at which they are evaluated")
    inputs = tuple(real_array("points", each) for each in (points if isinstance(points, tuple) else (points,)))
    if first.program.input_shapes != second.program.input_shapes:
        shapes = f"{first.program.input_shapes} and {second.program.input_shapes}"
        raise InputError(f"the two networks take inputs of different shapes, {shapes}")
    for subject in (first, second):
        subject.run(inputs)
    pairs = _paired(first, second)
    heads = tuple(_compared(first, a, second, b) for a, b in pairs)
    known = {(subject.name, name) for pair in pairs for subject, name in zip((first, second), pair, strict=True)}
    every = [(subject.name, name) for subject in (first, second) for name in subject.heads]
    alone = [f"{name} ({side})" for side, name in every if (side, name) not in known]
    largest = mean_square = None
    if first.outputs.shape == second.outputs.shape:
        apart = np.abs(first.outputs.astype(np.float64) - second.outputs)
        largest, mean_square = float(apart.max()), float(np.sqrt((apart**2).mean()))
    return Comparison(heads, largest, mean_square, second.bound, len(inputs[0]), tuple(alone))


def _is_array(given: Any) -> bool:
    return isinstance(given, np.ndarray | Sequence) and not isinstance(given, str)


class _Subject:
    """A network at points: its outputs, and the scores, patterns and z of each head, flat over points and queries."""

    def __init__(self, program: Program, name: str, bound: float | None, check: Callable[..., Any] | None) -> None:
        self.program, self.name, self.bound, self._check = program, name, bound, check
        both = ((MEMORY, program.unrolled_memory), ("", program.unrolled_layers))
        self.heads: dict[str, Head] = {
            f"{prefix}{layer.name}.head{h}": head
            for prefix, layers in both
            for layer in layers
            for h, head in enumerate(layer.heads)
        }
        self.outputs = np.zeros(0)
        self._cache: dict[str, np.ndarray] = {}

    @classmethod
    def of(cls, given: Any, name: str) -> _Subject:
        if hasattr(given, "certificate") and isinstance(getattr(given, "program", None), Program):
            return cls(given.program, name, given.certificate.bound, given.run)
        program = getattr(given, "program", None)
        if isinstance(program, Program) and hasattr(given, "state_dict"):
            return cls(program_with(program, given), name, None, None)
        if hasattr(given, "state_dict"):
            raise InputError(
                f"the {name} module has no names of heads and keys. Compare unfolded modules, as "
                'net.to_torch(form="unfolded", trainable=True) returns them.'
            )
        raise InputError(
            f"{name} must be a Network or an unfolded torch module, or both must be arrays; "
            f"found {type(given).__name__}"
        )

    def run(self, inputs: tuple[np.ndarray, ...]) -> None:
        if self._check is not None:
            self._check(*inputs)  # in the box, finite, of the right shape
        parts = {f"{name}.{part}" for name in self.heads for part in ("scores", "pattern", "z")}

        def keep(name: str, array: np.ndarray) -> np.ndarray:
            return self._cache.setdefault(name, array) if name in parts else array

        self.outputs = evaluate_visited(self.program, inputs, keep, MAX_MAPS_BYTES)

    def flat(self, head: str, part: str) -> Float[np.ndarray, "samples columns"]:
        array = self._cache[f"{head}.{part}"].astype(np.float64)
        return array.reshape(-1, array.shape[-1])

    def keys(self, head: str) -> Float[np.ndarray, "keys samples"]:
        """Return the scores of every key, less the mean over the keys that the query sees. Hidden scores are 0."""
        scores = self.flat(head, "scores")
        is_seen = np.isfinite(scores)
        scores = np.where(is_seen, scores, 0.0)
        centred = scores - (scores.sum(axis=1) / is_seen.sum(axis=1))[:, None]
        kept = is_seen.any(axis=0)  # keys of other heads in the same layer
        return np.where(is_seen, centred, 0.0)[:, kept].T

    def pattern(self, head: str) -> Float[np.ndarray, "samples keys"]:
        kept = np.isfinite(self.flat(head, "scores")).any(axis=0)
        return self.flat(head, "pattern")[:, kept]


def _paired(first: _Subject, second: _Subject) -> list[tuple[str, str]]:
    if list(first.heads) == list(second.heads):
        return [(name, name) for name in first.heads]
    from scipy.optimize import linear_sum_assignment

    names = list(first.heads), list(second.heads)
    alike = np.array([[_similarity(first.flat(a, "z"), second.flat(b, "z")) for b in names[1]] for a in names[0]])
    rows, columns = linear_sum_assignment(-alike.reshape(len(names[0]), len(names[1])))
    return [(names[0][a], names[1][b]) for a, b in zip(rows, columns, strict=True)]


def _similarity(a: Float[np.ndarray, "samples m"], b: Float[np.ndarray, "other n"]) -> float:
    """Return the linear centred kernel alignment of two sets of features, 0 if they have different samples."""
    if len(a) != len(b):
        return 0.0
    a, b = a - a.mean(axis=0), b - b.mean(axis=0)
    size = float(np.linalg.norm(a.T @ a) * np.linalg.norm(b.T @ b))
    if size == 0:
        return 1.0 if not a.any() and not b.any() else 0.0
    return float(np.linalg.norm(a.T @ b) ** 2 / size)


def _compared(first: _Subject, a: str, second: _Subject, b: str) -> HeadComparison:
    keys, others = first.keys(a), second.keys(b)
    if keys.shape[1] != others.shape[1]:
        raise InputError(
            f"{a} has {keys.shape[1]} queries at the points, {b} has {others.shape[1]}: nothing to compare"
        )
    matches, distance = _matched(keys, others, (a, b))
    p, q = first.pattern(a), second.pattern(b)
    alone = p.sum(axis=1) - p[:, matches[:, 0]].sum(axis=1) + q.sum(axis=1) - q[:, matches[:, 1]].sum(axis=1)
    apart = 0.5 * (np.abs(p[:, matches[:, 0]] - q[:, matches[:, 1]]).sum(axis=1) + alone)
    angles = {}
    for name, W in first.heads[a].matrices.items():
        other = second.heads[b].matrices[name]
        if name == "W_O":
            W, other = W.T, other.T
        if W.shape[0] == other.shape[0]:
            angles[name] = _angle(W, other)
    order = [_matched_first(matches[:, side], count) for side, count in ((0, len(keys)), (1, len(others)))]
    return HeadComparison(
        a,
        b,
        matches,
        (len(keys), len(others)),
        distance,
        float(np.sqrt((others**2).mean())) if others.size else 0.0,
        float(apart.mean()),
        _similarity(first.flat(a, "z"), second.flat(b, "z")),
        angles,
        _overlap(p[:, order[0]], q[:, order[1]]),
    )


def _compared_keys(learned: Any, constructed: Any) -> Comparison:
    """Compare two arrays of keys by their own distances."""
    arrays = []
    for name, given in (("learned", learned), ("constructed", constructed)):
        keys = real_array(f"the {name} keys", given).astype(np.float64)
        if keys.ndim != 2 or not keys.size or not np.isfinite(keys).all():
            raise InputError(f"the {name} keys must be finite numbers of shape (keys, d_k), found shape {keys.shape}")
        arrays.append(keys)
    a, b = arrays
    if a.shape[1] != b.shape[1]:
        raise InputError(f"keys of {a.shape[1]} and {b.shape[1]} numbers cannot be compared: project them first")
    matches, distance = _matched(a, b, ("learned", "constructed"))
    spread = b - b.mean(axis=0)
    order = [_matched_first(matches[:, side], count) for side, count in ((0, len(a)), (1, len(b)))]
    apart = np.sqrt(np.maximum(_squares(a[order[0]], b[order[1]]), 0.0))
    overlap = 1 / (1 + apart / (float(np.sqrt((spread**2).mean())) or 1.0))
    head = HeadComparison(
        "learned",
        "constructed",
        matches,
        (len(a), len(b)),
        distance,
        float(np.sqrt((spread**2).mean())),
        None,
        None,
        {"keys": _angle(a.T, b.T)},
        overlap,
    )
    return Comparison((head,), None, None, None, 0)


def _matched(
    keys: Float[np.ndarray, "keys samples"], others: Float[np.ndarray, "others samples"], names: tuple[str, str]
) -> tuple[Int[np.ndarray, "matched two"], float]:
    """Match keys one to one with the smallest sum of squares. Return the pairs, and their root mean square distance."""
    from scipy.optimize import linear_sum_assignment

    if max(len(keys), len(others)) > MAX_MATCHED_KEYS:
        raise InputError(
            f"{names[0]} and {names[1]} have {len(keys):,} and {len(others):,} keys: at most {MAX_MATCHED_KEYS:,} are "
            "matched"
        )
    rows, columns = linear_sum_assignment(_squares(keys, others))
    order = np.argsort(columns)
    matches = np.stack([rows[order], columns[order]], axis=1)
    apart = keys[matches[:, 0]] - others[matches[:, 1]]  # again by differences: the squares above are rounded
    return matches, float(np.sqrt((apart**2).mean())) if apart.size else 0.0


def _squares(a: np.ndarray, b: np.ndarray) -> Float[np.ndarray, "a b"]:
    """Return the mean squares of the differences of all rows."""
    squares: np.ndarray = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1) - 2 * a @ b.T
    return squares / max(1, a.shape[1])


def _matched_first(matched: Int[np.ndarray, " matched"], count: int) -> Int[np.ndarray, " keys"]:
    return np.concatenate([matched, np.setdiff1d(np.arange(count), matched)])


def _overlap(p: Float[np.ndarray, "samples m"], q: Float[np.ndarray, "samples n"]) -> Float[np.ndarray, "m n"]:
    shared = np.array([np.minimum(column[:, None], q).sum(axis=0) for column in p.T])
    larger = np.maximum(p.sum(axis=0)[:, None], q.sum(axis=0))
    return np.divide(shared, larger, out=np.zeros_like(shared), where=larger > 0)


def _angle(A: Float[np.ndarray, "width m"], B: Float[np.ndarray, "width n"]) -> float:
    """Return the largest principal angle between the column spaces, in degrees; 90 if their dimensions differ."""
    bases = []
    for W in (A, B):
        U, sizes, _ = np.linalg.svd(W.astype(np.float64), full_matrices=False)
        bases.append(U[:, sizes > RANK * sizes.max(initial=0.0)] if sizes.any() else U[:, :0])
    if bases[0].shape[1] != bases[1].shape[1]:
        return 90.0
    if not bases[0].shape[1]:
        return 0.0
    from scipy.linalg import subspace_angles

    return float(np.degrees(subspace_angles(*bases).max()))
