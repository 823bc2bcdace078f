"""Pictures of fits: both curves, the heads asked for, the function; and what cannot be drawn."""

from __future__ import annotations

import numpy as np
import pytest

from attnc.errors import InputError
from attnc.incontext import KernelRidge, Lasso, LogisticRegression, PoissonRegressor, Ridge
from attnc.incontext.progress import Objective, attention_map
from attnc.plots import plot_attention, plot_function, plot_loss
from attnc.plots.incontext import attention_figure, function_figure, loss_figure


@pytest.fixture(scope="module")
def examples():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(30, 2))
    return X, X @ [1.0, -1.0] + 0.1 * rng.normal(size=30)


@pytest.mark.parametrize(
    "model", [Ridge(), Ridge(method="chebyshev"), Lasso(0.1), LogisticRegression(), PoissonRegressor()], ids=str
)
def test_the_program_follows_exact_steps(examples, model):
    X, y = examples
    targets = {"LogisticRegression": (y > 0).astype(int), "PoissonRegressor": np.round(np.exp(y / 2))}
    fitted = model.fit(X, targets.get(type(model).__name__, y))
    objective = Objective.of(fitted.task_, fitted.prompt_[-fitted.task_.prompt.rows :])
    exact = objective.exact_trajectory(fitted.trajectory_[0])
    assert np.abs(exact - fitted.trajectory_).max() <= 1e-9
    end = fitted.trajectory_[-1]
    if type(model).__name__ != "Lasso":
        assert np.linalg.norm(objective.gradient(end)) <= 1e-5
    for i in range(len(end)):  # the gradient is that of the objective
        step = np.zeros(len(end))
        step[i] = 1e-5
        at = end + 0.3
        slope = (objective(at + step) - objective(at - step)) / 2e-5
        l1 = fitted.task_.l1[i] * np.sign(at[i]) if getattr(fitted.task_, "l1", ()) else 0.0
        assert slope == pytest.approx(objective.gradient(at)[i] + l1, rel=1e-5, abs=1e-6)
    lines = loss_figure(fitted).axes[0].lines
    assert len(lines) == 2
    assert np.allclose(lines[0].get_ydata(), lines[1].get_ydata(), rtol=1e-3, atol=1e-9)


def test_attention_of_chosen_heads(examples, tmp_path):
    model = Ridge(method="chebyshev").fit(*examples)
    picture = attention_figure(model, layer="gradient2", heads=[0, 4])
    image = picture.axes[0].images[0].get_array()
    assert image.shape == (2, 30)
    assert (np.sign(image[0]) == -np.sign(image[1])).mean() > 0.9  # heads j and −j
    weights = attention_map(model.program_.program, [model.start_, model.prompt_], "gradient2")
    assert weights.shape == (8, 1, 31)
    assert np.abs(weights.sum(axis=-1) - 1).max() <= 1e-12
    plot_attention(model, tmp_path / "heads.png")
    plot_attention(Ridge().fit(*examples), tmp_path / "newton.png", heads=[0, 8])
    logistic = LogisticRegression(method="nesterov").fit(examples[0], examples[1] > 0)
    assert attention_figure(logistic, layer="sum3").axes[0].images[0].get_array().shape == (8, 30)
    newton = LogisticRegression().fit(examples[0], examples[1] > 0)
    shown = attention_figure(newton, layer="sum3", heads=range(48)).axes[0].images[0].get_array()
    assert np.isfinite(shown).all()
    assert (shown == 0).all(axis=1).any()  # a head that gives all its weight to sinks
    with pytest.raises(InputError, match="the attention layers are gradient1"):
        attention_map(model.program_.program, [model.start_, model.prompt_], "update1")


def test_a_function_of_one_variable(tmp_path):
    x = np.linspace(-1, 1, 20)[:, None]
    model = KernelRidge(0.01, gamma=4.0).fit(x, np.sin(3 * x[:, 0]))
    line = function_figure(model, x, np.sin(3 * x[:, 0])).axes[0].lines[0]
    at, predicted = line.get_xdata(), line.get_ydata()
    inside = np.abs(at) <= 1
    assert np.abs(predicted[inside] - np.sin(3 * at[inside])).max() <= 0.05
    plot_function(model, x, x[:, 0], tmp_path / "f.svg")
    assert (tmp_path / "f.svg").stat().st_size > 5_000


def test_what_cannot_be_drawn(examples, tmp_path):
    with pytest.raises(InputError, match="no steps"):
        plot_loss(KernelRidge(), tmp_path / "x.png")
    with pytest.raises(InputError, match="one variable"):
        plot_function(Ridge().fit(*examples), *examples, tmp_path / "x.png")
    with pytest.raises(InputError, match="must end in"):
        plot_loss(Ridge().fit(*examples), tmp_path / "x.bmp")
    assert not list(tmp_path.iterdir())
