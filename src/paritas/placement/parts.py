"""What each rank is given of an argument, and how the results of the ranks become one.

All parts are functions of the whole argument in one autograd graph: the gradient of the whole is
what the ranks' gradients come to.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.operators import map_tensors
from paritas.errors import UsageError
from paritas.placement.recipes import (
    Concat,
    Divided,
    Group,
    Once,
    Partial,
    Range,
    Reduce,
    Same,
    Split,
    Whole,
)

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.placement.recipes import Combine, OperatorCall, Place, Placement, Recipe


# --- What each rank is given ----------------------------------------------------------------------

# All parts are functions of the whole argument in one autograd graph: the gradient of the whole is
# what the ranks' gradients come to.

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


class Terms:
    """Draws how something is made up of terms: the same for every run of one check.

    In the lifted run the terms have both signs and are random, so that a rule that holds for equal
    or positive terms only does not pass. In the native run they are exact fractions, so that no
    rounding comes from our taking apart what a program would never have had in one piece.

    Attributes:
        turn: which cotangent is sent back; the weights are others for each.
        full: whether a result that all ranks have is given its whole cotangent on each rank, as
            ranks of their own would; otherwise each rank is given a share of it.
    """

    def __init__(self, seed: int, *, lifted: bool) -> None:
        """Make the drawing of one run."""
        self.lifted = lifted
        self.turn = 0
        self.full = False
        self._seed = seed
        self._drawn = 0
        self._weights: dict[tuple[int, int], list[float]] = {}

    def generator(self) -> torch.Generator:
        """A new one for each use, in the order of uses."""
        self._drawn += 1
        return torch.Generator("cpu").manual_seed(self._seed * 1009 + self._drawn)

    def weights(self, ranks: int) -> list[float]:
        """One number for each rank; their sum is 1."""
        key = (ranks, self.turn)
        if key not in self._weights:
            self._weights[key] = self._weigh(ranks)
        return self._weights[key]

    def _weigh(self, ranks: int) -> list[float]:
        if not self.lifted:
            halves = [0.5 ** (rank + 1) for rank in range(ranks)]
            halves[-1] = 1.0 - sum(halves[:-1])
            return halves
        generator = torch.Generator("cpu").manual_seed(self._seed + 31 * self.turn + ranks)
        drawn = (torch.rand(ranks, generator=generator, dtype=torch.float64) + 0.5).tolist()
        signed = [-value if rank % 2 else value for rank, value in enumerate(drawn)]
        return [*signed[1:], 1.0 - sum(signed[1:])]

    def coefficients(self, like: Tensor, ranks: int, total: float) -> list[Tensor]:
        """For each element its share on each rank; the shares have the given sum."""
        shape = (ranks, *like.shape)
        if self.lifted:
            shares = torch.randn(shape, generator=self.generator(), dtype=torch.float64)
            shares[-1] = total - shares[:-1].sum(dim=0)
        else:
            each = self.weights(ranks) if total == 1 else [total / ranks] * ranks
            order = torch.rand(shape, generator=self.generator()).argsort(dim=0)
            shares = torch.tensor(each, dtype=torch.float64)[order]
        real = like.dtype.to_real() if like.is_complex() else like.dtype
        return list(shares.to(like.device, real))


def bounds(size: int, unit: int, ranks: int, what: str) -> list[tuple[int, int]]:
    """Begin and end of each rank's part; the first ranks have one unit more if it is uneven.

    Raises:
        UsageError: there are fewer units than ranks, or a part of a unit is left.
    """
    if unit < 1 or size % unit:
        message = f"{what} has {size} elements, which are no multiple of the unit of {unit}"
        raise UsageError(f"{message}; give a size that is")
    count, more = divmod(size // unit, ranks)
    if count == 0:
        message = f"{what} has {size // unit} parts, too few for {ranks} ranks"
        raise UsageError(f"{message}; check it with fewer ranks or a larger shape")
    ends = [unit * (count * (rank + 1) + min(rank + 1, more)) for rank in range(ranks)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def dimension(tensor: Tensor, split: Split, what: str) -> int:
    """The dimension of a split, counted from the front.

    Raises:
        UsageError: the tensor has no such dimension.
    """
    if not -tensor.dim() <= split.dim < tensor.dim():
        shape = list(tensor.shape)
        message = f"{what} has shape {shape} and no dimension {split.dim} to split"
        raise UsageError(f"{message}; name one of its {tensor.dim()}")
    return split.dim % tensor.dim()


def parts_of(value: Any, placement: Placement, ranks: int, terms: Terms, what: str) -> list[Any]:
    """What each rank is given of an argument; a list's tensors are all treated alike.

    Raises:
        UsageError: it cannot be split so.
    """
    if isinstance(value, torch.Tensor):
        return _parts_of_tensor(value, placement, ranks, terms, what)
    if isinstance(placement, Whole):
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


def _parts_of_tensor(
    tensor: Tensor, placement: Placement, ranks: int, terms: Terms, what: str
) -> list[Tensor]:
    match placement:
        case Split():
            dim = dimension(tensor, placement, what)
            size, (before, after) = tensor.shape[dim], placement.halo
            cuts = bounds(size, placement.unit, ranks, f"dimension {dim} of {what}")
            reach = [(max(0, begin - before), min(size, end + after)) for begin, end in cuts]
            return [tensor.narrow(dim, begin, end - begin) for begin, end in reach]
        case Whole(summed=True):
            return [tensor] * ranks
        case Whole():
            return list(_Claimed.apply(tensor, ranks, terms))  # type: ignore[no-untyped-call]
        case Once():
            return [tensor, *(torch.zeros_like(tensor) for _ in range(ranks - 1))]
        case Partial():
            return _terms_of(tensor, placement.reduction, ranks, terms, what)


def _terms_of(tensor: Tensor, reduction: str, ranks: int, terms: Terms, what: str) -> list[Tensor]:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        message = f"{what} is of {tensor.dtype}, and terms are drawn of floating tensors only"
        raise UsageError(f"{message}; give it whole or split")
    if reduction in {"sum", "avg"}:
        total = 1.0 if reduction == "sum" else float(ranks)
        return [tensor * share for share in terms.coefficients(tensor, ranks, total)]
    owner = torch.randint(ranks, tensor.shape, generator=terms.generator()).to(tensor.device)
    if reduction == "product":
        # One rank has the value, the others powers of two; of these the owner makes up for.
        signs = [-2.0 if rank % 2 else 0.5 for rank in range(ranks)]
        whole = torch.tensor(signs, dtype=torch.float64).prod().item()
        return [
            torch.where(owner == rank, tensor * (sign / whole), torch.full_like(tensor, sign))
            for rank, sign in enumerate(signs)
        ]
    away = torch.rand(tensor.shape, generator=terms.generator(), dtype=torch.float64) + 0.5
    away = away.to(tensor.device, tensor.dtype) * (1 if reduction == "min" else -1)
    return [torch.where(owner == rank, tensor, tensor.detach() + away) for rank in range(ranks)]


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
    if not isinstance(of, torch.Tensor) or not isinstance(placement, Split):
        message = f"a range follows the split of {what}, which is {placement}"
        raise UsageError(f"{message}; split it, or leave the range out")
    rank, ranks = where
    size = of.shape[dimension(of, placement, what)]
    begin, end = bounds(size, placement.unit, ranks, what)[rank]
    if not isinstance(value, int):
        return begin if rule.end == "begin" else end
    return value + begin if rule.end == "begin" else value - size + end


class _Claimed(torch.autograd.Function):
    """Gives each rank the whole, and takes each rank's gradient for the whole's.

    Gradients that agree give just that, whatever their weights; one that does not shows.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int, terms: Terms) -> tuple[Tensor, ...]:
        ctx.terms = terms
        return tuple(tensor.clone() for _ in range(ranks))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        weights = ctx.terms.weights(len(gradients))
        total = torch.stack([g * w for g, w in zip(gradients, weights, strict=True)]).sum(dim=0)
        return total, None, None


@dataclasses.dataclass(frozen=True)
class RankCut:
    """How a tensor lies on the ranks, for telling people where an element is."""

    dim: int
    bounds: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, parts: list[Tensor], dim: int) -> RankCut:
        """How results that are put one after the other lie."""
        ends = list(itertools.accumulate(part.shape[dim] for part in parts))
        return cls(dim % parts[0].dim(), tuple(zip([0, *ends[:-1]], ends, strict=True)))

    def words(self, index: tuple[int, ...]) -> str:
        """The rank that an element belongs to."""
        for rank, (begin, end) in enumerate(self.bounds):
            if begin <= index[self.dim] < end:
                return (
                    f"in the part of rank {rank} of {len(self.bounds)} "
                    f"({begin}:{end} along dimension {self.dim})"
                )
        return ""


# --- How the results of the ranks become one ------------------------------------------------------


class RankError(Exception):
    """The operator, or putting its results together, failed on ranks where the whole did not."""


def combine(parts: list[Tensor], rule: Combine, terms: Terms) -> Tensor:
    """Put the results of the ranks together; whatever torch raises at that passes through."""
    dtypes = {part.dtype for part in parts}
    if len(dtypes) > 1:
        raise TypeError(f"the ranks give {' and '.join(sorted(map(str, dtypes)))}")
    match rule:
        case Concat(dim=dim):
            return torch.cat(parts, dim=dim)
        case Reduce(reduction=reduction):
            return _reduce(parts, reduction)
        case Same():
            if not (parts[0].is_floating_point() or parts[0].is_complex()):
                return _agreed(tuple(parts), terms)
            return _Shared.apply(terms, *parts)  # type: ignore[no-any-return, no-untyped-call]


def combine_written(
    parts: list[Tensor], placement: Placement, ranks: int, wholes: Tensor, terms: Terms
) -> Tensor:
    """Put together an argument that each rank has written to, as it was taken apart."""
    match placement:
        case Split(dim=dim, halo=(0, 0)):
            return torch.cat(parts, dim=dim)
        case Split():
            return _without_halos(parts, placement, ranks, wholes)
        case Partial(reduction=reduction):
            return _reduce(parts, reduction)
        case Once():
            return parts[0]
        case _:
            return combine(parts, Same(), terms)


def _without_halos(parts: list[Tensor], split: Split, ranks: int, whole: Tensor) -> Tensor:

    dim = split.dim % whole.dim()
    cuts = bounds(whole.shape[dim], split.unit, ranks, f"dimension {dim}")
    own = [
        part.narrow(dim, min(begin, split.halo[0]), end - begin)
        for part, (begin, end) in zip(parts, cuts, strict=True)
    ]
    return torch.cat(own, dim=dim)


def _reduce(parts: list[Tensor], reduction: str) -> Tensor:
    """In one rounding: how a machine adds up ranks is not what is asked here."""
    stacked = torch.stack(parts)  # which refuses shapes that would broadcast
    dtype = stacked.dtype
    match reduction:
        case "sum" if dtype is torch.bool:
            return stacked.any(dim=0)
        case "sum":
            return stacked.sum(dim=0, dtype=dtype)
        case "avg":
            return stacked.mean(dim=0)
        case "max":
            return stacked.amax(dim=0)
        case "min":
            return stacked.amin(dim=0)
        case _:
            return stacked.prod(dim=0, dtype=dtype)


class _Shared(torch.autograd.Function):
    """A result that all ranks have: where they disagree, it is none of theirs.

    Of the cotangent each rank is given a share, so that the gradients of the ranks add up to the
    whole's if each of them is right.
    """

    @staticmethod
    def forward(ctx: Any, terms: Terms, *parts: Tensor) -> Tensor:
        ctx.terms, ctx.ranks = terms, len(parts)
        return _agreed(parts, terms)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.terms.full:
            return (None, *[gradient] * ctx.ranks)
        return (None, *[gradient * weight for weight in ctx.terms.weights(ctx.ranks)])


def _agreed(parts: tuple[Tensor, ...], terms: Terms) -> Tensor:
    first = parts[0].clone()
    shapes = {tuple(part.shape) for part in parts}
    if len(shapes) > 1:
        shown = " and ".join(str(list(shape)) for shape in sorted(shapes))
        raise ValueError(f"all ranks should have the same, but theirs are of shapes {shown}")
    if all(torch.equal(first, part) for part in parts[1:]):
        return first
    if not (first.is_floating_point() or first.is_complex()):
        for part in parts[1:]:
            other = ~parts[0] if first.dtype is torch.bool else 2 * parts[0] - part
            first = torch.where(part == parts[0], first, other)
        return first
    mixed = torch.zeros_like(first)
    same = torch.ones_like(first, dtype=torch.bool)
    for part, weight in zip(parts, terms.weights(len(parts)), strict=True):
        mixed = mixed + part * weight
        same &= (part == first) | (part.isnan() & first.isnan())
    return torch.where(same, first, mixed)


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
