"""Affine maps are proved only where their arithmetic holds them."""

from __future__ import annotations

import numpy as np
import pytest

import attnc
from attnc.ir.building import AffineBuilder
from attnc.ir.program import Program
from attnc.proofs.kinds.affine import AffineProver
from attnc.proofs.prover import ProofRequest
from attnc_checker import check


@pytest.mark.parametrize(("power", "end"), [(-120, 2.0**130), (100, 2.0**100)])
def test_an_affine_map_that_overflows_is_not_proved(power, end):
    """x itself, or a number computed from it, may be beyond the range of the dtype."""
    scale = AffineBuilder(1, ["x"], 1, ["y"])
    scale.link(0, "y", 0, "x", 2.0**power)
    target = attnc.as_target(f"x*2**({power})", {"x": (0, end)})
    for dtype, is_held in ((np.float32, False), (np.float64, True)):
        program = Program((scale.build("scale", dtype),), ((1,),), (1,))
        with np.errstate(all="ignore"):
            assert np.isfinite(program(np.array([[end]]))).all() == is_held
        if is_held:
            assert AffineProver().prove(program, target, ProofRequest()).bound <= 1e-14 * end * 2.0**power
        else:
            with pytest.raises(attnc.ProgramError, match="may overflow in float32"):
                AffineProver().prove(program, target, ProofRequest())


def test_products_that_underflow_are_proved_again(tmp_path):
    net = attnc.compile("3e-41*x - 1e-42*y", {"x": (-1, 1), "y": (-1, 1)}, eps=1e-43, dtype="float32")
    net.save(tmp_path / "net")
    verdict = check(tmp_path / "net", processes=1)
    assert verdict.proved, verdict.reason
