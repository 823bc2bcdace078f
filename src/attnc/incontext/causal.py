"""Programs that predict every example of a prompt from the examples before it, as trained models are asked to.

`of_predictor` puts N copies of a predictor side by side (`side_by_side`). Copy i reads the first i examples and the
penalties of the prompt, and its query is x_i. A predictor treats the rows that it does not read as padding, so copy i
returns what the predictor returns for a prompt of i examples. Copies share their weights but for the masks.

Least squares has a program of its own (`newton`), in which one set of examples has a state for each prefix.

There is no intercept: one that is not penalised has no value on the first prefixes, for example on those with one class
or without a count. Columns are scaled and not centred, since their means would tell of later examples. The unit of a
column is that of all examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from attnc.engines.prompt import run
from attnc.errors import InputError
from attnc.incontext.acceleration import Schedule, eigenvalue_bounds
from attnc.incontext.descent import Task
from attnc.incontext.differences import Sizes, choose
from attnc.incontext.domain import Domain
from attnc.incontext.newton import FINEST, NewtonTask
from attnc.incontext.newton_glm import ROW_REACH, CurvedTask, glm_tasks, huber_task, power_of_four
from attnc.incontext.programs import InContextProgram
from attnc.incontext.prompt import Prompt
from attnc.incontext.side_by_side import NOTHING, Part, of_inputs, side_by_side
from attnc.incontext.softmax_regression import SoftmaxTask
from attnc.incontext.turns import CURVATURES, Examples
from attnc.ir.program import Program
from attnc.ir.repeats import rolled
from attnc.ir.spec import check
from attnc.numerics.arrays import Float

LEAST_CONDITION = 16.0
"""The smallest condition of a Newton program. Data with a smaller one share it."""
SETTLED = 1e-9
"""The largest last step on a prefix: a Newton step relative to 1 + the largest weight, or a proximal gradient relative
to the first one. An error of this size is below the digits in which predictions are printed."""
ASKED_ROOM = 1.25
"""The factor by which predictions may exceed their bound in exact arithmetic."""
PACE = 1e-4
"""The eigenvalue by which the momentum of proximal steps is chosen, as a fraction of the largest. Prefixes with fewer
examples than columns have the eigenvalue 0."""

Pace = Callable[[float, float], Schedule]
"""A function that chooses the steps for eigenvalue bounds (L, μ)."""


@dataclass(frozen=True, eq=False)
class Causal:
    """A program that predicts every example from those before it, with inputs.

    Attributes
    ----------
    program : InContextProgram
        The program, and the prompts for which it is built.
    inputs : tuple of arrays
        The inputs for the examples for which it was made.
    unit : float
        The unit of its predictions.
    most : float
        A bound of its predictions before they are multiplied by the unit. Larger ones are those of steps that diverged.

    Examples
    --------
    >>> import attnc
    >>> causal = attnc.incontext.Ridge(alpha=1e-9).causal([[1.0], [2.0], [4.0]], [3.0, 6.0, 12.0])
    >>> [round(float(value), 4) + 0.0 for value in causal.predictions()]
    [0.0, 6.0, 12.0]
    """

    program: InContextProgram
    inputs: tuple[np.ndarray, ...]
    unit: float = 1.0
    most: float = math.inf

    def predictions(self) -> Float[np.ndarray, "rows ..."]:
        """Return the prediction of every example from those before it.

        Returns
        -------
        Array of shape (rows,), or (rows, classes) for more than two classes.

        Raises
        ------
        InputError
            If rounding made the steps diverge on a prefix.

        Examples
        --------
        >>> import attnc
        >>> causal = attnc.incontext.NadarayaWatson(gamma=100.0).causal([[0.0], [9.0], [0.0]], [5.0, 2.0, 1.0])
        >>> [round(float(value), 4) + 0.0 for value in causal.predictions()]
        [0.0, 5.0, 5.0]
        """
        with np.errstate(over="ignore", invalid="ignore"):
            found: np.ndarray = run(self.program.program, self.inputs)
        if not (np.abs(found) <= self.most).all() or not np.isfinite(found).all():
            raise InputError(
                "the steps diverged on some of the first examples: rows of very different sizes leave no digit in "
                "float64. Raise the penalty, or scale such rows down."
            )
        return found * self.unit


def of_predictor(
    predictor: Program, examples: int, rows: int, *, power: float = 0.0, factors: np.ndarray | None = None
) -> Program:
    """Return the causal program of a predictor.

    Parameters
    ----------
    predictor : Program
        A program that fits the examples of its prompt and answers one query, the last row.
    examples : int
        Number of examples.
    rows : int
        Number of rows of the prompt. Those after the examples hold penalties, which every copy reads.
    power : float
        The power of i/examples by which copy i multiplies penalty rows.
    factors : array of shape (examples,), optional
        The factors of the predictions.

    Returns
    -------
    Program
        Its input is the prompt without the query.
    """
    copies, each = np.arange(examples)[:, None], np.arange(rows + 1)
    read = np.where((each >= copies) & (each < examples), NOTHING, each)
    read[:, -1] = np.arange(examples)
    shares = (np.maximum(copies, 1) / examples) ** power
    times = np.where((each >= examples) & (each < rows), shares, 1.0)
    shape = (rows, predictor.input_shapes[-1][1])
    part = Part(predictor, of_inputs(predictor, read, NOTHING), of_inputs(predictor, times, 1.0))
    stream, (at,) = side_by_side([part], shape)
    answer = stream.answer(at, factors)
    outputs = len(answer.channels)
    out = (examples, outputs) if outputs > 1 else (examples,)
    return check(Program(rolled([*stream.layers, answer]), (shape,), out))


def least_squares(X: np.ndarray, y: np.ndarray, alpha: float, name: str) -> Causal:
    """Return the causal form of least squares with the penalty alpha·|w|²."""
    norms, columns = _scaled(X, alpha)
    spread = float(np.linalg.norm(y)) * (1 + 1e-12) or 1.0
    penalty = alpha / norms**2
    condition = power_of_four(max(LEAST_CONDITION, _condition(_prefixes(columns, y, penalty))))
    penalties = (tuple(penalty.tolist()),) if alpha else ()
    task = NewtonTask(Prompt(*X.shape), min(condition, FINEST), is_causal=True, penalties=penalties)
    start, tokens = np.zeros(X.shape[1]), task.tokens(columns, y / spread, np.zeros(X.shape[1]))
    return Causal(InContextProgram(task.program(), task.domain, name), (start, tokens), spread, task.reach)


def curved(
    loss: str, X: np.ndarray, y: np.ndarray, penalty: float, name: str, *, max_iter: int, is_mean: bool = False
) -> Causal:
    """Return the causal form of logistic or Poisson regression, by Newton turns that converge on every prefix.

    The objective of i examples is the sum of their losses and ½ penalty·|w|². If `is_mean`, the penalty is times i.
    """
    raised = penalty * (len(X) if is_mean else 1) / CURVATURES[loss]
    norms, columns = _scaled(X, raised)
    power = 0.5 if is_mean else 0.0
    fits = _prefixes(columns, y, raised / norms**2, 2 * power)
    prompt, doublings = _room(X), math.ceil(math.log2(_condition(fits)))
    for task in glm_tasks(loss, prompt, doublings, float(y.max()), max_iter):
        most = ROW_REACH / task.gradient_scale
        if all(task.steps.converges(each, most) and _is_settled(task, each) for each in fits):
            return _of_curved(task, columns, y, raised / norms**2, power, name)
    raise InputError(
        f"no number of Newton turns up to {max_iter} converges on every prefix of these {len(X)} examples. Raise the "
        "penalty."
    )


def _is_settled(task: CurvedTask, fit: Examples) -> bool:
    """Return whether exact turns end with a small step, and no mean exceeds the one for which the heads are made."""
    path, _, last = task.steps.path(fit)
    is_within = task.loss != "poisson" or float((path @ fit.X.T).max()) <= math.log(task.largest)
    return is_within and last <= SETTLED


def huber(X: np.ndarray, y: np.ndarray, penalty: float, name: str, *, tol: float, max_iter: int) -> Causal:
    """Return the causal form of the Huber loss with threshold 1."""
    norms, columns = _scaled(X, penalty)
    fits = _prefixes(columns, y, penalty / norms**2)
    task, left = huber_task(_room(X), fits, math.ceil(math.log2(_condition(fits))), tol, max_iter)
    if left > tol:
        raise InputError(f"{task.turns} turns leave a step of {left:.3g} on a prefix. Raise max_iter, or the penalty.")
    last = np.stack([task.steps.path(each)[0][-1] for each in fits[:-1]] or [np.zeros(X.shape[1])])
    asked = power_of_four(max(1.0, 2 * float(np.abs((last * columns[-len(last) :]).sum(axis=1)).max())))
    return _of_curved(replace(task, asked=asked), columns, y, penalty / norms**2, 0.0, name)


def _of_curved(
    task: CurvedTask, columns: np.ndarray, y: np.ndarray, penalty: np.ndarray, power: float, name: str
) -> Causal:
    (tokens,) = task.inputs(columns, y, penalty)
    predictor = replace(task, prompt=replace(task.prompt, queries=1)).program()
    program = of_predictor(predictor, len(y), task.prompt.rows, power=power)
    most = ASKED_ROOM * task.asked if task.is_huber else math.inf
    return Causal(InContextProgram(program, replace(task.domain, prefixes=power), name), (tokens[1:],), most=most)


def proximal(
    X: np.ndarray,
    y: np.ndarray,
    l1: float,
    penalty: float,
    name: str,
    *,
    method: str,
    heads: int,
    max_iter: int,
) -> Causal:
    """Return the causal form of Σ (w·x_i − y_i)²/2i + l1·|w|₁ + ½ penalty·|w|², a mean over i examples."""
    scale = np.hypot(np.sqrt((X**2).mean(axis=0)), math.sqrt(penalty))
    scale[scale == 0] = 1.0
    columns, thresholds, penalties = X / scale, l1 / scale, penalty / scale**2
    counts = np.arange(1, len(X) + 1)
    grams = np.cumsum(columns[:, :, None] * columns[:, None, :], axis=0) / counts[:, None, None]
    grams += np.diag(penalties)
    sums = np.cumsum(columns * y[:, None], axis=0) / counts[:, None]
    L = float(np.linalg.eigvalsh(grams)[:, -1].max()) * (1 + 1e-9) or 1.0
    norm = float(np.linalg.norm(y)) * (1 + 1e-12) or 1.0
    steps, w, size = _proximal_steps(grams, sums, thresholds, Schedule(method, max_iter, L, PACE * L), norm)
    schedule = Schedule(method, steps, L, PACE * L)
    x = float(np.sqrt((columns**2).sum(axis=1)).max()) * (1 + 1e-12)
    reach, prompt = schedule.overshoot * norm, Prompt(len(X), X.shape[1], queries=1)
    differences = choose(Sizes(len(X), X.shape[1] + 1, x, reach, size * x + norm, mean=True), heads, "float64")
    asked = max(2 * x * float(np.linalg.norm(w, axis=1).max()), 1e-100)
    given = (tuple(penalties), tuple(thresholds), size)
    task = Task(prompt, schedule, differences, reach, *given, mean=True, asked=asked)
    program = of_predictor(task.program(), len(X), len(X))
    prompt = replace(prompt, queries=0)
    domain = Domain(prompt, x, norm, L=L, penalty=task.penalty, mean=True, prefixes=0.0)
    return Causal(InContextProgram(program, domain, name), (prompt.tokens(columns, y),))


def _proximal_steps(
    grams: np.ndarray, sums: np.ndarray, l1: np.ndarray, schedule: Schedule, norm: float
) -> tuple[int, Float[np.ndarray, "prefixes weights"], float]:
    """Return the steps that converge on every prefix, the last weights, and four times the largest weight before.

    Raises InputError if those of the schedule are too few.
    """
    v = p = np.zeros_like(sums)
    largest, t = 1e-100, 0
    allowed = SETTLED * np.maximum(np.abs(sums).max(axis=1), 1e-300)
    is_nesterov = schedule.iterate == "p"
    for eta, beta in schedule.pairs:
        gradient = np.einsum("nij,nj->ni", grams, v) - sums
        moved = v - eta * gradient
        step = np.sign(moved) * np.maximum(np.abs(moved) - eta * l1, 0.0)
        largest, t = max(largest, float(np.abs(moved).max()), float(np.abs(v).max())), t + 1
        is_settled = (np.abs(step - v).max(axis=1) <= eta * allowed).all()
        v, p = (step + beta * (step - p), step) if is_nesterov else (step, v)
        if is_settled:
            return t, p if is_nesterov else v, 4 * largest
    raise InputError(f"{t} steps do not converge on every prefix. Raise max_iter, or alpha.")


def classes(X: np.ndarray, labels: np.ndarray, penalty: float, name: str, *, schedule: Pace, heads: int) -> Causal:
    """Return the causal form of logistic regression over several classes, by gradient steps on one-hot labels."""
    norms, columns = _scaled(X, 2 * penalty)
    columns, penalties = columns * math.sqrt(len(X)), penalty / norms**2 * len(X)
    norms = norms / math.sqrt(len(X))
    penalties = penalty / norms**2
    L = float(np.linalg.eigvalsh(columns.T @ columns / 2 + np.diag(penalties))[-1]) * (1 + 1e-9)
    x = float(np.sqrt((columns**2).sum(axis=1)).max()) * (1 + 1e-12)
    prompt = Prompt(len(X), X.shape[1], targets=labels.shape[1], queries=1)
    differences = choose(Sizes(len(X), 2, x, 1.0, 2.0), heads, "float64")
    task = SoftmaxTask(prompt, schedule(L, min(float(penalties.min()), L)), differences, 1.0, tuple(penalties))
    program = of_predictor(task.program(), len(X), len(X))
    prompt = replace(prompt, queries=0)
    domain = Domain(prompt, x, target=1.0, L=L, curvature=0.5, penalty=task.penalty)
    return Causal(InContextProgram(program, domain, name), (prompt.tokens(columns, labels),))


def _room(X: np.ndarray) -> Prompt:
    """Return a prompt with rows for penalties."""
    rows, features = X.shape
    return Prompt(rows + features, features)


def _scaled(X: np.ndarray, penalty: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the norms of the columns with their penalties, rounded up, and the columns divided by them."""
    norms = np.sqrt((X**2).sum(axis=0) + penalty) * (1 + 1e-12)
    norms[norms == 0] = 1.0
    return norms, X / norms


def _prefixes(columns: np.ndarray, y: np.ndarray, penalty: np.ndarray, power: float = 0.0) -> list[Examples]:
    """Return the first i examples for every i from 1, with penalties times a power of i/N."""
    rows = len(columns)
    return [Examples(columns[:i], y[:i], np.ones(i), penalty * (i / rows) ** power) for i in range(1, rows + 1)]


def _condition(fits: Sequence[Examples]) -> float:
    """Return the number of weights over the smallest eigenvalue of all prefixes that is not zero."""
    least, weights = 1.0, fits[0].X.shape[1]
    for each in fits:
        gram = each.X.T @ each.X + np.diag(each.penalty)
        if gram.any():
            least = min(least, eigenvalue_bounds(gram)[1])
    return weights / least
