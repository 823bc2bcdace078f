"""In-context algorithms: attention that fits models on its prompt.

The programs need nothing but numpy. The estimators follow scikit-learn, which is imported when one is first used.
"""

from importlib import import_module
from typing import Any

from attnc.errors import MissingExtra
from attnc.incontext.causal import Causal
from attnc.incontext.descent import descent_program, run_recorded
from attnc.incontext.domain import Domain, OutsideDomain
from attnc.incontext.errors import Norms, Plan, compose, plan_least_squares
from attnc.incontext.interpreter import EncodedHead, EncodedProgram, Interpreter
from attnc.incontext.meta import learn_start, start_variance
from attnc.incontext.programs import InContextProgram, load
from attnc.incontext.prompt import Prompt
from attnc.incontext.strongly_convex import ExampleBounds, plan_strongly_convex

_LINEAR = (
    "PoissonRegressor",
    "ElasticNet",
    "Huber",
    "Lasso",
    "LogisticRegression",
    "LinearRegression",
    "Ridge",
    "RidgeSelection",
)
_KERNEL = ("KNeighborsRegressor", "KernelRidge", "NadarayaWatson")
_ESTIMATORS = dict.fromkeys(_KERNEL, "kernel_models") | dict.fromkeys(_LINEAR, "linear_models")

__all__ = [
    "Causal",
    "Domain",
    "EncodedHead",
    "EncodedProgram",
    "ExampleBounds",
    "InContextProgram",
    "Interpreter",
    "Norms",
    "OutsideDomain",
    "Plan",
    "Prompt",
    "compose",
    "descent_program",
    "learn_start",
    "load",
    "plan_least_squares",
    "plan_strongly_convex",
    "run_recorded",
    "start_variance",
    *_ESTIMATORS,  # loaded by __getattr__
]


def __getattr__(name: str) -> Any:
    if name not in _ESTIMATORS:
        raise AttributeError(f"module 'attnc.incontext' has no attribute {name!r}")
    try:
        return getattr(import_module(f"attnc.incontext.{_ESTIMATORS[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "sklearn":
            raise
        return _stand_in(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _stand_in(name: str) -> type:
    """Return a class in the place of an estimator without scikit-learn: it can be named and imported, but not made.

    An error here would break `hasattr`, `dir` and `from attnc.incontext import *`.
    """

    def refuse(self: object, *given: object, **options: object) -> None:
        raise MissingExtra(f"attnc.incontext.{name} needs", "scikit-learn", "incontext")

    return type(name, (), {"__init__": refuse, "__module__": __name__})
