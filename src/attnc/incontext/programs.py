"""In-context programs as people use them: checked against their domain, run, saved, and exported."""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnc.errors import FileError, InputError
from attnc.exports.directory import CARD, FIT, IN_CONTEXT, WEIGHTS, json_bytes, json_lines, require_folder, utf8
from attnc.exports.safe_files import (
    CONFIG,
    MAX_JSON_BYTES,
    MAX_TENSOR_BYTES,
    Layout,
    PathLike,
    pack_tensors,
    parse_json,
    read_bytes,
    read_tensors,
    require_format,
    write_whole,
)
from attnc.exports.tensors import decode, encode, layout, require_same, stored_once
from attnc.incontext.domain import Domain, OutsideDomain
from attnc.ir.layers import Layer
from attnc.ir.program import Program
from attnc.numerics.arrays import Float
from attnc.numerics.bound import Bound, Term

if TYPE_CHECKING:
    from attnc.engines.torch_layers import LayeredNetwork

FORMAT = f"{IN_CONTEXT.family}2"
CERTIFICATE = "certificate.json"
OUTSIDE = ("raise", "warn", "allow")
"""The choices for a prompt outside of the domain."""
KEYS = {"format", "algorithm", "domain", "program", "same"}
"""The keys of config.json."""


@dataclass(frozen=True, eq=False)
class StoredFit:
    """The inputs of a fit, the weights that the program returned, and what is proved about them.

    Attributes
    ----------
    inputs : tuple of arrays
        The inputs of the program. The last one ends with the prompt.
    weights : array of shape (targets, weights)
        The weights that the program returned in float64.
    objective : dict
        `loss`, `penalty`, `mean` and `factor`, as docs/file-formats.md defines them. Empty without a bound.
    bound : Bound or None
        A bound of |weights − optimum|₂ for these weights and for those of the program in exact arithmetic.
    reason : str
        The reason why there is no bound.
    """

    inputs: tuple[Float[np.ndarray, "*shape"], ...]
    weights: Float[np.ndarray, "targets weights"]
    objective: dict[str, Any]
    bound: Bound | None
    reason: str = ""


@dataclass(frozen=True, eq=False, repr=False)
class InContextProgram:
    """A program that runs an algorithm on its prompt, with the domain for which it is built.

    Calling it runs the reference on a batch of inputs, after a check of every prompt.

    Attributes
    ----------
    program : attnc.Program
        The layers.
    domain : Domain
        The prompts for which it is built.
    algorithm : str
        The estimator that made it.
    bound : Bound or None
        A proven bound of |weights − optimum|₂ for every prompt in the domain, term by term. None if there is none.
    limit : float or None
        A proven bound of every weight, for all prompts within the limits x and y, whatever their eigenvalues. None
        without a safeguard.
    fit : StoredFit or None
        The inputs of a fit and its weights, with a bound for them. An estimator saves it with the program.
    depth : int
        The number of attention layers that are applied, repeats counted.

    Examples
    --------
    >>> import attnc
    >>> model = attnc.incontext.Ridge(alpha=1.0).fit([[0.0], [1.0], [2.0]], [1.0, 3.0, 5.0])
    >>> program = model.program_
    >>> program.check(model.prompt_)
    >>> bool(abs(program(model.start_[None], model.prompt_[None])[0] - model.trajectory_[-1])[0] < 1e-9)
    True
    """

    program: Program
    domain: Domain
    algorithm: str
    bound: Bound | None = None
    limit: float | None = None
    fit: StoredFit | None = None

    def __call__(self, *inputs: Any, outside: str = "raise") -> Float[np.ndarray, "batch ..."]:
        """Run the reference on a batch of inputs.

        Parameters
        ----------
        *inputs : array
            The inputs of the program, batch first. For most estimators these are `start_[None]` and `prompt_[None]`.
        outside : str
            The answer to a prompt outside of the domain: "raise" refuses it, "warn" warns, "allow" does not check.

        Returns
        -------
        array of shape (batch, ...)
            The outputs: for a regression, the fitted weights for the columns of the prompt.

        Raises
        ------
        OutsideDomain
            If a prompt is outside of the domain and `outside` is "raise".
        InputError
            If an input has another shape, or `outside` is another word.
        """
        given = tuple(np.asarray(each) for each in inputs)
        if outside not in OUTSIDE:
            raise InputError(f"outside is one of {', '.join(OUTSIDE)}; found {outside!r}")
        states = self.program.as_tokens(given)
        for i in range(len(states[0]) if outside != "allow" else 0):
            prompt, start = self._split([state[i] for state in states])
            found = self.domain.violations(prompt, start)
            if found and outside == "raise":
                raise OutsideDomain(self._refusal(found, f"prompt {i}"))
            if found:
                warnings.warn(self._refusal(found, f"prompt {i}"), stacklevel=2)
        return self.program(*given)

    def __repr__(self) -> str:
        return f"<InContextProgram {self.algorithm}: {self.depth:,} attention layers, {self.program!r}>"

    def __str__(self) -> str:
        return str(self.program)

    @property
    def depth(self) -> int:
        """The number of attention layers that are applied, repeats counted.

        Examples
        --------
        >>> import attnc
        >>> program = attnc.incontext.Ridge(alpha=1.0).fit([[0.0], [1.0]], [0.0, 1.0]).program_
        >>> program.depth == program.program.num_attention_layers
        True
        """
        return self.program.num_attention_layers

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of the main stream, all turns of repeated ones included.

        Examples
        --------
        >>> import attnc
        >>> program = attnc.incontext.Ridge(alpha=1.0).fit([[0.0], [1.0]], [0.0, 1.0]).program_
        >>> len(program.layers) >= program.depth
        True
        """
        return self.program.unrolled_layers

    @property
    def memory(self) -> tuple[Layer, ...]:
        """The layers of the memory, all turns of repeated ones included.

        Examples
        --------
        >>> import attnc
        >>> program = attnc.incontext.NadarayaWatson(gamma=1.0).fit([[0.0], [1.0]], [2.0, 4.0]).program_
        >>> program.memory == program.program.memory
        True
        """
        return self.program.unrolled_memory

    @property
    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the inputs of one point.

        Examples
        --------
        >>> import attnc
        >>> model = attnc.incontext.Ridge(alpha=1.0).fit([[0.0], [1.0]], [0.0, 1.0])
        >>> model.program_.input_shapes[1] == model.prompt_.shape
        True
        """
        return self.program.input_shapes

    def check(self, prompt: Any, start: Any = None) -> None:
        """Raise OutsideDomain if the program is not built for a prompt.

        Parameters
        ----------
        prompt : array of shape (rows, features + 2)
            The prompt, as `domain.prompt.tokens(X, y)` makes it. The prompt of a logistic program may have its first
            weights above it, as `prompt_` has.
        start : array of shape (weights,), optional
            The first weights.

        Raises
        ------
        OutsideDomain
            If a norm or an eigenvalue is outside of its limits. The message lists all that are.
        InputError
            If the prompt has another shape, or a number that is not finite.

        Examples
        --------
        >>> import attnc
        >>> model = attnc.incontext.Ridge(alpha=1.0).fit([[0.0], [1.0]], [0.0, 1.0])
        >>> model.program_.check(model.prompt_)
        """
        given = np.asarray(prompt)
        if len(self.input_shapes) == 1 and given.shape == self.input_shapes[0]:
            given, above = self._split([given])
            start = above if start is None else start
        found = self.domain.violations(given, start)
        if found:
            raise OutsideDomain(self._refusal(found, "the prompt"))

    def to_torch(self, *, trainable: bool = False) -> LayeredNetwork:
        """Return the program as a torch module. Repeated layers are one module that is called for every turn.

        Parameters
        ----------
        trainable : bool
            Whether its parameters need gradients.

        Returns
        -------
        torch.nn.Module
            It takes the program's inputs, batch first. It does not check them against the domain.

        Examples
        --------
        >>> import attnc, torch
        >>> model = attnc.incontext.Ridge(alpha=1.0).fit([[0.0], [1.0]], [0.0, 1.0])
        >>> module = model.program_.to_torch()
        >>> found = module(torch.tensor(model.start_[None]), torch.tensor(model.prompt_[None]))
        >>> bool(abs(found[0, 0].item() - model.trajectory_[-1][0]) < 1e-9)
        True
        """
        from attnc.engines.torch_layers import LayeredNetwork

        return LayeredNetwork(self.program, trainable=trainable).eval()

    def export_onnx(self, path: PathLike) -> None:
        """Write the program as an ONNX file, in which repeated layers are one Loop.

        Parameters
        ----------
        path : path
            The file, which is replaced if it exists.

        Examples
        --------
        >>> import attnc, os, tempfile
        >>> program = attnc.incontext.Ridge(alpha=1.0).fit([[0.0], [1.0]], [0.0, 1.0]).program_
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     program.export_onnx(f"{folder}/ridge.onnx")
        ...     os.listdir(folder)
        ['ridge.onnx']
        """
        from attnc.exports.onnx_layers import export_layers

        export_layers(self.program, path, metadata={"attnc.algorithm": self.algorithm, "attnc.format": FORMAT})

    def save(self, path: PathLike) -> None:
        """Write the program as a folder: config.json, model.safetensors, certificate.json, a card, and the fit.

        Parameters
        ----------
        path : path
            The folder. One that holds a program already is replaced.

        Examples
        --------
        >>> import attnc, tempfile
        >>> program = attnc.incontext.Ridge(alpha=1.0).fit([[0.0], [1.0]], [0.0, 1.0]).program_
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     program.save(f"{folder}/ridge")
        ...     attnc.incontext.load(f"{folder}/ridge").depth == program.depth
        True
        """
        structure, tensors = encode(self.program)
        tensors, same = stored_once(tensors)
        weights = pack_tensors(tensors)
        limits = self.domain.as_json()
        config = {"format": FORMAT, "algorithm": self.algorithm, "domain": limits, "program": structure, "same": same}
        certificate = {
            "format": FORMAT,
            "weights_sha256": hashlib.sha256(weights).hexdigest(),
            "algorithm": self.algorithm,
            "domain": limits,
            "dtype": self.program.dtype.name,
            "bound": _finite(self.bound.value) if self.bound is not None else None,
            "terms": _as_json(self.bound) if self.bound is not None else [],
            "limit": self.limit,
            "method": "theorem",
            "assumptions": ["the prompt is in the domain", "the derivation in docs/incontext.md"],
        }
        files = {CONFIG: json_bytes(config, CONFIG), WEIGHTS: weights, CARD: utf8(self._card(), CARD)}
        if self.fit is not None:
            given = {f"input{i}": values for i, values in enumerate(self.fit.inputs)}
            files[FIT] = pack_tensors(given | {"weights": self.fit.weights})
            certificate["fit"] = {"sha256": hashlib.sha256(files[FIT]).hexdigest(), **self._claim(self.fit)}
        files[CERTIFICATE] = json_lines(certificate, CERTIFICATE)
        write_whole(path, files, IN_CONTEXT)

    @staticmethod
    def _claim(fit: StoredFit) -> dict[str, Any]:
        """Return what the certificate states about a fit."""
        if fit.bound is None:
            return {"reason": fit.reason}
        return {**fit.objective, "bound": fit.bound.value, "terms": _as_json(fit.bound)}

    def _split(self, states: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the prompt and the first weights among the inputs of one point."""
        if len(states) == 2:
            is_start = len(self.input_shapes[0]) == 1
            return states[1], states[0].reshape(-1) if is_start else None
        if states[0].shape == self.domain.prompt.shape:
            return states[0], None
        return states[0][1:], states[0][0]

    def _refusal(self, found: tuple[str, ...], which: str) -> str:
        effect = "Its steps may diverge there."
        if self.limit is not None:
            effect = "The bound does not hold there. The safeguard keeps weights finite."
        return (
            f"{which} is outside of the domain of this {self.algorithm} program: {'; '.join(found)}. {effect} Scale "
            "the prompt, or fit a program to prompts like it."
        )

    def _call(self) -> str:
        """Return the line of the card that runs the program, if its inputs are the first weights and a prompt."""
        is_plain = len(self.input_shapes) == 2 and len(self.input_shapes[0]) == 1
        return f"weights = program(np.zeros((1, {self.input_shapes[0][0]})), prompt[None])[0]\n" if is_plain else ""

    def _card(self) -> str:
        bound = "None is proven for every prompt in the domain."
        if self.bound is not None and math.isfinite(self.bound.value):
            bound = (
                f"|weights − optimum|₂ ≤ {self.bound.value:.3g} for every prompt in the domain. It rests on a theorem, "
            )
            bound += "which `attnc verify` does not prove again."
        if self.fit is not None and self.fit.bound is not None:
            bound += f" For the stored prompt it is {self.fit.bound.value:.3g}, and `attnc verify` proves that again."
        limits = {key: value for key, value in self.domain.as_json().items() if isinstance(value, float)}
        tensors, _ = stored_once(encode(self.program)[1])
        lines = [
            f"# {self.algorithm} in context",
            "Affine maps and softmax attention that run an algorithm on their prompt. attnc constructed their weights.",
            f"- **Attention layers applied:** {self.depth:,}",
            f"- **Stored numbers:** {sum(tensor.size for tensor in tensors.values()):,}",
            f"- **Prompt:** at most {self.domain.prompt.rows} rows of {self.domain.prompt.features} features",
            *(f"- **{key}:** {value:.6g}" for key, value in limits.items()),
            f"- **Bound:** {bound}",
            '```python\nimport attnc\nimport numpy as np\n\nprogram = attnc.incontext.load(".")\n'
            f"prompt = program.domain.prompt.tokens(X, y)\nprogram.check(prompt)\n{self._call()}```",
        ]
        if self.domain.has_penalty_rows:
            lines[-1] += (
                "\n\nThe last rows of a prompt may hold penalties: the root of the penalty in the column of its "
                "weight, and 0 elsewhere. `tokens` leaves them 0, and the program then fits without a penalty."
            )
        return "\n\n".join([lines[0], lines[1], "\n".join(lines[2:-1]), lines[-1]]) + "\n"


def load(path: PathLike) -> InContextProgram:
    """Read a program that `save` wrote.

    Parameters
    ----------
    path : path
        The folder.

    Returns
    -------
    InContextProgram

    Raises
    ------
    FileError
        If there is no such folder, or a file in it was not written by `save`.

    Examples
    --------
    >>> import attnc, tempfile
    >>> program = attnc.incontext.Lasso(alpha=0.1).fit([[-1.0], [0.0], [1.0]], [-2.0, 0.0, 2.0]).program_
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     program.save(f"{folder}/lasso")
    ...     attnc.incontext.load(f"{folder}/lasso").algorithm
    'Lasso'
    """
    folder = require_folder(path)
    read = {}
    for name in (CONFIG, CERTIFICATE):
        place = os.path.join(folder, name)
        read[name] = parse_json(read_bytes(place, MAX_JSON_BYTES), place)
    config, certificate = read[CONFIG], read[CERTIFICATE]
    require_format(config.get("format"), FORMAT, f"cannot load {folder!r}: its {CONFIG}")
    if set(config) != KEYS or not isinstance(config["algorithm"], str):
        raise FileError(f"{folder!r}: {CONFIG} has other keys than {', '.join(sorted(KEYS))}")
    expected = layout(config["program"])
    same = require_same(config["same"], expected)
    stored = {name: entry for name, entry in expected.items() if name not in same}
    tensors, digest = read_tensors(os.path.join(folder, WEIGHTS), stored, MAX_TENSOR_BYTES)
    tensors |= {name: tensors[earlier] for name, earlier in same.items()}
    if certificate.get("weights_sha256") != digest or certificate.get("domain") != config["domain"]:
        raise FileError(f"{folder!r}: the certificate belongs to other weights or to another domain. Save it again.")
    program, domain = decode(config["program"], tensors), Domain.from_json(config["domain"])
    limit = certificate.get("limit")
    if limit is not None and not (isinstance(limit, float) and limit > 0):
        raise FileError(f"{folder!r}: {CERTIFICATE} states the limit {limit!r:.40}, which is no positive number")
    fit = _fit(folder, certificate["fit"], program, domain) if "fit" in certificate else None
    return InContextProgram(program, domain, config["algorithm"], _bound(certificate, folder), limit, fit)


def _fit(folder: str, stated: Any, program: Program, domain: Domain) -> StoredFit:
    """Return the fit that a folder holds."""
    number = np.dtype(np.float64)
    expected: Layout = {f"input{i}": (number, shape) for i, shape in enumerate(program.input_shapes)}
    weights = (domain.prompt.targets, domain.prompt.num_weights)
    tensors, digest = read_tensors(
        os.path.join(folder, FIT), {**expected, "weights": (number, weights)}, MAX_TENSOR_BYTES
    )
    if not isinstance(stated, dict) or stated.get("sha256") != digest:
        raise FileError(f"{folder!r}: the certificate belongs to another {FIT}. Save the program again.")
    inputs, found = tuple(tensors[name] for name in expected), tensors["weights"]
    if "bound" not in stated:
        return StoredFit(inputs, found, {}, None, str(stated.get("reason")))
    objective = {key: value for key, value in stated.items() if key not in ("sha256", "bound", "terms")}
    return StoredFit(inputs, found, objective, _bound(stated, folder))


def _bound(certificate: dict[str, Any], folder: str) -> Bound | None:
    """Return the bound that a certificate states."""
    if certificate.get("bound") is None and not certificate.get("terms"):
        return None
    try:
        terms = tuple(
            Term(str(term["name"]), math.inf if term["value"] is None else float(term["value"]), str(term["reason"]))
            for term in certificate["terms"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"{folder!r}: {CERTIFICATE} does not state its terms: {error}") from None
    if not terms or not all(term.value >= 0 for term in terms):
        raise FileError(f"{folder!r}: {CERTIFICATE} states a bound without terms, or a negative one")
    return Bound(terms)


def _as_json(bound: Bound) -> list[dict[str, Any]]:
    return [{"name": term.name, "value": _finite(term.value), "reason": term.reason} for term in bound.terms]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
