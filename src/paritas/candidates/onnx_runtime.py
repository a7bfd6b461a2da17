"""The model as ONNX, run by ONNX Runtime."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.quiet import quietly
from paritas.candidates.runtimes import Built, foreign_program
from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from paritas.candidates.capturing import Capture
    from paritas.checking.foreign import ForeignProgram

__all__ = ["onnxruntime"]

NAME = "onnxruntime"
_NEEDED = ("onnx", "onnxscript", "onnxruntime")
# Of ONNX Runtime's log: errors only, which it raises as well.
_ERRORS = 3
# Of a layer norm's epsilon or the constants of a tanh GELU this takes nine digits.
_ATTRIBUTES = "ONNX has its attributes, and its exporter some constants, in float32"
_LONGEST = 120


def onnxruntime(model: nn.Module, inputs: Any) -> ForeignProgram:
    """Export a model to ONNX and let ONNX Runtime run it, on CUDA where the model is there.

    Args:
        model: the reference, an `nn.Module`. It is not changed.
        inputs: as for `paritas.verify`; shapes are taken as they are.

    Raises:
        UsageError: a package is missing, or the model cannot be exported.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"candidate {NAME!r} needs {', '.join(missing)}, which is not installed: "
            "pip install 'paritas[onnx]'"
        )
    return foreign_program(NAME, model, inputs, _build)


def _build(captured: Capture) -> Built:
    with quietly():
        program = torch.onnx.export(captured.program, dynamo=True, verbose=False)
    if program is None:
        raise UsageError("torch.onnx.export gave no program")
    takes, gives = len(captured.tensors), len(program.model.graph.inputs)
    if takes != gives:
        raise UsageError(f"the ONNX model takes {gives} tensors where the model takes {takes}")
    device = next((tensor.device for tensor in captured.tensors), torch.device("cpu"))
    leaks = {_ATTRIBUTES} if captured.is_lifted else set()
    call: Callable[..., Sequence[Tensor]] = program
    try:
        program.initialize_inference_session(lambda model: _session(model, device))
    except Exception as error:
        if type(error).__name__ != "NotImplemented":
            raise
        text = " ".join(str(error).split()).rpartition(" : ")[2][:_LONGEST]
        if not captured.is_lifted:
            raise UsageError(
                f"{NAME} lacks an operator in this dtype: {text}; try another --dtype"
            ) from error
        leaks.add(
            f"ONNX's reference evaluator ran it, as {NAME} lacks an operator in float64: {text}"
        )
        call = program.call_reference

    def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        # Its results may lie in memory that the next run writes to.
        return [value.clone().to(device) for value in call(*tensors)]

    return Built(run, frozenset(leaks))


def _session(model: str | bytes, device: torch.device) -> Any:
    runtime = importlib.import_module("onnxruntime")

    options = runtime.SessionOptions()
    options.log_severity_level = _ERRORS
    options.intra_op_num_threads = torch.get_num_threads()
    wanted = ["CPUExecutionProvider"]
    if device.type == "cuda":
        wanted.insert(0, "CUDAExecutionProvider")
    known = runtime.get_available_providers()
    lacking = [provider for provider in wanted if provider not in known]
    if lacking:
        raise UsageError(
            f"the model is on {device}, but this onnxruntime has no {lacking[0]} (it has "
            f"{', '.join(known)}); install onnxruntime-gpu, or run on the CPU"
        )
    return runtime.InferenceSession(model, sess_options=options, providers=wanted)
