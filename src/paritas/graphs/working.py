"""Operators go to workers, or are checked here one after the other.

Checking an operator tells from torch's random state whether it draws, and puts it back: there is
one state in a process, so that two operators are never checked at once by threads of one.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING

from paritas.comparison.executors import Failed, executor_of, run_batches
from paritas.errors import UsageError
from paritas.graphs.operators.checking import check_call
from paritas.graphs.operators.signatures import signature_of
from paritas.numerics.graph_reports import OperatorResult, Outcome, Site

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from paritas.graphs.calls import GraphCall
    from paritas.graphs.operators.values import CallValues
    from paritas.graphs.settings import Settings

__all__ = ["Work", "check_executor", "check_work", "run_works"]

_AHEAD = 2  # for each worker, so that none waits for the next


@dataclasses.dataclass(frozen=True)
class Work:
    """An operator that is to be checked, with all that a worker needs.

    Attributes:
        number: in the order of the report.
        key: of its group.
        values: what it was given when the graph ran; None if values are to be drawn.
    """

    number: int
    key: str
    call: GraphCall
    settings: Settings
    values: CallValues | None = None


def check_work(work: Work) -> OperatorResult:
    """Check one operator; whatever goes wrong at that is its result."""
    try:
        return check_call(work.call, work.settings, work.values)
    except Exception as error:  # noqa: BLE001  (becomes the result: the others are checked still)
        text = (str(error).strip().splitlines() or [""])[0]
        return _unsupported(work, f"checking it raised {type(error).__name__}: {text:.200}")


def check_executor(executor: str | Executor, jobs: int | None) -> None:
    """Refuse what cannot spread operators, before the work.

    Raises:
        UsageError: threads, or no worker at all.
    """
    if executor == "threads" or isinstance(executor, ThreadPoolExecutor):
        raise UsageError(
            f"executor={executor!r}: operators that are checked at once by threads would share "
            "torch's random state; give processes, or dask://host:port"
        )
    if jobs is not None and jobs < 1:
        raise UsageError(f"jobs={jobs}: give one worker at least")


def run_works(
    works: Sequence[Work],
    *,
    executor: str | Executor = "processes",
    jobs: int | None = None,
    suspects: Collection[str] = (),
    begin: Callable[[str], None],
) -> Iterator[tuple[Work, OperatorResult]]:
    """Check operators; gives each with its result as soon as that is there.

    Args:
        executor: as `paritas.compare` takes it, but for threads.
        jobs: how many workers; unless given, processes are not started, and all happens here.
        suspects: keys that may have ended an earlier process: these get one of their own.
        begin: told the key of each operator that is checked in this process.
    """
    if executor == "processes" and (jobs or 1) == 1:
        yield from _here(works, suspects, begin)
        return
    travelling = [work for work in works if not _is_settled(work) and _travels(work)]
    with executor_of(executor, jobs) as (pool, workers):
        results = run_batches(pool, check_work, travelling, ahead=_AHEAD * workers, ordered=False)
        for work, result in results:
            yield work, _told(work, result)
    away = {work.number for work in travelling}
    yield from _here([work for work in works if work.number not in away], (), begin)


def _here(
    works: Sequence[Work], suspects: Collection[str], begin: Callable[[str], None]
) -> Iterator[tuple[Work, OperatorResult]]:
    for work in works:
        if _is_settled(work):
            yield work, check_work(work)
        elif work.key in suspects and _travels(work):
            yield work, _isolated(work)
        else:
            begin(work.key)
            yield work, check_work(work)


def _is_settled(work: Work) -> bool:
    """Whether the reader of the graph knows already how it ends: nothing is run for it."""
    return bool(work.call.idle or work.call.obstacle)


def _isolated(work: Work) -> OperatorResult:
    """Checked in a process of its own, which it may end."""
    with executor_of("processes", 1) as (pool, _):
        [(_, result)] = run_batches(pool, check_work, [work], ahead=1)
    return _told(work, result)


def _travels(work: Work) -> bool:
    """Whether another process can be given it: a function that was made in memory has no name."""
    try:
        pickle.Pickler(io.BytesIO(), protocol=pickle.HIGHEST_PROTOCOL).dump(work)
    except Exception:  # noqa: BLE001  (each kind of object refuses in its own way; it stays here)
        return False
    return True


def _told(work: Work, result: OperatorResult | Failed[Work]) -> OperatorResult:
    if isinstance(result, Failed):
        died = f"the process that checked it died, twice ({result.error})"
        return _unsupported(work, f"{died}: a crash in the operator, or no memory left")
    return result


def _unsupported(work: Work, reason: str) -> OperatorResult:
    call = work.call
    site = Site(
        position=call.position,
        node=call.name,
        source=call.source,
        code=call.code,
        module=call.module,
    )
    return OperatorResult(
        key=work.key,
        operator=call.operator,
        signature=signature_of(call),
        sites=(site,),
        outcome=Outcome.UNSUPPORTED,
        reason=reason,
    )
