"""Whether other threads ran meanwhile: torch's random generators belong to all of them."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time

# Linux makes the clock of a thread's processor time from its number and this kind.
_THREAD_CLOCK = 6


@dataclasses.dataclass(frozen=True)
class ThreadTimes:
    """The processor time of every other thread of this process that runs Python, at one moment.

    Attributes:
        times: identity of a thread -> nanoseconds; None where the system does not tell.
    """

    times: dict[int, int] | None

    @classmethod
    def now(cls) -> ThreadTimes:
        """Read the clocks of all other threads."""
        if sys.platform != "linux":
            return cls(None)
        own_ident = threading.get_ident()
        native_ids = {thread.ident: thread.native_id for thread in threading.enumerate()}
        try:
            # This also knows threads that torch or another library has started.
            clocks = {
                ident: _clock_of_thread(ident, native_ids.get(ident))
                for ident in sys._current_frames()  # noqa: SLF001
                if ident != own_ident
            }
            return cls({ident: time.clock_gettime_ns(clock) for ident, clock in clocks.items()})
        except OSError:  # a thread has just ended
            return cls(None)

    def others_ran(self) -> bool:
        """Whether another thread has used the processor since, as far as that can be known."""
        return self.times is None or self.times != ThreadTimes.now().times


def _clock_of_thread(ident: int, number: int | None) -> int:
    """The clock of a thread's processor time, by its number in the system if that is known.

    That of a thread which Python did not start is asked for by its identity; such threads, as those
    of autograd and of pytest-xdist, last as long as the process.
    """
    return time.pthread_getcpuclockid(ident) if number is None else ~number << 3 | _THREAD_CLOCK
