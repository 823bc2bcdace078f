"""The training example, in short."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    import train_attention_mlp

    return train_attention_mlp


def test_a_gated_network_goes_on_training_after_conversion(example):
    found = example.gated(steps=40)
    assert found["loss of the converted"] == pytest.approx(found["loss of the original"], rel=0.2)
    assert found["loss after fine-tuning it"] < found["loss of the converted"]
    assert found["largest difference of outputs"] <= 1e-9
    assert found["largest difference of gradients"] <= 1e-9


def test_attention_alone_is_trained_end_to_end(example):
    found = example.attention_only(steps=40)
    assert found["difference from the MLP it was built from"] <= 1e-2
    assert found["loss after"] < 0.7 * found["loss before"]
