"""Processes that are ranks of one group, kept warm between tasks.

A task is a function that can be imported and one payload for each rank. A rank that dies, hangs or
raises is told of; it never makes the caller wait for longer than it said.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import pickle
import signal
import tempfile
import time
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from paritas.errors import ParitasError, UsageError
from paritas.partition.ranks.starting import RankProcess, start_method, start_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paritas.partition.ranks.serving import Backend

__all__ = ["LET_GO", "LostRankError", "RankPool", "Told", "close_pools", "warm_pool"]

MOST_RANKS = 64
# What is said of a rank that is given up because of another.
LET_GO = "did not answer after another rank had failed"
_START_SECONDS = 120.0
# Once one rank has failed, its peers are in a collective that never ends: so long they may answer.
_GRACE_SECONDS = 2.0
_FAREWELL_SECONDS = 0.2
_LINES_SHOWN = 3


class LostRankError(ParitasError, RuntimeError):
    """A rank died or did not answer in time; the pool it was of is closed.

    Attributes:
        ranks: those that are lost, where that is known.
        told: rank -> what it had answered by then.
    """

    def __init__(
        self, reason: str, ranks: Sequence[int] = (), told: Mapping[int, Told] | None = None
    ) -> None:
        super().__init__(reason)
        self.ranks = tuple(ranks)
        self.told = dict(told or {})


@dataclasses.dataclass(frozen=True)
class Told:
    """What a rank answered.

    Attributes:
        value: what the task gave; of one that raised, what the exception keeps as `so_far`.
        error: what it raised, in words.
    """

    value: Any = None
    error: str | None = None


class RankPool:
    """So many processes, of one group, that wait for tasks.

    Args:
        ranks: how many.
        backend: by what they send tensors: `gloo`, or `nccl`, where each rank has a GPU of its own.
        method: `fork` starts in a fraction of a second, `anew` imports torch once more in each
            process; None takes fork where that is safe.

    Raises:
        UsageError: no such number of ranks.
        LostRankError: they did not start.
    """

    def __init__(self, ranks: int, method: str | None = None, backend: Backend = "gloo") -> None:
        if not 1 <= ranks <= MOST_RANKS:
            raise UsageError(f"{ranks} ranks: give a number from 1 to {MOST_RANKS}")
        self.ranks = ranks
        self.method = method or start_method()
        self.backend = backend
        self.owner = os.getpid()
        self._folder = tempfile.TemporaryDirectory(prefix="paritas-ranks-")
        self._ends: list[connection.Connection] = []
        self._processes: list[RankProcess] = []
        self.closed = False
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        pipes = [connection.Pipe() for _ in range(self.ranks)]
        self._ends = [ours for ours, _ in pipes]
        for rank in range(self.ranks):
            started = start_rank(
                self.method, (rank, self.ranks, self.backend, self._folder.name), pipes
            )
            self._processes.append(started)
        for _, theirs in pipes:
            theirs.close()
        for rank, told in enumerate(self._collect(_START_SECONDS, "to start")):
            if told.error is not None:
                raise LostRankError(f"rank {rank} of {self.ranks} did not start: {told.error}")

    def run(
        self, task: Callable[[int, int, Any], Any], payloads: Sequence[Any], timeout: float = 60.0
    ) -> list[Told]:
        """Have each rank call `task(rank, ranks, payload)`, and give what each answered.

        Raises:
            UsageError: the task or a payload cannot be sent to another process.
            LostRankError: a rank died or did not answer in time.
        """
        if self.closed:
            raise LostRankError("the ranks are gone: the pool was closed; take a new one")
        if len(payloads) != self.ranks:
            raise UsageError(f"{len(payloads)} payloads for {self.ranks} ranks: give one to each")
        messages = [_packed(task, payload) for payload in payloads]
        for rank, (end, message) in enumerate(zip(self._ends, messages, strict=True)):
            try:
                end.send_bytes(message)
            except (BrokenPipeError, ConnectionError):
                self._fail(f"{self._death(rank)} before it was given its task", [rank])
        return self._collect(timeout, f"to do {getattr(task, '__name__', task)}")

    def _collect(self, timeout: float, what: str) -> list[Told]:
        told: dict[int, Told] = {}
        end_of_time = time.monotonic() + timeout
        while len(told) < self.ranks:
            left = end_of_time - time.monotonic()
            late = [rank for rank in range(self.ranks) if rank not in told]
            if left <= 0:
                if any(answer.error for answer in told.values()):
                    self.close()
                    return [told.get(rank, Told(error=LET_GO)) for rank in range(self.ranks)]
                names = ("rank " if len(late) == 1 else "ranks ") + ", ".join(map(str, late))
                reason = f"{names} of {self.ranks} had {timeout:g} s {what}: no answer"
                self._fail(reason, late, told)
            # The pipe of a rank that dies ends, which is heard as well.
            connection.wait([self._ends[rank] for rank in late], max(left, 0))
            for rank in late:
                answer = self._answer(rank, told)
                if answer is None:
                    continue
                told[rank] = answer
                if answer.error is not None:
                    end_of_time = min(end_of_time, time.monotonic() + _GRACE_SECONDS)
        return [told[rank] for rank in range(self.ranks)]

    def _answer(self, rank: int, told: Mapping[int, Told]) -> Told | None:
        """What a rank has said, or None so far; its death is an error."""
        try:
            if self._ends[rank].poll():
                value, error = pickle.loads(self._ends[rank].recv_bytes())  # noqa: S301  (our own)
                return Told(value, error)
        except (EOFError, ConnectionError):
            self._fail(self._death(rank), [rank], told)
        return None

    def _death(self, rank: int) -> str:
        code = self._processes[rank].exit_code(_GRACE_SECONDS)
        how = f"with exit code {code}"
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                how = f"by {signal.Signals(-code).name}"
        said = _tail(Path(self._folder.name) / f"rank{rank}.log")
        return f"rank {rank} of {self.ranks} died {how}" + (f"; it said: {said}" if said else "")

    def _fail(
        self, reason: str, ranks: Sequence[int] = (), told: Mapping[int, Told] | None = None
    ) -> None:
        self.close()
        raise LostRankError(reason, ranks, told)

    def close(self) -> None:
        """End the processes; nothing of them is left."""
        if self.closed or os.getpid() != self.owner:
            return
        self.closed = True
        for end in self._ends:
            end.close()  # an idle rank ends when its pipe does
        for process in self._processes:
            if process.exit_code(_FAREWELL_SECONDS) is None:
                process.kill()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_WARM: dict[tuple[int, Backend], RankPool] = {}


def warm_pool(ranks: int, backend: Backend = "gloo") -> RankPool:
    """The pool of so many ranks of this process: started once, used by all."""
    pool = _WARM.get((ranks, backend))
    if pool is None or pool.closed or pool.owner != os.getpid():
        pool = _WARM[ranks, backend] = RankPool(ranks, backend=backend)
    return pool


def close_pools() -> None:
    """End all warm ranks of this process."""
    for pool in list(_WARM.values()):
        pool.close()
    _WARM.clear()


atexit.register(close_pools)


def _packed(task: Any, payload: Any) -> bytes:
    try:
        return pickle.dumps((task, payload))
    except Exception as error:  # noqa: BLE001  (what a user's object raises when pickled is its own)
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"what a rank needs cannot be sent to another process: {text}; "
            "define the operator at the top of a module, where a rank can import it"
        ) from None


def _tail(path: Path) -> str:
    with contextlib.suppress(OSError):
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-_LINES_SHOWN:])[:400]
    return ""
