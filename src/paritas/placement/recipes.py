"""How an operator is split over ranks, and how the results of the ranks make the whole.

Annotations, the library, discovery and users all produce recipes. A recipe says what each rank
receives of every argument, and how the ranks' results are joined. `partition` checks whether it is
right.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from paritas._torch.operators import map_tensors
from paritas.errors import UsageError
from paritas.placement.placement import bounds, dimension, split_tensor
from paritas.results.items import Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from paritas.placement.placement import Terms
    from paritas.results.items import Role

# An argument: its position or its name.
Place = int | str


# --- Numbers that follow a split ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Divided:
    """A number that is divided by the number of ranks, such as `heads` or a size.

    Attributes:
        item: index of the number in a tuple or list; None for a plain number.
    """

    item: int | None = None


@dataclasses.dataclass(frozen=True)
class Range:
    """The start or end of a rank's part of an argument, as in vocabulary-sharded embeddings.

    Attributes:
        of: the argument that is split.
    """

    of: Place
    end: Literal["begin", "end"]


@dataclasses.dataclass(frozen=True)
class Group:
    """The process group of the ranks, for an operator that communicates.

    Attributes:
        joined: whether the ranks get the group; otherwise they get None, as for a split that
            needs no communication.
    """

    joined: bool = True


KeywordRule = Divided | Range | Group


# --- Recipes --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One way to split an operator.

    Attributes:
        inputs: role of each argument; arguments not listed are replicated.
        outputs: role of each result tensor: sharded, partial or replicated.
        numbers: arguments other than tensors that change with the split.
        words: description: the annotation and the identifier that is split.
        identifier: what the operator is split by, as the rule names it.
    """

    inputs: tuple[tuple[Place, Role], ...]
    outputs: tuple[Role, ...]
    numbers: tuple[tuple[Place, KeywordRule], ...] = ()
    words: str = ""
    identifier: str = ""

    @property
    def split_words(self) -> str:
        """`split by c`, or the description if there is no identifier."""
        return f"split by {self.identifier}" if self.identifier else (self.words or "split")

    def placement(self, place: Place) -> Role:
        """The role of an argument."""
        return dict(self.inputs).get(place, Replicate())

    def splits(self, idx: int, dim: int, arguments: int) -> bool:
        """Whether it splits a dimension of tensor `idx`; results are counted after arguments."""
        at = idx - arguments
        role = self.placement(idx) if at < 0 else dict(enumerate(self.outputs)).get(at)
        return isinstance(role, Shard) and role.dim == dim

    @property
    def exchanges(self) -> bool:
        """Whether the ranks communicate while the operator runs."""
        return Group() in dict(self.numbers).values()


@dataclasses.dataclass(frozen=True)
class OperatorCall:
    """An operator and its arguments.

    Attributes:
        name: the user's name for it, such as `torch.nn.functional.linear`.
        without_gradient: arguments that need no gradient, such as running statistics.
        seed: the seed of arguments that were drawn at random.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    name: str = ""
    without_gradient: frozenset[Place] = frozenset()
    seed: int = 0

    def map(self, change: Callable[[Any], Any]) -> Self:
        """The same call with other arguments."""
        args = tuple(map(change, self.args))
        kwargs = {name: change(value) for name, value in self.kwargs.items()}
        return dataclasses.replace(self, args=args, kwargs=kwargs)

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same call with other tensors, also those in lists."""
        return self.map(lambda one: map_tensors(one, change) if tensors_in(one) else one)


def first_split(recipe: Recipe, call: OperatorCall) -> tuple[int, int]:
    """The first tensor that a recipe splits, and the dimension; results count after arguments."""
    places = [*range(len(call.args)), *call.kwargs]
    roles = [*map(recipe.placement, places), *recipe.outputs]
    return next(((at, one.dim) for at, one in enumerate(roles) if isinstance(one, Shard)), (0, 0))


# --- The arguments of a call, and the part that each rank receives --------------------------------

# Arguments by position and by name.
Values = dict["Place", Any]


def name_of(place: Place) -> str:
    """An argument as a user writes it: `args[0]`, `kwargs['dim']`."""
    return f"args[{place}]" if isinstance(place, int) else f"kwargs[{place!r}]"


def argument_words(call: OperatorCall, place: Place) -> str:
    """An argument with the name of its parameter, if it is known: `args[3] (mean)`."""
    if isinstance(place, str):
        return name_of(place)
    try:
        names = list(inspect.signature(call.function).parameters)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return name_of(place)
    return f"{name_of(place)} ({names[place]})" if place < len(names) else name_of(place)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in an argument, which may be a (nested) list."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def device_of(call: OperatorCall) -> torch.device:
    """The device of the tensors of a call; the CPU if it has none."""
    values = (*call.args, *call.kwargs.values())
    return next((t.device for value in values for t in tensors_in(value)), torch.device("cpu"))


def moved(value: Any, device: torch.device) -> Any:
    """An argument with its tensors moved to a device, and device arguments replaced by it."""
    if isinstance(value, torch.device):
        return device
    if isinstance(value, torch.Tensor | list | tuple):
        return map_tensors(value, lambda tensor: tensor.to(device))
    return value


def on_device(call: OperatorCall, device: torch.device) -> OperatorCall:
    """The same call on a device."""
    return call.map(lambda value: moved(value, device))


def parts_of(value: Any, placement: Role, ranks: int, terms: Terms, what: str) -> list[Any]:
    """The part of an argument for each rank; all tensors of a list are split the same way."""
    if isinstance(value, torch.Tensor):
        return split_tensor(value, placement, ranks, terms, what)
    if isinstance(placement, Replicate):
        if placement.summed or not tensors_in(value):
            return [value] * ranks
    elif not tensors_in(value):
        message = f"{what} is {value!r:.60}, which is not a tensor and cannot be {placement}"
        raise UsageError(f"{message}; remove it from the recipe's inputs")
    items = [
        parts_of(item, placement, ranks, terms, f"{what}[{place}]")
        if tensors_in(item)
        else [item] * ranks
        for place, item in enumerate(value)
    ]
    return [type(value)(item[rank] for item in items) for rank in range(ranks)]


def split_values(values: Values, recipe: Recipe, ranks: int, terms: Terms) -> list[Values]:
    """The arguments of each rank; the rank itself replaces a `Group` by its process group."""
    placements = dict(recipe.inputs)
    rules = {place: rule for place, rule in recipe.numbers if not isinstance(rule, Group)}
    each: list[Values] = [{} for _ in range(ranks)]
    for place, value in values.items():
        if place in rules:
            parts: list[Any] = [
                _number_for_rank(place, rules[place], values, recipe, (rank, ranks))
                for rank in range(ranks)
            ]
        elif place in placements:
            parts = parts_of(value, placements[place], ranks, terms, name_of(place))
        else:
            parts = [value] * ranks
        for mine, part in zip(each, parts, strict=True):
            mine[place] = part
    for place, rule in recipe.numbers:
        if isinstance(rule, Group):  # the call may lack this argument
            for mine in each:
                mine[place] = rule if rule.joined else None
    return each


def _number_for_rank(
    place: Place, rule: Divided | Range, values: Values, recipe: Recipe, where: tuple[int, int]
) -> Any:
    value, what = values[place], name_of(place)
    if isinstance(rule, Range):
        return _end_of_range(value, rule, values, recipe, where)
    if rule.item is None:
        return _share_of_number(value, *where, what)
    try:
        items = list(value)
        items[rule.item] = _share_of_number(items[rule.item], *where, f"{what}[{rule.item}]")
    except (TypeError, IndexError):
        raise UsageError(f"{what} is {value!r:.60}, which has no item {rule.item}") from None
    return tuple(items) if isinstance(value, tuple) else items


def _share_of_number(value: Any, rank: int, ranks: int, what: str) -> Any:
    if value == -1:  # torch infers this size from the others
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{what} must be an integer to be divided among ranks, got {value!r:.60}")
    cuts = bounds(value, 1, ranks, what)
    return cuts[rank][1] - cuts[rank][0]


def _end_of_range(
    value: Any, rule: Range, values: Values, recipe: Recipe, where: tuple[int, int]
) -> Any:
    """The start or end of a rank's part, relative to the range of the whole."""
    of, placement = values.get(rule.of), recipe.placement(rule.of)
    what = name_of(rule.of)
    if not isinstance(of, torch.Tensor) or not isinstance(placement, Shard):
        message = f"the range follows {what}, which is {placement} and not a sharded tensor"
        raise UsageError(f"{message}; shard it, or remove the range")
    rank, ranks = where
    size = of.shape[dimension(of, placement, what)]
    begin, end = bounds(size, placement.unit, ranks, what)[rank]
    if not isinstance(value, int):
        return begin if rule.end == "begin" else end
    return value + begin if rule.end == "begin" else value - size + end


# --- What went wrong on a rank --------------------------------------------------------------------


class RankError(Exception):
    """The operator or the assembly of its results failed on ranks, but not for the whole."""


def agreed_object(path: str, values: list[Any]) -> Any:
    """A result that is not a tensor; a `RankError` if the ranks return different ones."""
    for rank, value in enumerate(values):
        if value != values[0]:
            found = f"{value!r:.60}, rank 0 returns {values[0]!r:.60}"
            raise RankError(f"{path}: rank {rank} of {len(values)} returns {found}")
    return values[0]
