"""Faults of single operators: arithmetic, activations, precision, overflow, indices, writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from paritas.core.diagnosis.formats import format_of
from paritas.core.numerics.bits import dtype_name
from paritas.core.operators.catalogue import operators_of
from paritas.core.operators.rounding import rounds
from paritas.core.results.items import ItemKind
from paritas.mutants.programs import (
    CallPlace,
    FaultRule,
    RunningCall,
    is_number,
    number_in,
    result_position,
)

if TYPE_CHECKING:
    from collections.abc import Callable


# --- Arithmetic: operation, addend, factor, epsilon -----------------------------------------------

# A smaller constant in an addition is an epsilon that keeps a denominator from zero.
_LARGEST_EPSILON = 1e-2
_RSQRT = -0.5  # as an exponent
# Products that are added to their first argument, and normalisations with weight and bias.
ADDED_PRODUCTS = operators_of("products added to a tensor")
# Other batch norms return a fourth value, or write to an argument.
NORMS = operators_of("layer norm", "batch norm", "group norm") - {
    *("cudnn_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"),
}
_WITH_EPSILON = NORMS | operators_of("rms norm")
_ATTENTIONS = operators_of("attention")


def _calls_named(*names: str) -> Callable[[CallPlace], list[str]]:
    return lambda call_place: (
        [""] if call_place.name in names and call_place.parts(floating=False) else []
    )


def _alpha(call: RunningCall) -> Any:
    return call.kwargs.get("alpha", 1)


def _shaped_as_right(result: Any, call: RunningCall) -> Tensor:
    """A wrong value in the shape and dtype of the correct one."""
    right: Tensor = call.right()
    return torch.as_tensor(result).to(right.dtype).expand(right.shape).clone()


# --- 1, 2, 3, 14: another operation ---------------------------------------------------------------


def _sum_of_difference(call: RunningCall, _: str) -> Any:
    alpha = call.args[2] if len(call.args) > 2 else _alpha(call)  # noqa: PLR2004
    left, right = call.args[:2]
    if call.name == "rsub":
        return torch.add(torch.mul(left, alpha), right)
    return torch.add(left, right, alpha=alpha)


def _reciprocal_roots(call_place: CallPlace) -> list[str]:
    root = call_place.name == "pow" and call_place.argument(1) == _RSQRT
    return [""] if call_place.name == "rsqrt" or root else []


# --- 4, 5, 35: addends ----------------------------------------------------------------------------


def addends(call_place: CallPlace) -> list[str]:
    """The addends of an addition that are tensors, or numbers other than an epsilon."""
    if call_place.name != "add" or not call_place.parts(floating=False):
        return []
    addend_details = []
    for side, other in ((0, 1), (1, 0)):
        value = call_place.argument(side)
        addend = isinstance(value, Node) or (is_number(value) and abs(value) >= _LARGEST_EPSILON)
        if addend and isinstance(call_place.argument(other), Node):
            addend_details.append(f"argument {side}")
    return addend_details


def is_bias(call_place: CallPlace, detail: str) -> bool:
    """Whether an addend is a vector added to every row."""
    value = call_place.tensor_argument(number_in(detail))
    return value is not None and value.dim() < len(call_place.shape) and value.numel() > 1


def _bias_position(call: CallPlace | RunningCall) -> int | None:
    """Where an operator takes a bias, if it takes one."""
    if call.name in ADDED_PRODUCTS:
        return 0
    takes_bias = call.name == "convolution" or call.name in NORMS
    return call.place_of("bias") if takes_bias else None


def _droppable(call_place: CallPlace) -> list[str]:
    position = _bias_position(call_place)
    if position is not None:
        return ["bias"] if isinstance(call_place.argument(position), Node) else []
    if call_place.backward and is_gradient(call_place):
        return []  # that is untied_gradient
    return addends(call_place)


def is_gradient(call_place: CallPlace) -> bool:
    """Whether the call's result is a gradient, possibly through views."""
    return any(item.kind is ItemKind.GRADIENT for item in call_place.ends.values())


def _drop_addend(call: RunningCall, detail: str) -> Any:
    if detail != "bias":
        return without_addend(call, detail)
    position = _bias_position(call) or 0
    missing = torch.zeros_like(call.args[position]) if call.name in ADDED_PRODUCTS else None
    return call.call_with((position, missing))


def without_addend(call: RunningCall, detail: str) -> Tensor:
    """A sum of two without one of them."""
    left, right = call.args[:2]
    kept_addend = torch.mul(right, _alpha(call)) if detail == "argument 0" else left
    return _shaped_as_right(kept_addend, call)


def _double_addend(call: RunningCall, detail: str) -> Any:
    left, right = call.args[:2]
    again = left if detail == "argument 0" else torch.mul(right, _alpha(call))
    return torch.add(call.right(), again)


def _biases(call_place: CallPlace) -> list[str]:
    position = _bias_position(call_place)
    if position is not None and call_place.name not in NORMS:
        return ["bias"] if isinstance(call_place.argument(position), Node) else []
    return [detail for detail in addends(call_place) if is_bias(call_place, detail)]


def _bias_twice(call: RunningCall, detail: str) -> Any:
    if detail != "bias":
        return _double_addend(call, detail)
    position = _bias_position(call) or 0
    return call.call_with((position, torch.mul(call.args[position], 2)))


# --- 6, 7, 8: factors -----------------------------------------------------------------------------


def scale_result(factor: float) -> FaultRule:
    """A result times `factor`."""
    return FaultRule(
        lambda call_place: (
            [detail for detail, _ in call_place.parts()] if call_place.computes else []
        ),
        lambda call, detail: call.spoil(detail, lambda part: torch.mul(part, factor)),
    )


def _has_scale(call_place: CallPlace) -> list[str]:
    if call_place.name in _ATTENTIONS:
        return [""]
    if (
        call_place.name not in {"mul", "div"}
        or not call_place.parts()
        or call_place.tensor_argument(0) is None
    ):
        return []
    scale, traced = call_place.argument(1), call_place.tensor_argument(1)
    if traced is not None:
        return [""] if traced.dim() == 0 and len(call_place.shape) > 0 else []
    return [""] if is_number(scale) and scale != 1 else []


def _drop_scale(call: RunningCall, _: str) -> Any:
    if call.name in _ATTENTIONS:
        return call.call_with(scale=1.0)
    return _shaped_as_right(call.args[0], call)


# --- 9, 10: epsilons ------------------------------------------------------------------------------


def _has_epsilon(call_place: CallPlace) -> list[str]:
    position = 1 if call_place.name in {"add", "clamp_min"} else None
    if call_place.name in _WITH_EPSILON:
        position = call_place.place_of("epsilon" if "miopen" in call_place.name else "eps")
    value: Any = None if position is None else call_place.argument(position)
    is_epsilon = is_number(value) and 0 < value <= _LARGEST_EPSILON and call_place.parts()
    return [f"argument {position}"] if is_epsilon else []


def _with_epsilon(call: RunningCall, detail: str, factor: float) -> Any:
    position = number_in(detail.partition(",")[0])
    if factor == 0 and call.name == "clamp_min":
        return _shaped_as_right(call.args[0], call)
    return call.call_with((position, call.args[position] * factor))


ARITHMETIC_FAULTS: dict[str, FaultRule] = {
    "mul_to_add": FaultRule(
        lambda call_place: [""] if call_place.name == "mul" and call_place.parts() else [],
        lambda call, _: torch.add(call.args[0], call.args[1]),
    ),
    "add_to_sub": FaultRule(
        _calls_named("add"),
        lambda call, _: torch.sub(call.args[0], call.args[1], alpha=_alpha(call)),
    ),
    "sub_to_add": FaultRule(_calls_named("sub", "rsub"), _sum_of_difference),
    "dropped_addend": FaultRule(_droppable, _drop_addend),
    "doubled_addend": FaultRule(
        lambda call_place: [
            detail for detail in addends(call_place) if not is_bias(call_place, detail)
        ],
        _double_addend,
    ),
    "scaled_by_percent": scale_result(1.01),
    "scaled_by_permille": scale_result(1.001),
    "missing_scale": FaultRule(_has_scale, _drop_scale),
    "dropped_epsilon": FaultRule(
        _has_epsilon, lambda call, detail: _with_epsilon(call, detail, 0.0)
    ),
    "larger_epsilon": FaultRule(
        lambda call_place: [
            f"{detail}, times {n}" for detail in _has_epsilon(call_place) for n in (2, 10)
        ],
        lambda call, detail: _with_epsilon(call, detail, number_in(detail)),
    ),
    "rsqrt_to_sqrt": FaultRule(_reciprocal_roots, lambda call, _: torch.sqrt(call.args[0])),
    "bias_on_every_rank": FaultRule(_biases, _bias_twice),
}


# --- Activations, forward and backward ------------------------------------------------------------

aten = torch.ops.aten

# Which activation is mistaken for which is the fault, so an activation is written here by hand.
_OTHERS: dict[str, Callable[..., Any]] = {
    "relu": F.gelu,
    "gelu": F.silu,
    "silu": F.gelu,
    "tanh": torch.erf,
    "erf": torch.tanh,
    "sigmoid": F.hardsigmoid,
    "hardsigmoid": torch.sigmoid,
    "elu": F.relu,
    "leaky_relu": F.relu,
    "softplus": F.relu,
    "hardswish": F.silu,
    "mish": F.silu,
    "hardtanh": torch.tanh,
    "log_sigmoid_forward": F.relu,
}
# Functions of the incoming gradient and the saved tensor.
_OTHERS_BACKWARD: dict[str, Callable[..., Any]] = {
    "gelu_backward": aten.silu_backward.default,
    "silu_backward": aten.gelu_backward.default,
    "tanh_backward": aten.sigmoid_backward.default,
    "sigmoid_backward": aten.tanh_backward.default,
    "threshold_backward": lambda g, y: torch.where(y > 0, g, torch.mul(g, 0.01)),
    "hardswish_backward": aten.silu_backward.default,
    "elu_backward": lambda g, _: g.clone(),
    "leaky_relu_backward": lambda g, x: torch.where(x > 0, g, torch.zeros_like(g)),
}


def _activation_calls(call_place: CallPlace) -> list[str]:
    is_activation = call_place.name in _OTHERS or call_place.name in _OTHERS_BACKWARD
    return (
        [""]
        if is_activation and isinstance(call_place.value, torch.Tensor) and call_place.parts()
        else []
    )


def _other_activation(call: RunningCall, _: str) -> Any:
    name = call.name
    if name in _OTHERS:
        return _OTHERS[name](call.args[0])
    return _OTHERS_BACKWARD[name](call.args[0], call.args[1])


def _other_gelu(call: RunningCall, _: str) -> Any:
    approximation = call.kwargs.get("approximate", "none")
    return call.call_with(approximate="tanh" if approximation == "none" else "none")


ACTIVATION_FAULTS: dict[str, FaultRule] = {
    "wrong_activation": FaultRule(_activation_calls, _other_activation),
    # The first argument of a backward node is the incoming gradient.
    "dropped_activation": FaultRule(_activation_calls, lambda call, _: call.args[0].clone()),
    "other_gelu": FaultRule(
        lambda call_place: [""] if call_place.name in operators_of("gelu") else [], _other_gelu
    ),
}


# --- Precision: a narrower dtype inside, another dtype outside ------------------------------------

# The dtypes in which a careless kernel computes.
_NARROWER = {
    torch.float64: torch.float32,
    torch.float32: torch.bfloat16,
    torch.bfloat16: torch.float8_e4m3fn,
    torch.float16: torch.float8_e4m3fn,
}
_OTHER = {
    torch.float64: torch.float32,
    torch.float32: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.int64: torch.int32,
    torch.int32: torch.int64,
}
_DTYPES = {dtype_name(dtype): dtype for dtype in (*_NARROWER.values(), *_OTHER)}


def _dtype_in(detail: str) -> torch.dtype:
    return _DTYPES[detail.rsplit(" ", 1)[1]]


# --- 27: inside -----------------------------------------------------------------------------------


def _narrowable(call_place: CallPlace) -> list[str]:
    if not (call_place.computes and rounds(call_place.kind)):
        return []
    dtypes = {part.dtype for _, part in call_place.parts()}
    # The dtype is part of the detail, because a run in float64 does not know the program's own.
    return [f"in {dtype_name(_NARROWER[dtype])}" for dtype in dtypes if dtype in _NARROWER][:1]


def _narrow_call(call: RunningCall, detail: str) -> Any:
    narrow = _dtype_in(detail)

    def cast(value: Tensor) -> Tensor:
        limit = torch.finfo(narrow).max
        # Such casts usually saturate.
        clamped_value = value.clamp(-limit, limit) if narrow is torch.float8_e4m3fn else value
        return clamped_value.to(narrow).to(value.dtype)

    return _cast_around(call, cast)


def _round_call(call: RunningCall, detail: str) -> Any:
    """The same by arithmetic: a float64 run would undo a cast."""
    dtype = _dtype_in(detail)
    narrow = format_of(dtype)

    def cast(value: Tensor) -> Tensor:
        clamps = dtype.itemsize == 1
        limit = value.clamp(-narrow.largest, narrow.largest) if clamps else value
        return torch.where(torch.isfinite(limit), narrow.round_to_nearest(limit), limit)

    return _cast_around(call, cast)


def _cast_around(call: RunningCall, cast: Any) -> Any:
    """The call with every floating-point input and output cast."""

    def each(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return cast(value)
        return [each(item) for item in value] if isinstance(value, list | tuple) else value

    written = call.writes
    cast_arguments = [value if i in written else each(value) for i, value in enumerate(call.args)]
    result = call.call_with(*enumerate(cast_arguments))
    return cast(result) if isinstance(result, Tensor) else tuple(each(result))


# --- 31: outside ----------------------------------------------------------------------------------


def _retypable(call_place: CallPlace) -> list[str]:
    if call_place.kind.mutates or call_place.kind.view or not call_place.only_given_back:
        return []
    cast_details = []
    for part, part_value in call_place.parts(floating=False):
        dtype = part_value.dtype
        key = result_position(part) if part else None
        if key in call_place.ends and dtype in _OTHER:
            cast_details.append(", ".join(filter(None, [part, f"as {dtype_name(_OTHER[dtype])}"])))
    return cast_details


PRECISION_FAULTS: dict[str, FaultRule] = {
    "internal_downcast": FaultRule(_narrowable, _narrow_call, exact=_round_call),
    "output_dtype": FaultRule(
        _retypable,
        lambda call, detail: call.spoil(detail, lambda part: part.to(_dtype_in(detail))),
    ),
}


# --- Edges of the number range: overflow and NaN --------------------------------------------------

_INTEGERS = {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}

# --- 41: integers ---------------------------------------------------------------------------------

# What each computes without wrapping is the fault, so it is written by hand.
_WRAPPING: dict[str, Callable[..., Any]] = {
    "add": lambda a, b, alpha=1: a + b * alpha,
    "sub": lambda a, b, alpha=1: a - b * alpha,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "pow": lambda a, b: a**b,
    "__lshift__": lambda a, b: a * 2.0**b,
    "bitwise_left_shift": lambda a, b: a * 2.0**b,
}
# They take the dtype in which they compute.
_WIDENED = operators_of("sum", "running sum") | {"prod"}


def _wraps(call_place: CallPlace) -> list[str]:
    value = call_place.value
    if not isinstance(value, Tensor) or value.dtype not in _INTEGERS:
        return []
    if call_place.name == "_to_copy":
        source = call_place.tensor_argument(0)
        return [""] if source is not None and source.dtype in _INTEGERS else []
    return [""] if call_place.name in _WRAPPING or call_place.name in _WIDENED else []


def _saturate_integers(call: RunningCall, _: str) -> Any:
    right = call.right()
    wide = [x.to(torch.float64) if isinstance(x, Tensor) else x for x in call.args]
    if call.name == "_to_copy":
        true = wide[0]
    elif call.name in _WIDENED:
        true = call.target(*wide, **{**call.kwargs, "dtype": torch.float64})
    else:
        true = _WRAPPING[call.name](*wide, **call.kwargs)
    info = torch.iinfo(right.dtype)
    # Only outside the range: float64 does not hold every integer within.
    capped = torch.where(true >= info.max + 1, torch.full_like(right, info.max), right)
    return torch.where(true < info.min, torch.full_like(right, info.min), capped)


# --- 42: NaN --------------------------------------------------------------------------------------


def _clamp_without_nan(call: RunningCall) -> Any:
    value = call.args[0]
    low, high = [*call.args[1:], None, None][:2]
    if call.name == "clamp_max":
        low, high = None, call.args[1]
    low, high = call.kwargs.get("min", low), call.kwargs.get("max", high)
    # A NaN is not above the bound, so it is replaced by the bound.
    value = value if low is None else torch.where(value > low, value, low)
    return value if high is None else torch.where(value < high, value, high)


def _extreme_without_nan(call: RunningCall) -> Any:
    lowest = -torch.inf if "max" in call.name else torch.inf
    value = call.args[0]
    return call.call_with((0, torch.where(torch.isnan(value), lowest, value)))


# How each drops a NaN is the fault, so it is written by hand.
_COMPARING: dict[str, Callable[[RunningCall], Any]] = {
    "relu": lambda call: torch.where(call.args[0] > 0, call.args[0], 0),
    "hardtanh": _clamp_without_nan,
    "clamp": _clamp_without_nan,
    "clamp_min": _clamp_without_nan,
    "clamp_max": _clamp_without_nan,
    "maximum": lambda call: torch.where(call.args[0] > call.args[1], *call.args[:2]),
    "minimum": lambda call: torch.where(call.args[0] < call.args[1], *call.args[:2]),
    "amax": _extreme_without_nan,
    "amin": _extreme_without_nan,
    "max": _extreme_without_nan,
    "min": _extreme_without_nan,
    "max_pool2d_with_indices": _extreme_without_nan,
}


def _compares(call_place: CallPlace) -> list[str]:
    source = call_place.tensor_argument(0)
    is_comparing = call_place.name in _COMPARING and call_place.parts()
    return [""] if is_comparing and source is not None and source.is_floating_point() else []


SPECIAL_FAULTS: dict[str, FaultRule] = {
    "saturated_integer": FaultRule(_wraps, _saturate_integers),
    "swallowed_nan": FaultRule(_compares, lambda call, _: _COMPARING[call.name](call)),
}


# --- Indices: a row, a column, a mask, a slice, an order ------------------------------------------

_END = 2**62
# Operators that read or write a piece of an axis.
_SLICES = operators_of("slices")
_SELECTS = operators_of("selections")
_TRIANGLES = operators_of("triangles")
# Which comparison is mistaken for which is the fault, so it is written by hand.
_COMPARISONS = {"le": torch.lt, "lt": torch.le, "ge": torch.gt, "gt": torch.ge}


# --- 20, 21: rows and columns ---------------------------------------------------------------------


def _moves(call_place: CallPlace) -> bool:
    """Whether a call writes values, if only to move them."""
    return call_place.computes or call_place.name in operators_of("copies")


def _long_along(axis: int) -> Callable[[CallPlace], list[str]]:
    """Results with more than one element along an axis."""

    def where(call_place: CallPlace) -> list[str]:
        parts = call_place.parts() if _moves(call_place) else []
        return [detail for detail, part in parts if part.dim() > 0 and part.shape[axis] > 1]

    return where


def _with_zero_row(part: Tensor) -> Tensor:
    row = part.shape[0] // 2
    changed = part.clone()
    changed[row] = 0
    return changed


def _with_stale_column(part: Tensor) -> Tensor:
    changed = part.clone()
    changed[..., -1] = part[..., -2]
    return changed


# --- 22: masks ------------------------------------------------------------------------------------


def _masks(call_place: CallPlace) -> list[str]:
    if call_place.name in _TRIANGLES:
        return ["by 1", "by -1"]
    if call_place.name in _ATTENTIONS:
        is_causal = call_place.argument(call_place.place_of("is_causal"))
        return ["causal"] if is_causal is True else []
    if call_place.name in _COMPARISONS and isinstance(call_place.value, Tensor):
        left, right = call_place.tensor_argument(0), call_place.tensor_argument(1)
        are_discrete = all(v is not None and not v.is_floating_point() for v in (left, right))
        square = len(call_place.shape) > 1 and call_place.shape[-1] == call_place.shape[-2] > 1
        return ["border"] if are_discrete and square else []
    position = {"masked_fill": 1, "where": 0}.get(call_place.name)
    mask = None if position is None else call_place.tensor_argument(position)
    if mask is None or mask.dim() < 2 or not mask.shape[-1] == mask.shape[-2] > 1:  # noqa: PLR2004
        return []
    return [f"argument {position}"]


def _with_mask_moved(call: RunningCall, detail: str) -> Any:
    if call.name in _TRIANGLES:
        diagonal = call.args[1] if len(call.args) > 1 else 0
        return call.target(call.args[0], diagonal + number_in(detail))
    if call.name in _COMPARISONS:
        return _COMPARISONS[call.name](*call.args)
    if detail == "causal":
        return _with_mask_one_too_wide(call)
    position = number_in(detail)
    mask = call.args[position]
    moved = torch.cat([mask[..., :1], mask[..., :-1]], -1)
    return call.call_with((position, moved))


def _with_mask_one_too_wide(call: RunningCall) -> Any:
    """Attention with a causal mask that lets every position see one more."""
    query, key, value = call.args[:3]
    visibility = query.new_ones(query.shape[-2], key.shape[-2]).tril(1)
    mask = torch.where(
        visibility > 0, torch.zeros_like(visibility), torch.full_like(visibility, -torch.inf)
    )
    if call.name.endswith("_for_cpu"):
        return call.call_with((call.place_of("is_causal"), False), attn_mask=mask)
    # GPU kernels take no such mask, or not in every size: compute the output here.
    output, *rest = call.right()
    wide = torch.promote_types(query.dtype, torch.float32)
    scale = call.kwargs.get("scale") or query.shape[-1] ** -0.5
    weights = (query.to(wide) @ key.to(wide).mT * scale + mask.to(wide)).softmax(-1)
    return (weights @ value.to(wide)).to(output.dtype), *rest


# --- 23: slices -----------------------------------------------------------------------------------


def _slices(call_place: CallPlace) -> list[str]:
    if call_place.name not in _SLICES | _SELECTS:
        return []
    axis = call_place.argument(call_place.place_of("dim"), 0)
    size = _whole_length(call_place, axis)
    if call_place.name in _SELECTS:
        index = call_place.argument(call_place.place_of("index"))
        return ["by 1"] if size > 1 and isinstance(index, int) else []
    start, end, step = _bounds(call_place.node.args, call_place.place_of("start"), size)
    if step != 1 or end - start == size or end <= start:
        return []
    return ["by 1"] if end < size else ["by -1"]


def _whole_length(call_place: CallPlace, axis: int) -> int:
    """The length of the axis from which a piece is taken."""
    if call_place.name.endswith("_backward"):
        sizes = call_place.argument(1)
        return sizes[axis] if all(isinstance(size, int) for size in sizes) else 0
    whole_operand = call_place.tensor_argument(0)
    return 0 if whole_operand is None else whole_operand.shape[axis]


def _bounds(args: tuple[Any, ...], start_at: int, size: int) -> tuple[int, int, int]:
    start, end, step = [*args[start_at : start_at + 3], None, None, None][:3]
    start = 0 if start is None else start
    end = _END if end is None else end
    start, end = (min(max(value + size if value < 0 else value, 0), size) for value in (start, end))
    return start, end, 1 if step is None else step


def _move_slice(call: RunningCall, detail: str) -> Any:
    by = number_in(detail)
    position = call.place_of("dim")
    axis = call.args[position] if len(call.args) > position else 0
    size = call.args[1][axis] if call.name.endswith("_backward") else call.args[0].shape[axis]
    start_at = call.place_of("index" if call.name in _SELECTS else "start")
    if call.name in _SELECTS:
        return call.call_with((start_at, (call.args[start_at] + by) % size))
    start, end, _ = _bounds(call.args, start_at, size)
    args = [*call.args, *[0, None, None][: max(0, start_at + 2 - len(call.args))]]
    args[position], args[start_at], args[start_at + 1] = axis, start + by, end + by
    return call.target(*args, **call.kwargs)


# --- 24: concatenation ----------------------------------------------------------------------------


def _joins(call_place: CallPlace) -> list[str]:
    operands = call_place.argument(0)
    if call_place.name not in operators_of("joins") or not isinstance(operands, list | tuple):
        return []
    return [""] if len({each for each in operands if isinstance(each, Node)}) > 1 else []


def _swap_operands(call: RunningCall, _: str) -> Any:
    first, second, *rest = call.args[0]
    return call.call_with((0, [second, first, *rest]))


INDEXING_FAULTS: dict[str, FaultRule] = {
    "zero_row": FaultRule(_long_along(0), lambda call, detail: call.spoil(detail, _with_zero_row)),
    "stale_column": FaultRule(
        _long_along(-1), lambda call, detail: call.spoil(detail, _with_stale_column)
    ),
    "shifted_mask": FaultRule(_masks, _with_mask_moved),
    "shifted_slice": FaultRule(_slices, _move_slice),
    "swapped_operands": FaultRule(_joins, _swap_operands),
}


# --- State: missing and unwanted writes -----------------------------------------------------------

# --- 28, 29: writes left out ----------------------------------------------------------------------


def _without_write(call: RunningCall, detail: str) -> Any:
    position = number_in(detail)
    if call.in_place and position == 0:
        return call.args[0]
    old = call.args[position].clone()
    result = call.right()
    call.args[position].copy_(old)
    return result


def _written_in_place(call_place: CallPlace) -> list[str]:
    """Calls that write in place, but not to a buffer: that is stale_buffer."""
    is_fill = call_place.name in operators_of("fills")
    if 0 not in call_place.writes or call_place.kind.random or is_fill:
        return []
    return [] if call_place.writes_buffer(0) else [""]


STATE_FAULTS: dict[str, FaultRule] = {
    "stale_buffer": FaultRule(
        lambda call_place: [
            f"argument {at}" for at in call_place.writes if call_place.writes_buffer(at)
        ],
        _without_write,
    ),
    "dropped_write": FaultRule(_written_in_place, lambda call, _: call.args[0]),
    "aliased_output": FaultRule(
        lambda call_place: [] if call_place.donor is None else [f"argument {call_place.donor}"],
        lambda call, detail: call.args[number_in(detail)].copy_(call.right()),
    ),
}
