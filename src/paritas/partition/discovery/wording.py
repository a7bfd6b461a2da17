"""Splits that were discovered, in words and as an annotation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paritas.errors import UsageError
from paritas.partition.annotations.writing import annotation_text
from paritas.partition.discovery.cuts import argument
from paritas.partition.recipes import Combine, Concat, Place, Recipe, Same

if TYPE_CHECKING:
    import torch

    from paritas.partition.discovery.cuts import Cut, Subject

__all__ = ["cut_words", "write_annotations"]


def write_annotations(
    subject: Subject, results: Sequence[torch.Tensor], recipes: Sequence[Recipe]
) -> list[str]:
    """One annotation that says all of them, for each; where there is none, each its own.

    Two splits of one dimension go into no annotation, and some splits into none at all: these are
    told in words.
    """
    try:
        text = _annotation(subject, results, recipes)
    except UsageError:
        return [_alone(subject, results, recipe) for recipe in recipes]
    return [text for _ in recipes]


def _alone(subject: Subject, results: Sequence[torch.Tensor], recipe: Recipe) -> str:
    try:
        return _annotation(subject, results, [recipe])
    except UsageError:
        return recipe.words


def _annotation(
    subject: Subject, results: Sequence[torch.Tensor], recipes: Sequence[Recipe]
) -> str:
    given = subject.given()
    tensors = subject.tensors()
    inputs: dict[Place, tuple[int, ...] | None] = {
        place: tuple(tensors[place].shape) if place in tensors else None
        for place in given
        if isinstance(place, int) or place in tensors
    }
    others = {place: value for place, value in given.items() if place not in tensors}
    return annotation_text(inputs, [tuple(one.shape) for one in results], recipes, others)


def cut_words(name: str, cut: Cut, ways: list[Combine]) -> str:
    """What is split, what goes with it, and what becomes of the results."""
    dims = dict.fromkeys((argument(place), dim) for place, dim, _ in cut.dims)
    split = [f"dim {dim} of {_place_words(place)}" for place, dim in dims]
    once = [f"{_place_words(place)} once" for place in cut.once]
    divided = []
    if cut.number is not None:
        item = "" if cut.number.item is None else f"[{cut.number.item}]"
        divided = [f"{_place_words(cut.number.place)}{item} divided"]
    parts = ", ".join([" and ".join(split), *once, *divided])
    told = f"{parts} -> {', '.join(map(_way_words, ways))}"
    return f"{name}: split by {told}" if name else f"split by {told}"


def _way_words(way: Combine) -> str:
    """How results are put together."""
    if isinstance(way, Concat):
        return f"concat {way.dim}"
    return "same" if isinstance(way, Same) else way.reduction


def _place_words(place: Place) -> str:
    """An argument."""
    return f"args[{place}]" if isinstance(place, int) else place
