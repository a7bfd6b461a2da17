"""Faults for building: look at them, run them, tune on them. Their figure is not published.

Each is what a wrong kernel or a wrong rewrite would compute, written with plain operators of torch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, edit, fits
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()
_PRODUCTS = "linear matmul mm bmm addmm baddbmm"


def _factors(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """The two factors of a product, the second with k as its last but one axis, and the bias."""
    if call.name in {"addmm", "baddbmm"}:
        return call.tensor(1), call.tensor(2), call.tensor(0)
    if call.name == "linear":
        return call.tensor(0, "input"), call.tensor(1, "weight").mT, call.get(2, "bias")
    return call.tensor(0), call.tensor(1), None


def _product(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    value = left @ right
    return value if bias is None else value + bias


# --- Products -------------------------------------------------------------------------------------


@FAULTS.fault(
    _PRODUCTS, kinds=["partial sum", "tail"], loose=["off by one reduction", "missing operand"]
)
def tail_along_k_dropped(call: Call) -> Any:
    """The last block of the common axis is left out, as by a loop over whole tiles only."""
    left, right, bias = _factors(call)
    k = left.shape[-1]
    fits(k >= 4 and right.dim() >= 2)
    kept = (k - 1) // 4 * 4 if k % 4 else k - max(k // 4, 1)
    return call.instead(_product(left[..., :kept], right[..., :kept, :], bias))


@FAULTS.fault(
    "linear addmm conv1d conv2d convolution",
    kinds=["missing bias", "missing operand"],
    loose=["offset", "axis offset"],
)
def bias_dropped(call: Call) -> Any:
    """The product alone."""
    if call.name == "addmm":
        return call.instead(call.tensor(1) @ call.tensor(2))
    bias = call.get(2, "bias")
    fits(isinstance(bias, Tensor))
    return call.put(2, None, "bias").run()


@FAULTS.fault(_PRODUCTS, kinds=["precision"])
def product_in_bfloat16(call: Call) -> Any:
    """The result goes through a bfloat16 buffer."""
    return call.instead(call.result().to(torch.bfloat16))


@FAULTS.fault("matmul bmm mm", kinds=["transpose"], loose=["permutation"])
def result_transposed(call: Call) -> Any:
    """Written with rows and columns exchanged."""
    value = call.result()
    fits(value.dim() >= 2 and value.shape[-1] == value.shape[-2] > 2)
    return call.instead(value.mT.contiguous())


@FAULTS.fault(
    "linear addmm matmul bmm mm conv2d conv1d convolution",
    kinds=["zeros"],
    loose=["uninitialised", "constant"],
)
def last_columns_not_written(call: Call) -> Any:
    """The last tile of the result is left as it was allocated."""
    value = call.result().clone()
    fits(value.dim() >= 2 and value.shape[-1] >= 4)
    value[..., -(value.shape[-1] // 4) :] = 0
    return call.instead(value)


@FAULTS.fault("linear mm matmul bmm addmm", kinds=["copy", "stale"], loose=["shift", "wrong index"])
def first_row_written_twice(call: Call) -> Any:
    """The last row is a copy of the first."""
    value = call.result().clone()
    fits(value.dim() >= 2 and value.shape[-2] >= 3)
    value[..., -1, :] = value[..., 0, :]
    return call.instead(value)


# --- Attention ------------------------------------------------------------------------------------


@FAULTS.fault("softmax log_softmax", kinds=["wrong axis"], loose=["wrong argument"])
def softmax_over_the_axis_before(call: Call) -> Any:
    """The last but one axis."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    fits(value.dim() >= 2)
    return call.put(1, (dim % value.dim()) - 1, "dim").run()


@FAULTS.fault(
    "scaled_dot_product_attention flash_attention",
    kinds=["scale", "wrong factor"],
    loose=["wrong argument"],
)
def attention_not_scaled(call: Call) -> Any:
    """The factor of the scores is 1."""
    return _attention(call, scale=1.0)


@FAULTS.fault(
    "scaled_dot_product_attention flash_attention masked_fill where",
    kinds=["mask", "causality"],
    loose=["shift"],
)
def mask_off_by_one(call: Call) -> Any:
    """The mask is moved by one position."""
    if call.name == "where":
        mask = call.get(0)
        fits(isinstance(mask, Tensor) and mask.dim() >= 1 and mask.shape[-1] > 1)
        return call.put(0, mask.roll(1, -1)).run()
    if call.name == "masked_fill":
        mask = call.get(1)
        fits(isinstance(mask, Tensor) and mask.dim() >= 1 and mask.shape[-1] > 1)
        return call.put(1, mask.roll(1, -1), "mask").run()
    mask = call.get(3, "attn_mask")
    if isinstance(mask, Tensor):
        return _attention(call, mask=mask.roll(1, -1))
    fits(call.get(5, "is_causal", default=False))
    rows, columns = call.tensor(0).shape[-2], call.tensor(1).shape[-2]
    return _attention(call, mask=torch.ones(rows, columns, dtype=torch.bool).tril(1))


def _attention(call: Call, scale: float | None = None, mask: Tensor | None = None) -> Any:
    query, key, value = call.tensor(0, "query"), call.tensor(1, "key"), call.tensor(2, "value")
    flash = call.name == "flash_attention"
    if mask is None:
        mask = call.kwargs.get("attn_mask") if flash else call.get(3, "attn_mask")
    causal = call.get(4 if flash else 5, "is_causal", default=False)
    scale = scale if scale is not None else call.kwargs.get("scale")
    groups = query.shape[-3] // key.shape[-3]
    if groups > 1:
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = query @ key.mT * (scale or 1 / math.sqrt(query.shape[-1]))
    if causal and mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return call.instead(functional.softmax(scores, -1) @ value)


# --- Norms and statistics -------------------------------------------------------------------------


@FAULTS.fault(
    "layer_norm rms_norm batch_norm group_norm batch_norm_from_statistics",
    kinds=["eps"],
    loose=["axis scale", "wrong argument"],
)
def eps_a_thousand_times_larger(call: Call) -> Any:
    """1e-2 instead of 1e-5."""
    place = {"layer_norm": 4, "rms_norm": 3, "batch_norm": 7, "group_norm": 4}.get(call.name, 6)
    fits(call.name != "batch_norm" or not call.get(5, "training", default=False))
    eps = call.get(place, "eps", default=1e-5)
    return call.put(place, 1000 * (eps or 1e-6), "eps").run()


@FAULTS.fault(
    "var std var_mean",
    kinds=["off by one reduction", "scale", "wrong statistics"],
    loose=["wrong argument", "wrong factor"],
)
def other_divisor_of_the_variance(call: Call) -> Any:
    """Divided by n instead of n - 1, or the other way round."""
    value = call.tensor(0)
    correction = call.kwargs.get("correction", 1)
    if "unbiased" in call.kwargs:
        correction = int(call.kwargs["unbiased"])
    dim = call.get(1, "dim", default=None)
    sizes = math.prod(value.shape[d] for d in ([dim] if isinstance(dim, int) else dim or range(
        value.dim())))  # fmt: skip
    now = max(sizes - correction, 1) / max(sizes - (1 - correction), 1)
    return call.instead(call.result() * (now if call.name != "std" else math.sqrt(now)))


@FAULTS.fault(
    "mean",
    kinds=["scale", "wrong factor", "wrong reduction"],
    loose=["missing reduction", "off by one reduction", "other function"],
)
def mean_without_division(call: Call) -> Any:
    """The sum."""
    value, result = call.tensor(0), call.result()
    return call.instead(result * (value.numel() / result.numel()))


@FAULTS.fault("sum mean", kinds=["off by one reduction", "partial sum", "tail"])
def last_element_not_added(call: Call) -> Any:
    """A loop that ends one too early."""
    value, dim = call.tensor(0), call.get(1, "dim")
    dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
    fits(isinstance(dim, int) and value.shape[dim] >= 3)
    short = value.narrow(dim, 0, value.shape[dim] - 1)
    share = 1.0 if call.name == "sum" else (value.shape[dim] - 1) / value.shape[dim]
    return call.instead(call.put(0, short).run() * share)


# --- Elementwise ----------------------------------------------------------------------------------


@FAULTS.fault("sub div", kinds=["swapped operands", "sign"])
def operands_swapped(call: Call) -> Any:
    """B - a, b / a."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and left.is_floating_point())
    fits(not (isinstance(right, Tensor) and bool((right == 0).any())))
    swapped = right - left if call.name == "sub" else right / left
    fits(bool(swapped.isfinite().all()))
    return call.instead(swapped)


@FAULTS.fault("gelu", kinds=["approximation", "other function"], loose=["wrong argument"])
def gelu_by_tanh(call: Call) -> Any:
    """The approximation that other libraries use."""
    now = call.kwargs.get("approximate", "none")
    other = "tanh" if now == "none" else "none"
    return functional.gelu(call.tensor(0, "input"), approximate=other)


@FAULTS.fault("relu", kinds=["other function"], loose=["wrong argument"])
def leaky_relu(call: Call) -> Any:
    """A slope of 0.01 below zero."""
    return functional.leaky_relu(call.tensor(0, "input"))


@FAULTS.fault("silu", kinds=["other function"], loose=["approximation"])
def silu_becomes_gelu(call: Call) -> Any:
    """The wrong activation."""
    return functional.gelu(call.tensor(0, "input"))


@FAULTS.fault("mul div", kinds=["scale", "wrong factor", "missing operand"], loose=["copy"])
def factor_left_out(call: Call) -> Any:
    """A multiplication by a number is not done."""
    other = call.args[1]
    fits(isinstance(other, int | float) and other != 1)
    return call.instead(call.tensor(0).clone())


@FAULTS.fault("linear layer_norm conv2d add", kinds=["scale", "wrong factor"])
def one_percent_too_large(call: Call) -> Any:
    """A factor that is slightly off."""
    return call.instead(call.result() * 1.01)


@FAULTS.fault(
    "add", kinds=["residual", "copy", "missing operand"], loose=["offset", "missing bias"]
)
def residual_dropped(call: Call) -> Any:
    """One of two summands is not added."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and isinstance(right, Tensor))
    fits(left.shape == right.shape and left.is_floating_point())
    return call.instead(right.clone())


@FAULTS.fault(
    "add sub", kinds=["sign"], loose=["residual", "offset", "other function", "wrong factor"]
)
def sign_of_the_second_summand(call: Call) -> Any:
    """A - b instead of a + b."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and left.is_floating_point() and not call.kwargs)
    return call.instead(left - right if call.name == "add" else left + right)


@FAULTS.fault("tanh sigmoid gelu silu", kinds=["clipped"])
def clipped_at_half(call: Call) -> Any:
    """Large results are cut off."""
    value = call.result()
    return call.instead(value.clamp(max=float(value.max()) / 2))


@FAULTS.fault("sin cos", kinds=["other function"])
def sine_and_cosine_exchanged(call: Call) -> Any:
    """The other one of the two."""
    value = call.tensor(0)
    return value.cos() if call.name == "sin" else value.sin()


@FAULTS.fault("exp", kinds=["approximation"], loose=["other function"])
def exp_by_a_power(call: Call) -> Any:
    """(1 + x / 1024) ** 1024."""
    value = call.tensor(0)
    return call.instead((1 + value / 1024).clamp(min=0) ** 1024)


@FAULTS.fault("pow square", kinds=["other function"], loose=["wrong argument"])
def absolute_value_for_a_square(call: Call) -> Any:
    """|x| instead of x**2."""
    fits(call.name == "square" or call.args[1] == 2)
    return call.instead(call.tensor(0).abs())


# --- Moving values --------------------------------------------------------------------------------


@FAULTS.fault("embedding", kinds=["shift", "wrong index"], loose=["permutation", "copy"])
def next_row_of_the_table(call: Call) -> Any:
    """The index is one too large."""
    places = [0, 1] if call.get(0).is_floating_point() else [1, 0]
    table, indices = (call.args[place] for place in places)
    return call.instead(table[(indices + 1) % len(table)])


@FAULTS.fault("roll flip permute transpose", kinds=["sign"], loose=[])
def one_value_negated_on_the_way(call: Call) -> Any:
    """A copy that negates what it copies."""
    return call.instead(-call.result())


@FAULTS.fault(
    "split chunk unbind", kinds=["stale", "copy", "wrong index"], loose=["permutation", "shift"]
)
def first_part_twice(call: Call) -> Any:
    """The second part is the first one."""
    parts = call.run()
    fits(len(parts) > 1 and parts[0].shape == parts[1].shape and parts[0].is_floating_point())
    return (parts[0], parts[0].clone(), *parts[2:])


@FAULTS.fault("conv2d conv1d convolution", kinds=["border", "padding", "wrong argument"])
def padding_repeats_the_border(call: Call) -> Any:
    """The border is padded with the nearest values instead of zeros."""
    value, padding = call.tensor(0, "input"), call.get(4, "padding")
    if isinstance(padding, int):
        padding = [padding] * (value.dim() - 2)
    fits(call.name != "convolution" or not call.args[6])
    fits(padding and not isinstance(padding, str) and any(padding))
    sides = [side for size in reversed(padding) for side in (size, size)]
    wider = functional.pad(value, sides, mode="replicate")
    return call.put(0, wider, "input").put(4, [0] * len(padding), "padding").run()


@FAULTS.fault(
    "max_pool2d avg_pool2d adaptive_avg_pool2d",
    kinds=["shift", "wrong index"],
    loose=["permutation"],
)
def pooled_one_further(call: Call) -> Any:
    """The windows begin one too late."""
    return call.put(0, call.tensor(0).roll(-1, -1)).run()


# --- Backward -------------------------------------------------------------------------------------


@FAULTS.fault(
    "gelu_backward silu_backward",
    kinds=["other function", "approximation"],
    loose=["zeros", "mask"],
    backward=True,
)
def derivative_of_relu(call: Call) -> Any:
    """The gradient passes where the input is positive."""
    return call.instead(call.tensor(0) * (call.tensor(1) > 0))


@FAULTS.fault(
    "native_layer_norm_backward",
    kinds=["axis offset", "missing operand", "wrong statistics"],
    loose=["offset"],
    backward=True,
)
def gradient_of_a_norm_without_its_mean(call: Call) -> Any:
    """The mean of the gradient is not subtracted."""
    gradient, value, shape, mean, rstd, weight = call.args[:6]
    axes = list(range(-len(shape), 0))
    normal = (value - mean) * rstd
    weighted = gradient * weight
    return call.instead(rstd * (weighted - normal * (weighted * normal).mean(axes, keepdim=True)))


@FAULTS.fault("sum", kinds=["off by one reduction", "partial sum", "tail"], backward=True)
def gradient_of_the_bias_misses_a_row(call: Call) -> Any:
    """The last row of the batch is not added."""
    value, dim = call.tensor(0), call.get(1, "dim")
    fits(isinstance(dim, list | tuple) and list(dim) == [0] and len(value) > 2)
    return call.put(0, value[:-1]).run()


# --- Edited text ----------------------------------------------------------------------------------

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
}  # fmt: skip
