"""Programs with gates stay within their limits on every prompt, and are the plain ones where those do not diverge."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attnc.engines.prompt import run
from attnc.incontext.domain import Domain, OutsideDomain
from attnc.incontext.gates import Kept, limits_of, safeguarded

pytest.importorskip("sklearn")
from attnc import incontext as ours
from attnc.errors import InputError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 3))
Y = X @ [1.0, -2.0, 0.5] + 0.1 * RNG.normal(size=12)
COUNTS = np.round(np.exp(Y / 3))
CASES = [
    (ours.Ridge(safeguard=True), Y, True),
    (ours.Lasso(0.05, safeguard=True), Y, True),
    (ours.ElasticNet(0.05, safeguard=True), Y, True),
    (ours.Huber(0.5, safeguard=True), Y, True),
    (ours.PoissonRegressor(0.5, safeguard=True), COUNTS, True),
    (ours.PoissonRegressor(0.5, method="nesterov", max_iter=60, safeguard=True), COUNTS, False),
    (ours.LogisticRegression(safeguard=True), Y > 0, True),
    (ours.LogisticRegression(method="nesterov", tol=1e-4, safeguard=True), Y > 0, False),
    (ours.LogisticRegression(tol=1e-2, safeguard=True), np.digitize(Y, [-1, 1]), False),
]
"""An estimator, its targets, and whether the plain program diverges on some prompt within the norm limits."""


def hostile(model: Any) -> list[np.ndarray]:
    """Prompts at the norm limits: one direction, outliers, zero rows, and equal rows of alternating sign."""
    domain: Domain = model.program_.domain
    prompt, (rows, width), d = domain.prompt, model.prompt_.shape, domain.prompt.features
    most = domain.target if np.isfinite(domain.target) else domain.y / np.sqrt(prompt.rows)
    lowest = 0.0 if isinstance(model, ours.PoissonRegressor | ours.LogisticRegression) else -1.0
    rng, found = np.random.default_rng(1), []
    for case in range(5):
        tokens = np.zeros((rows, width))
        inner = tokens[rows - prompt.rows :]
        inner[:, d] = 1.0
        direction = rng.normal(size=d)
        if case == 3:
            direction = np.ones(d)
        signs = np.ones(prompt.rows) if case == 1 else rng.choice([-1.0, 1.0], prompt.rows)
        inner[:, :d] = np.outer(signs, direction / np.linalg.norm(direction)) * domain.x
        if case == 2:  # some rows are zero, and the others are outliers
            inner[::2, :d] = 0.0
        inner[:, -prompt.targets :] = most * rng.uniform(lowest, 1.0, (prompt.rows, prompt.targets))
        if case == 4:
            inner[:] = 0.0
        found.append(tokens)
    return found


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize(("model", "y", "diverges"), CASES, ids=lambda given: str(given)[:50])
def test_no_prompt_leads_beyond_the_limit(model: Any, y: np.ndarray, diverges: bool) -> None:
    model.fit(X, y)
    plain = type(model)(**(model.get_params() | {"safeguard": False})).fit(X, y)
    assert np.abs(model.coef_ - plain.coef_).max() <= 1e-9 * (1 + np.abs(plain.coef_).max())
    program, limit = model.program_, model.program_.limit
    assert limit <= 2 * 16 * np.abs(model.trajectory_).max() + 1
    program.check(model.prompt_)
    largest = 0.0
    for tokens in hostile(model):
        assert np.abs(run(program.program, [tokens])).max() <= limit
        inputs = [tokens] if len(plain.program_.input_shapes) == 1 else [plain.start_, tokens[1:]]
        with np.errstate(all="ignore"):
            largest = max(largest, np.abs(np.nan_to_num(run(plain.program_.program, inputs), nan=np.inf)).max())
        if program.domain.violations(tokens[1:]):
            with pytest.raises(OutsideDomain, match="safeguard keeps weights finite"):
                program.check(tokens)
    assert (largest > 1e6 * limit) == diverges
    asked = model.predict_in_context(X[:3], at_once=3)
    assert np.abs(asked - plain.predict_in_context(X[:3], at_once=3)).max() <= 1e-8 * (1 + np.abs(asked).max())


def test_a_program_with_gates_is_saved_and_stored_once(tmp_path) -> None:
    model = ours.Huber(0.5, safeguard=True).fit(X, Y)
    model.save(tmp_path / "program")
    again = ours.load(tmp_path / "program")
    assert again.limit == model.program_.limit
    assert np.abs(again(model.prompt_[None])[0] - model.trajectory_[-1]).max() <= 1e-9
    assert (tmp_path / "program" / "model.safetensors").stat().st_size < 600_000


def test_a_limit_that_rounding_exceeds_is_refused() -> None:
    model = ours.Lasso(0.05).fit(X, Y)
    task, domain = model.task_, model.program_.domain
    with pytest.raises(InputError, match="no safeguard is possible"):
        safeguarded(model.program_.program, Kept({0: 1e-30}, limits_of(task, 1.0).channels), domain)
    with pytest.raises(InputError, match="takes limits"):
        safeguarded(model.program_.program, limits_of(task, 8.0), Domain(domain.prompt))
