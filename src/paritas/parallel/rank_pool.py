"""Processes that are ranks of one group, kept warm between tasks."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime as dt
import faulthandler
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import distributed

from paritas.errors import ParitasError, UsageError, first_line, in_one_line
from paritas.results.graph_reports import Confirm as Backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from paritas.results.graph_reports import Confirm


# --- What a process of a pool does: join the group, then task after task --------------------------

# A rank, how many there are, by what they talk, and the folder in which they meet.
Seat = tuple[int, int, Backend, str]

# The parent's time-out ends a task; this one is for a parent that is gone.
_COLLECTIVE_SECONDS = 1800


def serve(seat: Seat, pipe: Connection, foreign: Iterable[Connection]) -> None:
    """Be a rank until the pipe ends."""
    rank, ranks, backend, folder = seat
    for end in foreign:
        end.close()
    _keep_quiet(Path(folder) / f"rank{rank}.log")
    # One thread: those of the parent's pool are not in a forked child, and ranks share the cores.
    torch.set_num_threads(1)
    # A fork may happen within a pass that is not recorded.
    torch.set_grad_enabled(True)
    try:
        _join_group(rank, ranks, backend, folder)
    except Exception as error:  # noqa: BLE001  (the parent reports it)
        _say(pipe, None, in_one_line(error, 300))
        return
    _say(pipe, None, None)
    with contextlib.suppress(EOFError, ConnectionError, KeyboardInterrupt):
        while True:
            _do_one(rank, ranks, pipe)
    # Without the farewell of interpreter and libraries: a forked child's are its parent's.
    os._exit(0)


def serve_anew() -> None:
    """Be a rank in an interpreter of its own, as its command line says."""
    rank, ranks, backend, folder, descriptor = sys.argv[1:]
    by: Backend = "nccl" if backend == "nccl" else "gloo"
    serve((int(rank), int(ranks), by, folder), Connection(int(descriptor)), [])


def _do_one(rank: int, ranks: int, pipe: Connection) -> None:
    message = pipe.recv_bytes()
    try:
        task, payload = pickle.loads(message)  # noqa: S301  (the parent's own)
        value = task(rank, ranks, payload)
        answer = pickle.dumps((value, None))
    except Exception as error:  # noqa: BLE001  (the parent reports it)
        _say(pipe, getattr(error, "so_far", None), in_one_line(error, 300))
        return
    pipe.send_bytes(answer)


def _say(pipe: Connection, value: Any, error: str | None) -> None:
    with contextlib.suppress(ConnectionError):
        pipe.send_bytes(pickle.dumps((value, error)))


def _join_group(rank: int, ranks: int, backend: Backend, folder: str) -> None:
    # All ranks are here: the loopback needs no name that resolves and no open network.
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store: Any = distributed.FileStore(  # type: ignore[attr-defined]
        str(Path(folder) / "rendezvous"), ranks
    )
    distributed.init_process_group(
        # What ranks tell each other before a collective lies on the host.
        "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=dt.timedelta(seconds=_COLLECTIVE_SECONDS),
    )


def _keep_quiet(log: Path) -> None:
    """Write what this process prints, gloo's greetings among it, where its parent can read it."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.disable()  # a parent's may write elsewhere
    os.close(descriptor)


# --- Starting a process that is a rank, by fork or anew -------------------------------------------

_SCRIPT = "from paritas.parallel.rank_pool import serve_anew; serve_anew()"


class RankProcess(Protocol):
    """What a pool asks of its processes."""

    def exit_code(self, patience: float = 0.0) -> int | None:
        """How it ended, negative for a signal; None if it is still there after so many seconds."""

    def kill(self) -> None:
        """End it and leave nothing of it."""


class _Forked:
    def __init__(self, seat: Seat, pipe: Connection, foreign: Sequence[Connection]) -> None:
        context = multiprocessing.get_context("fork")
        self._process = context.Process(
            target=serve, args=(seat, pipe, foreign), daemon=True, name=f"paritas-rank-{seat[0]}"
        )
        with warnings.catch_warnings():
            # Newer Pythons warn of any thread; `start_method` has looked for those that matter.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()

    def exit_code(self, patience: float = 0.0) -> int | None:
        self._process.join(patience)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


class _Anew:
    """A new interpreter.

    Not one of `multiprocessing`: that would run the user's script again, once in each rank.
    """

    def __init__(self, seat: Seat, pipe: Connection) -> None:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)  # noqa: PTH109
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, *map(str, seat), str(pipe.fileno())],
            pass_fds=[pipe.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths},
        )

    def exit_code(self, patience: float = 0.0) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(patience)
        return None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def start_method() -> str:
    """`fork` where nothing is lost or stuck in the child, otherwise `anew`."""
    alone = threading.active_count() == 1
    # With an accelerator autograd has threads of its own, and refuses to work in a forked process.
    still = not torch.accelerator.is_available() and not torch.distributed.is_initialized()
    return "fork" if sys.platform == "linux" and alone and still else "anew"


def start_rank(
    method: str, seat: Seat, pipes: Sequence[tuple[Connection, Connection]]
) -> RankProcess:
    """Start one rank; `pipes` are our ends and theirs, one pair for each rank.

    Raises:
        UsageError: there is no such way on this system.
    """
    theirs = pipes[seat[0]][1]
    if method == "fork":
        # A forked process has every end that is open here; unless it closes those of the others,
        # nobody would see a pipe end when this process does.
        foreign = [end for pair in pipes for end in pair if end is not theirs]
        return _Forked(seat, theirs, foreign)
    if method != "anew" or sys.platform == "win32":
        raise UsageError(f"no ranks can be started by {method!r} on {sys.platform}")
    return _Anew(seat, theirs)


# --- The pool -------------------------------------------------------------------------------------

# A task is a function that can be imported and one payload for each rank. A rank that dies, hangs
# or raises is told of; it never makes the caller wait for longer than it said.

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
        self, reason: str, ranks: Sequence[int] = (), told: Mapping[int, RankAnswer] | None = None
    ) -> None:
        super().__init__(reason)
        self.ranks = tuple(ranks)
        self.told = dict(told or {})


@dataclasses.dataclass(frozen=True)
class RankAnswer:
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

    def __init__(self, ranks: int, method: str | None = None, backend: Confirm = "gloo") -> None:
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
    ) -> list[RankAnswer]:
        """Have each rank call `task(rank, ranks, payload)`, and give what each answered.

        Raises:
            UsageError: the task or a payload cannot be sent to another process.
            LostRankError: a rank died or did not answer in time.
        """
        if self.closed:
            raise LostRankError("the ranks are gone: the pool was closed; take a new one")
        if len(payloads) != self.ranks:
            raise UsageError(f"{len(payloads)} payloads for {self.ranks} ranks: give one to each")
        messages = [_pack_task(task, payload) for payload in payloads]
        for rank, (end, message) in enumerate(zip(self._ends, messages, strict=True)):
            try:
                end.send_bytes(message)
            except (BrokenPipeError, ConnectionError):
                self._fail(f"{self._death(rank)} before it was given its task", [rank])
        return self._collect(timeout, f"to do {getattr(task, '__name__', task)}")

    def _collect(self, timeout: float, what: str) -> list[RankAnswer]:
        told: dict[int, RankAnswer] = {}
        end_of_time = time.monotonic() + timeout
        while len(told) < self.ranks:
            left = end_of_time - time.monotonic()
            late = [rank for rank in range(self.ranks) if rank not in told]
            if left <= 0:
                if any(answer.error for answer in told.values()):
                    self.close()
                    return [told.get(rank, RankAnswer(error=LET_GO)) for rank in range(self.ranks)]
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

    def _answer(self, rank: int, told: Mapping[int, RankAnswer]) -> RankAnswer | None:
        """What a rank has said, or None so far; its death is an error."""
        try:
            if self._ends[rank].poll():
                value, error = pickle.loads(self._ends[rank].recv_bytes())  # noqa: S301  (our own)
                return RankAnswer(value, error)
        except (EOFError, ConnectionError):
            self._fail(self._death(rank), [rank], told)
        return None

    def _death(self, rank: int) -> str:
        code = self._processes[rank].exit_code(_GRACE_SECONDS)
        how = f"with exit code {code}"
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                how = f"by {signal.Signals(-code).name}"
        said = _log_tail(Path(self._folder.name) / f"rank{rank}.log")
        return f"rank {rank} of {self.ranks} died {how}" + (f"; it said: {said}" if said else "")

    def _fail(
        self, reason: str, ranks: Sequence[int] = (), told: Mapping[int, RankAnswer] | None = None
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


_WARM: dict[tuple[int, Confirm], RankPool] = {}


def warm_pool(ranks: int, backend: Confirm = "gloo") -> RankPool:
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


def _pack_task(task: Any, payload: Any) -> bytes:
    try:
        return pickle.dumps((task, payload))
    except Exception as error:  # noqa: BLE001  (what a user's object raises when pickled is its own)
        text = first_line(error, 1000) or type(error).__name__
        raise UsageError(
            f"what a rank needs cannot be sent to another process: {text}; "
            "define the operator at the top of a module, where a rank can import it"
        ) from None


def _log_tail(path: Path) -> str:
    with contextlib.suppress(OSError):
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-_LINES_SHOWN:])[:400]
    return ""
