"""What a callable computes with: its modules, and all data that its code can reach.

A call can change everything it reaches: attributes of a module, the variables of a closure,
globals, defaults, data of classes, fields of objects. The walk calls no method of the user.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import dataclasses
import dis
import functools
import random
import sys
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from paritas.core.numerics.contents import Opaque, given_to_tensor, parts
from paritas.core.torch_private.tensors import INTERNALS, hook_tables, tensor_slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Decorators of closures of partials of methods.
MOST_LAYERS = 4
# Limits for a program's own code. Changes beyond are found by the last run of the reference.
_MOST_FUNCTIONS = 400
_MOST_METHODS = 60
_MOST_VALUES = 200_000
_MOST_ITEMS = 10_000

# Their content is their state.
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)

# Code that is not the program's own: its data does not count as state of the program.
_LIBRARIES = frozenset({"torch", "numpy", "triton", "paritas", "_paritas_pytest", "_pytest"})
# Libraries that torch's compilers use, and in which they leave locks and tables.
_LIBRARIES |= {"filelock", "fsspec", "jinja2", "mpmath", "networkx", "sympy", "tqdm"}
_TORCH_DATA = ("torch.optim", "torch.nn", "torch.distributions")
# Kernels, tuners and compiled code: they hold caches, and the globals of the kernel's module.
_KERNELS = ("triton.runtime", "triton.compiler", "triton.backends")
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclasses.dataclass(frozen=True, slots=True)
class Reached:
    """A value that a program can reach.

    Attributes:
        path: its name.
        value: the value, or the object that holds others.
        table: the dict, list, deque or cell that holds it; None if it cannot be replaced.
        key: its key or index in `table`.
        is_leaf: it holds no other values.
        is_owned: it is a parameter or a buffer of a module.
        holder: the object that holds it, or the namespace; None for the callable and its modules.
    """

    path: str
    value: Any
    table: Any
    key: Any
    is_leaf: bool
    is_owned: bool = False
    holder: Any = None


# Prefixes for the names of objects that other programs may use as well.
GLOBAL, CLASS, FUNCTION = "global ", "class ", "function "


class UsedNames(dict[str, Any]):
    """Some names of a namespace: those that the program's code uses, set or not."""

    def __init__(self, namespace: dict[str, Any], names: list[str]) -> None:
        """Values are read from the namespace, not copied."""
        super().__init__()
        self.namespace = namespace
        self.names = names


def walk_reachable(
    modules: dict[str, nn.Module],
    function: Any,
    known_names: dict[int, str],
    code: set[int] | None = None,
) -> Iterator[Reached]:
    """Everything that `function` reaches, modules first; containers before their contents.

    Args:
        modules: prefix of a name -> module, as `reachable_modules` gives them.
        function: the callable, or None for the modules alone.
        known_names: id -> name of objects that have a name already, from the other side.
        code: ids of the functions and classes to look into; by default, all. After a call, these
            are the ones that existed before it: a library that is imported on first use brings its
            own data, which the call did not change.
    """
    yield from _ReachWalk(known_names, code).run(modules, function)


_ARRAYS = (torch.Tensor, np.ndarray)


class _ReachWalk:
    def __init__(self, known_names: dict[int, str], code: set[int] | None) -> None:
        self.known = known_names
        self.code = code
        self.seen: dict[int, Any] = {}
        self.functions = 0
        # The names used by the code reached so far, and the methods that no code has named yet. A
        # class has many methods that a call never runs: to load, to save, to publish.
        self.used: set[str] = {"forward"}
        self.waiting: dict[str, list[tuple[str, Any, Any, Any]]] = {}
        self.slots: set[int] = set()
        self.namespaces: set[int] = set()
        # Each with what holds it.
        self.stack: list[tuple[tuple[str, Any, Any, Any], Any]] = []

    def run(self, modules: dict[str, nn.Module], function: Any) -> Iterator[Reached]:
        roots = [(prefix.removesuffix("."), module) for prefix, module in modules.items()]
        for path, module in roots:
            self.stack.append(((path, module, None, None), None))
            yield from self._empty_stack()
        if function is not None:
            self.stack.append((("", function, None, None), None))
            yield from self._empty_stack()

    def _empty_stack(self) -> Iterator[Reached]:
        while self.stack:
            (path, value, table, key), holder = self.stack.pop()
            value = original_of(value)
            reach = functools.partial(Reached, table=table, key=key, holder=holder)
            if isinstance(value, _ARRAYS):
                yield reach(path, value, is_leaf=True, is_owned=id(table) in self.slots)
                self.stack += self._below_tensor(path, value)
                continue
            if isinstance(value, _CODE) and (table is not None or key is not None):
                # Its identity, in addition to its contents: a program may replace it.
                named = Opaque(value, "code is compared by identity", by_identity=True)
                yield reach(path, named, table=None, is_leaf=True)
            if id(value) in self.seen or len(self.seen) > _MOST_VALUES:
                continue
            path = self.known.get(id(value), path)
            below = self._below(path, value)
            if below is None:
                yield reach(path, value, is_leaf=True)
                continue
            self.seen[id(value)] = value
            yield reach(path, value, is_leaf=False)
            # Nothing can be put into a tuple: what holds the tuple holds its contents.
            holds = holder if isinstance(value, tuple) else value
            self.stack += [
                (entry, entry[2] if id(entry[2]) in self.namespaces else holds)
                for entry in reversed(below)
            ]

    def _below(self, path: str, value: Any) -> list[tuple[str, Any, Any, Any]] | None:
        """Its contents, each with path, table and key; None for a leaf."""
        if isinstance(value, _WRAPPERS):
            return []
        if isinstance(value, nn.Module):
            return self._below_module(path, value)
        is_code = isinstance(value, types.FunctionType | type)
        if is_code and self.code is not None and id(value) not in self.code:
            return []
        if isinstance(value, types.FunctionType):
            return self._below_function(value)
        if isinstance(value, type):
            return self._below_class(value)
        if isinstance(value, types.ModuleType):
            return None
        return self._below_object(path, value)

    def _below_tensor(self, path: str, tensor: Any) -> list[tuple[tuple[str, Any, Any, Any], Any]]:
        """The attributes that the program has given to a tensor, and how many hooks it has."""
        if not isinstance(tensor, torch.Tensor) or id(tensor) in self.seen:
            return []
        given_attributes, table = given_to_tensor(tensor), attribute_table(tensor)
        path = self.known.get(id(tensor), path)
        entries: list[tuple[str, Any, Any, Any]] = [
            (f"{path}.{name}", value, table, name) for name, value in given_attributes.items()
        ]
        hooks = hook_tables(tensor)
        entries += [
            (f"{path}.{kind}", len(hooks[kind]), None, None) for kind in hooks if hooks[kind]
        ]
        if entries:
            self.seen[id(tensor)] = tensor
        return [(entry, tensor) for entry in reversed(entries)]

    def _below_module(self, path: str, module: nn.Module) -> list[tuple[str, Any, Any, Any]]:
        path = path.replace("_orig_mod.", "").removesuffix("_orig_mod")
        prefix = f"{path}." if path else ""
        entries: list[tuple[str, Any, Any, Any]] = []
        for slots in tensor_slots(module):
            self.slots.add(id(slots))
            self.seen[id(slots)] = slots
            entries += [(f"{prefix}{key}", value, slots, key) for key, value in slots.items()]
        module_table, scripted = vars(module), isinstance(module, torch.jit.ScriptModule)
        entries += [
            (f"{prefix}{key}", value, module_table, key)
            for key, value in module_table.items()
            if key not in INTERNALS and not (scripted and isinstance(value, nn.Module))
        ]
        entries += [
            (f"{prefix}{hooks}", len(module_table[hooks]), None, None)
            for hooks in _HOOKS
            if module_table.get(hooks)
        ]
        entries += [(f"{prefix}{key}", child, None, None) for key, child in module.named_children()]
        return [*entries, (f"{CLASS}{type(module).__qualname__}", type(module), None, None)]

    def _below_function(self, function: types.FunctionType) -> list[tuple[str, Any, Any, Any]]:
        """Closure, defaults, attributes and the globals that its code names."""
        self.functions += 1
        if self.functions > _MOST_FUNCTIONS or not is_own(function.__module__):
            return []
        name = function.__qualname__
        entries: list[tuple[str, Any, Any, Any]] = []
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        entries += [(f"variable {free}", cell, None, None) for free, cell in cells]
        function_parts = (function.__defaults__, function.__kwdefaults__, attribute_table(function))
        entries += [
            (f"{FUNCTION}{name}", what, None, None) for what in function_parts if what is not None
        ]
        names = names_in(function.__code__)
        for called in sorted(names & self.waiting.keys()):
            entries += self.waiting.pop(called)
        self.used |= names
        # An attribute may have the name of a global that this code never reads.
        space = function.__globals__
        used = [
            n for n in sorted(_globals_in(function.__code__)) if n in space or n not in _BUILT_IN
        ]
        entries += self._list_entries(space, used, GLOBAL)
        for key in used:
            module = space.get(key)
            if isinstance(module, types.ModuleType) and is_own(module.__name__):
                # Other classes of modules import what they lack on first use.
                is_lazy = type(module) is not types.ModuleType
                inside = sorted(names & vars(module).keys() if is_lazy else names)
                entries += self._list_entries(vars(module), inside, f"{GLOBAL}{key}.")
        return entries

    def _list_entries(
        self, namespace: dict[str, Any], names: list[str], prefix: str
    ) -> list[tuple[str, Any, Any, Any]]:
        names = [name for name in names if not name.startswith("__")]
        if not names:
            return []
        self.namespaces.add(id(namespace))
        entries = [
            (f"{prefix}{name}", namespace[name], namespace, name)
            for name in names
            if name in namespace
        ]
        return [(prefix, UsedNames(namespace, names), None, None), *entries]

    def _below_class(self, cls: type) -> list[tuple[str, Any, Any, Any]]:
        """The data of a class, its methods, its bases."""
        if not is_own(cls.__module__):
            return []
        entries: list[tuple[str, Any, Any, Any]] = []
        methods = {}
        for name, value in vars(cls).items():
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if isinstance(function, types.FunctionType):
                methods[name] = function
            elif not name.startswith("__") and not hasattr(type(value), "__get__"):
                entries.append((f"{CLASS}{cls.__qualname__}.{name}", value, None, None))
        if len(methods) > _MOST_METHODS:
            methods = {"forward": methods["forward"]} if "forward" in methods else {}
        for name, method in methods.items():
            method_entry = (f"{CLASS}{cls.__qualname__}.{name}", method, None, name)
            if self._may_be_called(cls, name):
                entries.append(method_entry)
            else:
                self.waiting.setdefault(name, []).append(method_entry)
        return [
            *entries,
            *((f"{CLASS}{base.__qualname__}", base, None, None) for base in cls.__bases__),
        ]

    def _may_be_called(self, cls: type, name: str) -> bool:
        """Whether reached code names a method, or Python calls it implicitly."""
        is_module = issubclass(cls, nn.Module)
        by_itself = name.startswith("__") and not (is_module and name == "__init__")
        return by_itself or name in self.used

    def _below_object(self, path: str, value: Any) -> list[tuple[str, Any, Any, Any]] | None:
        if isinstance(value, types.CellType):
            with contextlib.suppress(ValueError):  # it is not filled yet
                return [(path, value.cell_contents, value, None)]
            return []
        if isinstance(value, UsedNames) or _is_vocabulary(value):
            return []  # restored as a whole, without looking inside
        if isinstance(value, GENERATORS) or _is_anothers(type(value)):
            return None
        if is_kernel(value):
            table = attribute_table(value)
            return [
                (f"{path}.{key}", attribute, table, key)
                for key, attribute in given_to(value).items()
            ]
        return self._below_parts(path, value)

    def _below_parts(self, path: str, value: Any) -> list[tuple[str, Any, Any, Any]] | None:
        read = parts(value)
        if read is None:
            return None
        table = attribute_table(value)
        container: Any = value if isinstance(value, dict | list | collections.deque) else None
        keys = list(dict.keys(value)) if isinstance(value, dict) else range(len(read.items))
        count = _count_items(value)
        entries: list[tuple[str, Any, Any, Any]] = []
        for position, (suffix, child) in enumerate(read.items):
            if container is not None and position < count:
                key = keys[position]
                stored_child = dict.__getitem__(value, key) if isinstance(value, dict) else child
                entries.append((f"{path}{suffix}", stored_child, container, key))
            elif table is not None and suffix[1:] in table:
                entries.append((f"{path}{suffix}", child, table, suffix[1:]))
            else:
                entries.append((f"{path}{suffix}", child, None, None))
        if is_own(type(value).__module__):
            entries.append((f"{CLASS}{type(value).__qualname__}", type(value), None, None))
        return entries


def is_kernel(value: Any) -> bool:
    """Whether it is a kernel of Triton, or something that such a kernel holds."""
    return type(value).__module__.startswith(_KERNELS)


def given_to(kernel: Any) -> dict[str, Any]:
    """The attributes that the program has given to a kernel; those of its class are no state."""
    cls: type = type(kernel)
    fields = _fields_of(cls)
    table = attribute_table(kernel) or {}
    return {key: value for key, value in table.items() if key not in fields}


def give_to(kernel: Any, attributes: dict[str, Any]) -> None:
    """Give a kernel these attributes and no others; what it has compiled stays."""
    table = attribute_table(kernel) or {}
    for key in given_to(kernel).keys() - attributes.keys():
        del table[key]
    table.update(attributes)


@functools.lru_cache(maxsize=256)
def _fields_of(cls: type) -> frozenset[str]:
    """The attributes that a class has, and those that its methods and properties assign."""
    field_names: set[str] = set()
    for base in cls.__mro__:
        field_names |= vars(base).keys()
        for member in vars(base).values():
            both = (member.fget, member.fset) if isinstance(member, property) else (member,)
            field_names |= {
                step.argval
                for method in both
                if isinstance(method, types.FunctionType)
                for step in dis.get_instructions(method)
                if step.opname == "STORE_ATTR"
            }
    return frozenset(field_names)


def _is_anothers(cls: type) -> bool:
    """Whether an object belongs to torch, or to a runtime outside of Python."""
    root = cls.__module__.partition(".")[0]
    is_torchs = root == "torch" and not cls.__module__.startswith(_TORCH_DATA)
    return is_torchs or (root == "paritas" and cls.__name__ == "ForeignProgram")


def _is_vocabulary(value: Any) -> bool:
    """Whether a dict or list has so many plain values that visiting each takes too long."""
    if not isinstance(value, dict | list) or _count_items(value) <= _MOST_ITEMS:
        return False
    items = dict.values(value) if isinstance(value, dict) else list.__iter__(value)
    return type(next(iter(items))) in {int, float, str, bytes, bool}


def attribute_table(value: Any) -> dict[str, Any] | None:
    """The real `__dict__` of an object, even if its class overrides that name."""
    for cls in type(value).__mro__:
        descriptor = vars(cls).get("__dict__")
        # A member in a class that is written in C: SimpleNamespace.
        if isinstance(descriptor, types.GetSetDescriptorType | types.MemberDescriptorType):
            table = descriptor.__get__(value)
            return table if isinstance(table, dict) else None
    return None


def slots_of(value: Any) -> list[types.MemberDescriptorType]:
    """The slots of an object whose classes are written in Python."""
    return [
        descriptor
        for cls in type(value).__mro__
        if is_own(cls.__module__)
        for descriptor in vars(cls).values()
        if isinstance(descriptor, types.MemberDescriptorType)
    ]


def _count_items(value: Any) -> int:
    if isinstance(value, dict | list):
        return dict.__len__(value) if isinstance(value, dict) else list.__len__(value)
    return collections.deque.__len__(value) if isinstance(value, collections.deque) else 0


def is_own(module: Any) -> bool:
    """Whether code or a class belongs to the program, not to a library."""
    root = str(module).partition(".")[0]
    return root not in _LIBRARIES and root not in sys.stdlib_module_names


def names_in(code: types.CodeType) -> set[str]:
    """The names that code uses, including those in nested functions."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_in(constant)
    return names


_BUILT_IN = frozenset(vars(builtins))
_GLOBAL_OPERATIONS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})


@functools.lru_cache(maxsize=4096)
def _globals_in(code: types.CodeType) -> frozenset[str]:
    """The globals that code reads or writes, including those in nested functions."""
    names = {
        step.argval for step in dis.get_instructions(code) if step.opname in _GLOBAL_OPERATIONS
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _globals_in(constant)
    return frozenset(names)


# --- Modules --------------------------------------------------------------------------------------


def reachable_modules(function: Any, original: Callable[[Any], Any]) -> dict[str, nn.Module]:
    """The modules that a callable uses: itself, its owner, its closure, its partial arguments."""
    modules_by_name: dict[str, nn.Module] = {}
    _reach(function, original, modules_by_name, "", depth=0)
    if len(modules_by_name) == 1:
        return {"": next(iter(modules_by_name.values()))}
    return {f"{name}.": module for name, module in modules_by_name.items()}


def _reach(
    value: Any,
    original: Callable[[Any], Any],
    modules_by_name: dict[str, nn.Module],
    name: str,
    depth: int,
) -> None:
    value = original(value)
    if isinstance(value, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
        value = value.module  # parameters have the names of the inner module
    if isinstance(value, torch.nn.Module):
        if not any(module is value for module in modules_by_name.values()):
            modules_by_name[name or "model"] = value
        return
    if depth > MOST_LAYERS:
        return
    if isinstance(value, functools.partial):
        _reach(value.func, original, modules_by_name, name, depth + 1)
        for position, argument in enumerate(value.args):
            _reach_module(argument, original, modules_by_name, f"argument{position}")
        for key, argument in value.keywords.items():
            _reach_module(argument, original, modules_by_name, key)
        return
    owner = getattr(value, "__self__", None)
    _reach_module(owner, original, modules_by_name, name)
    function = getattr(value, "__func__", value)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for free, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            _reach(cell.cell_contents, original, modules_by_name, free, depth + 1)
    for used in code.co_names:
        global_value = function.__globals__.get(used)
        if _is_made_by_compile(global_value):
            _reach(global_value, original, modules_by_name, used, depth + 1)
        _reach_module(global_value, original, modules_by_name, used)


def _reach_module(
    value: Any, original: Callable[[Any], Any], modules_by_name: dict[str, nn.Module], name: str
) -> None:
    if isinstance(value, torch.nn.Module):
        _reach(value, original, modules_by_name, name, depth=0)


def original_of(value: Any) -> Any:
    """The original of a result of `torch.compile`; other values are returned unchanged."""
    # Only these types are inspected: reading an attribute of a lazy module would import it.
    # If the compiler was never loaded, nothing was compiled; loading it takes seconds.
    can_be = isinstance(value, types.FunctionType | nn.Module) and "torch._dynamo" in sys.modules
    if not can_be:
        return value
    from paritas.core.torch_private import dynamo

    return dynamo.original_of(value)


def _is_made_by_compile(value: Any) -> bool:
    return original_of(value) is not value and not isinstance(value, nn.Module)
