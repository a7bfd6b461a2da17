"""A large case cut into boxes, of which only one at a time is in float64."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.core.diagnosis.case import Case

# A tensor with more elements is cut into boxes.
MOST_ELEMENTS = 1 << 20
# Each element of a box takes about 100 bytes of temporaries.
BLOCK = 1 << 18


@dataclasses.dataclass(frozen=True, eq=False)
class Box:
    """Neighbouring elements of the flattened tensor as a case.

    Attributes:
        outer: the index along the axes before the one that is cut, which the case does not have.
        start: where it starts along that axis.
        offset: its first element in the flattened tensor.
        case: the elements.
    """

    outer: tuple[int, ...]
    start: int
    offset: int
    case: Case

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.case.reference.numel()


def boxes(case: Case, scale: float | None = None) -> Iterator[Box]:
    """All boxes of a case with at least one axis, in the order of the flattened tensor.

    Args:
        scale: of the whole case, if noise is needed that was not measured.
    """
    shape = case.shape
    # A box holds whole slices of this axis and those after it.
    cut = next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) <= BLOCK)
    inner = math.prod(shape[cut + 1 :])
    step = max(1, BLOCK // max(1, inner))
    offset = 0
    for outer in itertools.product(*map(range, shape[:cut])):
        for start in range(0, shape[cut], step):
            length = min(step, shape[cut] - start)
            yield Box(outer, start, offset, cut_case(case, outer, 0, start, length, scale))
            offset += length * inner


def cut_case(
    case: Case, outer: tuple[int, ...], axis: int, start: int, length: int, scale: float | None
) -> Case:
    """Some slices of a case, as views of its tensors.

    Args:
        outer: indices along the first axes, which the part does not have.
        axis: the one of the remaining axes that is cut.
        scale: of the whole case.
    """

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
