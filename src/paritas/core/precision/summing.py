"""The error of summing many terms, in half units in the last place.

Adding n terms one by one rounds n partial sums. Partial sums of terms of one sign grow like r k/n
towards the result r; those of random signs grow like the square root of the sum of squares q. The
roundings together are a random error of u/2 times the amplitude

    a = sqrt(n) * sqrt(r^2 / 3 + q / 2).

Implementations that sum in blocks or pairs do better. Two things can make it worse, in the order
of memory. The partial sums of sorted terms move far away and come back: where they do, their root
mean square takes the place of the second root. And terms that are nearly equal are all rounded in
the same direction: where that makes more, the error of adding them one by one is computed.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.numerics.criterion import UNIT_F32
from paritas.core.operators.catalogue import summation_of
from paritas.core.operators.summed_axes import summed_axes
from paritas.core.torch_private.operators import is_wrapper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paritas.core.operators.summed_axes import SummedAxes
    from paritas.core.torch_private.operators import Operator, Traits


@dataclasses.dataclass(frozen=True)
class SharedError:
    """An error that values share: a row that is divided by one norm is off by one factor.

    Attributes:
        amplitude: per value.
        shape: one draw for each element of this shape, which is broadcast over the values.
        repeats: how many times each draw is repeated first, along the second dimension: the
            channels of a group.
    """

    amplitude: Tensor
    shape: torch.Size
    repeats: int = 1


Amplitudes = list["Tensor | list[SharedError] | None"]


@dataclasses.dataclass(frozen=True)
class UnperturbedCall:
    """One call of an operator, on its unperturbed arguments."""

    name: str
    func: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


def amplitude_from(result: Tensor, squares: Tensor, length: int) -> Tensor:
    """The amplitude a, computed in place of `squares`, which is q."""
    size = result.abs() if result.is_complex() else result
    if squares.dtype != size.dtype:
        squares = squares.to(size.dtype)
    return squares.mul_(length / 2).addcmul_(size, size, value=length / 3).sqrt_()


def amplitude_in_order(amplitude: Tensor, length: int, squared_path: Tensor | None) -> Tensor:
    """The amplitude, raised where partial sums move far beyond what random signs would give.

    Args:
        amplitude: what `amplitude_from` gives.
        length: the number of terms.
        squared_path: the mean square of the partial sums; None if they need not be looked at.
    """
    if squared_path is None:
        return amplitude
    ordered = squared_path.reshape(amplitude.shape).mul(length).sqrt_().to(amplitude.dtype)
    is_far = ordered > FAR_FROM_RANDOM * amplitude
    return torch.where(is_far, ordered.mul_(_HALF_UNITS_PER_ROUNDING), amplitude)


# Paths of random terms are rarely longer, relative to what is expected of them.
FAR_FROM_RANDOM = 1.5


# Fewer terms cannot go far.
SHORTEST_PATH = 16


# A sum is rounded by up to one unit of the power of two below it. The root mean square over all
# sums between two powers is 1.47 half units of the sum, and nothing averages that out here.
_HALF_UNITS_PER_ROUNDING = 1.5


PATH_BLOCKS = 8


def path_of_rows(rows: Tensor) -> Tensor | None:
    """The mean square of the partial sums over the last dimension; None if it is short."""
    length = rows.shape[-1]
    if length < SHORTEST_PATH:
        return None
    width = -(-length // PATH_BLOCKS)
    whole_blocks = rows[..., : length // width * width].unflatten(-1, (-1, width))
    return square(whole_blocks.sum(-1).cumsum(-1)).mean(-1)


def with_error_of_equal_terms(amplitude: Tensor, rows: Tensor) -> Tensor:
    """The amplitude, raised where adding the terms one by one makes a far larger error.

    A partial sum is a multiple of its last digit, so what is lost by adding a term depends on this
    term alone: its part below that digit. Of equal terms it is the same each time.
    """
    length = rows.shape[-1]
    if length < SHORTEST_PATH or rows.is_complex() or not rows.numel():
        return amplitude
    limit = _NOT_BY_CHANCE * amplitude.reshape(-1)
    flat = rows.reshape(-1, length)
    step = max(1, flat.numel() // _MOST_ADDED_IN_ORDER)
    if step > 1 and not (_error_one_by_one(flat[::step]) > limit[::step]).any():
        return amplitude
    error = _error_one_by_one(flat).to(amplitude.dtype)
    raised = torch.where(error > limit, error * _HALF_UNITS_PER_ROUNDING, amplitude.reshape(-1))
    return raised.view(amplitude.shape)


# Errors of random terms are about half of their amplitude.
_NOT_BY_CHANCE = 2.5


# Of more terms, the error is computed for some sums only, before it is for all.
_MOST_ADDED_IN_ORDER = 1 << 16


def _error_one_by_one(rows: Tensor) -> Tensor:
    """The error of float32 sums over the last dimension, in half units of 1."""
    wide = rows.to(torch.float64)
    size = torch.maximum(wide.cumsum(-1).abs_(), wide.abs())
    digit = torch.ldexp(torch.ones_like(wide), torch.frexp(size).exponent - 24)
    lost = torch.round(wide / digit).mul_(digit).sub_(wide).sum(-1)
    return lost.abs_().nan_to_num_(0.0, 0.0, 0.0).mul_(2.0 / UNIT_F32)


def rows_of(x: Tensor, dims: Sequence[int]) -> Tensor:
    """The terms of a sum over some dimensions as last dimension, in the order of memory."""
    kept_dims = [dim for dim in range(x.dim()) if dim not in dims]
    moved = x.permute([*kept_dims, *sorted(dims)])
    return moved.reshape(*(x.shape[dim] for dim in kept_dims), -1)


def path_of_product(left: Tensor, right: Tensor) -> Tensor | None:
    """The same of a product of matrices; None if it is short, or a sample of it is not ordered."""
    length = left.shape[-1]
    if length < SHORTEST_PATH:
        return None
    rows = left if left.dim() > 1 else left[None]
    columns = right if right.dim() > 1 else right[:, None]
    few = _sample_matrices(rows, -2), _sample_matrices(columns, -1)
    terms = few[0].unsqueeze(-2) * few[1].mT.unsqueeze(-3)
    path, squares = path_of_rows(terms), square(terms).sum(-1)
    if path is None:
        return None
    expected = amplitude_from(terms.sum(-1), squares, length).mul_(FAR_FROM_RANDOM)
    return _whole_path(rows, columns) if path.mean() * length > expected.square_().mean() else None


def _whole_path(left: Tensor, right: Tensor) -> Tensor:
    """The mean square of the partial products, one block after the other, to save memory."""
    parts = zip(
        *(matrix.chunk(PATH_BLOCKS, dim) for matrix, dim in ((left, -1), (right, -2))), strict=True
    )
    first = next(parts)
    total = torch.matmul(*first)
    squares, count = square(total), 1
    for part in parts:
        total = total + torch.matmul(*part)
        squares.add_(square(total))
        count += 1
    return squares.div_(count)


def _sample_matrices(matrices: Tensor, dim: int) -> Tensor:
    """A few rows or columns, of a few matrices."""
    for sampled_dim in (dim, *range(matrices.dim() - 2)):
        step = max(1, matrices.shape[sampled_dim] // FEW)
        where = [slice(None)] * matrices.dim()
        where[sampled_dim] = slice(0, step * FEW, step)
        matrices = matrices[tuple(where)]
    return matrices


FEW = 4


def square(tensor: Tensor) -> Tensor:
    """The squared magnitudes, also of complex numbers."""
    return tensor.abs().square_() if tensor.is_complex() else tensor.square()


# --- The rounding of a last long sum, known without a run -----------------------------------------

# The gradient of a bias is a sum over rows, and the summation rounds far more than the rows
# themselves. This part of the noise can be computed from the terms while the arbiter runs. It is
# never more than the whole noise.

# Short sums round little more than any operator, and have many results.
_SHORTEST_SUM = 16
# The number of values remembered at once, for a program that only sums.
_MOST_REMEMBERED = 1 << 21
# Few enough values for their squares to stay in a core's cache.
_CACHED_COUNT = 1 << 16
# The rms of u/2 * a * U with U uniform in [-1, 1], per a.
_RMS_FACTOR = 2.0**-25 / math.sqrt(3)


class LastSums:
    """The sums of one run, by the memory of their results."""

    def __init__(self) -> None:
        # The result itself is kept, so that its memory is not reused.
        self._known: collections.OrderedDict[int, tuple[Tensor, Tensor]] = collections.OrderedDict()
        self._size = 0

    def note(
        self, kind: Traits, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Remember the result of a long sum."""
        adds_up = summation_of(kind.name) in ("sum", "mean")
        if not adds_up or kind.mutates or not isinstance(result, torch.Tensor):
            return
        terms = args[0]
        if not (_is_plain_float64(terms) and _is_plain_float64(result)):
            return
        many = (
            terms.numel() >= _SHORTEST_SUM * max(1, result.numel())
            and result.numel() <= _MOST_REMEMBERED
        )
        if not (many and result.numel()):
            return
        key = result.untyped_storage().data_ptr()
        self._forget(key)
        summed = summed_axes(kind.name, args, kwargs)["x"]
        amplitude = _amplitude_of_sum(terms, result, summed, mean=kind.name == "mean")
        self._known[key] = result.detach(), amplitude
        self._size += 2 * result.numel()
        while self._size > _MOST_REMEMBERED:
            self._forget(next(iter(self._known)))

    def forget_written(self, kind: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forget sums that an operator writes to."""
        if not (self._known and kind.mutates):
            return
        for argument_key, value in (*enumerate(args), *kwargs.items()):
            if argument_key in kind.mutates:
                for tensor in value if isinstance(value, list | tuple) else [value]:
                    if _is_plain_float64(tensor):
                        self._forget(tensor.untyped_storage().data_ptr())

    def behind(self, result: Tensor) -> Tensor | None:
        """The rms rounding per element of the sum in float32; None if no sum gave this result."""
        if not (self._known and _is_plain_float64(result)):
            return None
        noted_sum = self._known.get(result.untyped_storage().data_ptr())
        if noted_sum is None:
            return None
        added, amplitude = noted_sum
        same = added.numel() == result.numel() and added.storage_offset() == result.storage_offset()
        if not (same and added.is_contiguous() and result.is_contiguous()):
            return None
        # Values that fit float32 may be sums without rounding: masks, counts, positions.
        fits = added.to(torch.float32).to(torch.float64) == added
        return torch.where(fits, 0.0, amplitude.mul(_RMS_FACTOR)).view(result.shape)

    def _forget(self, key: int) -> None:
        forgotten_sum = self._known.pop(key, None)
        if forgotten_sum is not None:
            self._size -= 2 * forgotten_sum[0].numel()


def _is_plain_float64(value: Any) -> bool:
    """Whether a value is a strided float64 tensor with its own memory, and not a wrapper."""
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.float64:
        return False
    return value.layout is torch.strided and not value.is_nested and not is_wrapper(value)


def _amplitude_of_sum(x: Tensor, result: Tensor, summed: SummedAxes, *, mean: bool) -> Tensor:
    """The amplitude of a sum or mean of real `x` over some axes, without a copy of x's size."""
    pieces = _split_for_cache(x, summed.axes)
    squares = functools.reduce(
        torch.Tensor.add_, (piece.square().sum(summed.axes) for piece in pieces)
    )
    squares = squares.div_(summed.terms**2 if mean else 1).view(result.shape)
    return amplitude_from(result, squares, summed.terms)


def _split_for_cache(x: Tensor, dims: Sequence[int]) -> list[Tensor]:
    """Split `x` along the longest of these axes into pieces that stay in a core's cache."""
    axis = max(dims, key=lambda dim: x.shape[dim])
    most = _CACHED_COUNT if x.is_cpu else x.numel()
    width = max(1, most * x.shape[axis] // x.numel())
    return list(torch.split(x, width, dim=axis))
