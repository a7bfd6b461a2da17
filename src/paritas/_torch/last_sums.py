"""The rounding that results owe to their last step, where that was a long sum: known without a run.

A bias's gradient is a sum over rows, and what rounds in it is the adding up: far more than what
the rows bring along. That much can be told from the terms while the arbiter is made, and it is a
part of the noise, never more than the whole.
"""

from __future__ import annotations

import collections
import math
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paritas._torch.accumulation import amplitude_from

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paritas._torch.operators import Traits

__all__ = ["LastSums"]

_SUMS = frozenset({"sum", "mean"})
# Short sums round little more than any operator, and their results are many.
_SHORTEST = 16
# All that is remembered at once, in numbers: the results of a program that only sums.
_MOST = 1 << 21
# Few enough numbers for their squares to stay in a core's cache.
_PIECE = 1 << 16
# Of u/2 * a * U with U uniform in [-1, 1].
_RMS = 2.0**-25 / math.sqrt(3)


class LastSums:
    """The sums of one run, by the memory that their results lie in."""

    def __init__(self) -> None:
        """Start with none."""
        # The result itself is kept: its memory must not be handed to another while it stands here.
        self._known: collections.OrderedDict[int, tuple[Tensor, Tensor]] = collections.OrderedDict()
        self._size = 0

    def note(
        self, kind: Traits, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Remember the result of a long sum."""
        if kind.name not in _SUMS or kind.mutates or not isinstance(result, torch.Tensor):
            return
        terms, over = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
        if not (_is_plain(terms) and _is_plain(result)):
            return
        many = terms.numel() >= _SHORTEST * max(1, result.numel()) and result.numel() <= _MOST
        if not (many and result.numel()):
            return
        key = result.untyped_storage().data_ptr()
        self._forget(key)
        amplitude = _amplitude_of_sum(terms, result, over, mean=kind.name == "mean")
        if amplitude is None:
            return
        self._known[key] = result.detach(), amplitude
        self._size += 2 * result.numel()
        while self._size > _MOST:
            self._forget(next(iter(self._known)))

    def forget_written(self, kind: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A sum that is written to is none any more."""
        if not (self._known and kind.mutates):
            return
        for place, value in (*enumerate(args), *kwargs.items()):
            if place in kind.mutates:
                for tensor in value if isinstance(value, list | tuple) else [value]:
                    if _is_plain(tensor):
                        self._forget(tensor.untyped_storage().data_ptr())

    def behind(self, result: Tensor) -> Tensor | None:
        """Per element the rms rounding of adding up in float32; None if no sum gave this result."""
        if not (self._known and _is_plain(result)):
            return None
        found = self._known.get(result.untyped_storage().data_ptr())
        if found is None:
            return None
        added, amplitude = found
        same = added.numel() == result.numel() and added.storage_offset() == result.storage_offset()
        if not (same and added.is_contiguous() and result.is_contiguous()):
            return None
        # What fits float32 may have been added up without any rounding: masks, counts, positions.
        fits = added.to(torch.float32).to(torch.float64) == added
        return torch.where(fits, 0.0, amplitude.mul(_RMS)).view(result.shape)

    def _forget(self, key: int) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self._size -= 2 * known[0].numel()


def _is_plain(value: Any) -> bool:
    """Whether a value is a float64 tensor with memory of its own kind: no wrapper, not sparse."""
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.float64:
        return False
    return (
        value.layout is torch.strided
        and not value.is_nested
        and not is_traceable_wrapper_subclass(value)
    )


def _amplitude_of_sum(x: Tensor, result: Tensor, over: Any, *, mean: bool) -> Tensor | None:
    """The amplitude of a sum or mean of real `x` over some axes, made without a tensor like x."""
    if over is not None and not isinstance(over, list | tuple | int):
        return None
    dims = [over] if isinstance(over, int) else list(over or range(x.dim()))
    length = x.numel() // result.numel()
    squares: Tensor | None = None
    for piece in _pieces(x, dims):
        mine = piece.square().sum(dim=dims)
        squares = mine if squares is None else squares.add_(mine)
    if squares is None or squares.numel() != result.numel():
        return None
    return amplitude_from(result, squares.div_(length**2 if mean else 1).view(result.shape), length)


def _pieces(x: Tensor, dims: Sequence[int]) -> list[Tensor]:
    """`x` cut along the longest of these axes, into pieces that stay in a core's cache."""
    if not x.dim():
        return [x]
    axis = max(dims, key=lambda dim: x.shape[dim])
    most = _PIECE if x.is_cpu else x.numel()
    width = max(1, most * x.shape[axis] // x.numel())
    return list(torch.split(x, width, dim=axis))
