"""Values of one framework made into those of another: renamed, turned, taken apart, joined.

A rule is applied to the names of my dump and gives names of the golden one. What it does to the
values is a recipe, which travels with the operand until that is read.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

import torch

from paritas.comparison.operands import Operand
from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["PART", "Joined", "Part", "Permuted", "Renaming"]

# Stands, in the names of a rule, for each of the parts in turn.
PART = "{part}"


@dataclasses.dataclass(frozen=True)
class Permuted:
    """The dimensions of a tensor in another order, as `Tensor.permute` has it."""

    order: tuple[int, ...]

    @property
    def words(self) -> str:
        """What is done, for the table."""
        return f"dimensions permuted to {', '.join(map(str, self.order))}"

    def apply(self, parts: Sequence[Tensor]) -> Tensor:
        """Do it.

        Raises:
            UsageError: it has another number of dimensions.
        """
        tensor = _only(parts)
        if tensor.ndim != len(self.order):
            raise UsageError(
                f"a rename permutes {len(self.order)} dimensions to {list(self.order)}, and the "
                f"tensor has the shape {tuple(tensor.shape)}"
            )
        return tensor.permute(self.order)


@dataclasses.dataclass(frozen=True)
class Part:
    """One of the parts that a tensor is taken apart to along a dimension.

    Attributes:
        index: which.
        count: of how many.
        sizes: how long each is; empty where all are equally long.
    """

    dim: int
    index: int
    count: int
    sizes: tuple[int, ...] = ()

    @property
    def words(self) -> str:
        """What is done, for the table."""
        return f"part {self.index + 1} of {self.count} along dimension {self.dim}"

    def apply(self, parts: Sequence[Tensor]) -> Tensor:
        """Do it.

        Raises:
            UsageError: it cannot be taken apart like that.
        """
        tensor = _only(parts)
        length = _length(tensor, self.dim)
        sizes = self.sizes or (length // self.count,) * self.count
        if sum(sizes) != length:
            told = f"parts of {list(self.sizes)}" if self.sizes else f"{self.count} equal parts"
            raise UsageError(
                f"dimension {self.dim} of the shape {tuple(tensor.shape)} does not split into "
                f"{told}"
            )
        return tensor.narrow(self.dim, sum(sizes[: self.index]), sizes[self.index])


@dataclasses.dataclass(frozen=True)
class Joined:
    """Tensors put one behind the other along a dimension."""

    dim: int
    count: int

    @property
    def words(self) -> str:
        """What is done, for the table."""
        return f"{self.count} joined along dimension {self.dim}"

    def apply(self, parts: Sequence[Tensor]) -> Tensor:
        """Do it.

        Raises:
            UsageError: they do not fit together.
        """
        shapes = [tuple(part.shape) for part in parts]
        told = " and ".join(map(str, dict.fromkeys(shapes)))
        dtypes = dict.fromkeys(part.dtype for part in parts)
        if len(dtypes) > 1:
            raise UsageError(f"parts of the dtypes {', '.join(map(str, dtypes))} are not joined")
        for part in parts:
            at = self.dim % part.ndim if _length(part, self.dim) >= 0 else 0
            rest = (*part.shape[:at], *part.shape[at + 1 :])
            first = (*shapes[0][:at], *shapes[0][at + 1 :])
            if rest != first or part.ndim != len(shapes[0]):
                raise UsageError(f"the shapes {told} do not join along dimension {self.dim}")
        return torch.cat(list(parts), dim=self.dim)


def _only(parts: Sequence[Tensor]) -> Tensor:
    (tensor,) = parts
    return tensor


def _length(tensor: Tensor, dim: int) -> int:
    if not -tensor.ndim <= dim < tensor.ndim:
        raise UsageError(
            f"a rename speaks of dimension {dim}, and the tensor has the shape "
            f"{tuple(tensor.shape)}"
        )
    return tensor.shape[dim]


@dataclasses.dataclass(frozen=True)
class Renaming:
    r"""A rule: what is called so in my dump is called otherwise in the golden one.

    Attributes:
        my: is searched in a name of mine; with `concat`, `{part}` stands for each part.
        golden: what the found text is replaced by, with `\1` for what the first group found; with
            `split`, `{part}` stands for each part.
        dim: the dimension along which is split or joined.
        split: the parts that mine is taken apart to.
        sizes: how long these are; empty where all are equally long.
        concat: the parts of mine that are joined.
        permute: the order that the dimensions of mine are brought to, after all else.
    """

    my: str
    golden: str
    dim: int = 0
    split: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    concat: tuple[str, ...] = ()
    permute: tuple[int, ...] = ()

    def patterns(self) -> list[re.Pattern[str]]:
        """What is searched for: one for each part of mine."""
        parts = self.concat or ("",)
        return [re.compile(self.my.replace(PART, re.escape(part))) for part in parts]

    def replacements(self) -> list[str]:
        """What it is replaced by: one for each golden part."""
        parts = self.split or ("",)
        return [self.golden.replace(PART, part) for part in parts]

    def operand(self, mine: Sequence[Operand], golden_part: int = 0) -> Operand:
        """Mine, made into what the golden side has.

        Args:
            mine: one, or all of `concat`.
            golden_part: which part of `split`.
        """
        made = mine[0]
        if self.concat:
            made = Operand(tuple(mine), Joined(self.dim, len(self.concat)))
        elif self.split:
            made = Operand((made,), Part(self.dim, golden_part, len(self.split), self.sizes))
        return Operand((made,), Permuted(self.permute)) if self.permute else made
