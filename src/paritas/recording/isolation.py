"""Arguments and random states that can be had again: copies that keep strides and aliases."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paritas._torch.lifting import WIDE
from paritas.errors import UsageError
from paritas.numerics.contents import attributes, contents, parts
from paritas.numerics.trees import map_leaves

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Copier", "RandomState", "as_made"]


_REBUILT: tuple[Any, ...] = (collections.OrderedDict, dict, list, tuple, object)


def as_made(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Copies in here are made as the tensor was, under `torch.inference_mode()` or not.

    Compiled code is compiled anew for the other kind.
    """
    return torch.inference_mode(tensor.is_inference())


class Copier:
    """Copies tensors storage by storage: views of one storage stay views of one storage.

    Strides, overlaps and aliases among the arguments are part of what a program is given.
    """

    def __init__(self, *, widen: bool = False) -> None:
        """Copy as they are, or widened to float64."""
        self.widen = widen
        self.copies: dict[tuple[int, torch.dtype | None], torch.UntypedStorage] = {}

    def copy_tree(self, tree: Any) -> Any:
        """A tree of the same structure that shares nothing with the given one."""
        return map_leaves(tree, self._copy_leaf)

    def copy_tensor(self, tensor: Tensor) -> Tensor:
        """A leaf tensor with the same values, strides and requires_grad."""
        with as_made(tensor):
            return self._copy_tensor(tensor)

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        plain = tensor.detach()
        dtype = WIDE.get(plain.dtype, plain.dtype) if self.widen else plain.dtype
        if _is_plain(tensor) and self._is_alone(plain, dtype):
            result = plain.clone()
            self.copies[plain.data_ptr(), None] = result.untyped_storage()
        elif _is_plain(tensor):
            result = torch.empty(0, dtype=dtype, device=plain.device).set_(
                self._storage(plain), plain.storage_offset(), plain.shape, plain.stride()
            )
            # The storage holds a lazily conjugated or negated value as it was before that.
            result = result.conj() if plain.is_conj() else result
            result = result.neg_() if plain.is_neg() else result
        else:
            result = self._copy_whole(plain, dtype)
        result.requires_grad_(tensor.requires_grad)
        if tensor.is_leaf and tensor.grad is not None:
            result.grad = self.copy_tensor(tensor.grad)
        return result

    def _copy_whole(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Copy what is not dense; a class that cannot be cloned is rebuilt around copied parts."""
        try:
            return tensor.clone().to(dtype)
        except Exception as error:
            cls: Any = type(tensor)
            flatten = getattr(tensor, "__tensor_flatten__", None)
            if flatten is None:
                message = f"an input of class {cls.__name__} cannot be copied: {error}"
                raise UsageError(message) from error
            names, context = flatten()
            inner = {name: self.copy_tensor(getattr(tensor, name)) for name in names}
            rebuilt: Tensor = cls.__tensor_unflatten__(
                inner, context, tensor.shape, tensor.stride()
            )
            return rebuilt

    def _is_alone(self, tensor: Tensor, dtype: torch.dtype) -> bool:
        """Whether a tensor is all there is in its storage, and not copied yet: the quick case."""
        return (
            dtype is tensor.dtype
            and tensor.is_contiguous()
            and tensor.storage_offset() == 0
            and not (tensor.is_conj() or tensor.is_neg())
            and tensor.untyped_storage().nbytes() == tensor.nbytes
            and tensor.numel() > 0
            and (tensor.data_ptr(), None) not in self.copies
        )

    def _copy_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.copy_tensor(leaf)
        is_mutable = isinstance(leaf, np.ndarray | set | bytearray) or parts(leaf) is not None
        if not is_mutable or callable(leaf):
            return leaf
        # An object of a class we do not know, a cache for one: its tensors are copied as all are.
        tensors = [part for _, part in contents(leaf) if isinstance(part, torch.Tensor)]
        memo = {id(tensor): self.copy_tensor(tensor) for tensor in tensors}
        try:
            return copy.deepcopy(leaf, memo)
        except Exception:  # noqa: BLE001  (a lock inside it, say, or a method that refuses)
            return self._rebuild(leaf, memo)

    def _rebuild(self, value: Any, made: dict[int, Any]) -> Any:
        """Copy an object attribute by attribute; what has no content to copy stays shared."""
        if id(value) in made:
            return made[id(value)]
        if isinstance(value, np.ndarray | set | bytearray):
            return copy.copy(value)
        known = parts(value)
        cls: Any = type(value)
        base = next((kind for kind in _REBUILT if issubclass(cls, kind)), None)
        if known is None or base is None or callable(value):
            return value
        if base is tuple:
            return tuple.__new__(cls, [self._rebuild(one, made) for one in tuple.__iter__(value)])
        rebuilt = made[id(value)] = base.__new__(cls)
        if base is list:
            list.extend(rebuilt, [self._rebuild(one, made) for one in list.__iter__(value)])
        elif base is not object:
            for key, one in dict.items(value):
                base.__setitem__(rebuilt, key, self._rebuild(one, made))
        for name, one in attributes(value):
            object.__setattr__(rebuilt, name, self._rebuild(one, made))
        return rebuilt

    def _storage(self, tensor: Tensor) -> torch.UntypedStorage:
        """The copied storage; widened, every number of it takes twice or more the room."""
        storage = tensor.untyped_storage()
        # A complex number is two reals: both views of one storage widen to views of one storage.
        real = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
        wide = WIDE.get(real) if self.widen else None
        key = (storage.data_ptr() or id(tensor), real if wide else None)
        if key not in self.copies:
            if wide is None:
                self.copies[key] = storage.clone()
            else:
                flat = torch.empty(0, dtype=real, device=tensor.device)
                count = storage.nbytes() // real.itemsize
                flat = flat.set_(storage, 0, (count,), (1,))
                self.copies[key] = flat.to(wide).untyped_storage()
        return self.copies[key]


@dataclasses.dataclass(frozen=True)
class RandomState:
    """The state of every random generator a program may draw from."""

    cpu: Tensor
    devices: tuple[Tensor, ...]
    python: Any = None
    numpy: Any = None

    @classmethod
    def now(cls) -> RandomState:
        """Take the current state."""
        devices = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else ()
        return cls(torch.get_rng_state(), devices, random.getstate(), np.random.get_state())  # noqa: NPY002

    @classmethod
    def of_torch(cls) -> RandomState:
        """Take the state of torch's own generators alone: graphs draw from no other."""
        devices = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else ()
        return cls(torch.get_rng_state(), devices)

    def restore(self) -> None:
        """Make it the current state."""
        torch.set_rng_state(self.cpu)
        if self.devices:
            torch.cuda.set_rng_state_all(list(self.devices))
        if self.python is None:
            return
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002

    def same_torch(self, other: RandomState) -> bool:
        """Whether torch's generators stand at the same place."""
        return torch.equal(self.cpu, other.cpu) and all(
            torch.equal(a, b) for a, b in zip(self.devices, other.devices, strict=True)
        )


def _is_plain(tensor: Tensor) -> bool:
    kinds = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
    strided = tensor.layout is torch.strided and not tensor.is_quantized
    return type(tensor) in kinds and strided
