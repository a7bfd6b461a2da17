"""Search for the splits of an operator: every way to cut it that random trials bear out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from paritas.core.execution.cotangents import draw_cotangent
from paritas.core.numerics.bits import is_inexact
from paritas.core.numerics.gates import agree
from paritas.core.placement.assembly import join
from paritas.core.results.items import Replicate, Role, Shard, nth_output
from paritas.sharding.operators.trials import (
    DividedNumber,
    RandomTrials,
    TensorPlace,
    TrialCut,
    argument,
    common_units,
)

if TYPE_CHECKING:
    from paritas.core.operators.calls import Place
    from paritas.sharding.operators.trials import Tensors, TrialDraw


# --- The search for splits ------------------------------------------------------------------------

# The largest number of cuts to try. An operator with so many equal dimensions needs its own rule.
MOST_CUTS = 4000
MOST_RANKS = 8

Dims = tuple[tuple[TensorPlace, int], ...]
# For each result, the ways that still hold.
Ways = list[list[Role]]


class Search:
    """The search over one operator's arguments."""

    def __init__(self, trials: RandomTrials, gradients: GradientTrials, ranks: int) -> None:
        self._trials = trials
        self._gradients = gradients
        self._ranks = ranks
        self._shapes = trials.shapes
        self._numbers = trials.subject.numbers()
        # Parts may have to be multiples of these: windows of a pooling, blocks of a shuffle.
        values = {number.value for number in self._numbers}
        self._factors = sorted(values | {value**2 for value in values})

    def claims(self) -> Iterator[SplitClaim]:
        """The smallest sets of dimensions that are split together, then those with a bias.

        A dimension has one identifier, so a dimension of a found set is not tried in another.
        """
        used: set[tuple[TensorPlace, int]] = set()
        terms: list[Dims] = []
        for dims in itertools.islice(_sets(self._shapes, self._ranks), MOST_CUTS):
            if not used.isdisjoint(dims):
                continue
            claim, may_be_terms = self._first_of(dims)
            if claim is not None:
                used.update(dims)
                yield claim
            elif may_be_terms:
                terms.append(dims)
        for dims in terms:
            claim = self._with_once(dims) if used.isdisjoint(dims) else None
            if claim is not None:
                used.update(dims)
                yield claim

    # --- what is tried ----------------------------------------------------------------------------

    def _first_of(self, dims: Dims) -> tuple[SplitClaim | None, bool]:
        """The claim of a set, possibly with the first number that is divided with it.

        If there is none, also whether the results of the ranks have the shape of the whole.
        """
        may_be_terms = False
        for cut in self._cuts(dims):
            claim, whole_sized = self._try(cut)
            if claim is not None:
                return claim, False
            may_be_terms |= whole_sized and cut.number is None
        return None, may_be_terms

    def _cuts(self, dims: Dims) -> Iterator[TrialCut]:
        plain = self._cut(dims, None)
        if plain is not None:
            coarser = (plain.times(factor) for factor in self._factors)
            yield from (
                cut for cut in (plain, *filter(self._is_uneven, coarser)) if self._fits(cut)
            )
        for number in self._numbers:
            cut = self._cut(dims, number)
            if cut is not None and self._fits(cut):
                yield cut

    def _fits(self, cut: TrialCut) -> bool:
        return cut.fits(self._shapes, self._ranks)

    def _is_uneven(self, cut: TrialCut) -> bool:
        """Whether its parts differ from those of a cut into single elements."""
        tensor_place, dim, unit = cut.dims[0]
        return self._shapes[tensor_place][dim] % (unit * self._ranks) != 0

    def _with_once(self, dims: Dims) -> SplitClaim | None:
        """A sum to which every rank adds too much: an argument such as a bias must count once."""
        split = {tensor_place for tensor_place, _ in dims}
        unsplit_places = [
            tensor_place
            for tensor_place, tensor in self._trials.first.tensors.items()
            if tensor_place not in split
            and tensor.is_floating_point()
            and argument(tensor_place) == tensor_place
        ]
        plain = self._cut(dims, None)
        if plain is None:
            return None
        choices = [(tensor_place,) for tensor_place in unsplit_places] + (
            [tuple(unsplit_places)] if len(unsplit_places) > 1 else []
        )
        tried = (self._try(plain._replace(once=once))[0] for once in choices)
        return next((claim for claim in tried if claim is not None), None)

    def _cut(self, dims: Dims, number: DividedNumber | None) -> TrialCut | None:
        sizes = tuple(self._shapes[tensor_place][dim] for tensor_place, dim in dims)
        units = common_units(sizes, number)
        if units is None:
            return None
        by_argument = {
            (argument(tensor_place), unit)
            for (tensor_place, _), unit in zip(dims, units, strict=True)
        }
        if len(by_argument) > len({argument(tensor_place) for tensor_place, _ in dims}):
            return None  # a recipe has one unit for all items of a list
        pairs = zip(dims, units, strict=True)
        return TrialCut(
            tuple((tensor_place, dim, unit) for (tensor_place, dim), unit in pairs), number
        )

    def _try(self, cut: TrialCut) -> tuple[SplitClaim | None, bool]:
        tried = self._trials.attempt(cut, self._trials.first, self._ranks)
        claim = None if tried.ways is None else self._confirm(cut, tried.ways)
        return claim, tried.whole_sized

    # --- what is claimed --------------------------------------------------------------------------

    def _confirm(self, cut: TrialCut, ways: Ways) -> SplitClaim | None:
        """Try a cut with other values, other numbers of ranks, and backward."""
        second = self._trials.second
        narrowed_ways = self._narrow_ways(cut, ways, second, self._ranks)
        if self._trials.given is not self._trials.first:
            narrowed_ways = self._narrow_ways(cut, narrowed_ways, self._trials.given, self._ranks)
        for coarser in self._coarser(cut):
            others = self._other_ranks(coarser)
            confirmed = narrowed_ways
            for ranks in others:
                confirmed = self._narrow_ways(coarser, confirmed, second, ranks)
            if confirmed is None:
                continue
            chosen = self._settle_ways(coarser, confirmed)
            if chosen is None:
                return None
            last = others[0] if others else self._ranks
            backward = self._gradients.agree(coarser, chosen, self._trials.first, self._ranks)
            if backward:
                backward = self._gradients.agree(coarser, chosen, second, last)
            return SplitClaim(coarser, chosen, backward)
        return None

    def _narrow_ways(
        self, cut: TrialCut, ways: Ways | None, draw: TrialDraw, ranks: int
    ) -> Ways | None:
        """The ways that are right for this draw too; None if none is left for some result."""
        attempted_ways = None if ways is None else self._trials.attempt(cut, draw, ranks).ways
        if ways is None or attempted_ways is None:
            return None
        remaining_ways = [
            [way for way in old if way in new]
            for old, new in zip(ways, attempted_ways, strict=True)
        ]
        return remaining_ways if all(remaining_ways) else None

    def _settle_ways(self, cut: TrialCut, ways: Ways) -> list[Role] | None:
        """One way for each result; if several are left, further draws decide."""
        draws: list[TrialDraw] = []
        if any(not isinstance(way, Shard) for options in ways for way in options):
            draws += self._trials.recounted
        undecided = any(len(options) > 1 or Replicate() in options for options in ways)
        if undecided or self._trials.second.is_constant:
            draws += self._trials.shades
        remaining_ways: Ways | None = ways
        for draw in draws:
            remaining_ways = self._narrow_ways(cut, remaining_ways, draw, self._ranks)
        # Equal results on all ranks also agree with every reduction except the sum.
        if remaining_ways is None or any(
            len(options) > 1 and Replicate() not in options for options in remaining_ways
        ):
            return None
        return [options[0] for options in remaining_ways]

    def _coarser(self, cut: TrialCut) -> Iterator[TrialCut]:
        """The cut, then the same with larger units: half of a view may be whole rows."""
        yield cut
        units = self._units(cut)
        if cut.number is not None or units % self._ranks:
            return
        each = units // self._ranks
        for factor in range(2, each + 1):
            if each % factor == 0:
                yield cut.times(factor)

    def _other_ranks(self, cut: TrialCut) -> list[int]:
        """Other numbers of ranks that divide it evenly, 3 before 2."""
        units = self._units(cut)
        possible = [ranks for ranks in (*range(3, MOST_RANKS + 1), 2) if units % ranks == 0]
        return [
            ranks for ranks in possible if ranks != self._ranks and cut.fits(self._shapes, ranks)
        ]

    def _units(self, cut: TrialCut) -> int:
        tensor_place, dim, unit = cut.dims[0]
        return self._shapes[tensor_place][dim] // unit


@dataclasses.dataclass(frozen=True)
class SplitClaim:
    """A cut that was right in every trial, with the role of each result."""

    cut: TrialCut
    ways: list[Role]
    backward: bool | None


def _sets(shapes: Mapping[TensorPlace, torch.Size], ranks: int) -> Iterator[Dims]:
    """Sets of dimensions, at most one of each argument; those of equal length come first."""
    arguments: dict[Place, list[TensorPlace]] = {}
    for shape in shapes:
        arguments.setdefault(argument(shape), []).append(shape)
    dims = {
        name: [
            tuple((position, dim) for position in places)  # all items of a list are split
            for dim in range(min(len(shapes[position]) for position in places))
            if all(shapes[position][dim] >= ranks for position in places)
        ]
        for name, places in arguments.items()
    }
    unequal: list[Dims] = []
    for count in range(1, len(dims) + 1):
        for names in itertools.combinations(dims, count):
            for chosen in itertools.product(*(dims[name] for name in names)):
                joined_dims = tuple(itertools.chain(*chosen))
                if len({shapes[tensor_place][dim] for tensor_place, dim in joined_dims}) == 1:
                    yield joined_dims
                elif len(unequal) < MOST_CUTS:
                    unequal.append(joined_dims)
    yield from unequal


# --- Gradients ------------------------------------------------------------------------------------

SEED = 1
# The relative size of the rounding in a gradient that should be zero.
ROUNDING = 1e-13


class GradientTrials:
    """The gradients of an operator for draws of its arguments and random cotangents."""

    def __init__(self, trials: RandomTrials, without: Collection[Place]) -> None:
        self._trials = trials
        self._without = frozenset(without)
        self._cotangents: dict[int, list[torch.Tensor]] = {}
        self._truths: dict[int, Tensors | None] = {}

    def agree(self, cut: TrialCut, ways: list[Role], draw: TrialDraw, ranks: int) -> bool | None:
        """Whether the gradients of the ranks give those of the whole; None if there are none."""
        truth = self._truth(draw)
        if truth is None:
            return None
        leaves = _leaves(draw, truth)
        try:
            with torch.enable_grad():
                results = self._combine_rank_results({**draw.tensors, **leaves}, cut, ways, ranks)
                split_gradients = self._differentiate(results, leaves, draw)
        except Exception:  # noqa: BLE001  (a backward pass that fails does not agree)
            return False
        if split_gradients is None:
            return False
        return all(
            agree(split_gradients[tensor_place], truth[tensor_place], _rounding(draw, tensor_place))
            for tensor_place in truth
        )

    def _combine_rank_results(
        self, tensors: Tensors, cut: TrialCut, ways: list[Role], ranks: int
    ) -> list[torch.Tensor]:
        outcomes = [self._trials.run_rank(tensors, cut, rank, ranks) for rank in range(ranks)]
        parts = zip(*(outcome.tensors for outcome in outcomes), strict=True)
        pairs = zip(ways, parts, strict=True)
        return [join(list(part), way, copies="mean") for way, part in pairs if is_inexact(part[0])]

    def _truth(self, draw: TrialDraw) -> Tensors | None:
        """The gradients of the whole."""
        if id(draw) not in self._truths:
            floating = [
                tensor_place for tensor_place, tensor in draw.tensors.items() if is_inexact(tensor)
            ]
            gradient_places = [
                tensor_place
                for tensor_place in floating
                if argument(tensor_place) not in self._without
            ]
            truth = self._whole(draw, gradient_places)
            if truth is None:  # a running mean, for example, makes all of them fail
                gradient_places = [
                    tensor_place
                    for tensor_place in gradient_places
                    if self._whole(draw, [tensor_place])
                ]
                truth = self._whole(draw, gradient_places)
            self._truths[id(draw)] = truth
        return self._truths[id(draw)]

    def _whole(self, draw: TrialDraw, tensor_places: list[TensorPlace]) -> Tensors | None:
        leaves = _leaves(draw, tensor_places)
        if not leaves:
            return None
        try:
            with torch.enable_grad():
                whole_inputs = {**draw.tensors, **leaves}
                outcome = self._trials.run_whole(whole_inputs)
                results = [result for result in outcome.tensors if is_inexact(result)]
                return self._differentiate(results, leaves, draw)
        except Exception:  # noqa: BLE001  (an operator without a gradient: nothing to compare)
            return None

    def _differentiate(
        self, results: list[torch.Tensor], leaves: Tensors, draw: TrialDraw
    ) -> Tensors | None:
        """Gradients for the cotangents of the draw; None if nothing can be differentiated."""
        if id(draw) not in self._cotangents:
            seed = SEED + len(self._cotangents)
            self._cotangents[id(draw)] = [
                draw_cotangent(nth_output(number), result, seed)
                for number, result in enumerate(results)
            ]
        cotangents = self._cotangents[id(draw)]
        pairs = [
            (result, cotangent)
            for result, cotangent in zip(results, cotangents, strict=True)
            if result.requires_grad
        ]
        if not pairs:
            return None
        gradients = torch.autograd.grad(
            [result for result, _ in pairs],
            list(leaves.values()),
            [cotangent for _, cotangent in pairs],
            allow_unused=True,
        )
        return {
            tensor_place: torch.zeros_like(leaf) if gradient is None else gradient
            for (tensor_place, leaf), gradient in zip(leaves.items(), gradients, strict=True)
        }


def _leaves(draw: TrialDraw, tensor_places: Collection[TensorPlace]) -> Tensors:
    return {
        tensor_position: draw.tensors[tensor_position].detach().requires_grad_()
        for tensor_position in tensor_places
    }


def _rounding(draw: TrialDraw, tensor_place: TensorPlace) -> float:
    """The rounding that a gradient of zero may have: results divided by arguments."""
    size = max(map(_size, draw.whole.tensors))
    argument_size = _size(draw.tensors[tensor_place])
    return ROUNDING * size / argument_size if argument_size else 0.0


def _size(tensor: torch.Tensor) -> float:
    if tensor.numel() == 0 or not is_inexact(tensor):
        return 0.0
    size: float = tensor.detach().abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    return size
