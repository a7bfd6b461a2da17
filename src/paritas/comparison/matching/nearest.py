"""For a name that has no counterpart: the names on the other side that are most like it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["NearestNames"]

_LENGTH = 3
_MOST_LETTERS = 300
_MOST_NAMES = 100_000
# How many of a name's rarest pieces are looked up, and how many names each may point to. They
# bound the time that a name takes, whatever the number of names.
_PIECES, _POINTED = 6, 48
_COMPARED = 12
# Nobody reads more than that; the rest is told without.
_MOST_ASKED = 20_000
_GIVEN = 3
_LEAST = 0.3


class NearestNames:
    """Finds names by the pieces of three letters that they share."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(dict.fromkeys(names))[:_MOST_NAMES]
        self._pieces = [_pieces(name) for name in self._names]
        self._pointers: dict[str, list[int]] = {}
        for at, pieces in enumerate(self._pieces):
            for piece in pieces:
                self._pointers.setdefault(piece, []).append(at)
        self._known: dict[str, tuple[str, ...]] = {}

    def of(self, name: str) -> tuple[str, ...]:
        """Up to three names, the likest first; none where nothing is like it."""
        if name not in self._known and len(self._known) < _MOST_ASKED:
            self._known[name] = self._find(name)
        return self._known.get(name, ())

    def _find(self, name: str) -> tuple[str, ...]:
        pieces = _pieces(name)
        rare = sorted((len(self._pointers[one]), one) for one in pieces if one in self._pointers)
        shared: dict[int, int] = {}
        for _, piece in rare[:_PIECES]:
            for at in self._pointers[piece][:_POINTED]:
                shared[at] = shared.get(at, 0) + 1
        likely = sorted(shared, key=lambda at: -shared[at])[:_COMPARED]
        scores = [(self._likeness(pieces, at), at) for at in likely]
        scores.sort(key=lambda found: (-found[0], found[1]))
        return tuple(self._names[at] for score, at in scores[:_GIVEN] if score >= _LEAST)

    def _likeness(self, pieces: set[str], at: int) -> float:
        other = self._pieces[at]
        return 2 * len(pieces & other) / (len(pieces) + len(other))


def _pieces(name: str) -> set[str]:
    text = f" {name[:_MOST_LETTERS].lower()} "
    return {text[at : at + _LENGTH] for at in range(len(text) - _LENGTH + 1)}
