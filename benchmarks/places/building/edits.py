"""Edits of code for building: of Python, and of kernels in C++ and Triton."""

from __future__ import annotations

from benchmarks.places.calls import edit

# Of Python code: a line of a model, or a statement that torch.fx generated.
EDITS = {
    "plus becomes minus": edit(
        (r"\baten\.add\.Tensor\b", "aten.sub.Tensor"), (r" \+ ", " - "),
        words="sign, other function, wrong factor; residual, offset",
    ),
    "product becomes sum": edit(
        (r"\baten\.mul\.Tensor\b", "aten.add.Tensor"), (r" \* ", " + "), words="other function",
    ),
    "another axis": edit(
        (r"(softmax|cumsum)(\S*\(\w+, (?:dim ?= ?)?)-1", r"\1\2-2"),
        (r"(torch.softmax\(.*), -1\)", r"\1, -2)"), words="wrong axis, wrong argument",
    ),
    "not causal": edit((r"is_causal ?= ?True", "is_causal=False"), words="mask, wrong argument"),
    "gelu becomes silu": edit((r"(?<=[._])gelu(?=[.(])", "silu"), words="other function"),
    "tanh becomes sigmoid": edit((r"(?<=[.])tanh(?=[.(])", "sigmoid"), words="other function"),
    "silu becomes sigmoid": edit((r"(?<=[._])silu(?=[.(])", "sigmoid"), words="other function"),
    "a number ten percent larger": edit(
        (r"(?<![\w.])(0\.\d+)(?![\w.])", r"(1.1 * \1)"), words=None,
    ),
    "dot product with itself": edit(
        (r"\baten\.(b?mm)\.default\((\w+), \w+\)", r"aten.\1.default(\2, \2)"),
    ),
    "minus becomes plus": edit(
        (r"\baten\.sub\.Tensor\b", "aten.add.Tensor"), (r" - ", " + "),
        words="sign, other function, wrong factor; offset",
    ),
    "quotient becomes product": edit(
        (r"\baten\.div\.Tensor\b", "aten.mul.Tensor"), (r" / ", " * "),
        words="other function; scale, axis scale",
    ),
    "a large eps": edit(
        (r"(?<![\w.])1e-0?\d+(?!\w)", "0.02"), words="eps, offset; axis scale, wrong argument",
    ),
    "silu becomes relu": edit((r"(?<=[.])silu(?=[.(])", "relu"), words="other function"),
    "sigmoid becomes tanh": edit((r"(?<=[.])sigmoid(?=[.(])", "tanh"), words="other function"),
    "exp becomes expm1": edit(
        (r"(?<=[.])exp(?=[.(])", "expm1"), words="offset, other function; constant",
    ),
    "relu becomes abs": edit((r"(?<=[.])relu(?=[.(])", "abs"), words="other function"),
    "cosine becomes sine": edit((r"(?<=[.])cos(?=[.(])", "sin"), words="other function"),
    "operands exchanged": edit(
        (r"\b(sub\.Tensor|div\.Tensor|mm\.default|bmm\.default)\((\w+), (\w+)\)", r"\1(\3, \2)"),
        (r"\b(\w+) ([-/@]) (\w+)$", r"\3 \2 \1"), words="swapped operands; sign, transpose",
    ),
    "mask the other way round": edit(
        (r"== 0\b", "!= 0"), (r"\beq\.Scalar\b", "ne.Scalar"), words="mask, other function",
    ),
    "the next part": edit(
        (r"^(\w+)\[0\]$", r"\1[1]"), words="wrong index, permutation, copy, shift; stale",
    ),
    "factor becomes its inverse": edit(
        (r"(\bmul\.(?:Tensor|Scalar)\(\w+, )(\d+\.\d+)\)", r"\1(1 / \2))"),
        (r" \* (\d+\.\d+)$", r" / \1"), words="scale, wrong factor, wrong argument",
    ),
    "sum becomes mean": edit(
        (r"\baten\.sum\.dim_IntList\b", "aten.mean.dim"), (r"\.sum\(", ".mean("),
        words="other function, scale, wrong factor, wrong reduction",
    ),
    "mean becomes sum": edit(
        (r"\baten\.mean\.dim\b", "aten.sum.dim_IntList"), (r"\.mean\(", ".sum("),
        words="other function, scale, wrong factor, wrong reduction; missing reduction",
    ),
    "largest becomes smallest": edit(
        (r"(?<=[.])amax(?=[.(])", "amin"), (r"(?<=[.])max\(1\)", "min(1)"),
        words="other function; sign, wrong reduction",
    ),
    "sine becomes cosine": edit((r"(?<=[.])sin(?=[.(])", "cos"), words="other function"),
    "rsqrt becomes a root": edit(
        (r"(?<=[.])rsqrt(?=[.(])", "sqrt"), words="other function, missing operand",
    ),
    "square becomes a cube": edit(
        (r"(pow\.Tensor_Scalar\(\w+, )2\)", r"\g<1>3)"), (r"\.pow\(2\)", ".pow(3)"),
        words="other function, wrong argument",
    ),
    "softmax becomes sigmoid": edit(
        (r"aten\._softmax\.default\((\w+), [^)]*\)", r"aten.sigmoid.default(\1)"),
        (r"torch\.softmax\((.*), -1\)", r"torch.sigmoid(\1)"), words="other function",
    ),
    "relu becomes gelu": edit(
        (r"aten\.relu\.default", "aten.gelu.default"),
        (r"torch\.relu\(", "torch.nn.functional.gelu("), words="other function; approximation",
    ),
    "erf becomes tanh": edit(
        (r"(?<=[.])erf(?=[.(])", "tanh"), words="other function, approximation",
    ),
    "approximate gelu": edit(
        (r"(aten\.gelu\.default|torch\._C\._nn\.gelu)\((\w+)\)", r"\1(\2, approximate='tanh')"),
        (r"functional\.gelu\((.*)\)$", r"functional.gelu(\1, approximate='tanh')"),
        words="approximation, other function, wrong argument",
    ),
    "triangle the other way": edit(
        (r"(?<=[.])tril(?=[.(])", "triu"), (r"(?<=[.])triu(?=[.(])", "tril"),
        words="other function, mask, transpose",
    ),
    "rolled to the other side": edit(
        (r"(roll\S*\(\w+, )([\[(])-1, -1([\])])", r"\1\g<2>1, 1\3"),
        words="shift, sign, wrong argument, wrong index; permutation",
    ),
    "half of the second summand": edit(
        (r"(aten\.add\.Tensor\(\w+, [a-z]\w*)\)", r"\1, alpha=0.5)"),
        (r" \+ (\w+)$", r" + 0.5 * \1"), words="wrong factor, wrong argument; residual, offset",
    ),
    "second summand only": edit(
        (r"torch\.ops\.aten\.add\.Tensor\(\w+, ([a-z]\w*)\)", r"torch.ops.aten.clone.default(\1)"),
        (r"^[a-z]\w* \+ ([a-z]\w*)$", r"\1.clone()"),
        words="copy, missing operand, residual; offset",
    ),
    "parts in the other order": edit(
        (r"(cat\S*\([\[(])(\w+), (\w+)([\])])", r"\1\3, \2\4"),
        words="permutation, swapped operands, shift, wrong index",
    ),
    "product rounded": edit(
        (r"^(torch\.ops\.aten\.(?:mm|bmm|addmm)\.default\(.*\))$", r"\1.bfloat16().float()"),
        (r"^(torch\._C\._nn\.linear\(.*\))$", r"\1.bfloat16().float()"), words="precision",
    ),
    "mask that is not strong enough": edit(
        (r"-(?:1e4|10000\.0|inf|3\.40282346638528\d+e\+38)\b", "-1.0"),
        words="mask, wrong argument; constant, offset",
    ),
    "one element further": edit(
        (r"(slice\.Tensor\()(\w+), (\d+), 0, (\d+)\)", r"\1\2.roll(-1, \3), \3, 0, \4)"),
        (r"(select\.int\(\w+, \d+, )0\)", r"\g<1>1)"),
        words="wrong index, shift; wrong argument, permutation",
    ),
    "transposition forgotten": edit(
        (r"torch\.ops\.aten\.(?:t|permute)\.default\((\w+)(?:, \[1, 0\])?\)",
         r"torch.ops.aten.clone.default(\1)"), (r"\.mT\b", ""),
        words="transpose, copy, missing operand; permutation",
    ),
}  # fmt: skip
# Of a kernel of Inductor, in C++ and in Triton.
KERNEL_EDITS = {
    "eps larger": edit(
        (r"static_cast<(float|double)>\(1e-(05|06|12)\)", r"static_cast<\1>(0.01)"),
        (r"(?<![\w.])1e-(05|06|12)(?!\w)", "0.01"), words="eps; offset, axis scale",
        operators="add", constant=1e-05,
    ),
    "erf becomes tanh": edit(
        (r"\.erf\(\)", ".tanh()"), (r"std::erf\(", "std::tanh("),
        (r"libdevice\.erf\(", "libdevice.tanh("), words="other function", operators="erf",
    ),
    "exp becomes its square": edit(
        (r"(tmp\d+)(\.exp\(\)|\.fexp_u20\(\)|\.exp_u20\(\))", r"(\1 + \1)\2"),
        (r"std::exp\((tmp\d+)\)", r"std::exp(\1 + \1)"),
        (r"tl_math\.exp\((tmp\d+)\)", r"tl_math.exp(\1 + \1)"),
        (r"libdevice\.exp\((tmp\d+)\)", r"libdevice.exp(\1 + \1)"), operators="exp sigmoid",
    ),
    "half becomes a third": edit(
        (r"static_cast<float>\(0\.5\)", "static_cast<float>(0.3333)"),
        (r"(?<![\w.])0\.5(?![\w.])", "0.3333"), words="scale, wrong factor", operators="mul",
        constant=0.5,
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
        (r"libdevice\.rsqrt\((tmp\d+)\)", r"(1.0 / \1)"), words="other function", operators="rsqrt",
    ),
    "a mean of one more": edit(
        (r"static_cast<float>\((\d\d+)\.0\)", r"static_cast<float>(\1.0 + 1)"),
        (r"(?<![\w.])(\d\d+\.0)(?![\w.])", r"(\1 + 1)"),
        words="off by one reduction, scale, wrong factor", operators="mean var_mean var",
    ),
    "cosine becomes sine": edit(
        (r"\.cos\(\)", ".sin()"), (r"std::cos\(", "std::sin("), (r"tl_math\.cos\(", "tl_math.sin("),
        words="other function", operators="cos",
    ),
    "root of two rounded": edit(
        (r"0\.7071067811865476", "0.7"), words="scale, wrong factor", operators="mul",
        constant=0.7071067811865476,
    ),
    "rsqrt becomes a root": edit(
        (r"\.rsqrt\(\)", ".sqrt()"), (r"1 / std::sqrt\((tmp\d+)\)", r"std::sqrt(\1)"),
        (r"libdevice\.rsqrt\(", "libdevice.sqrt("), words="other function, missing operand",
        operators="rsqrt",
    ),
    "negative values kept": edit(
        (r"at::vec::clamp_min\((tmp\d+), decltype\(\1\)\(0\)\)", r"\1"),
        (r"(tmp\d+) \* \(\1>0\)", r"\1"),
        (r"triton_helpers\.maximum\(tl\.full\(\[1\], 0, tl\.int32\), (tmp\d+)\)", r"\1"),
        words="copy, missing operand, other function", operators="relu",
    ),
    "exp of base two": edit(
        (r"\.(?:fexp_u20|exp_u20|exp)\(\)", ".exp2()"), (r"std::exp\(", "std::exp2("),
        (r"(?:tl_math|libdevice)\.exp\(", "libdevice.exp2("),
        words="other function, wrong factor; approximation", operators="exp sigmoid",
    ),
    "sum begins at one": edit(
        (r"float (tmp_acc\d+) = 0;", r"float \1 = 1;"),
        words="offset; constant, stale, wrong reduction, residual", operators="sum mean",
    ),
    "difference becomes a sum": edit(
        (r"= decltype\((tmp\d+)\)\(\1 - (tmp\d+)\);", r"= decltype(\1)(\1 + \2);"),
        (r"= (tmp\d+) - (tmp\d+);", r"= \1 + \2;"), (r"= (tmp\d+) - (tmp\d+)\n", r"= \1 + \2\n"),
        words="sign, other function, wrong factor; offset, axis offset", operators="sub",
    ),
}  # fmt: skip
# Of the kernels in `triton_kernels.py`.
TRITON_EDITS = {
    "last column outside the mask": edit(
        (r"inside = at < n\n", "inside = at < n - 1\n"), words="partial sum; uninitialised, zeros",
        operators="layer_norm",
    ),
    "eps of another scale": edit(
        (r"tl\.sqrt\(variance \+ eps\)", "tl.sqrt(variance + 1000 * eps)"), words="eps; axis scale",
        operators="layer_norm",
    ),
    "loop over whole tiles": edit(
        (r"range\(0, k, K\)", "range(0, k - K + 1, K)"), words="partial sum", operators="linear",
    ),
    "tanh for erf": edit(
        (r"libdevice\.erf\(", "libdevice.tanh("), words="approximation, other function",
        operators="gelu",
    ),
    "bias of the kernel forgotten": edit(
        (r"total \+= tl\.load\(b [^\n]*\n", "\n"),
        words="missing bias, missing operand; offset, axis offset", operators="linear",
    ),
    "variance by one less": edit(
        (r"tl\.sum\(centred \* centred, 0\) / n", "tl.sum(centred * centred, 0) / (n - 1)"),
        words="off by one reduction, scale, wrong statistics; wrong factor", operators="layer_norm",
    ),
    "last tile overwritten": edit(
        (r"total \+= tl\.dot", "total = tl.dot"),
        words="partial sum; missing operand, lost accumulation", operators="linear",
    ),
    "factor of a half forgotten": edit(
        (r"value \* 0\.5 \*", "value *"), words="scale, wrong factor", operators="gelu",
    ),
    "mean of the norm not masked": edit(
        (r"tl\.where\(inside, value - mean, 0\.0\)", "value - mean"),
        words="wrong statistics, mask; axis scale, partial sum", operators="layer_norm",
    ),
    "bias of the rows": edit(
        (r"b \+ columns, mask=columns < n, other=0\.0\)\[None, :\]",
         "b + rows, mask=rows < n, other=0.0)[:, None]"),
        words="wrong axis, transpose, wrong index; axis offset, offset", operators="linear",
    ),
    "product in tensor floats": edit(
        (r'input_precision="ieee"', 'input_precision="tf32"'), words="precision",
        operators="linear",
    ),
}  # fmt: skip
