"""The same call gives the same bytes, whatever the number of threads of the linear algebra."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NETWORKS = """
import hashlib, pathlib, sys, tempfile
import numpy as np
import attnc

rng = np.random.default_rng(0)
points = rng.uniform(-1, 1, (500, 2))
table = attnc.TableTarget(points, np.sin(9 * points[:, 0] * points[:, 1]))
box = {"x": (-1, 1), "y": (-1, 1)}
"""
CASES = {
    "a table, first of all": "net = attnc.compile(table, eps=1e-2)",
    "a theorem by name": "net = attnc.constructions.table_scattered(table, eps=1e-2)",
    "a solved grid": "net = attnc.compile('exp(sin(x)*y)', box, 1e-3, construction='spectral_grid')",
    "a composition": "net = attnc.compile('exp(-x*x)*cos(y)', box, 1e-4)",
}
PRINTED = """
digest = hashlib.sha256()
digest.update(net.program(points).tobytes())
if isinstance(net, attnc.Network):
    digest.update(net(points).tobytes())
    with tempfile.TemporaryDirectory() as folder:
        net.save(f"{folder}/net")
        for path in sorted(pathlib.Path(folder, "net").iterdir()):
            digest.update(path.read_bytes())
print(digest.hexdigest())
"""


@pytest.mark.parametrize("case", CASES)
def test_threads_change_no_byte(case: str) -> None:
    """In processes of their own: libraries read the number of threads when they are loaded."""
    code = NETWORKS + CASES[case] + PRINTED
    found = set()
    for threads in ("1", "3"):
        names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
        environment = {**os.environ, **dict.fromkeys(names, threads)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        found.add(done.stdout)
    assert len(found) == 1
