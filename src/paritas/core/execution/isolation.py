"""Gives every run the same inputs, state and random numbers, and restores the caller's state."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch

from paritas.core.errors import UsageError, in_one_line
from paritas.core.execution.held_values import (
    ATOMS,
    MISSING,
    HeldValues,
    are_same_items,
    hold_given_to,
    hold_values,
    read_code,
    read_other_parts,
)
from paritas.core.execution.reachable import (
    CLASS,
    FUNCTION,
    GENERATORS,
    GLOBAL,
    Reached,
    UsedNames,
    original_of,
    walk_reachable,
)
from paritas.core.execution.saved_state import Copier, generator_state, made_like
from paritas.core.numerics.contents import Opaque, contents, given_to_tensor, same_leaf
from paritas.core.numerics.flattening import is_dense
from paritas.core.numerics.metrics import bitwise_equal, equal_on_device
from paritas.core.torch_private.operators import WIDE

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paritas.core.execution.subjects import Inputs


def copy_inputs(inputs: Inputs, *, widen: bool = False) -> Inputs:
    """Copy inputs into new storage."""
    args, kwargs = Copier(widen=widen).copy_tree([list(inputs.args), inputs.kwargs])
    return dataclasses.replace(inputs, args=tuple(args), kwargs=kwargs)


def frozen_leaf(leaf: Any) -> Any:
    """An immutable, comparable form of a leaf that is not a tensor."""
    if type(leaf) in ATOMS:
        return leaf
    if isinstance(leaf, GENERATORS):
        return generator_state(leaf)
    if isinstance(leaf, np.ndarray | bytearray):
        return leaf.copy()
    return leaf if isinstance(leaf, Opaque) else next(contents(leaf))[1]


# What holds a value, an object or a namespace, and its key there.
Place = tuple[Any, Any]


class ProgramState:
    """Everything that a program computes with apart from its inputs, and how to restore it.

    Parameters and buffers, their `.grad`, attributes of modules, variables of closures, globals,
    the data of classes and objects, and the contents of all these.

    Attributes:
        tensors: name -> tensor.
        saved: name -> a copy of its initial value.
        owned: the names of the tensors that are parameters or buffers of a module.
        failures: name -> why it could not be copied or restored.
        unreadable: name -> why it could not be read after a call.
        unseen: the names of objects whose changes cannot be detected: iterators.
        containers: name -> module, object or container that holds other values.
        places: name -> what holds it, for code, and for what was added since.
        gradients: name -> the `.grad` of a tensor, and a copy of it.
        flags: name -> whether a tensor was a leaf, and required grad.
        lent: name -> a parameter that is not copied: it is neither compared nor restored.
    """

    def __init__(
        self,
        modules: dict[str, nn.Module],
        function: Any = None,
        program_state: ProgramState | None = None,
        *,
        lends_parameters: bool = False,
    ) -> None:
        """Save the current state; what `program_state` has saved already is not copied again.

        With `lends_parameters`, the parameters of modules are left out: copying them takes as much
        memory as the model.
        """
        self._roots = modules, function
        self._lends = lends_parameters
        self.lent: dict[str, Tensor] = {}
        self._known = {} if program_state is None else program_state.names
        self.names: dict[int, str] = dict(self._known)
        self.tensors: dict[str, Tensor] = {}
        self.saved: dict[str, Tensor] = {}
        self.owned: set[str] = set()
        self.failures: dict[str, str] = {}
        self.unreadable: dict[str, str] = {}
        self.unseen: list[str] = []
        self.containers: dict[str, Any] = {}
        self.places: dict[str, Place] = {}
        self._reached: set[int] = set()
        self._globals: dict[int, set[str]] = {}  # id of a namespace -> names
        self._slots: dict[str, list[tuple[Any, Any]]] = {}
        self._named: dict[tuple[int, Any], str] = {}
        self._held: list[HeldValues] = []
        self._alive: list[Any] = []  # keeps objects alive that are identified by id
        self.flags: dict[str, tuple[bool, bool]] = {}
        self.gradients: dict[str, tuple[Tensor | None, Tensor | None]] = {}
        self._leaves: dict[str, Any] = {}
        self._mutable: list[tuple[str, Any]] = []
        self._shows_replacing = True
        readers: list[Callable[[], list[Any]]] = []
        pins: dict[int, Callable[[], list[Any]]] = {}
        self._code: set[int] | None = None
        code: set[int] = set()
        for reached_object in self._walk():
            if isinstance(reached_object.value, torch.Tensor):
                self._keep_tensor(reached_object, program_state)
            elif reached_object.is_leaf:
                self._keep_leaf(reached_object)
            else:
                self._keep_object(reached_object)
                if isinstance(reached_object.value, types.FunctionType | type):
                    code.add(id(reached_object.value))
                readers += read_other_parts(reached_object.value)
                self._shows_replacing &= not isinstance(
                    reached_object.value, torch.jit.ScriptModule
                )
            pins |= read_code(reached_object.value)
            if not isinstance(reached_object.value, torch.Tensor | Opaque):
                self._held += hold_values(reached_object)
        self._held.append(hold_given_to([*self.tensors.values(), *self.lent.values()]))
        self._code = code
        self._may_differ = True
        self._is_wide = False
        self._now = self.tensors
        self._readers = [*(held_value.read for held_value in self._held), *readers, *pins.values()]
        self._expected = [read() for read in self._readers]

    def _walk(self) -> Iterator[Reached]:
        yield from walk_reachable(*self._roots, self._known, self._code)

    def _keep_tensor(self, reached: Reached, program_state: ProgramState | None) -> None:
        tensor = reached.value
        name = self._name(reached)
        if torch.nn.parameter.is_lazy(tensor):
            raise UsageError(f"{name} is not initialised yet; call the model once before verifying")
        if reached.table is not None:
            self._slots.setdefault(name, []).append((reached.table, reached.key))
            self._named[id(reached.table), reached.key] = name
        if reached.is_owned:
            self.owned.add(name)
        self._reached.add(id(tensor))
        if name in self.tensors:
            return
        if self._lends and isinstance(tensor, torch.nn.Parameter):
            self.lent[name] = tensor
            return
        self.tensors[name] = tensor
        is_known = program_state is not None and program_state.tensors.get(name) is tensor
        if is_known and program_state is not None:
            self.saved[name] = program_state.saved[name]
            self.gradients[name] = program_state.gradients[name]
            self.flags[name] = program_state.flags[name]
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
        except Exception as error:  # noqa: BLE001  (it was in a CUDA graph that has run since)
            self.unreadable[f"{name}.grad"] = f"it cannot be read: {in_one_line(error, 120)}"

    def _keep_object(self, reached: Reached) -> None:
        value = reached.value
        self.containers.setdefault(reached.path, value)
        self.names.setdefault(id(value), reached.path)
        self._reached.add(id(value))
        self._alive.append(value)
        if isinstance(value, UsedNames):
            self._globals.setdefault(id(value.namespace), set()).update(value.names)

    def _name(self, reached: Reached) -> str:
        """The name of a tensor; tied weights have the name of their first place."""
        name = self.names.get(id(reached.value))
        if name is None:
            name, number = reached.path, 1
            while name in self.tensors or name in self._leaves:
                number += 1
                name = f"{reached.path} ({number})"
            self.names[id(reached.value)] = name
        return name

    def _keep_leaf(self, reached: Reached) -> None:
        value = frozen_leaf(reached.value)
        if isinstance(value, Opaque):
            self.places.setdefault(reached.path, (reached.holder, reached.key))
            if _is_consumed(reached):
                self.unseen.append(reached.path)
        if reached.path not in self._leaves:
            self._leaves[reached.path] = value
            if type(reached.value) not in ATOMS:
                self._mutable.append((reached.path, reached.value))

    def is_of(self, function: Any, modules: dict[str, nn.Module]) -> bool:
        """Whether this is the state of that callable with these modules, by these names."""
        own_modules, own_function = self._roots
        same_names = modules.keys() == own_modules.keys()
        same = same_names and all(own_modules[name] is modules[name] for name in modules)
        return same and original_of(function) is original_of(own_function)

    # --- Changes by a call ------------------------------------------------------------------------

    def reaches(self, location: Place) -> bool:
        """Whether the program reaches the object that holds a value, or names that global."""
        holder, key = location
        names = self._globals.get(id(holder))
        return id(holder) in self._reached if names is None else key in names

    def initial(self, path: str) -> Any:
        """The value before any call; `MISSING` if there was none."""
        if path in self.saved:
            return self.saved[path]
        if path.endswith(".grad") and path.removesuffix(".grad") in self.gradients:
            saved = self.gradients[path.removesuffix(".grad")][1]
            return MISSING if saved is None else saved
        return self._leaves.get(path, MISSING)

    def changed_values(self, among: frozenset[str] | None = None) -> dict[str, Any]:
        """The values that have changed, by name; tensors are copied.

        In a wide run the tensors are float64 and are compared with the widened saved values; only
        names in `among` are compared. Torch's version counters are not enough: compiled code
        writes to buffers without increasing them.
        """
        self._may_differ = True
        if among is not None and not among:
            return {}
        before = {**self.saved, **self._leaves}
        before |= {f"{name}.grad": g for name, (_, g) in self.gradients.items() if g is not None}
        changed = {}
        now = self._in_place() if self._is_nothing_replaced() else dict(self._present())
        wide = self._is_wide
        same = unchanged_on_device(before, now, widened=wide) if among is None else set()
        for path in [*before, *(path for path in now if path not in before)]:
            if path not in same and (among is None or path in among):
                old, value = before.get(path, MISSING), now.get(path, MISSING)
                if old is value or (path not in before and _is_imported(path, value)):
                    continue
                try:
                    if not is_same_leaf(old, value, widened=wide):
                        changed[path] = detached_copy(value) if _is_tensor(value) else value
                except Exception as error:  # noqa: BLE001  (the verdict lists it)
                    self.unreadable[path] = f"it cannot be read: {in_one_line(error, 120)}"
        self._may_differ = bool(changed) or among is not None
        return changed

    def changed_flags(self) -> dict[str, bool]:
        """`requires_grad` of the tensors for which it was set since the beginning."""
        return {
            name: tensor.requires_grad
            for name, tensor in self._now.items()
            if tensor.is_leaf and self.flags[name] == (True, not tensor.requires_grad)
        }

    def _is_nothing_replaced(self) -> bool:
        """Whether every object that was reached at the beginning still holds the same objects.

        Then a walk would find the same ones. It takes many times longer than this.
        """
        return (
            self._shows_replacing
            and not self.failures
            and all(map(are_same_items, (read() for read in self._readers), self._expected))
        )

    def _in_place(self) -> dict[str, Any]:
        """Every present value, if nothing was replaced."""
        now = self._leaves | {path: frozen_leaf(leaf) for path, leaf in self._mutable} | self._now
        for name, tensor in self._now.items():
            gradient = _live_gradient(tensor)
            if gradient is not None:
                now[f"{name}.grad"] = gradient
        return now

    def _present(self) -> Iterator[tuple[str, Any]]:
        """Every present value, with the name it would have had at the beginning."""
        names_by_id: dict[int, str] = {}
        yielded: set[str] = set()
        added: dict[int, Place] = {}  # id of a new object -> what holds it, and was there before
        for reached_object in self._walk():
            value = reached_object.value
            location = added.get(
                id(reached_object.holder), (reached_object.holder, reached_object.key)
            )
            if not reached_object.is_leaf and id(value) not in self._reached:
                added[id(value)] = location
            elif reached_object.is_leaf:
                self.places.setdefault(reached_object.path, location)
            if isinstance(value, torch.Tensor):
                path = self._present_name(reached_object, names_by_id)
                if path not in yielded and self.lent.get(path) is not value:
                    yielded.add(path)
                    yield path, value
                    gradient = _live_gradient(value)
                    if gradient is not None:
                        yield f"{path}.grad", gradient
            elif reached_object.is_leaf and reached_object.path not in yielded:
                yielded.add(reached_object.path)
                yield reached_object.path, frozen_leaf(value)

    def _present_name(self, reached: Reached, names_by_id: dict[int, str]) -> str:
        """The name of a tensor: that of the original tensor in its place, if there was one."""
        if reached.table is not None and (id(reached.table), reached.key) in self._named:
            return self._named[id(reached.table), reached.key]
        known_name = self.names.get(id(reached.value))
        if known_name is not None and self.tensors.get(known_name) is reached.value:
            return known_name
        return names_by_id.setdefault(id(reached.value), reached.path)

    def detach(self) -> None:
        """Detach the program's state from the autograd graph.

        Our own backward pass has freed that graph: without this, differentiating the next call
        would fail.
        """
        for reached_object in list(self._walk()):
            value = reached_object.value
            if _is_tensor(value) and value.grad_fn is not None and reached_object.table is not None:
                _set_item(reached_object.table, reached_object.key, value.detach())

    # --- Restoring --------------------------------------------------------------------------------

    def touch(self) -> None:
        """Note that a program is about to run on this state."""
        self._may_differ = True

    def restore(self) -> None:
        """Restore everything in place, keeping identities; `failures` lists what failed."""
        self._restore_places()
        if not self._may_differ:
            return  # compared since the last run, without changes
        self._may_differ = False
        for name, tensor in self.tensors.items():
            try:
                _put_back(tensor, self.saved[name])
                _put_back_flags(tensor, *self.flags[name])
                _put_back_gradient(tensor, *self.gradients[name])
            except Exception as error:  # noqa: BLE001  (a finding names it)
                self.failures[name] = f"it cannot be restored: {in_one_line(error, 120)}"

    def _restore_places(self) -> None:
        """Restore references: the tensors in their places, the attributes of objects."""
        if self._is_nothing_replaced():
            return
        for held_value in self._held:
            try:
                held_value.put_back()
            except Exception as error:  # noqa: BLE001  (a finding names it)
                self.failures[held_value.path] = f"it cannot be restored: {in_one_line(error, 120)}"

    # --- Running on other tensors -----------------------------------------------------------------

    @contextlib.contextmanager
    def swap_tensors(self, values: dict[str, Tensor]) -> Iterator[None]:
        """Replace tensors by others, in every place that holds them."""
        self._is_wide = True
        expected, shows = self._expected, self._shows_replacing
        self._shows_replacing = self._is_nothing_replaced()
        try:
            self._set_places(values)
            self._expected = [read() for read in self._readers]
            self._now = self.tensors | {n: v for n, v in values.items() if n in self._slots}
            yield
        finally:
            # Only if the run replaced something, each object is looked at.
            is_as_set = self._is_nothing_replaced()
            self._is_wide = False
            self._expected, self._shows_replacing, self._now = expected, shows, self.tensors
            if is_as_set:
                self._set_places(self.tensors)
            self._restore_places()
            # It ran on other tensors, except for those that could not be replaced.
            self._may_differ = self.tensors.keys() != self._slots.keys()

    def _set_places(self, values: Mapping[str, Tensor]) -> None:
        for name, places in self._slots.items():
            for table, key in places if name in values else ():
                _set_item(table, key, values[name])

    def widen_state(self) -> dict[str, Tensor]:
        """Copies of the saved state in float64; parameters stay parameters."""
        wide: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            if name not in self._slots:
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
        for name, value in wide.items():
            for key, attribute in given_to_tensor(self.tensors[name]).items():
                setattr(value, key, wide.get(self.names.get(id(attribute), ""), attribute))
        return wide


def _is_imported(path: str, value: Any) -> bool:
    """Whether a new name refers to code that was imported on first use."""
    code = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
    is_code = isinstance(value, Opaque) and isinstance(value.value, code)
    return is_code and path.startswith((GLOBAL, CLASS, FUNCTION))


def _is_consumed(reached: Reached) -> bool:
    """Whether a value is an iterator of the program's own.

    Libraries have iterators among their globals that no call uses. Files are iterators, too, but
    most programs only write to them.
    """
    is_shared = reached.path.startswith((GLOBAL, CLASS, FUNCTION))
    is_file = isinstance(reached.value, io.IOBase)
    return isinstance(reached.value, Iterator) and not is_file and not is_shared


# --- Comparing and copying ------------------------------------------------------------------------


def _is_tensor(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, torch.Tensor)


def is_same_leaf(before: Any, now: Any, *, widened: bool = False) -> bool:
    """Whether a leaf has the same bits as before; with `widened`, as the widened value."""
    if _is_tensor(before) and _is_tensor(now):
        is_widened = widened and is_dense(before) and is_dense(now)
        return bitwise_equal(now.detach(), _as_now(before, now) if is_widened else before)
    if now is before:
        return True
    if isinstance(before, Opaque) and isinstance(now, Opaque):
        return before.value is now.value
    if isinstance(before, np.ndarray) and isinstance(now, np.ndarray):
        return before.shape == now.shape and before.tobytes() == now.tobytes()
    return bool(same_leaf(before, now))


def unchanged_on_device(
    before: dict[str, Any], now: dict[str, Any], *, widened: bool = False
) -> set[str]:
    """The names of all tensors on an accelerator if none has changed: we wait for it only once."""
    names = [path for path, value in now.items() if _is_tensor(value) and not value.is_cpu]
    old_values = [before.get(name) for name in names]
    if not names or not all(_is_tensor(old) and is_dense(old) for old in old_values):
        return set()
    pairs: Iterable[tuple[Any, Tensor]] = zip(
        old_values, (now[n].detach() for n in names), strict=True
    )
    try:
        same = equal_on_device((_as_now(a, b) if widened else a, b) for a, b in pairs)
    except RuntimeError:  # one of them cannot be read: comparing each of them tells which
        return set()
    return set(names) if same else set()


def _as_now(before: Tensor, now: Tensor) -> Tensor:
    """A saved value, widened if the present one is its widened value."""
    is_wider = now.dtype is not before.dtype and now.dtype is WIDE.get(before.dtype)
    return before.to(now.dtype) if is_wider else before


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
    """Restore flags: an in-place write may have attached a tensor to an autograd graph."""
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
    except RuntimeError:  # it was in the memory of a CUDA graph that has run again since
        tensor.grad = saved.clone()


def _live_gradient(tensor: Tensor) -> Tensor | None:
    # Reading it from other tensors makes torch warn.
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None


def detached_copy(tensor: Tensor) -> Tensor:
    """A copy of a tensor, without autograd history."""
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
