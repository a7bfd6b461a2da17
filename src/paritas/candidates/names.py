"""The names of candidates; imports no torch, to report a typo at once."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

NAMED = {
    "onnxruntime": "torch.onnx.export, run by ONNX Runtime",
    "aot_inductor": "torch.export, compiled ahead of time by AOTInductor",
    "export": "the program of torch.export",
    "export-decomposed": "the same after run_decompositions(): core ATen operators",
}


def is_named(spec: str) -> bool:
    """Whether `spec` is a name; with a colon, it is a function of the user."""
    return ":" not in spec


def check_name(spec: str) -> None:
    """Raise `UsageError` unless there is a candidate with this name."""
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
        "or give your own function as package.module:function"
    )


def make(name: str, model: nn.Module, inputs: Any) -> Callable[..., Any]:
    """Make the candidate with this name from a model.

    Args:
        name: one of `paritas.candidates.names.NAMED`.
        model: the reference. It is not changed.
        inputs: as for `paritas.verify`; each set is captured with its shapes.

    Raises:
        UsageError: the name is unknown, a package is missing, or the model cannot be captured.
    """
    check_name(name)
    from paritas.candidates import makers

    made: Callable[..., Any] = getattr(makers, name.replace("-", "_"))(model, inputs)
    return made
