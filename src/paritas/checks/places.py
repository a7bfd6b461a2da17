"""Where the difference between two programs starts: the question, its answer, and who answers."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import msgspec

from paritas.checks.failures import without_kind
from paritas.errors import in_one_line
from paritas.execution.time_limit import OutOfTime, TimeLimit
from paritas.results.findings import Status
from paritas.results.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paritas.checks.failures import FailedPair
    from paritas.execution.evidence import Evidence
    from paritas.execution.observation import Observation, RunConditions
    from paritas.execution.saved_state import RandomState
    from paritas.execution.subject_runs import SubjectProgram
    from paritas.execution.subjects import Inputs, Subject, VerifyConfig
    from paritas.results.findings import Finding, Verdict


# --- The question and its answer ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FailedCall:
    """A call of two programs that gave different results, with all that is needed to repeat it.

    Attributes:
        inputs: the set of inputs that failed.
        rng: the state of the random generators before the call.
        conditions: the conditions of the native runs.
        failures: the findings that do not pass.
        deadline: when the search must have ended, by `time.monotonic`.
        tell: called with a few words before each step that may take long.
        compared: the evidence about the reference, and what both sides gave in their first call;
            None if that is not known.
        is_interrupted: Ctrl-C has come before the search: nothing more is found out.
    """

    reference: Subject
    candidate: Subject
    inputs: Inputs
    rng: RandomState
    config: VerifyConfig
    conditions: RunConditions
    failures: tuple[Finding, ...]
    deadline: float
    tell: Callable[[str], None]
    compared: tuple[Evidence[SubjectProgram], Observation, Observation] | None = None
    is_interrupted: bool = False


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a difference starts, or why that is not known.

    Attributes:
        findings: one for each cause, with its origin; empty if no place was found.
        pair: the two programs at the first place, with its inputs, if they can be called alone.
        causes: path of a failure -> path of the finding in `findings` that it results from, or ""
            if none of them explains it. All other failures result from the first.
        reason: why no place was found for some of the failures, in one sentence.
        command: the command that can find it, or "".
        is_interrupted: Ctrl-C has ended the search.
    """

    findings: tuple[Finding, ...] = ()
    pair: FailedPair | None = None
    causes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reason: str = ""
    command: str = ""
    is_interrupted: bool = False


# --- Who answers ----------------------------------------------------------------------------------

# Only these can have a place: what could not be compared has none, and neither has what the
# reference's own rounding decides.
_WRONG = {Status.DIFFERENT, Status.DEGRADED}
LONGER = "more time: --locate-seconds, or locate_seconds= in Python"


def locate_failure(call: FailedCall) -> Place:
    """Find where a failed call first goes wrong, by what its candidate allows.

    The graphs of a compiled candidate are checked one by one. If they are all correct, its own
    source may compute something else, as that of a candidate that is not compiled.
    """
    if not call.candidate.is_compiled:
        return _locate_in_source(call)
    from paritas.checks.locate_compiled import as_written, locate_compiled

    place = locate_compiled(call)
    written = as_written(call)
    if place.findings or written is None or is_over(call):
        return place
    source = _locate_in_source(written)
    return source if source.findings else place


def _locate_in_source(call: FailedCall) -> Place:
    from paritas.checks.locate_programs import locate_programs

    return locate_programs(call)


def is_over(call: FailedCall) -> bool:
    """Whether the time for the search is over."""
    return time.monotonic() >= call.deadline


def wrong_findings(verdict: Verdict) -> tuple[Finding, ...]:
    """The failures of a verdict that can have a place."""
    return tuple(finding for finding in verdict.failures if finding.status in _WRONG)


# A step that does not look at the time is interrupted this share of the limit later.
_GRACE = 0.1


def find_place(call: FailedCall) -> Place | None:
    """Look for where a failed call goes wrong, within the time for it; None if there is none.

    Nothing is raised, whatever happens during the search: the verdict is known already. The time
    limit is that of the configuration, and the deadline of the call if that is earlier.
    """
    seconds = min(call.config.locate_seconds, call.deadline - time.monotonic())
    if seconds <= 0 or not call.failures:
        return None
    if call.is_interrupted:
        return Place(reason="the search was interrupted", is_interrupted=True)
    call = dataclasses.replace(call, deadline=time.monotonic() + seconds)
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
    wrong = [finding for finding in verdict.findings if finding.status in _WRONG]
    whole = {finding.path for finding in wrong if not finding.item.graph}
    places = tuple(finding for finding in wrong if finding.origin is not None)
    pieces = tuple(finding for finding in wrong if finding.item.graph and not finding.cause)
    others = {finding.path: "" for finding in pieces}
    reason = ""
    if whole and not pieces:
        reason = (
            "each piece computes what the reference's does, so the difference is in what the "
            "candidate does across pieces"
        )
    return add_place(verdict, Place(findings=places, causes=others, reason=reason))


def add_place(verdict: Verdict, place: Place) -> Verdict:
    """Put the places first, and the failures that result from them after them."""
    located = [_not_graver(finding, verdict.status) for finding in place.findings]
    first = located[0].path if located else ""
    known = {finding.path for finding in located}
    rest = [finding for finding in verdict.findings if finding.path not in known]
    findings = [
        _caused_by(place.causes.get(finding.path, first), finding)
        if finding.status in _WRONG and not finding.cause
        else finding
        for finding in rest
    ]
    notes = verdict.notes
    if place.reason:
        advice = f"; to find it: {place.command}" if place.command else ""
        notes = (*notes, f"where it starts is not known: {place.reason}{advice}")
    return msgspec.structs.replace(verdict, findings=(*located, *findings), notes=notes)


def _caused_by(place: str, finding: Finding) -> Finding:
    """A failure that results from a place; what kind of wrong it is, is said there."""
    return without_kind(msgspec.structs.replace(finding, cause=place)) if place else finding


def _not_graver(finding: Finding, status: Status) -> Finding:
    """A place has at most the status of the verdict, which it explains and does not change."""
    if finding.status.gravity <= status.gravity:
        return finding
    return msgspec.structs.replace(finding, status=status)
