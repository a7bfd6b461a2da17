"""How an operator is split over ranks, and how what the ranks give becomes the whole.

A recipe is what an annotation, a library, a discovery or a user comes down to: for every argument
what each rank is given of it, for every result how those of the ranks are put together. It says
nothing about values; `partition` finds out whether it is right.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch

from paritas._torch.operators import map_tensors
from paritas.errors import UsageError
from paritas.placement.placement import bounds, dimension, split_tensor
from paritas.results.placements import Replicate, Shard

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.placement.placement import Terms
    from paritas.results.placements import Role

# An argument: its position, or its name.
Place = int | str


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
        outputs: what each tensor that the operator gives is over the ranks: parts one after the
            other, terms of a whole, or the same on all of them.
        numbers: arguments that are no tensors and go with the split.
        words: what it is, for people: the annotation and the identifier that is split.
    """

    inputs: tuple[tuple[Place, Role], ...]
    outputs: tuple[Role, ...]
    numbers: tuple[tuple[Place, KeywordRule], ...] = ()
    words: str = ""

    def placement(self, place: Place) -> Role:
        """What a rank is given of an argument."""
        return dict(self.inputs).get(place, Replicate())

    def splits(self, idx: int, dim: int, arguments: int) -> bool:
        """Whether it splits a dimension of an argument, or of a result, counted after these."""
        at = idx - arguments
        role = self.placement(idx) if at < 0 else dict(enumerate(self.outputs)).get(at)
        return isinstance(role, Shard) and role.dim == dim

    @property
    def split_by(self) -> str:
        """The identifier that is split, or the dimensions, of what it says about itself."""
        return self.words.rpartition("split by ")[2]

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


# --- The arguments of a call, and what each rank is given of them ---------------------------------

# Arguments by position and by name.
Values = dict["Place", Any]


def name_of(place: Place) -> str:
    """An argument as people write it."""
    return f"args[{place}]" if isinstance(place, int) else f"kwargs[{place!r}]"


def argument_words(call: OperatorCall, place: Place) -> str:
    """An argument with the name of its parameter, where the operator says it: `args[3] (mean)`."""
    if isinstance(place, str):
        return name_of(place)
    try:
        names = list(inspect.signature(call.function).parameters)
    except (TypeError, ValueError):  # not all that is built in says what it takes
        return name_of(place)
    return f"{name_of(place)} ({names[place]})" if place < len(names) else name_of(place)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of an argument, which may be a list of them."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def device_of(call: OperatorCall) -> torch.device:
    """Where the tensors of a call are; the host, if it has none."""
    values = (*call.args, *call.kwargs.values())
    return next((t.device for value in values for t in tensors_in(value)), torch.device("cpu"))


def moved(value: Any, device: torch.device) -> Any:
    """An argument on a device: its tensors, and devices that are named in it."""
    if isinstance(value, torch.device):
        return device
    if isinstance(value, torch.Tensor | list | tuple):
        return map_tensors(value, lambda tensor: tensor.to(device))
    return value


def on_device(call: OperatorCall, device: torch.device) -> OperatorCall:
    """The same call on a device."""
    return dataclasses.replace(
        call,
        args=tuple(moved(value, device) for value in call.args),
        kwargs={name: moved(value, device) for name, value in call.kwargs.items()},
    )


def parts_of(value: Any, placement: Role, ranks: int, terms: Terms, what: str) -> list[Any]:
    """What each rank is given of an argument; a list's tensors are all treated alike.

    Raises:
        UsageError: it cannot be split so.
    """
    if isinstance(value, torch.Tensor):
        return split_tensor(value, placement, ranks, terms, what)
    if isinstance(placement, Replicate):
        if placement.summed or not tensors_in(value):
            return [value] * ranks
    elif not tensors_in(value):
        message = f"{what} is {value!r:.60}, not a tensor, and cannot be {placement}"
        raise UsageError(f"{message}; leave it out of the recipe's inputs")
    items = [
        parts_of(item, placement, ranks, terms, f"{what}[{place}]")
        if tensors_in(item)
        else [item] * ranks
        for place, item in enumerate(value)
    ]
    return [type(value)(item[rank] for item in items) for rank in range(ranks)]


def split_values(values: Values, recipe: Recipe, ranks: int, terms: Terms) -> list[Values]:
    """The arguments of each rank; a `Group` in the place of one becomes the group on the rank.

    Raises:
        UsageError: an argument cannot be split so.
    """
    placements = dict(recipe.inputs)
    rules = {place: rule for place, rule in recipe.numbers if not isinstance(rule, Group)}
    each: list[Values] = [{} for _ in range(ranks)]
    for place, value in values.items():
        if place in rules:
            parts: list[Any] = [
                _number_for_rank(value, rules[place], values, recipe, (rank, ranks), name_of(place))
                for rank in range(ranks)
            ]
        elif place in placements:
            parts = parts_of(value, placements[place], ranks, terms, name_of(place))
        else:
            parts = [value] * ranks
        for mine, part in zip(each, parts, strict=True):
            mine[place] = part
    for place, rule in recipe.numbers:
        if isinstance(rule, Group):  # the call need not have it
            for mine in each:
                mine[place] = rule if rule.joined else None
    return each


def _number_for_rank(
    value: Any,
    rule: Divided | Range,
    values: Values,
    recipe: Recipe,
    where: tuple[int, int],
    what: str,
) -> Any:
    rank, ranks = where
    if isinstance(rule, Range):
        return _end_of_range(value, rule, values, recipe, where)
    if rule.item is None:
        return _share_of_number(value, rank, ranks, what)
    try:
        items = list(value)
        items[rule.item] = _share_of_number(items[rule.item], rank, ranks, f"{what}[{rule.item}]")
    except (TypeError, IndexError):
        message = f"{what} is {value!r:.60} and has no item {rule.item} to divide"
        raise UsageError(f"{message}; name one it has") from None
    return tuple(items) if isinstance(value, tuple) else items


def _share_of_number(value: Any, rank: int, ranks: int, what: str) -> Any:
    if value == -1:  # a size that follows from the others
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{what} is {value!r:.60}, not an integer that ranks can share")
    cuts = bounds(value, 1, ranks, what)
    return cuts[rank][1] - cuts[rank][0]


def _end_of_range(
    value: Any, rule: Range, values: Values, recipe: Recipe, where: tuple[int, int]
) -> Any:
    """Counted from where the whole's range begins, or to where it ends."""
    of, placement = values.get(rule.of), recipe.placement(rule.of)
    what = name_of(rule.of)
    if not isinstance(of, torch.Tensor) or not isinstance(placement, Shard):
        message = f"a range follows the split of {what}, which is {placement}"
        raise UsageError(f"{message}; split it, or leave the range out")
    rank, ranks = where
    size = of.shape[dimension(of, placement, what)]
    begin, end = bounds(size, placement.unit, ranks, what)[rank]
    if not isinstance(value, int):
        return begin if rule.end == "begin" else end
    return value + begin if rule.end == "begin" else value - size + end


# --- What went wrong on a rank --------------------------------------------------------------------


class RankError(Exception):
    """The operator, or putting its results together, failed on ranks where the whole did not."""


def agreed_object(path: str, values: list[Any]) -> Any:
    """A result that is no tensor: all ranks have to give the same.

    Raises:
        RankError: one gives another.
    """
    for rank, value in enumerate(values):
        if value != values[0]:
            found = f"{value!r:.60}, rank 0 gives {values[0]!r:.60}"
            raise RankError(f"{path}: rank {rank} of {len(values)} gives {found}")
    return values[0]
