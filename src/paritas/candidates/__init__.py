"""Candidates by name: what other forms of a model than `torch.compile`'s compute.

Each function takes a model and its inputs, and gives what can be called in place of the model; so
`paritas.verify(inputs, model, onnxruntime(model, inputs))`. The names are fetched from their homes
on first use: the command line asks for the list of them before it imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = [
    "ForeignProgram",
    "LiftedProgram",
    "aot_inductor",
    "export",
    "export_decomposed",
    "make",
    "onnxruntime",
]

_HOMES = {
    "ForeignProgram": "paritas.checking.foreign",
    "LiftedProgram": "paritas.checking.foreign",
    "aot_inductor": "paritas.candidates.ahead_of_time",
    "export": "paritas.candidates.exported",
    "export_decomposed": "paritas.candidates.exported",
    "make": "paritas.candidates.making",
    "onnxruntime": "paritas.candidates.onnx_runtime",
}

if TYPE_CHECKING:
    from paritas.candidates.ahead_of_time import aot_inductor
    from paritas.candidates.exported import export, export_decomposed
    from paritas.candidates.making import make
    from paritas.candidates.onnx_runtime import onnxruntime
    from paritas.checking.foreign import ForeignProgram, LiftedProgram
else:

    def __getattr__(name: str) -> object:
        import importlib

        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
