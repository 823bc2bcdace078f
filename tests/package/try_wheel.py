"""Build the wheel, install it into a fresh environment for every extra, and use the features of the extra.

`make test-wheel` runs this. `make test-wheel EXTRAS="none plots" PYTHON=python3.13` chooses extras and interpreter. It
takes minutes and downloads packages, so it is no part of `make test`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NONE = "none"
"""The name of the environment without an extra."""

BASE = """
import importlib.metadata, importlib.resources, subprocess, sys
import attnc

assert importlib.metadata.version("attnc") == attnc.__version__
for package in ("attnc", "attnc_checker", "attnc_lab", "attnc_playground"):
    assert importlib.resources.files(package).joinpath("py.typed").is_file(), package
files = [str(file) for file in importlib.metadata.files("attnc")]
assert any(file.endswith("licenses/LICENSE") for file in files), "the licence"
assert not any(file.startswith(("tests", "docs")) for file in files), "nothing but the packages"

def run(*words, code=0):
    done = subprocess.run([sys.executable, "-m", "attnc", *words], capture_output=True, text=True)
    assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr

assert run("--version") == f"attnc {attnc.__version__}\\n"
run("compile", "sin(x)+cos(y)", "--box", "x=-3:3", "--box", "y=-3:3", "--eps", "1e-6", "--out", "net")
assert "±" in run("eval", "net", "x=0.5", "y=1")
run("info", "net")
run("verify", "net")
run("plan", "sin(x)", "--box", "x=-3:3")
run("diagnose", "net")
net = attnc.load("net")
assert net.certificate.bound <= 1e-6

assert hasattr(attnc.incontext, "Ridge")
assert {"Ridge", "KernelRidge", "KNeighborsRegressor"} <= set(dir(attnc.incontext))
assert "diagnose" in dir(attnc)

from attnc.incontext import *
"""
"""Runs in every environment, in a folder of its own."""

HINTS = """
def hint(extra, act):
    try:
        act()
    except attnc.MissingExtra as error:
        assert f"pip install 'attnc[{extra}]'" in str(error), error
    else:
        raise AssertionError(f"{extra} is not installed, and nothing was said")

hint("plots", lambda: net.plot("net.svg"))
hint("torch", lambda: net.to_torch())
hint("jax", lambda: net.to_jax())
hint("lens", lambda: net.to_transformer_lens())
hint("onnx", lambda: net.export_onnx("net.onnx"))
hint("incontext", lambda: attnc.incontext.Ridge())
assert "pip install 'attnc[plots]'" in run("plot", "net", code=2)
assert "pip install 'attnc[onnx]'" in run("export", "net", "--to", "onnx", "--out", "f.onnx", code=2)
assert "pip install 'attnc[torch]'" in run("convert", "net", "--out", "c", code=2)
assert "pip install 'attnc[lab]'" in run("lab", "run", "temperature", code=2)
assert "pip install 'attnc[serve]'" in run("serve", code=2)
run("demo")
"""
"""Runs where no extra is installed: every feature that needs one names it."""

USES = {
    NONE: HINTS,
    "torch": """
import torch
module = net.to_torch(outside="clamp")
assert module(torch.zeros(3, 2)).shape == (3,)
mlp = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.GELU(), torch.nn.Linear(4, 1))
assert attnc.convert(mlp, eps=1e-6)[1].rows()
""",
    "jax": """
import jax
function = net.astype("float32").to_jax(outside="clamp")
assert function(jax.numpy.zeros((3, 2))).shape == jax.vmap(function)(jax.numpy.zeros((3, 2))).shape == (3,)
""",
    "docs": """
import griffe, zensical
""",
    "lens": """
model = net.to_transformer_lens()
assert model(model.embed_points([[0.0, 0.0]])).shape[0] == 1
""",
    "models": """
import transformers
from attnc.converting import huggingface
config = transformers.BertConfig(
    vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
)
transformers.BertModel(config).save_pretrained("bert")
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
open("bert/vocab.txt", "w").write("\\n".join(words))
transformers.BertTokenizer("bert/vocab.txt").save_pretrained("bert")
run("convert", "bert", "--out", "converted")
""",
    "onnx": """
assert net.export_onnx("net.onnx", outside="nan").is_within
run("export", "net", "--to", "onnx", "--out", "net.onnx")
""",
    "plots": """
net.plot("a.svg")
run("plot", "net", "--out", "b.png")
run("demo")
import os
assert os.path.exists("demo/demo.png")
""",
    "fast": """
import numba, numpy as np
grid = attnc.compile("sin(x)+cos(y)", {"x": (-3, 3), "y": (-3, 3)}, 0.1, construction="max_affine")
points = np.random.default_rng(0).uniform(-3, 3, (2000, 2))
assert np.abs(grid(points) - np.sin(points[:, 0]) - np.cos(points[:, 1])).max() <= grid.certificate.bound
""",
    "incontext": """
import numpy as np
X = np.random.default_rng(0).normal(size=(40, 3))
assert np.allclose(attnc.incontext.Ridge(alpha=1.0).fit(X, X @ [1.0, 2.0, 3.0]).predict(X[:1]).shape, (1,))
np.savetxt("data.csv", np.column_stack([X, X.sum(1)]), delimiter=",", header="a,b,c,y", comments="")
run("icl", "ridge", "--csv", "data.csv", "--output", "y")
""",
    "serve": """
from attnc_playground.app import make_app, static_files
assert {"/index.html", "/js/main.js", "/vendor/katex/katex.min.js"} <= set(static_files())
assert make_app().routes
""",
    "browser": """
from playwright.sync_api import sync_playwright
with sync_playwright() as browsers:
    assert browsers.chromium.name == "chromium"
""",
    "lab": """
run("lab", "list")
run("lab", "run", "range_length", "--out", "run")
import os
assert os.path.exists("run/report.html")
""",
    "cluster": """
import distributed
assert "no dask scheduler" in run(
    "lab", "run", "range_length", "--out", "run", "--cluster", "tcp://127.0.0.1:9", code=2
)
""",
    "tables": """
import numpy, pyarrow, pyarrow.parquet, zarr
x = numpy.linspace(0.0, 1.0, 50)
pyarrow.parquet.write_table(pyarrow.table({"x": x, "z": numpy.exp(x)}), "table.parquet")
run("compile", "--csv", "table.parquet", "--inputs", "x", "--output", "z", "--eps", "1e-6", "--out", "net")
group = zarr.open_group("table.zarr", mode="w")
group.create_array("x", data=x)
group.create_array("z", data=numpy.exp(x))
run("compile", "--csv", "table.zarr", "--inputs", "x", "--output", "z", "--eps", "1e-6", "--out", "net2")
""",
    "dev": """
import hypothesis, mypy, pytest, ruff
""",
}
"""The trial of every extra, after BASE."""


def main() -> int:
    extras = list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    missing = set(extras) - set(USES)
    assert not missing, f"add a trial of these extras to USES: {missing}"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extras", nargs="*", default=[NONE, *extras])
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the environments")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        failed = [extra for extra in chosen.extras if not tried(extra, wheel, chosen.python, Path(folder))]
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


def build(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT], check=True)
    (wheel,) = folder.glob("attnc-*.whl")
    print(f"built {wheel.name}, {wheel.stat().st_size:,} bytes", flush=True)
    return wheel


def tried(extra: str, wheel: Path, python: str, folder: Path) -> bool:
    """Return whether the wheel installs with this extra and does its work, in an environment that is then removed."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder) as place:
        subprocess.run([python, "-m", "venv", f"{place}/env"], check=True)
        inside = f"{place}/env/bin/python"
        what = str(wheel) if extra == NONE else f"{wheel}[{extra}]"
        install = [inside, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", what]
        subprocess.run(install, check=True)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        work = Path(place, "work")
        work.mkdir()
        done = subprocess.run(
            [inside, "-c", BASE + USES[extra]], cwd=work, env=environment, capture_output=True, text=True
        )
    version = subprocess.run([python, "--version"], capture_output=True, text=True).stdout.strip()
    print(
        f"{version}, {extra}: {'ok' if done.returncode == 0 else 'FAILED'}, {time.monotonic() - start:.0f} s",
        flush=True,
    )
    if done.returncode:
        print(done.stdout + done.stderr, flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
