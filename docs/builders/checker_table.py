"""The table of the checker's files in docs/checker.md: the order in which to read them, and their lines of code."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import attnc_checker

FOLDER = Path(attnc_checker.__file__).parent
PARTS: dict[str, tuple[str, dict[str, str]]] = {
    "What a leaf proves": (
        "the mathematics of a plain certificate",
        {
            "expressions.py": "text → steps, each of which names a rule of arithmetic",
            "ranges.py": "those rules for intervals with exact ends: the range of f on a box",
            "jets.py": "the same rules for Taylor models of f; polynomials on a cube",
            "averages.py": "a head on a box: its moment Taylor model, and the gaps between its scores",
            "rounding.py": "the errors of floating-point sums and exponentials",
            "leaves.py": "the distance of the function and the network: the theorems on leaves",
        },
    ),
    "Which network it is": (
        "",
        {
            "program.py": "the layers and their weights, every shape checked",
            "vectors.py": "the numbers of all keys of a head at once",
            "forms.py": "affine forms, with the sizes that bound their rounding",
            "network.py": "the program → one stage, in exact rationals",
            "overflow.py": "the check that no number of the network, needed or not, overflows on the box",
        },
    ),
    "Files → verdict": (
        "",
        {
            "files.py": "strict JSON and safetensors; typed fields",
            "cells.py": "the stated leaves, and the check in integers that they cover the box",
            "claims.py": "the claims of every certificate",
            "proving.py": "the proof, leaf by leaf; models that leaves share",
            "checking.py": "binding, kinds of proof, several processes",
            "limits.py": "limits on time and memory",
            "__main__.py": "the command",
        },
    ),
    "The same, faster": (
        "",
        {
            "moments.py": "moments of all keys of a grid by products of matrices; long division",
            "quick.py": "the moment Taylor model by simpler bounds, for boxes on which rounding is negligible",
        },
    ),
    "Other claims about one stage": (
        "",
        {
            "tails.py": "infinite ranges: leaves beyond the core",
            "norms.py": "L_p norms",
            "tables.py": "tables",
            "row_file.py": "the rows of a large table, in a file of their own",
            "float32.py": "sharper bounds on rounding in float32",
            "partitions.py": "grids of keys: the rows are read from the weights, and f is compared with the value of "
            "every cell",
        },
    ),
    "Deep programs": (
        "",
        {
            "deep/claims.py": "the claims about stages",
            "deep/lines.py": "the stage that writes a channel, as a function of one number",
            "deep/pieces.py": "the error of such a function that an error of its argument causes",
            "deep/normal_forms.py": "whether two expressions are the same",
            "deep/deviations.py": "the error that a stage itself adds, by the place of its argument and the size of "
            "its carrier",
            "deep/composition.py": "the stages composed are the expression; the sum of their errors",
            "deep/chains.py": "deep programs without claims about stages: enclosures of enclosures, the last head axis "
            "by axis",
        },
    ),
    "Gradients": (
        "",
        {
            "derivatives.py": "the partial derivatives of an expression",
            "gradients.py": "the leaves of a claim about gradients",
            "deep/slopes.py": "the slopes of every stage, and their errors at the outputs",
        },
    ),
    "Proofs in parts": (
        "",
        {
            "shards.py": "leaves in files of their own",
            "verdicts.py": "a check in parts, and the merge of their verdicts",
        },
    ),
    "Stock checkpoints": (
        "",
        {"stock.py": "a decoder of transformers as a program: its pins, and its heads, read off its own matrices"},
    ),
    "Fits in context": (
        "",
        {
            "exact_run.py": "a program, run on one input in ball arithmetic",
            "fits.py": "the optimum for a stored prompt, and the distance of the weights from it",
        },
    ),
}
"""Title → remark, and file → content, in the order of reading."""
WITHOUT_CODE = {"__init__.py", "deep/__init__.py"}


def files() -> set[str]:
    """Return the files of the checker that have code, relative to its folder."""
    return {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.py")} - WITHOUT_CODE


def lines_of_code(path: Path) -> int:
    """Count the lines with code: no empty lines, no comments and no docstrings."""
    source = path.read_text(encoding="utf-8")
    texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
    documented = {
        line
        for text in texts
        if isinstance(text, ast.Constant) and isinstance(text.value, str)
        for line in range(text.lineno, (text.end_lineno or 0) + 1)
    }
    empty = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in empty]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - documented)


def table() -> str:
    """Return the table as Markdown: a row for each part, in bold, and for each file."""
    listed = [name for _, contents in PARTS.values() for name in contents]
    assert sorted(listed) == sorted(files()), "a file of the checker is not listed, or twice"
    rows, total = ["| file | lines of code | content |", "| :-- | --: | :-- |"], 0
    for number, (title, (remark, contents)) in enumerate(PARTS.items(), 1):
        counts = {name: lines_of_code(FOLDER / name) for name in contents}
        total += sum(counts.values())
        rows.append(f"| **{number}. {title}** | **{sum(counts.values()):,}** | {remark} |")
        rows += [f"| `{name}` | {counts[name]} | {content} |" for name, content in contents.items()]
    return "\n".join([*rows, f"| **all files** | **{total:,}** | |"])
