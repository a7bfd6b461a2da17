"""Several ranks of one program: each hands in a report, and the first on a machine takes them.

They meet in a folder for temporary files, which works whatever became of the program's process
group. Ranks on other machines do not come there; the first of each machine speaks for its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping

WAIT_SECONDS = 60.0
# For the others, once this rank was told to stop: torchrun kills it half a minute later.
HURRIED_SECONDS = 5.0
_POLL_SECONDS = 0.1
_TOLD_AFTER_SECONDS = 2.0
# What the ranks of one launch have in common, and no other launch has at the same time.
_COMMON = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process among others.

    Attributes:
        rank: its number.
        world: how many there are.
        here: the numbers of those on this machine.
    """

    rank: int
    world: int
    here: range

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Ranks | None:
        """What torchrun and its like set, or None for a process alone."""
        try:
            rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            local = int(environment.get("LOCAL_RANK", rank))
            count = int(environment.get("LOCAL_WORLD_SIZE", world))
        except (KeyError, ValueError):
            return None
        return None if world <= 1 else cls(rank, world, range(rank - local, rank - local + count))

    @property
    def merges(self) -> bool:
        """Whether this one speaks for those on its machine."""
        return self.rank == self.here.start


class Meeting:
    """Where the ranks of one launch on one machine hand in their reports."""

    def __init__(self, ranks: Ranks, environment: Mapping[str, str]) -> None:
        """Name the place; the rank that merges clears it of what a killed launch left."""
        self.ranks = ranks
        common = [str(os.getppid()), *(environment.get(name, "") for name in _COMMON)]
        digest = hashlib.sha256("\n".join(common).encode()).hexdigest()[:16]
        owner = os.getuid() if hasattr(os, "getuid") else "all"
        self.folder = Path(tempfile.gettempdir()) / f"paritas-run-{owner}-{digest}"
        if ranks.merges:
            self.close()

    def hand_in(self, report: bytes) -> None:
        """Leave a report for the rank that merges; raises OSError where it cannot."""
        self._make_folder()
        unfinished = self.folder / f"{self.ranks.rank}.unfinished"
        unfinished.write_bytes(report)
        unfinished.replace(self._file(self.ranks.rank))

    def collect(self, seconds: float, hurried: threading.Event) -> dict[int, bytes]:
        """The reports of the other ranks, as far as they come in time."""
        others = [rank for rank in self.ranks.here if rank != self.ranks.rank]
        start, told = time.monotonic(), False
        while time.monotonic() < start + seconds and not hurried.is_set():
            missing = [rank for rank in others if not self._file(rank).exists()]
            if not missing:
                break
            if not told and time.monotonic() > start + _TOLD_AFTER_SECONDS:
                told = True
                listed = ", ".join(map(str, missing))
                click.echo(f"waiting up to {seconds:g} s for the report of rank {listed}", err=True)
            hurried.wait(_POLL_SECONDS)
        found = {}
        if self._is_ours():
            for rank in others:
                if self._file(rank).exists():
                    found[rank] = self._file(rank).read_bytes()
        return found

    def wait_until_closed(self, seconds: float, hurried: threading.Event) -> bool:
        """Whether the rank that merges took the reports in time."""
        deadline = time.monotonic() + seconds
        while self.folder.exists():
            if time.monotonic() >= deadline or hurried.is_set():
                return False
            hurried.wait(_POLL_SECONDS)
        return True

    def close(self) -> None:
        """Remove the folder."""
        if self._is_ours():
            shutil.rmtree(self.folder, ignore_errors=True)

    def _make_folder(self) -> None:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if not self._is_ours():
            raise PermissionError(f"{self.folder} belongs to somebody else")

    def _is_ours(self) -> bool:
        """Whether nobody else can have put anything there: folders for all are open to all."""
        try:
            status = self.folder.lstat()
        except OSError:
            return False
        mine = not hasattr(os, "getuid") or status.st_uid == os.getuid()
        closed = os.name == "nt" or not stat.S_IMODE(status.st_mode) & 0o077
        return stat.S_ISDIR(status.st_mode) and mine and closed

    def _file(self, rank: int) -> Path:
        return self.folder / f"{rank}.json"
