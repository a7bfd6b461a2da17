"""Read a dump: one that was closed, one whose run was killed, or one still being written."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash

from paritas.compat.foreign_dump import name_record_in_errors
from paritas.compat.npy_tree import read_npy
from paritas.dumps.index import DumpFiles, check_payload, check_sketch, read_rank
from paritas.errors import UsageError
from paritas.files.dtypes import (
    digest,
    in_safetensors,
    known_dtype,
    sketch_dtype,
    stored_dtype,
    stored_shape,
)
from paritas.files.folders import (
    HEADER,
    LOCK,
    index_home,
    is_data,
    is_locked,
    rank_folders,
    volumes_of,
)
from paritas.files.safetensors_files import PackedPiece, complete, is_complete, read_entries
from paritas.files.tensor_bytes import FilePlace, OpenFiles, typed
from paritas.results.wording import enumerated

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.files.records import Header, Layout, Payload, RankDump, Record
    from paritas.files.torch_files import Unreadable


# --- Headers of data files ------------------------------------------------------------------------


def complete_files(found: RankDump, files: DumpFiles) -> tuple[list[Path], list[str]]:
    """Write the missing headers of a rank's data files; the repaired files, and the problems."""
    if is_locked(found.folder / LOCK):
        raise UsageError(f"{found.folder} is still being written: wait, or stop its process")
    lacking = [
        path
        for volume in volumes_of(found.folder)
        for path in sorted(volume.iterdir())
        if is_data(path) and not is_complete(path)
    ]
    pieces = _collect_pieces(found, files) if lacking else {}
    named = {record.payload.file for record in found.records if record.payload is not None}
    repaired: list[Path] = []
    problems: list[str] = []
    for path in lacking:
        name = path.relative_to(found.folder.parent).as_posix()
        if name in named - pieces.keys():
            problems.append(f"{name} was not repaired: none of its values in the index exist")
            continue
        try:
            complete(path, pieces.get(name, {}).values())
            repaired.append(path)
        except (ValueError, OSError) as error:
            problems.append(f"{name} was not repaired: {error}")
    return repaired, problems


def header_problems(found: RankDump, files: DumpFiles) -> list[str]:
    """How the headers of a rank's data files differ from its index.

    paritas reads only the index; the headers are for other programs. A header that an unfinished
    run did not write is not a problem.
    """
    pieces = _collect_pieces(found, files)
    problems: list[str] = []
    for path in (one for volume in volumes_of(found.folder) for one in sorted(volume.iterdir())):
        if not is_data(path) or not (found.state == "closed" or is_complete(path)):
            continue
        name = path.relative_to(found.folder.parent).as_posix()
        try:
            entries = dict(read_entries(path, name))
        except (UsageError, OSError) as error:
            problems.append(f"{name}: {error}")
            continue
        own = pieces.get(name, {}).values()
        wrong = [piece.key for piece in own if not _describes_piece(entries.get(piece.key), piece)]
        if wrong:
            problems.append(
                f"{name}: its header differs from the index for {len(wrong)} of {len(own)} values, "
                f"first {wrong[0]!r}"
            )
    return problems


def _describes_piece(entry: FilePlace | Unreadable | None, piece: PackedPiece) -> bool:
    """Whether a header describes a piece as the index does."""
    if not isinstance(entry, FilePlace):
        return False
    if (entry.begin, entry.nbytes) != (piece.begin, piece.nbytes):
        return False
    described = in_safetensors(known_dtype(entry.dtype), entry.shape)
    return described == in_safetensors(piece.dtype, piece.shape)


def _collect_pieces(
    found: RankDump, files: DumpFiles
) -> dict[str, dict[tuple[int, str], PackedPiece]]:
    """The index's values in each file; for shared bytes, the record that wrote them."""
    pieces: dict[str, dict[tuple[int, str], PackedPiece]] = {}
    for record in found.records:
        for payload, dtype in _list_whole_payloads(record, files):
            piece = PackedPiece(payload.key, dtype, payload.shape, payload.begin, payload.nbytes)
            pieces.setdefault(payload.file, {}).setdefault((payload.begin, payload.key), piece)
    return pieces


def _list_whole_payloads(record: Record, files: DumpFiles) -> list[tuple[Payload, torch.dtype]]:
    """The payloads that are complete; reading the index reported the others."""
    there: list[tuple[Payload, torch.dtype]] = []
    if record.payload is not None and record.tensor is not None:
        with contextlib.suppress(UsageError):
            check_payload(record, files, "packed")
            there.append((record.payload, stored_dtype(known_dtype(record.tensor.dtype))))
    if record.sketch is not None:
        with contextlib.suppress(UsageError):
            sketch = check_sketch(record, files)[1]
            there.append((sketch, sketch_dtype(sketch)))
    return there


# --- The dump -------------------------------------------------------------------------------------

_MOST_NAMED = 5
# Dtypes to compare as: some dtypes support few operators, and NaN does not equal NaN.
_CARRIERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Dump:
    """A readable dump.

    Nothing in it is trusted: index lines, sizes and paths are checked before they are used; what
    fails is listed as a problem, and the rest can be read.

    Attributes:
        problems: of all ranks, and between them.
    """

    kind = "paritas"

    def __init__(self, path: Path, ranks: dict[int, RankDump], problems: list[str]) -> None:
        """Use `open`."""
        self.path = path
        self.ranks = ranks
        self.problems = problems
        self._files = DumpFiles(path)
        self._open = OpenFiles()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Dump:
        """Read the index of every rank."""
        root = Path(path)
        problems: list[str] = []
        ranks: dict[int, RankDump] = {}
        files = DumpFiles(root)
        for rank, folder in _found_ranks(index_home(root)).items():
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
            names = ", ".join(f"rank {rank} of {ranks[rank].header.run[:8]}" for rank in ranks)
            problems.append(f"it mixes {len(runs)} runs: {names}")
        return cls(root, ranks, problems)

    def header(self, rank: int) -> Header:
        """The header of a rank."""
        return self._rank(rank).header

    def records(self) -> Iterator[Record]:
        """All records, rank by rank, in the order of recording."""
        for found in self.ranks.values():
            yield from found.records

    def read(self, record: Record, *, check: bool = True) -> Tensor:
        """The values of a record, in memory of their own, in its dtype and shape.

        Repeated dimensions are expanded, not copied. The values of a quantised tensor are float32.

        Args:
            check: verify their digest.
        """
        return self._values(record, is_view=False, check=check)

    def view(self, record: Record, *, check: bool = False) -> Tensor:
        """The values of a record like `read`, but mapped from the file where possible.

        Small tensors are read, and so are dtypes that numpy lacks in the layout of `.npy` files.
        Writing to the result changes a private copy.

        Args:
            check: verify their digest, unless that was done before.
        """
        return self._values(record, is_view=True, check=check)

    def verify(self, record: Record) -> bool:
        """Verify the digest of a record's stored bytes, block by block.

        Bytes that were verified before, and not written to since, are not read again.

        Returns:
            Whether there is a digest.
        """
        payload = record.payload
        if payload is None or not record.digest:
            self._rank(record.rank)
            return False
        if self._layout(record) != "packed":
            self.view(record, check=True)
            return True
        with name_record_in_errors(record):
            path = check_payload(record, self._files, "packed")
            self._verify(record, payload, path, lambda: self._digest_stored(path, payload))
        return True

    def check_files(self) -> list[str]:
        """Problems of the files other than damaged values: headers that differ from the index."""
        return [
            f"rank {found.rank}: {problem}"
            for found in self.ranks.values()
            for problem in header_problems(found, self._files)
        ]

    def read_sketch(self, record: Record) -> Tensor:
        """The linear sketch of a record's values."""
        try:
            path, sketch = check_sketch(record, self._files)
            raw = self._open.read(path, sketch.begin, sketch.nbytes, sketch.file)
            return typed(raw, sketch_dtype(sketch)).reshape(sketch.shape)
        except (UsageError, OSError) as error:
            raise UsageError(f"sketch of {record.id} of step {record.step}: {error}") from error

    def repair(self) -> list[Path]:
        """Complete the data files of a killed run; returns the repaired ones.

        What cannot be repaired becomes a problem.
        """
        repaired: list[Path] = []
        for found in self.ranks.values():
            paths, problems = complete_files(found, self._files)
            repaired += paths
            self.problems += [f"rank {found.rank}: {problem}" for problem in problems]
        return repaired

    def _values(self, record: Record, *, is_view: bool, check: bool) -> Tensor:
        layout = self._layout(record)
        with name_record_in_errors(record):
            path = check_payload(record, self._files, layout)
            payload, facts = record.payload, record.tensor
            if payload is None or facts is None:
                raise UsageError(f"it is not a tensor: its value is {record.value}")
            if layout == "msit":
                values = found = read_npy(path, record, self._open if is_view else None)
            else:
                dtype = stored_dtype(known_dtype(facts.dtype))
                place = (path, payload.begin, payload.nbytes, payload.file)
                if is_view:
                    raw = self._open.view(*place, itemsize=dtype.itemsize)
                else:
                    raw = self._open.read(*place)
                values = typed(raw, dtype).reshape(payload.shape)
                found = values.expand(facts.shape)
            if check and record.digest and layout == "packed":
                self._verify(record, payload, path, lambda: digest(values))
            elif check and record.digest:
                self._verify(record, payload, path, lambda: _digest_expanded(found, record))
            return found

    def _verify(
        self, record: Record, payload: Payload, path: Path, compute: Callable[[], str]
    ) -> None:
        """Refuse bytes that do not match their digest."""
        place = (path, payload.begin, payload.nbytes)
        found = self._open.checked.mismatch(*place, record.digest, compute)
        if found is not None:
            raise UsageError(
                f"the bytes at {payload.begin} of {payload.file} have digest {found}, but the "
                f"index says {record.digest}: the file or the index is damaged; copy or record the "
                f"dump again"
            )

    def _digest_stored(self, path: Path, payload: Payload) -> str:
        hasher = xxhash.xxh3_128()
        for block in self._open.blocks(path, payload.begin, payload.nbytes, payload.file):
            hasher.update(block)
        return hasher.hexdigest()

    def _layout(self, record: Record) -> Layout:
        return self._rank(record.rank).header.layout

    def _rank(self, rank: int) -> RankDump:
        if rank not in self.ranks:
            there = ", ".join(map(str, sorted(self.ranks)))
            raise UsageError(f"{self.path} has no rank {rank}; it has {there}")
        return self.ranks[rank]


def _found_ranks(root: Path) -> dict[int, Path]:
    """The folders of the ranks, or an error that says what was looked for."""
    if not root.is_dir():
        reason = "is not a folder" if root.exists() else "does not exist"
        raise UsageError(f"{root} {reason}: give the folder of a dump")
    ranks = rank_folders(root)
    if ranks:
        return ranks
    if (root / HEADER).is_file():
        raise UsageError(f"{root} is one rank of a dump: give its parent folder, {root.parent}")
    names = sorted(path.name for path in root.iterdir())
    found = enumerated(names, _MOST_NAMED) or "nothing"
    raise UsageError(
        f"{root} is not a paritas dump: looked for rank0/{HEADER}, rank1/{HEADER} and so on, found "
        f"{found}"
    )


def _digest_expanded(values: Tensor, record: Record) -> str:
    """The digest of values from a file that stores repeated dimensions expanded."""
    facts = record.tensor
    kept = values.shape if facts is None else stored_shape(facts.shape, facts.stride)
    if values.dtype.itemsize in _CARRIERS:
        values = values.view(_CARRIERS[values.dtype.itemsize])
    once = values[tuple(slice(extent) for extent in kept)].contiguous()
    if tuple(kept) != tuple(values.shape) and not once.expand(values.shape).equal(values):
        raise UsageError("it was recorded with repeated values, but they differ in the file")
    return digest(once)
