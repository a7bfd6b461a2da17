"""Edits of the tenth set: of Python code, and of kernels."""

from __future__ import annotations

import re

from benchmarks.places import words
from benchmarks.places.calls import edit
from benchmarks.places.edit_patterns import (
    ATTENTION,
    CONVOLUTION,
    GELU,
    LINEAR,
    RELU,
    SIGMOID,
    SILU,
    SOFTMAX,
    TANH,
    around,
    method,
    operand,
)

# Of Python code: a line of a model, or a statement that torch.fx generated.
EDITS = {
    "gelu of the opposite": edit(
        *operand(0, GELU, r"(-\2)"), words="sign, other function, wrong argument; wrong factor",
    ),
    "silu of half of its input": edit(
        *operand(0, SILU, r"(0.5 * \2)"),
        words="wrong factor, wrong argument; scale, other function",
    ),
    "sigmoid of twice its argument": edit(
        *operand(0, SIGMOID, r"(2 * \2)"),
        words="wrong factor, wrong argument; scale, other function",
    ),
    "tanh less a tenth": edit(
        *around(TANH, r"(\1 - 0.1)"), words="offset; other function, axis offset, residual",
    ),
    "relu with a minus": edit(
        *around(RELU, r"(-\1)"), words="sign, scale, wrong factor; other function",
    ),
    "softmax over the axis before": edit(
        *[(rf"((?<![\w.]){re.escape(one)}\(\w+, (?:dim ?= ?)?)-1(?=[,)])", r"\1-2")
          for one in SOFTMAX.split()],
        words="wrong axis, wrong argument; wrong reduction, transpose, wrong statistics",
    ),
    "layer in float16": edit(
        *around(LINEAR, r"\1.half().float()"), words="precision; approximation, other function",
    ),
    "rows of the input one late": edit(
        *operand(0, "torch._C._nn.linear torch.ops.aten.mm.default", r"\2.roll(1, -2)"),
        *operand(1, "torch.ops.aten.addmm.default", r"\2.roll(1, -2)"), words=words.MOVED,
    ),
    "every word is the next one": edit(
        *operand(1, "torch.ops.aten.embedding.default", r"\2.roll(-1, -1)"),
        *operand(0, "torch.nn.functional.embedding functional.embedding self.table",
                  r"\2.roll(-1, -1)"), words=words.MOVED,
    ),
    "values of the attention one position late": edit(
        *operand(2, ATTENTION, r"\2.roll(1, -2)"), words=words.MOVED,
    ),
    "image one column late": edit(*operand(0, CONVOLUTION, r"\2.roll(1, -1)"), words=words.MOVED),
    "mean of the next row": edit(
        *around("torch.ops.aten.mean.dim torch.mean", r"\1.roll(-1, 1)"),
        *method("mean", r"\1.roll(-1, 1)"),
        words="shift, wrong index, permutation, wrong statistics; stale, copy",
    ),
    "first summand twice": edit(
        (r"^(torch\.ops\.aten\.add\.Tensor\()(\w+), ([a-z]\w*\))$", r"\g<1>2 * \2, \3"),
        (r"^([a-z]\w*) \+ ([a-z]\w*)$", r"2 * \1 + \2"),
        words="wrong factor, residual, doubled reduction; other function, scale, wrong argument",
    ),
    "joined parts doubled": edit(
        *around("torch.ops.aten.cat.default torch.cat", r"(2 * \1)"),
        words="scale, wrong factor; doubled reduction, residual",
    ),
}  # fmt: skip
# Of a kernel of Inductor, in C++ and in Triton.
KERNEL_EDITS = {
    "exponential less a tenth": edit(
        (r"(tmp\d+)\.(fexp_u20|exp_u20|exp)\(\)", r"(\1.\2() - decltype(\1)(0.1))"),
        (r"std::exp\((tmp\d+)\)", r"(std::exp(\1) - decltype(\1)(0.1))"),
        (r"(tl_math|libdevice)\.exp\((tmp\d+)\)", r"(\1.exp(\2) - 0.1)"),
        words="offset; other function, axis offset, residual", operators="exp",
    ),
    "tanh of three quarters of its argument": edit(
        (r"(tmp\d+)\.tanh\(\)", r"(\1 * decltype(\1)(0.75)).tanh()"),
        (r"std::tanh\((tmp\d+)\)", r"std::tanh(decltype(\1)(0.75) * \1)"),
        (r"libdevice\.tanh\((tmp\d+)\)", r"libdevice.tanh(0.75 * \1)"),
        words="wrong factor, wrong argument, other function; scale", operators="tanh",
    ),
    "error function of the magnitude": edit(
        (r"(tmp\d+)\.erf\(\)", r"(\1.abs()).erf()"),
        (r"std::erf\((tmp\d+)\)", r"std::erf(std::abs(\1))"),
        (r"libdevice\.erf\((tmp\d+)\)", r"libdevice.erf(tl_math.abs(\1))"),
        words="sign, other function, wrong argument; approximation", operators="erf gelu",
    ),
    "reciprocal root of twice the variance": edit(
        (r"(tmp\d+)\.rsqrt\(\)", r"(\1 * decltype(\1)(2)).rsqrt()"),
        (r"1 / std::sqrt\((tmp\d+)\)", r"1 / std::sqrt(2 * \1)"),
        (r"libdevice\.rsqrt\((tmp\d+)\)", r"libdevice.rsqrt(2 * \1)"),
        words="scale, wrong factor; wrong argument, axis scale", operators="rsqrt",
    ),
    "sine a tenth smaller": edit(
        (r"(tmp\d+)\.sin\(\)", r"(\1.sin() * decltype(\1)(0.9))"),
        (r"std::sin\((tmp\d+)\)", r"(decltype(\1)(0.9) * std::sin(\1))"),
        (r"tl_math\.sin\((tmp\d+)\)", r"(0.9 * tl_math.sin(\1))"), words="scale, wrong factor",
        operators="sin",
    ),
    "gate of twice its argument": edit(
        (r"(tmp\d+)\.neg\(\)\.exp\(\)", r"(\1 * decltype(\1)(2)).neg().exp()"),
        (r"1 \+ std::exp\(-(tmp\d+)\)", r"1 + std::exp(-2 * \1)"),
        (r"tl\.sigmoid\((tmp\d+)\)", r"tl.sigmoid(2 * \1)"),
        words="wrong factor, wrong argument, other function; scale", operators="sigmoid silu",
    ),
}  # fmt: skip
# Of the kernels in `triton_kernels.py`.
TRITON_EDITS = {
    "mean of the norm by one less": edit(
        (r"mean = tl\.sum\(value, 0\) / n", "mean = tl.sum(value, 0) / (n - 1)"),
        words="wrong statistics, wrong factor, wrong reduction, off by one reduction; "
        "axis offset, scale, offset", operators="layer_norm",
    ),
    "bias of the norm forgotten": edit(
        (r"normal \* weight \+ bias", "normal * weight"),
        words="missing bias, missing operand; axis offset, offset, residual",
        operators="layer_norm",
    ),
    "last column of the norm not stored": edit(
        (r"tl\.store\(y \+ row \* n \+ at, result, mask=inside\)",
         "tl.store(y + row * n + at, tl.where(at < n - 1, result, 0.0), mask=inside)"),
        words="zeros, mask; missing operand, uninitialised, constant, axis scale, wrong factor",
        operators="layer_norm",
    ),
    "left tile with a minus": edit(
        (r"tl\.dot\(left, right,", "tl.dot(-left, right,"),
        words="sign, wrong factor; scale, other function, wrong argument", operators="linear",
    ),
    "bias of the first column for all": edit(
        (r"tl\.load\(b \+ columns,", "tl.load(b + 0 * columns,"),
        words="copy, stale, wrong index; axis offset, offset, constant, missing bias",
        operators="linear",
    ),
    "gelu of half of its input": edit(
        (r"value = tl\.load\(x \+ at, mask=at < n\)",
         "value = 0.5 * tl.load(x + at, mask=at < n)"),
        words="wrong factor, wrong argument; scale, other function", operators="gelu",
    ),
}  # fmt: skip
