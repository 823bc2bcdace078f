"""Deep programs, channel by channel: an entry that attention wrote is an input of later stages, once it is proved."""

from __future__ import annotations

import re

from attnc_checker.files import Refused
from attnc_checker.forms import Form, unit
from attnc_checker.network import Reduction, Stage

TOKEN = re.compile("[0-9]{0,7}")


class Channels(Reduction):
    """An entry that attention wrote is an input, named by its place (layer, token, feature), once its `reach` is set.

    The walk through stages begins with the rounding of x, which is not counted here.
    """

    unproved = ", and no stage before has proved it"

    def stage_at(self, layer: str, channel: str) -> tuple[tuple[int, int, int], Stage]:
        """The place of a channel and the stage that writes it; a channel of a later token is "channel@token"."""
        found = [i for i, name in enumerate(self.program.names) if name == layer]
        name, _, token = channel.partition("@")
        tokens = self.main.shapes[found[0] + 1][0] if len(found) == 1 else 0
        if (
            not tokens
            or name not in self.program.channels[found[0]]
            or not TOKEN.fullmatch(token)
            or int(token or 0) >= tokens
        ):
            raise Refused(f"there is no channel {channel!r:.60} of a layer {layer!r:.60}")
        place = (found[0] + 1, int(token or 0), self.program.channels[found[0]].index(name))
        written = self._written(*place)
        if written is None:
            raise Refused(f"no head writes into {channel!r:.60}")
        return place, self._stage([written])

    def _input(self, x: int) -> Form:
        return unit(x)

    def _read_later(self, place: tuple[int, int, int], written: Form) -> Form:
        return unit(place) if place in self.reach else written
