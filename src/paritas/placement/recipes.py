"""How an operator is split over ranks, and how what the ranks give becomes the whole.

A recipe is what an annotation, a library, a discovery or a user comes down to: for every argument
what each rank is given of it, for every result how those of the ranks are put together. It says
nothing about values; `partition` finds out whether it is right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

# An argument: its position, or its name.
Place = int | str
Reduction = Literal["sum", "avg", "max", "min", "product"]


# --- what a rank is given -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Split:
    """Each rank has a part along a dimension, in the order of the ranks.

    Attributes:
        unit: parts are multiples of so many elements; of `(h d)`, split by h, as many as d has.
        halo: so many elements of its neighbours a rank has before and after its own part.
    """

    dim: int
    unit: int = 1
    halo: tuple[int, int] = (0, 0)


@dataclasses.dataclass(frozen=True)
class Whole:
    """Each rank has all of it.

    Attributes:
        summed: whether the gradients of the ranks are terms of the whole's; otherwise each of them
            is claimed to be the whole's already.
        own: whether what the operator writes to it is each rank's own, and nobody claims that it
            is what the whole writes.
    """

    summed: bool = True
    own: bool = False


@dataclasses.dataclass(frozen=True)
class Once:
    """One rank has it, the others have zeros in its place: a bias that must be added once."""


@dataclasses.dataclass(frozen=True)
class Partial:
    """Each rank has a term (or, of max and min, a bound) of what it is all together."""

    reduction: Reduction = "sum"


Placement = Split | Whole | Once | Partial


# --- what becomes of the results ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Concat:
    """Parts, one after the other."""

    dim: int


@dataclasses.dataclass(frozen=True)
class Reduce:
    """Terms of a whole."""

    reduction: Reduction = "sum"


@dataclasses.dataclass(frozen=True)
class Same:
    """All ranks have all of it: they have to agree."""


Combine = Concat | Reduce | Same


# --- numbers that go with a split -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Divided:
    """A number (or an item of a tuple) that is divided by the number of ranks: `heads`, a size.

    Attributes:
        item: which item of a tuple or list; None for a number by itself.
    """

    item: int | None = None


@dataclasses.dataclass(frozen=True)
class Range:
    """The begin or the end of a rank's part of an argument: vocabulary-sharded embeddings.

    Attributes:
        of: the argument that is split.
        end: which of the two.
    """

    of: Place
    end: Literal["begin", "end"]


@dataclasses.dataclass(frozen=True)
class Group:
    """The process group of the ranks, for an operator that exchanges something among them.

    Attributes:
        joined: whether the ranks are in it; otherwise the argument is None on each of them, as
            where something is split that needs no exchange.
    """

    joined: bool = True


KeywordRule = Divided | Range | Group


# --- the whole ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One way to split an operator.

    Attributes:
        inputs: what each rank is given of an argument; what is not named here is given whole.
        outputs: how the results are put together, one for each tensor that the operator gives.
        numbers: arguments that are no tensors and go with the split.
        words: what it is, for people: the annotation and the identifier that is split.
    """

    inputs: tuple[tuple[Place, Placement], ...]
    outputs: tuple[Combine, ...]
    numbers: tuple[tuple[Place, KeywordRule], ...] = ()
    words: str = ""

    def placement(self, place: Place) -> Placement:
        """What a rank is given of an argument."""
        return dict(self.inputs).get(place, Whole())

    @property
    def exchanges(self) -> bool:
        """Whether the ranks talk to each other while the operator runs."""
        return Group() in dict(self.numbers).values()


@dataclasses.dataclass(frozen=True)
class OperatorCall:
    """An operator and what it is called with.

    Attributes:
        name: what the user calls it: `torch.nn.functional.linear`.
        without_gradient: arguments of which no gradient is asked, such as running statistics.
        seed: of the arguments, as far as they were drawn.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    name: str = ""
    without_gradient: frozenset[Place] = frozenset()
    seed: int = 0
