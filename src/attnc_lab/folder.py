"""The folder of a run: its settings, a file for every finished cell, and a CSV for every finished experiment."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import attnc
from attnc_lab.experiment import PROFILES, Cell, Experiment, Row, Table

FORMAT = "attnc.lab/1"
SETTINGS = "settings.json"
MAX_FILE_BYTES = 2**26
"""The longest file that is read: 64 MiB. A longer one is not a table of the lab."""


@dataclass(frozen=True)
class Folder:
    """The folder of a run. Cells, tables and commands are added to it, and nothing in it is changed."""

    path: Path
    profile: str
    seed: int
    versions: Mapping[str, str]
    commands: tuple[str, ...] = ()

    @classmethod
    def open(cls, path: Path, profile: str, seed: int, versions: Mapping[str, str], command: str) -> Folder:
        """Begin a run, or open an existing one that was made with the same settings."""
        if (path / SETTINGS).exists():
            found = cls.read(path)
            asked = {"profile": profile, "seed": seed, **versions}
            there = {"profile": found.profile, "seed": found.seed, **found.versions}
            differ = [
                f"{key} {there.get(key)} (now: {value})" for key, value in asked.items() if there.get(key) != value
            ]
            if differ:
                raise attnc.InputError(
                    f"{path} holds another run: {', '.join(differ)}. Their numbers cannot be compared. "
                    "Choose another folder with --out, or repeat its settings to go on with it."
                )
            commands = tuple(dict.fromkeys((*found.commands, command)))
        elif path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise attnc.InputError(
                f"{path} exists and is no run of the lab (no {SETTINGS}). Choose another folder with --out."
            )
        else:
            commands = (command,)
        folder = cls(path, profile, seed, versions, commands)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise attnc.FileError(f"cannot write the run to {str(path)!r}: {error.strerror or error}") from None
        settings = {"format": FORMAT, "profile": profile, "seed": seed, "versions": versions, "commands": commands}
        write_whole(path / SETTINGS, json.dumps(settings, indent=2) + "\n")
        return folder

    @classmethod
    def read(cls, path: Path) -> Folder:
        if not (path / SETTINGS).is_file():
            raise attnc.InputError(
                f"{path} is no run of the lab: it has no {SETTINGS}. `attnc lab run all --out {path}` makes one."
            )
        try:
            found = json.loads(_text(path / SETTINGS))
            if found["format"] != FORMAT:
                raise ValueError(
                    f"it has the format {found['format']!r:.40}, and this version reads {FORMAT!r}. Use the version of "
                    "attnc that wrote the run, or run the experiments again in a new folder"
                )
            if found["profile"] not in PROFILES:
                raise ValueError(f"there is no profile {found['profile']!r:.40}")
            versions = {str(name): str(version) for name, version in found["versions"].items()}
            return cls(path, found["profile"], int(found["seed"]), versions, tuple(map(str, found["commands"])))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise attnc.FileError(f"{path / SETTINGS} does not fit: {type(error).__name__}: {error}") from None

    def missing(self, experiment: Experiment) -> list[Cell]:
        """Return the cells that are not finished."""
        return [cell for cell in experiment.cells(self.profile) if not self._cell(experiment, cell).exists()]

    def add(self, experiment: Experiment, cell: Cell, rows: Sequence[Row]) -> None:
        """Write the rows of a finished cell, each after the cell's parameters. The last cell completes the table."""
        path = self._cell(experiment, cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, to_csv([{**cell, **row} for row in rows]))
        if not self.missing(experiment):
            self.finish(experiment)

    def finish(self, experiment: Experiment) -> None:
        """Write all cells into one CSV, in the order of the cells, whatever the order in which they were run."""
        rows: list[Row] = []
        for cell in experiment.cells(self.profile):
            rows += from_csv(_text(self._cell(experiment, cell)))
        write_whole(self.table_path(experiment), to_csv(rows))

    def table(self, experiment: Experiment) -> Table | None:
        """Return the numbers of a finished experiment, or None if it is not finished."""
        path = self.table_path(experiment)
        if not path.is_file():
            return None
        try:
            return Table(from_csv(_text(path)))
        except (ValueError, csv.Error) as error:
            raise attnc.FileError(f"{path} is no table of the lab: {error}") from None

    def table_path(self, experiment: Experiment) -> Path:
        return self.path / f"{experiment.name}.csv"

    def _cell(self, experiment: Experiment, cell: Cell) -> Path:
        """Return the file of a cell. Its name is a hash of the parameters, so no two cells share one."""
        written = json.dumps(dict(cell), sort_keys=True)
        return self.path / "cells" / experiment.name / f"{hashlib.sha256(written.encode()).hexdigest()[:20]}.csv"


def to_csv(rows: Sequence[Row]) -> str:
    """Return rows as CSV, with columns in order of first appearance, and floats with all their digits."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    made = io.StringIO()
    writer = csv.DictWriter(made, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return made.getvalue()


def from_csv(text: str) -> list[Row]:
    lines = csv.reader(io.StringIO(text))
    names = next(lines, [])
    rows: list[Row] = []
    for line in lines:
        if len(line) != len(names):
            raise ValueError(f"line {lines.line_num} has {len(line)} entries, not {len(names)}")
        rows.append({name: _read(entry) for name, entry in zip(names, line, strict=True) if entry != ""})
    return rows


def _read(entry: str) -> float | int | str:
    for kind in (int, float):
        try:
            return kind(entry)
        except ValueError:
            continue
    return entry


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all, even if the process is killed while it writes."""
    temporary = path.parent / f".attnc-{secrets.token_hex(8)}"
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise attnc.FileError(f"cannot write {str(path)!r}: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _text(path: Path) -> str:
    if (size := path.stat().st_size) > MAX_FILE_BYTES:
        raise attnc.FileError(
            f"{path} has {size / 2**20:,.0f} MiB, and no file of the lab has more than {MAX_FILE_BYTES / 2**20:,.0f}"
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise attnc.FileError(f"cannot read {path}: {error}") from None
