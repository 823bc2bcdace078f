"""The cost of a bound of gradients: keys, time and tightness, for eps 1e-6 and gradient_eps 1e-4.

`python benchmarks/gradients.py` prints one table in Markdown. Each function is compiled twice in one run, for values
alone and with norm="C1", by the same construction, or both times by "auto". Times are CPU seconds of the proofs of the
same network.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import attnc
from attnc.proofs.cells.branching import Budget
from attnc.proofs.gradient_prover import gradient_task
from attnc.proofs.prover import ProofRequest
from attnc.proofs.provers import best_proof

EPS, GRADIENT_EPS = 1e-6, 1e-4
REPEATS = 3
"""Runs of each proof, of which the fastest counts."""
LINE, SQUARE = {"x": (-3, 3)}, {"x": (-2, 2), "y": (-2, 2)}
CASES = (
    ("sin(x)", LINE, "auto"),
    ("exp(-x)*sin(3*x)", {"x": (-1, 2)}, "auto"),
    ("1/(1+25*x**2)", {"x": (-1, 1)}, "auto"),
    ("tanh(2*x) + cos(x)", LINE, "auto"),
    ("gelu(x)", {"x": (-4, 4)}, "auto"),
    ("sin(x) + cos(y)", SQUARE, "auto"),
    ("sin(x*y)", SQUARE, "auto"),
    ("exp(-x**2-y**2)*sin(3*x+y)", SQUARE, "auto"),
    ("sqrt(1+x**2+y**2)", SQUARE, "auto"),
    ("tanh(sin(x)+y)+x*y", SQUARE, "auto"),
    ("sin(x*y)", SQUARE, "spectral_grid"),
    ("exp(-x**2-y**2)*sin(3*x+y)", SQUARE, "spectral_grid"),
    ("sqrt(1+x**2+y**2)", SQUARE, "spectral_grid"),
)


def fastest(work: Callable[[], object]) -> float:
    """Return the CPU seconds of the fastest of a few runs."""
    found = []
    for _ in range(REPEATS):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


def row(text: str, box: dict[str, tuple[float, float]], construction: str) -> str:
    """Return the line of one function."""
    plain = attnc.compile(text, box, EPS, construction=construction)
    net = attnc.compile(text, box, EPS, construction=construction, norm="C1", gradient_eps=GRADIENT_EPS)
    claim, target = net.certificate, attnc.as_target(text, box)
    request = ProofRequest(eps=EPS, observed=claim.observed or 0.0, derivation=net.derivation)
    values = fastest(lambda: best_proof(net.program, target, request))
    task = gradient_task(net.program, target, GRADIENT_EPS, net.derivation, net._slopes_at)
    slopes = fastest(lambda: task.proof(Budget()))
    assert claim.gradient is not None
    assert claim.bound is not None
    layers = net.program.num_attention_layers
    cells = (
        f"`{text}`",
        f"{net.construction}, {layers} layers" if layers > 1 else net.construction,
        f"{plain.num_anchors}",
        f"{net.num_anchors}",
        f"{claim.bound / (claim.observed or claim.bound):.3f}",
        f"{claim.gradient.bound:.2g}",
        f"{claim.gradient.bound / claim.gradient.observed:.3f}",
        f"{(values + slopes) / values:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> int:
    print("| f | construction | keys | keys, C1 | bound/observed | gradient | bound/observed | proof, times |")
    print("| :-- | :-- | --: | --: | --: | --: | --: | --: |")
    for case in CASES:
        print(row(*case), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
