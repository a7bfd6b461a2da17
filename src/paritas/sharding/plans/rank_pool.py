"""Processes that are ranks of one group, kept warm between tasks."""

from __future__ import annotations

import atexit
import dataclasses
import datetime as dt
import faulthandler
import gc
import os
import pickle
import re
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import msgspec
import torch
from torch import distributed

from paritas.core.errors import ParitasError, UsageError, chain_of_causes, first_line, in_one_line
from paritas.core.results.rank_backends import GLOO, RANK_BACKENDS, BackendName
from paritas.core.time_limit import TimeLimit
from paritas.core.workers.channel import Channel, ChannelClosedError, wait_for_any
from paritas.core.workers.inside import Program
from paritas.core.workers.starting import environment_here, signal_name, wait_for_end
from paritas.core.workers.worker import Worker, fork_worker, start_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


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
            match = pattern.search(str(cause)) if isinstance(cause, NotImplementedError) else None
            if match is not None:
                return match[1]
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

    def __init__(
        self, ranks: int, method: str | None = None, backend: BackendName = GLOO.name
    ) -> None:
        if not 1 <= ranks <= MOST_RANKS:
            raise UsageError(f"{ranks} ranks: give a number from 1 to {MOST_RANKS}")
        self.ranks = ranks
        self.method = method or start_method()
        self.backend = backend
        self.owner = os.getpid()
        self._folder = tempfile.TemporaryDirectory(prefix="paritas-ranks-")
        self._workers: list[Worker] = []
        self.closed = False
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        for rank in range(self.ranks):
            seat = RankSeat(
                rank=rank, ranks=self.ranks, backend=self.backend, folder=self._folder.name
            )
            self._workers.append(_start_rank(self.method, seat))
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
        for rank, (worker, message) in enumerate(zip(self._workers, messages, strict=True)):
            try:
                worker.channel.send(message)
            except ChannelClosedError:
                self._fail(f"{self._death(rank)} before it got its task", [rank])
        return self._collect(timeout, f"to run {getattr(task, '__name__', task)}")

    def _collect(self, timeout: float, what: str) -> list[RankAnswer]:
        answers: dict[int, RankAnswer] = {}
        limit = TimeLimit(timeout)
        while len(answers) < self.ranks:
            remaining_seconds = limit.left
            late = [rank for rank in range(self.ranks) if rank not in answers]
            if remaining_seconds <= 0:
                if any(answer.error for answer in answers.values()):
                    self.close()
                    return [answers.get(rank, GIVEN_UP) for rank in range(self.ranks)]
                names = ("rank " if len(late) == 1 else "ranks ") + ", ".join(map(str, late))
                reason = f"{names} of {self.ranks} had {timeout:g} s {what}: {NO_ANSWER}"
                self._fail(reason, late, answers, timed_out=True)
            # The channel of a rank that dies closes, which ends the wait as well.
            ready = wait_for_any(
                {rank: self._workers[rank].channel for rank in late}, max(remaining_seconds, 0)
            )
            for rank in ready:
                answers[rank] = answer = self._answer(rank, answers)
                if answer.error is not None:
                    limit = limit.shorten(_GRACE_SECONDS)
        return [answers[rank] for rank in range(self.ranks)]

    def _answer(self, rank: int, answers: Mapping[int, RankAnswer]) -> RankAnswer:
        """The answer of a rank; its death is an error."""
        try:
            reply = self._workers[rank].channel.receive(RankReply, most_bytes=_MOST_BYTES)
        except ChannelClosedError:
            self._fail(self._death(rank), [rank], answers)
        value = None if reply.value is None else _unpickle_parts(reply.value)
        return RankAnswer(value, reply.error)

    def _death(self, rank: int) -> str:
        code = wait_for_end(self._workers[rank].process, _GRACE_SECONDS)
        how = f"with exit code {code}"
        if code is not None and code < 0:
            how = f"by {signal_name(-code)}"
        printed = _tail(self._workers[rank].read_log())
        died = f"rank {rank} of {self.ranks} died {how}"
        return f"{died}; it printed: {printed}" if printed else died

    def _fail(
        self,
        reason: str,
        ranks: Sequence[int],
        answers: Mapping[int, RankAnswer] | None = None,
        *,
        timed_out: bool = False,
    ) -> NoReturn:
        self.close()
        raise LostRankError(reason, ranks, answers, timed_out=timed_out)

    def close(self) -> None:
        """End all processes."""
        if self.closed or os.getpid() != self.owner:
            return
        self.closed = True
        for worker in self._workers:
            worker.channel.close()  # an idle rank ends then
        for worker in self._workers:
            worker.wait(_FAREWELL_SECONDS)
            worker.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_WARM: dict[tuple[int, BackendName], RankPool] = {}


def warm_pool(ranks: int, backend: BackendName = GLOO.name) -> RankPool:
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


def _pack_task(task: Any, payload: Any) -> RankTask:
    try:
        return RankTask(_pickle_in_parts((task, payload)))
    except Exception as error:  # noqa: BLE001  (a user's object may raise anything when pickled)
        text = first_line(error, 1000) or type(error).__name__
        raise UsageError(
            f"the task cannot be sent to another process: {text}; "
            "define the operator at the top level of a module, where a rank can import it"
        ) from None


def _tail(log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    return " | ".join(lines[-_LINES_SHOWN:])[:400]


# --- A process of a pool: join the group, then run one task after the other -----------------------


class RankSeat(msgspec.Struct, frozen=True, kw_only=True):
    """Which rank a process is; `folder` is that of the rendezvous."""

    rank: int
    ranks: int
    backend: BackendName
    folder: str


class RankTask(msgspec.Struct, frozen=True):
    """A function and its payload, pickled: they are the parent's own."""

    content: list[bytes]


class RankReply(msgspec.Struct, frozen=True):
    """What the function returned, pickled, or what it raised, in words."""

    value: list[bytes] | None = None
    error: str | None = None


# The state of a large model is a long message; MessagePack has no bytes of 4 GiB or more.
_MOST_BYTES = 1 << 62
_PART_BYTES = 1 << 30


def _pickle_in_parts(value: Any) -> list[bytes]:
    content = memoryview(pickle.dumps(value))
    return [bytes(content[i : i + _PART_BYTES]) for i in range(0, len(content), _PART_BYTES)]


def _unpickle_parts(parts: list[bytes]) -> Any:
    return pickle.loads(b"".join(parts))  # noqa: S301  (from our own processes)


# The parent's timeout ends a task. This one applies if the parent is gone.
_COLLECTIVE_SECONDS = 1800


def prepare_rank(settings: bytes, *, forks: bool) -> Callable[[Channel], None]:  # noqa: ARG001  (no server starts ranks)
    """What the process of a rank does: join the group, and work until the channel closes."""
    seat = msgspec.json.decode(settings, type=RankSeat)

    def work(channel: Channel) -> None:
        # A forked child inherits its parent's garbage. Finalizers would run here a second time, and
        # may wait for locks that threads of the parent hold.
        gc.freeze()
        faulthandler.disable()  # what is printed last is shown
        # A forked child does not have the threads of its parent's pool, and ranks share the cores.
        torch.set_num_threads(1)
        # The fork may have happened under no_grad.
        torch.set_grad_enabled(True)
        try:
            _join_group(seat)
        except Exception as error:  # noqa: BLE001  (the parent reports it)
            channel.send(RankReply(error=in_one_line(error, 300)))
            return
        channel.send(RankReply())
        while True:
            channel.send(_run_task(seat, channel.receive(RankTask, most_bytes=_MOST_BYTES)))

    return work


def _run_task(seat: RankSeat, task: RankTask) -> RankReply:
    try:
        function, payload = _unpickle_parts(task.content)
        return RankReply(_pickle_in_parts(function(seat.rank, seat.ranks, payload)))
    except Exception as error:  # noqa: BLE001  (the parent reports it)
        so_far = getattr(error, "so_far", None)
        value = None if so_far is None else _pickle_in_parts(so_far)
        return RankReply(value, in_one_line(error, 300))


def _join_group(seat: RankSeat) -> None:
    # All ranks are on this machine, and the loopback needs neither name resolution nor a network.
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    backend = RANK_BACKENDS[seat.backend]
    if backend.needs_own_device:
        torch.cuda.set_device(seat.rank)
    store: Any = distributed.FileStore(  # type: ignore[attr-defined]
        str(Path(seat.folder) / "rendezvous"), seat.ranks
    )
    distributed.init_process_group(
        backend.group,
        store=store,
        rank=seat.rank,
        world_size=seat.ranks,
        timeout=dt.timedelta(seconds=_COLLECTIVE_SECONDS),
    )


# --- Starting the process of a rank, by fork or as a new interpreter ------------------------------


def start_method() -> str:
    """`fork` if that is safe, otherwise `anew`."""
    alone = threading.active_count() == 1
    # With an accelerator autograd has its own threads, and refuses to work in a forked process.
    still = not torch.accelerator.is_available() and not torch.distributed.is_initialized()
    return "fork" if sys.platform == "linux" and alone and still else "anew"


def _start_rank(method: str, seat: RankSeat) -> Worker:
    """Start one rank.

    Raises:
        UsageError: this system does not support the method.
    """
    program = Program(
        name=f"{__name__}:{prepare_rank.__name__}", settings=msgspec.json.encode(seat)
    )
    if method == "fork":
        return fork_worker(program)
    if method != "anew" or sys.platform == "win32":
        raise UsageError(f"ranks cannot be started by {method!r} on {sys.platform}")
    paths = [path or os.getcwd() for path in sys.path]  # noqa: PTH109
    return start_worker(program, environment_here(paths), outlives=True)
