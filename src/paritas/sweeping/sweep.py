"""sweep(): does any of my models compute something else now?"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import shutil
import sys
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paritas.errors import UsageError
from paritas.execution.executors import Failed, count_processors, executor_of, run_batches
from paritas.reports.files import check_writable, write_whole
from paritas.results.progress import Progress, shows_progress
from paritas.results.sweeps import RunEnd, SweepReport, SweepRow, changes, unverified
from paritas.sweeping import processes
from paritas.sweeping.journal import REPORT_JSON, SweepJournal, read_rows
from paritas.sweeping.plan import plan_tasks
from paritas.sweeping.processes import RunOrder, RunPlace

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from paritas.sweeping.plan import RunTask

LOCAL = "processes"
JUNIT, HTML = "junit.xml", "report.html"
_CACHE = "inductor-cache"


@shows_progress
def sweep(  # noqa: PLR0913  (each is an option of its own)
    targets: str | os.PathLike[str] | Sequence[str | Mapping[str, Any]],
    *,
    output: str | os.PathLike[str],
    against: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    executor: str | Executor = LOCAL,
    seconds: float | None = None,
    memory: int | str | None = None,
    strict: bool = False,
    restart: bool = False,
    on_progress: Callable[[str], None] | None = None,
) -> SweepReport:
    """Verify many targets under many settings, each run in its own process.

    An aborted sweep resumes when it is called again with the same targets and the same output.
    Ctrl-C ends it: the results so far are written and returned.

    Args:
        targets: the path of a TOML file, or a list of its rows: dicts such as
            `{"name": "hf:LlamaForCausalLM", "dtypes": ["float32", "bfloat16"]}`, or names.
        output: the folder for the journal, `sweep.json`, `junit.xml` and `report.html`.
        against: the output of an earlier sweep, to compare with.
        jobs: number of parallel runs; by default the processors, or the cluster's threads.
        executor: `processes`, `dask://host:port`, or an executor of `concurrent.futures`.
        seconds: the time limit of each run; it overrides the file's `[defaults]`.
        memory: the memory limit of each run, in bytes or as `"8 GB"`.
        strict: count `unstable` as a failure.
        restart: delete the rows in the output, and run everything again.
        on_progress: called with a `Progress` after each run.

    Returns:
        The report; true in a boolean context if all runs pass.

    Raises:
        UsageError: the targets are not valid, or the output holds another sweep.
    """
    processes.check_system()
    if jobs is not None and jobs < 1:
        raise UsageError(f"jobs={jobs}: the number of jobs must be 1 or more")
    tasks = plan_tasks(targets, seconds=seconds, memory=memory)
    earlier = None if against is None else read_rows(Path(against))
    folder = Path(output)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"cannot write to {str(folder)!r}: it is a file; use a folder")
    runs = [task.run for task in tasks]
    began, start = dt.datetime.now(dt.UTC).isoformat(timespec="seconds"), time.monotonic()
    with SweepJournal(folder, runs, processes.versions(), restart=restart) as journal:
        check_writable(folder / REPORT_JSON)
        left = [task for task in tasks if task.run not in journal.rows]
        stopped = ""

        def show_progress() -> None:
            if on_progress is not None:
                done = journal.rows.values()
                failing = sum(not row.passes() for row in done)
                on_progress(Progress("sweeping", len(done), len(tasks), failing=failing))

        try:
            with contextlib.closing(_run_all(left, folder, executor, jobs, show_progress)) as found:
                for row in found:
                    journal.add(row)
        except KeyboardInterrupt:
            stopped = "interrupt"
        rows = tuple(journal.rows[run] for run in runs if run in journal.rows)
        known = f"{journal.resumed} of {len(tasks)} rows are from before this sweep was resumed"
        report = SweepReport(
            rows=rows,
            planned=len(tasks),
            strict=strict,
            stopped=stopped,
            began=began,
            seconds=round(time.monotonic() - start, 3),
            versions=processes.versions(),
            against="" if against is None else os.fspath(against),
            changes=()
            if earlier is None
            else changes(rows, earlier, strict=strict, whole=not stopped),
            notes=(known,) if journal.resumed else (),
        )
        write_report(folder, report)
        if not stopped:
            shutil.rmtree(folder / _CACHE, ignore_errors=True)
    return report


def write_report(folder: Path, report: SweepReport) -> None:
    """Write the files of a report, each one completely or not at all."""
    from paritas.reports.annotations import junit_document
    from paritas.reports.sweeps import sweep_account, sweep_page

    write_whole(folder / REPORT_JSON, report.to_json())
    document = junit_document(sweep_account(report, subject=str(folder)))
    write_whole(folder / JUNIT, document.removesuffix("\n").encode())
    write_whole(folder / HTML, sweep_page(report).encode(errors="backslashreplace"))


def _run_all(
    tasks: Sequence[RunTask],
    folder: Path,
    spec: str | Executor,
    jobs: int | None,
    show_progress: Callable[[], None],
) -> Generator[SweepRow]:
    """Yield rows in order of completion; closing the generator ends the runs in progress."""
    if not tasks:
        return
    with contextlib.ExitStack() as stack:
        local = spec == LOCAL
        if local:
            jobs = min(jobs or count_processors(), len(tasks))
            # Each thread waits for a process. The threads end last, after the processes.
            spec = stack.enter_context(ThreadPoolExecutor(jobs, "paritas-sweep"))
        elif isinstance(spec, str) and not spec.startswith("dask://"):
            raise UsageError(f"executor={spec!r}: use {LOCAL}, dask://host:port, or an executor")
        executor, workers = stack.enter_context(executor_of(spec, jobs))
        if local:
            stack.callback(processes.stop_servers)
        place = _place_of(tasks, folder, workers if local else 1, workers)
        orders = (RunOrder(task=task, place=place) for task in tasks)
        show_progress()
        for order, row in run_batches(
            executor, processes.run_order, orders, ahead=workers, ordered=False
        ):
            yield _lost(order, row.error) if isinstance(row, Failed) else row
            show_progress()


def _place_of(tasks: Sequence[RunTask], folder: Path, jobs: int, workers: int) -> RunPlace:
    cache = (folder / _CACHE).absolute()
    cache.mkdir(parents=True, exist_ok=True)
    here = str(Path.cwd())
    paths = dict.fromkeys([here, *(path or here for path in sys.path)])
    return RunPlace(
        folder=here,
        paths=tuple(paths),
        cache=str(cache),
        libraries=processes.libraries_of(task.run.target for task in tasks),
        jobs=jobs,
        threads=max(count_processors() // max(workers, 1), 1),
    )


def _lost(order: RunOrder, error: str) -> SweepRow:
    """The row of a run whose worker died twice."""
    verdict = unverified(f"its worker died: {error}", "look at the worker's own log")
    return SweepRow(
        run=order.task.run,
        ended=RunEnd.CRASHED,
        verdict=verdict,
        counts={verdict.status.value: 1},
        versions=processes.versions(),
    )
