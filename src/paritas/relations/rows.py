"""The relations of one model: a row for each, and their roll-up."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

from paritas.core.results.findings import Coverage, Status, Verdict
from paritas.core.results.report import Report
from paritas.core.results.wording import count_things, finding_lines, status_counts

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        more = f" and {count_things(len(failing) - 1, 'other case')}" if len(failing) > 1 else ""
        first = next((row for row in failing if row.origin is not None), failing[0])
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
    _summary: ClassVar[str] = "paritas.relations.report:notebook_summary"

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

    @property
    def headline(self) -> str:
        """The report in one line."""
        checked, failing = self.checked, self.failures
        if not checked:
            return "unverified: no relation applies to this model, so nothing was compared"
        unchecked_count = len(self.rows) - len(checked)
        others = f"; {unchecked_count} not promised or not applicable" if unchecked_count else ""
        if failing:
            words = status_counts(row.verdict.status for row in failing)
            status = failing[0].verdict.status.value
            verb = "fails" if len(failing) == 1 else "fail"
            of = f"{len(failing)} of {len(checked)} relations"
            linked = sum(bool(row.linked) for row in failing)
            if linked:
                words.append(f"{linked} at a place where another fails, too")
            return f"{status}: {of} {verb} ({', '.join(words)}){others}"
        gravest = max((row.verdict.status for row in checked), key=lambda row: row.gravity)
        warning = " (unstable is a warning, not a failure)" if gravest is Status.UNSTABLE else ""
        verb = "holds" if len(checked) == 1 else "hold"
        return f"{gravest.value}: {count_things(len(checked), 'relation')} {verb}{warning}{others}"

    def __str__(self) -> str:
        return "\n".join(invariants_lines(self))


def invariants_lines(report: InvariantsReport) -> Iterator[str]:
    """The report as plain lines, the answer first."""
    yield report.headline
    for row in report.rows:
        yield f"  {row.relation}: {row.word}; {row.summary}"
    for row in report.failures:
        for finding in row.verdict.failures:
            yield from finding_lines(finding)
