"""Activations as layers, by the keys and the compiled loops of converted models."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import inspect
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnc.constructions.fitting.gate import ALL_REALS
from attnc.converting.activations import TEXTS, Solved, proved_error, solve, stored_keys
from attnc.converting.activations import KnownActivation as Named
from attnc.converting.modules import KEY_TENSORS, AttentionActivation, AttentionSoftsign
from attnc.converting.rounding import rounding_of
from attnc.errors import FileError, InputError, positive_number, real_number
from attnc.exports.safe_files import MAX_JSON_BYTES, parse_json, require_format
from attnc.ir.soft_head import SoftHead
from attnc.numerics.bound import Term
from attnc.proofs.certificate import Certificate, Standing
from attnc.wording import NOT_CERTIFIED, ceiling

FORMAT = "attnc.activation/1"
NAMES = tuple(sorted(set(TEXTS) - {"exp"}))
"""The activations by name. The keys of exp are for x ≤ 0 alone."""
ACTIVATION_EPS = 1e-6
"""The default error: below the noise of a model in float32."""
PARAMETERS = ("alpha", "beta", "hi", "lo", "slope", "threshold")
"""The names of all parameters of activations."""
SAMPLE = np.linspace(-30.0, 30.0, 6001)
"""Points at which the error of trained keys is seen, before it is proved."""


class Activation(nn.Module):
    """An activation as a torch module of softmax attention over a few keys, with a proven error on the whole real line.

    It takes tensors of any shape, and computes in their dtype: float64 or float32, and half precision in float32,
    rounded once. On a CPU with numba, compiled loops compute it and its derivative.

    Parameters
    ----------
    name : str
        The activation, such as "gelu", "silu", "tanh" or "softplus". A wrong name gives the list of all.
    eps : float
        The largest error allowed, in exact arithmetic. The certificate states what rounding adds.
    parameters : mapping, optional
        The parameters of the activation by name, such as {"slope": 0.1} for "leaky_relu".
    dtype : str, optional
        "float64" to store the keys in float64 alone, and to compute in it whatever the dtype of the input. By default
        the error is proven for keys in float64 and for keys in float32.
    trainable : bool
        Whether the keys are parameters. Once they move, the certificate is "not certified".

    Attributes
    ----------
    certificate : Certificate
        The bound. It holds for every x of `domain`.
    domain : tuple of float
        The ends of the range of the claim: infinite, but for "softsign".

    Raises
    ------
    InputError
        If there is no such activation or parameter, or the error cannot be proved.

    Examples
    --------
    >>> import attnc.nn, torch
    >>> gelu = attnc.nn.Activation("gelu")
    >>> x = torch.linspace(-20, 20, 1001)
    >>> bool((gelu(x) - torch.nn.functional.gelu(x)).abs().max() < 1e-5)
    True
    >>> gelu.certificate.bound <= 1e-6
    True
    """

    def __init__(
        self,
        name: str,
        eps: float = ACTIVATION_EPS,
        *,
        parameters: Mapping[str, float] | None = None,
        dtype: str | torch.dtype | None = None,
        trainable: bool = False,
    ) -> None:
        super().__init__()
        if name not in NAMES:
            near = difflib.get_close_matches(str(name).lower(), NAMES, n=1, cutoff=0.5)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(f"there is no activation {name!r:.60}{meant} Choose one of {', '.join(NAMES)}.")
        stored = None if dtype is None else str(dtype).removeprefix("torch.")
        if stored not in (None, "float64", "float32"):
            raise InputError(f"dtype must be float64 or float32, found {stored}: half precision is computed in float32")
        self.eps, self._is_wide = positive_number("eps", eps), stored == "float64"
        dtypes = ("float64", "float32") if stored is None else (stored,)
        solved = solve(_named(name, parameters or {}), self.eps, dtypes)
        kind = AttentionActivation if solved.sign is None else AttentionSoftsign
        self.gate = kind(solved)
        if trainable:
            self.gate.train_keys()
        self._proven(solved)

    @property
    def domain(self) -> tuple[float, float]:
        """The ends of the range of the claim.

        Examples
        --------
        >>> import attnc.nn
        >>> attnc.nn.Activation("relu", eps=1e-2).domain
        (-inf, inf)
        """
        return self.gate.solved.domain

    @property
    def certificate(self) -> Certificate:
        """The certificate of the keys, or one without a bound and with the method "not certified" once they moved.

        Examples
        --------
        >>> import attnc.nn
        >>> attnc.nn.Activation("tanh", eps=1e-2).certificate.bound <= 1e-2
        True
        """
        if self._digest() == self._certified:
            return self._claim
        return Certificate(None, None, (), (), self._claim.dtype, NOT_CERTIFIED)

    def _proven(self, solved: Solved) -> None:
        """Take the error of these keys as proven."""
        added = [(dtype, rounding_of(solved, dtype)) for dtype in solved.dtypes]
        known = [f"{ceiling(K)}·(1 + |f(x)|) in {dtype}" for dtype, K in added if K is not None]
        rounding = f"; rounding adds at most {' and '.join(known)}" if known else ""
        self._claim = Certificate(
            solved.error,
            None,
            (Term("approximation", solved.error, f"|keys − {solved.activation}| for every x"),),
            (f"the bound is for exact arithmetic, with keys as {' and '.join(solved.dtypes)} store them{rounding}",),
            solved.dtypes[-1],
            solved.method,
        )
        self._certified = self._digest()

    def _digest(self) -> str:
        """Return the SHA-256 of all keys."""
        found = hashlib.sha256()
        for name, tensor in sorted((*self.gate.named_parameters(), *self.gate.named_buffers())):
            found.update(name.encode() + tensor.detach().cpu().numpy().tobytes())
        return found.hexdigest()

    def forward(self, x: Tensor) -> Tensor:
        """Compute the activation of every number of a tensor.

        Parameters
        ----------
        x : torch.Tensor
            A tensor of any shape.

        Returns
        -------
        torch.Tensor
            A tensor of the same shape and dtype.

        Raises
        ------
        InputError
            If x is not a tensor.

        Examples
        --------
        >>> import attnc.nn, torch
        >>> layer = attnc.nn.Activation("gelu")
        >>> layer(torch.tensor([0.0, 10.0])).round(decimals=4).tolist()
        [0.0, 10.0]
        """
        if not isinstance(x, Tensor):
            raise InputError(f"an activation takes a torch tensor, found {type(x).__name__}")
        if self._is_wide and x.is_floating_point():
            return self.gate(x.double()).to(x.dtype)
        return self.gate(x)

    def recertify(self, *, eps: float | None = None) -> Certificate:
        """Prove a bound for the keys as they are now, and return the new certificate.

        Parameters
        ----------
        eps : float, optional
            The largest bound allowed. By default any is.

        Returns
        -------
        Certificate
            The certificate, which the layer has from now on.

        Raises
        ------
        InputError
            If no bound can be proved, or it is above eps. The layer is then unchanged.

        Examples
        --------
        >>> import attnc.nn, torch
        >>> layer = attnc.nn.Activation("tanh", trainable=True)
        >>> with torch.no_grad():
        ...     layer.gate.values *= 1.01
        >>> layer.certificate.method
        'not certified'
        >>> round(layer.recertify().bound, 3)
        0.01
        """
        solved = self.gate.solved
        if solved.sign is not None or solved.is_product:
            raise InputError(
                f"{solved.activation} has two layers or a product, for which trained keys have no proof yet"
            )
        numbers = [getattr(self.gate, name).detach().cpu().double().numpy() for name in KEY_TENSORS]
        if not all(np.isfinite(each).all() for each in numbers):
            raise InputError("the keys are not all finite: training has diverged")
        slopes, offsets, values, carried = numbers
        keys = SoftHead.of_one_variable(slopes, offsets, values, carried if carried.any() else None)
        errors = list[float]()
        for dtype in solved.dtypes:
            stored = stored_keys(keys, dtype)
            of_original = stored_keys(solved.keys, dtype)
            seen = float(np.abs(stored(SAMPLE[:, None]) - of_original(SAMPLE[:, None])).max())
            errors.append(
                proved_error(stored, solved.activation.expression(dtype), ALL_REALS, seen, max(seen, self.eps))
            )
        error = max(errors)
        if not math.isfinite(error):
            raise InputError(
                f"no bound of these keys was proved for {solved.activation}: their error grows with |x|. From "
                f"{SAMPLE[0]:g} to {SAMPLE[-1]:g} it is {seen:.3g}. Keep the first and the last key as they were."
            )
        if eps is not None and error > positive_number("eps", eps):
            raise InputError(f"these keys have the proven bound {ceiling(error)}, above eps={eps:g}. Train on.")
        self.gate.solved = dataclasses.replace(solved, keys=keys, error=error, method="proof")
        self._proven(self.gate.solved)
        return self._claim

    # --- state --------------------------------------------------------------------------------------------------------

    def get_extra_state(self) -> Tensor:
        """Return the claim about the keys as one tensor of bytes.

        Returns
        -------
        Tensor of uint8
            The bytes of a JSON object.

        Examples
        --------
        >>> import attnc.nn
        >>> attnc.nn.Activation("relu", eps=1e-2).get_extra_state().dtype
        torch.uint8
        """
        claim, activation = self._claim, self.gate.solved.activation
        facts = {
            "format": FORMAT,
            "activation": activation.name,
            "parameters": dict(activation.parameters),
            "bound": claim.bound,
            "method": claim.method,
            "dtype": claim.dtype,
            "assumptions": list(claim.assumptions),
            "keys_sha256": self._certified,
        }
        return torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Take the claim of a state dict. It is one that a file states, unless it is the layer's own.

        Parameters
        ----------
        state : Tensor of uint8
            The claim, as `get_extra_state` returns it.

        Raises
        ------
        FileError
            If it is no such tensor, or has another format.
        InputError
            If it is the claim about another activation.

        Examples
        --------
        >>> import attnc.nn
        >>> layer = attnc.nn.Activation("relu", eps=1e-2)
        >>> layer.set_extra_state(layer.get_extra_state())  # as load_state_dict does
        """
        if not isinstance(state, Tensor) or state.dtype != torch.uint8 or state.numel() > MAX_JSON_BYTES:
            raise FileError("the extra state of the activation is not a tensor of bytes, as attnc.nn writes it")
        if torch.equal(state.cpu(), self.get_extra_state()):
            return
        facts = parse_json(state.cpu().numpy().tobytes(), "the extra state of the activation")
        require_format(facts.get("format"), FORMAT, "cannot load the extra state of the activation: it")
        own = self.gate.solved.activation
        if (facts.get("activation"), facts.get("parameters")) != (own.name, dict(own.parameters)):
            raise InputError(f"the state is that of {facts.get('activation')!r:.60}, and this layer is {own}")
        bound, digest, assumptions = facts.get("bound"), facts.get("keys_sha256"), facts.get("assumptions")
        is_text = isinstance(digest, str) and isinstance(assumptions, list)
        if not (isinstance(bound, float) and bound >= 0 and is_text):
            raise FileError("the extra state of the activation does not state a bound, assumptions and a hash")
        self._claim = Certificate(
            bound,
            None,
            (Term("approximation", bound, "as a state dict states it"),),
            tuple(str(each) for each in assumptions or ()),
            str(facts.get("dtype")),
            str(facts.get("method")),
            standing=Standing.STATED,
        )
        self._certified = str(digest)

    def __repr__(self) -> str:
        claim = self.certificate
        bound = NOT_CERTIFIED if claim.bound is None else f"error ≤ {ceiling(claim.bound)}"
        return f"Activation({self.gate.solved.activation}, {self.gate.solved.num_anchors} keys, {bound})"


def _named(name: str, parameters: Mapping[str, float]) -> Named:
    """Return the activation. Raise InputError if it has other parameters."""
    given = {each: real_number(f"the parameter {each}", value) for each, value in parameters.items()}
    made = inspect.signature(TEXTS[name]).parameters
    known = {} if name == "selu" else {each: made[each] for each in made if each in PARAMETERS}
    needed = [each for each, parameter in known.items() if parameter.default is parameter.empty]
    for each in (*given, *needed):
        if each not in known or each not in given:
            has = f"takes {', '.join(known)}" if known else "has no parameters"
            example = ", ".join(f'"{other}": …' for other in known)
            raise InputError(
                f"{name} {has}" + (f": pass parameters={{{example}}}" if known else "") + f"; found {given or 'none'}"
            )
    return Named(name, tuple((each, given[each]) for each in known if each in given))
