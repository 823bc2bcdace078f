"""Networks into attention: torch models whose activations become softmax attention, with proven errors."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from attnc.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from attnc.constructions.built import Progress
    from attnc.converting.report import Report
    from attnc.network import Network
    from attnc.targets.box import BoxLike

__all__ = ["convert", "load_converted", "mlp_network"]


def convert(
    module: nn.Module, eps: float = 1e-6, *, strict: bool = False, example: Any = None
) -> tuple[nn.Module, Report]:
    """A copy of the model in which every elementwise activation is attention over a few constant keys, and a report.

    `eps` bounds the error of each activation, proven in exact arithmetic on all of R. Linear maps, attention and
    normalisation stay. What cannot be converted is in `report.left` with its path; `strict` raises instead. With an
    `example` (the arguments of one call: a tensor, a tuple or a dictionary) both models run on it: the report then has
    the ranges of pre-activations, the drift, and the calls of functions that no reading of the code could show.
    """
    need_torch()
    from attnc.converting.walking import convert_module

    return convert_module(module, eps, strict, example)


def load_converted(path: str | os.PathLike[str]) -> nn.Module:
    """The model that `attnc convert` wrote as a directory, in evaluation mode."""
    need_torch()
    from attnc.converting import huggingface

    return huggingface.load_converted(path)


def mlp_network(
    module: nn.Module, box: BoxLike | tuple[float, float], eps: float = 1e-6, *, progress: Progress | None = None
) -> Network:
    """An MLP or a feed-forward block as a network of attnc on a box: Affine → Attention → Affine, units as tokens.

    It takes linear maps and activations in a row: an nn.Sequential, or the block of one of torch's transformer layers.
    The keys are those that `convert` chooses for this eps. The prover serves one hidden layer of up to 16 units and 3
    inputs; elsewhere the certificate has no bound, and `parameters["error"]` is the error in exact arithmetic, proven.
    """
    need_torch()
    from attnc.converting import program_form

    return program_form.mlp_network(module, box, eps, progress)


def need_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"converting needs torch, which cannot be imported ({error}). "
            "Install it with: pip install -c constraints.txt 'attnc[torch]'"
        ) from error
