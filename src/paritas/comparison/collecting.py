"""Python's search for unreachable objects, while a large table grows."""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["few_full_collections"]

# Full ones are so many times as rare as the next lesser ones.
_SELDOM = 1000
# What was in force before each use that is not over yet: the setting is one for all threads, and
# what the last of them puts back has to be what the first one found.
_before: list[tuple[int, int, int]] = []
_lock = threading.Lock()


@contextlib.contextmanager
def few_full_collections() -> Iterator[None]:
    """Within, Python seldom goes over all objects there are.

    A table of 50,000 rows is a million objects that stay, and looking through all of them again
    and again takes as long as matching does. What is young is looked through as often as ever.
    """
    with _lock:
        _before.append(gc.get_threshold())
        gc.set_threshold(*_before[-1][:2], max(_before[-1][2], _SELDOM))
    try:
        yield
    finally:
        with _lock:
            gc.set_threshold(*_before.pop())
