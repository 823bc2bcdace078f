"""The arithmetic of the page, run by node: the same numbers as attnc's own engine, and the same names of failures."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnc
import attnc_playground
from attnc.ir.rounding import evaluation_error
from attnc_playground import jobs
from attnc_playground.requests import CompileRequest

STATIC = Path(attnc_playground.__file__).parent / "static"
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node runs the modules of the page")

NETWORKS = [
    ("sin(x)", {"x": [-3.0, 3.0]}, 1e-3, "auto"),
    ("gelu(x)", {"x": ["-inf", "inf"]}, 1e-3, "auto"),
    ("abs(x)", {"x": [-1.0, 1.0]}, 1e-3, "auto"),
    ("exp(-4*(x**2+y**2))", {"x": [-1.0, 1.0], "y": [-1.0, 1.0]}, 1e-3, "auto"),
    ("x*y", {"x": [-1.0, 1.0], "y": [-1.0, 1.0]}, 1e-3, "auto"),
    ("sin(x*y)", {"x": [-1.0, 1.0], "y": [-1.0, 1.0]}, 1e-3, "spectral_grid"),
    *(
        ("sin(3*x)", {"x": [-1.0, 1.0]}, 0.1, construction)
        for construction in ("max_affine", "max_affine_cross", "two_layer", "attention_softmax", "graded", "binomial")
    ),
]


def page(*given: dict[str, Any]) -> list[Any]:
    """Return what the page's modules answer."""
    request = json.dumps({"static": STATIC.as_uri(), "jobs": given})
    script = Path(__file__).with_name("run_page.mjs")
    done = subprocess.run(["node", str(script)], input=request, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_node
def test_the_page_computes_what_the_engine_computes() -> None:
    """Both may be off by what rounding can do to one evaluation of the program."""
    nets = [
        jobs.compile_network(CompileRequest(text, box, eps, construction=construction), 30.0)
        for text, box, eps, construction in NETWORKS
    ]
    points = [sample(net) for net in nets]
    asked = [
        {"kind": "evaluate", "program": jobs.program(net.program), "points": at.tolist(), "sharpness": 1}
        for net, at in zip(nets, points, strict=True)
    ]
    for net, at, found in zip(nets, points, page(*asked), strict=True):
        allowed = 2 * evaluation_error(net.program, [at])
        assert (np.abs(np.array(found["outputs"]) - net.program(at)) <= allowed.reshape(-1)).all(), net


def sample(net: attnc.Network) -> np.ndarray:
    found = jobs.picture(net)
    assert found is not None
    return np.array(found["checked"]["points"])


@needs_node
def test_weights_are_a_softmax_of_the_networks_own_scores() -> None:
    net = attnc.compile("sin(3*x)", {"x": (-1, 1)}, eps=0.1, construction="max_affine")
    points = np.linspace(-1, 1, 41)[:, None]
    asked = {"kind": "evaluate", "program": jobs.program(net.program), "points": points.tolist()}
    own, uniform, hard = page(*(asked | {"sharpness": sharpness} for sharpness in (1, 0, "inf")))
    weights = net.run(points, cache=True).cache["select.head0.pattern"][:, 0]
    mine = np.array(own["weights"][0]).reshape(weights.shape)
    assert np.abs(mine - weights).max() <= 2**-23  # the page keeps weights as float32
    assert np.ptp(uniform["outputs"]) == 0
    assert set(np.array(hard["weights"][0]).tolist()) <= {0.0, 0.5, 1.0}


def ladder(net: attnc.Network) -> dict[str, list[float]]:
    found = jobs.picture(net)
    assert found is not None
    return found["ladder"]


@needs_node
@pytest.mark.parametrize(("d", "keys"), [(1, 9), (1, 64), (2, 6)])
def test_a_network_built_by_hand_is_the_papers_construction(d: int, keys: int) -> None:
    text, names = ("sin(x)", "x") if d == 1 else ("x*y", "xy")
    box = dict.fromkeys(names, (-3.0, 3.0))
    values = ladder(attnc.compile(text, box, eps=0.1))[keys]
    settings = {"lo": [-3] * d, "hi": [3] * d, "keys": keys, "values": values}
    points = np.random.default_rng(0).uniform(-3, 3, (50, d))
    betas = [0.1, 10.0, 1000.0]
    found = page(*({"kind": "byhand", "settings": settings, "beta": beta, "points": points.tolist()} for beta in betas))
    for beta, answer in zip(betas, found, strict=True):
        net = attnc.compile(text, box, construction="max_affine", beta=beta, points_per_axis=keys)
        allowed = 2 * evaluation_error(net.program, [points])
        assert (np.abs(answer["outputs"] - net.program(points)) <= allowed.reshape(-1)).all()


@needs_node
def test_heads_with_sentinels_are_the_papers_construction() -> None:
    """A clipped identity, whose heads in the paper have the same anchors: the spacing reaches from end to end."""
    heads, own, sentinels, beta = 3, 4, 2, 3.0
    clip = attnc.TruncatedLinear([1.0], t=0.0, a=-1.0, b=1.0, box=(-1, 1))
    tokens = own + 2 * sentinels
    built = attnc.constructions.truncated_linear_heads(
        clip, num_heads=heads, num_tokens=tokens, sentinels=sentinels, beta=beta
    )
    keys = heads * own
    half = keys / (keys - 1)  # the box of the page, whose outer cells reach half a spacing beyond the outer anchors
    values = np.linspace(-1, 1, keys).tolist()
    settings = {"lo": [-half], "hi": [half], "keys": keys, "heads": heads, "sentinels": sentinels, "values": values}
    points = np.linspace(-1, 1, 81)[:, None]
    found = page({"kind": "byhand", "settings": settings, "beta": beta, "points": points.tolist()})[0]
    allowed = 2 * evaluation_error(built.program, [points])
    assert (np.abs(np.array(found["outputs"]) - built.program(points)) <= allowed.reshape(-1)).all()


@needs_node
def test_failures_have_the_names_that_diagnose_gives() -> None:
    target = attnc.as_target("sin(x)", {"x": (-3, 3)})
    points = np.linspace(-3, 3, 601)[:, None]
    wanted = target(points)[:, 0]
    values = ladder(attnc.compile("sin(x)", {"x": (-3, 3)}, eps=0.1))
    cases = [(32, 0.02), (9, 0.01), (24, 0.5), (9, 1000.0), (40, 1000.0), (64, 3.0), (12, 2.0)]
    nothing = attnc.Certificate(None, None, (), (), "float64", "none")
    asked, expected = [], []
    for keys, beta in cases:
        built = attnc.constructions.max_affine(target, points_per_axis=keys, beta=beta)
        net = attnc.Network(built.program, nothing, target.box, built.construction, "sin(x)", eps=0.12)
        expected.append([symptom.name for symptom in attnc.diagnose(net).symptoms])
        settings = {"lo": [-3], "hi": [3], "keys": keys, "values": values[keys]}
        asked.append({"settings": settings, "beta": beta, "points": points.tolist(), "wanted": wanted.tolist()})
    found = page(*({"kind": "signatures", "eps": 0.12, "arithmetic": "float64"} | one for one in asked))
    assert expected[1] == []  # diagnose overlooks attention that is almost uniform
    expected[1] = ["diffuse attention"]
    assert found == expected
    assert {name for names in expected for name in names} >= {"diffuse attention", "oscillation", "boundary artefacts"}


@needs_node
def test_uniform_attention_is_diffuse() -> None:
    """Sharper scores of uniform attention are uniform, too, so that a test by sharpening cannot show it."""
    points = np.linspace(-3, 3, 601)[:, None]
    settings = {"lo": [-3], "hi": [3], "keys": 9, "values": np.sin(np.linspace(-2.7, 2.7, 9)).tolist()}
    asked = {"settings": settings, "beta": 0, "points": points.tolist(), "arithmetic": "float64"}
    asked |= {"wanted": np.sin(points[:, 0]).tolist(), "eps": 0.04, "kind": "signatures"}
    assert page(asked) == [["diffuse attention"]]


@needs_node
def test_a_careless_softmax_underflows() -> None:
    """exp of a score beyond 88 is infinite in float32. With the largest score subtracted, nothing happens."""
    points = np.linspace(-3, 3, 601)[:, None]
    settings = {"lo": [-3], "hi": [3], "keys": 33, "values": np.sin(np.linspace(-3, 3, 33)).tolist()}
    asked = {"settings": settings, "beta": 100.0, "points": points.tolist()}
    asked |= {"wanted": np.sin(points[:, 0]).tolist(), "eps": 0.2, "kind": "signatures"}
    assert page(asked | {"arithmetic": "plain32"}, asked | {"arithmetic": "float32"}) == [["underflow"], []]


@needs_node
def test_mathematics_and_links() -> None:
    texts = ["1/(1+25*x**2)", "-x**2+3*(x-1)*y", "sin(x", "a b", "x**-2", "(x+1)**2", "((" * 200]
    found = page(*({"kind": "latex", "text": text} for text in texts))
    assert [answer["tex"] for answer in found] == [
        r"\frac{1}{1 + 25\,{x}^{2}}",
        r"-{x}^{2} + 3\,\left(x - 1\right)\,y",
        None,
        None,
        "{x}^{-2}",
        r"{\left(x + 1\right)}^{2}",
        None,
    ]
    assert found[1]["variables"] == ["x", "y"]
    links = [
        "f=x*y&box=x%3A-1%3A1%3By%3A0%3A2&eps=1e-5&view=compiled&beta=300",
        "tab=incontext&model=ridge&points=0,0;1,1",
    ]
    links += ["view=compiled&beta=667", "view=compiled", "beta=500", ""]
    first, second, *others = page(*({"kind": "roundtrip", "text": link} for link in links))
    assert sorted(first.split("&")) == sorted(links[0].split("&"))
    assert others == links[2:]
    assert second == "tab=incontext&model=ridge&points=0%2C0%3B1%2C1"


def test_pages_load_nothing_from_elsewhere_and_hold_no_script() -> None:
    for path in STATIC.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", text), path
        assert not re.search(r"<script(?![^>]*\bsrc=)", text), path
        assert not re.search(r"<style|\sstyle=|\son\w+=", text), path
    for path in [*STATIC.glob("js/*.js"), *STATIC.glob("css/*.css")]:
        text = path.read_text(encoding="utf-8")
        assert "innerHTML" not in text, path
        links = [link for link in re.findall(r"https?://[^\s'\"`)]+", text) if link != "http://www.w3.org/2000/svg"]
        assert links == [], path


def test_every_element_that_a_script_names_is_in_the_page() -> None:
    html = (STATIC / "index.html").read_text(encoding="utf-8")
    known = set(re.findall(r'\bid="([^"]+)"', html))
    for path in STATIC.glob("js/*.js"):
        named = set(re.findall(r"byId\('([\w-]+)'\)", path.read_text(encoding="utf-8")))
        assert named <= known, (path.name, named - known)


def test_scripts_import_the_helpers_that_they_call() -> None:
    helpers = set(re.findall(r"export (?:function|const) (\w+)", (STATIC / "js/dom.js").read_text(encoding="utf-8")))
    for path in STATIC.glob("js/*.js"):
        text = path.read_text(encoding="utf-8")
        called = {name for name in helpers if re.search(rf"(?<![\w.])(?<!function ){name}\(", text)}
        imported = re.findall(r"import \{([^}]+)\} from './dom.js'", text)
        named = {name.strip() for name in imported[0].split(",")} if imported else set()
        assert path.name == "dom.js" or called == named, (path.name, called ^ named)


def test_every_control_has_a_name() -> None:
    html = (STATIC / "index.html").read_text(encoding="utf-8")
    labelled = set(re.findall(r'<label for="([^"]+)"', html))
    for control in re.findall(r"<(?:input|select)\b[^>]*>", html):
        name = re.search(r'\bid="([^"]+)"', control)
        assert 'type="radio"' in control or (name and name[1] in labelled), control


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_has_a_contrast_of_at_least_4_5() -> None:
    css = (STATIC / "css" / "tokens.css").read_text(encoding="utf-8")
    for block in re.findall(r"\{([^{}]*--text[^{}]*)\}", css):
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        pairs = [
            (name, under) for name in ("text", "muted", "accent", "good", "bad", "warn") for under in ("bg", "surface")
        ]
        for name, under in [*pairs, ("on-accent", "accent")]:
            low, high = sorted((luminance(colours[name]), luminance(colours[under])))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (name, under)
