"""Networks into attention: torch models whose activations become softmax attention, with proven errors."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from attnc.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from attnc.converting.report import Report

__all__ = ["convert", "load_converted"]


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


def need_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"converting needs torch, which cannot be imported ({error}). "
            "Install it with: pip install -c constraints.txt 'attnc[torch]'"
        ) from error
