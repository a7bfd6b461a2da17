"""How long the dimensions of an annotation are in a call: measured, told, or left over.

Of `(h d)` only the product can be measured. Each factor has to be known from elsewhere but one.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple, NoReturn

from paritas.partition.annotations.grammar import ANY_LENGTH, Dim, Factor

__all__ = ["Measure", "lengths_of"]


class Measure(NamedTuple):
    """A dimension, how long it is, and what says so."""

    dim: Dim
    length: int
    where: str


def lengths_of(
    told: list[Measure], measured: list[Measure], refuse: Callable[[str], NoReturn]
) -> dict[str, int]:
    """The lengths of all identifiers that are measured.

    Args:
        told: by arguments: they are what they are.
        measured: of tensors: a length of 1 may be broadcast.
        refuse: called with the reason when they contradict each other or leave one unknown.
    """
    lengths = _Lengths(refuse)
    # What is broadcast speaks last.
    first = [*told, *(each for each in measured if each.length != 1)]
    last = [each for each in measured if each.length == 1]
    lengths.leave_none(lengths.learn(lengths.learn(first) + last))
    return lengths.known


class _Lengths:
    def __init__(self, refuse: Callable[[str], NoReturn]) -> None:
        self.known: dict[str, int] = {}
        self._said: dict[str, str] = {}
        self._refuse = refuse

    def learn(self, measures: list[Measure]) -> list[Measure]:
        """Learn what can be learned; give back what has more than one unknown factor still."""
        while True:
            later = [measure for measure in measures if not self._settle(measure)]
            if len(later) == len(measures):
                return later
            measures = later

    def leave_none(self, left: list[Measure]) -> None:
        """Refuse what stayed unknown; a product of 1 tells its factors."""
        for dim, length, where in left:
            names = [each.name for each in dim.factors if self._size(each) is None]
            if length == 1:
                self.known |= dict.fromkeys(names, 1)
            elif names:
                hint = f"give one of them as an argument, and write `; argument={names[0]}`"
                both = " and ".join(names)
                self._refuse(f"{where} is {length}, and nothing says how long {both} are: {hint}")

    def _size(self, factor: Factor) -> int | None:
        return int(factor.name) if factor.is_number else self.known.get(factor.name)

    def _settle(self, measure: Measure) -> bool:
        """Learn a dimension's last unknown factor; whether nothing is left to learn of it."""
        dim, length, where = measure
        if dim.factors[0].name == ANY_LENGTH:
            return True
        sizes = [self._size(factor) for factor in dim.factors]
        known = prod(size for size in sizes if size is not None)
        unknown = [factor.name for factor in dim.factors if self._size(factor) is None]
        if len(unknown) > 1:
            return False
        if unknown:
            if known == 0 or length % known:
                rest = f"no multiple of {known}, which the rest of `{dim}` is"
                self._refuse(f"{where} is {length}, {rest}")
            self.known[unknown[0]] = length // known
            self._said[unknown[0]] = where
        elif length != known and (length != 1 or all(each.is_number for each in dim.factors)):
            said = "; ".join(
                f"{each.name} is {self.known[each.name]} by {self._said.get(each.name, 'itself')}"
                for each in dim.factors
                if not each.is_number
            )
            self._refuse(
                f"{where} is {length}, not {known} as `{dim}`" + (f" ({said})" * bool(said))
            )
        return True
