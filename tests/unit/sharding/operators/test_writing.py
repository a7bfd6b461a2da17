"""Recipes as an annotation, which gives the same recipes when it is parsed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paritas.core.errors import UsageError
from paritas.core.operators.calls import OperatorCall, Place
from paritas.core.placement.placement import Divided, Group, Range, Recipe
from paritas.core.results.items import Once, Partial, Replicate, Shard
from paritas.sharding.operators.annotation import Annotation
from paritas.sharding.operators.recipe_annotations import annotation_text

Shape = tuple[int, ...]


def essence(recipe: Recipe, places: list[Place]) -> tuple[Any, ...]:
    """What a recipe does, independent of how it is written."""
    return [recipe.placement(place) for place in places], recipe.outputs, set(recipe.numbers)


def read_again(
    text: str, inputs: dict[Place, Shape | None], others: dict[Place, Any]
) -> list[Recipe]:
    values: dict[Place, Any] = {
        place: None if shape is None else torch.zeros(shape) for place, shape in inputs.items()
    }
    values |= others
    positional = sorted(place for place in values if isinstance(place, int))
    call = OperatorCall(
        torch.add,
        tuple(values[place] for place in positional),
        {place: value for place, value in values.items() if isinstance(place, str)},
    )
    annotation = Annotation.parse(text)
    return [annotation.recipe(call, option) for option in annotation.options(call)]


def recipe(
    inputs: dict[Place, Any], *outputs: Any, numbers: dict[Place, Any] | None = None
) -> Recipe:
    return Recipe(tuple(inputs.items()), outputs, tuple((numbers or {}).items()))


CASES: dict[str, tuple[Any, ...]] = {
    "a norm whose ranks exchange, and one that keeps its own": (
        "a b, b : @a -> a b ; group=ranks(a)",
        {0: (4, 6), 1: (6,)},
        [(4, 6)],
        [
            recipe({0: Shard(0), 1: Replicate(own=True)}, Shard(0), numbers={"group": Group()}),
            recipe({0: Shard(1), 1: Shard(0)}, Shard(1)),
        ],
    ),
    "linear": (
        "a b+, c b+, c : !b -> a c",
        {0: (4, 6), 1: (8, 6), 2: (8,)},
        [(4, 8)],
        [
            recipe({0: Shard(0)}, Shard(0)),
            recipe({0: Shard(1), 1: Shard(1), 2: Once()}, Partial()),
            recipe({1: Shard(0), 2: Shard(0)}, Shard(1)),
        ],
    ),
    "a dimension that is never split": (
        "a b^, keep=? -> a c^",
        {0: (4, 6), "keep": None},
        [(4, 6)],
        [recipe({0: Shard(0)}, Shard(0))],
    ),
    "results of different kinds": (
        "a b+min -> a, a : b+max, 1, ?",
        {0: (4, 6)},
        [(4,), (4,), (), None],
        [
            recipe({0: Shard(1)}, Partial("min"), Partial("max"), Partial("min"), Replicate()),
            recipe({0: Shard(0)}, Shard(0), Shard(0), Replicate(), Replicate()),
        ],
    ),
    "a gradient that is whole already": (
        "a b^, c^ : /a -> a d^",
        {0: (4, 6), 1: (6,)},
        [(4, 6)],
        [recipe({0: Shard(0), 1: Replicate(summed=False)}, Shard(0))],
    ),
    "groups of channels": (
        "(a 4) b^, (a 3) c^ -> (a 3) d^ ; groups=a",
        {0: (8, 9), 1: (6, 4)},
        [(6, 7)],
        [recipe({0: Shard(0, 4), 1: Shard(0, 3)}, Shard(0), numbers={"groups": Divided()})],
        {"groups": 2},
    ),
    "a view": (
        "a b^ c^ -> (a 3) d^ ; size[0]=(a 3)",
        {0: (2, 3, 4)},
        [(6, 4)],
        [recipe({0: Shard(0)}, Shard(0), numbers={"size": Divided(0)})],
        {"size": (6, 4)},
    ),
    "a range and names that are taken": (
        "b^, c+ d^ -> e^ f^ ; start:stop=c",
        {0: (9,), 1: (50, 6)},
        [(9, 6)],
        [
            recipe(
                {1: Shard(0)},
                Partial(),
                numbers={"start": Range(1, "begin"), "stop": Range(1, "end")},
            )
        ],
        {"start": 0, "stop": 50, "a": 3},
    ),
    "a halo": (
        "a^ b~0:2 -> c^ b",
        {0: (2, 9)},
        [(2, 7)],
        [recipe({0: Shard(1, halo=(0, 2))}, Shard(1))],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_gives_the_same_recipes_when_read(name: str) -> None:
    expected, inputs, outputs, recipes, *others = CASES[name]
    text = annotation_text(inputs, outputs, recipes, *others)
    assert text == expected
    places = list(inputs)
    found = read_again(text, inputs, others[0] if others else {})
    assert sorted(map(repr, (essence(each, places) for each in found))) == sorted(
        map(repr, (essence(each, places) for each in recipes))
    )


def test_shapes_may_come_as_a_sequence() -> None:
    assert annotation_text([(4, 6), None], [(4,)], []) == "a^ b^, ? -> c^"


@pytest.mark.parametrize(
    ("recipes", "why"),
    [
        (
            [recipe({0: Shard(0)}, Shard(0)), recipe({0: Shard(0)}, Partial())],
            "both split dimension 0 of argument 0, which one annotation cannot express",
        ),
        (
            [recipe({0: Shard(0)}, Shard(0)), recipe({0: Shard(1)}, Shard(0))],
            "both split dimension 0 of output 0",
        ),
        (
            [recipe({0: Partial("avg")}, Partial("avg"))],
            "the recipe `without a split` splits no input",
        ),
        (
            [recipe({0: Shard(0), 1: Partial("max")}, Partial("max"))],
            "the recipe `argument 0 at 0` takes terms of a max, which an annotation cannot express",
        ),
        (
            [recipe({0: Shard(0)}, Partial(), numbers={"start": Range(0, "begin")})],
            "has only one end of a range",
        ),
    ],
)
def test_what_an_annotation_cannot_express_is_refused(recipes: list[Recipe], why: str) -> None:
    with pytest.raises(UsageError) as caught:
        annotation_text([(4, 6), (4,)], [(4,)], recipes)
    assert why in str(caught.value)
