"""The ranks of a program that torchrun started, and how they meet."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paritas.core.time_limit import TimeLimit

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping


# Ranks exchange reports in a temporary folder, which works even if the program's process group is
# broken. The first rank of each machine reports for all ranks of that machine.

WAIT_SECONDS = 60.0
# After a stop signal: torchrun kills it half a minute later.
HURRIED_SECONDS = 5.0
_MEETING_POLL_SECONDS = 0.1
_NOTICE_AFTER_SECONDS = 2.0
# Together unique to one launch among those that run at the same time.
_COMMON = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The rank of this process, the world size, and the ranks on this machine."""

    rank: int
    world: int
    here: range

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str], *, alone: bool = False
    ) -> Ranks | None:
        """Read the variables of torchrun.

        Args:
            environment: the variables of this process.
            alone: whether the only rank that torchrun started counts as one.

        Returns:
            None if this process is no rank.
        """
        try:
            rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            local = int(environment.get("LOCAL_RANK", rank))
            count = int(environment.get("LOCAL_WORLD_SIZE", world))
        except (KeyError, ValueError):
            return None
        # Schedulers set the other variables for processes that are no ranks.
        is_single_rank = alone and "TORCHELASTIC_RUN_ID" in environment
        least = 1 if is_single_rank else 2
        here = range(rank - local, rank - local + count)
        return None if world < least else cls(rank, world, here)

    @property
    def merges(self) -> bool:
        """Whether this rank reports for all ranks on its machine."""
        return self.rank == self.here.start


class Meeting:
    """The folder where the ranks of one launch on one machine exchange reports."""

    def __init__(self, ranks: Ranks, environment: Mapping[str, str]) -> None:
        """Choose the folder; the merging rank removes what a killed launch left there."""
        self.ranks = ranks
        common = [str(os.getppid()), *(environment.get(name, "") for name in _COMMON)]
        digest = hashlib.sha256("\n".join(common).encode()).hexdigest()[:16]
        owner = os.getuid() if hasattr(os, "getuid") else "all"
        self.folder = Path(tempfile.gettempdir()) / f"paritas-run-{owner}-{digest}"
        if ranks.merges:
            self.close()

    def hand_in(self, report: bytes) -> None:
        """Leave a report for the merging rank; raises OSError if that fails."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if not self._is_ours():
            raise PermissionError(f"{self.folder} belongs to another user")
        unfinished = self.folder / f"{self.ranks.rank}.unfinished"
        unfinished.write_bytes(report)
        unfinished.replace(self._file(self.ranks.rank))

    def collect(self, seconds: float, hurried: threading.Event) -> dict[int, bytes]:
        """The reports of the other ranks that arrive in time."""
        others = [rank for rank in self.ranks.here if rank != self.ranks.rank]
        limit, noticed = TimeLimit(seconds), False
        while not limit.is_over and not hurried.is_set():
            missing = [rank for rank in others if not self._file(rank).exists()]
            if not missing:
                break
            if not noticed and limit.spent > _NOTICE_AFTER_SECONDS:
                noticed = True
                listed = ", ".join(map(str, missing))
                click.echo(f"waiting up to {seconds:g} s for the report of rank {listed}", err=True)
            hurried.wait(_MEETING_POLL_SECONDS)
        if not self._is_ours():
            return {}
        return {rank: self._file(rank).read_bytes() for rank in others if self._file(rank).exists()}

    def wait_until_closed(self, seconds: float, hurried: threading.Event) -> bool:
        """Whether the merging rank read the reports in time."""
        limit = TimeLimit(seconds)
        while self.folder.exists():
            if limit.is_over or hurried.is_set():
                return False
            hurried.wait(_MEETING_POLL_SECONDS)
        return True

    def close(self) -> None:
        """Remove the folder."""
        if self._is_ours():
            shutil.rmtree(self.folder, ignore_errors=True)

    def _is_ours(self) -> bool:
        """Whether no other user can write there: folders for temporary files are open to all."""
        try:
            status = self.folder.lstat()
        except OSError:
            return False
        is_own_directory = not hasattr(os, "getuid") or status.st_uid == os.getuid()
        closed = os.name == "nt" or not stat.S_IMODE(status.st_mode) & 0o077
        return stat.S_ISDIR(status.st_mode) and is_own_directory and closed

    def _file(self, rank: int) -> Path:
        return self.folder / f"{rank}.json"
