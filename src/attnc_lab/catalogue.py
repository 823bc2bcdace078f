"""All experiments, by name. Every module of `attnc_lab.experiments` is one."""

from __future__ import annotations

import difflib
import importlib
import pkgutil

import attnc
from attnc_lab import experiments
from attnc_lab.experiment import Experiment


def _found() -> tuple[Experiment, ...]:
    names = [f"{experiments.__name__}.{module.name}" for module in pkgutil.iter_modules(experiments.__path__)]
    found = [Experiment.of_module(importlib.import_module(name)) for name in names]
    return tuple(sorted(found, key=lambda experiment: experiment.number))


EXPERIMENTS: tuple[Experiment, ...] = _found()
"""All experiments, in the order of their numbers."""


def named(name: str) -> Experiment:
    """Return the experiment of a name.

    Parameters
    ----------
    name : str
        A name from `attnc lab list`.

    Returns
    -------
    Experiment
        Its question, its cells, and how they are measured, judged and drawn.

    Raises
    ------
    InputError
        If there is no experiment of this name. The message has the names that are close to it.

    Examples
    --------
    >>> import attnc_lab
    >>> attnc_lab.named("frequency").name
    'frequency'
    """
    names = {experiment.name: experiment for experiment in EXPERIMENTS}
    if name in names:
        return names[name]
    close = difflib.get_close_matches(name, names, 3, 0.5)
    hint = f"Did you mean {' or '.join(close)}?" if close else f"They are: {', '.join(names)}."
    raise attnc.InputError(f"there is no experiment {name!r:.80}. {hint}")
