"""Wrong places: a row, a column, a mask, a slice, the order of what is joined."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from paritas.mutants.mutations.calls import Call, Fault, Place, number_in

_END = 2**62
# Operators that take a piece of an axis or put one back, with the positions of axis and start.
_SLICES = {"slice": (1, 2), "slice_backward": (2, 3), "slice_scatter": (2, 3)}
_SELECTS = {"select": (1, 2), "select_backward": (2, 3), "select_scatter": (2, 3)}
# Attention kernels, with the position at which they are told to be causal.
_ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_cudnn_attention": 6,
}
_COMPARISONS = {"le": torch.lt, "lt": torch.le, "ge": torch.gt, "gt": torch.ge}


# --- 20, 21: rows and columns ---------------------------------------------------------------------


def _moves(place: Place) -> bool:
    """Whether a call writes values, be it only to move them."""
    return place.computes or place.name in {"clone", "_to_copy", "copy"}


def _rows(place: Place) -> list[str]:
    if not _moves(place):
        return []
    return [detail for detail, part in place.parts() if part.dim() > 0 and part.shape[0] > 1]


def _with_zero_row(part: Tensor) -> Tensor:
    row = part.shape[0] // 2
    changed = part.clone()
    changed[row] = 0
    return changed


def _columns(place: Place) -> list[str]:
    if not _moves(place):
        return []
    return [detail for detail, part in place.parts() if part.dim() > 0 and part.shape[-1] > 1]


def _with_stale_column(part: Tensor) -> Tensor:
    changed = part.clone()
    changed[..., -1] = part[..., -2]
    return changed


# --- 22: masks ------------------------------------------------------------------------------------


def _masks(place: Place) -> list[str]:
    if place.name in {"triu", "tril"}:
        return ["by 1", "by -1"]
    if place.name in _ATTENTION:
        return ["causal"] if place.argument(_ATTENTION[place.name]) is True else []
    if place.name in _COMPARISONS and isinstance(place.value, Tensor):
        left, right = place.given(0), place.given(1)
        whole = all(v is not None and not v.is_floating_point() for v in (left, right))
        square = len(place.shape) > 1 and place.shape[-1] == place.shape[-2] > 1
        return ["border"] if whole and square else []
    position = {"masked_fill": 1, "where": 0}.get(place.name)
    mask = None if position is None else place.given(position)
    if mask is None or mask.dim() < 2 or not mask.shape[-1] == mask.shape[-2] > 1:  # noqa: PLR2004
        return []
    return [f"argument {position}"]


def _with_mask_moved(call: Call, detail: str) -> Any:
    if call.name in {"triu", "tril"}:
        diagonal = call.args[1] if len(call.args) > 1 else 0
        return call.target(call.args[0], diagonal + number_in(detail))
    if call.name in _COMPARISONS:
        return _COMPARISONS[call.name](*call.args)
    if detail == "causal":
        return _seeing_the_next(call)
    position = number_in(detail)
    mask = call.args[position]
    moved = torch.cat([mask[..., :1], mask[..., :-1]], -1)
    return call.given((position, moved))


def _seeing_the_next(call: Call) -> Any:
    """Attention whose causal mask lets every position see one more."""
    query, key, value = call.args[:3]
    seen = query.new_ones(query.shape[-2], key.shape[-2]).tril(1)
    mask = torch.where(seen > 0, torch.zeros_like(seen), torch.full_like(seen, -torch.inf))
    if call.name.endswith("_for_cpu"):
        return call.given((_ATTENTION[call.name], False), attn_mask=mask)
    # A device's kernel takes no such mask, or not in every size: its output is written out.
    output, *rest = call.right()
    wide = torch.promote_types(query.dtype, torch.float32)
    scale = call.kwargs.get("scale") or query.shape[-1] ** -0.5
    weights = (query.to(wide) @ key.to(wide).mT * scale + mask.to(wide)).softmax(-1)
    return (weights @ value.to(wide)).to(output.dtype), *rest


# --- 23: slices -----------------------------------------------------------------------------------


def _slices(place: Place) -> list[str]:
    if place.name in _SELECTS:
        axis, start = _SELECTS[place.name]
        size = _size(place, place.argument(axis))
        return ["by 1"] if size > 1 and isinstance(place.argument(start), int) else []
    if place.name not in _SLICES:
        return []
    position, start_at = _SLICES[place.name]
    axis = place.argument(position, 0)
    size = _size(place, axis)
    start, end, step = _bounds(place.node.args, start_at, size)
    if step != 1 or end - start == size or end <= start:
        return []
    return ["by 1"] if end < size else ["by -1"]


def _size(place: Place, axis: int) -> int:
    """How long the whole is of which a piece is taken."""
    if place.name.endswith("_backward"):
        sizes = place.argument(1)
        return sizes[axis] if all(isinstance(size, int) for size in sizes) else 0
    whole = place.given(0)
    return 0 if whole is None else whole.shape[axis]


def _bounds(args: tuple[Any, ...], start_at: int, size: int) -> tuple[int, int, int]:
    start, end, step = [*args[start_at : start_at + 3], None, None, None][:3]
    start = 0 if start is None else start
    end = _END if end is None else end
    start, end = (min(max(value + size if value < 0 else value, 0), size) for value in (start, end))
    return start, end, 1 if step is None else step


def _moved(call: Call, detail: str) -> Any:
    by = number_in(detail)
    if call.name in _SELECTS:
        axis, start = (call.args[position] for position in _SELECTS[call.name])
        size = call.args[1][axis] if call.name.endswith("_backward") else call.args[0].shape[axis]
        return call.given((_SELECTS[call.name][1], (start + by) % size))
    position, start_at = _SLICES[call.name]
    axis = call.args[position] if len(call.args) > position else 0
    size = call.args[1][axis] if call.name.endswith("_backward") else call.args[0].shape[axis]
    start, end, _ = _bounds(call.args, start_at, size)
    args = [*call.args, *[0, None, None][: max(0, start_at + 2 - len(call.args))]]
    args[position], args[start_at], args[start_at + 1] = axis, start + by, end + by
    return call.target(*args, **call.kwargs)


# --- 24: what is joined ---------------------------------------------------------------------------


def _joins(place: Place) -> list[str]:
    operands = place.argument(0)
    if place.name not in {"cat", "stack"} or not isinstance(operands, list | tuple):
        return []
    return [""] if len({each for each in operands if isinstance(each, Node)}) > 1 else []


def _swapped(call: Call, _: str) -> Any:
    first, second, *rest = call.args[0]
    return call.given((0, [second, first, *rest]))


FAULTS: dict[str, Fault] = {
    "zero_row": Fault(_rows, lambda call, detail: call.spoil(detail, _with_zero_row)),
    "stale_column": Fault(_columns, lambda call, detail: call.spoil(detail, _with_stale_column)),
    "shifted_mask": Fault(_masks, _with_mask_moved),
    "shifted_slice": Fault(_slices, _moved),
    "swapped_operands": Fault(_joins, _swapped),
}
