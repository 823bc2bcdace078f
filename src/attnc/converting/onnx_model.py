"""A converted Hugging Face model as one ONNX file, compared with the torch model in onnxruntime."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnc.constructions.built import Progress
from attnc.converting import measuring
from attnc.converting.huggingface import example_inputs, load_model
from attnc.converting.model_folder import ModelFolder
from attnc.converting.report import Report
from attnc.converting.walking import convert_module
from attnc.errors import InputError, MissingExtra
from attnc.exports.onnx_file import MAX_ONNX_BYTES, checked_target
from attnc.exports.safe_files import PathLike, write_file_whole

ACTIVATION_OPERATORS = {
    *(
        "Celu",
        "Elu",
        "Erf",
        "Gelu",
        "HardSigmoid",
        "HardSwish",
        "LeakyRelu",
        "Mish",
        "PRelu",
        "Relu",
        "Selu",
        "Sigmoid",
    ),
    *("Softplus", "Softsign", "Swish", "Tanh", "ThresholdedRelu", "GRU", "LSTM", "RNN"),
}
"""The operators of ONNX that compute activations."""


@dataclass(frozen=True)
class OnnxFile:
    """The report of a conversion to ONNX.

    `parity` is the largest difference of the outputs in onnxruntime from those of the converted torch model, and
    `drift` from those of the original. Both are measured on the example.
    """

    report: Report
    operators: dict[str, int]
    parity: float
    drift: float
    inputs: str

    def remarks(self) -> list[str]:
        """Return the lines below the table of the report."""
        operators = ", ".join(f"{name} {count}" for name, count in self.operators.items())
        return [
            f"operators: {operators}",
            f"in onnxruntime, on {self.inputs}: outputs differ by up to {self.parity:.2e} from the converted model in "
            f"torch, and by {self.drift:.2e} from the original",
        ]

    def as_json(self) -> dict[str, Any]:
        measured = {"parity": self.parity, "drift": self.drift, "inputs": self.inputs}
        return self.report.as_json() | {"operators": self.operators} | measured


class _FirstOutput(nn.Module):
    """The model as a function of its tensors in a fixed order. It returns the first output."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, tuple(names)

    def forward(self, *tensors: Tensor) -> Tensor:
        output = self.model(**dict(zip(self.names, tensors, strict=True)), return_dict=False)
        return output[0] if isinstance(output, tuple) else output


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter, which warns about packages that are not needed."""
    former = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(former)


def convert_to_onnx(
    source: PathLike,
    out: PathLike,
    eps: float = 1e-6,
    *,
    texts: Sequence[str] | None = None,
    strict: bool = False,
    progress: Progress | None = None,
) -> OnnxFile:
    """Read the model in `source`, convert it, and write it as an ONNX file with symbolic batch and length."""
    try:
        import onnxruntime
        import onnxscript  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: F401
    except ImportError as error:
        raise MissingExtra("ONNX files need", "onnx, onnxruntime and onnxscript", "onnx", error) from error
    report_step = progress or (lambda step, fraction: None)
    target = checked_target(out)
    report_step("loading the model", 0.0)
    folder = ModelFolder.read(source)
    model = load_model(folder)
    inputs, described = example_inputs(model, folder.path, texts)
    if inputs is None:
        raise InputError(f"cannot write {folder.path!r} as ONNX: {described}, and the exporter needs an example")
    report_step("replacing and proving the activations", 0.2)
    converted, report = convert_module(model, eps, strict, inputs)
    report_step("exporting", 0.4)
    proto = exported_model(converted, inputs)
    operators = Counter(node.op_type for node in proto.graph.node)
    operators.update(node.op_type for function in proto.functions for node in function.node)
    left = sorted(ACTIVATION_OPERATORS & set(operators))
    if left:
        report.notes.append(f"the file has the operators {', '.join(left)}, of parts that were left as they were")
    content = proto.SerializeToString()
    report_step("measuring", 0.8)
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    with measuring.in_evaluation(model), measuring.in_evaluation(converted), torch.no_grad():
        theirs, ours = (_FirstOutput(each, tuple(inputs))(*inputs.values()) for each in (model, converted))
    made = torch.from_numpy(found)
    parity, drift = (measuring.largest_difference(each, made) or 0.0 for each in (ours, theirs))
    write_file_whole(target, content)
    return OnnxFile(report, dict(sorted(operators.items())), parity, drift, described)


def exported_model(converted: nn.Module, inputs: dict[str, Tensor]) -> Any:
    """Return the ONNX model by torch's default exporter, with symbolic batch, and length if the inputs are tokens."""
    if getattr(getattr(converted, "config", None), "use_cache", False):
        converted.config.use_cache = False  # type: ignore[union-attr]
    dynamic = torch.export.Dim.DYNAMIC
    axes = tuple({0: dynamic, 1: dynamic} if tensor.ndim == 2 else {0: dynamic} for tensor in inputs.values())
    whole = _FirstOutput(converted, tuple(inputs)).eval()
    try:
        with _quiet(), torch.no_grad():
            program: Any = torch.onnx.export(
                whole,
                tuple(inputs.values()),
                dynamic_shapes={"tensors": axes},
                input_names=list(inputs),
                output_names=["output"],
                dynamo=True,
                verbose=False,
            )
            proto = program.model_proto
    except Exception as error:  # the exporter fails in many ways, and its message is all that is known
        first = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise InputError(
            f"torch cannot export this model to ONNX: {first[0][:300]}. Convert it to a folder instead, without --to."
        ) from error
    if proto.ByteSize() > MAX_ONNX_BYTES:
        raise InputError(
            f"the file would have {proto.ByteSize():,} bytes, and one file holds {MAX_ONNX_BYTES:,}. Convert the model "
            "to a folder instead, without --to."
        )
    return proto
