"""Edits for measuring: of Python code, and of kernels."""

from __future__ import annotations

from benchmarks.places import words
from benchmarks.places.calls import edit
from benchmarks.places.edit_patterns import (
    ATTENTION,
    CONVOLUTION,
    GELU,
    SIGMOID,
    SILU,
    SOFTMAX,
    TABLE,
    TANH,
    around,
    method,
    operand,
)

_NORM = "torch.nn.functional.layer_norm self.norm self.before self.between"
_LINEAR = "torch._C._nn.linear torch.ops.aten.addmm.default"
_MATRICES = "torch.ops.aten.mm.default torch.ops.aten.bmm.default torch.matmul torch.bmm"

# Of Python code: a line of a model, or a statement that torch.fx generated.
EDITS = {
    "relu and a half of its input": edit(
        *((pattern, rf"({new} + 0.5 * \2)") for pattern, new in (
            (r"(torch\.ops\.aten\.relu\.default)\((\w+)\)", r"\1(\2)"),
            (r"((?<![\w.])torch\.relu)\((\w+)\)", r"\1(\2)"),
            (r"((?:torch\.nn\.)?\bfunctional\.relu)\((\w+)(?:, inplace = False)?\)", r"\1(\2)"),
        )), words="residual, other function; wrong factor, offset, wrong argument",
    ),
    "gelu of one less": edit(
        *operand(0, GELU, r"(\2 - 1)"),
        words="offset, wrong argument; other function, axis offset, residual",
    ),
    "silu at most a half": edit(
        *around(SILU, r"\1.clamp(max=0.5)"), words="clipped; other function",
    ),
    "sigmoid in tenths": edit(
        *around(SIGMOID, r"(10 * \1).round().div(10)"),
        words="precision; other function, approximation",
    ),
    "tanh doubled": edit(*around(TANH, r"(2 * \1)"), words="scale, wrong factor"),
    "tanh and its argument": edit(
        (r"(torch\.ops\.aten\.tanh\.default)\((\w+)\)", r"(\1(\2) + \2)"),
        (r"(?<![\w.])(torch\.tanh)\((\w+)\)", r"(\1(\2) + \2)"),
        words="residual, other function; offset",
    ),
    "softmax three times": edit(*around(SOFTMAX, r"(3 * \1)"), words="scale, wrong factor"),
    "softmax of scores in bfloat16": edit(
        *operand(0, SOFTMAX, r"\2.bfloat16().to(\2.dtype)"),
        words="precision; approximation, wrong argument",
    ),
    "softmax with a minus": edit(*around(SOFTMAX, r"(-\1)"), words="sign, scale, wrong factor"),
    "norm at three quarters": edit(
        *around(_NORM, r"(0.75 * \1)"), words="scale, wrong factor; axis scale",
    ),
    "norm in whole numbers": edit(
        *around(_NORM, r"\1.round()"), words="precision, other function; approximation",
    ),
    "norm of the magnitudes": edit(
        *operand(0, _NORM, r"\2.abs()"),
        words="sign, other function; wrong argument, wrong statistics",
    ),
    "layer one column late": edit(
        *around(_LINEAR, r"\1.roll(1, -1)"), words="shift, wrong index, permutation; copy",
    ),
    "layer less a tenth": edit(
        *around(_LINEAR, r"(\1 - 0.1)"),
        words="offset; axis offset, residual, missing bias, repeated bias",
    ),
    "input of the layer in halves": edit(
        *operand(0, "torch._C._nn.linear torch.ops.aten.mm.default", r"(2 * \2).round().div(2)"),
        *operand(1, "torch.ops.aten.addmm.default", r"(2 * \2).round().div(2)"),
        words=words.ROUNDED,
    ),
    "weight of the layer with a minus": edit(
        *operand(1, "torch._C._nn.linear", r"(-\2)"),
        *operand(2, "torch.ops.aten.addmm.default", r"(-\2)"),
        words="sign, wrong factor, scale; wrong argument, swapped operands",
    ),
    "values of the attention with a minus": edit(
        *operand(2, ATTENTION, r"(-\2)"),
        *operand(2, "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default",
                  r"(-\2)"), words="sign, wrong factor, scale; wrong argument",
    ),
    "keys of the attention doubled": edit(
        *operand(1, ATTENTION, r"(2 * \2)"),
        *operand(1, "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default",
                  r"(2 * \2)"), words="wrong factor, scale, wrong argument; other function",
    ),
    "attention plus a tenth": edit(
        *around(ATTENTION, r"(\1 + 0.1)"), words="offset; axis offset, residual",
    ),
    "rows of the table with a minus": edit(
        *around(TABLE, r"(-\1)"), words="sign, scale, wrong factor",
    ),
    "rows of the table plus a tenth": edit(
        *around(TABLE, r"(\1 + 0.1)"), words="offset; axis offset, residual",
    ),
    "mean three times": edit(
        *around("torch.ops.aten.mean.dim", r"(3 * \1)"), *method("mean", r"(3 * \1)"),
        words="scale, wrong factor; wrong reduction",
    ),
    "total at most one": edit(
        *around("torch.ops.aten.sum.dim_IntList", r"\1.clamp(max=1.0)"),
        *method("sum", r"\1.clamp(max=1.0)"), words="clipped; other function",
    ),
    "largest as the next whole number": edit(
        *around("torch.ops.aten.amax.default", r"\1.ceil()"), *method("amax", r"\1.ceil()"),
        words="precision, other function; approximation, offset",
    ),
    "sum of two three times": edit(
        (r"^(torch\.ops\.aten\.add\.Tensor\(\w+, [a-z]\w*\))$", r"3 * \1"),
        (r"^([a-z]\w* \+ [a-z]\w*)$", r"3 * (\1)"), words="scale, wrong factor; doubled reduction",
    ),
    "second summand squared": edit(
        (r"\baten\.add\.Tensor\((\w+), ([a-z]\w*)\)", r"aten.add.Tensor(\1, \2 * \2)"),
        (r"^([a-z]\w*) \+ ([a-z]\w*)$", r"\1 + \2 * \2"), words="other function; wrong factor",
    ),
    "first factor in whole numbers": edit(
        (r"\baten\.mul\.Tensor\((\w+), ([a-z]\w*)\)", r"aten.mul.Tensor(\1.round(), \2)"),
        (r"^([a-z]\w*) \* ([a-z]\w*)$", r"\1.round() * \2"),
        words="precision, other function; approximation",
    ),
    "product of two with a floor": edit(
        (r"^(torch\.ops\.aten\.mul\.Tensor\(\w+, [a-z]\w*\))$", r"\1.clamp(min=-0.1)"),
        (r"^([a-z]\w* \* [a-z]\w*)$", r"(\1).clamp(min=-0.1)"), words="clipped; other function",
    ),
    "difference plus a tenth": edit(
        (r"^(torch\.ops\.aten\.sub\.Tensor\(\w+, [a-z]\w*\))$", r"\1 + 0.1"),
        (r"^([a-z]\w* - [a-z]\w*)$", r"\1 + 0.1"), words="offset; axis offset, eps, residual",
    ),
    "quotient doubled": edit(
        *around("torch.ops.aten.div.Tensor", r"(2 * \1)"), (r"^([a-z]\w* / [a-z]\w*)$", r"2 * \1"),
        words="scale, wrong factor",
    ),
    "square plus a tenth": edit(
        (r"^(torch\.ops\.aten\.pow\.Tensor_Scalar\(\w+, 2\))$", r"\1 + 0.1"),
        (r"\b(\w+\.pow\(2\))", r"(\1 + 0.1)"), words="offset; eps, axis offset, other function",
    ),
    "reciprocal root at most one": edit(
        *around("torch.ops.aten.rsqrt.default torch.rsqrt", r"\1.clamp(max=1.0)"),
        words="clipped; other function, eps, axis scale",
    ),
    "exponential doubled": edit(
        *around("torch.ops.aten.exp.default torch.exp", r"(2 * \1)"),
        words="scale, wrong factor; offset, other function",
    ),
    "cosine at three quarters": edit(
        *around("torch.ops.aten.cos.default", r"(0.75 * \1)"), *method("cos", r"(0.75 * \1)"),
        words="scale, wrong factor",
    ),
    "sine plus a fifth": edit(
        *around("torch.ops.aten.sin.default", r"(\1 + 0.2)"), *method("sin", r"(\1 + 0.2)"),
        words="offset; other function, axis offset",
    ),
    "joined parts from the last column": edit(
        *around("torch.ops.aten.cat.default torch.cat", r"\1.flip(-1)"),
        words="permutation, wrong index; shift, swapped operands",
    ),
    "transposed values doubled": edit(
        *around("torch.ops.aten.transpose.int", r"(2 * \1)"), *method("transpose", r"(2 * \1)"),
        words="scale, wrong factor",
    ),
    "image plus a half": edit(
        *operand(0, CONVOLUTION, r"(\2 + 0.5)"),
        words="offset, wrong argument; axis offset, residual, other function",
    ),
    "filters three times": edit(
        *operand(1, CONVOLUTION, r"(3 * \2)"), words="wrong factor, scale; wrong argument",
    ),
    "matrix product at most one": edit(
        *around(_MATRICES, r"\1.clamp(max=1.0)"), (r"^(\w+ @ \w+)$", r"(\1).clamp(max=1.0)"),
        words="clipped; other function",
    ),
    "gradient behind the activation at most a tenth": edit(
        *around(
            "torch.ops.aten.gelu_backward.default torch.ops.aten.silu_backward.default "
            "torch.ops.aten.tanh_backward.default torch.ops.aten.sigmoid_backward.default "
            "torch.ops.aten.threshold_backward.default",
            r"\1.clamp(-0.1, 0.1)",
        ), words="clipped; other function",
    ),
}  # fmt: skip
# Of a kernel of Inductor, in C++ and in Triton.
KERNEL_EDITS = {
    "error function halved": edit(
        (r"(tmp\d+)\.erf\(\)", r"(\1.erf() * decltype(\1)(0.5))"),
        (r"std::erf\((tmp\d+)\)", r"(0.5f * std::erf(\1))"),
        (r"libdevice\.erf\((tmp\d+)\)", r"(0.5 * libdevice.erf(\1))"),
        words="wrong factor, scale, other function; approximation", operators="erf gelu",
    ),
    "exponential at most seven tenths": edit(
        (r"(tmp\d+)\.(fexp_u20|exp_u20|exp)\(\)", r"at::vec::minimum(\1.\2(), decltype(\1)(0.7))"),
        (r"std::exp\((tmp\d+)\)", r"std::min(std::exp(\1), decltype(\1)(0.7))"),
        (r"(tl_math|libdevice)\.exp\((tmp\d+)\)", r"tl.minimum(\1.exp(\2), 0.7)"),
        words="clipped; other function", operators="exp",
    ),
    "tanh plus a tenth": edit(
        (r"(tmp\d+)\.tanh\(\)", r"(\1.tanh() + decltype(\1)(0.1))"),
        (r"std::tanh\((tmp\d+)\)", r"(0.1f + std::tanh(\1))"),
        (r"libdevice\.tanh\((tmp\d+)\)", r"(0.1 + libdevice.tanh(\1))"),
        words="offset; other function, axis offset", operators="tanh",
    ),
    "logarithm at a half": edit(
        (r"(tmp\d+)\.log\(\)", r"(\1.log() * decltype(\1)(0.5))"),
        (r"std::log\((tmp\d+)\)", r"(0.5f * std::log(\1))"),
        (r"tl_math\.log\((tmp\d+)\)", r"(0.5 * tl_math.log(\1))"),
        words="scale, wrong factor; other function", operators="log",
    ),
    "reciprocal root with a minus": edit(
        (r"(tmp\d+)\.rsqrt\(\)", r"\1.rsqrt().neg()"),
        (r"1 / std::sqrt\((tmp\d+)\)", r"(-1 / std::sqrt(\1))"),
        (r"libdevice\.rsqrt\((tmp\d+)\)", r"(-libdevice.rsqrt(\1))"),
        words="sign, scale, wrong factor", operators="rsqrt",
    ),
    "cosine of twice the angle": edit(
        (r"(tmp\d+)\.cos\(\)", r"(\1 + \1).cos()"), (r"std::cos\((tmp\d+)\)", r"std::cos(\1 + \1)"),
        (r"tl_math\.cos\((tmp\d+)\)", r"tl_math.cos(\1 + \1)"),
        words="wrong factor, scale, wrong argument; other function", operators="cos",
    ),
    "sine plus a tenth": edit(
        (r"(tmp\d+)\.sin\(\)", r"(\1.sin() + decltype(\1)(0.1))"),
        (r"std::sin\((tmp\d+)\)", r"(0.1f + std::sin(\1))"),
        (r"tl_math\.sin\((tmp\d+)\)", r"(0.1 + tl_math.sin(\1))"),
        words="offset; other function, axis offset", operators="sin",
    ),
    "magnitude three times": edit(
        (r"(tmp\d+)\.abs\(\)", r"(\1.abs() * decltype(\1)(3))"),
        (r"std::abs\((tmp\d+)\)", r"(3 * std::abs(\1))"),
        (r"tl_math\.abs\((tmp\d+)\)", r"(3 * tl_math.abs(\1))"), words="scale, wrong factor",
        operators="abs",
    ),
    "root with a minus": edit(
        (r"(tmp\d+)\.sqrt\(\)", r"\1.sqrt().neg()"),
        (r"(?<!1 / )std::sqrt\((tmp\d+)\)", r"(-std::sqrt(\1))"),
        (r"(libdevice\.sqrt|tl\.sqrt_rn|tl_math\.sqrt)\((tmp\d+)\)", r"(-\1(\2))"),
        words="sign, scale, wrong factor", operators="sqrt std",
    ),
    "gate with a minus": edit(
        (r"decltype\((tmp\d+)\)\(1\)( ?/ ?)\(decltype", r"decltype(\1)(-1)\2(decltype"),
        (r"tl\.sigmoid\((tmp\d+)\)", r"(-tl.sigmoid(\1))"), words="sign, scale, wrong factor",
        operators="sigmoid silu",
    ),
    "squares of the terms of a sum": edit(
        (r"(tmp_acc\d+_vec) = \1 \+ (tmp\d+);", r"\1 = \1 + \2 * \2;"),
        (r"(tmp_acc\d+) = \1 \+ (tmp\d+);", r"\1 = \1 + \2 * \2;"),
        (r"tl\.sum\((_?tmp\d+), 1\)", r"tl.sum(\1 * \1, 1)"),
        words="other function, wrong reduction; wrong statistics, wrong factor",
        operators="sum mean",
    ),
}  # fmt: skip
# Of the kernels in `triton_kernels.py`.
TRITON_EDITS = {
    "weight of the norm halved": edit(
        (r"normal \* weight \+ bias", "normal * weight * 0.5 + bias"),
        words="wrong factor, scale; axis scale", operators="layer_norm",
    ),
    "normal values at most one": edit(
        (r"normal \* weight \+ bias", "tl.minimum(normal, 1.0) * weight + bias"),
        words="clipped; other function", operators="layer_norm",
    ),
    "eps of one in the kernel": edit(
        (r"variance \+ eps", "variance + 1.0"),
        words="eps, wrong argument; axis scale, wrong statistics, offset, scale, wrong factor",
        operators="layer_norm",
    ),
    "rows of the kernel from the last": edit(
        (r"tl\.load\(x \+ row \* n \+ at", "tl.load(x + (tl.num_programs(0) - 1 - row) * n + at"),
        words="permutation, wrong index; shift, swapped operands", operators="layer_norm",
    ),
    "left row of the program before": edit(
        (r"x \+ rows\[:, None\] \* k", "x + ((rows[:, None] + m - 1) % m) * k"),
        words="shift, wrong index, permutation; copy, stale", operators="linear",
    ),
    "first row not stored": edit(
        (r"wanted = \(rows\[:, None\] < m\)",
         "wanted = (rows[:, None] > 0) & (rows[:, None] < m)"), words=words.EMPTY,
        operators="linear",
    ),
    "total by a tanh": edit(
        (r"total, mask=wanted", "libdevice.tanh(total), mask=wanted"),
        words="other function; clipped, approximation", operators="linear",
    ),
    "bias of the kernel twice": edit(
        (r"total \+= tl\.load\(b ", "total += 2.0 * tl.load(b "),
        words="wrong factor, scale, repeated bias, residual; axis offset, offset, "
        "doubled reduction", operators="linear",
    ),
    "first tile of the common axis left out": edit(
        (r"range\(0, k, K\)", "range(K, k, K)"),
        words="partial sum, mask, wrong index; zeros, missing operand, off by one reduction, "
        "lost accumulation, wrong reduction", operators="linear",
    ),
    "gelu stored in bfloat16": edit(
        (r"tl\.store\(y \+ at, result, mask=at < n\)",
         "tl.store(y + at, result.to(tl.bfloat16).to(tl.float32), mask=at < n)"),
        words="precision; approximation", operators="gelu",
    ),
    "magnitudes before gelu": edit(
        (r"result = value \* 0\.5",
         "value = tl.abs(value)\n    result = value * 0.5"),
        words="sign, other function; wrong argument", operators="gelu",
    ),
}  # fmt: skip
