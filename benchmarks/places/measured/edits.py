"""Edits for measuring: of Python code, and of kernels."""

from __future__ import annotations

from typing import Any

from benchmarks.places import words
from benchmarks.places.calls import edit
from benchmarks.places.edit_patterns import (
    ATTENTION,
    GELU,
    LINEAR,
    SIGMOID,
    SILU,
    around,
    between,
    operand,
)

_SOFTMAX = (
    "torch.ops.aten._softmax.default torch.ops.aten._safe_softmax.default "
    "torch.nn.functional.softmax functional.softmax torch.softmax"
)

# Of Python code: a line of a model, or a statement that torch.fx generated.
EDITS: dict[str, Any] = {
    "gelu one and a half times": edit(
        *around(GELU, r"(1.5 * \1)"), words="scale, wrong factor; other function",
    ),
    "silu in bfloat16": edit(
        *around(SILU, r"\1.bfloat16().float()"), words="precision; approximation, other function",
    ),
    "sigmoid less a tenth": edit(
        *around(SIGMOID, r"(\1 - 0.1)"), words="offset; other function, axis offset, residual",
    ),
    "softmax from the last key": edit(
        *around(_SOFTMAX, r"\1.flip(-1)"),
        words="permutation, wrong index; shift, copy, stale, transpose",
    ),
    "layer at most a half": edit(
        *around(LINEAR, r"\1.clamp(max=0.5)"), words="clipped; other function",
    ),
    "features of the values one late": edit(
        *operand(2, ATTENTION, r"\2.roll(1, -1)"), words=words.MOVED,
    ),
    "second summand one row late": edit(
        *between("+", "add", r"\1 + \2.roll(1, -2)"), words=words.MOVED,
    ),
    "product of two at most a half": edit(
        *between("*", "mul", r"(\1 * \2).clamp(max=0.5)"),
        words="clipped; other function, wrong argument",
    ),
}  # fmt: skip
KERNEL_EDITS: dict[str, Any] = {}
TRITON_EDITS: dict[str, Any] = {}
