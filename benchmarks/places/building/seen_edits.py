"""Edits that were measured and have been seen: of Python code, and of kernels."""

from __future__ import annotations

from benchmarks.places.calls import edit

# Of Python code: a line of a model, or a statement that torch.fx generated.
EDITS = {
    "mean becomes largest": edit(
        (r"\baten\.mean\.dim\(", "aten.amax.default("), (r"\.mean\(-1", ".amax(-1"),
        words="wrong reduction, other function, wrong statistics; wrong factor",
    ),
    "reciprocal root becomes root": edit(
        (r"(?<=[.])rsqrt(?=[.(])", "sqrt"), words="other function; axis scale, scale",
    ),
    "tanh becomes arctangent": edit(
        (r"(?<=[.])tanh(?=[.(])", "atan"), words="other function, approximation",
    ),
    "sigmoid becomes error function": edit(
        (r"(?<=[.])sigmoid(?=[.(])", "erf"), words="other function; approximation",
    ),
    "relu becomes tanh": edit((r"(?<=[.])relu(?=[.(])", "tanh"), words="other function"),
    "gelu becomes relu": edit(
        (r"\baten\.gelu\.default\((\w+)[^)]*\)", r"aten.relu.default(\1)"),
        (r"\btorch\._C\._nn\.gelu\((\w+)[^)]*\)", r"torch.relu(\1)"),
        (r"\bfunctional\.gelu\(", "functional.relu("),
        words="other function, approximation; clipped",
    ),
    "silu becomes tanh": edit(
        (r"\baten\.silu\.default\(", "aten.tanh.default("),
        (r"\btorch\.nn\.functional\.silu\((\w+)[^)]*\)", r"torch.tanh(\1)"), words="other function",
    ),
    "sum becomes maximum": edit(
        (r"\baten\.add\.Tensor\((\w+), ([a-z]\w*)\)", r"aten.maximum.default(\1, \2)"),
        (r"^(\w+) \+ ([a-z]\w*)$", r"torch.maximum(\1, \2)"),
        words="other function; missing operand, residual, clipped",
    ),
    "first operand twice": edit(
        (r"\baten\.mul\.Tensor\((\w+), ([a-z]\w*)\)", r"aten.mul.Tensor(\1, \1)"),
        (r"^(\w+) \* ([a-z]\w*)$", r"\1 * \1"),
        words="wrong index, other function, missing operand; stale, copy, wrong argument, "
        "swapped operands",
    ),
    "exponential to the base of two": edit(
        (r"(?<=[.])exp(?=[.(])", "exp2"),
        words="other function, wrong factor; approximation, scale",
    ),
    "square becomes cube": edit(
        (r"(pow\.Tensor_Scalar\(\w+, )2\)", r"\g<1>3)"), (r"\.pow\(2\)", ".pow(3)"),
        words="other function, wrong argument; wrong factor",
    ),
    "square without a transposition": edit(
        (r"\baten\.t\.default\((\w+)\)", r"aten.clone.default(\1)"),
        words="transpose, copy, missing operand; permutation, swapped operands",
    ),
    "the other half": edit(
        (r"slice\.Tensor\((\w+), (\d), 0, (\d+)\)",
         r"slice.Tensor(\1, \2, \3, 9223372036854775807)"),
        (r"slice\(None, (\d+), None\)\)\]", r"slice(\1, None, None))]"),
        (r"\[\.\.\., :(\d+)\]", r"[..., \1:]"),
        words="wrong index, shift; permutation, swapped operands, wrong argument",
    ),
    "quotient rounded down": edit(
        (r"\baten\.div\.Tensor\((\w+), ([\w.]+)\)",
         r"aten.div.Tensor_mode(\1, \2, rounding_mode='floor')"),
        (r"^(\w+) / ([\w.]+)$", r"torch.div(\1, \2, rounding_mode='floor')"),
        (r"^(\w+) / (\w+\.\w+\([^()]*\))$", r"torch.div(\1, \2, rounding_mode='floor')"),
        words="other function; zeros, precision, approximation, wrong argument",
    ),
    "opposite becomes absolute value": edit(
        (r"(?<=[.])neg(?=[.(])", "abs"), (r"^-(\w+)$", r"abs(\1)"), words="other function, sign",
    ),
    "last instead of first": edit(
        (r"(select\.int\(\w+, \d+, )0\)", r"\1-1)"),
        (r"\[\(slice\(None, None, None\), 0\)\]", "[(slice(None, None, None), -1)]"),
        words="wrong index, wrong argument; shift, copy",
    ),
    "sine becomes its argument": edit(
        (r"\baten\.(sin|tanh)\.default\((\w+)\)", r"aten.clone.default(\2)"),
        (r"^(\w+)\.sin\(\)$", r"\1.clone()"),
        words="copy, other function, approximation; missing operand",
    ),
    "number cut to two digits": edit((r"(?<![\w.])(\d+\.\d\d)\d{2,}(?![\w.])", r"\1"), words=None),
    "half of the gradient's rows": edit(
        (r"(sum\.dim_IntList\()(\w+), \[0\]", r"\1\2[::2], [0]"),
        words="partial sum, lost accumulation, one rank's part; missing operand, wrong index, "
        "wrong reduction",
    ),
}  # fmt: skip
# Of a kernel of Inductor, in C++ and in Triton.
KERNEL_EDITS = {
    "square loses a factor": edit(
        (r"\b(tmp\d+) \* \1\b", r"\1"), words="other function, copy, missing operand",
        operators="pow",
    ),
    "tanh left out": edit(
        (r"(tmp\d+)\.tanh\(\)", r"\1"), (r"std::tanh\((tmp\d+)\)", r"(\1)"),
        (r"libdevice\.tanh\((tmp\d+)\)", r"(\1)"),
        words="copy, missing operand, other function; approximation", operators="tanh",
    ),
    "root left out": edit(
        (r"(tmp\d+)\.sqrt\(\)", r"\1"), (r"(?<!1 / )std::sqrt\((tmp\d+)\)", r"(\1)"),
        (r"(?:libdevice\.sqrt|tl\.sqrt_rn|tl_math\.sqrt)\((tmp\d+)\)", r"(\1)"),
        words="other function, copy, missing operand; axis scale, scale, wrong statistics",
        operators="sqrt std",
    ),
    "sigmoid with two": edit(
        (r"\(decltype\((tmp\d+)\)\(1\) \+ (\w+)\.neg\(\)\.exp\(\)\)",
         r"(decltype(\1)(2) + \2.neg().exp())"), (r"\(1 \+ std::exp\(-", "(2 + std::exp(-"),
        (r"tl\.sigmoid\((tmp\d+)\)", r"(1.0 / (2.0 + tl.exp(-\1)))"),
        words="other function, approximation; scale, wrong factor, offset", operators="sigmoid",
    ),
    "logarithm of one more": edit(
        (r"(tmp\d+)\.log\(\)", r"\1.log1p()"), (r"std::log\(", "std::log1p("),
        (r"tl_math\.log\(", "libdevice.log1p("),
        words="other function; offset, approximation, axis offset", operators="log",
    ),
    "comparison turned round": edit(
        (r"\b(tmp\d+) > (tmp\d+)\b", r"\1 < \2"),
        words="mask, other function, swapped operands; sign", operators="gt",
    ),
    "a tenth becomes a fifth": edit(
        (r"static_cast<float>\(0\.1\)", "static_cast<float>(0.2)"),
        (r"(?<![\w.])0\.1(?![\w.])", "0.2"), words="scale, wrong factor, wrong argument",
        operators="mul", constant=0.1,
    ),
    "four becomes two": edit(
        (r"static_cast<float>\(4\.0\)", "static_cast<float>(2.0)"),
        (r"(?<![\w.])4\.0(?![\w.])", "2.0"), words="scale, wrong factor, wrong argument",
        operators="mul div", constant=4.0,
    ),
    "maximum becomes minimum": edit(
        (r"\bat::vec::clamp_min\(", "at::vec::clamp_max("),
        (r"\bstd::max\((tmp\d+), (decltype\(tmp\d+\)\(0\))\)", r"std::min(\1, \2)"),
        (r"triton_helpers\.maximum\(", "triton_helpers.minimum("),
        words="other function, clipped, sign", operators="relu",
    ),
}  # fmt: skip
# Of the kernels in `triton_kernels.py`.
TRITON_EDITS = {
    "mean of the kernel not subtracted": edit(
        (r"tl\.where\(inside, value - mean, 0\.0\)", "tl.where(inside, value, 0.0)"),
        words="missing operand, wrong statistics, other function; axis offset",
        operators="layer_norm",
    ),
    "absolute deviations": edit(
        (r"tl\.sum\(centred \* centred, 0\)", "tl.sum(tl.abs(centred), 0)"),
        words="wrong statistics, other function, wrong reduction; axis scale, scale",
        operators="layer_norm",
    ),
    "weight of the kernel plus one": edit(
        (r"normal \* weight \+ bias", "normal * (weight + 1) + bias"),
        words="wrong factor, scale, axis scale; residual, offset", operators="layer_norm",
    ),
    "weight in the other layout": edit(
        (r"w \+ columns\[None, :\] \* k \+ at\[:, None\]",
         "w + at[:, None] * n + columns[None, :]"),
        words="transpose, permutation, wrong index; shift", operators="linear",
    ),
    "bias by rows": edit(
        (r"tl\.load\(b \+ columns, mask=columns < n, other=0\.0\)\[None, :\]",
         "tl.load(b + rows, mask=rows < n, other=0.0)[:, None]"),
        words="wrong axis, wrong index, transpose; axis offset, offset", operators="linear",
    ),
    "product in ten bits": edit(
        (r'input_precision="ieee"', 'input_precision="tf32"'), words="precision",
        operators="linear",
    ),
    "argument of erf not halved": edit(
        (r"0\.7071067811865476", "1.0"),
        words="other function, wrong factor, approximation; scale, missing operand",
        operators="gelu",
    ),
    "last block not launched": edit(
        (r"triton\.cdiv\(x\.numel\(\), 128\)", "max(x.numel() // 128, 1)"),
        words="zeros, uninitialised; mask, constant", operators="gelu",
    ),
    "sign of erf": edit(
        (r"1\.0 \+ libdevice\.erf", "1.0 - libdevice.erf"),
        words="sign, other function; wrong factor", operators="gelu",
    ),
}  # fmt: skip
