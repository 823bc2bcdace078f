"""A slice of `python -m attack.gradients`, and a bound that it has to find too small."""

from __future__ import annotations

import dataclasses

import pytest

import attnc
from attack.gradients import KINDS, Attack
from attack.grammar import Case, random_case

pytest.importorskip("torch")


def test_gradients_keep_their_bounds_and_are_proved_again():
    found = Attack().run(seed=29, count=2000, points=60)
    assert found.failures == []
    assert found.cases.total() >= 2
    assert 0 < found.closest <= 1


@pytest.mark.slow
def test_many_gradients_keep_their_bounds():
    found = Attack().run(seed=31, count=60_000, points=500)
    assert found.failures == []


def test_a_bound_that_is_too_small_is_found(monkeypatch):
    compiled = Case.compile

    def too_small(self: Case) -> attnc.Network:
        network = compiled(self)
        claim = network.certificate
        lower = dataclasses.replace(claim.gradient, bound=0.9 * claim.gradient.observed)
        return dataclasses.replace(network, certificate=dataclasses.replace(claim, gradient=lower))

    monkeypatch.setattr(Case, "compile", too_small)
    found = Attack()
    found.one(random_case(29, 1, KINDS), 1, 200)
    assert any(" > " in failure for failure in found.failures)
