"""Processes that are ranks of one group, kept warm between tasks."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime as dt
import faulthandler
import gc
import multiprocessing
import os
import pickle
import re
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

from paritas.core.errors import (
    ParitasError,
    UsageError,
    chain_of_causes,
    first_line,
    in_one_line,
)
from paritas.sharding.rows import Confirm as Backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from paritas.sharding.rows import Confirm


# --- A process of a pool: join the group, then run one task after the other -----------------------

# The rank, the number of ranks, their backend and the folder of their rendezvous.
Seat = tuple[int, int, Backend, str]

# The parent's timeout ends a task. This one applies if the parent is gone.
_COLLECTIVE_SECONDS = 1800


def serve(seat: Seat, pipe: Connection, foreign: Iterable[Connection]) -> None:
    """Work as a rank until the pipe closes."""
    rank, ranks, backend, folder = seat
    # A forked child inherits its parent's garbage. Finalizers would run here a second time, and may
    # wait for locks that threads of the parent hold.
    gc.freeze()
    for end in foreign:
        end.close()
    _keep_quiet(Path(folder) / f"rank{rank}.log")
    # A forked child does not have the threads of its parent's pool, and ranks share the cores.
    torch.set_num_threads(1)
    # The fork may have happened under no_grad.
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
    # Skip the exit handlers: those of a forked child belong to its parent.
    os._exit(0)


def serve_anew() -> None:
    """Work as the rank that the command line of this interpreter names."""
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
    # All ranks are on this machine, and the loopback needs neither name resolution nor a network.
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store: Any = distributed.FileStore(  # type: ignore[attr-defined]
        str(Path(folder) / "rendezvous"), ranks
    )
    distributed.init_process_group(
        # Metadata that ranks exchange before a collective lies on the host.
        "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=dt.timedelta(seconds=_COLLECTIVE_SECONDS),
    )


def _keep_quiet(log: Path) -> None:
    """Redirect the output of this process, with gloo's messages, to a file for its parent."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.disable()  # the parent's may write elsewhere
    os.close(descriptor)


# --- Starting the process of a rank, by fork or as a new interpreter ------------------------------

_SCRIPT = "from paritas.sharding.plans.rank_pool import serve_anew; serve_anew()"


class RankProcess(Protocol):
    """The process of a rank."""

    def exit_code(self, patience: float = 0.0) -> int | None:
        """The exit code, negative for a signal; None if it still runs after `patience` seconds."""

    def kill(self) -> None:
        """Kill the process and reap it."""


class _Forked:
    def __init__(self, seat: Seat, pipe: Connection, foreign: Sequence[Connection]) -> None:
        context = multiprocessing.get_context("fork")
        self._process = context.Process(
            target=serve, args=(seat, pipe, foreign), daemon=True, name=f"paritas-rank-{seat[0]}"
        )
        with warnings.catch_warnings():
            # Newer Pythons warn about any thread; `start_method` checked for those that matter.
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

    `multiprocessing` would run the user's script again, once in each rank.
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
    """`fork` if that is safe, otherwise `anew`."""
    alone = threading.active_count() == 1
    # With an accelerator autograd has its own threads, and refuses to work in a forked process.
    still = not torch.accelerator.is_available() and not torch.distributed.is_initialized()
    return "fork" if sys.platform == "linux" and alone and still else "anew"


def start_rank(
    method: str, seat: Seat, pipes: Sequence[tuple[Connection, Connection]]
) -> RankProcess:
    """Start one rank; `pipes` holds our end and its end, one pair for each rank.

    Raises:
        UsageError: this system does not support the method.
    """
    theirs = pipes[seat[0]][1]
    if method == "fork":
        # A forked process inherits every open end. Unless it closes those of the others, no rank
        # sees its pipe close when this process ends.
        foreign = [end for pair in pipes for end in pair if end is not theirs]
        return _Forked(seat, theirs, foreign)
    if method != "anew" or sys.platform == "win32":
        raise UsageError(f"ranks cannot be started by {method!r} on {sys.platform}")
    return _Anew(seat, theirs)


# --- The pool -------------------------------------------------------------------------------------

# A task is an importable function and one payload for each rank. A rank that dies, hangs or raises
# is reported, and never makes the caller wait longer than its timeout.

MOST_RANKS = 64
LET_GO = "did not answer after another rank had failed"
NO_ANSWER = "no answer"
_START_SECONDS = 120.0
# Once a rank has failed, its peers may wait in a collective forever. They get this long to answer.
_GRACE_SECONDS = 2.0
_FAREWELL_SECONDS = 0.2
_LINES_SHOWN = 3


class LostRankError(ParitasError, RuntimeError):
    """A rank died or did not answer in time; its pool is closed.

    Attributes:
        ranks: the lost ranks, if they are known.
        answers: rank -> what it had answered by then.
        timed_out: whether the ranks did not answer in time, rather than died.
    """

    def __init__(
        self,
        reason: str,
        ranks: Sequence[int] = (),
        answers: Mapping[int, RankAnswer] | None = None,
        *,
        timed_out: bool = False,
    ) -> None:
        super().__init__(reason)
        self.ranks = tuple(ranks)
        self.answers = dict(answers or {})
        self.timed_out = timed_out


@dataclasses.dataclass(frozen=True)
class RankAnswer:
    """What a rank answered.

    Attributes:
        value: what the task returned; if it raised, `so_far` of the exception.
        error: what it raised, in words.
        waited: whether it failed only because of another rank.
    """

    value: Any = None
    error: str | None = None
    waited: bool = False


GIVEN_UP = RankAnswer(error=LET_GO, waited=True)


def lost_peer(error: Exception) -> bool:
    """Whether gloo raised this because another rank is gone.

    It raises a plain RuntimeError, so its text is all there is to go by.
    """
    return "Connection closed" in str(error)


# How torch says that an operator has no kernel on this device, or that DTensor has a rule only for
# the operator that a GPU calls in its place.
_NO_KERNEL = (
    re.compile(r"Could not run '(\S+)' with arguments from the 'CPU' backend"),
    re.compile(r"Operator (\S+_for_cpu\S*) does not have a sharding strategy"),
)


def operator_without_kernel(error: BaseException | None) -> str:
    """The operator that torch does not have on a CPU, if that is why it raised; else empty."""
    chain = () if error is None else chain_of_causes(error, lambda e: e.__cause__ or e.__context__)
    for cause in chain:
        for pattern in _NO_KERNEL:
            found = pattern.search(str(cause)) if isinstance(cause, NotImplementedError) else None
            if found is not None:
                return found[1]
    return ""


class RankPool:
    """Processes that form one process group and wait for tasks.

    Args:
        ranks: how many.
        backend: `gloo`, or `nccl`, where each rank has its own GPU.
        method: `fork` starts in a fraction of a second, `anew` imports torch again in each process;
            None means fork if that is safe.

    Raises:
        UsageError: the number of ranks is out of range.
        LostRankError: a rank did not start.
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
        for rank, answer in enumerate(self._collect(_START_SECONDS, "to start")):
            if answer.error is not None:
                raise LostRankError(f"rank {rank} of {self.ranks} did not start: {answer.error}")

    def run(
        self, task: Callable[[int, int, Any], Any], payloads: Sequence[Any], timeout: float = 60.0
    ) -> list[RankAnswer]:
        """Have each rank call `task(rank, ranks, payload)`, and return the answers.

        Raises:
            UsageError: the task or a payload cannot be sent to another process.
            LostRankError: a rank died or did not answer in time.
        """
        if self.closed:
            raise LostRankError("the pool was closed and its ranks are gone: make a new pool")
        if len(payloads) != self.ranks:
            raise UsageError(f"{len(payloads)} payloads for {self.ranks} ranks: give one per rank")
        messages = [_pack_task(task, payload) for payload in payloads]
        for rank, (end, message) in enumerate(zip(self._ends, messages, strict=True)):
            try:
                end.send_bytes(message)
            except (BrokenPipeError, ConnectionError):
                self._fail(f"{self._death(rank)} before it got its task", [rank])
        return self._collect(timeout, f"to run {getattr(task, '__name__', task)}")

    def _collect(self, timeout: float, what: str) -> list[RankAnswer]:
        answers: dict[int, RankAnswer] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.ranks:
            left = deadline - time.monotonic()
            late = [rank for rank in range(self.ranks) if rank not in answers]
            if left <= 0:
                if any(answer.error for answer in answers.values()):
                    self.close()
                    return [answers.get(rank, GIVEN_UP) for rank in range(self.ranks)]
                names = ("rank " if len(late) == 1 else "ranks ") + ", ".join(map(str, late))
                reason = f"{names} of {self.ranks} had {timeout:g} s {what}: {NO_ANSWER}"
                self._fail(reason, late, answers, timed_out=True)
            # The pipe of a rank that dies closes, which ends the wait as well.
            connection.wait([self._ends[rank] for rank in late], max(left, 0))
            for rank in late:
                answer = self._answer(rank, answers)
                if answer is None:
                    continue
                answers[rank] = answer
                if answer.error is not None:
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        return [answers[rank] for rank in range(self.ranks)]

    def _answer(self, rank: int, answers: Mapping[int, RankAnswer]) -> RankAnswer | None:
        """The answer of a rank, None if there is none yet; its death is an error."""
        try:
            if self._ends[rank].poll():
                value, error = pickle.loads(self._ends[rank].recv_bytes())  # noqa: S301  (our own)
                return RankAnswer(value, error)
        except (EOFError, ConnectionError):
            self._fail(self._death(rank), [rank], answers)
        return None

    def _death(self, rank: int) -> str:
        code = self._processes[rank].exit_code(_GRACE_SECONDS)
        how = f"with exit code {code}"
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                how = f"by {signal.Signals(-code).name}"
        printed = _log_tail(Path(self._folder.name) / f"rank{rank}.log")
        died = f"rank {rank} of {self.ranks} died {how}"
        return f"{died}; it printed: {printed}" if printed else died

    def _fail(
        self,
        reason: str,
        ranks: Sequence[int],
        answers: Mapping[int, RankAnswer] | None = None,
        *,
        timed_out: bool = False,
    ) -> None:
        self.close()
        raise LostRankError(reason, ranks, answers, timed_out=timed_out)

    def close(self) -> None:
        """End all processes."""
        if self.closed or os.getpid() != self.owner:
            return
        self.closed = True
        for end in self._ends:
            end.close()  # an idle rank ends when its pipe closes
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
    """The pool of this process with so many ranks: started once, used by all."""
    pool = _WARM.get((ranks, backend))
    if pool is None or pool.closed or pool.owner != os.getpid():
        pool = _WARM[ranks, backend] = RankPool(ranks, backend=backend)
    return pool


def close_pools() -> None:
    """End all warm pools of this process."""
    for pool in list(_WARM.values()):
        pool.close()
    _WARM.clear()


atexit.register(close_pools)


def _pack_task(task: Any, payload: Any) -> bytes:
    try:
        return pickle.dumps((task, payload))
    except Exception as error:  # noqa: BLE001  (a user's object may raise anything when pickled)
        text = first_line(error, 1000) or type(error).__name__
        raise UsageError(
            f"the task cannot be sent to another process: {text}; "
            "define the operator at the top level of a module, where a rank can import it"
        ) from None


def _log_tail(path: Path) -> str:
    with contextlib.suppress(OSError):
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-_LINES_SHOWN:])[:400]
    return ""
