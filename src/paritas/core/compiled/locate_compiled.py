"""Where a compiled candidate goes wrong: it runs once more, and each of its graphs is guarded.

A guard compares the code of each graph with the graph itself, on the inputs that the graph gets in
this call. So a graph that is wrong is wrong by itself, and not because of one before it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

import msgspec

from paritas.core.compiled.guard import GuardEverywhere
from paritas.core.compiled.guard_settings import GuardSettings, SearchOverError
from paritas.core.compiled.guarded_calls import GuardJournal, origin_item
from paritas.core.errors import in_one_line
from paritas.core.execution.observation import RunOptions
from paritas.core.execution.running import running_subject
from paritas.core.execution.subjects import inspect_subject
from paritas.core.locating.places import LONGER, FailedCall, Place
from paritas.core.results.findings import (
    Aspect,
    Finding,
    Origin,
    OriginKind,
    Status,
    mismatch,
    starting_place,
)
from paritas.core.results.wording import count_things
from paritas.core.time_limit import OutOfTime
from paritas.core.torch_private.compile_time import quick_compiles
from paritas.core.torch_private.dynamo import (
    backend_name,
    find_backend,
    leaving_no_entries,
    raised_by_backend,
    room_for_entries,
    undo_compile,
)
from paritas.core.torch_private.global_state import quietly

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paritas.core.compiled.guarded_calls import GraphEntry

# A wrong shape becomes a wrong value, and either one an exception, but memory that is shared or
# written to explains only itself.
_OF_VALUES = {Aspect.VALUE, Aspect.SHAPE, Aspect.DTYPE, Aspect.STRUCTURE, Aspect.DEVICE}


def locate_compiled(call: FailedCall) -> Place:
    """Run a compiled candidate with its graphs guarded, and return where they go wrong."""
    reason = ""
    for way in _ways(call):
        if call.limit.is_over:
            break
        call.tell(f"checking the candidate graph by graph{way.words}")
        journal = _read_journal(call, *_run_guarded(call, way))
        if journal.findings:
            return _with_places_of_gradients(call, journal, way)
        reason = reason or journal.reason
    if call.limit.is_over:
        seconds = call.config.locate_seconds
        return Place(reason=f"the {seconds:g} seconds for the search were over", command=LONGER)
    return Place(reason=reason, command="verdict.shrink() in Python, or the command paritas shrink")


def as_written(call: FailedCall) -> FailedCall | None:
    """The same call of the candidate's own source; None if that is the reference's.

    Compiled code that does what its graphs say is as wrong as the source of these graphs.
    """
    if not call.candidate.is_wholly_compiled:
        return call
    source = undo_compile(call.candidate.call)
    if source in (call.candidate.call, call.reference.call):
        return None
    reference = call.reference
    candidate = inspect_subject(source, "candidate", "compiled_model", reference.state)
    return dataclasses.replace(call, candidate=candidate)


# --- The guarded runs -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Way:
    """How the candidate is run.

    Attributes:
        gradients: with its backward pass.
        is_wide: in float64.
        checks_passes: the passes of its compiler are checked, too.
    """

    gradients: bool
    is_wide: bool = False
    checks_passes: bool = False

    @property
    def words(self) -> str:
        if self.checks_passes:
            return ", and the passes of its compiler"
        return " in float64" if self.is_wide else ""


def _ways(call: FailedCall) -> Iterator[_Way]:
    """The ways to run it, the likeliest and quickest first.

    A wrong forward pass explains wrong gradients, and a fault that rounding hides shows in float64
    only.
    """
    is_hidden = all(
        finding.lifted is not None and finding.native is not None and finding.native.passed
        for finding in call.failures
    )
    is_backward = [finding.item.kind.is_of_backward for finding in call.failures]
    first = all(is_backward)
    native = [_Way(first)]
    if any(find_backend(backend).is_inductor for backend in call.candidate.backends):
        native.append(_Way(first, checks_passes=True))
    wide = [_Way(first, is_wide=True)] if call.config.lift else []
    yield from (*wide, *native) if is_hidden else (*native, *wide)
    if any(is_backward) and not first:
        yield _Way(gradients=True)


def _lifted_agrees(call: FailedCall) -> bool | None:
    """Whether all that fails is right in float64; None if that is not known."""
    lifted = [finding.lifted for finding in call.failures]
    passeds = [score.passed for score in lifted if score is not None]
    return all(passeds) if passeds and (len(passeds) == len(lifted) or not all(passeds)) else None


@quietly()
def _run_guarded(call: FailedCall, way: _Way) -> tuple[GuardJournal, Exception | None]:
    """Call the candidate as in the failed call, and return what the guards saw and it raised.

    Its state and the generators are restored.
    """
    settings = GuardSettings(
        on_mismatch="record",
        check_passes=way.checks_passes,
        strict=call.config.strict,
        seed=call.config.seed,
        limit=call.limit,
        lifted_agrees=None if way.is_wide else _lifted_agrees(call),
    )
    conditions = dataclasses.replace(
        call.conditions,
        gradients=way.gradients,
        second=False,
        repeats=False,
        changing=frozenset(),
        options=RunOptions(wide=way.is_wide),
    )
    calls = min((finding.item.call or 1 for finding in call.failures), default=1)
    journal = GuardJournal(strict=call.config.strict, explains=False)
    with (
        leaving_no_entries(),
        room_for_entries(),
        quick_compiles(),
        GuardEverywhere(settings, journal),
        running_subject(call.candidate, call.rng, conditions) as run,
    ):
        errors: list[Exception | None] = [None]
        # What the guards have seen by then counts.
        with contextlib.suppress(OutOfTime):
            errors = [run(call.inputs).error for _ in range(calls)]
    error = None if errors[0] is None else raised_by_backend(errors[0])
    return journal, None if isinstance(error, SearchOverError) else error


def _with_places_of_gradients(call: FailedCall, forward_place: Place, way: _Way) -> Place:
    """A place in the forward pass, and those in the backward pass that it does not explain.

    Each graph is compared with what it should compute from the values that it gets, so a node of
    the backward pass is not wrong because of the forward pass. All of a graph may be.
    """
    if (
        way.gradients
        or call.limit.is_over
        or not any(finding.item.kind.is_of_backward for finding in call.failures)
    ):
        return forward_place
    call.tell("checking the backward pass graph by graph")
    journal, _ = _run_guarded(call, dataclasses.replace(way, gradients=True, checks_passes=False))
    backward = _places_in(journal, {finding.aspect for finding in call.failures})[1]
    number = call.failures[0].item.inputs
    further = [
        msgspec.structs.replace(finding, item=finding.item.during(0, number))
        for finding in backward
        if not _is_whole_graph(finding)
    ]
    findings = tuple(_distinct([*forward_place.findings, *further]))
    return dataclasses.replace(forward_place, findings=findings)


# --- What the guards found ------------------------------------------------------------------------


def _read_journal(call: FailedCall, journal: GuardJournal, error: Exception | None) -> Place:
    verdict = journal.verdict()
    aspects = {finding.aspect for finding in call.failures}
    forward, backward = _places_in(journal, aspects, error)
    if forward:  # a graph whose inputs are wrong gives wrong gradients
        backward = [finding for finding in backward if not _is_whole_graph(finding)]
    # They work before the graph is split into forward and backward, and so belong to neither.
    explaining = [finding for finding in verdict.failures if _explains(finding, aspects)]
    passes = [finding for finding in explaining if finding.origin and not finding.item.graph]
    places = _distinct([*forward, *backward])
    if places and passes:
        places[0] = _with_reasons(places[0], passes)
    places = places or passes
    if not places:
        return Place(reason=_why_none(call, journal, verdict.findings, error))
    number = call.failures[0].item.inputs
    places = [
        msgspec.structs.replace(position, item=position.item.during(0, number))
        for position in places
    ]
    is_backward = bool(backward) and not (forward or passes)
    causes, reason = _group_failures(call, places[0], is_backward=is_backward)
    return Place(findings=tuple(places), causes=causes, reason=reason)


def _places_in(
    journal: GuardJournal, aspects: set[Aspect], error: Exception | None = None
) -> tuple[list[Finding], list[Finding]]:
    """The places in forward graphs, and those in backward graphs."""
    explaining = [failure for failure in journal.verdict().failures if _explains(failure, aspects)]
    forward: list[Finding] = []
    backward: list[Finding] = []
    for entry in journal.graphs:
        failed = [finding for finding in explaining if finding.item.graph == entry.label]
        if failed:
            (backward if entry.is_backward else forward).append(_place_in(entry, failed))
        elif error is not None and not entry.calls:
            forward.append(_refused_graph(entry, error))
    return forward, backward


def _is_whole_graph(finding: Finding) -> bool:
    return finding.origin is not None and finding.origin.kind is OriginKind.GRAPH


def _distinct(places: list[Finding]) -> list[Finding]:
    """One place for each cause: a wrong node may be computed again in the backward pass."""
    by_cause: dict[tuple[str, ...], Finding] = {}
    for position in places:
        where = position.origin
        if where is not None:
            key = (where.source, where.operator, where.module, where.name)
            by_cause.setdefault(key, position)
    return list(by_cause.values())


def _explains(finding: Finding, aspects: set[Aspect]) -> bool:
    """Whether a failure of a graph can be the reason for failures of these aspects."""
    if finding.status is Status.UNVERIFIED and not finding.raised:
        return False
    if finding.aspect in _OF_VALUES:
        return bool(aspects & {*_OF_VALUES, Aspect.EXCEPTION})
    return finding.aspect in aspects


def _place_in(entry: GraphEntry, failed: list[Finding]) -> Finding:
    """The place that was found in a graph; the graph itself if there is none."""
    located = [finding for finding in failed if finding.origin is not None]
    if located:
        return _with_source(located[0], entry)
    first = failed[0]
    origin = Origin(kind=OriginKind.GRAPH, name=entry.label)
    item = origin_item(entry.label, origin)
    if first.raised:
        raised = mismatch(item, first.aspect, first.reason, raised=first.raised, origin=origin)
        return _with_source(raised, entry)
    located_place = starting_place(item, first, first.reason, first.aspect, origin=origin)
    return _with_source(located_place, entry)


def _refused_graph(entry: GraphEntry, error: Exception) -> Finding:
    """The place of an exception of the compiler: the graph that it was given."""
    origin = Origin(kind=OriginKind.GRAPH, name=entry.label)
    reason = f"the compiler raises {in_one_line(error, 160)}"
    raised, item = type(error).__name__, origin_item(entry.label, origin)
    finding = mismatch(item, Aspect.EXCEPTION, reason, raised=raised, origin=origin)
    return _with_source(finding, entry)


def _with_source(finding: Finding, entry: GraphEntry) -> Finding:
    """A place without a line of its own has that of its graph."""
    if finding.origin is None or finding.origin.source:
        return finding
    origin = msgspec.structs.replace(finding.origin, source=entry.source)
    return msgspec.structs.replace(finding, source=entry.source or None, origin=origin)


def _with_reasons(finding: Finding, passes: list[Finding]) -> Finding:
    """A place with the compiler passes that make it."""
    named = [f"{pass_.path} changes what the graph computes" for pass_ in passes]
    return msgspec.structs.replace(finding, reason="; ".join([finding.reason, *named]))


def _group_failures(
    call: FailedCall, first: Finding, *, is_backward: bool
) -> tuple[dict[str, str], str]:
    """Which failure results from which place: a backward graph computes gradients only."""
    if not is_backward:
        return {}, ""
    others = [failure.path for failure in call.failures if not failure.item.kind.is_of_backward]
    if not others:
        return {}, ""
    reason = f"no graph shows why {others[0]} differs; {first.path} explains the gradients only"
    return dict.fromkeys(others, ""), reason


def _why_none(
    call: FailedCall,
    journal: GuardJournal,
    findings: tuple[Finding, ...],
    error: Exception | None,
) -> str:
    """Why no place was found, in one sentence."""
    if error is not None:
        return f"no compiled graph explains that the candidate raises {in_one_line(error, 120)}"
    names = ", ".join(dict.fromkeys(map(backend_name, call.candidate.backends)))
    if not journal.graphs:
        return f"torch.compile ({names}) captured no graph"
    for finding in findings:
        if finding.status is Status.UNVERIFIED:
            return f"{finding.path} could not be checked: {finding.reason}"
    graphs = count_things(sum(not entry.is_backward for entry in journal.graphs), "compiled graph")
    return (
        f"each of {graphs} ({names}) computes what was captured, so the difference is between the "
        "graphs, or in what was captured"
    )
