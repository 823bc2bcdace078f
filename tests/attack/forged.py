"""False certificates: a network is compiled, its files are forged many times, and the checker has to refuse them."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import attnc
from attack import grammar
from attack.files import MAIN, Files
from attack.forging import FAMILIES, tightened
from attack.grammar import Case, Rng, random_case
from attack.limits import TooLong, cpu_limit
from attack.oracle import Judgement, Truth, judge
from attnc_checker import check

VERIFY_SECONDS = 60.0
MOST_CHECK_SECONDS = 0.5
"""Networks that take the checker longer than this are not forged, so that most forgeries are cheap."""
TIGHT = 0.4
"""The share of forgeries that are not false by themselves and get a bound below a confirmed error."""
SEARCHED = 6000
"""Points at which a forgery is searched again if the checker accepts it and nothing shows whether it is true."""
ATTEMPTS = 12
"""The number of networks that are compiled until one suits a family."""
FEW = Path("/dev/shm")
"""A folder in memory, if there is one: files are written and read thousands of times."""


def composed(rng: Rng) -> Case:
    """Two heads in parallel, with masks, which are proved head by head."""
    names = grammar.NAMES[: int(rng.integers(2, 4))]
    first, second = (grammar.composition(rng, names, 1, grammar.SMOOTH, ("({})*({})",)) for _ in range(2))
    text = f"{first} + {grammar.shown(rng.normal())}*{second} + {grammar.affine(rng, names)}*{names[0]}"
    options = {"construction": "compose"}
    return grammar.of_text(rng, "composed", text, [grammar.random_ends(rng) for _ in names], 1e-4, 0.1, **options)


def gates(rng: Rng) -> Case:
    """Sums of gates, which share one attention layer by a mask."""
    parts = [
        str(rng.choice(grammar.ON_THE_LINE[:8])).format(grammar.affine(rng, "x"))
        for _ in range(int(rng.integers(2, 4)))
    ]
    options = {"construction": "gates"}
    return grammar.of_text(rng, "gates", " + ".join(parts), [grammar.random_ends(rng)], 1e-4, 0.1, **options)


EVERY = (
    grammar.smooth,
    grammar.kinked,
    composed,
    grammar.relu_networks,
    grammar.tables,
    grammar.infinite_boxes,
    grammar.jumps,
    grammar.named_constructions,
    grammar.truncated_linear,
    gates,
)
SUITING: dict[str, Sequence[Callable[[Rng], Case]]] = {
    "masks": (composed, gates, composed),
    "stages": (composed, grammar.relu_networks, grammar.truncated_linear, grammar.many_variables),
    "rows": (grammar.tables,),
}
"""Kinds of cases whose networks have the part that a family is about; all kinds for other families."""
HAS: dict[str, Callable[[Files], bool]] = {
    "masks": lambda files: any("mask" in name for name in files.tensors),
    "stages": lambda files: files.certificate["method"] == "staged proof",
    "rows": lambda files: "table" in files.certificate,
}


class Forgery:
    """Forgeries of one network, of one family, and the verdicts on them."""

    def __init__(self, seed: int, number: int) -> None:
        self.rng = np.random.default_rng((seed, number, 1))
        self.family = list(FAMILIES)[number % len(FAMILIES)]
        self.counts: Counter[str] = Counter()
        self.failures: list[tuple[str, str]] = []
        self.slowest = 0.0
        self.case = ""

    def run(self, count: int) -> dict[str, Any]:
        """Forge `count` times, and return the counts by truth and verdict, and the failures."""
        with tempfile.TemporaryDirectory(dir=FEW if FEW.is_dir() else None) as folder:
            base = self._base(Path(folder))
            if base is not None:
                honest = judge(base, base, self.rng, np.zeros((0, 0)))
                if honest.is_false or honest.truth == Truth.UNREADABLE:
                    self.failures.append(("honest called false", f"{self.case}: {honest.why}"))
                else:
                    hints = np.zeros((0, 0)) if honest.points is None else honest.points
                    for _ in range(count):
                        self._forge(base, hints, Path(folder))
        return {
            "family": self.family,
            "case": self.case,
            "counts": dict(self.counts),
            "slowest": self.slowest,
            "failures": self.failures,
        }

    def _base(self, folder: Path) -> Files | None:
        """Return the files of a network that suits the family and is quick to check."""
        kinds = SUITING.get(self.family, EVERY)
        for _ in range(ATTEMPTS):
            case = random_case(int(self.rng.integers(2**31)), int(self.rng.integers(2**31)), kinds)
            try:
                with cpu_limit(20.0):
                    network = case.compile()
                network.save(folder / "net")
                with cpu_limit(10.0):
                    verdict = check(folder / "net", processes=1)
            except (attnc.AttncError, TooLong):
                continue
            names = [MAIN, *(f"certificate.{dtype}.json" for dtype in network.also)]
            name = str(self.rng.choice(names)) if verdict.proved else MAIN
            found = Files.read(folder / "net", name)
            for path in (folder / "net").glob("certificate*.json"):
                path.unlink()
            if verdict.proved and verdict.seconds <= MOST_CHECK_SECONDS and HAS.get(self.family, bool)(found):
                self.case = str(case)
                return found
        return None

    def _forge(self, base: Files, hints: np.ndarray, folder: Path) -> None:
        forgers, files = FAMILIES[self.family], base.copy()
        try:
            said = forgers[int(self.rng.integers(len(forgers)))](self.rng, files)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError):
            said = None  # a change that cannot be written
        if said is None:
            return
        files.write(folder / "net")
        found = judge(files, base, self.rng, hints)
        is_open = (
            found.truth in (Truth.UNDECIDED, Truth.TRUE) and found.worst > 0 and files.certificate["norm"] == "inf"
        )
        if is_open and (self.family == "bound" or self.rng.random() < TIGHT):
            said = f"{said}; {tightened(self.rng, files, found.worst)}"
            files.write(folder / "net")
            found = Judgement(Truth.FALSE, f"the error is at least {found.worst!r}", found.worst)
        self._verify(files, base, found, said, folder)
        if files.name != base.name:
            (folder / "net" / files.name).unlink()

    def _verify(self, files: Files, base: Files, found: Judgement, said: str, folder: Path) -> None:
        try:
            with cpu_limit(VERIFY_SECONDS):
                verdict = check(folder / "net", processes=1, name=files.name)
        except TooLong:
            self._fail("verify too long", said, found, folder)
            return
        self.slowest = max(self.slowest, verdict.seconds)
        if "broke off" in verdict.reason:
            self._fail("verify traceback", f"{said}: {verdict.reason}", found, folder)
        if verdict.proved and found.truth == Truth.UNDECIDED:
            again = judge(files, base, self.rng, np.zeros((0, 0)) if found.points is None else found.points, SEARCHED)
            found = again if again.is_false else found
        if verdict.proved and found.is_false:
            self._fail("false certificate accepted", said, found, folder)
        self.counts[f"{found.truth} {'accepted' if verdict.proved else 'refused'}"] += 1

    def _fail(self, kind: str, said: str, found: Judgement, folder: Path) -> None:
        self.failures.append((kind, f"{self.family}: {said} [{found.truth}: {found.why}] of {self.case}"))
