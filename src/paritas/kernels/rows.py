"""The judgement of a kernel: a row for each case, what the task is worth, and the timing."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from paritas.core.results.findings import Coverage, Finding, Status, Verdict, unverified
from paritas.core.results.report import Report
from paritas.core.results.wording import MEANING, count_things, list_first

if TYPE_CHECKING:
    from collections.abc import Iterable

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

    @classmethod
    def of(cls, verdict: Verdict, **about: Any) -> KernelRow:
        """The row of a case with this verdict."""
        return cls(status=verdict.status, verdict=verdict, **about)


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
        return tuple(
            trivial_candidate.name
            for trivial_candidate in self.trivial
            if trivial_candidate.is_accepted
        )

    @property
    def given_accepts(self) -> tuple[str, ...]:
        """What passes with the given inputs alone."""
        return tuple(
            trivial_candidate.name
            for trivial_candidate in self.trivial
            if trivial_candidate.given and trivial_candidate.cases
        )

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
    _summary: ClassVar[str] = "paritas.kernels.report:notebook_summary"

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

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        verdict = self.verdict
        status = verdict.status
        cases = count_things(len(self.rows) - len(self.limits), "case")
        if status is Status.UNVERIFIED and self.rating.accepts:
            return f"unverified: this task accepts {list_first(list(self.rating.accepts), 5)}"
        words = f"{status.value}: {MEANING[status]}"
        if self.failures:
            count = len(self.failures)
            fail = "fails" if count == 1 else "fail"
            words += f"; {count} of {cases} {'not judged' if status is Status.UNVERIFIED else fail}"
        else:
            words += f"; {cases}"
        if self.limits:
            words += f", {count_things(len(self.limits), 'limit')}"
        return words

    def __str__(self) -> str:
        return self.headline

    def _failure_text(self) -> str:
        lines = [self.headline]
        for row in self.failures[:3]:
            worst = row.verdict.worst
            lines.append(f"{row.case}: {worst.reason if worst else row.status}")
        return "\n".join(lines)


def _in_case(finding: Finding, row: KernelRow) -> Finding:
    item = finding.item.in_graph(row.case)
    return msgspec.structs.replace(finding, item=item)


def _vacuous_finding(accepted: Iterable[str]) -> Finding:
    names = list_first(list(accepted), 5)
    reason = f"this task accepts {names}, so a pass would mean nothing"
    return unverified(
        "task", reason, "give inputs for which the reference's output depends on them"
    )
