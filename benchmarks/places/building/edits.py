"""Edits of code for building: of Python, and of kernels in C++ and Triton."""

from __future__ import annotations

from benchmarks.places.calls import edit

# Of Python code: a line of a model, or a statement that torch.fx generated.
EDITS = {
    "plus becomes minus": edit(
        (r"\baten\.add\.Tensor\b", "aten.sub.Tensor"), (r" \+ ", " - "),
        kinds=["sign"], loose=["residual", "offset"],
    ),
    "product becomes sum": edit(
        (r"\baten\.mul\.Tensor\b", "aten.add.Tensor"), (r" \* ", " + "),
        kinds=["other function"],
    ),
    "another axis": edit(
        (r"(softmax|cumsum)(\S*\(\w+, (?:dim ?= ?)?)-1", r"\1\2-2"),
        (r"(torch.softmax\(.*), -1\)", r"\1, -2)"),
        kinds=["wrong axis"], loose=["wrong argument"],
    ),
    "not causal": edit((r"is_causal ?= ?True", "is_causal=False"),
        kinds=["mask", "causality"],
        loose=["wrong argument"]),
    "gelu becomes silu": edit((r"(?<=[._])gelu(?=[.(])", "silu"), kinds=["other function"]),
    "tanh becomes sigmoid": edit((r"(?<=[.])tanh(?=[.(])", "sigmoid"), kinds=["other function"]),
    "silu becomes sigmoid": edit((r"(?<=[._])silu(?=[.(])", "sigmoid"), kinds=["other function"]),
    "a number ten percent larger": edit(
        (r"(?<![\w.])(0\.\d+)(?![\w.])", r"(1.1 * \1)"), kinds=None,
    ),
    "dot product with itself": edit(
        (r"\baten\.(b?mm)\.default\((\w+), \w+\)", r"aten.\1.default(\2, \2)"),
    ),
    "minus becomes plus": edit(
        (r"\baten\.sub\.Tensor\b", "aten.add.Tensor"), (r" - ", " + "),
        kinds=["sign"], loose=["offset"],
    ),
    "quotient becomes product": edit(
        (r"\baten\.div\.Tensor\b", "aten.mul.Tensor"), (r" / ", " * "),
        kinds=["other function"], loose=["scale", "axis scale"],
    ),
    "a large eps": edit(
        (r"(?<![\w.])1e-0?\d+(?!\w)", "0.02"), kinds=["eps"], loose=["axis scale", "offset"],
    ),
    "silu becomes relu": edit((r"(?<=[.])silu(?=[.(])", "relu"), kinds=["other function"]),
    "sigmoid becomes tanh": edit((r"(?<=[.])sigmoid(?=[.(])", "tanh"), kinds=["other function"]),
    "exp becomes expm1": edit(
        (r"(?<=[.])exp(?=[.(])", "expm1"), kinds=["offset", "other function"], loose=["constant"],
    ),
    "relu becomes abs": edit((r"(?<=[.])relu(?=[.(])", "abs"), kinds=["other function"]),
    "cosine becomes sine": edit((r"(?<=[.])cos(?=[.(])", "sin"), kinds=["other function"]),
    "operands exchanged": edit(
        (r"\b(sub\.Tensor|div\.Tensor|mm\.default|bmm\.default)\((\w+), (\w+)\)", r"\1(\3, \2)"),
        (r"\b(\w+) ([-/@]) (\w+)$", r"\3 \2 \1"),
        kinds=["swapped operands"], loose=["sign", "transpose"],
    ),
    "mask the other way round": edit(
        (r"== 0\b", "!= 0"), (r"\beq\.Scalar\b", "ne.Scalar"), kinds=["mask", "other function"],
    ),
    "the next part": edit(
        (r"^(\w+)\[0\]$", r"\1[1]"), kinds=["wrong index", "permutation", "copy", "shift"],
        loose=["stale"],
    ),
}  # fmt: skip
# Of a kernel of Inductor, in C++ and in Triton.
KERNEL_EDITS = {
    "eps larger": edit(
        (r"static_cast<(float|double)>\(1e-(05|06|12)\)", r"static_cast<\1>(0.01)"),
        (r"(?<![\w.])1e-(05|06|12)(?!\w)", "0.01"),
        kinds=["eps"], loose=["offset", "axis scale"], operators="add", constant=1e-05,
    ),
    "erf becomes tanh": edit(
        (r"\.erf\(\)", ".tanh()"), (r"std::erf\(", "std::tanh("),
        (r"libdevice\.erf\(", "libdevice.tanh("), operators="erf",
        kinds=["other function"],
    ),
    "exp becomes its square": edit(
        (r"(tmp\d+)(\.exp\(\)|\.fexp_u20\(\)|\.exp_u20\(\))", r"(\1 + \1)\2"),
        (r"std::exp\((tmp\d+)\)", r"std::exp(\1 + \1)"),
        (r"tl_math\.exp\((tmp\d+)\)", r"tl_math.exp(\1 + \1)"),
        (r"libdevice\.exp\((tmp\d+)\)", r"libdevice.exp(\1 + \1)"), operators="exp sigmoid",
    ),
    "half becomes a third": edit(
        (r"static_cast<float>\(0\.5\)", "static_cast<float>(0.3333)"),
        (r"(?<![\w.])0\.5(?![\w.])", "0.3333"),
        kinds=["scale", "wrong factor"], operators="mul", constant=0.5,
    ),
    "tanh becomes erf": edit(
        (r"\.tanh\(\)", ".erf()"), (r"std::tanh\(", "std::erf("),
        (r"libdevice\.tanh\(", "libdevice.erf("), operators="tanh",
    ),
    "sigmoid of the opposite": edit(
        (r"(tmp\d+)\.neg\(\)\.exp\(\)", r"\1.exp()"), (r"std::exp\(-(tmp\d+)\)", r"std::exp(\1)"),
        (r"tl\.sigmoid\((tmp\d+)\)", r"(1 - tl.sigmoid(\1))"), operators="sigmoid",
    ),
    "rsqrt becomes reciprocal": edit(
        (r"\.rsqrt\(\)", ".reciprocal()"), (r"1 / std::sqrt\((tmp\d+)\)", r"1 / \1"),
        (r"libdevice\.rsqrt\((tmp\d+)\)", r"(1.0 / \1)"), operators="rsqrt",
        kinds=["other function"],
    ),
    "a mean of one more": edit(
        (r"static_cast<float>\((\d\d+)\.0\)", r"static_cast<float>(\1.0 + 1)"),
        (r"(?<![\w.])(\d\d+\.0)(?![\w.])", r"(\1 + 1)"),
        kinds=["off by one reduction", "scale", "wrong factor"], operators="mean var_mean var",
    ),
    "cosine becomes sine": edit(
        (r"\.cos\(\)", ".sin()"), (r"std::cos\(", "std::sin("),
        (r"tl_math\.cos\(", "tl_math.sin("), operators="cos", kinds=["other function"],
    ),
    "root of two rounded": edit(
        (r"0\.7071067811865476", "0.7"), kinds=["scale", "wrong factor"], operators="mul",
        constant=0.7071067811865476,
    ),
}  # fmt: skip
# Of the kernels in `triton_kernels.py`.
TRITON_EDITS = {
    "last column outside the mask": edit(
        (r"inside = at < n\n", "inside = at < n - 1\n"), kinds=["tail", "partial sum"],
        loose=["uninitialised", "zeros"], operators="layer_norm",
    ),
    "eps of another scale": edit(
        (r"tl\.sqrt\(variance \+ eps\)", "tl.sqrt(variance + 1000 * eps)"), kinds=["eps"],
        loose=["axis scale"], operators="layer_norm",
    ),
    "loop over whole tiles": edit(
        (r"range\(0, k, K\)", "range(0, k - K + 1, K)"), kinds=["tail", "partial sum"],
        operators="linear",
    ),
    "tanh for erf": edit(
        (r"libdevice\.erf\(", "libdevice.tanh("), kinds=["approximation", "other function"],
        operators="gelu",
    ),
    "bias of the kernel forgotten": edit(
        (r"total \+= tl\.load\(b [^\n]*\n", "\n"), kinds=["missing bias", "missing operand"],
        loose=["offset", "axis offset"], operators="linear",
    ),
    "variance by one less": edit(
        (r"tl\.sum\(centred \* centred, 0\) / n", "tl.sum(centred * centred, 0) / (n - 1)"),
        kinds=["off by one reduction", "scale", "wrong statistics"], loose=["wrong factor"],
        operators="layer_norm",
    ),
    "last tile overwritten": edit(
        (r"total \+= tl\.dot", "total = tl.dot"), kinds=["partial sum", "tail"],
        loose=["missing operand", "lost accumulation"], operators="linear",
    ),
    "factor of a half forgotten": edit(
        (r"value \* 0\.5 \*", "value *"), kinds=["scale", "wrong factor"], operators="gelu",
    ),
}  # fmt: skip
