"""A proposed way to cut the arguments of an operator, and the operator run on what a rank has.

Less than a recipe and quicker to try: a discovery runs hundreds of them, most of which fail.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from paritas.numerics.trees import leaves
from paritas.partition.recipes import Divided, Once, Place, Placement, Split

__all__ = ["Cut", "DividedNumber", "Outcome", "Subject", "argument", "common_units", "part"]

Tensors = dict[Place, torch.Tensor]


class DividedNumber(NamedTuple):
    """A number of the call that may have to be divided with a split."""

    place: Place
    item: int | None
    value: int


class Cut(NamedTuple):
    """What is split together, at one dimension of each.

    Attributes:
        dims: argument, dimension, and of how many elements its parts are multiples.
        number: what is divided with it.
        once: arguments that only the first rank has; the others have zeros.
    """

    dims: tuple[tuple[Place, int, int], ...]
    number: DividedNumber | None = None
    once: tuple[Place, ...] = ()

    def times(self, factor: int) -> Cut:
        """The same in parts that are multiples of more elements."""
        return self._replace(dims=tuple((p, d, factor * unit) for p, d, unit in self.dims))

    def placements(self) -> tuple[tuple[Place, Placement], ...]:
        """The same for a recipe."""
        split = {argument(place): Split(dim, unit) for place, dim, unit in self.dims}
        return (*split.items(), *((place, Once()) for place in self.once))

    def numbers(self) -> tuple[tuple[Place, Divided], ...]:
        """Likewise."""
        return () if self.number is None else ((self.number.place, Divided(self.number.item)),)

    def fits(self, shapes: Mapping[Place, torch.Size], ranks: int) -> bool:
        """Whether every rank gets a part, and a whole number."""
        if self.number is not None and self.number.value % ranks:
            return False
        return all(
            shapes[place][dim] % unit == 0 and shapes[place][dim] // unit >= ranks
            for place, dim, unit in self.dims
        )


class Outcome(NamedTuple):
    """What a run gave.

    Attributes:
        tensors: the tensors among the results.
        others: the rest of them.
        arguments: the tensors it was given, as it left them.
    """

    tensors: list[torch.Tensor]
    others: list[Any]
    arguments: Tensors


@dataclasses.dataclass(frozen=True)
class Subject:
    """An operator call whose tensors can be replaced."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def given(self) -> dict[Place, Any]:
        """Its arguments, by where they are given."""
        found: dict[Place, Any] = dict(enumerate(self.args))
        found.update(self.kwargs)
        return found

    def tensors(self) -> Tensors:
        """Those of them that are tensors, and the items of those that are lists of tensors."""
        found: Tensors = {}
        for place, value in self.given().items():
            if isinstance(value, torch.Tensor):
                found[place] = value
            elif _is_list(value):
                found.update({item_place(place, at): one for at, one in enumerate(value)})
        return found

    def numbers(self) -> list[DividedNumber]:
        """Its whole numbers above one: sizes, heads and groups are among them."""
        found: list[DividedNumber] = []
        for place, value in self.given().items():
            items = enumerate(value) if isinstance(value, tuple | list) else [(None, value)]
            found += [
                DividedNumber(place, item, number)
                for item, number in items
                if isinstance(number, int) and not isinstance(number, bool) and number > 1
            ]
        return found

    def run(self, tensors: Tensors, number: DividedNumber | None = None, ranks: int = 1) -> Outcome:
        """Call the operator with other tensors, and maybe with a number divided by the ranks."""
        given: dict[Place, Any] = dict(tensors)
        for place, value in self._lists.items():
            items = [tensors[item_place(place, at)] for at in range(len(value))]
            given[place] = tuple(items) if isinstance(value, tuple) else items
        if number is not None:
            given[number.place] = self._divided(number, ranks)
        args = [given.get(place, value) for place, value in enumerate(self.args)]
        kwargs = {name: given.get(name, value) for name, value in self.kwargs.items()}
        result = self.function(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            return Outcome([result], [], tensors)
        flat = [leaf for _, leaf in leaves(result)]
        found = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        others = [leaf for leaf in flat if not isinstance(leaf, torch.Tensor)]
        return Outcome(found, others, tensors)

    def run_rank(
        self, tensors: Tensors, cut: Cut, rank: int, ranks: int, *, fresh: bool = False
    ) -> Outcome:
        """Call the operator with what a rank has.

        Args:
            fresh: give it copies, for an operator that writes to its arguments.
        """
        own = dict(tensors)
        for place, dim, unit in cut.dims:
            own[place] = part(own[place], dim, unit, rank, ranks)
        if rank:
            own.update({place: torch.zeros_like(own[place]) for place in cut.once})
        if fresh:
            own = {place: tensor.clone() for place, tensor in own.items()}
        return self.run(own, cut.number, ranks)

    @functools.cached_property
    def _lists(self) -> dict[Place, Any]:
        return {place: value for place, value in self.given().items() if _is_list(value)}

    def _divided(self, number: DividedNumber, ranks: int) -> Any:
        if number.item is None:
            return number.value // ranks
        place = number.place
        value = self.kwargs[place] if isinstance(place, str) else self.args[place]
        items = list(value)
        items[number.item] = number.value // ranks
        return tuple(items) if isinstance(value, tuple) else items


def item_place(place: Place, at: int) -> str:
    """Where an item of a list is: no argument by name is called so."""
    return f"{place}[{at}]"


def argument(place: Place) -> Place:
    """The argument that a place is, or is an item of."""
    name, bracket, _ = str(place).partition("[")
    if not bracket:
        return place
    return int(name) if name.isdecimal() else name


def _is_list(value: Any) -> bool:
    return (
        isinstance(value, tuple | list)
        and len(value) > 0
        and all(isinstance(one, torch.Tensor) for one in value)
    )


def part(tensor: torch.Tensor, dim: int, unit: int, rank: int, ranks: int) -> torch.Tensor:
    """A rank's part; the first ranks have one unit more where it does not divide evenly."""
    each, more = divmod(tensor.shape[dim] // unit, ranks)
    begin = rank * each + min(rank, more)
    length = each + (rank < more)
    return tensor.narrow(dim, begin * unit, length * unit)


def common_units(sizes: tuple[int, ...], number: DividedNumber | None) -> tuple[int, ...] | None:
    """Of how many elements the parts of dimensions are multiples; None if they have no such.

    Dimensions that are split together bear one identifier, alone or as the first factor of a
    product: they are multiples of the shortest, the number that is divided being one of them.
    """
    lengths = sizes if number is None else (*sizes, number.value)
    units = min(lengths)
    if any(length % units for length in lengths):
        return None
    return tuple(size // units for size in sizes)
