"""Commands as the docs show them, with their output."""

from __future__ import annotations

import contextlib
import io
import shlex
import subprocess
import sys
from collections.abc import Callable


def run(line: str) -> str:
    """Return the output of a command."""
    from attnc.cli import main

    if line.startswith("attnc verify"):  # a process of its own, which writes past this one's stdout
        command = [sys.executable, "-m", "attnc", *shlex.split(line)[1:]]
        return subprocess.run(command, check=False, capture_output=True, encoding="utf-8").stdout.rstrip()
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), contextlib.suppress(SystemExit):
        main(shlex.split(line)[1:])
    return out.getvalue().rstrip()


def transcript(*lines: str) -> str:
    parts = [f"$ {line}\n" + "\n".join(text.rstrip() for text in run(line).split("\n")) for line in lines]
    return "```console\n" + "\n".join(part.rstrip("\n") for part in parts) + "\n```"


def shown(*lines: str) -> str:
    """Return commands with their output, in a block that the tests do not run again: each takes seconds."""
    return transcript(*lines).replace("```console", "```text", 1)


def fitted() -> str:
    """Write a small table, and return the transcript of a fit."""
    import numpy as np

    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 2))
    rows = np.column_stack([X, X @ [1.5, -2.0] + 0.5 + 0.1 * rng.normal(size=40)])
    np.savetxt("data.csv", rows, fmt="%.4f", delimiter=",", header="a,b,y", comments="")
    return shown("attnc icl ridge --csv data.csv --output y --alpha 1.0")


def cli() -> dict[str, Callable[[], str]]:
    """In this order, in one folder: later commands use the files of earlier ones."""
    wave = 'attnc compile "sin(x)+cos(y)" --box x=-3:3 --box y=-3:3 --eps 0.1'
    return {
        "cli-compile": lambda: transcript(f"{wave} --out net"),
        "cli-json": lambda: transcript('attnc compile "-x**2" --box x=-pi:pi --eps 0.5 --json'),
        "cli-norm": lambda: transcript('attnc compile "sign(x)*y" --box x=-1:1 --box y=-1:1 --eps 0.1 --norm 2'),
        "cli-eval": lambda: transcript("attnc eval net x=0.5 y=pi/4", "attnc eval net x=0.5 y=1 --json"),
        "cli-outside": lambda: transcript("attnc eval net x=4 y=0 --outside clamp"),
        "cli-info": lambda: transcript("attnc info net"),
        "cli-export": lambda: transcript("attnc export net --to onnx --out net.onnx"),
        "cli-bad": lambda: transcript('attnc compile "log(x)" --box x=-1:1', "attnc eval net x=4 y=0"),
        "cli-not-met": lambda: transcript(f"{wave} --max-anchors 100 --construction max_affine"),
        "cli-plot": lambda: transcript("attnc plot net --out net.svg"),
        "cli-diagnose": lambda: transcript("attnc diagnose net"),
        "cli-icl": fitted,
        "cli-lab": lambda: transcript("attnc lab list"),
        "cli-demo": lambda: shown("attnc demo --out demo"),
        "cli-ground-truth": lambda: shown(
            "attnc ground-truth make --count 1 --seed 7 --disguise plain --out benchmark",
            "attnc certify-heads benchmark/models/m00000 --layer 0 --tokens 0:4 --query-tokens 5",
        ),
        "cli-doctor": lambda: transcript("attnc doctor"),
        "cli-verify": lambda: transcript("attnc verify net", "attnc eval net x=0.5 y=pi/4"),
        "plan-expression": lambda: transcript('attnc plan "exp(sin(x)*y)" --box x=-2:2 --box y=-2:2 --eps 1e-6'),
        "plan-all": lambda: transcript('attnc plan "sin(x)+cos(y)" --box x=-3:3 --box y=-3:3 --eps 0.1'),
        "cli-expressions": lambda: transcript(
            'attnc compile "2x + 1" --box x=0:1',
            'attnc compile "1/x" --box x=-1:1',
            'attnc compile "sign(x)" --box x=-1:1',
        ),
    }
