"""Pickles and `torch.save` files, read without executing them."""

from __future__ import annotations

import dataclasses
import struct
import zipfile
import zlib
from typing import TYPE_CHECKING, Any, Protocol

from paritas.core.errors import UsageError
from paritas.formats.files.tensor_bytes import FilePlace, Member, known_dtype, place_of

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Iterator
    from pathlib import Path


# --- Pickles --------------------------------------------------------------------------------------
# A pickle is a program. This reader only follows it: containers, numbers and text come out as
# they are; where the program would look up a name or call something, a description takes the
# place of the result. Nothing is imported or called, so a hostile file can do nothing.
# `pickle.Unpickler` with its own `find_class` would not do: seven bytes that name a high memo entry
# make it allocate gigabytes, and it does not tell where in the file an instruction is.

_LONGEST = 64 << 20
_LONGEST_INTEGER = 32  # bytes
_DEEPEST = 64
_PLAIN = (str, int, float, bool, bytes, type(None))
_LAST_VERSION = 5
_STOP, _NEW_LINE = b".\n"


@dataclasses.dataclass(frozen=True)
class Name:
    """A class, function or constant that the pickle looks up, by its full name."""

    path: str


@dataclasses.dataclass(eq=False)
class Call:
    """What the pickle would call, with its arguments and the state it would set on the result."""

    what: Any
    arguments: Any
    state: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class Persistent:
    """An object stored outside the pickle; for torch, a storage."""

    identity: Any


class PickleWatch(Protocol):
    """Sees everything that a pickle looks up or calls, also what it discards; raises to refuse.

    `at` is the byte offset of the instruction.
    """

    def see_name(self, name: Name, at: int) -> None:
        """The pickle looks up a name."""

    def see_call(self, call: Call, at: int) -> None:
        """The pickle calls something; the state is not known yet."""


class _Mark:
    """Where a group begins on the stack."""


_MARK = _Mark()


class _PickleReader:
    """Follows one pickle. Every length is checked against the remaining data."""

    def __init__(self, data: memoryview, begin: int, watch: PickleWatch | None) -> None:
        self._data = data
        self._watch = watch
        self.at = begin
        self._instruction = begin
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._keys = 0

    def run(self) -> Any:
        while True:
            self._instruction = self.at
            code = self.take(1)[0]
            if code == _STOP:
                return self.pop()
            step = _STEPS.get(code)
            if step is None:
                raise UsageError(f"its pickle has the unknown instruction {code:#04x}")
            step(self)

    def take(self, count: int) -> memoryview:
        end = self.at + count
        if end > len(self._data):
            raise UsageError(f"its pickle ends {end - len(self._data)} bytes too early")
        part = self._data[self.at : end]
        self.at = end
        return part

    def _number(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def _line(self) -> str:
        end = self.at
        while end < len(self._data) and self._data[end] != _NEW_LINE:
            end += 1
        text = bytes(self.take(end - self.at))
        self.take(1)
        return text.decode("utf-8", "replace")

    def pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise UsageError("its pickle pops from an empty stack")
        return self._stack.pop()

    def _top(self) -> Any:
        top = self.pop()
        self._stack.append(top)
        return top

    def take_group(self) -> list[Any]:
        for position in range(len(self._stack) - 1, -1, -1):
            if self._stack[position] is _MARK:
                group = self._stack[position + 1 :]
                del self._stack[position:]
                return group
        raise UsageError("its pickle ends a group that was never begun")

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def text(self, code: str) -> None:
        self.push(bytes(self.take(self._number(code))).decode("utf-8", "replace"))

    def raw(self, code: str) -> None:
        self.push(bytes(self.take(self._number(code))))

    def number(self, code: str) -> None:
        self.push(self._number(code))

    def integer(self, code: str) -> None:
        length = self._number(code)
        if not 0 <= length <= _LONGEST_INTEGER:
            raise UsageError(f"its pickle has an integer of {length} bytes")
        self.push(int.from_bytes(self.take(length), "little", signed=True))

    def group(self, kind: Callable[[list[Any]], Any]) -> None:
        self.push(kind(self.take_group()))

    def mapping(self) -> None:
        group = self.take_group()
        self.push({})
        self.assign(group)

    def last(self, count: int) -> None:
        items = [self.pop() for _ in range(count)]
        self.push(tuple(reversed(items)))

    def extend(self, items: list[Any]) -> None:
        target = self._top()
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Call):  # the contents of an unknown object are not needed
            raise UsageError(f"its pickle puts items into a {type(target).__name__}")

    def set_item(self) -> None:
        value = self.pop()
        self.assign([self.pop(), value])

    def assign(self, group: list[Any]) -> None:
        target = self._top()
        if len(group) % 2:
            raise UsageError("its pickle has a key without a value")
        if isinstance(target, Call):
            return
        if not isinstance(target, dict):
            raise UsageError(f"its pickle puts keys into a {type(target).__name__}")
        for key, value in zip(group[::2], group[1::2], strict=True):
            # Hashing a deeply nested key could recurse without limit.
            if not isinstance(key, _PLAIN):
                self._keys += 1
                target[f"<{type(key).__name__} {self._keys}>"] = value
            else:
                target[key] = value

    def get(self, code: str) -> None:
        number = self._number(code)
        if number not in self._memo:
            raise UsageError(f"its pickle reads memo {number}, which was never written")
        self.push(self._memo[number])

    def put(self, code: str) -> None:
        self._memo[self._number(code)] = self._top()

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._top()

    def name(self) -> None:
        module = self._line()
        self._look_up(Name(f"{module}.{self._line()}"))

    def stack_name(self) -> None:
        name, module = self.pop(), self.pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise UsageError("its pickle looks up something that is not a name")
        self._look_up(Name(f"{module}.{name}"))

    def _look_up(self, name: Name) -> None:
        if self._watch is not None:
            self._watch.see_name(name, self._instruction)
        self.push(name)

    def call(self) -> None:
        arguments = self.pop()
        call = Call(self.pop(), arguments)
        if self._watch is not None:
            self._watch.see_call(call, self._instruction)
        self.push(_make_container(call))

    def call_with_names(self) -> None:
        self.pop()
        self.call()

    def build(self) -> None:
        state = self.pop()
        target = self._top()
        if isinstance(target, Call):
            target.state = state

    def skip_version(self) -> None:
        version = self.take(1)[0]
        if version > _LAST_VERSION:
            raise UsageError(
                f"its pickle has version {version}; the latest known one is {_LAST_VERSION}"
            )


def _make_container(call: Call) -> Any:
    """Make an OrderedDict at once, as it is only a container; other calls stay descriptions."""
    arguments = call.arguments
    if isinstance(call.what, Name) and call.what.path == "collections.OrderedDict":
        pairs = arguments[0] if isinstance(arguments, tuple) and arguments else []
        container: dict[Any, Any] = {}
        for pair in pairs if isinstance(pairs, list) else []:
            match pair:
                case [key, value] if isinstance(key, _PLAIN):
                    container[key] = value
        return container
    return call


_STEPS: dict[int, Callable[[_PickleReader], Any]] = {
    0x28: lambda r: r.push(_MARK),
    0x29: lambda r: r.push(()),
    0x30: lambda r: r.pop(),
    0x31: lambda r: r.take_group(),
    0x42: lambda r: r.raw("<I"),
    0x43: lambda r: r.raw("<B"),
    0x47: lambda r: r.number(">d"),
    0x4A: lambda r: r.number("<i"),
    0x4B: lambda r: r.number("<B"),
    0x4D: lambda r: r.number("<H"),
    0x4E: lambda r: r.push(None),
    0x51: lambda r: r.push(Persistent(r.pop())),
    0x52: _PickleReader.call,
    0x54: lambda r: r.text("<I"),
    0x55: lambda r: r.text("<B"),
    0x58: lambda r: r.text("<I"),
    0x5D: lambda r: r.push([]),
    0x61: lambda r: r.extend([r.pop()]),
    0x62: _PickleReader.build,
    0x63: _PickleReader.name,
    0x64: _PickleReader.mapping,
    0x65: lambda r: r.extend(r.take_group()),
    0x68: lambda r: r.get("<B"),
    0x6A: lambda r: r.get("<I"),
    0x6C: lambda r: r.group(list),
    0x71: lambda r: r.put("<B"),
    0x72: lambda r: r.put("<I"),
    0x73: _PickleReader.set_item,
    0x74: lambda r: r.group(tuple),
    0x75: lambda r: r.assign(r.take_group()),
    0x7D: lambda r: r.push({}),
    0x80: _PickleReader.skip_version,
    0x81: _PickleReader.call,
    0x85: lambda r: r.last(1),
    0x86: lambda r: r.last(2),
    0x87: lambda r: r.last(3),
    0x88: lambda r: r.push(True),
    0x89: lambda r: r.push(False),
    0x8A: lambda r: r.integer("<B"),
    0x8B: lambda r: r.integer("<i"),
    0x8C: lambda r: r.text("<B"),
    0x8D: lambda r: r.text("<Q"),
    0x8E: lambda r: r.raw("<Q"),
    0x8F: lambda r: r.push([]),
    0x90: lambda r: r.extend(r.take_group()),
    0x91: lambda r: r.group(list),
    0x92: _PickleReader.call_with_names,
    0x93: _PickleReader.stack_name,
    0x94: _PickleReader.memoize,
    0x95: lambda r: r.take(8),
    0x96: lambda r: r.raw("<Q"),
}


def follow(data: bytes, begin: int = 0, watch: PickleWatch | None = None) -> tuple[Any, int]:
    """What a pickle would make, and the byte after it. A set becomes a list."""
    if len(data) - begin > _LONGEST:
        raise UsageError(f"its pickle has {len(data) - begin} bytes, the limit is {_LONGEST}")
    reader = _PickleReader(memoryview(data), begin, watch)
    return reader.run(), reader.at


def leaves(tree: Any, most: int) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The leaves of a tree of lists, tuples and dicts, each with its keys.

    `most` limits its parts: shared parts can make a tree far larger than its pickle.
    """
    waiting: list[tuple[tuple[str, ...], Any]] = [((), tree)]
    visited = 0
    while waiting:
        visited += 1
        if visited > most:
            raise UsageError(f"it has more than {most} parts, too many for its size")
        way, part = waiting.pop()
        items: Any
        if isinstance(part, dict):
            items = part.items()
        elif isinstance(part, (list, tuple)):
            items = enumerate(part)
        else:
            yield way, part
            continue
        if len(way) >= _DEEPEST:
            raise UsageError(f"it is nested deeper than {_DEEPEST} containers")
        if len(waiting) + len(part) > most:
            raise UsageError(f"it has more than {most} parts, too many for its size")
        for key, item in reversed(list(items)):
            waiting.append(((*way, key if isinstance(key, str) else repr(key)), item))


def plain_text(value: Any) -> str | None:
    """A number, text or name as Python would print it; None for anything else."""
    if isinstance(value, Name):
        return value.path
    if isinstance(value, _PLAIN):
        return repr(value)
    return None


# --- Files of `torch.save` ------------------------------------------------------------------------
# Such a file is a zip archive: a pickle that describes the objects, and the memory of each
# tensor. The pickle is followed, never executed (see above), and values are read in place. So
# a file may contain objects of any class; those that are not tensors are reported.

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
        saved_leaves: list[SavedLeaf] = []
        for way, item in leaves(part, self._most):
            value: FilePlace | Unreadable | PlainValue
            try:
                value = self._storages.interpret(item)
            except UsageError as error:
                value = Unreadable(str(error))
            saved_leaves.append(SavedLeaf(way, value))
        return saved_leaves


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
    values = [leaf.value for leaf in saved.leaves(saved.tree)]
    if len(values) == 1 and isinstance(values[0], FilePlace):
        return values[0]
    reasons = [value.reason for value in values if isinstance(value, Unreadable)]
    raise UsageError(
        f"it holds {len(values)} values, not one tensor{': ' if reasons else ''}"
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
                    stored_member = Member(member.filename, begin, member.file_size, member.CRC)
                    self._members[key] = stored_member
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
            value = self._tensor(inner, depth + 1)
            wants = bool(arguments[1]) if len(arguments) > 1 else True
            if isinstance(value, FilePlace):
                return dataclasses.replace(value, requires_grad=wants)
            return value
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
        position = self._place(storage, dtype, offset, shape, stride)
        flags = arguments[-1] if isinstance(arguments[-1], dict) else {}
        return dataclasses.replace(
            position,
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
        position = place_of(self._name, dtype, shape, stride, begin, room)
        return dataclasses.replace(position, offset=offset, device=storage.location, member=member)

    def _storage(self, item: Persistent) -> _Storage:
        match item.identity:
            case ("storage", Name(path=path), str() as key, str() as location, _):
                pass
            case _:
                raise UsageError("a tensor's memory is described in an unknown way")
        kind = path.rpartition(".")[2]
        if kind not in _STORAGES and kind != "UntypedStorage":
            raise UsageError(f"a tensor's memory has the unknown class {path}")
        member = self._members.get(key, "it is not in the file")
        if isinstance(member, str):
            raise UsageError(f"storage {key[:32]!r} of a tensor: {member}")
        return _Storage(_STORAGES.get(kind), location[:32], member)


def _read_numbers(value: Any) -> tuple[int, ...]:
    """A shape or strides, possibly as a `torch.Size`."""
    if isinstance(value, Call) and isinstance(value.arguments, tuple) and len(value.arguments) == 1:
        value = value.arguments[0]
    if not isinstance(value, (tuple, list)) or not all(map(_is_count, value)):
        raise UsageError("a tensor's shape or strides are not whole numbers")
    return tuple(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62
