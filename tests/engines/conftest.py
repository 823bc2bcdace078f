from __future__ import annotations

import pytest

from attnc.engines import grid


@pytest.fixture
def any_number_of_keys(monkeypatch):
    """Grids are taken for such, however small."""
    monkeypatch.setattr(grid, "FEWEST_KEYS", 1)
