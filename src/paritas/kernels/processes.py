"""The processes in which candidates run, seen from the judge.

Whatever a candidate does, the judge gets an answer: a record, or how the process ended. A process
loads one candidate, and makes the calls that it is ordered to make. Inputs are all that it gets.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from paritas.core.time_limit import OutOfTime
from paritas.core.workers.channel import ChannelClosedError, MessageError
from paritas.core.workers.starting import describe_end
from paritas.core.workers.worker import Worker, start_worker
from paritas.kernels.messages import (
    LONGEST_TEXT,
    Broken,
    Construct,
    Constructed,
    Load,
    Loaded,
    Order,
)
from paritas.kernels.servers import candidate_environment, candidate_program, stop_servers
from paritas.kernels.wire import encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.core.time_limit import TimeLimit
    from paritas.core.workers.server import WorkerServer
    from paritas.kernels.messages import SideName

T = TypeVar("T")

_LONGEST_LOG = 2000
_GRACE_SECONDS = 5.0
# The folders of running processes.
_folders: set[str] = set()


class CandidateEnded(Exception):  # noqa: N818  (how a process ended, not an error of ours)
    """A candidate's process is gone.

    Attributes:
        how: what happened, in words.
        kind: `crashed`, `timed out`.
        log: the end of what it printed.
    """

    def __init__(self, how: str, kind: str, log: str = "") -> None:
        super().__init__(how)
        self.how, self.kind, self.log = how, kind, log


class CandidateProcess:
    """The process of one candidate, or of a reference that is timed against it.

    Attributes:
        loaded: what its import did.
        is_gone: whether it has ended.
    """

    def __init__(
        self,
        side: SideName,
        server: WorkerServer | None,
        *,
        device: str = "cpu",
        memory: int = 0,
        seconds: float = 60.0,
        limit: TimeLimit | None = None,
        is_candidate: bool = True,
    ) -> None:
        """Start it, and load the side in it.

        Args:
            seconds: the time limit of loading.
            limit: the time limit of everything that it is asked.

        Raises:
            CandidateEnded: the process ended meanwhile.
            OutOfTime: the time limit was reached.
        """
        self._limit = limit
        self._device = device
        self._folder = tempfile.TemporaryDirectory(prefix="kernel-", ignore_cleanup_errors=True)
        _folders.add(self._folder.name)
        if device.startswith("cuda"):
            memory = 0  # CUDA reserves far more addresses than it uses
        if server is not None and server.is_usable:
            self._worker = Worker(partial(server.start, memory=memory))
        else:
            self._worker = start_worker(candidate_program(), candidate_environment(), memory=memory)
        self.is_gone = False
        order = Load(
            side=side,
            device=device,
            folder=str(Path.cwd()),
            temporary=self._folder.name,
            paths=[path for path in sys.path if path],
            is_candidate=is_candidate,
        )
        try:
            self.loaded = self.ask(order, Loaded, seconds)
        except (CandidateEnded, OutOfTime):
            self.close()
            raise

    def ask(self, order: Order, answer_type: type[T], seconds: float) -> T:
        """Give one order and wait for the answer.

        Raises:
            CandidateEnded: the process ended, hung, or sent something else.
            OutOfTime: the time limit was reached.
        """
        remaining_seconds = seconds if self._limit is None else self._limit.left
        patience = max(min(seconds, remaining_seconds), 0.05)
        expected: Any = answer_type | Broken
        try:
            self._worker.channel.send(order, seconds=patience)
            answer = self._worker.channel.receive(expected, seconds=patience)
        except TimeoutError:
            self._end(0)
            if remaining_seconds < seconds:
                raise OutOfTime from None
            raise CandidateEnded(f"it did not return within {seconds:.3g} s", "timed out") from None
        except MessageError as error:
            self._end()
            raise CandidateEnded(
                f"it sent {error} instead of a result", "crashed", self._read_log()
            ) from None
        except ChannelClosedError:
            how = f"its process {describe_end(self._end())}"
            raise CandidateEnded(how, "crashed", self._read_log()) from None
        if isinstance(answer, Broken):
            self._end(0)
            how = f"its process cannot go on: {answer.reason:.{LONGEST_TEXT}}"
            raise CandidateEnded(how, "crashed", self._read_log())
        return answer  # type: ignore[no-any-return]

    def construct(
        self,
        init: Any,
        seed: int,
        seconds: float,
        dtype: str = "",
        *,
        moves: bool = False,
        reads_state: bool = True,
    ) -> Constructed:
        """Make what is called, and move it, if asked; return its parameters and buffers."""
        order = Construct(
            init=encode(init),
            seed=seed,
            device=self._device,
            dtype=dtype,
            moves=moves,
            reads_state=reads_state,
        )
        return self.ask(order, Constructed, seconds)

    def _end(self, seconds: float = _GRACE_SECONDS) -> int:
        """The exit code; a process that closed its channel but goes on is killed."""
        self.is_gone = True
        self._worker.channel.close()
        return self._worker.wait(seconds)

    def _read_log(self) -> str:
        return self._worker.read_log()[-_LONGEST_LOG:]

    def close(self) -> None:
        """End it."""
        if not self.is_gone:
            self._end(0)
        self._worker.close()
        self._folder.cleanup()
        _folders.discard(self._folder.name)

    @property
    def temporary(self) -> str:
        """Its own folder for temporary files."""
        return self._folder.name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class LastResort:
    """Ends this process if a block goes on long after the time limit.

    The limit reaches into most of what takes long. A function of the task, or one operator, may
    still not return.
    """

    def __init__(self, seconds: float, give_up: Callable[[], int]) -> None:
        """`give_up` reports what is known, in another thread, and returns the exit code."""
        self._give_up = give_up
        self._settled = threading.Lock()
        self._timer = threading.Timer(seconds + _GRACE_SECONDS, self._end)
        self._timer.daemon = True

    def _end(self) -> None:
        if not self._settled.acquire(blocking=False):
            return
        code = 3
        try:
            code = self._give_up()
            sys.stdout.flush()
            sys.stderr.flush()
            stop_servers()
            for folder in list(_folders):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os._exit(code)

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        if not self._settled.acquire(blocking=False):
            self._timer.join()  # it ends this process
