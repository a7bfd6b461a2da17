"""Edits that were measured fifth and have been seen: of Python code, and of kernels."""

from __future__ import annotations

from benchmarks.places.calls import edit

# Of Python code: a line of a model, or a statement that torch.fx generated.
EDITS = {
    "relu becomes silu": edit(
        (r"\baten\.relu\.default\(", "aten.silu.default("),
        (r"\bfunctional\.relu\(", "functional.silu("),
        (r"\btorch\.relu\(", "torch.nn.functional.silu("), words="other function; approximation",
    ),
    "gelu becomes elu": edit(
        (r"\baten\.gelu\.default\((\w+)[^)]*\)", r"aten.elu.default(\1)"),
        (r"\btorch\._C\._nn\.gelu\((\w+)[^)]*\)", r"torch.nn.functional.elu(\1)"),
        words="other function; approximation",
    ),
    "sigmoid becomes a half": edit(
        (r"\baten\.sigmoid\.default\((\w+)\)", r"aten.full_like.default(\1, 0.5)"),
        (r"\btorch\.sigmoid\((\w+)\)", r"torch.full_like(\1, 0.5)"),
        words="constant, missing operand; other function, approximation",
    ),
    "tanh becomes relu": edit(
        (r"\baten\.tanh\.default\(", "aten.relu.default("), (r"\btorch\.tanh\(", "torch.relu("),
        words="other function; clipped, approximation",
    ),
    "softmax squared": edit(
        (r"\baten\._softmax\.default\(([^()]*)\)", r"aten._softmax.default(\1).square()"),
        (r"\bfunctional\.softmax\(([^()]*)\)", r"functional.softmax(\1).square()"),
        (r"\btorch\.softmax\(([^()]*)\)", r"torch.softmax(\1).square()"),
        words="other function; wrong factor",
    ),
    "norm doubled": edit(
        (r"^(torch\.nn\.functional\.layer_norm\(.*\))$", r"2 * \1"),
        (r"^(self\.(?:norm|before|between)\([^()]*\))$", r"2 * \1"),
        words="scale, wrong factor; axis scale",
    ),
    "norm of the limited input": edit(
        (r"\bfunctional\.layer_norm\((\w+), ", r"functional.layer_norm(\1.clamp(-0.5, 0.5), "),
        (r"\baten\.native_layer_norm\.default\((\w+), ",
         r"aten.native_layer_norm.default(\1.clamp(-0.5, 0.5), "),
        (r"\bself\.(norm|before)\((\w+)\)", r"self.\1(\2.clamp(-0.5, 0.5))"),
        words="clipped; other function, wrong statistics",
    ),
    "weight of the layer rounded": edit(
        (r"\b_nn\.linear\((\w+), (\w+)", r"_nn.linear(\1, \2.bfloat16().to(\2.dtype)"),
        (r"\baten\.addmm\.default\((\w+), (\w+), (\w+)",
         r"aten.addmm.default(\1, \2, \3.bfloat16().to(\3.dtype)"),
        words="precision; approximation",
    ),
    "bias of the layer plus one": edit(
        (r"\b_nn\.linear\((\w+), (\w+), (\w+)\)", r"_nn.linear(\1, \2, 1 + \3)"),
        (r"\baten\.addmm\.default\((\w+), ", r"aten.addmm.default(1 + \1, "),
        words="offset; axis offset, wrong argument, residual",
    ),
    "values of the attention doubled": edit(
        (r"(scaled_dot_product_attention\(\w+, \w+, )(\w+)", r"\1 2 * \2"),
        (r"(_flash_attention_for_cpu\.default\(\w+, \w+, )(\w+)", r"\1 2 * \2"),
        words="scale, wrong factor; wrong argument",
    ),
    "keys of the attention negated": edit(
        (r"(scaled_dot_product_attention\(\w+, )(\w+)", r"\1-\2"),
        (r"(_flash_attention_for_cpu\.default\(\w+, )(\w+)", r"\1-\2"),
        words="sign, wrong factor, wrong argument; scale, other function",
    ),
    "values of the attention limited": edit(
        (r"(scaled_dot_product_attention\(\w+, \w+, )(\w+)", r"\1\2.clamp(-0.2, 0.2)"),
        (r"(_flash_attention_for_cpu\.default\(\w+, \w+, )(\w+)", r"\1\2.clamp(-0.2, 0.2)"),
        words="clipped; other function",
    ),
    "rows of the table limited": edit(
        (r"^(torch\.nn\.functional\.embedding\(.*\))$", r"\1.clamp(max=0.0)"),
        (r"^(torch\.ops\.aten\.embedding\.default\(.*\))$", r"\1.clamp(max=0.0)"),
        (r"^(self\.table\(\w+\))$", r"\1.clamp(max=0.0)"),
        words="clipped, zeros; other function, mask",
    ),
    "mean a tenth smaller": edit(
        (r"\baten\.mean\.dim\(([^()]*)\)", r"aten.mean.dim(\1).mul(0.9)"),
        (r"(\.mean\(-1, keepdim ?= ?True\))", r"\1.mul(0.9)"),
        (r"(\.mean\(\(2, 3\)\))", r"\1.mul(0.9)"),
        words="scale, wrong factor; wrong statistics, axis scale",
    ),
    "sum of exponentials for the sum": edit(
        (r"\baten\.sum\.dim_IntList\(", "aten.logsumexp.default("),
        (r"\.sum\((?=-?1\b)", ".logsumexp("), words="other function, wrong reduction",
    ),
    "largest plus one": edit(
        (r"\baten\.amax\.default\(([^()]*)\)", r"aten.amax.default(\1).add(1.0)"),
        (r"(\.amax\(-1, keepdim ?= ?True\))", r"\1.add(1.0)"),
        words="offset; axis offset, other function, eps",
    ),
    "sum becomes a length": edit(
        (r"\baten\.add\.Tensor\((\w+), ([a-z]\w*)\)", r"aten.hypot.default(\1, \2)"),
        (r"^(\w+) \+ ([a-z]\w*)$", r"torch.hypot(\1, \2)"), words="other function; sign",
    ),
    "sum negated": edit(
        (r"^torch\.ops\.aten\.add\.Tensor\((\w+), ([a-z]\w*)\)$", r"-(\1 + \2)"),
        (r"^(\w+) \+ ([a-z]\w*)$", r"-(\1 + \2)"), words="sign, scale, wrong factor",
    ),
    "product negated": edit(
        (r"^torch\.ops\.aten\.mul\.Tensor\((\w+), ([a-z]\w*)\)$", r"-(\1 * \2)"),
        (r"^(\w+) \* ([a-z]\w*)$", r"-(\1 * \2)"),
        (r"^(\w+) \* (torch\.sigmoid\(\w+\))$", r"-(\1 * \2)"), words="sign, scale, wrong factor",
    ),
    "product becomes the smaller": edit(
        (r"\baten\.mul\.Tensor\((\w+), ([a-z]\w*)\)", r"aten.minimum.default(\1, \2)"),
        (r"^(\w+) \* ([a-z]\w*)$", r"torch.minimum(\1, \2)"),
        words="other function; missing operand, clipped",
    ),
    "difference squared": edit(
        (r"^torch\.ops\.aten\.sub\.Tensor\((\w+), ([a-z]\w*)\)$", r"(\1 - \2).square()"),
        (r"^(\w+) - ([a-z]\w*)$", r"(\1 - \2).square()"),
        (r"^\((\w+) - (\w+)\) ", r"(\1 - \2).square() "),
        words="other function; sign, wrong factor",
    ),
    "quotient at most a half": edit(
        (r"\baten\.div\.Tensor\((\w+), ([a-z]\w*)\)",
         r"aten.clamp.default(\1 / \2, max=0.5)"),
        (r"^(\w+) / ([a-z]\w*)$", r"(\1 / \2).clamp(max=0.5)"),
        words="clipped; other function, wrong argument",
    ),
    "quotient of magnitudes": edit(
        (r"\baten\.div\.Tensor\((\w+), ([a-z]\w*)\)", r"aten.abs.default(\1 / \2)"),
        (r"^(\w+) / ([a-z]\w*)$", r"(\1 / \2).abs()"), (r"\((\w+) / (\w+)\)", r"((\1 / \2).abs())"),
        words="sign, other function; wrong factor",
    ),
    "square of one more": edit(
        (r"\baten\.pow\.Tensor_Scalar\((\w+), 2\)", r"aten.square.default(1 + \1)"),
        (r"\b(\w+)\.pow\(2\)", r"(1 + \1).pow(2)"),
        (r"\btorch\.square\((\w+)\)",
                                                     r"torch.square(1 + \1)"),
        words="offset, other function; wrong argument",
    ),
    "reciprocal root halved": edit(
        (r"\baten\.rsqrt\.default\((\w+)\)", r"aten.rsqrt.default(\1).mul(0.5)"),
        (r"\btorch\.rsqrt\(([^()]*)\)", r"torch.rsqrt(\1).mul(0.5)"),
        words="scale, wrong factor; axis scale",
    ),
    "exponential becomes softplus": edit(
        (r"\baten\.exp\.default\(", "aten.softplus.default("),
        (r"\btorch\.exp\(", "torch.nn.functional.softplus("), words="other function; approximation",
    ),
    "exponential at most a half": edit(
        (r"\baten\.exp\.default\((\w+)\)", r"aten.exp.default(\1).clamp(max=0.5)"),
        (r"\btorch\.exp\(([^()]*)\)", r"torch.exp(\1).clamp(max=0.5)"),
        words="clipped; other function, overflow",
    ),
    "cosine without a sign": edit(
        (r"\baten\.cos\.default\((\w+)\)", r"aten.cos.default(\1).abs()"),
        (r"\b(\w+)\.cos\(\)", r"\1.cos().abs()"), words="sign, other function",
    ),
    "sine becomes the tangent": edit(
        (r"\baten\.sin\.default\(", "aten.tan.default("), (r"\b(\w+)\.sin\(\)", r"\1.tan()"),
        words="other function; approximation",
    ),
    "joined parts negated": edit(
        (r"^(torch\.cat\(.*\))$", r"-\1"), (r"^(torch\.ops\.aten\.cat\.default\(.*\))$", r"-\1"),
        words="sign, scale, wrong factor",
    ),
    "second branch always": edit(
        (r"\baten\.where\.self\((\w+), (\w+), (\w+)\)", r"aten.add.Tensor(0 * \2, \3)"),
        (r"^torch\.where\((\w+), (\w+), (\w+)\)$", r"(0 * \2 + \3)"),
        (r"\btorch\.where\(\w+ > 0, \w+, ([^()]*)\)", r"(\1)"),
        words="mask, copy, missing operand; other function, wrong argument",
    ),
    "running sum halved": edit(
        (r"\btorch\.cumsum\(([^()]*)\)", r"torch.cumsum(\1).mul(0.5)"),
        (r"\baten\.cumsum\.default\(([^()]*)\)", r"aten.cumsum.default(\1).mul(0.5)"),
        words="scale, wrong factor",
    ),
    "image negated": edit(
        (r"\bconv2d\((\w+), ", r"conv2d(-\1, "),
        (r"\baten\.convolution\.default\((\w+), ", r"aten.convolution.default(-\1, "),
        words="sign, wrong factor; scale, wrong argument",
    ),
    "filters rounded": edit(
        (r"\bconv(1|2)d\((\w+), (\w+), ", r"conv\1d(\2, \3.bfloat16().to(\3.dtype), "),
        (r"\baten\.convolution\.default\((\w+), (\w+), ",
         r"aten.convolution.default(\1, \2.bfloat16().to(\2.dtype), "),
        words="precision; approximation",
    ),
    "sum over letters halved": edit(
        (r"^(torch\.functional\.einsum\(.*\))$", r"0.5 * \1"),
        (r"^(torch\.einsum\(.*\))$", r"0.5 * \1"), words="scale, wrong factor",
    ),
    "matrix product negated": edit(
        (r"^(torch\.ops\.aten\.bmm\.default\(\w+, \w+\))$", r"-\1"),
        (r"^(torch\.(?:matmul|bmm)\(\w+, \w+\))$", r"-\1"), (r"^(\w+ @ \w+)$", r"-(\1)"),
        words="sign, scale, wrong factor",
    ),
    "matrix product three times": edit(
        (r"^(torch\.ops\.aten\.mm\.default\(\w+, \w+\))$", r"3 * \1"),
        (r"^(torch\._C\._nn\.linear\(\w+, \w+, None\))$", r"3 * \1"), words="scale, wrong factor",
    ),
    "no gradient behind the activation": edit(
        (r"(\baten\.(?:gelu|silu|tanh|sigmoid|threshold)_backward\.default\([^()]*\))",
         r"\1.mul(0)"), words="zeros, constant, missing operand; wrong factor, scale",
    ),
}  # fmt: skip
# Of a kernel of Inductor, in C++ and in Triton.
KERNEL_EDITS = {
    "exponential plus a tenth": edit(
        (r"(?<!neg\(\))\.(fexp_u20|exp_u20|exp)\(\)", r".\1() + 0.1f"),
        (r"std::exp\((tmp\d+)\)", r"(0.1f + std::exp(\1))"),
        (r"(tl_math|libdevice)\.exp\((tmp\d+)\)", r"(0.1 + \1.exp(\2))"),
        words="offset, other function; eps, approximation", operators="exp",
    ),
    "tanh at most a half": edit(
        (r"(tmp\d+)\.tanh\(\)", r"at::vec::minimum(\1.tanh(), decltype(\1)(0.5))"),
        (r"std::tanh\((tmp\d+)\)", r"std::min(std::tanh(\1), decltype(\1)(0.5))"),
        (r"libdevice\.tanh\((tmp\d+)\)", r"triton_helpers.minimum(libdevice.tanh(\1), 0.5)"),
        words="clipped; other function", operators="tanh",
    ),
    "error function a tenth larger": edit(
        (r"(tmp\d+)\.erf\(\)", r"(\1.erf() * decltype(\1)(1.1))"),
        (r"std::erf\((tmp\d+)\)", r"(1.1f * std::erf(\1))"),
        (r"libdevice\.erf\((tmp\d+)\)", r"(1.1 * libdevice.erf(\1))"),
        words="wrong factor, scale, other function, approximation", operators="erf gelu",
    ),
    "logarithm of twice its argument": edit(
        (r"(tmp\d+)\.log\(\)", r"(\1 * decltype(\1)(2)).log()"),
        (r"std::log\((tmp\d+)\)", r"std::log(2 * \1)"),
        (r"tl_math\.log\((tmp\d+)\)", r"tl_math.log(2 * \1)"),
        words="offset, wrong factor, scale, other function; wrong argument", operators="log",
    ),
    "reciprocal root doubled": edit(
        (r"(tmp\d+)\.rsqrt\(\)", r"(\1.rsqrt() * decltype(\1)(2))"),
        (r"1 / std::sqrt\((tmp\d+)\)", r"2 / std::sqrt(\1)"),
        (r"libdevice\.rsqrt\((tmp\d+)\)", r"(2 * libdevice.rsqrt(\1))"),
        words="scale, wrong factor; axis scale", operators="rsqrt",
    ),
    "cosine three quarters": edit(
        (r"(tmp\d+)\.cos\(\)", r"(\1.cos() * decltype(\1)(0.75))"),
        (r"std::cos\((tmp\d+)\)", r"(0.75f * std::cos(\1))"),
        (r"tl_math\.cos\((tmp\d+)\)", r"(0.75 * tl_math.cos(\1))"), words="scale, wrong factor",
        operators="cos",
    ),
    "sine with a minus": edit(
        (r"(tmp\d+)\.sin\(\)", r"\1.sin().neg()"), (r"std::sin\((tmp\d+)\)", r"(-std::sin(\1))"),
        (r"tl_math\.sin\((tmp\d+)\)", r"(-tl_math.sin(\1))"), words="sign, scale, wrong factor",
        operators="sin",
    ),
    "magnitude one and a half times": edit(
        (r"(tmp\d+)\.abs\(\)", r"(\1.abs() * decltype(\1)(1.5))"),
        (r"std::abs\((tmp\d+)\)", r"(1.5f * std::abs(\1))"),
        (r"tl_math\.abs\((tmp\d+)\)", r"(1.5 * tl_math.abs(\1))"), words="scale, wrong factor",
        operators="abs",
    ),
    "root of a half of its argument": edit(
        (r"(tmp\d+)\.sqrt\(\)", r"(\1 * decltype(\1)(0.5)).sqrt()"),
        (r"(?<!1 / )std::sqrt\((tmp\d+)\)", r"std::sqrt(0.5f * \1)"),
        (r"(libdevice\.sqrt|tl\.sqrt_rn|tl_math\.sqrt)\((tmp\d+)\)", r"\1(0.5 * \2)"),
        words="scale, wrong factor; wrong argument", operators="sqrt std",
    ),
    "terms of a sum halved": edit(
        (r"(tmp_acc\d+_vec) = \1 \+ (tmp\d+);", r"\1 = \1 + \2 * decltype(\2)(0.5);"),
        (r"(tmp_acc\d+) = \1 \+ (tmp\d+);", r"\1 = \1 + \2 * decltype(\2)(0.5);"),
        (r"(tl\.sum\(_?tmp\d+, 1\))", r"(0.5 * \1)"),
        words="scale, wrong factor; wrong reduction, wrong statistics", operators="sum mean",
    ),
    "rounded and one added": edit(
        (r"(tmp\d+)\.round\(\)", r"(\1.round() + decltype(\1)(1))"),
        (r"std::nearbyint\((tmp\d+)\)", r"(1 + std::nearbyint(\1))"),
        (r"libdevice\.nearbyint\((tmp\d+)\)", r"(1 + libdevice.nearbyint(\1))"),
        words="offset, other function", operators="round",
    ),
}  # fmt: skip
# Of the kernels in `triton_kernels.py`.
TRITON_EDITS = {
    "deviation plus one": edit(
        (r"centred / tl\.sqrt\(variance \+ eps\)", "centred / (1.0 + tl.sqrt(variance + eps))"),
        words="offset, wrong statistics, eps, other function; axis scale, scale",
        operators="layer_norm",
    ),
    "mean less the value": edit(
        (r"tl\.where\(inside, value - mean, 0\.0\)", "tl.where(inside, mean - value, 0.0)"),
        words="sign, swapped operands, wrong factor; scale, other function", operators="layer_norm",
    ),
    "weight added for the bias": edit(
        (r"bias = tl\.load\(b \+ at", "bias = tl.load(w + at"),
        words="swapped operands, copy, wrong index; missing bias, missing operand, "
        "axis offset, offset, residual", operators="layer_norm",
    ),
    "variance doubled": edit(
        (r"tl\.sum\(centred \* centred, 0\) / n", "2.0 * tl.sum(centred * centred, 0) / n"),
        words="wrong factor, wrong statistics, scale; axis scale", operators="layer_norm",
    ),
    "result of the norm in half": edit(
        (r"result = normal \* weight \+ bias",
         "result = (normal * weight + bias).to(tl.float16).to(tl.float32)"),
        words="precision; approximation", operators="layer_norm",
    ),
    "columns stored one further": edit(
        (r"y \+ rows\[:, None\] \* n \+ columns\[None, :\]",
         "y + rows[:, None] * n + (columns[None, :] + 1) % n"),
        words="shift, wrong index, permutation", operators="linear",
    ),
    "left tile in bfloat16": edit(
        (r"tl\.dot\(left, right", "tl.dot(left.to(tl.bfloat16).to(tl.float32), right"),
        words="precision; approximation", operators="linear",
    ),
    "total stored twice as large": edit(
        (r"total, mask=wanted", "2.0 * total, mask=wanted"),
        words="scale, wrong factor; doubled reduction", operators="linear",
    ),
    "half added to the error function": edit(
        (r"\(1\.0 \+ libdevice", "(0.5 + libdevice"),
        words="other function, wrong factor; offset, wrong argument", operators="gelu",
    ),
    "gelu with a minus": edit(
        (r"tl\.store\(y \+ at, result, mask=at < n\)", "tl.store(y + at, -result, mask=at < n)"),
        words="sign, scale, wrong factor", operators="gelu",
    ),
    "gelu of the neighbour": edit(
        (r"value = tl\.load\(x \+ at, mask=at < n\)",
         "value = tl.load(x + (at ^ 1), mask=(at ^ 1) < n, other=0.0)"),
        words="wrong index, permutation, shift", operators="gelu",
    ),
}  # fmt: skip
