"""A dump of another tool: the same questions can be asked of it as of one of ours."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from paritas.dumps.index import RankDump
from paritas.dumps.records import Header
from paritas.errors import ParitasError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from paritas.dumps.records import Record

__all__ = ["ForeignDump", "rank_of"]


class ForeignDump:
    """A dump that another tool made.

    What a file says is turned into records when the dump is opened; values are read when they are
    asked for. What cannot be read is a problem that is listed, and the rest goes on.

    Attributes:
        path: its folder or file.
        kind: which tool's it is, for example `ge`.
        ranks: by number.
        problems: what could not be understood.
    """

    def __init__(
        self,
        path: Path,
        kind: str,
        ranks: dict[int, RankDump],
        problems: list[str],
        read: Callable[[Record], Tensor],
        view: Callable[[Record, bool], Tensor],
        verify: Callable[[Record], bool] | None = None,
    ) -> None:
        """Use the `open_dump` of a reader.

        Args:
            read: gives the values of a record, in its dtype and logical shape.
            view: gives the same, mapped from its file where that can be; held against their
                checksum if the second argument says so.
            verify: as the method of that name does; None where the tool keeps no checksums.
        """
        self.path = path
        self.kind = kind
        self.ranks = ranks
        self.problems = problems
        self._read = read
        self._view = view
        self._verify = verify

    def header(self, rank: int) -> Header:
        """What is known of a rank's part."""
        if rank not in self.ranks:
            there = ", ".join(map(str, sorted(self.ranks)))
            raise UsageError(f"{self.path} has no rank {rank}; it has {there}")
        return self.ranks[rank].header

    def records(self) -> Iterator[Record]:
        """All of them, rank by rank, in the order of the program as far as that is known."""
        for found in self.ranks.values():
            yield from found.records

    def read(self, record: Record) -> Tensor:
        """The values of a record.

        Raises:
            UsageError: they are missing, damaged, or were not recorded.
        """
        with _naming(record):
            return self._read(record)

    def view(self, record: Record, *, check: bool = False) -> Tensor:
        """The values of a record as `read` gives them, in memory of their own only where they must.

        They are mapped from the file, for as long as the tensor lives; what is small, compressed,
        widened, in another layout or not aligned is read. Who writes into them writes into a copy.

        Args:
            check: hold them against their checksum, where there is one.

        Raises:
            UsageError: they are missing, damaged, or were not recorded.
        """
        with _naming(record):
            return self._view(record, check)

    def verify(self, record: Record) -> bool:
        """Hold the stored bytes of a record against their checksum.

        Returns:
            Whether there is one. Zip archives have one for each member: files of `torch.save`, and
            `.npz` files. No other file of another tool has any.

        Raises:
            UsageError: they are missing, or not those that were written.
        """
        self.header(record.rank)  # refuses a rank that is not there
        if record.payload is None or self._verify is None:
            return False
        with _naming(record):
            return self._verify(record)

    def check_files(self) -> list[str]:
        """All that files say beside their values was read when the dump was opened."""
        return []

    def read_sketch(self, record: Record) -> Tensor:
        """No other tool makes sketches."""
        raise UsageError(f"{record.id} of step {record.step} has no sketch: {self.kind} makes none")


@contextlib.contextmanager
def _naming(record: Record) -> Iterator[None]:
    """What is wrong with a record's values is told with its name."""
    try:
        yield
    except (ParitasError, OSError) as error:
        raise UsageError(f"{record.id} of step {record.step}: {error}") from error


def rank_of(
    path: Path,
    kind: str,
    rank: int,
    records: list[Record],
    *,
    world_size: int = 1,
    data: str = "tensor",
    problems: list[str] | None = None,
) -> RankDump:
    """A rank's part of a foreign dump."""
    header = Header(
        run=f"{kind} {path}",
        rank=rank,
        world_size=world_size,
        program=kind,
        data="stats" if data == "stats" else "tensor",
        closed=True,
        records=len(records),
    )
    return RankDump(rank, path, header, "closed", records, problems or [])
