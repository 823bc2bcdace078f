"""The folder of a Hugging Face model, read and checked without torch, whose import takes seconds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from attnc.errors import FileError
from attnc.exports.directory import FORMAT_FAMILY
from attnc.exports.safe_files import CONFIG, FolderKind, PathLike, read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
VOCABULARIES = (
    *("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model"),
)
COPIED = (
    *VOCABULARIES,
    *("merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("generation_config.json", "preprocessor_config.json", "LICENSE"),
)
"""The files that are copied if they exist. None of them is code."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
MAX_WEIGHT_BYTES = 2**33
"""Maximum size of the weights that are read: 8 GiB. Writing a model takes about four copies of it in memory, and a
workstation has 32 GiB."""
MAX_MODEL_LAYERS, BYTES_PER_LAYER = 10_000, 32
"""Most layers of a model, ten times those of the deepest, and the fewest bytes of a file for a layer: safetensors needs
more to name one tensor. transformers would build any number of layers before it reads the weights."""
FAMILY = "attnc.converted/"
FORMAT = f"{FAMILY}2"
KEYS, REPORT, CARD = "attention_keys.safetensors", "report.json", "README.md"
"""The file of the keys. It is separate, so that the file of the model's weights does not change."""
CONVERTED = FolderKind(
    "a converted model", FAMILY, ("attnc", "format"), {CONFIG, WEIGHTS, KEYS, REPORT, CARD, *COPIED}.__contains__
)


@dataclass(frozen=True)
class ModelFolder:
    """A Hugging Face model on disk: its configuration, and the safetensors files of its weights.

    Attributes
    ----------
    path : str
        The folder.
    config : dict
        The contents of its config.json.
    weights : tuple of str
        The names of the files that hold the weights.
    """

    path: str
    config: dict[str, Any]
    weights: tuple[str, ...]

    @classmethod
    def read(cls, path: PathLike) -> ModelFolder:
        """Read the configuration and the headers of the weights. Raise FileError if the model cannot be loaded."""
        folder = os.fspath(path)
        if not os.path.isdir(folder):
            raise FileError(f"{folder!r} is not a folder. A Hugging Face model is a folder with a {CONFIG} in it.")
        config = read_json(os.path.join(folder, CONFIG))
        if str(config.get("format")).startswith(FORMAT_FAMILY):
            raise FileError(f"{folder!r} is a network of attnc. It has no activations to convert.")
        if "auto_map" in config:
            raise FileError(f"{folder!r}: the model needs code of its own (auto_map), and attnc runs none")
        found = cls(folder, config, _weight_files(folder))
        total = sum(map(os.path.getsize, found.weight_paths))
        if total > MAX_WEIGHT_BYTES:
            raise FileError(f"{folder!r} holds {total:,} bytes of weights; attnc reads at most {MAX_WEIGHT_BYTES:,}")
        for key, value in config.items():
            if "layer" in key and type(value) is int and value > min(MAX_MODEL_LAYERS, total // BYTES_PER_LAYER):
                raise FileError(
                    f"cannot load {folder!r}: {CONFIG} states {key} = {value:,} for weights of {total:,} bytes"
                )
        for file in found.weight_paths:
            _require_safetensors(file)
        return found

    @property
    def weight_paths(self) -> tuple[str, ...]:
        return tuple(os.path.join(self.path, name) for name in self.weights)


def _weight_files(folder: str) -> tuple[str, ...]:
    """Return the names of the files that hold the weights. Raise FileError if there are none, or one is missing."""
    has = {name: os.path.isfile(os.path.join(folder, name)) for name in (WEIGHTS, INDEX)}
    names = [WEIGHTS] if has[WEIGHTS] else []
    if has[INDEX] and not names:
        listed = read_json(os.path.join(folder, INDEX)).get("weight_map")
        names = sorted(set(map(str, listed.values()))) if isinstance(listed, dict) else []
    for name in names:
        if os.path.basename(name) != name or not name.endswith(".safetensors"):
            raise FileError(f"{folder!r}: {INDEX} names {name!r}, which is no safetensors file beside it")
        if not os.path.isfile(os.path.join(folder, name)):
            raise FileError(f"{folder!r}: {name!r}, which {INDEX} names, is missing")
    if not names:
        pickles = sorted(name for name in os.listdir(folder) if name.endswith(PICKLES))
        also = f"; {pickles[0]!r} is a pickle, which can run code, and is not read" if pickles else ""
        raise FileError(
            f"{folder!r} has no {WEIGHTS}{also}. Save the model as safetensors first: model.save_pretrained(folder)."
        )
    return tuple(names)


def _require_safetensors(path: str) -> None:
    """Raise FileError unless the header of the file fits its size."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise FileError(f"{path!r} is not a safetensors file: {error}") from error
