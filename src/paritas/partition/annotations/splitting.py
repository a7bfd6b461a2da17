"""What the split of one identifier makes of every argument and every result of a call."""

from __future__ import annotations

import functools
from math import prod
from typing import TYPE_CHECKING

from paritas.partition.annotations.arguments import holds_tensor, value_at
from paritas.partition.annotations.grammar import Bounds, Dim, Members, reduction_of
from paritas.partition.recipes import (
    Combine,
    Concat,
    Divided,
    Group,
    KeywordRule,
    Once,
    Place,
    Placement,
    Range,
    Reduce,
    Same,
    Split,
    Whole,
)

if TYPE_CHECKING:
    from paritas.partition.annotations.expanding import Expansion, Operand

__all__ = ["IdentifierSplit"]


class IdentifierSplit:
    """What becomes of a call when one of its identifiers is split."""

    def __init__(self, expansion: Expansion, name: str, ranks: int | None = None) -> None:
        self._expansion = expansion
        self._name = name
        self._ranks = ranks

    def obstacle(self) -> str | None:
        """Why it cannot be split in this call, if it cannot."""
        name, ranks, call = self._name, self._ranks, self._expansion.call
        if name in self._expansion.frozen:
            return f"{name} {self._expansion.frozen[name]}"
        numbers = self.numbers
        sized = [rule for _, rule in numbers if not isinstance(rule, Group)]
        if self._split_argument() is None and not sized:
            return f"no input has {name}, and no argument goes with it"
        length = self._expansion.lengths.get(name)
        if ranks is not None and length is not None and length < ranks:
            return f"{name} has length {length}, too short for {ranks} ranks"
        for place, rule in numbers:
            if isinstance(rule, Group) and (isinstance(place, str) or place < len(call.args)):
                continue  # the ranks are given it, whatever the call has there
            value = value_at(call, place, rule.item if isinstance(rule, Divided) else None)
            if value is None:
                return f"argument {place} goes with {name} and is not given: give it"
            # A number that is a multiple of the length is shared evenly or not at all.
            uneven = ranks is not None and length is not None and length % ranks
            if isinstance(rule, Divided) and value != length and uneven:
                shares = f"{length} for {ranks} ranks is uneven"
                return f"argument {place} is {value} and goes with {name}, and {shares}"
        return None

    @functools.cached_property
    def inputs(self) -> tuple[tuple[Place, Placement], ...]:
        """What a rank is given of every tensor among the arguments."""
        call = self._expansion.call
        return tuple(
            (operand.place, self._placement(operand))
            for operand in self._expansion.inputs
            if operand.place is not None and holds_tensor(value_at(call, operand.place))
        )

    @functools.cached_property
    def outputs(self) -> tuple[Combine, ...]:
        """How every result is put together."""
        return tuple(map(self._combine, self._expansion.outputs))

    @functools.cached_property
    def numbers(self) -> tuple[tuple[Place, KeywordRule], ...]:
        """The arguments that go with the split."""
        expansion, call = self._expansion, self._expansion.call
        rules: dict[tuple[Place, int | None], KeywordRule] = {}
        value = call.kwargs.get(self._name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            rules[self._name, None] = Divided()
        for number in expansion.signature.numbers:
            if isinstance(number, Bounds):
                of = self._split_argument() if number.name == self._name else None
                if of is not None:
                    rules[number.begin, None] = Range(of, "begin")
                    rules[number.end, None] = Range(of, "end")
            elif isinstance(number, Members):
                joined = self._name in number.names
                if joined or value_at(call, number.place) is not None:
                    rules[number.place, None] = Group(joined)
            elif (
                any(factor.name == self._name for factor in number.dim.factors)
                and value_at(call, number.place, number.item) != -1
            ):
                rules[number.place, number.item] = Divided(number.item)
        return tuple((place, rule) for (place, _), rule in rules.items())

    def _split_argument(self) -> Place | None:
        placements = self.inputs
        return next(
            (place for place, placement in placements if isinstance(placement, Split)), None
        )

    def _find(self, operand: Operand) -> tuple[int, Dim] | None:
        for at, dim in enumerate(operand.dims or ()):
            if any(factor.name == self._name for factor in dim.factors):
                return at, dim
        return None

    def _placement(self, operand: Operand) -> Placement:
        found = self._find(operand)
        if found is not None:
            at, dim = found
            # The identifier is the first factor that is not 1: all others make up one step of it.
            lengths = self._expansion.lengths
            others = [factor for factor in dim.factors if factor.name != self._name]
            unit = prod(int(each.name) if each.is_number else lengths[each.name] for each in others)
            return Split(at, unit, dim.halo)
        control = operand.tensor.control(self._name)
        if control is not None and control.kind == "!":
            # Without a name it is about every sum: of other results it is no term.
            counted = control.name or self._expansion.suffixes[self._name] == "sum"
            return Once() if counted else Whole()
        if control is not None and control.kind == "@":
            return Whole(own=True)
        return Whole(summed=control is None)

    def _combine(self, operand: Operand) -> Combine:
        found = self._find(operand)
        if found is not None:
            return Concat(found[0])
        control = operand.tensor.control(self._name)
        if operand.dims is None and control is None:
            return Same()
        suffix = self._expansion.suffixes[self._name] if control is None else control.kind
        reduction = reduction_of(suffix)
        return Same() if reduction is None else Reduce(reduction)
