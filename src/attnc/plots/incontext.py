"""Pictures of fits on a prompt: the loss after every step, the attention of chosen heads, functions of one variable."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.errors import InputError
from attnc.incontext.progress import Objective, attention_map, loss_path
from attnc.plots import style
from attnc.plots.drawing import write_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOKENS_SHOWN = 120
"""Maximum number of prompt tokens in a picture of attention. A token is then about 10 pixels wide."""


def plot_loss(model: Any, path: str | os.PathLike[str]) -> None:
    """Write the picture of the loss against the layer, for the attention program and for exact steps."""
    write_figure(path, lambda: loss_figure(model))


def loss_figure(model: Any) -> Figure:
    """Draw both losses, less their smallest value, and below them the distance between the weights of the two."""
    if not hasattr(model, "task_"):
        raise InputError(f"{type(model).__name__} has no steps to show, or is not fitted")
    tokens = model.prompt_[-model.task_.prompt.rows :]
    objective = Objective.of(model.task_, tokens)
    exact = objective.exact_trajectory(model.trajectory_[0])
    steps, by_attention = loss_path(objective, model.trajectory_)
    _, by_numpy = loss_path(objective, exact)
    least = min(by_attention.min(), by_numpy.min())
    floor = max(1e-16 * abs(least), 1e-300)
    note = f"{model.n_iter_} steps of the method {model.method}, {len(objective.examples.X)} examples of "
    note += f"{objective.examples.X.shape[1]} weights; the attention program and exact steps"
    picture = style.new_figure(8.0, 5.6, f"{type(model).__name__}: loss against layer", note)
    above, below = picture.subplots(2, 1, sharex=True)
    for losses, colour, width, opacity, name in (
        (by_numpy, style.ORANGE, 4.0, 0.5, "exact steps"),
        (by_attention, style.BLUE, 1.3, 1.0, "attention program"),
    ):
        shown = np.maximum(losses - least, floor)
        above.plot(steps, shown, color=colour, linewidth=width, alpha=opacity, label=name)
    style.set_title(above, "loss above its minimum")
    above.legend(frameon=False, fontsize=9)
    apart = np.linalg.norm(model.trajectory_ - exact, axis=1)[steps]
    below.plot(steps, np.maximum(apart, 1e-300), color=style.BLUE, linewidth=1.3)
    style.set_title(below, "distance between the two", "|w by attention − w by exact steps|")
    below.set_xlabel("step", color=style.INK)
    below.xaxis.get_major_locator().set_params(integer=True)
    for axes, values in ((above, by_attention - least), (below, apart)):
        if (values > 0).sum() > 1:
            axes.set_yscale("log")
            axes.set_ylim(values[values > 0].min() / 3, 3 * values.max())
        style.set_plain(axes)
    return picture


def plot_attention(
    model: Any, path: str | os.PathLike[str], *, layer: str | None = None, heads: Sequence[int] | None = None
) -> None:
    """Write the picture of the attention of chosen heads of one layer over the prompt: by default the first layer."""
    write_figure(path, lambda: attention_figure(model, layer=layer, heads=heads))


def attention_figure(model: Any, *, layer: str | None = None, heads: Sequence[int] | None = None) -> Figure:
    """Draw one row per head: the weight of each token divided by the mean, less 1. The sinks are left out.

    A head that gives all its weight to sinks has a row of zeros.
    """
    program = model.program_.program
    layer = layer or next(each.name for each in program.unrolled_layers if each.heads)
    inputs = [model.start_, model.prompt_] if len(program.input_shapes) > 1 else [model.prompt_]
    maps = attention_map(program, inputs, layer, heads)
    rows = model.task_.prompt.rows
    query = int(np.argmax([len(np.unique(maps[0, q])) for q in range(maps.shape[1])]))
    weights = maps[:, query, :rows]
    means = weights.mean(axis=1, keepdims=True)
    shown = (weights / np.where(means > 0, means, 1.0) - (means > 0))[:, :TOKENS_SHOWN]
    most = float(np.abs(shown).max()) or 1.0
    chosen = list(heads) if heads is not None else list(range(len(maps)))
    note = f"the first {shown.shape[1]} of {rows} tokens: weight divided by the mean, less 1; "
    note += f"all tokens together have at most {weights.sum(axis=1).max():.1e}, the sinks have the rest"
    title = f"{type(model).__name__}: attention of layer {layer}"
    picture = style.new_figure(9.0, 0.6 + 0.42 * len(chosen), title, note)
    axes = picture.subplots()
    drawn = axes.imshow(shown, aspect="auto", cmap=style.ERRORS, vmin=-most, vmax=most, interpolation="nearest")
    axes.set_yticks(range(len(chosen)), [f"head {h}" for h in chosen])
    axes.set_xlabel("token of the prompt", color=style.INK)
    axes.tick_params(colors=style.GREY, labelsize=9, length=0)
    style.add_colorbar(axes, drawn, "weight / mean − 1", 0.02)
    return picture


def plot_function(model: Any, X: Any, y: Any, path: str | os.PathLike[str]) -> None:
    """Write the picture of the predicted function of one variable, with the prompt's examples."""
    write_figure(path, lambda: function_figure(model, X, y))


def function_figure(model: Any, X: Any, y: Any) -> Figure:
    """Draw the predicted function of one variable, and the prompt's examples."""
    X, y = np.asarray(X, np.float64), np.asarray(y, np.float64)
    if X.ndim != 2 or X.shape[1] != 1:
        raise InputError(f"the picture needs a function of one variable, X of shape (n, 1); found {X.shape}")
    low, high = float(X.min()), float(X.max())
    margin = 0.08 * (high - low or 1.0)
    at = np.linspace(low - margin, high + margin, 600)
    is_classifier = hasattr(model, "predict_proba")
    predicted = model.predict_proba(at[:, None])[:, 1] if is_classifier else model.predict(at[:, None])
    title = f"{type(model).__name__}: the function found in context"
    picture = style.new_figure(8.0, 4.2, title, f"{len(X)} examples in the prompt")
    axes = picture.subplots()
    axes.scatter(X[:, 0], y, s=16, color=style.ORANGE, alpha=0.8, linewidths=0, label="examples")
    axes.plot(at, predicted, color=style.BLUE, linewidth=1.8, label="prediction")
    axes.set_xlabel("x", color=style.INK)
    style.set_plain(axes)
    axes.legend(frameon=False, fontsize=9)
    return picture
