"""`torch.save` files, read without executing them.

Such a file is a zip archive: a pickle that describes the objects, and the memory of each tensor.
The pickle is followed, never executed (see `pickles`), and values are read in place. So a file may
contain objects of any class; those that are not tensors are reported.
"""

from __future__ import annotations

import dataclasses
import struct
import zipfile
import zlib
from typing import TYPE_CHECKING, Any

from paritas.errors import UsageError
from paritas.files.dtypes import known_dtype
from paritas.files.pickles import Call, Name, Persistent, follow, leaves
from paritas.files.tensor_bytes import FilePlace, Member, place_of

if TYPE_CHECKING:
    import io
    from pathlib import Path

_LARGEST_PICKLE = 64 << 20
_LOCAL_HEADER = 30
_UTF_8 = 0x800  # the flag of names encoded in UTF-8
_MOST_WRAPPERS = 4
_LONGEST_ORDER = 16
_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
}
_TENSOR_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    NotImplementedError,
    RuntimeError,
    ValueError,
    OverflowError,
    EOFError,
    struct.error,
)


@dataclasses.dataclass(frozen=True)
class SavedLeaf:
    """One leaf of the saved tree.

    Attributes:
        way: the keys that lead to it.
        value: where a tensor is, why it cannot be read, or a value other than a tensor.
    """

    way: tuple[str, ...]
    value: FilePlace | Unreadable | PlainValue


@dataclasses.dataclass(frozen=True)
class Unreadable:
    """A tensor or other object whose values cannot be read."""

    reason: str


@dataclasses.dataclass(frozen=True)
class PlainValue:
    """A value other than a tensor."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Saved:
    """The contents of a file.

    Attributes:
        tree: as saved, with descriptions in place of objects.
    """

    tree: Any
    _storages: _Storages
    _most: int

    def leaves(self, part: Any) -> list[SavedLeaf]:
        """The leaves of a part of the tree."""
        found: list[SavedLeaf] = []
        for way, item in leaves(part, self._most):
            value: FilePlace | Unreadable | PlainValue
            try:
                value = self._storages.interpret(item)
            except UsageError as error:
                value = Unreadable(str(error))
            found.append(SavedLeaf(way, value))
        return found


def open_archive(path: Path) -> zipfile.ZipFile:
    """Open a zip archive that does not claim more bytes than the file has."""
    try:
        archive = zipfile.ZipFile(path)
    except _ZIP_ERRORS as error:
        raise UsageError(f"not a zip archive, or a damaged one: {error}") from error
    size = path.stat().st_size
    claimed = sum(max(member.compress_size, 0) for member in archive.infolist())
    names = {member.filename for member in archive.infolist()}
    if claimed > size or len(names) != len(archive.infolist()):
        archive.close()
        raise UsageError(
            f"its {len(archive.infolist())} members with {len(names)} names claim {claimed} of its "
            f"{size} bytes: it is damaged, or crafted to mislead its readers"
        )
    return archive


def stored_at(file: io.BufferedReader, member: zipfile.ZipInfo, size: int) -> int:
    """The offset of an uncompressed member."""
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
        raise UsageError(f"{member.filename} is compressed or encrypted; torch never writes that")
    file.seek(member.header_offset)
    head = file.read(_LOCAL_HEADER)
    if len(head) < _LOCAL_HEADER or head[:4] != b"PK\x03\x04":
        raise UsageError(f"{member.filename} is not where the archive says: the file is damaged")
    name_length, extra_length = struct.unpack("<HH", head[26:])
    code = "utf-8" if member.flag_bits & _UTF_8 else "cp437"
    if file.read(name_length).decode(code, "replace") != member.orig_filename:
        raise UsageError(
            f"another member lies where the archive says {member.filename} is: the file is damaged"
        )
    begin = int(member.header_offset + _LOCAL_HEADER + name_length + extra_length)
    if member.file_size != member.compress_size or begin + member.file_size > size:
        raise UsageError(f"{member.filename} ends after the end of the file: it is truncated")
    return begin


def read_saved(path: Path, name: str) -> Saved:
    """Read the structure of a `torch.save` file, but no values; `name` is its path in the dump."""
    with path.open("rb") as file:
        start = file.read(len(_LEGACY))
        if start == _LEGACY:
            raise UsageError(
                "it has the format of torch before 1.6: load it in torch and save it again"
            )
        if start[:2] != b"PK":
            raise UsageError(f"not a torch.save file: it begins with {start[:8]!r}")
        size = path.stat().st_size
        with open_archive(path) as archive:
            members = {member.filename: member for member in archive.infolist()}
        top = _top_folder(members)
        if f"{top}/constants.pkl" in members:
            raise UsageError("it is a TorchScript program, not saved tensors")
        _check_order(file, members.get(f"{top}/byteorder"), size)
        pickle = members[f"{top}/data.pkl"]
        if pickle.file_size > _LARGEST_PICKLE:
            raise UsageError(
                f"its pickle has {pickle.file_size} bytes, too many for a description of tensors"
            )
        tree, _ = follow(_read_member(file, pickle, size))
        storages = _Storages(name, file, members, top, size)
        return Saved(tree, storages, pickle.file_size + 16)


def only_tensor(path: Path, name: str) -> FilePlace:
    """Where the values of the only tensor of a file are."""
    saved = read_saved(path, name)
    found = [leaf.value for leaf in saved.leaves(saved.tree)]
    if len(found) == 1 and isinstance(found[0], FilePlace):
        return found[0]
    reasons = [value.reason for value in found if isinstance(value, Unreadable)]
    raise UsageError(
        f"it holds {len(found)} values, not one tensor{': ' if reasons else ''}"
        + "; ".join(reasons[:3])
    )


def _top_folder(members: dict[str, zipfile.ZipInfo]) -> str:
    tops = [name.removesuffix("/data.pkl") for name in members if name.endswith("/data.pkl")]
    if len(tops) != 1:
        raise UsageError(f"it has {len(tops)} data.pkl members; torch writes one")
    return tops[0]


def _check_order(file: io.BufferedReader, member: zipfile.ZipInfo | None, size: int) -> None:
    if member is None:  # written before torch 2.1; assume little endian
        return
    order = _read_member(file, member, size) if member.file_size <= _LONGEST_ORDER else b""
    if order != b"little":
        raise UsageError(f"its byte order is {order!r}; only little endian is supported")


def _read_member(file: io.BufferedReader, member: zipfile.ZipInfo, size: int) -> bytes:
    """Read a small member and verify its checksum, if it has one."""
    file.seek(stored_at(file, member, size))
    data = file.read(member.file_size)
    if member.CRC and zlib.crc32(data) != member.CRC:
        raise UsageError(
            f"{member.filename} has checksum {zlib.crc32(data):08x}, but the archive says "
            f"{member.CRC:08x}: the file is damaged; copy or record it again"
        )
    return data


@dataclasses.dataclass(frozen=True)
class _Storage:
    dtype: str | None
    location: str
    member: Member


class _Storages:
    """The memory of a file's tensors, and how tensors are made from it."""

    def __init__(
        self,
        name: str,
        file: io.BufferedReader,
        members: dict[str, zipfile.ZipInfo],
        top: str,
        size: int,
    ) -> None:
        self._name = name
        self._members: dict[str, Member | str] = {}
        for member in members.values():
            folder, _, key = member.filename.rpartition("/")
            if folder == f"{top}/data":
                try:
                    begin = stored_at(file, member, size)
                    found = Member(member.filename, begin, member.file_size, member.CRC)
                    self._members[key] = found
                except UsageError as error:
                    self._members[key] = str(error)

    def interpret(self, item: Any) -> FilePlace | Unreadable | PlainValue:
        """Interpret a leaf of the tree."""
        if isinstance(item, Persistent):
            storage = self._storage(item)
            dtype = storage.dtype or "uint8"
            count = storage.member.nbytes // known_dtype(dtype).itemsize
            return self._place(storage, dtype, 0, (count,), (1,))
        if not isinstance(item, Call):
            return PlainValue(item)
        return self._tensor(item, 0)

    def _tensor(self, call: Call, depth: int) -> FilePlace | Unreadable:
        what = call.what.path if isinstance(call.what, Name) else ""
        arguments = call.arguments if isinstance(call.arguments, tuple) else ()
        if depth > _MOST_WRAPPERS:
            return Unreadable("it is wrapped too many times")
        if what in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"):
            return self._rebuilt(arguments, typed=what.endswith("3"))
        if what == "torch._utils._rebuild_tensor":
            return self._rebuilt((*arguments, False), typed=False)
        inner: Any = arguments[0] if arguments else None
        if what.startswith("torch._utils._rebuild_parameter") and isinstance(inner, Call):
            found = self._tensor(inner, depth + 1)
            wants = bool(arguments[1]) if len(arguments) > 1 else True
            if isinstance(found, FilePlace):
                return dataclasses.replace(found, requires_grad=wants)
            return found
        if what == "torch._tensor._rebuild_from_type_v2":
            match arguments:
                case (function, Name(path=kind), inner, _) if kind in _TENSOR_CLASSES:
                    return self._tensor(Call(function, inner), depth + 1)
                case (_, Name(path=kind), _, _):
                    return Unreadable(f"tensors of class {kind} are not supported")
        return Unreadable(f"it is made by {what or 'an unnamed object'}, which is not called")

    def _rebuilt(self, arguments: tuple[Any, ...], *, typed: bool) -> FilePlace:
        least = 7 if typed else 5
        if len(arguments) < least or not isinstance(arguments[0], Persistent):
            raise UsageError(f"a tensor is described by {len(arguments)} arguments")
        offset = arguments[1]
        shape, stride = _read_numbers(arguments[2]), _read_numbers(arguments[3])
        storage = self._storage(arguments[0])
        dtype = storage.dtype
        if typed:
            dtype = arguments[6].path if isinstance(arguments[6], Name) else None
            dtype = dtype.removeprefix("torch.") if dtype else None
        if dtype is None or not _is_count(offset):
            raise UsageError(f"a tensor's dtype is {dtype}, its offset {offset!r}")
        place = self._place(storage, dtype, offset, shape, stride)
        flags = arguments[-1] if isinstance(arguments[-1], dict) else {}
        return dataclasses.replace(
            place,
            requires_grad=arguments[4] is True,
            is_conjugate=flags.get("conj") is True and known_dtype(dtype).is_complex,
            is_negated=flags.get("neg") is True,
        )

    def _place(
        self,
        storage: _Storage,
        dtype: str,
        offset: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
    ) -> FilePlace:
        skipped = offset * known_dtype(dtype).itemsize
        member = storage.member
        room, begin = member.nbytes - skipped, member.begin + skipped
        place = place_of(self._name, dtype, shape, stride, begin, room)
        return dataclasses.replace(place, offset=offset, device=storage.location, member=member)

    def _storage(self, item: Persistent) -> _Storage:
        match item.identity:
            case ("storage", Name(path=path), str() as key, str() as location, _):
                pass
            case _:
                raise UsageError("a tensor's memory is described in an unknown way")
        kind = path.rpartition(".")[2]
        if kind not in _STORAGES and kind != "UntypedStorage":
            raise UsageError(f"a tensor's memory has the unknown class {path}")
        found = self._members.get(key, "it is not in the file")
        if isinstance(found, str):
            raise UsageError(f"storage {key[:32]!r} of a tensor: {found}")
        return _Storage(_STORAGES.get(kind), location[:32], found)


def _read_numbers(value: Any) -> tuple[int, ...]:
    """A shape or strides, possibly as a `torch.Size`."""
    if isinstance(value, Call) and isinstance(value.arguments, tuple) and len(value.arguments) == 1:
        value = value.arguments[0]
    if not isinstance(value, (tuple, list)) or not all(map(_is_count, value)):
        raise UsageError("a tensor's shape or strides are not whole numbers")
    return tuple(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62
