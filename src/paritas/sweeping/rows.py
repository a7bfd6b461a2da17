"""The result of a sweep: one row for each run, and what changed since an earlier sweep."""

from __future__ import annotations

import enum
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

import msgspec

from paritas.core.results.findings import Finding, Status, Verdict, unverified
from paritas.core.results.report import Report, Result
from paritas.core.results.wording import MEANING, count_things, deciding_excess, status_counts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

# How many findings of a run are kept: failing ones, and the passing ones nearest to failing.
MOST_FAILING, MOST_PASSING = 50, 5
# A run is newly slow if it took this factor of the earlier processor time, and this many seconds
# more. Less is within the machine's own variation.
SLOWER, SLOWER_SECONDS = 1.5, 10.0
# Of `sweep.json`; raised when a key changes its meaning or goes.
FORMAT = 1
# Why a sweep ended before its last run.
INTERRUPT, CLUSTER_LOST = "interrupt", "cluster lost"


# --- One run and its row --------------------------------------------------------------------------


class KernelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a kernel is judged in a sweep: `paritas.KernelOptions`, as far as a target file has them.

    Attributes:
        cases: how many cases are made.
        seed: of everything that is drawn.
        fixed: what the task promises.
        forbid: operators that the candidate must not call.
        gradients: compare gradients too.
        fresh_outputs: a result in memory that a later call uses again is a failure.
    """

    cases: int = 40
    seed: int = 0
    fixed: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    gradients: bool = False
    fresh_outputs: bool = False

    @property
    def words(self) -> str:
        """Everything that is not usual."""
        usual = KernelSettings()
        setting_words = [f"{self.cases} cases"] if self.cases != usual.cases else []
        setting_words += [f"seed {self.seed}"] if self.seed else []
        setting_words += ["gradients"] if self.gradients else []
        setting_words += ["fresh outputs"] if self.fresh_outputs else []
        setting_words += [f"fixed {name}" for name in self.fixed]
        setting_words += [f"no {name}" for name in self.forbid]
        return " ".join(["kernel", *setting_words])


class SweepRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One target under one setting; two sweeps are compared by it.

    Attributes:
        target: what was checked, as it was given.
        dtype: the dtype of parameters and inputs; empty for the model's own.
        device: where it ran.
        mode: `eval`, `train`, or one of them without gradients: `eval-forward`, `train-forward`.
        candidate: what the target was compared with.
        inputs: the function that makes the inputs; empty for the target's own.
        kernel: the candidate is a kernel, and the target its reference; None for models.
    """

    target: str
    dtype: str = ""
    device: str = "cpu"
    mode: str = "eval"
    candidate: str = "inductor"
    inputs: str = ""
    kernel: KernelSettings | None = None

    @property
    def settings(self) -> tuple[str, ...]:
        """Everything except the target, in words."""
        if self.kernel is not None:
            words = self.device, self.kernel.words, self.candidate, self.inputs
            return tuple(filter(None, words))
        dtype_text = self.dtype or "own dtype"
        return tuple(
            filter(None, (dtype_text, self.device, self.mode, self.candidate, self.inputs))
        )

    def __str__(self) -> str:
        return f"{self.target} ({', '.join(self.settings)})"


class RunEnd(enum.StrEnum):
    """How the process of a run ended."""

    VERDICT = "verdict"
    RAISED = "raised"
    CRASHED = "crashed"
    TIMED_OUT = "timed out"
    OUT_OF_MEMORY = "out of memory"


class SweepRow(Result, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of one run.

    Attributes:
        run: what was run.
        ended: how the process ended; anything except `verdict` is `unverified`.
        verdict: with the failing findings, and a few of the others.
        status: that of the verdict.
        counts: number of findings per status.
        began: when, in UTC.
        seconds: from the start of its process to the end.
        processor_seconds: processor time of it and of the compilers it called.
        memory: peak memory in bytes of it and of the compilers it called.
        versions: versions of torch, Python, the platform and other libraries used.
        log: the end of its output; empty if there is a verdict.
    """

    _called: ClassVar[str] = "a row of a sweep"
    _summary: ClassVar[str] = "paritas.sweeping.report:row_summary"

    run: SweepRun
    ended: RunEnd
    verdict: Verdict
    status: Status = Status.UNVERIFIED
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    began: str = ""
    seconds: float = 0.0
    processor_seconds: float = 0.0
    memory: int = 0
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    log: str = ""

    def __post_init__(self) -> None:
        # Stored for readers of the JSON, who cannot derive it; never believed.
        msgspec.structs.force_setattr(self, "status", self.verdict.status)

    def passes(self, *, strict: bool = False) -> bool:
        """Whether the candidate computes what the target computes."""
        return self.verdict.enabled and self.status.passes(strict=strict)

    @property
    def worst(self) -> Finding | None:
        """The gravest finding; None if there are no findings."""
        return self.verdict.worst


def without_verdict(reason: str, advice: str = "") -> Verdict:
    """The verdict of a run that did not return one."""
    return Verdict(findings=(unverified("run", reason, advice),))


def trim_verdict(verdict: Verdict) -> tuple[Verdict, dict[str, int]]:
    """The verdict with the most relevant findings, and the counts of all.

    A large model has thousands of findings that pass. At least one of each status stays, so
    the status of the verdict stays the same.
    """
    counts = Counter(finding.status for finding in verdict.findings)
    kept_positions: set[int] = set()
    for status in counts:
        status_positions = [
            position
            for position, finding in enumerate(verdict.findings)
            if finding.status is status
        ]
        if status.passes():
            status_positions.sort(key=lambda position: -deciding_excess(verdict.findings[position]))
        kept_positions.update(
            status_positions[: MOST_FAILING if not status.passes(strict=True) else MOST_PASSING]
        )
    findings = tuple(
        finding for position, finding in enumerate(verdict.findings) if position in kept_positions
    )
    small = msgspec.structs.replace(verdict, findings=findings)
    return small, {status.value: count for status, count in counts.items()}


# --- What changed since an earlier sweep ----------------------------------------------------------


class ChangeKind(enum.StrEnum):
    """How a row compares with the earlier one, the most important first."""

    DIFFERENT = "newly different"
    UNVERIFIED = "newly unverified"
    FIXED = "newly fixed"
    SLOW = "newly slow"
    NEW = "new"
    GONE = "gone"


class RowChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row that changed.

    Attributes:
        run: the run, in both sweeps.
        kind: what changed.
        before: its status in the earlier sweep; None for a new row.
        now: its status; None for a row that is gone.
        seconds_before: its processor time in the earlier sweep, if it is newly slow.
        seconds_now: its processor time.
        fails: whether it is newly wrong, and counts for the exit code.
    """

    run: SweepRun
    kind: ChangeKind
    before: Status | None = None
    now: Status | None = None
    seconds_before: float = 0.0
    seconds_now: float = 0.0
    fails: bool = False


def changes(
    rows: Sequence[SweepRow], earlier: Sequence[SweepRow], *, strict: bool, whole: bool = True
) -> tuple[RowChange, ...]:
    """What changed, by kind; a row may be both newly different and newly slow.

    Args:
        strict: whether `unstable` counts as a failure.
        whole: whether this sweep is finished; otherwise no row is reported as gone.
    """
    before = {row.run: row for row in earlier}
    row_changes = [
        row_change
        for row in rows
        for row_change in _row_changes(row, before.get(row.run), strict=strict)
    ]
    if whole:
        now = {row.run for row in rows}
        gone = [row for row in earlier if row.run not in now]
        row_changes += [
            RowChange(run=row.run, kind=ChangeKind.GONE, before=row.status) for row in gone
        ]
    order = list(ChangeKind)
    return tuple(sorted(row_changes, key=lambda row_change: order.index(row_change.kind)))


def _row_changes(row: SweepRow, before: SweepRow | None, *, strict: bool) -> Iterator[RowChange]:
    passes = row.passes(strict=strict)
    if before is None:
        yield RowChange(run=row.run, kind=ChangeKind.NEW, now=row.status, fails=not passes)
        return
    change = RowChange(run=row.run, kind=ChangeKind.DIFFERENT, before=before.status, now=row.status)
    passed = before.passes(strict=strict)
    if not passes and (passed or row.status.gravity > before.status.gravity):
        unknown = row.status is Status.UNVERIFIED
        kind = ChangeKind.UNVERIFIED if unknown else ChangeKind.DIFFERENT
        yield msgspec.structs.replace(change, kind=kind, fails=True)
    elif passes and not passed:
        yield msgspec.structs.replace(change, kind=ChangeKind.FIXED)
    took, taken = row.processor_seconds, before.processor_seconds
    compared = row.ended is before.ended is RunEnd.VERDICT
    if compared and took > SLOWER * taken and took - taken > SLOWER_SECONDS:
        slow = {"kind": ChangeKind.SLOW, "seconds_before": taken, "seconds_now": took}
        yield msgspec.structs.replace(change, **slow)


# --- The sweep ------------------------------------------------------------------------------------


class SweepReport(Report, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All rows of a sweep; true in a boolean context only if all pass.

    Attributes:
        rows: in the order of the targets.
        planned: number of planned runs.
        strict: whether `unstable` counts as a failure.
        stopped: empty, or why rows are missing: `interrupt`, `cluster lost`.
        began: start in UTC; for a resumed sweep, when it was resumed.
        seconds: duration; for a resumed sweep, since it was resumed.
        versions: versions of torch, Python, the platform and other libraries used.
        against: the earlier sweep it is compared with; may be empty.
        changes: the rows that changed since then.
        notes: what else a reader should know.
        format: of the JSON.
    """

    _called: ClassVar[str] = "the report of a sweep"
    _summary: ClassVar[str] = "paritas.sweeping.report:notebook_summary"

    format: int = FORMAT
    rows: tuple[SweepRow, ...] = ()
    planned: int = 0
    strict: bool = False
    stopped: str = ""
    began: str = ""
    seconds: float = 0.0
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    against: str = ""
    changes: tuple[RowChange, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[SweepRow, ...]:
        """Every row that does not pass, gravest first, otherwise in the order of the targets."""
        bad = [row for row in self.rows if not row.passes(strict=self.strict)]
        return tuple(sorted(bad, key=lambda row: -row.status.gravity))

    @property
    def newly_wrong(self) -> tuple[RowChange, ...]:
        """The changes that count for the exit code of a sweep against an earlier one."""
        return tuple(change for change in self.changes if change.fails)

    @property
    def status(self) -> Status:
        """The gravest status of all rows; missing rows are `unverified`."""
        statuses = [row.status for row in self.rows]
        if len(self.rows) < max(self.planned, 1):
            statuses.append(Status.UNVERIFIED)
        return max(statuses, key=lambda status: status.gravity)

    @property
    def verdict(self) -> Verdict:
        """The findings of all rows, each labelled with its run."""
        parts = [_label_findings(row) for row in self.rows]
        if len(self.rows) < max(self.planned, 1):
            missing = max(self.planned, 1) - len(self.rows)
            parts.append(
                without_verdict(f"{count_things(missing, 'run')} of the sweep did not run")
            )
        merged = Verdict.merge(parts)
        return msgspec.structs.replace(merged, strict=self.strict)

    @property
    def exit_code(self) -> int:
        """As for every report; against an earlier sweep, only what is newly wrong counts."""
        if not self.against or len(self.rows) < self.planned:
            return self.status.exit_code(strict=self.strict)
        codes = {
            change.now.exit_code(strict=self.strict) for change in self.newly_wrong if change.now
        }
        return 1 if 1 in codes else max(codes, default=0)

    @property
    def headline(self) -> str:
        """The sweep in one line."""
        rows, failing = len(self.rows), self.failures
        done = count_things(rows, "run")
        if self.stopped:
            how = "interrupted" if self.stopped == INTERRUPT else f"stopped ({self.stopped})"
            done = f"{how} after {rows} of {count_things(self.planned, 'run')}"
        if not rows:
            return f"unverified: {done}; nothing was compared"
        if self.against and not self.stopped:
            return f"{_changes_headline(self)}; {done}, {len(failing)} failing"
        if not failing:
            unsure = sum(row.status is Status.UNSTABLE for row in self.rows)
            warning = f", {unsure} of them unstable (a warning, not a failure)" if unsure else ""
            word = self.status.value
            same = "unverified" if self.stopped else word
            return f"{same}: {done}; all pass{warning}"
        words = status_counts(row.status for row in failing)
        return f"{self.status.value}: {done}; {len(failing)} of {rows} fail ({', '.join(words)})"

    def __str__(self) -> str:
        return "\n".join(sweep_lines(self))


def _label_findings(row: SweepRow) -> Verdict:
    run_name = str(row.run)
    findings = [
        msgspec.structs.replace(finding, item=finding.item.in_graph(run_name))
        for finding in row.verdict.findings
    ]
    return msgspec.structs.replace(row.verdict, findings=tuple(findings))


# --- The data in plain words ----------------------------------------------------------------------


def sweep_lines(report: SweepReport) -> list[str]:
    """The headline, then the failing runs, then the changes."""
    lines = [report.headline]
    lines += [f"  {row.run}: {row.status.value}; {row_words(row)}" for row in report.failures]
    lines += [
        f"  {change.kind.value}: {change.run}{change_words(change)}" for change in report.changes
    ]
    return lines


def _changes_headline(report: SweepReport) -> str:
    counts = Counter(change.kind for change in report.changes)
    words = [f"{counts[kind]} {kind.value}" for kind in ChangeKind if counts[kind]]
    wrong = [change.now for change in report.newly_wrong if change.now is not None]
    if not wrong:
        return f"no run is newly wrong ({', '.join(words) or 'nothing changed'})"
    gravest = max(wrong, key=lambda status: status.gravity)
    return f"{gravest.value}: {count_things(len(wrong), 'run')} newly wrong ({', '.join(words)})"


def row_words(row: SweepRow) -> str:
    """A row in one line."""
    worst = row.worst
    if worst is None:
        return "nothing was compared"
    if worst.status is Status.UNVERIFIED and worst.reason:
        return worst.reason
    if worst.status.passes():
        return MEANING[worst.status]
    grave = row.counts.get(worst.status.value, 1)
    more = f" and {count_things(grave - 1, 'other item')}" if grave > 1 else ""
    reason_text = f": {worst.reason}" if worst.reason else ""
    return f"{worst.path}{more}{reason_text}"


def change_words(change: RowChange) -> str:
    """The change, shown after the name of the run."""
    if change.kind is ChangeKind.SLOW:
        return f": {change.seconds_now:.0f} s of processor time, {change.seconds_before:.0f} before"
    words = [status.value for status in (change.before, change.now) if status is not None]
    return f": {' -> '.join(words)}"


def columns(rows: Iterable[SweepRow]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The settings that all runs share, and all settings of each column of the matrix."""
    settings = list(dict.fromkeys(row.run.settings for row in rows))
    if not settings:
        return (), []
    common = tuple(
        setting for setting in settings[0] if all(setting in other for other in settings)
    )
    return common, settings


def column_name(settings: tuple[str, ...], common: tuple[str, ...]) -> str:
    """The name of a column, without the settings that all columns share."""
    return ", ".join(setting for setting in settings if setting not in common) or "verdict"
