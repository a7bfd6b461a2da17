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
        times: number of a thread -> nanoseconds; None where the system does not tell.
    """

    times: dict[int, int] | None

    @classmethod
    def now(cls) -> ThreadTimes:
        """Read the clocks of all other threads."""
        mine = threading.get_ident()
        known = {thread.ident: thread.native_id for thread in threading.enumerate()}
        # This also knows threads that torch or another library has started.
        numbers = [known.get(ident) for ident in sys._current_frames() if ident != mine]  # noqa: SLF001
        if not numbers:
            return cls({})
        if sys.platform != "linux" or None in numbers:
            return cls(None)
        try:
            clocks = {number: ~number << 3 | _THREAD_CLOCK for number in numbers if number}
            return cls({n: time.clock_gettime_ns(clock) for n, clock in clocks.items()})
        except OSError:  # a thread has just ended
            return cls(None)

    def others_ran(self) -> bool:
        """Whether another thread has used the processor since, as far as that can be known."""
        return self.times is None or self.times != ThreadTimes.now().times
