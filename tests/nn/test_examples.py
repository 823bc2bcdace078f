"""The examples of layers: a calibration table in a small network, and a law of motion in a transformer block."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for others would take the time of other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name=name)


def test_the_amplifier_is_found_through_the_table():
    found = example("calibration_layer")["calibrated"](steps=250)
    assert found["gain"] == pytest.approx(1.4, abs=0.01)
    assert found["offset"] == pytest.approx(-0.3, abs=0.01)


def test_a_network_with_a_table_is_trained():
    before, after = example("calibration_layer")["end_to_end"](steps=40)
    assert after < before / 2


def test_an_aged_table_is_certified_again():
    found = example("calibration_layer")["aged"](steps=60)
    assert found["after training"] == "not certified"
    assert found["error at the new points in °C"] < 2


def test_the_law_holds_where_training_has_not_been():
    found = example("physics_in_transformer")["compared"](steps=20)
    assert found["proven error of the law"] <= 1e-3
    assert found["with the law, 30 steps from 2 rad"] < 0.01
    assert found["with the law, 30 steps from 2 rad"] < found["with a network, 30 steps from 2 rad"] / 20
