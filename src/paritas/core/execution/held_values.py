"""How to read, and to restore, what one mutable object holds: one level deep.

Nothing here calls a method of the user: containers are read and written by the methods of the
built-in classes.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paritas.core.execution.reachable import (
    GENERATORS,
    Reached,
    UsedNames,
    attribute_table,
    give_to,
    given_to,
    is_kernel,
    is_own,
    names_in,
    slots_of,
)
from paritas.core.execution.saved_state import generator_state, set_generator_state
from paritas.core.numerics.contents import given_to_tensor, parts
from paritas.core.torch_private.tensors import hook_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn


class Missing:
    """Marks a value that was deleted or does not exist yet."""

    def __repr__(self) -> str:
        return "nothing"

    def __reduce__(self) -> str:
        return "MISSING"


MISSING = Missing()


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class HeldValues:
    """One mutable object and its saved contents, one level deep.

    Attributes:
        path: its name.
        read: returns its contents as a list.
        write: sets its contents from such a list.
        before: the saved contents.
    """

    path: str
    read: Callable[[], list[Any]]
    write: Callable[[list[Any]], None]
    before: list[Any]

    def put_back(self) -> None:
        """Restore the contents, if they changed."""
        if not are_same_items(self.read(), self.before):
            self.write(self.before)


def hold_values(reached: Reached) -> Iterator[HeldValues]:
    """How to restore a container or object, by the methods of the built-in classes."""
    value, path = reached.value, reached.path
    pairs: list[tuple[Callable[[], list[Any]], Callable[[list[Any]], None]]] = []
    if isinstance(value, UsedNames):
        pairs.append(_named_values(value))
    elif isinstance(value, types.CellType):
        set_cell = functools.partial(setattr, value, "cell_contents")
        delete = functools.partial(delattr, value, "cell_contents")
        pairs.append(_single_value(lambda: value.cell_contents, set_cell, delete))
    elif isinstance(value, type):
        pairs += [_class_values(value)] if is_own(value.__module__) else []
    elif isinstance(value, torch.nn.Module):
        pairs.append(_module_values(value))
    elif isinstance(value, GENERATORS):
        set_state = functools.partial(set_generator_state, value)
        pairs.append((lambda: [generator_state(value)], lambda items: set_state(items[0])))
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        pairs.append(_array_content(value))
    elif is_kernel(value):
        pairs.append(_given_values(value))
    elif parts(value) is not None or isinstance(value, set | bytearray):
        pairs += _object_values(value)
    for read, write in pairs:
        yield HeldValues(path, read, write, read())


def hold_given_to(tensors: list[torch.Tensor]) -> HeldValues:
    """How to restore the attributes that a program gives to tensors, and their hooks."""
    before = [(tensor, given_to_tensor(tensor), _hooks_of(tensor)) for tensor in tensors]

    def read() -> list[Any]:
        tensor_values: list[Any] = []
        for tensor in tensors:
            for table in (given_to_tensor(tensor), *hook_tables(tensor).values()):
                if table:
                    tensor_values += [tensor, *_keys_and_values(table)]
        return tensor_values

    def write(_: list[Any]) -> None:
        for tensor, old_attributes, hooks in before:
            attributes = attribute_table(tensor) or {}
            for name in given_to_tensor(tensor).keys() - old_attributes.keys():
                del attributes[name]
            attributes.update(old_attributes)
            for kind, table in hook_tables(tensor).items():
                _write_mapping(table, hooks.get(kind, []))

    return HeldValues("attributes and hooks of tensors", read, write, read())


def _hooks_of(tensor: torch.Tensor) -> dict[str, list[Any]]:
    return {kind: _keys_and_values(table) for kind, table in hook_tables(tensor).items()}


def _module_values(module: nn.Module) -> Any:
    """All that a module holds: its attributes, and the contents of its tables."""
    own_attributes = vars(module)
    tables = [own_attributes]
    if not isinstance(module, torch.jit.ScriptModule):
        tables += [table for table in own_attributes.values() if isinstance(table, dict)]
    before = [(table, _keys_and_values(table)) for table in tables]

    def read() -> list[Any]:
        keys_and_values = _keys_and_values(own_attributes)
        for table in own_attributes.values():
            if isinstance(table, dict) and table:
                keys_and_values += _keys_and_values(table)
        return keys_and_values

    def write(_: list[Any]) -> None:
        for table, items in before:
            _write_mapping(table, items)

    return read, write


def read_other_parts(value: Any) -> list[Callable[[], list[Any]]]:
    """How to read what `hold_values` and `read_code` do not: slots of other classes, proxies."""
    if type(value) in _SHOWN or isinstance(value, _SHOWN_TOO) or is_kernel(value):
        return []
    table, read = attribute_table(value), parts(value)
    if read is None or (table is not None and all(n[1:] in table for n, _ in read.items)):
        return []
    return [lambda: [part for named in getattr(parts(value), "items", ()) for part in named]]


_SHOWN = {tuple, slice, types.MethodType, functools.partial, dict, list}
_SHOWN |= {collections.OrderedDict, collections.deque}
_SHOWN_TOO = (UsedNames, types.CellType, types.FunctionType, type, torch.nn.Module)


def read_code(value: Any) -> dict[int, Callable[[], list[Any]]]:
    """How to read what a call may replace in code, which is not restored; by an id."""
    if isinstance(value, types.FunctionType) and is_own(value.__module__):
        space, names = value.__globals__, names_in(value.__code__)

        def read() -> list[Any]:
            function_parts = [
                value.__code__,
                value.__defaults__,
                value.__kwdefaults__,
                value.__closure__,
            ]
            table = attribute_table(value) or {}
            return [*function_parts, *table, *table.values(), *sorted(names & space.keys())]

        return {id(value): read}
    if isinstance(value, type) and is_own(value.__module__):
        return {id(value): lambda: list(value.__bases__)}
    if isinstance(value, types.ModuleType) and is_own(value.__name__):
        inside = vars(value)
        # No walk looks for names like `__compiled_fn_1`, which Dynamo adds.
        return {id(inside): lambda: [name for name in inside if not name.startswith("__")]}
    return {}


def _object_values(
    value: Any,
) -> Iterator[tuple[Callable[[], list[Any]], Callable[[list[Any]], None]]]:
    if isinstance(value, dict):
        yield _mapping_items(value)
    elif isinstance(value, list | bytearray):
        base: Any = list if isinstance(value, list) else bytearray
        yield (
            lambda: list(base.__iter__(value)),
            lambda items: base.__setitem__(value, slice(None), items),
        )
    elif isinstance(value, set | collections.deque):
        kind: Any = set if isinstance(value, set) else collections.deque
        fill: Any = kind.update if kind is set else kind.extend

        def write(items: list[Any]) -> None:
            kind.clear(value)
            fill(value, items)

        yield lambda: list(kind.__iter__(value)), write
    table = attribute_table(value)
    if table is not None:
        yield _mapping_items(table)
    for slot in slots_of(value):
        places = (slot.__get__, slot.__set__, slot.__delete__)
        yield _single_value(*(functools.partial(place, value) for place in places))


def _given_values(kernel: Any) -> Any:
    return lambda: _keys_and_values(given_to(kernel)), lambda keys_and_values: give_to(
        kernel, _pair_keys_with_values(keys_and_values)
    )


def _mapping_items(table: dict[Any, Any]) -> Any:
    return lambda: _keys_and_values(table), lambda items: _write_mapping(table, items)


def _keys_and_values(table: dict[Any, Any]) -> list[Any]:
    return [*dict.keys(table), *dict.values(table)]


def _write_mapping(table: dict[Any, Any], items: list[Any]) -> None:
    # An OrderedDict keeps its order separately: dict.clear would corrupt it.
    base: Any = collections.OrderedDict if isinstance(table, collections.OrderedDict) else dict
    now = dict(dict.items(table))
    stored_items = _pair_keys_with_values(items)
    for key in now:
        if key not in stored_items:
            base.__delitem__(table, key)
    in_order = [key for key in now if key in stored_items] == [
        key for key in stored_items if key in now
    ]
    if len(now.keys() & stored_items.keys()) != len(stored_items) or not in_order:
        base.clear(table)
    for key, value in stored_items.items():
        if dict.get(table, key, MISSING) is not value:
            base.__setitem__(table, key, value)


def _pair_keys_with_values(items: list[Any]) -> dict[Any, Any]:
    count = len(items) // 2
    return dict(zip(items[:count], items[count:], strict=True))


def _named_values(names: UsedNames) -> Any:
    space = names.namespace

    def write(items: list[Any]) -> None:
        for name, value in zip(names.names, items, strict=True):
            if value is MISSING:
                # `import a.b` sets `a.b` only once: without it, the next call would fail.
                if not isinstance(space.get(name), types.ModuleType):
                    space.pop(name, None)
            elif space.get(name, MISSING) is not value:
                space[name] = value

    return lambda: [space.get(name, MISSING) for name in names.names], write


def _single_value(
    get: Callable[[], Any], fill: Callable[[Any], None], empty: Callable[[], None]
) -> tuple[Callable[[], list[Any]], Callable[[list[Any]], None]]:
    """How to read and restore a cell of a closure or a slot, which may be empty."""

    def read() -> list[Any]:
        try:
            return [get()]
        except (ValueError, AttributeError):  # it is empty
            return []

    def write(items: list[Any]) -> None:
        if items:
            fill(items[0])
        else:
            empty()

    return read, write


def _class_values(cls: type) -> Any:
    def read() -> list[Any]:
        class_attributes = {
            key: value for key, value in vars(cls).items() if key not in _OF_CLASSES
        }
        return [*class_attributes, *class_attributes.values()]

    def write(items: list[Any]) -> None:
        now, before = _pair_keys_with_values(read()), _pair_keys_with_values(items)
        for key in now.keys() - before.keys():
            type.__delattr__(cls, key)
        for key, value in before.items():
            if now.get(key, MISSING) is not value:
                type.__setattr__(cls, key, value)

    return read, write


# Attributes that Python itself may set at any time.
_OF_CLASSES = frozenset({"__dict__", "__weakref__", "__doc__", "__abstractmethods__", "_abc_impl"})


def _array_content(array: np.ndarray[Any, Any]) -> Any:
    return lambda: [array.tobytes()], lambda items: np.copyto(
        array, np.frombuffer(items[0], dtype=array.dtype).reshape(array.shape)
    )


# --- Comparing ----------------------------------------------------------------------------------


def are_same_items(now: list[Any], before: list[Any]) -> bool:
    """Whether two lists have the same objects, or equal numbers and strings."""
    # Almost always by identity, which is many times faster.
    return len(now) == len(before) and (
        all(map(operator.is_, now, before)) or all(map(_is_same_item, now, before))
    )


def _is_same_item(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if type(now) is tuple and type(before) is tuple and len(now) == len(before):
        return all(map(_is_same_item, now, before))
    return type(now) is type(before) and type(now) in ATOMS and now == before


ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None)})
