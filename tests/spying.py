"""Notes of what a program was called with, where `verify` puts back all that it finds."""

from __future__ import annotations

import queue
from typing import Any


class Spy:
    """Keeps notes where no isolation reaches: lists in closures and attributes are put back."""

    def __init__(self) -> None:
        self._notes: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def note(self, value: Any) -> None:
        self._notes.put(value)

    def notes(self) -> list[Any]:
        """All notes, in order."""
        found = [self._notes.get() for _ in range(self._notes.qsize())]
        for value in found:
            self._notes.put(value)
        return found
