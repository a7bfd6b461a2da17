"""The results about one model or kernel: of `paritas invariants`, `engine` and `kernel`.

A kernel's result has a row for each case, what the task is worth, and the timing.
"""

from __future__ import annotations

import enum
from collections import Counter
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

from paritas.core.results.findings import Coverage, Finding, Status, Verdict, unverified
from paritas.core.results.report import Report
from paritas.core.results.wording import MEANING, counted, enumerated, finding_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


# --- invariants: one row for each relation, and their roll-up -------------------------------------

# Whether a relation was checked; otherwise its reason says why not.
Promise = Literal["checked", "does not apply", "not promised"]


class RelationRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of one relation.

    Attributes:
        relation: its name.
        about: what must agree.
        promise: whether it was checked.
        reason: why it was not.
        verdict: of all its cases; empty if it was not checked.
        linked: an earlier relation that fails at the same module: they may have one cause.
        seconds: duration.
    """

    relation: str
    about: str
    promise: Promise
    reason: str = ""
    verdict: Verdict = Verdict()
    linked: str = ""
    seconds: float = 0.0

    @property
    def status(self) -> Status | None:
        """The status; None if it was not checked."""
        return self.verdict.status if self.promise == "checked" else None

    @property
    def word(self) -> str:
        """The status, or why there is none, in a word or three."""
        return self.promise if self.status is None else self.status.value

    @property
    def summary(self) -> str:
        """The row in one line."""
        if self.status is None:
            return self.reason
        failing = self.verdict.failures
        if not failing:
            return self.about
        more = f" and {counted(len(failing) - 1, 'other case')}" if len(failing) > 1 else ""
        first = next((one for one in failing if one.origin is not None), failing[0])
        case = first.item.option or first.item.name
        where = ""
        if first.origin is not None:
            where = f"; first in {first.origin.name or 'the model itself'}"
        if self.linked:
            where += f", as in {self.linked}: probably one cause"
        return f"{case}{more}: {first.reason or first.aspect.value}{where}"


class InvariantsReport(Report, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The relations of one model; true in a boolean context only if all that are promised hold.

    Attributes:
        rows: in the order of the catalogue.
        target: what was checked, as it was given; may be empty.
        strict: whether `unstable` counts as a failure.
        seconds: duration.
        notes: what else a reader should know.
    """

    _called: ClassVar[str] = "a report of invariants"

    rows: tuple[RelationRow, ...] = ()
    target: str = ""
    strict: bool = False
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def checked(self) -> tuple[RelationRow, ...]:
        """The relations that were checked."""
        return tuple(row for row in self.rows if row.promise == "checked")

    @property
    def failures(self) -> tuple[RelationRow, ...]:
        """The relations that do not hold or could not be compared, gravest first."""
        bad = [row for row in self.checked if not row.verdict.passed]
        return tuple(sorted(bad, key=lambda row: -row.verdict.status.gravity))

    @property
    def verdict(self) -> Verdict:
        """The findings of all relations; those that were not checked are listed as skipped."""
        merged = Verdict.merge(row.verdict for row in self.checked)
        skipped = tuple(
            f"{row.relation}: {row.promise}: {row.reason}"
            for row in self.rows
            if row.promise != "checked"
        )
        return msgspec.structs.replace(
            merged,
            coverage=merged.coverage + Coverage(skipped=skipped),
            notes=(*self.notes, *merged.notes),
            strict=self.strict,
        )

    def row(self, relation: str) -> RelationRow:
        """The row of one relation."""
        return next(row for row in self.rows if row.relation == relation)

    def __str__(self) -> str:
        return "\n".join(invariants_lines(self))


def invariants_headline(report: InvariantsReport) -> str:
    """The report in one line."""
    checked, failing = report.checked, report.failures
    if not checked:
        return "unverified: no relation applies to this model, so nothing was compared"
    left = len(report.rows) - len(checked)
    others = f"; {left} not promised or not applicable" if left else ""
    if failing:
        counts = Counter(row.verdict.status for row in failing)
        words = [f"{counts[one]} {one.value}" for one in reversed(Status) if counts[one]]
        status = failing[0].verdict.status.value
        verb = "fails" if len(failing) == 1 else "fail"
        of = f"{len(failing)} of {len(checked)} relations"
        linked = sum(bool(row.linked) for row in failing)
        if linked:
            words.append(f"{linked} at a place where another fails, too")
        return f"{status}: {of} {verb} ({', '.join(words)}){others}"
    gravest = max((row.verdict.status for row in checked), key=lambda one: one.gravity)
    warning = " (unstable is a warning, not a failure)" if gravest is Status.UNSTABLE else ""
    verb = "holds" if len(checked) == 1 else "hold"
    return f"{gravest.value}: {counted(len(checked), 'relation')} {verb}{warning}{others}"


def invariants_lines(report: InvariantsReport) -> Iterator[str]:
    """The report as plain lines, the answer first."""
    yield invariants_headline(report)
    for row in report.rows:
        yield f"  {row.relation}: {row.word}; {row.summary}"
    for row in report.failures:
        for finding in row.verdict.failures:
            yield from finding_lines(finding)


# --- engine: one row for each request, and what explains those that fail --------------------------


class EngineCause(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A changed run of the reference that gives what the engine returned.

    Attributes:
        kind: temperature, truncation, penalties, normalisation, shift, prompt, positions, cache,
            quantised cache, stale weights, quantised weights, loaded weights, precision, settings,
            layers, routing, sampling.
        text: the cause in words.
        requests: the requests that it explains.
        remaining: the rms of what it leaves, as a share of the difference without it.
        to_rounding: it explains them down to rounding; otherwise it is only the closest.
        mostly: further requests of which it explains most, but not all.
        also: other causes that explain the same requests as well.
    """

    kind: str
    text: str
    requests: tuple[str, ...]
    remaining: float
    to_rounding: bool
    mostly: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """The cause and how well it explains the record."""
        share = f"{100 * (1 - self.remaining):.3g} % of the difference"
        if self.to_rounding:
            more = f", and most of {len(self.mostly)} more" if self.mostly else ""
            same = f"; so does this: {'; '.join(self.also)}" if self.also else ""
            explained = f"explains {counted(len(self.requests), 'request')} to rounding{more}"
            return f"{self.text} ({explained}){same}"
        return f"not explained; closest: {self.text} (explains {share})"


class EngineRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request.

    Attributes:
        name: its name.
        tokens: the number of compared numbers.
        difference: the mean distance of the engine's log probabilities to the arbiter's.
        rounding: the same for the reference itself in the dtype of its run.
        first: the first output token whose log probability is beyond rounding; None if none is.
        findings: of its log probabilities and tokens.
    """

    name: str
    tokens: int
    difference: float
    rounding: float
    first: int | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def status(self) -> Status:
        """The gravest status."""
        found = [one.status for one in self.findings] or [Status.UNVERIFIED]
        return max(found, key=lambda one: one.gravity)


class EngineReport(Report, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a serving engine returned against the reference model.

    Attributes:
        rows: the requests.
        causes: what explains those that fail, best first.
        target: the reference, as it was given; may be empty.
        strict: whether `unstable` counts as a failure.
        tried: the number of changed runs that were tried.
        seconds: duration.
        observed: what the differences look like, whatever their cause is.
        notes: what else a reader should know.
    """

    _called: ClassVar[str] = "a report of an engine"

    rows: tuple[EngineRow, ...] = ()
    causes: tuple[EngineCause, ...] = ()
    target: str = ""
    strict: bool = False
    tried: int = 0
    seconds: float = 0.0
    observed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[EngineRow, ...]:
        """The requests that do not pass."""
        return tuple(row for row in self.rows if not row.status.passes(strict=self.strict))

    @property
    def verdict(self) -> Verdict:
        """The findings of all requests."""
        findings = tuple(one for row in self.rows for one in row.findings)
        return Verdict(
            findings=findings,
            coverage=Coverage(compared=len(findings)),
            notes=self.notes,
            strict=self.strict,
        )

    def __str__(self) -> str:
        return "\n".join(engine_lines(self))


def engine_headline(report: EngineReport) -> str:
    """The report in one line."""
    failing, status = report.failures, report.verdict.status
    total = counted(len(report.rows), "request")
    if not failing:
        same = "are" if len(report.rows) > 1 else "is"
        return f"{status.value}: {total} {same} the reference's up to rounding"
    counts = Counter(row.status for row in failing)
    words = ", ".join(f"{counts[one]} {one.value}" for one in reversed(Status) if counts[one])
    cause = f": {report.causes[0].sentence}" if report.causes else ""
    if not cause and report.tried:
        cause = f": none of {counted(report.tried, 'changed run')} gives this"
    return f"{status.value}: {len(failing)} of {total} ({words}){cause}"


def engine_lines(report: EngineReport) -> Iterator[str]:
    """The report as plain lines, the answer first."""
    yield engine_headline(report)
    for cause in report.causes:
        yield f"  {cause.kind}: {cause.sentence}"
        yield from (f"    as well: {other}" for other in cause.also)
    yield from (f"  seen: {one}" for one in report.observed)
    yield from (f"  note: {one}" for one in report.notes)
    for row in report.failures:
        for finding in row.findings:
            if not finding.status.passes(strict=report.strict):
                yield from finding_lines(finding)


# --- The judgement of a kernel --------------------------------------------------------------------

FORMAT = 1


class CaseFamily(enum.StrEnum):
    """Why a case was made."""

    GIVEN = "given"
    MEMORY = "memory"
    VALUES = "values"
    SIZES = "sizes"
    LAYOUTS = "layouts"
    DTYPES = "dtypes"
    WEIGHTS = "weights"
    MODES = "modes"
    ALIASES = "aliases"
    NONFINITE = "nonfinite"
    ARGUMENTS = "arguments"
    CALLERS = "callers"
    LOADING = "loading"
    REGISTRATION = "registration"


class CaseEnd(enum.StrEnum):
    """How the candidate's call ended."""

    RETURNED = "returned"
    RAISED = "raised"
    CRASHED = "crashed"
    TIMED_OUT = "timed out"
    NOT_CALLED = "not called"


class KernelRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One case.

    Attributes:
        case: what is special about it, in words.
        family: why it was made.
        inputs: shapes and dtypes of the inputs, for people.
        status: the gravest status of its findings.
        ended: how the candidate's call ended.
        is_limit: what fails here does not fail the kernel: the task promises that it does not
            happen, or the caller has to know it, such as a result in memory that is used again.
        verdict: everything that was compared.
        seconds: the time of the candidate's call.
    """

    case: str
    family: CaseFamily
    inputs: str = ""
    status: Status
    ended: CaseEnd = CaseEnd.RETURNED
    is_limit: bool = False
    verdict: Verdict = Verdict()
    seconds: float = 0.0


class TrivialCandidate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A candidate that computes nothing, judged like any other.

    Attributes:
        name: `zeros`, `a constant`, `the input`, `the mean`, `the first case's output`.
        given: whether it passes all cases with the given inputs.
        passed: how many of all cases it passes.
        cases: in how many cases it could be tried.
        caught_by: the first case that refutes it; empty if none does.
    """

    name: str
    given: bool
    passed: int
    cases: int
    caught_by: str = ""

    @property
    def is_accepted(self) -> bool:
        """Whether no case refutes it."""
        return self.cases > 0 and self.passed == self.cases


class TaskRating(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the task itself is worth.

    Attributes:
        trivial: candidates that compute nothing.
        planted: number of planted faults; 0 if none were planted.
        caught: how many of them the given inputs show.
        note: why there are no planted faults.
    """

    trivial: tuple[TrivialCandidate, ...] = ()
    planted: int = 0
    caught: int = 0
    note: str = ""

    @property
    def accepts(self) -> tuple[str, ...]:
        """What passes on every case."""
        return tuple(one.name for one in self.trivial if one.is_accepted)

    @property
    def given_accepts(self) -> tuple[str, ...]:
        """What passes with the given inputs alone."""
        return tuple(one.name for one in self.trivial if one.given and one.cases)

    @property
    def power(self) -> float | None:
        """The share of planted faults that the given inputs show; None if none were planted."""
        return self.caught / self.planted if self.planted else None


class KernelTiming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of one call in seconds, measured in turn.

    Attributes:
        reference: median of the reference.
        candidate: median of the candidate.
        reference_spread: half the distance of the quartiles of the reference.
        candidate_spread: the same of the candidate.
        calls: number of calls of each.
        is_cold: whether caches were flushed before each call.
    """

    reference: float
    candidate: float
    reference_spread: float
    candidate_spread: float
    calls: int
    is_cold: bool

    @property
    def speedup(self) -> float:
        """How many times faster the candidate is."""
        return self.reference / self.candidate if self.candidate else float("inf")


class KernelReport(Report, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The judgement of one kernel. True in a boolean context only if it passed.

    Attributes:
        reference: as it was named.
        candidate: as it was named.
        rows: one for each case, in the order of the calls.
        refused: cases that the reference itself refuses; the candidate was not asked.
        rating: what the task is worth.
        timing: if it was requested.
        notes: what a reader should know.
        promises: what the task promises: `fixed shapes` ...
        script: a script that shows the smallest failing case, if one was written.
        smallest: the smallest failing case in words.
        seconds: the time of the judgement.
    """

    _called: ClassVar[str] = "the judgement of a kernel"

    reference: str
    candidate: str
    rows: tuple[KernelRow, ...] = ()
    refused: tuple[str, ...] = ()
    rating: TaskRating = TaskRating()
    timing: KernelTiming | None = None
    notes: tuple[str, ...] = ()
    promises: tuple[str, ...] = ()
    script: str = ""
    smallest: str = ""
    strict: bool = False
    seconds: float = 0.0
    format: int = FORMAT

    @property
    def verdict(self) -> Verdict:
        """The roll-up of all cases, each finding with its case; limits are left out."""
        findings: list[Finding] = []
        coverage = Coverage(skipped=self.refused)
        for row in self.rows:
            if row.is_limit:
                continue
            findings += [_in_case(finding, row) for finding in row.verdict.findings]
            coverage += row.verdict.coverage
        if self.rating.accepts:
            findings.append(_vacuous_finding(self.rating.accepts))
        return Verdict(
            findings=tuple(findings),
            coverage=coverage,
            notes=self.notes,
            strict=self.strict,
        )

    @property
    def status(self) -> Status:
        """The status of the verdict."""
        return self.verdict.status

    @property
    def failures(self) -> tuple[KernelRow, ...]:
        """The cases that fail, gravest first, otherwise in order."""
        bad = [
            row
            for row in self.rows
            if not row.is_limit and not row.status.passes(strict=self.strict)
        ]
        return tuple(sorted(bad, key=lambda row: -row.status.gravity))

    @property
    def limits(self) -> tuple[KernelRow, ...]:
        """The cases that fail without failing the kernel; see `KernelRow.is_limit`."""
        return tuple(row for row in self.rows if row.is_limit)

    def __str__(self) -> str:
        return kernel_headline(self)

    def _failure_text(self) -> str:
        lines = [kernel_headline(self)]
        for row in self.failures[:3]:
            worst = max(row.verdict.findings, key=lambda one: one.status.gravity, default=None)
            lines.append(f"{row.case}: {worst.reason if worst else row.status}")
        return "\n".join(lines)


def _in_case(finding: Finding, row: KernelRow) -> Finding:
    item = finding.item.in_graph(row.case)
    return msgspec.structs.replace(finding, item=item)


def _vacuous_finding(accepted: Iterable[str]) -> Finding:
    names = enumerated(list(accepted), 5)
    reason = f"this task accepts {names}, so a pass would mean nothing"
    return unverified(
        "task", reason, "give inputs for which the reference's output depends on them"
    )


def kernel_headline(report: KernelReport) -> str:
    """The verdict in one line."""
    verdict = report.verdict
    status = verdict.status
    cases = counted(len(report.rows) - len(report.limits), "case")
    if status is Status.UNVERIFIED and report.rating.accepts:
        return f"unverified: this task accepts {enumerated(list(report.rating.accepts), 5)}"
    words = f"{status.value}: {MEANING[status]}"
    if report.failures:
        count = len(report.failures)
        fail = "fails" if count == 1 else "fail"
        words += f"; {count} of {cases} {'not judged' if status is Status.UNVERIFIED else fail}"
    else:
        words += f"; {cases}"
    if report.limits:
        words += f", {counted(len(report.limits), 'limit')}"
    return words
