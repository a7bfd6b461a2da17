"""Two sequences laid side by side: which members of one are which of the other, in order."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

__all__ = ["align"]

# The table of the exact method has as many cells as the two lengths multiply to.
_MOST_CELLS = 250_000
_PIECE = 96


def align(first: Sequence[Hashable], second: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Pairs of places with equal members, ascending on both sides.

    What both begin and end with is taken first, then what each has once; between those, as many as
    can be had. Only where long stretches have nothing that is there once, it is as many as can be
    had piece by piece, so that time does not grow with the square of the length.
    """
    found: list[tuple[int, int]] = []
    waiting = [(0, len(first), 0, len(second))]
    while waiting:
        begin, end, other, last = waiting.pop()
        while begin < end and other < last and first[begin] == second[other]:
            found.append((begin, other))
            begin, other = begin + 1, other + 1
        while begin < end and other < last and first[end - 1] == second[last - 1]:
            end, last = end - 1, last - 1
            found.append((end, last))
        if begin == end or other == last:
            continue
        if (end - begin) * (last - other) <= _MOST_CELLS:
            found += _exactly(first, second, (begin, end, other, last))
            continue
        anchors = _anchors(first, second, (begin, end, other, last))
        if not anchors:
            found += _piecewise(first, second, (begin, end, other, last))
        for at, there in anchors:
            found.append((at, there))
            waiting.append((begin, at, other, there))
            begin, other = at + 1, there + 1
        if anchors:
            waiting.append((begin, end, other, last))
    return sorted(found)


Stretch = tuple[int, int, int, int]


def _exactly(
    first: Sequence[Hashable], second: Sequence[Hashable], where: Stretch
) -> list[tuple[int, int]]:
    """The longest common subsequence."""
    begin, end, other, last = where
    width = last - other
    table = [[0] * (width + 1)]
    for at in range(end - 1, begin - 1, -1):
        below, row, member = table[-1], [0] * (width + 1), first[at]
        for there in range(width - 1, -1, -1):
            if member == second[other + there]:
                row[there] = below[there + 1] + 1
            else:
                row[there] = max(below[there], row[there + 1])
        table.append(row)
    table.reverse()
    found = []
    at, there = 0, 0
    while at < end - begin and there < width:
        if first[begin + at] == second[other + there]:
            found.append((begin + at, other + there))
            at, there = at + 1, there + 1
        elif table[at + 1][there] >= table[at][there + 1]:
            at += 1
        else:
            there += 1
    return found


def _anchors(
    first: Sequence[Hashable], second: Sequence[Hashable], where: Stretch
) -> list[tuple[int, int]]:
    """What both have once, as far as it is in the same order."""
    begin, end, other, last = where
    places = _once(first, begin, end)
    there = _once(second, other, last)
    pairs = [(at, there[member]) for member, at in places.items() if member in there]
    # The longest ascending run; `pairs` ascend on the first side already.
    tails: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for index, (_, place) in enumerate(pairs):
        at = bisect_left(tails, place)
        before.append(ends[at - 1] if at else -1)
        if at == len(tails):
            tails.append(place)
            ends.append(index)
        else:
            tails[at], ends[at] = place, index
    run: list[tuple[int, int]] = []
    index = ends[-1] if ends else -1
    while index >= 0:
        run.append(pairs[index])
        index = before[index]
    return run[::-1]


def _once(members: Sequence[Hashable], begin: int, end: int) -> dict[Hashable, int]:
    places: dict[Hashable, int] = {}
    often: set[Hashable] = set()
    for at in range(begin, end):
        if members[at] in places:
            often.add(members[at])
        places[members[at]] = at
    return {member: at for member, at in places.items() if member not in often}


def _piecewise(
    first: Sequence[Hashable], second: Sequence[Hashable], where: Stretch
) -> list[tuple[int, int]]:
    """The longest common subsequence of one piece after the other.

    Of each piece only the first half counts: what its end is like depends on what follows.
    """
    begin, end, other, last = where
    found: list[tuple[int, int]] = []
    while begin < end and other < last:
        piece = (begin, min(end, begin + _PIECE), other, min(last, other + _PIECE))
        pairs = _exactly(first, second, piece)
        is_last = piece[1] == end and piece[3] == last
        kept = pairs if is_last else [one for one in pairs if one[0] < begin + _PIECE // 2]
        found += kept
        if is_last:
            break
        if kept:
            begin, other = kept[-1][0] + 1, kept[-1][1] + 1
        else:
            begin, other = begin + _PIECE // 2, other + _PIECE // 2
    return found
