"""Proofs by leaves as `compile` runs them and head by head, and the borders of cells as places to look for trouble."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import attnc
from attnc import constructions
from attnc.engines.numpy_engine import NumpyEngine
from attnc.errors import ProgramError
from attnc.ir.program import Program
from attnc.numerics.limits import time_limit
from attnc.proofs.cells.dyadic import cell_boxes
from attnc.proofs.leaves_prover import LeavesProver
from attnc.proofs.observed import observed_error
from attnc.proofs.proof import Proof
from attnc.proofs.prover import ProofRequest
from attnc.proofs.staged.prover import StagedProver
from attnc.targets.box import Box
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.parts.part import Derivation
from attnc.targets.target import Target
from proofs.comparisons import Comparisons, Engine, adversarial_points


def proven(program: Program, target: ExpressionTarget, seconds: float = 1.0, tolerance: float = 0.03) -> Proof:
    engine = NumpyEngine(program)
    observed = observed_error(lambda x: engine(x).reshape(len(x), -1), target, engine.work_per_point)
    request = ProofRequest(observed=observed, truncation=engine.truncation, tolerance=tolerance)
    with time_limit(counted=seconds):
        return LeavesProver().prove(program, target, request)


def constructed(name: str, text: str, box: Mapping[str, tuple[float, float]], **options: Any) -> tuple[Program, Target]:
    """The program that a construction makes of an expression, and the target."""
    target = attnc.as_target(text, box)
    return getattr(constructions, name)(target, **options).program, target


def compare(
    made: Comparisons,
    program: Program,
    target: ExpressionTarget,
    seed: int = 0,
    *,
    count: int = 1500,
    seconds: float = 0.7,
    engines: Mapping[str, Engine] | None = None,
) -> tuple[Proof, float]:
    """The proof by leaves, and the largest error that was found; an error above the bound raises."""
    found = proven(program, target, seconds)
    points = adversarial_points(program, target, count, seed, borders(found, target))
    return found, made.check(program, target, found.bound, points, engines)


def prove_heads(
    program: Program, target: Target, derivation: Derivation | None = None, *, seconds: float = 60.0
) -> Proof:
    with time_limit(counted=seconds):
        return StagedProver().prove(program, target, ProofRequest(derivation=derivation))


def proved_or_refused(
    program: Program, target: Target, derivation: Derivation | None = None, *, seconds: float
) -> Proof | None:
    """The proof; None where the prover refuses the program or its derivation."""
    try:
        return prove_heads(program, target, derivation, seconds=seconds)
    except ProgramError:
        return None


def core_of(found: Proof, target: ExpressionTarget) -> Box:
    """The box that the leaves cover."""
    core = found.evidence.core
    return target.box if core is None else Box.parse([core], target.box.names)


def borders(found: Proof, target: ExpressionTarget, most: int = 2000) -> np.ndarray:
    """Corners of the leaves with the largest bounds: they crowd at kinks."""
    worst = [found.evidence.leaves[i] for i in np.argsort(-found.evidence.bounds)[:most]]
    level, index = (np.array([getattr(leaf, name) for leaf in worst]) for name in ("level", "index"))
    centres, radii = cell_boxes(core_of(found, target), level, index)
    return np.concatenate([centres - radii, centres + radii])
