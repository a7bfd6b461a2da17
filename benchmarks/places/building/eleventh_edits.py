"""Edits of the eleventh set: of Python code, and of kernels."""

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
    """A quotient or product of two names; its groups are these."""
    return [
        (rf"^torch\.ops\.aten\.{aten}\.Tensor\((\w+), ([a-z]\w*)\)$", text),
        (rf"^([a-z]\w*) {re.escape(sign)} ([a-z]\w*)$", text),
    ]


_RELU = "torch.ops.aten.relu.default torch.relu torch.nn.functional.relu functional.relu"
_GELU = "torch.ops.aten.gelu.default torch._C._nn.gelu torch.nn.functional.gelu functional.gelu"
_SILU = "torch.ops.aten.silu.default torch.nn.functional.silu functional.silu"
_TANH = "torch.ops.aten.tanh.default torch.tanh"
_EXP = "torch.ops.aten.exp.default torch.exp"
_SOFTMAX = (
    "torch.ops.aten._softmax.default torch.ops.aten._safe_softmax.default "
    "torch.nn.functional.softmax functional.softmax torch.softmax"
)
_LINEAR = "torch._C._nn.linear torch.ops.aten.addmm.default torch.ops.aten.mm.default"
_ATTENTION = "torch._C._nn.scaled_dot_product_attention functional.scaled_dot_product_attention"
_CONVOLUTION = "torch.conv1d torch.conv2d torch.ops.aten.convolution.default"
_SHIFTED: dict[str, Any] = {
    "kinds": ["shift", "wrong index", "permutation"],
    "loose": ["wrong argument", "stale", "copy"],
}

# Of Python code: a line of a model, or a statement that torch.fx generated.
EDITS: dict[str, Any] = {
    "relu that opens at a tenth": edit(
        *_operand(0, _RELU, r"(\2 - 0.1)"), kinds=["offset", "wrong argument"],
        loose=["other function", "clipped", "axis offset", "residual"],
    ),
    "gelu with a minus": edit(
        *_around(_GELU, r"(-\1)"), kinds=["sign", "scale", "wrong factor"],
        loose=["other function"],
    ),
    "silu less a tenth": edit(
        *_around(_SILU, r"(\1 - 0.1)"), kinds=["offset"],
        loose=["other function", "axis offset", "residual"],
    ),
    "tanh in bfloat16": edit(
        *_around(_TANH, r"\1.bfloat16().float()"), kinds=["precision"],
        loose=["approximation", "other function"],
    ),
    "softmax one column early": edit(
        *_around(_SOFTMAX, r"\1.roll(-1, -1)"), **_SHIFTED,
    ),
    "rows of the layer one early": edit(
        *_around(_LINEAR, r"\1.roll(-1, -2)"), **_SHIFTED,
    ),
    "weight of the layer from its last row": edit(
        *_operand(1, "torch._C._nn.linear", r"\2.flip(0)"),
        *_operand(2, "torch.ops.aten.addmm.default", r"\2.flip(1)"),
        kinds=["permutation", "wrong index"],
        loose=["shift", "wrong argument", "swapped operands", "wrong rank's shard"],
    ),
    "features of the queries one late": edit(
        *_operand(0, _ATTENTION, r"\2.roll(1, -1)"), **_SHIFTED,
    ),
    "quotient with a minus": edit(
        *_between("/", "div", r"-(\1 / \2)"), kinds=["sign", "scale", "wrong factor"],
        loose=["other function"],
    ),
    "product one and a half times": edit(
        *_between("*", "mul", r"1.5 * (\1 * \2)"), kinds=["scale", "wrong factor"],
        loose=["wrong argument", "other function"],
    ),
    "exponential of two thirds of its argument": edit(
        *_operand(0, _EXP, r"(2 * \2 / 3)"), kinds=["wrong factor", "wrong argument"],
        loose=["scale", "other function"],
    ),
    "image one line late": edit(
        *_operand(0, _CONVOLUTION, r"\2.roll(1, -2)"), **_SHIFTED,
    ),
}  # fmt: skip
# Of a kernel of Inductor, in C++ and in Triton.
KERNEL_EDITS: dict[str, Any] = {
    "exponential one and a half times": edit(
        (r"(tmp\d+)\.(fexp_u20|exp_u20|exp)\(\)", r"(\1.\2() * decltype(\1)(1.5))"),
        (r"std::exp\((tmp\d+)\)", r"(decltype(\1)(1.5) * std::exp(\1))"),
        (r"(tl_math|libdevice)\.exp\((tmp\d+)\)", r"(1.5 * \1.exp(\2))"), operators="exp",
        kinds=["scale", "wrong factor"], loose=["wrong argument", "offset"],
    ),
    "tanh one and a half times": edit(
        (r"(tmp\d+)\.tanh\(\)", r"(\1.tanh() * decltype(\1)(1.5))"),
        (r"std::tanh\((tmp\d+)\)", r"(decltype(\1)(1.5) * std::tanh(\1))"),
        (r"libdevice\.tanh\((tmp\d+)\)", r"(1.5 * libdevice.tanh(\1))"), operators="tanh",
        kinds=["scale", "wrong factor"], loose=["other function"],
    ),
    "error function of half of its argument": edit(
        (r"(tmp\d+)\.erf\(\)", r"(\1 * decltype(\1)(0.5)).erf()"),
        (r"std::erf\((tmp\d+)\)", r"std::erf(decltype(\1)(0.5) * \1)"),
        (r"libdevice\.erf\((tmp\d+)\)", r"libdevice.erf(0.5 * \1)"), operators="erf gelu",
        kinds=["wrong factor", "wrong argument", "other function"],
        loose=["scale", "approximation"],
    ),
    "reciprocal root of one more": edit(
        (r"(tmp\d+)\.rsqrt\(\)", r"(\1 + decltype(\1)(1)).rsqrt()"),
        (r"1 / std::sqrt\((tmp\d+)\)", r"1 / std::sqrt(1 + \1)"),
        (r"libdevice\.rsqrt\((tmp\d+)\)", r"libdevice.rsqrt(1 + \1)"), operators="rsqrt",
        kinds=["eps", "offset", "other function"],
        loose=["wrong argument", "wrong statistics", "axis scale", "residual"],
    ),
    "cosine halved": edit(
        (r"(tmp\d+)\.cos\(\)", r"(\1.cos() * decltype(\1)(0.5))"),
        (r"std::cos\((tmp\d+)\)", r"(decltype(\1)(0.5) * std::cos(\1))"),
        (r"tl_math\.cos\((tmp\d+)\)", r"(0.5 * tl_math.cos(\1))"), operators="cos",
        kinds=["scale", "wrong factor"], loose=["wrong argument"],
    ),
}  # fmt: skip
TRITON_EDITS: dict[str, Any] = {}
