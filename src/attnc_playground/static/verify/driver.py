"""The checker in a browser: takes the files that a reader dropped, runs `attnc_checker` on them, and tells every step.

It runs in Pyodide, in a worker. Messages are JSON objects with a `type`. The claim, the leaves and their places are
told as the checker itself has read them. Nothing here decides whether anything is proved.
"""

import dataclasses
import hashlib
import io
import json
import os
import platform
import shutil
import struct
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import flint

import attnc_checker
from attnc_checker.claims import AtPoints, ByLeaves, Claim, read_claim
from attnc_checker.files import MAX_WEIGHTS, BadFile, Refused, parse_safetensors, read_json
from attnc_checker.norms import Integral
from attnc_checker.proving import Job, Proof, Subject
from attnc_checker.tables import Table

FOLDER = Path("/networks")
CONFIG, WEIGHTS = "config.json", "model.safetensors"
MAX_FILES, MAX_BYTES = 1000, 2 * MAX_WEIGHTS
"""Largest number of files of a dropped network, and of their bytes when they are unpacked. The checker reads up to
MAX_WEIGHTS bytes of weights."""
INTERVAL = 0.05
"""Seconds between two messages about leaves: the picture moves 20 times a second."""
MAX_DRAWN = 100_000
"""Largest number of leaves whose places are told. With more, the page counts them only."""

Tell = Callable[[str], None]
"""Takes a message as JSON."""


class Unusable(Exception):
    """The dropped files hold no saved network."""


def versions(source: bytes) -> str:
    """Return the versions of all parts, as JSON."""
    found = {
        "python": platform.python_version(),
        "flint": flint.__version__,
        "checker": hashlib.sha256(source).hexdigest(),
        "lines": sum(text.count(b"\n") for text in _unzipped(source).values()),
    }
    return json.dumps(found)


def receive(name: str, files: Mapping[str, bytes]) -> str:
    """Write the files of a saved network to a folder of their own, and return it.

    The network may be in a folder of the dropped files, or in a zip file. Files beside its config.json come along.
    """
    for path, content in files.items():
        if len(files) == 1 and path.lower().endswith(".zip"):
            files = _unzipped(content)
    roots = sorted((os.path.dirname(path) for path in files if os.path.basename(path) == CONFIG), key=len)
    if not roots:
        raise Unusable(
            f"there is no {CONFIG} among these {len(files):,} files. A saved network is a folder with "
            f"{CONFIG}, {WEIGHTS} and certificate.json."
        )
    shutil.rmtree(FOLDER, ignore_errors=True)
    folder = FOLDER / ("".join(x if x.isalnum() or x in "-_" else "_" for x in name)[:40] or "network")
    folder.mkdir(parents=True)
    for path, content in files.items():
        place = os.path.relpath(path, roots[0] or ".").split(os.sep)
        if place[0] == os.pardir:
            continue
        if len(place) == 1:
            (folder / place[0]).write_bytes(content)
        else:  # only its name matters: the checker refuses a stock checkpoint beside folders that it does not expect
            (folder / place[0]).mkdir(exist_ok=True)
    return str(folder)


def _unzipped(raw: bytes) -> dict[str, bytes]:
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            if len(entries) > MAX_FILES or sum(entry.file_size for entry in entries) > MAX_BYTES:
                raise Unusable(f"the zip file has more than {MAX_FILES:,} files, or more than {MAX_BYTES:,} bytes")
            return {os.path.normpath(entry.filename).lstrip("/"): archive.read(entry) for entry in entries}
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise Unusable(f"the zip file cannot be read: {error}") from None


def tamper(folder: str, how: str) -> str:
    """Change a saved network, to try the checker. Return a sentence about the change."""
    weights, certificate = Path(folder, WEIGHTS), Path(folder, "certificate.json")
    if how == "bound":
        claim = json.loads(certificate.read_bytes())
        claim["bound"] /= 2
        claim["observed"] = min(claim["observed"] or 0.0, claim["bound"])
        certificate.write_text(json.dumps(claim), encoding="utf-8")
        return f"The certificate now claims half the bound: {claim['bound']:.6g}."
    raw = bytearray(weights.read_bytes())
    place, letter, value = _largest(bytes(raw))
    changed = value * 1.5
    raw[place : place + struct.calcsize(letter)] = struct.pack(letter, changed)
    weights.write_bytes(raw)
    text = f"One number of {WEIGHTS} is now {changed:.6g} instead of {value:.6g}."
    if how == "weight":
        return text
    claim = json.loads(certificate.read_bytes())
    claim["weights_sha256"] = hashlib.sha256(raw).hexdigest()
    certificate.write_text(json.dumps(claim), encoding="utf-8")
    return f"{text} The certificate has the SHA-256 of the changed file, so it looks as if it belonged to it."


def _largest(raw: bytes) -> tuple[int, str, float]:
    """Return the largest number of the last tensor of floats in a file of tensors: its place, its format, its value."""
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:begin])
    floats = [(header[name]["data_offsets"][0], tensor) for name, tensor in parse_safetensors(raw).items()]
    start, tensor = max((start, tensor) for start, tensor in floats if tensor.dtype in ("F32", "F64") and tensor.values)
    letter = "<d" if tensor.dtype == "F64" else "<f"
    index = max(range(len(tensor.values)), key=lambda i: abs(tensor.values[i]))
    return begin + start + index * struct.calcsize(letter), letter, float(tensor.values[index])


def check(folder: str, seconds: float, tell: Tell) -> None:
    """Check every certificate of the saved network, and tell every step."""
    end = time.monotonic() + seconds
    for name in attnc_checker.certificates(folder):
        _Told(folder, name, tell).run(max(0.0, end - time.monotonic()))
    tell(json.dumps({"type": "end"}))


class _Told:
    """One check. It tells the claim, the places of all leaves, every leaf that is proved, and the verdict."""

    def __init__(self, folder: str, name: str, tell: Tell) -> None:
        self.folder, self.name, self.tell = folder, name, tell
        self.claim: Claim | None = None
        self.subjects: Sequence[Subject] = ()
        self.jobs: Sequence[Job] = ()
        self.found: Mapping[Job, float] = {}
        self.told = 0  # jobs
        self.last = 0.0  # the time of the last message

    def run(self, seconds: float) -> None:
        self._tell_claim()
        verdict = attnc_checker.check(self.folder, 1, self._progress, self.name, seconds)
        self._tell_leaves()
        is_leaf = not verdict.proved and verdict.decided and len(self.found) < len(self.jobs)
        failed = self._failed(*self.jobs[len(self.found)]) if is_leaf else None
        self._say("verdict", **dataclasses.asdict(verdict), failed=failed, done=len(self.found))

    def _say(self, kind: str, **content: object) -> None:
        self.tell(json.dumps({"type": kind, "certificate": self.name, **content}))

    def _tell_claim(self) -> None:
        try:
            self.claim = claim = read_claim(read_json(Path(self.folder, self.name)))
        except (BadFile, Refused):  # the verdict has the reason
            self._say("claim")
            return
        evidence = claim.evidence
        kind = "rows" if isinstance(evidence, AtPoints) else "leaves" if isinstance(evidence, ByLeaves) else "stages"
        box = [[name, *map(_number, self._whole(i))] for i, name in enumerate(claim.variables)]
        told = {"expression": claim.expression, "box": box, "bound": claim.bound, "norm": claim.norm}
        self._say("claim", **told, dtype=claim.dtype, evidence=kind, stages=self._stages())

    def _whole(self, i: int) -> tuple[float, float]:
        """Return the ends of the box along one axis, which may be infinite."""
        assert self.claim is not None
        (lo, hi), sides = self.claim.ends[i], self.claim.sides
        return (-float("inf") if -1 in sides else lo), (float("inf") if 1 in sides else hi)

    def _stages(self) -> list[dict[str, object]]:
        evidence = self.claim.evidence if self.claim else None
        if evidence is None or isinstance(evidence, (AtPoints, ByLeaves)):
            return []
        names = ("name", "channel", "function", "argument", "carrier", "interval", "bound", "like")
        return [{name: getattr(stage, name) for name in names} for stage in evidence.stages]

    def _progress(self, proof: Proof, jobs: Sequence[Job], found: Mapping[Job, float]) -> None:
        self.subjects, self.jobs, self.found = proof.subjects, jobs, found
        if not found:
            subjects = [_layout(subject) for subject in proof.subjects]
            count = sum(len(self._leaves(*job)) for job in jobs)
            self._say("layout", subjects=subjects, count=count, scope=proof.scope)
        if time.monotonic() - self.last >= INTERVAL:
            self._tell_leaves()

    def _tell_leaves(self) -> None:
        jobs = self.jobs[self.told : len(self.found)]
        new = [(job[0], leaf, self.found[job]) for job in jobs for leaf in self._leaves(*job)]
        if new:
            self._say("leaves", proved=new)
        self.told, self.last = len(self.found), time.monotonic()

    def _leaves(self, subject: int, n: int) -> range:
        """Return the leaves that a job proves: one, or a block of rows of a table."""
        table = self.subjects[subject]
        if not isinstance(table, Table):
            return range(n, n + 1)
        return range(n * table.block, min(len(table.rows), (n + 1) * table.block))

    def _failed(self, subject: int, n: int) -> tuple[int, int]:
        """Return the subject and the leaf that a failed job could not prove."""
        leaves, table = self._leaves(subject, n), self.subjects[subject]
        if isinstance(table, Table):
            single = dataclasses.replace(table, block=1)
            for row in leaves:
                try:
                    single.found(row)
                except Refused:
                    return subject, row
        return subject, leaves[0]


def _number(x: float) -> float | str:
    """Return a number that JSON can state."""
    return x if abs(x) != float("inf") else "∞" if x > 0 else "−∞"


def _layout(subject: Subject) -> dict[str, Any]:
    """Return where the leaves of a subject lie. Each has the two ends of all of its sides; a tail has a side."""
    ends = [*map(list, subject.claim.ends)]
    bounds = subject.bounds
    if isinstance(subject, Table):
        rows = [subject.rows[n] for n in range(min(len(subject.rows), MAX_DRAWN))]
        leaves = [{"kind": "row", "sides": [x for x in row[: len(ends)] for _ in range(2)]} for row in rows]
        bounds = [subject.claim.bound] * len(subject.rows)  # a job is a block of rows
    else:
        leaves = [_drawn(subject, n) for n in range(min(len(subject.leaves), MAX_DRAWN))]
    return {
        "title": subject.claim.title,
        "variables": [*subject.claim.variables],
        "ends": ends,
        "leaves": leaves,
        "count": len(bounds),
        "bounds": [*bounds[:MAX_DRAWN]],
        "measures": not isinstance(subject, Integral),  # whether the number of a leaf is a bound on its error
    }


def _drawn(subject: Subject, n: int) -> dict[str, Any]:
    leaf = subject.leaves[n]
    if leaf.cell is None:
        return {"kind": leaf.kind, "side": leaf.order}
    sides = [float(x) for side in subject.sides(leaf.cell) for x in side]
    return {"kind": leaf.kind, "order": leaf.order, "level": leaf.cell[0], "sides": sides}
