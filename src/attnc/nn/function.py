"""Layers that compute a compiled network: functions and tables."""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.func import functional_call

from attnc.compiling import compile
from attnc.constructions.construction import DEFAULT_EPS
from attnc.engines.numpy_engine import NumpyEngine, has_numba
from attnc.engines.torch_engine import is_observed
from attnc.engines.torch_rows import is_plain
from attnc.errors import FileError, InputError
from attnc.exports.directory import network_files
from attnc.exports.safe_files import MAX_TENSOR_BYTES, pack_tensors
from attnc.loading import load
from attnc.network import BEYOND, Network
from attnc.nn.values import HeldValues
from attnc.planning import DEFAULT_SECONDS
from attnc.proofs.certificate import Certificate, Standing
from attnc.proofs.prover import PROOF_SECONDS
from attnc.targets.box import BoxLike
from attnc.targets.sources import as_target
from attnc.targets.table import TableTarget
from attnc.targets.target import Target
from attnc.wording import NOT_CERTIFIED, ceiling, function_of, plural

MOST_STATE_BYTES = 2 * MAX_TENSOR_BYTES
"""The largest saved network in a state dict: its weights, and as much again for its certificates."""


class NetworkLayer(nn.Module):
    """A layer that computes a compiled network, with its certificate. `Function` and `Table` are such layers."""

    def __init__(self, network: Network, outside: str, trainable: bool) -> None:
        super().__init__()
        if outside not in BEYOND:
            raise InputError(f"outside must be one of {', '.join(BEYOND)}; found {outside!r}")
        if len(network.program.input_shapes) != 1 or len(network.program.input_shapes[0]) != 1:
            raise InputError(
                f"a layer takes points, and this network takes sequences {network.program.input_shapes}: use "
                "net.to_torch()"
            )
        self.outside, self._held = outside, None if not trainable else HeldValues.of(network.program)
        self._take(network)
        self._first = dataclasses.replace(network)
        if self._held is not None:
            values = torch.tensor(self._held.read(network.program))
            if not len(values):
                raise InputError(
                    f"trainable: no value of {function_of(network)} is one stored number, as in networks whose values "
                    'all carry the input. Train net.to_torch(form="unfolded", trainable=True) instead.'
                )
            self.values = nn.Parameter(values)

    # --- the network --------------------------------------------------------------------------------------------------

    def _take(self, network: Network) -> None:
        """Compute this network from now on."""
        self._network = dataclasses.replace(network)  # without its engines, which take memory
        self._engine: NumpyEngine | None = None
        module = network.to_torch(outside=self.outside)
        for part in module.modules():  # the state dict has the network itself, not what is made of it
            part._non_persistent_buffers_set.update(part._buffers)
        if "_module" in self._modules:
            module.to(self._device)
        self._module = module

    @property
    def _device(self) -> torch.device:
        return next(self._module.buffers()).device

    @property
    def network(self) -> Network:
        """The certified network. It does not have trained values before `recertify`.

        Examples
        --------
        >>> import attnc.nn
        >>> attnc.nn.Function("x**2", {"x": (0, 1)}, 0.1).network.variables
        ('x',)
        """
        return self._network

    @property
    def certificate(self) -> Certificate:
        """The certificate of the network, or one without a bound and with the method "not certified" after training.

        Its `standing` is "stated" if a state dict was loaded: anybody may have written it. `recertify` proves it again.

        Examples
        --------
        >>> import attnc.nn
        >>> attnc.nn.Function("x**2", {"x": (0, 1)}, 0.1).certificate.bound <= 0.1
        True
        """
        claim = self._network.certificate
        if not self._has_moved():
            return claim
        return Certificate(None, None, (), (), claim.dtype, NOT_CERTIFIED, claim.norm)

    def _has_moved(self) -> bool:
        if self._held is None:
            return False
        return not np.array_equal(self._held.read(self._network.program), self.values.detach().cpu().numpy())

    def recertify(
        self, target: Target | str | None = None, *, eps: float | None = None, seconds: float = PROOF_SECONDS
    ) -> Certificate:
        """Prove a bound for the values as they are now, and return the new certificate.

        Parameters
        ----------
        target : Target or str, optional
            The function of the claim, on the same box. By default it is that of the layer.
        eps : float, optional
            The largest bound allowed. By default any is.
        seconds : float
            Time limit of the proof.

        Returns
        -------
        Certificate
            The certificate, which the layer has from now on.

        Raises
        ------
        BoundNotMet
            If the bound is above eps, or none can be proved. The layer is then unchanged.
        InputError
            If a value is not finite, or the target does not fit.

        Examples
        --------
        >>> import attnc.nn, torch
        >>> layer = attnc.nn.Function("cos(3*x)", {"x": (-1, 1)}, 1e-5, trainable=True)
        >>> with torch.no_grad():
        ...     layer.values *= 1.25
        >>> layer.certificate.method
        'not certified'
        >>> layer.recertify("1.25*cos(3*x)").bound < 1.3e-5
        True
        """
        # Derivatives are proved again if the first certificate has a bound of them. A later one may have none.
        stated = self._network.expression
        network = dataclasses.replace(self._first, expression=stated, derivation=self._network.derivation, eps=None)
        program = network.program
        weights = self._held.write(program, self.values.detach().cpu().numpy()) if self._held is not None else None
        wanted = as_target(target, network.box.as_dict()) if isinstance(target, str) else target or self._own_target()
        trained = network.with_weights(
            network.to_torch(form="unfolded") if weights is None else weights, target=wanted, eps=eps, seconds=seconds
        )
        self._take(dataclasses.replace(trained, eps=eps if eps is not None else self._network.eps))
        return self._network.certificate

    def _own_target(self) -> Target | None:
        """Return the target if the network does not state it as an expression."""
        return None

    # --- computing ----------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Tensor) -> Tensor:
        """Compute the function at points.

        Parameters
        ----------
        *inputs : torch.Tensor
            One tensor (…, d), or d tensors of one shape. They are computed in the dtype of the network.

        Returns
        -------
        torch.Tensor
            The values, in the dtype of the input, with the shape of the points.

        Examples
        --------
        >>> import attnc.nn, torch
        >>> layer = attnc.nn.Function("x**2", {"x": (0, 1)}, 0.1)
        >>> layer(torch.rand(5, 1)).shape
        torch.Size([5, 1])
        """
        points, shape, dtype = self._points(inputs)
        kind = points.device.type
        if torch.is_autocast_enabled(kind):  # products in half precision are outside of the certificate
            with torch.autocast(kind, enabled=False):
                out = self._outputs(points)
        else:
            out = self._outputs(points)
        return out.reshape((*shape, *self._network.program.output_shape)).to(dtype)

    def _points(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, tuple[int, ...], torch.dtype]:
        """Return the inputs as points (batch, d), their shape without the last axis, and the dtype of the result."""
        d, names = self._network.box.d, ", ".join(self._network.variables)
        for given in inputs:
            if not isinstance(given, Tensor) or given.is_complex():
                raise InputError(f"the layer takes real torch tensors; found {getattr(given, 'dtype', type(given))}")
        if len(inputs) == d:  # one tensor per variable
            columns = torch.broadcast_tensors(*inputs)  # type: ignore[no-untyped-call]
            together = columns[0].unsqueeze(-1) if d == 1 else torch.stack(columns, dim=-1)
        elif len(inputs) == 1 and inputs[0].ndim and inputs[0].shape[-1] == d:
            (together,) = inputs
        else:
            found = ", ".join(str(tuple(given.shape)) for given in inputs) or "none"
            raise InputError(
                f"the layer has the variables {names}: pass one tensor (…, {d}) with these columns, or one tensor for "
                f"each; found {found}"
            )
        dtype = together.dtype if together.is_floating_point() else self._module.dtype
        return together.reshape(math.prod(together.shape[:-1]), d), tuple(together.shape[:-1]), dtype

    def _outputs(self, points: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and self._has_quick(points):
            return self._module.within_limits((points,), self._quick)
        if self._held is None:
            return self._module(points)
        return functional_call(self._module, self._held.folded(self._module, self.values), (points,))

    def _has_quick(self, points: Tensor) -> bool:
        """Return whether the compiled loops of the network compute these points: on a CPU, with untrained values."""
        if not has_numba() or is_observed() or not is_plain(points.detach().mT) or self._device.type != "cpu":
            return False
        if self._engine is None:
            self._engine = self._network._engine
            self._network = dataclasses.replace(self._network)
        is_trained = self._held is not None and torch.is_grad_enabled() and self.values.requires_grad
        return self._engine.has_loops and not is_trained and not self._has_moved()

    def _quick(self, u: Tensor) -> Tensor:
        return _Compiled.apply(u, self)  # type: ignore[no-untyped-call]

    def _compiled_outputs(self, u: Tensor) -> Tensor:
        assert self._engine is not None
        out = self._engine(u.detach().numpy(), is_compiled=True, threads=torch.get_num_threads())
        return torch.from_numpy(out.reshape(len(out), math.prod(out.shape[1:])))

    def _compiled_gradient(self, u: Tensor) -> Tensor:
        """Return the derivatives (batch, outputs, d). Grids are factorised if no bound of derivatives is claimed."""
        assert self._engine is not None
        is_claimed = self._network.certificate.gradient_bound is not None
        threads = torch.get_num_threads()
        found = self._engine.gradient(u.numpy(), is_compiled=True, threads=threads, with_grids=not is_claimed)
        return torch.from_numpy(found)

    def _dense_outputs(self, u: Tensor) -> Tensor:
        return self._module._outputs(u)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NetworkLayer:
        """Move the layer to a device. It keeps its dtype, in which its certificate holds, when a model is cast."""
        dtype = self._module.dtype

        def moved(tensor: Tensor) -> Tensor:
            try:
                found = fn(tensor)
            except TypeError as error:
                if dtype == torch.float64 and "float64" in str(error):
                    raise InputError(
                        f'this device has no float64, in which the layer is certified: make it with dtype="float32". '
                        f"The device says: {error}"
                    ) from None
                raise
            if tensor.is_floating_point() and found.dtype != tensor.dtype:
                return tensor.to(found.device)
            return found

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_engine": None}  # compiled functions cannot be copied

    # --- state --------------------------------------------------------------------------------------------------------

    def get_extra_state(self) -> Tensor:
        """Return the files of the saved network as one tensor of bytes: its weights and its certificate.

        Returns
        -------
        Tensor of uint8
            The bytes of the files.

        Examples
        --------
        >>> import attnc.nn
        >>> attnc.nn.Function("x**2", {"x": (0, 1)}, 0.1).get_extra_state().dtype
        torch.uint8
        """
        files = network_files(*self._network._saved(), card="")
        stored = {name: np.frombuffer(content, np.uint8) for name, content in files.items()}
        return torch.frombuffer(bytearray(pack_tensors(stored)), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Take the network of a state dict. Its certificate is one that a file states, unless it is the layer's own.

        Parameters
        ----------
        state : Tensor of uint8
            The network, as `get_extra_state` returns it.

        Raises
        ------
        InputError
            If the network has other variables, outputs or trainable values than the layer.

        Examples
        --------
        >>> import attnc.nn
        >>> layer = attnc.nn.Function("x**2", {"x": (0, 1)}, 0.1)
        >>> layer.set_extra_state(layer.get_extra_state())  # as load_state_dict does
        """
        if isinstance(state, Tensor) and torch.equal(state.cpu(), self.get_extra_state()):
            return
        network = _network_of(state)
        own = self._network
        if network.variables != own.variables or network.program.output_shape != own.program.output_shape:
            raise InputError(
                f"the state is that of a layer of {', '.join(network.variables)} with outputs of shape "
                f"{network.program.output_shape}, and this one has {', '.join(own.variables)} and "
                f"{own.program.output_shape}"
            )
        if self._held is not None:
            held = HeldValues.of(network.program)
            if (count := len(held.read(network.program))) != len(self.values):
                raise InputError(
                    f"the state has {count} trainable values, and this layer {len(self.values)}: make the layer with "
                    "the arguments of the one that was saved"
                )
            self._held = held
        self._take(network)
        self._first = dataclasses.replace(network)

    def __repr__(self) -> str:
        claim = self.certificate
        bound = NOT_CERTIFIED if claim.bound is None else f"error ≤ {ceiling(claim.bound)}"
        if claim.bound is None and claim.observed is not None:
            bound = f"error {ceiling(claim.observed)} seen, nothing proven"
        if claim.gradient_bound is not None:
            bound += f", gradient error ≤ {ceiling(claim.gradient_bound)}"
        if claim.bound is not None and claim.standing is Standing.STATED:
            bound += " (stated by a state dict)"
        keys = plural(self._network.num_anchors, "key")
        what = f"{function_of(self._network)[:80]} on {self._network.box}"
        return f"{type(self).__name__}({what}; {keys}, {bound}, {claim.dtype})"


class _Compiled(torch.autograd.Function):
    """The outputs and their derivatives by compiled loops. A second derivative is that of the torch module."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, layer: NetworkLayer) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(u)
        return layer._compiled_outputs(u)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (u,), (grad,) = ctx.saved_tensors, grads
        if torch.is_grad_enabled() or is_observed():
            with torch.enable_grad():
                given = u if u.requires_grad else u.detach().requires_grad_()
                (found,) = torch.autograd.grad(ctx.layer._dense_outputs(given), given, grad, create_graph=True)
            return found, None
        return torch.einsum("bo,boi->bi", grad, ctx.layer._compiled_gradient(u.detach())), None


def _network_of(state: Any) -> Network:
    """Return the network of an extra state. Raise FileError if it is not one."""
    if not isinstance(state, Tensor) or state.dtype != torch.uint8 or state.ndim != 1:
        raise FileError("the extra state of the layer is not a tensor of bytes, as attnc.nn writes it")
    if state.numel() > MOST_STATE_BYTES:
        raise FileError(f"the extra state of the layer has {state.numel():,} bytes, more than {MOST_STATE_BYTES:,}")
    try:
        files = safetensors.numpy.load(state.cpu().numpy().tobytes())
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise FileError(f"the extra state of the layer cannot be read: {error}") from None
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            if os.path.basename(name) != name or content.dtype != np.uint8:
                raise FileError(
                    f"the extra state of the layer has the entry {name!r:.80}, which is not a file of a network"
                )
            with open(os.path.join(folder, name), "wb") as file:
                file.write(content.tobytes())
        return load(folder)


class Function(NetworkLayer):
    """A function as a torch module of affine maps and softmax attention, with a proven error.

    It takes one tensor (…, d) with a column per variable, or d tensors that are broadcast. A function of one variable
    takes one tensor, and is computed at each of its numbers. The result has the shape without the columns; several
    outputs are a last axis. It has the dtype of the input, and is computed in `dtype`, in which the certificate holds.
    Half precision is rounded once at the end.

    Parameters
    ----------
    source : str, Target, callable or Network
        Anything that `attnc.compile` takes, or a network that was compiled before.
    box : mapping or sequence, optional
        The range of every variable. A Target and a network have their own.
    eps : float, optional
        The largest error allowed anywhere on the box: by default 0.01.
    gradient_eps : float, optional
        The largest error allowed of every derivative. By default nothing is proved about them.
    dtype : str
        The arithmetic, "float64" or "float32". Devices without float64 need "float32".
    outside : str
        For points outside the box: "clamp" to move them to it, "nan" to return NaN, or "allow" to compute there, where
        nothing is claimed.
    trainable : bool
        Whether the values of the keys are a parameter, `values`. Once they move, the certificate is "not certified".
    construction : str
        As for `attnc.compile`.
    seconds : float
        Time limit of the compilation.

    Attributes
    ----------
    certificate : Certificate
        The bound and its proof.
    network : Network
        The certified network: `net.gradient`, `net.save` and all the rest.
    values : torch.nn.Parameter
        The values of the keys, if they are trainable.

    Raises
    ------
    InputError, ExpressionError, BoundNotMet
        As for `attnc.compile`.

    Examples
    --------
    >>> import attnc.nn, torch
    >>> layer = attnc.nn.Function("cos(3*x)", {"x": (-1, 1)}, 1e-5)
    >>> x = torch.linspace(-1, 1, 5)
    >>> bool((layer(x) - torch.cos(3 * x)).abs().max() <= layer.certificate.bound + 1e-6)
    True
    >>> plane = attnc.nn.Function("exp(-x)*sin(3*y)", {"x": (0, 1), "y": (-1, 1)}, 1e-5)
    >>> plane(torch.zeros(4, 7, 2)).shape, plane(torch.zeros(4, 1), torch.zeros(7)).shape
    (torch.Size([4, 7]), torch.Size([4, 7]))
    """

    def __init__(
        self,
        source: str | Target | Network | Callable[[np.ndarray], Any],
        box: BoxLike | None = None,
        eps: float | None = None,
        *,
        gradient_eps: float | None = None,
        dtype: str | torch.dtype = "float64",
        outside: str = "clamp",
        trainable: bool = False,
        construction: str = "auto",
        seconds: float = DEFAULT_SECONDS,
    ) -> None:
        if isinstance(source, Network):
            if box is not None or eps is not None or gradient_eps is not None:
                raise InputError("a network has a box and an eps of its own: leave out box, eps and gradient_eps")
            network = source
        else:
            network = _compiled(source, box, eps, gradient_eps, dtype, construction=construction, seconds=seconds)
        super().__init__(network, outside, trainable)


class Table(NetworkLayer):
    """A table of points and values as a torch module of affine maps and softmax attention.

    It has the values at the points, with a proven error. Between the points it is a smooth average of the values of
    keys near by, and nothing is proved. It takes and returns tensors as `Function` does.

    Parameters
    ----------
    points : array (N,) or (N, d)
        The points, of at most three coordinates: arrays or tensors.
    values : array (N,) or (N, k)
        The values at the points.
    eps : float, optional
        The largest error allowed at the points: by default 0.01.
    names : sequence of str, optional
        The names of the coordinates: x0, x1, … by default.
    dtype, outside, trainable, seconds
        As for `Function`.

    Attributes
    ----------
    certificate, network, values
        As for `Function`.

    Raises
    ------
    InputError
        If the points and values do not fit each other, are not finite, or state two values for one point.
    BoundNotMet
        If the error cannot be brought to eps.

    Examples
    --------
    >>> import attnc.nn, torch
    >>> table = attnc.nn.Table([0.0, 0.5, 1.0], [1.0, 0.0, 2.0], 1e-6)
    >>> table(torch.tensor([0.0, 0.5, 1.0])).round(decimals=4).tolist()
    [1.0, 0.0, 2.0]
    """

    def __init__(
        self,
        points: Any,
        values: Any,
        eps: float | None = None,
        *,
        names: Any = None,
        dtype: str | torch.dtype = "float64",
        outside: str = "clamp",
        trainable: bool = False,
        seconds: float = DEFAULT_SECONDS,
    ) -> None:
        self._table = TableTarget(_as_numpy(points), _as_numpy(values), names)
        network = _compiled(self._table, None, eps, None, dtype, seconds=seconds)
        super().__init__(network, outside, trainable)

    def _own_target(self) -> Target | None:
        stated = self._network.certificate.at_points
        if stated is not None and stated.table:  # that of a state dict may be another table
            table = np.array(stated.table)
            d = self._network.box.d
            values = table[:, d:] if self._network.program.output_shape else table[:, d]
            return TableTarget(table[:, :d], values, self._network.variables)
        return self._table


def _as_numpy(given: Any) -> Any:
    return given.detach().cpu().numpy() if isinstance(given, Tensor) else given


def _compiled(
    source: Any,
    box: BoxLike | None,
    eps: float | None,
    gradient_eps: float | None,
    dtype: str | torch.dtype,
    *,
    construction: str = "auto",
    seconds: float,
) -> Network:
    name = str(dtype).removeprefix("torch.")
    if name not in ("float64", "float32"):
        raise InputError(
            f"dtype must be float64 or float32, found {name}: a layer computes in one of them, and its result has the "
            "dtype of its input, so that half precision is rounded once"
        )
    of_gradient: dict[str, Any] = {} if gradient_eps is None else {"norm": "C1", "gradient_eps": gradient_eps}
    return compile(
        source,
        box,
        DEFAULT_EPS if eps is None else eps,
        dtype=name,
        construction=construction,
        seconds=seconds,
        **of_gradient,
    )
