"""The checker proves the prover's bounds again: at the ends of domains, at kinks, on tails, in both dtypes."""

from __future__ import annotations

import math

import pytest

import attnc
from attnc_checker import check
from checker.tampering import change_weight, proved, refusal, reproved

REALS = {"x": (-math.inf, math.inf)}


@pytest.mark.parametrize(
    ("expression", "box", "eps", "options"),
    [
        ("x**1.5", {"x": (0, 1)}, 1e-6, {"construction": "graded"}),
        ("sqrt(1 - x**2)", {"x": (-1, 1)}, 1e-3, {"construction": "graded"}),
        ("acos(x)", {"x": (-1, 1)}, 1e-2, {"construction": "graded"}),
        ("sqrt(x)", {"x": (0, 1)}, 0.3, {"construction": "attention_softmax"}),
        ("x**(1/3), sqrt(x)", {"x": (0, 8)}, 3e-2, {"construction": "graded"}),
        ("softplus(x)", REALS, 1e-6, {}),
        ("clip(x, -1, 1)", REALS, 1e-3, {}),
        ("3.5*x - 2.3", {"x": (-math.inf, 3)}, 1e-4, {"dtype": "float32"}),
        ("2*(x + 1/3)", REALS, 1e-6, {}),
        ("min(x**2, 0.5)", {"x": (-1, 1)}, 1e-3, {"construction": "graded"}),
        ("sin(x)", {"x": (-3, 3)}, 1e-4, {"dtype": "float32"}),
        ("sin(x) + cos(y)", {"x": (-3, 3), "y": (-3, 3)}, 1e-6, {}),
        ("sin(x)*y", {"x": (-2, 2), "y": (0, 1)}, 1e-1, {"construction": "max_affine"}),
        ("x**3 - 2*x", {"x": (-1, 1)}, 1e-3, {"construction": "binomial"}),
        ("x + 0.1", {"x": (-1, 1.5)}, 1e-6, {"construction": "compose", "dtype": "float32"}),
        ("cos(softplus(x))", {"x": (-0.5, 3)}, 0.25, {"construction": "attention_softmax", "dtype": "float32"}),
        # exact gates, of which a proof has few, wide leaves
        ("tanh(y + 1.3*x)", {"x": (-0.1, 0.39), "y": (-0.74, 1.15)}, 3e-2, {"construction": "gates"}),
        ("tanh(5*x + y)", {"x": (-1, 1), "y": (-1, 1)}, 1e-5, {"construction": "gates"}),
        ("tanh(y - y)", {"y": (-1, 1)}, 1e-3, {}),  # zero, up to what underflow costs
        ("1e-200*sin(x)", {"x": (-1, 1)}, 1e-3, {"dtype": "float32"}),
        # |x| ≥ 0 is what bounds the error at the kink, on a Taylor leaf
        (
            "2*x - atan(x), abs(clip(x, -1, 0.75)), x*x - 0.43*x - 0.315",
            {"x": (-1.95218, 10.3616)},
            0.6565146760875632,
            {},
        ),
        # a kink on a selection leaf, where the range of the function is better than its Taylor polynomial
        (
            "min(cos(y) - softplus(y), 0.647*x - 1.68*y - 0.031)",
            {"y": (2, 4), "x": (0.898, 1.673)},
            0.096,
            {"norm": 6.5, "dtype": "float32"},
        ),
        # quotients and roots that cancel: the network is a constant, and all that is left is rounding
        *((text, {"x": (0.5, 2)}, 1e-3, {}) for text in ("x/abs(x)", "sqrt(x*x)/x", "x/sqrt(x**2)", "relu(x)/x")),
        ("(x + y)/max(x + y, 0.1)", {"x": (0.5, 2), "y": (0, 1)}, 1e-3, {}),
        # a root on a wide leaf, whose derivatives are large at one end
        ("y + x + sqrt(y)", {"y": (0.943415, 8.66542), "x": (0, 1)}, 0.457, {}),
        # a Taylor leaf beside a jump, where the other key is far behind for the prover, and not for the checker
        ("floor(0.343*x + 0.761)", {"x": (0, 1)}, 0.2, {"norm": 3.5, "dtype": "float32"}),
        # scores are off by 5, and all keys but one are far behind on a leaf, but not on the larger cells around it
        (
            "floor(0.441*x + 1.93)*y",
            {"x": (-0.139, -0.107), "y": (-12.1, -10.35)},
            0.053,
            {"norm": 2, "dtype": "float32"},
        ),
        # half of the bound is rounding, of which the cast of the input is a part
        ("min(sqrt(abs(x)), x - (-1.84*x + 0.704))", {"x": (-2, 2)}, 0.0017989679477068974, {"dtype": "float32"}),
        # the rounding of a score decides which key wins, on a leaf beside the jump
        ("sign(1.18*x + 1.82) + (1.14*x + 1.04)", {"x": (-2, 1)}, 2.7988902812818606, {"norm": 7, "dtype": "float32"}),
    ],
)
def test_honest_certificates_are_proved_again(tmp_path, expression, box, eps, options):
    net = attnc.compile(expression, box=box, eps=eps, **options)
    assert net.certificate.method in ("proof", "staged proof")
    reproved(tmp_path / "net", net)


@pytest.mark.parametrize(
    ("expression", "box", "eps", "options"),
    [
        # scores of far keys change by 40 on a leaf, but their rounding is counted where they matter
        ("sqrt(abs(x))", (-0.008259141096420885, 0.01651828219284177), 0.00011619304644545313, {}),
        # rounded to float32, some rows never win
        ("(-x + (0.023*x - 0.478))*cos(x**3)", (-9.931101, 5.838692), 0.5954170156156399, {"norm": 6.5}),
    ],
)
def test_honest_certificates_for_float32_as_well_are_proved_again(tmp_path, expression, box, eps, options):
    net = attnc.compile(expression, {"x": box}, eps, also="float32", **options)
    net.save(tmp_path / "net")
    assert net.also["float32"].method in ("proof", "staged proof")
    proved(tmp_path / "net", name="certificate.float32.json")


@pytest.mark.parametrize(("tensor", "reason"), [("weight", "drift apart"), ("constant", "is not re-proved to")])
def test_another_affine_map_on_all_reals_is_refused(tmp_path, tensor, reason):
    reproved(tmp_path / "net", attnc.compile("2*x + 1/3", box=REALS, eps=1e-6))
    change_weight(tmp_path / "net", f"layers.0.read.{tensor}.values", 0, 1 + 1e-13)
    found = refusal(tmp_path / "net")
    assert "taylor leaf" in found or reason in found


def test_what_the_grid_engine_leaves_out_is_in_the_certificate(tmp_path):
    net = attnc.compile("sin(x*y)", box=[(-1, 1), (-1, 1)], eps=1e-6, construction="spectral_grid")
    assert net.certificate.truncation == net.truncation > 0
    net.save(tmp_path / "net")
    assert any(f"{net.truncation:.3g}" in text for text in check(tmp_path / "net", processes=1).assumptions)
    assert attnc.load(tmp_path / "net").certificate.truncation == net.truncation
