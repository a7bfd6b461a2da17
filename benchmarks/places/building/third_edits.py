"""Edits that were measured third and have been seen: of Python code, and of kernels."""

from __future__ import annotations

from benchmarks.places.calls import edit

# Of Python code: a line of a model, or a statement that torch.fx generated.
EDITS = {
    "softmax of the opposite": edit(
        (r"softmax(\.default|\.int)?\((\w+), (?=-?\d|dim)", r"softmax\1(-\2, "),
        words="sign, wrong factor, other function; scale",
    ),
    "product of magnitudes": edit(
        (r"\b_nn\.linear\((\w+), ", r"_nn.linear(abs(\1), "),
        (r"\baten\.addmm\.default\((\w+), (\w+), ", r"aten.addmm.default(\1, abs(\2), "),
        (r"\bself\.(second|last|out|first|shared)\((\w+)\)", r"self.\1(abs(\2))"),
        words="other function, sign; missing operand, wrong factor, clipped",
    ),
    "product with the opposite sign": edit(
        (r"\b_nn\.linear\((\w+), ", r"_nn.linear(-\1, "),
        (r"\baten\.addmm\.default\(([^()]*)\)", r"aten.addmm.default(\1, alpha=-1)"),
        (r"\bself\.(gate|mix|query|key|rate|left)\((\w+)\)", r"self.\1(-\2)"),
        words="sign, wrong factor, wrong argument; scale, offset, axis offset, other function",
    ),
    "features of the input turned": edit(
        (r"\b_nn\.linear\((\w+), ", r"_nn.linear(\1.roll(1, -1), "),
        (r"\baten\.addmm\.default\((\w+), (\w+), ", r"aten.addmm.default(\1, \2.roll(1, -1), "),
        (r"\bself\.(value|state|inside|enter|box)\((\w+)\)", r"self.\1(\2.roll(1, -1))"),
        words="shift, wrong index, permutation",
    ),
    "table upside down": edit(
        (r"\bfunctional\.embedding\((\w+), (\w+)", r"functional.embedding(\1, \2.flip(0)"),
        (r"\baten\.embedding\.default\((\w+), ", r"aten.embedding.default(\1.flip(0), "),
        words="wrong index, permutation; shift, sign",
    ),
    "positions of the values from the end": edit(
        (r"(scaled_dot_product_attention\(\w+, \w+, )(\w+)", r"\1\2.flip(-2)"),
        words="permutation, wrong index; shift, transpose",
    ),
    "magnitude of the second summand": edit(
        (r"\baten\.add\.Tensor\((\w+), ([a-z]\w*)\)", r"aten.add.Tensor(\1, abs(\2))"),
        (r"^(\w+) \+ ([a-z]\w*)$", r"\1 + abs(\2)"),
        (r" \+ (self\.\w+\(\w+\)|torch\.relu\(\w+\)|[a-z]\w*)$", r" + abs(\1)"),
        words="other function, sign; wrong factor, residual, clipped, offset",
    ),
    "product becomes quotient": edit(
        (r"\baten\.mul\.Tensor\((\w+), ([a-z]\w*)\)", r"aten.div.Tensor(\1, \2)"),
        (r"^(\w+) \* ([a-z]\w*)$", r"\1 / \2"), (r"(\w+) \* (torch\.sigmoid\(\w+\))", r"\1 / \2"),
        words="other function; nonfinite, wrong factor, overflow",
    ),
    "norm of the opposite": edit(
        (r"\bfunctional\.layer_norm\((\w+), ", r"functional.layer_norm(-\1, "),
        (r"\baten\.native_layer_norm\.default\((\w+), ", r"aten.native_layer_norm.default(-\1, "),
        (r"\bself\.(norm|before|between)\(([^()]+)\)", r"self.\1(-(\2))"),
        words="sign, wrong factor; scale, other function",
    ),
    "whole numbers by a cast": edit(
        (r"\.to\(torch\.float32\)$", ".to(torch.float32).round()"),
        (r"\.float\(\)$", ".float().round()"),
        (r"(\baten\._to_copy\.default\(\w+, dtype ?= ?torch\.float32\))", r"\1.round()"),
        words="precision, other function; approximation, zeros, wrong argument",
    ),
    "cosine becomes one": edit(
        (r"\baten\.cos\.default\((\w+)\)", r"aten.ones_like.default(\1)"),
        (r"\b(\w+)\.cos\(\)", r"torch.ones_like(\1)"),
        words="constant, missing operand; other function, approximation",
    ),
    "image upside down": edit(
        (r"\bconv2d\((\w+), ", r"conv2d(\1.flip(-2), "),
        (r"\baten\.convolution\.default\((\w+), ", r"aten.convolution.default(\1.flip(-2), "),
        (r"\bself\.(first|second|deep|down|up)\((x|hidden|image|mixed)\)", r"self.\1(\2.flip(-1))"),
        words="permutation, wrong index; transpose, shift",
    ),
    "mean becomes mean of squares": edit(
        (r"\b(\w+)\.mean\(-1", r"\1.square().mean(-1"),
        (r"\baten\.mean\.dim\((\w+), ", r"aten.mean.dim(\1 * \1, "),
        (r"\b(\w+)\.mean\(\(2, 3\)", r"\1.square().mean((2, 3)"),
        (r"\b(\w+)\.mean\(1\)", r"\1.square().mean(1)"),
        words="other function, wrong statistics, wrong reduction; wrong factor",
    ),
    "first element for the mean": edit(
        (r"\b(\w+)\.mean\(-1, keepdim ?= ?True\)", r"\1[..., :1]"),
        (r"\baten\.mean\.dim\((\w+), \[-1\], True\)", r"\1[..., :1]"),
        words="copy, missing reduction, wrong reduction, partial sum; wrong index, "
        "wrong statistics, one rank's part",
    ),
    "sum becomes largest": edit(
        (r"\baten\.sum\.dim_IntList\(", "aten.amax.default("), (r"\.sum\((?=-?1\b)", ".amax("),
        words="other function, wrong reduction; scale, missing operand, sign",
    ),
    "limits left out": edit(
        (r"\baten\.clamp(?:_min|_max)?\.default\((\w+), [^()]*\)", r"aten.clone.default(\1)"),
        (r"^(\w+)\.clamp\([^()]*\)$", r"\1.clone()"),
        (r"^torch\.clamp\((\w+), [^()]*\)$", r"\1.clone()"),
        (r"^torch\.clamp\((torch\.\w+\(.*\)), -?[\d.]+, [\d.]+\)$", r"\1"),
        (r"\)\.clamp\([^()]*\)$", ")"),
        words="missing operand, copy, wrong argument; clipped, other function",
    ),
    "rounding left out": edit(
        (r"\baten\.round\.default\((\w+)\)", r"aten.clone.default(\1)"),
        (r"\btorch\.round\(", "torch.clone("), (r"\btorch\.floor\(", "torch.clone("),
        words="missing operand, copy; precision, approximation, other function",
    ),
    "larger becomes smaller": edit(
        (r"\baten\.maximum\.default\(", "aten.minimum.default("),
        (r"\btorch\.maximum\(", "torch.minimum("),
        words="other function; clipped, swapped operands, sign",
    ),
    "smaller becomes the mean": edit(
        (r"\baten\.minimum\.default\((\w+), (\w+)\)", r"(0.5 * (\1 + \2))"),
        (r"^torch\.minimum\((\w+), (\w+)\)$", r"(0.5 * (\1 + \2))"),
        (r"\btorch\.minimum\((.*), (torch\.sqrt\(\w+\))\)$", r"(0.5 * (\1 + \2))"),
        words="other function; scale, wrong factor, approximation",
    ),
    "triangle left out": edit(
        (r"\baten\.(?:tril|triu)\.default\((\w+)[^()]*\)", r"aten.clone.default(\1)"),
        (r"\btorch\.(?:tril|triu)\(", "torch.clone("),
        (r"^(\w+)\.(?:tril|triu)\([^()]*\)$", r"\1.clone()"),
        words="mask, copy, missing operand; other function, constant",
    ),
    "hidden scores become large": edit(
        (r"(masked_fill\S*\(.*, )-(?=[\d.]|inf|torch)", r"\1"),
        words="sign, mask, wrong argument; wrong factor, constant",
    ),
    "first branch always": edit(
        (r"\baten\.where\.self\((\w+), (\w+), (\w+)\)", r"aten.add.Tensor(\2, \3, alpha=0)"),
        (r"^torch\.where\((\w+), (\w+), (\w+)\)$", r"(\2 + 0 * \3)"),
        (r"\btorch\.where\(\w+ > 0, ([^,]*), (.*)\)", r"(\1)"),
        words="mask, copy, missing operand; other function, wrong argument",
    ),
    "running sum becomes a running product": edit(
        (r"(?<=[.])cumsum(?=[.(])", "cumprod"), words="other function, wrong reduction",
    ),
    "difference becomes a distance": edit(
        (r"\baten\.sub\.Tensor\((\w+), ([a-z]\w*)\)", r"aten.sub.Tensor(\1, \2).abs()"),
        (r"^(\w+) - ([a-z]\w*)$", r"abs(\1 - \2)"),
        (r"^(\w+) - (\w+\.\w+\([^()]*\))$", r"abs(\1 - \2)"),
        (r"\((\w+) - (\w+)\)", r"abs(\1 - \2)"), words="other function, sign; clipped",
    ),
    "gradient and value exchanged": edit(
        (r"\b(\w+_backward\.default)\((\w+), (\w+)(?=[,)])", r"\1(\3, \2"),
        words="swapped operands, wrong index; other function, wrong argument",
    ),
    "exp to the first order": edit(
        (r"\baten\.exp\.default\((\w+)\)", r"aten.add.Tensor(\1, 1)"),
        (r"\btorch\.exp\(([^()]*)\)", r"(1 + (\1))"), (r"\btorch\.exp\((.*)\)$", r"(1 + (\1))"),
        words="approximation, other function; offset, missing operand",
    ),
    "root becomes a cube root": edit(
        (r"\baten\.sqrt\.default\((\w+)\)", r"aten.pow.Tensor_Scalar(\1, 1 / 3)"),
        (r"\btorch\.sqrt\(([^()]*)\)", r"torch.pow(\1, 1 / 3)"),
        words="other function, wrong argument; axis scale, scale, approximation",
    ),
    "sigmoid by a quotient": edit(
        (r"\baten\.sigmoid\.default\((\w+)\)", r"(0.5 + 0.5 * \1 / (1 + abs(\1)))"),
        (r"\btorch\.sigmoid\((\w+)\)", r"(0.5 + 0.5 * \1 / (1 + abs(\1)))"),
        words="approximation, other function",
    ),
    "scores of the first query for all": edit(
        (r"softmax(\.default)?\((\w+), (?=-1|dim ?= ?-1)",
         r"softmax\1(\2[..., :1, :].expand_as(\2), "),
        words="copy, wrong index, stale; wrong axis, constant",
    ),
    "letters of the sum exchanged": edit(
        (r"\"ijd,jd->id\"", '"ijd,id->id"'), (r"'ijd,jd->id'", "'ijd,id->id'"),
        (r"([\"'])tej,ejk->tek\1", r"\1tej,tjk->tek\1" ), (r"bi,eij->bej", "bj,eij->bei"),
        words="wrong index, wrong axis, transpose; swapped operands, wrong argument",
    ),
    "gate applied as a threshold": edit(
        (r"\btorch\.sigmoid\((\w+)\)", r"(\1 > 0) * 1.0"),
        (r"\baten\.sigmoid\.default\((\w+)\)", r"aten.gt.Scalar(\1, 0).to(\1.dtype)"),
        words="approximation, other function; clipped, mask, zeros, precision",
    ),
    "tanh becomes its cube": edit(
        (r"\baten\.tanh\.default\((\w+)\)", r"aten.pow.Tensor_Scalar(aten.tanh.default(\1), 3)"),
        (r"\btorch\.tanh\((\w+)\)", r"torch.tanh(\1).pow(3)"),
        words="other function; wrong factor, approximation",
    ),
    "argument of the activation doubled": edit(
        (r"\b(gelu|silu|relu|elu)(\.default)?\((\w+)(?=[,)])", r"\1\2(2 * \3"),
        words="wrong factor, scale, other function; wrong argument",
    ),
    "reciprocal root of the square": edit(
        (r"(?<=[.])rsqrt(\.default)?\((\w+)", r"rsqrt\1(\2 * \2"),
        words="other function; axis scale, scale, wrong factor, missing operand",
    ),
    "parts from the last to the first": edit(
        (r"\b(\w+)\.chunk\((\d), ?(?:dim ?= ?)?-1\)", r"\1.chunk(\2, -1)[::-1]"),
        (r"\b(\w+\.unbind\([^()]*\))$", r"\1[::-1]"),
        (r"(\baten\.split\.Tensor\(\w+, \d+, -1\))$", r"\1[::-1]"),
        words="permutation, swapped operands, wrong index; shift, copy",
    ),
}  # fmt: skip
# Of a kernel of Inductor, in C++ and in Triton.
KERNEL_EDITS = {
    "rounding becomes floor": edit(
        (r"(tmp\d+)\.round\(\)", r"\1.floor()"), (r"std::nearbyint\(", "std::floor("),
        (r"libdevice\.nearbyint\(", "libdevice.floor("),
        words="other function, offset; approximation, precision", operators="round",
    ),
    "exp of the magnitude": edit(
        (r"(tmp\d+)\.(fexp_u20|exp_u20|exp)\(\)", r"\1.abs().\2()"),
        (r"std::exp\((tmp\d+)\)", r"std::exp(std::abs(\1))"),
        (r"(tl_math|libdevice)\.exp\((tmp\d+)\)", r"\1.exp(tl_math.abs(\2))"),
        words="other function, sign; wrong factor", operators="exp",
    ),
    "terms of a sum counted twice": edit(
        (r"(tmp_acc\d+_vec) = \1 \+ (tmp\d+);", r"\1 = \1 + \2 + \2;"),
        (r"(tmp_acc\d+) = \1 \+ (tmp\d+);", r"\1 = \1 + \2 + \2;"),
        words="doubled reduction, scale, wrong factor; wrong reduction", operators="sum mean",
    ),
    "half of a tanh": edit(
        (r"(tmp\d+)\.tanh\(\)", r"(\1.tanh() * decltype(\1)(0.5))"),
        (r"std::tanh\((tmp\d+)\)", r"(0.5f * std::tanh(\1))"),
        (r"libdevice\.tanh\((tmp\d+)\)", r"(0.5 * libdevice.tanh(\1))"),
        words="scale, wrong factor; approximation, other function", operators="tanh",
    ),
    "absolute value becomes a square": edit(
        (r"(tmp\d+)\.abs\(\)", r"(\1 * \1)"), (r"std::abs\((tmp\d+)\)", r"(\1 * \1)"),
        (r"tl_math\.abs\((tmp\d+)\)", r"(\1 * \1)"), words="other function; wrong factor",
        operators="abs",
    ),
    "floor becomes the next whole number": edit(
        (r"(tmp\d+)\.floor\(\)", r"\1.ceil()"), (r"std::floor\(", "std::ceil("),
        (r"libdevice\.floor\(", "libdevice.ceil("),
        words="offset, other function; wrong argument, shift", operators="floor remainder frac",
    ),
    "minimum becomes maximum": edit(
        (r"at::vec::minimum\(", "at::vec::maximum("),
        (r"std::min\((tmp\d+), (tmp\d+)\)", r"std::max(\1, \2)"),
        (r"triton_helpers\.minimum\(", "triton_helpers.maximum("),
        words="other function; clipped, swapped operands", operators="minimum",
    ),
    "root of the magnitude plus one": edit(
        (r"(tmp\d+)\.sqrt\(\)", r"(\1 + decltype(\1)(1)).sqrt()"),
        (r"(?<!1 / )std::sqrt\((tmp\d+)\)", r"std::sqrt(\1 + 1)"),
        (r"(libdevice\.sqrt|tl\.sqrt_rn|tl_math\.sqrt)\((tmp\d+)\)", r"\1(\2 + 1)"),
        words="offset, eps, other function; axis scale, axis offset, scale", operators="sqrt std",
    ),
    "sigmoid becomes one less itself": edit(
        (r"\((\w+)\.neg\(\)\.exp\(\)\)", r"(\1.exp())"), (r"\.neg\(\)\.exp\(\)", ".exp()"),
        (r"1 \+ std::exp\(-(tmp\d+)\)", r"1 + std::exp(\1)"),
        (r"tl\.sigmoid\((tmp\d+)\)", r"tl.sigmoid(-\1)"),
        words="sign, other function; swapped operands, wrong factor", operators="sigmoid",
    ),
    "power of a product": edit(
        (r"\b(tmp\d+) \* \1\b", r"\1 * \1 * \1 * \1"),
        words="other function, wrong argument; wrong factor", operators="pow",
    ),
}  # fmt: skip
# Of the kernels in `triton_kernels.py`.
TRITON_EDITS = {
    "mean over the whole block": edit(
        (r"mean = tl\.sum\(value, 0\) / n", "mean = tl.sum(value, 0) / BLOCK"),
        words="wrong statistics, off by one reduction, wrong factor; axis offset, scale, offset",
        operators="layer_norm",
    ),
    "bias of the norm subtracted": edit(
        (r"normal \* weight \+ bias", "normal * weight - bias"),
        words="sign, wrong factor; offset, axis offset", operators="layer_norm",
    ),
    "deviation not limited from below by eps": edit(
        (r"tl\.sqrt\(variance \+ eps\)", "tl.sqrt(variance + eps) + 0.1"),
        words="eps; axis scale, offset, scale", operators="layer_norm",
    ),
    "row of the program before": edit(
        (r"tl\.store\(y \+ row \* n", "tl.store(y + ((row + 1) % tl.num_programs(0)) * n"),
        words="shift, wrong index; permutation", operators="layer_norm",
    ),
    "second tile first": edit(
        (r"at = start \+ tl\.arange\(0, K\)\n",
         "at = tl.maximum(start - K, 0) + tl.arange(0, K)\n"),
        words="stale, wrong index, doubled reduction, partial sum; shift", operators="linear",
    ),
    "magnitudes of the tile": edit(
        (r"tl\.dot\(left, right", "tl.dot(tl.abs(left), right"),
        words="other function, sign; wrong factor", operators="linear",
    ),
    "value of gelu squared": edit(
        (r"result = value \* 0\.5", "result = value * value * 0.5"),
        words="other function, wrong factor; sign", operators="gelu",
    ),
    "every second block is the one before": edit(
        (r"at = tl\.program_id\(0\) \* BLOCK \+ tl\.arange\(0, BLOCK\)\n    value",
         "at = tl.program_id(0) // 2 * 2 * BLOCK + tl.arange(0, BLOCK)\n    value"),
        words="zeros, uninitialised; mask, constant, wrong index", operators="gelu",
    ),
}  # fmt: skip
