"""Imports point down, `import attnc` is light, and nothing in the package runs text or bytes as code."""

from __future__ import annotations

import ast
import graphlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import attnc
from attnc import constructions, incontext, scheduling

SRC = Path(__file__).parents[1] / "src"
PACKAGE = SRC / "attnc"

LEVELS = (
    {"errors"},
    {"numerics", "opening", "scheduling"},
    {"functions"},
    {"ir"},
    {"targets"},
    {"proofs", "engines", "exports"},
    {"constructions", "verifying", "wording"},
    {"incontext"},
    {"model_card"},
    {"plots", "stock"},
    {"exact_channels", "groundtruth", "proving"},
    {"interventions", "retraining"},
    {"comparing"},
    {"network"},
    {"loading", "planning", "refusing", "certifying"},
    {"compiling", "sharding"},
    {"converting"},
    {"heads", "nn"},
    {"demo", "doctor", "cli", "__main__"},
)
"""Lowest first. A part imports from the levels below its own and from itself, never from a neighbour on its level."""
PROGRAMS = LEVELS[-1]
"""At the top, the parts that people run may use each other, and the public API."""
BELOW_NETWORK = (
    "comparing",
    "exact_channels",
    "interventions",
    "model_card",
    "plots",
    "proving",
    "retraining",
    "wording",
)
ONLY_TYPES = {(part, "attnc.network") for part in BELOW_NETWORK}
ONLY_TYPES |= {("plots", "attnc.comparing"), ("plots", "attnc.interventions")}
"""Upwards, for annotations alone: words, cards and pictures are about a Network and its claims."""
ABOVE = ("attnc_lab", "attnc_playground")
"""The packages that use the public API of attnc, and nothing else of it."""
CODE_RUNNERS = {"eval", "exec", "compile", "__import__"}
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
HEAVY = ("torch", "transformers", "matplotlib", "sympy", "scipy", "onnx", "onnxruntime", "sklearn")

MODULES = sorted(SRC.rglob("*.py"))
ids = [str(path.relative_to(SRC)) for path in MODULES]


def level(part: str) -> int | None:
    return next((i for i, parts in enumerate(LEVELS) if part in parts), None)


def names_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of everything that is imported anywhere in the file, within functions too. None is relative."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}:{node.lineno} imports by a relative name"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def lines_for_types(path: Path) -> set[int]:
    """The lines under `if TYPE_CHECKING:`."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            lines.update(range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1))
    return lines


def forbidden(importer: str, name: str) -> str | None:
    """Why the part `importer` may not import this absolute name, or None."""
    package, _, rest = name.partition(".")
    if package in ABOVE:
        return f"{package} is above attnc" if importer not in PROGRAMS else None
    if package == "attnc_checker":
        return "the checker is independent of attnc, and attnc of it" if importer not in PROGRAMS else None
    if package != "attnc":
        return None
    if not rest and importer in PROGRAMS:
        return None
    part = rest.partition(".")[0]
    here, there = level(importer), level(part)
    if there is None:
        is_submodule = "." in rest or (PACKAGE / part).exists() or (PACKAGE / f"{part}.py").exists()
        return None if importer in PROGRAMS and not is_submodule else f"{name!r} has no level in LEVELS"
    if importer == part or (importer in PROGRAMS and part in PROGRAMS):
        return None
    return None if here is not None and there < here else f"imports point down, {part} is not below {importer}"


def test_every_part_has_a_level():
    """A new folder or module of the package must be placed: add it to LEVELS."""
    parts = {path.stem if path.suffix == ".py" else path.name for path in PACKAGE.iterdir()}
    parts -= {"__init__", "__pycache__", "py.typed"}
    assert not {part for part in parts if level(part) is None}


@pytest.mark.parametrize(
    "path", [path for path in MODULES if PACKAGE in path.parents], ids=lambda p: str(p.relative_to(SRC))
)
def test_imports_point_down(path):
    inside = path.relative_to(PACKAGE).with_suffix("").parts
    if inside == ("__init__",):
        return  # the API itself
    for_types = lines_for_types(path)
    for line, name in names_of(path):
        reason = forbidden(inside[0], name)
        if line in for_types and (inside[0], ".".join(name.split(".")[:2])) in ONLY_TYPES:
            continue
        assert reason is None, f"{path.relative_to(SRC)}:{line} imports {name}: {reason}"


@pytest.mark.parametrize("part", ["proofs", "constructions"])
def test_folders_within_a_part_import_each_other_one_way(part):
    """The parts of theorems and proofs: a folder that needs another is not needed by it."""
    folders = {path.parent.name for path in (PACKAGE / part).glob("*/__init__.py")}
    needs: dict[str, set[str]] = {folder: set() for folder in folders}
    for folder in folders:
        for path in (PACKAGE / part / folder).rglob("*.py"):
            names = [name.split(".") for _, name in names_of(path) if name.startswith(f"attnc.{part}.")]
            needs[folder] |= {name[2] for name in names} & folders - {folder}
    graphlib.TopologicalSorter(needs).prepare()  # raises CycleError


def test_the_checker_imports_nothing_of_attnc():
    for path in (SRC / "attnc_checker").rglob("*.py"):
        for line, name in names_of(path):
            assert name.partition(".")[0] not in {"attnc", "numpy"}, f"{path.name}:{line} imports {name}"


@pytest.mark.parametrize("package", ABOVE)
def test_packages_above_attnc_use_the_public_api_alone(package):
    """They import attnc, its public submodules, and of these only what they export."""
    public = {
        "attnc": attnc.__all__,
        "attnc.constructions": constructions.__all__,
        "attnc.incontext": incontext.__all__,
        "attnc.scheduling": scheduling.__all__,
    }
    for path in (SRC / package).rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for line, name in names_of(path):
            module, _, exported = name.rpartition(".")
            is_public = name in public or (module in public and exported in public[module])
            assert not name.startswith("attnc.") or is_public, f"{path.name}:{line} imports {name}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and (module := ast.unparse(node.value)) in public:
                known = [*public[module], "__version__"]
                assert node.attr in known, f"{path.name}:{node.lineno} uses {module}.{node.attr}"


def printed_by(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_attnc_does_not_import_the_lab():
    code = "import sys, attnc; assert 'attnc_lab' not in sys.modules; attnc.diagnose; assert 'attnc_lab' in sys.modules"
    printed_by(code)


@pytest.mark.parametrize(
    ("importer", "allowed", "refused"),
    [
        ("errors", [], ["attnc.numerics"]),
        ("numerics", ["attnc.errors.InputError"], []),
        ("ir", ["attnc.numerics.bound", "numpy"], ["attnc.targets", "attnc.compile", "attnc", "attnc_checker"]),
        ("proofs", [], ["attnc.constructions.fitting"]),
        ("engines", ["attnc.engines.grid"], ["attnc.exports"]),
        ("incontext", ["attnc.engines"], ["attnc.networks"]),
        ("plots", [], ["attnc.unheard_of.thing"]),
        ("network", ["attnc.plots"], ["attnc.compiling", "attnc_lab"]),
        ("compiling", ["attnc.network"], []),
        ("cli", ["attnc.plots", "attnc.compile", "attnc", "attnc_lab.report", "attnc_playground.serve"], []),
    ],
)
def test_the_rule_itself(importer, allowed, refused):
    assert [name for name in (*allowed, *refused) if forbidden(importer, name) is None] == allowed


def test_relative_imports_are_refused(tmp_path):
    (tmp_path / "module.py").write_text("from . import a")
    with pytest.raises(AssertionError, match="relative name"):
        list(names_of(tmp_path / "module.py"))


@pytest.mark.parametrize("module", ["attnc", "attnc.ir", "attnc.engines.numpy_engine"])
def test_imports_are_light(module):
    code = f"import json, sys, {module}; print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    assert json.loads(printed_by(code)) == []


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_nothing_runs_text_or_bytes_as_code(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    own |= {name.rpartition(".")[2] for _, name in names_of(path) if name.startswith("attnc")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.id if isinstance(node.func, ast.Name) else ""
            assert called not in CODE_RUNNERS - own, f"{path.name}:{node.lineno} calls {called}"
            for keyword in node.keywords:
                allows = keyword.arg == "allow_pickle" and not _is_false(keyword.value)
                assert not allows, f"{path.name}:{node.lineno} allows pickles"
        if isinstance(node, ast.Attribute):
            is_builtin = isinstance(node.value, ast.Name) and node.value.id == "builtins"
            assert not (is_builtin and node.attr in CODE_RUNNERS), f"{path.name}:{node.lineno} uses {node.attr}"
    for line, name in names_of(path):
        assert name.partition(".")[0] not in UNSAFE_MODULES, f"{path.name}:{line} imports {name}"


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False
