"""Replace the activations of torch models by softmax attention, with proven errors."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from attnc.errors import MissingExtra

if TYPE_CHECKING:
    from torch import nn

    from attnc.constructions.built import Progress
    from attnc.converting.report import Report
    from attnc.network import Network
    from attnc.targets.box import BoxLike

__all__ = ["convert", "load_converted", "mlp_network"]


def convert(
    module: nn.Module,
    eps: float = 1e-6,
    *,
    strict: bool = False,
    example: Any = None,
    box: BoxLike | tuple[float, float] | None = None,
) -> tuple[nn.Module, Report]:
    """Copy a torch model with every elementwise activation replaced by attention over a few constant keys.

    Activations may be modules, functions, or arithmetic such as x*(x > 0). LSTM, GRU and RNN are converted too. Linear
    maps, attention, normalisation and all weights stay the same. The original is not changed.

    Parameters
    ----------
    module : torch.nn.Module
        The model.
    eps : float
        The error allowed per activation. It is proven in exact arithmetic, on all of R (softsign: for |x| ≤ 10⁴).
    strict : bool
        Whether to raise if a part of the model cannot be converted. Otherwise `report.left` lists it.
    example : tensor, tuple, dict or callable, optional
        The arguments of one call, or a function that takes the model and runs it. Both models run on it. The report
        then also has the ranges of the pre-activations, the drift of the outputs beside the noise floor, and every
        nonlinear operator that only a run shows.
    box : box or (lo, hi), optional
        The domain of the inputs, or of every token. One pair (lo, hi) applies to all features. `report.on_box` then
        has a proven bound of |converted − original| for all inputs in it, rounding included. There are rules for
        MLPs, norm layers, residual sums and torch's encoder layers.

    Returns
    -------
    converted : torch.nn.Module
        The copy.
    report : Report
        Lists every activation with its path, keys, proven error and measured figures. `str(report)` is a table.

    Raises
    ------
    InputError
        If torch is missing, there is nothing to convert, eps cannot be proved, (strict) a part cannot be converted, or
        a box is given and there is no rule for a part.

    Examples
    --------
    >>> import attnc, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    >>> x = torch.linspace(-1, 1, 8).reshape(4, 2)
    >>> converted, report = attnc.convert(model, eps=1e-6, example=x)
    >>> [(entry.path, entry.activation, entry.error <= 1e-6) for entry in report.replaced]
    [('1', 'relu', True)]
    >>> bool((converted(x) - model(x)).abs().max() < 1e-5)
    True
    """
    need_torch()
    from attnc.converting.walking import convert_module

    converted, report = convert_module(module, eps, strict, example)
    if box is not None:
        from attnc.converting.on_box import on_box

        report.on_box = on_box(module, converted, box, example)
    return converted, report


def load_converted(path: str | os.PathLike[str]) -> nn.Module:
    """Load the model that `attnc convert` wrote as a directory, in evaluation mode.

    Parameters
    ----------
    path : str or path
        The directory.

    Returns
    -------
    torch.nn.Module
        The converted model. Its keys were proved again and compared with those in the directory.

    Raises
    ------
    FileError
        If the directory is not a converted model, or its files do not belong together.
    InputError
        If torch or transformers is missing.

    Examples
    --------
    >>> import attnc
    >>> model = attnc.load_converted("converted/")  # doctest: +SKIP
    """
    need_torch()
    from attnc.converting import huggingface

    return huggingface.load_converted(path)


def mlp_network(
    module: nn.Module, box: BoxLike | tuple[float, float], eps: float = 1e-6, *, progress: Progress | None = None
) -> Network:
    """Compile an MLP or a feed-forward block into a network on a box: Affine → Attention → Affine, units as tokens.

    Parameters
    ----------
    module : torch.nn.Module
        An nn.Sequential of linear maps, each followed by an activation, or one of torch's transformer layers, whose
        feed-forward block is taken. The last linear map needs no activation.
    box : box or (lo, hi)
        The domain of the inputs. One pair (lo, hi) applies to all of them.
    eps : float
        The error allowed per activation. The keys are those that `convert` chooses for it.
    progress : callable, optional
        Called while the proof runs.

    Returns
    -------
    Network
        Its certificate has a bound if all activations are ReLUs, or if there is one hidden layer with at most 16 units
        and 3 inputs. Otherwise it has none, and `parameters["error"]` is the proven error in exact arithmetic.

    Raises
    ------
    InputError
        If torch is missing, the module is of another kind, or eps cannot be proved.

    Examples
    --------
    >>> import attnc, torch
    >>> block = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.SiLU(), torch.nn.Linear(2, 1)).double()
    >>> network = attnc.mlp_network(block, box=(-1, 1), eps=1e-6)
    >>> network.certificate.bound <= 1e-6
    True
    """
    need_torch()
    from attnc.converting import mlp

    return mlp.mlp_network(module, box, eps, progress)


def need_torch(what: str = "converting needs") -> None:
    """Raise MissingExtra, with the command to install it, if torch cannot be imported."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingExtra(what, "torch", "torch", error) from error
