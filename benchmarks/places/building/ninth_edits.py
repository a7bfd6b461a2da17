"""Edits of the ninth set: of Python code, and of kernels."""

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

# Of Python code: a line of a model, or a statement that torch.fx generated.
EDITS = {
    "relu with a leak of a tenth": edit(
        *_function(_RELU, r"torch.nn.functional.leaky_relu(\1, 0.1)"), kinds=["other function"],
        loose=["approximation", "residual", "wrong argument"],
    ),
    "gelu plus a quarter": edit(
        *_around(_GELU, r"(\1 + 0.25)"), kinds=["offset"],
        loose=["other function", "axis offset", "residual"],
    ),
    "silu doubled": edit(
        *_around(_SILU, r"(2 * \1)"), kinds=["scale", "wrong factor"],
        loose=["doubled reduction"],
    ),
    "sigmoid at least a half": edit(
        *_around(_SIGMOID, r"\1.clamp(min=0.5)"), kinds=["clipped"], loose=["other function"],
    ),
    "tanh of twice its argument": edit(
        *_operand(0, _TANH, r"(2 * \2)"), kinds=["wrong factor", "scale", "wrong argument"],
        loose=["other function"],
    ),
    "softmax at most a fifth": edit(
        *_around(_SOFTMAX, r"\1.clamp(max=0.2)"), kinds=["clipped"], loose=["other function"],
    ),
    "layer at three quarters": edit(
        *_around(_LINEAR, r"(0.75 * \1)"), kinds=["scale", "wrong factor"],
        loose=["axis scale", "wrong reduction"],
    ),
    "attention at three quarters": edit(
        *_around(_ATTENTION, r"(0.75 * \1)"), kinds=["scale", "wrong factor"],
        loose=["axis scale", "wrong reduction"],
    ),
    "rows of the table in hundredths": edit(
        *_around(_TABLE, r"(100 * \1).round().div(100)"), kinds=["precision"],
        loose=["approximation", "other function"],
    ),
    "mean plus a tenth": edit(
        *_around("torch.ops.aten.mean.dim torch.mean", r"(\1 + 0.1)"),
        *_method("mean", r"(\1 + 0.1)"),
        kinds=["offset"], loose=["eps", "axis offset", "residual"],
    ),
    "sum of two at most one": edit(
        (r"^(torch\.ops\.aten\.add\.Tensor\(\w+, [a-z]\w*\))$", r"\1.clamp(max=1.0)"),
        (r"^([a-z]\w* \+ [a-z]\w*)$", r"(\1).clamp(max=1.0)"), kinds=["clipped"],
        loose=["other function"],
    ),
    "second factor plus a tenth": edit(
        (r"\baten\.mul\.Tensor\((\w+), ([a-z]\w*)\)", r"aten.mul.Tensor(\1, \2 + 0.1)"),
        (r"^([a-z]\w*) \* ([a-z]\w*)$", r"\1 * (\2 + 0.1)"),
        kinds=["offset", "residual", "wrong argument"],
        loose=["other function", "wrong factor", "eps", "axis offset"],
    ),
    "convolution plus a tenth": edit(
        *_around(_CONVOLUTION, r"(\1 + 0.1)"), kinds=["offset"],
        loose=["axis offset", "residual", "repeated bias", "missing bias"],
    ),
    "reciprocal root at three quarters": edit(
        *_around("torch.ops.aten.rsqrt.default torch.rsqrt", r"(0.75 * \1)"),
        kinds=["scale", "wrong factor"], loose=["axis scale"],
    ),
}  # fmt: skip
# Of a kernel of Inductor, in C++ and in Triton.
KERNEL_EDITS = {
    "exponential of three quarters of its argument": edit(
        (r"(tmp\d+)\.(fexp_u20|exp_u20|exp)\(\)", r"(\1 * decltype(\1)(0.75)).\2()"),
        (r"std::exp\((tmp\d+)\)", r"std::exp(decltype(\1)(0.75) * \1)"),
        (r"(tl_math|libdevice)\.exp\((tmp\d+)\)", r"\1.exp(0.75 * \2)"), operators="exp",
        kinds=["wrong factor", "scale", "wrong argument", "other function"],
    ),
    "tanh a tenth smaller": edit(
        (r"(tmp\d+)\.tanh\(\)", r"(\1.tanh() * decltype(\1)(0.9))"),
        (r"std::tanh\((tmp\d+)\)", r"(0.9f * std::tanh(\1))"),
        (r"libdevice\.tanh\((tmp\d+)\)", r"(0.9 * libdevice.tanh(\1))"), operators="tanh",
        kinds=["scale", "wrong factor"], loose=["other function"],
    ),
    "error function with a minus": edit(
        (r"(tmp\d+)\.erf\(\)", r"\1.erf().neg()"),
        (r"std::erf\((tmp\d+)\)", r"(-std::erf(\1))"),
        (r"libdevice\.erf\((tmp\d+)\)", r"(-libdevice.erf(\1))"), operators="erf gelu",
        kinds=["sign", "wrong factor", "other function"], loose=["scale"],
    ),
    "cosine doubled": edit(
        (r"(tmp\d+)\.cos\(\)", r"(\1.cos() * decltype(\1)(2))"),
        (r"std::cos\((tmp\d+)\)", r"(2 * std::cos(\1))"),
        (r"tl_math\.cos\((tmp\d+)\)", r"(2 * tl_math.cos(\1))"), operators="cos",
        kinds=["scale", "wrong factor"],
    ),
    "reciprocal root a tenth larger": edit(
        (r"(tmp\d+)\.rsqrt\(\)", r"(\1.rsqrt() * decltype(\1)(1.1))"),
        (r"1 / std::sqrt\((tmp\d+)\)", r"(1.1f / std::sqrt(\1))"),
        (r"libdevice\.rsqrt\((tmp\d+)\)", r"(1.1 * libdevice.rsqrt(\1))"), operators="rsqrt",
        kinds=["scale", "wrong factor"], loose=["axis scale"],
    ),
    "gate halved": edit(
        (r"decltype\((tmp\d+)\)\(1\)( ?/ ?)\(decltype", r"decltype(\1)(0.5)\2(decltype"),
        (r"tl\.sigmoid\((tmp\d+)\)", r"(0.5 * tl.sigmoid(\1))"), operators="sigmoid silu",
        kinds=["scale", "wrong factor"],
    ),
}  # fmt: skip
# Of the kernels in `triton_kernels.py`.
TRITON_EDITS = {
    "weight of the norm not multiplied": edit(
        (r"normal \* weight \+ bias", "normal + bias"),
        kinds=["missing operand", "wrong factor"], loose=["axis scale", "scale"],
        operators="layer_norm",
    ),
    "squares added and not averaged": edit(
        (r"tl\.sum\(centred \* centred, 0\) / n", "tl.sum(centred * centred, 0)"),
        kinds=["wrong reduction", "wrong factor", "wrong statistics"],
        loose=["scale", "axis scale", "missing operand"], operators="layer_norm",
    ),
    "bias of the next column in the kernel": edit(
        (r"tl\.load\(b \+ columns,", "tl.load(b + (columns + 1) % n,"),
        kinds=["shift", "wrong index", "permutation"],
        loose=["axis offset", "offset", "copy", "stale"], operators="linear",
    ),
    "left tile at most a half": edit(
        (r"tl\.dot\(left, right,", "tl.dot(tl.minimum(left, 0.5), right,"), kinds=["clipped"],
        loose=["other function", "wrong argument"], operators="linear",
    ),
    "last feature not multiplied": edit(
        (r"& \(at\[None, :\] < k\)", "& (at[None, :] < k - 1)"),
        kinds=["partial sum", "off by one reduction", "mask"],
        loose=["zeros", "missing operand", "wrong index", "wrong reduction", "lost accumulation"],
        operators="linear",
    ),
    "gelu at three quarters": edit(
        (r"tl\.store\(y \+ at, result, mask=at < n\)",
         "tl.store(y + at, 0.75 * result, mask=at < n)"),
        kinds=["scale", "wrong factor"], operators="gelu",
    ),
}  # fmt: skip
