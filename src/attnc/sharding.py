"""Proofs in shards: the box is divided into regions, and each is proved by itself, anywhere, in any order.

The shard of a region is a file. Its content depends on the saved network, on its number and on the number of shards
alone, so that it may be lost and made again. `merge_shards` makes one certificate of all shards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnc.constructions.built import Progress
from attnc.errors import BoundNotMet, FileError, InputError, ProgramError
from attnc.exports.directory import MAX_SHARD_BYTES, MAX_SHARDS, WEIGHTS, shard_name
from attnc.exports.safe_files import CONFIG, MAX_JSON_BYTES, MAX_TENSOR_BYTES, read_bytes, write_file_whole
from attnc.loading import load
from attnc.network import Network
from attnc.numerics.bound import Term
from attnc.numerics.intervals import Interval
from attnc.numerics.quiet import quiet
from attnc.numerics.threads import one_thread
from attnc.proofs.cells.dyadic import cell_boxes, regions
from attnc.proofs.cells.integral import norm_of_leaves
from attnc.proofs.certificate import Standing
from attnc.proofs.partition_prover import MAX_PROVED_ANCHORS
from attnc.proofs.proof import Leaves, Proof
from attnc.proofs.prover import ProofRequest
from attnc.proofs.provers import LEAVES
from attnc.proofs.shards import SHARD_FORMAT, Shard, ShardedLeaves
from attnc.proving import BESIDE_THEOREM, proved_by
from attnc.scheduling import LOCAL, finished
from attnc.targets.sources import as_target
from attnc.targets.target import Target

NUM_SHARDS = 64
"""The number of shards, unless another is chosen. It does not depend on the machine, so that certificates do not."""
MAX_SHARD_CELLS = 2**22
"""Most cells of a shard."""
SAMPLED_LEAVES = 256
"""Number of leaves of each shard that a merge compares with the network at a random point."""
STEM = "proof"
PART = re.compile(STEM + r"\.([1-9][0-9]{0,5})-of-([1-9][0-9]{0,5})\.shard")
CERTIFICATE_FILE = "certificate.json"


@dataclass(frozen=True, eq=False)
class ShardTask:
    """A saved network, and the request for its proof."""

    network: Network
    target: Target
    request: ProofRequest
    weights_sha256: str
    config_sha256: str

    @classmethod
    def of(cls, folder: str | os.PathLike[str]) -> ShardTask:
        """Read a saved network. Raise InputError if it cannot be proved in shards."""
        network = load(Path(folder))
        if reason := why_not_in_shards(network):
            raise InputError(reason)
        target, request = _target_of(network), _request_of(network)
        digests = (
            hashlib.sha256(read_bytes(os.path.join(folder, name), limit)).hexdigest()
            for name, limit in ((WEIGHTS, MAX_TENSOR_BYTES), (CONFIG, MAX_JSON_BYTES))
        )
        return cls(network, target, request, *digests)

    def digest(self, n: int) -> str:
        """Return the hash of everything that the content of a shard depends on, but its number."""
        asked = [self.network.certificate.norm, self.request.eps, self.request.observed, self.request.truncation, n]
        stated = [SHARD_FORMAT, self.weights_sha256, self.config_sha256, *asked]
        return hashlib.sha256(json.dumps(stated).encode()).hexdigest()

    def prove(self, k: int, n: int, progress: Progress | None = None) -> Shard:
        """Prove shard k of n."""
        region, d = regions(self.network.box.d, n)[k - 1], self.network.box.d
        request = dataclasses.replace(self.request, region=region, progress=progress)
        with one_thread(), quiet():
            try:
                proof = LEAVES.prove(self.network.program, self.target, request)
            except ProgramError as error:
                raise InputError(f"this network cannot be proved in shards: {error}") from None
        if not math.isfinite(proof.bound):
            raise InputError(f"no bound was found on shard {k} of {n}: numbers overflow, or the cells ran out")
        return Shard.of(proof, d, region, self.weights_sha256, self.digest(n))

    def why_not(self, shard: Shard, k: int, n: int) -> str | None:
        """Return why a shard is not number k of n of this task, or None if it is."""
        if shard.header["weights_sha256"] != self.weights_sha256:
            return "it belongs to another network"
        return shard.why_not_of(self.digest(n), regions(self.network.box.d, n)[k - 1])

    def stored(self, place: str | os.PathLike[str], k: int, n: int) -> Shard:
        """Read shard k of n. Raise FileError if the file is missing, or is another one."""
        path = os.path.join(place, shard_name(STEM, k, n))
        shard = Shard.read(read_bytes(path, MAX_SHARD_BYTES), path)
        reason = self.why_not(shard, k, n)
        if reason is not None:
            raise FileError(f"{path}: {reason}")
        return shard

    def _require_plausible(self, shard: Shard, name: str) -> None:
        """Compare a random sample of leaves with the error at a point of each, where f is enclosed."""
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
        if (wrong := apart > rows["bound"]).any():
            n = int(np.argmax(wrong))
            where = ", ".join(f"{x} = {t:.6g}" for x, t in zip(box.names, points[n], strict=True))
            raise FileError(
                f"{name} is wrong: it states the bound {rows['bound'][n]:.6g} on a leaf, and the error at {where} in "
                f"it is {apart[n]:.6g}. Prove this shard again, on another machine."
            )

    def merged(self, shards: list[Shard]) -> Network:
        """Return the network with the certificate that all shards make together.

        Raise FileError if a bound of a leaf is below the error at a random point of it: then its maker lies.
        """
        for k, shard in enumerate(shards, 1):
            self._require_plausible(shard, f"shard {k} of {len(shards)}")
        worst, leaves = max(shards, key=lambda shard: shard.bound), ShardedLeaves(tuple(shards))
        bound, terms = worst.bound, worst.terms
        if self.request.p < math.inf:
            levels = np.concatenate([shard.rows["level"] for shard in shards]).astype(np.int64)
            bound = norm_of_leaves(self.network.box, self.request.p, levels, leaves.bounds)
            terms = _weighed_terms(shards, self.request.p, bound)
        complete = bound <= max(self.request.eps, (1 + self.request.tolerance) * self.request.observed)
        proof = Proof(bound, terms, Leaves(leaves, leaves.bounds), complete)
        found = proved_by(self.network, proof, self.target)
        return found._with_certificate(dataclasses.replace(found.certificate, standing=Standing.STATED))


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
    claim = network.certificate
    if network.expression is None and network.definitions is None:
        return "shards prove networks for expressions: tables and code are proved in one piece"
    target = _target_of(network)
    if not network.box.is_bounded or (claim.norm != "inf" and not target.is_continuous):
        return "shards prove continuous functions on a bounded box: others are proved in one piece"
    is_large = network.num_anchors > MAX_PROVED_ANCHORS
    if is_large or not LEAVES.accepts(network.program, target, _request_of(network)):
        return "shards prove networks of one attention layer in up to four variables: others are proved in one piece"
    return None


def _target_of(network: Network) -> Target:
    source = network.expression or network.definitions or ""
    return as_target(source, network.box.as_dict(), p=float(network.certificate.norm))


def _request_of(network: Network) -> ProofRequest:
    claim = network.certificate
    return ProofRequest(
        p=float(claim.norm),
        cells=MAX_SHARD_CELLS,
        eps=network.eps or BESIDE_THEOREM * (claim.bound or 0.0),
        observed=claim.observed or 0.0,
        truncation=network.truncation,
    )


def prove_shard(source: str | dict[str, bytes], k: int, n: int) -> bytes:
    """Return the content of shard k of n of a saved network: of a folder, or of the contents of its files."""
    if isinstance(source, str):
        return ShardTask.of(source).prove(k, n).content
    with tempfile.TemporaryDirectory() as folder:
        for name, content in source.items():
            Path(folder, name).write_bytes(content)
        return ShardTask.of(folder).prove(k, n).content


def write_shard(folder: str | os.PathLike[str], place: str | os.PathLike[str], k: int, n: int) -> str:
    """Prove shard k of n, write it into the folder `place`, and return its path. A shard that is there is kept."""
    task, path = ShardTask.of(folder), os.path.join(place, shard_name(STEM, k, n))
    make_folder(place)
    if not _is_done(task, place, k, n):
        write_file_whole(path, task.prove(k, n).content)
    return path


def merge_shards(folder: str | os.PathLike[str], place: str | os.PathLike[str]) -> Network:
    """Return the network with the certificate of all shards in the folder `place`.

    Raise FileError if a shard is missing, changed, or of another network, request or division.
    """
    try:
        counts = {int(found[2]) for name in os.listdir(place) if (found := PART.fullmatch(name))}
    except OSError as error:
        raise FileError(f"{os.fspath(place)!r} cannot be read: {error.strerror or error}") from None
    if len(counts) != 1:
        several = f"shards of {len(counts)} divisions" if counts else "no shards"
        raise FileError(f"{os.fspath(place)!r} has {several}: prove those of one division there, k/n for all k")
    (n,) = counts
    missing = [k for k in range(1, n + 1) if not os.path.exists(os.path.join(place, shard_name(STEM, k, n)))]
    if missing:
        named = ", ".join(f"{k}/{n}" for k in missing[:10]) + (" …" if len(missing) > 10 else "")
        raise FileError(f"{os.fspath(place)!r} lacks {len(missing):,} of {n:,} shards: {named}. Prove these first.")
    task = ShardTask.of(folder)
    return task.merged([task.stored(place, k, n) for k in range(1, n + 1)])


def prove_all(
    folder: str | os.PathLike[str],
    place: str | os.PathLike[str],
    n: int,
    cluster: str = LOCAL,
    processes: int | None = None,
    progress: Progress | None = None,
) -> Network:
    """Prove all shards that are not in the folder `place` yet, and return the network with their certificate."""
    if not 1 <= n <= MAX_SHARDS:
        raise InputError(f"a proof has 1 to {MAX_SHARDS:,} shards, found {n:,}")
    task = ShardTask.of(folder)
    make_folder(place)
    done = {k for k in range(1, n + 1) if _is_done(task, place, k, n)}
    source = os.fspath(folder) if cluster == LOCAL else _files(folder)
    tasks = {k: (source, k, n) for k in range(1, n + 1) if k not in done}
    if progress is not None:
        progress("proving", len(done) / n)
    for k, content in finished(prove_shard, tasks, cluster, processes):
        reason = task.why_not(Shard.read(content, f"shard {k} of {n}"), k, n)
        if reason is not None:
            raise FileError(f"a worker returned a wrong shard {k} of {n}: {reason}")
        write_file_whole(os.path.join(place, shard_name(STEM, k, n)), content)
        done.add(k)
        if progress is not None:
            progress("proving", len(done) / n)
    return task.merged([task.stored(place, k, n) for k in range(1, n + 1)])


def proved_on(cluster: str, network: Network, place: Path, n: int, progress: Progress | None) -> Network:
    """Return a new network with a certificate of n shards, which are kept in the folder `place` until all are proved.

    Call it again after an interruption: the same network has the same shards. The shards are then deleted.
    """
    make_folder(place)
    folder = place / "net"
    network.save(folder)
    found = prove_all(folder, place, n, cluster, progress=progress)
    claim = found.certificate
    if claim.bound is None or claim.bound > (network.eps or math.inf):
        raise BoundNotMet(
            f"the shards prove the bound {claim.bound:.3g}, above eps={network.eps:g}. The best network is in "
            f"{folder}: choose a larger eps, or another construction.",
            eps=network.eps or 0.0,
            bound=claim.bound,
            network=found,
        )
    for path in (*shard_files(place), *folder.iterdir()):
        path.unlink()
    folder.rmdir()
    with contextlib.suppress(OSError):  # it holds files of somebody else
        place.rmdir()
    return dataclasses.replace(found, command=network.command)


def make_folder(place: str | os.PathLike[str]) -> None:
    try:
        os.makedirs(place, exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot make the folder {os.fspath(place)!r}: {error.strerror or error}") from None


def shard_files(place: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the shards in a folder."""
    return (path for path in Path(place).iterdir() if PART.fullmatch(path.name))


def _is_done(task: ShardTask, place: str | os.PathLike[str], k: int, n: int) -> bool:
    try:
        task.stored(place, k, n)
    except FileError:
        return False
    return True


def _files(folder: str | os.PathLike[str]) -> dict[str, bytes]:
    limits = {CONFIG: MAX_JSON_BYTES, WEIGHTS: MAX_TENSOR_BYTES, CERTIFICATE_FILE: MAX_JSON_BYTES}
    return {name: read_bytes(os.path.join(folder, name), limit) for name, limit in limits.items()}
