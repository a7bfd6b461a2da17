"""Same bits of input, state and randomness for every run, and the caller's left as they were."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import pickle
import random
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paritas._torch.operators import WIDE
from paritas.errors import UsageError, in_one_line
from paritas.execution.reachable import (
    CLASS,
    FUNCTION,
    GENERATORS,
    GLOBAL,
    Reached,
    UsedNames,
    attribute_table,
    is_own,
    original_of,
    slots_of,
    walk_reachable,
)
from paritas.execution.saved_state import Copier, made_like
from paritas.numerics.contents import Opaque, contents, parts, same_leaf
from paritas.numerics.flattening import is_dense
from paritas.numerics.metrics import bitwise_equal

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paritas.execution.subjects import Inputs


class Missing:
    """What stands where a value was deleted, or is not there yet."""

    def __repr__(self) -> str:
        return "nothing"

    def __reduce__(self) -> str:
        return "MISSING"


MISSING = Missing()


def copy_inputs(inputs: Inputs, *, widen: bool = False) -> Inputs:
    """The same inputs in storage of their own."""
    copier = Copier(widen=widen)
    args = copier.copy_tree(list(inputs.args))
    return dataclasses.replace(inputs, args=tuple(args), kwargs=copier.copy_tree(inputs.kwargs))


def frozen_leaf(leaf: Any) -> Any:
    """A leaf that is no tensor in a form that nothing changes and that can be compared."""
    if type(leaf) in _ATOMS:
        return leaf
    if isinstance(leaf, GENERATORS):
        return _generator_state(leaf)
    if isinstance(leaf, np.ndarray | bytearray):
        return leaf.copy()
    return leaf if isinstance(leaf, Opaque) else next(contents(leaf))[1]


class ProgramState:
    """All that a program computes with beside its inputs, and how to put it back.

    Parameters and buffers, their `.grad`, attributes of modules, variables of closures, globals,
    the data of classes and objects, and what is inside any of these.

    Attributes:
        tensors: name -> tensor.
        saved: name -> a copy of what was in it.
        owned: the names of the tensors that are parameters or buffers of a module.
        failures: name -> why it could not be copied or put back.
        unreadable: name -> why it could not be looked at after a call.
        unseen: the names of what can change without being seen: iterators.
        containers: name -> module, object or container that holds the rest.
        gradients: name -> the `.grad` of a tensor, and a copy of that.
        flags: name -> whether a tensor was a leaf, and required grad.
    """

    def __init__(
        self,
        modules: dict[str, nn.Module],
        function: Any = None,
        known: ProgramState | None = None,
    ) -> None:
        """Remember the state as it is now; what is `known` already is not copied again."""
        self._roots = modules, function
        self._known = {} if known is None else known.names
        self.names: dict[int, str] = dict(self._known)
        self.tensors: dict[str, Tensor] = {}
        self.saved: dict[str, Tensor] = {}
        self.owned: set[str] = set()
        self.failures: dict[str, str] = {}
        self.unreadable: dict[str, str] = {}
        self.unseen: list[str] = []
        self.containers: dict[str, Any] = {}
        self._places: dict[str, list[tuple[Any, Any]]] = {}
        self._named: dict[tuple[int, Any], str] = {}
        self._held: list[_Held] = []
        self._alive: list[Any] = []  # what is known by its id
        self.flags: dict[str, tuple[bool, bool]] = {}
        self.gradients: dict[str, tuple[Tensor | None, Tensor | None]] = {}
        self._leaves: dict[str, Any] = {}
        self._code: set[int] | None = None
        code: set[int] = set()
        for found in self._walk():
            if isinstance(found.value, torch.Tensor):
                self._keep_tensor(found, known)
            elif found.is_leaf:
                self._keep_leaf(found)
            else:
                self.containers.setdefault(found.path, found.value)
                self.names.setdefault(id(found.value), found.path)
                self._alive.append(found.value)
                if isinstance(found.value, types.FunctionType | type):
                    code.add(id(found.value))
            if not isinstance(found.value, torch.Tensor | Opaque):
                self._held += _hold_values(found)
        self._code = code
        self._may_differ = True
        self._is_wide = False

    def _walk(self) -> Iterator[Reached]:
        yield from walk_reachable(*self._roots, self._known, self._code)

    def _keep_tensor(self, found: Reached, known: ProgramState | None) -> None:
        tensor = found.value
        name = self._name(found)
        if torch.nn.parameter.is_lazy(tensor):
            message = f"{name} is not initialised yet; call the model once before verifying"
            raise UsageError(message)
        if found.table is not None:
            self._places.setdefault(name, []).append((found.table, found.key))
            self._named[id(found.table), found.key] = name
        if found.is_owned:
            self.owned.add(name)
        if name in self.tensors:
            return
        self.tensors[name] = tensor
        is_known = known is not None and known.tensors.get(name) is tensor
        if is_known and known is not None:
            self.saved[name] = known.saved[name]
            self.gradients[name] = known.gradients[name]
            self.flags[name] = known.flags[name]
            return
        self.flags[name] = tensor.is_leaf, tensor.requires_grad
        gradient = _live_gradient(tensor)
        self.gradients[name] = gradient, None
        try:
            self.saved[name] = detached_copy(tensor)
        except Exception as error:  # noqa: BLE001  (a finding says that it could not be copied)
            self.failures[name] = f"it cannot be copied: {in_one_line(error, 120)}"
            del self.tensors[name]
        try:
            self.gradients[name] = gradient, None if gradient is None else detached_copy(gradient)
        except Exception as error:  # noqa: BLE001  (it lay in a CUDA graph that has run since)
            self.unreadable[f"{name}.grad"] = f"it cannot be read: {in_one_line(error, 120)}"

    def _name(self, found: Reached) -> str:
        """Tied weights are one tensor in several places, known by its first name."""
        name = self.names.get(id(found.value))
        if name is None:
            taken = self.tensors.keys() | self._leaves.keys()
            name = next(n for n in _numbered_paths(found.path) if n not in taken)
            self.names[id(found.value)] = name
        return name

    def _keep_leaf(self, found: Reached) -> None:
        value = frozen_leaf(found.value)
        if isinstance(value, Opaque) and _is_consumed(found):
            self.unseen.append(found.path)
        self._leaves.setdefault(found.path, value)

    def is_of(self, function: Any, modules: dict[str, nn.Module]) -> bool:
        """Whether this is the state of that callable with these modules, by these names."""
        own, mine = self._roots
        same_names = modules.keys() == own.keys()
        same = same_names and all(own[name] is modules[name] for name in modules)
        return same and original_of(function) is original_of(mine)

    # --- what a call did --------------------------------------------------------------------------

    def container_of(self, path: str) -> Any:
        """The nearest object around what bears that name; None if that is unknown."""
        while path not in self.containers:
            if not path:
                return None
            cut = max(path.rfind("."), path.rfind("["), 0)
            path = GLOBAL if not cut and path.startswith(GLOBAL) else path[:cut]
        found = self.containers[path]
        return found.namespace if isinstance(found, UsedNames) else found

    def initial(self, path: str) -> Any:
        """What stood there before any call; `MISSING` if nothing did."""
        if path in self.saved:
            return self.saved[path]
        if path.endswith(".grad") and path.removesuffix(".grad") in self.gradients:
            saved = self.gradients[path.removesuffix(".grad")][1]
            return MISSING if saved is None else saved
        return self._leaves.get(path, MISSING)

    def changed(self, among: frozenset[str] | None = None) -> dict[str, Any]:
        """What is no longer what it was, by name: copies of the present values.

        In a wide run the tensors in their places are float64; they are compared with the saved bits
        widened, and only those `among` the ones of interest. Counting writes is no substitute:
        compiled code writes to buffers without torch noting it.
        """
        self._may_differ = True
        if among is not None and not among:
            return {}
        before = {**self.saved, **self._leaves}
        before |= {f"{name}.grad": g for name, (_, g) in self.gradients.items() if g is not None}
        changed = {}
        now = dict(self._present())
        for path in [*before, *(path for path in now if path not in before)]:
            if among is None or path in among:
                value = now.get(path, MISSING)
                if path not in before and _is_imported(path, value):
                    continue
                try:
                    if not is_same_leaf(before.get(path, MISSING), value, widened=self._is_wide):
                        changed[path] = detached_copy(value) if _is_tensor(value) else value
                except Exception as error:  # noqa: BLE001  (the verdict lists it)
                    self.unreadable[path] = f"it cannot be read: {in_one_line(error, 120)}"
        self._may_differ = bool(changed) or among is not None
        return changed

    def _present(self) -> Iterator[tuple[str, Any]]:
        """Every value by the name it would have had at the beginning."""
        given: dict[int, str] = {}
        told: set[str] = set()
        for found in self._walk():
            value = found.value
            if isinstance(value, torch.Tensor):
                path = self._present_name(found, given)
                if path not in told:
                    told.add(path)
                    yield path, value
                    gradient = _live_gradient(value)
                    if gradient is not None:
                        yield f"{path}.grad", gradient
            elif found.is_leaf and found.path not in told:
                told.add(found.path)
                yield found.path, frozen_leaf(value)

    def _present_name(self, found: Reached, given: dict[int, str]) -> str:
        """A tensor in a place where one stood bears that one's name, whatever it is now."""
        if found.table is not None and (id(found.table), found.key) in self._named:
            return self._named[id(found.table), found.key]
        known = self.names.get(id(found.value))
        if known is not None and self.tensors.get(known) is found.value:
            return known
        return given.setdefault(id(found.value), found.path)

    def detach(self) -> None:
        """Cut what the program keeps off the graph that made it.

        Our own backward pass has freed that graph: the next call could not be differentiated,
        which the program itself never asks for.
        """
        for found in list(self._walk()):
            value = found.value
            if _is_tensor(value) and value.grad_fn is not None and found.table is not None:
                _set_item(found.table, found.key, value.detach())

    # --- putting it back --------------------------------------------------------------------------

    def touch(self) -> None:
        """Say that a program is about to run on this state."""
        self._may_differ = True

    def restore(self) -> None:
        """Put everything back, in place, keeping identities; what cannot be is in `failures`."""
        self._restore_places()
        if not self._may_differ:
            return  # looked at since the last run, and found as it was
        self._may_differ = False
        for name, tensor in self.tensors.items():
            try:
                _put_back(tensor, self.saved[name])
                _put_back_flags(tensor, *self.flags[name])
                _put_back_gradient(tensor, *self.gradients[name])
            except Exception as error:  # noqa: BLE001  (a finding names it)
                self.failures[name] = f"it cannot be put back: {in_one_line(error, 120)}"

    def _restore_places(self) -> None:
        """What stands where: the tensors in their places, the attributes in their objects."""
        for held in self._held:
            try:
                held.put_back()
            except Exception as error:  # noqa: BLE001  (a finding names it)
                self.failures[held.path] = f"it cannot be put back: {in_one_line(error, 120)}"

    # --- running on other tensors -----------------------------------------------------------------

    @contextlib.contextmanager
    def swapped(self, values: dict[str, Tensor]) -> Iterator[None]:
        """Let the program run on other tensors, in every place where the named one stands."""
        self._is_wide = True
        try:
            for name, value in values.items():
                for table, key in self._places.get(name, ()):
                    _set_item(table, key, value)
            yield
        finally:
            self._is_wide = False
            self._restore_places()
            # It ran on other tensors, but for those that stand in no place where they can be.
            self._may_differ = self.tensors.keys() != self._places.keys()

    def widened(self) -> dict[str, Tensor]:
        """Copies of the saved state in float64; parameters stay parameters."""
        wide: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            if name not in self._places:
                wide[name] = tensor
                continue
            value = self.saved[name]
            with made_like(tensor):
                value = _widen(value) if value.dtype in WIDE else value.clone()
            if isinstance(tensor, torch.nn.Parameter):
                value = torch.nn.Parameter(value, requires_grad=tensor.requires_grad)
            elif self.flags[name][1]:
                value.requires_grad_()
            gradient = self.gradients[name][1]
            if gradient is not None:
                value.grad = _widen(gradient) if gradient.dtype in WIDE else gradient.clone()
            wide[name] = value
        return wide


def _is_imported(path: str, value: Any) -> bool:
    """Whether a name that was not there before stands for code: imported on first use."""
    code = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
    is_code = isinstance(value, Opaque) and isinstance(value.value, code)
    return is_code and path.startswith((GLOBAL, CLASS, FUNCTION))


def _is_consumed(found: Reached) -> bool:
    """Whether a value gives something else each time it is asked, and is the program's own.

    Libraries have iterators among their globals that no call ever asks. A file is an iterator, too:
    many programs keep one to write to, and few read their data from it.
    """
    is_shared = found.path.startswith((GLOBAL, CLASS, FUNCTION))
    is_file = isinstance(found.value, io.IOBase)
    return isinstance(found.value, Iterator) and not is_file and not is_shared


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Held:
    """One object that can change, and what stood in it, one level deep.

    Attributes:
        path: its name.
        read: gives its content as a list.
        write: makes such a list its content.
        before: the content as it was.
    """

    path: str
    read: Callable[[], list[Any]]
    write: Callable[[list[Any]], None]
    before: list[Any]

    def put_back(self) -> None:
        """Make the content what it was; what did not change is not touched."""
        now = self.read()
        same = len(now) == len(self.before) and all(map(_is_same_item, now, self.before))
        if not same:
            self.write(self.before)


def _hold_values(found: Reached) -> Iterator[_Held]:
    """How to put back what is in a container or object, by the methods of the built-in classes."""
    value, path = found.value, found.path
    pairs: list[tuple[Callable[[], list[Any]], Callable[[list[Any]], None]]] = []
    if isinstance(value, UsedNames):
        pairs.append(_named_values(value))
    elif isinstance(value, types.CellType):
        pairs.append(_cell_value(value))
    elif isinstance(value, type):
        pairs += [_class_values(value)] if is_own(value.__module__) else []
    elif isinstance(value, torch.nn.Module):
        tables = [vars(value)]
        if not isinstance(value, torch.jit.ScriptModule):
            tables += [one for one in vars(value).values() if isinstance(one, dict)]
        pairs += [_mapping_items(table) for table in tables]
    elif isinstance(value, GENERATORS):
        pairs.append(_generator_draws(value))
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        pairs.append(_array_content(value))
    elif parts(value) is not None or isinstance(value, set | bytearray):
        pairs += _object_values(value)
    for read, write in pairs:
        yield _Held(path, read, write, read())


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
        yield _slot_value(value, slot)


def _mapping_items(table: dict[Any, Any]) -> Any:
    # An OrderedDict keeps its order beside the dict: dict.clear would leave it in pieces.
    base: Any = collections.OrderedDict if isinstance(table, collections.OrderedDict) else dict

    def write(items: list[tuple[Any, Any]]) -> None:
        now = dict(dict.items(table))
        kept = dict(items)
        for key in now:
            if key not in kept:
                base.__delitem__(table, key)
        in_order = [key for key in now if key in kept] == [key for key in kept if key in now]
        if len(now.keys() & kept.keys()) != len(kept) or not in_order:
            base.clear(table)
        for key, value in items:
            if dict.get(table, key, MISSING) is not value:
                base.__setitem__(table, key, value)

    return lambda: list(dict.items(table)), write


def _named_values(names: UsedNames) -> Any:
    space = names.namespace

    def write(items: list[Any]) -> None:
        for name, value in zip(names.names, items, strict=True):
            if value is MISSING:
                space.pop(name, None)
            elif space.get(name, MISSING) is not value:
                space[name] = value

    return lambda: [space.get(name, MISSING) for name in names.names], write


def _cell_value(cell: types.CellType) -> Any:
    def read() -> list[Any]:
        try:
            return [cell.cell_contents]
        except ValueError:  # it is not filled yet
            return []

    def write(items: list[Any]) -> None:
        if items:
            cell.cell_contents = items[0]
        else:
            del cell.cell_contents

    return read, write


def _class_values(cls: type) -> Any:
    def read() -> list[Any]:
        own = {key: value for key, value in vars(cls).items() if key not in _OF_CLASSES}
        return list(own.items())

    def write(items: list[tuple[str, Any]]) -> None:
        now, before = dict(read()), dict(items)
        for key in now.keys() - before.keys():
            type.__delattr__(cls, key)
        for key, value in before.items():
            if now.get(key, MISSING) is not value:
                type.__setattr__(cls, key, value)

    return read, write


# Which Python itself fills in when it likes.
_OF_CLASSES = frozenset({"__dict__", "__weakref__", "__doc__", "__abstractmethods__", "_abc_impl"})


def _slot_value(value: Any, slot: types.MemberDescriptorType) -> Any:
    def read() -> list[Any]:
        try:
            return [slot.__get__(value)]
        except AttributeError:  # it is empty
            return []

    def write(items: list[Any]) -> None:
        if items:
            slot.__set__(value, items[0])
        else:
            slot.__delete__(value)

    return read, write


def _generator_draws(generator: Any) -> Any:
    return (
        lambda: [_generator_state(generator)],
        lambda items: _set_generator_state(generator, items[0]),
    )


def _generator_state(generator: Any) -> bytes:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return pickle.dumps(random.Random.getstate(generator))
    state = generator.get_state() if hasattr(generator, "get_state") else None
    return pickle.dumps(generator.bit_generator.state if state is None else state)


def _set_generator_state(generator: Any, state: bytes) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        return
    # Written by the function above, a few microseconds ago.
    known = pickle.loads(state)  # noqa: S301
    if isinstance(generator, random.Random):
        random.Random.setstate(generator, known)
    elif hasattr(generator, "set_state"):
        generator.set_state(known)
    else:
        generator.bit_generator.state = known


def _array_content(array: np.ndarray[Any, Any]) -> Any:
    return lambda: [array.tobytes()], lambda items: np.copyto(
        array, np.frombuffer(items[0], dtype=array.dtype).reshape(array.shape)
    )


# --- comparing and copying ------------------------------------------------------------------------


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_same_item(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if type(now) is tuple and type(before) is tuple and len(now) == len(before):
        return all(map(_is_same_item, now, before))
    return type(now) is type(before) and type(now) in _ATOMS and now == before


_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None)})


def is_same_leaf(before: Any, now: Any, *, widened: bool = False) -> bool:
    """Whether a leaf is bit for bit what it was; in a wide run, what it was when widened."""
    if _is_tensor(before) and _is_tensor(now):
        if not (is_dense(before) and is_dense(now)):
            return bitwise_equal(now.detach(), before)
        if before.shape != now.shape:
            return False
        if widened and now.dtype is not before.dtype and now.dtype is WIDE.get(before.dtype):
            before = before.to(now.dtype)
        return before.dtype is now.dtype and bitwise_equal(now.detach(), before)
    if now is before:
        return True
    if isinstance(before, Opaque) and isinstance(now, Opaque):
        return before.value is now.value
    if isinstance(before, np.ndarray) and isinstance(now, np.ndarray):
        return before.shape == now.shape and before.tobytes() == now.tobytes()
    return bool(same_leaf(before, now))


def _put_back(tensor: Tensor, saved: Tensor) -> None:
    plain = tensor.detach()
    if is_same_leaf(saved, plain):
        return
    if not is_dense(saved) or plain.shape != saved.shape or plain.dtype is not saved.dtype:
        tensor.data = detached_copy(saved)
    else:
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            plain.copy_(saved)


def _put_back_flags(tensor: Tensor, is_leaf: bool, requires_grad: bool) -> None:  # noqa: FBT001
    """A write in place may have hung a tensor into the graph of what was written."""
    if is_leaf and not tensor.is_leaf:
        tensor.detach_()
    if tensor.is_leaf and tensor.requires_grad is not requires_grad:
        tensor.requires_grad_(requires_grad)


def _put_back_gradient(tensor: Tensor, gradient: Tensor | None, saved: Tensor | None) -> None:
    if _live_gradient(tensor) is not gradient:
        tensor.grad = gradient
    if gradient is None or saved is None:
        return
    try:
        _put_back(gradient, saved)
    except RuntimeError:  # it lay in the memory of a CUDA graph, which has run again since
        tensor.grad = saved.clone()


def _live_gradient(tensor: Tensor) -> Tensor | None:
    # Asking any other for it makes torch warn.
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None


def detached_copy(tensor: Tensor) -> Tensor:
    """A tensor of its own with the same content, off any graph."""
    plain = tensor.detach()
    with made_like(tensor):
        return plain.clone() if is_dense(plain) else Copier().copy_tensor(plain)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(WIDE[tensor.dtype])


def _set_item(table: Any, key: Any, value: Any) -> None:
    if isinstance(table, types.CellType):
        table.cell_contents = value
    elif isinstance(table, dict):
        base: Any = collections.OrderedDict if isinstance(table, collections.OrderedDict) else dict
        base.__setitem__(table, key, value)
    elif isinstance(table, list):
        list.__setitem__(table, key, value)
    else:
        collections.deque.__setitem__(table, key, value)


def _numbered_paths(path: str) -> Iterator[str]:
    yield path
    for number in range(2, 1_000_000):
        yield f"{path} ({number})"
