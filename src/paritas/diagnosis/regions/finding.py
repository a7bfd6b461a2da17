"""Where a tensor is wrong: the simplest set of elements that the evidence pays for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from paritas.diagnosis.regions.phrases import worded
from paritas.diagnosis.regions.places import Place
from paritas.diagnosis.regions.searching import Found, plain, search, single
from paritas.diagnosis.regions.sight import Sight
from paritas.diagnosis.regions.spans import bits_of_choice

if TYPE_CHECKING:
    from paritas.diagnosis.cases import Case
    from paritas.diagnosis.regions.marks import Marked
    from paritas.diagnosis.regions.surveying import Survey
    from paritas.numerics.diagnoses import Region

__all__ = ["find_place", "find_region"]

# A region is stated if it saves so many bits: by chance that happens once in 2 to this power.
_MARGIN = 7.0
# A region that is right in so few places needs no closer look.
_DENSE = 0.95
# Everything is wrong if this share of it is.
_NEARLY_ALL = 0.9
# Or if it would be, were it not for values that are equal by chance.
_CHANCE = 1.3
# Where a fault is not beyond its limit everywhere, smaller errors show how far it reaches; of
# this size they are no noise.
_LEVELS = (6.0, 3.0, 1.5, 0.5)
_NO_NOISE_Z = 3.0
_OFF_SHARE = 0.4
# Below this no structure is claimed, if nothing is beyond the limit: that is how noise looks.
_LEAST_Z = 4.0
# A closer look may cost so many bits of what the judge's limit shows, and so much more of them:
# large errors are seldom spread evenly.
_SLACK = 16.0
_SLACK_SHARE = 1.05
# Most of a tensor, if it is wrong so seldom, is no region.
_THIN = 0.3
# A part is wrong among stray errors if it is so many times as often wrong as the rest.
_OFTEN = 8.0


def find_region(case: Case, survey: Survey | None = None) -> Region | None:
    """Where `case` is wrong, in the simplest terms that fit; None if nothing is.

    A region holds all wrong elements, unless its sentence says how many are elsewhere.

    Args:
        survey: of the case, where it is too large for masks of it.
    """
    place = find_place(case, survey)
    return None if place is None else worded(place, case)


def find_place(case: Case, survey: Survey | None = None) -> Place | None:
    """The same as data, of which one can ask for the very elements."""
    sight: Sight | Survey = survey or Sight(case)
    marks = sight.base
    if not marks.number:
        return None
    if marks.number == marks.size:
        place = Place("everywhere", plain(marks), marks, marks)
    elif not case.is_exact and not sight.reaches(_LEAST_Z):
        place = Place("scatter", plain(marks), marks, marks)
    else:
        place = _found(sight, marks, _shards(case))
    return dataclasses.replace(place, any_finite=sight.any_finite)


def _found(sight: Sight | Survey, marks: Marked, shards: tuple[int, ...]) -> Place:
    best = single(marks) if marks.number == 1 else _described(sight, marks, shards)
    seen, everywhere = marks, False
    if not sight.case.is_exact:
        best, seen, everywhere = _looked_closer(sight, best, shards)
    pays = not everywhere and _pays(best, seen)
    if pays and _density(best, seen) >= _NEARLY_ALL:
        return Place("region", best, marks, seen)
    if everywhere or (not pays and _is_everywhere(sight)):
        return Place("everywhere", plain(marks), marks, marks)
    among = _among_strays(marks, shards, best.cost(marks.number))
    if among is not None:
        return Place("mostly", among, marks, marks)
    if pays or marks.number == 1:
        return Place("region", best, marks, seen)
    return Place("nonfinite" if sight.are_lost() else "scatter", plain(marks), marks, marks)


def _shards(case: Case) -> tuple[int, ...]:
    """Sizes that a rank's part can have."""
    sizes = {
        size // world
        for world in case.context.world.values()
        for size in case.shape
        if world > 1 and size % world == 0 and size > world
    }
    return tuple(sorted(sizes))


def _described(sight: Sight | Survey, marks: Marked, shards: tuple[int, ...]) -> Found:
    return search(marks, shards, sight.marked_out(marks))


def _density(found: Found, marks: Marked) -> float:
    return marks.number / max(found.size, marks.number)


def _pays(found: Found, marks: Marked) -> bool:
    saved = plain(marks).cost(marks.number) - found.cost(marks.number)
    thin = _density(found, marks) < _THIN and 2 * found.size > marks.total
    return not found.is_all and not thin and saved >= _MARGIN


def _looked_closer(
    sight: Sight | Survey, best: Found, shards: tuple[int, ...]
) -> tuple[Found, Marked, bool]:
    """The region, if smaller errors show it better, and which; whether all is wrong after all."""
    base: Marked = sight.base
    seen = base
    many_off = sight.share_beyond(_NO_NOISE_Z) >= _OFF_SHARE
    densest = _density(best, base) if _pays(best, base) else 0.0
    plainly_all = not densest and base.number >= _NEARLY_ALL * base.total
    if plainly_all or (densest >= _DENSE and not sight.share_beyond(_LEVELS[0])):
        return best, seen, plainly_all
    for level, marks in _levels(sight):
        found = _described(sight, marks, shards)
        density = _density(found, marks)
        dear = found.cost(base.number) > _SLACK_SHARE * best.cost(base.number) + _SLACK
        if _pays(found, marks) and density >= min(densest, _DENSE) and not dear:
            best, seen, densest = found, marks, density
        if densest >= _DENSE and level <= _NO_NOISE_Z:
            break
    return best, seen, many_off and densest < _DENSE


def _levels(sight: Sight | Survey) -> Iterator[tuple[float, Marked]]:
    """Ever more elements, as long as there are more of them and right ones are left."""
    known = sight.base.number
    for level in (*_LEVELS, 0.0):
        marks = sight.beyond(level) if level else sight.differing()
        if marks.number >= marks.total:
            return
        if marks.number > known:
            known = marks.number
            yield level, marks


def _is_everywhere(sight: Sight | Survey) -> bool:
    marks = sight.base
    wrong = marks.number / max(1, marks.total)
    if wrong >= _NEARLY_ALL:
        return True
    return 1 - wrong <= _CHANCE * sight.chance_of_equality()


def _among_strays(marks: Marked, shards: tuple[int, ...], known: float) -> Found | None:
    """A region that is wrong far more often than the rest, where that is wrong here and there."""
    best, saved = None, 2 * _MARGIN
    for axis in range(len(marks.shape)):
        counts, sizes = marks.along(axis), marks.shares(axis) * marks.total
        often = counts / np.maximum(sizes, 1.0)
        hot = often > often.max() / 3
        inside, outside = float(sizes[hot].sum()), float(sizes[~hot].sum())
        held = int(counts[hot].sum())
        strays = marks.number - held
        if not 0 < strays < held or held * outside < _OFTEN * strays * inside:
            continue
        found = search(marks.within(axis, hot), shards)
        cost = found.cost(held) + bits_of_choice(marks.total - found.size, strays)
        if not found.is_all and known - cost > saved:
            best, saved = found, known - cost
    return best
