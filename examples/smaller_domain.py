"""A smaller domain needs fewer cells: the Lipschitz corollary of the max-affine theorem, in numbers.

A function with Lipschitz constant Λ on a box of d sides of length w needs about (Λ·w/ε)^d cells: a third of the side
saves a factor 3^d, and more where the function is flatter there. Adaptive centres have part of that saving on the large
box already: they spend few cells where the function is flat.

    python examples/smaller_domain.py
"""

from __future__ import annotations

import attnc

FUNCTIONS = (
    ("sin(x) + cos(y)", 0.1),
    ("sqrt(1 + x**2 + y**2)", 0.1),
    ("x**2 + y**2", 0.5),
    ("exp(-x**2 - y**2)", 0.05),
)
SIDES = (3.0, 2.0, 1.0)


def cells(text: str, side: float, eps: float, centres: str) -> int:
    target = attnc.as_target(text, [(-side, side)] * 2)
    return attnc.constructions.max_affine(target, eps=eps, centres=centres).program.num_anchors


def main() -> None:
    print("cells for the same eps, grid / adaptive")
    print(f"{'':24}{'eps':>6}" + "".join(f"{f'[−{side:g}, {side:g}]²':>17}" for side in SIDES) + "   first / last")
    for text, eps in FUNCTIONS:
        counts = [[cells(text, side, eps, centres) for side in SIDES] for centres in ("grid", "adaptive")]
        shown = "".join(f"{f'{grid:,} / {adaptive:,}':>17}" for grid, adaptive in zip(*counts, strict=True))
        saved = " / ".join(f"{row[0] / row[-1]:.1f}" for row in counts)
        print(f"{text:24}{eps:>6g}{shown}   {saved}")


if __name__ == "__main__":
    main()
