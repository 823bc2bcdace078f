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
from attnc.converting.activations import KnownActivation
from attnc.converting.arithmetic import Written
from attnc.converting.intercepting import HOLDER
from attnc.converting.model_folder import (
    CARD,
    CONVERTED,
    COPIED,
    FORMAT,
    KEYS,
    MAX_WEIGHT_BYTES,
    REPORT,
    VOCABULARIES,
    WEIGHTS,
    ModelFolder,
)
from attnc.converting.modules import KEY_TENSORS, AttentionActivation
from attnc.converting.report import EndToEnd, Report, model_card
from attnc.converting.walking import convert_module
from attnc.errors import FileError, InputError, MissingExtra
from attnc.exports.directory import json_bytes
from attnc.exports.safe_files import (
    CONFIG,
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
MAX_COPIED_BYTES = 2**28
"""Maximum size of a copied file: 256 MiB. The largest vocabularies take about 30 MiB."""


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
    report_step("loading the model", 0.0)
    folder = ModelFolder.read(source)
    model = load_model(folder)
    inputs, described = example_inputs(model, folder.path, texts)
    report_step("replacing and proving the activations", 0.25)
    converted, report = convert_module(model, eps, strict, inputs)
    report_step("measuring", 0.5)
    if inputs is not None:
        report.end_to_end = _end_to_end(model, converted, inputs, described)
    else:
        report.notes.append(f"nothing was measured: {described}")
    report_step("saving", 0.75)
    keys = {name: tensor.detach().clone() for name, tensor in _stored_keys(converted)}
    weights, key_bytes = pack(unpacked(*folder.weight_paths), metadata={"format": "pt"}), pack(keys)
    hashes = {WEIGHTS: hashlib.sha256(weights).hexdigest(), KEYS: hashlib.sha256(key_bytes).hexdigest()}
    config = folder.config | {"attnc": {"format": FORMAT, "eps": report.eps}}
    name = os.path.basename(os.path.abspath(folder.path))
    facts = {"format": FORMAT, "source": name, "sha256": hashes, **report.as_json()}
    files = {
        CONFIG: json_bytes(config, CONFIG),
        WEIGHTS: weights,
        KEYS: key_bytes,
        REPORT: json_bytes(facts, REPORT),
        CARD: model_card(report, name, type(model).__name__).encode(),
    }
    write_whole(out, files | _copied(folder.path), CONVERTED)
    return report


def load_converted(path: PathLike) -> nn.Module:
    """Load the model that `attnc convert` wrote. Its keys are proved again and must equal those in the file."""
    folder = os.fspath(path)
    config = read_json(os.path.join(folder, CONFIG))
    found = config.get("attnc")
    if not isinstance(found, dict):
        raise FileError(f"cannot load {folder!r}: its {CONFIG} is not that of a converted model ({FORMAT!r})")
    require_format(found.get("format"), FORMAT, f"cannot load {folder!r}: its {CONFIG}")
    facts = read_json(os.path.join(folder, REPORT))
    hashes = facts.get("sha256")
    for name in (WEIGHTS, KEYS):
        digest = sha256_of(os.path.join(folder, name), MAX_WEIGHT_BYTES)
        if not isinstance(hashes, dict) or hashes.get(name) != digest:
            raise FileError(f"{folder!r}: {REPORT} belongs to another {name}; convert the model again")
    converted, _ = convert_module(load_model(ModelFolder.read(folder)), found.get("eps"), False, None)  # type: ignore[arg-type]
    try:
        _made_by_runs(converted, facts)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileError(f"{folder!r}: {REPORT} does not describe this model: {error!r}") from error
    stored = unpacked(os.path.join(folder, KEYS))
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
            if entry.get("written") is not None:
                activation: KnownActivation = Written.from_json(entry["written"])
            else:
                parameters = tuple((str(name), float(value)) for name, value in entry["parameters"])
                activation = KnownActivation(str(entry["activation"]).partition("(")[0], parameters)
            getattr(owner, HOLDER).gate(activation, (str(entry["dtype"]),))


def _end_to_end(model: nn.Module, converted: nn.Module, inputs: dict[str, Tensor], described: str) -> EndToEnd:
    """Measure the drift of the last hidden states and of their means over the tokens, which embed sentences."""

    def run(model: nn.Module) -> Any:
        return _last_hidden(model(**inputs, output_hidden_states=True))

    mask = inputs.get("attention_mask")
    with measuring.in_evaluation(model), measuring.in_evaluation(converted), torch.no_grad():
        before, after = run(model), run(converted)
        silent = list[str]()  # the first comparison has told why there is no noise floor
        copied = measuring.in_float64(model, silent)
        exact = None if copied is None else measuring.run_in_float64(copied, run, silent)
    if before is None or after is None or before.ndim != 3:
        return EndToEnd(described)
    if mask is None or mask.shape != before.shape[:2]:
        mask = torch.ones(before.shape[:2], dtype=torch.int64)
    seen = mask.bool()[..., None]
    a, b = (torch.where(seen, hidden.double(), 0.0) for hidden in (before, after))
    means = [hidden.sum(1) / seen.sum(1) for hidden in (a, b)]
    cosine = (means[0] * means[1]).sum(-1) / (means[0].norm(dim=-1) * means[1].norm(dim=-1))
    floor = None if exact is None else float((a - torch.where(seen, exact, 0.0)).abs().max())
    size = float(a.abs().max())
    return EndToEnd(described, float((a - b).abs().max()), max(0.0, float((1 - cosine).max())), size, floor)


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
def load_model(folder: ModelFolder) -> Any:
    """Load the model of a folder with the class that its configuration names, in its stored dtype."""
    names = folder.config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    kind: Any = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        kind = transformers.AutoModel
    try:
        model = kind.from_pretrained(
            folder.path, dtype="auto", use_safetensors=True, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, SafetensorError) as error:
        first = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise FileError(f"transformers cannot load {folder.path!r}: {first[0][:300]}") from error
    return model.eval()


def unpacked(*paths: str) -> dict[str, Tensor]:
    """Return the tensors of all these files."""
    found: dict[str, Tensor] = {}
    for path in paths:
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
