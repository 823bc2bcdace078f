"""The counts of an attack: added up job by job, printed, and kept in a JSON file from which an attack goes on."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from attack.forging import FAMILIES

MOST_MEMORY = 2**30
"""The most memory, in bytes, by which a job may grow: the limit that every command has to keep."""
MOST_FAILURES = 1000
"""The most failures that are kept word by word. All are counted."""


@dataclass
class Record:
    """The largest value so far, and the job in which it was seen."""

    value: float = 0.0
    job: str = ""

    def see(self, value: float, job: str) -> None:
        if value > self.value:
            self.value, self.job = value, job

    def __str__(self) -> str:
        return f"{self.value:.4g}" + (f" ({self.job})" if self.job else "")


@dataclass
class Tally:
    """The counts of all jobs of one seed."""

    seed: int
    next: dict[str, int] = field(default_factory=lambda: {"honest": 0, "forged": 0})
    seconds: dict[str, float] = field(default_factory=lambda: {"honest": 0.0, "forged": 0.0})
    ends: Counter[str] = field(default_factory=Counter)  # of honest cases
    refusals: Counter[str] = field(default_factory=Counter)  # of compile, by kind of case and error
    not_reprovable: Counter[str] = field(default_factory=Counter)  # marked claims, by kind of case and method
    comparisons: Counter[str] = field(default_factory=Counter)  # by engine
    in_arb: int = 0
    closest: Record = field(default_factory=Record)  # the largest error/bound
    compile_seconds: Record = field(default_factory=Record)
    verify_seconds: Record = field(default_factory=Record)
    forged_seconds: Record = field(default_factory=Record)  # of the check of a forgery
    memory: Record = field(default_factory=Record)  # the growth of a job, in bytes
    forged: Counter[str] = field(default_factory=Counter)  # by family, truth and verdict
    failed: Counter[str] = field(default_factory=Counter)  # failures by kind
    failures: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, seed: int) -> Tally:
        """Go on from a file of the same seed, or begin."""
        if not path.exists():
            return cls(seed)
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["seed"] != seed:
            raise SystemExit(f"{path} is of the seed {stored['seed']}. Choose that seed, or another file with --out.")
        fresh = cls(seed)
        kinds = {name: type(value) for name, value in vars(fresh).items()}
        return cls(**{name: Record(**x) if kinds[name] is Record else kinds[name](x) for name, x in stored.items()})

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        beside = path.with_name(path.name + ".part")
        stored = {name: asdict(value) if isinstance(value, Record) else value for name, value in vars(self).items()}
        beside.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(beside, path)

    def add(self, kind: str, number: int, found: Mapping[str, Any], seconds: float) -> None:
        """Add the result of a job."""
        job = f"{kind}:{number}"
        self.seconds[kind] += seconds
        self.memory.see(found["memory"], job)
        failures = [tuple(each) for each in found["failures"]]
        if found["memory"] > MOST_MEMORY:
            failures.append(("memory", f"{found['memory'] / 2**20:,.0f} MiB more than before"))
        if kind == "honest" and "end" in found:
            self._add_honest(found, job)
        elif "counts" in found:
            self.forged.update({f"{found['family']} {name}": count for name, count in found["counts"].items()})
            self.forged_seconds.see(found["slowest"], job)
        for what, message in failures:
            self.failed[what] += 1
            if len(self.failures) < MOST_FAILURES:
                command = f"PYTHONPATH=tests python -m attack --seed {self.seed} --job {job}"
                about = {"case": str(found.get("case", "")), "message": message[:4000]}
                self.failures.append({"kind": what, "job": job, "command": command, **about})

    def _add_honest(self, found: Mapping[str, Any], job: str) -> None:
        self.ends[found["end"]] += 1
        if found["refusal"]:
            self.refusals[f"{found['kind']}: {found['refusal']}"] += 1
        if found["end"] == "not re-provable":
            self.not_reprovable[f"{found['kind']}: {found['method']}"] += 1
        self.comparisons.update(found["comparisons"])
        self.in_arb += found["in_arb"]
        self.closest.see(found["closest"], job)
        self.compile_seconds.see(found["compile_seconds"], job)
        self.verify_seconds.see(found["verify_seconds"], job)

    def false_ones(self, family: str = "") -> int:
        """The number of false certificates of a family, or of all: refused, or accepted, which is a failure."""
        return sum(
            count
            for name, count in self.forged.items()
            if name.startswith(family) and name.split()[1] in ("false", "broken")
        )

    def __str__(self) -> str:
        engines = ", ".join(f"{name} {count:,}" for name, count in self.comparisons.items())
        ends = ", ".join(f"{count:,} {name}" for name, count in self.ends.most_common())
        refusals = ", ".join(f"{name} {count}" for name, count in self.refusals.most_common(6))
        not_reprovable = ", ".join(f"{name} {count}" for name, count in self.not_reprovable.most_common())
        families = ", ".join(f"{name} {self.false_ones(name + ' '):,}" for name in FAMILIES)
        by_verdict = Counter[str]()
        for name, count in self.forged.items():
            by_verdict[" ".join(name.split()[1:])] += count
        verdicts = ", ".join(f"{count:,} {name}" for name, count in by_verdict.most_common())
        failed = ", ".join(f"{count:,} {name}" for name, count in self.failed.most_common()) or "none"
        return "\n".join(
            [
                f"honest: {self.ends.total():,} cases in {self.seconds['honest']:,.0f} s: {ends}",
                f"  refused by compile: {refusals or 'none'}",
                f"  not re-provable: {not_reprovable or 'none'}",
                f"  {self.comparisons.total():,} comparisons ({engines}), {self.in_arb:,} decided in Arb",
                f"  largest error/bound {self.closest.value:.9f} ({self.closest.job})",
                f"  slowest compile {self.compile_seconds} s, slowest verify {self.verify_seconds} s",
                f"forged: {self.forged.total():,} in {self.seconds['forged']:,.0f} s: {verdicts}",
                f"  {self.false_ones():,} false certificates: {families}",
                f"  slowest check {self.forged_seconds} s",
                f"largest growth of memory {self.memory.value / 2**20:,.0f} MiB ({self.memory.job})",
                f"failures: {failed}",
            ]
        )
