"""The comparison of two dumps: a row for each pair of values, and where they diverge.

Everything here is data. `paritas.comparison` fills it in, and puts it into words.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import msgspec

from paritas.core.results.details import Detail
from paritas.core.results.findings import (
    Aspect,
    Coverage,
    Finding,
    Origin,
    OriginKind,
    Score,
    Status,
    Verdict,
    finding_about,
    unverified,
)
from paritas.core.results.items import Item, ItemKind, PairFigures
from paritas.core.results.report import Report, json_of_each, spell_nonfinite

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FORMAT = 1

# How the two sides of a row were matched; "" if one of them is missing.
MatchedBy = Literal["id", "node", "module", "rename", "value", "order", ""]
# How an error was divided into an inherited and an added part.
Attributed = Literal["replayed", "estimated", ""]
# What begins to differ: values, NaNs and infinities, or both at once.
BeginningOf = Literal["values", "both", "non-finite"]
# Whether a failing row's difference was made there, or came in with its inputs.
Made = Literal["here", "before", ""]


class Basis(enum.StrEnum):
    """What the comparison of two values used."""

    UNKNOWN = ""
    VALUES = "values"
    SUMMARIES = "summaries"
    DIGESTS = "digests"


class SideFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One side of a row.

    Attributes:
        path: the file of the values, relative to the dump.
        id: canonical name in its own dump.
        op: the operator, as that dump calls it.
        dtype: torch's name without `torch.`; empty if not a tensor.
        value: a value other than a tensor, as text.
        step: the step as its own dump counts.
        ranks: the rank it is from, or the ranks it was assembled from.
        made_of: how it was assembled or rearranged, in words.
    """

    path: str = ""
    id: str = ""
    op: str = ""
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    value: str | None = None
    step: int = 0
    ranks: tuple[int, ...] = ()
    made_of: str = ""
    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None


class ComparisonRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One pair of values, or a value whose counterpart is missing.

    Attributes:
        index: its position in the table, which is in program order.
        step: the step, or token, as the golden side counts.
        rank: None if it was assembled from several.
        name: canonical name on the golden side, else on my side.
        call: the same for all inputs and outputs of one call.
        level: what is named: module, op, node, buffer, parameter, tensor.
        phase: forward or backward.
        side: input or output.
        position: which input or output.
        nodes: the graph nodes it represents, if several were fused.
        aspect: what about it decided.
        judged_by: the yardstick, in words: bits, float64 replay, noise of a dtype, a rule ...
        basis: what was compared: the values, or what was kept of them.
        nonfinite: of summaries: only one side has NaN or infinities.
        limits: what this row cannot show, in words.
        own: the error added here, relative to the golden side's norm.
        inherited: the error that came in with the inputs, in the same unit.
        made: for a failing row, whether its difference was made here.
        sources: rows (by index) of the values this one was computed from.
    """

    index: int
    step: int
    name: str
    status: Status
    rank: int | None = 0
    call: str = ""
    level: str = "tensor"
    phase: str = "forward"
    side: str = "output"
    position: str = "0"
    op: str = ""
    module: str = ""
    line: str = ""
    code: str = ""
    graph: str = ""
    kernel: str = ""
    nodes: tuple[str, ...] = ()
    matched_by: MatchedBy = ""
    my: SideFacts | None = None
    golden: SideFacts | None = None
    aspect: Aspect = Aspect.VALUE
    reason: str = ""
    advice: str = ""
    judged_by: str = ""
    basis: Basis = Basis.UNKNOWN
    nonfinite: bool = False
    limits: str = ""
    figures: PairFigures | None = None
    score: Score | None = None
    own: float | None = None
    inherited: float | None = None
    attributed: Attributed = ""
    made: Made = ""
    sources: tuple[int, ...] = ()
    detail: Detail | None = None

    def __str__(self) -> str:
        return str(finding_of(self))

    @property
    def is_of_summaries(self) -> bool:
        """Whether only statistics or sketches were compared."""
        return self.basis is Basis.SUMMARIES

    @property
    def is_by_digest(self) -> bool:
        """Whether only digests were compared; `judged_by` says why."""
        return self.basis is Basis.DIGESTS

    @property
    def rel_l2(self) -> float | None:
        """Norm of the difference over the norm of the golden side; None if unknown."""
        return None if self.figures is None else self.figures.rel_l2


class Divergence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the two begin to differ.

    Attributes:
        kind: "made": this call made the difference; its inputs are right. "given": the program's
            inputs already differ. "unclear": the first failing row; it is unknown whether it made
            the difference, and `reason` says why. "unmatched": the same, because values before it
            have no certain counterpart.
        row: the index of that row.
    """

    kind: Literal["made", "given", "unclear", "unmatched"]
    row: int
    reason: str = ""


class DumpFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the two dumps.

    Attributes:
        problems: what is damaged, missing or doubtful.
        losses: what the dump lacks of the compared steps and ranks; with one, nothing passes.
    """

    path: str
    kind: str
    records: int = 0
    ranks: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    program: str = ""
    torch: str = ""
    sources: tuple[str, ...] = ()
    fusion: str = ""
    problems: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()


class Comparison(Report, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two dumps, compared. True in a boolean context only if every row passes.

    Attributes:
        rows: in the order of the program; nothing is left out.
        first: where values begin to differ.
        first_non_finite: the first NaN or infinity that only one side has.
        coverage: how much was compared, what was skipped, what has no counterpart.
        nbytes: bytes of values compared, of both sides.
    """

    _called: ClassVar[str] = "a comparison"
    _summary: ClassVar[str] = "paritas.comparison.page:notebook_summary"

    my: DumpFacts
    golden: DumpFacts
    rows: tuple[ComparisonRow, ...] = ()
    coverage: Coverage = Coverage()
    notes: tuple[str, ...] = ()
    first: Divergence | None = None
    first_non_finite: Divergence | None = None
    strict: bool = False
    created: str = ""
    paritas: str = ""
    torch: str = ""
    seconds: float = 0.0
    nbytes: int = 0
    format: int = FORMAT

    @property
    def verdict(self) -> Verdict:
        """All rows as findings, then a finding for each thing that a dump lacks."""
        return Verdict(
            findings=(*_findings_by_cause(self.rows), *losses_of(self)),
            coverage=self.coverage,
            notes=self.notes,
            strict=self.strict,
        )

    @property
    def status(self) -> Status:
        """The gravest status of all rows; nothing compared, or a loss, is `unverified`."""
        statuses = {row.status for row in self.rows}
        if self.coverage.compared == 0 or not statuses or self.my.losses or self.golden.losses:
            statuses.add(Status.UNVERIFIED)
        return max(statuses, key=lambda status: status.gravity)

    @property
    def exit_code(self) -> int:
        """0 pass, 1 different or degraded (or unstable under strict), 3 unverified."""
        return self.status.exit_code(strict=self.strict)

    @property
    def of_summaries(self) -> int:
        """Number of rows compared by statistics or sketches instead of values."""
        return sum(row.is_of_summaries for row in self.rows)

    @property
    def by_digest(self) -> int:
        """Number of rows compared by digests instead of values."""
        return sum(row.is_by_digest for row in self.rows)

    def to_json(self) -> bytes:
        """Encode as JSON; `from_json` returns an equal comparison."""
        rest: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(self, rows=()))
        # Row by row: as plain objects, all rows at once take ten times the memory of their text.
        return msgspec.json.encode(spell_nonfinite(rest) | {"rows": json_of_each(self.rows)})


class Beginning(NamedTuple):
    """Where the two begin to differ, with the row and its position in the table."""

    of: BeginningOf
    divergence: Divergence
    row: ComparisonRow
    place: int


def beginnings(comparison: Comparison) -> list[Beginning]:
    """The first divergence and the first NaN or infinity, which may be the same row."""
    first, bad = comparison.first, comparison.first_non_finite
    divergences: dict[BeginningOf, Divergence | None] = {"values": first, "non-finite": bad}
    if first is not None and bad is not None and first.row == bad.row:
        divergences = {"both": first}
    return [
        Beginning(of, divergence, row, row_position)
        for of, divergence in divergences.items()
        if divergence is not None
        for row_position, row in enumerate(comparison.rows)
        if row.index == divergence.row
    ]


def finding_of(row: ComparisonRow) -> Finding:
    """A row as a finding."""
    shown = row.my or row.golden
    return finding_about(
        Item(ItemKind.RECORDED, row_path(row)),
        row.aspect,
        row.status,
        row.reason,
        row.advice,
        dtype=shown.dtype or None if shown else None,
        shape=shown.shape if shown else None,
        metrics=row.figures.metrics if row.figures else None,
        native=row.score,
        source=row.line or None,
        origin=_origin_of_row(row) if row.made == "here" else None,
        diagnosis=row.detail.diagnosis if row.detail else None,
    )


def _findings_by_cause(rows: Iterable[ComparisonRow]) -> Iterator[Finding]:
    """The rows as findings; one that inherits its error names the row that made it, if known."""
    makers: dict[int, str] = {}  # the row that made the error of each row
    for row in rows:  # in program order: the sources of a row come before it
        finding = finding_of(row)
        if row.made == "here":
            makers[row.index] = finding.path
        elif row.made == "before":
            maker = next((makers[source] for source in row.sources if source in makers), "")
            if maker:
                makers[row.index] = maker
                finding = msgspec.structs.replace(finding, cause=maker)
        yield finding


def losses_of(comparison: Comparison) -> tuple[Finding, ...]:
    """What the dumps lack, as findings: what is lost on both sides was not compared."""
    return tuple(
        unverified(
            Item(ItemKind.HARNESS, whose),
            f"it is incomplete: {loss}",
            "copy or record it again, or select what is complete with --ranks and --steps",
        )
        for whose, dump in (("my dump", comparison.my), ("the golden dump", comparison.golden))
        for loss in dump.losses
    )


def row_path(row: ComparisonRow) -> str:
    """The name of a row that is unique in its table."""
    rank = "" if row.rank in (None, 0) else f", rank {row.rank}"
    return f"{row.name} (step {row.step}{rank})"


def _origin_of_row(row: ComparisonRow) -> Origin:
    fused = len(row.nodes) > 1
    return Origin(
        kind=OriginKind.FUSION if fused else OriginKind.NODE,
        name=row.kernel if fused and row.kernel else row.name,
        operator=row.op,
        module=row.module,
        source=row.line,
        code=row.code,
        nodes=row.nodes if fused else (),
    )
