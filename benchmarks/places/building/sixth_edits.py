"""Edits that were measured sixth and have been seen: of Python code, and of kernels."""

from __future__ import annotations

from benchmarks.places.calls import edit

# Of Python code: a line of a model, or a statement that torch.fx generated.
EDITS = {
    "relu becomes sigmoid": edit(
        (r"\baten\.relu\.default\(", "aten.sigmoid.default("),
        (r"\b(?:functional|torch)\.relu\(", "torch.sigmoid("),
        words="other function; approximation",
    ),
    "gelu halved": edit(
        (r"^(torch\.ops\.aten\.gelu\.default\(.*\))$", r"0.5 * \1"),
        (r"^(torch\._C\._nn\.gelu\(.*\))$", r"0.5 * \1"),
        (r"^(functional\.gelu\(.*\))$", r"0.5 * \1"), words="scale, wrong factor",
    ),
    "silu with a minus": edit(
        (r"^(torch\.ops\.aten\.silu\.default\(.*\))$", r"-\1"),
        (r"^(torch\.nn\.functional\.silu\(.*\))$", r"-\1"), words="sign, scale, wrong factor",
    ),
    "sigmoid plus a tenth": edit(
        (r"\baten\.sigmoid\.default\((\w+)\)", r"aten.sigmoid.default(\1).add(0.1)"),
        (r"\btorch\.sigmoid\((\w+)\)", r"torch.sigmoid(\1).add(0.1)"),
        words="offset; other function, axis offset, eps",
    ),
    "tanh of the magnitude": edit(
        (r"\baten\.tanh\.default\((\w+)\)", r"aten.tanh.default(abs(\1))"),
        (r"\btorch\.tanh\((\w+)\)", r"torch.tanh(abs(\1))"),
        words="sign, other function; wrong argument",
    ),
    "softmax plus a hundredth": edit(
        (r"\baten\._softmax\.default\(([^()]*)\)", r"aten._softmax.default(\1).add(0.01)"),
        (r"\bfunctional\.softmax\(([^()]*)\)", r"functional.softmax(\1).add(0.01)"),
        (r"\btorch\.softmax\(([^()]*)\)", r"torch.softmax(\1).add(0.01)"),
        words="offset, eps; other function, axis offset",
    ),
    "softmax of limited scores": edit(
        (r"\baten\._softmax\.default\((\w+), ", r"aten._softmax.default(\1.clamp(-0.1, 0.1), "),
        (r"\bfunctional\.softmax\((\w+), ", r"functional.softmax(\1.clamp(-0.1, 0.1), "),
        (r"\btorch\.softmax\((\w+), ", r"torch.softmax(\1.clamp(-0.1, 0.1), "),
        words="clipped; other function, wrong argument, mask",
    ),
    "norm plus one": edit(
        (r"^(torch\.nn\.functional\.layer_norm\(.*\))$", r"1 + \1"),
        (r"^(self\.(?:norm|before|between|last)\([^()]*\))$", r"1 + \1"),
        words="offset, axis offset; other function",
    ),
    "norm at most one": edit(
        (r"^(torch\.nn\.functional\.layer_norm\(.*\))$", r"\1.clamp(max=1.0)"),
        (r"^(self\.(?:norm|before|between)\([^()]*\))$", r"\1.clamp(max=1.0)"),
        words="clipped; other function",
    ),
    "norm of the features from the end": edit(
        (r"\bfunctional\.layer_norm\((\w+), ", r"functional.layer_norm(\1.flip(-1), "),
        (r"\baten\.native_layer_norm\.default\((\w+), ",
         r"aten.native_layer_norm.default(\1.flip(-1), "),
        (r"\bself\.(norm|before)\((\w+)\)", r"self.\1(\2.flip(-1))"),
        words="permutation, wrong index; shift, wrong argument",
    ),
    "weight of the layer three halves": edit(
        (r"\b_nn\.linear\((\w+), (\w+)", r"_nn.linear(\1, 1.5 * \2"),
        (r"\baten\.addmm\.default\((\w+), (\w+), (\w+)", r"aten.addmm.default(\1, \2, 1.5 * \3"),
        words="wrong factor, scale; wrong argument",
    ),
    "input of the layer plus a tenth": edit(
        (r"\b_nn\.linear\((\w+), ", r"_nn.linear(\1 + 0.1, "),
        (r"\baten\.addmm\.default\((\w+), (\w+), ", r"aten.addmm.default(\1, \2 + 0.1, "),
        words="offset; axis offset, wrong argument, residual",
    ),
    "input of the layer without negative values": edit(
        (r"\b_nn\.linear\((\w+), ", r"_nn.linear(\1.relu(), "),
        (r"\baten\.mm\.default\((\w+), ", r"aten.mm.default(\1.relu(), "),
        words="clipped, other function, zeros; mask, wrong argument, sign, partial sum",
    ),
    "query of the attention rounded": edit(
        (r"(scaled_dot_product_attention\()(\w+)", r"\1\2.bfloat16().to(\2.dtype)"),
        (r"(_flash_attention_for_cpu\.default\()(\w+)", r"\1\2.bfloat16().to(\2.dtype)"),
        words="precision; approximation",
    ),
    "keys of the attention one position late": edit(
        (r"(scaled_dot_product_attention\(\w+, )(\w+)", r"\1\2.roll(1, -2)"),
        (r"(_flash_attention_for_cpu\.default\(\w+, )(\w+)", r"\1\2.roll(1, -2)"),
        words="shift, wrong index, permutation; wrong argument, copy",
    ),
    "rows of the table doubled": edit(
        (r"^(torch\.nn\.functional\.embedding\(.*\))$", r"2 * \1"),
        (r"^(torch\.ops\.aten\.embedding\.default\(.*\))$", r"2 * \1"),
        (r"^(self\.table\(\w+\))$", r"2 * \1"), words="scale, wrong factor",
    ),
    "every word is the first": edit(
        (r"\bfunctional\.embedding\((\w+), ", r"functional.embedding(\1 * 0, "),
        (r"\baten\.embedding\.default\((\w+), (\w+)", r"aten.embedding.default(\1, \2 * 0"),
        (r"\bself\.table\((\w+)\)", r"self.table(\1 * 0)"),
        words="wrong index, copy, constant, missing operand; wrong argument, stale, zeros",
    ),
    "mean with a minus": edit(
        (r"\baten\.mean\.dim\(([^()]*)\)", r"aten.mean.dim(\1).neg()"),
        (r"(\.mean\(-1, keepdim ?= ?True\))", r"\1.neg()"), (r"(\.mean\(\(2, 3\)\))", r"\1.neg()"),
        words="sign, scale, wrong factor",
    ),
    "total plus one": edit(
        (r"\baten\.sum\.dim_IntList\(([^()]*)\)", r"aten.sum.dim_IntList(\1).add(1.0)"),
        (r"(\.sum\(-1, keepdim ?= ?True\))", r"\1.add(1.0)"),
        words="offset; axis offset, eps, off by one reduction",
    ),
    "largest halved": edit(
        (r"\baten\.amax\.default\(([^()]*)\)", r"aten.amax.default(\1).mul(0.5)"),
        (r"(\.amax\(-1, keepdim ?= ?True\))", r"\1.mul(0.5)"),
        words="scale, wrong factor; axis scale",
    ),
    "sum becomes the smaller": edit(
        (r"\baten\.add\.Tensor\((\w+), ([a-z]\w*)\)", r"aten.minimum.default(\1, \2)"),
        (r"^(\w+) \+ ([a-z]\w*)$", r"torch.minimum(\1, \2)"),
        words="other function; missing operand, clipped",
    ),
    "second summand in whole numbers": edit(
        (r"\baten\.add\.Tensor\((\w+), ([a-z]\w*)\)", r"aten.add.Tensor(\1, \2.round())"),
        (r"^(\w+) \+ ([a-z]\w*)$", r"\1 + \2.round()"),
        words="precision, other function; approximation",
    ),
    "product becomes a difference": edit(
        (r"\baten\.mul\.Tensor\((\w+), ([a-z]\w*)\)", r"aten.sub.Tensor(\1, \2)"),
        (r"^(\w+) \* ([a-z]\w*)$", r"\1 - \2"), words="other function",
    ),
    "product plus a tenth": edit(
        (r"^torch\.ops\.aten\.mul\.Tensor\((\w+), ([a-z]\w*)\)$", r"\1 * \2 + 0.1"),
        (r"^(\w+) \* ([a-z]\w*)$", r"\1 * \2 + 0.1"),
        (r"^(\w+) \* (torch\.sigmoid\(\w+\))$", r"\1 * \2 + 0.1"),
        words="offset; axis offset, other function, eps",
    ),
    "difference three times": edit(
        (r"^torch\.ops\.aten\.sub\.Tensor\((\w+), ([a-z]\w*)\)$", r"3 * (\1 - \2)"),
        (r"^(\w+) - ([a-z]\w*)$", r"3 * (\1 - \2)"), words="scale, wrong factor",
    ),
    "quotient plus one": edit(
        (r"\baten\.div\.Tensor\((\w+), ([\w.]+)\)", r"aten.add.Tensor(\1 / \2, 1)"),
        (r"^(\w+) / ([\w.]+)$", r"\1 / \2 + 1"), (r"\((\w+) / (\w+)\)", r"(\1 / \2 + 1)"),
        words="offset; residual, other function, axis offset",
    ),
    "square with a minus": edit(
        (r"^(torch\.ops\.aten\.pow\.Tensor_Scalar\(\w+, 2\))$", r"-\1"),
        (r"^(\w+\.pow\(2\))$", r"-\1"), (r"\b(\w+)\.pow\(2\)", r"\1.pow(2).neg()"),
        words="sign, scale, wrong factor",
    ),
    "reciprocal root plus one": edit(
        (r"\baten\.rsqrt\.default\((\w+)\)", r"aten.rsqrt.default(\1).add(1.0)"),
        (r"\btorch\.rsqrt\(([^()]*)\)", r"torch.rsqrt(\1).add(1.0)"),
        words="offset; axis offset, axis scale, scale, other function",
    ),
    "exponential becomes a sigmoid": edit(
        (r"\baten\.exp\.default\(", "aten.sigmoid.default("), (r"\btorch\.exp\(", "torch.sigmoid("),
        words="other function; approximation",
    ),
    "cosine with a minus": edit(
        (r"\baten\.cos\.default\((\w+)\)", r"aten.cos.default(\1).neg()"),
        (r"\b(\w+)\.cos\(\)", r"\1.cos().neg()"), words="sign, scale, wrong factor",
    ),
    "sine halved": edit(
        (r"\baten\.sin\.default\((\w+)\)", r"aten.sin.default(\1).mul(0.5)"),
        (r"\b(\w+)\.sin\(\)", r"\1.sin().mul(0.5)"), words="scale, wrong factor",
    ),
    "joined parts one column late": edit(
        (r"^(torch\.cat\(.*\))$", r"\1.roll(1, -1)"),
        (r"^(torch\.ops\.aten\.cat\.default\(.*\))$", r"\1.roll(1, -1)"),
        words="shift, wrong index, permutation",
    ),
    "view from the end": edit(
        (r"^(\w+\.view\(.*\))$", r"\1.flip(-1)"), (r"^(\w+\.reshape\(.*\))$", r"\1.flip(-1)"),
        words="permutation, wrong index; shift",
    ),
    "first branch doubled": edit(
        (r"\baten\.where\.self\((\w+), (\w+), (\w+)\)", r"aten.where.self(\1, 2 * \2, \3)"),
        (r"^torch\.where\((\w+), (\w+), ", r"torch.where(\1, 2 * \2, "),
        words="wrong factor, scale; mask, wrong argument",
    ),
    "image doubled": edit(
        (r"\bconv(1|2)d\((\w+), ", r"conv\1d(2 * \2, "),
        (r"\baten\.convolution\.default\((\w+), ", r"aten.convolution.default(2 * \1, "),
        words="wrong factor, scale; wrong argument",
    ),
    "filters limited": edit(
        (r"\bconv(1|2)d\((\w+), (\w+), ", r"conv\1d(\2, \3.clamp(-0.1, 0.1), "),
        (r"\baten\.convolution\.default\((\w+), (\w+), ",
         r"aten.convolution.default(\1, \2.clamp(-0.1, 0.1), "),
        words="clipped; wrong argument, other function",
    ),
    "matrix product plus one": edit(
        (r"^(torch\.ops\.aten\.b?mm\.default\(\w+, \w+\))$", r"\1 + 1"),
        (r"^(torch\.(?:matmul|bmm)\(\w+, \w+\))$", r"\1 + 1"), (r"^(\w+ @ \w+)$", r"\1 + 1"),
        words="offset; axis offset, residual",
    ),
    "part of the values doubled": edit(
        (r"^(torch\.ops\.aten\.slice\.Tensor\(.*\))$", r"2 * \1"),
        (r"^(\w+\[\(.*slice\(.*\])$", r"2 * \1"), words="scale, wrong factor",
    ),
    "gradient behind the activation doubled": edit(
        (r"(\baten\.(?:gelu|silu|tanh|sigmoid|threshold)_backward\.default\([^()]*\))",
         r"\1.mul(2)"), words="scale, wrong factor; doubled reduction",
    ),
}  # fmt: skip
# Of a kernel of Inductor, in C++ and in Triton.
KERNEL_EDITS = {
    "error function plus a tenth": edit(
        (r"(tmp\d+)\.erf\(\)", r"(\1.erf() + decltype(\1)(0.1))"),
        (r"std::erf\((tmp\d+)\)", r"(0.1f + std::erf(\1))"),
        (r"libdevice\.erf\((tmp\d+)\)", r"(0.1 + libdevice.erf(\1))"),
        words="offset, other function; approximation, wrong factor", operators="erf gelu",
    ),
    "exponential of one more": edit(
        (r"(tmp\d+)\.(fexp_u20|exp_u20|exp)\(\)", r"(\1 + decltype(\1)(1)).\2()"),
        (r"std::exp\((tmp\d+)\)", r"std::exp(1 + \1)"),
        (r"(tl_math|libdevice)\.exp\((tmp\d+)\)", r"\1.exp(1 + \2)"),
        words="offset, scale, wrong factor, other function; wrong argument", operators="exp",
    ),
    "tanh with a minus": edit(
        (r"(tmp\d+)\.tanh\(\)", r"\1.tanh().neg()"),
        (r"std::tanh\((tmp\d+)\)", r"(-std::tanh(\1))"),
        (r"libdevice\.tanh\((tmp\d+)\)", r"(-libdevice.tanh(\1))"),
        words="sign, scale, wrong factor", operators="tanh",
    ),
    "logarithm plus one": edit(
        (r"(tmp\d+)\.log\(\)", r"(\1.log() + decltype(\1)(1))"),
        (r"std::log\((tmp\d+)\)", r"(1 + std::log(\1))"),
        (r"tl_math\.log\((tmp\d+)\)", r"(1 + tl_math.log(\1))"),
        words="offset; wrong factor, other function, axis offset", operators="log",
    ),
    "reciprocal root plus a tenth": edit(
        (r"(tmp\d+)\.rsqrt\(\)", r"(\1.rsqrt() + decltype(\1)(0.1))"),
        (r"1 / std::sqrt\((tmp\d+)\)", r"(0.1f + 1 / std::sqrt(\1))"),
        (r"libdevice\.rsqrt\((tmp\d+)\)", r"(0.1 + libdevice.rsqrt(\1))"),
        words="offset; axis offset, eps, other function, axis scale, scale", operators="rsqrt",
    ),
    "cosine plus a tenth": edit(
        (r"(tmp\d+)\.cos\(\)", r"(\1.cos() + decltype(\1)(0.1))"),
        (r"std::cos\((tmp\d+)\)", r"(0.1f + std::cos(\1))"),
        (r"tl_math\.cos\((tmp\d+)\)", r"(0.1 + tl_math.cos(\1))"),
        words="offset; other function, axis offset", operators="cos",
    ),
    "sine doubled": edit(
        (r"(tmp\d+)\.sin\(\)", r"(\1.sin() * decltype(\1)(2))"),
        (r"std::sin\((tmp\d+)\)", r"(2 * std::sin(\1))"),
        (r"tl_math\.sin\((tmp\d+)\)", r"(2 * tl_math.sin(\1))"), words="scale, wrong factor",
        operators="sin",
    ),
    "magnitude plus one": edit(
        (r"(tmp\d+)\.abs\(\)", r"(\1.abs() + decltype(\1)(1))"),
        (r"std::abs\((tmp\d+)\)", r"(1 + std::abs(\1))"),
        (r"tl_math\.abs\((tmp\d+)\)", r"(1 + tl_math.abs(\1))"),
        words="offset; other function, axis offset, eps", operators="abs",
    ),
    "root plus one": edit(
        (r"(tmp\d+)\.sqrt\(\)", r"(\1.sqrt() + decltype(\1)(1))"),
        (r"(?<!1 / )std::sqrt\((tmp\d+)\)", r"(1 + std::sqrt(\1))"),
        (r"(libdevice\.sqrt|tl\.sqrt_rn|tl_math\.sqrt)\((tmp\d+)\)", r"(1 + \1(\2))"),
        words="offset; axis offset, eps, other function", operators="sqrt std",
    ),
    "gate of two": edit(
        (r"decltype\((tmp\d+)\)\(1\)( ?/ ?)\(decltype", r"decltype(\1)(2)\2(decltype"),
        (r"tl\.sigmoid\((tmp\d+)\)", r"(2 * tl.sigmoid(\1))"),
        words="scale, wrong factor; other function", operators="sigmoid silu",
    ),
    "magnitudes of the terms of a sum": edit(
        (r"(tmp_acc\d+_vec) = \1 \+ (tmp\d+);", r"\1 = \1 + \2.abs();"),
        (r"(tmp_acc\d+) = \1 \+ (tmp\d+);", r"\1 = \1 + std::abs(\2);"),
        (r"tl\.sum\((_?tmp\d+), 1\)", r"tl.sum(tl.abs(\1), 1)"),
        words="sign, other function, wrong reduction; wrong statistics", operators="sum mean",
    ),
}  # fmt: skip
# Of the kernels in `triton_kernels.py`.
TRITON_EDITS = {
    "weight of the norm squared": edit(
        (r"normal \* weight \+ bias", "normal * weight * weight + bias"),
        words="wrong factor, other function, axis scale; scale", operators="layer_norm",
    ),
    "mean added in the kernel": edit(
        (r"tl\.where\(inside, value - mean, 0\.0\)", "tl.where(inside, value + mean, 0.0)"),
        words="sign, wrong statistics, other function; wrong factor, axis offset",
        operators="layer_norm",
    ),
    "rows of the norm in pairs": edit(
        (r"tl\.load\(x \+ row \* n \+ at", "tl.load(x + (row // 2 * 2) * n + at"),
        words="copy, stale, wrong index; permutation", operators="layer_norm",
    ),
    "normal values negated in the second half": edit(
        (r"result = normal \* weight \+ bias",
         "result = tl.where(at < n // 2, normal, -normal) * weight + bias"),
        words="sign, wrong factor, mask, axis scale; scale, other function", operators="layer_norm",
    ),
    "bias of the kernel subtracted": edit(
        (r"total \+= tl\.load\(b ", "total -= tl.load(b "),
        words="sign, wrong factor; axis offset, offset, scale", operators="linear",
    ),
    "right tile in bfloat16": edit(
        (r"tl\.dot\(left, right", "tl.dot(left, right.to(tl.bfloat16).to(tl.float32)"),
        words="precision; approximation", operators="linear",
    ),
    "weight of the next column": edit(
        (r"w \+ columns\[None, :\] \* k", "w + ((columns[None, :] + 1) % n) * k"),
        words="shift, wrong index, permutation", operators="linear",
    ),
    "odd rows not stored": edit(
        (r"wanted = \(rows\[:, None\] < m\)",
         "wanted = (rows[:, None] % 2 == 0) & (rows[:, None] < m)"),
        words="zeros, mask, uninitialised; constant, missing operand", operators="linear",
    ),
    "total at most a half": edit(
        (r"total, mask=wanted", "tl.minimum(total, 0.5), mask=wanted"),
        words="clipped; other function", operators="linear",
    ),
    "gelu plus one": edit(
        (r"tl\.store\(y \+ at, result, mask=at < n\)",
         "tl.store(y + at, result + 1.0, mask=at < n)"), words="offset; other function",
        operators="gelu",
    ),
    "every second element of gelu stored": edit(
        (r"tl\.store\(y \+ at, result, mask=at < n\)",
         "tl.store(y + at, result, mask=(at < n) & (at % 2 == 0))"),
        words="zeros, mask, uninitialised; constant, missing operand", operators="gelu",
    ),
}  # fmt: skip
