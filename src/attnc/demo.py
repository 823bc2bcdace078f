"""The demonstration: one function by the papers' partition, and the cheapest proven network at two accuracies."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from attnc.constructions.built import Progress
from attnc.errors import FileError, MissingExtra
from attnc.model_card import summary
from attnc.wording import ceiling

if TYPE_CHECKING:
    from attnc.network import Network

SHOWN_EXPRESSION = "sin(x)+cos(y)"
BOX = {"x": (-3.0, 3.0), "y": (-3.0, 3.0)}
ACCURACIES = (0.1, 1e-6)
FIGURES = ("demo.png", "demo-fine.png")
"""The file names of two pictures: the papers' partition beside soft heads, and the network of the smallest eps."""
PAPERS, DRAWN_EPS = "max_affine", 0.5
"""The papers' construction, built at the first accuracy for comparison, and the eps at which it is drawn. Its cells are
then wide enough to be seen."""


def run_demo(
    out_dir: Path, *, json_output: bool = False, progress: AbstractContextManager[Progress | None] | None = None
) -> list[Path]:
    """Compile, draw pictures into `out_dir`, which is created, and print a table; return the pictures' paths.

    `progress` is a bar that is shown during the work. Without matplotlib there are no pictures, and a line tells how to
    install it.
    """
    from attnc import compile as compile_network
    from attnc.cli.output import print_json

    try:
        out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot write the demo to {str(out_dir)!r}: {error.strerror or error}") from None
    with progress or nullcontext(None) as report:
        cheapest = [compile_network(SHOWN_EXPRESSION, box=BOX, eps=eps, progress=report) for eps in ACCURACIES]
        papers, drawn = (
            compile_network(SHOWN_EXPRESSION, box=BOX, eps=eps, construction=PAPERS, progress=report)
            for eps in (ACCURACIES[0], DRAWN_EPS)
        )
        figures, missing = _draw(drawn, cheapest[-1], out_dir, report)
    networks = [papers, *cheapest]
    if json_output:
        rows = [summary(network) | {"name": f"{network.construction}, eps={network.eps}"} for network in networks]
        print_json({"networks": rows, "figures": [str(path) for path in figures]})
    else:
        _print_table(networks, figures, missing)
    return figures


def _draw(partition: Network, fine: Network, out_dir: Path, progress: Progress | None) -> tuple[list[Path], str | None]:
    from attnc.plots import plot, plot_demonstration

    first, second = (out_dir / name for name in FIGURES)
    if progress:
        progress("drawing", 0.0)
    try:
        plot_demonstration(first, partition, fine)
        plot(fine, second)
    except MissingExtra as error:
        return [], str(error)
    return [first, second], None


def _print_table(networks: list[Network], figures: list[Path], missing: str | None) -> None:
    from rich.text import Text

    from attnc.cli.output import console, plain_table

    first = networks[0]
    sizes = ("eps", "anchors", "heads", "layers", "parameters")
    table = plain_table("construction", *sizes, "bound\n(proven)", "observed\n(sampled)", is_tight=True)
    for network in networks:
        program, claim = network.program, network.certificate
        counts = (network.num_anchors, program.num_heads, len(program.all_layers), network.num_parameters)
        assert claim.bound is not None  # these networks are proved, or compile raises
        errors = ceiling(claim.bound), f"{claim.observed:.3g}"
        table.add_row(network.construction, f"{network.eps:g}", *(f"{count:,}" for count in counts), *errors)
    screen = console()
    screen.print(Text.assemble((SHOWN_EXPRESSION, "bold"), f" on {first.box}"))
    screen.print("as affine maps and softmax attention, constructed, not trained:")
    screen.print(table)
    screen.print(
        f"{PAPERS} is the construction of the papers. The others are those that auto chooses for each eps. The "
        f"bound holds on the whole box in {first.dtype}, rounding included; the observed error is the largest seen at "
        "samples.",
        style="dim",
    )
    for path in figures:
        screen.print(Text.assemble(("wrote ", "green"), str(path)), soft_wrap=True)
    if missing:
        screen.print(Text(f"no pictures: {missing}"), soft_wrap=True)
