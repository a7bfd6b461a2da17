"""Candidates by name, for runtimes other than `torch.compile`.

Each function takes a model and its inputs, and returns a callable to compare with the model:
`paritas.verify(inputs, model, onnxruntime(model, inputs))`. The functions are imported on first
use: the command line needs their names before it imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paritas.core.importing import import_on_use as _import_on_use

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
    "ForeignProgram": "paritas.core.execution.subjects",
    "LiftedProgram": "paritas.core.execution.subjects",
    "aot_inductor": "paritas.core.candidates.makers",
    "export": "paritas.core.candidates.makers",
    "export_decomposed": "paritas.core.candidates.makers",
    "make": "paritas.core.candidates.loading",
    "onnxruntime": "paritas.core.candidates.makers",
}

if TYPE_CHECKING:
    from paritas.core.candidates.loading import make
    from paritas.core.candidates.makers import aot_inductor, export, export_decomposed, onnxruntime
    from paritas.core.execution.subjects import ForeignProgram, LiftedProgram
else:
    # Hidden from type checkers, which would accept any misspelt name.
    __getattr__ = _import_on_use(globals(), _HOMES)


def __dir__() -> list[str]:
    return list(__all__)
