"""All experiments, by name."""

from __future__ import annotations

import difflib

from attnc.errors import InputError
from attnc.lab.experiment import Experiment
from attnc.lab.experiments import (
    beyond,
    boundary,
    frequency,
    incontext,
    learnability,
    noise,
    perturbation,
    range_length,
    rate_in_heads,
    rate_in_p,
    scaling,
    selection,
    sequences,
    temperature,
    two_dimensional,
)

EXPERIMENTS: tuple[Experiment, ...] = (
    rate_in_p.EXPERIMENT,
    rate_in_heads.EXPERIMENT,
    range_length.EXPERIMENT,
    selection.EXPERIMENT,
    temperature.EXPERIMENT,
    boundary.EXPERIMENT,
    frequency.EXPERIMENT,
    scaling.EXPERIMENT,
    two_dimensional.EXPERIMENT,
    learnability.EXPERIMENT,
    noise.EXPERIMENT,
    perturbation.EXPERIMENT,
    sequences.EXPERIMENT,
    incontext.EXPERIMENT,
    beyond.EXPERIMENT,
)


def named(name: str) -> Experiment:
    for experiment in EXPERIMENTS:
        if experiment.name == name:
            return experiment
    names = [experiment.name for experiment in EXPERIMENTS]
    close = difflib.get_close_matches(name, names, 3, 0.5)
    hint = f"Did you mean {' or '.join(close)}?" if close else f"They are: {', '.join(names)}."
    raise InputError(f"there is no experiment {name!r:.80}. {hint}")
