"""Edits for measuring: of Python code, and of kernels; of the eighth set."""

from __future__ import annotations

from benchmarks.places import words
from benchmarks.places.calls import edit
from benchmarks.places.edit_patterns import (
    CONVOLUTION,
    GELU,
    SILU,
    SOFTMAX,
    TANH,
    around,
    function,
    method,
    operand,
)

_LINEAR = "torch._C._nn.linear torch.ops.aten.addmm.default"
_ATTENTION = (
    "torch._C._nn.scaled_dot_product_attention functional.scaled_dot_product_attention "
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default"
)

# Of Python code: a line of a model, or a statement that torch.fx generated.
EDITS = {
    "softmax of the magnitudes": edit(
        *operand(0, SOFTMAX, r"\2.abs()"), words="sign, other function, wrong argument",
    ),
    "gelu becomes hardswish": edit(
        *function(GELU, r"torch.nn.functional.hardswish(\1)"),
        words="other function, approximation",
    ),
    "silu of the row before": edit(*operand(0, SILU, r"\2.roll(1, -2)"), words=words.MOVED),
    "tanh becomes softsign": edit(
        *function(TANH, r"(\1 / (1 + \1.abs()))"), words="other function, approximation",
    ),
    "columns of the layer in pairs": edit(
        *around(_LINEAR, r"\1.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)"),
        words="permutation, wrong index; shift, swapped operands, transpose",
    ),
    "weight of the layer in e5m2": edit(
        *operand(1, "torch._C._nn.linear torch.ops.aten.mm.default",
                  r"\2.to(torch.float8_e5m2).to(\2.dtype)"),
        *operand(2, "torch.ops.aten.addmm.default", r"\2.to(torch.float8_e5m2).to(\2.dtype)"),
        words=words.ROUNDED,
    ),
    "mean of the magnitudes": edit(
        *operand(0, "torch.ops.aten.mean.dim torch.mean", r"\2.abs()"),
        (r"\b(?!torch\b|aten\b)(\w+)\.mean\(", r"\1.abs().mean("),
        words="sign, other function, wrong reduction; wrong argument, wrong statistics",
    ),
    "every word is the one before": edit(
        *operand(1, "torch.ops.aten.embedding.default", r"\2.roll(1, -1)"),
        *operand(0, "torch.nn.functional.embedding functional.embedding self.table",
                  r"\2.roll(1, -1)"), words=words.MOVED,
    ),
    "queries of the next head": edit(
        *operand(0, _ATTENTION, r"\2.roll(-1, 1)"), words=words.MOVED_OPERAND,
    ),
    "running sum one place late": edit(
        *around("torch.ops.aten.cumsum.default torch.cumsum", r"\1.roll(1, 1)"),
        *method("cumsum", r"\1.roll(1, 1)"),
        words="shift, wrong index, permutation; off by one reduction, stale, copy",
    ),
    "filters mirrored": edit(
        *operand(1, CONVOLUTION, r"\2.flip(-1)"),
        words="permutation, wrong index; shift, wrong argument, swapped operands",
    ),
    "sum of two averaged": edit(
        (r"^(torch\.ops\.aten\.add\.Tensor\(\w+, [a-z]\w*\))$", r"0.5 * \1"),
        (r"^([a-z]\w* \+ [a-z]\w*)$", r"0.5 * (\1)"),
        words="scale, wrong factor; wrong reduction, other function",
    ),
    "exponential to the second order": edit(
        *function("torch.ops.aten.exp.default torch.exp", r"(1 + \1 + 0.5 * \1 * \1)"),
        words="other function, approximation",
    ),
    "joined parts at most a half": edit(
        *around("torch.ops.aten.cat.default torch.cat", r"\1.clamp(max=0.5)"),
        words="clipped; other function",
    ),
}  # fmt: skip
# Of a kernel of Inductor, in C++ and in Triton.
KERNEL_EDITS = {
    "exponential of half of its argument": edit(
        (r"(tmp\d+)\.(fexp_u20|exp_u20|exp)\(\)", r"(\1 * decltype(\1)(0.5)).\2()"),
        (r"std::exp\((tmp\d+)\)", r"std::exp(decltype(\1)(0.5) * \1)"),
        (r"(tl_math|libdevice)\.exp\((tmp\d+)\)", r"\1.exp(0.5 * \2)"),
        words="wrong factor, scale, wrong argument, other function", operators="exp",
    ),
    "tanh of straight lines": edit(
        (r"(tmp\d+)\.tanh\(\)",
         r"at::vec::minimum(at::vec::maximum(\1, decltype(\1)(-1)), decltype(\1)(1))"),
        (r"std::tanh\((tmp\d+)\)",
         r"std::min(std::max(\1, decltype(\1)(-1)), decltype(\1)(1))"),
        (r"libdevice\.tanh\((tmp\d+)\)", r"tl.minimum(tl.maximum(\1, -1.0), 1.0)"),
        words="approximation, clipped, other function", operators="tanh",
    ),
    "error function at most a half": edit(
        (r"(tmp\d+)\.erf\(\)", r"at::vec::minimum(\1.erf(), decltype(\1)(0.5))"),
        (r"std::erf\((tmp\d+)\)", r"std::min(std::erf(\1), decltype(\1)(0.5))"),
        (r"libdevice\.erf\((tmp\d+)\)", r"tl.minimum(libdevice.erf(\1), 0.5)"),
        words="clipped; other function, approximation", operators="erf gelu",
    ),
    "magnitude less a tenth": edit(
        (r"(tmp\d+)\.abs\(\)", r"(\1.abs() - decltype(\1)(0.1))"),
        (r"std::abs\((tmp\d+)\)", r"(std::abs(\1) - decltype(\1)(0.1))"),
        (r"tl_math\.abs\((tmp\d+)\)", r"(tl_math.abs(\1) - 0.1)"),
        words="offset; other function, axis offset", operators="abs",
    ),
}  # fmt: skip
# Of the kernels in `triton_kernels.py`.
TRITON_EDITS = {
    "bias of the norm before the weight": edit(
        (r"normal \* weight \+ bias", "(normal + bias) * weight"),
        words="other function, wrong factor, residual; offset, axis offset, axis scale, "
        "swapped operands", operators="layer_norm",
    ),
    "normal values at least minus a half": edit(
        (r"normal \* weight \+ bias", "tl.maximum(normal, -0.5) * weight + bias"),
        words="clipped; other function", operators="layer_norm",
    ),
    "row of the norm two programs before": edit(
        (r"tl\.load\(x \+ row \* n \+ at",
         "tl.load(x + ((row + tl.num_programs(0) - 2) % tl.num_programs(0)) * n + at"),
        words="shift, wrong index, permutation; copy, stale", operators="layer_norm",
    ),
    "total less than zero not stored": edit(
        (r"total, mask=wanted", "tl.maximum(total, 0.0), mask=wanted"),
        words="clipped, other function; zeros, mask", operators="linear",
    ),
    "right tile three times": edit(
        (r"tl\.dot\(left, right,", "tl.dot(left, 3.0 * right,"),
        words="wrong factor, scale; axis scale", operators="linear",
    ),
    "gelu less its argument": edit(
        (r"tl\.store\(y \+ at, result, mask=at < n\)",
         "tl.store(y + at, result - value, mask=at < n)"),
        words="residual, other function, offset; sign, missing operand", operators="gelu",
    ),
}  # fmt: skip
