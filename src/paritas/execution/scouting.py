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
import os
import pickle
import select
import signal
import struct
import sys
import time
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import torch

from paritas._torch.global_state import quietly
from paritas.errors import in_one_line

if sys.platform != "win32":
    import resource

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
# How often to look whether a scout is still there that says nothing.
_LOOK_SECONDS = 0.1

# What a scout says: the kind, the number of the attempt, the length of the content.
_HEAD = struct.Struct("<cIQ")
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
    until = time.monotonic() + seconds
    outcomes: dict[int, bytes] = {}
    lost: list[str] = []
    while len(lost) < MOST_LOST:
        try:
            watch = _Watch(_Child.fork(compute, outcomes, until), outcomes, until)
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
        if watch.current is None or time.monotonic() > until:
            break
        outcomes[watch.current] = _FATAL
    times = "once" if len(lost) == 1 else f"{len(lost)} times"
    failure = f"the process that tries them ended {times} ({lost[-1]})"
    return Report(None, tuple(lost), failure)


# --- In the process that sends scouts -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Child:
    """A forked process, and the end of the pipe that it writes to."""

    pid: int
    messages: int

    @classmethod
    def fork(cls, compute: Callable[[], Any], outcomes: dict[int, bytes], until: float) -> _Child:
        read, write = os.pipe()
        try:
            with quietly():  # Python warns of forks of a process with threads
                pid = os.fork()
        except BaseException:
            os.close(read)
            os.close(write)
            raise
        if not pid:
            _be_scout(compute, outcomes, write, until - time.monotonic())
        os.close(write)
        return cls(pid, read)

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

    def __init__(self, child: _Child, outcomes: dict[int, bytes], until: float) -> None:
        self.result: bytes | None = None
        self.failure = ""
        self.current: int | None = None
        self.end = ""
        self._child = child
        self._outcomes = outcomes
        self._until = until
        self._heard = time.monotonic()
        self._longest: float | None = None

    def listen(self) -> None:
        """Follow it to its end."""
        hung = False
        try:
            buffer = b""
            while self.result is None and not self.failure:
                content = self._read()
                if content is None:
                    hung = True
                    break
                if not content:
                    break
                buffer = self._take(buffer + content)
        finally:
            self.end = self._child.end()
        self.end = _HUNG if hung else self.end

    def _read(self) -> bytes | None:
        """What it says next; empty at its end, None if it says nothing for too long."""
        while time.monotonic() < min(self._until, self._heard + self._patience):
            if select.select([self._child.messages], [], [], _LOOK_SECONDS)[0]:
                return os.read(self._child.messages, 1 << 16)
            # Another process may have inherited the other end of the pipe.
            if self._child.has_ended():
                is_left = select.select([self._child.messages], [], [], 0)[0]
                return os.read(self._child.messages, 1 << 16) if is_left else b""
        return None

    @property
    def _patience(self) -> float:
        if self.current is None:
            return self._until
        return _FIRST_SILENT if self._longest is None else MOST_SILENT + _LONGER * self._longest

    def _take(self, buffer: bytes) -> bytes:
        """Note all complete messages, and return the rest."""
        while len(buffer) >= _HEAD.size:
            kind, number, length = _HEAD.unpack_from(buffer)
            end = _HEAD.size + length
            if len(buffer) < end:
                break
            self._note(kind, number, buffer[_HEAD.size : end])
            buffer = buffer[end:]
        return buffer

    def _note(self, kind: bytes, number: int, content: bytes) -> None:
        now = time.monotonic()
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
        known = self._outcomes.get(number, _NOT_KEPT)
        if known == _FATAL:
            raise FatalAttemptError("it has ended a process")
        if known != _NOT_KEPT:
            outcome: T = pickle.loads(known)  # noqa: S301  (our own process)
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
        left = memoryview(_HEAD.pack(kind, number, len(content)) + content)
        while left:
            left = left[os.write(self._messages, left) :]


_this: _Scout | None = None
_streams: list[Any] = []


def _be_scout(
    compute: Callable[[], Any], outcomes: dict[int, bytes], messages: int, seconds: float
) -> NoReturn:
    """Compute, say what it gives, and end without a word of the program whose copy this is."""
    global _this  # noqa: PLW0603  (of this process only)
    try:
        _leave_the_program(seconds)
        _this = _Scout(messages, outcomes)
        try:
            content = pickle.dumps(compute())
        except BaseException as error:  # noqa: BLE001  (it is reported)
            _this.say(_FAILS, content=in_one_line(error).encode())
        else:
            _this.say(_RETURNS, content=content)
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
    _leave_no_core()
    # The threads of OpenMP have stayed behind: whoever waits for them waits for ever.
    torch.set_num_threads(1)


def _leave_no_core() -> None:
    # A limit of 1 byte also keeps a core from a program that collects them, a limit of 0 does not.
    most = resource.getrlimit(resource.RLIMIT_CORE)[1]
    least = 1 if most == resource.RLIM_INFINITY else min(1, most)
    resource.setrlimit(resource.RLIMIT_CORE, (least, least))
