"""Values that lie somewhere in a file: where exactly, and how they become a tensor."""

from __future__ import annotations

import dataclasses
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
    from pathlib import Path
    from typing import IO

    from torch import Tensor

__all__ = [
    "Place",
    "bools",
    "contiguous_stride",
    "fill",
    "place_of",
    "read_values",
    "values_at",
    "view_at",
]

_MOST_BYTES = 2**62
_MOST_DIMENSIONS = 64
_BLOCK = 1 << 20


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
        is_packed: whether they are in a compressed member of an archive.
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
        raw = (files or OpenFiles()).read(file, place.begin, place.nbytes, place.file)
    if place.is_swapped:
        width = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
        raw = raw.reshape(-1, width).flip(1).reshape(-1)
    return _as_tensor(raw, place, dtype)


def view_at(file: Path, place: Place, files: OpenFiles) -> Tensor:
    """The same, in memory of its own only where it must be: small, compressed, or rearranged.

    Raises:
        UsageError: the file has changed, is damaged or is gone.
    """
    if not place.nbytes or place.is_packed or place.is_swapped:
        return values_at(file, place, files)
    dtype = known_dtype(place.dtype)
    where = (file, place.begin, place.nbytes, place.file)
    return _as_tensor(files.view(*where, itemsize=dtype.itemsize), place, dtype)


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


def _read_packed(file: Path, place: Place) -> Tensor:
    try:
        with zipfile.ZipFile(file) as archive, archive.open(place.key) as member:
            skipped = bytearray(place.begin)
            fill(member, memoryview(skipped), place.key)
            raw = torch.empty(place.nbytes, dtype=torch.uint8)
            fill(member, raw.numpy().data, place.key)
            return raw
    except (zipfile.BadZipFile, zlib.error, KeyError, NotImplementedError, RuntimeError) as error:
        raise UsageError(f"{place.key} of {place.file} is damaged: {error}") from error
