"""The report of a guarded run, of one process or of several ranks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Self

import click
import msgspec

from paritas.core.commands.options import (
    OutputFormat,
    subject_source,
    with_shrink_command,
    write_json,
)
from paritas.core.commands.ranks import HURRIED_SECONDS, WAIT_SECONDS, Meeting, Ranks
from paritas.core.compiled.guard_settings import NOTHING_COMPILED
from paritas.core.errors import UsageError
from paritas.core.results.findings import Coverage, Verdict, unverified
from paritas.core.results.report import Report
from paritas.core.results.wording import headline

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping
    from pathlib import Path

    from paritas.core.commands.scripts import Ending, ScriptProgram, StopSignals
    from paritas.core.compiled.guarded_calls import GuardJournal


class GraphCounts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One compiled graph; see `paritas.core.compiled.guarded_calls.GraphEntry`."""

    label: str
    source: str
    calls: int
    checked: int
    failed: int
    compared: int
    unguarded: str


class RankReport(Report, frozen=True):
    """The graphs and the verdict of one process."""

    _called: ClassVar[str] = "the report of a rank"

    graphs: tuple[GraphCounts, ...]
    verdict: Verdict

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        """Decode; unreadable data becomes a report that says so."""
        try:
            return super().from_json(data)
        except UsageError as error:
            reason = f"its report cannot be read: {error}"
            return cls((), Verdict(findings=(unverified("report", reason),)))


def merge_ranks(ranks: Ranks, reports: Mapping[int, RankReport]) -> RankReport:
    """One report for all ranks of this machine; a missing report is unverified."""
    graphs: list[GraphCounts] = []
    verdicts = []
    for rank in ranks.here:
        label = f"rank {rank}"
        if rank in reports:
            graphs += [
                msgspec.structs.replace(graph, label=f"{label}: {graph.label}")
                for graph in reports[rank].graphs
            ]
            verdicts.append(_label_verdict(reports[rank].verdict, rank))
        else:
            reason = "it sent no report in time: it was killed, or is still running"
            verdicts.append(Verdict(findings=(unverified(label, reason),)))
    verdict = Verdict.merge(verdicts)
    here = ranks.here
    if len(here) < ranks.world:
        which = f"rank {here[0]}" if len(here) == 1 else f"ranks {here[0]} to {here[-1]}"
        note = (
            f"this report covers {which} of {ranks.world}, those on this machine; the first rank "
            "of each other machine reports for its own"
        )
        verdict = msgspec.structs.replace(verdict, notes=(note, *verdict.notes))
    return RankReport(tuple(graphs), verdict)


def _label_verdict(verdict: Verdict, rank: int) -> Verdict:
    def label_ranks(items: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"rank {rank}: {item}" for item in items)

    coverage = verdict.coverage
    # `merge` adds a finding if nothing was compared; it gets the label too.
    merged = Verdict.merge([verdict])
    return msgspec.structs.replace(
        merged,
        findings=tuple(
            msgspec.structs.replace(finding, item=msgspec.structs.replace(finding.item, rank=rank))
            for finding in merged.findings
        ),
        coverage=Coverage(
            compared=coverage.compared,
            skipped=label_ranks(coverage.skipped),
            unmatched=label_ranks(coverage.unmatched),
        ),
        notes=label_ranks(verdict.notes),
    )


# --- The end of a run -----------------------------------------------------------------------------

UNREACHED = "the rest of the script was not checked"
NOTHING_BEFORE = "nothing was compiled before that"
NO_GRAPH = "nothing was compiled: torch.compile found no graph to capture"
NOTHING_ADVICE = (
    "only the script's own process is checked, not processes that it starts; and torch.compile has "
    "no effect if it is disabled (TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE, set_stance)"
)


@dataclasses.dataclass(frozen=True)
class GuardedRun:
    """A guarded run and its result.

    Attributes:
        journal: of the guards; None if nothing was compiled.
        failure: why it could not be guarded.
    """

    program: ScriptProgram
    ending: Ending
    journal: GuardJournal | None
    failure: Exception | None
    strict: bool


@dataclasses.dataclass(frozen=True)
class OutputFiles:
    """The files of `--json` and `--format`."""

    json_path: Path | None = None
    form: OutputFormat = dataclasses.field(default_factory=OutputFormat)

    def of_rank(self, rank: int) -> OutputFiles:
        """Files of its own for the first rank of another machine: the file system may be shared."""
        if rank == 0:
            return self

        def own(path: Path | None) -> Path | None:
            return None if path is None else path.with_stem(f"{path.stem}.rank{rank}")

        form = dataclasses.replace(self.form, file=own(self.form.file))
        return OutputFiles(own(self.json_path), form)


def report_run(
    course: GuardedRun, meeting: Meeting | None, files: OutputFiles, signals: StopSignals
) -> int:
    """Report what the guards found, and return the exit code."""
    ending = course.ending
    report = report_on(course)
    if meeting is None:
        _print_report(_note_rank(report), course.program, files)
    elif meeting.ranks.merges:
        report = _merge_reports(report, ending, meeting, signals.hurried)
        _print_report(report, course.program, files.of_rank(meeting.ranks.rank))
    else:
        _hand_in(report, course, meeting, signals.hurried)
    if meeting is not None:
        # When the other ranks end, torchrun sends SIGTERM to this one, which is ending anyway.
        if not ending.is_replaced:
            signals.ignore_termination()
        if meeting.ranks.merges:
            meeting.close()
    return ending.code if ending.by_signal else report.verdict.exit_code


def report_on(course: GuardedRun) -> RankReport:
    """The report of this process, including how the script ended."""
    verdict = Verdict(strict=course.strict)
    graphs: tuple[GraphCounts, ...] = ()
    if course.journal is not None:
        verdict = course.journal.verdict()
        graphs = tuple(
            msgspec.convert(entry, GraphCounts, from_attributes=True)
            for entry in course.journal.graphs
        )
    findings = list(verdict.findings)
    path = f"script {course.program.target}"
    if course.failure is not None:
        findings.append(unverified(path, f"it could not be guarded: {course.failure}"))
    if course.ending.words:
        missed = UNREACHED if graphs else NOTHING_BEFORE
        findings.append(unverified(path, f"it {course.ending.words}; {missed}"))
    elif course.journal is None and course.failure is None:
        findings.append(unverified(path, NOTHING_COMPILED, NOTHING_ADVICE))
    elif not graphs and course.failure is None:
        findings.append(unverified(path, NO_GRAPH))
    return RankReport(graphs, msgspec.structs.replace(verdict, findings=tuple(findings)))


def _note_rank(report: RankReport) -> RankReport:
    """Note that this is one of several ranks that could not be merged."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return report
    note = (
        f"this report covers only rank {dist.get_rank()} of {dist.get_world_size()}: RANK and "
        "WORLD_SIZE are not set; start the ranks with torchrun for one report on all"
    )
    verdict = report.verdict
    noted = msgspec.structs.replace(verdict, notes=(note, *verdict.notes))
    return msgspec.structs.replace(report, verdict=noted)


def _merge_reports(
    report: RankReport, ending: Ending, meeting: Meeting, hurried: threading.Event
) -> RankReport:
    seconds = HURRIED_SECONDS if ending.by_signal else WAIT_SECONDS
    handed_in = meeting.collect(seconds, hurried)
    reports = {rank: RankReport.from_json(data) for rank, data in handed_in.items()}
    return merge_ranks(meeting.ranks, {**reports, meeting.ranks.rank: report})


def _hand_in(
    report: RankReport, course: GuardedRun, meeting: Meeting, hurried: threading.Event
) -> None:
    """Send the report to the merging rank; print it here if that fails."""
    rank = meeting.ranks.rank
    click.echo(f"rank {rank}: {headline(report.verdict)}", err=True)
    try:
        meeting.hand_in(report.to_json())
    except OSError as error:
        click.echo(f"rank {rank}: the report cannot be handed over: {error}", err=True)
        _print_report(report, course.program, OutputFiles())
        return
    if report.verdict.passed:
        return
    # torchrun ends all ranks when one fails, so wait until the report has been read.
    seconds = HURRIED_SECONDS if course.ending.words else WAIT_SECONDS
    if not meeting.wait_until_closed(seconds, hurried):
        click.echo(f"rank {rank}: its report was not read within {seconds:g} s", err=True)
        _print_report(report, course.program, OutputFiles())


def _print_report(report: RankReport, program: ScriptProgram, files: OutputFiles) -> None:
    from rich.console import Console

    from paritas.core.reporting.annotations import verdict_account
    from paritas.core.reporting.terminal import Printable
    from paritas.guarding.summary import guard_report

    verdict, target = report.verdict, program.target
    if not program.is_module:
        arguments = ["--", *program.args] if program.args else []
        verdict = with_shrink_command(verdict, [target, *arguments])
    file, _ = subject_source(target)
    files.form.write(
        lambda: verdict_account(verdict, command="run", subject=target, file=file), err=True
    )
    console = Console(stderr=True, highlight=False)
    console.print()
    console.rule("paritas run", style="dim")
    console.print(Printable(guard_report(report.graphs, verdict)), crop=False)
    write_json(files.json_path, verdict.to_json)
