"""Experiment 23: one module with fixed weights computes every head that its prompt encodes, with one certificate."""

from __future__ import annotations

import hashlib

import numpy as np

import attnc
from attnc.incontext import EncodedProgram, Interpreter
from attnc_lab import drawing
from attnc_lab.experiment import About, Cell, Row, Status, Table, Verdict, Verdicts, sweep

SCORES = (4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0)
"""The radii of the balls: the largest score of a key."""
ROWS, VALUE = 48, 2.0
FUNCTIONS = ("sin(3*x)", "exp(-x**2)", "tanh(4*x)", "cos(x)+x**2/2", "1/(1+x**2)", "log(2+x)", "atan(5*x)", "x**3-x")
OUTER, OUTER_REACH = "exp(t)-t**2", 2.25
"""The function with which the others are composed, and its box, which holds their values."""
EPS = 1e-6
POINTS = 501
DRAWS = {"quick": 20, "full": 400}
"""Number of random heads in a ball."""
MODULE = Interpreter(inputs=1, outputs=1, signals=8, steps=6, rows=256, score=2.0**20, value=1024.0, reach=2.0)
"""The module of all compiled programs."""


def cells(profile: str) -> list[Cell]:
    return [
        *sweep(kind="ball", score=SCORES, draws=(DRAWS[profile],)),
        *sweep(kind="function", function=FUNCTIONS, composed=(0, 1)),
    ]


def measure(cell: Cell, seed: int) -> list[Row]:
    if cell["kind"] == "ball":
        return [_in_a_ball(cell["score"], cell["draws"], seed)]
    return [_of_a_function(cell["function"], bool(cell["composed"]))]


def _in_a_ball(score: float, draws: int, seed: int) -> Row:
    """Measure random heads on the boundary of a ball, and return their largest error beside the ball's bound."""
    interpreter = Interpreter(inputs=1, outputs=1, signals=0, steps=1, rows=ROWS, score=score, value=VALUE, reach=1.0)
    rng = np.random.default_rng([seed, int(score)])
    columns = {name: i for i, name in enumerate(interpreter.columns)}
    x = np.linspace(-1, 1, 101)
    worst, weights = 0.0, {_weights(interpreter)}
    for _ in range(draws):
        keys = int(rng.integers(2, ROWS + 1))
        share = rng.uniform(0, 1, keys)
        slopes = score * share * rng.choice([-1.0, 1.0], keys)
        offsets = score * (1 - share) * rng.choice([-1.0, 1.0], keys)
        slopes, offsets = slopes * (1 - 1e-12), offsets * (1 - 1e-12)
        values = rng.choice([-VALUE, VALUE], keys) * rng.uniform(0, 1, keys) ** 0.1
        prompt = np.zeros((ROWS, len(columns)))
        for name, column in (("slope.in.0", slopes), ("offset", offsets), ("value.out.0", values)):
            prompt[:keys, columns[name]] = column
        prompt[:keys, [columns["step.0"], columns["present"]]] = 1.0
        found = interpreter(x[:, None], prompt)[:, 0]
        worst = max(worst, float(np.abs(found - _head(slopes, offsets, values, x)).max()))
    weights.add(_weights(interpreter))
    return {"error": worst, "bound": interpreter.bound().value, "modules": len(weights)}


def _head(slopes: np.ndarray, offsets: np.ndarray, values: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return a head at every x in long double, which has eleven bits more than the module."""
    scores = x.astype(np.longdouble)[:, None] * slopes + offsets
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(weights @ values / weights.sum(axis=1), np.float64)


def _of_a_function(text: str, composed: bool) -> Row:
    """Run a compiled function by the fixed module, alone or composed with another one by concatenated prompts."""
    program = attnc.compile(text, {"x": (-1, 1)}, EPS).as_prompt()
    if composed:
        program = program.then(attnc.compile(OUTER, {"t": (-OUTER_REACH, OUTER_REACH)}, EPS).as_prompt())
    x = np.linspace(-1, 1, POINTS)
    exact = attnc.as_target(text, {"x": (-1, 1)})(x[:, None]).reshape(-1)
    if composed:
        exact = np.exp(exact) - exact**2
    error = np.abs(MODULE(x[:, None], program)[:, 0] - exact).max()
    return {
        "error": float(error),
        "bound": _stated(program) + MODULE.deviation(program),
        "deviation": MODULE.deviation(program),
        "keys": program.num_keys,
        "steps": program.num_steps,
        "weights": _weights(MODULE),
    }


def _stated(program: EncodedProgram) -> float:
    return float("inf") if program.bound is None else program.bound


def _weights(interpreter: Interpreter) -> str:
    """Return a hash of every number of the module."""
    made = hashlib.sha256()
    for name, tensor in sorted(interpreter.to_torch().state_dict().items()):
        made.update(name.encode())
        made.update(tensor.numpy().tobytes())
    return made.hexdigest()[:16]


def judge(table: Table) -> Verdicts:
    balls, functions = table.where(kind="ball"), table.where(kind="function")
    looseness = balls.ratio("bound", "error")
    yield Verdict(
        "One certificate holds for all programs of one head in a norm ball.",
        Status.HOLDS.when(balls.is_within("error", "bound")),
        f"for {len(balls)} radii the errors of random heads on the boundary of the ball are below the one bound of the "
        f"module, which is {looseness.min():.0f} to {looseness.max():.0f} times the largest of them. It grows like the "
        "radius: rounding of scores.",
        {"least_looseness": looseness.min(), "largest_looseness": looseness.max()},
    )
    hashes = len(functions.distinct("weights"))
    is_one = hashes == 1 and bool((balls.column("modules") == 1).all())
    alone, both = functions.where(composed=0), functions.where(composed=1)
    yield Verdict(
        "A fixed module computes every function from its prompt (2508.17550).",
        Status.HOLDS.when(functions.is_within("error", "bound") and is_one),
        f"{len(alone)} functions and {len(both)} compositions, compiled to "
        f"{EPS:g}, run by one module whose weights are the same bytes for all. The largest error is "
        f"{functions.column('error').max():.2g}, and every error is below its proven bound.",
        {"modules": float(hashes), "largest_error": functions.column("error").max()},
    )
    share = both.ratio("deviation", "bound").max()
    yield Verdict(
        "Prompts concatenate to compositions.",
        Status.HOLDS.when(both.is_within("error", "bound") and bool((both.column("steps") > 1).all())),
        f"the rows of two prompts, one below the other, compute {OUTER} of each function. The module's own part of the "
        f"bound is at most {share:.2g} of it.",
        {"share": share},
    )


def draw(table: Table, picture: drawing.Figure) -> None:
    left, right = drawing.panels(picture, 2)
    balls, functions = table.where(kind="ball"), table.where(kind="function")
    left.label("one bound for all heads in a ball", "radius: the largest score", "error", log="xy")
    left.line(balls, "score", "bound", "the module's bound", drawing.INK)
    left.points(balls, "score", "error", "largest error of random heads", drawing.BLUE)
    left.legend(1)
    right.label("compiled functions, one module", "keys in the prompt", "error", log="y")
    for composed, name, colour, marker in ((0, "alone", drawing.GREEN, "o"), (1, "composed", drawing.ORANGE, "^")):
        rows = functions.where(composed=composed)
        right.points(rows, "keys", "error", f"error, {name}", colour, marker)
        right.points(rows, "keys", "bound", f"bound, {name}", colour, "D" if composed else "s")
    right.legend(2)


ABOUT = About(
    23,
    "The prompt as a program",
    "Can one module with fixed weights run whatever its prompt encodes, with one certificate for all prompts?",
    "The module's rounding alone: at most (spread of values)·ζ/2 for errors ζ of scores, which grow like the largest "
    "score. Compositions add their bounds, times Lipschitz constants.",
    "beyond the papers; 2508.17550: in-context emulation of algorithms by fixed weights; the page prompts.md",
)
