from __future__ import annotations

import pytest

from strategies.reference import precision


@pytest.fixture(autouse=True)
def precise():
    with precision(200):
        yield
