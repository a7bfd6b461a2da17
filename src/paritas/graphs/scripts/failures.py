"""From a failed operator of a graph to the script that shows it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

from paritas.checking.observing import AFTER
from paritas.errors import UsageError
from paritas.graphs.operators.checking import prepare
from paritas.graphs.operators.resolving import subject_of
from paritas.graphs.operators.rules import offers
from paritas.graphs.scripts.text import Facts
from paritas.graphs.scripts.writing import Handed, stem_of, write_script
from paritas.numerics.findings import Status
from paritas.partition.running.placing import name_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from paritas.graphs.working import Work
    from paritas.numerics.graph_reports import OperatorResult, OptionResult
    from paritas.partition.recipes import OperatorCall, Recipe

__all__ = ["with_script"]

_DRAWS = "it draws random numbers"


def with_script(
    folder: Path,
    work: Work,
    result: OperatorResult,
    versions: Mapping[str, str],
    *,
    graph: int = 1,
) -> OperatorResult:
    """The result with its script, or with a note that says why it has none.

    Args:
        graph: the number of the graph in the folder: scripts of the first have plain names.
    """
    handed = Handed(note="no script shows it by itself: none of its splits is wrong for certain")
    for option in result.failures:
        try:
            facts = _facts(work, result, option, versions)
        except UsageError as error:
            handed = Handed(note=f"no script shows it by itself: {error}")
            continue
        stem = stem_of(work.number, result.operator)
        stem = stem if graph == 1 else f"graph{graph}_{stem}"
        recorded, degraded = work.values is not None, option.status is Status.DEGRADED
        handed = write_script(folder, stem, facts, recorded=recorded, degraded=degraded)
        if handed.path:
            break
    notes = (*result.notes, handed.note) if handed.note else result.notes
    return msgspec.structs.replace(result, script=handed.path, notes=notes)


def _facts(
    work: Work, result: OperatorResult, option: OptionResult, versions: Mapping[str, str]
) -> Facts:
    """Everything again as it was when it was checked.

    Raises:
        UsageError: why a script could not do the same.
    """
    if any(note.startswith(_DRAWS) for note in (*result.notes, *option.verdict.notes)):
        raise UsageError(f"{_DRAWS}, and each rank was given its part of the whole's")
    seen = option.confirmation
    if seen is not None and seen.simulated.passes(strict=work.settings.strict):
        raise UsageError(
            f"it shows on {seen.backend} ranks alone, and a script has simulated ones; run the "
            "command again to see it"
        )
    # A script runs where torch alone is: on the host.
    settings = dataclasses.replace(work.settings, device=None)
    subject, call, _ = prepare(
        subject_of(work.call, settings.imports), work.call, settings, work.values
    )
    return Facts(
        operator=work.call.operator,
        call=call,
        recipe=_recipe(subject.name, call, work, option),
        ranks=option.ranks,
        heading=_heading(result, option, versions),
        written=tuple(
            place
            for place in (*range(len(call.args)), *call.kwargs)
            if any(one.path == f"{name_of(place)}{AFTER}" for one in option.verdict.findings)
        ),
        seed=work.settings.seed,
        imports=work.settings.imports,
    )


def _recipe(name: str, call: OperatorCall, work: Work, option: OptionResult) -> Recipe:
    offer = offers(name, call, work.call.annotation, work.settings, option.ranks)
    if offer.fault:
        raise UsageError(f"the annotation itself is refused: {offer.fault}")
    wanted = (option.idx, option.dim, option.split, option.rule, option.origin)
    for one in offer.options:
        if (one.idx, one.dim, one.split, one.rule, one.origin) == wanted:
            return one.recipe
    raise UsageError(f"{option.split} is not offered a second time")


def _heading(
    result: OperatorResult, option: OptionResult, versions: Mapping[str, str]
) -> tuple[str, ...]:
    site = result.sites[0]
    more = len(result.sites) - 1
    others = f", and {more} more like it" if more else ""
    place = f" at {site.source}" if site.source else ""
    return (
        f"{result.operator}, {option.split} over {option.ranks} ranks, against the whole of it.",
        "",
        *([f"Node:       {site.node}{place}{others}"] if site.node else []),
        *([f"Code:       {site.code.strip()}"] if site.code.strip() else []),
        f"Signature:  {result.signature}",
        f"Annotation: {option.rule} ({option.origin})",
        f"Verdict:    {option.status}: {option.reason}",
        f"Versions:   {', '.join(f'{name} {version}' for name, version in versions.items())}",
        "",
        "Exit code 1: the fault is there; 0: no fault is seen; 3: the operator itself fails.",
    )
