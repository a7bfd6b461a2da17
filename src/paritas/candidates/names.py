"""Candidates by name; no torch here, so that a slip is reported at once."""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any

from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

NAMED = {
    "onnxruntime": "torch.onnx.export, run by ONNX Runtime",
    "aot_inductor": "torch.export, compiled ahead of time by AOTInductor",
    "export": "torch.export's program, run as it is",
    "export-decomposed": "the same after run_decompositions(): core ATen operators",
}


def is_named(spec: str) -> bool:
    """Whether `spec` is meant as a name; with a colon, it names a function of the user's."""
    return ":" not in spec


def check_name(spec: str) -> None:
    """Raise `UsageError` unless there is a candidate of this name."""
    if spec in NAMED:
        return
    asked = spec.lower()
    near = [
        *difflib.get_close_matches(asked.replace("_", "-"), NAMED, n=1),
        *difflib.get_close_matches(asked, NAMED, n=1),
        *(name for name in NAMED if asked and name.startswith(asked)),
    ]
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UsageError(
        f"unknown --candidate {spec!r}; {hint}known are {', '.join(NAMED)}, "
        "or name a function of your own as package.module:function"
    )


_MAKERS = {
    "onnxruntime": "paritas.candidates.makers:onnxruntime",
    "aot_inductor": "paritas.candidates.makers:aot_inductor",
    "export": "paritas.candidates.makers:export",
    "export-decomposed": "paritas.candidates.makers:export_decomposed",
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
