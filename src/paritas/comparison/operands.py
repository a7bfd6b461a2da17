"""What is compared: a recorded value, or what several recorded values are put together to."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.dumps.records import Record
    from paritas.numerics.comparisons import MatchedBy

__all__ = ["Operand", "Pair", "Recipe"]


class Recipe(Protocol):
    """How parts become one tensor. Frozen, and fit to be sent to another process."""

    @property
    def words(self) -> str:
        """What is done, for the table: `put together from ranks 0-3 along dimension 1`."""

    def apply(self, parts: Sequence[Tensor]) -> Tensor:
        """Do it.

        Raises:
            UsageError: the parts do not fit together; the message says how.
        """


@dataclasses.dataclass(frozen=True)
class Operand:
    """One side of a pair.

    Attributes:
        parts: a record, or what the recipe takes.
        recipe: None for a record by itself.
        record: the first record, which names the whole.
        is_single: whether it is a record by itself, as most are.
    """

    parts: tuple[Record | Operand, ...]
    recipe: Recipe | None = None
    # Found once: whoever deals with operands asks for these, again and again.
    record: Record = dataclasses.field(init=False, repr=False, compare=False)
    is_single: bool = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Find what is asked for most."""
        first = self.parts[0]
        record = first.record if isinstance(first, Operand) else first
        object.__setattr__(self, "record", record)
        single = self.recipe is None and len(self.parts) == 1 and record is first
        object.__setattr__(self, "is_single", single)

    @property
    def step(self) -> int:
        """The step, as its dump counts."""
        return self.record.step

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that it is of, ascending."""
        if self.is_single:
            return (self.record.rank,)
        return tuple(sorted({record.rank for record in self.records()}))

    @property
    def words(self) -> str:
        """How it was put together; empty for a record by itself."""
        if self.is_single:
            return ""
        inner = [part.words for part in self.parts if isinstance(part, Operand)]
        own = [] if self.recipe is None else [self.recipe.words]
        return ", then ".join(words for words in dict.fromkeys((*inner, *own)) if words)

    def records(self) -> Iterator[Record]:
        """All records that it is made of."""
        if self.is_single:
            return iter((self.record,))
        return itertools.chain.from_iterable(
            part.records() if isinstance(part, Operand) else (part,) for part in self.parts
        )

    def read(self, values: Callable[[Record], Tensor]) -> Tensor:
        """Its value, given those of records.

        Raises:
            UsageError: a record cannot be read, or the parts do not fit together.
        """
        parts = [
            part.read(values) if isinstance(part, Operand) else values(part) for part in self.parts
        ]
        return parts[0] if self.recipe is None else self.recipe.apply(parts)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two operands that belong together, or one that has no counterpart.

    Attributes:
        nearest: names on the other side that are most like that of an operand without one.
    """

    my: Operand | None
    golden: Operand | None
    matched_by: MatchedBy
    nearest: tuple[str, ...] = ()

    @property
    def leading(self) -> Operand:
        """The operand that names the pair: the golden one, unless it is seen elsewhere.

        What a kernel reads is compared with what the golden node made that it is the value of.
        """
        if self.golden is None or self.my is None:
            found = self.golden or self.my
            if found is None:
                raise ValueError("a pair of nothing")
            return found
        same_side = self.my.record.site.side == self.golden.record.site.side
        return self.golden if same_side else self.my
