"""A saved network in memory: its JSON files and its weights, which a forger changes and writes with new hashes."""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load

from attnc.exports.safe_files import pack_tensors
from attnc.exports.tensors import decode, encode
from attnc.ir.program import Program

MAIN = "certificate.json"


@dataclass
class Files:
    """The files of a saved network with one certificate. `is_hashed` is False where a forged hash stays as it is."""

    config: dict[str, Any]
    certificate: dict[str, Any]
    weights: bytes
    name: str = MAIN
    is_hashed: bool = True

    @classmethod
    def read(cls, folder: Path, name: str = MAIN) -> Files:
        config, certificate = (
            json.loads((folder / each).read_text(encoding="utf-8")) for each in ("config.json", name)
        )
        return cls(config, certificate, (folder / "model.safetensors").read_bytes(), name)

    def copy(self) -> Files:
        return Files(copy.deepcopy(self.config), copy.deepcopy(self.certificate), self.weights, self.name)

    def write(self, folder: Path) -> None:
        """Write the files, and the hash of the weights into the certificate."""
        if self.is_hashed:
            self.certificate["weights_sha256"] = hashlib.sha256(self.weights).hexdigest()
        (folder / "model.safetensors").write_bytes(self.weights)
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        (folder / self.name).write_text(json.dumps(self.certificate), encoding="utf-8")
        if self.name != MAIN:  # the checker reads one certificate at a time
            (folder / MAIN).unlink(missing_ok=True)

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        return {name: tensor.copy() for name, tensor in load(self.weights).items()}

    @tensors.setter
    def tensors(self, tensors: dict[str, np.ndarray]) -> None:
        self.weights = pack_tensors(tensors)

    @property
    def program(self) -> Program:
        """The stored program, in the dtype of the certificate if that is the second one. FileError if it is none."""
        stored = decode(self.config["program"], self.tensors)
        return stored if self.name == MAIN else stored.astype(self.certificate["dtype"])

    @program.setter
    def program(self, program: Program) -> None:
        self.config["program"], tensors = encode(program)
        self.tensors = tensors

    @property
    def header(self) -> dict[str, Any]:
        return json.loads(self.weights[8 : 8 + int.from_bytes(self.weights[:8], "little")])

    @header.setter
    def header(self, header: dict[str, Any]) -> None:
        start, packed = 8 + int.from_bytes(self.weights[:8], "little"), json.dumps(header).encode()
        self.weights = len(packed).to_bytes(8, "little") + packed + self.weights[start:]
