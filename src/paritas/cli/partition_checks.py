"""Which splits of an operator are checked, and the check of each."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

import msgspec

from paritas.checking.remembering import remember
from paritas.errors import UsageError
from paritas.numerics.findings import Aspect, Finding, Status, Verdict
from paritas.partition.annotations.annotation import Annotation, Option
from paritas.partition.failed_splits import failed_split
from paritas.partition.recipes import Concat, Recipe, Split
from paritas.reporting.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.checking.remembering import FailedSplit
    from paritas.cli.partition import Options
    from paritas.partition.discovery.discovering import Discovered
    from paritas.partition.recipes import OperatorCall

__all__ = ["Checked", "Row", "check"]

NO_SPLIT = "no dimension was found by which it can be split"


@dataclasses.dataclass(frozen=True)
class Row:
    """One split and how it ended.

    Attributes:
        option: `idx,dim`, the first dimension that is split; empty where there is nothing to split.
        split_by: the identifier, or the dimensions.
        wrong: what to shrink, if it is wrong.
    """

    option: str
    split_by: str
    verdict: Verdict
    wrong: tuple[FailedSplit, ...] = ()


@dataclasses.dataclass(frozen=True)
class Checked:
    """All splits of an operator.

    Attributes:
        rule: the annotation, or the annotations.
        source: where it comes from.
    """

    name: str
    rule: tuple[str, ...]
    source: str
    ranks: int
    rows: tuple[Row, ...]
    verdict: Verdict


def check(call: OperatorCall, options: Options, tell: Callable[[str], None]) -> Checked:
    """Check the splits that are declared, or those that are found by running the operator.

    Args:
        tell: hears of every split.

    Raises:
        UsageError: the operator fails by itself, or an option cannot be read.
    """
    asked = [_read_option(text) for text in options.options]
    annotation, source = _declared(call, options)
    if annotation is not None:
        rule: tuple[str, ...] = (annotation.text,)
        chosen = _by_annotation(call, annotation, asked)
    else:
        tell(f"looking for splits of {call.name}")
        rule, chosen = _discovered(call, options.ranks, asked)
    found = []
    for done, one in enumerate(chosen):
        tell(Progress(f"checking splits of {call.name}", done, len(chosen)))
        found.append(_row(call, one, annotation, options))
    rows = tuple(found)
    notes = (
        f"rule ({source}): {'; '.join(rule) or 'none'}",
        f"tensors drawn with seed {call.seed}",
    )
    if not rows and annotation is not None:
        rows = (_unsplit(call, annotation, options),)
    verdict = Verdict.merge(row.verdict for row in rows) if rows else _nothing(call)
    verdict = msgspec.structs.replace(
        verdict, strict=options.strict, notes=(*notes, *verdict.notes)
    )
    remember(verdict, [wrong for row in rows for wrong in row.wrong])
    return Checked(call.name, rule, source, options.ranks, rows, verdict)


# --- which ----------------------------------------------------------------------------------------

# An option, and its recipe or why there is none.
_Chosen = tuple[Option, Recipe | str]


def _declared(call: OperatorCall, options: Options) -> tuple[Annotation | None, str]:
    if options.annotation is not None:
        annotation = Annotation.parse(options.annotation)
        annotation.check(call)
        return annotation, "given"
    if options.discover:
        return None, "found by running"
    from paritas.partition.library import annotation_for

    known = annotation_for(call.name, call.args, call.kwargs) or annotation_for(
        call.function, call.args, call.kwargs
    )
    return known, "found by running" if known is None else "from the library"


def _by_annotation(
    call: OperatorCall, annotation: Annotation, asked: list[Option]
) -> list[_Chosen]:
    chosen: list[_Chosen] = []
    for option in asked or annotation.options(call):
        try:
            chosen.append((option, annotation.recipe(call, option)))
        except UsageError as error:
            chosen.append((option, str(error)))
    return chosen


def _discovered(
    call: OperatorCall, ranks: int, asked: list[Option]
) -> tuple[tuple[str, ...], list[_Chosen]]:
    from paritas.partition.discovery.discovering import discover_partitions

    found = discover_partitions(
        call.function,
        call.args,
        call.kwargs,
        ranks=ranks,
        without_gradient=tuple(call.without_gradient),
    )
    rule = tuple(dict.fromkeys(one.annotation for one in found))
    if not asked:
        recipes = [one.recipe if len(rule) > 1 else _named(call, one) for one in found]
        pairs = [(_option_of(call, recipe), recipe) for recipe in recipes]
        return rule, sorted(pairs, key=lambda pair: (pair[0].idx, pair[0].dim))
    chosen: list[_Chosen] = []
    for option in asked:
        fitting = [one.recipe for one in found if _splits(call, one.recipe, option)]
        missing = f"no valid split of this dimension over {ranks} ranks was found by running it"
        chosen += [(option, recipe) for recipe in fitting] or [(option, missing)]
    return rule, chosen


def _named(call: OperatorCall, found: Discovered) -> Recipe:
    """The same recipe, called by its identifier in the annotation, which is shorter."""
    try:
        annotation = Annotation.parse(found.annotation)
        words = annotation.recipe(call, _option_of(call, found.recipe)).words
    except UsageError:  # it is not in the language: its own words say it
        return found.recipe
    return dataclasses.replace(found.recipe, words=words)


def _read_option(text: str) -> Option:
    form = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*", text)
    if form is None:
        raise UsageError(f"--option {text!r} is not of the form idx,dim, as in '0,1'")
    return Option(int(form[1]), int(form[2]))


def _option_of(call: OperatorCall, recipe: Recipe) -> Option:
    """The first dimension that a recipe splits; arguments by name are counted after the others."""
    names = list(call.kwargs)
    places = [
        (place if isinstance(place, int) else len(call.args) + names.index(place), placement.dim)
        for place, placement in recipe.inputs
        if isinstance(placement, Split)
    ]
    return Option(*min(places))


def _splits(call: OperatorCall, recipe: Recipe, option: Option) -> bool:
    output = option.idx - len(call.args)
    if output < 0:
        placement = recipe.placement(option.idx)
        return isinstance(placement, Split) and placement.dim == option.dim
    combine = recipe.outputs[output] if output < len(recipe.outputs) else None
    return isinstance(combine, Concat) and combine.dim == option.dim


# --- how it ends ----------------------------------------------------------------------------------


def _row(
    call: OperatorCall, chosen: _Chosen, annotation: Annotation | None, options: Options
) -> Row:
    option, recipe = chosen
    label = f"{option.idx},{option.dim}"
    if isinstance(recipe, str):
        return Row(label, "", _unverified(f"option {label}", recipe))
    from paritas.partition.confirming import check_confirmed

    split_by = recipe.words.rpartition("split by ")[2] or recipe.words
    try:
        verdict = check_confirmed(
            call,
            recipe,
            options.ranks,
            seed=options.seed,
            strict=options.strict,
            confirm=options.confirm,
        )
    except UsageError as error:
        return Row(label, split_by, _unverified(f"option {label}", str(error)))
    wrong = failed_split(
        verdict, call, recipe, options.ranks, seed=options.seed, annotation=annotation
    )
    return Row(label, split_by, _labelled(verdict, f"option {label}"), wrong)


def _unsplit(call: OperatorCall, annotation: Annotation, options: Options) -> Row:
    """A rule that lets nothing be split leaves each rank to run the whole operator."""
    from paritas.partition.verifying import check_unsplit

    verdict = check_unsplit(
        call,
        len(annotation.signature.outputs),
        options.ranks,
        "the rule leaves every dimension whole",
        seed=options.seed,
        strict=options.strict,
        confirm=options.confirm,
    )
    return Row("", "nothing", verdict)


def _labelled(verdict: Verdict, label: str) -> Verdict:
    from paritas.partition.confirming import labelled

    own = labelled(verdict, f"{label}, ")
    if own.passed or own.failures:
        return own
    # Beside others that did compare something, this one must not go unnoticed.
    silent = _unverified(label, "nothing was compared").findings
    return msgspec.structs.replace(own, findings=(*own.findings, *silent))


def _unverified(path: str, reason: str) -> Verdict:
    finding = Finding(path=path, aspect=Aspect.HARNESS, status=Status.UNVERIFIED, reason=reason)
    return Verdict(findings=(finding,))


def _nothing(call: OperatorCall) -> Verdict:
    return _unverified(call.name, f"nothing to check: {NO_SPLIT}")
