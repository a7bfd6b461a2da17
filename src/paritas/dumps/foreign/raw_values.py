"""Values that lie somewhere in a file: where exactly, and how they become a tensor."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import zipfile
import zlib
from typing import TYPE_CHECKING

import torch

from paritas.dumps.dtypes import known_dtype
from paritas.dumps.foreign.finding import locate
from paritas.dumps.mapped_files import OpenFiles, typed
from paritas.dumps.records import Payload, TensorFacts
from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import IO

    from torch import Tensor

__all__ = [
    "Member",
    "Place",
    "bools",
    "contiguous_stride",
    "fill",
    "place_of",
    "read_values",
    "values_at",
    "verify_at",
    "view_at",
]

_MOST_BYTES = 2**62
_MOST_DIMENSIONS = 64
_BLOCK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Member:
    """The member of a zip archive that values lie in.

    Attributes:
        begin: byte of the file at which it begins.
        nbytes: how many bytes it has there.
        crc: the checksum that the archive has of it; 0 where who wrote it left that out, as torch
            does if asked to.
    """

    name: str
    begin: int
    nbytes: int
    crc: int


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the values of a tensor are.

    Attributes:
        file: path inside the folder of the dump.
        key: the name of the tensor, or of the member, in that file.
        dtype: torch's name.
        stride: of the values from `begin` on, in elements.
        begin: byte of the file, or of the unpacked member, at which they begin.
        nbytes: how many bytes they lie in.
        member: of an archive, that they are in.
        is_packed: whether that is compressed.
        is_swapped: whether the bytes of a number are in the other order.
        is_conjugate: whether the file leaves the sign of the imaginary parts to be turned.
        is_negated: whether it leaves the sign of all values to be turned.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin: int
    nbytes: int
    key: str = ""
    offset: int = 0
    device: str = "cpu"
    requires_grad: bool = False
    member: Member | None = None
    is_packed: bool = False
    is_swapped: bool = False
    is_conjugate: bool = False
    is_negated: bool = False

    @property
    def facts(self) -> TensorFacts:
        """What the tensor was."""
        return TensorFacts(
            dtype=self.dtype,
            shape=self.shape,
            stride=self.stride,
            offset=self.offset,
            device=self.device,
            requires_grad=self.requires_grad,
        )

    @property
    def payload(self) -> Payload:
        """Where it is, for a record."""
        return Payload(
            file=self.file, key=self.key, begin=self.begin, nbytes=self.nbytes, shape=self.shape
        )


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of values in row-major order."""
    stride: list[int] = []
    step = 1
    for extent in reversed(shape):
        stride.append(step)
        step *= max(extent, 1)
    return tuple(reversed(stride))


def place_of(
    file: str, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], begin: int, room: int
) -> Place:
    """A place whose numbers were checked: before any memory is taken for them.

    Args:
        begin: byte at which the first value is.
        room: how many bytes there are from there on.

    Raises:
        UsageError: they are no tensor's, or reach beyond what is there.
    """
    itemsize = known_dtype(dtype).itemsize
    if len(shape) != len(stride) or len(shape) > _MOST_DIMENSIONS:
        raise UsageError(f"a shape of {len(shape)} numbers has strides of {len(stride)}")
    if min((*shape, *stride, begin), default=0) < 0:
        raise UsageError(f"shape {shape}, strides {stride} or their begin {begin} is negative")
    # Of an empty tensor too: torch multiplies the other extents all the same.
    if math.prod(max(extent, 1) for extent in shape) * itemsize > _MOST_BYTES:
        raise UsageError(f"shape {shape} is larger than any memory")
    last = sum((extent - 1) * step for extent, step in zip(shape, stride, strict=True))
    nbytes = 0 if 0 in shape else (1 + last) * itemsize
    if nbytes > max(room, 0):
        raise UsageError(f"shape {shape} of {dtype} takes {nbytes} bytes, and there are {room}")
    return Place(file=file, dtype=dtype, shape=shape, stride=stride, begin=begin, nbytes=nbytes)


def read_values(path: Path, place: Place) -> Tensor:
    """The tensor at a place of a dump; see `values_at`."""
    return values_at(locate(path, place.file), place)


def values_at(file: Path, place: Place, files: OpenFiles | None = None) -> Tensor:
    """The tensor at a place of a file; dimensions that repeat values are not written out.

    Args:
        files: to read by, for who reads many from one file.

    Raises:
        UsageError: the file has changed, is damaged or is gone.
    """
    dtype = known_dtype(place.dtype)
    if not place.nbytes:
        return torch.empty(place.shape, dtype=dtype)
    if place.is_packed:
        raw = _read_packed(file, place)
    else:
        files = files or OpenFiles()
        verify_at(file, place, files)
        raw = files.read(file, place.begin, place.nbytes, place.file)
    if place.is_swapped:
        width = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
        raw = raw.reshape(-1, width).flip(1).reshape(-1)
    return _as_tensor(raw, place, dtype)


def view_at(file: Path, place: Place, files: OpenFiles, *, check: bool = False) -> Tensor:
    """The same, in memory of its own only where it must be: small, compressed, or rearranged.

    Args:
        check: hold what is mapped against its checksum, too; what is read always is.

    Raises:
        UsageError: the file has changed, is damaged or is gone.
    """
    if not place.nbytes or place.is_packed or place.is_swapped:
        return values_at(file, place, files)
    dtype = known_dtype(place.dtype)
    if check:
        verify_at(file, place, files)
    where = (file, place.begin, place.nbytes, place.file)
    return _as_tensor(files.view(*where, itemsize=dtype.itemsize), place, dtype)


def verify_at(file: Path, place: Place, files: OpenFiles) -> bool:
    """Hold the member of an archive that values are in against its checksum.

    Returns:
        Whether it has one. Nothing but archives has any.

    Raises:
        UsageError: it does not fit, or the file is gone.
    """
    member = place.member
    if member is None or not member.crc:
        return False
    where = (file, member.begin, member.nbytes)

    def compute() -> int:
        blocks = _unpacked(file, place) if place.is_packed else files.blocks(*where, place.file)
        return functools.reduce(lambda crc, block: zlib.crc32(block, crc), blocks, 0)

    found = files.checked.misfit(*where, member.crc, compute)
    if found is not None:
        raise UsageError(
            f"{member.name} of {place.file} is not what was written: its checksum is {found:08x}, "
            f"and the archive says {member.crc:08x}; the file is damaged: copy or record it again"
        )
    return True


def bools(raw: Tensor) -> Tensor:
    """Bytes as bools: one other than 0 and 1 is none, and torch may take it for anything."""
    return raw.view(torch.bool) if int(raw.max()) <= 1 else raw.ne(0)


def fill(file: IO[bytes], room: memoryview, name: str) -> None:
    """Read as many bytes as there is room for."""
    done = 0
    while done < len(room):
        block = file.read(min(_BLOCK, len(room) - done))
        if not block:
            raise UsageError(f"{name} ends {len(room) - done} bytes too early: it was cut off")
        room[done : done + len(block)] = block
        done += len(block)


def _as_tensor(raw: Tensor, place: Place, dtype: torch.dtype) -> Tensor:
    values = bools(raw) if dtype is torch.bool else typed(raw, dtype)
    found = values.as_strided(place.shape, place.stride)
    if place.is_conjugate:
        found = found.conj().resolve_conj()
    return found.neg() if place.is_negated else found


def _unpacked(file: Path, place: Place) -> Iterator[bytes]:
    with _unpacking(file, place) as unpacked:
        while block := unpacked.read(_BLOCK):
            yield block


def _read_packed(file: Path, place: Place) -> Tensor:
    with _unpacking(file, place) as unpacked:
        skipped = bytearray(place.begin)
        fill(unpacked, memoryview(skipped), place.key)
        raw = torch.empty(place.nbytes, dtype=torch.uint8)
        fill(unpacked, raw.numpy().data, place.key)
        if unpacked.read(1):  # only at its end is it held against its checksum
            raise UsageError(f"{place.key} of {place.file} has more bytes than its header says")
        return raw


@contextlib.contextmanager
def _unpacking(file: Path, place: Place) -> Iterator[IO[bytes]]:
    try:
        with zipfile.ZipFile(file) as archive, archive.open(place.key) as unpacked:
            yield unpacked
    except (zipfile.BadZipFile, zlib.error, KeyError, NotImplementedError, RuntimeError) as error:
        raise UsageError(f"{place.key} of {place.file} is damaged: {error}") from error
