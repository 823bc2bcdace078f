"""The tasks that are divided: leaves of the box by regions, rows of a table by ranges, heads by groups.

The shard of a part is a file. Its content depends on the saved network, on its number and on the number of shards
alone, so that it may be lost and made again.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from attnc.constructions.built import Progress
from attnc.errors import FileError, InputError, ProgramError
from attnc.exports.directory import MAX_SHARD_BYTES, TABLE, WEIGHTS, shard_name
from attnc.exports.safe_files import CONFIG, MAX_JSON_BYTES, MAX_TENSOR_BYTES, read_bytes
from attnc.loading import load
from attnc.network import Network
from attnc.numerics.bound import Term
from attnc.numerics.intervals import Interval
from attnc.numerics.quiet import quiet
from attnc.numerics.threads import one_thread
from attnc.proofs.cells.dyadic import Region, cell_boxes, regions
from attnc.proofs.cells.integral import norm_of_leaves
from attnc.proofs.certificate import Standing
from attnc.proofs.kinds.point import RowCheck, WorstRow, points_of
from attnc.proofs.partition_prover import MAX_PROVED_ANCHORS
from attnc.proofs.proof import Leaves, Points, Proof, Stages
from attnc.proofs.prover import ProofRequest
from attnc.proofs.provers import LEAVES
from attnc.proofs.shards import HeadShard, RowShard, Shard, ShardedLeaves, ShardFile
from attnc.proofs.staged.prover import GroupProof, HeadGroup, ProvedGroup, begun
from attnc.proving import BESIDE_THEOREM, proved_by
from attnc.targets.sources import as_target
from attnc.targets.stored_rows import StoredRows
from attnc.targets.table import BLOCK_ROWS
from attnc.targets.target import Target, show_point

MAX_SHARD_CELLS = 2**22
"""Most cells of a shard."""
SAMPLED_LEAVES = 256
"""Number of leaves or rows of each shard that a merge compares with the network at a random point."""
STEM = "proof"
CERTIFICATE_FILE = "certificate.json"
OTHER_ROWS = (
    "the rows that were given are not those of the network: give the file, the columns and the options of rows that "
    "`attnc compile` had"
)
S = TypeVar("S", bound=ShardFile)


@dataclasses.dataclass(frozen=True, eq=False)
class ShardTask(abc.ABC, Generic[S]):
    """A saved network, and the request for its proof."""

    network: Network
    target: Target
    request: ProofRequest
    hashes: tuple[str, str]  # of the weights and of config.json

    @property
    @abc.abstractmethod
    def kind(self) -> type[S]:
        """The kind of shards."""

    @property
    @abc.abstractmethod
    def most(self) -> int:
        """The largest number of shards that all have work."""

    @property
    def asked(self) -> list[Any]:
        """Everything that the content of a shard depends on besides the files of the network."""
        return [self.network.certificate.norm, self.request.eps, self.request.observed, self.request.truncation]

    @abc.abstractmethod
    def part(self, k: int, n: int, progress: Progress | None) -> S:
        """Prove shard k of n."""

    @abc.abstractmethod
    def why_not_part(self, shard: S, k: int, n: int) -> str | None:
        """Return why a shard of this task is not number k of n."""

    @abc.abstractmethod
    def require_plausible(self, shard: S, name: str) -> None:
        """Raise FileError if a bound of the shard is below the error at a random point: then its maker lies."""

    @abc.abstractmethod
    def proof(self, shards: list[S]) -> Proof:
        """Return the proof that all shards make together."""

    def files(self, folder: str | os.PathLike[str], k: int, n: int) -> dict[str, bytes]:
        """Return the contents of the files that a worker elsewhere needs for shard k of n."""
        limits = {CONFIG: MAX_JSON_BYTES, WEIGHTS: MAX_TENSOR_BYTES, CERTIFICATE_FILE: MAX_JSON_BYTES}
        return {name: read_bytes(os.path.join(folder, name), limit) for name, limit in limits.items()}

    def header(self, n: int) -> dict[str, str]:
        """Return the hashes that all shards of n have."""
        stated = [self.kind.format, *self.hashes, *self.asked, n]
        digest = hashlib.sha256(json.dumps(stated).encode()).hexdigest()
        return {"weights_sha256": self.hashes[0], "task_sha256": digest}

    def require_count(self, n: int) -> None:
        """Raise InputError if there are more shards than parts."""
        if n > self.most:
            raise InputError(f"this proof has at most {self.most:,} shards, and {n:,} were asked for: choose fewer")

    def prove(self, k: int, n: int, progress: Progress | None = None) -> S:
        """Prove shard k of n. Raise InputError if no bound is found."""
        self.require_count(n)
        with one_thread(), quiet():
            try:
                return self.part(k, n, progress)
            except ProgramError as error:
                raise InputError(f"this network cannot be proved in shards: {error}") from None

    def why_not(self, shard: S, k: int, n: int) -> str | None:
        """Return why a shard is not number k of n of this task, or None if it is."""
        return shard.why_not_of(self.header(n)) or self.why_not_part(shard, k, n)

    def read(self, content: bytes, name: str) -> S:
        return self.kind.read(content, name)

    def stored(self, place: str | os.PathLike[str], k: int, n: int) -> S:
        """Read shard k of n. Raise FileError if the file is missing, or is another one."""
        path = os.path.join(place, shard_name(STEM, k, n))
        shard = self.read(read_bytes(path, MAX_SHARD_BYTES), path)
        reason = self.why_not(shard, k, n)
        if reason is not None:
            raise FileError(f"{path}: {reason}")
        return shard

    def merged(self, shards: list[S]) -> Network:
        """Return the network with the certificate that all shards make together."""
        for k, shard in enumerate(shards, 1):
            self.require_plausible(shard, f"shard {k} of {len(shards)}")
        found = proved_by(self.network, self.proof(shards), self.target)
        return found._with_certificate(dataclasses.replace(found.certificate, standing=Standing.STATED))

    def _require_bounds(self, apart: np.ndarray, bounds: np.ndarray, name: str, where: str, points: np.ndarray) -> None:
        """Raise FileError if an error at a point is above its bound. `where` names the kind of place."""
        if (wrong := apart > bounds).any():
            n = int(np.argmax(wrong))
            raise FileError(
                f"{name} is wrong: it states the bound {bounds[n]:.6g} {where}, and the error at "
                f"{show_point(self.network.box.names, points[n])} in it is {apart[n]:.6g}. Prove this shard again, on "
                "another machine."
            )


@dataclasses.dataclass(frozen=True, eq=False)
class LeavesTask(ShardTask[Shard]):
    """The leaves of an expression on a box. A shard has those of a region."""

    @property
    def kind(self) -> type[Shard]:
        return Shard

    @property
    def most(self) -> int:
        return 1 << 62

    def _region(self, k: int, n: int) -> Region:
        return regions(self.network.box.d, n)[k - 1]

    @functools.cached_property
    def _proved(self) -> Callable[[ProofRequest], Proof]:
        """Prove a request. The kinds of leaves are chosen once for all shards of a process."""
        return LEAVES.prepared(self.network.program, self.target, self.request)

    def part(self, k: int, n: int, progress: Progress | None) -> Shard:
        region, d = self._region(k, n), self.network.box.d
        request = dataclasses.replace(self.request, region=region, progress=progress)
        proof = self._proved(request)
        if not math.isfinite(proof.bound):
            raise InputError(f"no bound was found on shard {k} of {n}: numbers overflow, or the cells ran out")
        return Shard.of(proof, d, region, self.header(n))

    def why_not_part(self, shard: Shard, k: int, n: int) -> str | None:
        return shard.why_not_covering(self._region(k, n))

    def require_plausible(self, shard: Shard, name: str) -> None:
        rng, box = np.random.default_rng(), self.network.box
        rows = shard.rows[rng.integers(0, len(shard.rows), min(SAMPLED_LEAVES, len(shard.rows)))]
        centres, radii = cell_boxes(box, rows["level"].astype(np.int64), rows["index"].astype(np.int64))
        points = np.clip(centres + radii * rng.uniform(-1, 1, radii.shape), box.lo, box.hi)
        expression = self.target.expression
        assert expression is not None
        with quiet():
            f = expression.ranges(Interval.point(points), violations="infinite")
            values = self.network.at(points).reshape(f.lo.shape)
            apart = np.maximum(f.lo - values, values - f.hi).max(axis=1)
        self._require_bounds(apart, rows["bound"], name, "on a leaf", points)

    def proof(self, shards: list[Shard]) -> Proof:
        worst, leaves = max(shards, key=lambda shard: shard.bound), ShardedLeaves(tuple(shards))
        bound, terms = worst.bound, worst.terms
        if self.request.p < math.inf:
            levels = np.concatenate([shard.rows["level"] for shard in shards]).astype(np.int64)
            bound = norm_of_leaves(self.network.box, self.request.p, levels, leaves.bounds)
            terms = _weighed_terms(shards, self.request.p, bound)
        complete = bound <= max(self.request.eps, (1 + self.request.tolerance) * self.request.observed)
        return Proof(bound, terms, Leaves(leaves, leaves.bounds), complete)


@dataclasses.dataclass(frozen=True, eq=False)
class RowsTask(ShardTask[RowShard]):
    """The rows of a table. A shard has the bound at a range of them."""

    sha256: str  # of the rows

    @property
    def kind(self) -> type[RowShard]:
        return RowShard

    @property
    def table(self) -> StoredRows:
        assert isinstance(self.target, StoredRows)
        return self.target

    @property
    def most(self) -> int:
        return self.table.count

    @property
    def asked(self) -> list[Any]:
        return [*super().asked, self.sha256]

    def _rows(self, k: int, n: int) -> tuple[int, int]:
        return self.table.count * (k - 1) // n, self.table.count * k // n

    def files(self, folder: str | os.PathLike[str], k: int, n: int) -> dict[str, bytes]:
        """Return the files. If a table has a file of its own, only the rows of the shard are sent."""
        first, after = self._rows(k, n)
        points = self.network.certificate.at_points
        own = {} if points is None or points.sha256 is None else {TABLE: self.table.rows[first:after].tobytes()}
        return super().files(folder, k, n) | own

    def part(self, k: int, n: int, progress: Progress | None) -> RowShard:
        first, after = self._rows(k, n)
        rows = RowCheck.of(self.network.program, self.network.box, self.table.num_outputs, self.request)
        worst = WorstRow()
        for start in range(first, after, BLOCK_ROWS):

            def report(done: int, start: int = start) -> None:
                if progress is not None:
                    progress("proving", (start + done - first) / (after - first))

            worst = max(worst, rows.worst(*self.table.part(start, min(after, start + BLOCK_ROWS)), report))
        if not math.isfinite(worst.bound):
            raise InputError(f"no bound was found on shard {k} of {n}: numbers overflow")
        return RowShard.of(worst, first, after, self.header(n))

    def why_not_part(self, shard: RowShard, k: int, n: int) -> str | None:
        return shard.why_not_rows(*self._rows(k, n))

    def require_plausible(self, shard: RowShard, name: str) -> None:
        first, after = shard.header["first"], shard.header["after"]
        chosen = np.sort(np.random.default_rng().integers(first, after, min(SAMPLED_LEAVES, after - first)))
        rows = np.asarray(self.table.rows[chosen - self.table.first], np.float64)
        points, values = rows[:, : self.table.box.d], rows[:, self.table.box.d :]
        apart = np.abs(self.network.at(points).reshape(values.shape) - values).max(axis=1)
        self._require_bounds(apart, np.full(len(apart), shard.bound), name, "at rows", points)

    def proof(self, shards: list[RowShard]) -> Proof:
        worst = max(shard.worst for shard in shards)
        return Proof(worst.bound, worst.terms, points_of(self.table, self.sha256))


@dataclasses.dataclass(frozen=True, eq=False)
class HeadsTask(ShardTask[HeadShard]):
    """The heads of a composition. A shard has the leaves of every n-th group of heads that are one function of t.

    Groups are proved for arguments that are off by the errors that are `allowed` to earlier heads before their proof.
    """

    @property
    def kind(self) -> type[HeadShard]:
        return HeadShard

    @functools.cached_property
    def most(self) -> int:
        numbers = list[int]()

        def prove_group(group: HeadGroup) -> ProvedGroup:
            numbers.append(len(numbers))
            return ProvedGroup(group, group.allowed())

        with one_thread(), quiet():
            self._walk(prove_group)
        return max(1, len(numbers))

    @property
    def asked(self) -> list[Any]:
        stages = self.network.certificate.by_heads
        assert stages is not None
        fields = ("stage", "channel", "name", "function", "argument", "carrier")
        heads = [[getattr(head, field) for field in fields] for head in stages.heads]
        return [*super().asked, heads, list(stages.outputs)]

    def _walk(self, prove_group: Any) -> Any:
        walk, read = begun(self.network.program, self.target, self.request, prove_group)
        walk.through_all(self.request)
        return walk, read

    def part(self, k: int, n: int, progress: Progress | None) -> HeadShard:
        proved, count = dict[int, GroupProof](), 0

        def prove_group(group: HeadGroup) -> ProvedGroup:
            nonlocal count
            number, count = count, count + 1
            allowed = ProvedGroup(group, group.allowed())
            if number % n == k - 1:
                proved[number] = group.with_signs(group.proof())
                if not ProvedGroup(group, proved[number], allowed).own <= allowed.own:
                    raise InputError(
                        f"the proof of {group.heads[0].claim.name} finds more than the error that is allowed to it: "
                        "prove this network in one piece, by `attnc compile` without --no-proof"
                    )
            if progress is not None:
                progress("proving", (number + 1) / self.most)
            return allowed

        self._walk(prove_group)
        return HeadShard.of(proved, self.header(n))

    def why_not_part(self, shard: HeadShard, k: int, n: int) -> str | None:
        return shard.why_not_groups(range(k - 1, self.most, n))

    def require_plausible(self, shard: HeadShard, name: str) -> None:
        """Nothing is done here: `proof` compares all shards with the heads, while it follows their errors."""

    def proof(self, shards: list[HeadShard]) -> Proof:
        records, owners, count = dict[int, Any](), dict[int, int](), 0
        for k, shard in enumerate(shards, 1):
            for number, record in shard.proofs():
                records[number], owners[number] = record, k
        rng = np.random.default_rng()

        def prove_group(group: HeadGroup) -> ProvedGroup:
            nonlocal count
            number, count = count, count + 1
            name = f"shard {owners[number]} of {len(shards)}"
            try:
                proof = records[number].proof(group.claim)
            except ValueError as error:
                raise FileError(f"{name} is wrong: {error}. Prove this shard again.") from None
            for covering, middles in ((proof.leaves, 0.0), *(() if proof.signed is None else (proof.signed,))):
                self._require_heads(group, proof.rounding, covering, middles, name, rng)
            allowed = ProvedGroup(group, group.allowed())
            found = ProvedGroup(group, proof, allowed)
            if not found.own <= allowed.own:
                raise FileError(f"{name} is wrong: a bound is above the error that is allowed. Prove this shard again.")
            return found

        with one_thread(), quiet():
            walk, read = self._walk(prove_group)
            found: Proof = walk.proof(read, str(self.network.program.dtype), self.request)
        if not math.isfinite(found.bound):
            raise InputError("the proved heads have no bound together: prove this network in one piece")
        return found

    def _require_heads(
        self, group: HeadGroup, rounding: float, proof: Any, middles: Any, name: str, rng: np.random.Generator
    ) -> None:
        """Compare a random sample of leaves with the heads at a point of each."""
        chosen = rng.integers(0, len(proof.cells), min(SAMPLED_LEAVES, len(proof.cells)))
        box, cells = group.claim.box, proof.cells
        centres, radii = cell_boxes(box, cells.level[chosen], cells.index[chosen])
        points = np.clip(centres + radii * rng.uniform(-1, 1, radii.shape), box.lo, box.hi)
        middle = np.broadcast_to(middles, len(cells))[chosen]
        bounds = cells.upper[chosen, 0] - np.abs(middle)
        bounds = (
            bounds + rounding / group.size + 4 * group.claim.floor if group.size > 0 else np.full(len(chosen), np.inf)
        )
        apart = np.abs(group.claim.differences(points) - middle)
        if (wrong := apart > bounds).any():
            n = int(np.argmax(wrong))
            raise FileError(
                f"{name} is wrong: for {group.heads[0].claim.name} it states the bound {bounds[n]:.6g} on a leaf, and "
                f"the error at t = {points[n, 0]:.6g} in it is {apart[n]:.6g}. Prove this shard again, on another "
                "machine."
            )


Task = ShardTask[Any]


def task_of(folder: str | os.PathLike[str], table: str | None = None) -> Task:
    """Read a saved network, with its rows from the file `table` if it has none beside it.

    Raise InputError if it cannot be proved in shards.
    """
    digests = tuple(
        hashlib.sha256(read_bytes(os.path.join(folder, name), limit)).hexdigest()
        for name, limit in ((WEIGHTS, MAX_TENSOR_BYTES), (CONFIG, MAX_JSON_BYTES))
    )
    network = load(Path(folder))
    if reason := why_not_in_shards(network):
        raise InputError(reason)
    hashes, request, claim = (digests[0], digests[1]), request_of(network), network.certificate
    if claim.at_points is not None:
        rows = _rows_of(network, claim.at_points, Path(folder), table)
        sha256 = claim.at_points.sha256 or hashlib.sha256(rows.rows.tobytes()).hexdigest()
        return RowsTask(network, rows, request, hashes, sha256)
    if table is not None:
        raise InputError(f"{os.fspath(folder)!r} is not the network of a table: leave --csv out")
    if isinstance(claim.evidence, Stages):
        derived = dataclasses.replace(request, derivation=network.known_derivation)
        return HeadsTask(network, target_of(network), derived, hashes)
    return LeavesTask(network, target_of(network), request, hashes)


def _rows_of(network: Network, points: Points, folder: Path, table: str | None) -> StoredRows:
    """Return the rows of a network for a table: those of its certificate, or of a file whose hash that states."""
    shape = network.program.output_shape
    if points.sha256 is None:
        rows = np.array(points.table)
        if table is not None and (
            os.path.getsize(table) != rows.nbytes or read_bytes(table, rows.nbytes) != rows.tobytes()
        ):
            raise FileError(OTHER_ROWS)
        return StoredRows(network.box, rows, shape, points.count)
    path = table or str(folder / TABLE)
    if not os.path.exists(path):
        raise InputError(
            f"the table of {str(folder)!r} is not stored: give it with --csv FILE --inputs … --output …, as to "
            "`attnc compile`"
        )
    try:
        return StoredRows.of_file(path, points.sha256, points.count, points.columns, network.box, shape)
    except FileError as error:
        if table is None:
            raise
        raise FileError(OTHER_ROWS) from error


def task_of_files(files: Mapping[str, bytes], folder: str, k: int, n: int) -> Task:
    """Return the task of a worker that was sent the files of a network, in an empty folder.

    If a table has a file of its own, there are only the rows of shard k of n. They are not compared with its hash.
    """
    for name, content in files.items():
        Path(folder, name).write_bytes(content)
    if TABLE not in files:
        return task_of(folder)
    network = load(Path(folder))
    points = network.certificate.at_points
    assert points is not None
    assert points.sha256 is not None
    rows = np.frombuffer(files[TABLE], "<f8").reshape(-1, points.columns)
    first = points.count * (k - 1) // n
    stored = StoredRows(network.box, rows, network.program.output_shape, points.count, first)
    hashes = (hashlib.sha256(files[name]).hexdigest() for name in (WEIGHTS, CONFIG))
    return RowsTask(network, stored, request_of(network), (next(hashes), next(hashes)), points.sha256)


def _weighed_terms(shards: Sequence[Shard], p: float, bound: float) -> tuple[Term, ...]:
    """Return the terms of an L_p norm N. The norm n of a region with the terms t adds n^p = n^{p−1}·Σ t to N^p."""
    found = dict[str, Term]()
    for shard in shards:
        norm = sum(term.value for term in shard.terms)
        for term in shard.terms:
            added = term.value * (norm / bound) ** (p - 1) if bound > 0 else 0.0
            before = found[term.name].value if term.name in found else 0.0
            found[term.name] = dataclasses.replace(term, value=before + added)
    total = math.fsum(term.value for term in found.values())
    scale = min(1.0, bound / total) * (1 - 2.0**-40) if total > 0 else 1.0
    return tuple(dataclasses.replace(term, value=scale * term.value) for term in found.values())


def why_not_in_shards(network: Network) -> str | None:
    """Return why a network is not proved in shards, or None if it is."""
    claim, points = network.certificate, network.certificate.at_points
    if points is not None:
        if points.sha256 is None and not points.table:
            return "the network does not have its table: compile it with --no-proof"
        return None
    if network.expression is None and network.definitions is None:
        return "shards prove networks for expressions and tables: code is proved in one piece"
    if isinstance(claim.evidence, Stages):
        return None
    target = target_of(network)
    if not network.box.is_bounded or (claim.norm != "inf" and not target.is_continuous):
        return "shards prove continuous functions on a bounded box: others are proved in one piece"
    is_large = network.num_anchors > MAX_PROVED_ANCHORS
    if is_large or not LEAVES.accepts(network.program, target, request_of(network)):
        return (
            "shards prove compositions, and networks of one attention layer in up to four variables: others are proved "
            "in one piece"
        )
    return None


def target_of(network: Network) -> Target:
    source = network.expression or network.definitions or ""
    return as_target(source, network.box.as_dict(), p=float(network.certificate.norm))


def request_of(network: Network) -> ProofRequest:
    claim = network.certificate
    return ProofRequest(
        p=float(claim.norm),
        cells=MAX_SHARD_CELLS,
        eps=network.eps or BESIDE_THEOREM * (claim.bound or 0.0),
        observed=claim.observed or 0.0,
        truncation=network.truncation,
    )
