"""The memory of a measurement is its own. Libraries and other objects that stay afterwards are not counted."""

from __future__ import annotations

import numpy as np
import pytest

from attnc_lab.costs import STATUS, metered
from attnc_lab.experiment import CPU_SECONDS, PEAK_MIB

MIB = 2**17
"""The number of float64 numbers in a MiB."""


@pytest.mark.skipif(not STATUS.exists(), reason="only Linux records memory")
def test_memory_that_stays_is_not_counted() -> None:
    kept: list[np.ndarray] = []

    def work() -> float:
        kept.append(np.ones(60 * MIB))
        return float(np.ones(20 * MIB).sum())

    result, costs = metered(work)
    assert result == 20 * MIB
    assert costs[CPU_SECONDS] >= 0
    if PEAK_MIB in costs:  # the kernel may not let a process reset its record
        assert 15 < costs[PEAK_MIB] < 40
        _, again = metered(lambda: float(np.ones(20 * MIB).sum()))
        assert 15 < again[PEAK_MIB] < 40
