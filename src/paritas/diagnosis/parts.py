"""A case cut into boxes, so that of a large tensor no more is in float64 than one of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.diagnosis.cases import Case

__all__ = ["Box", "boxes", "narrowed"]

# An element of a box takes some 100 bytes on the way.
BLOCK = 1 << 18


@dataclasses.dataclass(frozen=True, eq=False)
class Box:
    """Neighbouring elements in the order of the flattened tensor, as a case of their own.

    Attributes:
        outer: the index along the axes before the one that is cut, which the case has no more.
        start: where it begins along that one.
        offset: its first element in the flattened tensor.
        case: the elements.
    """

    outer: tuple[int, ...]
    start: int
    offset: int
    case: Case

    @property
    def size(self) -> int:
        """How many elements it has."""
        return self.case.reference.numel()


def boxes(case: Case, scale: float | None = None) -> Iterator[Box]:
    """All of a case that has an axis, in the order of the flattened tensor.

    Args:
        scale: of the whole case, where the noise is asked for and was not measured.
    """
    shape = case.shape
    # Of that axis and those behind it whole slices go into a box.
    cut = next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) <= BLOCK)
    inner = math.prod(shape[cut + 1 :])
    step = max(1, BLOCK // max(1, inner))
    offset = 0
    for outer in itertools.product(*map(range, shape[:cut])):
        for start in range(0, shape[cut], step):
            length = min(step, shape[cut] - start)
            yield Box(outer, start, offset, _cut(case, outer, 0, start, length, scale))
            offset += length * inner


def narrowed(case: Case, axis: int, start: int, length: int, scale: float | None) -> Case:
    """Some slices of a case, views of its tensors.

    Args:
        scale: of the whole case.
    """
    return _cut(case, (), axis, start, length, scale)


def _cut(
    case: Case, outer: tuple[int, ...], axis: int, start: int, length: int, scale: float | None
) -> Case:
    def part(value: Tensor) -> Tensor:
        return value.detach().expand(case.shape)[outer].narrow(axis, start, length)

    return dataclasses.replace(
        case,
        candidate=part(case.candidate),
        reference=part(case.reference),
        arbiter=None if case.arbiter is None else part(case.arbiter),
        noise=None if case.noise is None else part(case.noise),
        whole_scale=scale if case.whole_scale is None else case.whole_scale,
    )
