"""Pictures of fewer points than usual: they show the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from attnc.plots import one_variable, two_variables


@pytest.fixture(scope="session", autouse=True)
def small_pictures() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_variables, "MOST_BLOCKS", 32)
        patch.setattr(two_variables, "PIXELS", 120)
        patch.setattr(two_variables, "PIXELS_OF_HEADS", 120)
        patch.setattr(one_variable, "MOST_POINTS", 4_000)
        yield
