"""Proofs and their second proofs, measured: how close bounds are, and the time of the prover and the checker.

`python benchmarks/proofs.py [--checker]`. Grids have the size that is stated, whatever error that leaves, so that a
proof has as many keys as in the figures that are required. Times depend on the machine and its load.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import attnc
import attnc_checker
from attnc.certifying import certify
from attnc.constructions import gates, max_affine, spectral_grid
from attnc.constructions.built import Built
from attnc.targets.target import Target

INF = float("inf")
GRIDS = [
    ("sin(30*x)", 3, 129, 1.05, 0.5),
    ("1/(1+100*x**2)", 1, 129, 1.05, 0.5),
    ("exp(cos(3*x))/(2+x)", 1, 33, 1.05, 0.5),
    ("sin(x)+cos(y)", 3, 17, 1.1, 5),
    ("exp(-x**2-y**2)*sin(3*x+y)", 2, 23, 1.1, 5),
    ("log(1+x**2+y**2)*tanh(x-y)", 2, 33, 1.1, 5),
    ("sin(x)*cos(y)+z**2", 3, 9, 1.2, 20),
    ("exp(-x*y*z)+z**3", 1, 9, 1.2, 20),
    ("sin(x)*cos(y)+z**2", 3, 15, 1.2, 60),
    ("exp(sin(x)*y)+x*z", 2, 15, 1.2, 60),
]


def cases() -> list[tuple[str, Target, Built, float, float]]:
    found = []
    for text, reach, n, ratio, seconds in GRIDS:
        d = 1 + ("y" in text) + ("z" in text)
        target = attnc.as_target(text, {name: (-reach, reach) for name in "xyz"[:d]})
        found.append((f"{text}, {n}^{d}", target, spectral_grid(target, num_anchors=n), ratio, seconds))
    plane = attnc.as_target("sin(x)*y", {"x": (-2, 2), "y": (-2, 2)})
    found.append(("sin(x)*y, max_affine", plane, max_affine(plane, eps=0.04), 1.5, 20))
    line = attnc.as_target("gelu(x)", {"x": (-INF, INF)})
    found.append(("gelu(x) on R, gates", line, gates(line, eps=1e-7), 1.1, 1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checker", action="store_true", help="prove it all again by the checker")
    is_checked = parser.parse_args().checker
    print(
        "| case | keys | bound | bound/observed | at most | leaves | observed and proved, s | at most | checker | s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, target, built, ratio, seconds in cases():
        start = time.perf_counter()
        eps = (
            0.0 if built.bound is None else 1.1 * built.bound.value
        )  # as close as the prover gets, or nearly the theorem
        network = certify(built, target, eps, seconds=120)
        proof = time.perf_counter() - start
        claim = network.certificate
        row = (
            f"| `{name}` | {network.num_anchors:,} | {claim.bound:.3g} | {claim.bound / claim.observed:.3f} | {ratio} "
        )
        row += f"| {claim.num_leaves:,} | {proof:.2f} | {seconds} "
        if is_checked:
            with tempfile.TemporaryDirectory() as folder:
                network.save(f"{folder}/net")
                verdict = attnc_checker.check(f"{folder}/net")
            row += f"| {'re-proved' if verdict.proved else verdict.reason} | {verdict.seconds:.1f} "
        print(row + "|", flush=True)


if __name__ == "__main__":
    main()
