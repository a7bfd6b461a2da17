"""Same bits of input, state and randomness for every run, and the caller's left as they were."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.lifting import WIDE
from paritas._torch.modules import INTERNALS, tensor_slots
from paritas.errors import UsageError
from paritas.numerics.metrics import bitwise_equal
from paritas.recording.isolation import Copier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

    from paritas.checking.config import Inputs


def copied(inputs: Inputs, *, widen: bool = False) -> Inputs:
    """The same inputs in storage of their own."""
    copier = Copier(widen=widen)
    args = copier.copy_tree(list(inputs.args))
    return dataclasses.replace(inputs, args=tuple(args), kwargs=copier.copy_tree(inputs.kwargs))


class ModuleState:
    """The parameters, buffers and plain attributes of some modules, and how to put them back."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        """Remember the state of `modules` as it is now."""
        self.tensors: dict[str, Tensor] = {}
        self._modules = modules
        self._slots: dict[str, list[tuple[dict[str, Any], str]]] = {}
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._attributes: list[tuple[nn.Module, dict[str, _Kept]]] = []
        names: dict[int, str] = {}
        for prefix, root in modules.items():
            for path, module in root.named_modules():
                self._read(f"{prefix}{path}", module, names)
        self.saved = {name: _detached_clone(tensor) for name, tensor in self.tensors.items()}
        self._may_differ = True

    def _read(self, path: str, module: nn.Module, names: dict[int, str]) -> None:
        path = path.replace("_orig_mod.", "").removesuffix("_orig_mod")
        for slots in tensor_slots(module):
            self._tables.append((slots, dict(slots)))
            for key, tensor in slots.items():
                if tensor is None:
                    continue
                # Tied weights are one tensor in several slots, known by its first name.
                name = names.setdefault(id(tensor), f"{path}.{key}".lstrip("."))
                if torch.nn.parameter.is_lazy(tensor):
                    message = f"{name} is not initialised yet; call the model once before verifying"
                    raise UsageError(message)
                self.tensors[name] = tensor
                self._slots.setdefault(name, []).append((slots, key))
        own = {
            key: value
            for key, value in vars(module).items()
            if key not in INTERNALS and not isinstance(value, torch.nn.Module)
        }
        self._attributes.append((module, {key: _Kept(value) for key, value in own.items()}))

    def is_of(self, modules: dict[str, nn.Module]) -> bool:
        """Whether these modules, by these names, are the ones whose state this is."""
        same_names = modules.keys() == self._modules.keys()
        return same_names and all(self._modules[name] is modules[name] for name in modules)

    def changed(self, among: frozenset[str] | None = None) -> dict[str, Tensor]:
        """The parameters and buffers whose bits are no longer what they were, copied.

        In a wide run the tensors in the slots are float64; they are compared with the saved bits
        widened, and only those `among` the ones of interest. Counting writes is no substitute:
        compiled code writes to buffers without torch noting it.
        """
        changed = {}
        for name, tensor in self._current().items():
            if among is not None and name not in among:
                continue
            before = self.saved[name]
            if tensor.dtype is not before.dtype and tensor.dtype is WIDE.get(before.dtype):
                before = before.to(tensor.dtype)
            if not bitwise_equal(tensor.detach(), before):
                changed[name] = _detached_clone(tensor)
        self._may_differ = bool(changed) or among is not None
        return changed

    def touch(self) -> None:
        """Say that a program is about to run on this state."""
        self._may_differ = True

    def restore(self) -> None:
        """Put every parameter, buffer and attribute back, in place, keeping identities."""
        self._restore_places()
        if not self._may_differ:
            return  # looked at since the last run, and found as it was
        self._may_differ = False
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                if not bitwise_equal(tensor.detach(), self.saved[name]):
                    tensor.detach().copy_(self.saved[name])

    @contextlib.contextmanager
    def swapped(self, values: dict[str, Tensor]) -> Iterator[None]:
        """Let the modules run on other tensors, in every slot where the named one stands."""
        try:
            for name, value in values.items():
                for slots, key in self._slots[name]:
                    slots[key] = value
            yield
        finally:
            self._restore_places()
            self._may_differ = False  # it ran on other tensors

    def _restore_places(self) -> None:
        """What stands where: the tensors in their slots, the attributes in their modules."""
        for slots, content in self._tables:
            same = slots.keys() == content.keys()
            if not same or any(slots[key] is not content[key] for key in content):
                slots.clear()
                slots.update(content)
        for module, attributes in self._attributes:
            _restore_attributes(module, attributes)

    def widened(self) -> dict[str, Tensor]:
        """Copies of the saved state in float64; parameters stay parameters."""
        wide: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            value = self.saved[name]
            value = value.to(WIDE[value.dtype]) if value.dtype in WIDE else value.clone()
            if isinstance(tensor, torch.nn.Parameter):
                value = torch.nn.Parameter(value, requires_grad=tensor.requires_grad)
            wide[name] = value
        return wide

    def _current(self) -> dict[str, Tensor]:
        """What stands in the slots now: a program may also replace a buffer outright."""
        current = {}
        for name, places in self._slots.items():
            slots, key = places[0]
            now = slots.get(key)
            current[name] = self.tensors[name] if now is None else now
        return current


class _Kept:
    """An attribute's value and, of a tensor or a container, what was in it, however deep."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.content: Any = None
        if isinstance(value, torch.Tensor):
            self.content = _detached_clone(value)
        elif isinstance(value, dict):
            self.content = {key: _Kept(item) for key, item in value.items()}
        elif isinstance(value, list):
            self.content = [_Kept(item) for item in value]
        elif isinstance(value, set):
            self.content = set(value)

    def restored(self) -> Any:
        """The same object, with what was in it."""
        value, content = self.value, self.content
        if isinstance(value, torch.Tensor):
            if not bitwise_equal(value.detach(), content):
                with torch.no_grad():
                    value.detach().copy_(content)
        elif isinstance(value, dict):
            items = {key: kept.restored() for key, kept in content.items()}
            value.clear()
            value.update(items)
        elif isinstance(value, list):
            value[:] = [kept.restored() for kept in content]
        elif isinstance(value, set):
            value.clear()
            value.update(content)
        return value


def _restore_attributes(module: nn.Module, attributes: dict[str, _Kept]) -> None:
    for key, value in list(vars(module).items()):
        is_own = key not in INTERNALS and not isinstance(value, torch.nn.Module)
        if is_own and key not in attributes:
            delattr(module, key)
    for key, kept in attributes.items():
        value = kept.restored()
        if key not in vars(module) or vars(module)[key] is not value:
            object.__setattr__(module, key, value)


def _detached_clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def reachable_modules(function: Any, original: Callable[[Any], Any]) -> dict[str, nn.Module]:
    """The modules a callable computes with: itself, its owner, its closure, its partial."""
    found: dict[str, nn.Module] = {}
    _reach(function, original, found, "", depth=0)
    if len(found) == 1:
        return {"": next(iter(found.values()))}
    return {f"{name}.": module for name, module in found.items()}


def _reach(
    value: Any, original: Callable[[Any], Any], found: dict[str, nn.Module], name: str, depth: int
) -> None:
    value = original(value)
    if isinstance(value, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
        value = value.module  # whose names the parameters are known by
    if isinstance(value, torch.nn.Module):
        if not any(module is value for module in found.values()):
            found[name or "model"] = value
        return
    if depth > MOST_LAYERS:
        return
    if isinstance(value, functools.partial):
        _reach(value.func, original, found, name, depth + 1)
        for position, argument in enumerate(value.args):
            _reach_module(argument, original, found, f"argument{position}")
        for key, argument in value.keywords.items():
            _reach_module(argument, original, found, key)
        return
    owner = getattr(value, "__self__", None)
    _reach_module(owner, original, found, name)
    function = getattr(value, "__func__", value)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for free, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            _reach(cell.cell_contents, original, found, free, depth + 1)
    for used in code.co_names:
        held = function.__globals__.get(used)
        if _is_made_by_compile(held):
            _reach(held, original, found, used, depth + 1)
        _reach_module(held, original, found, used)


def _reach_module(
    value: Any, original: Callable[[Any], Any], found: dict[str, nn.Module], name: str
) -> None:
    if isinstance(value, torch.nn.Module):
        _reach(value, original, found, name, depth=0)


# Decorators around closures around partials around methods.
MOST_LAYERS = 4


def _is_made_by_compile(value: Any) -> bool:
    # Nothing was compiled where the compiler was never loaded, and loading it takes seconds.
    if "torch._dynamo" not in sys.modules:
        return False
    from paritas._torch.compiled import is_made_by_compile

    return is_made_by_compile(value)
