"""Try splits of an operator on random arguments."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch

from paritas.core.errors import UsageError, in_one_line
from paritas.core.numerics.bits import is_inexact
from paritas.core.numerics.contents import leaves
from paritas.core.numerics.gates import agree
from paritas.core.numerics.random_tensors import Domain, between, mask, normal
from paritas.core.operators.calls import Place
from paritas.core.placement.assembly import join, rank_bounds
from paritas.core.placement.placement import Divided
from paritas.core.results.items import Once, Partial, Reduction, Replicate, Role, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# --- A proposed cut of the arguments --------------------------------------------------------------

# This is less than a recipe and quicker to try. Discovery tries hundreds of cuts, and most fail.


class ListItem(NamedTuple):
    """A tensor in an argument that is a list."""

    argument: Place
    at: int


TensorPlace = Place | ListItem
Tensors = dict[TensorPlace, torch.Tensor]


class DividedNumber(NamedTuple):
    """A number in the call that may have to be divided with a split."""

    place: Place
    item: int | None
    value: int


class TrialCut(NamedTuple):
    """Dimensions of arguments that are split together.

    Attributes:
        dims: argument, dimension and unit; parts are multiples of the unit.
        number: the number that is divided with it.
        once: arguments that only the first rank has; the others have zeros.
    """

    dims: tuple[tuple[TensorPlace, int, int], ...]
    number: DividedNumber | None = None
    once: tuple[TensorPlace, ...] = ()

    def times(self, factor: int) -> TrialCut:
        """The same cut with larger units."""
        return self._replace(dims=tuple((p, d, factor * unit) for p, d, unit in self.dims))

    def placements(self) -> tuple[tuple[Place, Role], ...]:
        """The inputs of the recipe."""
        split = {argument(tensor_place): Shard(dim, unit) for tensor_place, dim, unit in self.dims}
        return (*split.items(), *((argument(tensor_place), Once()) for tensor_place in self.once))

    def numbers(self) -> tuple[tuple[Place, Divided], ...]:
        """The numbers of the recipe."""
        return () if self.number is None else ((self.number.place, Divided(self.number.item)),)

    def fits(self, shapes: Mapping[TensorPlace, torch.Size], ranks: int) -> bool:
        """Whether every rank gets a part, and the number can be divided."""
        if self.number is not None and self.number.value % ranks:
            return False
        return all(
            shapes[tensor_place][dim] % unit == 0 and shapes[tensor_place][dim] // unit >= ranks
            for tensor_place, dim, unit in self.dims
        )


class TrialOutcome(NamedTuple):
    """The outcome of a run.

    Attributes:
        tensors: the results that are tensors.
        others: the other results.
        arguments: the tensor arguments after the call.
    """

    tensors: list[torch.Tensor]
    others: list[Any]
    arguments: Tensors


@dataclasses.dataclass(frozen=True)
class TrialSubject:
    """An operator call with replaceable tensors."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def arguments_by_place(self) -> dict[Place, Any]:
        """Its arguments, by position or name."""
        arguments: dict[Place, Any] = dict(enumerate(self.args))
        arguments.update(self.kwargs)
        return arguments

    def tensors(self) -> Tensors:
        """Its tensors, including the items of lists of tensors."""
        tensors: Tensors = {}
        for argument_place, value in self.arguments_by_place().items():
            if isinstance(value, torch.Tensor):
                tensors[argument_place] = value
            elif _is_list(value):
                tensors.update(
                    {ListItem(argument_place, at): list_item for at, list_item in enumerate(value)}
                )
        return tensors

    def numbers(self) -> list[DividedNumber]:
        """Its integers above 1: sizes, heads, groups and others."""
        divided_numbers: list[DividedNumber] = []
        for argument_place, value in self.arguments_by_place().items():
            items = enumerate(value) if isinstance(value, tuple | list) else [(None, value)]
            divided_numbers += [
                DividedNumber(argument_place, item, number)
                for item, number in items
                if isinstance(number, int) and not isinstance(number, bool) and number > 1
            ]
        return divided_numbers

    def run(
        self, tensors: Tensors, number: DividedNumber | None = None, ranks: int = 1
    ) -> TrialOutcome:
        """Call the operator with other tensors, and optionally with a divided number."""
        arguments: dict[TensorPlace, Any] = dict(tensors)
        for argument_place, value in self._lists.items():
            items = [tensors[ListItem(argument_place, at)] for at in range(len(value))]
            arguments[argument_place] = tuple(items) if isinstance(value, tuple) else items
        if number is not None:
            arguments[number.place] = self._divide_number(number, ranks)
        args = [arguments.get(position, value) for position, value in enumerate(self.args)]
        kwargs = {name: arguments.get(name, value) for name, value in self.kwargs.items()}
        result = self.function(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            return TrialOutcome([result], [], tensors)
        flat = [leaf for _, leaf in leaves(result)]
        result_tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        others = [leaf for leaf in flat if not isinstance(leaf, torch.Tensor)]
        return TrialOutcome(result_tensors, others, tensors)

    @functools.cached_property
    def _lists(self) -> dict[Place, Any]:
        return {
            argument_place: value
            for argument_place, value in self.arguments_by_place().items()
            if _is_list(value)
        }

    def _divide_number(self, number: DividedNumber, ranks: int) -> Any:
        if number.item is None:
            return number.value // ranks
        argument_place = number.place
        value = (
            self.kwargs[argument_place]
            if isinstance(argument_place, str)
            else self.args[argument_place]
        )
        items = list(value)
        items[number.item] = number.value // ranks
        return tuple(items) if isinstance(value, tuple) else items


def argument(tensor_place: TensorPlace) -> Place:
    """The argument at a place, or the list of which it is an item."""
    return tensor_place.argument if isinstance(tensor_place, ListItem) else tensor_place


def _is_list(value: Any) -> bool:
    return (
        isinstance(value, tuple | list)
        and len(value) > 0
        and all(isinstance(list_item, torch.Tensor) for list_item in value)
    )


def common_units(sizes: tuple[int, ...], number: DividedNumber | None) -> tuple[int, ...] | None:
    """The unit of each dimension; None if there are none.

    Dimensions that are split together have one identifier, alone or as the first factor of a
    product. So they, and the number that is divided, are multiples of the shortest of them.
    """
    lengths = sizes if number is None else (*sizes, number.value)
    shortest = min(lengths)
    if any(length % shortest for length in lengths):
        return None
    return tuple(size // shortest for size in sizes)


# --- The ways to join the results of the ranks ----------------------------------------------------


def is_comparable(whole_result: torch.Tensor) -> bool:
    """Whether there is anything to compare: not if the result is empty or has no finite value."""
    return whole_result.numel() > 0 and (
        not is_inexact(whole_result) or bool(whole_result.isfinite().any())
    )


def is_constant(whole_result: torch.Tensor) -> bool:
    """Whether all values are the same, so their order does not matter."""
    return whole_result.numel() > 1 and bool((whole_result == whole_result.flatten()[0]).all())


def could_be_part(first: torch.Tensor, whole_result: torch.Tensor) -> bool:
    """Whether the result of the first rank can be part of the whole; most wrong cuts fail here."""
    if first.dtype != whole_result.dtype or first.dim() != whole_result.dim():
        return False
    dim = _short_dim(first, whole_result)
    if dim is None:
        return first.shape == whole_result.shape
    return agree(first, whole_result.narrow(dim, 0, first.shape[dim]))


def ways(parts: list[torch.Tensor], whole_result: torch.Tensor) -> list[Role]:
    """All ways to join the parts that give the whole, the most plausible first."""
    dim = _short_dim(parts[0], whole_result)
    if dim is not None:
        return [way for way in [Shard(dim)] if _holds(way, parts, whole_result)]
    if any(part.shape != whole_result.shape or part.dtype != whole_result.dtype for part in parts):
        return []
    roles: list[Role] = [Replicate()] if all(agree(part, whole_result) for part in parts) else []
    return roles + [way for way in _reductions(whole_result) if _holds(way, parts, whole_result)]


def _holds(way: Role, parts: list[torch.Tensor], whole_result: torch.Tensor) -> bool:
    try:
        return agree(join(parts, way, copies="mean"), whole_result)
    except (RuntimeError, TypeError):  # shapes or dtypes that do not fit
        return False


def _reductions(whole_result: torch.Tensor) -> list[Role]:
    kinds: tuple[Reduction, ...] = ("sum", "max", "min", "product")
    if whole_result.dtype is torch.bool:
        kinds = ("max", "min")
    elif whole_result.is_complex():
        kinds = ("sum", "avg", "product")
    elif whole_result.is_floating_point():
        kinds = ("sum", "avg", "max", "min", "product")
    return [Partial(kind) for kind in kinds]


def _short_dim(first: torch.Tensor, whole_result: torch.Tensor) -> int | None:
    """The one dimension along which a part is shorter than the whole."""
    if first.dim() != whole_result.dim():
        return None
    pairs = list(zip(first.shape, whole_result.shape, strict=True))
    shorter = [dim for dim, (part_length, full) in enumerate(pairs) if part_length != full]
    if len(shorter) != 1 or pairs[shorter[0]][0] > pairs[shorter[0]][1]:
        return None
    return shorter[0]


# --- Random arguments that are like the given ones ------------------------------------------------

# What holds for several draws is not a coincidence. A draw stays in the domain of the given values
# (positive, a probability, an index in range, unique along a dimension), so operators accept it.

# Special draws distinguish reductions that agree on ordinary values: max and replicated for `any`,
# min and sum for a `relu` that is zero everywhere, anything for a threshold that is never reached.
Shade = Literal[
    "one", "all but one", "few", "all but few", "positive", "negative", "large", "special"
]
SHADES: tuple[Shade, ...] = get_args(Shade)

MOST_CLASSES = 3
FEW_VALUES_OF = 64


def _lift(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float64, where rounding is much smaller than any fault."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


def _vary(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """New values for a constant tensor, which would hide its effect.

    For example, it makes no difference whether a bias of zeros is added once or on every rank.
    """
    return _redraw(tensor, generator) if _is_constant(tensor) else tensor


def _is_constant(tensor: torch.Tensor) -> bool:
    # Not integers: a constant index may be the only one in range.
    if not (tensor.is_floating_point() or tensor.dtype is torch.bool) or tensor.numel() == 0:
        return False
    return bool((tensor == tensor.flatten()[0]).all())


def _redraw(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """New values of the same kind."""
    if tensor.is_complex():
        drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.complex128)
        return drawn.to(tensor)
    if not tensor.is_floating_point():
        if tensor.dtype is torch.bool and _is_constant(tensor):
            return mask(tuple(tensor.shape), generator).to(tensor.device)
        return _shuffle(tensor, generator)
    if _is_discrete(tensor):
        return _shuffle(tensor, generator)
    finite = tensor.isfinite()
    finite_values = tensor if finite.all() else tensor[finite]
    if finite_values.numel() == 0:
        return tensor
    drawn = _domain_of(finite_values)(tuple(tensor.shape), generator).to(tensor)
    if finite_values is tensor:
        return drawn
    masked = _shuffle(tensor, generator)  # a mask of -inf moves, but stays a mask
    return torch.where(masked.isfinite(), drawn, masked)


def _is_discrete(tensor: torch.Tensor) -> bool:
    """Whether it holds classes and not quantities: targets of -1 and 1, a mask of 0 and 1."""
    some = tensor.flatten()[:FEW_VALUES_OF].unique()
    if not 1 < len(some) <= MOST_CLASSES:
        return False
    return len(tensor.unique()) <= MOST_CLASSES


def _domain_of(finite_values: torch.Tensor) -> Domain:
    """The numbers that are like these."""
    low, high = finite_values.min().item(), finite_values.max().item()
    if low >= 0 and 0 < high <= 1:
        return between(0.05, 0.95)
    if low > 0 or high < 0:
        mean = finite_values.double().mean().item()
        return lambda shape, generator: mean * between(0.5, 1.5)(shape, generator)
    spread = finite_values.double().std(correction=0).item() or 1.0
    return lambda shape, generator: spread * normal(shape, generator)


def _shuffle(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Shuffle along each dimension, so that values that are unique along one stay unique."""
    for dim, length in enumerate(tensor.shape):
        order = torch.randperm(length, generator=generator).to(tensor.device)
        tensor = tensor.index_select(dim, order)
    return tensor


def _recount(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The same values with other frequencies of classes, indices and truth values."""
    if tensor.numel() == 0 or (is_inexact(tensor) and not _is_discrete(tensor)):
        return tensor
    chosen = torch.randint(tensor.numel(), tensor.shape, generator=generator)
    return tensor.flatten()[chosen.to(tensor.device)]


def _shade(shade: Shade, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The tensor with many or few zeros, one sign, large values or special values."""
    match shade:
        case "one" | "all but one":
            count = max(1, tensor.numel())
            chosen = torch.zeros(count, dtype=torch.bool)
            chosen[int(torch.randint(count, (), generator=generator))] = True
            chosen = chosen[: tensor.numel()].view(tensor.shape)
        case "few" | "all but few":
            # A row has none or one about half of the time.
            likely = 0.7 / max((1, *tensor.shape))
            chosen = torch.rand(tensor.shape, generator=generator) < likely
        case _:
            return _tint(shade, tensor, generator) if tensor.is_floating_point() else tensor
    chosen = (~chosen if shade in ("all but one", "all but few") else chosen).to(tensor.device)
    return chosen if tensor.dtype is torch.bool else torch.where(chosen, tensor, 0)


def _tint(shade: Shade, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if shade in ("positive", "negative"):
        return tensor.abs() if shade == "positive" else -tensor.abs()
    drawn = torch.rand(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)
    if shade == "large":
        return tensor * 10 ** (6 * drawn)
    for number, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        tensor = tensor.masked_fill((drawn * 6).floor() == number, value)
    return tensor


# --- Trials ---------------------------------------------------------------------------------------

# A trial that raises has failed. Most wrong cuts fail because the operator refuses them.

SEED = 0
RECOUNTS = 4


@dataclasses.dataclass(frozen=True)
class TrialDraw:
    """Arguments and the outcome of the operator on them."""

    tensors: Tensors
    whole: TrialOutcome

    @functools.cached_property
    def is_constant(self) -> bool:
        """Whether a result is constant."""
        return any(is_constant(tensor) for tensor in self.whole.tensors)


@dataclasses.dataclass(frozen=True)
class Tried:
    """The outcome of a trial.

    Attributes:
        ways: for each result, the ways to join it; None if there is none for some result.
        whole_sized: whether the results of a rank have the shape of the whole, so they may be
            terms.
    """

    ways: list[list[Role]] | None
    whole_sized: bool = False


class RandomTrials:
    """An operator with random draws of its arguments.

    Attributes:
        given: the given arguments in float64.
        first: the same, with new values for constant arguments.
        written: the arguments that the operator writes to.
    """

    def __init__(self, subject: TrialSubject) -> None:
        self.subject = subject
        self._generator = torch.Generator().manual_seed(SEED)
        self.given = self._draw_given()
        varied = self._change_tensors(self.given.tensors, _vary)
        changed = any(
            varied[tensor_place] is not given_tensor
            for tensor_place, given_tensor in self.given.tensors.items()
        )
        self.first = (self._unless_constant(varied) if changed else None) or self.given
        self.written = [
            tensor_place
            for tensor_place, tensor in self.first.tensors.items()
            if not agree_bits(self.first.whole.arguments[tensor_place], tensor)
        ]

    @property
    def shapes(self) -> dict[TensorPlace, torch.Size]:
        """The shapes of the tensors."""
        return {tensor_place: tensor.shape for tensor_place, tensor in self.first.tensors.items()}

    @functools.cached_property
    def second(self) -> TrialDraw:
        """Other values; the first ones again if the operator accepts no others."""
        tensors = self.first.tensors
        return (
            self._unless_constant(self._change_tensors(tensors, _redraw))
            or self._unless_constant(self._change_tensors(tensors, _shuffle))
            or self.first
        )

    @functools.cached_property
    def shades(self) -> list[TrialDraw]:
        """Special values that distinguish more than ordinary ones."""
        base = self.second.tensors
        drawn = (self._change_tensors(base, functools.partial(_shade, shade)) for shade in SHADES)
        return [draw for draw in map(self._draw, drawn) if draw is not None]

    @functools.cached_property
    def recounted(self) -> list[TrialDraw]:
        """Other frequencies of classes and indices: ignored targets may be even by coincidence."""
        base = self.second.tensors
        drawn = [self._change_tensors(base, _recount) for _ in range(RECOUNTS)]
        if all(drawn[0][tensor_place] is tensor for tensor_place, tensor in base.items()):
            return []
        return [draw for draw in map(self._draw, drawn) if draw is not None]

    # --- results ----------------------------------------------------------------------------------

    def attempt(self, cut: TrialCut, draw: TrialDraw, ranks: int) -> Tried:
        """Run the operator on each rank, and find the ways to join the results."""
        whole_outcome, outcomes = draw.whole, []
        try:
            for rank in range(ranks):
                rank_outcome = self.run_rank(draw.tensors, cut, rank, ranks)
                if (
                    len(rank_outcome.tensors) != len(whole_outcome.tensors)
                    or rank_outcome.others != whole_outcome.others
                ):
                    return Tried(None)
                if rank == 0 and not all(
                    map(could_be_part, rank_outcome.tensors, whole_outcome.tensors)
                ):
                    return Tried(None)  # most cuts fail here, before other ranks run
                outcomes.append(rank_outcome)
        except Exception:  # noqa: BLE001  (the operator refuses the cut: no claim)
            return Tried(None)
        parts = list(zip(*(outcome.tensors for outcome in outcomes), strict=True))
        sized = all(
            part[0].shape == tensor.shape
            for part, tensor in zip(parts, whole_outcome.tensors, strict=True)
        )
        ways_by_result = [
            ways(list(part), tensor)
            for part, tensor in zip(parts, whole_outcome.tensors, strict=True)
        ]
        if cut.once:  # zeros are neutral only in a sum
            ways_by_result = [
                [way for way in options if way == Partial("sum")] for options in ways_by_result
            ]
        if not all(ways_by_result) or not self._arguments_agree(cut, outcomes, whole_outcome):
            return Tried(None, sized)
        return Tried(ways_by_result, sized)

    def run_rank(self, tensors: Tensors, cut: TrialCut, rank: int, ranks: int) -> TrialOutcome:
        """Run the operator on the part of a rank."""
        rank_tensors = dict(tensors)
        for tensor_place, dim, unit in cut.dims:
            begin, end = rank_bounds(rank_tensors[tensor_place].shape[dim], rank, ranks, unit=unit)
            rank_tensors[tensor_place] = rank_tensors[tensor_place].narrow(dim, begin, end - begin)
        if rank:
            rank_tensors.update(
                {tensor_key: torch.zeros_like(rank_tensors[tensor_key]) for tensor_key in cut.once}
            )
        if self.written:
            rank_tensors = {
                tensor_key: tensor.clone() for tensor_key, tensor in rank_tensors.items()
            }
        return self.subject.run(rank_tensors, cut.number, ranks)

    def _arguments_agree(
        self, cut: TrialCut, outcomes: list[TrialOutcome], trial_outcome: TrialOutcome
    ) -> bool:
        """Whether written arguments are right: split ones make the whole, the others agree."""
        dims = {tensor_key: dim for tensor_key, dim, _ in cut.dims}
        for tensor_place in self.written:
            truth = trial_outcome.arguments[tensor_place]
            rank_arguments = [outcome.arguments[tensor_place] for outcome in outcomes]
            joined_arguments = (
                [join(rank_arguments, Shard(dims[tensor_place]))]
                if tensor_place in dims
                else rank_arguments
            )
            if tensor_place in cut.once or not all(
                agree(written_argument, truth) for written_argument in joined_arguments
            ):
                return False
        return True

    # --- draws ------------------------------------------------------------------------------------

    def _draw_given(self) -> TrialDraw:
        """The given arguments, in float64 if the operator accepts that."""
        tensors = self.subject.tensors()
        detached_tensors = {
            tensor_place: tensor.detach() for tensor_place, tensor in tensors.items()
        }
        lifted = self._draw(
            {tensor_place: _lift(tensor) for tensor_place, tensor in detached_tensors.items()}
        )
        if lifted is not None:
            return lifted
        try:
            return TrialDraw(detached_tensors, self.run_whole(detached_tensors))
        except Exception as error:
            text = in_one_line(error, 300, whole=True)
            raise UsageError(f"the operator itself fails on these arguments: {text}") from error

    def _change_tensors(
        self, tensors: Tensors, change: Callable[[torch.Tensor, torch.Generator], torch.Tensor]
    ) -> Tensors:
        return {
            tensor_place: change(tensor, self._generator)
            for tensor_place, tensor in tensors.items()
        }

    def _unless_constant(self, tensors: Tensors) -> TrialDraw | None:
        """A draw, unless it makes results constant, which would say less than the given values."""
        draw = self._draw(tensors)
        return None if draw is None or (draw.is_constant and not self.given.is_constant) else draw

    def _draw(self, tensors: Tensors) -> TrialDraw | None:
        """A draw, unless the operator fails on it or returns nothing to compare."""
        try:
            whole_outcome = self.run_whole(tensors)
        except Exception:  # noqa: BLE001  (the draw is outside of the operator's domain)
            return None
        if not all(map(is_comparable, whole_outcome.tensors)):
            return None
        return TrialDraw(tensors, whole_outcome)

    def run_whole(self, tensors: Tensors) -> TrialOutcome:
        """Run the whole operator on copies, because it may write to them."""
        return self.subject.run(
            {tensor_place: tensor.clone() for tensor_place, tensor in tensors.items()}
        )


def agree_bits(tensor: torch.Tensor, truth: torch.Tensor) -> bool:
    """Whether two tensors are equal, with NaN equal to NaN."""
    return tensor.shape == truth.shape and bool(
        ((tensor == truth) | ((tensor != tensor) & (truth != truth))).all()  # noqa: PLR0124  (NaN)
    )
