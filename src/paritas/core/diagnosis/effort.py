"""Limits of searches that give the same answers on a busy machine.

A limit in seconds finds less where each step takes longer. A small fixed piece of work shows how
slow the machine is now, and the limits grow with that.
"""

from __future__ import annotations

import contextlib
import contextvars
import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

# What the piece of work takes on a machine that is neither fast nor busy, in seconds.
_USUAL = 150e-6
# A machine that is slower than this is not waited for.
_SLOWEST = 4.0
_ADDITIONS = 100


# When all searches must have ended, by `time.monotonic`.
_end: contextvars.ContextVar[float] = contextvars.ContextVar("end of all", default=float("inf"))


@contextlib.contextmanager
def ending_within(seconds: float) -> Iterator[None]:
    """Searches that begin in here last shorter as the time of all of them runs out."""
    token = _end.set(min(_end.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _end.reset(token)


def until(seconds: float) -> float:
    """When this many seconds of a quiet machine are over, by `now`."""
    residual = max(0.0, _end.get() - time.monotonic())
    return now() + min(seconds * _slowness(), residual)


def now() -> float:
    """The time of this thread: what else runs beside it does not count."""
    return time.thread_time()


def _slowness() -> float:
    values = torch.ones(64, dtype=torch.float64)
    least = min(_time_of_work(values) for _ in range(3))
    return min(max(1.0, least / _USUAL), _SLOWEST)


def _time_of_work(values: torch.Tensor) -> float:
    began = now()
    for _ in range(_ADDITIONS):
        torch.add(values, values)
    return now() - began
