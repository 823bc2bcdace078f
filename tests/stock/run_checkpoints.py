"""Run stock checkpoints by plain transformers, in a process that cannot import attnc: python run_checkpoints.py JOBS.

JOBS is a JSON file: [{"folder", "points": an .npy file, "out": an .npz file}]. Per folder the outputs are written for
eager attention and SDPA, in one sequence and one by one, with padding, as logits of the causal language model, and by
the function that the model card defines.
"""

import json
import os
import re
import runpy
import sys
from pathlib import Path


class Blocked:
    """Refuses to import attnc."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0].startswith("attnc"):
            raise ImportError(f"{name} is not to be had here")


sys.meta_path.insert(0, Blocked())

import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModel, AutoModelForCausalLM  # noqa: E402

torch.set_num_threads(1)
BY_ITSELF = 10


def of_card(folder):
    """Run the lines of the model card in its folder, and return the function that they define."""
    (lines,) = re.findall("```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    script = folder.parent / "card.py"
    script.write_text(lines, encoding="utf-8")
    os.chdir(folder)
    return runpy.run_path(str(script))["f"]


def run(job):
    points = torch.as_tensor(np.load(job["points"]), dtype=torch.float32)
    found = {}
    for attention in ("eager", "sdpa"):
        model = AutoModel.from_pretrained(job["folder"], dtype=torch.float32, attn_implementation=attention)
        E, names = model.get_input_embeddings().weight, model.config.attnc
        prefix, pad = E[: names["prefix"]], E[[names["pad"]]]

        @torch.no_grad()
        def f(points, before=0, between=0, mask=False, model=model, E=E, names=names, prefix=prefix, pad=pad):
            queries = E[names["query"]] + points @ E[names["variables"]]
            parts = [pad.repeat(before, 1), prefix, pad.repeat(between, 1), queries]
            tokens = torch.cat(parts)[None]
            shown = torch.ones(tokens.shape[:2], dtype=torch.long)
            shown[0, :before] = 0 if mask else 1
            hidden = model(inputs_embeds=tokens, attention_mask=shown if mask else None).last_hidden_state
            return (hidden[0, -len(points) :] @ E[names["outputs"]].T).numpy()

        found[f"{attention} in one sequence"] = f(points)
        found[f"{attention} one by one"] = np.concatenate([f(point[None]) for point in points[:BY_ITSELF]])
        found[f"{attention} with padding"] = f(points, before=3, between=2)
        found[f"{attention} with masked padding"] = f(points, before=3, between=1, mask=True)
        if attention == "eager":
            causal = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=torch.float32)
            with torch.no_grad():
                tokens = torch.cat([prefix, E[names["query"]] + points @ E[names["variables"]]])[None]
                logits = causal(inputs_embeds=tokens).logits[0, names["prefix"] :, names["outputs"]]
            found["logits"] = logits.numpy()
    found["card"] = of_card(Path(job["folder"]))(points).numpy()
    np.savez(job["out"], **{name: array.astype(np.float64) for name, array in found.items()})


with open(sys.argv[1], encoding="utf-8") as jobs:
    for each in json.load(jobs):
        run(each)
