"""Read a pickle without executing it.

A pickle is a program. This reader only follows it: containers, numbers and text come out as they
are; where the program would look up a name or call something, a description takes the place of the
result. Nothing is imported or called, so a hostile file can do nothing.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import TYPE_CHECKING, Any, Protocol

from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
        for place in range(len(self._stack) - 1, -1, -1):
            if self._stack[place] is _MARK:
                group = self._stack[place + 1 :]
                del self._stack[place:]
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
        made = Call(self.pop(), arguments)
        if self._watch is not None:
            self._watch.see_call(made, self._instruction)
        self.push(_make_container(made))

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
        made: dict[Any, Any] = {}
        for pair in pairs if isinstance(pairs, list) else []:
            match pair:
                case [key, value] if isinstance(key, _PLAIN):
                    made[key] = value
        return made
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
    seen = 0
    while waiting:
        seen += 1
        if seen > most:
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
