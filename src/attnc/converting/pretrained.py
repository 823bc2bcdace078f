"""Models of Hugging Face directories, from safetensors files and nowhere else, and inputs to run them on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attnc.errors import FileError, InputError
from attnc.exports.safe_files import open_regular, read_json

try:
    import transformers
    from safetensors import SafetensorError
    from safetensors.torch import load as unpack
except ImportError as error:
    raise InputError(
        f"Hugging Face models need transformers, which cannot be imported ({error}). "
        "Install it with: pip install -c constraints.txt 'attnc[models]'"
    ) from error

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
VOCABULARIES = (
    *("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model"),
)
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
MAX_BYTES = 2**33
TEXTS = (
    "The committee approved the budget after a long discussion.",
    "A cat sleeps on the warm stones beside the river.",
    "Water boils at a lower temperature on a high mountain.",
    "She plays the violin in the city orchestra every Friday.",
    "The train to the coast was delayed by heavy snow.",
    "Prime numbers are infinite in number, as Euclid proved.",
    "Would you like your coffee with or without milk?",
    "Interest rates fell sharply in the second quarter of the year.",
    "def add(a, b): return a + b",
    "1234567890 !? — ( ) [ ] { }",
    "Les enfants jouent dans le jardin derrière la maison.",
    "In 1969 two people walked on the surface of the Moon for the first time.",
)


def load_model(folder: str) -> Any:
    """The model of a directory, by the class that its configuration names, in the dtype it was stored in."""
    if not os.path.isdir(folder):
        raise FileError(f"{folder!r} is not a folder. A Hugging Face model is a folder with a {CONFIG} in it.")
    config = read_json(os.path.join(folder, CONFIG))
    if "auto_map" in config:
        raise FileError(f"{folder!r}: the model brings code of its own (auto_map), and none is run here")
    _check_files(folder)
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    kind: Any = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        kind = transformers.AutoModel
    try:
        with quiet():
            model = kind.from_pretrained(
                folder, dtype="auto", use_safetensors=True, local_files_only=True, trust_remote_code=False
            )
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, SafetensorError) as error:
        first = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise FileError(f"transformers cannot load {folder!r}: {first[0][:300]}") from error
    return model.eval()


def _check_files(folder: str) -> None:
    names = _weight_files(folder)
    if not names:
        pickles = sorted(name for name in os.listdir(folder) if name.endswith(PICKLES))
        also = f"; {pickles[0]!r} is a pickle, which can run code, and is not read" if pickles else ""
        raise FileError(
            f"{folder!r} has no {WEIGHTS}{also}. Save the model as safetensors first: model.save_pretrained(folder)."
        )
    total = sum(os.path.getsize(os.path.join(folder, name)) for name in names)
    if total > MAX_BYTES:
        raise FileError(f"{folder!r} holds {total:,} bytes of weights, more than the {MAX_BYTES:,} that are read here")


def _weight_files(folder: str) -> list[str]:
    if os.path.isfile(os.path.join(folder, WEIGHTS)):
        return [WEIGHTS]
    if not os.path.isfile(os.path.join(folder, INDEX)):
        return []
    listed = read_json(os.path.join(folder, INDEX)).get("weight_map")
    names = sorted(set(listed.values())) if isinstance(listed, dict) else []
    for name in names:
        if not isinstance(name, str) or os.path.basename(name) != name or not name.endswith(".safetensors"):
            raise FileError(f"{folder!r}: {INDEX} names {name!r}, which is no safetensors file beside it")
        if not os.path.isfile(os.path.join(folder, name)):
            raise FileError(f"{folder!r}: {name!r}, which {INDEX} names, is missing")
    return names


def stored_tensors(folder: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name in _weight_files(folder):
        found |= unpacked(folder, name)
    return found


def unpacked(folder: str, name: str) -> dict[str, Tensor]:
    with open_regular(os.path.join(folder, name)) as file:
        raw = file.read()
    try:
        return unpack(raw)
    except SafetensorError as error:
        raise FileError(f"{os.path.join(folder, name)!r} is not a safetensors file: {error}") from error


def example_inputs(model: Any, folder: str, texts: Sequence[str] | None) -> tuple[dict[str, Tensor] | None, str]:
    """The arguments of one call, and what they are; None where none can be made."""
    main = getattr(model, "main_input_name", "input_ids")
    config = model.config
    if main == "pixel_values":
        size = getattr(config, "image_size", None) or 224
        height, width = size if isinstance(size, list | tuple) else (size, size)
        noise = torch.Generator().manual_seed(0)
        pixels = torch.randn(2, getattr(config, "num_channels", 3), height, width, generator=noise)
        return {"pixel_values": pixels.to(model.dtype)}, "two images of noise"
    if main != "input_ids":
        return None, f"the model takes {main}, of which none were given"
    given = TEXTS if texts is None else tuple(texts)
    if not given:
        raise InputError("texts: give one or more")
    tokenizer = _tokenizer(folder)
    if tokenizer is None:
        if texts is not None:
            raise FileError(f"{folder!r} has no tokenizer that can be loaded, and texts were given")
        noise = torch.Generator().manual_seed(0)
        ids = torch.randint(0, config.vocab_size, (8, 16), generator=noise)
        inputs, told = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, "8 sequences of random tokens"
    else:
        longest = min(256, getattr(config, "max_position_embeddings", None) or 256)
        inputs = dict(tokenizer(list(given), padding=True, truncation=True, max_length=longest, return_tensors="pt"))
        told = f"{len(given)} {'built-in' if texts is None else 'given'} texts"
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = inputs["input_ids"]
    return inputs, told


def _tokenizer(folder: str) -> Any:
    if not any(os.path.isfile(os.path.join(folder, name)) for name in VOCABULARIES):
        return None  # without files of its own transformers makes one that knows no word
    try:
        with quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except Exception:  # of whatever kind: there are dozens of tokenizers, and a model does without
        return None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer if tokenizer.pad_token is not None and len(tokenizer) > 1 else None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No bars, and no warnings about what a model of another class has no use for."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
