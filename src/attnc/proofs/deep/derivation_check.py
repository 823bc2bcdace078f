"""Whether a derivation is one of the target: its parts, put together as it says, are the expression.

Who proves the heads of a program against a derivation proves that the program computes what the derivation says. This
is the other half, that it says what was asked for; without it the proof would be of another function.
"""

from __future__ import annotations

import dataclasses

from attnc.errors import ProgramError
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.canonical import equivalent
from attnc.targets.parts.part import Combination, Derivation, HeadClaim, Multiply, Part, Source, T, Unary, operands_of
from attnc.targets.parts.part_ranges import PartRanges


def check_derivation(derivation: Derivation, target: ExpressionTarget, ranges: PartRanges) -> None:
    """ProgramError unless the outputs are the target's, and what is claimed of a head is the part it stands for."""
    wanted = target.expression.outputs
    if len(derivation.outputs) != len(wanted):
        raise ProgramError(f"the derivation has {len(derivation.outputs)} outputs, the target {len(wanted)}")
    claims = derivation.heads.values()
    parts = [part for claim in claims for part in (claim.part, claim.argument, claim.carrier) if part is not None]
    for part in _reachable([*derivation.outputs, *parts]):
        if isinstance(part, Source) and not 0 <= part.index < target.box.d:
            raise ProgramError(f"the derivation reads input {part.index}, the target has {target.box.d}")
        if isinstance(part, Combination) and part.known is not None:
            _check_known(part, part.known, ranges)
    for channel, claim in derivation.heads.items():
        if not _is_of_its_part(claim):
            raise ProgramError(
                f"the derivation says that {channel} stands for {ranges.describe(claim.part)}, but claims another "
                f"function of its head, of {ranges.describe(claim.argument)}"
            )
    if not equivalent([ranges.tree(part) for part in derivation.outputs], wanted):
        raise ProgramError(
            f"the derivation is not known to be one of {target.describe()}: its outputs are "
            f"{', '.join(map(ranges.describe, derivation.outputs))}"
        )


def _reachable(parts: list[Part]) -> list[Part]:
    """All parts that these are made of, and those that say what is known of them."""
    found: dict[int, Part] = {}
    pending = list(parts)
    while pending:
        part = pending.pop()
        if id(part) not in found:
            found[id(part)] = part
            pending.extend(operands_of(part))
            if isinstance(part, Combination) and part.known is not None:
                pending.append(part.known)
    return list(found.values())


def _check_known(part: Combination, known: Unary, ranges: PartRanges) -> None:
    """What is said of a combination follows from its terms."""
    terms, said = ranges.tree(dataclasses.replace(part, known=None)), ranges.tree(known)
    if not equivalent([terms], [said]):
        raise ProgramError(f"{ranges.describe(part)} is not known to be the combination that the derivation says it is")


def _is_of_its_part(claim: HeadClaim) -> bool:
    """carrier·tree(argument) is the part, by the way it is written."""
    part = claim.part
    if isinstance(part, Unary):
        return claim.carrier is None and claim.argument is part.base and claim.tree == part.tree
    if not isinstance(part, Multiply):
        return False
    for factor, carrier in ((part.left, part.right), (part.right, part.left)):
        if claim.carrier is carrier:
            if claim.argument is factor and claim.tree == T:
                return True
            if isinstance(factor, Unary) and claim.argument is factor.base and claim.tree == factor.tree:
                return True
    return False
