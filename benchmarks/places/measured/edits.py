"""Edits for measuring: of Python code, and of kernels."""

from __future__ import annotations

import re
from typing import Any

from benchmarks.places.calls import edit

# What a call is given, with brackets in two levels.
_GIVEN = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"


def _around(calls: str, text: str) -> list[tuple[str, str]]:
    """The first call of one of these, with something around it; its first group is the call."""
    return [(rf"(?<![\w.])({re.escape(one)}{_GIVEN})", text) for one in calls.split()]


def _operand(place: int, calls: str, text: str) -> list[tuple[str, str]]:
    """An operand that is a name, changed; its second group is the operand."""
    before = r"[\w.]+, " * place
    return [
        (rf"((?<![\w.]){re.escape(one)}\({before})(\w+)(?=[,)])", rf"\1{text}")
        for one in calls.split()
    ]


def _between(sign: str, aten: str, text: str) -> list[tuple[str, str]]:
    """A sum or product of two names; its groups are these."""
    return [
        (rf"^torch\.ops\.aten\.{aten}\.Tensor\((\w+), ([a-z]\w*)\)$", text),
        (rf"^([a-z]\w*) {re.escape(sign)} ([a-z]\w*)$", text),
    ]


_GELU = "torch.ops.aten.gelu.default torch._C._nn.gelu torch.nn.functional.gelu functional.gelu"
_SILU = "torch.ops.aten.silu.default torch.nn.functional.silu functional.silu"
_SIGMOID = "torch.ops.aten.sigmoid.default torch.sigmoid"
_SOFTMAX = (
    "torch.ops.aten._softmax.default torch.ops.aten._safe_softmax.default "
    "torch.nn.functional.softmax functional.softmax torch.softmax"
)
_LINEAR = "torch._C._nn.linear torch.ops.aten.addmm.default torch.ops.aten.mm.default"
_ATTENTION = "torch._C._nn.scaled_dot_product_attention functional.scaled_dot_product_attention"
_SHIFTED: dict[str, Any] = {
    "kinds": ["shift", "wrong index", "permutation"],
    "loose": ["wrong argument", "stale", "copy"],
}

# Of Python code: a line of a model, or a statement that torch.fx generated.
EDITS: dict[str, Any] = {
    "gelu one and a half times": edit(
        *_around(_GELU, r"(1.5 * \1)"), kinds=["scale", "wrong factor"],
        loose=["other function"],
    ),
    "silu in bfloat16": edit(
        *_around(_SILU, r"\1.bfloat16().float()"), kinds=["precision"],
        loose=["approximation", "other function"],
    ),
    "sigmoid less a tenth": edit(
        *_around(_SIGMOID, r"(\1 - 0.1)"), kinds=["offset"],
        loose=["other function", "axis offset", "residual"],
    ),
    "softmax from the last key": edit(
        *_around(_SOFTMAX, r"\1.flip(-1)"), kinds=["permutation", "wrong index"],
        loose=["shift", "copy", "stale", "transpose"],
    ),
    "layer at most a half": edit(
        *_around(_LINEAR, r"\1.clamp(max=0.5)"), kinds=["clipped"],
        loose=["other function"],
    ),
    "features of the values one late": edit(
        *_operand(2, _ATTENTION, r"\2.roll(1, -1)"), **_SHIFTED,
    ),
    "second summand one row late": edit(
        *_between("+", "add", r"\1 + \2.roll(1, -2)"), **_SHIFTED,
    ),
    "product of two at most a half": edit(
        *_between("*", "mul", r"(\1 * \2).clamp(max=0.5)"), kinds=["clipped"],
        loose=["other function", "wrong argument"],
    ),
}  # fmt: skip
KERNEL_EDITS: dict[str, Any] = {}
TRITON_EDITS: dict[str, Any] = {}
