"""Reading a dump: one that was closed, one whose run was killed, and one that is being written."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash

from paritas.dumps.index import DumpFiles, check_payload, check_sketch, read_rank
from paritas.errors import ParitasError, UsageError
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


# --- Headers of data files, completed and checked -------------------------------------------------


def complete_files(found: RankDump, files: DumpFiles) -> tuple[list[Path], list[str]]:
    """Complete what data files of a rank lack their header; which were, and what hindered others.

    Raises:
        UsageError: the rank is still being written.
    """
    if is_locked(found.folder / LOCK):
        raise UsageError(f"{found.folder} is still being written: wait, or end its process")
    lacking = [
        path
        for volume in volumes_of(found.folder)
        for path in sorted(volume.iterdir())
        if is_data(path) and not is_complete(path)
    ]
    pieces = _collect_pieces(found, files) if lacking else {}
    named = {record.payload.file for record in found.records if record.payload is not None}
    mended: list[Path] = []
    problems: list[str] = []
    for path in lacking:
        name = path.relative_to(found.folder.parent).as_posix()
        if name in named - pieces.keys():
            problems.append(f"{name} was not repaired: nothing that the index has in it is there")
            continue
        try:
            complete(path, pieces.get(name, {}).values())
            mended.append(path)
        except (ValueError, OSError) as error:
            problems.append(f"{name} was not repaired: {error}")
    return mended, problems


def header_problems(found: RankDump, files: DumpFiles) -> list[str]:
    """What the headers of a rank's data files say otherwise than its index does.

    The index alone is read here; the headers are for other programs. Those that a run did not
    come to write are none.
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
                f"{name}: its header does not describe {len(wrong)} of {len(own)} values as the "
                f"index does; the first is {wrong[0]!r}"
            )
    return problems


def _describes_piece(entry: FilePlace | Unreadable | None, piece: PackedPiece) -> bool:
    """Whether a header has the values of a piece where they are, as what they are."""
    if not isinstance(entry, FilePlace) or (entry.begin, entry.nbytes) != (
        piece.begin,
        piece.nbytes,
    ):
        return False
    told = in_safetensors(known_dtype(entry.dtype), entry.shape)
    return told == in_safetensors(piece.dtype, piece.shape)


def _collect_pieces(
    found: RankDump, files: DumpFiles
) -> dict[str, dict[tuple[int, str], PackedPiece]]:
    """What the index has in each file; of records that share bytes, the one that wrote them."""
    pieces: dict[str, dict[tuple[int, str], PackedPiece]] = {}
    for record in found.records:
        for payload, dtype in _list_whole_payloads(record, files):
            piece = PackedPiece(payload.key, dtype, payload.shape, payload.begin, payload.nbytes)
            pieces.setdefault(payload.file, {}).setdefault((payload.begin, payload.key), piece)
    return pieces


def _list_whole_payloads(record: Record, files: DumpFiles) -> list[tuple[Payload, torch.dtype]]:
    """The payloads that are there in full."""
    there: list[tuple[Payload, torch.dtype]] = []
    # What is not was listed among the problems when the index was read.
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
# To compare by: torch knows few operators for some dtypes, and takes no NaN for equal.
_CARRIERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        self._files = DumpFiles(path)
        self._open = OpenFiles()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Dump:
        """Read the index of every rank.

        Raises:
            UsageError: this is no dump.
        """
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
        return self._values(record, is_view=False, check=check)

    def view(self, record: Record, *, check: bool = False) -> Tensor:
        """The values of a record as `read` gives them, in memory of their own only where they must.

        They are mapped from the file, for as long as the tensor lives; few bytes, and what numpy
        has no dtype for in the layout of `.npy` files, are read. Who writes into them writes into
        a copy.

        Args:
            check: compare the bytes with their digest, unless that was done before.

        Raises:
            UsageError: they are missing, cut off, damaged where that is checked, or were not
                recorded.
        """
        return self._values(record, is_view=True, check=check)

    def verify(self, record: Record) -> bool:
        """Hold the stored bytes of a record against their digest, a block at a time.

        What was held against it before, and was not written to since, is not read again.

        Returns:
            Whether there is a digest to hold them against.

        Raises:
            UsageError: they are missing, or not those that were written.
        """
        payload = record.payload
        if payload is None or not record.digest:
            self._rank(record.rank)
            return False
        layout = self._layout(record)
        try:
            path = check_payload(record, self._files, layout)
            if layout == "msit":
                values = self._npy(path, record, is_view=True)
                self._hold(record, payload, path, lambda: _digest_of_written_out(values, record))
            elif layout == "packed":
                self._hold(record, payload, path, lambda: self._digest_of_stored(path, payload))
            else:
                self.view(record, check=True)
        except (ParitasError, OSError) as error:
            raise UsageError(f"{record.id} of step {record.step}: {error}") from error
        return True

    def check_files(self) -> list[str]:
        """What is wrong with the files beside the values in them: headers that tell otherwise."""
        return [
            f"rank {found.rank}: {problem}"
            for found in self.ranks.values()
            for problem in header_problems(found, self._files)
        ]

    def read_sketch(self, record: Record) -> Tensor:
        """The linear sketch of a record's values.

        Raises:
            UsageError: it is missing, damaged, or was not recorded.
        """
        try:
            path, sketch = check_sketch(record, self._files)
            raw = self._open.read(path, sketch.begin, sketch.nbytes, sketch.file)
            return typed(raw, sketch_dtype(sketch)).reshape(sketch.shape)
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

    def _values(self, record: Record, *, is_view: bool, check: bool) -> Tensor:
        layout = self._layout(record)
        try:
            path = check_payload(record, self._files, layout)
            payload, facts = record.payload, record.tensor
            if payload is None or facts is None:
                raise UsageError(f"it is no tensor: its value is {record.value}")
            check = check and bool(record.digest)
            if layout == "msit":
                found = self._npy(path, record, is_view=is_view)
                if check:
                    self._hold(record, payload, path, lambda: _digest_of_written_out(found, record))
                return found
            dtype = stored_dtype(known_dtype(facts.dtype))
            place = (path, payload.begin, payload.nbytes, payload.file)
            if is_view:
                raw = self._open.view(*place, itemsize=dtype.itemsize)
            else:
                raw = self._open.read(*place)
            values = typed(raw, dtype).reshape(payload.shape)
            found = values.expand(facts.shape)
            if check and layout == "packed":
                self._hold(record, payload, path, lambda: digest(values))
            elif check:
                self._hold(record, payload, path, lambda: _digest_of_written_out(found, record))
            return found
        except (ParitasError, OSError) as error:
            raise UsageError(f"{record.id} of step {record.step}: {error}") from error

    def _npy(self, path: Path, record: Record, *, is_view: bool) -> Tensor:
        from paritas.compat import npy_tree  # seldom needed

        return npy_tree.read_npy(path, record, self._open if is_view else None)

    def _hold(
        self, record: Record, payload: Payload, path: Path, compute: Callable[[], str]
    ) -> None:
        """Refuse bytes that do not fit their digest."""
        place = (path, payload.begin, payload.nbytes)
        found = self._open.checked.misfit(*place, record.digest, compute)
        if found is not None:
            raise UsageError(
                f"the bytes at {payload.begin} of {payload.file} are not those that were written: "
                f"their digest is {found}, not {record.digest}; the file or the index is damaged: "
                f"copy or record the dump again"
            )

    def _digest_of_stored(self, path: Path, payload: Payload) -> str:
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
    """The folders of the ranks, or a message that says what was looked for."""
    if not root.is_dir():
        raise UsageError(f"{root} is {'no folder' if root.exists() else 'not there'}: give a dump")
    ranks = rank_folders(root)
    if ranks:
        return ranks
    if (root / HEADER).is_file():
        raise UsageError(f"{root} is one rank of a dump: give the folder above it, {root.parent}")
    names = sorted(path.name for path in root.iterdir())
    found = enumerated(names, _MOST_NAMED) or "nothing"
    raise UsageError(
        f"{root} is no dump of paritas: looked for rank0/{HEADER}, rank1/{HEADER} and so on, "
        f"found {found}"
    )


def _digest_of_written_out(values: Tensor, record: Record) -> str:
    """The digest of what a file holds in which every value that was repeated is written out."""
    facts = record.tensor
    kept = values.shape if facts is None else stored_shape(facts.shape, facts.stride)
    if values.dtype.itemsize in _CARRIERS:
        values = values.view(_CARRIERS[values.dtype.itemsize])
    once = values[tuple(slice(extent) for extent in kept)].contiguous()
    if tuple(kept) != tuple(values.shape) and not once.expand(values.shape).equal(values):
        raise UsageError("it repeated its values, and the file has others in the place of some")
    return digest(once)
