"""Two sides that name their dimensions: brought into one order."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["Arrangement", "arrange"]

Names = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """Dimensions in another order, some of them laid into one.

    Attributes:
        words: the order.
        order: which dimension comes where.
        joined: so many of them, in that order, become one.
    """

    words: str
    order: tuple[int, ...]
    joined: tuple[int, ...]

    def apply(self, parts: Sequence[Tensor]) -> Tensor:
        """Rearrange the one part.

        Raises:
            UsageError: it has another number of dimensions.
        """
        (tensor,) = parts
        if tensor.ndim != len(self.order):
            raise UsageError(f"{self.words}: the tensor has the shape {tuple(tensor.shape)}")
        moved = tensor.permute(self.order)
        extents = iter(moved.shape)
        return moved.reshape([math.prod(itertools.islice(extents, n)) for n in self.joined])


def arrange(my: Names, golden: Names) -> tuple[Arrangement | None, Arrangement | None]:
    """How to bring two sides into the golden order; None for one that is in it.

    Args:
        my: per dimension its names, several where several dimensions were laid into one.
        golden: likewise. If the two do not have the same names, nothing can be done.
    """
    blocks = _blocks(my, golden)
    if blocks is None:
        return None, None
    return _arrangement(my, blocks), _arrangement(golden, blocks)


def _blocks(my: Names, golden: Names) -> Names | None:
    """The dimensions that both sides can be brought to, in the golden order."""
    mine = {name: names for names in my for name in names}
    theirs = {name: names for names in golden for name in names}
    if mine.keys() != theirs.keys():
        return None
    blocks: list[tuple[str, ...]] = []
    for name, names in theirs.items():
        if any(name in block for block in blocks):
            continue
        block = max(mine[name], names, key=len)
        inner = {other: {mine[other], theirs[other]} for other in block}
        # Every dimension of either side must lie within one block, and in its order.
        if any(not _is_run(one, block) for found in inner.values() for one in found):
            return None
        blocks.append(block)
    return tuple(blocks)


def _is_run(names: tuple[str, ...], block: tuple[str, ...]) -> bool:
    return any(block[at : at + len(names)] == names for at in range(len(block)))


def _arrangement(names: Names, blocks: Names) -> Arrangement | None:
    if names == blocks:
        return None
    place = {one: at for at, dimension in enumerate(names) for one in dimension}
    order: list[int] = []
    joined: list[int] = []
    for block in blocks:
        own = list(dict.fromkeys(place[name] for name in block))
        order += own
        joined.append(len(own))
    told = " ".join("*".join(block) for block in blocks)
    return Arrangement(f"dimensions brought to {told}", tuple(order), tuple(joined))
