"""The names that `--candidate` knows; no torch here, so that a slip is told at once."""

from __future__ import annotations

import difflib

from paritas.errors import UsageError

__all__ = ["NAMED", "check_name", "is_named"]

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
