"""Candidates by name, for runtimes other than `torch.compile`.

Each function takes a model and its inputs, and returns a callable to compare with the model:
`paritas.verify(inputs, model, onnxruntime(model, inputs))`. The functions are imported on first
use: the command line needs their names before it imports torch.
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
    "ForeignProgram": "paritas.execution.subjects",
    "LiftedProgram": "paritas.execution.subjects",
    "aot_inductor": "paritas.candidates.makers",
    "export": "paritas.candidates.makers",
    "export_decomposed": "paritas.candidates.makers",
    "make": "paritas.candidates.loading",
    "onnxruntime": "paritas.candidates.makers",
}

if TYPE_CHECKING:
    from paritas.candidates.loading import make
    from paritas.candidates.makers import aot_inductor, export, export_decomposed, onnxruntime
    from paritas.execution.subjects import ForeignProgram, LiftedProgram
else:

    def __getattr__(name: str) -> object:
        import importlib

        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
