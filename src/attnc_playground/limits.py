"""The limits of the playground. Each is a number that a stranger's request cannot exceed."""

from __future__ import annotations

import os
from dataclasses import dataclass

MAX_BODY = 2**16
"""Largest body of a request in bytes. The largest honest one, 40 points for a regression, has 2,000."""
MAX_DISCARDED = 2**23
"""Bytes of a body after which the connection is closed. The client of a smaller body reads why it was refused."""
MAX_EXPRESSION = 500
"""Largest number of characters of an expression. A line on the page shows about 80."""
MAX_VARIABLES = 4
"""Largest number of variables. The page draws one or two."""
MAX_SIDE = 1e6
"""Largest absolute value of a finite end of a box."""
EPS_RANGE = (1e-13, 10.0)
"""Least and largest eps. In float64 rounding leaves less than 1e-13 for hardly any function."""
MAX_KEYS = 20_000
"""Largest number of keys of a network: one with 20,000 keys is 1.5 MB of JSON."""
MAX_POINTS = 40
"""Largest number of points of a regression in context."""
MAX_STEPS = 200
"""Largest number of steps of a regression in context. 200 take 0.1 s."""


@dataclass(frozen=True)
class Limits:
    """The limits of a server.

    Attributes
    ----------
    workers : int
        Number of jobs that run at a time.
    queue : int
        Number of jobs that may wait. One more is refused with 429.
    seconds : float
        Time of a job on the wall, after which it is killed.
    cpu_seconds : int
        CPU time of a job.
    compile_seconds : float
        Time that `attnc.compile` and `attnc.plan` are given. They answer with a reason when it runs out.
    memory : int
        Bytes that a job may add to the memory of an idle worker.
    cache : int
        Bytes of finished answers that are kept.
    connections : int
        Number of open connections. One more is answered with 503.
    header_seconds, body_seconds : float
        Time in which a request's head and its body must have arrived.
    response_seconds : float
        Time after the head in which the answer must have been taken.
    """

    workers: int = max(1, min(8, os.cpu_count() or 1))
    queue: int = 32
    seconds: float = 20.0
    cpu_seconds: int = 18
    compile_seconds: float = 12.0
    memory: int = 2**30
    cache: int = 2**26
    connections: int = 256
    header_seconds: float = 10.0
    body_seconds: float = 10.0
    response_seconds: float = 90.0
