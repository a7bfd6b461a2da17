"""A candidate by its name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paritas.candidates.names import check_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = ["make"]

_MAKERS = {
    "onnxruntime": "paritas.candidates.onnx_runtime:onnxruntime",
    "aot_inductor": "paritas.candidates.ahead_of_time:aot_inductor",
    "export": "paritas.candidates.exported:export",
    "export-decomposed": "paritas.candidates.exported:export_decomposed",
}


def make(name: str, model: nn.Module, inputs: Any) -> Callable[..., Any]:
    """Make the candidate that is called `name` of a model.

    Args:
        name: one of `paritas.candidates.names.NAMED`.
        model: the reference. It is not changed.
        inputs: as for `paritas.verify`; each set of them is captured, with its shapes.

    Raises:
        UsageError: there is no such name, a package is missing, or the model cannot be captured.
    """
    check_name(name)
    module, _, function = _MAKERS[name].partition(":")
    made: Callable[..., Any] = getattr(importlib.import_module(module), function)(model, inputs)
    return made
