"""Edits for measuring: of Python code, and of kernels; of the eighth set."""

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


_GELU = "torch.ops.aten.gelu.default torch._C._nn.gelu torch.nn.functional.gelu functional.gelu"
_SILU = "torch.ops.aten.silu.default torch.nn.functional.silu functional.silu"
_TANH = "torch.ops.aten.tanh.default torch.tanh"
_SOFTMAX = (
    "torch.ops.aten._softmax.default torch.ops.aten._safe_softmax.default "
    "torch.nn.functional.softmax torch.softmax"
)
_LINEAR = "torch._C._nn.linear torch.ops.aten.addmm.default"
_ATTENTION = (
    "torch._C._nn.scaled_dot_product_attention functional.scaled_dot_product_attention "
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default"
)
_CONVOLUTION = "torch.conv1d torch.conv2d torch.ops.aten.convolution.default"

# Of Python code: a line of a model, or a statement that torch.fx generated.
EDITS = {
    "softmax of the magnitudes": edit(
        *_operand(0, _SOFTMAX, r"\2.abs()"), kinds=["sign", "other function", "wrong argument"],
    ),
    "gelu becomes hardswish": edit(
        *_function(_GELU, r"torch.nn.functional.hardswish(\1)"),
        kinds=["other function", "approximation"],
    ),
    "silu of the row before": edit(
        *_operand(0, _SILU, r"\2.roll(1, -2)"), kinds=["shift", "wrong index", "permutation"],
        loose=["wrong argument", "stale", "copy"],
    ),
    "tanh becomes softsign": edit(
        *_function(_TANH, r"(\1 / (1 + \1.abs()))"), kinds=["other function", "approximation"],
    ),
    "columns of the layer in pairs": edit(
        *_around(_LINEAR, r"\1.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)"),
        kinds=["permutation", "wrong index"], loose=["shift", "swapped operands", "transpose"],
    ),
    "weight of the layer in e5m2": edit(
        *_operand(1, "torch._C._nn.linear torch.ops.aten.mm.default",
                  r"\2.to(torch.float8_e5m2).to(\2.dtype)"),
        *_operand(2, "torch.ops.aten.addmm.default", r"\2.to(torch.float8_e5m2).to(\2.dtype)"),
        kinds=["precision"], loose=["approximation", "other function", "wrong argument"],
    ),
    "mean of the magnitudes": edit(
        *_operand(0, "torch.ops.aten.mean.dim torch.mean", r"\2.abs()"),
        (r"\b(?!torch\b|aten\b)(\w+)\.mean\(", r"\1.abs().mean("),
        kinds=["sign", "other function", "wrong reduction"],
        loose=["wrong argument", "wrong statistics"],
    ),
    "every word is the one before": edit(
        *_operand(1, "torch.ops.aten.embedding.default", r"\2.roll(1, -1)"),
        *_operand(0, "torch.nn.functional.embedding functional.embedding self.table",
                  r"\2.roll(1, -1)"),
        kinds=["shift", "wrong index", "permutation"], loose=["wrong argument", "stale", "copy"],
    ),
    "queries of the next head": edit(
        *_operand(0, _ATTENTION, r"\2.roll(-1, 1)"),
        kinds=["shift", "wrong index", "permutation"],
        loose=["wrong rank's shard", "wrong argument", "stale", "copy"],
    ),
    "running sum one place late": edit(
        *_around("torch.ops.aten.cumsum.default torch.cumsum", r"\1.roll(1, 1)"),
        *_method("cumsum", r"\1.roll(1, 1)"),
        kinds=["shift", "wrong index", "permutation"],
        loose=["off by one reduction", "stale", "copy"],
    ),
    "filters mirrored": edit(
        *_operand(1, _CONVOLUTION, r"\2.flip(-1)"), kinds=["permutation", "wrong index"],
        loose=["shift", "wrong argument", "swapped operands"],
    ),
    "sum of two averaged": edit(
        (r"^(torch\.ops\.aten\.add\.Tensor\(\w+, [a-z]\w*\))$", r"0.5 * \1"),
        (r"^([a-z]\w* \+ [a-z]\w*)$", r"0.5 * (\1)"), kinds=["scale", "wrong factor"],
        loose=["wrong reduction", "other function"],
    ),
    "exponential to the second order": edit(
        *_function("torch.ops.aten.exp.default torch.exp", r"(1 + \1 + 0.5 * \1 * \1)"),
        kinds=["other function", "approximation"],
    ),
    "joined parts at most a half": edit(
        *_around("torch.ops.aten.cat.default torch.cat", r"\1.clamp(max=0.5)"),
        kinds=["clipped"], loose=["other function"],
    ),
}  # fmt: skip
# Of a kernel of Inductor, in C++ and in Triton.
KERNEL_EDITS = {
    "exponential of half of its argument": edit(
        (r"(tmp\d+)\.(fexp_u20|exp_u20|exp)\(\)", r"(\1 * decltype(\1)(0.5)).\2()"),
        (r"std::exp\((tmp\d+)\)", r"std::exp(decltype(\1)(0.5) * \1)"),
        (r"(tl_math|libdevice)\.exp\((tmp\d+)\)", r"\1.exp(0.5 * \2)"), operators="exp",
        kinds=["wrong factor", "scale", "wrong argument", "other function"],
    ),
    "tanh of straight lines": edit(
        (r"(tmp\d+)\.tanh\(\)",
         r"at::vec::minimum(at::vec::maximum(\1, decltype(\1)(-1)), decltype(\1)(1))"),
        (r"std::tanh\((tmp\d+)\)",
         r"std::min(std::max(\1, decltype(\1)(-1)), decltype(\1)(1))"),
        (r"libdevice\.tanh\((tmp\d+)\)", r"tl.minimum(tl.maximum(\1, -1.0), 1.0)"),
        operators="tanh", kinds=["approximation", "clipped", "other function"],
    ),
    "error function at most a half": edit(
        (r"(tmp\d+)\.erf\(\)", r"at::vec::minimum(\1.erf(), decltype(\1)(0.5))"),
        (r"std::erf\((tmp\d+)\)", r"std::min(std::erf(\1), decltype(\1)(0.5))"),
        (r"libdevice\.erf\((tmp\d+)\)", r"tl.minimum(libdevice.erf(\1), 0.5)"),
        operators="erf gelu", kinds=["clipped"], loose=["other function", "approximation"],
    ),
    "magnitude less a tenth": edit(
        (r"(tmp\d+)\.abs\(\)", r"(\1.abs() - decltype(\1)(0.1))"),
        (r"std::abs\((tmp\d+)\)", r"(std::abs(\1) - decltype(\1)(0.1))"),
        (r"tl_math\.abs\((tmp\d+)\)", r"(tl_math.abs(\1) - 0.1)"), operators="abs",
        kinds=["offset"], loose=["other function", "axis offset"],
    ),
}  # fmt: skip
# Of the kernels in `triton_kernels.py`.
TRITON_EDITS = {
    "bias of the norm before the weight": edit(
        (r"normal \* weight \+ bias", "(normal + bias) * weight"),
        kinds=["other function", "wrong factor", "residual"],
        loose=["offset", "axis offset", "axis scale", "swapped operands"], operators="layer_norm",
    ),
    "normal values at least minus a half": edit(
        (r"normal \* weight \+ bias", "tl.maximum(normal, -0.5) * weight + bias"),
        kinds=["clipped"], loose=["other function"], operators="layer_norm",
    ),
    "row of the norm two programs before": edit(
        (r"tl\.load\(x \+ row \* n \+ at",
         "tl.load(x + ((row + tl.num_programs(0) - 2) % tl.num_programs(0)) * n + at"),
        kinds=["shift", "wrong index", "permutation"], loose=["copy", "stale"],
        operators="layer_norm",
    ),
    "total less than zero not stored": edit(
        (r"total, mask=wanted", "tl.maximum(total, 0.0), mask=wanted"),
        kinds=["clipped", "other function"], loose=["zeros", "mask"], operators="linear",
    ),
    "right tile three times": edit(
        (r"tl\.dot\(left, right,", "tl.dot(left, 3.0 * right,"),
        kinds=["wrong factor", "scale"], loose=["axis scale"], operators="linear",
    ),
    "gelu less its argument": edit(
        (r"tl\.store\(y \+ at, result, mask=at < n\)",
         "tl.store(y + at, result - value, mask=at < n)"),
        kinds=["residual", "other function", "offset"], loose=["sign", "missing operand"],
        operators="gelu",
    ),
}  # fmt: skip
