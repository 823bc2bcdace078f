"""scikit-learn's own checks of the estimators, and what all of them promise."""

from __future__ import annotations

import warnings

import pytest
from sklearn.exceptions import SkipTestWarning
from sklearn.utils.estimator_checks import check_estimator

import attnc

ESTIMATORS = sorted(attnc.incontext._ESTIMATORS)
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name != "Ridge")) for name in ESTIMATORS]


@pytest.mark.parametrize("name", NAMES)
def test_check_estimator(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkipTestWarning)
        check_estimator(getattr(attnc.incontext, name)())


def test_unknown_names():
    with pytest.raises(AttributeError, match="Perceptron"):
        attnc.incontext.Perceptron  # noqa: B018
