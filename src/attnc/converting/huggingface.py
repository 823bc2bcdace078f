"""A Hugging Face model directory, converted into another one; weights come from safetensors files and nowhere else."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import save as pack
from torch import Tensor, nn

from attnc.converting import measuring
from attnc.converting.activations import Activation
from attnc.converting.card import model_card
from attnc.converting.intercepting import HOLDER
from attnc.converting.modules import NAMES, AttentionActivation
from attnc.converting.pretrained import (
    CONFIG,
    VOCABULARIES,
    WEIGHTS,
    example_inputs,
    load_model,
    stored_tensors,
    unpacked,
)
from attnc.converting.report import EndToEnd, Report
from attnc.converting.walking import convert_module
from attnc.errors import FileError
from attnc.exports.safe_files import Path, open_regular, read_json, write_whole

FAMILY = "attnc.converted/"
FORMAT = f"{FAMILY}1"
KEYS, REPORT, CARD = "attention_keys.safetensors", "report.json", "README.md"
"""The model's own weights stay in a file of their own, as they were."""
COPIED = (
    *VOCABULARIES,
    *("merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("generation_config.json", "preprocessor_config.json", "LICENSE"),
)
"""What goes along with the weights, if it is there: no code, and nothing that runs."""


def convert_directory(
    source: Path, out: Path, eps: float = 1e-6, *, texts: Sequence[str] | None = None, strict: bool = False
) -> Report:
    """Reads the model in `source`, converts it, measures it on the texts, and writes the whole of `out`, or nothing."""
    folder = os.fspath(source)
    model = load_model(folder)
    inputs, told = example_inputs(model, folder, texts)
    converted, report = convert_module(model, eps, strict, inputs)
    if inputs is not None:
        report.end_to_end = _end_to_end(model, converted, inputs, told)
    else:
        report.notes.append(f"nothing was measured: {told}")
    keys = {
        f"{path}.{name}": getattr(gate, name).detach().clone()
        for path, gate in converted.named_modules()
        if isinstance(gate, AttentionActivation)
        for name in NAMES
    }
    weights, key_bytes = pack(stored_tensors(folder), metadata={"format": "pt"}), pack(keys)
    hashes = {WEIGHTS: hashlib.sha256(weights).hexdigest(), KEYS: hashlib.sha256(key_bytes).hexdigest()}
    config = read_json(os.path.join(folder, CONFIG)) | {"attnc": {"format": FORMAT, "eps": report.eps}}
    name = os.path.basename(os.path.abspath(folder))
    facts = {"format": FORMAT, "source": name, "sha256": hashes, **report.as_json()}
    files = {
        CONFIG: _json(config),
        WEIGHTS: weights,
        KEYS: key_bytes,
        REPORT: _json(facts),
        CARD: model_card(report, name, type(model).__name__).encode(),
    }
    write_whole(out, files | _copied(folder), _why_not_replace)
    return report


def load_converted(path: Path) -> nn.Module:
    """The model that `attnc convert` wrote, ready to run. Its keys are proved again, and must be those in the file."""
    folder = os.fspath(path)
    config = read_json(os.path.join(folder, CONFIG))
    found = config.get("attnc")
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise FileError(f"cannot load {folder!r}: its {CONFIG} does not say that it is a converted model ({FORMAT!r})")
    facts = read_json(os.path.join(folder, REPORT))
    hashes = facts.get("sha256")
    for name in (WEIGHTS, KEYS):
        with open_regular(os.path.join(folder, name)) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        if not isinstance(hashes, dict) or hashes.get(name) != digest:
            raise FileError(f"{folder!r}: {REPORT} belongs to another {name}; convert the model again")
    converted, _ = convert_module(load_model(folder), found.get("eps"), False, None)  # type: ignore[arg-type]
    try:
        _made_by_runs(converted, facts)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileError(f"{folder!r}: {REPORT} does not describe this model: {error!r}") from error
    stored = unpacked(folder, KEYS)
    for path_of, gate in converted.named_modules():
        for name in NAMES if isinstance(gate, AttentionActivation) else ():
            tensor = stored.pop(f"{path_of}.{name}", None)
            if tensor is None or not torch.equal(tensor, getattr(gate, name)):
                raise FileError(f"{folder!r}: {KEYS} does not hold the proven keys of {path_of}; convert it again")
    if stored:
        raise FileError(f"{folder!r}: the keys {min(stored)!r} belong to no activation of the model; convert it again")
    return converted.eval()


def _made_by_runs(converted: nn.Module, facts: dict[str, Any]) -> None:
    """Functions that only a run had shown, made again."""
    for entry in facts.get("replaced", ()):
        if entry["found"] == "function":
            owner = converted.get_submodule(str(entry["name"]).rpartition(".")[0])
            parameters = tuple((str(name), float(value)) for name, value in entry["parameters"])
            activation = Activation(str(entry["activation"]).partition("(")[0], parameters)
            getattr(owner, HOLDER).gate(activation, (str(entry["dtype"]),))


def _end_to_end(model: nn.Module, converted: nn.Module, inputs: dict[str, Tensor], told: str) -> EndToEnd:
    """The drift of the last hidden states, and of their means over the tokens, which is how sentences are embedded."""
    mask = inputs.get("attention_mask")
    with measuring.in_evaluation(model), measuring.in_evaluation(converted), torch.no_grad():
        before, after = (_last_hidden(each(**inputs, output_hidden_states=True)) for each in (model, converted))
    if before is None or after is None or before.ndim != 3:
        return EndToEnd(told)
    if mask is None or mask.shape != before.shape[:2]:
        mask = torch.ones(before.shape[:2], dtype=torch.int64)
    seen = mask.bool()[..., None]
    a, b = (torch.where(seen, hidden.double(), 0.0) for hidden in (before, after))
    means = [hidden.sum(1) / seen.sum(1) for hidden in (a, b)]
    cosine = (means[0] * means[1]).sum(-1) / (means[0].norm(dim=-1) * means[1].norm(dim=-1))
    return EndToEnd(told, float((a - b).abs().max()), max(0.0, float((1 - cosine).max())), float(a.abs().max()))


def _last_hidden(output: Any) -> Tensor | None:
    for name in ("last_hidden_state", "hidden_states", "decoder_hidden_states"):
        found = getattr(output, name, None)
        if found is not None:
            return found if isinstance(found, Tensor) else found[-1]
    return None


def _copied(folder: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name in COPIED:
        path = os.path.join(folder, name)
        if os.path.isfile(path) and os.path.getsize(path) <= 2**28:
            with open_regular(path) as file:
                found[name] = file.read()
    return found


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _why_not_replace(path: str) -> str | None:
    """Only a converted model may go, and only if nothing else is with it."""
    try:
        names = os.listdir(path)
        marks = read_json(os.path.join(path, CONFIG)).get("attnc") if CONFIG in names else None
    except (OSError, FileError) as error:
        return f"a folder that cannot be looked into ({error})"
    if not names:
        return "an empty folder"
    if not isinstance(marks, dict) or not str(marks.get("format", "")).startswith(FAMILY):
        return "a folder that is not a converted model of attnc"
    foreign = sorted(set(names) - {CONFIG, WEIGHTS, KEYS, REPORT, CARD, *COPIED})
    return f"a converted model together with {foreign[0]!r}, which is not part of it" if foreign else None


def why_not_writable(path: Path) -> str | None:
    """Why a converted model cannot be written there, to be asked before the work; None if it can."""
    target = os.path.abspath(os.fspath(path))
    if os.path.lexists(target):
        found = _why_not_replace(target) if os.path.isdir(target) else "a file"
        return None if found is None else f"{os.fspath(path)!r} is {found}. Choose another name, or remove it first."
    parent = os.path.dirname(target)
    return None if os.path.isdir(parent) else f"the folder {parent!r} does not exist. Create it first."
