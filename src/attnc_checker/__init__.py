"""The independent checker of attnc's certificates.

It shares no code with attnc, and needs only Python's standard library and python-flint. From the files of a saved
network it proves again, independently, that sup |f − network| ≤ bound, or reports why it cannot. See docs/checker.md.
"""

from attnc_checker.checking import Verdict, certificates, check, check_shard, merge

__all__ = ["Verdict", "certificates", "check", "check_shard", "merge"]
