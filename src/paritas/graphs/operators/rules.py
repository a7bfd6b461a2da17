"""The ways to split a call: what the graph claims, what the library knows, what running shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from paritas.errors import UsageError
from paritas.partition.annotations.annotation import Annotation, Option
from paritas.partition.annotations.expanding import expand
from paritas.partition.library import annotation_for
from paritas.partition.library.registry import is_registered
from paritas.partition.recipes import Concat, Recipe, Reduce, Split

if TYPE_CHECKING:
    from paritas.graphs.settings import Settings
    from paritas.numerics.graph_reports import RuleOrigin
    from paritas.partition.recipes import OperatorCall

__all__ = ["Offer", "SplitOption", "annotation_of", "offers", "option_of"]


@dataclasses.dataclass(frozen=True)
class SplitOption:
    """One way to split a call over a number of ranks.

    Attributes:
        idx: the first tensor that is split, by position: the inputs, then the outputs.
        dim: its dimension.
        split: what is split, in the words of the rule.
        rule: the annotation.
        even: whether all ranks have equal parts.
    """

    idx: int
    dim: int
    split: str
    rule: str
    origin: RuleOrigin
    recipe: Recipe
    even: bool = True


@dataclasses.dataclass(frozen=True)
class Offer:
    """What there is to check of a call over a number of ranks.

    Attributes:
        options: the splits, even ones first.
        left_out: what could not be split, and why.
        missing: sources that know no rule.
        fault: why an annotation of the graph's or the user's is wrong before anything is run.
        faulty: which of the two.
    """

    options: tuple[SplitOption, ...] = ()
    left_out: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    fault: str = ""
    faulty: RuleOrigin = "declared"


def annotation_of(
    name: str, call: OperatorCall, declared: str | Recipe | None, settings: Settings
) -> Annotation | None:
    """The rule that says which lengths belong together; None where none fits."""
    if isinstance(declared, Recipe):
        return None
    asked = _sources(declared, settings)
    try:
        if "declared" in asked and declared is not None:
            annotation: Annotation | None = Annotation.parse(declared)
        else:
            annotation = annotation_for(name, call.args, call.kwargs)
        if annotation is not None:
            annotation.check(call)
    except (UsageError, RuntimeError):  # a rule may look at values, and here there are none
        return None
    return annotation


def offers(
    name: str, call: OperatorCall, declared: str | Recipe | None, settings: Settings, ranks: int
) -> Offer:
    """Everything that is asked for, each split once, under the first source that has it."""
    if isinstance(declared, Recipe):
        return Offer((option_of(declared, call),))
    found: dict[Any, SplitOption] = {}
    left: list[str] = []
    missing: list[str] = []
    for source in _sources(declared, settings):
        try:
            if source == "discover":
                options = list(_discovered(call, ranks, missing))
            else:
                rule = _rule(source, name, call, declared, missing)
                options = [] if rule is None else list(_annotated(*rule, call, ranks, left))
        except UsageError as error:
            if source == "declared":
                return Offer(fault=str(error))
            if source == "library" and _is_claimed(name, call):
                return Offer(fault=str(error), faulty="registered")
            missing.append(str(error))
            continue
        for option in options:
            found.setdefault(_meaning(option.recipe, call), option)
    even_first = sorted(found.values(), key=lambda option: not option.even)
    return Offer(tuple(even_first), tuple(dict.fromkeys(left)), tuple(missing))


def _sources(declared: str | None, settings: Settings) -> tuple[str, ...]:
    if settings.options is None:
        return ("declared",) if declared is not None else ("library",)
    if settings.options == "all":
        return ("declared", "library", "discover")
    return (settings.options,)


def _rule(
    source: str, name: str, call: OperatorCall, declared: str | None, missing: list[str]
) -> tuple[Annotation, RuleOrigin] | None:
    if source == "declared":
        if declared is not None:
            return Annotation.parse(declared), "declared"
        missing.append("the graph declares no split of it; --options library looks for a rule")
        return None
    known = annotation_for(name, call.args, call.kwargs) or annotation_for(
        call.function, call.args, call.kwargs
    )
    if known is not None:
        return known, "registered" if _is_claimed(name, call) else "library"
    hint = "--options discover looks for one"
    missing.append(f"the library has no rule for such a call of {name}; {hint}")
    return None


def _is_claimed(name: str, call: OperatorCall) -> bool:
    """Whether the rule is the user's own: one that does not fit is as wrong as the graph's."""
    return is_registered(name) or is_registered(call.function)


def _annotated(
    annotation: Annotation, origin: RuleOrigin, call: OperatorCall, ranks: int, left: list[str]
) -> Iterator[SplitOption]:
    expansion = expand(annotation.signature, call)
    options = annotation.options(call)
    for option in options:
        dims = expansion.operands[option.idx].dims or ()
        identifier = expansion.first_factor(dims[option.dim]).name
        try:
            recipe = annotation.recipe(call, Option(option.idx, option.dim, ranks))
        except UsageError as error:
            left.append(str(error).rpartition("`: ")[2] or str(error))
            continue
        length = expansion.lengths.get(identifier)
        even = length is None or length % ranks == 0
        if not even and Reduce("avg") in recipe.outputs:
            left.append(
                f"{identifier} has length {length}: {ranks} ranks would have unequal parts, whose "
                "means do not average to that of the whole"
            )
            continue
        yield SplitOption(
            option.idx,
            option.dim,
            f"split by {identifier}",
            annotation.text,
            origin,
            recipe,
            even=even,
        )
    if not options:
        why = [f"{name} {reason}" for name, reason in expansion.frozen.items() if name.isalnum()]
        told = ", ".join(why) or "no dimension has a name"
        left.append(f"`{annotation.text}` lets nothing be split: {told}")


def _discovered(call: OperatorCall, ranks: int, missing: list[str]) -> Iterator[SplitOption]:
    from paritas.partition.discovery.discovering import discover_partitions

    found = discover_partitions(
        call.function,
        call.args,
        call.kwargs,
        ranks=ranks,
        name=call.name,
        without_gradient=tuple(call.without_gradient),
    )
    right = [one for one in found if one.backward is not False]
    for one in right:
        idx, dim = _place(one.recipe, call)
        words = one.recipe.words.rpartition(": ")[2] or "split"
        yield SplitOption(
            idx, dim, words, str(one.annotation or ""), "discovered", one.recipe, even=True
        )
    if not right:
        missing.append(f"running {call.name} over {ranks} ranks shows no split to be right")


def option_of(recipe: Recipe, call: OperatorCall) -> SplitOption:
    """A recipe as it is: nobody claims of it that the parts are equal."""
    idx, dim = _place(recipe, call)
    _, found, name = recipe.words.rpartition("split by ")
    split = f"split by {name}" if found else recipe.words or "split"
    return SplitOption(idx, dim, split, recipe.words or "a recipe", "declared", recipe)


def _place(recipe: Recipe, call: OperatorCall) -> tuple[int, int]:
    """Which tensor a recipe splits first, and along which dimension."""
    places = [*range(len(call.args)), *call.kwargs]
    for at, place in enumerate(places):
        placement = recipe.placement(place)
        if isinstance(placement, Split):
            return at, placement.dim
    for at, combine in enumerate(recipe.outputs):
        if isinstance(combine, Concat):
            return len(places) + at, combine.dim
    return 0, 0


def _meaning(recipe: Recipe, call: OperatorCall) -> Any:
    """What a recipe does, whatever it is called and whether it names what it leaves whole."""
    places = [*range(len(call.args)), *call.kwargs]
    inputs = tuple(recipe.placement(place) for place in places)
    return inputs, recipe.outputs, frozenset(recipe.numbers)
