"""The shapes on which a wrong split is tried again, from small to large."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import torch

from paritas.errors import UsageError
from paritas.graphs.calls import GraphCall, TensorValue
from paritas.graphs.operators.rules import option_of
from paritas.graphs.operators.values import CallValues
from paritas.graphs.scripts.values import NoScriptError, function_text
from paritas.graphs.settings import Settings
from paritas.graphs.working import Work
from paritas.partition.annotations.annotation import Annotation, Option
from paritas.partition.failed_splits import kinds_of
from paritas.partition.library.registry import name_of
from paritas.partition.recipes import OperatorCall, Recipe

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paritas.checking.remembering import FailedSplit
    from paritas.numerics.findings import Aspect, Status
    from paritas.numerics.graph_reports import OptionResult
    from paritas.partition.recipes import Place

__all__ = ["Attempt", "Wanted", "attempts_on", "attempts_on_caps"]

_LARGEST_CAP = 1024


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The split that is wrong, and how.

    Attributes:
        idx: which tensor is split first.
        dim: along which dimension.
        split: in the words of the rule.
        ranks: over how many ranks.
        status: how it ended.
        kinds: in what it is wrong.
    """

    idx: int
    dim: int
    split: str
    ranks: int
    status: Status
    kinds: frozenset[tuple[Aspect, str]]

    @classmethod
    def of(cls, option: OptionResult) -> Wanted:
        """What is wanted again of a split that was checked."""
        kinds = kinds_of(option.verdict)
        return cls(option.idx, option.dim, option.split, option.ranks, option.status, kinds)

    def is_shown_by(self, option: OptionResult) -> bool:
        """Whether the same split is wrong in the same way."""
        return Wanted.of(option) == self


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One try.

    Attributes:
        words: what the shapes are, for people.
        work: the call on these shapes.
        wanted: what has to be seen of it.
    """

    words: str
    work: Work
    wanted: Wanted


def attempts_on_caps(
    call: GraphCall, settings: Settings, wanted: Wanted, key: str = ""
) -> Iterator[Attempt]:
    """The call with its dimensions cut to ever larger lengths, and last as it is checked usually.

    Args:
        settings: of the usual check.
        key: of the call's group.
    """
    for cap in _caps(call, wanted.ranks, settings.cap):
        capped = dataclasses.replace(settings, cap=cap, ranks=(wanted.ranks,))
        words = f"no dimension longer than {cap}" if cap else "shapes as they are"
        yield Attempt(words, Work(0, key, call, capped), wanted)


def _caps(call: GraphCall, ranks: int, usual: int | None) -> Iterator[int | None]:
    """Lengths that can be divided evenly, as long as they cut anything."""
    longest = max((length for value in call.tensors() for length in value.shape), default=0)
    cap = ranks
    while cap < min(longest, _LARGEST_CAP + 1, usual or longest):
        yield cap
        cap *= 2
    yield usual


# --- from the call of an operator -----------------------------------------------------------------


def attempts_on(failed: FailedSplit, setup: Sequence[str] = ()) -> Iterator[Attempt]:
    """A split on smaller shapes with drawn values, and last on the very values of the check.

    Args:
        setup: statements that a script has to run first.

    Raises:
        UsageError: no script could do the same; the message says why.
    """
    call, recipe, ranks = failed.call, failed.recipe, failed.ranks
    if not isinstance(recipe, Recipe) or not isinstance(ranks, int):
        raise UsageError(
            f"{_name(call)}: it is split over a mesh of {ranks} ranks, and a script is written for "
            "one axis; check the axes one by one and shrink the one that is wrong"
        )
    settings = Settings(ranks=(ranks,), seed=failed.seed, imports=_modules(setup))
    _check_importable(call, settings.imports)
    return _attempts(failed, graph_call(call), settings)


def _attempts(failed: FailedSplit, bare: GraphCall, settings: Settings) -> Iterator[Attempt]:
    given = option_of(failed.recipe, failed.call)
    plain = dataclasses.replace(bare, annotation=failed.recipe)
    wanted = Wanted(
        given.idx, given.dim, given.split, settings.ranks[0], failed.status, failed.kinds
    )
    first = _first_option(failed, wanted.ranks)
    if first is None:
        yield from attempts_on_caps(plain, settings, wanted)
    else:
        # On other shapes a rule makes another recipe.
        named = dataclasses.replace(bare, annotation=failed.annotation)
        there = dataclasses.replace(wanted, idx=first.idx, dim=first.dim)
        yield from attempts_on_caps(named, settings, there)
    values = CallValues(failed.call.args, failed.call.kwargs)
    yield Attempt("the values of the check", Work(0, "", plain, settings, values), wanted)


def _first_option(failed: FailedSplit, ranks: int) -> Option | None:
    """Where the rule of a split names first what is split; None if it has no such rule."""
    if failed.annotation is None:
        return None
    annotation = Annotation.parse(failed.annotation)
    for option in annotation.options(failed.call):
        asked = dataclasses.replace(option, num=ranks)
        try:
            recipe = annotation.recipe(failed.call, asked)
        except UsageError:  # not this one, over so many ranks
            continue
        if recipe == failed.recipe:
            return option
    return None


def graph_call(call: OperatorCall) -> GraphCall:
    """A call as a graph would have it: shapes in place of tensors."""
    names: dict[int, str] = {}

    def bare(place: Place, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            name = names.setdefault(id(value), f"tensor{len(names)}")  # the same one, given twice
            grad = place not in call.without_gradient
            return TensorValue(name, tuple(value.shape), value.dtype, requires_grad=grad)
        if isinstance(value, dict):
            return {key: bare(place, item) for key, item in value.items()}
        if isinstance(value, list) or (isinstance(value, tuple) and not hasattr(value, "_fields")):
            return type(value)(bare(place, item) for item in value)
        return value

    return GraphCall(
        position=0,
        name="",
        operator=_name(call),
        args=tuple(bare(place, value) for place, value in enumerate(call.args)),
        kwargs={name: bare(name, value) for name, value in call.kwargs.items()},
        function=call.function,
    )


def _name(call: OperatorCall) -> str:
    return call.name.removeprefix("torch.ops.") or name_of(call.function)


def _modules(setup: Sequence[str]) -> tuple[str, ...]:
    found = [re.fullmatch(r"\s*import\s+([\w.]+)\s*", statement) for statement in setup]
    for statement, form in zip(setup, found, strict=True):
        if form is None:
            raise UsageError(
                f"setup {statement!r}: before a split only modules are imported; write "
                "'import package.module'"
            )
    return tuple(form[1] for form in found if form is not None)


def _check_importable(call: OperatorCall, imports: tuple[str, ...]) -> None:
    """Refuse before the search what no script could call."""
    try:
        function_text(_name(call), call.function, imports)
    except NoScriptError as error:
        home = getattr(call.function, "__module__", None)
        raise UsageError(
            f"{error} (it is of {home or 'no module'}); put it at the top level of a module of its "
            "own, and where a module registers it, name that: setup=['import package.module']"
        ) from None
