"""scikit-learn's own checks of the estimators, and what all of them promise."""

from __future__ import annotations

import warnings

import pytest
from sklearn.exceptions import SkipTestWarning
from sklearn.utils.estimator_checks import check_estimator

import attnc

LONG = {
    "KernelRidge",
    "KNeighborsRegressor",
    "ElasticNet",
    "Lasso",
    "LinearRegression",
    "LogisticRegression",
    "NadarayaWatson",
    "PoissonRegressor",
}
NAMES = [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in sorted(attnc.incontext._ESTIMATORS)]


@pytest.mark.parametrize("name", NAMES)
def test_check_estimator(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkipTestWarning)
        check_estimator(getattr(attnc.incontext, name)())


def test_unknown_names():
    with pytest.raises(AttributeError, match="Perceptron"):
        attnc.incontext.Perceptron  # noqa: B018
