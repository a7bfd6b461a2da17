"""Which faults were taken: all of them once before any of them twice."""

from __future__ import annotations

import importlib
import multiprocessing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

TABLES = ("FAULTS", "EDITS", "KERNEL_EDITS", "TRITON_EDITS")


class Claims:
    """How often each fault of a half was taken, by this process and its forks."""

    def __init__(self, half: str, taken: Iterable[str]) -> None:
        home = importlib.import_module(f"benchmarks.places.{half}")
        names = sorted({name for table in TABLES for name in getattr(home, table)})
        self._places = {name: place for place, name in enumerate(names)}
        fork = multiprocessing.get_context("fork")
        self._counts = fork.Array("i", len(names))
        self._round = fork.Value("i", 1)
        for name in taken:
            if name in self._places:
                self._counts[self._places[name]] += 1

    def begin_round(self) -> None:
        """Each may be taken once more."""
        self._round.value += 1

    def is_free(self, fault: str) -> bool:
        """Whether it was taken less often than there were rounds."""
        return self._counts[self._places[fault]] < self._round.value

    def take(self, fault: str) -> bool:
        """Take it if it is free; whether it was."""
        with self._counts.get_lock():
            is_free = self.is_free(fault)
            self._counts[self._places[fault]] += is_free
        return is_free
