"""Faults of sums: contractions, pooling, reductions, and their use in parallel plans."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paritas.core.operators.catalogue import operators_of
from paritas.mutants.operator_faults import (
    ADDED_PRODUCTS,
    NORMS,
    addends,
    is_gradient,
    without_addend,
)
from paritas.mutants.programs import CallPlace, FaultRule, RunningCall, is_number, number_in

if TYPE_CHECKING:
    from collections.abc import Callable


# --- Contractions and pooling ---------------------------------------------------------------------

_PRODUCTS = operators_of("products")
_BACKWARD_POOLS = operators_of("maxima of windows backward")
_POOLS = operators_of("maxima of windows")
_MAXIMUM = operators_of("maximum")
# The switch of a convolution, and its number of groups.
_TRANSPOSED, _GROUPS = 6, 8


@dataclasses.dataclass(frozen=True)
class ContractedOperands:
    """The operands of a contraction and the axis of each that is summed over."""

    left: int
    right: int
    left_axis: int
    right_axis: int
    length: int

    @property
    def axes(self) -> tuple[tuple[int, int], ...]:
        """The position of each operand with its axis."""
        return (self.left, self.left_axis), (self.right, self.right_axis)


def contraction(
    name: str, args: tuple[Any, ...], operand_at: Callable[[int], Any]
) -> ContractedOperands | None:
    """What a call sums over; `operand_at` returns an operand by its position."""
    if name in _PRODUCTS | ADDED_PRODUCTS:
        left, right = (0, 1) if name in _PRODUCTS else (1, 2)
        first, second = operand_at(left), operand_at(right)
        if first is None or second is None:
            return None
        axis = second.dim() - 2 if second.dim() > 1 else 0
        return ContractedOperands(left, right, first.dim() - 1, axis, first.shape[-1])
    if name == "convolution" and args[_GROUPS] == 1 and operand_at(0) is not None:
        # Over channels, which come first in a transposed kernel.
        axis = 0 if args[_TRANSPOSED] else 1
        return ContractedOperands(0, 1, 1, axis, operand_at(0).shape[1])
    return None


def contraction_at(call_place: CallPlace) -> ContractedOperands | None:
    """What a call of the graph sums over."""
    return contraction(call_place.name, call_place.node.args, call_place.tensor_argument)


def shorten_operands(call: RunningCall, keep: Callable[[int], int]) -> Any:
    """A contraction or a sum over its first terms only."""
    contracted_operands = contraction(call.name, call.args, call.args.__getitem__)
    if contracted_operands is None:
        source, axes = call.args[:2]
        axis = axes[0]
        return call.call_with((0, source.narrow(axis, 0, keep(source.shape[axis]))))
    length = keep(contracted_operands.length)
    return call.call_with(
        *(
            (position, call.args[position].narrow(axis, 0, length))
            for position, axis in contracted_operands.axes
        )
    )


def sums(call_place: CallPlace) -> bool:
    """Whether a call sums along a given axis of more than one element."""
    axes, source = call_place.argument(1), call_place.tensor_argument(0)
    if call_place.name != "sum" or source is None or not isinstance(axes, list | tuple) or not axes:
        return False
    return source.dim() > 0 and source.shape[axes[0]] > 1


# --- 18, 19, 25, 26 -------------------------------------------------------------------------------


def _square(call_place: CallPlace) -> list[str]:
    contracted_operands = contraction_at(call_place)
    if contracted_operands is None:
        return []
    axes = (0, 1) if call_place.name == "convolution" else (-1, -2)
    operands = (
        [contracted_operands.right]
        if call_place.name == "convolution"
        else [contracted_operands.left, contracted_operands.right]
    )
    return [
        f"argument {position}"
        for position in operands
        if (value := call_place.tensor_argument(position)) is not None
        and value.dim() > 1
        and value.shape[axes[0]] == value.shape[axes[1]] > 1
    ]


def _transpose_operand(call: RunningCall, detail: str) -> Any:
    position = number_in(detail)
    axes = (0, 1) if call.name == "convolution" else (-1, -2)
    return call.call_with((position, call.args[position].transpose(*axes).contiguous()))


def _is_shortenable(call_place: CallPlace) -> bool:
    contracted_operands = contraction_at(call_place)
    return (contracted_operands is not None and contracted_operands.length > 1) or sums(call_place)


def _flippable(call_place: CallPlace) -> list[str]:
    position = {"convolution": 1, "convolution_backward": 2}.get(call_place.name)
    kernel = None if position is None else call_place.tensor_argument(position)
    return [""] if kernel is not None and max(kernel.shape[2:], default=1) > 1 else []


def _flip_kernel(call: RunningCall, _: str) -> Any:
    position = 1 if call.name == "convolution" else 2
    kernel = call.args[position]
    return call.call_with((position, torch.flip(kernel, list(range(2, kernel.dim())))))


def _pools(call_place: CallPlace) -> list[str]:
    if call_place.name in _MAXIMUM:
        # Overloads with indices, or between two tensors, do something else.
        along_axes = isinstance(call_place.argument(1), list | tuple | int) and bool(
            call_place.parts()
        )
        return [""] if isinstance(call_place.value, Tensor) and along_axes else []
    if call_place.name in _POOLS:
        return [""] if call_place.parts() and _pool_arguments(call_place.node.args, 1) else []
    return (
        [""]
        if call_place.name in _BACKWARD_POOLS and _pool_arguments(call_place.node.args, 2)
        else []
    )


def _pool_arguments(args: tuple[Any, ...], start: int) -> list[Any] | None:
    """Kernel, stride, padding and rounding of a pool; None if dilated: a mean cannot be."""
    usual: list[Any] = [None, [], 0, 1, False]
    given_options = args[start : start + len(usual)]
    kernel, stride, padding, dilation, ceil = [*given_options, *usual[len(given_options) :]]
    gaps = dilation if isinstance(dilation, list | tuple) else [dilation]
    return None if any(gap != 1 for gap in gaps) else [kernel, stride, padding, ceil]


def _average_pools(call: RunningCall, _: str) -> Any:
    aten = torch.ops.aten
    if call.name in _MAXIMUM:
        return torch.mean(call.args[0], *call.args[1:])
    flat = "2d" in call.name
    if call.name in _POOLS:
        pool = aten.avg_pool2d.default if flat else aten.avg_pool3d.default
        _, indices = call.right()
        return pool(call.args[0], *(_pool_arguments(call.args, 1) or [])), indices
    pool = aten.avg_pool2d_backward.default if flat else aten.avg_pool3d_backward.default
    shape = _pool_arguments(call.args, 2) or []
    return pool(call.args[0], call.args[1], *shape, True, None)


CONTRACTION_FAULTS: dict[str, FaultRule] = {
    "transposed_operand": FaultRule(_square, _transpose_operand),
    "short_contraction": FaultRule(
        lambda call_place: [""] if _is_shortenable(call_place) else [],
        lambda call, _: shorten_operands(call, lambda length: length - 1),
    ),
    "flipped_kernel": FaultRule(_flippable, _flip_kernel),
    "max_to_average": FaultRule(_pools, _average_pools),
}


# --- Reductions: axis, divisor, variance ----------------------------------------------------------

# Operators that keep the shape along any axis.
_ALONG = operators_of("softmaxes", "softmax backward", "log softmax backward", "running values") | {
    "flip"
}
_SPREADS = operators_of("variance", "deviation")


def _other_axes(call_place: CallPlace) -> list[str]:
    source = call_place.tensor_argument(0)
    if source is None or source.dim() < 2:  # noqa: PLR2004
        return []
    count = source.dim()
    if call_place.name in _ALONG:
        axis = call_place.argument(_axis_position(call_place))
        axis = axis[0] if isinstance(axis, list | tuple) and len(axis) == 1 else axis
        return [f"axis {(axis - 1) % count}"] if isinstance(axis, int) else []
    axes = reduced_axes(call_place)
    if not axes or len(axes) == count:
        return []
    free = [axis for axis in range(count) if axis not in axes]
    sizes = source.shape
    # The result must keep its shape, or the program would raise.
    return [
        f"axis {other}"
        for other in free
        if sizes[other] == sizes[axes[-1]] > 1 and other == axes[-1] - 1
    ]


def _axis_position(call: CallPlace | RunningCall) -> int:
    return call.place_of("dims" if call.name == "flip" else "dim")


def reduced_axes(call_place: CallPlace) -> list[int]:
    """The axes of a reduction; empty if it names none."""
    source, axes = call_place.tensor_argument(0), call_place.argument(1)
    if source is None or call_place.name not in operators_of("reductions"):
        return []
    axes = [axes] if isinstance(axes, int) and not isinstance(axes, bool) else axes
    if not isinstance(axes, list | tuple):
        return []
    return sorted(axis % source.dim() for axis in axes)


def _along_other(call: RunningCall, detail: str) -> Any:
    axis = number_in(detail)
    if call.name in _ALONG:
        position = _axis_position(call)
        axis_argument = call.args[position]
        return call.call_with(
            (position, [axis] if isinstance(axis_argument, list | tuple) else axis)
        )
    # The two axes have the same size, so the result keeps its shape.
    return call.call_with((0, call.args[0].transpose(axis, axis + 1)))


def _averages(call_place: CallPlace) -> list[str]:
    source = call_place.tensor_argument(0)
    if source is None:
        return []
    if call_place.name == "mean":
        return [""] if _count_terms(call_place) > 1 else []
    count = call_place.argument(1)
    # The backward pass of a mean divides the expanded gradient by the number of terms.
    spread = call_place.name == "div" and call_place.backward and call_place.parts()
    is_term_count = is_number(count) and 1 < count <= source.numel() and count == int(count)
    return [""] if spread and is_term_count and "expand" in str(call_place.argument(0)) else []


def _count_terms(call_place: CallPlace) -> int:
    source = call_place.tensor_argument(0)
    if source is None:
        return 0
    return source.numel() // max(1, math.prod(call_place.shape))


def _one_less(call: RunningCall, _: str) -> Any:
    if call.name == "div":
        return torch.div(call.args[0], call.args[1] - 1)
    right = call.right()
    count = call.args[0].numel() // max(1, right.numel())
    return torch.mul(right, count / (count - 1))


def _has_variance(call_place: CallPlace) -> list[str]:
    if call_place.name in _SPREADS:
        return [""] if _count_terms(call_place) > 1 else []
    is_batch = call_place.name in operators_of("batch norm")
    in_inference = is_batch and call_place.argument(5) is not True
    if call_place.name not in NORMS or in_inference:
        return []
    arguments = [call_place.argument(i) for i in range(8)]
    return [""] if _terms_of_norm(call_place.name, call_place.shape, arguments) > 1 else []


def _terms_of_norm(name: str, shape: tuple[int, ...], args: Any) -> int:
    """The number of values in one variance of a normalisation."""
    if name == "native_layer_norm":
        return math.prod(args[1])
    if name == "native_group_norm":
        return int(args[4] * args[5] // args[6])
    return math.prod(shape) // shape[1]


def _other_correction(call: RunningCall, _: str) -> Any:
    name = call.name
    if name not in NORMS:
        correction = call.kwargs.get("correction", 1)
        return call.call_with(correction=1 - (1 if correction is None else correction))
    # 1/sqrt(k var + eps) = 1/sqrt(k) * 1/sqrt(var + eps/k), with k = n / (n - 1).
    count = _terms_of_norm(name, call.args[0].shape, call.args)
    k = count / (count - 1)
    weight_at, eps_at = (2, 4) if name == "native_layer_norm" else (1, 7)
    weight = call.args[weight_at]
    if weight is None:
        size = call.args[1] if name == "native_layer_norm" else [call.args[0].shape[1]]
        weight = call.args[0].new_ones(size)
    shrunk = torch.mul(weight, k**-0.5)
    out, mean, rstd = call.call_with((weight_at, shrunk), (eps_at, call.args[eps_at] / k))
    return out, mean, torch.mul(rstd, k**-0.5)


REDUCTION_FAULTS: dict[str, FaultRule] = {
    "wrong_dim": FaultRule(_other_axes, _along_other),
    "mean_over_one_less": FaultRule(_averages, _one_less),
    "wrong_correction": FaultRule(_has_variance, _other_correction),
}


# --- Faults of parallel plans, as they appear on one device with two ranks ------------------------

_GRADIENT_SOURCES = operators_of("products", "sum", "convolution backward", "embedding backward")
_MEAN = 1  # a value of a loss's `reduction`
# The losses whose halves `_uneven_loss` can join, each in its own way: written by hand.
_LOSSES = frozenset({"nll_loss_forward", "mse_loss"})


# --- 32, 33, 34, 37: contractions over ranks ------------------------------------------------------


def _splittable(call_place: CallPlace) -> list[str]:
    contracted_operands = contraction_at(call_place)
    # Gradients are summed over batches: see unreduced_gradient.
    is_weight = call_place.backward and is_gradient(call_place)
    return (
        [""]
        if contracted_operands is not None and contracted_operands.length > 1 and not is_weight
        else []
    )


def _twice(call: RunningCall, _: str) -> Any:
    contracted_operands = contraction(call.name, call.args, call.args.__getitem__)
    if contracted_operands is None:
        return torch.mul(call.right(), 2)
    # The bias of an addmm is added once, after the sum over ranks.
    return call.call_with(
        (contracted_operands.left, torch.mul(call.args[contracted_operands.left], 2))
    )


def _exchange_shards(call: RunningCall, _: str) -> Any:
    contracted_operands = contraction(call.name, call.args, call.args.__getitem__)
    if contracted_operands is None:
        return call.right()
    return call.call_with(
        (
            contracted_operands.right,
            swapped_halves(call.args[contracted_operands.right], contracted_operands.right_axis),
        )
    )


def swapped_halves(value: Tensor, axis: int) -> Tensor:
    """The two halves of an axis swapped; a middle element stays."""
    size = value.shape[axis]
    half = size // 2
    first = value.narrow(axis, 0, half)
    middle = value.narrow(axis, half, size - 2 * half)
    return torch.cat([value.narrow(axis, size - half, half), middle, first], axis)


def _list_chunked_axes(call_place: CallPlace) -> list[str]:
    if contraction_at(call_place) is None or not call_place.parts():
        return []
    axes = {0, len(call_place.shape) - 1} if call_place.shape else set()
    return [f"axis {axis}" for axis in sorted(axes) if call_place.shape[axis] > 1]


# --- 36, 40: gradients ----------------------------------------------------------------------------


def _gradients(call_place: CallPlace) -> list[str]:
    if (
        not call_place.backward
        or call_place.name not in _GRADIENT_SOURCES
        or not is_gradient(call_place)
    ):
        return []
    if call_place.name == "convolution_backward":
        return [
            f"result {part}, scaled" for part in sorted(p for p in call_place.ends if p is not None)
        ]
    return ["scaled", "one rank's"] if _is_shortenable(call_place) else ["scaled"]


def _leave_unreduced(call: RunningCall, detail: str) -> Any:
    if detail == "one rank's":
        return shorten_operands(call, _half)
    return call.spoil(detail, lambda part: torch.div(part, 2))


def _half(length: int) -> int:
    return length // 2


# --- 38: random masks -----------------------------------------------------------------------------


def _drawing_calls(call_place: CallPlace) -> list[str]:
    is_drawing = call_place.name in operators_of("random masks")
    return [""] if is_drawing and call_place.shape and call_place.shape[0] > 1 else []


def _same_on_both(call: RunningCall, _: str) -> Any:
    if call.name != "native_dropout":
        return _repeat_first_half(call.right())
    _, mask = call.right()
    again = _repeat_first_half(mask)
    share = call.args[1]
    return torch.div(torch.mul(call.args[0], again), 1 - share), again


def _repeat_first_half(mask: Tensor) -> Tensor:
    half = mask.shape[0] // 2
    return torch.cat([mask[:half], mask[:half], mask[2 * half :]])


# --- 39: means ------------------------------------------------------------------------------------


def _mean_calls(call_place: CallPlace) -> list[str]:
    source = call_place.tensor_argument(0)
    if source is None or source.dim() == 0:
        return []
    if call_place.name in _LOSSES:
        reduces = call_place.argument(call_place.place_of("reduction"), _MEAN) == _MEAN
        return [""] if reduces and source.shape[0] > 2 else []  # noqa: PLR2004
    if call_place.name != "mean":
        return []
    axes = call_place.argument(1)
    axis = axes[0] if isinstance(axes, list | tuple) and axes else 0
    return [f"axis {axis}"] if source.shape[axis] > 2 else []  # noqa: PLR2004


def _uneven(call: RunningCall, detail: str) -> Any:
    """The mean of two ranks' means, one of which has a third of the terms or fewer."""
    if call.name in _LOSSES:
        return _uneven_loss(call)
    axis = number_in(detail)
    source = call.args[0]
    parts = torch.tensor_split(source, [_smaller(source.shape[axis])], axis)
    first, second = (call.call_with((0, part)) for part in parts)
    return torch.div(torch.add(first, second), 2)


def _uneven_loss(call: RunningCall) -> Any:
    cut = _smaller(call.args[0].shape[0])
    left, right = ((value[:cut], value[cut:]) for value in call.args[:2])
    halves = [call.call_with((0, a), (1, b)) for a, b in zip(left, right, strict=True)]
    if call.name == "mse_loss":
        return torch.div(torch.add(*halves), 2)
    _, total = call.right()
    return torch.div(torch.add(halves[0][0], halves[1][0]), 2), total


def _smaller(size: int) -> int:
    return max(1, math.floor(size / 3))


RANK_FAULTS: dict[str, FaultRule] = {
    "dropped_all_reduce": FaultRule(_splittable, lambda call, _: shorten_operands(call, _half)),
    "double_all_reduce": FaultRule(
        lambda call_place: [] if contraction_at(call_place) is None else [""], _twice
    ),
    "wrong_shard": FaultRule(_splittable, _exchange_shards),
    "unreduced_gradient": FaultRule(_gradients, _leave_unreduced),
    "permuted_chunks": FaultRule(
        _list_chunked_axes,
        lambda call, detail: call.spoil("", lambda part: swapped_halves(part, number_in(detail))),
    ),
    "equal_masks": FaultRule(_drawing_calls, _same_on_both),
    "mean_of_means": FaultRule(_mean_calls, _uneven),
    "untied_gradient": FaultRule(
        lambda call_place: (
            addends(call_place) if call_place.backward and is_gradient(call_place) else []
        ),
        without_addend,
    ),
}
