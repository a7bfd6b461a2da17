"""The time that something may take, and how its end reaches into what takes long.

A call in another process ends with that process. Runs in this one end where they ask for the time,
and compilations wherever they are.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


class OutOfTime(BaseException):
    """The time limit was reached.

    It is no `Exception`: what keeps those that a user's program raises must let it pass.
    """


class TimeLimit:
    """The time that a judgement, a search or a wait may take.

    Attributes:
        seconds: all of it.
        of_thread: count the time of the processor in the thread that asks: what runs beside it,
            and waiting, do not count. Otherwise the time of the clock.
    """

    def __init__(self, seconds: float, *, of_thread: bool = False) -> None:
        """Begin now."""
        self.seconds, self.of_thread = seconds, of_thread
        self.begin()

    def begin(self, spent: float = 0.0) -> None:
        """Begin anew; `spent` seconds of the time are gone already."""
        self._began = self._now() - spent
        self._end = self._began + self.seconds

    @property
    def left(self) -> float:
        """The seconds that are left; negative after the end."""
        return self._end - self._now()

    @property
    def spent(self) -> float:
        """The seconds since the beginning, of a limit without an end as well."""
        return self._now() - self._began

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return self.left <= 0

    def shorten(self, seconds: float) -> TimeLimit:
        """Another limit: what is left of this one, but at most so many seconds from now on."""
        return TimeLimit(min(self.left, seconds), of_thread=self.of_thread)

    def require(self, seconds: float = 0.0) -> None:
        """Require that this much time is left.

        Raises:
            OutOfTime: it is not.
        """
        if self.left <= seconds:
            raise OutOfTime

    @contextlib.contextmanager
    def reserving(self, seconds: float) -> Iterator[None]:
        """Keep some of the time for what comes after this block."""
        self._end -= seconds
        try:
            yield
        finally:
            self._end += seconds

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """Do not count the time of this block, which has a limit of its own."""
        began = self._now()
        try:
            yield
        finally:
            self._end += self._now() - began

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """End this block when the limit, by the clock, is reached, also within a compilation.

        By a signal, as Ctrl-C does: in other threads, on systems without it, and while another
        timer of the process runs, the block ends where it asks for the time.

        Raises:
            OutOfTime: the time limit was reached.
        """
        self.require()
        if not _can_interrupt():
            yield
            return
        before = signal.signal(signal.SIGALRM, _raise_out_of_time)
        # What swallows the first one, such as a destructor, does not swallow the next.
        signal.setitimer(signal.ITIMER_REAL, self.left, _AGAIN_AFTER)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _now(self) -> float:
        return time.thread_time() if self.of_thread else time.monotonic()


UNLIMITED = TimeLimit(math.inf)

# Long enough to put everything back that the first interruption leaves changed.
_AGAIN_AFTER = 10.0


def _can_interrupt() -> bool:
    if threading.current_thread() is not threading.main_thread():
        return False
    return hasattr(signal, "setitimer") and signal.getitimer(signal.ITIMER_REAL)[0] == 0


def _raise_out_of_time(*_: Any) -> None:
    raise OutOfTime
