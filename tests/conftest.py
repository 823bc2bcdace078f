"""Settings for all tests: machines are shared and slow at times, so no test fails for the time it takes.

`make test` draws the same examples every time, so that main is green or it is not; `make test-slow` draws new ones.
"""

import pytest
from hypothesis import settings

settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("new", deadline=None)
settings.load_profile("same")


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory):
    """Keep records of re-proved networks out of the user's cache folder, and the user's records out of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
