"""A certificate: the norm of f − network is ≤ bound, for these weights, on this box, in this arithmetic.

Only this file reads and writes the JSON of certificates. All other code uses the typed evidence of `proof`.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from attnc.errors import FileError
from attnc.numerics.arrays import Float
from attnc.numerics.bound import Term
from attnc.numerics.rounding import up
from attnc.proofs.cells.branching import Leaf
from attnc.proofs.proof import (
    Beyond,
    Evidence,
    Excluded,
    GradientProof,
    HeadProof,
    Leaves,
    Points,
    Proof,
    SlopeProof,
    Stages,
)
from attnc.proofs.shards import ShardedLeaves
from attnc.targets.box import Box, show_intervals

FORMAT = "attnc.certificate/1"
TAIL_LEAF = "tail"  # the first entry of a leaf that is a half-line; the second one is its side
THEOREM, ASSUMING = "theorem", " under the stated assumption: "
"""The method of a bound that the theorem of a construction states, and the words before a given constant."""
TRUSTED = "the theorem of the construction holds for these weights: `attnc verify` cannot re-prove the bound"
"""The assumption of a bound by a theorem."""
TAILS = "beyond the core of the box the bound is for exact arithmetic: rounding grows with |x| there"
E = TypeVar("E", Leaves, Stages, Points)
CLAIM_FIELDS = ("dtype", "norm", "bound", "observed", "terms", "assumptions", "method", "complete")
GRADIENT_FIELDS = ("eps", "bound", "observed", "terms", "complete")
HEAD_FIELDS = tuple(field.name for field in dataclasses.fields(HeadProof) if field.name != "like")
LIKE_FIELDS = ("stage", "channel", "name", "term", "argument", "argument_as", "like")
"""The fields of a certificate, of its bound of gradients, of a head, and of a head that is like another. They are in
the order of the file."""


class Standing(enum.Enum):
    """The ground on which a bound stands in this process: `net.certificate.standing`.

    Attributes
    ----------
    PROVEN
        The prover proved it in this process.
    STATED
        A file states it. Anybody may have written the file.
    REPROVED
        A file states it, and `attnc verify` re-proved these files on this machine.

    Examples
    --------
    >>> import attnc
    >>> attnc.compile("sin(x)", {"x": (-3, 3)}, eps=1e-3).certificate.standing
    <Standing.PROVEN: 'proven'>
    """

    PROVEN = "proven"
    STATED = "stated"
    REPROVED = "re-proved"


@dataclass(frozen=True, repr=False)
class Certificate:
    """The claim that ‖f − network‖ ≤ bound, for one set of weights, on one box, in one arithmetic.

    The certificate of a network is `net.certificate`. The proven `bound` and the sampled `observed` are never mixed.

    Attributes
    ----------
    bound : float or None
        The bound that was proved, rounding included. None if no bound was proved.
    observed : float or None
        The largest error seen at samples. It proves nothing.
    terms : tuple of Term
        The parts of the bound, each with `name`, `value` and `reason`; their sum, rounded up, is the bound.
    assumptions : tuple of str
        The facts that the proof takes for granted.
    dtype : str
        The arithmetic in which the bound holds: "float64" or "float32".
    method : str
        The way in which the bound was found, for example "proof" (by leaves) or "staged proof" (head by head).
    norm : str
        "inf" for the largest error, otherwise the p of an L_p norm.
    complete : bool
        False where time ran out before the bound was as small as it can be.
    truncation : float
        The part of the bound for engines that leave out far anchors.
    evidence : Leaves, Stages, Points or None
        The proof: cells that cover the box, heads, or the points of a table. A theorem of a construction has none.
    gradient : GradientProof or None
        The bound of the errors of all partial derivatives, with its proof. None if it was not asked for.
    standing : Standing
        "proven" in this process, "stated" by a file, or a file's and "re-proved" on this machine. Files do not have it.

    Examples
    --------
    >>> import attnc
    >>> claim = attnc.compile("sin(x)", {"x": (-3, 3)}, eps=1e-3).certificate
    >>> claim.observed <= claim.bound <= 1e-3
    True
    >>> claim.method, claim.norm, claim.dtype
    ('proof', 'inf', 'float64')
    >>> [term.name for term in claim.terms]
    ['approximation', 'remainder', 'rounding']
    """

    bound: float | None
    observed: float | None
    terms: tuple[Term, ...]
    assumptions: tuple[str, ...]
    dtype: str
    method: str
    norm: str = "inf"
    complete: bool = True
    truncation: float = 0.0
    evidence: Evidence | None = None
    gradient: GradientProof | None = None
    standing: Standing = dataclasses.field(default=Standing.PROVEN, compare=False)

    def __repr__(self) -> str:
        claim = f"bound={self.bound!r}, observed={self.observed!r}, dtype={self.dtype!r}, method={self.method!r}"
        claim += f", standing={self.standing.value!r}"
        proof = f"{len(self.terms)} terms, {self.num_leaves:,} leaves, {self.num_heads} stages"
        return f"<Certificate: {claim}; {proof}>"

    @property
    def by_leaves(self) -> Leaves | None:
        """The leaves, if the proof is by leaves.

        Examples
        --------
        >>> import attnc
        >>> net = attnc.compile("sin(x)", {"x": (-3, 3)}, eps=1e-3)
        >>> len(net.certificate.by_leaves.leaves) == net.certificate.num_leaves
        True
        """
        return self._evidence(Leaves)

    @property
    def by_heads(self) -> Stages | None:
        """The heads, if the proof is head by head.

        Examples
        --------
        >>> import attnc
        >>> claim = attnc.compile("tanh(x) * y", {"x": (-1, 1), "y": (-1, 1)}, eps=0.1).certificate
        >>> claim.method, len(claim.by_heads.heads) == claim.num_heads
        ('staged proof', True)
        """
        return self._evidence(Stages)

    @property
    def at_points(self) -> Points | None:
        """The points, if the claim is about the points of a table. It then states nothing about other points.

        Examples
        --------
        >>> import attnc
        >>> table = attnc.TableTarget([[0.0], [1.0]], [2.0, 3.0])
        >>> attnc.compile(table, eps=1e-6).certificate.at_points.count
        2
        """
        return self._evidence(Points)

    @property
    def is_of_table(self) -> bool:
        """Whether the claim is about the points of a table alone.

        Examples
        --------
        >>> import attnc
        >>> table = attnc.TableTarget([[0.0], [1.0]], [2.0, 3.0])
        >>> attnc.compile(table, eps=1e-6).certificate.is_of_table
        True
        >>> attnc.compile("x**2", {"x": (0, 1)}, eps=0.1).certificate.is_of_table
        False
        """
        return self.at_points is not None

    @property
    def num_points(self) -> int:
        """The number of points of the table that the claim is about, or 0 if it is not about a table.

        Examples
        --------
        >>> import attnc
        >>> table = attnc.TableTarget([[0.0], [1.0]], [2.0, 3.0])
        >>> attnc.compile(table, eps=1e-6).certificate.num_points
        2
        """
        return 0 if self.at_points is None else self.at_points.count

    @property
    def gradient_bound(self) -> float | None:
        """The bound of |∂network/∂x_i − ∂f/∂x_i| away from kinks, rounding included. None if none was proved.

        Examples
        --------
        >>> import attnc
        >>> claim = attnc.compile("sin(x)", {"x": (-1, 1)}, 1e-2, norm="C1", gradient_eps=0.1).certificate
        >>> claim.gradient_bound <= 0.1
        True
        """
        return None if self.gradient is None else self.gradient.bound

    @property
    def gradient_observed(self) -> float | None:
        """The largest error of a partial derivative seen at samples. It proves nothing.

        Examples
        --------
        >>> import attnc
        >>> claim = attnc.compile("sin(x)", {"x": (-1, 1)}, 1e-2, norm="C1", gradient_eps=0.1).certificate
        >>> claim.gradient_observed <= claim.gradient_bound
        True
        """
        return None if self.gradient is None else self.gradient.observed

    @property
    def gradient_eps(self) -> float | None:
        """The largest error of partial derivatives that was asked for.

        Examples
        --------
        >>> import attnc
        >>> claim = attnc.compile("sin(x)", {"x": (-1, 1)}, 1e-2, norm="C1", gradient_eps=0.1).certificate
        >>> claim.gradient_eps
        0.1
        """
        return None if self.gradient is None else self.gradient.eps

    @property
    def excluded(self) -> tuple[Excluded, ...]:
        """The neighbourhoods of kinks in which nothing is claimed about gradients.

        Examples
        --------
        >>> import attnc
        >>> claim = attnc.compile("relu(x)", {"x": (-1, 1)}, 1e-2, norm="C1", gradient_eps=0.1).certificate
        >>> [(strip.argument, strip.lo < 0 < strip.hi) for strip in claim.excluded]
        [('x', True)]
        """
        return () if self.gradient is None else self.gradient.excluded

    @property
    def num_leaves(self) -> int:
        """The number of leaves, tails included.

        Examples
        --------
        >>> import attnc
        >>> claim = attnc.compile("sin(x)", {"x": (-3, 3)}, eps=0.1).certificate
        >>> claim.num_leaves == len(claim.by_leaves.leaves)  # a finite box has no tails
        True
        """
        return len(self._leaves.leaves) + len(self._leaves.tails)

    @property
    def num_heads(self) -> int:
        """The number of heads that are proved one by one.

        Examples
        --------
        >>> import attnc
        >>> attnc.compile("tanh(x) * y", {"x": (-1, 1), "y": (-1, 1)}, eps=0.1).certificate.num_heads
        1
        """
        return 0 if self.by_heads is None else len(self.by_heads.heads)

    @property
    def leaf_bounds(self) -> Float[np.ndarray, " leaves"]:
        """The bounds of the leaves, without tails. Empty if the proof is not by leaves.

        Examples
        --------
        >>> import attnc
        >>> net = attnc.compile("sin(x)", {"x": (-3, 3)}, eps=1e-3)
        >>> bool(net.certificate.leaf_bounds.max() <= net.certificate.bound)
        True
        """
        return self._leaves.bounds

    @property
    def _leaves(self) -> Leaves:
        return self.by_leaves or Leaves((), np.zeros(0))

    def _evidence(self, kind: type[E]) -> E | None:
        return self.evidence if isinstance(self.evidence, kind) else None

    @property
    def error(self) -> float | None:
        """The bound, or the observed error if no bound was proved.

        Examples
        --------
        >>> import attnc
        >>> net = attnc.compile(lambda points: points[:, 0] ** 2, [(0, 1)], eps=0.1)
        >>> net.certificate.bound is None, net.certificate.error == net.certificate.observed
        (True, True)
        """
        return self.observed if self.bound is None else self.bound

    @property
    def pointwise_bound(self) -> float | None:
        """The bound if it holds at every point of the box. None for an L_p norm with p < ∞, and for a table.

        Examples
        --------
        >>> import attnc
        >>> claim = attnc.compile("x**2", {"x": (0, 1)}, eps=0.1).certificate
        >>> claim.pointwise_bound == claim.bound
        True
        >>> table = attnc.TableTarget([[0.0], [1.0]], [2.0, 3.0])
        >>> print(attnc.compile(table, eps=1e-6).certificate.pointwise_bound)
        None
        """
        return self.bound if self.norm == "inf" and not self.is_of_table else None

    @property
    def is_by_theorem(self) -> bool:
        """Whether the bound is the construction's own, and was not derived from the weights.

        Examples
        --------
        >>> import attnc
        >>> net = attnc.compile("sin(x)", {"x": (-3, 3)}, eps=1e-3)
        >>> net.certificate.is_by_theorem
        False
        """
        return self.bound is not None and self.method.partition(ASSUMING)[0] == THEOREM

    @property
    def is_reprovable(self) -> bool:
        """Whether the checker re-proves claims of this kind: not those of theorems, nor those under an assumption.

        Examples
        --------
        >>> import attnc
        >>> net = attnc.compile("sin(x)", {"x": (-3, 3)}, eps=1e-3)
        >>> net.certificate.is_reprovable
        True
        """
        return self.bound is not None and (
            self.method in ("proof", "staged proof") or self.method.startswith("proof at the table's ")
        )

    @property
    def core(self) -> tuple[float, float] | None:
        """The finite part of an infinite box, on which the bound includes rounding.

        Examples
        --------
        >>> import attnc
        >>> claim = attnc.compile("tanh(x)", {"x": (-float("inf"), float("inf"))}, eps=1e-3).certificate
        >>> claim.core[0] < 0 < claim.core[1]
        True
        """
        return self._leaves.core

    @property
    def beyond(self) -> Beyond | None:
        """The rounding beyond the core; None if there is no core, or if the bound there is about exact arithmetic.

        Examples
        --------
        >>> import attnc
        >>> claim = attnc.compile("tanh(x)", {"x": (-float("inf"), float("inf"))}, eps=1e-3).certificate
        >>> claim.beyond.reach > claim.core[1]
        True
        """
        return self._leaves.beyond

    def bound_at(self, x: float) -> float | None:
        """Return the bound at a point of one variable, rounding included.

        Parameters
        ----------
        x : float
            The point. Beyond the core of an infinite range the bound grows with |x|.

        Returns
        -------
        float or None
            None where no such bound is proved.

        Examples
        --------
        >>> import attnc
        >>> net = attnc.compile("tanh(x)", {"x": (-float("inf"), float("inf"))}, eps=1e-6)
        >>> net.certificate.bound_at(1e6) <= 1e-6
        True
        """
        if self.core is None or self.core[0] <= x <= self.core[1]:
            return self.pointwise_bound
        if self.pointwise_bound is None or self.beyond is None or not abs(x) <= self.beyond.reach:
            return None
        return float(up(self.pointwise_bound + up(self.beyond.relative * abs(x))))

    def proved(self, proof: Proof, method: str) -> Certificate:
        """Return the certificate with the bound, the terms and the evidence of a proof.

        Parameters
        ----------
        proof : Proof
            The bound, its terms and its evidence.
        method : str
            The name of the method.

        Returns
        -------
        Certificate
            A new certificate, whose standing is `proven`.

        Examples
        --------
        >>> import attnc
        >>> from attnc.proofs.proof import Proof
        >>> claim = attnc.compile("x**2", {"x": (0, 1)}, eps=0.1).certificate
        >>> proof = Proof(claim.bound, claim.terms, claim.evidence)
        >>> claim.proved(proof, "proof").bound == claim.bound
        True
        """
        is_exact_beyond = isinstance(proof.evidence, Leaves) and proof.evidence.tails and proof.evidence.beyond is None
        return dataclasses.replace(
            self,
            bound=proof.bound,
            terms=proof.terms,
            method=method,
            complete=proof.complete,
            evidence=proof.evidence,
            standing=Standing.PROVEN,
            assumptions=(
                *(each for each in self.assumptions if each != TRUSTED),
                *([TAILS] if is_exact_beyond else []),
            ),
        )

    def cells(self, box: Box) -> tuple[Float[np.ndarray, "leaves d"], Float[np.ndarray, "leaves d"]]:
        """Return the lower and upper ends of the leaves, without tails. They are rounded: for pictures and messages.

        Parameters
        ----------
        box : Box
            The box of the network.

        Returns
        -------
        tuple of two arrays of shape (leaves, d)
            The lower ends and the upper ends.

        Examples
        --------
        >>> import attnc
        >>> net = attnc.compile("sin(x)", {"x": (-3, 3)}, eps=1e-3)
        >>> lo, hi = net.certificate.cells(net.box)
        >>> float(lo.min()), float(hi.max())
        (-3.0, 3.0)
        """
        if self.core is not None:
            box = Box.parse([self.core], box.names)
        leaves = self._leaves.leaves
        level = np.array([leaf.level for leaf in leaves])[:, None]
        index = np.array([leaf.index for leaf in leaves]).reshape(len(leaves), -1)
        lo, hi = index / 2.0**level, (index + 1) / 2.0**level
        for axis, inner in enumerate(self._leaves.knots or ((),) * box.d):
            ends = [box.lo[axis], *inner, box.hi[axis]]
            for side in (lo, hi):
                side[:, axis] = np.interp(side[:, axis], np.linspace(0, 1, len(ends)), ends)
        return lo, hi

    def worst_box(self, box: Box) -> dict[str, tuple[float, float]] | None:
        """Return the ends of the leaf with the largest bound.

        Parameters
        ----------
        box : Box
            The box of the network.

        Returns
        -------
        dict or None
            (lo, hi) by variable. None if there are no leaves.

        Examples
        --------
        >>> import attnc
        >>> net = attnc.compile("sin(x)", {"x": (-3, 3)}, eps=1e-3)
        >>> list(net.certificate.worst_box(net.box))
        ['x']
        """
        if not len(self.leaf_bounds):
            return None
        lo, hi = self.cells(box)
        worst = int(np.argmax(self.leaf_bounds))
        return {name: (float(a), float(b)) for name, a, b in zip(box.names, lo[worst], hi[worst], strict=True)}

    def worst_place(self, box: Box) -> str:
        """Return the worst box as text, or "" if the ledger is not that of one leaf: for norms, tails and heads.

        Parameters
        ----------
        box : Box
            The box of the network.

        Returns
        -------
        str
            The ranges of the variables there.

        Examples
        --------
        >>> import attnc
        >>> net = attnc.compile("sin(x)", {"x": (-3, 3)}, eps=1e-3)
        >>> net.certificate.worst_place(net.box)[:3]
        'x ∈'
        """
        found = self.worst_box(box) if self.norm == "inf" and all(term.name != "tail" for term in self.terms) else None
        return show_intervals(found or {})

    def to_json(self, expression: str | None, box: Box) -> dict[str, Any]:
        """Return the certificate as JSON, without the hash of the weights, which the writer of the files adds.

        Parameters
        ----------
        expression : str or None
            The function as text, if it has one.
        box : Box
            The box of the network.

        Returns
        -------
        dict
            Plain lists, texts and numbers, as `json.dumps` takes them.

        Examples
        --------
        >>> import attnc
        >>> net = attnc.compile("sin(x)", {"x": (-3, 3)}, eps=1e-3)
        >>> net.certificate.to_json("sin(x)", net.box)["box"]
        {'x': [-3.0, 3.0]}
        """
        leaves, heads, points = self._leaves, self.by_heads or Stages((), ()), self.at_points
        return {
            "format": FORMAT,
            "expression": expression,
            "box": box.as_json(),
            **{name: _plain(getattr(self, name)) for name in CLAIM_FIELDS},
            **_leaves_json(leaves),
            **_stated(core=leaves.core, cuts=leaves.cuts, gap=leaves.gap, knots=leaves.knots),
            **({} if leaves.beyond is None else {"beyond": dataclasses.asdict(leaves.beyond)}),
            "truncation": self.truncation,
            **({} if points is None else _points_json(points)),
            "stages": [_head_json(head) for head in heads.heads],
            "outputs": _plain(heads.outputs),
            **_stated(axes=heads.axes),
            **({} if self.gradient is None else {"gradient": _gradient_json(self.gradient)}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Certificate:
        """Read a certificate. Raise FileError if a field is missing, has another type, or contradicts another field.

        Parameters
        ----------
        data : mapping
            The content of a file `certificate.json`.

        Returns
        -------
        Certificate
            Its standing is `stated`: nothing is proved by reading it.

        Raises
        ------
        FileError
            If the file has another format, or a field that is missing, false or of another type.

        Examples
        --------
        >>> import attnc
        >>> net = attnc.compile("sin(x)", {"x": (-3, 3)}, eps=1e-3)
        >>> read = attnc.Certificate.from_json(net.certificate.to_json("sin(x)", net.box))
        >>> read.bound == net.certificate.bound, read.standing.value
        (True, 'stated')
        """
        try:
            if data["format"] != FORMAT:
                raise FileError(
                    f"certificate: its format is {data['format']!r:.60}, and this version of attnc reads {FORMAT!r}. "
                    "Use the version of attnc that wrote it, or compile the network again."
                )
            apart = ("evidence", "standing", "gradient")
            stated = {name: data[name] for name in get_type_hints(cls) if name not in apart}
            claim = dataclasses.replace(
                _typed(stated, cls),
                evidence=_read_evidence(data),
                gradient=_read_gradient(data),
                standing=Standing.STATED,
            )
            claim._require_consistent()
        except KeyError as error:
            raise FileError(f"certificate: the field {error} is missing") from None
        except (TypeError, ValueError, OverflowError) as error:
            raise FileError(f"certificate: {error}") from None
        return claim

    def _require_consistent(self) -> None:
        """Raise ValueError if a size is negative, or the bound is below one of its parts: then the file was changed."""
        heads = () if self.by_heads is None else self.by_heads.heads
        sizes = [self.bound, self.observed, self.truncation, *(term.value for term in self.terms), *self.leaf_bounds]
        sizes += [] if self.beyond is None else [self.beyond.relative, self.beyond.reach]
        for size in (*sizes, *(size for head in heads for size in (head.bound, head.carrier_size, head.noise))):
            if size is not None and not size >= 0:
                raise ValueError(f"expected a finite number ≥ 0, found {size!r:.80}")
        parts = {"the sum of its terms": math.fsum(term.value for term in self.terms)}
        if self.norm == "inf":
            largest = float(np.max(self.leaf_bounds, initial=0.0))
            parts |= {"its largest leaf": largest, "the observed error": self.observed or 0.0}
        gradient = self.gradient
        if gradient is not None:
            largest = max(gradient.observed, float(gradient.leaves.bounds.max(initial=0.0)))
            if not 0 <= largest <= gradient.bound:
                raise ValueError(
                    f"the bound {gradient.bound:.6g} of gradients is below {largest:.6g}: it was not proved"
                )
        for part, least in parts.items():
            if self.bound is not None and self.bound < least * (1 - 2.0**-40):
                raise ValueError(f"the bound {self.bound:.6g} is below {part}, {least:.6g}: it was not proved")


def _gradient_json(proof: GradientProof) -> dict[str, Any]:
    return {
        **{name: _plain(getattr(proof, name)) for name in GRADIENT_FIELDS},
        "excluded": [dataclasses.asdict(each) for each in proof.excluded],
        "leaves": _plain(proof.leaves),
        "leaf_bounds": proof.leaves.bounds.tolist(),
        **({"stages": [_slopes_json(head) for head in proof.heads]} if proof.heads else {}),
        **_stated(axes=proof.axes),
    }


def _slopes_json(head: SlopeProof) -> dict[str, Any]:
    leaves = head.leaves
    return {
        "name": head.name,
        "bound": head.bound,
        "leaves": _plain(leaves),
        "leaf_bounds": leaves.bounds.tolist(),
        **_stated(leaf_middles=leaves.middles),
    }


def _read_gradient(data: Mapping[str, Any]) -> GradientProof | None:
    stated = _typed(data.get("gradient"), dict | None)
    if stated is None:
        return None
    heads = tuple(_read_slopes(_typed(head, dict)) for head in _typed(stated.get("stages", []), list))
    leaves = _leaves_of_gradient(stated, len(data["box"]), is_empty=bool(heads))
    fields = {name: stated[name] for name in (*GRADIENT_FIELDS, "excluded")}
    hints = get_type_hints(GradientProof)
    read = {name: _typed(value, hints[name]) for name, value in fields.items()}
    return GradientProof(**read, leaves=leaves, heads=heads, axes=_typed(stated.get("axes", []), Whole))


def _read_slopes(stated: Mapping[str, Any]) -> SlopeProof:
    name, bound = _typed(stated["name"], str), _typed(stated["bound"], float)
    leaves = _leaves_of_gradient(stated, 1, is_empty=False)
    if not 0 <= float(leaves.bounds.max()) <= bound:
        raise ValueError(f"the bound {bound:.6g} of the slopes of {name!r:.40} is below that of a leaf")
    return SlopeProof(name, bound, leaves)


def _leaves_of_gradient(stated: Mapping[str, Any], d: int, *, is_empty: bool) -> Leaves:
    entries, bounds = _typed(stated["leaves"], list), np.array(_typed(stated["leaf_bounds"], Numbers))
    if len(bounds) != len(entries) or is_empty != (not entries):
        raise ValueError(f"{len(bounds):,} leaf_bounds for {len(entries):,} leaves of gradients")
    found = tuple(Leaf.from_json(entry, d) for entry in entries)
    return Leaves(found, bounds, middles=_read_middles(stated, bounds))


def _read_middles(stated: Mapping[str, Any], bounds: np.ndarray) -> tuple[float, ...]:
    """Read the middles of errors on leaves. Raise ValueError if there is not one for each leaf, within its bound."""
    middles = _typed(stated.get("leaf_middles", []), Numbers)
    if middles and not (len(middles) == len(bounds) and (np.abs(np.array(middles)) <= bounds).all()):
        raise ValueError(
            f"{len(middles):,} leaf_middles for {len(bounds):,} leaves, or one above the bound of its leaf"
        )
    return middles


def _plain(value: Any) -> Any:
    """Return a value as JSON: tuples become lists, terms become objects, leaves become lists of their entries."""
    if isinstance(value, Leaves):
        return [leaf.as_json() for leaf in value.leaves]
    if isinstance(value, Term):
        return {"name": value.name, "value": value.value, "reason": value.reason}
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value


def _stated(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not empty."""
    return {name: _plain(value) for name, value in fields.items() if value}


def _head_json(head: HeadProof) -> dict[str, Any]:
    """Return the entry of a head. Optional fields without a value are left out."""
    is_like = head.like is not None or head.leaves is None
    bounds = np.zeros(0) if is_like or head.leaves is None else head.leaves.bounds
    bounds = bounds if (bounds < head.bound).any() else np.zeros(0)
    left_out = {name for name in ("argument_as", "carrier_as") if getattr(head, name) is None}
    if not (len(bounds) or head.carrier_size):
        left_out.add("carrier_size")  # the unit of the bounds
    if not head.noise:
        left_out.add("noise")
    names = (name for name in (LIKE_FIELDS if is_like else HEAD_FIELDS) if name not in left_out)
    middles = () if head.leaves is None else head.leaves.middles
    of_leaves = _stated(leaf_bounds=tuple(bounds.tolist()), leaf_middles=middles)
    return {name: _plain(getattr(head, name)) for name in names} | of_leaves


def _read_evidence(data: Mapping[str, Any]) -> Evidence | None:
    """Return the evidence. Raise ValueError if the data has several kinds of it."""
    leaves, bounds = (_typed(data[name], list) for name in ("leaves", "leaf_bounds"))
    stages, points = _typed(data["stages"], list), data.get("points")
    stated = {
        "leaves": bool(leaves or bounds or data.get("shards")),
        "stages": bool(stages),
        "points": points is not None,
    }
    if sum(stated.values()) > 1:
        raise ValueError(f"a proof is by leaves, by stages or at points; found {stated}")
    if stated["leaves"]:
        return _read_leaves(data)
    if stated["stages"]:
        return Stages(_read_heads(stages), _typed(data["outputs"], Texts), _typed(data.get("axes", []), Whole))
    if points is None:
        return None
    found = Points(_typed(points, int), _typed(data.get("table", []), Rows))
    if "table_file" in data:
        stated_file = _typed(data["table_file"], dict)
        sha256, columns = _typed(stated_file["sha256"], str), _typed(stated_file["columns"], int)
        found = dataclasses.replace(found, sha256=sha256, columns=columns)
    if found.count < 1:
        raise ValueError(f"expected a whole number ≥ 1, found {found.count}")
    return found


def _points_json(points: Points) -> dict[str, Any]:
    """Return the fields of a table. Many rows are written to a file of their own, whose hash is stated here."""
    if points.sha256 is None:
        return {"points": points.count, "table": _plain(points.table)}
    entry = {"sha256": points.sha256, "columns": points.columns}
    return {"points": points.count, "table": [], "table_file": {**entry, "content": points.content}}


def _leaves_json(leaves: Leaves) -> dict[str, Any]:
    """Return the leaves of the box, or the entries of the files that have them."""
    if isinstance(leaves.leaves, ShardedLeaves):
        return {"leaves": [], "leaf_bounds": [], "shards": leaves.leaves.as_json()}
    entries = [*_plain(leaves), *([TAIL_LEAF, side] for side in leaves.tails)]
    return {"leaves": entries, "leaf_bounds": leaves.bounds.tolist()}


def _read_leaves(data: Mapping[str, Any]) -> Leaves:
    if data.get("shards"):
        if data["leaves"] or data["leaf_bounds"]:
            raise ValueError("a certificate has leaves of its own or shards, not both")
        sharded = ShardedLeaves.from_json(_typed(data["shards"], list))
        if sharded[0].index and len(sharded[0].index) != len(data["box"]):
            raise ValueError("the shards have another number of variables than the box")
        return Leaves(sharded, sharded.bounds)
    entries = [_typed(entry, list) for entry in data["leaves"]]
    cells = [entry for entry in entries if entry[:1] != [TAIL_LEAF]]
    tails = [_typed(entry, tuple[str, int]) for entry in entries if entry[:1] == [TAIL_LEAF]]
    bounds = np.array(_typed(data["leaf_bounds"], Numbers))
    if len(bounds) and len(bounds) != len(cells):
        raise ValueError(f"{len(bounds):,} leaf_bounds for {len(data['leaves']):,} leaves, tails among them")
    if not {side for _, side in tails} <= {-1, 1}:
        raise ValueError(f"expected tails on the sides -1 and 1, found {tails!r:.80}")
    return Leaves(
        tuple(Leaf.from_json(entry, len(data["box"])) for entry in cells),
        bounds,
        _typed(data.get("core"), tuple[float, float] | None),
        tuple(side for _, side in tails),
        _typed(data.get("cuts", []), Rows),
        _typed(data.get("beyond"), Beyond | None),
        _typed(data.get("gap"), float | None),
        _read_knots(data),
    )


def _read_knots(data: Mapping[str, Any]) -> Rows:
    """Read the knots of every variable. Raise ValueError unless they are 2^k − 1 ascending points inside of the box."""
    knots = _typed(data.get("knots", []), Rows)
    ends = [_typed(pair, tuple[float, float]) for pair in data["box"].values()] if knots else []
    for (lo, hi), inner in zip(ends, knots, strict=bool(knots)):
        points = [lo, *inner, hi]
        if (len(points) - 1).bit_count() != 1 or any(x >= y for x, y in itertools.pairwise(points)):
            raise ValueError(f"expected 2^k − 1 ascending knots between {lo} and {hi}, found {inner!r:.80}")
    return knots


def _read_heads(entries: list[Any]) -> tuple[HeadProof, ...]:
    """Read the heads. A head that is like an earlier one has its function, interval and bound, and no leaves."""
    found: dict[str, HeadProof] = {}
    before: dict[str, dict[str, Any]] = {}
    try:
        for entry in entries:
            stated = _typed(entry, dict)
            like, leaves = stated.get("like"), None
            if like is None:
                bounds = np.array(_typed(stated.get("leaf_bounds", []), Numbers))
                cells = tuple(Leaf.from_json(leaf, 1) for leaf in _typed(stated["leaves"], list))
                leaves = Leaves(cells, bounds, middles=_read_middles(stated, bounds))
            elif like not in before or before[like].get("like") is not None:
                raise ValueError(f"one claims to be like {like!r:.40}, which is no head with leaves before it")
            else:
                stated = {**before[like], "argument_as": None, **stated}
            head = _typed({name: value for name, value in stated.items() if name != "leaves"}, HeadProof)
            before[head.name], found[head.name] = stated, dataclasses.replace(head, leaves=leaves)
    except KeyError as error:
        raise ValueError(f"a stage does not fit: the field {error} is missing") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"a stage does not fit: {error}") from None
    if len(found) < len(entries):
        raise ValueError("a stage does not fit: two have the same name")
    return tuple(found.values())


Texts, Whole, Numbers = tuple[str, ...], tuple[int, ...], tuple[float, ...]
Rows = tuple[tuple[float, ...], ...]
NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", list: "a list", dict: "fields"}


def _typed(value: Any, kind: Any) -> Any:
    """Convert a JSON value to a type: text, a number, a tuple, a dataclass, or None where that is allowed.

    Raise TypeError or ValueError if it has another type, and KeyError if a field is missing.
    """
    if type(value) is kind and kind is not float:
        return value
    members = get_args(kind)
    if NoneType in members:
        return None if value is None else _typed(value, members[0])
    if get_origin(kind) is tuple:
        count = len(_typed(value, list)) if members[-1] is Ellipsis else len(members)
        if len(_typed(value, list)) != count:
            raise TypeError(f"expected {count} entries, found {value!r:.80}")
        return tuple(map(_typed, value, members[:1] * count if members[-1] is Ellipsis else members))
    if hasattr(kind, "__dataclass_fields__"):
        fields, hints = dataclasses.fields(kind), get_type_hints(kind)
        if not isinstance(value, dict):
            *names, last = (f"a {field.name}" for field in fields)
            raise TypeError(
                f"expected a {kind.__name__.lower()} with {', '.join(names)} and {last}, found {value!r:.80}"
            )
        stated = [each.name for each in fields if each.name in value or each.default is dataclasses.MISSING]
        return kind(**{name: _typed(value[name], hints[name]) for name in stated})
    value = float(value) if kind is float and type(value) is int else value
    if type(value) is not kind:
        raise TypeError(f"expected {NAMES[kind]}, found {value!r:.80}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"expected a finite number, found {value!r:.80}")
    return value
