"""Read the contents of any object without calling methods that its class may have overridden.

Containers are read through the methods of the built-in classes, objects through the descriptors of
their attributes. A user's `__eq__`, `__iter__`, `items` or `__getattr__` is never called: it may
always return True, return tensors, raise, or write. Objects that only their own code can read (a
lock, a generator, a file) are `Opaque`. Plain nested containers have a faster reader, which can
also rebuild them with other leaves.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import copy
import dataclasses
import enum
import functools
import logging
import operator
import threading
import types
import typing
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paritas.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


# Families: see `ContainerKind`.
SEQUENCE, MAPPING, RECORD = "sequence", "mapping", "record"
# Deeper than any sensible result; an endless chain of objects ends here.
_MOST_LEVELS = 64
# Per value. A tokenizer's vocabulary has a few hundred thousand.
_MOST_LEAVES = 1_000_000

_NUMBERS = (bool, int, float, complex)
_PLAIN = (
    *_NUMBERS,
    str,
    bytes,
    bytearray,
    range,
    type(None),
    type(Ellipsis),
    type(NotImplemented),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.qscheme,
)
# Compared by identity: they are created once and do not hold results.
_IDENTITIES = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ModuleType,
    types.CodeType,
    torch.nn.Module,
    logging.Logger,
    threading.Thread,
)
# Not readable: they use the `==` of their contents, can be read only once, or hold threads.
_UNREADABLE = (
    weakref.ReferenceType,
    weakref.ProxyType,
    weakref.CallableProxyType,
    types.CellType,
    types.GeneratorType,
    types.CoroutineType,
    types.AsyncGeneratorType,
    memoryview,
    threading.Event,
    threading.Condition,
    threading.Semaphore,
    threading.Barrier,
    concurrent.futures.Executor,
    concurrent.futures.Future,
)
# Classes in C that keep everything in attributes.
_READABLE = (object, types.SimpleNamespace, typing.Generic)
_NATIVE_METHODS = (
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Opaque:
    """A leaf that cannot be read, with the reason.

    Attributes:
        by_identity: whether the same object counts as equal; otherwise it cannot be compared.
    """

    value: Any
    reason: str
    by_identity: bool = False


@dataclasses.dataclass(frozen=True)
class ContainerKind:
    """The kind of a container, an object or a tensor that is not dense.

    Attributes:
        name: its class name, for messages.
        family: interchangeable kinds: a tuple and a list, any two mappings. Only values of one
            family are compared part by part.
        is_tensor: whether a dense tensor may replace it.
    """

    name: str
    family: str
    is_tensor: bool = False


@dataclasses.dataclass(frozen=True)
class Parts:
    """The kind of a value and its parts, each with the suffix of its path."""

    kind: ContainerKind
    items: list[tuple[str, Any]]


def contents(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a value with its path, depth first: tensors, numbers, strings, `Opaque`."""
    for where, leaf, below in walk(value, path):
        if below is None:
            yield where, leaf


def parts(value: Any) -> Parts | None:
    """The parts of a container or an object, one level deep; None for a leaf."""
    parts_beside_attributes = _parts_beside_attributes(value)
    return (
        None
        if parts_beside_attributes is None
        else _with_attributes(value, parts_beside_attributes)
    )


def _parts_beside_attributes(value: Any) -> Parts | None:
    cls = type(value)
    if _is_leaf(value):
        return None
    for read in (_read_mapping, _read_sequence, _read_special):
        content_parts = read(value)
        if content_parts is not None:
            return content_parts
    if any(_is_native(base) for base in cls.__mro__ if base not in _READABLE):
        return None
    is_record = dataclasses.is_dataclass(cls) or issubclass(cls, types.SimpleNamespace)
    kind = ContainerKind(cls.__name__, RECORD) if is_record else _own_kind(cls)
    return Parts(kind, [])


def same_leaf(left: Any, right: Any) -> bool | None:
    """Whether two leaves other than tensors are equal in class and value; None if unknown.

    1, True and 1.0 are three values. No `==` written in Python is called.
    """
    if isinstance(left, Opaque) and isinstance(right, Opaque):
        if type(left.value) is not type(right.value):
            return False
        return True if left.value is right.value and left.by_identity else None
    if type(left) is not type(right):
        return False
    if isinstance(left, enum.Enum):
        return left is right
    if isinstance(left, set | frozenset):
        return {_tag_with_class(x) for x in left} == {_tag_with_class(x) for x in right}
    if isinstance(left, float | complex):
        return repr(left) == repr(right)  # NaN is NaN, and -0.0 is not 0.0
    if isinstance(left, np.ndarray | np.generic):
        alike = left.dtype == right.dtype and left.shape == right.shape
        return bool(alike and left.tobytes() == right.tobytes())
    return _equal_by_own_class(left, right)


def _equal_by_own_class(left: Any, right: Any) -> bool | None:
    """Compare by the `==` of a class written in C; its contents may be incomparable."""
    try:
        equal = left == right
    except Exception:  # noqa: BLE001  (unknown: unverified)
        return None
    return equal if isinstance(equal, bool) else None


def walk(value: Any, path: str) -> Iterator[tuple[str, Any, Parts | None]]:
    """Every value with its path and its parts, a container before its contents."""
    stack: list[tuple[str, Any, tuple[tuple[int, str], ...]]] = [(path, value, ())]
    visited_count = 0
    while stack:
        where, node, above = stack.pop()
        cycle = next((p for address, p in above if address == id(node)), None)
        if cycle is not None:
            yield where, f"<the object at {cycle or 'the root'}>", None
            continue
        below = parts(node)
        visited_count += 1
        if below is None:
            yield where, as_leaf(node), None
        elif len(above) >= _MOST_LEVELS or visited_count > _MOST_LEAVES:
            too = "deep" if len(above) >= _MOST_LEVELS else "large"
            yield where, Opaque(node, f"too {too} to be compared"), None
        else:
            yield where, node, below
            inside = (*above, (id(node), where))
            stack += [(where + suffix, child, inside) for suffix, child in reversed(below.items)]


def _is_leaf(value: Any) -> bool:
    cls = type(value)
    if issubclass(cls, torch.Tensor) or cls in _PLAIN or cls is object or _is_array(value):
        return True
    return issubclass(cls, (enum.Enum, set, frozenset, *_IDENTITIES, *_UNREADABLE))


def _is_array(value: Any) -> bool:
    cls = type(value)
    return issubclass(cls, np.generic | np.dtype) or (
        cls is np.ndarray and not value.dtype.hasobject
    )


def as_leaf(value: Any) -> Any:
    """A leaf as it is, or `Opaque` if neither we nor its own class can compare it."""
    cls: type = type(value)
    if cls in _PLAIN or _is_array(value) or issubclass(cls, torch.Tensor | enum.Enum):
        return value
    if issubclass(cls, _IDENTITIES):
        return Opaque(
            value, f"paritas can compare a {cls.__name__} only by identity", by_identity=True
        )
    if issubclass(cls, set | frozenset):
        base = set if issubclass(cls, set) else frozenset
        elements = list(base.__iter__(value))
        if all(map(_is_simple, elements)):
            return base(elements)
        return Opaque(value, f"paritas cannot compare a {cls.__name__} of objects: it has no order")
    # Compiled code of a library, such as datetime: its == is not a user's.
    if "__eq__" in vars(cls) and _is_native(cls) and cls not in (*_UNREADABLE, object):
        return value
    reason = f"paritas cannot compare objects of type {cls.__name__}"
    return Opaque(value, reason, by_identity=cls is object)


def _read_mapping(value: Any) -> Parts | None:
    cls = type(value)
    if issubclass(cls, dict):
        pairs = list(dict.items(value))
    elif cls is types.MappingProxyType:
        pairs = list(value.items())
    else:
        return None
    items: list[tuple[str, Any]] = []
    for position, (key, item) in enumerate(pairs):
        if _is_simple(key):
            items.append((f"[{_key_name(key)}]", item))
        else:  # the key has no stable name, so it is compared too
            items.append((f"[{position}]", (key, item)))
    return Parts(ContainerKind(cls.__name__, MAPPING), items)


def _read_sequence(value: Any) -> Parts | None:
    cls = type(value)
    base: Any
    if issubclass(cls, tuple):
        fields, base = getattr(cls, "_fields", None), tuple
        if isinstance(fields, tuple):
            pairs = zip(fields, tuple.__iter__(value), strict=True)
            return Parts(
                ContainerKind(cls.__name__, RECORD), [(f".{name}", item) for name, item in pairs]
            )
    elif issubclass(cls, list):
        base = list
    elif issubclass(cls, collections.deque):
        base = collections.deque
    else:
        return None
    items = [(f"[{position}]", item) for position, item in enumerate(base.__iter__(value))]
    return Parts(ContainerKind(cls.__name__, SEQUENCE), items)


def _read_special(value: Any) -> Parts | None:
    """Objects with contents outside their Python attributes."""
    cls = type(value)
    names: tuple[str, ...]
    if cls is slice:
        names = ("start", "stop", "step")
    elif issubclass(cls, types.MethodType):
        names = ("__func__", "__self__")
    elif issubclass(cls, functools.partial):
        names = ("func", "args", "keywords")
    elif issubclass(cls, BaseException):
        names = ("args",)
    else:
        return _read_scalar(value) or _read_array(value)
    # Not getattr, which a subclass may have overridden.
    items = [(f".{name}", object.__getattribute__(value, name)) for name in names]
    return Parts(_own_kind(cls), items)


def _read_scalar(value: Any) -> Parts | None:
    """A number or string of a user's subclass, as its plain value."""
    cls = type(value)
    for base in (int, float, complex, str, bytes):
        if issubclass(cls, base):
            plain = base(*getattr(base, "__getnewargs__")(value))  # noqa: B009  (not in typeshed)
            return Parts(_own_kind(cls), [(".value", plain)])
    return None


def _read_array(value: Any) -> Parts | None:
    cls = type(value)
    if cls is np.ma.MaskedArray:  # masked values may be anything
        items = [(".mask", np.ma.getmaskarray(value)), (".data", value.filled(0))]
        return Parts(_own_kind(cls), items)
    if not issubclass(cls, np.ndarray):
        return None
    plain = np.ndarray.view(value, np.ndarray)
    if not plain.dtype.hasobject:
        return Parts(_own_kind(cls), [(".data", plain)])
    items = [(".shape", plain.shape), *((f".flat[{i}]", x) for i, x in enumerate(plain.flat))]
    return Parts(_own_kind(cls), items)


def _with_attributes(value: Any, content_parts: Parts) -> Parts:
    """Add the attributes to the parts, each once."""
    by_suffix = dict(content_parts.items)
    items = list(content_parts.items)
    hidden: list[tuple[str, Any]] = []
    if type(value) is np.ma.MaskedArray:
        return content_parts
    for name, attribute in attributes(value):
        suffix = f".{name}"
        part = by_suffix.get(suffix, by_suffix.get(f"[{name!r}]", _MISSING))
        # A ModelOutput's fields are also its items, except those that are None.
        if part is attribute or (content_parts.kind.family == MAPPING and attribute is None):
            continue
        # A private lock or weak reference is not part of the result.
        private = name.startswith("_") and _is_hidden(attribute)
        (hidden if private else items).append((suffix, attribute))
    return dataclasses.replace(content_parts, items=items or hidden)


_MISSING = object()


def attributes(value: Any) -> list[tuple[str, Any]]:
    """The contents of an object's `__dict__` and slots, except cached properties."""
    attribute_values: dict[str, Any] = {}
    cls = type(value)
    stored, cached = _stored_in(cls)
    for base_index, name in stored:
        descriptor = vars(cls.__mro__[base_index])[name]
        if name == "__dict__":
            attribute_values |= dict.items(descriptor.__get__(value))
        else:
            with contextlib.suppress(AttributeError):  # an empty slot
                attribute_values[name] = descriptor.__get__(value)
    return [
        (name, attribute)
        for name, attribute in attribute_values.items()
        if type(name) is str and name not in cached and not _is_special(name)
    ]


# What torch itself sets on tensors: nn.Buffer, Inductor's freezing, and Dynamo's marks.
_OF_TORCH = frozenset(
    {"persistent", "_is_buffer", "_is_param", "_is_frozen_param", "_specialize_on"}
)
_DYNAMOS = "dynamo"
_OWN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def given_to_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes that a program has given to a tensor of torch's own classes.

    Those of other classes are their contents.
    """
    own_attributes = vars(tensor) if type(tensor) in _OWN_TENSORS else {}
    return {
        name: value
        for name, value in own_attributes.items()
        if name not in _OF_TORCH and _DYNAMOS not in name and not _is_special(name)
    }


def marks_of_dynamo(tensor: torch.Tensor) -> dict[str, Any]:
    """What the user has told Dynamo about a tensor, such as `mark_dynamic`.

    It compiles again for a tensor without. A fixed address is not among them: no copy has it.
    """
    return {
        name: copy.copy(value)
        for name, value in (vars(tensor).items() if type(tensor) in _OWN_TENSORS else ())
        if _DYNAMOS in name and name != "_dynamo_static_input_type"
    }


def _stored_in(cls: type) -> tuple[list[tuple[int, str]], frozenset[str]]:
    """What an object of a class stores, by its place among the bases, and its cached properties.

    Kept while the class lives, which has them from its creation on. By identity: a metaclass may
    refuse to be hashed.
    """
    key = id(cls)
    cached_entry = _STORED_IN.get(key)
    if cached_entry is not None and cached_entry[0]() is cls:
        return cached_entry[1], cached_entry[2]
    stored: list[tuple[int, str]] = []
    cached: set[str] = set()
    for base_index, base in reversed(list(enumerate(cls.__mro__))):
        for name, descriptor in list(vars(base).items()):
            if isinstance(descriptor, functools.cached_property):
                cached.add(name)
            elif isinstance(descriptor, _STORED) and (name == "__dict__" or not _is_native(base)):
                stored.append((base_index, name))
    forget = weakref.ref(cls, lambda _: _STORED_IN.pop(key, None))
    _STORED_IN[key] = forget, stored, frozenset(cached)
    return stored, frozenset(cached)


# No descriptors: they would keep their class alive.
_STORED_IN: dict[int, tuple[weakref.ref[type], list[tuple[int, str]], frozenset[str]]] = {}
_STORED = (types.GetSetDescriptorType, types.MemberDescriptorType)


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_hidden(value: Any) -> bool:
    # Without its attributes: objects may refer to each other in a cycle.
    return _parts_beside_attributes(value) is None and isinstance(as_leaf(value), Opaque)


def _is_native(cls: type) -> bool:
    """Whether a class is written in C: its objects may hold more than attributes."""
    return any(
        isinstance(member, _NATIVE_METHODS) and member.__objclass__ is cls
        for member in vars(cls).values()
    )


def _own_kind(cls: type) -> ContainerKind:
    """A kind that is interchangeable with no other class."""
    return ContainerKind(cls.__name__, f"{cls.__module__}.{cls.__qualname__}")


def _is_simple(value: Any) -> bool:
    """Whether the repr of a key or element identifies it."""
    cls = type(value)
    if cls is tuple or cls is frozenset:
        return all(map(_is_simple, value))
    return cls in _PLAIN or issubclass(cls, enum.Enum | np.generic)


def _key_name(key: Any) -> str:
    return f"{type(key).__name__}.{key._name_}" if isinstance(key, enum.Enum) else repr(key)


def _tag_with_class(value: Any) -> Any:
    if isinstance(value, tuple | frozenset):
        return type(value), type(value)(_tag_with_class(x) for x in value)
    return type(value), repr(value) if isinstance(value, float | complex) else value


# --- Plain nested containers: their leaves, and rebuilding them -----------------------------------


def children(tree: Any) -> list[tuple[str, Any]] | None:
    """The (path suffix, child) pairs of a container, or None if `tree` is a leaf."""
    if isinstance(tree, torch.Tensor | str | bytes):
        return None
    if isinstance(tree, Mapping):  # Hugging Face's ModelOutput is one
        return [(f"[{key!r}]", value) for key, value in tree.items()]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return [(f".{name}", getattr(tree, name)) for name in tree._fields]
    if isinstance(tree, list | tuple):
        return [(f"[{position}]", value) for position, value in enumerate(tree)]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(f".{field.name}", getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    if isinstance(tree, types.SimpleNamespace):
        return [(f".{name}", value) for name, value in vars(tree).items()]
    return None


def leaves(
    tree: Any, path: str = "", join: Callable[[str, str], str] = operator.add
) -> Iterator[tuple[str, Any]]:
    """Every leaf with its path, depth first, in container order.

    Args:
        join: the path of a child, from that of its container and a suffix such as `[0]` or `.name`.

    Raises:
        UsageError: a container contains itself, or too much.
    """
    yield from _leaves(tree, path, join, 0, iter(range(_MOST_LEAVES)))


def _leaves(
    tree: Any, path: str, join: Callable[[str, str], str], level: int, budget: Iterator[int]
) -> Iterator[tuple[str, Any]]:
    below = children(tree)
    if below is None:
        yield path, tree
        return
    _limit(tree, level, budget)
    for suffix, child in below:
        yield from _leaves(child, join(path, suffix), join, level + 1, budget)


def _limit(tree: Any, level: int, budget: Iterator[int]) -> None:
    """Refuse a container that is too deep, or one too many: lists may contain each other."""
    if level >= _MOST_LEVELS or next(budget, None) is None:
        raise UsageError(
            f"a {type(tree).__name__} cannot be read: it contains itself, or is nested more than "
            f"{_MOST_LEVELS} levels deep, or is one of more than {_MOST_LEAVES:,} containers"
        )


def detach_value(value: Any) -> Any:
    """A tensor without its history; any other value as it is."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def map_leaves(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Rebuild `tree` with `function` applied to each leaf; containers are always new objects.

    What occurs twice is mapped once, and its image occurs twice: a program may ask whether two
    arguments are the same object, and compiled code does.

    Raises:
        UsageError: a container contains itself, or too much.
    """
    return _map_leaves(tree, function, {}, 0, iter(range(_MOST_LEAVES)))


def replace_leaves(tree: Any, values: Iterable[Any]) -> Any:
    """Rebuild `tree` with these leaves, in the order of `leaves`."""
    remaining = iter(values)
    return _map_leaves(tree, lambda _: next(remaining), None, 0, iter(range(_MOST_LEAVES)))


def _map_leaves(
    tree: Any,
    function: Callable[[Any], Any],
    images: dict[int, tuple[Any, Any]] | None,
    level: int,
    budget: Iterator[int],
) -> Any:
    """Rebuild a tree; `images` has what was mapped already, by id, if that is not mapped again."""
    keeps_identity = images is not None and type(tree) not in _PLAIN
    if images is not None and keeps_identity and id(tree) in images:
        return images[id(tree)][1]
    below = children(tree)
    if below is None:
        image = function(tree)
    else:
        _limit(tree, level, budget)
        mapped = [_map_leaves(child, function, images, level + 1, budget) for _, child in below]
        image = _rebuild_container(tree, below, mapped)
    if images is not None and keeps_identity:
        images[id(tree)] = tree, image  # with the original, which keeps its id taken
    return image


def _rebuild_container(tree: Any, below: list[tuple[str, Any]], mapped: list[Any]) -> Any:
    """A container like this one, with other children."""
    if isinstance(tree, Mapping):
        return _rebuild_mapping(tree, mapped)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*mapped)
    if isinstance(tree, list | tuple):
        # torch.Size and torch.return_types are tuples too; their constructors take a sequence
        return type(tree)(mapped)
    names = [suffix[1:] for suffix, _ in below]
    rebuilt = copy.copy(tree)
    for name, value in zip(names, mapped, strict=True):
        object.__setattr__(rebuilt, name, value)  # a frozen dataclass refuses plain assignment
    return rebuilt


def map_arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], function: Callable[[str, Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call by `map_in_tuples`, with paths such as `args[0]`, `kwargs['x']`."""
    named = {
        name: map_in_tuples(value, function, f"kwargs[{name!r}]") for name, value in kwargs.items()
    }
    return map_in_tuples(args, function, "args"), named


def map_in_tuples(tree: Any, function: Callable[[str, Any], Any], path: str = "") -> Any:
    """Apply `function` to the path and the value of a tensor, and of each in plain tuples.

    Lists and objects stay the same, as does a tuple in which nothing changes: a program may write
    to them, or compare them by identity.
    """
    if isinstance(tree, torch.Tensor):
        return function(path, tree)
    if type(tree) is not tuple:
        return tree
    mapped = tuple(
        map_in_tuples(item, function, f"{path}[{position}]") for position, item in enumerate(tree)
    )
    return mapped if any(new is not old for new, old in zip(mapped, tree, strict=True)) else tree


def _rebuild_mapping(tree: Mapping[Any, Any], values: list[Any]) -> Any:
    pairs = dict(zip(tree.keys(), values, strict=True))
    if type(tree) is dict:
        return pairs
    if not hasattr(tree, "__setitem__"):
        return type(tree)(pairs)  # type: ignore[call-arg]  # e.g. MappingProxyType
    rebuilt = copy.copy(tree)
    for key, value in pairs.items():
        rebuilt[key] = value
    return rebuilt
