"""Recipes of the same operator, written as one annotation."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paritas.core.errors import UsageError
from paritas.core.placement.placement import Group, Range, Recipe
from paritas.core.results.items import Once, Partial, Replicate, Role, Shard
from paritas.sharding.operators.grammar import (
    AnnotationSignature,
    Bounds,
    Control,
    Dim,
    DimFactor,
    InputMark,
    Members,
    Number,
    Suffix,
    Tensor,
)

if TYPE_CHECKING:
    from paritas.core.operators.calls import Place

Shape = tuple[int, ...]
_SCALAR = (Dim((DimFactor("1"),)),)


def annotation_text(
    inputs: Mapping[Place, Shape | None] | Sequence[Shape | None],
    outputs: Sequence[Shape | None],
    recipes: Sequence[Recipe],
    others: Mapping[Place, Any] | None = None,
) -> str:
    """Write recipes as one annotation, which gives the same recipes when it is parsed.

    Args:
        inputs: the shapes of the arguments, by place or in order; None for other arguments.
        outputs: the shapes of the results.
        recipes: each becomes an identifier, in this order.
        others: values of arguments that are not tensors. Identifiers avoid their names, and numbers
            that change with a split need their values.

    Raises:
        UsageError: one annotation cannot express all recipes, because two split the same dimension
            or the language cannot express one. The message names the recipe.
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
        numbers = {argument_place for recipe in recipes for argument_place, _ in recipe.numbers}
        names = _identifiers(
            {str(argument_place) for argument_place in {*inputs, *others, *numbers}}
        )
        # Names are assigned as they are written, so that they appear in alphabetical order.
        self._free = names
        self._given: dict[int, str] = {}
        self._lengths = [self._length(recipe) for recipe in recipes]
        self._suffixes: list[Suffix] = [_common_suffix(recipe) for recipe in recipes]

    def signature(self) -> AnnotationSignature:
        inputs = [
            self._input(argument_place, shape) for argument_place, shape in self._inputs.items()
        ]
        # Keywords come last, as in a call.
        inputs.sort(key=lambda tensor: tensor.keyword is not None)
        outputs = [self._output(at, shape) for at, shape in enumerate(self._outputs)]
        return AnnotationSignature(tuple(inputs), tuple(outputs), tuple(self._numbers()))

    def _length(self, recipe: Recipe) -> int:
        """The largest number of parts that this recipe allows."""
        for argument_place, placement in recipe.inputs:
            shape = self._inputs.get(argument_place)
            if isinstance(placement, Shard) and shape is not None and shape[placement.dim]:
                return shape[placement.dim] // placement.unit
        raise UsageError(
            f"{_title(recipe)} splits no input, which an annotation cannot express; remove it"
        )

    def _input(self, argument_place: Place, shape: Shape | None) -> Tensor:
        roles = [recipe.placement(argument_place) for recipe in self._recipes]
        dims: tuple[Dim, ...] | None = None
        if shape is not None:
            ats = range(len(shape))
            dims = (
                tuple(self._input_dim(roles, at, f"argument {argument_place}") for at in ats)
                or _SCALAR
            )
        controls = [
            Control(mark, self._name(which))
            for which, (recipe, role) in enumerate(zip(self._recipes, roles, strict=True))
            if (mark := _mark(recipe, role)) is not None
        ]
        return Tensor(
            dims, tuple(controls), argument_place if isinstance(argument_place, str) else None
        )

    def _input_dim(self, roles: list[Role], at: int, what: str) -> Dim:
        recipe_and_role = self._splitting(roles, at, what)
        if recipe_and_role is None:
            return self._frozen()
        which, role = recipe_and_role
        factor = DimFactor(self._name(which), self._suffixes[which])
        return _product_dim(factor, role.unit, role.halo)

    def _output(self, at: int, shape: Shape | None) -> Tensor:
        roles = [recipe.outputs[at] for recipe in self._recipes]
        dims: tuple[Dim, ...] | None = None
        if shape is not None:
            sizes = enumerate(shape)
            dims = tuple(self._output_dim(roles, *size, f"output {at}") for size in sizes)
            dims = dims or _SCALAR
        controls = []
        for which, (role, suffix) in enumerate(zip(roles, self._suffixes, strict=True)):
            reduction_suffix: Suffix = role.reduction if isinstance(role, Partial) else ""
            # `?` is replicated, whatever the suffix says.
            usual = "" if shape is None else suffix
            if not isinstance(role, Shard) and reduction_suffix != usual:
                controls.append(Control(reduction_suffix, self._name(which)))
        return Tensor(dims, tuple(controls))

    def _output_dim(self, roles: list[Role], dim: int, length: int, what: str) -> Dim:
        recipe_and_role = self._splitting(roles, dim, what)
        if recipe_and_role is None:
            return self._frozen()
        times, rest = divmod(length, self._lengths[recipe_and_role[0]])
        return _product_dim(DimFactor(self._name(recipe_and_role[0])), 1 if rest else times)

    def _splitting(self, roles: list[Role], dim: int, what: str) -> tuple[int, Shard] | None:
        """The recipe that splits a dimension, and the role of the tensor in it."""
        splitting_roles = [
            (which, role)
            for which, role in enumerate(roles)
            if isinstance(role, Shard) and role.dim == dim
        ]
        if len(splitting_roles) > 1:
            both = " and ".join(_title(self._recipes[which]) for which, _ in splitting_roles[:2])
            raise UsageError(
                f"{both} both split dimension {dim} of {what}, which one annotation cannot "
                "express; remove one"
            )
        return splitting_roles[0] if splitting_roles else None

    def _name(self, which: int) -> str:
        if which not in self._given:
            self._given[which] = next(self._free)
        return self._given[which]

    def _frozen(self) -> Dim:
        return Dim((DimFactor(next(self._free), "^"),))

    def _numbers(self) -> Iterator[Number | Bounds | Members]:
        yield from self._members()
        for which, (recipe, length) in enumerate(zip(self._recipes, self._lengths, strict=True)):
            name = self._name(which)
            ends: dict[str, Place] = {}
            for argument_place, rule in recipe.numbers:
                if isinstance(rule, Group):
                    continue
                if isinstance(rule, Range):
                    ends[rule.end] = argument_place
                    continue
                value: Any = self._others.get(argument_place)
                if rule.item is not None and value is not None:
                    value = value[rule.item]
                times = value // length if isinstance(value, int) and value % length == 0 else 1
                yield Number(argument_place, rule.item, _product_dim(DimFactor(name), times))
            if len(ends) == 1:
                raise UsageError(
                    f"{_title(recipe)} has only one end of a range, but an annotation needs both"
                )
            if ends:
                yield Bounds(ends["begin"], ends["end"], name)

    def _members(self) -> Iterator[Members]:
        """Process groups: one entry for all splits that need the group."""
        joined: dict[Place, list[str]] = {}
        for which, recipe in enumerate(self._recipes):
            for argument_place, rule in recipe.numbers:
                if rule == Group():
                    joined.setdefault(argument_place, []).append(self._name(which))
        yield from (Members(argument_key, tuple(names)) for argument_key, names in joined.items())


def _title(recipe: Recipe) -> str:
    splits = [
        f"argument {argument_place} at {each.dim}"
        for argument_place, each in recipe.inputs
        if isinstance(each, Shard)
    ]
    return f"the recipe `{recipe.words or ', '.join(splits) or 'without a split'}`"


def _common_suffix(recipe: Recipe) -> Suffix:
    """The most frequent reduction of the results; other results get a control."""
    reductions: list[Suffix] = []
    reductions += [each.reduction for each in recipe.outputs if isinstance(each, Partial)]
    return max(reductions, key=reductions.count, default="")


def _product_dim(factor: DimFactor, times: int, halo: tuple[int, int] = (0, 0)) -> Dim:
    return Dim((factor,) if times <= 1 else (factor, DimFactor(str(times))), halo)


def _mark(recipe: Recipe, placement: Role) -> InputMark | None:
    """The mark of an input after the colon."""
    if isinstance(placement, Partial):
        terms = f"terms of a {placement.reduction}"
        raise UsageError(f"{_title(recipe)} takes {terms}, which an annotation cannot express")
    if isinstance(placement, Once):
        return "!"
    if placement == Replicate(own=True):
        return "@"
    return "/" if placement == Replicate(summed=False) else None
