"""The search for splits: which cuts are tried, and what it takes for one to be claimed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from paritas.partition.discovery.cuts import Cut, DividedNumber, argument, common_units
from paritas.partition.recipes import Combine, Concat, Place, Same

if TYPE_CHECKING:
    import torch

    from paritas.partition.discovery.gradients import Gradients
    from paritas.partition.discovery.trials import Bench, Draw

__all__ = ["Claim", "Search"]

# More cuts than this are not tried: an operator of so many equal dimensions has a rule of its own.
MOST_CUTS = 4000
MOST_RANKS = 8

Dims = tuple[tuple[Place, int], ...]
# For each result, the ways that still hold.
Ways = list[list[Combine]]


@dataclasses.dataclass(frozen=True)
class Claim:
    """A cut that held in every trial, with what becomes of each result."""

    cut: Cut
    ways: list[Combine]
    backward: bool | None


class Search:
    """The search over one operator's arguments."""

    def __init__(self, bench: Bench, gradients: Gradients, ranks: int) -> None:
        self._bench = bench
        self._gradients = gradients
        self._ranks = ranks
        self._shapes = bench.shapes
        self._numbers = bench.subject.numbers()
        # Windows of a pooling, blocks of a shuffle: parts may have to be multiples of these.
        values = {number.value for number in self._numbers}
        self._factors = sorted(values | {value**2 for value in values})

    def claims(self) -> Iterator[Claim]:
        """The smallest sets of dimensions that are split together, and then those beside a bias.

        A dimension has one identifier: one that was found in a set is looked for in no other.
        """
        used: set[tuple[Place, int]] = set()
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

    def _first_of(self, dims: Dims) -> tuple[Claim | None, bool]:
        """A set as it is, or with the first number that has to be divided with it.

        Also whether the ranks' results, though they do not make the whole, are as large as it.
        """
        may_be_terms = False
        for cut in self._cuts(dims):
            claim, whole_sized = self._try(cut)
            if claim is not None:
                return claim, False
            may_be_terms |= whole_sized and cut.number is None
        return None, may_be_terms

    def _cuts(self, dims: Dims) -> Iterator[Cut]:
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

    def _fits(self, cut: Cut) -> bool:
        return cut.fits(self._shapes, self._ranks)

    def _is_uneven(self, cut: Cut) -> bool:
        """Whether it makes other parts than a cut in single elements does."""
        place, dim, unit = cut.dims[0]
        return self._shapes[place][dim] % (unit * self._ranks) != 0

    def _with_once(self, dims: Dims) -> Claim | None:
        """Terms that are too many: what is whole on every rank, such as a bias, counts once."""
        split = {place for place, _ in dims}
        whole = [
            place
            for place, tensor in self._bench.first.tensors.items()
            if place not in split and tensor.is_floating_point() and argument(place) == place
        ]
        plain = self._cut(dims, None)
        if plain is None:
            return None
        choices = [(place,) for place in whole] + ([tuple(whole)] if len(whole) > 1 else [])
        tried = (self._try(plain._replace(once=once))[0] for once in choices)
        return next((claim for claim in tried if claim is not None), None)

    def _cut(self, dims: Dims, number: DividedNumber | None) -> Cut | None:
        sizes = tuple(self._shapes[place][dim] for place, dim in dims)
        units = common_units(sizes, number)
        if units is None:
            return None
        by_argument = {
            (argument(place), unit) for (place, _), unit in zip(dims, units, strict=True)
        }
        if len(by_argument) > len({argument(place) for place, _ in dims}):
            return None  # a recipe has one unit for all items of a list
        pairs = zip(dims, units, strict=True)
        return Cut(tuple((place, dim, unit) for (place, dim), unit in pairs), number)

    def _try(self, cut: Cut) -> tuple[Claim | None, bool]:
        tried = self._bench.attempt(cut, self._bench.first, self._ranks)
        claim = None if tried.ways is None else self._confirm(cut, tried.ways)
        return claim, tried.whole_sized

    # --- what is claimed --------------------------------------------------------------------------

    def _confirm(self, cut: Cut, ways: Ways) -> Claim | None:
        """Try it on other values, with other numbers of ranks, and backward."""
        second = self._bench.second
        left = self._narrowed(cut, ways, second, self._ranks)
        if self._bench.given is not self._bench.first:
            left = self._narrowed(cut, left, self._bench.given, self._ranks)
        for coarser in self._coarser(cut):
            others = self._other_ranks(coarser)
            confirmed = left
            for ranks in others:
                confirmed = self._narrowed(coarser, confirmed, second, ranks)
            if confirmed is None:
                continue
            chosen = self._settled(coarser, confirmed)
            if chosen is None:
                return None
            last = others[0] if others else self._ranks
            backward = self._gradients.agree(coarser, chosen, self._bench.first, self._ranks)
            if backward:
                backward = self._gradients.agree(coarser, chosen, second, last)
            return Claim(coarser, chosen, backward)
        return None

    def _narrowed(self, cut: Cut, ways: Ways | None, draw: Draw, ranks: int) -> Ways | None:
        """Which of the ways hold here as well; None if a result is left without one."""
        found = None if ways is None else self._bench.attempt(cut, draw, ranks).ways
        if ways is None or found is None:
            return None
        left = [[way for way in old if way in new] for old, new in zip(ways, found, strict=True)]
        return left if all(left) else None

    def _settled(self, cut: Cut, ways: Ways) -> list[Combine] | None:
        """One way for each result: where several hold, or all values are equal, others decide."""
        draws: list[Draw] = []
        if any(not isinstance(way, Concat) for options in ways for way in options):
            draws += self._bench.recounted
        undecided = any(len(options) > 1 or Same() in options for options in ways)
        if undecided or self._bench.second.is_constant:
            draws += self._bench.shades
        left: Ways | None = ways
        for draw in draws:
            left = self._narrowed(cut, left, draw, self._ranks)
        # What is the same on all ranks in every draw agrees with every reduction but the sum.
        if left is None or any(len(options) > 1 and Same() not in options for options in left):
            return None
        return [options[0] for options in left]

    def _coarser(self, cut: Cut) -> Iterator[Cut]:
        """The cut, and the same in multiples of more elements: half of a view may be whole rows."""
        yield cut
        units = self._units(cut)
        if cut.number is not None or units % self._ranks:
            return
        each = units // self._ranks
        for factor in range(2, each + 1):
            if each % factor == 0:
                yield cut.times(factor)

    def _other_ranks(self, cut: Cut) -> list[int]:
        """Other numbers of ranks that divide it evenly, 3 before 2."""
        units = self._units(cut)
        possible = [ranks for ranks in (*range(3, MOST_RANKS + 1), 2) if units % ranks == 0]
        return [
            ranks for ranks in possible if ranks != self._ranks and cut.fits(self._shapes, ranks)
        ]

    def _units(self, cut: Cut) -> int:
        place, dim, unit = cut.dims[0]
        return self._shapes[place][dim] // unit


def _sets(shapes: Mapping[Place, torch.Size], ranks: int) -> Iterator[Dims]:
    """Sets of dimensions, at most one of each argument; equally long ones come first."""
    arguments: dict[Place, list[Place]] = {}
    for place in shapes:
        arguments.setdefault(argument(place), []).append(place)
    dims = {
        name: [
            tuple((place, dim) for place in places)  # the items of a list are split alike
            for dim in range(min(len(shapes[place]) for place in places))
            if all(shapes[place][dim] >= ranks for place in places)
        ]
        for name, places in arguments.items()
    }
    unequal: list[Dims] = []
    for count in range(1, len(dims) + 1):
        for names in itertools.combinations(dims, count):
            for chosen in itertools.product(*(dims[name] for name in names)):
                found = tuple(itertools.chain(*chosen))
                if len({shapes[place][dim] for place, dim in found}) == 1:
                    yield found
                elif len(unequal) < MOST_CUTS:
                    unequal.append(found)
    yield from unequal
