"""The description of the API, as `GET /openapi.json` returns it. The limits are the ones that the readers check."""

from __future__ import annotations

from typing import Any

import attnc
from attnc_playground.limits import (
    EPS_RANGE,
    MAX_EXPRESSION,
    MAX_KEYS,
    MAX_POINTS,
    MAX_STEPS,
    MAX_VARIABLES,
)
from attnc_playground.requests import DOWNLOADS, MODELS

Schema = dict[str, Any]

FUNCTION: Schema = {
    "expression": {"type": "string", "maxLength": MAX_EXPRESSION, "example": "sin(x)"},
    "box": {
        "type": "object",
        "minProperties": 1,
        "maxProperties": MAX_VARIABLES,
        "description": 'The range of every variable. Ends may be "-inf" and "inf" if there is one variable.',
        "additionalProperties": {
            "type": "array",
            "minItems": 2,
            "maxItems": 2,
            "items": {"oneOf": [{"type": "number"}, {"enum": ["inf", "-inf"]}]},
        },
        "example": {"x": [-3, 3]},
    },
    "eps": {
        "type": "number",
        "minimum": EPS_RANGE[0],
        "maximum": EPS_RANGE[1],
        "description": "The largest error allowed anywhere on the box.",
        "example": 1e-3,
    },
    "norm": {"oneOf": [{"const": "inf"}, {"type": "number", "minimum": 1, "maximum": 100}], "default": "inf"},
}
COMPILE: Schema = FUNCTION | {
    "construction": {"type": "string", "default": "auto", "description": "A name from /api/plan, or auto."},
    "points_per_axis": {
        "type": "integer",
        "minimum": 1,
        "maximum": MAX_KEYS,
        "description": "The number of keys per axis, in place of eps. The bound is then stated, not enforced.",
    },
    "beta": {"type": "number", "exclusiveMinimum": 0, "description": "The inverse temperature, in (key spacing)⁻²."},
}
INCONTEXT: Schema = {
    "points": {
        "type": "array",
        "minItems": 2,
        "maxItems": MAX_POINTS,
        "items": {"type": "array", "minItems": 2, "maxItems": 2, "items": {"type": "number"}},
    },
    "model": {"enum": list(MODELS), "default": "descent"},
    "degree": {"type": "integer", "minimum": 1, "maximum": 5, "default": 1},
    "steps": {"type": "integer", "minimum": 1, "maximum": MAX_STEPS, "default": 8},
    "step": {"type": "number", "minimum": 0.01, "maximum": 1, "default": 0.5, "description": "As a share of 2/L."},
    "heads": {"type": "integer", "minimum": 1, "maximum": 8, "default": 4, "description": "Pairs of heads."},
    "alpha": {"type": "number", "default": 0.1, "description": "The penalty of ridge and kernel regression."},
    "gamma": {"type": "number", "default": 4.0, "description": "The inverse squared width of the kernel."},
}
ERRORS = {
    "400": "The request cannot be read.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is not application/json.",
    "422": "attnc refuses the function, the box or eps. An ExpressionError has a position.",
    "429": "Too many jobs wait. Try again after the time in Retry-After.",
    "504": "The job took more time than the playground gives.",
    "507": "The job took more memory than the playground gives.",
}


def document() -> dict[str, Any]:
    """Return the OpenAPI document."""
    file: Schema = {"application/zip": {}, "application/octet-stream": {}}
    network = {"application/json": {"schema": {"$ref": "#/components/schemas/Network"}}}
    anything = {"application/json": {"schema": {"type": "object"}}}
    download = COMPILE | {"kind": {"enum": list(DOWNLOADS), "default": "network"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "attnc playground",
            "version": attnc.__version__,
            "description": "Compiles mathematics into softmax attention, with a proven bound of the error.",
        },
        "paths": {
            "/": {"get": _page("The playground.")},
            "/openapi.json": {"get": _page("This document.")},
            "/health": {"get": _page("Whether the workers are ready, and how many jobs run and wait.")},
            "/api/compile": {"post": _job("Compile a function.", COMPILE, ["expression", "box"], network)},
            "/api/plan": {
                "post": _job("The cost of every construction.", FUNCTION, ["expression", "box", "eps"], anything)
            },
            "/api/download": {"post": _job("A network as a file.", download, ["expression", "box"], file)},
            "/api/incontext": {
                "post": _job("A regression by attention, step by step.", INCONTEXT, ["points"], anything)
            },
        },
        "components": {"schemas": {"Error": _error(), "Network": _network()}},
    }


def _page(summary: str) -> Schema:
    return {"summary": summary, "responses": {"200": {"description": summary}}}


def _job(summary: str, fields: Schema, required: list[str], content: Schema) -> Schema:
    schema = {"type": "object", "additionalProperties": False, "required": required, "properties": fields}
    refusal = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    errors = {status: {"description": text, "content": refusal} for status, text in ERRORS.items()}
    status = {
        "name": "Attnc-Status",
        "in": "header",
        "schema": {"enum": ["header"]},
        "description": "With this, a refusal has the status 200, and its own status is in the header Attnc-Status.",
    }
    return {
        "summary": summary,
        "parameters": [status],
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": summary, "content": content}} | errors,
    }


def _error() -> Schema:
    fields = {"type": {"type": "string"}, "message": {"type": "string"}, "position": {"type": ["integer", "null"]}}
    error = {"type": "object", "required": ["type", "message"], "properties": fields}
    return {"type": "object", "required": ["error"], "properties": {"error": error}}


def _network() -> Schema:
    number, text = {"type": "number"}, {"type": "string"}
    maybe = {"type": ["number", "null"]}
    term = {"type": "object", "properties": {"name": text, "value": maybe, "reason": text}}
    certificate = {
        "bound": {"type": ["number", "null"], "description": "Proven, rounding included. null if nothing was proved."},
        "observed": {
            "type": ["number", "null"],
            "description": "The largest error seen at samples. It proves nothing.",
        },
        "terms": {"type": "array", "items": term},
        "assumptions": {"type": "array", "items": text},
        "dtype": text,
        "method": text,
        "norm": text,
    }
    program = "Every stored number of the network; null if it is too large for a page."
    fields = {
        "expression": text,
        "variables": {"type": "array", "items": text},
        "box": FUNCTION["box"],
        "eps": maybe,
        "construction": text,
        "dtype": text,
        "num_anchors": number,
        "num_parameters": number,
        "num_layers": number,
        "num_heads": number,
        "certificate": {"type": "object", "properties": certificate},
        "program": {"type": ["object", "null"], "description": program},
        "picture": {"type": ["object", "null"], "description": "The target at the points of the picture."},
    }
    return {"type": "object", "properties": fields}
