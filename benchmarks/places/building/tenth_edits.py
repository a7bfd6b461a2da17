"""Edits of the tenth set: of Python code, and of kernels."""

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


def _function(calls: str, text: str) -> list[tuple[str, str]]:
    """A call whose first argument is a name, replaced; its first group is that argument."""
    return [(rf"(?<![\w.]){re.escape(one)}\((\w+)(?:, [^()]*)?\)", text) for one in calls.split()]


_RELU = "torch.ops.aten.relu.default torch.relu torch.nn.functional.relu functional.relu"
_GELU = "torch.ops.aten.gelu.default torch._C._nn.gelu torch.nn.functional.gelu functional.gelu"
_SILU = "torch.ops.aten.silu.default torch.nn.functional.silu functional.silu"
_SIGMOID = "torch.ops.aten.sigmoid.default torch.sigmoid"
_TANH = "torch.ops.aten.tanh.default torch.tanh"
_SOFTMAX = (
    "torch.ops.aten._softmax.default torch.ops.aten._safe_softmax.default "
    "torch.nn.functional.softmax torch.softmax"
)
_LINEAR = "torch._C._nn.linear torch.ops.aten.addmm.default torch.ops.aten.mm.default"
_TABLE = "torch.nn.functional.embedding torch.ops.aten.embedding.default self.table"
_ATTENTION = "torch._C._nn.scaled_dot_product_attention functional.scaled_dot_product_attention"
_CONVOLUTION = "torch.conv1d torch.conv2d torch.ops.aten.convolution.default"
_NORM = "torch.nn.functional.layer_norm functional.layer_norm"

# Of Python code: a line of a model, or a statement that torch.fx generated.
EDITS = {
    "gelu of the opposite": edit(
        *_operand(0, _GELU, r"(-\2)"), kinds=["sign", "other function", "wrong argument"],
        loose=["wrong factor"],
    ),
    "silu of half of its input": edit(
        *_operand(0, _SILU, r"(0.5 * \2)"), kinds=["wrong factor", "wrong argument"],
        loose=["scale", "other function"],
    ),
    "sigmoid of twice its argument": edit(
        *_operand(0, _SIGMOID, r"(2 * \2)"), kinds=["wrong factor", "wrong argument"],
        loose=["scale", "other function"],
    ),
    "tanh less a tenth": edit(
        *_around(_TANH, r"(\1 - 0.1)"), kinds=["offset"],
        loose=["other function", "axis offset", "residual"],
    ),
    "relu with a minus": edit(
        *_around(_RELU, r"(-\1)"), kinds=["sign", "scale", "wrong factor"],
        loose=["other function"],
    ),
    "softmax over the axis before": edit(
        *[(rf"((?<![\w.]){re.escape(one)}\(\w+, (?:dim ?= ?)?)-1(?=[,)])", r"\1-2")
          for one in _SOFTMAX.split()],
        kinds=["wrong axis", "wrong argument"],
        loose=["wrong reduction", "transpose", "wrong statistics"],
    ),
    "layer in float16": edit(
        *_around(_LINEAR, r"\1.half().float()"), kinds=["precision"],
        loose=["approximation", "other function"],
    ),
    "rows of the input one late": edit(
        *_operand(0, "torch._C._nn.linear torch.ops.aten.mm.default", r"\2.roll(1, -2)"),
        *_operand(1, "torch.ops.aten.addmm.default", r"\2.roll(1, -2)"),
        kinds=["shift", "wrong index", "permutation"], loose=["wrong argument", "stale", "copy"],
    ),
    "every word is the next one": edit(
        *_operand(1, "torch.ops.aten.embedding.default", r"\2.roll(-1, -1)"),
        *_operand(0, "torch.nn.functional.embedding functional.embedding self.table",
                  r"\2.roll(-1, -1)"),
        kinds=["shift", "wrong index", "permutation"], loose=["wrong argument", "stale", "copy"],
    ),
    "values of the attention one position late": edit(
        *_operand(2, _ATTENTION, r"\2.roll(1, -2)"),
        kinds=["shift", "wrong index", "permutation"], loose=["wrong argument", "stale", "copy"],
    ),
    "image one column late": edit(
        *_operand(0, _CONVOLUTION, r"\2.roll(1, -1)"),
        kinds=["shift", "wrong index", "permutation"], loose=["wrong argument", "stale", "copy"],
    ),
    "mean of the next row": edit(
        *_around("torch.ops.aten.mean.dim torch.mean", r"\1.roll(-1, 1)"),
        *_method("mean", r"\1.roll(-1, 1)"),
        kinds=["shift", "wrong index", "permutation", "wrong statistics"],
        loose=["stale", "copy"],
    ),
    "first summand twice": edit(
        (r"^(torch\.ops\.aten\.add\.Tensor\()(\w+), ([a-z]\w*\))$", r"\g<1>2 * \2, \3"),
        (r"^([a-z]\w*) \+ ([a-z]\w*)$", r"2 * \1 + \2"),
        kinds=["wrong factor", "residual", "doubled reduction"],
        loose=["other function", "scale", "wrong argument"],
    ),
    "joined parts doubled": edit(
        *_around("torch.ops.aten.cat.default torch.cat", r"(2 * \1)"),
        kinds=["scale", "wrong factor"], loose=["doubled reduction", "residual"],
    ),
}  # fmt: skip
# Of a kernel of Inductor, in C++ and in Triton.
KERNEL_EDITS = {
    "exponential less a tenth": edit(
        (r"(tmp\d+)\.(fexp_u20|exp_u20|exp)\(\)", r"(\1.\2() - decltype(\1)(0.1))"),
        (r"std::exp\((tmp\d+)\)", r"(std::exp(\1) - decltype(\1)(0.1))"),
        (r"(tl_math|libdevice)\.exp\((tmp\d+)\)", r"(\1.exp(\2) - 0.1)"), operators="exp",
        kinds=["offset"], loose=["other function", "axis offset", "residual"],
    ),
    "tanh of three quarters of its argument": edit(
        (r"(tmp\d+)\.tanh\(\)", r"(\1 * decltype(\1)(0.75)).tanh()"),
        (r"std::tanh\((tmp\d+)\)", r"std::tanh(decltype(\1)(0.75) * \1)"),
        (r"libdevice\.tanh\((tmp\d+)\)", r"libdevice.tanh(0.75 * \1)"), operators="tanh",
        kinds=["wrong factor", "wrong argument", "other function"], loose=["scale"],
    ),
    "error function of the magnitude": edit(
        (r"(tmp\d+)\.erf\(\)", r"(\1.abs()).erf()"),
        (r"std::erf\((tmp\d+)\)", r"std::erf(std::abs(\1))"),
        (r"libdevice\.erf\((tmp\d+)\)", r"libdevice.erf(tl_math.abs(\1))"),
        operators="erf gelu", kinds=["sign", "other function", "wrong argument"],
        loose=["approximation"],
    ),
    "reciprocal root of twice the variance": edit(
        (r"(tmp\d+)\.rsqrt\(\)", r"(\1 * decltype(\1)(2)).rsqrt()"),
        (r"1 / std::sqrt\((tmp\d+)\)", r"1 / std::sqrt(2 * \1)"),
        (r"libdevice\.rsqrt\((tmp\d+)\)", r"libdevice.rsqrt(2 * \1)"), operators="rsqrt",
        kinds=["scale", "wrong factor"], loose=["wrong argument", "axis scale"],
    ),
    "sine a tenth smaller": edit(
        (r"(tmp\d+)\.sin\(\)", r"(\1.sin() * decltype(\1)(0.9))"),
        (r"std::sin\((tmp\d+)\)", r"(decltype(\1)(0.9) * std::sin(\1))"),
        (r"tl_math\.sin\((tmp\d+)\)", r"(0.9 * tl_math.sin(\1))"), operators="sin",
        kinds=["scale", "wrong factor"],
    ),
    "gate of twice its argument": edit(
        (r"(tmp\d+)\.neg\(\)\.exp\(\)", r"(\1 * decltype(\1)(2)).neg().exp()"),
        (r"1 \+ std::exp\(-(tmp\d+)\)", r"1 + std::exp(-2 * \1)"),
        (r"tl\.sigmoid\((tmp\d+)\)", r"tl.sigmoid(2 * \1)"), operators="sigmoid silu",
        kinds=["wrong factor", "wrong argument", "other function"], loose=["scale"],
    ),
}  # fmt: skip
# Of the kernels in `triton_kernels.py`.
TRITON_EDITS = {
    "mean of the norm by one less": edit(
        (r"mean = tl\.sum\(value, 0\) / n", "mean = tl.sum(value, 0) / (n - 1)"),
        kinds=["wrong statistics", "wrong factor", "wrong reduction", "off by one reduction"],
        loose=["axis offset", "scale", "offset"], operators="layer_norm",
    ),
    "bias of the norm forgotten": edit(
        (r"normal \* weight \+ bias", "normal * weight"),
        kinds=["missing bias", "missing operand"], loose=["axis offset", "offset", "residual"],
        operators="layer_norm",
    ),
    "last column of the norm not stored": edit(
        (r"tl\.store\(y \+ row \* n \+ at, result, mask=inside\)",
         "tl.store(y + row * n + at, tl.where(at < n - 1, result, 0.0), mask=inside)"),
        kinds=["zeros", "mask"], loose=["missing operand", "uninitialised", "constant",
                                        "axis scale", "wrong factor"],
        operators="layer_norm",
    ),
    "left tile with a minus": edit(
        (r"tl\.dot\(left, right,", "tl.dot(-left, right,"),
        kinds=["sign", "wrong factor"], loose=["scale", "other function", "wrong argument"],
        operators="linear",
    ),
    "bias of the first column for all": edit(
        (r"tl\.load\(b \+ columns,", "tl.load(b + 0 * columns,"),
        kinds=["copy", "stale", "wrong index"],
        loose=["axis offset", "offset", "constant", "missing bias"], operators="linear",
    ),
    "gelu of half of its input": edit(
        (r"value = tl\.load\(x \+ at, mask=at < n\)",
         "value = 0.5 * tl.load(x + at, mask=at < n)"),
        kinds=["wrong factor", "wrong argument"], loose=["scale", "other function"],
        operators="gelu",
    ),
}  # fmt: skip
