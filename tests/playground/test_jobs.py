"""The work of the playground: regressions in context, and the description of the API."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from attnc import incontext
from attnc_playground import jobs, openapi, requests
from attnc_playground.requests import CompileRequest, DownloadRequest, FunctionRequest, InContextRequest

X = np.array([-0.9, -0.4, 0.1, 0.3, 0.8])
Y = np.array([-0.5, -0.6, 0.2, 0.1, 0.9])
POINTS = [[float(x), float(y)] for x, y in zip(X, Y, strict=True)]


@pytest.mark.parametrize(("model", "degree"), [("descent", 1), ("descent", 3), ("ridge", 1), ("ridge", 2)])
def test_the_weights_are_within_the_proven_distance(model: str, degree: int) -> None:
    found = jobs.fitted(InContextRequest(POINTS, model, degree, steps=20))
    assert len(found["trajectory"]) == 21
    distance = np.linalg.norm(np.array(found["trajectory"][-1]) - found["exact"])
    assert distance == found["distance"] <= found["bound"]
    assert found["loss"][-1] >= found["exact_loss"] * (1 - 1e-12)


def test_the_steps_are_those_of_gradient_descent() -> None:
    """Up to the error of the difference heads, which the plan proves and which is tiny with four pairs."""
    found = jobs.fitted(InContextRequest(POINTS, "descent", 1, steps=5, step=0.5))
    regressors = np.stack([X, np.ones_like(X)], axis=1)
    hessian = regressors.T @ regressors
    eta = 0.99 / (np.linalg.eigvalsh(hessian)[-1] * (1 + 1e-9))
    weights = np.zeros(2)
    for seen in found["trajectory"][1:]:
        weights = weights - eta * (hessian @ weights - regressors.T @ Y)
        assert np.abs(weights - seen).max() <= 1e-9


def test_the_kernel_fit_is_what_the_estimator_predicts() -> None:
    found = jobs.fitted(InContextRequest(POINTS, "kernel", steps=40, alpha=0.1, gamma=4.0))
    model = incontext.KernelRidge(alpha=0.1, gamma=4.0, max_iter=40, tol=1e-12)
    with pytest.warns(Warning, match="steps"):
        model.fit(X[:, None], Y)
    at = np.linspace(-1, 1, 9)
    kernel = np.exp(-4.0 * (at[:, None] - X) ** 2)
    assert np.abs(kernel @ found["trajectory"][-1] - model.predict(at[:, None])).max() <= 1e-9
    assert np.abs(kernel @ (np.array(found["exact"]) - found["trajectory"][-1])).max() <= 1e-3


def test_the_description_has_the_fields_that_are_read() -> None:
    paths = openapi.document()["paths"]
    for kind, request in (
        ("compile", CompileRequest),
        ("plan", FunctionRequest),
        ("download", DownloadRequest),
        ("incontext", InContextRequest),
    ):
        body = paths[f"/api/{kind}"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert set(body["properties"]) == {field.name for field in dataclasses.fields(request)}
    json.dumps(openapi.document(), allow_nan=False)


def test_what_is_read_is_what_was_asked() -> None:
    asked = {"expression": "sin(x)", "box": {"x": [-1, "inf"]}, "eps": 0.1, "norm": 2, "construction": "compose"}
    found = requests.read("compile", json.dumps(asked).encode())
    assert requests.as_fields(found) == asked | {"points_per_axis": None, "beta": None, "box": {"x": [-1.0, "inf"]}}
    for kind in ("compile", "plan", "download", "incontext"):
        with pytest.raises(requests.BadRequest):
            requests.read(kind, b"{}")
