"""Reading a dump: one that was closed, one whose run was killed, and one that is being written."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paritas.dumps.dtypes import digest, known_dtype, sketch_dtype, stored_dtype
from paritas.dumps.folders import HEADER, rank_folders
from paritas.dumps.index import RankDump, read_rank
from paritas.dumps.repairing import complete_files
from paritas.dumps.validating import Files, check_payload, check_sketch
from paritas.errors import ParitasError, UsageError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.dumps.records import Header, Payload, Record

__all__ = ["Dump", "RankDump"]

_MOST_NAMED = 5


class Dump:
    """A dump that can be read.

    Nothing in it is trusted: a line of the index, a size and a path are checked before they are
    used, and what does not hold is a problem that is listed while the rest can be read.

    Attributes:
        path: its folder.
        kind: it is one of ours.
        ranks: by number.
        problems: of all ranks, and between them.
    """

    kind = "paritas"

    def __init__(self, path: Path, ranks: dict[int, RankDump], problems: list[str]) -> None:
        """Use `open`."""
        self.path = path
        self.ranks = ranks
        self.problems = problems
        self._files = Files(path)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Dump:
        """Read the index of every rank.

        Raises:
            UsageError: this is no dump.
        """
        root = Path(path)
        problems: list[str] = []
        ranks: dict[int, RankDump] = {}
        files = Files(root)
        for rank, folder in _found_ranks(root).items():
            try:
                found = read_rank(rank, folder, files)
            except UsageError as error:
                problems.append(f"rank {rank}: {error}")
                continue
            ranks[rank] = found
            problems += [f"rank {rank}: {problem}" for problem in found.problems]
        if not ranks:
            raise UsageError(f"{root} cannot be read: {'; '.join(problems)}")
        runs = {found.header.run for found in ranks.values()}
        if len(runs) > 1:
            told = ", ".join(f"rank {rank} of {ranks[rank].header.run[:8]}" for rank in ranks)
            problems.append(f"it is of {len(runs)} runs: {told}")
        return cls(root, ranks, problems)

    def header(self, rank: int) -> Header:
        """What a rank says of its part."""
        return self._rank(rank).header

    def records(self) -> Iterator[Record]:
        """All of them, rank by rank, in the order of recording."""
        for found in self.ranks.values():
            yield from found.records

    def read(self, record: Record, *, check: bool = True) -> Tensor:
        """The values of a record, in memory of their own, in its dtype and shape.

        Dimensions that the recorded tensor repeated are repeated, not copied. The values of a
        quantised tensor are float32.

        Args:
            check: compare the bytes with their digest.

        Raises:
            UsageError: they are missing, damaged, or were not recorded.
        """
        layout = self._rank(record.rank).header.layout
        try:
            path = check_payload(record, self._files, layout)
            payload, facts = record.payload, record.tensor
            if layout == "msit" or payload is None or facts is None:
                from paritas.dumps import msit_layout

                return msit_layout.read_npy(path, record)
            dtype = stored_dtype(known_dtype(facts.dtype))
            values = _read_values(path, payload, dtype)
            if check and record.digest and digest(values) != record.digest:
                raise UsageError(
                    f"the bytes at {payload.begin} of {payload.file} are not those that were "
                    f"written: their digest is {digest(values)}, not {record.digest}"
                )
            return values.expand(facts.shape)
        except (ParitasError, OSError) as error:
            raise UsageError(f"{record.id} of step {record.step}: {error}") from error

    def read_sketch(self, record: Record) -> Tensor:
        """The linear sketch of a record's values.

        Raises:
            UsageError: it is missing, damaged, or was not recorded.
        """
        try:
            path, sketch = check_sketch(record, self._files)
            return _read_values(path, sketch, sketch_dtype(sketch))
        except (UsageError, OSError) as error:
            raise UsageError(f"sketch of {record.id} of step {record.step}: {error}") from error

    def repair(self) -> list[Path]:
        """Make the data files that a killed run left safetensors files; gives those it mended.

        What cannot be mended becomes a problem.

        Raises:
            UsageError: a rank is still being written.
        """
        mended: list[Path] = []
        for found in self.ranks.values():
            paths, problems = complete_files(found, self._files)
            mended += paths
            self.problems += [f"rank {found.rank}: {problem}" for problem in problems]
        return mended

    def _rank(self, rank: int) -> RankDump:
        if rank not in self.ranks:
            there = ", ".join(map(str, sorted(self.ranks)))
            raise UsageError(f"{self.path} has no rank {rank}; it has {there}")
        return self.ranks[rank]


def _found_ranks(root: Path) -> dict[int, Path]:
    """The folders of the ranks, or a message that says what was looked for."""
    if not root.is_dir():
        raise UsageError(f"{root} is {'no folder' if root.exists() else 'not there'}: give a dump")
    ranks = rank_folders(root)
    if ranks:
        return ranks
    if (root / HEADER).is_file():
        raise UsageError(f"{root} is one rank of a dump: give the folder above it, {root.parent}")
    names = sorted(path.name for path in root.iterdir())
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    found = ", ".join(names[:_MOST_NAMED]) + more if names else "nothing"
    raise UsageError(
        f"{root} is no dump of paritas: looked for rank0/{HEADER}, rank1/{HEADER} and so on, "
        f"found {found}"
    )


def _read_values(path: Path, payload: Payload, dtype: torch.dtype) -> Tensor:
    """Bytes of a file as a tensor; their place was checked."""
    raw = torch.empty(payload.nbytes, dtype=torch.uint8)
    with path.open("rb", buffering=0) as file:
        file.seek(payload.begin)
        room, done = raw.numpy().data, 0
        while done < payload.nbytes:
            count = file.readinto(room[done:])
            if not count:
                raise UsageError(f"{payload.file} was cut off while it was read")
            done += count
    with warnings.catch_warnings():
        # Torch warns that few operators know half complex numbers. None is asked for any here.
        warnings.simplefilter("ignore", UserWarning)
        return raw.view(dtype).reshape(payload.shape)
