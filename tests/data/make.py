"""Write the golden files anew: `.venv/bin/python tests/data/make.py` in a checkout.

Only a change of a format's number is a reason to do so. The folder of the former number then stays, and the tests state
that it is refused.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

import attnc

FOLDER = Path(__file__).parent


def networks() -> dict[str, attnc.Network]:
    """One network for every kind of certificate and layer that files can hold."""
    table = np.linspace(0, 1, 7)[:, None]
    relu = attnc.ReLUNetwork([np.array([[1.0], [-2.0]]), np.array([[1.0, 0.5]])], [np.zeros(2), np.zeros(1)], (-1, 1))
    return {
        "leaves": attnc.compile("sin(x)", {"x": (-1, 1)}, 1e-3),
        "gradient": attnc.compile("relu(x)", {"x": (-1, 1)}, 1e-2, norm="C1", gradient_eps=0.1),
        "second-dtype": attnc.compile("cos(x)", {"x": (-1, 1)}, 1e-3, also="float32"),
        "stages": attnc.compile("exp(-x*x)*y", {"x": (-1, 1), "y": (-1, 1)}, 1e-2, construction="compose"),
        "definitions": attnc.compile(relu, eps=0.2),
        "tails": attnc.compile("gelu(x)", {"x": (-math.inf, math.inf)}, 1e-2),
        "norm": attnc.compile("sign(x)", {"x": (-1, 1)}, 0.2, norm=2),
        "chain": attnc.compile("abs(x)", {"x": (-1, 1)}, points_per_axis=4, construction="attention_softmax"),
        "table": attnc.compile(attnc.TableTarget(table, np.sin(table[:, 0]), ("t",)), eps=1e-3),
        "sequence": attnc.compile(
            attnc.SequenceTarget(lambda X: X - X.mean(1, keepdims=True), tokens=2, width=1, lipschitz=2.0), eps=1.0
        ),
    }


def tiny_model(folder: Path) -> None:
    """Save a BERT with two hidden units and a vocabulary of letters, in the layout of Hugging Face."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 2, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 2}
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]
    config = transformers.BertConfig(vocab_size=len(words), max_position_embeddings=8, type_vocab_size=1, **sizes)
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    tokenizer = {"tokenizer_class": "BertTokenizer", "model_max_length": 8}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))


def in_context() -> attnc.incontext.InContextProgram:
    """Return a ridge program for at most three rows of one feature."""
    from attnc.engines.prompt import run
    from attnc.incontext import Domain, InContextProgram, Norms, Prompt, plan_least_squares
    from attnc.incontext.stored_fit import stored_fit

    prompt, norms = Prompt(rows=3, features=1), Norms(x=1.0, y=3.0, L=3.0, mu=1.0)
    plan = plan_least_squares(prompt, norms, (1.0,), accuracy=1e-3)
    domain = Domain(prompt, norms.x, norms.y, start=0.0, L=norms.L, mu=norms.mu, penalty=(1.0,))
    program = plan.task.program()
    inputs = plan.task.inputs(np.zeros(1), np.array([[0.5], [-1.0]]), np.array([1.0, -2.0]))
    fit = stored_fit(program, plan.task, inputs, run(program, inputs))
    return InContextProgram(program, domain, "Ridge", plan.bound, fit=fit)


def main() -> int:
    from tempfile import TemporaryDirectory

    from attnc_lab import run

    (FOLDER / "network-1").mkdir(exist_ok=True)
    for name, network in networks().items():
        network.save(FOLDER / "network-1" / name)
    (FOLDER / "stock-1").mkdir(exist_ok=True)
    (FOLDER / "incontext-2").mkdir(exist_ok=True)
    attnc.compile("tanh(x)*y", {"x": (-1, 1), "y": (-1, 1)}, 1e-2).export_hf(FOLDER / "stock-1" / "product")
    in_context().save(FOLDER / "incontext-2" / "ridge")
    run(["frequency"], FOLDER / "lab-1", command="attnc lab run frequency --out lab-1")
    for cell in sorted((FOLDER / "lab-1" / "cells" / "frequency").iterdir())[1:]:
        cell.unlink()  # the table has them all; one file shows their form
    with TemporaryDirectory() as place:
        from attnc.converting.huggingface import convert_directory

        tiny_model(Path(place))
        convert_directory(Path(place), FOLDER / "converted-2", 1e-4, texts=["a b"], strict=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
