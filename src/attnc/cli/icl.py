"""`attnc icl`: fit a model on a table by an attention program, and show it beside scikit-learn's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnc.cli.commands import app
from attnc.cli.options import Command, Json, completed, one_of, optional
from attnc.cli.output import plain_table, print_json, print_parts, progress_bar
from attnc.cli.tables import read_examples
from attnc.errors import InputError
from attnc.exports.directory import IN_CONTEXT
from attnc.exports.safe_files import why_not_writable
from attnc.incontext.acceleration import METHODS
from attnc.wording import one_line, plural

if TYPE_CHECKING:
    import numpy as np

    from attnc.constructions.built import Progress

MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "linear": ("LinearRegression", ("method", "tol", "max_iter", "heads", "max_rows")),
    "ridge": ("Ridge", ("alpha", "method", "tol", "max_iter", "heads", "learning_rate", "max_rows")),
    "lasso": ("Lasso", ("alpha", "method", "tol", "max_iter", "heads", "max_rows")),
    "elastic-net": ("ElasticNet", ("alpha", "l1_ratio", "method", "tol", "max_iter", "heads", "max_rows")),
    "huber": ("Huber", ("alpha", "threshold", "tol", "max_iter", "max_rows")),
    "logistic": ("LogisticRegression", ("C", "method", "tol", "max_iter", "heads", "max_rows")),
    "poisson": ("PoissonRegressor", ("alpha", "method", "tol", "max_iter", "heads", "max_rows")),
    "kernel-ridge": ("KernelRidge", ("alpha", "gamma", "method", "tol", "max_iter", "max_rows")),
    "nadaraya-watson": ("NadarayaWatson", ("gamma", "max_rows")),
    "neighbors": ("KNeighborsRegressor", ("n_neighbors", "max_rows")),
}
BLOCKS = "▁▂▃▄▅▆▇█"
SPARKS = 60
"""Most points of a curve in the terminal. Each takes one column."""
COEFFICIENTS_SHOWN = 40
"""Most coefficients in the printed table: about a screen."""


@app.command(
    "icl",
    cls=Command,
    epilog="Examples:\n\nattnc icl ridge --csv data.csv --output y --alpha 1.0\n\n"
    "attnc icl logistic --csv data.csv --inputs a,b --output class --c 0.5 --standardise --plot loss.svg",
)
def icl_command(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help=f"The model to fit: {', '.join(MODELS)}.", autocompletion=completed(tuple(MODELS))
        ),
    ],
    csv: Annotated[
        Path,
        typer.Option(
            "--csv",
            metavar="FILE",
            help="The examples: a CSV file whose first line names the columns; - is standard input.",
        ),
    ],
    output: Annotated[str, typer.Option(metavar="Z", help="The column that the model predicts.")],
    inputs: Annotated[
        str | None, optional("The columns that it predicts from. By default, all other columns.", metavar="X,Y")
    ] = None,
    standardise: Annotated[
        bool, typer.Option("--standardise", help="Scale every input column to mean 0 and variance 1 before the fit.")
    ] = False,
    alpha: Annotated[
        float | None,
        optional(
            "The weight of the penalty, for ridge, lasso, elastic-net, huber, poisson and kernel-ridge.", metavar="A"
        ),
    ] = None,
    l1_ratio: Annotated[
        float | None,
        optional("The share of the l1 norm in the penalty, from 0 to 1, for elastic-net.", metavar="SHARE"),
    ] = None,
    C: Annotated[
        float | None, optional("The inverse of the weight of the penalty, for logistic.", "--c", metavar="C")
    ] = None,
    threshold: Annotated[
        float | None,
        optional("The residual beyond which the loss is linear, in units of the output, for huber.", metavar="R"),
    ] = None,
    gamma: Annotated[
        float | None,
        optional(
            "The factor gamma of the kernel exp(-gamma·d²) of two points at distance d, for kernel-ridge and "
            "nadaraya-watson.",
            metavar="G",
        ),
    ] = None,
    n_neighbors: Annotated[
        int | None, optional("The number of neighbours, for neighbors.", "--neighbors", metavar="N")
    ] = None,
    method: Annotated[
        str | None, one_of("The kind of steps, which decides the number of layers", ("newton", *METHODS), default=False)
    ] = None,
    learning_rate: Annotated[
        float | None,
        optional("The step size of --method plain, for ridge. By default it follows from the data.", metavar="R"),
    ] = None,
    tol: Annotated[
        float | None, optional("The fit stops when its error is below this share of the first error.", metavar="T")
    ] = None,
    max_iter: Annotated[
        int | None, optional("The maximum number of steps. A step takes one or more attention layers.", metavar="N")
    ] = None,
    heads: Annotated[
        int | None,
        optional(
            "The number of pairs of heads in a gradient layer. More pairs make a gradient more exact.",
            "--head-pairs",
            metavar="N",
        ),
    ] = None,
    max_rows: Annotated[
        int | None,
        optional("The maximum number of rows in the prompt. By default, the rows of the table.", metavar="N"),
    ] = None,
    plot: Annotated[
        Path | None, optional("Draw the loss after every step into this file: .svg, .pdf or .png.", metavar="FILE")
    ] = None,
    out: Annotated[
        Path | None, optional("Write the attention program with its certificate to this folder.", metavar="DIR")
    ] = None,
    json_output: Json = False,
) -> None:
    """Fit a model on a table by attention, and show its coefficients beside those of scikit-learn.

    The rows of the table are the tokens of a prompt. Attention layers compute the steps of the fit from them.

    Nothing is trained. The output states the program's size, its bound if one is proved, and the loss of every step.
    """
    if model not in MODELS:
        raise InputError(f"there is no model {model!r:.60}; there are {', '.join(MODELS)}")
    options = {option for _, known in MODELS.values() for option in known}
    given = {name: value for name, value in context.params.items() if name in options and value is not None}
    name, known = MODELS[model]
    flags = {param.name: param.opts[0] for param in context.command.params}

    def flag(option: str) -> str:
        return str(flags[option])

    for option in given:
        if option not in known:
            raise InputError(f"{model} has no option {flag(option)}; it has {', '.join(map(flag, known))}")
    if plot is not None:
        from attnc.plots.drawing import check_picture

        check_picture(plot)
    if out is not None and (reason := why_not_writable(out, IN_CONTEXT)):
        raise InputError(f"cannot save to {str(out)!r}: {reason}")
    with progress_bar("reading the table") as progress:
        X, y, columns = read_examples(csv, output, inputs, with_labels=model == "logistic")
        if standardise:
            scale = X.std(axis=0)
            scale[scale == 0] = 1.0
            X = (X - X.mean(axis=0)) / scale
        report = _fit(name, given, X, y, columns, progress)
        if plot is not None:
            from attnc.plots import plot_loss

            progress("drawing", 0.0)
            plot_loss(report["model"], plot)
        if out is not None:
            report["model"].save(out)
            report["out"] = str(out)
    if json_output:
        print_json({key: value for key, value in report.items() if key != "model"})
    else:
        _print(report)


def _fit(
    name: str, given: dict[str, Any], X: np.ndarray, y: np.ndarray, columns: tuple[str, ...], progress: Progress
) -> dict[str, Any]:
    import warnings

    import numpy as np

    from attnc import incontext

    progress("fitting by attention", 0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fitted = getattr(incontext, name)(**given).fit(X, y)
        except ValueError as error:  # scikit-learn raises it for bad data
            raise InputError(str(error)) from None
    progress("fitting by scikit-learn", 0.5)
    theirs = _theirs(name, fitted, X, y)
    progress("comparing", 0.75)
    report: dict[str, Any] = {"name": name, "model": fitted, "rows": len(X), "features": len(columns)}
    report["warnings"] = [str(warning.message) for warning in caught]
    if hasattr(fitted, "coef_"):
        models = (fitted,) if theirs is None else (fitted, theirs)
        found = [np.append(np.ravel(model.coef_), np.ravel(model.intercept_)[0]).tolist() for model in models]
        other = found[1] if theirs is not None else [None] * len(found[0])
        report["coefficients"] = [
            {"name": column, "attention": a, "scikit_learn": b}
            for column, a, b in zip((*columns, "(intercept)"), found[0], other, strict=True)
        ]
    if theirs is not None:
        predictions, others = fitted.predict(X), theirs.predict(X)
        moved = np.abs(np.subtract(found[0], found[1]))[:-1] if hasattr(fitted, "coef_") else None
        apart = predictions != others if predictions.dtype.kind == "U" else np.abs(predictions - others)
        report["largest_difference"] = {
            "predictions": float(apart.max()),
            "coefficients": float(moved.max()) if moved is not None else None,
        }
    return report | _sizes(fitted)


def _theirs(name: str, fitted: Any, X: np.ndarray, y: np.ndarray) -> Any:
    """Return scikit-learn's model of the same kind, fitted with its smallest tolerance, or None if there is none."""
    import warnings

    from sklearn import kernel_ridge, linear_model, neighbors

    where = {"KernelRidge": kernel_ridge, "KNeighborsRegressor": neighbors}.get(name, linear_model)
    if not hasattr(where, name):
        return None  # scikit-learn's HuberRegressor has another objective: it finds a scale as well
    options = {
        key: value for key, value in fitted.get_params().items() if key in ("alpha", "l1_ratio", "C", "n_neighbors")
    }
    if name in ("Lasso", "ElasticNet", "LogisticRegression", "PoissonRegressor"):
        options |= {"tol": 1e-13, "max_iter": 10**5}
    if name in ("LogisticRegression", "PoissonRegressor"):
        options["solver"] = "newton-cholesky"
    if name == "KernelRidge":
        options |= {"kernel": "rbf", "gamma": fitted.gamma_}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(where, name)(**options).fit(X, y)


def _sizes(fitted: Any) -> dict[str, Any]:
    from attnc.incontext.progress import Objective, loss_path

    program = fitted.program_.program
    sizes: dict[str, Any] = {
        "layers": len(program.all_layers),
        "attention_layers": program.num_attention_layers,
        "stored_parameters": program.num_parameters,
        "prompt_rows": int(program.input_shapes[-1][0]),
        "steps": getattr(fitted, "n_iter_", None),
    }
    for key, attribute in (("bound", "bound_"), ("gradient_bound", "gradient_bound_")):
        bound = getattr(fitted, attribute, None)
        if bound is not None:
            sizes[key] = {"value": bound.value, "terms": {term.name: term.value for term in bound.terms}}
    if hasattr(fitted, "gradient_norm_"):
        sizes["gradient_norm"] = fitted.gradient_norm_
    if hasattr(fitted, "task_"):
        objective = Objective.of(fitted.task_, fitted.prompt_[-fitted.task_.prompt.rows :])
        steps, losses = loss_path(objective, fitted.trajectory_, SPARKS)
        sizes["loss"] = [
            {"name": f"step {t}", "step": int(t), "loss": float(loss)} for t, loss in zip(steps, losses, strict=True)
        ]
    return sizes


def sparkline(values: list[float]) -> str:
    """Draw the values, minus the smallest of them, as blocks on a logarithmic scale."""
    import numpy as np

    least = float(np.nanmin(values))
    rise = np.array(values, float) - least
    above = np.log10(np.maximum(rise, 1e-15 * max(abs(least), float(np.nanmax(rise)), 1e-300)))
    span = above.max() - above.min() or 1.0
    return "".join(BLOCKS[round(float((a - above.min()) / span) * (len(BLOCKS) - 1))] for a in above)


def _print(report: dict[str, Any]) -> None:
    from rich.text import Text

    print_parts(
        Text.assemble(
            (report["name"], "bold"), f" on {plural(report['rows'], 'row')} of {plural(report['features'], 'feature')}"
        )
    )
    if "coefficients" in report:
        rows = report["coefficients"]
        is_compared = rows[0]["scikit_learn"] is not None
        table = plain_table("column", "by attention", *(("scikit-learn", "difference") if is_compared else ()))
        for row in rows if len(rows) <= COEFFICIENTS_SHOWN + 1 else [*rows[:COEFFICIENTS_SHOWN], rows[-1]]:
            ours, theirs = row["attention"], row["scikit_learn"]
            compared = (f"{theirs:.10g}", f"{ours - theirs:.1e}") if is_compared else ()
            table.add_row(Text(one_line(row["name"])), f"{ours:.10g}", *compared)
        print_parts(table)
    size = f"{plural(report['layers'], 'layer')}, {report['attention_layers']:,} of attention, over a prompt of "
    size += f"{plural(report['prompt_rows'], 'row')}; {plural(report['stored_parameters'], 'number')} stored"
    facts = [("program", size)]
    if "largest_difference" in report:
        found = report["largest_difference"].items()
        facts.append(
            ("difference from scikit-learn", ", ".join(f"{of} {apart:.2g}" for of, apart in found if apart is not None))
        )
    for key, title in (("gradient_bound", "bound of a gradient"), ("bound", "bound of the weights")):
        if key in report:
            terms = " + ".join(f"{value:.2g} ({name})" for name, value in report[key]["terms"].items())
            facts.append((title, f"{report[key]['value']:.3g} = {terms}"))
    if "gradient_norm" in report:
        facts.append(("gradient at the end", f"{report['gradient_norm']:.3g}"))
    if "loss" in report:
        losses = [point["loss"] for point in report["loss"]]
        curve = f"{sparkline(losses)}  {losses[0]:.6g} → {losses[-1]:.6g}, {plural(report['steps'], 'step')}"
        facts.append(("loss per layer", curve))
    if "out" in report:
        facts.append(("written to", one_line(report["out"])))
    lines = [Text.assemble((f"{title}: ", "cyan"), text) for title, text in facts]
    lines += [Text(f"warning: {one_line(message)}", "yellow") for message in report["warnings"]]
    print_parts(*lines)
