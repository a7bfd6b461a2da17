"""A scout: a forked process that tries what might end a process.

An operator that does not check its arguments may read foreign memory if it gets others than the
program's own. So a copy of this process tries them, and says before and after each attempt which
one it is at. If the copy ends, that attempt is known: the next copy leaves it out, and takes the
outcomes of those before it from the first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import math
import os
import pickle
import select
import signal
import struct
import sys
import time
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import torch

from paritas.core.errors import in_one_line
from paritas.core.time_limit import TimeLimit
from paritas.core.torch_private.global_state import quietly
from paritas.core.workers.inside import leave_no_core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

T = TypeVar("T")

# After this many scouts that have not come back, no other is sent.
MOST_LOST = 8
# How long an attempt may take: in seconds, and in multiples of the longest before it.
MOST_SILENT = 8.0
_LONGER = 10.0
# The first one has nothing to be compared with.
_FIRST_SILENT = 10.0
# How often to look what a scout says, and whether it is still there.
_LOOK_SECONDS = 0.1

# What a scout says: the kind, the number of the attempt, when it is, the length of the content.
_HEAD = struct.Struct("<cIdQ")
_BEGINS, _ENDS, _GOES_ON, _RETURNS, _FAILS = b"b", b"e", b"g", b"r", b"f"
# The outcome of an attempt that ended a scout, and of one whose outcome cannot be handed on.
_FATAL, _NOT_KEPT = b"fatal", b""
_HUNG = "it hung"
# Whether a fork of this process waits for something that stayed behind, such as a lock: one that
# came nowhere shows it, and the next would not come further.
_hangs = False


class FatalAttemptError(ValueError):
    """The attempt has ended a scout, so it is not made again."""


@dataclasses.dataclass(frozen=True)
class Report(Generic[T]):
    """What scouts brought back.

    Attributes:
        result: what was computed; None if no scout returned.
        lost: how each scout ended that did not return.
        failure: why there is no result; empty if there is one.
    """

    result: T | None
    lost: tuple[str, ...] = ()
    failure: str = ""


def can_scout(tensors: Iterable[Tensor]) -> bool:
    """Whether a fork of this process can compute with these tensors."""
    # No accelerator survives a fork.
    return (
        sys.platform == "linux"
        and not _hangs
        and not (torch.cuda.is_initialized() or torch.xpu.is_initialized())
        and all(tensor.device.type == "cpu" for tensor in tensors)
    )


def is_scout() -> bool:
    """Whether this process is a scout: it may be ended by what it tries."""
    return _this is not None


def attempt_apart(compute: Callable[[], T], *, keep: bool = True) -> T:
    """Compute something that might end the process; in other processes than a scout, plainly.

    Args:
        keep: if this scout is lost later, the next one gets the outcome instead of computing it
            again, if it can be pickled.

    Raises:
        FatalAttemptError: it has ended a scout.
    """
    return compute() if _this is None else _this.attempt(compute, keep=keep)


def run_apart(compute: Callable[[], T], *, seconds: float) -> Report[T]:
    """Compute something in a scout, and in another one if that is lost.

    What is returned is pickled. Everything that might end the process is computed by
    `attempt_apart`: if a scout ends elsewhere, no other is sent.

    Args:
        seconds: the time for all scouts together.
    """
    global _hangs  # noqa: PLW0603  (of the process)
    limit = TimeLimit(seconds)
    outcomes: dict[int, bytes] = {}
    lost: list[str] = []
    while len(lost) < MOST_LOST:
        try:
            watch = _Watch(_Child.fork(compute, outcomes, limit), outcomes, limit)
        except OSError as error:  # no memory, or too many processes
            return Report(None, tuple(lost), f"no process could be forked: {in_one_line(error)}")
        watch.listen()
        if watch.result is not None:
            return Report(pickle.loads(watch.result), tuple(lost))  # noqa: S301  (our own process)
        if watch.failure:
            return Report(None, tuple(lost), watch.failure)
        lost.append(watch.end)
        if watch.end == _HUNG and watch.current in (None, 1):
            _hangs = True
        if watch.current is None or limit.is_over:
            break
        outcomes[watch.current] = _FATAL
    times = "once" if len(lost) == 1 else f"{len(lost)} times"
    failure = f"the process that tries them ended {times} ({lost[-1]})"
    return Report(None, tuple(lost), failure)


# --- In the process that sends scouts -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Child:
    """A forked process.

    Attributes:
        messages: the file in memory that it writes to. Thousands of messages through a pipe would
            each wake this process, and the scout would wait for it.
        end_of_it: a pipe that has something to read when nothing is written any more.
    """

    pid: int
    messages: int
    end_of_it: int

    @classmethod
    def fork(
        cls, compute: Callable[[], Any], outcomes: dict[int, bytes], limit: TimeLimit
    ) -> _Child:
        with contextlib.ExitStack() as stack:
            messages = os.memfd_create("paritas-scout")
            stack.callback(os.close, messages)
            read, write = os.pipe()
            stack.callback(os.close, read)
            stack.callback(os.close, write)
            with quietly():  # Python warns of forks of a process with threads
                pid = os.fork()
            if not pid:
                _be_scout(compute, outcomes, (messages, write), limit.left)
            stack.pop_all()
        os.close(write)
        return cls(pid, messages, read)

    def has_finished(self, seconds: float) -> bool:
        """Wait until it has written all, or has ended, but not longer than this."""
        if select.select([self.end_of_it], [], [], seconds)[0]:
            return True
        # Another process may have inherited the other end of the pipe.
        return self.has_ended()

    def has_ended(self) -> bool:
        """Whether it has; its status is left for `end`."""
        try:
            exit_state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # the program ignores the ends of its children
            return True
        return exit_state is not None

    def end(self) -> str:
        """End it, and say how it ended."""
        os.close(self.messages)
        os.close(self.end_of_it)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            return "unknown signal"
        return signal.strsignal(-code) or str(-code) if code < 0 else f"exit code {code}"


class _Watch:
    """Listens to one scout until it returns, fails, is lost, or is out of time.

    Attributes:
        result: what it returned, pickled.
        failure: the exception that it ended with.
        current: the number of the attempt that it is at.
        end: how it was lost.
    """

    def __init__(self, child: _Child, outcomes: dict[int, bytes], limit: TimeLimit) -> None:
        self.result: bytes | None = None
        self.failure = ""
        self.current: int | None = None
        self.end = ""
        self._child = child
        self._outcomes = outcomes
        self._limit = limit
        self._heard = time.monotonic()
        self._longest: float | None = None
        self._read = 0
        self._left = b""

    def listen(self) -> None:
        """Follow it to its end."""
        is_over = False
        try:
            while not is_over:
                is_over = self._child.has_finished(_LOOK_SECONDS)
                self._take_all()
                if self._limit.is_over or time.monotonic() >= self._heard + self._patience:
                    break
        finally:
            self.end = self._child.end()
        self.end = self.end if is_over else _HUNG

    def _take_all(self) -> None:
        """Note what it has written since the last look."""
        while content := os.pread(self._child.messages, 1 << 20, self._read):
            self._read += len(content)
            self._left = self._take(self._left + content)

    @property
    def _patience(self) -> float:
        if self.current is None:
            return math.inf
        return _FIRST_SILENT if self._longest is None else MOST_SILENT + _LONGER * self._longest

    def _take(self, buffer: bytes) -> bytes:
        """Note all complete messages, and return the rest."""
        start = 0
        while len(buffer) >= start + _HEAD.size:
            kind, number, now, length = _HEAD.unpack_from(buffer, start)
            content = start + _HEAD.size
            if len(buffer) < content + length:
                break
            start = content + length
            self._note(kind, number, now, buffer[content:start])
        return buffer[start:]

    def _note(self, kind: bytes, number: int, now: float, content: bytes) -> None:
        if kind == _ENDS or (kind == _GOES_ON and self.current is not None):
            self._longest = max(self._longest or 0.0, now - self._heard)
        self._heard = now
        if kind == _BEGINS:
            self.current = number
        elif kind == _ENDS:
            self.current = None
            self._outcomes[number] = content
        elif kind == _RETURNS:
            self.result = content
        elif kind == _FAILS:
            self.failure = content.decode()


# --- In a scout -----------------------------------------------------------------------------------


class _Scout:
    """Numbers attempts, and says which one it is at."""

    def __init__(self, messages: int, outcomes: dict[int, bytes]) -> None:
        self._messages = messages
        self._outcomes = outcomes
        self._number = 0
        self._is_at_one = False

    def attempt(self, compute: Callable[[], T], *, keep: bool) -> T:
        if self._is_at_one:
            self.say(_GOES_ON)
            return compute()
        self._number += 1
        number = self._number
        stored_outcome = self._outcomes.get(number, _NOT_KEPT)
        if stored_outcome == _FATAL:
            raise FatalAttemptError("it has ended a process")
        if stored_outcome != _NOT_KEPT:
            outcome: T = pickle.loads(stored_outcome)  # noqa: S301  (our own process)
            return outcome
        self.say(_BEGINS, number)
        self._is_at_one = True
        content = _NOT_KEPT
        try:
            result = compute()
            if keep:
                # What holds functions is computed again.
                with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
                    content = pickle.dumps(result)
        finally:
            self._is_at_one = False
            self.say(_ENDS, number, content)
        return result

    def say(self, kind: bytes, number: int = 0, content: bytes = b"") -> None:
        head = _HEAD.pack(kind, number, time.monotonic(), len(content))
        unsent_bytes = memoryview(head + content)
        while unsent_bytes:
            unsent_bytes = unsent_bytes[os.write(self._messages, unsent_bytes) :]


_this: _Scout | None = None
_streams: list[Any] = []


def _be_scout(
    compute: Callable[[], Any], outcomes: dict[int, bytes], ends: tuple[int, int], seconds: float
) -> NoReturn:
    """Compute, say what it gives, and end without a word of the program whose copy this is.

    Args:
        ends: where messages are written, and what is written to when all are.
    """
    global _this  # noqa: PLW0603  (of this process only)
    try:
        _leave_the_program(seconds)
        _this = _Scout(ends[0], outcomes)
        try:
            content = pickle.dumps(compute())
        except BaseException as error:  # noqa: BLE001  (it is reported)
            _this.say(_FAILS, content=in_one_line(error).encode())
        else:
            _this.say(_RETURNS, content=content)
        os.write(ends[1], b"!")
    finally:
        os._exit(0)


def _leave_the_program(seconds: float) -> None:
    """Do nothing that the program whose copy this is would notice."""
    # Neither destructors of its objects nor its handlers of signals belong here.
    gc.disable()
    faulthandler.disable()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # It ends by itself if the program does not end it.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.0) + 1.0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    # A notebook and a test have streams of their own. If nobody held them, they would be flushed.
    _streams.extend((sys.stdout, sys.stderr))
    sys.stdout = sys.stderr = os.fdopen(nothing, "w", encoding="utf-8")
    leave_no_core()
    # The threads of OpenMP have stayed behind: whoever waits for them waits for ever.
    torch.set_num_threads(1)
