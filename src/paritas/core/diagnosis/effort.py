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

from paritas.core.time_limit import UNLIMITED, TimeLimit

if TYPE_CHECKING:
    from collections.abc import Iterator

# What the piece of work takes on a machine that is neither fast nor busy, in seconds.
_USUAL = 150e-6
# A machine that is slower than this is not waited for.
_SLOWEST = 4.0
_ADDITIONS = 100


# The time for all searches together.
_all: contextvars.ContextVar[TimeLimit] = contextvars.ContextVar("of all", default=UNLIMITED)


@contextlib.contextmanager
def ending_within(seconds: float) -> Iterator[None]:
    """Searches that begin in here last shorter as the time of all of them runs out."""
    token = _all.set(_all.get().shorten(seconds))
    try:
        yield
    finally:
        _all.reset(token)


def limit_search(seconds: float) -> TimeLimit:
    """This many seconds of a quiet machine: what else runs beside this thread does not count."""
    return TimeLimit(min(seconds * _slowness(), max(0.0, _all.get().left)), of_thread=True)


def _slowness() -> float:
    values = torch.ones(64, dtype=torch.float64)
    least = min(_time_of_work(values) for _ in range(3))
    return min(max(1.0, least / _USUAL), _SLOWEST)


def _time_of_work(values: torch.Tensor) -> float:
    began = time.thread_time()
    for _ in range(_ADDITIONS):
        torch.add(values, values)
    return time.thread_time() - began
