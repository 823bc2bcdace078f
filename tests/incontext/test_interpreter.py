"""One module, many programs: the prompt alone decides which function it computes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attnc
from attnc.incontext import EncodedHead, EncodedProgram, Interpreter, OutsideDomain
from attnc.ir.soft_head import SoftHead

CASES = [
    ("sin(2*x)", {"x": (-2, 2)}),
    ("sin(x) + cos(y)", {"x": (-3, 3), "y": (-3, 3)}),
    ("exp(sin(x)*y) + x", {"x": (-1, 2), "y": (-2, 1)}),
    ("(x*y, 2*x - 1)", {"x": (-1, 1), "y": (0, 1)}),
    ("max(x, y**2)", {"x": (-1, 1), "y": (-1, 1)}),
]


@pytest.fixture(scope="module")
def programs() -> list[EncodedProgram]:
    return [attnc.compile(text, box, 1e-5).as_prompt() for text, box in CASES]


@pytest.fixture(scope="module")
def interpreter(programs: list[EncodedProgram]) -> Interpreter:
    return Interpreter.fitting(*programs)


def points_of(program: EncodedProgram, count: int = 100) -> np.ndarray:
    return np.random.default_rng(0).uniform(program.box.lo, program.box.hi, (count, program.num_inputs))


def exactly(program: EncodedProgram, points: np.ndarray) -> np.ndarray:
    """The heads one after the other, in long double."""
    known = {f"in.{i}": column for i, column in enumerate(points.T.astype(np.longdouble))}
    for head in program.heads:
        x = np.column_stack([known[name] for name in head.reads]) if head.reads else np.zeros((len(points), 0))
        scores = x @ head.keys.slopes.astype(np.longdouble).T + head.keys.offsets
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        values = weights @ head.keys.values.astype(np.longdouble) / weights.sum(axis=1, keepdims=True)
        known |= dict(zip(head.writes, values.T, strict=True))
    return np.column_stack([known[f"out.{j}"] for j in range(program.num_outputs)])


def test_one_module_computes_every_program(programs, interpreter):
    for (text, box), program in zip(CASES, programs, strict=True):
        points = points_of(program)
        wanted = attnc.as_target(text, box)(points).reshape(len(points), -1)
        found = interpreter(points, program)[:, : program.num_outputs]
        deviation = interpreter.deviation(program)
        assert np.abs(found - wanted).max() <= program.bound + deviation
        assert program.bound <= 1e-5
        assert np.abs(found - exactly(program, points)).max() <= deviation


def test_no_weight_depends_on_a_prompt(programs, interpreter):
    """The module is made from its sizes, before any program is known."""
    again = Interpreter(**dataclasses.asdict(interpreter))
    for one, other in zip(interpreter.program.all_layers, again.program.all_layers, strict=True):
        for head, twin in zip(one.heads, other.heads, strict=True):
            assert all(np.array_equal(W, twin.matrices[name]) for name, W in head.matrices.items())
    prompts = [interpreter.prompt(program) for program in programs]
    assert len({prompt.tobytes() for prompt in prompts}) == len(prompts)


def test_prompts_concatenate_to_compositions():
    inner = attnc.compile("(sin(x) + y, x*y)", {"x": (-1, 1), "y": (-1, 1)}, 1e-6).as_prompt()
    outer = attnc.compile("exp(a)*cos(b)", {"a": (-2, 2), "b": (-1.5, 1.5)}, 1e-6).as_prompt()
    both = inner.then(outer)
    assert both.num_keys == inner.num_keys + outer.num_keys
    interpreter = Interpreter.fitting(both)
    points = points_of(both)
    x, y = points.T
    wanted = np.exp(np.sin(x) + y) * np.cos(x * y)
    assert np.abs(interpreter(points, both)[:, 0] - wanted).max() <= both.bound + interpreter.deviation(both)
    assert both.bound < 1e-4
    with pytest.raises(attnc.InputError, match="larger box"):
        inner.then(attnc.compile("a + b", {"a": (-1, 1), "b": (-1, 1)}, 1e-3).as_prompt())
    with pytest.raises(attnc.InputError, match="numbers agree"):
        outer.then(outer)


def random_prompt(interpreter: Interpreter, draw: np.random.Generator, sharp: float) -> np.ndarray:
    """A program of one head with slopes, offsets and values up to the limits."""
    tokens = np.zeros((interpreter.rows, len(interpreter.columns)))
    columns = {name: i for i, name in enumerate(interpreter.columns)}
    keys = draw.integers(1, interpreter.rows + 1)
    slopes = draw.uniform(-1, 1, (keys, interpreter.inputs)) * sharp * interpreter.score / interpreter.reach
    tokens[:keys, [columns[f"slope.in.{i}"] for i in range(interpreter.inputs)]] = slopes / (2 * interpreter.inputs)
    tokens[:keys, columns["offset"]] = draw.uniform(-0.5, 0.5, keys) * interpreter.score * sharp
    tokens[:keys, columns["value.out.0"]] = draw.choice([-1.0, 1.0], keys) * interpreter.value
    tokens[:keys, columns["step.0"]] = tokens[:keys, columns["present"]] = 1.0
    return tokens


@given(st.integers(0, 10**6), st.sampled_from([0.01, 0.1, 1.0]))
@settings(max_examples=30, deadline=None)
def test_the_uniform_bound_holds_for_all_prompts_of_one_head(seed, sharp):
    interpreter = Interpreter(inputs=2, outputs=1, signals=3, steps=3, rows=24, score=512.0, value=8.0, reach=4.0)
    draw = np.random.default_rng(seed)
    tokens = random_prompt(interpreter, draw, sharp)
    interpreter.check(tokens)
    points = draw.uniform(-4, 4, (64, 2))
    rows = tokens[tokens[:, -1] == 1].astype(np.longdouble)
    columns = {name: i for i, name in enumerate(interpreter.columns)}
    scores = points @ rows[:, :2].T + rows[:, columns["offset"]]
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    wanted = weights @ rows[:, columns["value.out.0"]] / weights.sum(axis=1)
    error = np.abs(interpreter(points, tokens)[:, 0] - wanted).max()
    assert error <= interpreter.bound().value


def test_the_uniform_bound_is_not_vacuous():
    """Within a factor 200 of the error of the worst of some prompts: scores near their limit, values of both signs."""
    interpreter = Interpreter(inputs=1, outputs=1, signals=0, steps=1, rows=2, score=2.0**20, value=1.0, reach=1.0)
    columns = {name: i for i, name in enumerate(interpreter.columns)}
    x, worst = np.linspace(-1, 1, 4001)[:, None], 0.0
    for offset in (2.0**19 / 3, 2.0**19 / 7, 2.0**19 * 0.9):
        tokens = np.zeros((2, len(interpreter.columns)))
        tokens[:, columns["slope.in.0"]] = 0.0, 2.0**19 * 0.99
        tokens[:, columns["offset"]] = 0.0, -offset
        tokens[:, columns["value.out.0"]] = -1.0, 1.0
        tokens[:, columns["step.0"]] = tokens[:, columns["present"]] = 1.0
        near = offset / (2.0**19 * 0.99) + x * 4e-6
        exact = np.tanh((near.astype(np.longdouble) * tokens[1, 0] + tokens[1, columns["offset"]]) / 2)
        worst = max(worst, float(np.abs(interpreter(near, tokens) - exact).max()))
    assert worst <= interpreter.bound().value <= 200 * worst


def test_empty_programs_and_unused_steps_rest(interpreter):
    empty = np.zeros((interpreter.rows, len(interpreter.columns)))
    assert not interpreter(np.ones((2, interpreter.inputs)), empty).any()
    assert interpreter(np.zeros((0, interpreter.inputs)), empty).shape == (0, interpreter.outputs)


def test_prompts_outside_of_the_domain_are_refused(programs, interpreter):
    prompt = interpreter.prompt(programs[0])
    columns = {name: i for i, name in enumerate(interpreter.columns)}

    def changed(row, column, value):
        tokens = prompt.copy()
        tokens[row, columns[column]] = value
        return tokens

    with pytest.raises(OutsideDomain, match="a score may be"):
        interpreter.check(changed(0, "offset", 1e9))
    with pytest.raises(OutsideDomain, match="a value is"):
        interpreter.check(changed(0, "value.out.0", 1e9))
    with pytest.raises(OutsideDomain, match="exactly one step"):
        interpreter.check(changed(0, "step.1", 1.0))
    with pytest.raises(OutsideDomain, match="not empty"):
        interpreter.check(changed(0, "present", 0.0))
    with pytest.raises(OutsideDomain, match="neither 1"):
        interpreter.check(changed(0, "present", 0.5))
    twice = changed(0, "step.0", 0.0)
    twice[0, columns["step.1"]] = 1.0
    with pytest.raises(OutsideDomain, match="two steps write"):
        interpreter.check(twice)
    early = changed(0, "slope.signal.0", 1.0)
    early[0, columns["value.signal.0"]] = 1.0
    with pytest.raises(OutsideDomain, match="before a head writes"):
        interpreter.check(early)
    with pytest.raises(attnc.InputError, match="finite numbers"):
        interpreter.check(changed(0, "offset", np.nan))
    with pytest.raises(attnc.InputError, match="shape"):
        interpreter.check(prompt[1:])
    with pytest.raises(OutsideDomain, match="at most"):
        interpreter(np.full((1, interpreter.inputs), 1e9), prompt)
    with pytest.raises(OutsideDomain, match="outside of"):
        interpreter([[2.5]], programs[0])
    with pytest.raises(OutsideDomain, match="room for 1"):
        Interpreter(rows=1).prompt(programs[0])
    with pytest.raises(attnc.InputError, match="whole number"):
        Interpreter(steps=0)


def test_an_encoded_signal_that_nothing_reads_changes_nothing(interpreter):
    keys = SoftHead(np.array([[1.0], [-1.0]]), np.zeros(2), np.array([[1.0], [2.0]]))
    other = SoftHead(np.array([[3.0], [-1.0]]), np.zeros(2), np.array([[1.0], [2.0]]))
    box = attnc.as_target("x", {"x": (-1, 1)}).box
    heads = EncodedHead(("in.0",), keys, ("out.0",)), EncodedHead(("in.0",), other, ("signal.0",))
    one = EncodedProgram("one", box, heads[:1], 1, None, np.array([[1.0, 2.0]]))
    two = dataclasses.replace(one, heads=heads)
    assert np.array_equal(interpreter([[0.3]], one), interpreter([[0.3]], two))


def test_networks_that_cannot_be_encoded_are_refused():
    with pytest.raises(attnc.InputError, match="bounded box"):
        attnc.compile("tanh(x)", {"x": (-np.inf, np.inf)}, 1e-6).as_prompt()
    with pytest.raises(attnc.InputError, match="no expression"):
        attnc.compile(lambda p: np.sin(p[:, 0]), [(-1, 1)], 1e-2).as_prompt()


def test_a_table_becomes_a_prompt():
    points = np.linspace(0, 3, 31)[:, None]
    program = attnc.compile(attnc.TableTarget(points, np.sqrt(1 + points[:, 0])), eps=1e-5).as_prompt()
    found = Interpreter.fitting(program)(points, program)
    assert np.abs(found[:, 0] - np.sqrt(1 + points[:, 0])).max() <= program.bound + 1e-11


def test_torch_and_onnx_agree_with_the_reference(programs, interpreter, tmp_path):
    torch = pytest.importorskip("torch")
    onnxruntime = pytest.importorskip("onnxruntime")
    interpreter.export_onnx(tmp_path / "interpreter.onnx")
    assert (tmp_path / "interpreter.onnx").stat().st_size < 2**20
    session = onnxruntime.InferenceSession(tmp_path / "interpreter.onnx", providers=["CPUExecutionProvider"])
    module = interpreter.to_torch()
    for program in programs:
        points = np.pad(points_of(program, 5), ((0, 0), (0, interpreter.inputs - program.num_inputs)))
        prompt = np.repeat(interpreter.prompt(program)[None], 5, axis=0)
        wanted = interpreter(points, prompt[0])
        feeds = {given.name: array for given, array in zip(session.get_inputs(), (points, prompt), strict=True)}
        (by_onnx,) = session.run(None, feeds)
        by_torch = module(torch.tensor(points), torch.tensor(prompt)).numpy()
        for found in (by_onnx, by_torch):
            assert np.abs(found - wanted)[:, : program.num_outputs].max() <= 2 * interpreter.deviation(program)
