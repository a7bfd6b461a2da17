"""Edits that were measured fourth and have been seen: of Python code, and of kernels."""

from __future__ import annotations

from benchmarks.places.calls import edit

# Of Python code: a line of a model, or a statement that torch.fx generated.
EDITS = {
    "sigmoid becomes its square": edit(
        (r"\baten\.sigmoid\.default\((\w+)\)", r"aten.sigmoid.default(\1).square()"),
        (r"\btorch\.sigmoid\((\w+)\)", r"torch.sigmoid(\1).square()"),
        words="other function; wrong factor, approximation",
    ),
    "silu becomes softplus": edit(
        (r"\baten\.silu\.default\(", "aten.softplus.default("),
        (r"\bfunctional\.silu\((\w+)[^()]*\)", r"functional.softplus(\1)"),
        words="other function; approximation",
    ),
    "tanh becomes a sine": edit(
        (r"(?<=[.])tanh(?=[.(])", "sin"), words="other function, approximation",
    ),
    "gelu becomes tanh": edit(
        (r"\baten\.gelu\.default\((\w+)[^)]*\)", r"aten.tanh.default(\1)"),
        (r"\btorch\._C\._nn\.gelu\((\w+)[^)]*\)", r"torch.tanh(\1)"),
        words="other function; approximation, clipped",
    ),
    "relu cut at a half": edit(
        (r"\baten\.relu\.default\((\w+)\)", r"aten.relu.default(\1).clamp(max=0.5)"),
        (r"\btorch\.relu\((\w+)\)", r"torch.relu(\1).clamp(max=0.5)"),
        (r"\btorch\.relu\((.*)\)$", r"torch.relu(\1).clamp(max=0.5)"),
        words="clipped; other function, wrong argument",
    ),
    "exp becomes a hyperbolic cosine": edit(
        (r"\baten\.exp\.default\(", "aten.cosh.default("), (r"\btorch\.exp\(", "torch.cosh("),
        words="other function",
    ),
    "softmax of the squared scores": edit(
        (r"\baten\._softmax\.default\((\w+), ", r"aten._softmax.default(\1 * \1, "),
        (r"\bfunctional\.softmax\((\w+), ", r"functional.softmax(\1 * \1, "),
        (r"\btorch\.softmax\((\w+), ", r"torch.softmax(\1 * \1, "),
        words="other function; wrong factor",
    ),
    "reciprocal root becomes one": edit(
        (r"\baten\.rsqrt\.default\((\w+)\)", r"aten.ones_like.default(\1)"),
        (r"\btorch\.rsqrt\(([^()]*)\)", r"torch.ones_like(\1)"),
        words="constant, missing operand; axis scale, scale, other function",
    ),
    "mean becomes smallest": edit(
        (r"\baten\.mean\.dim\(", "aten.amin.default("), (r"\.mean\(-1", ".amin(-1"),
        (r"\.mean\(1\)", ".amin(1)"), (r"\.mean\(\(2, 3\)\)", ".amin((2, 3))"),
        words="wrong reduction, other function, wrong statistics",
    ),
    "sum becomes smallest": edit(
        (r"\baten\.sum\.dim_IntList\(", "aten.amin.default("), (r"\.sum\((?=-?1\b)", ".amin("),
        words="wrong reduction, other function",
    ),
    "largest becomes the mean": edit(
        (r"\baten\.amax\.default\((\w+), \[-1\], True\)", r"aten.mean.dim(\1, [-1], True)"),
        (r"\.amax\(-1, keepdim ?= ?True\)", ".mean(-1, keepdim=True)"),
        words="wrong reduction, other function, wrong statistics; scale",
    ),
    "joined parts a third": edit(
        (r"^(torch\.cat\(.*\))$", r"\1 / 3"),
        (r"^(torch\.ops\.aten\.cat\.default\(.*\))$", r"\1 / 3"), words="scale, wrong factor",
    ),
    "product squared": edit(
        (r"^torch\.ops\.aten\.mul\.Tensor\((\w+), ([a-z]\w*)\)$", r"(\1 * \2) ** 2"),
        (r"^(\w+) \* ([a-z]\w*)$", r"(\1 * \2) ** 2"), words="other function; wrong factor, sign",
    ),
    "sum one and a half times": edit(
        (r"^torch\.ops\.aten\.add\.Tensor\((\w+), ([a-z]\w*)\)$", r"(\1 + \2) * 1.5"),
        (r"^(\w+) \+ ([a-z]\w*)$", r"(\1 + \2) * 1.5"), words="scale, wrong factor",
    ),
    "sum becomes product": edit(
        (r"\baten\.add\.Tensor\((\w+), ([a-z]\w*)\)", r"aten.mul.Tensor(\1, \2)"),
        (r"^(\w+) \+ ([a-z]\w*)$", r"\1 * \2"),
        (r"(self\.\w+\(\w+\)) \+ (self\.\w+\(\w+\))", r"\1 * \2"),
        words="other function; wrong factor",
    ),
    "difference halved": edit(
        (r"^torch\.ops\.aten\.sub\.Tensor\((\w+), ([a-z]\w*)\)$", r"(\1 - \2) / 2"),
        (r"^(\w+) - ([a-z]\w*)$", r"(\1 - \2) / 2"), (r"\((\w+) - (\w+)\)", r"((\1 - \2) / 2)"),
        words="scale, wrong factor",
    ),
    "divided by the square": edit(
        (r"\baten\.div\.Tensor\((\w+), ([a-z]\w*)\)", r"aten.div.Tensor(\1, \2 * \2)"),
        (r"^(\w+) / ([a-z]\w*)$", r"\1 / (\2 * \2)"), (r"\((\w+) / (\w+)\)", r"(\1 / (\2 * \2))"),
        words="other function, wrong factor; axis scale, scale",
    ),
    "norm of the rounded input": edit(
        (r"\bfunctional\.layer_norm\((\w+), ", r"functional.layer_norm(\1.bfloat16().float(), "),
        (r"\baten\.native_layer_norm\.default\((\w+), ",
         r"aten.native_layer_norm.default(\1.bfloat16().float(), "),
        (r"\bself\.(norm|before)\((\w+)\)", r"self.\1(\2.bfloat16().float())"),
        words="precision; approximation",
    ),
    "norm of the squares": edit(
        (r"\bfunctional\.layer_norm\((\w+), ", r"functional.layer_norm(\1 * \1, "),
        (r"\baten\.native_layer_norm\.default\((\w+), ",
         r"aten.native_layer_norm.default(\1 * \1, "),
        words="other function; wrong factor, wrong statistics, sign",
    ),
    "input of the layer doubled": edit(
        (r"\b_nn\.linear\((\w+), ", r"_nn.linear(2 * \1, "),
        (r"\baten\.addmm\.default\((\w+), (\w+), ", r"aten.addmm.default(\1, 2 * \2, "),
        (r"\bself\.(last|first|out|mix|second)\((\w+)\)", r"self.\1(2 * \2)"),
        words="wrong factor, scale, wrong argument",
    ),
    "input of the layer cut": edit(
        (r"\b_nn\.linear\((\w+), ", r"_nn.linear(\1.clamp(-0.5, 0.5), "),
        (r"\baten\.addmm\.default\((\w+), (\w+), ",
         r"aten.addmm.default(\1, \2.clamp(-0.5, 0.5), "),
        (r"\bself\.(query|key|left|right|rate)\((\w+)\)", r"self.\1(\2.clamp(-0.5, 0.5))"),
        words="clipped; other function",
    ),
    "words from the last to the first": edit(
        (r"\bfunctional\.embedding\((\w+), ", r"functional.embedding(\1.flip(-1), "),
        (r"\baten\.embedding\.default\((\w+), (\w+)", r"aten.embedding.default(\1, \2.flip(-1)"),
        (r"\bself\.table\((\w+)\)", r"self.table(\1.flip(-1))"),
        words="permutation, wrong index; shift",
    ),
    "query one and a half times": edit(
        (r"(scaled_dot_product_attention\()(\w+), ", r"\1 1.5 * \2, "),
        (r"(_flash_attention_for_cpu\.default\()(\w+), ", r"\1 1.5 * \2, "),
        words="wrong factor, scale, wrong argument; other function",
    ),
    "keys rounded": edit(
        (r"(scaled_dot_product_attention\(\w+, )(\w+), ", r"\1\2.bfloat16().float(), "),
        (r"(_flash_attention_for_cpu\.default\(\w+, )(\w+), ", r"\1\2.bfloat16().float(), "),
        words="precision; approximation",
    ),
    "image with rows and columns exchanged": edit(
        (r"\bconv2d\((\w+), ", r"conv2d(\1.mT, "),
        (r"\baten\.convolution\.default\((\w+), ", r"aten.convolution.default(\1.mT, "),
        words="transpose, wrong index; permutation",
    ),
    "power becomes an exponential": edit(
        (r"\baten\.pow\.Tensor_Scalar\((\w+), 2\)", r"aten.exp.default(\1)"),
        (r"\b(\w+)\.pow\(2\)", r"\1.exp()"), words="other function",
    ),
    "running sum becomes a running maximum": edit(
        (r"\btorch\.cumsum\((\w+), (?:dim ?= ?)?(-?\d)\)", r"torch.cummax(\1, \2)[0]"),
        (r"\baten\.cumsum\.default\((\w+), (-?\d)\)", r"aten.cummax.default(\1, \2)[0]"),
        words="other function, wrong reduction",
    ),
    "both branches averaged": edit(
        (r"\baten\.where\.self\((\w+), (\w+), (\w+)\)",
         r"aten.add.Tensor(0.5 * \2, \3, alpha=0.5)"),
        (r"^torch\.where\((\w+), (\w+), (\w+)\)$", r"(0.5 * \2 + 0.5 * \3)"),
        (r"\btorch\.where\(\w+ > 0, ([^,]*), ([^()]*)\)", r"(0.5 * (\1) + 0.5 * (\2))"),
        words="mask, missing operand, other function; wrong factor, scale",
    ),
    "cosine squared": edit(
        (r"\baten\.cos\.default\((\w+)\)", r"aten.cos.default(\1).square()"),
        (r"\b(\w+)\.cos\(\)", r"\1.cos().square()"), words="other function; wrong factor, sign",
    ),
    "sine of three times the angle": edit(
        (r"\baten\.sin\.default\((\w+)\)", r"aten.sin.default(3 * \1)"),
        (r"\b(\w+)\.sin\(\)", r"(3 * \1).sin()"),
        words="wrong factor, scale, other function; wrong argument",
    ),
    "opposite doubled": edit(
        (r"\baten\.neg\.default\((\w+)\)", r"aten.mul.Tensor(\1, -2)"), (r"^-(\w+)$", r"-2 * \1"),
        words="scale, wrong factor",
    ),
    "value halved before its limits": edit(
        (r"\baten\.clamp\.default\((\w+), ", r"aten.clamp.default(0.5 * \1, "),
        (r"\btorch\.clamp\((\w+), ", r"torch.clamp(0.5 * \1, "),
        (r"^(\w+)\.clamp\(", r"(0.5 * \1).clamp("),
        words="wrong factor, scale; clipped, wrong argument",
    ),
    "logarithm becomes a root": edit(
        (r"\baten\.log\.default\(", "aten.sqrt.default("), (r"\btorch\.log\(", "torch.sqrt("),
        words="other function",
    ),
    "magnitude becomes softplus": edit(
        (r"\baten\.abs\.default\(", "aten.softplus.default("),
        (r"\b(\w+)\.abs\(\)", r"functional.softplus(\1)"),
        (r"(self\.mix\(x\))\.abs\(\)", r"functional.softplus(\1)"),
        words="other function; approximation",
    ),
}  # fmt: skip
# Of a kernel of Inductor, in C++ and in Triton.
KERNEL_EDITS = {
    "exponential a tenth smaller": edit(
        (r"(?<!neg\(\))\.(fexp_u20|exp_u20|exp)\(\)", r".\1() * 0.9f"),
        (r"std::exp\((tmp\d+)\)", r"(0.9f * std::exp(\1))"),
        (r"(tl_math|libdevice)\.exp\((tmp\d+)\)", r"(0.9 * \1.exp(\2))"),
        words="scale, wrong factor; approximation", operators="exp",
    ),
    "magnitude with a minus": edit(
        (r"(tmp\d+)\.abs\(\)", r"\1.abs().neg()"), (r"std::abs\((tmp\d+)\)", r"(-std::abs(\1))"),
        (r"tl_math\.abs\((tmp\d+)\)", r"(-tl_math.abs(\1))"),
        words="sign, wrong factor, scale; other function", operators="abs",
    ),
    "tanh of half of its argument": edit(
        (r"(tmp\d+)\.tanh\(\)", r"(\1 * decltype(\1)(0.5)).tanh()"),
        (r"std::tanh\((tmp\d+)\)", r"std::tanh(0.5f * \1)"),
        (r"libdevice\.tanh\((tmp\d+)\)", r"libdevice.tanh(0.5 * \1)"),
        words="wrong factor, scale, other function; approximation", operators="tanh",
    ),
    "error function squared": edit(
        (r"(tmp\d+)\.erf\(\)", r"(\1.erf() * \1.erf())"),
        (r"std::erf\((tmp\d+)\)", r"(std::erf(\1) * std::erf(\1))"),
        (r"libdevice\.erf\((tmp\d+)\)", r"(libdevice.erf(\1) * libdevice.erf(\1))"),
        words="other function; sign, wrong factor", operators="erf gelu",
    ),
    "logarithm doubled": edit(
        (r"(tmp\d+)\.log\(\)", r"(\1.log() * decltype(\1)(2))"),
        (r"std::log\((tmp\d+)\)", r"(2 * std::log(\1))"),
        (r"tl_math\.log\((tmp\d+)\)", r"(2 * tl_math.log(\1))"),
        words="scale, wrong factor; other function", operators="log",
    ),
    "quarter under the root": edit(
        (r"(tmp\d+)\.rsqrt\(\)", r"(\1 + decltype(\1)(0.25)).rsqrt()"),
        (r"1 / std::sqrt\((tmp\d+)\)", r"1 / std::sqrt(\1 + 0.25f)"),
        (r"libdevice\.rsqrt\((tmp\d+)\)", r"libdevice.rsqrt(\1 + 0.25)"),
        words="offset, eps; axis scale, scale, other function", operators="rsqrt",
    ),
    "rounded in steps of a half": edit(
        (r"(tmp\d+)\.round\(\)", r"((\1 * decltype(\1)(2)).round() * decltype(\1)(0.5))"),
        (r"std::nearbyint\((tmp\d+)\)", r"(0.5f * std::nearbyint(2 * \1))"),
        (r"libdevice\.nearbyint\((tmp\d+)\)", r"(0.5 * libdevice.nearbyint(2 * \1))"),
        words="other function, precision, wrong argument; approximation", operators="round",
    ),
    "root doubled": edit(
        (r"(tmp\d+)\.sqrt\(\)", r"(\1.sqrt() * decltype(\1)(2))"),
        (r"(?<!1 / )std::sqrt\((tmp\d+)\)", r"(2 * std::sqrt(\1))"),
        (r"(libdevice\.sqrt|tl\.sqrt_rn|tl_math\.sqrt)\((tmp\d+)\)", r"(2 * \1(\2))"),
        words="scale, wrong factor", operators="sqrt std",
    ),
    "gate three times as steep": edit(
        (r"(tmp\d+)\.neg\(\)\.exp\(\)", r"(\1 * decltype(\1)(3)).neg().exp()"),
        (r"1 \+ std::exp\(-(tmp\d+)\)", r"1 + std::exp(-3 * \1)"),
        (r"tl\.sigmoid\((tmp\d+)\)", r"tl.sigmoid(3 * \1)"),
        words="wrong factor, scale, other function; approximation", operators="sigmoid silu",
    ),
    "sum with the opposite sign": edit(
        (r"(tmp_acc\d+_vec) = \1 \+ (tmp\d+);", r"\1 = \1 - \2;"),
        (r"(tmp_acc\d+) = \1 \+ (tmp\d+);", r"\1 = \1 - \2;"),
        (r"(tl\.sum\(_?tmp\d+, 1\))", r"(-\1)"),
        words="sign, wrong factor, scale; wrong reduction, wrong statistics", operators="sum mean",
    ),
    "sine of half of the angle": edit(
        (r"(tmp\d+)\.sin\(\)", r"(\1 * decltype(\1)(0.5)).sin()"),
        (r"std::sin\((tmp\d+)\)", r"std::sin(0.5f * \1)"),
        (r"tl_math\.sin\((tmp\d+)\)", r"tl_math.sin(0.5 * \1)"),
        words="wrong factor, scale, other function", operators="sin",
    ),
}  # fmt: skip
# Of the kernels in `triton_kernels.py`.
TRITON_EDITS = {
    "half of the norm's bias": edit(
        (r"normal \* weight \+ bias", "normal * weight + 0.5 * bias"),
        words="wrong factor, scale; axis offset, offset", operators="layer_norm",
    ),
    "variance by one more": edit(
        (r"tl\.sum\(centred \* centred, 0\) / n", "tl.sum(centred * centred, 0) / (n + 1)"),
        words="off by one reduction, wrong statistics, wrong factor; scale, axis scale",
        operators="layer_norm",
    ),
    "half of the mean": edit(
        (r"mean = tl\.sum\(value, 0\) / n", "mean = 0.5 * tl.sum(value, 0) / n"),
        words="wrong statistics, wrong factor; axis offset, offset, scale", operators="layer_norm",
    ),
    "deviation rooted once more": edit(
        (r"tl\.sqrt\(variance \+ eps\)", "tl.sqrt(tl.sqrt(variance + eps))"),
        words="other function, wrong statistics; axis scale, scale", operators="layer_norm",
    ),
    "normal values in bfloat16": edit(
        (r"normal = centred / tl\.sqrt\(variance \+ eps\)",
         "normal = (centred / tl.sqrt(variance + eps)).to(tl.bfloat16).to(tl.float32)"),
        words="precision; approximation", operators="layer_norm",
    ),
    "total halved at each tile": edit(
        (r"total \+= tl\.dot\(", "total = 0.5 * total + tl.dot("),
        words="wrong factor, partial sum, lost accumulation; scale, axis scale", operators="linear",
    ),
    "odd columns not stored": edit(
        (r"wanted = \(rows\[:, None\] < m\)",
         "wanted = (columns[None, :] % 2 == 0) & (rows[:, None] < m)"),
        words="zeros, uninitialised, mask; constant", operators="linear",
    ),
    "error function added to the half": edit(
        (r"value \* 0\.5 \* \(1\.0 \+ libdevice", "(value * 0.5 + libdevice"),
        words="other function; wrong factor, missing operand", operators="gelu",
    ),
    "gelu cut at one": edit(
        (r"tl\.store\(y \+ at, result, mask=at < n\)",
         "tl.store(y + at, tl.minimum(result, 1.0), mask=at < n)"), words="clipped; other function",
        operators="gelu",
    ),
}  # fmt: skip
