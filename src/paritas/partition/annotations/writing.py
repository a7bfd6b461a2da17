"""Writes recipes that were found as the one annotation which says them all."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paritas.errors import UsageError
from paritas.partition.annotations.grammar import (
    Bounds,
    Control,
    Dim,
    Factor,
    InputMark,
    Members,
    Number,
    Signature,
    Suffix,
    Tensor,
)
from paritas.partition.recipes import (
    Concat,
    Group,
    Once,
    Partial,
    Place,
    Placement,
    Range,
    Recipe,
    Reduce,
    Split,
    Whole,
)

__all__ = ["annotation_text"]

Shape = tuple[int, ...]
_SCALAR = (Dim((Factor("1"),)),)


def annotation_text(
    inputs: Mapping[Place, Shape | None] | Sequence[Shape | None],
    outputs: Sequence[Shape | None],
    recipes: Sequence[Recipe],
    others: Mapping[Place, Any] | None = None,
) -> str:
    """Write recipes as an annotation: parsed again, it gives the same recipes.

    Args:
        inputs: the shapes of the arguments by place, or in their order; None for what is no tensor.
        outputs: the shapes of the results.
        recipes: each becomes an identifier, in this order.
        others: the values of the arguments that are no tensors. Identifiers keep clear of their
            names, and numbers that go with a split are written with what they are.

    Raises:
        UsageError: no one annotation says them all: two split the same dimension, or one says what
            the language does not have. The message names the recipe.
    """
    places: dict[Place, Shape | None] = {}
    places.update(inputs if isinstance(inputs, Mapping) else enumerate(inputs))
    return str(_Writer(places, list(outputs), list(recipes), dict(others or {})).signature())


def _identifiers(taken: set[str]) -> Iterator[str]:
    for length in itertools.count(1):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            if "".join(letters) not in taken:
                yield "".join(letters)


class _Writer:
    def __init__(
        self,
        inputs: dict[Place, Shape | None],
        outputs: list[Shape | None],
        recipes: list[Recipe],
        others: dict[Place, Any],
    ) -> None:
        self._inputs = inputs
        self._outputs = outputs
        self._recipes = recipes
        self._others = others
        numbers = {place for recipe in recipes for place, _ in recipe.numbers}
        names = _identifiers({str(place) for place in {*inputs, *others, *numbers}})
        # Names are given out as they are written, so that they read in the order of the alphabet.
        self._free = names
        self._given: dict[int, str] = {}
        self._lengths = [self._length(recipe) for recipe in recipes]
        self._suffixes: list[Suffix] = [_suffix(recipe) for recipe in recipes]

    def signature(self) -> Signature:
        inputs = [self._input(place, shape) for place, shape in self._inputs.items()]
        # Keywords stand behind, as in a call.
        inputs.sort(key=lambda tensor: tensor.keyword is not None)
        outputs = [self._output(at, shape) for at, shape in enumerate(self._outputs)]
        return Signature(tuple(inputs), tuple(outputs), tuple(self._numbers()))

    def _length(self, recipe: Recipe) -> int:
        """Into how many pieces at most this recipe can split."""
        for place, placement in recipe.inputs:
            shape = self._inputs.get(place)
            if isinstance(placement, Split) and shape is not None and shape[placement.dim]:
                return shape[placement.dim] // placement.unit
        raise UsageError(
            f"{_title(recipe)} splits no input: an annotation cannot say it; leave it out"
        )

    def _input(self, place: Place, shape: Shape | None) -> Tensor:
        keyword = place if isinstance(place, str) else None
        dims = None if shape is None else self._input_dims(place, shape) or _SCALAR
        controls = []
        for which, recipe in enumerate(self._recipes):
            mark = _mark(recipe, recipe.placement(place))
            if mark is not None:
                controls.append(Control(mark, self._name(which)))
        return Tensor(dims, tuple(controls), keyword)

    def _input_dims(self, place: Place, shape: Shape) -> tuple[Dim, ...]:
        dims = []
        for at in range(len(shape)):
            found = []
            for which, recipe in enumerate(self._recipes):
                placement = recipe.placement(place)
                if isinstance(placement, Split) and placement.dim == at:
                    found.append((which, placement))
            self._only_one([which for which, _ in found], f"dimension {at} of argument {place}")
            if found:
                which, placement = found[0]
                factor = Factor(self._name(which), self._suffixes[which])
                dims.append(_product(factor, placement.unit, placement.halo))
            else:
                dims.append(self._frozen())
        return tuple(dims)

    def _output(self, at: int, shape: Shape | None) -> Tensor:
        dims = None if shape is None else self._output_dims(at, shape) or _SCALAR
        controls = []
        for which, (recipe, suffix) in enumerate(zip(self._recipes, self._suffixes, strict=True)):
            combine = recipe.outputs[at]
            own: Suffix = combine.reduction if isinstance(combine, Reduce) else ""
            # Of `?` nothing but agreement is asked, whatever the suffix says.
            usual = "" if shape is None else suffix
            if not isinstance(combine, Concat) and own != usual:
                controls.append(Control(own, self._name(which)))
        return Tensor(dims, tuple(controls))

    def _output_dims(self, at: int, shape: Shape) -> tuple[Dim, ...]:
        dims = []
        for dim, length in enumerate(shape):
            found = [
                which
                for which, recipe in enumerate(self._recipes)
                if recipe.outputs[at] == Concat(dim)
            ]
            self._only_one(found, f"dimension {dim} of output {at}")
            if not found:
                dims.append(self._frozen())
                continue
            one = self._lengths[found[0]]
            dims.append(
                _product(Factor(self._name(found[0])), length // one if length % one == 0 else 1)
            )
        return tuple(dims)

    def _name(self, which: int) -> str:
        if which not in self._given:
            self._given[which] = next(self._free)
        return self._given[which]

    def _frozen(self) -> Dim:
        return Dim((Factor(next(self._free), "^"),))

    def _only_one(self, found: list[int], where: str) -> None:
        if len(found) > 1:
            both = " and ".join(_title(self._recipes[which]) for which in found[:2])
            raise UsageError(
                f"{both} both split {where}: one annotation cannot say both; leave one out"
            )

    def _numbers(self) -> Iterator[Number | Bounds | Members]:
        yield from self._members()
        for which, (recipe, length) in enumerate(zip(self._recipes, self._lengths, strict=True)):
            name = self._name(which)
            ends: dict[str, Place] = {}
            for place, rule in recipe.numbers:
                if isinstance(rule, Group):
                    continue
                if isinstance(rule, Range):
                    ends[rule.end] = place
                    continue
                value: Any = self._others.get(place)
                if rule.item is not None and value is not None:
                    value = value[rule.item]
                times = value // length if isinstance(value, int) and value % length == 0 else 1
                yield Number(place, rule.item, _product(Factor(name), times))
            if len(ends) == 1:
                raise UsageError(
                    f"{_title(recipe)} has one end of a range alone: an annotation has both or none"
                )
            if ends:
                yield Bounds(ends["begin"], ends["end"], name)

    def _members(self) -> Iterator[Members]:
        """Arguments that are the group of the ranks: one entry for all splits that exchange."""
        joined: dict[Place, list[str]] = {}
        for which, recipe in enumerate(self._recipes):
            for place, rule in recipe.numbers:
                if rule == Group():
                    joined.setdefault(place, []).append(self._name(which))
        yield from (Members(place, tuple(names)) for place, names in joined.items())


def _title(recipe: Recipe) -> str:
    splits = [
        f"argument {place} at {each.dim}"
        for place, each in recipe.inputs
        if isinstance(each, Split)
    ]
    return f"the recipe `{recipe.words or ', '.join(splits) or 'without a split'}`"


def _suffix(recipe: Recipe) -> Suffix:
    """What most of the results without the identifier are; the others say so themselves."""
    reductions: list[Suffix] = []
    reductions += [each.reduction for each in recipe.outputs if isinstance(each, Reduce)]
    return max(reductions, key=reductions.count, default="")


def _product(factor: Factor, times: int, halo: tuple[int, int] = (0, 0)) -> Dim:
    return Dim((factor,) if times <= 1 else (factor, Factor(str(times))), halo)


def _mark(recipe: Recipe, placement: Placement) -> InputMark | None:
    """What an input says after the colon."""
    if isinstance(placement, Partial):
        terms = f"terms of a {placement.reduction}"
        raise UsageError(f"{_title(recipe)} takes {terms}, which no annotation can say")
    if isinstance(placement, Once):
        return "!"
    if placement == Whole(own=True):
        return "@"
    return "/" if placement == Whole(summed=False) else None
