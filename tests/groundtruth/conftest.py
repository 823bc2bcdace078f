"""One small benchmark for all tests of the folder: a nested function and a product, in all disguises."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnc import groundtruth
from attnc.groundtruth import generator

SEED = 11


@pytest.fixture(scope="session")
def benchmark(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ground-truth") / "benchmark"
    levels = {name: generator.LEVELS[name] for name in ("nested", "products")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator, "LEVELS", levels)
        groundtruth.make(2, SEED, folder)
    return folder
