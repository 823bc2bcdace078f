"""A network: a program with its certificate, ready to run, save and export."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attnc.constructions.built import Progress
from attnc.constructions.construction import MAX_BYTES
from attnc.engines.fused import is_between
from attnc.engines.numpy_engine import FractionDone, Limits, NumpyEngine, OutsideLimits, has_numba
from attnc.errors import InputError, ParityExceeded, ProgramError, positive_number, real_number, whole_number
from attnc.exports.directory import folder_named, save_network
from attnc.ir.patching import Patch, patching
from attnc.ir.program import Program, require_shapes, split_columns
from attnc.ir.reference import evaluate_visited
from attnc.ir.rounding import evaluation_error
from attnc.ir.spec import check
from attnc.numerics.arithmetic import warn_of_fault
from attnc.numerics.arrays import Float, real_array
from attnc.numerics.limits import OutOfTime, time_limit
from attnc.numerics.quiet import quiet
from attnc.numerics.rounding import LARGEST, UNIT_ROUNDOFF
from attnc.proofs.certificate import Certificate, Standing
from attnc.proofs.observed import observed_error, sample_with_tails
from attnc.proofs.prover import PROOF_SECONDS, ProofRequest
from attnc.proofs.provers import HEAD_BY_HEAD, LEAVES, best_proof
from attnc.proofs.staged.claims import stated_derivation
from attnc.proofs.stages.enclosed_sparse import weights_within as weights_as_intervals
from attnc.targets.box import Box, BoxLike
from attnc.targets.expression_target import ExpressionTarget
from attnc.targets.expressions.expression import Expression
from attnc.targets.expressions.kinks import REACH
from attnc.targets.expressions.tree import to_text
from attnc.targets.parts.part import Derivation
from attnc.targets.table import TableTarget
from attnc.targets.target import Target
from attnc.wording import NOT_CERTIFIED, ON_EXPORT, ON_FILE, ceiling, function_of, plural, said

if TYPE_CHECKING:
    from attnc.incontext.interpreter import EncodedProgram
    from attnc.interventions import Ablated

OUTSIDE = ("raise", "clamp", "allow")
"""The choices for a point outside the box of a network."""
BEYOND = ("clamp", "nan", "allow")
"""The same choices for an exported network: torch modules, JAX functions and ONNX files cannot refuse a point."""
FORMS = ("folded", "unfolded")
"""The forms of a torch module."""
PART_TOLERANCE = 0.003
"""The proof on a part of the box ends when its bound is within this share of the error seen there: a bound is printed
with three digits."""

PARITY_POINTS = (16, 200)
"""Least and largest number of points at which an exported file is compared with the reference. The file computes the
same formula, so a wrong weight shows at nearly every point. With 175 anchors the export takes 0.2 s of CPU time with
200 points, as with 100, and 0.4 s with 400."""
PARITY_SCORES = 2**24
"""Number of scores that the sample may take, if it has more points than the least: 128 MB in float64."""


class Run(NamedTuple):
    """The outputs of a run, and every named activation and attention map.

    Attributes
    ----------
    outputs : ndarray
        The outputs, one row per point.
    cache : mapping
        Name → array. Empty unless `cache=True` was given.

    Examples
    --------
    >>> import attnc
    >>> net = attnc.compile("tanh(x)", {"x": (-1, 1)}, eps=1e-6)
    >>> run = net.run([[0.5]], cache=True)
    >>> run.outputs.shape, len(run.cache) > 0
    ((1,), True)
    """

    outputs: Float[np.ndarray, "batch ..."]
    cache: Mapping[str, np.ndarray]


class Parity(NamedTuple):
    """The difference between an exported file and the reference on a sample, as `Network.export_onnx` returns it.

    Attributes
    ----------
    num_points : int
        Points of the sample.
    difference : float
        The difference of an output, at the point where it is the largest share of the allowed one.
    allowed : float
        The largest difference that rounding can make between two evaluations at that point.
    is_within : bool
        Whether the difference is within the allowed one at every point.

    Examples
    --------
    >>> import attnc
    >>> attnc.Parity(num_points=200, difference=1e-16, allowed=1e-14, is_within=True).is_within
    True
    """

    num_points: int
    difference: float
    allowed: float
    is_within: bool


@dataclass(frozen=True, eq=False, repr=False)
class Network:
    """A program with its certificate, as `attnc.compile` and `attnc.load` return it.

    Attributes
    ----------
    program : Program
        The layers. `program(points)` is the plain numpy reference.
    certificate : Certificate
        The bound, the observed error and how they were found.
    box : Box
        The domain of the claim.
    construction : str
        The construction by which the weights were made.
    expression : str or None
        The function as text, if it has one.
    eps : float or None
        The error that was asked for.
    parameters : mapping
        The parameters of the construction.
    command : str or None
        The command line that made the network.
    also : mapping
        Certificates for the weights rounded to another dtype and evaluated in it, by dtype.
    definitions : str or None
        The definitions that state a truncated linear function or a ReLU network. Files hold them instead of the
        expression.
    derivation : Derivation or None
        The part of the expression that every head of a composition computes. Files hold it only as the stages of a
        certificate.

    Examples
    --------
    >>> import attnc, math
    >>> net = attnc.compile("tanh(x)", {"x": (-1, 1)}, eps=1e-6)
    >>> abs(float(net([[0.5]])[0]) - math.tanh(0.5)) <= net.certificate.bound
    True
    """

    program: Program
    certificate: Certificate
    box: Box
    construction: str
    expression: str | None = None
    eps: float | None = None
    parameters: Mapping[str, float | int | str] = field(default_factory=dict)
    command: str | None = None
    also: Mapping[str, Certificate] = field(default_factory=dict)
    definitions: str | None = None
    derivation: Derivation | None = None

    def __repr__(self) -> str:
        """Return one line: weights and leaves may be millions of numbers."""
        bound = self.certificate.bound
        facts = (
            self.construction,
            plural(self.num_anchors, "anchor"),
            plural(self.num_parameters, "parameter"),
            self.dtype,
            "no bound" if bound is None else f"bound {ceiling(bound)} ({said(self.certificate)})",
        )
        return f"<Network: {function_of(self)[:80]}; {', '.join(facts)}>"

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of the variables, in the order of the columns of points.

        Examples
        --------
        >>> import attnc
        >>> attnc.compile("tanh(x)", {"x": (-1, 1)}, eps=1e-6).variables
        ('x',)
        """
        return self.box.names

    @property
    def dtype(self) -> str:
        """The arithmetic of the network, "float64" or "float32".

        Examples
        --------
        >>> import attnc
        >>> attnc.compile("tanh(x)", {"x": (-1, 1)}, eps=1e-6).dtype
        'float64'
        """
        return str(self.program.dtype)

    @property
    def num_anchors(self) -> int:
        """The number of (head, key) pairs that a query meets, summed over heads and layers.

        Examples
        --------
        >>> import attnc
        >>> attnc.compile("tanh(x)", {"x": (-1, 1)}, eps=1e-6).num_anchors
        2
        """
        return self.program.num_anchors

    @property
    def num_parameters(self) -> int:
        """The number of stored non-zeros.

        Examples
        --------
        >>> import attnc
        >>> net = attnc.compile("tanh(x)", {"x": (-1, 1)}, eps=1e-6)
        >>> net.num_parameters >= net.num_anchors
        True
        """
        return self.program.num_parameters

    @property
    def work_per_point(self) -> int:
        """The number of scores that one point costs, summed over heads and layers: queries × keys, or fewer on a grid.

        Examples
        --------
        >>> import attnc
        >>> attnc.compile("tanh(x)", {"x": (-1, 1)}, eps=1e-6).work_per_point
        2
        """
        return self._engine.work_per_point

    @property
    def truncation(self) -> float:
        """The largest distance of the engine from the full softmax besides rounding, in any output.

        Examples
        --------
        >>> import attnc
        >>> attnc.compile("tanh(x)", {"x": (-1, 1)}, eps=1e-6).truncation
        0.0
        """
        return self._engine.truncation

    def bound(
        self, box: BoxLike | None = None, *, seconds: float = PROOF_SECONDS, weights_within: float = 0.0
    ) -> float | None:
        """Return the bound of the certificate. For a part of the box, prove a new one for these weights.

        With `weights_within`, prove one bound for all networks whose stored numbers are close to these.

        Parameters
        ----------
        box : mapping or sequence, optional
            A part of the box. Variables that a mapping leaves out keep their whole range.
        seconds : float
            Time limit of the proof.
        weights_within : float
            The share r by which every stored number w may differ. The bound then holds, in exact arithmetic, for all
            networks whose numbers lie between w(1 − r) and w(1 + r), each on its own. There is one for networks that
            were made from an expression, by leaves for one attention layer, and head by head for several.

        Returns
        -------
        float or None
            None if nothing was proved, and for a part of the box of a table. With `weights_within` it is None if there
            is no finite bound, or if the proof does not finish in time. If the network has no expression, or the
            proof does not finish in time, a part has the bound of the whole box, which a file may only state. The bound
            of a part is at most that of the whole box, except if the latter is only stated by a file and was not
            re-proved on this machine.

        Raises
        ------
        InputError
            If `box` is not a part of the network's box, `seconds` is negative, or `weights_within` is not from 0 to 1.

        Examples
        --------
        >>> import attnc
        >>> net = attnc.compile("sin(x)", {"x": (-3, 3)}, eps=1e-3)
        >>> net.bound({"x": (0, 0.1)}) <= net.bound()
        True
        >>> net.bound() < net.bound(weights_within=1e-7) < 1e-3
        True
        """
        claim = self.certificate
        if not 0 <= real_number("weights_within", weights_within) < 1:
            raise InputError(
                f"weights_within is the share by which each weight may differ, from 0 to 1; found {weights_within!r}"
            )
        if weights_within:
            return self._bound_within(float(weights_within), box, seconds)
        if box is None or claim.bound is None:
            return claim.bound
        part = self._part(box, seconds)
        if claim.is_of_table:
            return None
        if self.expression is None:
            return claim.bound
        target, p = ExpressionTarget(Expression.parse(self.expression), part), float(claim.norm)
        # The functions of the heads in the certificate are not trusted: the proof may raise ProgramError for them.
        with quiet(), suppress(ProgramError, OutOfTime), time_limit(seconds, counted=seconds):
            request = ProofRequest(
                p=p,
                observed=observed_error(self.at, target, self.work_per_point, p),
                tolerance=PART_TOLERANCE,
                truncation=self.truncation,
                derivation=None if claim.by_heads is None else self.known_derivation,
                has_theorem=claim.by_leaves is not None and bool(claim.by_leaves.cuts),
            )
            proof = best_proof(self.program, target, request)
            if proof is not None:  # a bound that only a file states may be too small
                return proof.bound if claim.standing is Standing.STATED else min(claim.bound, proof.bound)
        return claim.bound

    def _part(self, box: BoxLike, seconds: float) -> Box:
        """Return a part of the box, checked, together with a time limit for its proof."""
        if isinstance(box, Mapping) and set(box) <= set(self.variables):
            box = {name: box.get(name, ends) for name, ends in self.box.as_dict().items()}
        part = Box.parse(box, self.variables)
        if part.names != self.variables or (part.lo < self.box.lo).any() or (part.hi > self.box.hi).any():
            raise InputError(f"box: {part} is not a part of the network's box, {self.box}")
        if real_number("seconds", seconds) < 0:
            raise InputError(f"seconds must be at least 0, found {seconds!r}")
        return part

    def _bound_within(self, relative: float, box: BoxLike | None, seconds: float) -> float | None:
        """Prove a bound for all networks whose stored numbers differ from these by at most this share."""
        part = self._part(self.box.as_dict() if box is None else box, seconds)
        claim = self.certificate
        if self.expression is None:
            return None
        by_leaves = LEAVES.proves_intervals_of(self.program)
        derivation = None if by_leaves or claim.by_heads is None else self.known_derivation
        if not by_leaves and derivation is None:
            return None
        target, p = ExpressionTarget(Expression.parse(self.expression), part), float(claim.norm)
        with (
            quiet(),
            suppress(ProgramError, OutOfTime),
            time_limit(seconds, counted=seconds),
            weights_as_intervals(relative),
        ):
            request = ProofRequest(
                p=p,
                eps=self.eps or 0.0,
                observed=observed_error(self.at, target, self.work_per_point, p),
                tolerance=PART_TOLERANCE,
                truncation=self.truncation,
                derivation=derivation,
            )
            found = (LEAVES if by_leaves else HEAD_BY_HEAD).prove(self.program, target, request).bound
            return found if found < math.inf else None
        return None

    def certified_in(self, dtype: str) -> Certificate | None:
        """Return the certificate for an arithmetic.

        Parameters
        ----------
        dtype : str
            "float64" or "float32".

        Returns
        -------
        Certificate or None
            None if the network is not certified in it.

        Raises
        ------
        InputError
            If `dtype` is another one.

        Examples
        --------
        >>> import attnc
        >>> net = attnc.compile("tanh(x)", {"x": (-1, 1)}, eps=1e-4, also="float32")
        >>> net.certified_in("float32").dtype
        'float32'
        """
        if dtype not in UNIT_ROUNDOFF:
            raise InputError(f"dtype must be one of {', '.join(UNIT_ROUNDOFF)}; found {dtype!r}")
        claim = self.certificate if dtype == self.dtype else self.also.get(dtype)
        return None if claim is None or claim.bound is None else claim

    def astype(self, dtype: str) -> Network:
        """Return the network with its weights rounded to another dtype, and the certificate for that, if there is one.

        Parameters
        ----------
        dtype : str
            "float64" or "float32".

        Returns
        -------
        Network
            The network itself if it has this dtype already.

        Raises
        ------
        InputError
            If `dtype` is another one.
        ProgramError
            If a weight overflows in it.

        Examples
        --------
        >>> import attnc
        >>> net = attnc.compile("tanh(x)", {"x": (-1, 1)}, eps=1e-4).astype("float32")
        >>> net.dtype, net.certificate.bound
        ('float32', None)
        """
        claim = self.certified_in(dtype)
        if dtype == self.dtype:
            return self
        if claim is None:
            claim = Certificate(None, None, (), (), dtype, NOT_CERTIFIED, self.certificate.norm)
        return dataclasses.replace(self, program=check(self.program.astype(dtype)), certificate=claim, also={})

    @cached_property
    def known_derivation(self) -> Derivation | None:
        """The derivation that the stages of the certificate state, or the construction's; None if there is neither.

        Examples
        --------
        >>> import attnc
        >>> net = attnc.compile("tanh(x) * y", {"x": (-1, 1), "y": (-1, 1)}, eps=0.1)
        >>> len(net.known_derivation.outputs)  # one for each output of the network
        1
        """
        stages = self.certificate.by_heads
        if stages is None:
            return self.derivation
        try:
            return stated_derivation(stages.heads, stages.outputs, self.variables)
        except ProgramError:
            return None

    @cached_property
    def _engine(self) -> NumpyEngine:
        """The engine. It does not use grids if the bound does not include the anchors that they leave out."""
        engine, claim = self._engine_with_grids, self.certificate
        is_covered = claim.bound is None or engine.truncation <= claim.truncation
        return engine if is_covered else NumpyEngine(self.program, with_grids=False)

    @cached_property
    def _engine_with_grids(self) -> NumpyEngine:
        return NumpyEngine(self.program)

    def _with_certificate(self, claim: Certificate) -> Network:
        """Return the network with another certificate. It keeps the engine, which takes long to make."""
        changed = dataclasses.replace(self, certificate=claim)
        changed.__dict__["_engine_with_grids"] = self._engine_with_grids
        return changed

    def _slopes_at(self, points: Float[np.ndarray, "points d"]) -> Float[np.ndarray, "points slopes"]:
        """Return the derivatives of every output by every variable as one row per point, in numpy alone."""
        inputs, run = tuple(split_columns(points, self.program.input_shapes)), self._engine_with_grids.gradient
        return self._outputs(inputs, "raise", None, is_compiled=False, run=run).reshape(len(points), -1)

    def __call__(
        self, *inputs: Float[np.ndarray, "batch ..."], outside: str = "raise", progress: FractionDone | None = None
    ) -> Float[np.ndarray, "batch ..."]:
        """Return the outputs at points of the box.

        Parameters
        ----------
        *inputs : array_like
            Points (batch, d) with the columns of `variables`, or the sequences that the network takes.
        outside : str
            For points outside the box: "raise", "clamp" to move them to it, or "allow" to evaluate them there.
        progress : callable, optional
            Called with the fraction that is done.

        Returns
        -------
        ndarray
            (batch,), or (batch, k) for k outputs.

        Raises
        ------
        InputError
            If the points do not fit, are not finite or are outside the box, or if their scores overflow.

        Examples
        --------
        >>> import attnc
        >>> net = attnc.compile("tanh(x)", {"x": (-1, 1)}, eps=1e-6)
        >>> net([[0.0], [5.0]], outside="clamp").round(3).tolist()
        [0.0, 0.762]
        """
        return self._outputs(inputs, outside, progress, is_compiled=has_numba())

    def at(
        self, points: Float[np.ndarray, "points d"], progress: FractionDone | None = None, *, outside: str = "raise"
    ) -> Float[np.ndarray, "points outputs"]:
        """Return the outputs of each point as one row, whatever shapes the network takes and returns.

        They are computed in numpy alone, because proofs start from them and must not depend on installed extras.

        Parameters
        ----------
        points : ndarray
            (batch, d), one column per variable.
        progress : callable, optional
            Called with the fraction that is done.
        outside : str
            As for a call of the network.

        Returns
        -------
        ndarray
            (batch, outputs).

        Raises
        ------
        InputError
            As for a call of the network.

        Examples
        --------
        >>> import attnc, numpy as np
        >>> attnc.compile("tanh(x)", {"x": (-1, 1)}, eps=1e-6).at(np.zeros((3, 1))).shape
        (3, 1)
        """
        inputs = tuple(split_columns(points, self.program.input_shapes))
        return self._outputs(inputs, outside, progress, is_compiled=False).reshape(len(points), -1)

    def gradient(
        self, *inputs: Float[np.ndarray, "batch ..."], outside: str = "raise", progress: FractionDone | None = None
    ) -> Float[np.ndarray, "batch outputs d"]:
        """Return the derivatives of the network at points of the box: of each output by each variable.

        They are computed forwards from the weights, in the program's dtype, in blocks of points with bounded memory.
        They are derivatives of the network, not of the function. A bound of their distance is in the certificate only
        if it was asked for. A point that "clamp" moves has the derivatives at the point to which it is moved.

        Parameters
        ----------
        *inputs : array_like
            As for a call of the network.
        outside : str
            As for a call of the network.
        progress : callable, optional
            Called with the fraction that is done.

        Returns
        -------
        ndarray
            (batch, outputs, d), with one column per variable, in the order of `variables`. There is an axis for the
            outputs also if there is only one. Sequences are taken and returned as one row of numbers.

        Raises
        ------
        InputError
            As for a call of the network, and if a derivative overflows.

        Examples
        --------
        >>> import attnc
        >>> net = attnc.compile("sin(x) + y**2", {"x": (-3, 3), "y": (-1, 1)}, eps=1e-6)
        >>> net.gradient([[0.0, 0.5]]).round(3).tolist()
        [[[1.0, 1.0]]]
        """
        return self._outputs(inputs, outside, progress, is_compiled=has_numba(), run=self._engine_with_grids.gradient)

    def run(
        self,
        *inputs: Float[np.ndarray, "batch ..."],
        cache: bool = False,
        outside: str = "raise",
        max_bytes: int = MAX_BYTES,
        patch: Mapping[str, Patch] | None = None,
    ) -> Run:
        """Return the outputs. With `cache`, also return every intermediate array of the unfolded reference.

        With `patch`, replace some of these arrays, and compute the later ones from them. No bound is claimed then.

        Parameters
        ----------
        *inputs : array_like
            As for a call of the network.
        cache : bool
            Whether to keep the arrays. `layer.channel` is (batch, tokens), `layer.head0.scores` and
            `layer.head0.pattern` are (batch, queries, keys), and `layer.head0.z` is (batch, queries, d_v): the mean of
            the values by the pattern, before W_O. Tokens and queries that nothing reads are left out.
        outside : str
            As for a call of the network.
        max_bytes : int
            Limit of the memory for the arrays.
        patch : mapping, optional
            Name of the cache → the array to use instead, of the same shape, or with 1 in place of the batch, or a
            number; or a function that takes the array and returns such a one. The cache has the new array. Scores may
            be −∞.

        Returns
        -------
        Run
            The outputs and the cache.

        Raises
        ------
        InputError
            As for a call of the network, if the arrays need more than `max_bytes`, and if a patch has an unknown name
            or does not fit.

        Examples
        --------
        >>> import attnc
        >>> net = attnc.compile("tanh(x)", {"x": (-1, 1)}, eps=1e-6)
        >>> [name for name in net.run([[0.5]], cache=True).cache if name.endswith("pattern")]
        ['attend1.head0.pattern']
        >>> net.run([[0.5]], patch={"attend1.head0.pattern": [[[0.5, 0.5]]]}).outputs.round(9).tolist()
        [0.0]
        """
        if not cache and patch is None:
            return Run(self._outputs(inputs, outside, is_compiled=has_numba()), {})
        checked = self._in_box(self._as_arrays(inputs, outside), outside)
        found: dict[str, np.ndarray] = {}
        visit = patching(self.program, patch or {}, found.setdefault if cache else None)
        with np.errstate(over="ignore", invalid="ignore") if patch else nullcontext():
            outputs = evaluate_visited(self.program, checked, visit, max_bytes)
        if patch and not np.isfinite(outputs).all():
            raise InputError(f"the patch makes outputs that are not finite in {self.dtype}. Choose smaller numbers.")
        return Run(outputs, found)

    def ablate(
        self,
        head: str | Sequence[str],
        how: str = "zero",
        *,
        over: Float[np.ndarray, "points d"] | None = None,
        seed: int = 0,
    ) -> Ablated:
        """Return the network with a head, or several, switched off: to call and to run, without a certificate.

        Parameters
        ----------
        head : str or sequence of str
            The head, such as "attend1.head0", or several.
        how : str
            The numbers that replace the head's z, the mean of its values by its pattern: "zero"; "mean", the mean of z
            over the points `over`; "resample", the z of a point that is drawn from `over` for each point.
        over : array_like, optional
            Points (n, d), one column per variable. By default, 256 points of the box: a grid, and random points.
        seed : int
            The seed of the draw, and of the random points.

        Returns
        -------
        Ablated
            Call it as the network. The same call gives the same outputs.

        Raises
        ------
        InputError
            If there is no such head, `how` is another word, or `over` does not fit.

        Examples
        --------
        >>> import attnc, numpy as np
        >>> net = attnc.compile("sin(x) + cos(y)", {"x": (-3, 3), "y": (-3, 3)}, eps=1e-6)
        >>> off = net.ablate("attend1.head1", how="mean", over=[[0.0, 0.0], [np.pi / 2, 0.0]])
        >>> off([[3.0, 0.0]]).round(5).tolist()  # the mean of sin 0 and sin π/2, plus cos 0
        [1.5]
        """
        from attnc.interventions import ablate

        return ablate(self, head, how, over, seed)

    def _outputs(
        self,
        inputs: tuple[Any, ...],
        outside: str,
        progress: FractionDone | None = None,
        *,
        is_compiled: bool,
        run: Callable[..., np.ndarray] | None = None,
    ) -> Float[np.ndarray, "batch ..."]:
        """Return the outputs; raise InputError if scores overflow, outside the box or far out on an infinite range.

        With `run`, return the results of that method of the engine instead.
        """
        warn_of_fault()
        run = self._engine if run is None else run
        arrays = self._as_arrays(inputs, outside)
        is_safe = self.box.is_bounded and outside != "allow"
        if is_safe and len(arrays) == 1 and arrays[0].dtype == self.program.dtype:
            try:  # the engine compares points with the box while they are in the cache
                return run(arrays[0], is_compiled=is_compiled, progress=progress, limits=self._ends)
            except OutsideLimits:
                pass
        checked = self._in_box(arrays, outside)
        if is_safe:
            return run(*checked, is_compiled=is_compiled, progress=progress)
        with quiet():
            outputs = run(*checked, is_compiled=is_compiled, progress=progress)
        lost = np.flatnonzero(~np.isfinite(outputs).reshape(len(outputs), -1).all(axis=1))
        if len(lost):
            row = int(lost[0])
            at = np.concatenate([array[row].ravel() for array in checked])
            most = int(np.abs(at).argmax())
            raise InputError(
                f"point {row} has no value in {self.dtype}: its scores overflow, with {self.variables[most]} = "
                f"{at[most]:.6g}. Choose points closer to 0."
            )
        return outputs

    def _as_arrays(self, inputs: tuple[Any, ...], outside: str) -> list[np.ndarray]:
        """Return the inputs as arrays of floats; raise InputError if they do not fit."""
        if outside not in OUTSIDE:
            raise InputError(f"outside must be one of {', '.join(OUTSIDE)}; found {outside!r}")
        arrays = [real_array("points", given) for given in inputs]
        require_shapes("network", self.program.input_shapes, arrays, self.variables)
        return arrays

    def _in_box(self, arrays: list[np.ndarray], outside: str) -> tuple[np.ndarray, ...]:
        """Return the inputs, in the box or moved there; raise InputError at the first bad number."""
        warn_of_fault()
        least, most = np.maximum(self.box.lo, -LARGEST), np.minimum(self.box.hi, LARGEST)
        checked, start = [], 0
        for array, shape in zip(arrays, self.program.input_shapes, strict=True):
            columns = slice(start, start := start + math.prod(shape))
            flat = array if array.ndim == 2 else array.reshape(len(array), math.prod(shape))
            if not is_between(flat, least[columns], most[columns]):
                array = self._inside(flat, columns, outside).reshape(array.shape)
            checked.append(array)
        return tuple(checked)

    @cached_property
    def _ends(self) -> Limits:
        """The least and the largest numbers of the program's dtype that are in the box."""
        least, most = (ends.astype(self.program.dtype) for ends in (self.box.lo, self.box.hi))
        least = np.where(least < self.box.lo, np.nextafter(least, np.inf, dtype=least.dtype), least)
        most = np.where(most > self.box.hi, np.nextafter(most, -np.inf, dtype=most.dtype), most)
        return least, most

    def _inside(self, flat: np.ndarray, columns: slice, outside: str) -> np.ndarray:
        """Return the columns of one input, in the box or moved there; raise InputError at the first bad number."""
        names, lo, hi = self.variables[columns], self.box.lo[columns], self.box.hi[columns]

        def first(is_bad: np.ndarray) -> tuple[int, int] | None:
            return next(((int(row), int(column)) for row, column in np.argwhere(is_bad)), None)

        if (found := first(np.isnan(flat))) is not None:
            raise InputError(f"point {found[0]} is NaN in {names[found[1]]}")
        if outside == "clamp":
            flat = np.clip(flat, lo, hi)
        elif outside == "raise" and (found := first((flat < lo) | (flat > hi))) is not None:
            row, column = found
            raise InputError(
                f"point {row} has {names[column]} = {flat[found]:.6g}, outside [{lo[column]:.6g}, {hi[column]:.6g}]; "
                'nothing is claimed there. Use outside="clamp" or outside="allow" to go on.'
            )
        if (found := first(~np.isfinite(flat))) is not None:
            raise InputError(f"points must be finite: point {found[0]} has {names[found[1]]} = {flat[found]:g}")
        return flat

    def plot(self, path: str | Path, target: Any = None, *, output: int = 0) -> None:
        """Draw the network into a file.

        Parameters
        ----------
        path : str or path
            The file, which ends in .svg, .pdf or .png.
        target : Target or callable, optional
            The function to draw beside the network, if the network has no expression.
        output : int
            The output to draw.

        Raises
        ------
        InputError
            If an argument does not fit, or matplotlib is missing.
        FileError
            If the file cannot be written.

        Examples
        --------
        >>> import attnc, os, tempfile
        >>> net = attnc.compile("tanh(x)", {"x": (-1, 1)}, eps=1e-6)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     net.plot(f"{folder}/net.svg")
        ...     os.listdir(folder)
        ['net.svg']
        """
        from attnc.plots import plot

        plot(self, path, target, output=output)

    def plot_certificate(self, path: str | Path) -> None:
        """Draw the sources of the bound, and the error over the box or of each head.

        Parameters
        ----------
        path : str or path
            The file, which ends in .svg, .pdf or .png.

        Raises
        ------
        InputError
            If nothing was proved about the network, or matplotlib is missing.
        FileError
            If the file cannot be written.

        Examples
        --------
        >>> import attnc, os, tempfile
        >>> net = attnc.compile("tanh(x)", {"x": (-1, 1)}, eps=1e-6)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     net.plot_certificate(f"{folder}/bound.svg")
        ...     os.listdir(folder)
        ['bound.svg']
        """
        from attnc.plots import plot_certificate

        plot_certificate(self, path)

    def to_torch(
        self, *, form: str = "folded", trainable: bool = False, block: int | str | None = "auto", outside: str = "allow"
    ) -> Any:
        """Return a torch.nn.Module in the program's dtype: same inputs, same outputs, differentiable in its inputs.

        **The folded form takes points in blocks.** A hook on it sees one block at a time, and is called once for each:
        with 3,844 keys, above 272 points without a gradient. `block=None` switches blocks off. The unfolded form never
        has blocks.

        Parameters
        ----------
        form : str
            "folded" for speed: constants are multiplied out, and constant keys are projected once. "unfolded" for
            hooks: every layer as it is written. It has a submodule `place1` for each layer, `attend1.head0` for each
            head with the parameters W_Q, W_K, W_V and W_O, and a hook point (an identity module) for each name of
            `net.run(points, cache=True)`: see `module.hook_points`.
        trainable : bool
            Whether weights are parameters that need a gradient. In the unfolded form these are the stored entries of
            affine maps, and the entries of W_Q, W_K, W_V and W_O that are not zero; zeros get no gradient and keep the
            structure of the network. `with_weights` takes such a module back. In the folded form these are the queries,
            keys, values, W_O and output map that remain after folding; they cannot be taken back. If False, parameters
            of the unfolded form need no gradient, and the folded form has buffers instead of parameters.
        block : int, str or None
            For the folded form: the number of points in a block, "auto" to choose it by memory, or None for all points
            at once. Memory then grows with points × keys.
        outside : str
            For points outside the box: "clamp" to move them to it, "nan" to return NaN, or "allow" to compute there,
            where nothing is claimed.

        Returns
        -------
        torch.nn.Module
            The module. It needs torch.

        Raises
        ------
        InputError
            If `form`, `block` or `outside` is another word, or blocks are asked of the unfolded form.
        ProgramError
            If a name of the program cannot be a name of a torch module.

        Examples
        --------
        >>> import attnc, torch
        >>> net = attnc.compile("tanh(x)", {"x": (-1, 1)}, eps=1e-6)
        >>> net.to_torch()(torch.zeros(3, 1, dtype=torch.float64)).shape
        torch.Size([3])
        >>> module, seen = net.to_torch(form="unfolded"), {}
        >>> hook = module.attend1.head0.pattern.register_forward_hook(lambda _, given, pattern: seen.update(p=pattern))
        >>> module(torch.zeros(3, 1)).shape, seen["p"].shape
        (torch.Size([3]), torch.Size([3, 1, 2]))
        """
        limits, is_nan = self._limits(outside), outside == "nan"
        if form not in FORMS:
            raise InputError(f"form must be one of {', '.join(FORMS)}; found {form!r}")
        if form == "unfolded":
            if block not in ("auto", None):
                raise InputError(f"the unfolded form takes all points at once: leave out block={block!r}")
            from attnc.engines.torch_unfolded import to_torch_unfolded

            return to_torch_unfolded(self.program, limits, is_nan_outside=is_nan, trainable=bool(trainable))
        if block not in ("auto", None):
            block = whole_number("block", block, 1)
        from attnc.engines.torch_engine import to_torch

        return to_torch(self.program, limits, is_nan_outside=is_nan, block=block, trainable=bool(trainable))

    def with_weights(
        self, module: Any, *, target: Target | None = None, eps: float | None = None, seconds: float = PROOF_SECONDS
    ) -> Network:
        """Return the network with the weights of a trained module, certified anew, or refuse it with its bound.

        The bound is proved from the new weights alone. No theorem of a construction is used.

        Parameters
        ----------
        module : torch.nn.Module or mapping
            An unfolded module of this network, `net.to_torch(form="unfolded", trainable=True)`, or its state dict.
        target : Target, optional
            The function of the claim, on the same box. By default it is the expression of the network.
        eps : float, optional
            The largest error allowed. By default it is that of the network; without one, any bound is accepted.
        seconds : float
            Time limit of the proof.

        Returns
        -------
        Network
            The network with the new weights and their certificate.

        Raises
        ------
        BoundNotMet
            If the bound is above eps, or none can be proved. It carries the network with its bound.
        InputError
            If the weights are not those of an unfolded module of this network, are not finite, or the target is not
            known or does not fit.

        Examples
        --------
        >>> import attnc, torch
        >>> net = attnc.compile("sin(x)", {"x": (-1, 1)}, eps=1e-3)
        >>> module = net.to_torch(form="unfolded", trainable=True)
        >>> net.with_weights(module).certificate.bound == net.certificate.bound
        True
        >>> with torch.no_grad():
        ...     module.attend1.head0.W_O *= 1.5
        >>> try:
        ...     net.with_weights(module)
        ... except attnc.BoundNotMet as refusal:
        ...     print(0.4 < refusal.bound < 0.43)
        True
        """
        from attnc.retraining import with_weights

        return with_weights(self, module, target, eps, seconds)

    def to_jax(self, *, outside: str = "allow") -> Callable[..., Any]:
        """Return a pure function of JAX arrays, which `jax.jit`, `jax.vmap` and `jax.grad` take.

        It takes and returns the same arrays as a call of the network, in the program's dtype, or a single point without
        the batch axis: `jax.vmap(jax.grad(function))(points)` has the gradient at each point. `vmap` evaluates all of
        its points at once. A batch with many keys is evaluated in blocks, so that memory stays bounded.

        A call with arrays uses vectors of 512 bits on processors that have them. Within `jax.jit` and other
        transformations the options of the caller hold: set XLA_FLAGS=--xla_cpu_prefer_vector_width=512 before the
        program starts, or pass it in `compiler_options` of the outermost `jax.jit`.

        Parameters
        ----------
        outside : str
            For points outside the box: "clamp" to move them to it, "nan" to return NaN, or "allow" to compute there,
            where nothing is claimed.

        Returns
        -------
        callable
            The function, compiled at its first call with arrays of some shape. It needs jax.

        Raises
        ------
        InputError
            If `outside` is another word, or the network computes in float64 and JAX has that switched off.

        Examples
        --------
        >>> import attnc, jax
        >>> function = attnc.compile("tanh(x)", {"x": (-1, 1)}, eps=1e-4, dtype="float32").to_jax()
        >>> function(jax.numpy.zeros((3, 1))).shape
        (3,)
        >>> round(float(jax.grad(function)(jax.numpy.zeros(1))[0]), 2)
        1.0
        """
        limits = self._limits(outside)
        from attnc.engines.jax_engine import to_jax

        return to_jax(self.program, limits, is_nan_outside=outside == "nan")

    def to_transformer_lens(self) -> Any:
        """Return the network as a model of TransformerLens: attention alone, no norm, one residual stream.

        The positions are `rest`, where idle heads look, then the keys, then the query. The model takes tensors made by
        its `embed_points`, and the outputs are at its last position.

        Returns
        -------
        transformer_lens.model_bridge.TransformerBridge
            The model, in the program's dtype. It needs transformer-lens. It has these further attributes:
            `embed_points(points)`, the tensor (batch, positions, d_model) for some points; `residual_labels`, the
            expression that each channel holds; `position_labels`; `head_labels`, the program's name of each head of
            each block.

        Raises
        ------
        InputError
            If the program has no such form: scores that multiply two quantities that both depend on the input, or too
            many keys and heads for a map of all positions.
        ProgramError
            If the model differs from the reference by more than rounding allows.

        Examples
        --------
        >>> import attnc
        >>> net = attnc.compile("sin(x) + cos(y)", {"x": (-3, 3), "y": (-3, 3)}, eps=1e-6)
        >>> model = net.to_transformer_lens()  # doctest: +SKIP
        >>> outputs, cache = model.run_with_cache(model.embed_points([[0.5, 1.0]]))  # doctest: +SKIP
        >>> cache["blocks.0.attn.hook_pattern"].shape  # doctest: +SKIP
        torch.Size([1, 2, 9, 9])
        """
        from attnc.exports.residual_stream import residual_stream
        from attnc.exports.transformer_lens import run_points, to_transformer_lens

        stream = residual_stream(self.program, self.variables, self._meanings(), self._output_texts())
        model = to_transformer_lens(stream, self.program.input_shapes, self.dtype)
        found = self._parity(lambda inputs: run_points(model, inputs, self.program.output_shape), stream.num_scores)
        if not found.is_within:
            raise ProgramError(
                f"on {found.num_points:,} points the model and the reference differ by {found.difference:.3g}; "
                f"rounding allows {found.allowed:.3g}. Use another version of transformer-lens, or net.to_torch()."
            )
        return model

    def _meanings(self) -> dict[str, str]:
        """Return the expression of the variables that each channel holds, as far as it is known."""
        from attnc.exact_channels import ExactChannels

        exact = ExactChannels(self)
        channels = dict.fromkeys(channel for layer in self.program.all_layers for channel in layer.channels)
        found = {channel: exact.holds(channel) for channel in channels}
        return {channel: text for channel, text in found.items() if text is not None}

    def _output_texts(self) -> tuple[str, ...]:
        """Return the expression of each output, or nothing."""
        return () if self.expression is None else tuple(map(to_text, Expression.parse(self.expression).outputs))

    def show_attention(
        self, *inputs: Float[np.ndarray, "batch ..."], outside: str = "raise", max_bytes: int = MAX_BYTES
    ) -> Any:
        """Return the attention maps of all heads at some points, for a notebook or as a page.

        Parameters
        ----------
        *inputs : array_like
            As for a call of the network, at most 256 points.
        outside : str
            As for a call of the network.
        max_bytes : int
            Limit of the memory for the maps.

        Returns
        -------
        AttentionView
            A notebook shows it. `.save("attention.html")` writes one page that needs no connection.

        Raises
        ------
        InputError
            As for `run`, and if there are too many points or weights for a page.

        Examples
        --------
        >>> import attnc
        >>> net = attnc.compile("sin(x)", {"x": (-3, 3)}, eps=1e-3)
        >>> view = net.show_attention([[0.5], [1.0]])
        >>> "<script" in view.page, "http" in view.page.replace("http-equiv", "")
        (True, False)
        """
        from attnc.plots.attention_page import MOST_PAGE_POINTS, attention_view

        arrays = self._as_arrays(inputs, outside)
        count = len(arrays[0])
        if not 1 <= count <= MOST_PAGE_POINTS:
            raise InputError(f"a page shows from 1 to {MOST_PAGE_POINTS} points, found {count:,}")
        outputs, cache = self.run(*inputs, cache=True, outside=outside, max_bytes=max_bytes)
        flat = np.concatenate([array.reshape(count, -1) for array in arrays], axis=1)
        points = [
            {
                "label": ", ".join(f"{name} = {x:.6g}" for name, x in zip(self.variables, row, strict=True))[:200],
                "output": ", ".join(f"{y:.6g}" for y in np.ravel(out))[:200],
            }
            for row, out in zip(flat, outputs, strict=True)
        ]
        return attention_view(self.program, cache, points, function_of(self)[:200])

    def _limits(self, outside: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the box to which an export restricts its inputs, None for "allow"; InputError for an unknown word."""
        if outside not in BEYOND:
            raise InputError(f"outside must be one of {', '.join(BEYOND)}; found {outside!r}")
        return None if outside == "allow" else (self.box.lo, self.box.hi)

    def export_onnx(self, path: str | Path, *, outside: str = "allow") -> Parity:
        """Write an ONNX file, after running it against the reference on a sample.

        On an infinite box, the sample covers the core and the tails.

        Parameters
        ----------
        path : str or path
            The file.
        outside : str
            For points outside the box: "clamp" to move them to it, "nan" to return NaN, or "allow" to compute there,
            where nothing is claimed. The metadata of the file state the box and this word.

        Returns
        -------
        Parity
            The difference on the sample, and the one that rounding allows.

        Raises
        ------
        FileError
            If the file cannot be written.
        InputError
            If `outside` is another word.
        ParityExceeded
            If ONNX Runtime differs from the reference by more than rounding allows. No file is written.

        Examples
        --------
        >>> import attnc, tempfile
        >>> net = attnc.compile("tanh(x)", {"x": (-1, 1)}, eps=1e-6)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     net.export_onnx(f"{folder}/net.onnx").is_within
        True
        """
        from attnc.exports.onnx_file import export_onnx, run_onnx

        limits = self._limits(outside)
        facts = {
            "expression": self.expression,
            "construction": self.construction,
            "bound": self.certificate.bound,
            "arithmetic of the bound": self.certificate.dtype,
            "standing of the bound": None if self.certificate.bound is None else ON_FILE,
            "box": self.box,
            "outside the box": ON_EXPORT[outside],
        }
        stated = {name: str(fact) for name, fact in facts.items() if fact is not None}
        found: list[Parity] = []

        def accept(content: bytes) -> None:
            found.append(self._parity(lambda inputs: run_onnx(content, inputs)))
            if not found[0].is_within:
                raise ParityExceeded(os.fspath(path), found[0])

        export_onnx(self.program, path, metadata=stated, limits=limits, is_nan_outside=outside == "nan", accept=accept)
        return found[0]

    def export_hf(self, path: str | Path, *, eps: float | None = None, progress: Progress | None = None) -> Certificate:
        """Write a checkpoint that plain transformers loads, with a certificate for its computation in float32.

        It is a stock decoder without remote code: its feed-forward weights are 0, its norms are the identity, and its
        keys are tokens of a prefix. A network of one stage whose keys and values are constants is exported as it is.
        Other networks are built anew from their expression: keys that carry the input become squares of sums, or keys
        that are dense at kinks. So the bound may differ from that of the network. Float32 limits it.

        Parameters
        ----------
        path : str or path
            The folder. It gets config.json, model.safetensors, certificate.json and README.md, the model card with the
            lines that load it and define f(points).
        eps : float, optional
            The largest bound allowed. By default the bound is near that of the network, as far as float32 allows.
        progress : callable, optional
            Called during the search, with the current step and the fraction of it that is done.

        Returns
        -------
        Certificate
            The certificate of the checkpoint.

        Raises
        ------
        InputError
            If the network cannot be exported: the message gives the reason, and names exports that are possible.
        BoundNotMet
            If no bound, or none of at most `eps`, can be proved.
        FileError
            If the folder cannot be written.

        Examples
        --------
        >>> import attnc, os, tempfile
        >>> net = attnc.compile("sin(x) + cos(y)", {"x": (-3, 3), "y": (-3, 3)}, eps=1e-5)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     claim = net.export_hf(f"{folder}/checkpoint")
        ...     sorted(os.listdir(f"{folder}/checkpoint"))
        ['README.md', 'certificate.json', 'config.json', 'model.safetensors']
        >>> claim.dtype, claim.bound < 2e-5
        ('float32', True)
        """
        from attnc.stock.exporting import export_stock

        claim = self.certificate
        limit = math.inf if eps is None else positive_number("eps", eps)
        target = self._stated_target("a checkpoint")
        is_as_it_is = self.construction not in ("compose", "gates")
        found = export_stock(
            folder_named(path),
            target,
            expression=self.expression,
            program=self.program if is_as_it_is else None,
            eps=self.eps or claim.bound if eps is None else limit,
            has_theorem=claim.by_leaves is not None and bool(claim.by_leaves.cuts),
            limit=limit,
            progress=progress,
        )
        return found.certificate

    def as_prompt(self, *, progress: Progress | None = None) -> EncodedProgram:
        """Return the network as a prompt of `attnc.incontext.Interpreter`, whose weights are the same for all prompts.

        The heads are those of the network if their keys and values are constants. Otherwise they are fitted anew from
        the expression. Their bound is proved.

        Parameters
        ----------
        progress : callable, optional
            Called during the search, with the current step and the fraction of it that is done.

        Returns
        -------
        attnc.incontext.EncodedProgram
            The heads in the order in which they run, with their bound.

        Raises
        ------
        InputError
            If the network cannot be encoded: the message gives the reason.
        BoundNotMet
            If no bound can be proved.

        Examples
        --------
        >>> import attnc
        >>> program = attnc.compile("sin(x)*y", {"x": (-1, 1), "y": (-1, 1)}, eps=1e-4).as_prompt()
        >>> interpreter = attnc.incontext.Interpreter.fitting(program)
        >>> bool(abs(interpreter([[0.5, 1.0]], program)[0, 0] - 0.4794255) <= 1e-4)
        True
        """
        from attnc.stock.prompting import encoded_program

        target = self._stated_target("a prompt")
        eps = self.eps or self.certificate.bound
        if eps is None:
            raise InputError(
                f"nothing is proved about {function_of(self)}, and a prompt states a bound: compile with eps"
            )
        return encoded_program(target, self.program, self.derivation, eps, progress)

    def _stated_target(self, artefact: str) -> Target:
        """Return the function that the network states: its expression, or the table in its certificate."""
        claim = self.certificate
        if self.expression is not None:
            return ExpressionTarget(Expression.parse(self.expression), self.box)
        if claim.at_points is not None and claim.at_points.table:
            table = np.array(claim.at_points.table)
            return TableTarget(table[:, : self.box.d], table[:, self.box.d :], self.variables)
        raise InputError(
            f"{function_of(self)} has no expression and no stored table, so no bound of {artefact} could be "
            "proved again. Compile an expression or a table, or export to ONNX."
        )

    def _parity(self, run: Callable[[list[np.ndarray]], np.ndarray], scores_per_point: int = 1) -> Parity:
        """Compare an exported network with the reference, in the core of the box and in its tails.

        The sample has fewer points if the exported network computes many scores for each, at least `scores_per_point`.
        Points whose scores overflow in the reference are left out: the network refuses them.
        """
        claimed = self.certificate.core
        core = self.box.core(REACH) if claimed is None else Box.parse([claimed], self.variables)
        count = int(np.clip(PARITY_SCORES // max(scores_per_point, self.num_anchors, 1), *PARITY_POINTS))
        # A tail is sampled out to 1/√u widths of the core. There, half of the digits of a score are left. At 1/u,
        # rounding allows any value.
        flat = sample_with_tails(self.box, core, count, UNIT_ROUNDOFF[self.dtype] ** -0.5)
        with quiet():
            inputs = split_columns(flat, self.program.input_shapes)
            expected = self.program(*inputs)
            kept = np.isfinite(expected).reshape(len(flat), -1).all(axis=1)
            inputs = [array[kept] for array in inputs]
            differences = np.abs(run(inputs) - expected[kept])
            allowed = 2 * evaluation_error(self.program, inputs)
            shares = np.where(differences == 0, 0.0, differences / allowed)
        if not kept.any():
            return Parity(0, math.nan, math.nan, is_within=False)
        worst = np.unravel_index(np.nan_to_num(shares, nan=math.inf).argmax(), shares.shape)
        is_within = bool((differences <= allowed).all())
        return Parity(int(kept.sum()), float(differences[worst]), float(allowed[worst]), is_within)

    def save(self, path: str | Path) -> None:
        """Write config.json, model.safetensors, certificate.json and README.md. If that fails, nothing is left behind.

        Parameters
        ----------
        path : str or path
            The folder. A certificate for a second dtype is certificate.<dtype>.json in it.

        Raises
        ------
        InputError
            If `path` is not a path.
        FileError
            If the folder cannot be written, or holds something other than a saved network.

        Examples
        --------
        >>> import attnc, os, tempfile
        >>> net = attnc.compile("tanh(x)", {"x": (-1, 1)}, eps=1e-6)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     net.save(f"{folder}/net")
        ...     sorted(os.listdir(f"{folder}/net"))
        ['README.md', 'certificate.json', 'config.json', 'model.safetensors']
        """
        from attnc.model_card import model_card

        folder = folder_named(path)
        save_network(folder, *self._saved(), model_card(self))

    def _saved(self) -> tuple[Program, dict[str, Any], dict[str, dict[str, Any]]]:
        """Return the parts of a saved network: the program, the configuration, and the certificates by file name."""
        stated = self.expression or self.definitions
        config = {
            "construction": self.construction,
            "expression": stated,
            "variables": list(self.variables),
            "box": self.box.as_json(),
            "eps": self.eps,
            "parameters": dict(self.parameters),
            "command": self.command,
        }
        claims = {"certificate.json": self.certificate}
        claims |= {f"certificate.{dtype}.json": claim for dtype, claim in self.also.items()}
        certificates = {name: claim.to_json(stated, self.box) for name, claim in claims.items()}
        return self.program, config, certificates
