"""Conversion of a Hugging Face model directory into another one. Weights are read from safetensors files only."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnc.constructions.built import Progress
from attnc.converting import measuring
from attnc.converting.activations import Activation
from attnc.converting.intercepting import HOLDER
from attnc.converting.modules import KEY_TENSORS, AttentionActivation
from attnc.converting.report import EndToEnd, Report, model_card
from attnc.converting.walking import convert_module
from attnc.errors import FileError, InputError, MissingExtra
from attnc.exports.directory import json_bytes
from attnc.exports.safe_files import (
    CONFIG,
    FolderKind,
    PathLike,
    read_bytes,
    read_json,
    require_format,
    sha256_of,
    write_whole,
)

try:
    import transformers
    from safetensors import SafetensorError
    from safetensors.torch import load as unpack
    from safetensors.torch import save as pack
except ImportError as error:
    raise MissingExtra("Hugging Face models need", "transformers", "models", error) from error

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
VOCABULARIES = (
    *("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model"),
)
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
MAX_WEIGHT_BYTES = 2**33
"""Maximum size of the weights that are read: 8 GiB. Writing a model takes about four copies of it in memory, and a
workstation has 32 GiB."""
SENTENCES = (
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
"""The texts for the measurement if none are given: prose, code, signs, and another language."""
FAMILY = "attnc.converted/"
FORMAT = f"{FAMILY}1"
KEYS, REPORT, CARD = "attention_keys.safetensors", "report.json", "README.md"
"""The file of the keys. It is separate, so that the file of the model's weights does not change."""
COPIED = (
    *VOCABULARIES,
    *("merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("generation_config.json", "preprocessor_config.json", "LICENSE"),
)
"""The files that are copied if they exist. None of them is code."""
MAX_MODEL_LAYERS, BYTES_PER_LAYER = 10_000, 32
"""Most layers of a model, ten times those of the deepest, and the fewest bytes of a file for a layer: safetensors needs
more to name one tensor. transformers would build any number of layers before it reads the weights."""
MAX_COPIED_BYTES = 2**28
"""Maximum size of a copied file: 256 MiB. The largest vocabularies take about 30 MiB."""
CONVERTED = FolderKind(
    "a converted model", FAMILY, ("attnc", "format"), {CONFIG, WEIGHTS, KEYS, REPORT, CARD, *COPIED}.__contains__
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars, and its warnings about weights of another class."""
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


def convert_directory(
    source: PathLike,
    out: PathLike,
    eps: float = 1e-6,
    *,
    texts: Sequence[str] | None = None,
    strict: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Read the model in `source`, convert it, measure it on the texts, and write all of `out`, or nothing."""
    report_step = progress or (lambda step, fraction: None)
    folder = os.fspath(source)
    report_step("loading the model", 0.0)
    model = load_model(folder)
    inputs, described = example_inputs(model, folder, texts)
    report_step("replacing and proving the activations", 0.25)
    converted, report = convert_module(model, eps, strict, inputs)
    report_step("measuring", 0.5)
    if inputs is not None:
        report.end_to_end = _end_to_end(model, converted, inputs, described)
    else:
        report.notes.append(f"nothing was measured: {described}")
    report_step("saving", 0.75)
    keys = {name: tensor.detach().clone() for name, tensor in _stored_keys(converted)}
    weights, key_bytes = pack(unpacked(folder, *_weight_files(folder)), metadata={"format": "pt"}), pack(keys)
    hashes = {WEIGHTS: hashlib.sha256(weights).hexdigest(), KEYS: hashlib.sha256(key_bytes).hexdigest()}
    config = read_json(os.path.join(folder, CONFIG)) | {"attnc": {"format": FORMAT, "eps": report.eps}}
    name = os.path.basename(os.path.abspath(folder))
    facts = {"format": FORMAT, "source": name, "sha256": hashes, **report.as_json()}
    files = {
        CONFIG: json_bytes(config, CONFIG),
        WEIGHTS: weights,
        KEYS: key_bytes,
        REPORT: json_bytes(facts, REPORT),
        CARD: model_card(report, name, type(model).__name__).encode(),
    }
    write_whole(out, files | _copied(folder), CONVERTED)
    return report


def load_converted(path: PathLike) -> nn.Module:
    """Load the model that `attnc convert` wrote. Its keys are proved again and must equal those in the file."""
    folder = os.fspath(path)
    config = read_json(os.path.join(folder, CONFIG))
    found = config.get("attnc")
    if not isinstance(found, dict):
        raise FileError(f"cannot load {folder!r}: its {CONFIG} does not say that it is a converted model ({FORMAT!r})")
    require_format(found.get("format"), FORMAT, f"cannot load {folder!r}: its {CONFIG}")
    facts = read_json(os.path.join(folder, REPORT))
    hashes = facts.get("sha256")
    for name in (WEIGHTS, KEYS):
        digest = sha256_of(os.path.join(folder, name), MAX_WEIGHT_BYTES)
        if not isinstance(hashes, dict) or hashes.get(name) != digest:
            raise FileError(f"{folder!r}: {REPORT} belongs to another {name}; convert the model again")
    converted, _ = convert_module(load_model(folder), found.get("eps"), False, None)  # type: ignore[arg-type]
    try:
        _made_by_runs(converted, facts)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileError(f"{folder!r}: {REPORT} does not describe this model: {error!r}") from error
    stored = unpacked(folder, KEYS)
    for name, proved in _stored_keys(converted):
        tensor = stored.pop(name, None)
        if tensor is None or not torch.equal(tensor, proved):
            path_of = name.rpartition(".")[0]
            raise FileError(f"{folder!r}: {KEYS} does not hold the proven keys of {path_of}; convert the model again")
    if stored:
        raise FileError(f"{folder!r}: no activation has the keys {min(stored)!r}; convert the model again")
    return converted.eval()


def _stored_keys(converted: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of the keys of all activations."""
    for path, gate in converted.named_modules():
        for name in KEY_TENSORS if isinstance(gate, AttentionActivation) else ():
            yield f"{path}.{name}", getattr(gate, name)


def _made_by_runs(converted: nn.Module, facts: dict[str, Any]) -> None:
    """Rebuild the activations that a run found and the code does not show."""
    for entry in facts.get("replaced", ()):
        if entry["found"] == "function":
            owner = converted.get_submodule(str(entry["name"]).rpartition(".")[0])
            parameters = tuple((str(name), float(value)) for name, value in entry["parameters"])
            activation = Activation(str(entry["activation"]).partition("(")[0], parameters)
            getattr(owner, HOLDER).gate(activation, (str(entry["dtype"]),))


def _end_to_end(model: nn.Module, converted: nn.Module, inputs: dict[str, Tensor], described: str) -> EndToEnd:
    """Measure the drift of the last hidden states and of their means over the tokens, which embed sentences."""
    mask = inputs.get("attention_mask")
    with measuring.in_evaluation(model), measuring.in_evaluation(converted), torch.no_grad():
        before, after = (_last_hidden(each(**inputs, output_hidden_states=True)) for each in (model, converted))
    if before is None or after is None or before.ndim != 3:
        return EndToEnd(described)
    if mask is None or mask.shape != before.shape[:2]:
        mask = torch.ones(before.shape[:2], dtype=torch.int64)
    seen = mask.bool()[..., None]
    a, b = (torch.where(seen, hidden.double(), 0.0) for hidden in (before, after))
    means = [hidden.sum(1) / seen.sum(1) for hidden in (a, b)]
    cosine = (means[0] * means[1]).sum(-1) / (means[0].norm(dim=-1) * means[1].norm(dim=-1))
    return EndToEnd(described, float((a - b).abs().max()), max(0.0, float((1 - cosine).max())), float(a.abs().max()))


def _last_hidden(output: Any) -> Tensor | None:
    for name in ("last_hidden_state", "hidden_states", "decoder_hidden_states"):
        found = getattr(output, name, None)
        if found is not None:
            return found if isinstance(found, Tensor) else found[-1]
    return None


def _copied(folder: str) -> dict[str, bytes]:
    paths = {name: os.path.join(folder, name) for name in COPIED}
    kept = {n: path for n, path in paths.items() if os.path.isfile(path) and os.path.getsize(path) <= MAX_COPIED_BYTES}
    return {name: read_bytes(path, MAX_COPIED_BYTES) for name, path in kept.items()}


@quiet()
def load_model(folder: str) -> Any:
    """Load the model of a directory with the class that its configuration names, in its stored dtype."""
    if not os.path.isdir(folder):
        raise FileError(f"{folder!r} is not a folder. A Hugging Face model is a folder with a {CONFIG} in it.")
    config = read_json(os.path.join(folder, CONFIG))
    if "auto_map" in config:
        raise FileError(f"{folder!r}: the model needs code of its own (auto_map), and attnc runs none")
    total = sum(os.path.getsize(os.path.join(folder, file)) for file in _weight_files(folder))
    for key, value in config.items():
        if "layer" in key and type(value) is int and value > min(MAX_MODEL_LAYERS, total // BYTES_PER_LAYER):
            raise FileError(f"cannot load {folder!r}: {CONFIG} states {key} = {value:,} for weights of {total:,} bytes")
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    kind: Any = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        kind = transformers.AutoModel
    try:
        model = kind.from_pretrained(
            folder, dtype="auto", use_safetensors=True, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, SafetensorError) as error:
        first = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise FileError(f"transformers cannot load {folder!r}: {first[0][:300]}") from error
    return model.eval()


def _weight_files(folder: str) -> list[str]:
    """Return the names of the files that hold the weights. Raise FileError if none of them can be read."""
    has = {name: os.path.isfile(os.path.join(folder, name)) for name in (WEIGHTS, INDEX)}
    names = [WEIGHTS] if has[WEIGHTS] else []
    if has[INDEX] and not names:
        listed = read_json(os.path.join(folder, INDEX)).get("weight_map")
        names = sorted(set(listed.values())) if isinstance(listed, dict) else []
    for name in names:
        if not isinstance(name, str) or os.path.basename(name) != name or not name.endswith(".safetensors"):
            raise FileError(f"{folder!r}: {INDEX} names {name!r}, which is no safetensors file beside it")
        if not os.path.isfile(os.path.join(folder, name)):
            raise FileError(f"{folder!r}: {name!r}, which {INDEX} names, is missing")
    if not names:
        pickles = sorted(name for name in os.listdir(folder) if name.endswith(PICKLES))
        also = f"; {pickles[0]!r} is a pickle, which can run code, and is not read" if pickles else ""
        raise FileError(
            f"{folder!r} has no {WEIGHTS}{also}. Save the model as safetensors first: model.save_pretrained(folder)."
        )
    total = sum(os.path.getsize(os.path.join(folder, name)) for name in names)
    if total > MAX_WEIGHT_BYTES:
        raise FileError(f"{folder!r} holds {total:,} bytes of weights; attnc reads at most {MAX_WEIGHT_BYTES:,}")
    return names


def unpacked(folder: str, *names: str) -> dict[str, Tensor]:
    """Return the tensors of all these files."""
    found: dict[str, Tensor] = {}
    for path in (os.path.join(folder, name) for name in names):
        try:
            found |= unpack(read_bytes(path, MAX_WEIGHT_BYTES))
        except SafetensorError as error:
            raise FileError(f"{path!r} is not a safetensors file: {error}") from error
    return found


def example_inputs(model: Any, folder: str, texts: Sequence[str] | None) -> tuple[dict[str, Tensor] | None, str]:
    """Return the arguments of one call and their description.

    The arguments are None if the model takes other inputs.
    """
    main = getattr(model, "main_input_name", "input_ids")
    config = model.config
    if main == "pixel_values":
        size = getattr(config, "image_size", None) or 224
        height, width = size if isinstance(size, list | tuple) else (size, size)
        noise = torch.Generator().manual_seed(0)
        pixels = torch.randn(2, getattr(config, "num_channels", 3), height, width, generator=noise)
        return {"pixel_values": pixels.to(model.dtype)}, "two images of noise"
    if main != "input_ids":
        return None, f"the model takes {main}, and none were given"
    given = SENTENCES if texts is None else tuple(texts)
    if not given:
        raise InputError("give at least one text, found none")
    tokenizer = _tokenizer(folder)
    if tokenizer is None:
        if texts is not None:
            raise FileError(f"{folder!r} has no tokenizer that can be loaded, and texts were given")
        noise = torch.Generator().manual_seed(0)
        ids = torch.randint(0, config.vocab_size, (8, 16), generator=noise)
        inputs, described = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, "8 sequences of random tokens"
    else:
        longest = min(256, getattr(config, "max_position_embeddings", None) or 256)
        inputs = dict(tokenizer(list(given), padding=True, truncation=True, max_length=longest, return_tensors="pt"))
        described = f"{len(given)} {'built-in' if texts is None else 'given'} texts"
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = inputs["input_ids"]
    return inputs, described


@quiet()
def _tokenizer(folder: str) -> Any:
    if not any(os.path.isfile(os.path.join(folder, name)) for name in VOCABULARIES):
        return None  # transformers would make a tokenizer with an empty vocabulary
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception:  # tokenizers fail in many ways, and a model can be measured without one
        return None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer if tokenizer.pad_token is not None and len(tokenizer) > 1 else None
