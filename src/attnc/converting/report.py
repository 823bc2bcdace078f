"""The report of a conversion and the model card: activations with keys and errors, and the parts left with reasons."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from attnc.constructions.fitting.gate import ALL_REALS
from attnc.converting.activations import Solved, key_arrays
from attnc.converting.arithmetic import Written
from attnc.converting.evaluation import evaluation_text
from attnc.converting.rounding import rounding_of
from attnc.model_card import code, escape, fenced
from attnc.numerics.bound import Bound
from attnc.wording import ceiling

HEADERS = (
    *("path", "activation", "keys", "proven error", "proven rounding", "proven block error", "range seen"),
    *("measured drift", "noise floor", "time"),
)
"""The column headers of the table."""


@dataclass
class Replaced:
    """One activation of the model that is now attention.

    `error` is proven in exact arithmetic for every x in `domain`, with the keys as the dtype stores them.
    `block_error` is ‖|W₂|‖_∞·error, also proven, if the linear map that follows is known. In a gated block it counts
    the other factor, if a norm layer or a clamp bounds that. `block_error_seen` is the same with the size of the other
    factor on the example. `evaluation` tells how the activation is computed on a CPU. `rounding` is a proven K: the
    rounding of the computed activation is at most K(1 + |y|) for every x. It is None if there is no rule, as for
    softsign and PReLU.

    The rest is measured on the example: the range of the pre-activations, and the largest change `drift` of the block's
    output. `floor` is the change that the dtype alone makes there: the original against itself in float64. `share` is
    the share of the time of one run.
    """

    path: str
    activation: str
    parameters: tuple[tuple[str, float], ...]
    anchors: int
    error: float
    method: str
    dtype: str
    domain: tuple[float, float]
    found: str = "module"  # or "function", if it is a call in the code
    block_error: float | None = None
    block_error_seen: float | None = None
    seen: tuple[float, float] | None = None
    drift: float | None = None
    floor: float | None = None
    rounding: float | None = None
    share: float | None = None
    also: tuple[str, ...] = ()  # further paths of a shared module
    consumers: tuple[str, ...] = ()  # the linear maps that take the output
    written: Written | None = None  # if it is arithmetic in the code
    evaluation: str = ""

    @classmethod
    def of(cls, solved: Solved, path: str, found: str) -> Replaced:
        activation, figures = solved.activation, (solved.num_anchors, solved.error, solved.method)
        dtype = " or ".join(solved.dtypes)
        made = cls(path, str(activation), activation.parameters, *figures, dtype, solved.domain, found)
        made.written = activation if isinstance(activation, Written) else None
        made.evaluation = evaluation_text(key_arrays(solved.keys), solved.dtypes[-1], is_product=solved.is_product)
        made.rounding = rounding_of(solved, solved.dtypes[-1])
        return made

    def add_consumer(self, path: str) -> None:
        self.consumers = tuple(sorted({*self.consumers, path}))


@dataclass
class Left:
    """A part of the model that was not converted, and the reason."""

    path: str
    what: str
    reason: str


@dataclass
class EndToEnd:
    """Differences between the original and the converted model, measured on given inputs."""

    inputs: str
    hidden: float | None = None
    cosine: float | None = None  # 1 − the smallest cosine between pooled outputs
    size: float | None = None  # the largest number in the hidden states of the original
    noise_floor: float | None = None  # the original in its dtype against itself in float64

    def sentence(self) -> str:
        """Describe the drift beside the noise floor."""
        if self.hidden is None:
            return "nothing to compare"
        changed = f"outputs change by up to {self.hidden:.2e}"
        if self.noise_floor is None:
            return changed
        floor = f"noise floor {self.noise_floor:.2e}"
        if self.hidden <= 2 * self.noise_floor:
            return f"{changed}, which is noise ({floor})"
        return (
            f"{changed} ({floor})"
            if not self.noise_floor
            else (f"{changed}, {self.hidden / self.noise_floor:.3g} times the noise floor ({self.noise_floor:.2e})")
        )


@dataclass(frozen=True)
class BlockOnBox:
    """The proven bounds of one layer of an encoder.

    `bound` holds if both layers get the same input, `composed` for the models from the first layer to this one. Each is
    None if it is vacuous: not smaller than `width`, the width of the range of the outputs.
    """

    path: str
    bound: float | None
    composed: float | None
    width: float | None


@dataclass(frozen=True)
class OnBox:
    """A proven bound of |converted − original| for all inputs of a box, with both models computed in their dtype.

    Attributes
    ----------
    box : str
        The box of the inputs. In a model of tokens, every token lies in it.
    tokens : int
        The largest number of tokens for which the bound holds. Without attention it has no effect.
    dtype : str
        The dtype of the computations.
    terms : Bound or None
        The parts of the bound: conversion in exact arithmetic, and the rounding of each model. None if one is infinite.
    width : float or None
        The width of the proven range of the outputs.
    vacuous_at : str or None
        The first part of the model whose error bound is as wide as its range, if that is so at the output too.
    blocks : tuple of BlockOnBox
        The bounds of the layers of an encoder.
    assumptions : tuple of str
        The assumptions about the machine.

    Examples
    --------
    >>> import attnc, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.GELU(), torch.nn.Linear(8, 1)).double()
    >>> _, report = attnc.convert(model, eps=1e-6, box=(-1, 1))
    >>> report.on_box.box, report.on_box.bound < 1e-5
    ('[-1, 1]^2', True)
    """

    box: str
    tokens: int
    dtype: str
    terms: Bound | None
    width: float | None
    vacuous_at: str | None = None
    blocks: tuple[BlockOnBox, ...] = ()
    assumptions: tuple[str, ...] = ()

    @property
    def bound(self) -> float | None:
        """The bound. It is None if the bound is vacuous: not smaller than the range of the outputs."""
        return None if self.terms is None or self.vacuous_at is not None else self.terms.value

    def __str__(self) -> str:
        where = f"for all inputs in {self.box}, in {self.dtype}"
        if self.terms is None or self.vacuous_at is not None:
            return (
                f"no useful bound {where}: from {self.vacuous_at or 'the input'!r} on, the error bound is as wide as "
                "the range of the values"
            )
        return f"proven {where}: |converted − original| ≤ {ceiling(self.terms.value)} = {self.terms}"


@dataclass
class Report:
    """The report of `attnc.convert`. `str(report)` is a table.

    Attributes
    ----------
    eps : float
        The requested error per activation.
    dtype : str
        The dtype in which the keys are proved.
    replaced : list of Replaced
        The activations that are now attention, with proven and measured figures.
    left : list of Left
        The parts that could not be converted, with reasons.
    notes : list of str
        Remarks about the conversion.
    kept : dict
        The number of nonlinear operators that stay on purpose, by kind: softmax, normalisation, products. Only if an
        example was given.
    end_to_end : EndToEnd or None
        The measured drift, if an example was given.
    on_box : OnBox or None
        The proven bound from end to end, if a box was given.

    Examples
    --------
    >>> import attnc, torch
    >>> _, report = attnc.convert(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.GELU()), eps=1e-5)
    >>> isinstance(report, attnc.Report), len(report.replaced)
    (True, 1)
    """

    eps: float
    dtype: str
    replaced: list[Replaced] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kept: dict[str, int] = field(default_factory=dict)
    end_to_end: EndToEnd | None = None
    on_box: OnBox | None = None

    @property
    def num_anchors(self) -> int:
        """The number of keys, summed over all activations.

        Examples
        --------
        >>> import attnc, torch
        >>> _, report = attnc.convert(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()), eps=1e-2)
        >>> report.num_anchors == report.replaced[0].anchors
        True
        """
        return sum(entry.anchors for entry in self.replaced)

    @property
    def error(self) -> float:
        """The largest proven error of the activations.

        Examples
        --------
        >>> import attnc, torch
        >>> _, report = attnc.convert(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.GELU()), eps=1e-2)
        >>> report.error <= 1e-2
        True
        """
        return max((entry.error for entry in self.replaced), default=0.0)

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values. A path is called name, and a domain of all real numbers is None.

        Returns
        -------
        dict
            Plain lists, texts and numbers, as `json.dumps` takes them.

        Examples
        --------
        >>> import attnc, torch
        >>> _, report = attnc.convert(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.GELU()), eps=1e-2)
        >>> [(entry["name"], entry["activation"]) for entry in report.as_json()["replaced"]]
        [('1', 'gelu')]
        """
        report = asdict(self)
        for entry in report["replaced"]:
            del entry["consumers"]
            entry["domain"] = None if entry["domain"] == ALL_REALS else entry["domain"]
            if entry["written"] is not None and math.isinf(entry["written"]["lipschitz"]):
                entry["written"]["lipschitz"] = None
        for listed in ("replaced", "left"):
            report[listed] = [{"name": entry.pop("path"), **entry} for entry in report[listed]]
        return report

    def rows(self) -> list[list[str]]:
        """The cells of the table, with proven and measured figures in separate columns.

        Returns
        -------
        list of list of str
            A row for each activation that was replaced.

        Examples
        --------
        >>> import attnc, torch
        >>> _, report = attnc.convert(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.GELU()), eps=1e-2)
        >>> report.rows()[0][:2]
        ['1', 'gelu']
        """
        rows = []
        for entry in self.replaced:
            bounds = (entry.error, entry.rounding, entry.block_error)
            seen = "" if entry.seen is None else f"[{entry.seen[0]:.3g}, {entry.seen[1]:.3g}]"
            measured = ["" if each is None else f"{each:.2e}" for each in (entry.drift, entry.floor)]
            share = "" if entry.share is None else f"{100 * entry.share:.1f} %"
            proven = ["" if bound is None else ceiling(bound) for bound in bounds]
            start = [entry.path or "(the model)", entry.activation, str(entry.anchors)]
            rows.append([*start, *proven, seen, *measured, share])
        return rows

    def markdown(self) -> str:
        """The table in Markdown.

        Returns
        -------
        str
            A table with a header.

        Examples
        --------
        >>> import attnc, torch
        >>> _, report = attnc.convert(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.GELU()), eps=1e-2)
        >>> report.markdown().splitlines()[1].count(":--")
        2
        """
        rows = [
            HEADERS,
            (*[":--"] * 2, *["--:"] * (len(HEADERS) - 2)),
            *((code(path), *cells) for path, *cells in self.rows()),
        ]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    def html(self) -> str:
        """The report as one HTML page that needs no other file. It needs the package jinja2 (extra `lab`).

        Returns
        -------
        str
            A complete page.

        Examples
        --------
        >>> import attnc, torch
        >>> _, report = attnc.convert(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.GELU()), eps=1e-2)
        >>> report.html()[:15]
        '<!doctype html>'
        """
        from attnc.converting.report_page import page

        return page(self)

    def __str__(self) -> str:
        table = [list(HEADERS), *self.rows()]
        widths = [max(len(row[i]) for row in table) for i in range(len(HEADERS))]
        return "\n".join([*("  ".join(map(str.ljust, row, widths)).rstrip() for row in table), *self.remarks()])

    def remarks(self) -> list[str]:
        """The lines below the table: parts left, notes, and the drift from end to end.

        Returns
        -------
        list of str
            One line for each remark.

        Examples
        --------
        >>> import attnc, torch
        >>> _, report = attnc.convert(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.GELU()), eps=1e-2)
        >>> report.remarks()
        ['evaluation on a CPU: compiled, one exponential (1)']
        """
        lines = [f"left as it was: {entry.path or 'the model'} ({entry.what}): {entry.reason}" for entry in self.left]
        lines += [f"note: {note}" for note in self.notes]
        if self.kept:
            kinds = ", ".join(f"{kind} ({count})" for kind, count in self.kept.items())
            lines.append(f"kept on purpose, with the number of operators: {kinds}")
        ways = Counter(entry.evaluation for entry in self.replaced)
        lines += [f"evaluation on a CPU: {way} ({count})" for way, count in ways.items()]
        drift = self.end_to_end
        if drift is not None and drift.hidden is not None:
            pooled = "" if drift.cosine is None else f"; 1 − cosine of pooled outputs {drift.cosine:.2e}"
            lines.append(f"measured on {drift.inputs}: {drift.sentence()}{pooled}")
        if self.on_box is not None:
            lines.append(str(self.on_box))
        return lines


def model_card(report: Report, source: str, architecture: str) -> str:
    """The README.md of a converted model, in Markdown. All text from the source is escaped."""
    kinds = sorted({entry.activation for entry in report.replaced})
    drift = report.end_to_end
    blocks = [
        f"# {code(source)} with attention for activations",
        f"{code(architecture)}, converted by attnc: {len(report.replaced)} activation(s) ({escape(', '.join(kinds))}) "
        "are now softmax attention over a few constant keys. Linear maps, attention, normalisation and all weights are "
        "those of the source, and so is its licence.",
        "## Error bounds",
        f"Every activation is within **{ceiling(report.error)}** of the original everywhere: proven, in exact "
        f"arithmetic, with the keys as {escape(report.dtype)} stores them. A block error is this error times the "
        "largest row sum of |W₂|, and is proven too. Ranges and drift are measured on the inputs named below.",
        report.markdown(),
    ]
    if drift is not None and drift.hidden is not None:
        moved = f"- **largest drift of the last hidden states:** {drift.hidden:.2e} (their size: {drift.size or 0:.3g})"
        if drift.noise_floor is not None:
            moved += f"\n- **noise floor, the source in its dtype against float64:** {drift.noise_floor:.2e}"
        if drift.cosine is not None:
            moved += f"\n- **1 − cosine of mean-pooled embeddings, at most:** {drift.cosine:.2e}"
        blocks += ["## End to end, measured", f"On {escape(drift.inputs)}:", moved]
    left = [f"- {code(entry.path)} ({escape(entry.what)}): {escape(entry.reason)}" for entry in report.left]
    notes = [f"- {escape(note)}" for note in report.notes]
    for title, lines in (("## Left as it was", left), ("## Notes", notes)):
        if lines:
            blocks += [title, "\n".join(lines)]
    snippet = 'import attnc\n\nmodel = attnc.load_converted(".")   # a torch module, in evaluation mode'
    blocks += ["## Run it", "In this folder, with attnc and its extras torch and models:", fenced(snippet, "python")]
    return "\n\n".join(blocks) + "\n"
