"""Python's search for unreachable objects, while a large table grows."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["few_full_collections"]

# Full ones are so many times as rare as the next lesser ones.
_SELDOM = 1000


@contextlib.contextmanager
def few_full_collections() -> Iterator[None]:
    """Within, Python seldom goes over all objects there are.

    A table of 50,000 rows is a million objects that stay, and looking through all of them again
    and again takes as long as matching does. What is young is looked through as often as ever.
    """
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], max(before[2], _SELDOM))
    try:
        yield
    finally:
        gc.set_threshold(*before)
