"""Without scikit-learn the estimators can be named, listed and imported, and name the missing package on first use."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
sys.modules["sklearn"] = None
import attnc
names = ("Ridge", "Lasso", "LogisticRegression", "KernelRidge", "KNeighborsRegressor")
for name in names:
    assert hasattr(attnc.incontext, name)
    assert name in dir(attnc.incontext)
from attnc.incontext import *
from attnc.incontext import Ridge
assert Ridge.__name__ == "Ridge"
assert not hasattr(attnc.incontext, "Rigde")
try:
    Ridge(alpha=1.0)
except attnc.MissingExtra as error:
    print(error)
"""


def test_the_estimators_are_named_and_say_what_they_need() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "attnc.incontext.Ridge needs scikit-learn. Install it with: pip install 'attnc[incontext]'"
    )


def test_dir_lists_what_is_loaded_on_demand() -> None:
    import attnc

    assert {"diagnose", "Diagnosis", "compile", "__version__"} <= set(dir(attnc))
    assert {*attnc.incontext.__all__} <= set(dir(attnc.incontext))
