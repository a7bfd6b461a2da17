"""Edits for measuring: of Python code, and of kernels."""

from __future__ import annotations

import re

from benchmarks.places.calls import edit

# What a call is given, with brackets in two levels.
_GIVEN = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"


def _around(calls: str, text: str) -> list[tuple[str, str]]:
    """The first call of one of these, with something around it; its first group is the call."""
    return [(rf"(?<![\w.])({re.escape(one)}{_GIVEN})", text) for one in calls.split()]


def _method(name: str, text: str) -> list[tuple[str, str]]:
    """The same for the call of a method on a name."""
    return [(rf"\b(?!torch\b|aten\b)(\w+\.{name}{_GIVEN})", text)]


def _operand(place: int, calls: str, text: str) -> list[tuple[str, str]]:
    """An operand that is a name, changed; its second group is the operand."""
    before = r"[\w.]+, " * place
    return [
        (rf"((?<![\w.]){re.escape(one)}\({before})(\w+)(?=[,)])", rf"\1{text}")
        for one in calls.split()
    ]


_GELU = "torch.ops.aten.gelu.default torch._C._nn.gelu torch.nn.functional.gelu functional.gelu"
_SILU = "torch.ops.aten.silu.default torch.nn.functional.silu functional.silu"
_SIGMOID = "torch.ops.aten.sigmoid.default torch.sigmoid"
_TANH = "torch.ops.aten.tanh.default torch.tanh"
_SOFTMAX = (
    "torch.ops.aten._softmax.default torch.ops.aten._safe_softmax.default "
    "torch.nn.functional.softmax torch.softmax"
)
_NORM = "torch.nn.functional.layer_norm self.norm self.before self.between"
_LINEAR = "torch._C._nn.linear torch.ops.aten.addmm.default"
_TABLE = "torch.nn.functional.embedding torch.ops.aten.embedding.default self.table"
_MATRICES = "torch.ops.aten.mm.default torch.ops.aten.bmm.default torch.matmul torch.bmm"
_ATTENTION = "torch._C._nn.scaled_dot_product_attention functional.scaled_dot_product_attention"
_CONVOLUTION = "torch.conv1d torch.conv2d torch.ops.aten.convolution.default"

# Of Python code: a line of a model, or a statement that torch.fx generated.
EDITS = {
    "relu and a half of its input": edit(
        *((pattern, rf"({new} + 0.5 * \2)") for pattern, new in (
            (r"(torch\.ops\.aten\.relu\.default)\((\w+)\)", r"\1(\2)"),
            (r"((?<![\w.])torch\.relu)\((\w+)\)", r"\1(\2)"),
            (r"((?:torch\.nn\.)?\bfunctional\.relu)\((\w+)(?:, inplace = False)?\)", r"\1(\2)"),
        )),
        kinds=["residual", "other function"], loose=["wrong factor", "offset", "wrong argument"],
    ),
    "gelu of one less": edit(
        *_operand(0, _GELU, r"(\2 - 1)"), kinds=["offset", "wrong argument"],
        loose=["other function", "axis offset", "residual"],
    ),
    "silu at most a half": edit(
        *_around(_SILU, r"\1.clamp(max=0.5)"), kinds=["clipped"], loose=["other function"],
    ),
    "sigmoid in tenths": edit(
        *_around(_SIGMOID, r"(10 * \1).round().div(10)"), kinds=["precision"],
        loose=["other function", "approximation"],
    ),
    "tanh doubled": edit(*_around(_TANH, r"(2 * \1)"), kinds=["scale", "wrong factor"]),
    "tanh and its argument": edit(
        (r"(torch\.ops\.aten\.tanh\.default)\((\w+)\)", r"(\1(\2) + \2)"),
        (r"(?<![\w.])(torch\.tanh)\((\w+)\)", r"(\1(\2) + \2)"),
        kinds=["residual", "other function"], loose=["offset"],
    ),
    "softmax three times": edit(*_around(_SOFTMAX, r"(3 * \1)"), kinds=["scale", "wrong factor"]),
    "softmax of scores in bfloat16": edit(
        *_operand(0, _SOFTMAX, r"\2.bfloat16().to(\2.dtype)"), kinds=["precision"],
        loose=["approximation", "wrong argument"],
    ),
    "softmax with a minus": edit(
        *_around(_SOFTMAX, r"(-\1)"), kinds=["sign", "scale", "wrong factor"],
    ),
    "norm at three quarters": edit(
        *_around(_NORM, r"(0.75 * \1)"), kinds=["scale", "wrong factor"], loose=["axis scale"],
    ),
    "norm in whole numbers": edit(
        *_around(_NORM, r"\1.round()"), kinds=["precision", "other function"],
        loose=["approximation"],
    ),
    "norm of the magnitudes": edit(
        *_operand(0, _NORM, r"\2.abs()"), kinds=["sign", "other function"],
        loose=["wrong argument", "wrong statistics"],
    ),
    "layer one column late": edit(
        *_around(_LINEAR, r"\1.roll(1, -1)"), kinds=["shift", "wrong index", "permutation"],
        loose=["copy"],
    ),
    "layer less a tenth": edit(
        *_around(_LINEAR, r"(\1 - 0.1)"), kinds=["offset"],
        loose=["axis offset", "residual", "missing bias", "repeated bias"],
    ),
    "input of the layer in halves": edit(
        *_operand(0, "torch._C._nn.linear torch.ops.aten.mm.default", r"(2 * \2).round().div(2)"),
        *_operand(1, "torch.ops.aten.addmm.default", r"(2 * \2).round().div(2)"),
        kinds=["precision"], loose=["approximation", "other function", "wrong argument"],
    ),
    "weight of the layer with a minus": edit(
        *_operand(1, "torch._C._nn.linear", r"(-\2)"),
        *_operand(2, "torch.ops.aten.addmm.default", r"(-\2)"),
        kinds=["sign", "wrong factor", "scale"], loose=["wrong argument", "swapped operands"],
    ),
    "values of the attention with a minus": edit(
        *_operand(2, _ATTENTION, r"(-\2)"),
        *_operand(2, "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default",
                  r"(-\2)"),
        kinds=["sign", "wrong factor", "scale"], loose=["wrong argument"],
    ),
    "keys of the attention doubled": edit(
        *_operand(1, _ATTENTION, r"(2 * \2)"),
        *_operand(1, "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default",
                  r"(2 * \2)"),
        kinds=["wrong factor", "scale", "wrong argument"], loose=["other function"],
    ),
    "attention plus a tenth": edit(
        *_around(_ATTENTION, r"(\1 + 0.1)"), kinds=["offset"],
        loose=["axis offset", "residual"],
    ),
    "rows of the table with a minus": edit(
        *_around(_TABLE, r"(-\1)"), kinds=["sign", "scale", "wrong factor"],
    ),
    "rows of the table plus a tenth": edit(
        *_around(_TABLE, r"(\1 + 0.1)"), kinds=["offset"], loose=["axis offset", "residual"],
    ),
    "mean three times": edit(
        *_around("torch.ops.aten.mean.dim", r"(3 * \1)"), *_method("mean", r"(3 * \1)"),
        kinds=["scale", "wrong factor"], loose=["wrong reduction"],
    ),
    "total at most one": edit(
        *_around("torch.ops.aten.sum.dim_IntList", r"\1.clamp(max=1.0)"),
        *_method("sum", r"\1.clamp(max=1.0)"),
        kinds=["clipped"], loose=["other function"],
    ),
    "largest as the next whole number": edit(
        *_around("torch.ops.aten.amax.default", r"\1.ceil()"), *_method("amax", r"\1.ceil()"),
        kinds=["precision", "other function"], loose=["approximation", "offset"],
    ),
    "sum of two three times": edit(
        (r"^(torch\.ops\.aten\.add\.Tensor\(\w+, [a-z]\w*\))$", r"3 * \1"),
        (r"^([a-z]\w* \+ [a-z]\w*)$", r"3 * (\1)"), kinds=["scale", "wrong factor"],
        loose=["doubled reduction"],
    ),
    "second summand squared": edit(
        (r"\baten\.add\.Tensor\((\w+), ([a-z]\w*)\)", r"aten.add.Tensor(\1, \2 * \2)"),
        (r"^([a-z]\w*) \+ ([a-z]\w*)$", r"\1 + \2 * \2"),
        kinds=["other function"], loose=["wrong factor"],
    ),
    "first factor in whole numbers": edit(
        (r"\baten\.mul\.Tensor\((\w+), ([a-z]\w*)\)", r"aten.mul.Tensor(\1.round(), \2)"),
        (r"^([a-z]\w*) \* ([a-z]\w*)$", r"\1.round() * \2"),
        kinds=["precision", "other function"], loose=["approximation"],
    ),
    "product of two with a floor": edit(
        (r"^(torch\.ops\.aten\.mul\.Tensor\(\w+, [a-z]\w*\))$", r"\1.clamp(min=-0.1)"),
        (r"^([a-z]\w* \* [a-z]\w*)$", r"(\1).clamp(min=-0.1)"),
        kinds=["clipped"], loose=["other function"],
    ),
    "difference plus a tenth": edit(
        (r"^(torch\.ops\.aten\.sub\.Tensor\(\w+, [a-z]\w*\))$", r"\1 + 0.1"),
        (r"^([a-z]\w* - [a-z]\w*)$", r"\1 + 0.1"),
        kinds=["offset"], loose=["axis offset", "eps", "residual"],
    ),
    "quotient doubled": edit(
        *_around("torch.ops.aten.div.Tensor", r"(2 * \1)"),
        (r"^([a-z]\w* / [a-z]\w*)$", r"2 * \1"), kinds=["scale", "wrong factor"],
    ),
    "square plus a tenth": edit(
        (r"^(torch\.ops\.aten\.pow\.Tensor_Scalar\(\w+, 2\))$", r"\1 + 0.1"),
        (r"\b(\w+\.pow\(2\))", r"(\1 + 0.1)"), kinds=["offset"],
        loose=["eps", "axis offset", "other function"],
    ),
    "reciprocal root at most one": edit(
        *_around("torch.ops.aten.rsqrt.default torch.rsqrt", r"\1.clamp(max=1.0)"),
        kinds=["clipped"], loose=["other function", "eps", "axis scale"],
    ),
    "exponential doubled": edit(
        *_around("torch.ops.aten.exp.default torch.exp", r"(2 * \1)"),
        kinds=["scale", "wrong factor"], loose=["offset", "other function"],
    ),
    "cosine at three quarters": edit(
        *_around("torch.ops.aten.cos.default", r"(0.75 * \1)"), *_method("cos", r"(0.75 * \1)"),
        kinds=["scale", "wrong factor"],
    ),
    "sine plus a fifth": edit(
        *_around("torch.ops.aten.sin.default", r"(\1 + 0.2)"), *_method("sin", r"(\1 + 0.2)"),
        kinds=["offset"], loose=["other function", "axis offset"],
    ),
    "joined parts from the last column": edit(
        *_around("torch.ops.aten.cat.default torch.cat", r"\1.flip(-1)"),
        kinds=["permutation", "wrong index"], loose=["shift", "swapped operands"],
    ),
    "transposed values doubled": edit(
        *_around("torch.ops.aten.transpose.int", r"(2 * \1)"), *_method("transpose", r"(2 * \1)"),
        kinds=["scale", "wrong factor"],
    ),
    "image plus a half": edit(
        *_operand(0, _CONVOLUTION, r"(\2 + 0.5)"), kinds=["offset", "wrong argument"],
        loose=["axis offset", "residual", "other function"],
    ),
    "filters three times": edit(
        *_operand(1, _CONVOLUTION, r"(3 * \2)"), kinds=["wrong factor", "scale"],
        loose=["wrong argument"],
    ),
    "matrix product at most one": edit(
        *_around(_MATRICES, r"\1.clamp(max=1.0)"), (r"^(\w+ @ \w+)$", r"(\1).clamp(max=1.0)"),
        kinds=["clipped"], loose=["other function"],
    ),
    "gradient behind the activation at most a tenth": edit(
        *_around(
            "torch.ops.aten.gelu_backward.default torch.ops.aten.silu_backward.default "
            "torch.ops.aten.tanh_backward.default torch.ops.aten.sigmoid_backward.default "
            "torch.ops.aten.threshold_backward.default",
            r"\1.clamp(-0.1, 0.1)",
        ),
        kinds=["clipped"], loose=["other function"],
    ),
}  # fmt: skip
# Of a kernel of Inductor, in C++ and in Triton.
KERNEL_EDITS = {
    "error function halved": edit(
        (r"(tmp\d+)\.erf\(\)", r"(\1.erf() * decltype(\1)(0.5))"),
        (r"std::erf\((tmp\d+)\)", r"(0.5f * std::erf(\1))"),
        (r"libdevice\.erf\((tmp\d+)\)", r"(0.5 * libdevice.erf(\1))"), operators="erf gelu",
        kinds=["wrong factor", "scale", "other function"], loose=["approximation"],
    ),
    "exponential at most seven tenths": edit(
        (r"(tmp\d+)\.(fexp_u20|exp_u20|exp)\(\)", r"at::vec::minimum(\1.\2(), decltype(\1)(0.7))"),
        (r"std::exp\((tmp\d+)\)", r"std::min(std::exp(\1), decltype(\1)(0.7))"),
        (r"(tl_math|libdevice)\.exp\((tmp\d+)\)", r"tl.minimum(\1.exp(\2), 0.7)"),
        operators="exp", kinds=["clipped"], loose=["other function"],
    ),
    "tanh plus a tenth": edit(
        (r"(tmp\d+)\.tanh\(\)", r"(\1.tanh() + decltype(\1)(0.1))"),
        (r"std::tanh\((tmp\d+)\)", r"(0.1f + std::tanh(\1))"),
        (r"libdevice\.tanh\((tmp\d+)\)", r"(0.1 + libdevice.tanh(\1))"), operators="tanh",
        kinds=["offset"], loose=["other function", "axis offset"],
    ),
    "logarithm at a half": edit(
        (r"(tmp\d+)\.log\(\)", r"(\1.log() * decltype(\1)(0.5))"),
        (r"std::log\((tmp\d+)\)", r"(0.5f * std::log(\1))"),
        (r"tl_math\.log\((tmp\d+)\)", r"(0.5 * tl_math.log(\1))"), operators="log",
        kinds=["scale", "wrong factor"], loose=["other function"],
    ),
    "reciprocal root with a minus": edit(
        (r"(tmp\d+)\.rsqrt\(\)", r"\1.rsqrt().neg()"),
        (r"1 / std::sqrt\((tmp\d+)\)", r"(-1 / std::sqrt(\1))"),
        (r"libdevice\.rsqrt\((tmp\d+)\)", r"(-libdevice.rsqrt(\1))"), operators="rsqrt",
        kinds=["sign", "scale", "wrong factor"],
    ),
    "cosine of twice the angle": edit(
        (r"(tmp\d+)\.cos\(\)", r"(\1 + \1).cos()"),
        (r"std::cos\((tmp\d+)\)", r"std::cos(\1 + \1)"),
        (r"tl_math\.cos\((tmp\d+)\)", r"tl_math.cos(\1 + \1)"), operators="cos",
        kinds=["wrong factor", "scale", "wrong argument"], loose=["other function"],
    ),
    "sine plus a tenth": edit(
        (r"(tmp\d+)\.sin\(\)", r"(\1.sin() + decltype(\1)(0.1))"),
        (r"std::sin\((tmp\d+)\)", r"(0.1f + std::sin(\1))"),
        (r"tl_math\.sin\((tmp\d+)\)", r"(0.1 + tl_math.sin(\1))"), operators="sin",
        kinds=["offset"], loose=["other function", "axis offset"],
    ),
    "magnitude three times": edit(
        (r"(tmp\d+)\.abs\(\)", r"(\1.abs() * decltype(\1)(3))"),
        (r"std::abs\((tmp\d+)\)", r"(3 * std::abs(\1))"),
        (r"tl_math\.abs\((tmp\d+)\)", r"(3 * tl_math.abs(\1))"), operators="abs",
        kinds=["scale", "wrong factor"],
    ),
    "root with a minus": edit(
        (r"(tmp\d+)\.sqrt\(\)", r"\1.sqrt().neg()"),
        (r"(?<!1 / )std::sqrt\((tmp\d+)\)", r"(-std::sqrt(\1))"),
        (r"(libdevice\.sqrt|tl\.sqrt_rn|tl_math\.sqrt)\((tmp\d+)\)", r"(-\1(\2))"),
        operators="sqrt std", kinds=["sign", "scale", "wrong factor"],
    ),
    "gate with a minus": edit(
        (r"decltype\((tmp\d+)\)\(1\)( ?/ ?)\(decltype", r"decltype(\1)(-1)\2(decltype"),
        (r"tl\.sigmoid\((tmp\d+)\)", r"(-tl.sigmoid(\1))"), operators="sigmoid silu",
        kinds=["sign", "scale", "wrong factor"],
    ),
    "squares of the terms of a sum": edit(
        (r"(tmp_acc\d+_vec) = \1 \+ (tmp\d+);", r"\1 = \1 + \2 * \2;"),
        (r"(tmp_acc\d+) = \1 \+ (tmp\d+);", r"\1 = \1 + \2 * \2;"),
        (r"tl\.sum\((_?tmp\d+), 1\)", r"tl.sum(\1 * \1, 1)"), operators="sum mean",
        kinds=["other function", "wrong reduction"], loose=["wrong statistics", "wrong factor"],
    ),
}  # fmt: skip
# Of the kernels in `triton_kernels.py`.
TRITON_EDITS = {
    "weight of the norm halved": edit(
        (r"normal \* weight \+ bias", "normal * weight * 0.5 + bias"),
        kinds=["wrong factor", "scale"], loose=["axis scale"], operators="layer_norm",
    ),
    "normal values at most one": edit(
        (r"normal \* weight \+ bias", "tl.minimum(normal, 1.0) * weight + bias"),
        kinds=["clipped"], loose=["other function"], operators="layer_norm",
    ),
    "eps of one in the kernel": edit(
        (r"variance \+ eps", "variance + 1.0"), kinds=["eps", "wrong argument"],
        loose=["axis scale", "wrong statistics", "offset", "scale", "wrong factor"],
        operators="layer_norm",
    ),
    "rows of the kernel from the last": edit(
        (r"tl\.load\(x \+ row \* n \+ at", "tl.load(x + (tl.num_programs(0) - 1 - row) * n + at"),
        kinds=["permutation", "wrong index"], loose=["shift", "swapped operands"],
        operators="layer_norm",
    ),
    "left row of the program before": edit(
        (r"x \+ rows\[:, None\] \* k", "x + ((rows[:, None] + m - 1) % m) * k"),
        kinds=["shift", "wrong index", "permutation"], loose=["copy", "stale"],
        operators="linear",
    ),
    "first row not stored": edit(
        (r"wanted = \(rows\[:, None\] < m\)",
         "wanted = (rows[:, None] > 0) & (rows[:, None] < m)"),
        kinds=["zeros", "mask", "uninitialised"],
        loose=["constant", "missing operand", "axis scale", "wrong factor"], operators="linear",
    ),
    "total by a tanh": edit(
        (r"total, mask=wanted", "libdevice.tanh(total), mask=wanted"),
        kinds=["other function"], loose=["clipped", "approximation"], operators="linear",
    ),
    "bias of the kernel twice": edit(
        (r"total \+= tl\.load\(b ", "total += 2.0 * tl.load(b "),
        kinds=["wrong factor", "scale", "repeated bias", "residual"],
        loose=["axis offset", "offset", "doubled reduction"], operators="linear",
    ),
    "first tile of the common axis left out": edit(
        (r"range\(0, k, K\)", "range(K, k, K)"),
        kinds=["partial sum", "mask", "wrong index"],
        loose=["zeros", "missing operand", "off by one reduction", "lost accumulation",
               "wrong reduction"],
        operators="linear",
    ),
    "gelu stored in bfloat16": edit(
        (r"tl\.store\(y \+ at, result, mask=at < n\)",
         "tl.store(y + at, result.to(tl.bfloat16).to(tl.float32), mask=at < n)"),
        kinds=["precision"], loose=["approximation"], operators="gelu",
    ),
    "magnitudes before gelu": edit(
        (r"result = value \* 0\.5",
         "value = tl.abs(value)\n    result = value * 0.5"),
        kinds=["sign", "other function"], loose=["wrong argument"], operators="gelu",
    ),
}  # fmt: skip
