"""Where a failed check starts: who answers it, and the verdict with the answer."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import msgspec

from paritas.core.errors import in_one_line
from paritas.core.judging.failures import without_kind
from paritas.core.judging.pairs import Ruling, reconsider
from paritas.core.locating.places import LONGER, FailedCall, Place
from paritas.core.results.progress import Progress
from paritas.core.time_limit import OutOfTime, TimeLimit

if TYPE_CHECKING:
    from paritas.core.results.findings import Finding, Status, Verdict

# Only these can have a place: what could not be compared has none, and neither has what the
# reference's own rounding decides.


def locate_failure(call: FailedCall) -> Place:
    """Find where a failed call first goes wrong, by what its candidate allows.

    The graphs of a compiled candidate are checked one by one. If they are all correct, its own
    source may compute something else, as that of a candidate that is not compiled.
    """
    if not call.candidate.is_compiled:
        return _locate_in_source(call)
    from paritas.core.compiled.locate_compiled import as_written, locate_compiled

    compiled_place = locate_compiled(call)
    written = as_written(call)
    if compiled_place.findings or written is None or call.limit.is_over:
        return compiled_place
    source = _locate_in_source(written)
    return source if source.findings else compiled_place


def _locate_in_source(call: FailedCall) -> Place:
    from paritas.core.locating.locate_programs import locate_programs

    return locate_programs(call)


def wrong_findings(verdict: Verdict) -> tuple[Finding, ...]:
    """The failures of a verdict that can have a place."""
    return tuple(finding for finding in verdict.failures if finding.status.is_wrong)


# A step that does not look at the time is interrupted this share of the limit later.
_GRACE = 0.1


def find_place(call: FailedCall) -> Place | None:
    """Look for where a failed call goes wrong, within the time for it; None if there is none.

    Nothing is raised, whatever happens during the search: the verdict is known already. The time
    limit is that of the configuration, and that of the call if less of it is left.
    """
    limit = call.limit.shorten(call.config.locate_seconds)
    seconds = limit.seconds
    if seconds <= 0 or not call.failures:
        return None
    if call.is_interrupted:
        return Place(reason="the search was interrupted", is_interrupted=True)
    call = dataclasses.replace(call, limit=limit)
    call.tell(Progress(f"looking for where it starts (at most {seconds:g} s)", at_most=seconds))
    try:
        with TimeLimit((1 + _GRACE) * seconds).interrupting():
            return locate_failure(call)
    except OutOfTime:
        return Place(reason=f"the {seconds:g} seconds for the search were over", command=LONGER)
    except KeyboardInterrupt:
        return Place(reason="the search was interrupted", is_interrupted=True)
    except Exception as error:  # noqa: BLE001  (the verdict stands; a note reports it)
        return Place(reason=f"the search failed: {in_one_line(error, 200)}")


def gather_places(verdict: Verdict) -> Verdict:
    """Put the places in the pieces of a model first, and the failures of the whole under them.

    A piece is checked on the reference's inputs, so what fails in another piece is not a result.
    """
    wrong = [finding for finding in verdict.findings if finding.status.is_wrong]
    paths = {finding.path for finding in wrong if not finding.item.graph}
    places = tuple(finding for finding in wrong if finding.origin is not None)
    pieces = tuple(finding for finding in wrong if finding.item.graph and not finding.cause)
    others = {finding.path: "" for finding in pieces}
    reason = ""
    if paths and not pieces:
        reason = (
            "each piece computes what the reference's does, so the difference is in what the "
            "candidate does across pieces"
        )
    return add_place(verdict, Place(findings=places, causes=others, reason=reason))


def add_place(verdict: Verdict, located_place: Place) -> Verdict:
    """Put the places first, and the failures that result from them after them."""
    located = reconsider(
        located_place.findings, functools.partial(_rule_on_gravity, verdict.status)
    )
    first = located[0].path if located else ""
    paths = {finding.path for finding in located}
    rest = [finding for finding in verdict.findings if finding.path not in paths]
    findings = [
        _caused_by(located_place.causes.get(finding.path, first), finding)
        if finding.status.is_wrong and not finding.cause
        else finding
        for finding in rest
    ]
    notes = verdict.notes
    if located_place.reason:
        advice = f"; to find it: {located_place.command}" if located_place.command else ""
        notes = (*notes, f"where it starts is not known: {located_place.reason}{advice}")
    return msgspec.structs.replace(verdict, findings=(*located, *findings), notes=notes)


def _caused_by(cause: str, finding: Finding) -> Finding:
    """A failure that results from a place; what kind of wrong it is, is said there."""
    return without_kind(msgspec.structs.replace(finding, cause=cause)) if cause else finding


def _rule_on_gravity(most: Status, finding: Finding) -> Ruling | None:
    """A place has at most the status of the verdict, which it explains and does not change."""
    return Ruling(most) if finding.status.gravity > most.gravity else None
