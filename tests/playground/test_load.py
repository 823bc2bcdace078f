"""A short run of benchmarks/playground_load.py: the server outlives hostile clients and kills."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("playground_load")


def test_a_short_load_with_hostile_clients(script: Any) -> None:
    result = asyncio.run(script.load(clients=20, seconds=5.0))
    assert result.wrong == []
    assert result.answered >= 1  # how many it is depends on the machine
    assert {*result.failed} <= {"507"}  # the jobs of workers that were killed here
    assert result.after_worker.startswith(("200", "507"))
    assert result.after_template.startswith(("200", "507"))
    assert (result.left, result.idle, result.orphans, result.errors) == ([], True, [], 0)
    assert len(result.hostile) >= 10
    assert dict(script.rows(result))["errors in the log"] == "0"


def test_wrong_answers_are_found(script: Any) -> None:
    """The check of the load test fails for an output that is beyond the bound, and for a bound beyond eps."""
    import json
    import random

    path, body, check = script.network_request(random.Random(0))
    asked = json.loads(body)
    assert path == "/api/compile"
    lo, hi = asked["box"]["x"]

    def answer(bound: float, outputs: list[float]) -> bytes:
        checked = {"points": [[lo], [hi]], "outputs": outputs}
        claim = {"bound": bound}
        return json.dumps({"expression": "f", "certificate": claim, "picture": {"checked": checked}}).encode()

    assert "is proven" in check(answer(asked["eps"], [1e3, 1e3]))
    assert "not within eps" in check(answer(2 * asked["eps"], [0.0, 0.0]))
