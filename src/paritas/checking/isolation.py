"""Same bits of input, state and randomness for every run, and the caller's left as they were."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paritas._torch.lifting import WIDE
from paritas._torch.modules import INTERNALS, tensor_slots
from paritas.numerics.metrics import bitwise_equal
from paritas.numerics.trees import children, map_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

    from paritas.checking.config import Inputs

PLAIN_LAYOUT = torch.strided


class Copier:
    """Copies tensors storage by storage: views of one storage stay views of one storage.

    Strides, overlaps and aliases among the arguments are part of what a program is given.
    """

    def __init__(self, *, widen: bool = False) -> None:
        """Copy as they are, or widened to float64."""
        self.widen = widen
        self.copies: dict[tuple[int, torch.dtype], Tensor] = {}

    def copy_tree(self, tree: Any) -> Any:
        """A tree of the same structure that shares nothing with the given one."""
        return map_leaves(tree, self._copy_leaf)

    def copy_tensor(self, tensor: Tensor) -> Tensor:
        """A leaf tensor with the same values, strides and requires_grad."""
        plain = tensor.detach()
        if _is_plain(tensor):
            storage = self._storage(plain)
            result = torch.empty(0, dtype=storage.dtype, device=storage.device).set_(
                storage.untyped_storage(), plain.storage_offset(), plain.shape, plain.stride()
            )
        else:
            result = plain.clone()
            if self.widen and result.dtype in WIDE:
                result = result.to(WIDE[result.dtype])
        if tensor.is_conj():
            result = result.conj()
        return result.requires_grad_(tensor.requires_grad)

    def _copy_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.copy_tensor(leaf)
        if children(leaf) is None and hasattr(leaf, "__dict__") and not callable(leaf):
            # An object of a class we do not know, a cache for one: its tensors must not be shared.
            return copy.deepcopy(leaf)
        return leaf

    def _storage(self, tensor: Tensor) -> Tensor:
        """The copied storage as a flat tensor of the tensor's dtype."""
        storage = tensor.untyped_storage()
        key = (storage.data_ptr() or id(tensor), tensor.dtype)
        if key not in self.copies:
            unconjugated = tensor.conj() if tensor.is_conj() else tensor
            count = storage.nbytes() // tensor.element_size()
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            flat = flat.set_(unconjugated.untyped_storage(), 0, (count,), (1,))
            wide = WIDE.get(tensor.dtype) if self.widen else None
            self.copies[key] = flat.to(wide) if wide else flat.clone()
        return self.copies[key]


def copied(inputs: Inputs, *, widen: bool = False) -> Inputs:
    """The same inputs in storage of their own."""
    copier = Copier(widen=widen)
    args = copier.copy_tree(list(inputs.args))
    return dataclasses.replace(inputs, args=tuple(args), kwargs=copier.copy_tree(inputs.kwargs))


@dataclasses.dataclass(frozen=True)
class RandomState:
    """The state of every random generator a program may draw from."""

    cpu: Tensor
    devices: tuple[Tensor, ...]
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> RandomState:
        """Take the current state."""
        devices = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else ()
        return cls(torch.get_rng_state(), devices, random.getstate(), np.random.get_state())  # noqa: NPY002

    def restore(self) -> None:
        """Make it the current state."""
        torch.set_rng_state(self.cpu)
        if self.devices:
            torch.cuda.set_rng_state_all(list(self.devices))
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002

    def same_torch(self, other: RandomState) -> bool:
        """Whether torch's generators stand at the same place."""
        return torch.equal(self.cpu, other.cpu) and all(
            torch.equal(a, b) for a, b in zip(self.devices, other.devices, strict=True)
        )


class ModuleState:
    """The parameters, buffers and plain attributes of some modules, and how to put them back."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        """Remember the state of `modules` as it is now."""
        self.tensors: dict[str, Tensor] = {}
        self._slots: dict[str, list[tuple[dict[str, Any], str]]] = {}
        self._attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        names: dict[int, str] = {}
        for prefix, root in modules.items():
            for path, module in root.named_modules():
                self._read(f"{prefix}{path}", module, names)
        self.saved = {name: _detached_clone(tensor) for name, tensor in self.tensors.items()}

    def _read(self, path: str, module: nn.Module, names: dict[int, str]) -> None:
        path = path.replace("_orig_mod.", "").removesuffix("_orig_mod")
        for slots in tensor_slots(module):
            for key, tensor in slots.items():
                if tensor is None:
                    continue
                # Tied weights are one tensor in several slots, known by its first name.
                name = names.setdefault(id(tensor), f"{path}.{key}".lstrip("."))
                self.tensors[name] = tensor
                self._slots.setdefault(name, []).append((slots, key))
        own = {
            key: value
            for key, value in vars(module).items()
            if key not in INTERNALS and not isinstance(value, torch.nn.Module)
        }
        self._attributes.append((module, {key: _kept(value) for key, value in own.items()}))

    def changed(self) -> dict[str, Tensor]:
        """The parameters and buffers whose bits are no longer what they were, copied.

        In a wide run the tensors in the slots are float64; they are compared with the saved bits
        widened.
        """
        changed = {}
        for name, tensor in self._current().items():
            before = self.saved[name]
            if tensor.dtype is not before.dtype and tensor.dtype is WIDE.get(before.dtype):
                before = before.to(tensor.dtype)
            if not bitwise_equal(tensor.detach(), before):
                changed[name] = _detached_clone(tensor)
        return changed

    def restore(self) -> None:
        """Put every parameter, buffer and attribute back, in place, keeping identities."""
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                for slots, key in self._slots[name]:
                    slots[key] = tensor
                if not bitwise_equal(tensor.detach(), self.saved[name]):
                    tensor.detach().copy_(self.saved[name])
        for module, attributes in self._attributes:
            _restore_attributes(module, attributes)

    @contextlib.contextmanager
    def swapped(self, values: dict[str, Tensor]) -> Iterator[None]:
        """Let the modules run on other tensors, in every slot where the named one stands."""
        try:
            for name, value in values.items():
                for slots, key in self._slots[name]:
                    slots[key] = value
            yield
        finally:
            for name, tensor in self.tensors.items():
                for slots, key in self._slots[name]:
                    slots[key] = tensor
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


def _kept(value: Any) -> tuple[Any, Any]:
    """The object itself and what to put back into it."""
    if isinstance(value, list | dict | set):
        return value, copy.copy(value)
    if isinstance(value, torch.Tensor):
        return value, _detached_clone(value)
    return value, None


def _restore_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    for key in list(vars(module)):
        if key not in attributes and key not in INTERNALS and _is_new(module, key):
            delattr(module, key)
    for key, (value, content) in attributes.items():
        if vars(module).get(key, INTERNALS) is not value:
            object.__setattr__(module, key, value)
        if content is None:
            continue
        if isinstance(value, list):
            value[:] = content
        elif isinstance(value, dict | set):
            value.clear()
            value.update(content)
        elif not bitwise_equal(value.detach(), content):
            with torch.no_grad():
                value.detach().copy_(content)


def _is_new(module: nn.Module, key: str) -> bool:
    return not isinstance(vars(module)[key], torch.nn.Module)


def _detached_clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _is_plain(tensor: Tensor) -> bool:
    kinds = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
    return type(tensor) in kinds and tensor.layout is PLAIN_LAYOUT and not tensor.is_quantized


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
    if isinstance(value, torch.nn.Module):
        if not any(module is value for module in found.values()):
            found[name or "model"] = value
        return
    if depth > 4:  # noqa: PLR2004  (deep enough for decorators around closures around methods)
        return
    owner = getattr(value, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        _reach(owner, original, found, name, depth + 1)
    function = getattr(value, "__func__", getattr(value, "func", value))
    code = getattr(function, "__code__", None)
    if code is not None:
        for free, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                _reach(cell.cell_contents, original, found, free, depth + 1)
        for used in code.co_names:
            held = function.__globals__.get(used)
            if isinstance(held, torch.nn.Module):
                _reach(held, original, found, used, depth + 1)
    for position, argument in enumerate(getattr(value, "args", ()) or ()):
        if isinstance(argument, torch.nn.Module):
            _reach(argument, original, found, f"argument{position}", depth + 1)
