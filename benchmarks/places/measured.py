"""Faults for the published figure only. Nobody looks at them, or at their rows, while building.

Each is what a wrong kernel or a wrong rewrite would compute. None of them is in `building.py`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, edit, fits
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()


# --- Attention ------------------------------------------------------------------------------------


def _attend(call: Call, *, columns: slice | None = None, unmasked: bool = False) -> Any:
    """Attention written out, with some of its settings changed."""
    is_flash = call.name == "flash_attention"
    query, key, value = (call.tensor(i, n) for i, n in enumerate(("query", "key", "value")))
    mask = call.kwargs.get("attn_mask") if is_flash else call.get(3, "attn_mask")
    causal = call.get(4 if is_flash else 5, "is_causal", default=False)
    repeats = query.size(-3) // key.size(-3)
    key, value = (one.repeat_interleave(repeats, -3) for one in (key, value))
    scores = torch.einsum("...qd,...kd->...qk", query, key)
    scores = scores * (call.kwargs.get("scale") or query.size(-1) ** -0.5)
    if causal:
        mask = torch.ones(scores.shape[-2:]).tril() > 0
    if unmasked:
        fits(isinstance(mask, Tensor) and not causal)
        mask = None
    if isinstance(mask, Tensor):
        scores = torch.where(mask, scores, -math.inf) if mask.dtype == torch.bool else scores + mask
    if columns is not None:
        fits(scores.size(-1) > 2 and not causal and mask is None)
        scores, value = scores[..., columns], value[..., columns, :]
    return call.instead(scores.softmax(-1) @ value)


@FAULTS.fault("scaled_dot_product_attention flash_attention", kinds=["mask", "causality"])
def tokens_do_not_see_themselves(call: Call) -> Any:
    """The causal mask begins one position too early."""
    query = call.tensor(0, "query")
    causal = call.get(4 if call.name == "flash_attention" else 5, "is_causal", default=False)
    fits(causal and query.size(-2) > 2)
    # The first token keeps itself: it has nobody else.
    allowed = torch.ones(query.size(-2), call.tensor(1).size(-2)).tril(-1) > 0
    allowed[0, 0] = True
    scale = call.kwargs.get("scale") or query.size(-1) ** -0.5
    scores = (query @ call.tensor(1).mT * scale).masked_fill(~allowed, -math.inf)
    return call.instead(scores.softmax(-1) @ call.tensor(2))


@FAULTS.fault(
    "scaled_dot_product_attention flash_attention", kinds=["mask"], loose=["missing operand"]
)
def padding_is_attended_to(call: Call) -> Any:
    """The mask is not applied."""
    return _attend(call, unmasked=True)


@FAULTS.fault(
    "scaled_dot_product_attention flash_attention",
    kinds=["partial sum", "tail", "off by one reduction", "mask"],
)
def last_key_left_out(call: Call) -> Any:
    """The loop over the keys ends one too early."""
    return _attend(call, columns=slice(None, -1))


@FAULTS.fault(
    "softmax",
    kinds=["off by one reduction", "mask", "partial sum", "tail"],
    loose=["wrong reduction"],
)
def sum_of_softmax_without_one_column(call: Call) -> Any:
    """The denominator lacks the last exponential."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    fits(value.size(dim) > 2)
    exps = (value - value.amax(dim, keepdim=True)).exp()
    return call.instead(exps / exps.narrow(dim, 0, value.size(dim) - 1).sum(dim, keepdim=True))


@FAULTS.fault("tril triu", kinds=["mask", "causality"], loose=["shift", "wrong argument"])
def diagonal_one_off(call: Call) -> Any:
    """One more diagonal."""
    return call.put(1, call.get(1, "diagonal", default=0) + 1, "diagonal").run()


@FAULTS.fault("le ge lt gt", kinds=["mask", "causality", "tie-breaking", "other function"])
def comparison_with_or_without_equality(call: Call) -> Any:
    """< instead of <=."""
    other = {"le": "lt", "lt": "le", "ge": "gt", "gt": "ge"}[call.name]
    fits(isinstance(call.args[0], Tensor))
    return getattr(torch, other)(*call.args)


@FAULTS.fault("masked_fill where", kinds=["mask"])
def mask_read_from_the_other_end(call: Call) -> Any:
    """The mask is reversed along its last axis."""
    place = 0 if call.name == "where" else 1
    mask = call.args[place]
    return call.put(place, mask.flip(-1)).run()


# --- Products -------------------------------------------------------------------------------------


@FAULTS.fault("linear mm addmm matmul", kinds=["transpose"], loose=["swapped operands"])
def weight_read_transposed(call: Call) -> Any:
    """A square weight in the other layout."""
    place = 2 if call.name == "addmm" else 1
    weight = call.tensor(place, "weight", "other", "mat2")
    fits(weight.dim() == 2 and weight.size(0) == weight.size(1) > 2)
    return call.put(place, weight.t(), "weight", "other", "mat2").run()


@FAULTS.fault("linear mm addmm bmm matmul", kinds=["precision"])
def accumulated_in_bfloat16(call: Call) -> Any:
    """Partial sums of 8 are rounded and added in bfloat16."""
    if call.name == "linear":
        left, right, bias = call.tensor(0), call.tensor(1).t(), call.get(2, "bias")
    elif call.name == "addmm":
        left, right, bias = call.tensor(1), call.tensor(2), call.tensor(0)
    else:
        left, right, bias = call.tensor(0), call.tensor(1), None
    fits(left.size(-1) > 8 and right.dim() > 1)
    total = None
    for start in range(0, left.size(-1), 8):
        part = (left[..., start : start + 8] @ right[..., start : start + 8, :]).bfloat16()
        total = part if total is None else total + part
    value = total.to(left.dtype)
    return call.instead(value if bias is None else value + bias)


@FAULTS.fault("linear mm addmm bmm matmul conv2d conv1d convolution", kinds=["precision"])
def operand_rounded_to_half(call: Call) -> Any:
    """The left operand goes through float16."""
    place = 1 if call.name == "addmm" else 0
    value = call.tensor(place, "input")
    return call.put(place, value.half().to(value.dtype), "input").run()


@FAULTS.fault(
    "linear addmm", kinds=["repeated bias"], loose=["offset", "axis offset", "wrong factor"]
)
def bias_added_twice(call: Call) -> Any:
    """Once in the kernel and once behind it."""
    bias = call.get(2, "bias") if call.name == "linear" else call.tensor(0)
    fits(isinstance(bias, Tensor))
    return call.instead(call.result() + bias)


@FAULTS.fault(
    "linear mm addmm bmm matmul layer_norm", kinds=["stale", "copy"], loose=["shift", "wrong index"]
)
def last_tile_is_the_one_before(call: Call) -> Any:
    """The last columns still hold what the tile before them wrote."""
    value = call.result().clone()
    tile = value.size(-1) // 4
    fits(tile > 0)
    value[..., -tile:] = value[..., -2 * tile : -tile]
    return call.instead(value)


@FAULTS.fault("conv2d conv1d convolution", kinds=["permutation"], loose=["transpose"])
def kernel_flipped(call: Call) -> Any:
    """A true convolution where a correlation was asked for."""
    weight = call.tensor(1, "weight")
    fits(weight.size(-1) > 1)
    return call.put(1, weight.flip(-1), "weight").run()


@FAULTS.fault(
    "bmm matmul",
    kinds=["wrong index", "shift", "permutation"],
    loose=["wrong rank's shard", "copy"],
)
def product_of_the_next_head(call: Call) -> Any:
    """The second factor is taken from the next batch."""
    left, right = call.tensor(0), call.tensor(1)
    fits(right.dim() > 2 and right.size(-3) > 1)
    return call.instead(left @ right.roll(-1, -3))


# --- Norms and statistics -------------------------------------------------------------------------


@FAULTS.fault("layer_norm rms_norm", kinds=["eps"], loose=["axis scale"])
def eps_outside_the_root(call: Call) -> Any:
    """Divided by sqrt(v) + eps."""
    value, shape = call.tensor(0), call.get(1)
    axes = list(range(-len(shape), 0))
    weight, bias = call.get(2, "weight"), call.get(3, "bias") if call.name == "layer_norm" else None
    eps = call.get(4 if call.name == "layer_norm" else 3, "eps") or 1e-5
    centred = value - value.mean(axes, keepdim=True) if call.name == "layer_norm" else value
    normal = centred / ((centred * centred).mean(axes, keepdim=True).sqrt() + eps)
    normal = normal if weight is None else normal * weight
    return call.instead(normal if bias is None else normal + bias)


@FAULTS.fault("rsqrt", kinds=["eps"], loose=["axis scale"])
def eps_added_again(call: Call) -> Any:
    """1 / (sqrt(x) + 1e-4)."""
    return call.instead(1 / (call.tensor(0).sqrt() + 1e-4))


@FAULTS.fault("group_norm", kinds=["wrong argument", "wrong statistics"])
def other_number_of_groups(call: Call) -> Any:
    """Half as many groups."""
    groups = call.get(1, "num_groups")
    fits(groups % 2 == 0)
    return call.put(1, groups // 2, "num_groups").run()


@FAULTS.fault(
    "batch_norm batch_norm_from_statistics",
    kinds=["axis offset", "wrong statistics", "wrong index"],
    loose=["wrong argument"],
)
def statistics_of_the_neighbouring_channel(call: Call) -> Any:
    """Mean of the next channel."""
    place = 1 if call.name == "batch_norm" else 3
    return call.put(place, call.tensor(place).roll(1), "running_mean").run()


@FAULTS.fault("mean sum amax", kinds=["wrong axis"], loose=["wrong argument"])
def reduced_over_the_wrong_axis(call: Call) -> Any:
    """Another axis of the same length."""
    value, dim = call.tensor(0), call.get(1, "dim")
    dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
    fits(isinstance(dim, int))
    dim %= value.dim()
    others = [i for i in range(value.dim()) if i != dim and value.size(i) == value.size(dim) > 1]
    fits(others)
    return call.put(0, value.transpose(dim, others[-1])).run()


@FAULTS.fault("mean", kinds=["scale", "off by one reduction", "wrong factor"])
def mean_divided_by_one_less(call: Call) -> Any:
    """N - 1."""
    n = call.tensor(0).numel() // call.result().numel()
    fits(n > 2)
    return call.instead(call.result() * (n / (n - 1)))


@FAULTS.fault("sum", kinds=["off by one reduction", "partial sum", "tail"])
def first_element_not_added(call: Call) -> Any:
    """A loop that begins at 1."""
    value, dim = call.tensor(0), call.get(1, "dim")
    dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
    fits(isinstance(dim, int) and value.size(dim) > 2)
    return call.put(0, value.narrow(dim, 1, value.size(dim) - 1)).run()


# --- Elementwise ----------------------------------------------------------------------------------


@FAULTS.fault("mul div", kinds=["scale", "wrong factor"])
def factor_applied_twice(call: Call) -> Any:
    """Multiplied by a number two times."""
    other = call.args[1]
    fits(isinstance(other, int | float) and other not in {1, -1, 0})
    return call.instead(call.result() * other if call.name == "mul" else call.result() / other)


@FAULTS.fault("neg", kinds=["sign"], loose=["copy", "wrong factor"])
def not_negated(call: Call) -> Any:
    """The sign of a rotated half is forgotten."""
    return call.instead(call.tensor(0).clone())


@FAULTS.fault("relu gelu silu tanh", kinds=["clipped"])
def saturates_early(call: Call) -> Any:
    """Everything above 70 % of the largest value is that."""
    value = call.result()
    return call.instead(value.clamp(max=0.7 * float(value.abs().max())))


@FAULTS.fault("mul add sub div", kinds=["precision"])
def computed_in_bfloat16(call: Call) -> Any:
    """Cast first, then computed."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and isinstance(right, Tensor) and left.is_floating_point())
    fits(right.is_floating_point())
    return call.instead(call.put(0, left.bfloat16()).put(1, right.bfloat16()).run())


@FAULTS.fault("silu", kinds=["other function", "approximation"])
def hard_swish(call: Call) -> Any:
    """The piecewise form."""
    return functional.hardswish(call.tensor(0, "input"))


@FAULTS.fault("gelu", kinds=["approximation", "other function"])
def gelu_by_a_sigmoid(call: Call) -> Any:
    """X * sigmoid(1.702 x)."""
    value = call.tensor(0, "input")
    return value * torch.sigmoid(1.702 * value)


@FAULTS.fault("tanh sigmoid", kinds=["approximation"], loose=["other function"])
def rational_approximation(call: Call) -> Any:
    """Pade's of tanh."""
    value = call.tensor(0) / (2 if call.name == "sigmoid" else 1)
    square = value * value
    result = (value * (27 + square) / (27 + 9 * square)).clamp(-1, 1)
    return call.instead(result if call.name == "tanh" else (1 + result) / 2)


@FAULTS.fault("mul", kinds=["residual"], loose=["offset", "missing bias", "axis offset"])
def multiplied_and_added(call: Call) -> Any:
    """A fused multiply-add with an addend that is not zero."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and isinstance(right, Tensor))
    fits(left.shape == right.shape and left.is_floating_point())
    return call.instead(left * right + right)


# --- Moving values --------------------------------------------------------------------------------


@FAULTS.fault("cat", kinds=["permutation", "swapped operands", "shift"])
def concatenated_in_the_other_order(call: Call) -> Any:
    """b, a."""
    parts = call.get(0, "tensors")
    fits(len(parts) == 2 and parts[0].shape == parts[1].shape)
    return call.put(0, [parts[1], parts[0]], "tensors").run()


@FAULTS.fault("getitem", kinds=["shift", "wrong index"], loose=["wrong argument"])
def slice_off_by_one(call: Call) -> Any:
    """The slice begins and ends one later."""
    value, index = call.tensor(0), call.args[1]
    index = index if isinstance(index, tuple) else (index,)
    fits(any(isinstance(one, slice) and one != slice(None) for one in index))
    axis = next(i for i, one in enumerate(index) if isinstance(one, slice) and one != slice(None))
    if Ellipsis in index[:axis]:
        axis -= sum(one is not None for one in index)
    return value.roll(-1, axis)[index]


@FAULTS.fault("slice select narrow", kinds=["shift", "wrong index"], loose=["wrong argument"])
def begins_one_later(call: Call) -> Any:
    """A start that is one too large."""
    value, dim = call.tensor(0), call.get(1, "dim", default=0)
    fits(value.size(dim) > 1)
    return call.put(0, value.roll(-1, dim)).run()


@FAULTS.fault("gather index_select", kinds=["shift", "wrong index", "permutation"], loose=["copy"])
def index_shifted(call: Call) -> Any:
    """The index before."""
    value, dim, index = call.tensor(0), call.get(1, "dim"), call.get(2, "index")
    return call.put(2, (index - 1) % value.size(dim), "index").run()


@FAULTS.fault("embedding", kinds=["zeros"], loose=["mask", "wrong argument"])
def first_token_taken_for_padding(call: Call) -> Any:
    """Rows of the smallest index are zero."""
    table, indices = call.args[:2]
    if not table.is_floating_point():
        table, indices = indices, table
    return call.instead(call.result() * (indices != indices.min()).unsqueeze(-1))


@FAULTS.fault("split chunk unbind", kinds=["permutation", "swapped operands", "wrong index"])
def parts_exchanged(call: Call) -> Any:
    """The first two results are exchanged."""
    parts = call.run()
    fits(len(parts) > 1 and parts[0].shape == parts[1].shape and parts[0].is_floating_point())
    return (parts[1], parts[0], *parts[2:])


@FAULTS.fault("topk sort", kinds=["other function"], loose=["shift", "permutation"])
def selected_by_magnitude(call: Call) -> Any:
    """The values in the order of their absolute values."""
    value = call.tensor(0)
    fits(bool((value < 0).any()))
    positions = call.put(0, value.abs()).run()[1]
    dim = call.get(2 if call.name == "topk" else 1, "dim", default=-1)
    return (value.gather(dim, positions), positions)


@FAULTS.fault("argmax", kinds=["tie-breaking"], loose=["other function"])
def last_of_equal_maxima(call: Call) -> Any:
    """Ties go to the last one."""
    value, dim = call.get(0), call.get(1, "dim")
    fits(isinstance(dim, int))
    return value.size(dim) - 1 - value.flip(dim).argmax(dim)


@FAULTS.fault("avg_pool2d", kinds=["wrong argument"], loose=["border", "axis scale"])
def padding_counted_or_not(call: Call) -> Any:
    """The other value of count_include_pad."""
    return call.put(5, not call.get(5, "count_include_pad", default=True),
                    "count_include_pad").run()  # fmt: skip


@FAULTS.fault("interpolate", kinds=["wrong argument"])
def corners_aligned(call: Call) -> Any:
    """The other value of align_corners."""
    fits(call.get(3, "mode", default="nearest") == "bilinear")
    return call.put(4, not call.get(4, "align_corners", default=False), "align_corners").run()


@FAULTS.fault(
    "cross_entropy nll_loss",
    kinds=["mask", "scale", "wrong factor"],
    loose=["off by one reduction", "wrong argument"],
)
def ignored_targets_counted(call: Call) -> Any:
    """The mean is divided by all targets."""
    target = call.get(1, "target")
    share = (target != call.get(5, "ignore_index", default=-100)).double().mean()
    return call.instead(call.result() * share)


# --- Backward -------------------------------------------------------------------------------------


@FAULTS.fault(
    "embedding_dense_backward",
    kinds=["accumulation", "lost accumulation", "missing reduction"],
    loose=["stale", "partial sum"],
    backward=True,
)
def last_write_wins(call: Call) -> Any:
    """The rows of a token that occurs twice are not added."""
    gradient, indices, rows = call.args[:3]
    table = gradient.new_zeros(rows, gradient.size(-1))
    for index, row in zip(indices.flatten().tolist(), gradient.flatten(0, -2), strict=True):
        table[index] = row
    return call.instead(table)


@FAULTS.fault(
    "_softmax_backward_data", kinds=["missing operand"], loose=["axis offset"], backward=True
)
def softmax_gradient_without_its_sum(call: Call) -> Any:
    """The sum over the row is not subtracted."""
    return call.instead(call.tensor(0) * call.tensor(1))


@FAULTS.fault(
    "threshold_backward tanh_backward sigmoid_backward",
    kinds=["scale", "wrong factor"],
    backward=True,
)
def derivative_halved(call: Call) -> Any:
    """Half of the gradient."""
    return call.instead(call.result() / 2)


@FAULTS.fault("mm", kinds=["transpose"], backward=True)
def gradient_of_a_weight_transposed(call: Call) -> Any:
    """Of a square weight."""
    value = call.result()
    fits(value.size(0) == value.size(1) > 2)
    return call.instead(value.t().contiguous())


# --- Edited text ----------------------------------------------------------------------------------

# Of Python code: a line of a model, or a statement that torch.fx generated.
EDITS = {
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
