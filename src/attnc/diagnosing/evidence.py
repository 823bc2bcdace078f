"""Everything that failure signatures look at: errors, peaks of keys, ends of the box, seams between heads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attnc.diagnosing.observing import Seen, Subject
from attnc.targets.box import Box
from attnc.targets.target import show_point

FAINT = 1e-3
"""The weight from which a head takes part."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """Everything the signatures look at."""

    points: np.ndarray
    names: tuple[str, ...]
    seen: Seen
    wanted: np.ndarray | None
    eps: float | None
    box: Box | None
    subject: Subject

    @cached_property
    def errors(self) -> np.ndarray:
        assert self.wanted is not None
        return np.nan_to_num(np.abs(self.seen.outputs - self.wanted).max(axis=1), nan=math.inf)

    @cached_property
    def is_wrong(self) -> bool:
        """Whether any error is larger than tolerated; without a target nobody knows."""
        return self.wanted is not None and self.eps is not None and bool(self.errors.max() > self.eps)

    @cached_property
    def peaks(self) -> np.ndarray:
        """The largest weight of every key that is ever the first, over all heads."""
        found = []
        for weights in self.seen.heads:
            clean = np.nan_to_num(weights, nan=0.0)
            first = np.unique(clean.argmax(axis=1))
            found.append(clean.max(axis=0)[first])
        return np.concatenate(found)

    @cached_property
    def peak(self) -> float:
        return float(np.median(self.peaks))

    @cached_property
    def softness(self) -> float:
        """βh² from the peak of a key among equally spaced ones: peak = 1/(1 + 2e^{−βh²} + …)^d."""
        share = max(self.peak, 1e-9) ** (1 / max(1, min(3, self.points.shape[1])))
        return max(1e-3, -math.log(max(1e-12, (1 / min(share, 1 - 1e-12) - 1) / 2)))

    @cached_property
    def num_cells(self) -> int:
        """Keys that are first somewhere, of the head that has the most of them."""
        return max(len(np.unique(np.nan_to_num(weights, nan=0.0).argmax(axis=1))) for weights in self.seen.heads)

    @property
    def facts(self) -> dict[str, float]:
        return {"peak": self.peak, "softness": self.softness, "cells": float(self.num_cells)}

    def place(self, index: int) -> str:
        return show_point(self.names, self.points[index])

    @cached_property
    def at_end(self) -> np.ndarray:
        """Within a cell of the box's ends: a cell is a box side over the number of cells along it."""
        if self.box is None or not self.box.is_bounded or self.box.d != self.points.shape[1]:
            return np.zeros(len(self.points), bool)
        per_axis = max(4.0, self.num_cells ** (1 / self.box.d))
        distance = np.minimum(self.points - self.box.lo, self.box.hi - self.points) / self.box.widths
        return distance.min(axis=1) < 1 / per_axis

    @cached_property
    def at_seam(self) -> np.ndarray:
        """Where two heads share: both have some of their weight, not all, on keys that they do not rest on."""
        if len(self.seen.heads) < 2:
            return np.zeros(len(self.points), bool)
        activity = np.stack([_activity(weights) for weights in self.seen.heads], axis=1)
        return ((activity > FAINT) & (activity < 1 - FAINT)).sum(axis=1) >= 2


def _activity(weights: np.ndarray) -> np.ndarray:
    """The weight of a head on keys other than those it rests on: keys that win far more often than others."""
    wins = np.bincount(weights.argmax(axis=1), minlength=weights.shape[1])
    winning = wins[wins > 0]
    resting = wins > 2.5 * np.median(winning)
    found: np.ndarray = weights[:, ~resting].sum(axis=1)
    return found
