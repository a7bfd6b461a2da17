"""Which part of a whole a plain tensor is, in a model that was split by hand: its values show it.

If several parts have these values, as in a bias of zeros, the part that is expected on the rank is
chosen.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from paritas.core.placement.assembly import box, length, positions, take
from paritas.core.placement.assembly import whole as all_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paritas.core.numerics.gates import Near
    from paritas.core.placement.assembly import Where

# The number of equal parts of a dimension -> which of them is expected on the rank, from 0.
ExpectedChunk = Callable[[int], int]
_MOST_ROWS = 1 << 16
_MOST_PRODUCTS = 1 << 26


@dataclasses.dataclass(frozen=True)
class PlainPart:
    """Where in the whole one rank's plain tensor lies.

    Attributes:
        where: which part of the whole it is.
        dim: the dim that is split; None if there are several.
        chunk: which of the equal parts along `dim` it is, from 0; None if the parts are not equal.
        natural: the part that is expected on this rank.
        proven: whether its values show it.
        ambiguous: whether they also fit elsewhere.
    """

    where: Where
    dim: int | None = None
    chunk: int | None = None
    natural: int | None = None
    proven: bool = False
    ambiguous: bool = False

    def fits(self, value: Tensor, shape: tuple[int, ...]) -> bool:
        """Whether a tensor has the shape of this part."""
        return len(shape) == len(self.where) and tuple(value.shape) == tuple(
            map(length, self.where)
        )


def find_plain_part(
    full_tensor: Tensor, local: Tensor, expected: ExpectedChunk, match: Match
) -> PlainPart | None:
    """Where `local` lies; None if it is the whole, or cannot be a part of it.

    A tensor whose values are nowhere in the whole is taken for the part that is expected, if it has
    its shape.
    """
    dims = split_dims(full_tensor.shape, local.shape)
    if not dims:
        return None
    if len(dims) > 1:
        return _find_block(full_tensor, local, dims, match)
    return (
        _find_chunk(full_tensor, local, dims[0], expected, match)
        or _find_rows(full_tensor, local, dims[0], match)
        or expected_part(full_tensor.shape, local.shape, expected)
    )


def expected_part(
    full_shape: Sequence[int], local: Sequence[int], expected: ExpectedChunk
) -> PlainPart | None:
    """The part that is expected on a rank, by shapes alone; None unless one dim has equal parts."""
    dims = split_dims(full_shape, local)
    if not dims or len(dims) > 1:
        return None
    parts, rest = divmod(full_shape[dims[0]], local[dims[0]])
    if rest:
        return None
    chunk = expected(parts)
    return PlainPart(_locate_chunk(local, dims[0], chunk), dims[0], chunk, chunk)


def split_dims(full_shape: Sequence[int], local: Sequence[int]) -> list[int] | None:
    """The dims along which a tensor is shorter than the whole; None if it cannot be a part."""
    if len(full_shape) != len(local) or 0 in local:
        return None
    if any(part > full for part, full in zip(local, full_shape, strict=True)):
        return None
    return [dim for dim, part in enumerate(local) if part < full_shape[dim]]


def _locate_chunk(local: Sequence[int], dim: int, chunk: int) -> Where:
    """One of the equal parts along a dim."""
    return box([chunk * size if at == dim else 0 for at, size in enumerate(local)], local)


def _find_chunk(
    full_tensor: Tensor, local: Tensor, dim: int, expected: ExpectedChunk, match: Match
) -> PlainPart | None:
    """The place of one of the equal parts."""
    parts, rest = divmod(full_tensor.shape[dim], local.shape[dim])
    if rest:
        return None
    places = [_locate_chunk(local.shape, dim, chunk) for chunk in range(parts)]
    fitting = [
        n for n, position in enumerate(places) if match.is_part(local, take(full_tensor, position))
    ]
    if not fitting:
        return None
    natural = expected(parts)
    chunk = natural if natural in fitting else fitting[0]
    several = len(fitting) > 1
    return PlainPart(places[chunk], dim, chunk, natural, proven=True, ambiguous=several)


def _find_rows(full_tensor: Tensor, local: Tensor, dim: int, match: Match) -> PlainPart | None:
    """The place of rows from anywhere, such as a part of each of queries, keys and values."""
    rows = match.find_rows(local, full_tensor, dim)
    if rows is None:
        return None
    where = [*map(all_of, full_tensor.shape)]
    where[dim] = positions(rows)
    return PlainPart(tuple(where), dim, proven=True)


def _find_block(
    full_tensor: Tensor, local: Tensor, dims: list[int], match: Match
) -> PlainPart | None:
    """The place of a block that is split along several dims."""
    counts = [divmod(full_tensor.shape[dim], local.shape[dim]) for dim in dims]
    if any(rest for _, rest in counts):
        return None
    for chunks in itertools.product(*(range(parts) for parts, _ in counts)):
        offset = [0] * full_tensor.dim()
        for dim, chunk in zip(dims, chunks, strict=True):
            offset[dim] = chunk * local.shape[dim]
        where = box(offset, local.shape)
        if match.is_part(local, take(full_tensor, where)):
            return PlainPart(where, proven=True)
    return None


# --- When values are those of a part --------------------------------------------------------------


class Match(Protocol):
    """Compares a tensor with parts of the whole."""

    def is_part(self, local: Tensor, part: Tensor) -> bool:
        """Whether it is this part, which has its shape."""

    def find_rows(self, local: Tensor, full_tensor: Tensor, dim: int) -> list[int] | None:
        """The positions of its rows along a dim of the whole; None if that is not clear."""


class ExactMatch:
    """Equal values, as those of parameters before the first step."""

    def is_part(self, local: Tensor, part: Tensor) -> bool:
        """Whether it has the values of this part."""
        return torch.equal(part, local)

    def find_rows(self, local: Tensor, full_tensor: Tensor, dim: int) -> list[int] | None:
        """A slice from anywhere, as uneven parts are, or single rows."""
        if full_tensor.shape[dim] > _MOST_ROWS:
            return None
        return self._find_slice(local, full_tensor, dim) or self._find_single_rows(
            local, full_tensor, dim
        )

    def _find_slice(self, local: Tensor, full_tensor: Tensor, dim: int) -> list[int] | None:
        size = local.shape[dim]
        starts = (full_tensor == local.narrow(dim, 0, 1)).movedim(dim, 0)
        starts = starts.reshape(len(starts), -1).all(1)
        fitting = [
            start
            for start in starts.nonzero().flatten().tolist()
            if start + size <= full_tensor.shape[dim]
            and torch.equal(full_tensor.narrow(dim, start, size), local)
        ]
        return [*range(fitting[0], fitting[0] + size)] if len(fitting) == 1 else None

    def _find_single_rows(self, local: Tensor, full_tensor: Tensor, dim: int) -> list[int] | None:
        numbers: dict[bytes, int] = {}
        for number, row in enumerate(_flat_rows(full_tensor, dim)):
            if numbers.setdefault(_row_bytes(row), number) != number:
                return None  # two rows are equal, so the numbers do not show which it is
        rows = [numbers.get(_row_bytes(row), -1) for row in _flat_rows(local, dim)]
        return rows if min(rows) >= 0 else None


@dataclasses.dataclass(frozen=True)
class NearMatch:
    """Values that differ by rounding, as those that ranks compute."""

    near: Near

    def is_part(self, local: Tensor, part: Tensor) -> bool:
        """Whether it has the values of this part."""
        return self.near(local, part)

    def find_rows(self, local: Tensor, full_tensor: Tensor, dim: int) -> list[int] | None:
        """The nearest row of the whole for each row; None if there are too many."""
        rows, local_rows = _flat_rows(full_tensor, dim).double(), _flat_rows(local, dim).double()
        if len(rows) * len(local_rows) * rows.shape[1] > _MOST_PRODUCTS:
            return None
        distances = torch.cdist(local_rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
        nearest = distances.argmin(dim=1)
        return (
            nearest.tolist() if self.near(local, full_tensor.index_select(dim, nearest)) else None
        )


def _flat_rows(tensor: Tensor, dim: int) -> Tensor:
    return tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)


def _row_bytes(row: Tensor) -> bytes:
    return row.contiguous().view(torch.uint8).numpy().tobytes()
