"""Write the pages of the lab from a run: `python docs/builders/lab_pages.py RUN` takes a run of the profile full.

Without RUN it takes the run that is stored in docs/lab. It writes the tables of papers.md and lab.md, the page
lab-results.md and its figures.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from attnc_lab import EXPERIMENTS
from attnc_lab.experiment import CPU_SECONDS, Status
from attnc_lab.folder import SETTINGS, Folder
from attnc_lab.report import Finding, findings

DOCS = Path(__file__).resolve().parents[1]
STORED, FIGURES = DOCS / "lab", DOCS / "figures" / "lab"
RESULTS = "lab-results.md"
SUMMARY = "summary only"
"""Where a page says so, an item is in the summaries of the papers, and was not found in the papers themselves."""


class Item(NamedTuple):
    """An item of a paper: its number, text, place in the paper, pages or commands, and verdicts.

    A verdict is the name of an experiment and its number on the experiment's list, from 1.
    """

    number: int
    text: str
    place: str
    page: str
    verdicts: tuple[tuple[str, int], ...]


def _page(name: str, anchor: str = "") -> str:
    return f"[{name}]({name}.md{anchor})"


SOFTMAX = [
    Item(1, "two layers of attention are universal", "abstract, (i)", _page("two_layer"), (("sequences", 1),)),
    Item(2, "one layer followed by a softmax is universal", "abstract, (ii)", _page("attention_softmax"),
         (("sequences", 2),)),
    Item(3, "sequence-to-sequence functions", "abstract", f"`SequenceTarget` in {_page('max_affine')}",
         (("sequences", 1), ("sequences", 5))),
    Item(4, "the generalised ReLU by one head, O(1/p)", f"abstract; rate: {SUMMARY}, key results",
         _page("truncated_linear"), (("rate_in_p", 1), ("rate_in_p", 2))),
    Item(5, "by H heads, O(1/(nH))", f"{SUMMARY}, key results", _page("truncated_linear_heads"),
         (("rate_in_heads", 1),)),
    Item(6, "sentinels", f"{SUMMARY}, mechanism 2", _page("truncated_linear_heads"), (("boundary", 1),)),
    Item(7, "softmax as a selector", f"{SUMMARY}, mechanism 1", _page("truncated_linear"), (("selection", 1),)),
    Item(8, "bumps, then retrieval", f"{SUMMARY}, mechanism 3", _page("two_layer"), (("sequences", 1),)),
    Item(9, "several heads in layer 1, one in layer 2", f"{SUMMARY}, component map",
         f"`heads=` in {_page('two_layer')}", (("sequences", 3),)),
    Item(10, "attention subsumes ReLU networks and other known approximators", "abstract",
         f"{_page('relu_network')}, {_page('networks')}", (("sequences", 5), ("beyond_the_box", 4))),
    Item(11, "a gradient step in context", f"{SUMMARY}, key results", _page("incontext"), (("incontext", 1),)),
    Item(12, "statistical models in context", "abstract", f"{_page('incontext')}, `attnc icl`",
         (("estimators", 1), ("convergence", 3))),
    Item(13, "precision p against sequence length n", f"{SUMMARY}, trade-offs", _page("truncated_linear"),
         (("range_length", 3),)),
    Item(14, "heads H against capacity", f"{SUMMARY}, trade-offs", _page("truncated_linear_heads"),
         (("rate_in_heads", 4), ("range_length", 4))),
    Item(15, "β against underflow", f"{SUMMARY}, trade-offs", _page("float32"), (("temperature", 2),)),
    Item(16, "signature: uniform attention", f"{SUMMARY}, failure signatures", "`attnc diagnose`",
         (("selection", 2), ("diagnosis", 1))),
    Item(17, "signature: boundary artefacts", f"{SUMMARY}, failure signatures", "`attnc diagnose`",
         (("boundary", 1), ("diagnosis", 1))),
    Item(18, "signature: interpolation drift", f"{SUMMARY}, failure signatures", "`attnc diagnose`",
         (("diagnosis", 3),)),
    Item(19, "experiment 1: mean squared error against p, trained", f"{SUMMARY}, first experiments", "",
         (("rate_in_p", 3), ("rate_in_p", 4))),
    Item(20, "experiment 2: heat maps", f"{SUMMARY}, first experiments", "", (("selection", 1),)),
    Item(21, "experiment 3: heads ablated, at a fixed total p and at fixed keys per head",
         f"{SUMMARY}, first experiments", "",
         (("range_length", 4), ("range_length", 5), ("rate_in_heads", 2), ("rate_in_heads", 3))),
    Item(22, "open: universality in context", f"{SUMMARY}, open questions",
         _page("incontext", "#kernels-neighbours-and-every-continuous-function"),
         (("incontext_universal", 1), ("incontext_universal", 2), ("incontext_universal", 3))),
    Item(23, "open: polynomial size", f"{SUMMARY}, open questions", _page("compose"), (("scaling", 4), ("scaling", 5))),
    Item(24, "open: convergence of many steps, meta-learning", f"{SUMMARY}, open questions", _page("incontext"),
         (("convergence", 1), ("incontext", 2), ("convergence", 4))),
    Item(25, "open: task composition", f"{SUMMARY}, open questions", _page("incontext"),
         (("convergence", 2), ("incontext", 3))),
    Item(26, "limitation: infinite β, infinite precision", f"{SUMMARY}, limitations", _page("certificates"),
         (("temperature", 1), ("temperature", 3))),
    Item(27, "limitation: overhead", f"{SUMMARY}, limitations", "`attnc plan`", (("scaling", 2), ("beyond", 1))),
    Item(28, "limitation: continuity, compactness", "abstract (compact domains)",
         f"{_page('affine_cells')}, {_page('gates')}", (("boundary", 4), ("cross_inputs", 2), ("beyond_the_box", 3))),
    Item(29, "check 1: β = 10, 50, 100, 1000", f"{SUMMARY}, next checks", "", (("temperature", 4),)),
    Item(30, "check 2: boundaries, steep places, jumps", f"{SUMMARY}, next checks", "",
         (("boundary", 2), ("boundary", 3), ("boundary", 4))),
    Item(31, "check 3: n = 1,000 and 10,000", f"{SUMMARY}, next checks", "", (("scaling", 1), ("scaling", 2))),
    Item(32, "check 3: wider tokens, higher dimension", f"{SUMMARY}, next checks", "",
         (("scaling", 1), ("dimension", 1))),
    Item(33, "the settings of the experiments (d = 10, n = 50; 20 × 5)", f"{SUMMARY}, next checks 3; authors' code", "",
         (("rate_in_p", 5), ("sequences", 5), ("sequences", 6), ("sequences", 7))),
]  # fmt: skip
PARTITION = [
    Item(34, "self-attention in L∞", "Theorem 4.1", _page("max_affine"), (("two_dimensional", 1),)),
    Item(35, "cross-attention, f(X)", f"{SUMMARY}, key results", _page("max_affine_cross"), (("two_dimensional", 2),)),
    Item(36, "cross-attention, f(X, Y)", f"{SUMMARY}, key results",
         f"`SequenceTarget(tokens=(1, 2))` in {_page('max_affine_cross')}", (("cross_inputs", 1),)),
    Item(37, "L_p norms", f"{SUMMARY}, key results",
         f"`norm=`: {_page('max_affine', '#l_p-and-functions-that-jump')}, {_page('affine_cells')}",
         (("two_dimensional", 4), ("cross_inputs", 2), ("cross_inputs", 3))),
    Item(38, "Lipschitz functions, smaller domains", f"{SUMMARY}, key results",
         _page("max_affine", "#a-smaller-domain-needs-fewer-cells"), (("two_dimensional", 5),)),
    Item(39, "scores v·x − ½‖v‖²", "Proposition 3.2", "[below](#symbols-and-propositions)",
         (("two_dimensional", 3),)),
    Item(40, "value reassignment", "Proposition 3.3", "[below](#symbols-and-propositions)", (("two_dimensional", 3),)),
    Item(41, "breaks if R is small, or far from all centres", f"{SUMMARY}, mechanism 1", "`attnc diagnose`",
         (("selection", 2), ("beyond_the_box", 1), ("beyond_the_box", 2))),
    Item(42, "breaks at high frequency within a cell", f"{SUMMARY}, mechanism 2", "", (("frequency", 1),
         ("frequency", 2))),
    Item(43, "breaks at finite P and finite precision", f"{SUMMARY}, mechanism 3", _page("float32"),
         (("temperature", 3), ("two_dimensional", 1))),
    Item(44, "no positional encodings", f"{SUMMARY}, executive summary",
         f"`position_channels=False`: {_page('max_affine', '#position-channels-and-the-form-without')}",
         (("sequences", 4),)),
    Item(45, "signature: oscillation", f"{SUMMARY}, failure signatures", "`attnc diagnose`",
         (("diagnosis", 1), ("frequency", 2))),
    Item(46, "experiment 2: norms grow in training", f"{SUMMARY}, first experiments; Section 6", "",
         (("learnability", 2), ("learnability", 3), ("learnability", 4))),
    Item(47, "experiment 3: noise", f"{SUMMARY}, first experiments", "",
         (("noise", 1), ("noise", 2), ("noise", 3), ("noise", 4), ("noise", 5))),
    Item(48, "check 1: learned against constructed", f"{SUMMARY}, next checks", "`attnc.compare`",
         (("learnability", 1), ("learnability", 5), ("learnability", 6))),
    Item(49, "check 2: dimensions 2 to 10", f"{SUMMARY}, next checks", "",
         (("dimension", 1), ("dimension", 2), ("dimension", 3))),
    Item(50, "check 3: perturbation", f"{SUMMARY}, next checks", "`net.bound(weights_within=r)`",
         (("perturbation", 1), ("perturbation", 2), ("perturbation", 3), ("perturbation", 4), ("perturbation", 5))),
    Item(51, "exponential growth P^{dn}", f"{SUMMARY}, trade-offs", "`attnc plan`", (("scaling", 3), ("dimension", 1))),
    Item(52, "sufficiency for real sequence tasks", f"{SUMMARY}, confidence", "",
         (*(("real_tasks", k) for k in range(1, 7)),)),
]  # fmt: skip


def papers_table(items: Sequence[Item], found: dict[str, Finding]) -> str:
    """Return the items of a paper, each with its verdicts in the stored run."""
    rows = []
    for item in items:
        names = list(dict.fromkeys(name for name, _ in item.verdicts))
        command = f"`attnc lab run {' '.join(names)}`" + (f"; {item.page}" if item.page else "")
        verdicts = "; ".join(
            f"{found[name].experiment.number}.{k}: {found[name].verdicts[k - 1].label}" for name, k in item.verdicts
        )
        figures = ", ".join(f"[{found[name].experiment.number}]({RESULTS}#{anchor(found[name])})" for name in names)
        rows.append((str(item.number), item.text, item.place, command, verdicts, figures))
    return _table(("#", "item", "where in the paper", "command, page", "verdict", "figure"), rows)


def lab_table(found: dict[str, Finding]) -> str:
    """Return all experiments, each with its question, the counts of its verdicts, and its processor time."""
    rows = []
    for name, finding in found.items():
        counts = {status: sum(each.status is status for each in finding.verdicts) for status in Status}
        shown = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        seconds = finding.table.having(CPU_SECONDS).column(CPU_SECONDS).sum()
        number = finding.experiment.number
        link = f"[{number}]({RESULTS}#{anchor(finding)})"
        rows.append((link, f"`{name}`", finding.experiment.question, shown, f"{seconds:,.0f}"))
    return _table(("#", "experiment", "question", "verdicts", "CPU s"), rows)


def anchor(finding: Finding) -> str:
    """Return the name of the heading of an experiment."""
    heading = f"{finding.experiment.number}. {finding.experiment.title}"
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def results_page(folder: Folder, found: dict[str, Finding]) -> str:
    """Return the page of all figures and verdicts."""
    seconds = sum(finding.table.having(CPU_SECONDS).column(CPU_SECONDS).sum() for finding in found.values())
    commands = ", ".join(f"`{command}`" for command in folder.commands)
    counts = {status: sum(v.status is status for f in found.values() for v in f.verdicts) for status in Status}
    parts = [
        "# The lab: figures and verdicts\n",
        "This page is written by `docs/builders/lab_pages.py` from a run of all experiments with the profile full, "
        f"seed {folder.seed}. Its commands were {commands}; a later one measured its experiments anew. All cells took "
        f"{seconds / 60:,.0f} minutes of processor time. Its tables are in the folder `docs/lab`, and "
        "`attnc lab report docs/lab` makes the report from them. "
        f"In all: {', '.join(f'{count} × {status}' for status, count in counts.items())}. [The lab](lab.md) has the "
        "meaning of a verdict and the commands, [the papers](papers.md) the items that they belong to.\n",
        "Errors are observed at samples, unless they are called proven. Training is stated with its steps and seeds. "
        "Means over seeds are geometric, and their 95 % intervals are those of normal logarithms. "
        "“Not reached by this training” is about that training, and not about what weights can do.\n",
    ]
    for name, finding in found.items():
        about = finding.experiment
        parts.append(f"## {about.number}. {about.title}\n")
        alt = f"{about.title}: measured points, and the prediction as dashed lines"
        parts.append(f"![{alt}](figures/lab/{name}.svg)\n")
        parts.append(f"*Command:* `attnc lab run {name}`. *Source:* {_escaped(about.source)}.\n")
        parts.append(f"*Prediction:* {_escaped(about.prediction)}\n")
        for k, verdict in enumerate(finding.verdicts, 1):
            c = verdict.constant.definition if verdict.constant and verdict.status is Status.CONSTANT else ""
            defined = f" c: {c}." if c else ""
            effort = (
                f" Training: {verdict.effort}." if verdict.effort and verdict.status is not Status.NOT_REACHED else ""
            )
            text = f"{verdict.claim} {verdict.because[:1].upper()}{verdict.because[1:]}{defined}{effort}"
            parts.append(f"- **{about.number}.{k} {_escaped(verdict.label)}.** {_escaped(text)}")
        parts.append("")
    return "\n".join(parts)


def _escaped(text: str) -> str:
    """Return a text in which Markdown finds no marks of its own."""
    return re.sub(r"([|*_<>\[\]~])", r"\\\1", text)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["--:", *[":--"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def pages(path: Path = STORED) -> dict[str, str]:
    """Return every page of the lab as it should be, by its name."""
    found = {finding.experiment.name: finding for finding in findings(path)}
    missing = [experiment.name for experiment in EXPERIMENTS if experiment.name not in found]
    assert not missing, f"not in the run: {missing}"
    tables = {
        "papers-softmax": papers_table(SOFTMAX, found),
        "papers-partition": papers_table(PARTITION, found),
        "lab-experiments": lab_table(found),
    }
    made = {RESULTS: results_page(Folder.read(path), found)}
    for name in ("papers.md", "lab.md"):
        made[name] = re.sub(
            r"(<!-- lab: (\S+) -->\n).*?(<!-- end -->)",
            lambda match: f"{match[1]}{tables[match[2]]}\n{match[3]}",
            (DOCS / name).read_text(encoding="utf-8"),
            flags=re.DOTALL,
        )
    return made


def main() -> None:
    """Store a run, if one is named, and write the pages and the figures."""
    if len(sys.argv) > 1:
        run = Path(sys.argv[1])
        assert Folder.read(run).profile == "full"
        shutil.rmtree(STORED, ignore_errors=True)
        STORED.mkdir()
        for name in (SETTINGS, *(f"{experiment.name}.csv" for experiment in EXPERIMENTS)):
            shutil.copy(run / name, STORED / name)
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")
    FIGURES.mkdir(parents=True, exist_ok=True)
    for finding in findings(STORED):
        (FIGURES / f"{finding.experiment.name}.svg").write_text(finding.figure + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
