"""The checker's arithmetic in every test of its parts."""

import pytest

from attnc_checker.checking import precision


@pytest.fixture(autouse=True)
def checkers_precision():
    with precision():
        yield
