"""The folder of a stock checkpoint: config.json, model.safetensors, certificate.json and README.md."""

from __future__ import annotations

import hashlib

from attnc.exports.directory import CARD, STOCK, STOCK_FAMILY, WEIGHTS, json_bytes, json_lines, utf8
from attnc.exports.safe_files import CONFIG, PathLike, pack_tensors, write_whole
from attnc.exports.stock_layout import CONTEXT, Checkpoint
from attnc.model_card import code, escape, fenced
from attnc.proofs.certificate import Certificate
from attnc.targets.box import Box
from attnc.wording import ceiling

FORMAT = f"{STOCK_FAMILY}1"
SNIPPET = """\
import torch
from transformers import AutoModel

model = AutoModel.from_pretrained(".", dtype=torch.float32)
E, names = model.get_input_embeddings().weight, model.config.attnc

@torch.no_grad()
def f(points):  # (n, {d}), columns {columns} -> (n, {outputs})
    queries = E[names["query"]] + torch.as_tensor(points, dtype=torch.float32) @ E[names["variables"]]
    tokens = torch.cat([E[: names["prefix"]], queries])[None]
    return model(inputs_embeds=tokens).last_hidden_state[0, names["prefix"] :] @ E[names["outputs"]].T

print(f([{middle}]))"""


def save_checkpoint(
    path: PathLike, checkpoint: Checkpoint, claim: Certificate, expression: str | None, made: str
) -> None:
    """Write the folder, whole or not at all. `made` is the origin of its heads."""
    box = checkpoint.network.box
    weights = pack_tensors(checkpoint.tensors(), {"format": "pt"})
    stated = {"format": FORMAT, "expression": expression, "box": box.as_json(), **checkpoint.names()}
    certificate = {**claim.to_json(expression, box), "weights_sha256": hashlib.sha256(weights).hexdigest()}
    files = {
        CONFIG: json_bytes({**checkpoint.config(), "attnc": stated}, CONFIG),
        WEIGHTS: weights,
        "certificate.json": json_lines(certificate, "certificate.json"),
        CARD: utf8(card(checkpoint, claim, expression, made), CARD),
    }
    write_whole(path, files, STOCK)


def snippet(checkpoint: Checkpoint) -> str:
    """Return the lines that load the checkpoint and define f(points)."""
    box = checkpoint.network.box
    middle = [float(x) for x in box.lo / 2 + box.hi / 2]
    return SNIPPET.format(d=box.d, columns=", ".join(box.names), outputs=len(checkpoint.outputs), middle=repr(middle))


def card(checkpoint: Checkpoint, claim: Certificate, expression: str | None, made: str) -> str:
    """Return the model card as Markdown."""
    network, box = checkpoint.network, checkpoint.network.box
    what = "the values of a table" if expression is None else code(expression)
    assert claim.bound is not None
    blocks = [
        "---\nlibrary_name: transformers\ntags: [attnc, interpretability, constructed-weights]\n---",
        f"# {what} as a stock decoder",
        "A `SmolLM3` checkpoint for plain transformers, without remote code. Its weights are constructed, not trained. "
        "The feed-forward weights are all 0, and every norm is the identity: softmax attention computes the function.",
        "\n".join(
            [
                f"- **Function:** {what}",
                f"- **Box:** {_shown(box)}. Outside of it nothing is claimed.",
                f"- **Bound (stated by certificate.json):** the error is at most **{ceiling(claim.bound)}** "
                f"{'at the points of the table' if claim.is_of_table else 'at every point of the box'}, in float32, "
                "rounding included.",
                f"- **Observed error (sampled):** {'none' if claim.observed is None else ceiling(claim.observed)}",
                f"- **Heads:** {made}",
                f"- **Size:** {checkpoint.num_layers} layers, {len(network.heads)} heads, {network.prefix} key tokens, "
                f"{len(checkpoint.channels)} channels in use of {checkpoint.width}",
            ]
        ),
        "## Run it",
        "In this folder, with torch and transformers:",
        fenced(snippet(checkpoint), "python"),
        "`attnc verify .` proves the bound again from config.json and model.safetensors alone.",
        "## Conventions",
        f"Tokens 0 to {network.prefix - 1} of the vocabulary are keys, and come before all queries. Any number of "
        f"query tokens follow, up to {CONTEXT:,} tokens in all; they do not see each other, as long as they "
        "are in the box. The token `<pad>` may stand anywhere. "
        "`model.config.attnc` names the channels of the residual stream, the words, and the heads with the channels "
        "that they read and write. With `AutoModelForCausalLM` the logit of the word `<output j>` is output j.",
        "## The bound assumes",
        "\n".join(f"- {escape(sentence)}" for sentence in claim.assumptions),
    ]
    return "\n\n".join(blocks) + "\n"


def _shown(box: Box) -> str:
    return ", ".join(f"{code(name)} ∈ [{lo!r}, {hi!r}]" for name, (lo, hi) in box.as_dict().items())
