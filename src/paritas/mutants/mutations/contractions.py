"""Wrong contractions, on one device and over ranks, and wrong pooling."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paritas.mutants.mutations.calls import Call, Fault, Place, number_in

if TYPE_CHECKING:
    from collections.abc import Callable

# Where the two operands stand.
_PRODUCTS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "mv": (0, 1),
    "dot": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "addmv": (1, 2),
}
_BACKWARD_POOLS = {"max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward"}
_POOLS = {"max_pool2d_with_indices", "max_pool3d_with_indices"}
_TRANSPOSED = 6  # convolution's own switch


@dataclasses.dataclass(frozen=True)
class Contraction:
    """The operands of a contraction and the axis of each that is summed over."""

    left: int
    right: int
    left_axis: int
    right_axis: int
    length: int


def contraction(
    name: str, args: tuple[Any, ...], given: Callable[[int], Any]
) -> Contraction | None:
    """What a call sums over; `given` tells an operand by its position."""
    if name in _PRODUCTS:
        left, right = _PRODUCTS[name]
        first, second = given(left), given(right)
        if first is None or second is None:
            return None
        axis = second.dim() - 2 if second.dim() > 1 else 0
        return Contraction(left, right, first.dim() - 1, axis, first.shape[-1])
    if name == "convolution" and args[8] == 1 and given(0) is not None:
        # Over channels: those of a transposed kernel come first.
        axis = 0 if args[_TRANSPOSED] else 1
        return Contraction(0, 1, 1, axis, given(0).shape[1])
    return None


def contraction_at(place: Place) -> Contraction | None:
    """What a call of the graph sums over."""
    if place.name not in _PRODUCTS and place.name != "convolution":
        return None
    return contraction(place.name, place.node.args, place.given)


def shortened(call: Call, keep: Callable[[int], int]) -> Any:
    """A contraction or a sum over its first terms only."""
    found = contraction(call.name, call.args, lambda position: call.args[position])
    if found is None:
        source, axes = call.args[:2]
        axis = axes[0]
        return call.given((0, source.narrow(axis, 0, keep(source.shape[axis]))))
    length = keep(found.length)
    return call.given(
        (found.left, call.args[found.left].narrow(found.left_axis, 0, length)),
        (found.right, call.args[found.right].narrow(found.right_axis, 0, length)),
    )


def sums(place: Place) -> bool:
    """Whether a call adds up along a named axis of more than one element."""
    axes, source = place.argument(1), place.given(0)
    if place.name != "sum" or source is None or not isinstance(axes, list | tuple) or not axes:
        return False
    return source.dim() > 0 and source.shape[axes[0]] > 1


# --- 18, 19, 25, 26 -------------------------------------------------------------------------------


def _square(place: Place) -> list[str]:
    found = contraction_at(place)
    if found is None:
        return []
    axes = (0, 1) if place.name == "convolution" else (-1, -2)
    operands = [found.right] if place.name == "convolution" else [found.left, found.right]
    return [
        f"argument {position}"
        for position in operands
        if (value := place.given(position)) is not None
        and value.dim() > 1
        and value.shape[axes[0]] == value.shape[axes[1]] > 1
    ]


def _transposed(call: Call, detail: str) -> Any:
    position = number_in(detail)
    axes = (0, 1) if call.name == "convolution" else (-1, -2)
    return call.given((position, call.args[position].transpose(*axes).contiguous()))


def _shortenable(place: Place) -> list[str]:
    found = contraction_at(place)
    return [""] if (found is not None and found.length > 1) or sums(place) else []


def _flippable(place: Place) -> list[str]:
    position = {"convolution": 1, "convolution_backward": 2}.get(place.name)
    kernel = None if position is None else place.given(position)
    return [""] if kernel is not None and max(kernel.shape[2:], default=1) > 1 else []


def _flipped(call: Call, _: str) -> Any:
    position = 1 if call.name == "convolution" else 2
    kernel = call.args[position]
    return call.given((position, torch.flip(kernel, list(range(2, kernel.dim())))))


def _pools(place: Place) -> list[str]:
    if place.name in {"amax", "max"}:
        # With indices, or between two tensors, it is another operator of that name.
        return [""] if isinstance(place.value, Tensor) and _along_axes(place) else []
    if place.name in _POOLS:
        return [""] if place.parts() and _pool_arguments(place.node.args, 1) else []
    return [""] if place.name in _BACKWARD_POOLS and _pool_arguments(place.node.args, 2) else []


def _along_axes(place: Place) -> bool:
    return isinstance(place.argument(1), list | tuple | int) and bool(place.parts())


def _pool_arguments(args: tuple[Any, ...], start: int) -> list[Any] | None:
    """Kernel, stride, padding and rounding of a pool; None if it leaves gaps: a mean cannot."""
    usual: list[Any] = [None, [], 0, 1, False]
    given = args[start : start + len(usual)]
    kernel, stride, padding, dilation, ceil = [*given, *usual[len(given) :]]
    gaps = dilation if isinstance(dilation, list | tuple) else [dilation]
    return None if any(gap != 1 for gap in gaps) else [kernel, stride, padding, ceil]


def _averaged(call: Call, _: str) -> Any:
    aten = torch.ops.aten
    if call.name in {"amax", "max"}:
        return torch.mean(call.args[0], *call.args[1:])
    flat = "2d" in call.name
    if call.name in _POOLS:
        pool = aten.avg_pool2d.default if flat else aten.avg_pool3d.default
        _, indices = call.right()
        return pool(call.args[0], *(_pool_arguments(call.args, 1) or [])), indices
    pool = aten.avg_pool2d_backward.default if flat else aten.avg_pool3d_backward.default
    shape = _pool_arguments(call.args, 2) or []
    return pool(call.args[0], call.args[1], *shape, True, None)


FAULTS: dict[str, Fault] = {
    "transposed_operand": Fault(_square, _transposed),
    "short_contraction": Fault(
        _shortenable, lambda call, _: shortened(call, lambda length: length - 1)
    ),
    "flipped_kernel": Fault(_flippable, _flipped),
    "max_to_average": Fault(_pools, _averaged),
}
