"""torchwright: one graph per function, compiled into a transformer with feed-forward layers, in float32.

It has two sets of operations. Those of ReLU interpolate functions of one variable linearly, and are exact for |x|.
Those of SwiGLU round the kinks, and multiply exactly. A graph has to be written by hand, so each function has the graph
that suits it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from bench_functions import CREASE, RUNGE, TEN, TWISTED, WAVE, Function
from protocol import Evaluate, Fitted, Job, serve, smallest
from torchwright import compile_headless
from torchwright.graph import Node
from torchwright.ops.inout_nodes import create_input
from torchwright.ops.linear import add, subtract
from torchwright.ops.relu import arithmetic_ops as relu
from torchwright.ops.swiglu import arithmetic_ops as swiglu

SIZES = [16 * 2**k for k in range(9)]
"""Breakpoints of each function of one variable. Beyond 4,096 the rounding of float32 decides."""
BLOCKS = (64, 256, 1024)
"""Points of a block, which torchwright takes as the tokens of one sequence: the fastest is used."""
WIDTH, HEAD_WIDTH = 64, 16
FEW = 2048
"""Points at which a size is chosen: it takes about 20 µs per point, so that more would use up the time."""

Piece = Callable[[Node, Callable[[np.ndarray], np.ndarray], float, float], Node]


def breakpoints(f: Callable[[np.ndarray], np.ndarray], lo: float, hi: float, n: int) -> list[float]:
    """Return n points, dense where |f''| is large: then linear interpolation has the same error everywhere."""
    t = np.linspace(lo, hi, 20_001)
    bend = np.sqrt(np.abs(np.gradient(np.gradient(f(t), t), t)))
    bend += 0.05 * bend.max()
    mass = np.concatenate([[0.0], np.cumsum((bend[1:] + bend[:-1]) / 2)])
    return [lo, *np.interp(np.linspace(0, mass[-1], n)[1:-1], mass, t).tolist(), hi]


def graph(text: str, x: dict[str, Node], n: int) -> Node:
    def bent(node: Node, f: Callable[[np.ndarray], np.ndarray], lo: float, hi: float) -> Node:
        return relu.piecewise_linear(node, breakpoints(f, lo, hi, n), lambda t: float(f(np.float64(t))), d_max=n + 2)

    def soft(node: Node, f: Callable[[np.ndarray], np.ndarray], lo: float, hi: float) -> Node:
        knots = breakpoints(f, lo, hi, n)
        # The rounded kinks have a radius of 17/(128·input_scale): this keeps them apart, as torchwright advises.
        scale = max(1.0, 34 / 128 / min(np.diff(knots)))
        value = lambda t: float(f(np.float64(t)))  # noqa: E731
        return swiglu.piecewise_linear(node, knots, value, d_max=n + 2, input_scale=scale)

    times = swiglu.multiply
    match text:
        case WAVE.text:
            return add(bent(x["x"], np.sin, -3, 3), bent(x["y"], np.cos, -3, 3))
        case TWISTED.text:
            return soft(times(soft(x["x"], np.sin, -2, 2), x["y"]), np.exp, -2, 2)
        case CREASE.text:
            return relu.abs(subtract(x["x"], x["y"]))
        case RUNGE.text:
            return bent(x["x"], RUNGE.numpy, -1, 1)
        case TEN.text:
            first = times(times(soft(x["a"], np.sin, -1, 1), soft(x["b"], np.exp, -1, 1)), soft(x["c"], np.cos, -1, 1))
            second = times(times(soft(x["d"], np.tanh, -1, 1), x["f"]), soft(x["g"], lambda t: 1 / (2 + t), -1, 1))
            third = times(soft(x["h"], lambda t: np.log(3 + t), -1, 1), soft(x["i"], lambda t: np.sqrt(4 + t), -1, 1))
            fourth = times(soft(x["j"], np.atan, -1, 1), swiglu.square(x["k"]))
            return subtract(add(add(first, second), third), fourth)
    raise ValueError(f"no graph for {text}")


def fit(job: Job, target: Function) -> Iterator[Fitted]:
    threads = torch.get_num_threads()

    def compiled(n: int) -> tuple[Evaluate, int]:
        torch.set_num_threads(1)  # many small operations, slower with more
        inputs = {name: create_input(name, 1, value_range=ends) for name, ends in target.box.items()}
        module = compile_headless(graph(target.text, inputs, n), d=WIDTH, d_head=HEAD_WIDTH, d_hidden=10 * n + 64)
        torch.set_num_threads(threads)
        columns = [list(target.box).index(name) for name in module.input_names]

        @torch.no_grad()
        def evaluate(points: np.ndarray, block: int) -> np.ndarray:
            rows = torch.as_tensor(points[:, columns], dtype=torch.float32)
            return torch.cat([module(part) for part in rows.split(block)]).numpy()

        block = fastest(evaluate, target.sample(BLOCKS[-1], seed=5))
        layers = [part for layer in module.net.layers for part in (layer.attn.attn, layer.mlp)]
        return lambda points: evaluate(points, block), sum(map(non_zeros, layers))

    yield from smallest("torchwright", job, target, SIZES, compiled, threads, num_fitted=FEW)


def fastest(evaluate: Callable[[np.ndarray, int], np.ndarray], points: np.ndarray) -> int:
    times = []
    for block in BLOCKS:
        evaluate(points[:block], block)
        start = time.perf_counter()
        evaluate(points, block)
        times.append(time.perf_counter() - start)
    return BLOCKS[int(np.argmin(times))]


def non_zeros(part: object) -> int:
    """Return the number of weights that are not zero, in a part of a layer and the parts that it holds."""
    if isinstance(part, torch.Tensor):
        return int(torch.count_nonzero(part))
    held = vars(part).values() if hasattr(part, "__dict__") else ()
    return sum(
        non_zeros(each) for each in held if isinstance(each, torch.Tensor) or "torchwright" in type(each).__module__
    )


if __name__ == "__main__":
    serve(fit)
