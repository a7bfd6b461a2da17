"""What is wrong in a call, as a change: of its result, of an operand, or of the parts it reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.places.calls import fits
from benchmarks.places.parts import round_to

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from benchmarks.places.calls import Call
    from torch import Tensor

    Change = Callable[[Tensor], Tensor]
    Wrong = Callable[[Call], Any]


def result(change: Change, where: Callable[[Tensor], Any] | None = None) -> Wrong:
    """The right result, changed; only where it fits."""

    def wrong(call: Call) -> Any:
        value = call.result()
        fits(where is None or where(value))
        return call.instead(change(value))

    return wrong


def operand(
    place: int, change: Change, *keys: str, where: Callable[[Tensor], Any] | None = None
) -> Wrong:
    """The call with an operand changed; only where that operand fits."""

    def wrong(call: Call) -> Any:
        value = call.tensor(place, *keys)
        fits(where is None or where(value))
        return call.put(place, change(value), *keys).run()

    return wrong


def on(
    parts: Callable[[Call], Any],
    compute: Callable[..., Any],
    where: Callable[..., Any] | None = None,
) -> Wrong:
    """What is computed of a call and its parts, one or several; only where these fit."""

    def wrong(call: Call) -> Any:
        read = parts(call)
        values = read if isinstance(read, tuple) else (read,)
        fits(where is None or where(*values))
        return compute(call, *values)

    return wrong


def computed(
    parts: Callable[[Call], Any],
    compute: Callable[..., Tensor],
    where: Callable[..., Any] | None = None,
) -> Wrong:
    """The result that is computed of the parts alone; only where these fit."""
    return on(parts, lambda call, *values: call.instead(compute(*values)), where)


def tensors(*places: int) -> Callable[[Call], tuple[Tensor, ...]]:
    """These operands of a call."""
    return lambda call: tuple(call.tensor(place) for place in places)


def rounded(dtype: torch.dtype) -> Change:
    """A value in a narrower format, with its own gradient."""
    return lambda value: round_to(value, dtype)


def longer(axis: int, least: int = 1) -> Callable[[Tensor], bool]:
    """Whether a value is longer than this along an axis."""
    return lambda value: _has(value, axis) and value.size(axis) > least


def even(axis: int) -> Callable[[Tensor], bool]:
    """Whether the length of a value along an axis is even."""
    return lambda value: _has(value, axis) and value.size(axis) % 2 == 0


def _has(value: Tensor, axis: int) -> bool:
    return value.dim() >= (-axis if axis < 0 else axis + 1)
