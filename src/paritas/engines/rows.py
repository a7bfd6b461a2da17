"""What a serving engine returned: a row for each request, and what explains those that fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec

from paritas.core.results.findings import Coverage, Finding, Status, Verdict
from paritas.core.results.report import Report
from paritas.core.results.wording import count_things, finding_lines, status_counts

if TYPE_CHECKING:
    from collections.abc import Iterator


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
            explained = f"explains {count_things(len(self.requests), 'request')} to rounding{more}"
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
        statuses = [finding.status for finding in self.findings] or [Status.UNVERIFIED]
        return max(statuses, key=lambda status: status.gravity)


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
    _summary: ClassVar[str] = "paritas.engines.report:notebook_summary"

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
        findings = tuple(finding for row in self.rows for finding in row.findings)
        return Verdict(
            findings=findings,
            coverage=Coverage(compared=len(findings)),
            notes=self.notes,
            strict=self.strict,
        )

    @property
    def headline(self) -> str:
        """The report in one line."""
        failing, status = self.failures, self.verdict.status
        total = count_things(len(self.rows), "request")
        if not failing:
            same = "are" if len(self.rows) > 1 else "is"
            return f"{status.value}: {total} {same} the reference's up to rounding"
        words = ", ".join(status_counts(row.status for row in failing))
        cause = f": {self.causes[0].sentence}" if self.causes else ""
        if not cause and self.tried:
            cause = f": none of {count_things(self.tried, 'changed run')} gives this"
        return f"{status.value}: {len(failing)} of {total} ({words}){cause}"

    def __str__(self) -> str:
        return "\n".join(engine_lines(self))


def engine_lines(report: EngineReport) -> Iterator[str]:
    """The report as plain lines, the answer first."""
    yield report.headline
    for cause in report.causes:
        yield f"  {cause.kind}: {cause.sentence}"
        yield from (f"    as well: {other}" for other in cause.also)
    yield from (f"  seen: {observation}" for observation in report.observed)
    yield from (f"  note: {note}" for note in report.notes)
    for row in report.failures:
        for finding in row.findings:
            if not finding.status.passes(strict=report.strict):
                yield from finding_lines(finding)
