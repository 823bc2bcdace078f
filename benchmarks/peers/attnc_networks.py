"""attnc itself, in the project's environment: the construction that `auto` chooses, and two with a single head."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from bench_functions import Function
from protocol import Fitted, Job, serve

import attnc
from attnc.ir.normal_form import AttentionStage, normal_form
from attnc.ir.soft_head import unpacked

CONSTRUCTIONS = {"auto": "attnc", "spectral_grid": "attnc, one soft head", "max_affine": "attnc, max-affine partition"}
MAX_ANCHORS = 100_000


def fit(job: Job, target: Function) -> Iterator[Fitted]:
    attnc.compile("sin(x)", {"x": (-1, 1)}, 1e-3)(np.zeros((1, 1)))  # imports and compiled loops are not timed
    for construction, method in CONSTRUCTIONS.items():
        end = time.perf_counter() + job.search_seconds
        for eps in sorted(job.accuracies, reverse=True):
            if construction != "auto" and time.perf_counter() > end:
                break
            start = time.perf_counter()
            try:
                net = attnc.compile(target.text, target.box, eps, construction=construction, max_anchors=MAX_ANCHORS)
            except attnc.AttncError:
                break  # this construction cannot reach it, nor any smaller eps
            built = time.perf_counter() - start
            if construction == "spectral_grid":
                save_head(net, Path(job.folder), eps, built)
            yield Fitted(
                method,
                eps,
                net.num_parameters,
                built,
                net,
                threads=os.cpu_count() or 1,
                bound=net.certificate.bound,
                keys=net.num_anchors,
            )


def save_head(net: attnc.Network, folder: Path, eps: float, built: float) -> None:
    """Write the scores' slopes and offsets and the values of a network with one head, for dense attention in torch."""
    (stage,) = normal_form(net.program).stages
    assert isinstance(stage, AttentionStage)
    assert stage.residual is None
    (head,) = stage.heads
    soft = head.soft_head(0)
    assert soft is not None
    assert soft.carried is None
    np.savez(
        folder / f"head_{eps:.0e}.npz",
        slopes=unpacked(soft.slopes),
        offsets=soft.offsets,
        values=soft.values,
        built=built,
        size=net.num_parameters,
    )


if __name__ == "__main__":
    serve(fit)
