"""The independent checker of attnc's certificates.

It shares no code with attnc, and needs Python's standard library and python-flint alone. From the files of a saved
network it proves, again and by itself, that sup |f − network| ≤ bound, or says why it cannot. See docs/checker.md.
"""

from attnc_checker.checking import Verdict, certificates, check

__all__ = ["Verdict", "certificates", "check"]
