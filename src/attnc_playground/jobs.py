"""The work of the playground, as it runs in a worker: requests in, JSON values or a file out."""

from __future__ import annotations

import base64
import io
import json
import math
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import attnc
from attnc import incontext
from attnc_playground.limits import MAX_KEYS
from attnc_playground.requests import (
    INFINITE,
    CompileRequest,
    DownloadRequest,
    FunctionRequest,
    InContextRequest,
)

CURVE_POINTS = 601
"""Points of a curve on the page. It is about 700 pixels wide."""
PICTURE_SIDE = 73
"""Points along each axis of a picture of two variables. 5,329 points and 64 keys take the page 10 ms."""
CHECKED_POINTS = 33
"""Points at which the page compares its own outputs with the engine's."""
LADDER = {1: range(2, 65), 2: range(2, 17)}
"""Numbers of keys per axis that the page can build by hand, by the number of variables: up to 64 keys on a line and
256 in the plane. A frame with 256 keys takes the page 30 ms."""
PROGRAM_NUMBERS = 120_000
"""Largest number of stored numbers of a program that is sent to the page: about 2 MB of JSON."""
WINDOW = 6.0
"""Where an infinite end of a box is drawn. Beyond ±6 the functions of the presets equal their asymptotes to 1e-8."""
MAX_EDGES = 2_000
"""Largest number of steps of the proven band. A plot has fewer pixels."""


@dataclass(frozen=True)
class File:
    """A file to download."""

    name: str
    type: str
    content: bytes


def compile_network(request: CompileRequest, seconds: float) -> attnc.Network:
    """Compile, with the limits of the playground."""
    return attnc.compile(
        request.expression,
        box_of(request),
        request.eps,
        construction=request.construction,
        norm=request.norm,
        points_per_axis=request.points_per_axis,
        beta=request.beta,
        max_anchors=MAX_KEYS,
        seconds=seconds,
    )


def box_of(request: FunctionRequest) -> dict[str, tuple[float, float]]:
    ends = {
        name: [INFINITE[end] if isinstance(end, str) else end for end in pair] for name, pair in request.box.items()
    }
    return {name: (lo, hi) for name, (lo, hi) in ends.items()}


def compiled(request: CompileRequest, seconds: float) -> dict[str, Any]:
    """Return everything that the page shows of a network."""
    net = compile_network(request, seconds)
    return {
        "expression": request.expression,
        "variables": list(net.variables),
        "box": net.box.as_json(),
        "eps": request.eps,
        "construction": net.construction,
        "parameters": {name: str(value) for name, value in net.parameters.items()},
        "dtype": net.dtype,
        "num_anchors": net.num_anchors,
        "num_parameters": net.num_parameters,
        "num_layers": net.program.num_attention_layers,
        "num_heads": net.program.num_heads,
        "certificate": certificate(net),
        "program": program(net.program),
        "picture": picture(net),
    }


def certificate(net: attnc.Network) -> dict[str, Any]:
    claim = net.certificate
    return {
        "bound": claim.bound,
        "observed": claim.observed,
        "terms": [{"name": term.name, "value": _finite(term.value), "reason": term.reason} for term in claim.terms],
        "assumptions": list(claim.assumptions),
        "dtype": claim.dtype,
        "method": claim.method,
        "norm": claim.norm,
        "stages": _stages(claim),
        "band": _band(net) if net.box.d == 1 else None,
    }


def _stages(claim: attnc.Certificate) -> list[dict[str, Any]]:
    """Return the bound of each head of a composition: the ledger by stage."""
    if claim.by_heads is None:
        return []
    return [
        {
            "layer": head.stage,
            "name": head.name,
            "computes": f"the error of the head that computes {head.function} of t = {head.argument}",
            "bound": _finite(head.bound),
        }
        for head in claim.by_heads.heads
    ]


def _band(net: attnc.Network) -> dict[str, list[float]] | None:
    """Return the proven bound along x, as steps: the largest of the leaves over each."""
    claim = net.certificate
    if claim.pointwise_bound is None or not len(claim.leaf_bounds):
        return None
    starts, stops = (ends[:, 0] for ends in claim.cells(net.box))
    edges = np.unique(np.concatenate([starts, stops]))
    if len(edges) > MAX_EDGES or not np.isfinite(edges).all():
        return None
    bounds = np.zeros(len(edges) - 1)
    for start, stop, bound in zip(starts, stops, claim.leaf_bounds, strict=True):
        within = slice(*np.searchsorted(edges, (start, stop)))
        bounds[within] = np.maximum(bounds[within], bound)
    return {"edges": edges.tolist(), "bounds": bounds.tolist()}


def program(of: attnc.Program) -> dict[str, Any] | None:
    """Return the program as JSON: every stored number, and no other. None if it is too large for a page."""
    dense = sum(W.size for layer in of.all_layers for head in layer.heads for W in head.matrices.values())
    if of.num_parameters + dense > PROGRAM_NUMBERS:
        return None
    return {
        "input_shapes": [list(shape) for shape in of.input_shapes],
        "layers": [_layer(layer) for layer in of.unrolled_layers],
        "memory": [_layer(layer) for layer in of.unrolled_memory],
    }


def _layer(layer: attnc.Affine | attnc.Attention | attnc.Softmax) -> dict[str, Any]:
    stated: dict[str, Any] = {"name": layer.name, "width": len(layer.channels)}
    if isinstance(layer, attnc.Affine):
        return stated | {"kind": "affine", "weight": _sparse(layer.weight), "constant": _sparse(layer.constant)}
    if isinstance(layer, attnc.Softmax):
        return stated | {"kind": "softmax"}
    heads = [
        {name: W.tolist() for name, W in head.matrices.items()}
        | {"mask": None if head.mask is None else [head.mask.query_segments.tolist(), head.mask.key_segments.tolist()]}
        for head in layer.heads
    ]
    return stated | {"kind": "attention", "residual": layer.residual, "cross": layer.cross, "heads": heads}


def _sparse(tensor: attnc.Sparse) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "index": tensor.index.ravel().tolist(), "values": tensor.values.tolist()}


def picture(net: attnc.Network) -> dict[str, Any] | None:
    """Return the target at the points of the picture and at the keys that can be built by hand, and some outputs."""
    if net.box.d > 2:
        return None
    core = net.certificate.core
    box = net.box.core(WINDOW) if core is None else attnc.Box.parse([core], net.variables)
    target = attnc.as_target(net.expression or "", box.as_dict(), p=float(net.certificate.norm))

    def wanted(axes: list[np.ndarray]) -> list[float]:
        points = np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="xy")], axis=1)
        return target(points)[:, 0].tolist()

    sides = list(zip(box.lo, box.hi, strict=True))
    count = CURVE_POINTS if box.d == 1 else PICTURE_SIDE
    checked = np.stack([lo + (hi - lo) * _spread(axis) for axis, (lo, hi) in enumerate(sides)], axis=1)
    return {
        "lo": box.lo.tolist(),
        "hi": box.hi.tolist(),
        "count": count,
        "target": wanted([np.linspace(lo, hi, count) for lo, hi in sides]),
        "ladder": {n: wanted([lo + (hi - lo) * (np.arange(n) + 0.5) / n for lo, hi in sides]) for n in LADDER[box.d]},
        "checked": {"points": checked.tolist(), "outputs": np.reshape(net(checked), (len(checked), -1))[:, 0].tolist()},
        "num_outputs": target.num_outputs,
    }


def _spread(axis: int) -> np.ndarray:
    """Return shares of a side in [0, 1] that are spread evenly, in another order for each axis (Weyl's sequence)."""
    step = (math.sqrt(5) - 1) / 2 if axis == 0 else math.sqrt(2) - 1
    return (0.5 + step * np.arange(CHECKED_POINTS)) % 1.0


def planned(request: FunctionRequest, seconds: float) -> dict[str, Any]:
    """Return the cost of each construction. A row whose cost was not found in time states that."""
    if request.eps is None:
        raise attnc.InputError("a plan needs eps, the largest error allowed")
    rows = attnc.plan(request.expression, box_of(request), request.eps, norm=request.norm, seconds=seconds)
    names = ("name", "anchors", "heads", "layers", "parameters", "multiply_adds", "error", "why_not")
    found = [{name: _finite(getattr(row, name)) for name in names} for row in rows]
    of_papers = {"max_affine", "max_affine_cross", "two_layer", "attention_softmax"}
    return {"eps": request.eps, "rows": [row | {"paper": row["name"] in of_papers} for row in found]}


def downloaded(request: DownloadRequest, seconds: float, folder: Path) -> File:
    """Return the network as a file. `folder` is the worker's own, and is removed when the job ends."""
    net = compile_network(request, seconds)
    if request.kind == "onnx":
        net.export_onnx(folder / "network.onnx")
        return File("network.onnx", "application/octet-stream", (folder / "network.onnx").read_bytes())
    if request.kind == "checkpoint":
        net.export_hf(folder / "checkpoint")
    else:
        net.save(folder / "network")
    if request.kind == "files":
        files = {path.name: base64.b64encode(path.read_bytes()).decode() for path in (folder / "network").iterdir()}
        return File("network.json", "application/json", json.dumps(files).encode())
    return File(f"{request.kind}.zip", "application/zip", _zipped(folder / request.kind))


def _zipped(folder: Path) -> bytes:
    """Return the files of a folder as a zip file, the same bytes for the same files."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.iterdir()):
            archive.writestr(zipfile.ZipInfo(f"{folder.name}/{path.name}"), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return written.getvalue()


# --- in context -------------------------------------------------------------------------------------------------------


def fitted(request: InContextRequest) -> dict[str, Any]:
    """Return the weights after every step that attention takes on the points, and the exact ones."""
    x, y = np.array(request.points).T
    return _kernel(request, x, y) if request.model == "kernel" else _polynomial(request, x, y)


def _polynomial(request: InContextRequest, x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """Least squares with powers of x by plain steps, or ridge regression by Chebyshev steps."""
    X = x[:, None] ** np.arange(1, request.degree + 1)
    regressors = np.concatenate([X, np.ones((len(x), 1))], axis=1)
    alpha = request.alpha if request.model == "ridge" else 0.0
    hessian = regressors.T @ regressors + alpha * np.eye(regressors.shape[1])
    eigenvalues = np.linalg.eigvalsh(hessian)
    slack = 1 + 1e-9  # eigenvalues are rounded, and must be bounds
    norms = incontext.Norms(
        x=float(np.linalg.norm(regressors, axis=1).max()) * slack,
        y=max(float(np.linalg.norm(y)), 1e-6) * slack,
        L=float(eigenvalues[-1]) * slack,
        mu=max(float(eigenvalues[0]) / slack, alpha / slack, 1e-9),
    )
    plan = incontext.plan_least_squares(
        incontext.Prompt(rows=len(x), features=request.degree, intercept=True),
        norms,
        penalty=(alpha,) * regressors.shape[1],
        steps=request.steps,
        heads=request.heads,
        method="plain" if request.model == "descent" else "chebyshev",
        eta=2 * 0.99 * request.step / norms.L if request.model == "descent" else None,
    )
    network = incontext.descent_program([plan.task])
    start = np.zeros(regressors.shape[1])
    _, trajectory = incontext.run_recorded(network, plan.task.inputs(start, X, y), start, plan.task.iterate)
    exact = np.linalg.lstsq(hessian, regressors.T @ y, rcond=None)[0]
    residuals = trajectory @ regressors.T - y
    return {
        "model": request.model,
        "degree": request.degree,
        "trajectory": trajectory.tolist(),
        "exact": exact.tolist(),
        "loss": ((residuals**2).sum(axis=1) + alpha * (trajectory**2).sum(axis=1)).tolist(),
        "exact_loss": float(((regressors @ exact - y) ** 2).sum() + alpha * (exact**2).sum()),
        "bound": _finite(plan.bound.value),
        "distance": float(np.linalg.norm(trajectory[-1] - exact)),
        "num_layers": network.num_attention_layers,
        "num_heads": network.num_heads,
        "num_keys": len(x) + 1,
    }


def _kernel(request: InContextRequest, x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """Kernel ridge regression by steps with momentum on the dual weights."""
    X = x[:, None]
    model = incontext.KernelRidge(
        alpha=request.alpha, gamma=request.gamma, method="heavy_ball", max_iter=request.steps, tol=1e-12
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reader chose the number of steps; the page shows what is left
        model.fit(X, y)
    kernel = np.exp(-request.gamma * (x[:, None] - x) ** 2)
    exact = np.linalg.solve(kernel + request.alpha * np.eye(len(x)), y)
    trajectory = np.asarray(model.trajectory_)

    def loss(dual: np.ndarray) -> float:
        values = kernel @ dual
        return float(((values - y) ** 2).sum() + request.alpha * dual @ values)

    network = model.program_.program
    return {
        "model": "kernel",
        "gamma": request.gamma,
        "trajectory": trajectory.tolist(),
        "exact": exact.tolist(),
        "loss": [loss(dual) for dual in trajectory],
        "exact_loss": loss(exact),
        "bound": None,
        "distance": float(np.linalg.norm(trajectory[-1] - exact)),
        "num_layers": network.num_attention_layers,
        "num_heads": network.num_heads,
        "num_keys": len(x) + 1,
    }


def _finite(value: Any) -> Any:
    """Return a number that JSON has: None in place of an infinite one or NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- dispatch ---------------------------------------------------------------------------------------------------------


def run(request: Any, seconds: float, folder: Path) -> dict[str, Any] | File:
    """Do the job that a request asks for."""
    match request:
        case DownloadRequest():
            return downloaded(request, seconds, folder)
        case CompileRequest():
            return compiled(request, seconds)
        case InContextRequest():
            return fitted(request)
        case FunctionRequest():
            return planned(request, seconds)
        case _:
            raise TypeError(f"no job takes a {type(request).__name__}")


def error_of(error: attnc.AttncError) -> dict[str, Any]:
    """Return an error of attnc as JSON values."""
    found: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, attnc.ExpressionError):
        # The page marks the place itself; the message is what stands above attnc's own mark.
        found |= {"position": error.position}
        found["message"] = str(error).partition("\n")[0]
    if isinstance(error, attnc.BoundNotMet):
        found |= {"eps": error.eps, "met": _finite(error.reach), "bound": _finite(error.bound)}
    return found


def warm_up() -> None:
    """Compile once, so that every worker is forked with all modules imported and all tables made."""
    jobs: list[Callable[[], Any]] = [
        lambda: compiled(CompileRequest("sin(x)", {"x": [-1.0, 1.0]}, 1e-3), 10.0),
        lambda: compiled(CompileRequest("x*y", {"x": [-1.0, 1.0], "y": [-1.0, 1.0]}, 1e-2), 10.0),
        lambda: compiled(CompileRequest("sin(x)", {"x": [-1.0, 1.0]}, 0.1, construction="max_affine"), 10.0),
        lambda: planned(FunctionRequest("sin(x)", {"x": [-1.0, 1.0]}, 1e-2), 60.0),
        lambda: fitted(InContextRequest([[0.0, 0.0], [1.0, 1.0]])),
        lambda: fitted(InContextRequest([[0.0, 0.0], [1.0, 1.0]], model="kernel")),
    ]
    for job in jobs:
        job()
