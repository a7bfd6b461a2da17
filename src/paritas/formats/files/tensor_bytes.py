"""How tensor values are stored in a file: every torch dtype, and the bytes, located and checked."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import mmap
import os
import stat
import threading
import warnings
import weakref
import zipfile
import zlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from paritas.core.errors import UsageError, first_line
from paritas.formats.files.records import Payload, TensorFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from typing import IO

    from torch import Tensor


# --- Dtypes: every one of torch, bit for bit ------------------------------------------------------

# Only names that safetensors 0.6 knows: it refuses a whole file because of one unknown dtype.
# Every other dtype is stored as pairs of real numbers or as bytes.
SAFETENSORS_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}
_FLOAT4 = torch.float4_e2m1fn_x2
_QUANTISED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
# Integer dtypes to copy through: torch copies integers of any width bit for bit.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Dtypes whose numpy buffer can be cast to bytes.
_IN_NUMPY = {
    dtype
    for dtype, name in SAFETENSORS_NAMES.items()
    if name != "BF16" and not name.startswith("F8")
}

_REAL = frozenset(_IN_NUMPY | {torch.bfloat16})


def known_dtype(name: str) -> torch.dtype:
    """The torch dtype of this name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(
            f"torch {torch.__version__} has no dtype {name!r}: read the dump with the version of "
            f"torch that wrote it"
        )
    return dtype


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the values in the file: float32 for a quantised dtype, otherwise the same.

    Quantised integers mean nothing without their scales, so the values they represent are stored.
    """
    return torch.float32 if dtype in _QUANTISED else dtype


def stored_shape(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The shape in the file: a dimension of stride 0 is stored once."""
    if 0 not in stride or 0 in shape:
        return tuple(shape)
    return tuple(1 if step == 0 else extent for extent, step in zip(shape, stride, strict=True))


def in_safetensors(dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, list[int]]:
    """The safetensors name and shape for values of a dtype.

    A dtype without a name is a view of the same bytes: complex numbers get a last dimension of
    real and imaginary parts, other dtypes a last dimension of bytes.
    """
    name = SAFETENSORS_NAMES.get(dtype)
    if name is not None:
        return name, list(shape)
    if dtype.is_complex:
        return SAFETENSORS_NAMES[dtype.to_real()], [*shape, 2]
    if dtype is _FLOAT4 and shape:
        # torch counts bytes, safetensors counts the two numbers in each.
        return "F4", [*shape[:-1], shape[-1] * 2]
    if dtype.itemsize == 1:
        return "U8", list(shape)
    return "U8", [*shape, dtype.itemsize]


def as_stored(tensor: Tensor) -> Tensor:
    """The values as written to a file: row-major, dimensions of stride 0 once.

    The result stays on its device and is a copy only where necessary.
    """
    if _is_stored_form(tensor):
        return tensor
    _refuse_unstorable(tensor)
    plain = tensor.detach() if tensor.requires_grad else tensor
    if type(plain) is not torch.Tensor:
        plain = plain.as_subclass(torch.Tensor)
    stride = plain.stride()
    if 0 in stride:
        shape = stored_shape(plain.shape, stride)
        plain = plain[tuple(slice(0, extent) for extent in shape)]
    if plain.is_quantized:
        return _dequantise_tensor(plain).contiguous()
    if plain.is_conj():
        plain = plain.resolve_conj()
    if plain.is_neg():
        plain = plain.resolve_neg()
    if plain.is_contiguous():
        return plain
    carrier = _CARRIERS.get(plain.dtype.itemsize)
    if carrier is None or not plain.dim():
        return plain.contiguous()
    return plain.view(carrier).contiguous().view(plain.dtype)


def _is_stored_form(tensor: Tensor) -> bool:
    """A quick test that accepts the common case; anything else takes the slow path."""
    if (
        type(tensor) is not torch.Tensor
        or tensor.dtype not in _REAL
        or not tensor.is_cpu
        or tensor.requires_grad
        or tensor.is_nested
        or not tensor.is_contiguous()
        or tensor.is_neg()
        or 0 in tensor.stride()
    ):
        return False
    try:
        nbytes = tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # inside torch.func's transforms
        return False
    return bool(nbytes >= (tensor.storage_offset() + tensor.numel()) * tensor.dtype.itemsize)


def _refuse_unstorable(tensor: Tensor) -> None:
    if type(tensor) is not torch.Tensor:
        _refuse_class(tensor)
    if tensor.is_nested:
        raise UsageError("cannot store a nested tensor: pass its components, or pad it")
    if tensor.layout is not torch.strided:
        raise UsageError(f"cannot store a tensor of layout {tensor.layout}: call to_dense() first")
    if tensor.is_meta:
        raise UsageError("a tensor on the meta device has no values")
    try:
        nbytes = tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError) as error:
        # torch.vmap and torch.func.grad pass such tensors to the function they transform.
        raise UsageError(
            f"a tensor inside a torch.func transform has no values ({error}): record it outside "
            f"the transform"
        ) from error
    needed = _extent(tensor)
    if nbytes < needed and not tensor.is_quantized:
        # Sharded training frees the memory of unused parameters.
        raise UsageError(
            f"a tensor of shape {tuple(tensor.shape)} needs {needed} bytes and its storage holds "
            f"{nbytes}: its memory was freed"
        )


def _refuse_class(tensor: Tensor) -> None:
    kind = type(tensor)
    if isinstance(tensor, (UninitializedBuffer, UninitializedParameter)):
        raise UsageError(f"a {kind.__name__} has no values yet: run the module once first")
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise UsageError(
            f"cannot store a tensor of class {kind.__module__}.{kind.__qualname__}: pass the plain "
            f"tensors it consists of"
        )


def _extent(tensor: Tensor) -> int:
    """Bytes from the start of the storage to the end of the tensor's last value."""
    count = tensor.numel()
    if count == 0:
        return 0
    if not tensor.is_contiguous():
        reach = zip(tensor.shape, tensor.stride(), strict=True)
        count = 1 + sum((extent - 1) * step for extent, step in reach)
    return (int(tensor.storage_offset()) + count) * tensor.dtype.itemsize


def _dequantise_tensor(tensor: Tensor) -> Tensor:
    try:
        return tensor.dequantize()
    except RuntimeError as error:
        raise UsageError(
            f"cannot dequantise a tensor of {tensor.dtype}: {first_line(error, 1000)}"
        ) from error


def raw_bytes(tensor: Tensor) -> Any:
    """The memory of a contiguous CPU tensor, as a buffer, without a copy."""
    if tensor.dtype in _IN_NUMPY:
        return tensor.numpy()
    # A contiguous tensor of at most one value may have any stride.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()


def digest(tensor: Tensor) -> str:
    """XXH3 hash (128 bits, hexadecimal) of the bytes of a contiguous CPU tensor."""
    return digest_of(raw_bytes(tensor))


def digest_of(data: Any) -> str:
    """XXH3 hash (128 bits, hexadecimal) of a buffer."""
    return xxhash.xxh3_128_hexdigest(data)


# Going through so many values takes minutes.
_MOST_REPEATED = 2**36


def check_repeats(tensor: Tensor) -> None:
    """Refuse to go through a tensor that repeats its values almost without end."""
    if tensor.numel() > _MOST_REPEATED and tensor.untyped_storage().nbytes() < tensor.numel():
        raise UsageError(
            f"its shape {tuple(tensor.shape)} is repeated from few values, more than "
            f"{_MOST_REPEATED} elements: too many to read"
        )


def sketch_dtype(payload: Payload) -> torch.dtype:
    """The dtype of a stored sketch: float64 if float32 could not hold the sums."""
    return torch.float64 if payload.nbytes == 8 * math.prod(payload.shape) else torch.float32


def bytes_needed(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """The size of the values in bytes, computed without overflow."""
    return math.prod(shape) * dtype.itemsize


# --- Verified checksums ---------------------------------------------------------------------------

# Fewer bytes are faster to hash again than to remember.
_FEW = 1 << 16
# About 300 bytes each: beyond this the cache starts over, so memory does not grow with the dump.
_MOST_KEPT = 1 << 16


class CheckedBytes:
    """Remembers which bytes match their checksum, so that shared bytes are checked once.

    Mismatches are not remembered, and a file that was written to is checked again. Thread-safe.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], None] = {}

    def mismatch(
        self,
        path: str | os.PathLike[str],
        begin: int,
        nbytes: int,
        checksum: str | int,
        compute: Callable[[], str | int],
    ) -> str | int | None:
        """The actual checksum of these bytes if it differs from `checksum`, otherwise None.

        Raises:
            OSError: the file cannot be read.
        """
        if nbytes < _FEW:
            actual = compute()
            return None if actual == checksum else actual
        facts = os.stat(path)  # noqa: PTH116  (called for each tensor)
        position = (os.fspath(path), facts.st_ino, facts.st_mtime_ns, facts.st_size)
        key = (*position, begin, nbytes, checksum)
        if key in self._known:
            return None
        actual = compute()
        if actual != checksum:
            return actual
        if len(self._known) >= _MOST_KEPT:
            self._known.clear()
        self._known[key] = None
        return None


# --- Mapped files ---------------------------------------------------------------------------------

# A mapping uses the system's file cache and no memory of its own. For few bytes, reading is faster.
#
# A file must not shrink while it is mapped: the system kills a process that touches a missing page.
# Writers of dumps append to files or remove them, which leaves mappings intact.

# Measured: below this, reading is faster than mapping.
LEAST_MAPPED = 256 << 10
# Block size for iterating: so large that mapping it costs nothing in comparison.
_VIEWED_BLOCK = 16 << 20
_MOST_OPEN = 16
# A Python mapping keeps a descriptor, and a process has 1024 of them by default.
_MOST_MAPPED = 256

_preadv: Any = getattr(os, "preadv", None)
_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


class OpenFiles:
    """Reads from files and keeps a few of them open. Thread-safe.

    Its methods raise `UsageError` if a file is too short, and `OSError` if it cannot be read.
    `name` is the name of the file in messages.

    Attributes:
        checked: which bytes match their checksum.
    """

    def __init__(self) -> None:
        self.checked = CheckedBytes()
        self._lock = threading.Lock()
        self._files: OrderedDict[str, _Descriptor] = OrderedDict()

    def read(self, path: str | os.PathLike[str], begin: int, nbytes: int, name: str) -> Tensor:
        """Bytes of a file, in memory of their own."""
        file = self._open(path, begin + nbytes, name)
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        if nbytes < LEAST_MAPPED:
            # For few bytes, Python allocates faster than torch.
            few = bytearray(nbytes)
            file.fill(memoryview(few), begin, name)
            return torch.frombuffer(few, dtype=torch.uint8)
        raw = torch.empty(nbytes, dtype=torch.uint8)
        file.fill(raw.numpy().data, begin, name)
        return raw

    def view(
        self, path: str | os.PathLike[str], begin: int, nbytes: int, name: str, *, itemsize: int
    ) -> Tensor:
        """Bytes of a file; mapped if they are many and aligned to `itemsize`, otherwise read.

        Writing to the result changes a private copy, not the file.
        """
        if nbytes < LEAST_MAPPED or begin % itemsize or len(_mapped) >= _MOST_MAPPED:
            return self.read(path, begin, nbytes, name)
        file = self._open(path, begin + nbytes, name)
        skipped = begin % mmap.ALLOCATIONGRANULARITY
        try:
            # mmap checks the length against the file.
            mapping = mmap.mmap(
                file.number, skipped + nbytes, access=mmap.ACCESS_COPY, offset=begin - skipped
            )
        except (OSError, ValueError):
            # No mappings on this file system, too many of them, or the file has just shrunk.
            return self.read(path, begin, nbytes, name)
        _mapped.add(mapping)
        return torch.frombuffer(mapping, dtype=torch.uint8, offset=skipped, count=nbytes)

    def blocks(
        self, path: str | os.PathLike[str], begin: int, nbytes: int, name: str
    ) -> Iterator[memoryview]:
        """Bytes of a file in blocks of bounded size."""
        end = begin + nbytes
        for position in range(begin, end, _VIEWED_BLOCK):
            block = self.view(path, position, min(_VIEWED_BLOCK, end - position), name, itemsize=1)
            yield block.numpy().data

    def _open(self, path: str | os.PathLike[str], least: int, name: str) -> _Descriptor:
        """The open file, checked to be still the one of that name and long enough."""
        key = os.fspath(path)
        facts = os.stat(key)  # noqa: PTH116  (called for each tensor)
        if facts.st_size < least:
            raise UsageError(
                f"{name} ends at byte {facts.st_size}, before byte {least}: it is truncated"
            )
        with self._lock:
            open_file = self._files.get(key)
            if open_file is not None and open_file.identity == (facts.st_dev, facts.st_ino):
                self._files.move_to_end(key)
                return open_file
        if not stat.S_ISREG(facts.st_mode):
            raise UsageError(f"{name} is not a regular file")
        opened = _Descriptor(key)
        with self._lock:
            self._files[key] = opened
            self._files.move_to_end(key)
            if len(self._files) > _MOST_OPEN:
                # A reader that still uses it keeps it open.
                self._files.popitem(last=False)
        return opened


class _Descriptor:
    """A file that stays open while this object is referenced."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        facts = os.fstat(self.number)
        self.identity = (facts.st_dev, facts.st_ino)
        self._lock = threading.Lock()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # At interpreter exit `os` may already be gone; the default argument keeps its function.
        number = getattr(self, "number", None)
        if number is not None:
            close(number)

    def fill(self, room: memoryview, begin: int, name: str) -> None:
        """Read until `room` is full."""
        done = 0
        while done < len(room):
            count = self._take(room[done:], begin + done)
            if not count:
                raise UsageError(f"{name} was truncated while it was read")
            done += count

    def _take(self, room: memoryview, begin: int) -> int:
        if _preadv is not None:
            return int(_preadv(self.number, [room], begin))
        with self._lock:  # this system cannot read at an offset
            os.lseek(self.number, begin, os.SEEK_SET)
            data = os.read(self.number, len(room))
            room[: len(data)] = data
            return len(data)


def view_as_dtype(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers, without a copy."""
    if dtype is not torch.complex32:
        return raw.view(dtype)
    with warnings.catch_warnings():
        # torch warns that few operators support complex32; none is used here.
        warnings.simplefilter("ignore", UserWarning)
        return raw.view(dtype)


# --- Values at a place in a file ------------------------------------------------------------------

_MOST_BYTES = 2**62
_MOST_DIMENSIONS = 64
_READ_BLOCK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Member:
    """The member of a zip archive that holds values.

    Attributes:
        begin: byte of the file at which it begins.
        nbytes: its size in the file.
        crc: its checksum in the archive; 0 if the writer left it out, which torch can do.
    """

    name: str
    begin: int
    nbytes: int
    crc: int


@dataclasses.dataclass(frozen=True)
class FilePlace:
    """Where the values of a tensor are.

    Attributes:
        file: path inside the dump's folder.
        key: the name of the tensor, or of the member, in that file.
        dtype: torch's name.
        stride: in elements, from `begin` on.
        begin: first byte in the file, or in the unpacked member.
        nbytes: bytes from the first value to the last.
        member: the archive member that holds them.
        is_packed: whether that member is compressed.
        is_swapped: whether the bytes of a number are in the other order.
        is_conjugate: whether the values still have to be conjugated.
        is_negated: whether the values still have to be negated.
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
        """The tensor's properties, for a record."""
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
        """The values' location, for a record."""
        return Payload(
            file=self.file, key=self.key, begin=self.begin, nbytes=self.nbytes, shape=self.shape
        )


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a row-major tensor."""
    stride: list[int] = []
    step = 1
    for extent in reversed(shape):
        stride.append(step)
        step *= max(extent, 1)
    return tuple(reversed(stride))


def place_of(
    file: str, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], begin: int, room: int
) -> FilePlace:
    """A place, checked before any memory is allocated; there are `room` bytes from `begin` on."""
    itemsize = known_dtype(dtype).itemsize
    if len(shape) != len(stride) or len(shape) > _MOST_DIMENSIONS:
        raise UsageError(f"a shape of {len(shape)} dimensions has {len(stride)} strides")
    if min((*shape, *stride, begin), default=0) < 0:
        raise UsageError(f"shape {shape}, strides {stride} or begin {begin} is negative")
    # Also for an empty tensor: torch multiplies the other extents anyway.
    if math.prod(max(extent, 1) for extent in shape) * itemsize > _MOST_BYTES:
        raise UsageError(f"shape {shape} is larger than any memory")
    last = sum((extent - 1) * step for extent, step in zip(shape, stride, strict=True))
    nbytes = 0 if 0 in shape else (1 + last) * itemsize
    if nbytes > max(room, 0):
        raise UsageError(f"shape {shape} of {dtype} takes {nbytes} bytes, but there are {room}")
    return FilePlace(file=file, dtype=dtype, shape=shape, stride=stride, begin=begin, nbytes=nbytes)


def values_at(file: Path, file_place: FilePlace, files: OpenFiles | None = None) -> Tensor:
    """The tensor at a place of a file; repeated dimensions are not materialised."""
    dtype = known_dtype(file_place.dtype)
    if not file_place.nbytes:
        return torch.empty(file_place.shape, dtype=dtype)
    if file_place.is_packed:
        raw = _read_packed(file, file_place)
    else:
        files = files or OpenFiles()
        verify_at(file, file_place, files)
        raw = files.read(file, file_place.begin, file_place.nbytes, file_place.file)
    if file_place.is_swapped:
        width = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
        raw = raw.reshape(-1, width).flip(1).reshape(-1)
    return _as_tensor(raw, file_place, dtype)


def view_at(file: Path, file_place: FilePlace, files: OpenFiles, *, check: bool = False) -> Tensor:
    """Like `values_at`, but mapped unless it is small, compressed or rearranged.

    `check` also verifies the checksum of mapped values; values that are read are always verified.
    """
    if not file_place.nbytes or file_place.is_packed or file_place.is_swapped:
        return values_at(file, file_place, files)
    dtype = known_dtype(file_place.dtype)
    if check:
        verify_at(file, file_place, files)
    where = (file, file_place.begin, file_place.nbytes, file_place.file)
    return _as_tensor(files.view(*where, itemsize=dtype.itemsize), file_place, dtype)


def verify_at(file: Path, file_place: FilePlace, files: OpenFiles) -> bool:
    """Verify the checksum of the archive member that holds the values.

    Returns:
        Whether it has a checksum. Only archives have them.
    """
    member = file_place.member
    if member is None or not member.crc:
        return False
    where = (file, member.begin, member.nbytes)

    def compute() -> int:
        blocks = (
            _iterate_unpacked(file, file_place)
            if file_place.is_packed
            else files.blocks(*where, file_place.file)
        )
        return functools.reduce(lambda crc, block: zlib.crc32(block, crc), blocks, 0)

    mismatch = files.checked.mismatch(*where, member.crc, compute)
    if mismatch is not None:
        raise UsageError(
            f"{member.name} of {file_place.file} has checksum {mismatch:08x}, but the archive says "
            f"{member.crc:08x}: the file is damaged; copy or record it again"
        )
    return True


def bools(raw: Tensor) -> Tensor:
    """Bytes as bools; torch may misread a bool byte other than 0 and 1, so these are converted."""
    return raw.view(torch.bool) if int(raw.max()) <= 1 else raw.ne(0)


def fill(file: IO[bytes], room: memoryview, name: str) -> None:
    """Read until `room` is full."""
    done = 0
    while done < len(room):
        block = file.read(min(_READ_BLOCK, len(room) - done))
        if not block:
            raise UsageError(f"{name} ends {len(room) - done} bytes too early: it is truncated")
        room[done : done + len(block)] = block
        done += len(block)


def _as_tensor(raw: Tensor, file_place: FilePlace, dtype: torch.dtype) -> Tensor:
    values = bools(raw) if dtype is torch.bool else view_as_dtype(raw, dtype)
    conj = values.as_strided(file_place.shape, file_place.stride)
    if file_place.is_conjugate:
        conj = conj.conj().resolve_conj()
    return conj.neg() if file_place.is_negated else conj


def _iterate_unpacked(file: Path, file_place: FilePlace) -> Iterator[bytes]:
    with _open_packed(file, file_place) as unpacked:
        while block := unpacked.read(_READ_BLOCK):
            yield block


def _read_packed(file: Path, file_place: FilePlace) -> Tensor:
    with _open_packed(file, file_place) as unpacked:
        skipped = bytearray(file_place.begin)
        fill(unpacked, memoryview(skipped), file_place.key)
        raw = torch.empty(file_place.nbytes, dtype=torch.uint8)
        fill(unpacked, raw.numpy().data, file_place.key)
        if unpacked.read(1):  # zipfile verifies the checksum only at the end
            raise UsageError(
                f"{file_place.key} of {file_place.file} has more bytes than its header says"
            )
        return raw


@contextlib.contextmanager
def _open_packed(file: Path, file_place: FilePlace) -> Iterator[IO[bytes]]:
    try:
        with zipfile.ZipFile(file) as archive, archive.open(file_place.key) as unpacked:
            yield unpacked
    except (zipfile.BadZipFile, zlib.error, KeyError, NotImplementedError, RuntimeError) as error:
        raise UsageError(f"{file_place.key} of {file_place.file} is damaged: {error}") from error
