"""The README.md of a converted model."""

from __future__ import annotations

from attnc.converting.report import Report
from attnc.model_card import code, escape, fenced
from attnc.wording import ceiling


def model_card(report: Report, source: str, architecture: str) -> str:
    """Markdown; whatever came from the source is escaped."""
    kinds = sorted({entry.activation for entry in report.replaced})
    drift = report.end_to_end
    blocks = [
        f"# {code(source)} with attention for activations",
        f"{code(architecture)}, converted by attnc: {len(report.replaced)} activation(s) ({escape(', '.join(kinds))}) "
        "are now softmax attention over a few constant keys. Linear maps, attention, normalisation and all weights are "
        "those of the source, and so is its licence.",
        "## How far off it can be",
        f"Every activation is within **{ceiling(report.error)}** of the original everywhere: proven, in exact "
        f"arithmetic, with the keys as {escape(report.dtype)} stores them. A block error is that times the largest row "
        "sum of |W₂|, proven too. Ranges and drift are measured, on the inputs named below.",
        report.markdown(),
    ]
    if drift is not None and drift.hidden is not None:
        lines = [
            f"- **largest drift of the last hidden states:** {drift.hidden:.2e} (their size: {drift.size or 0:.3g})"
        ]
        if drift.cosine is not None:
            lines.append(f"- **1 − cosine of mean-pooled embeddings, at most:** {drift.cosine:.2e}")
        blocks += ["## End to end, measured", f"On {escape(drift.inputs)}:", "\n".join(lines)]
    if report.left:
        rows = [f"- {code(entry.path)} ({escape(entry.what)}): {escape(entry.reason)}" for entry in report.left]
        blocks += ["## Left as it was", "\n".join(rows)]
    if report.notes:
        blocks += ["## Notes", "\n".join(f"- {escape(note)}" for note in report.notes)]
    snippet = 'import attnc\n\nmodel = attnc.load_converted(".")   # a torch module, in evaluation mode'
    blocks += ["## Run it", "In this folder, with attnc and its extras torch and models:", fenced(snippet, "python")]
    return "\n\n".join(blocks) + "\n"
