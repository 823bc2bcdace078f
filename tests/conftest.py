"""Settings for all tests: machines are shared and slow at times, so no test fails for the time it takes."""

from hypothesis import settings

settings.register_profile("attnc", deadline=None)
settings.load_profile("attnc")
