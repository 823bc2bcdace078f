"""The checker's arithmetic in every test of its parts, and a copy of the network that a module has saved."""

import shutil

import pytest

from attnc_checker.checking import precision


@pytest.fixture(autouse=True)
def checkers_precision():
    with precision():
        yield


@pytest.fixture
def net(saved, tmp_path):
    """A copy that a test may tamper with; `saved` is a fixture of its module."""
    return shutil.copytree(saved, tmp_path / "net")
