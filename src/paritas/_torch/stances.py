"""Stances of the compiler, taken by threads that overlap.

Torch has one for the whole process, and whoever leaves puts back what it found. Where two threads
overlap, that may be what the other had taken, which would then stay for good: no program would be
compiled any more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Backend = Callable[..., Any] | str | None

__all__ = ["taking_stance"]


@dataclasses.dataclass(frozen=True, eq=False)
class _Taken:
    """One that was taken, and torch's own switch that knows what was in force before the first."""

    name: str
    backend: Backend
    first: Any


# Those that were taken and not left yet, of all threads; the last is in force.
_taken: list[_Taken] = []
_lock = threading.Lock()


@contextlib.contextmanager
def taking_stance(name: str, *, backend: Backend = None) -> Iterator[None]:
    """`torch.compiler.set_stance`; when the last has left, all is as the first found it."""
    with _lock:
        switch = torch.compiler.set_stance(name, force_backend=backend)
        mine = _Taken(name, backend, _taken[0].first if _taken else switch)
        _taken.append(mine)
    try:
        yield
    finally:
        with _lock:
            _taken.remove(mine)
            if _taken:
                torch.compiler.set_stance(_taken[-1].name, force_backend=_taken[-1].backend)
            else:
                mine.first.__exit__(None, None, None)
