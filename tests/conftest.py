"""Settings for all tests: machines are shared and slow at times, so no test fails for the time it takes.

`make test` draws the same examples every time, so that main is green or it is not; `make test-slow` draws new ones.
"""

from hypothesis import settings

settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("new", deadline=None)
settings.load_profile("same")
