"""What `paritas run` reports when the script has ended, and the exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import TYPE_CHECKING, ClassVar, Self

import click
import msgspec
import torch.distributed as dist
from rich.console import Console

from paritas.checks.guard_settings import NOTHING_COMPILED
from paritas.cli.options import TEXT, OutputFormat, subject_file
from paritas.cli.running import HURRIED_SECONDS, WAIT_SECONDS
from paritas.errors import UsageError
from paritas.reports.annotations import verdict_account
from paritas.reports.files import write_verdict
from paritas.reports.terminal import GraphCounts, guard_report
from paritas.results.findings import Aspect, Coverage, Finding, Status, Verdict
from paritas.results.report import Report
from paritas.results.wording import headline

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping
    from pathlib import Path

    from paritas.checks.guarded_calls import GuardJournal
    from paritas.cli.running import Ending, Meeting, Ranks, ScriptProgram, StopSignals
    from paritas.reports.annotations import Account


# --- One report made of several -------------------------------------------------------------------


class RankReport(Report, frozen=True):
    """What one process saw."""

    _called: ClassVar[str] = "the report of a rank"

    graphs: tuple[GraphCounts, ...]
    verdict: Verdict

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        """Decode; what cannot be read becomes a report that says so."""
        try:
            return super().from_json(data)
        except UsageError as error:
            reason = f"what it handed in cannot be read: {error}"
            return cls((), Verdict(findings=(unverified("report", reason),)))


def unverified(path: str, reason: str, advice: str = "") -> Finding:
    """A finding about something that kept the program from being checked."""
    return Finding(
        path=path,
        aspect=Aspect.HARNESS,
        status=Status.UNVERIFIED,
        reason=reason,
        advice=advice,
    )


def merge_ranks(ranks: Ranks, reports: Mapping[int, RankReport]) -> RankReport:
    """One report over all ranks of this machine; one that is missing is unverified."""
    graphs: list[GraphCounts] = []
    verdicts = []
    for rank in ranks.here:
        label = f"rank {rank}"
        if rank in reports:
            graphs += [
                msgspec.structs.replace(graph, label=f"{label}: {graph.label}")
                for graph in reports[rank].graphs
            ]
            verdicts.append(_label_verdict(reports[rank].verdict, label))
        else:
            verdicts.append(_missing_report(label))
    verdict = Verdict.merge(verdicts)
    if len(ranks.here) < ranks.world:
        note = (
            f"this is about {_rank_words(ranks.here)} of {ranks.world}, those on this machine; the "
            "first rank of each other machine tells of its own"
        )
        verdict = msgspec.structs.replace(verdict, notes=(note, *verdict.notes))
    return RankReport(tuple(graphs), verdict)


def _rank_words(here: range) -> str:
    return f"rank {here[0]}" if len(here) == 1 else f"ranks {here[0]} to {here[-1]}"


def _label_verdict(verdict: Verdict, label: str) -> Verdict:
    def named(items: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{label}: {item}" for item in items)

    coverage = verdict.coverage
    # Merged with its own silence told, which gets the label too.
    spoken = Verdict.merge([verdict])
    return msgspec.structs.replace(
        spoken,
        findings=tuple(
            msgspec.structs.replace(finding, path=f"{label}: {finding.path}")
            for finding in spoken.findings
        ),
        coverage=Coverage(
            compared=coverage.compared,
            skipped=named(coverage.skipped),
            unmatched=named(coverage.unmatched),
        ),
        notes=named(verdict.notes),
    )


def _missing_report(label: str) -> Verdict:
    reason = "it handed in no report in time: it was killed, or is still running"
    return Verdict(findings=(unverified(label, reason),))


# --- The end of a run -----------------------------------------------------------------------------

UNREACHED = "what it did not get to was not checked"
NOTHING_BEFORE = "nothing was compiled before that"
NO_GRAPH = "nothing was compiled: in what torch.compile was given, there was no graph to capture"
NOTHING_ADVICE = (
    "only the script's own process is watched, not those that it starts; and torch.compile does "
    "nothing where it is switched off (TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE, set_stance)"
)


@dataclasses.dataclass(frozen=True)
class GuardedRun:
    """How a guarded run went.

    Attributes:
        program: what was run.
        ending: how it ended.
        journal: what the guards saw; None if nothing was compiled.
        failure: why it could not be guarded.
        strict: whether `unstable` counts as a failure.
    """

    program: ScriptProgram
    ending: Ending
    journal: GuardJournal | None
    failure: Exception | None
    strict: bool


@dataclasses.dataclass(frozen=True)
class OutputFiles:
    """What is written beside the report: the verdict, and what the calling system wants."""

    json_path: Path | None = None
    form: OutputFormat = TEXT

    def of_rank(self, rank: int) -> OutputFiles:
        """Another machine, whose first rank is not 0, may share its files with this one."""
        if rank == 0:
            return self
        form = dataclasses.replace(self.form, file=_own_file(self.form.file, rank))
        return OutputFiles(_own_file(self.json_path, rank), form)


def finish(
    course: GuardedRun, meeting: Meeting | None, files: OutputFiles, signals: StopSignals
) -> int:
    """Tell what was seen; the exit code."""
    ending = course.ending
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()  # what the script said comes before what is said of it
    report = report_on(course)
    if meeting is None:
        _print_report(_note_rank(report), course.program, files)
    elif meeting.ranks.merges:
        report = _merge_reports(report, ending, meeting, signals.hurried)
        _print_report(report, course.program, files.of_rank(meeting.ranks.rank))
    else:
        _hand_in(report, course, meeting, signals.hurried)
    if meeting is not None:
        # The others may end now, and torchrun then ends this one, which is about to do so itself.
        signals.ignore_termination()
        if meeting.ranks.merges:
            meeting.close()
    return ending.code if ending.by_signal else report.verdict.exit_code


def report_on(course: GuardedRun) -> RankReport:
    """What this process saw. How the script itself ended is part of it."""
    verdict = Verdict(strict=course.strict)
    graphs: tuple[GraphCounts, ...] = ()
    if course.journal is not None:
        verdict = course.journal.verdict()
        graphs = tuple(
            msgspec.convert(entry, GraphCounts, from_attributes=True)
            for entry in course.journal.graphs
        )
    found = list(verdict.findings)
    path = f"script {course.program.target}"
    if course.failure is not None:
        found.append(unverified(path, f"it could not be guarded: {course.failure}"))
    if course.ending.words:
        missed = UNREACHED if graphs else NOTHING_BEFORE
        found.append(unverified(path, f"it {course.ending.words}; {missed}"))
    elif course.journal is None and course.failure is None:
        found.append(unverified(path, NOTHING_COMPILED, NOTHING_ADVICE))
    elif not graphs and course.failure is None:
        found.append(unverified(path, NO_GRAPH))
    return RankReport(graphs, msgspec.structs.replace(verdict, findings=tuple(found)))


def _note_rank(report: RankReport) -> RankReport:
    """Of a rank that the environment says nothing about, so that nothing could be merged."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return report
    note = (
        f"this is about rank {dist.get_rank()} of {dist.get_world_size()} alone: RANK and "
        "WORLD_SIZE are not in the environment; start the ranks by torchrun for one report on all"
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


def _own_file(path: Path | None, rank: int) -> Path | None:
    return None if path is None else path.with_stem(f"{path.stem}.rank{rank}")


def _hand_in(
    report: RankReport, course: GuardedRun, meeting: Meeting, hurried: threading.Event
) -> None:
    """Leave the telling to another rank; where that comes to nothing, tell all the same."""
    rank = meeting.ranks.rank
    click.echo(f"rank {rank}: {headline(report.verdict)}", err=True)
    try:
        meeting.hand_in(report.to_json())
    except OSError as error:
        click.echo(f"rank {rank}: the report cannot be handed in: {error}", err=True)
        _print_report(report, course.program, OutputFiles())
        return
    if report.verdict.passed:
        return
    # torchrun ends all ranks when one ends with a failure: not before it was told of.
    seconds = HURRIED_SECONDS if course.ending.words else WAIT_SECONDS
    if not meeting.wait_until_closed(seconds, hurried):
        click.echo(f"rank {rank}: its report was not taken within {seconds:g} s", err=True)
        _print_report(report, course.program, OutputFiles())


def _print_report(report: RankReport, program: ScriptProgram, files: OutputFiles) -> None:
    files.form.write(lambda: _account(report.verdict, program), err=True)
    console = Console(stderr=True, highlight=False)
    console.print()
    console.rule("paritas run", style="dim")
    console.print(guard_report(report.graphs, report.verdict), crop=False)
    if files.json_path is not None:
        write_verdict(files.json_path, report.verdict)


def _account(verdict: Verdict, program: ScriptProgram) -> Account:
    target = program.target
    return verdict_account(verdict, command="run", subject=target, file=subject_file(target))
