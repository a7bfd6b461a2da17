"""Edits of the eleventh set: of Python code, and of kernels."""

from __future__ import annotations

from typing import Any

from benchmarks.places import words
from benchmarks.places.calls import edit
from benchmarks.places.edit_patterns import (
    ATTENTION,
    CONVOLUTION,
    GELU,
    LINEAR,
    RELU,
    SILU,
    TANH,
    around,
    between,
    operand,
)

_EXP = "torch.ops.aten.exp.default torch.exp"
_SOFTMAX = (
    "torch.ops.aten._softmax.default torch.ops.aten._safe_softmax.default "
    "torch.nn.functional.softmax functional.softmax torch.softmax"
)

# Of Python code: a line of a model, or a statement that torch.fx generated.
EDITS: dict[str, Any] = {
    "relu that opens at a tenth": edit(
        *operand(0, RELU, r"(\2 - 0.1)"),
        words="offset, wrong argument; other function, clipped, axis offset, residual",
    ),
    "gelu with a minus": edit(
        *around(GELU, r"(-\1)"), words="sign, scale, wrong factor; other function",
    ),
    "silu less a tenth": edit(
        *around(SILU, r"(\1 - 0.1)"), words="offset; other function, axis offset, residual",
    ),
    "tanh in bfloat16": edit(
        *around(TANH, r"\1.bfloat16().float()"), words="precision; approximation, other function",
    ),
    "softmax one column early": edit(*around(_SOFTMAX, r"\1.roll(-1, -1)"), words=words.MOVED),
    "rows of the layer one early": edit(*around(LINEAR, r"\1.roll(-1, -2)"), words=words.MOVED),
    "weight of the layer from its last row": edit(
        *operand(1, "torch._C._nn.linear", r"\2.flip(0)"),
        *operand(2, "torch.ops.aten.addmm.default", r"\2.flip(1)"),
        words="permutation, wrong index; shift, wrong argument, swapped operands, "
        "wrong rank's shard",
    ),
    "features of the queries one late": edit(
        *operand(0, ATTENTION, r"\2.roll(1, -1)"), words=words.MOVED,
    ),
    "quotient with a minus": edit(
        *between("/", "div", r"-(\1 / \2)"), words="sign, scale, wrong factor; other function",
    ),
    "product one and a half times": edit(
        *between("*", "mul", r"1.5 * (\1 * \2)"),
        words="scale, wrong factor; wrong argument, other function",
    ),
    "exponential of two thirds of its argument": edit(
        *operand(0, _EXP, r"(2 * \2 / 3)"),
        words="wrong factor, wrong argument; scale, other function",
    ),
    "image one line late": edit(*operand(0, CONVOLUTION, r"\2.roll(1, -2)"), words=words.MOVED),
}  # fmt: skip
# Of a kernel of Inductor, in C++ and in Triton.
KERNEL_EDITS: dict[str, Any] = {
    "exponential one and a half times": edit(
        (r"(tmp\d+)\.(fexp_u20|exp_u20|exp)\(\)", r"(\1.\2() * decltype(\1)(1.5))"),
        (r"std::exp\((tmp\d+)\)", r"(decltype(\1)(1.5) * std::exp(\1))"),
        (r"(tl_math|libdevice)\.exp\((tmp\d+)\)", r"(1.5 * \1.exp(\2))"),
        words="scale, wrong factor; wrong argument, offset", operators="exp",
    ),
    "tanh one and a half times": edit(
        (r"(tmp\d+)\.tanh\(\)", r"(\1.tanh() * decltype(\1)(1.5))"),
        (r"std::tanh\((tmp\d+)\)", r"(decltype(\1)(1.5) * std::tanh(\1))"),
        (r"libdevice\.tanh\((tmp\d+)\)", r"(1.5 * libdevice.tanh(\1))"),
        words="scale, wrong factor; other function", operators="tanh",
    ),
    "error function of half of its argument": edit(
        (r"(tmp\d+)\.erf\(\)", r"(\1 * decltype(\1)(0.5)).erf()"),
        (r"std::erf\((tmp\d+)\)", r"std::erf(decltype(\1)(0.5) * \1)"),
        (r"libdevice\.erf\((tmp\d+)\)", r"libdevice.erf(0.5 * \1)"), words=words.ANOTHER_FACTOR,
        operators="erf gelu",
    ),
    "reciprocal root of one more": edit(
        (r"(tmp\d+)\.rsqrt\(\)", r"(\1 + decltype(\1)(1)).rsqrt()"),
        (r"1 / std::sqrt\((tmp\d+)\)", r"1 / std::sqrt(1 + \1)"),
        (r"libdevice\.rsqrt\((tmp\d+)\)", r"libdevice.rsqrt(1 + \1)"),
        words="eps, offset, other function; wrong argument, wrong statistics, axis scale, "
        "residual", operators="rsqrt",
    ),
    "cosine halved": edit(
        (r"(tmp\d+)\.cos\(\)", r"(\1.cos() * decltype(\1)(0.5))"),
        (r"std::cos\((tmp\d+)\)", r"(decltype(\1)(0.5) * std::cos(\1))"),
        (r"tl_math\.cos\((tmp\d+)\)", r"(0.5 * tl_math.cos(\1))"),
        words="scale, wrong factor; wrong argument", operators="cos",
    ),
}  # fmt: skip
TRITON_EDITS: dict[str, Any] = {}
