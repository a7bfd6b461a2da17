"""What `paritas run` tells when the script has ended, and the exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import TYPE_CHECKING

import click
import msgspec
import torch.distributed as dist
from rich.console import Console

from paritas.checking.guarding.watching import NOTHING
from paritas.cli.formatting import TEXT, Format, subject_file
from paritas.cli.rank_reports import Report, merge_ranks, unverified
from paritas.cli.ranks import HURRIED_SECONDS, WAIT_SECONDS
from paritas.numerics.findings import Verdict
from paritas.numerics.wording import headline
from paritas.reporting.annotations import of_verdict
from paritas.reporting.guard_summary import GraphCounts, guard_summary
from paritas.reporting.json_file import write_verdict

if TYPE_CHECKING:
    import threading
    from pathlib import Path

    from paritas.checking.guarding.journal import Journal
    from paritas.cli.ranks import Meeting
    from paritas.cli.running import Ending, Program, StopSignals
    from paritas.reporting.annotations import Account

UNREACHED = "what it did not get to was not checked"
NOTHING_BEFORE = "nothing was compiled before that"
NO_GRAPH = "nothing was compiled: in what torch.compile was given, there was no graph to capture"
NOTHING_ADVICE = (
    "only the script's own process is watched, not those that it starts; and torch.compile does "
    "nothing where it is switched off (TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE, set_stance)"
)


@dataclasses.dataclass(frozen=True)
class Course:
    """How a guarded run went.

    Attributes:
        program: what was run.
        ending: how it ended.
        journal: what the guards saw; None if nothing was compiled.
        failure: why it could not be guarded.
        strict: whether `unstable` counts as a failure.
    """

    program: Program
    ending: Ending
    journal: Journal | None
    failure: Exception | None
    strict: bool


@dataclasses.dataclass(frozen=True)
class Files:
    """What is written beside the report: the verdict, and what the calling system wants."""

    json_path: Path | None = None
    form: Format = TEXT

    def of_rank(self, rank: int) -> Files:
        """Another machine, whose first rank is not 0, may share its files with this one."""
        if rank == 0:
            return self
        form = dataclasses.replace(self.form, file=_own_file(self.form.file, rank))
        return Files(_own_file(self.json_path, rank), form)


def finish(course: Course, meeting: Meeting | None, files: Files, signals: StopSignals) -> int:
    """Tell what was seen; the exit code."""
    ending = course.ending
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()  # what the script said comes before what is said of it
    report = report_on(course)
    if meeting is None:
        _tell(_with_rank_noted(report), course.program, files)
    elif meeting.ranks.merges:
        report = _merged(report, ending, meeting, signals.hurried)
        _tell(report, course.program, files.of_rank(meeting.ranks.rank))
    else:
        _hand_in(report, course, meeting, signals.hurried)
    if meeting is not None:
        # The others may end now, and torchrun then ends this one, which is about to do so itself.
        signals.ignore_termination()
        if meeting.ranks.merges:
            meeting.close()
    return ending.code if ending.by_signal else report.verdict.exit_code


def report_on(course: Course) -> Report:
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
        found.append(unverified(path, NOTHING, NOTHING_ADVICE))
    elif not graphs and course.failure is None:
        found.append(unverified(path, NO_GRAPH))
    return Report(graphs, msgspec.structs.replace(verdict, findings=tuple(found)))


def _with_rank_noted(report: Report) -> Report:
    """Of a rank that the environment says nothing about, so that nothing could be merged."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return report
    note = (
        f"this is about rank {dist.get_rank()} of {dist.get_world_size()} alone: RANK and "
        "WORLD_SIZE are not in the environment; start the ranks by torchrun for one report on all"
    )
    verdict = report.verdict
    noted = msgspec.structs.replace(verdict, notes=(note, *verdict.notes))
    return dataclasses.replace(report, verdict=noted)


def _merged(report: Report, ending: Ending, meeting: Meeting, hurried: threading.Event) -> Report:
    seconds = HURRIED_SECONDS if ending.by_signal else WAIT_SECONDS
    handed_in = meeting.collect(seconds, hurried)
    reports = {rank: Report.from_json(data) for rank, data in handed_in.items()}
    return merge_ranks(meeting.ranks, {**reports, meeting.ranks.rank: report})


def _own_file(path: Path | None, rank: int) -> Path | None:
    return None if path is None else path.with_stem(f"{path.stem}.rank{rank}")


def _hand_in(report: Report, course: Course, meeting: Meeting, hurried: threading.Event) -> None:
    """Leave the telling to another rank; where that comes to nothing, tell all the same."""
    rank = meeting.ranks.rank
    click.echo(f"rank {rank}: {headline(report.verdict)}", err=True)
    try:
        meeting.hand_in(report.to_json())
    except OSError as error:
        click.echo(f"rank {rank}: the report cannot be handed in: {error}", err=True)
        _tell(report, course.program, Files())
        return
    if report.verdict.passed:
        return
    # torchrun ends all ranks when one ends with a failure: not before it was told of.
    seconds = HURRIED_SECONDS if course.ending.words else WAIT_SECONDS
    if not meeting.wait_until_closed(seconds, hurried):
        click.echo(f"rank {rank}: its report was not taken within {seconds:g} s", err=True)
        _tell(report, course.program, Files())


def _tell(report: Report, program: Program, files: Files) -> None:
    files.form.write(lambda: _account(report.verdict, program), err=True)
    console = Console(stderr=True, highlight=False)
    console.print()
    console.rule("paritas run", style="dim")
    console.print(guard_summary(report.graphs, report.verdict), crop=False)
    if files.json_path is not None:
        write_verdict(files.json_path, report.verdict)


def _account(verdict: Verdict, program: Program) -> Account:
    target = program.target
    return of_verdict(verdict, command="run", subject=target, file=subject_file(target))
