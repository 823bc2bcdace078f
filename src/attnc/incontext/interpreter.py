"""A prompt as a program: one fixed module computes whatever heads its prompt encodes.

A row of the prompt is a key of a head: its slopes, its offset, its values, and the number of the step in which its head
runs. The main stream has one token, which holds the inputs, the signals that heads write, and the outputs. All turns of
the module are equal, and no weight depends on a prompt. A turn is

    run       cross-attention: the score of key k is a_k·s + c_k, and the values of a head are added to the signals that
              it writes
    advance   affine: the channel `other.t` is 0 in step t and 1 otherwise. It moves on by one

Silence.  Keys of other steps, and rows that hold no key, have −M in their scores. A sink of value 0 has the score −M/2.
          It wins where a step has no keys. The penalty of a live key is the exact number 0, so that it rounds nothing.

Theorem.  For every prompt in the domain, an output of the module and of the heads in exact arithmetic differ by at most
          `deviation(prompt)`, rounding included, at all inputs within `reach`. For prompts of one head, `bound()` is a
          number that holds for all prompts in the domain.
Proof.    On the domain Σ|a_i|·reach + Σ|a_m|·value + |c| ≤ B = score, so a silent score is at least M/2 − 2B ≥ DEEP
          below a live one, and the weights of all silent keys together are at most (rows + 1)·e^−DEEP. Let the numbers
          s_c be off by at most e_c, and computed scores by at most η. If the slopes are within A_c of a common middle,
          the scores of a head are off by at most ζ = Σ A_c e_c + η, up to a term that all share. The weights p, q of
          such scores have a total variation of at most tanh(ζ/2) ≤ ζ/2, because the logarithms of p_k/q_k lie in an
          interval of length 2ζ. So Σ p_k v_k and Σ q_k v_k differ by at most (max v − min v)·ζ/2. Sums over n keys
          round by γ_n max|v|. A signal is written once, so its error is that of its head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.errors import InputError, real_number, whole_number
from attnc.incontext.differences import rounded_up
from attnc.incontext.domain import LIMIT_SLACK, OutsideDomain
from attnc.ir.building import AffineBuilder, Attending, reading
from attnc.ir.layers import Attention, Layer
from attnc.ir.program import Program
from attnc.ir.repeats import rolled
from attnc.ir.soft_head import SoftHead
from attnc.ir.spec import check
from attnc.numerics.arrays import Float, real_array
from attnc.numerics.bound import Bound
from attnc.numerics.rounding import ENGINE_ULPS, UNIT_ROUNDOFF, gamma, up
from attnc.targets.box import Box

if TYPE_CHECKING:
    from attnc.engines.torch_layers import LayeredNetwork
    from attnc.exports.safe_files import PathLike

DEEP = 800.0
"""The least distance of a silent score from a live one. e^−745 is 0 in float64, and 55 are left for rounding."""
LEAK = 1e-300
"""More than e^−DEEP times any number of keys."""
MOST_ROWS = 2**16
"""The most keys of a prompt: the memory of one point then takes 100 MB."""
MOST_STEPS = 2**10
"""The most heads of a prompt. Every step is a layer of attention over all rows."""
BLOCK_NUMBERS = 2**22
"""The most numbers of the memory of a block of points."""
ONE, REST, ABSENT = "one", "rest", "absent"


def named(kind: str, count: int) -> tuple[str, ...]:
    """Return the channels kind.0, kind.1, …"""
    return tuple(f"{kind}.{i}" for i in range(count))


@dataclass(frozen=True, eq=False)
class EncodedHead:
    """A head with constant keys and values that reads and writes channels of the interpreter.

    Attributes
    ----------
    reads : tuple of str
        The channels whose numbers the scores depend on, such as "in.0" and "signal.2".
    keys : SoftHead
        Slopes for these channels, offsets, and values for the channels that it writes.
    writes : tuple of str
        The channels that it writes, such as "signal.2" and "out.0".

    Examples
    --------
    >>> import attnc
    >>> (head,) = attnc.compile("sin(x)", {"x": (-1, 1)}, 1e-4).as_prompt().heads
    >>> head.reads, head.writes
    (('in.0',), ('out.0',))
    """

    reads: tuple[str, ...]
    keys: SoftHead[np.ndarray]
    writes: tuple[str, ...]

    def renamed(self, names: dict[str, str]) -> EncodedHead:
        """Return the head with other channels. Those that `names` lacks stay.

        Parameters
        ----------
        names : dict
            Old name → new name.

        Returns
        -------
        EncodedHead
            A new head.

        Examples
        --------
        >>> import attnc
        >>> (head,) = attnc.compile("sin(x)", {"x": (-1, 1)}, 0.1).as_prompt().heads
        >>> head.renamed({"out.0": "signal.0"}).writes
        ('signal.0',)
        """
        reads, writes = (tuple(names.get(name, name) for name in each) for each in (self.reads, self.writes))
        return replace(self, reads=reads, writes=writes)


@dataclass(frozen=True, eq=False, repr=False)
class EncodedProgram:
    """A network as a prompt of an `Interpreter`. `net.as_prompt()` makes one.

    Attributes
    ----------
    text : str
        The function that it computes.
    box : Box
        The range of each input.
    heads : tuple of EncodedHead
        The heads, in the order in which they run.
    num_outputs : int
        The number of outputs.
    bound : float or None
        A proven bound of |heads − function| over the box, in every output. None if nothing is proved.
    values : array of shape (outputs, 2)
        The least and the largest value of every output of the function on the box, by interval arithmetic.
    lipschitz : float
        A Lipschitz constant of the function on the box, from the 2-norm to the largest output. Infinite if none is
        known.

    Examples
    --------
    >>> import attnc
    >>> program = attnc.compile("sin(x)", {"x": (-1, 1)}, 1e-4).as_prompt()
    >>> program.num_steps, program.bound < 1e-4
    (1, True)
    """

    text: str
    box: Box
    heads: tuple[EncodedHead, ...]
    num_outputs: int
    bound: float | None
    values: Float[np.ndarray, "outputs 2"]
    lipschitz: float = math.inf

    def __repr__(self) -> str:
        stated = "no bound" if self.bound is None else f"bound {self.bound:.3g}"
        return f"<EncodedProgram {self.text}: {self.num_keys} keys in {self.num_steps} steps, {stated}>"

    @property
    def num_inputs(self) -> int:
        """The number of inputs.

        Examples
        --------
        >>> import attnc
        >>> attnc.compile("sin(x)", {"x": (-1, 1)}, 0.1).as_prompt().num_inputs
        1
        """
        return self.box.d

    @property
    def num_steps(self) -> int:
        """The number of heads: each takes one step.

        Examples
        --------
        >>> import attnc
        >>> attnc.compile("sin(x)", {"x": (-1, 1)}, 0.1).as_prompt().num_steps
        1
        """
        return len(self.heads)

    @property
    def num_keys(self) -> int:
        """The number of keys of all heads.

        Examples
        --------
        >>> import attnc
        >>> net = attnc.compile("sin(x)", {"x": (-1, 1)}, 0.1)
        >>> net.as_prompt().num_keys == net.num_anchors
        True
        """
        return sum(head.keys.num_keys for head in self.heads)

    @property
    def num_signals(self) -> int:
        """The number of signals that heads pass on to later heads.

        Examples
        --------
        >>> import attnc
        >>> program = attnc.compile("sin(x)", {"x": (-1, 1)}, 0.1).as_prompt()
        >>> program.num_signals, program.then(attnc.compile("x**2", {"x": (-2, 2)}, 0.1).as_prompt()).num_signals
        (0, 2)
        """
        return len({name for head in self.heads for name in head.writes if name.startswith("signal.")})

    def then(self, after: EncodedProgram) -> EncodedProgram:
        """Return the composition after ∘ self: the rows of both prompts, one below the other.

        The outputs of the first program become signals, which the second reads as its inputs.

        Parameters
        ----------
        after : EncodedProgram
            The program that takes the outputs of this one. Its box must hold them.

        Returns
        -------
        EncodedProgram
            Its bound is after.bound + after.lipschitz·√(number of outputs)·self.bound, if all of these are known.

        Raises
        ------
        InputError
            If the numbers of outputs and inputs differ, or the outputs may leave the box.

        Examples
        --------
        >>> import attnc
        >>> inner = attnc.compile("sin(x)", {"x": (-1, 1)}, 1e-6).as_prompt()
        >>> outer = attnc.compile("exp(t)", {"t": (-2, 2)}, 1e-6).as_prompt()
        >>> both = inner.then(outer)
        >>> both.num_steps, both.bound < 1e-5
        (2, True)
        """
        if self.num_outputs != after.num_inputs:
            raise InputError(
                f"{self.text} has {self.num_outputs} outputs, and {after.text} takes {after.num_inputs} inputs: "
                "compose programs whose numbers agree"
            )
        lo, hi = self._reached()
        if not ((after.box.lo <= lo) & (hi <= after.box.hi)).all():
            found = ", ".join(f"[{a:.6g}, {b:.6g}]" for a, b in zip(lo, hi, strict=True))
            raise InputError(
                f"the outputs of {self.text} lie in {found}, beyond the box {after.box} of {after.text}: compile the "
                "second function for a larger box"
            )
        own = self.num_signals
        passed = {f"out.{i}": f"signal.{own + i}" for i in range(self.num_outputs)}
        taken = {f"in.{i}": f"signal.{own + i}" for i in range(self.num_outputs)}
        taken |= {f"signal.{m}": f"signal.{own + self.num_outputs + m}" for m in range(after.num_signals)}
        heads = (*(head.renamed(passed) for head in self.heads), *(head.renamed(taken) for head in after.heads))
        slope = up(after.lipschitz * up(math.sqrt(self.num_outputs)), 2)
        bound = None
        if self.bound is not None and after.bound is not None and math.isfinite(slope):
            bound = float(up(after.bound + up(slope * self.bound)))
        return EncodedProgram(
            f"({after.text}) of ({self.text})",
            self.box,
            heads,
            after.num_outputs,
            bound,
            after.values,
            float(up(slope * self.lipschitz)),
        )

    def _reached(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the ends of the ranges of the computed outputs: those of the heads' values, or of the function."""
        ends = np.array([[-math.inf, math.inf]] * self.num_outputs)
        for head in self.heads:
            for column, name in enumerate(head.writes):
                if name.startswith("out."):
                    values = head.keys.values[:, column]
                    ends[int(name[4:])] = values.min(), values.max()
        if self.bound is None:
            return ends[:, 0], ends[:, 1]
        lo, hi = -up(self.bound - self.values[:, 0]), up(self.values[:, 1] + self.bound)
        return np.maximum(ends[:, 0], lo), np.minimum(ends[:, 1], hi)


@dataclass(frozen=True)
class Interpreter:
    """A module of affine maps and softmax attention whose weights depend on its sizes alone, and not on any program.

    Parameters
    ----------
    inputs, outputs : int
        The number of inputs and outputs.
    signals : int
        The most numbers that heads pass on to later heads.
    steps : int
        The most heads of a program, and the number of attention layers.
    rows : int
        The most keys of a program: the rows of its prompt.
    score : float
        The largest score of a key: Σ|slope|·(reach or value) + |offset|.
    value : float
        The largest absolute value of a key.
    reach : float
        The largest absolute input.

    Examples
    --------
    >>> import attnc
    >>> interpreter = attnc.incontext.Interpreter(inputs=1, outputs=1)
    >>> prompts = [attnc.compile(f, {"x": (-1, 1)}, 1e-6).as_prompt() for f in ("sin(x)", "exp(x)", "tanh(sin(3*x))")]
    >>> [round(float(interpreter([[0.5]], prompt)[0, 0]), 3) for prompt in prompts]
    [0.479, 1.649, 0.761]
    """

    inputs: int = 1
    outputs: int = 1
    signals: int = 16
    steps: int = 24
    rows: int = 512
    score: float = 16384.0
    value: float = 64.0
    reach: float = 64.0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("inputs", 1, 64),
            ("outputs", 1, 64),
            ("signals", 0, MOST_STEPS),
            ("steps", 1, MOST_STEPS),
            ("rows", 1, MOST_ROWS),
        ):
            whole_number(name, getattr(self, name), least, most)
        for name in ("score", "value", "reach"):
            if not 2.0**-20 <= real_number(name, getattr(self, name)) <= 2.0**40:
                raise InputError(f"{name} is a number from 2^-20 to 2^40, found {getattr(self, name)}")

    @classmethod
    def fitting(cls, *programs: EncodedProgram) -> Interpreter:
        """Return an interpreter that is large enough for some programs.

        Parameters
        ----------
        *programs : EncodedProgram
            The programs.

        Returns
        -------
        Interpreter

        Raises
        ------
        InputError
            If no program is given.

        Examples
        --------
        >>> import attnc
        >>> program = attnc.compile("sin(x)", {"x": (-1, 1)}, 1e-4).as_prompt()
        >>> attnc.incontext.Interpreter.fitting(program).steps
        1
        """
        if not programs:
            raise InputError("an interpreter is made for at least one program")
        value = max([1.0, *(float(np.abs(head.keys.values).max()) for each in programs for head in each.heads)])
        reach = max(float(each.box.magnitude.max()) for each in programs)
        sized = cls(
            inputs=max(each.num_inputs for each in programs),
            outputs=max(each.num_outputs for each in programs),
            signals=max(each.num_signals for each in programs),
            steps=max(each.num_steps for each in programs),
            rows=max(each.num_keys for each in programs),
            value=_power_of_two(value),
            reach=_power_of_two(reach),
        )
        scores = [float(sized._sizes(head).max()) for each in programs for head in each.heads]
        return replace(sized, score=_power_of_two(max(1.0, *scores)))

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns of a prompt.

        Examples
        --------
        >>> import attnc
        >>> attnc.incontext.Interpreter(inputs=1, outputs=1, signals=0, steps=1, rows=4).columns
        ('slope.in.0', 'offset', 'value.out.0', 'step.0', 'present')
        """
        slopes = tuple(f"slope.{name}" for name in self._read)
        values = tuple(f"value.{name}" for name in self._written)
        return (*slopes, "offset", *values, *named("step", self.steps), "present")

    @cached_property
    def program(self) -> Program:
        """The module: its inputs are a point, (inputs,), and a prompt, (rows, columns).

        Examples
        --------
        >>> import attnc
        >>> attnc.incontext.Interpreter(inputs=1, outputs=1, signals=0, steps=1, rows=4).program.input_shapes
        ((1,), (4, 5))
        """
        memory = AffineBuilder(self.rows, self.columns, self.rows + 1, self._keyed)
        everywhere = np.arange(self.rows)
        memory.copy(everywhere, everywhere, self.columns[:-1])
        memory.set(everywhere, ABSENT, 1.0)
        memory.link(everywhere, ABSENT, everywhere, "present", -1.0)
        memory.set(self.rows, REST, 1.0)
        run, advance = self._run(), self._advance()
        layers: list[Layer] = [self._begin()]
        for t in range(self.steps):
            layers += [replace(run, name=f"run{t + 1}"), replace(advance, name=f"advance{t + 1}")]
        outputs = {name: name for name in named("out", self.outputs)}
        layers.append(reading("answer", 1, self._state, [0], outputs, "float64"))
        shapes = ((self.inputs,), (self.rows, len(self.columns)))
        return check(Program(rolled(layers), shapes, (self.outputs,), (memory.build("place"),)))

    def prompt(self, program: EncodedProgram) -> Float[np.ndarray, "rows columns"]:
        """Return the prompt of a program: a row for every key, and rows of zeros below.

        Parameters
        ----------
        program : EncodedProgram
            The program.

        Returns
        -------
        array of shape (rows, len(columns))

        Raises
        ------
        OutsideDomain
            If the program is too large for this interpreter. The message lists what is too large.

        Examples
        --------
        >>> import attnc
        >>> program = attnc.compile("sin(x)", {"x": (-1, 1)}, 1e-4).as_prompt()
        >>> interpreter = attnc.incontext.Interpreter.fitting(program)
        >>> interpreter.prompt(program).shape == (program.num_keys, len(interpreter.columns))
        True
        """
        self._require_room(program)
        columns = {name: i for i, name in enumerate(self.columns)}
        tokens = np.zeros((self.rows, len(columns)))
        row = 0
        for step, head in enumerate(program.heads):
            own = slice(row, row + head.keys.num_keys)
            tokens[own, [columns[f"slope.{name}"] for name in head.reads]] = head.keys.slopes
            tokens[own, columns["offset"]] = head.keys.offsets
            tokens[own, [columns[f"value.{name}"] for name in head.writes]] = head.keys.values
            tokens[own, columns[f"step.{step}"]] = tokens[own, columns["present"]] = 1.0
            row = own.stop
        self.check(tokens)
        return tokens

    def check(self, prompt: Any) -> None:
        """Raise OutsideDomain if a prompt is not a program for this interpreter.

        Parameters
        ----------
        prompt : array of shape (rows, len(columns))
            The prompt.

        Raises
        ------
        OutsideDomain
            If a key is larger than the limits, or a row is neither a key nor empty.
        InputError
            If the prompt has another shape, or a number that is not finite.

        Examples
        --------
        >>> import attnc, numpy as np
        >>> interpreter = attnc.incontext.Interpreter(rows=4)
        >>> interpreter.check(np.zeros((4, len(interpreter.columns))))  # an empty program, whose outputs are 0
        """
        given = real_array("prompts", prompt)
        if given.shape != (self.rows, len(self.columns)) or not np.isfinite(given).all():
            raise InputError(
                f"the prompt of this interpreter has the shape {(self.rows, len(self.columns))} and finite numbers, "
                f"found {given.shape}: `interpreter.prompt(program)` makes one"
            )
        num_read, num_written = len(self._read), len(self._written)
        slopes, offset, values, step, present = np.split(
            given, np.cumsum([num_read, 1, num_written, self.steps]), axis=1
        )
        found = []
        if not np.isin(present, (0.0, 1.0)).all():
            found.append("`present` is neither 1, for a key, nor 0, for an empty row")
        is_key = present[:, 0] == 1
        if given[~is_key].any():
            found.append("a row with `present` 0 is not empty")
        if not (np.isin(step, (0.0, 1.0)).all() and (step[is_key].sum(axis=1) == 1).all()):
            found.append("a key is not in exactly one step")
        size = float(up((np.abs(slopes) @ self._limits)[:, None] + np.abs(offset), len(slopes[0]) + 2).max(initial=0))
        if size > self.score * LIMIT_SLACK:
            found.append(f"a score may be {size:.6g}, above {self.score:g}")
        if (largest := float(np.abs(values).max(initial=0))) > self.value * LIMIT_SLACK:
            found.append(f"a value is {largest:.6g}, above {self.value:g}")
        if (column := _written_twice(step, values)) is not None:
            found.append(f"heads of two steps write {self._written[column]}")
        if (column := _read_early(step, slopes[:, self.inputs :], values[:, : self.signals])) is not None:
            found.append(f"signal.{column} is read before a head writes it")
        if found:
            raise OutsideDomain(
                f"the prompt is outside of the domain of this interpreter: {'; '.join(found)}. "
                "`Interpreter.fitting(program)` is large enough for a program."
            )

    def __call__(self, points: Any, prompt: Any) -> Float[np.ndarray, "batch outputs"]:
        """Run the module on points, all with the same prompt.

        Parameters
        ----------
        points : array of shape (batch, inputs)
            The inputs, of absolute value at most `reach`. A program of fewer inputs takes the first columns.
        prompt : EncodedProgram or array
            The program, or the array that `prompt` makes of it.

        Returns
        -------
        array of shape (batch, outputs)

        Raises
        ------
        OutsideDomain
            If the prompt is outside of the domain, or a point lies beyond `reach` or beyond the box of the program.
        """
        given = np.atleast_2d(real_array("points", points))
        tokens = prompt
        if isinstance(prompt, EncodedProgram):
            tokens = self.prompt(prompt)
            if given.shape[1] == prompt.num_inputs and not prompt.box.contains(given).all():
                raise OutsideDomain(f"a point lies outside of {prompt.box}, the box of {prompt.text}")
            given = np.pad(given, ((0, 0), (0, max(0, self.inputs - given.shape[1]))))
        else:
            self.check(tokens)
            tokens = np.asarray(tokens, np.float64)
        if given.ndim != 2 or given.shape[1] != self.inputs or not (np.abs(given) <= self.reach).all():
            raise OutsideDomain(
                f"this interpreter takes points of shape (batch, {self.inputs}) with numbers of at most {self.reach:g}"
            )
        block = max(1, BLOCK_NUMBERS // (tokens.size + len(self._keyed)))
        found = [np.zeros((0, self.outputs))]
        for at in range(0, len(given), block):
            some = given[at : at + block]
            found.append(self.program(some, np.broadcast_to(tokens, (len(some), *tokens.shape))))
        return np.concatenate(found)

    def bound(self) -> Bound:
        """Return a bound of |module − head| for all programs of one head in the domain, and all inputs within `reach`.

        Returns
        -------
        Bound
            The head is taken in exact arithmetic. The rounding of the module is included.

        Examples
        --------
        >>> import attnc
        >>> attnc.incontext.Interpreter(inputs=2, rows=100, score=64.0, value=8.0).bound().value < 1e-10
        True
        """
        moved = self._moved(self.score, 0.0)
        return self._head_error(2 * self.value, self.value, moved)

    def deviation(self, program: EncodedProgram) -> float:
        """Bound |module − heads| in every output, for one program and all points of its box.

        Parameters
        ----------
        program : EncodedProgram
            The program.

        Returns
        -------
        float
            The heads are taken in exact arithmetic. With `program.bound` it adds up to a bound of |module − function|.

        Examples
        --------
        >>> import attnc
        >>> program = attnc.compile("tanh(sin(3*x))", {"x": (-1, 1)}, 1e-6).as_prompt()
        >>> attnc.incontext.Interpreter.fitting(program).deviation(program) < 1e-11
        True
        """
        self._require_room(program)
        errors = dict.fromkeys(named("in", self.inputs), 0.0)
        largest = dict(zip(named("in", program.num_inputs), program.box.magnitude.tolist(), strict=True))
        for head in program.heads:
            slopes = np.abs(head.keys.slopes)
            size = np.array([largest[name] for name in head.reads])
            off = np.array([errors[name] for name in head.reads])
            scores = float(up(slopes @ (size + off) + np.abs(head.keys.offsets), len(off) + 3).max())
            width = np.ptp(head.keys.slopes, axis=0) / 2
            moved = self._moved(scores, float(up(width @ off, len(off) + 4)))
            for column, name in enumerate(head.writes):
                values = head.keys.values[:, column]
                top = float(np.abs(values).max())
                errors[name] = self._head_error(float(up(np.ptp(values))), top, moved).value
                largest[name] = float(up(top + errors[name]))
        return max(errors[name] for name in named("out", program.num_outputs))

    def to_torch(self, *, trainable: bool = False) -> LayeredNetwork:
        """Return the module for torch. Its turns share one set of weights.

        Parameters
        ----------
        trainable : bool
            Whether its parameters need gradients.

        Returns
        -------
        torch.nn.Module
            It takes points (batch, inputs) and prompts (batch, rows, columns), and checks neither.

        Examples
        --------
        >>> import attnc, torch
        >>> program = attnc.compile("sin(x)", {"x": (-1, 1)}, 1e-6).as_prompt()
        >>> interpreter = attnc.incontext.Interpreter.fitting(program)
        >>> prompt = torch.tensor(interpreter.prompt(program))[None]
        >>> round(interpreter.to_torch()(torch.tensor([[0.5]], dtype=torch.float64), prompt).item(), 4)
        0.4794
        """
        from attnc.engines.torch_layers import LayeredNetwork

        return LayeredNetwork(self.program, trainable=trainable).eval()

    def export_onnx(self, path: PathLike) -> None:
        """Write the module as an ONNX file, whose turns are one Loop. Points and prompts are its inputs.

        Parameters
        ----------
        path : path
            The file, which is replaced if it exists.

        Examples
        --------
        >>> import attnc, os, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     attnc.incontext.Interpreter(rows=64).export_onnx(f"{folder}/interpreter.onnx")
        ...     os.listdir(folder)
        ['interpreter.onnx']
        """
        from attnc.exports.onnx_layers import export_layers

        export_layers(self.program, path, metadata={"attnc.algorithm": "interpreter"})

    # --- channels -----------------------------------------------------------------------------------------------------

    @cached_property
    def _read(self) -> tuple[str, ...]:
        return (*named("in", self.inputs), *named("signal", self.signals))

    @cached_property
    def _written(self) -> tuple[str, ...]:
        return (*named("signal", self.signals), *named("out", self.outputs))

    @cached_property
    def _state(self) -> tuple[str, ...]:
        return (*named("in", self.inputs), *self._written, ONE, *named("other", self.steps))

    @cached_property
    def _keyed(self) -> tuple[str, ...]:
        return (*self.columns[:-1], ABSENT, REST)

    @cached_property
    def _limits(self) -> Float[np.ndarray, " read"]:
        """The largest absolute number of each channel that a head may read."""
        return np.array([self.reach] * self.inputs + [self.value] * self.signals)

    @property
    def _silence(self) -> float:
        """M: twice the distance DEEP + 2B, as a power of two."""
        return _power_of_two(2 * (DEEP + 2 * self.score))

    # --- layers -------------------------------------------------------------------------------------------------------

    def _begin(self) -> Layer:
        inputs = named("in", self.inputs)
        begin = AffineBuilder(1, inputs, 1, self._state)
        begin.copy(0, 0, inputs)
        begin.set(0, ONE, 1.0)
        for name in named("other", self.steps)[1:]:
            begin.set(0, name, 1.0)
        return begin.build("begin")

    def _run(self) -> Attention:
        M = self._silence
        queries = {(name, f"slope.{name}"): 1.0 for name in self._read} | {(ONE, "offset"): 1.0}
        queries |= {(f"other.{t}", f"step.{t}"): 1.0 for t in range(self.steps)} | {
            (ONE, ABSENT): 1.0,
            (ONE, REST): 1.0,
        }
        keys = {(f"slope.{name}", f"slope.{name}"): 1.0 for name in self._read} | {("offset", "offset"): 1.0}
        keys |= {(name, name): -M for name in (*named("step", self.steps), ABSENT)} | {(REST, REST): -M / 2}
        values = {(f"value.{name}", name): 1.0 for name in self._written}
        outputs = {(name, name): 1.0 for name in self._written}
        head = Attending(self._state, self._keyed, "float64").head(queries, keys, values, outputs)
        return Attention("run", (head,), self._state, residual=True, cross=True)

    def _advance(self) -> Layer:
        advance = AffineBuilder(1, self._state, 1, self._state)
        others = named("other", self.steps)
        advance.copy(0, 0, self._state[: -len(others)])
        advance.link(0, others[0], 0, ONE)
        for before, name in pairwise(others):
            advance.link(0, name, 0, before)
        return advance.build("advance")

    # --- bounds -------------------------------------------------------------------------------------------------------

    def _sizes(self, head: EncodedHead) -> Float[np.ndarray, " keys"]:
        """Return a bound of the absolute score of each key."""
        limits = dict(zip(self._read, self._limits.tolist(), strict=True))
        slopes = np.abs(head.keys.slopes) @ np.array([limits[name] for name in head.reads])
        return np.asarray(up(slopes + np.abs(head.keys.offsets), len(head.reads) + 2))

    def _moved(self, scores: float, by_errors: float) -> float:
        """Bound ζ: the error of scores of at most `scores`, those of the numbers that they read included.

        A score is a sum of all terms of the head, its difference from the largest one rounds once more, and weights are
        within ENGINE_ULPS ulp for exact scores.
        """
        u, terms = UNIT_ROUNDOFF["float64"], len(self._read) + self.steps + 3
        return float(up(by_errors + (gamma(terms + 2, u) + 2 * u) * scores + (2 * ENGINE_ULPS["float64"] + 2) * u, 8))

    def _head_error(self, spread: float, largest: float, moved: float) -> Bound:
        """Bound the error of Σ w_k v_k with values in an interval of length `spread`, of absolute value ≤ `largest`."""
        summed = gamma(self.rows + 4, UNIT_ROUNDOFF["float64"])
        return rounded_up(
            ("scores", spread * moved / 2, "the errors of scores, and of the numbers that they read"),
            ("rounding", summed * largest, "sums over keys"),
            ("leak", LEAK * largest, "keys of other steps, and empty rows"),
        )

    def _require_room(self, program: EncodedProgram) -> None:
        asked = {
            "inputs": (program.num_inputs, self.inputs),
            "outputs": (program.num_outputs, self.outputs),
            "signals": (program.num_signals, self.signals),
            "steps": (program.num_steps, self.steps),
            "rows": (program.num_keys, self.rows),
        }
        found = [
            f"it has {size} {name}, and there is room for {most}" for name, (size, most) in asked.items() if size > most
        ]
        if (reach := float(program.box.magnitude.max())) > self.reach:
            found.append(f"its box reaches to {reach:.6g}, and inputs may be at most {self.reach:g}")
        if found:
            raise OutsideDomain(
                f"{program.text} does not fit this interpreter: {'; '.join(found)}. `Interpreter.fitting(program)` is "
                "large enough."
            )


def _power_of_two(number: float) -> float:
    return math.ldexp(1.0, math.ceil(math.log2(number)))


def _steps_of(
    step: Float[np.ndarray, "rows steps"], entries: Float[np.ndarray, "rows columns"]
) -> Iterator[np.ndarray]:
    """Yield the steps, ascending, whose keys have an entry in each column."""
    for column in entries.T:
        yield np.flatnonzero(step[column != 0].any(axis=0)) if column.any() else np.zeros(0, np.int64)


def _written_twice(step: np.ndarray, values: np.ndarray) -> int | None:
    """Return a column that keys of two steps write, or None."""
    return next((column for column, steps in enumerate(_steps_of(step, values)) if len(steps) > 1), None)


def _read_early(step: np.ndarray, slopes: np.ndarray, values: np.ndarray) -> int | None:
    """Return a signal that keys read in the step in which it is written, or before, or None."""
    pairs: Sequence[tuple[np.ndarray, np.ndarray]] = list(
        zip(_steps_of(step, slopes), _steps_of(step, values), strict=True)
    )
    return next(
        (m for m, (read, written) in enumerate(pairs) if len(read) and len(written) and read[0] <= written[0]), None
    )
