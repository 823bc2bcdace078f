"""The answer of a command."""

from __future__ import annotations

import json
from typing import NamedTuple


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


def is_clean(ran: Ran) -> bool:
    return "Traceback" not in ran.err + ran.out
