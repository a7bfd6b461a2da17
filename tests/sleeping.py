"""Waiting until all other threads sleep."""

from __future__ import annotations

import time

from paritas.core.execution.threads import ThreadTimes

# A thread that waits for a processor has not run either: give it the time to get one.
LOOKS, PAUSE = 5, 0.01


def times_when_others_sleep():
    """The clocks of the other threads, once none of them has moved for a while."""
    while True:
        times = ThreadTimes.now()
        for _ in range(LOOKS):
            time.sleep(PAUSE)
            if times.others_ran():
                break
        else:
            return times
