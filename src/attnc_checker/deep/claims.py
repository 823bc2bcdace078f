"""The claims of a staged proof: one for every channel that attention writes, and outputs as combinations of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, get_type_hints

from attnc_checker.cells import ENCLOSURE, MAX_LEVEL, TAYLOR, Ends, Leaf, read_leaves
from attnc_checker.files import BadFile, Object, Refused, field, require, typed

MAX_STAGES = 1000
"""Largest number of stages. The corpus has up to 64 of them, which take 50 ms each. So 1000 take about a minute."""
ALIKE = ("function", "interval", "held", "bound")
"""The fields that a stage copies from the earlier stage in its field `like`."""


@dataclass(frozen=True)
class StageClaim:
    """Attention writes carrier·function(t) into the channel, at t = argument, in the names of earlier stages.

    For t in `interval` its heads are within `bound` of the function, which is constant beyond the ends `held`. A stage
    that is `like` an earlier one has the same heads, as functions of t, and needs no leaves. The fields have the same
    names as in the certificate.
    """

    stage: str  # the layer
    channel: str
    name: str
    argument: str
    argument_as: str | None  # an equal expression in the variables
    carrier: str | None
    carrier_as: str | None
    carrier_size: float | None  # the unit of its bounds, if the carrier is not larger; any number is sound
    function: str
    interval: Ends
    held: Ends | None
    bound: float
    like: str | None
    noise: float | None  # a further error of the channel, from the machine that computes the program; it is added
    leaves: tuple[Leaf, ...]
    leaf_bounds: tuple[float, ...]  # one for each leaf; `bound` where the certificate has none
    leaf_middles: tuple[
        float, ...
    ]  # heads − function is within bound − |middle| of the middle of a leaf; () if all are 0

    variables, truncation, beyond = ("t",), 0.0, None

    @property
    def title(self) -> str:
        return f"stage {self.name}, {self.channel!r:.60}: "

    @property
    def ends(self) -> tuple[Ends]:
        return (self.interval,)

    @property
    def unit(self) -> str:
        return "1" if self.carrier is None else self.carrier


class Stages(NamedTuple):
    stages: tuple[StageClaim, ...]
    outputs: tuple[str, ...]  # as combinations of stages
    axes: tuple[int, ...]  # the axes along which the box is halved in turn; any axes are sound


def read_stages(data: Object, variables: tuple[str, ...]) -> Stages:
    entries, axes = field(data, "stages", list), read_axes(data, variables)
    require(len(entries) <= MAX_STAGES, f"the certificate has more than {MAX_STAGES} stages", BadFile)
    stages: dict[str, StageClaim] = {}
    for i, entry in enumerate(entries):
        stage = _stage(typed(entry, dict, f"stages[{i}]"), f"stages[{i}].", stages)
        is_new = stage.name not in (*variables, *stages)
        require(is_new, f"two stages or variables are called {stage.name!r:.40}")
        stages[stage.name] = stage
    return Stages(tuple(stages.values()), field(data, "outputs", tuple[str, ...]), axes)


def read_axes(data: Object, variables: tuple[str, ...]) -> tuple[int, ...]:
    """Read the axes along which the box is halved in turn."""
    axes = field(data, "axes", tuple[int, ...] | None) or ()
    if len(axes) > MAX_LEVEL or not all(0 <= i < len(variables) for i in axes):
        raise BadFile(f"the certificate: axes is {axes!r:.40}, not at most {MAX_LEVEL} numbers of variables")
    return axes


def read_middles(entry: Object, leaves: tuple[Leaf, ...], where: str) -> tuple[float, ...]:
    """Read the middles of the errors on leaves. Only a Taylor leaf may have one. One above its bound is not proved."""
    middles = field(entry, "leaf_middles", tuple[float, ...] | None, where) or ()
    require(
        len(middles) in (0, len(leaves)), f"{where}leaf_middles has {len(middles)} entries for {len(leaves)} leaves"
    )
    for leaf, middle in zip(leaves, middles, strict=False):
        is_known = math.isfinite(middle) and (middle == 0 or leaf.kind == TAYLOR)
        require(is_known, f"an entry of {where}leaf_middles is not finite, or not that of a Taylor leaf")
    return middles


def _stage(entry: Object, where: str, known: dict[str, StageClaim]) -> StageClaim:
    """Read one stage. `known` has the stages before it."""
    fields: dict[str, Any]
    if (like := field(entry, "like", str | None, where)) is None:
        leaves = read_leaves(field(entry, "leaves", list, where), 1)
        bounds = field(entry, "leaf_bounds", tuple[float, ...] | None, where)
        if bounds is None:
            bounds = (field(entry, "bound", float, where),) * len(leaves)
        fields = {"leaves": leaves, "leaf_bounds": bounds, "leaf_middles": read_middles(entry, leaves, where)}
    elif like in known and known[like].like is None:
        fields = {
            "leaves": (),
            "leaf_bounds": (),
            "leaf_middles": (),
            **{name: getattr(known[like], name) for name in ALIKE},
        }
    else:
        raise Refused(f"a stage claims to be like {like!r:.40}, which is not a stage before it")
    kinds = {name: kind for name, kind in get_type_hints(StageClaim).items() if name not in fields}
    claim = StageClaim(**fields, **{name: field(entry, name, kind, where) for name, kind in kinds.items()})
    for low, high in (claim.interval, claim.held or claim.interval):
        require(low < high, f"the interval [{low}, {high}] of {where[:-1]} is empty or reversed")
    name, leaves, bounds = f"stage {claim.name!r:.40}", claim.leaves, claim.leaf_bounds
    require(len(bounds) == len(leaves), f"{name} has {len(leaves)} leaves and {len(bounds)} bounds")
    require(claim.noise is None or claim.noise >= 0, f"the noise of {name} is negative")
    in_order = all(0 <= x <= claim.bound for x in (claim.bound, *bounds))
    require(in_order, f"a bound of {name} is negative, or that of a leaf above that of the stage")
    is_one_stage = all(leaf.kind != ENCLOSURE for leaf in leaves)
    require(is_one_stage, f"{name} has enclosure leaves, which are for whole networks")
    return claim
