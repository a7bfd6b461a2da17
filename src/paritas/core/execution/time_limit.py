"""The time limit of a judgement or a search, and how it reaches into what takes long.

A call in another process ends with that process. Runs in this one end at the next operator, and
compilations wherever they are.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from paritas.core.torch_private.operators import DispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterator


class OutOfTime(BaseException):
    """The time limit was reached.

    It is no `Exception`: what keeps those that a user's program raises must let it pass.
    """


class TimeLimit:
    """The time that one judgement may take.

    Attributes:
        seconds: all of it.
    """

    def __init__(self, seconds: float) -> None:
        """Begin now."""
        self.seconds = seconds
        self.begin()

    def begin(self, spent: float = 0.0) -> None:
        """Begin anew; `spent` seconds of the time are gone already."""
        self._end = time.monotonic() + self.seconds - spent

    @property
    def left(self) -> float:
        """The seconds that are left; negative after the end."""
        return self._end - time.monotonic()

    @property
    def is_reached(self) -> bool:
        """Whether no time is left."""
        return self.left <= 0

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
    def interrupting(self) -> Iterator[None]:
        """End this block when the limit is reached, also within a compilation.

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


# Long enough to put everything back that the first interruption leaves changed.
_AGAIN_AFTER = 10.0


def _can_interrupt() -> bool:
    if threading.current_thread() is not threading.main_thread():
        return False
    return hasattr(signal, "setitimer") and signal.getitimer(signal.ITIMER_REAL)[0] == 0


def _raise_out_of_time(*_: Any) -> None:
    raise OutOfTime


class TimeWatch(DispatchMode):
    """Ends a run at the first operator after the time limit."""

    supports_higher_order_operators = True

    def __init__(self, limit: TimeLimit) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._limit = limit

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator.

        Raises:
            OutOfTime: the time limit was reached.
        """
        self._limit.require()
        return func(*args, **(kwargs or {}))
