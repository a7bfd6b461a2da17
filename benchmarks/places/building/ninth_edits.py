"""Edits of the ninth set: of Python code, and of kernels."""

from __future__ import annotations

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
    TABLE,
    TANH,
    around,
    function,
    method,
    operand,
)

# Of Python code: a line of a model, or a statement that torch.fx generated.
EDITS = {
    "relu with a leak of a tenth": edit(
        *function(RELU, r"torch.nn.functional.leaky_relu(\1, 0.1)"),
        words="other function; approximation, residual, wrong argument",
    ),
    "gelu plus a quarter": edit(
        *around(GELU, r"(\1 + 0.25)"), words="offset; other function, axis offset, residual",
    ),
    "silu doubled": edit(
        *around(SILU, r"(2 * \1)"), words="scale, wrong factor; doubled reduction",
    ),
    "sigmoid at least a half": edit(
        *around(SIGMOID, r"\1.clamp(min=0.5)"), words="clipped; other function",
    ),
    "tanh of twice its argument": edit(
        *operand(0, TANH, r"(2 * \2)"),
        words="wrong factor, scale, wrong argument; other function",
    ),
    "softmax at most a fifth": edit(
        *around(SOFTMAX, r"\1.clamp(max=0.2)"), words="clipped; other function",
    ),
    "layer at three quarters": edit(
        *around(LINEAR, r"(0.75 * \1)"), words="scale, wrong factor; axis scale, wrong reduction",
    ),
    "attention at three quarters": edit(
        *around(ATTENTION, r"(0.75 * \1)"),
        words="scale, wrong factor; axis scale, wrong reduction",
    ),
    "rows of the table in hundredths": edit(
        *around(TABLE, r"(100 * \1).round().div(100)"),
        words="precision; approximation, other function",
    ),
    "mean plus a tenth": edit(
        *around("torch.ops.aten.mean.dim torch.mean", r"(\1 + 0.1)"),
        *method("mean", r"(\1 + 0.1)"), words="offset; eps, axis offset, residual",
    ),
    "sum of two at most one": edit(
        (r"^(torch\.ops\.aten\.add\.Tensor\(\w+, [a-z]\w*\))$", r"\1.clamp(max=1.0)"),
        (r"^([a-z]\w* \+ [a-z]\w*)$", r"(\1).clamp(max=1.0)"), words="clipped; other function",
    ),
    "second factor plus a tenth": edit(
        (r"\baten\.mul\.Tensor\((\w+), ([a-z]\w*)\)", r"aten.mul.Tensor(\1, \2 + 0.1)"),
        (r"^([a-z]\w*) \* ([a-z]\w*)$", r"\1 * (\2 + 0.1)"),
        words="offset, residual, wrong argument; other function, wrong factor, eps, axis offset",
    ),
    "convolution plus a tenth": edit(
        *around(CONVOLUTION, r"(\1 + 0.1)"),
        words="offset; axis offset, residual, repeated bias, missing bias",
    ),
    "reciprocal root at three quarters": edit(
        *around("torch.ops.aten.rsqrt.default torch.rsqrt", r"(0.75 * \1)"),
        words="scale, wrong factor; axis scale",
    ),
}  # fmt: skip
# Of a kernel of Inductor, in C++ and in Triton.
KERNEL_EDITS = {
    "exponential of three quarters of its argument": edit(
        (r"(tmp\d+)\.(fexp_u20|exp_u20|exp)\(\)", r"(\1 * decltype(\1)(0.75)).\2()"),
        (r"std::exp\((tmp\d+)\)", r"std::exp(decltype(\1)(0.75) * \1)"),
        (r"(tl_math|libdevice)\.exp\((tmp\d+)\)", r"\1.exp(0.75 * \2)"),
        words="wrong factor, scale, wrong argument, other function", operators="exp",
    ),
    "tanh a tenth smaller": edit(
        (r"(tmp\d+)\.tanh\(\)", r"(\1.tanh() * decltype(\1)(0.9))"),
        (r"std::tanh\((tmp\d+)\)", r"(0.9f * std::tanh(\1))"),
        (r"libdevice\.tanh\((tmp\d+)\)", r"(0.9 * libdevice.tanh(\1))"),
        words="scale, wrong factor; other function", operators="tanh",
    ),
    "error function with a minus": edit(
        (r"(tmp\d+)\.erf\(\)", r"\1.erf().neg()"), (r"std::erf\((tmp\d+)\)", r"(-std::erf(\1))"),
        (r"libdevice\.erf\((tmp\d+)\)", r"(-libdevice.erf(\1))"),
        words="sign, wrong factor, other function; scale", operators="erf gelu",
    ),
    "cosine doubled": edit(
        (r"(tmp\d+)\.cos\(\)", r"(\1.cos() * decltype(\1)(2))"),
        (r"std::cos\((tmp\d+)\)", r"(2 * std::cos(\1))"),
        (r"tl_math\.cos\((tmp\d+)\)", r"(2 * tl_math.cos(\1))"), words="scale, wrong factor",
        operators="cos",
    ),
    "reciprocal root a tenth larger": edit(
        (r"(tmp\d+)\.rsqrt\(\)", r"(\1.rsqrt() * decltype(\1)(1.1))"),
        (r"1 / std::sqrt\((tmp\d+)\)", r"(1.1f / std::sqrt(\1))"),
        (r"libdevice\.rsqrt\((tmp\d+)\)", r"(1.1 * libdevice.rsqrt(\1))"),
        words="scale, wrong factor; axis scale", operators="rsqrt",
    ),
    "gate halved": edit(
        (r"decltype\((tmp\d+)\)\(1\)( ?/ ?)\(decltype", r"decltype(\1)(0.5)\2(decltype"),
        (r"tl\.sigmoid\((tmp\d+)\)", r"(0.5 * tl.sigmoid(\1))"), words="scale, wrong factor",
        operators="sigmoid silu",
    ),
}  # fmt: skip
# Of the kernels in `triton_kernels.py`.
TRITON_EDITS = {
    "weight of the norm not multiplied": edit(
        (r"normal \* weight \+ bias", "normal + bias"),
        words="missing operand, wrong factor; axis scale, scale", operators="layer_norm",
    ),
    "squares added and not averaged": edit(
        (r"tl\.sum\(centred \* centred, 0\) / n", "tl.sum(centred * centred, 0)"),
        words="wrong reduction, wrong factor, wrong statistics; scale, axis scale, "
        "missing operand", operators="layer_norm",
    ),
    "bias of the next column in the kernel": edit(
        (r"tl\.load\(b \+ columns,", "tl.load(b + (columns + 1) % n,"),
        words="shift, wrong index, permutation; axis offset, offset, copy, stale",
        operators="linear",
    ),
    "left tile at most a half": edit(
        (r"tl\.dot\(left, right,", "tl.dot(tl.minimum(left, 0.5), right,"),
        words="clipped; other function, wrong argument", operators="linear",
    ),
    "last feature not multiplied": edit(
        (r"& \(at\[None, :\] < k\)", "& (at[None, :] < k - 1)"),
        words="partial sum, off by one reduction, mask; zeros, missing operand, wrong index, "
        "wrong reduction, lost accumulation", operators="linear",
    ),
    "gelu at three quarters": edit(
        (r"tl\.store\(y \+ at, result, mask=at < n\)",
         "tl.store(y + at, 0.75 * result, mask=at < n)"), words="scale, wrong factor",
        operators="gelu",
    ),
}  # fmt: skip
