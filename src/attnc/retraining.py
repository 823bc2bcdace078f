"""Trained weights back into a network, with a fresh certificate."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.errors import BoundNotMet, InputError, ProgramError, positive_number, real_number
from attnc.ir.patching import unknown
from attnc.ir.program import Program
from attnc.ir.spec import check
from attnc.ir.weights import named_weights, with_named_weights
from attnc.numerics.arrays import real_array
from attnc.numerics.limits import OutOfTime, time_limit
from attnc.proving import observe, prove, prove_gradient, unproved
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.expression import Expression
from attnc.targets.target import Target
from attnc.wording import ceiling, largest_on

if TYPE_CHECKING:
    from attnc.network import Network

FOLDED = "stages."
"""The beginning of the names of weights of a folded module."""


def with_weights(network: Network, weights: Any, target: Target | None, eps: float | None, seconds: float) -> Network:
    """Return the network with other weights, certified anew. See `Network.with_weights`."""
    if eps is not None:
        positive_number("eps", eps)
    if real_number("seconds", seconds) < 0:
        raise InputError(f"seconds must be at least 0, found {seconds!r}")
    wanted = _target_of(network, target)
    derivation = network.known_derivation if wanted.text == network.expression else None
    goal = eps if eps is not None else network.eps if network.eps is not None else math.inf
    program = program_with(network.program, weights)
    changed = dataclasses.replace(
        network,
        program=program,
        expression=wanted.text,
        definitions=wanted.definitions,
        eps=None if goal == math.inf else goal,
        parameters={**network.parameters, "weights": "given"},
        command=None,
        also={},
        derivation=derivation,
        certificate=unproved(wanted, network.dtype, network.certificate.norm, 0.0),
    )
    changed = changed._with_certificate(dataclasses.replace(changed.certificate, truncation=changed.truncation))
    with np.errstate(all="ignore"), suppress(OutOfTime, ProgramError), time_limit(counted=seconds):
        changed = observe(changed, wanted, None)
        changed = prove(changed, wanted, None, seconds)
        if changed.certificate.bound is None and derivation is not None:
            # Training has changed more than the heads. A bound by enclosures alone is loose, but it is one.
            plain = prove(dataclasses.replace(changed, derivation=None), wanted, None, seconds)
            changed = changed._with_certificate(plain.certificate)
        if network.certificate.gradient is not None:
            changed, _ = prove_gradient(changed, wanted, network.certificate.gradient.eps, None, seconds)
    claim = changed.certificate
    error = claim.error if claim.is_of_table else claim.bound  # all points of a table are checked
    if error is not None and error <= goal:
        return changed
    what = f"{wanted.describe()} on {wanted.box}"
    seen = "" if claim.observed is None else f" The error seen at samples is {claim.observed:.3g}."
    if claim.bound is None or not math.isfinite(claim.bound):
        found = f"no bound of these weights was proved for {what}.{seen} Choose weights closer to those of compile"
        found += "." if target is not None else ", or pass target=, if the network was compiled from a Target."
    else:
        found = (
            f"these weights have the proven bound {ceiling(claim.bound)} for {what}{largest_on(claim, changed.box)}, "
            f"above eps={goal:g}.{seen} Train on, or ask for eps ≥ {ceiling(claim.bound, 2)}."
        )
    raise BoundNotMet(
        found, eps=goal, bound=claim.bound, worst_box=claim.worst_box(changed.box), network=changed, reach=claim.bound
    )


def _target_of(network: Network, target: Target | None) -> Target:
    if target is None:
        if network.expression is None:
            raise InputError(
                "the network has no expression, so its function is not known: pass target=, the Target that it was "
                "compiled from"
            )
        return ExpressionTarget(Expression.parse(network.expression), network.box)
    if not isinstance(target, Target):
        raise InputError(f"target must be a Target, as attnc.as_target returns it; found {type(target).__name__}")
    program = network.program
    if str(target.box) != str(network.box) or target.input_shapes != program.input_shapes:
        raise InputError(f"the target is on {target.box}, the network on {network.box}: they must be the same")
    if target.output_shape != program.output_shape:
        raise InputError(f"the target has outputs {target.output_shape}, the network {program.output_shape}")
    return target


def program_with(program: Program, weights: Any) -> Program:
    """Return the program with the weights of an unfolded module, or of its state dict.

    Raise InputError if names or shapes differ from those of the program, or a number is not finite.
    """
    if hasattr(weights, "state_dict"):
        weights = weights.state_dict()
    if not isinstance(weights, Mapping):
        raise InputError(
            f"weights are those of a torch module or a mapping from names to arrays; found {type(weights).__name__}"
        )
    own = named_weights(program)
    if weights and all(str(name).startswith((FOLDED, "readout.")) for name in weights) and not set(own) & set(weights):
        raise InputError(
            "this module is folded: it has products of the weights, from which they cannot be told. Train an unfolded "
            'one: net.to_torch(form="unfolded", trainable=True).'
        )
    for name in weights:
        if name not in own:
            raise InputError(f"weights: {unknown(name, own, 'weight')} The module must be one of this network.")
    found = {}
    for name, array in own.items():
        if name not in weights:
            raise InputError(f"the weights {name!r} are missing: the module must be an unfolded one of this network")
        given = _as_array(name, weights[name])
        if given.shape != array.shape:
            raise InputError(f"the weights {name!r} have shape {given.shape}, those of the network {array.shape}")
        with np.errstate(over="ignore"):
            given = given.astype(array.dtype)
        if not np.isfinite(given).all():
            raise InputError(f"the weights {name!r} are not all finite in {array.dtype}: training has diverged")
        found[name] = given
    return check(with_named_weights(program, found))


def _as_array(name: str, given: Any) -> np.ndarray:
    if hasattr(given, "detach"):  # a tensor; numpy has no bfloat16, and float64 holds every number of the smaller types
        given = given.detach().cpu().double().numpy()
    return real_array(f"the weights {name!r}", given)
