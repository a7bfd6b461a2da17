"""State that can be restored: copies of arguments, random states, the settings of the process.

Copies keep strides and aliases. The state of a program is in `isolation`.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import copy
import ctypes
import dataclasses
import functools
import math
import operator
import pickle
import random
import sys
import types
import zlib
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.random import mtrand

from paritas.core.errors import UsageError
from paritas.core.numerics.contents import (
    attributes,
    contents,
    given_to_tensor,
    map_leaves,
    marks_of_dynamo,
    parts,
)
from paritas.core.torch_private.operators import WIDE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor


# --- Arguments and random generators --------------------------------------------------------------

_REBUILT: tuple[Any, ...] = (collections.OrderedDict, dict, list, tuple, object)


def made_like(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make tensors inside the block as inference tensors if and only if `tensor` is one.

    For the other kind, compiled code would be compiled again.
    """
    return torch.inference_mode(tensor.is_inference())


class Copier:
    """Copies tensors storage by storage: views of one storage stay views of one storage.

    What it copies twice stays one object, also if it is in an object the second time. Strides,
    overlaps, aliases and identities of arguments can change what a program computes.
    """

    def __init__(self, *, widen: bool = False) -> None:
        """Copy tensors unchanged, or widened to float64."""
        self.widen = widen
        self.copies: dict[tuple[int, torch.dtype | None], torch.UntypedStorage] = {}
        # By id; with the originals, which keep their ids taken.
        self._objects: dict[int, tuple[Any, Any]] = {}

    def copy_tree(self, tree: Any) -> Any:
        """A tree of the same structure that shares nothing with the given one."""
        return map_leaves(tree, self._copy_leaf)

    def copy_tensor(self, tensor: Tensor) -> Tensor:
        """A leaf tensor with the same values, strides and requires_grad."""
        if id(tensor) not in self._objects:
            with made_like(tensor):
                self._objects[id(tensor)] = tensor, self._copy_tensor(tensor)
        copied: Tensor = self._objects[id(tensor)][1]
        return copied

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        plain = tensor.detach()
        dtype = WIDE.get(plain.dtype, plain.dtype) if self.widen else plain.dtype
        if _is_plain_tensor(tensor) and self._is_alone(plain, dtype):
            result = plain.clone()
            self.copies[plain.data_ptr(), None] = result.untyped_storage()
        elif _is_plain_tensor(tensor):
            result = _no_elements(dtype, plain.device).set_(
                self._storage(plain), plain.storage_offset(), plain.shape, plain.stride()
            )
            # The storage of a lazily conjugated or negated tensor holds the value before that.
            result = result.conj() if plain.is_conj() else result
            result = result.neg_() if plain.is_neg() else result
        else:
            result = self._copy_whole(plain, dtype)
        if type(tensor) is torch.nn.Parameter:
            result = torch.nn.Parameter(result, requires_grad=tensor.requires_grad)
        result.requires_grad_(tensor.requires_grad)
        if tensor.is_leaf and tensor.grad is not None:
            result.grad = self.copy_tensor(tensor.grad)
        for name, value in given_to_tensor(tensor).items():
            setattr(result, name, self._copy_leaf(value))
        vars(result).update(marks_of_dynamo(tensor))
        return result

    def _copy_whole(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Copy a tensor that is not dense; if it cannot be cloned, rebuild it from copied parts."""
        try:
            return tensor.clone().to(dtype)
        except Exception as error:
            cls: Any = type(tensor)
            flatten = getattr(tensor, "__tensor_flatten__", None)
            if flatten is None:
                raise UsageError(
                    f"an input of class {cls.__name__} cannot be copied: {error}"
                ) from error
            names, context = flatten()
            inner = {name: self.copy_tensor(getattr(tensor, name)) for name in names}
            rebuilt: Tensor = cls.__tensor_unflatten__(
                inner, context, tensor.shape, tensor.stride()
            )
            return rebuilt

    def _is_alone(self, tensor: Tensor, dtype: torch.dtype) -> bool:
        """Whether a tensor fills its storage and is not copied yet: the fast case."""
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
        # An object of an unknown class, for example a cache: its tensors are copied like others.
        for _, part in contents(leaf):
            if isinstance(part, torch.Tensor):
                self.copy_tensor(part)
        memo = {key: copied for key, (_, copied) in self._objects.items()}
        if id(leaf) not in memo:
            self._objects[id(leaf)] = leaf, self._copy_object(leaf, memo)
        return self._objects[id(leaf)][1]

    def _copy_object(self, value: Any, memo: dict[int, Any]) -> Any:
        """Copy an object; `memo` has the copies of what is copied already, by id."""
        copies = dict(memo)  # it would also keep what is not finished there
        try:
            copied = copy.deepcopy(value, copies)
        except Exception:  # noqa: BLE001  (it may hold a lock, or a method may raise)
            return self._rebuild_or_refuse(value, memo)
        # By its own id, the memo has all originals, to keep them alive.
        for original in copies.pop(id(copies), ()):
            if id(original) in copies:
                self._objects[id(original)] = original, copies[id(original)]
        return copied

    def _rebuild_or_refuse(self, value: Any, rebuilt_by_id: dict[int, Any]) -> Any:
        try:
            return self._rebuild(value, rebuilt_by_id)
        except RecursionError:
            kind = type(value).__name__
            raise UsageError(
                f"an input of class {kind} cannot be copied: its objects refer to each other more "
                f"than {sys.getrecursionlimit()} levels deep"
            ) from None

    def _rebuild(self, value: Any, rebuilt_by_id: dict[int, Any]) -> Any:
        """Copy an object attribute by attribute; values without contents stay shared."""
        if id(value) in rebuilt_by_id:
            return rebuilt_by_id[id(value)]
        if isinstance(value, np.ndarray | set | bytearray):
            return copy.copy(value)
        value_parts = parts(value)
        cls: Any = type(value)
        base = next((kind for kind in _REBUILT if issubclass(cls, kind)), None)
        if value_parts is None or base is None or callable(value):
            return value
        if base is tuple:
            return tuple.__new__(
                cls, [self._rebuild(element, rebuilt_by_id) for element in tuple.__iter__(value)]
            )
        rebuilt = rebuilt_by_id[id(value)] = base.__new__(cls)
        if base is list:
            list.extend(
                rebuilt, [self._rebuild(element, rebuilt_by_id) for element in list.__iter__(value)]
            )
        elif base is not object:
            for key, part in dict.items(value):
                base.__setitem__(rebuilt, key, self._rebuild(part, rebuilt_by_id))
        for name, part in attributes(value):
            object.__setattr__(rebuilt, name, self._rebuild(part, rebuilt_by_id))
        return rebuilt

    def _storage(self, tensor: Tensor) -> torch.UntypedStorage:
        """The copied storage of a tensor, widened if requested."""
        storage = tensor.untyped_storage()
        # A complex number is two reals: a real and a complex view share their widened storage.
        real = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
        wide = WIDE.get(real) if self.widen else None
        key = (storage.data_ptr() or id(tensor), real if wide else None)
        if key not in self.copies:
            if wide is None:
                self.copies[key] = storage.clone()
            else:
                flat = _no_elements(real, tensor.device)
                count = storage.nbytes() // real.itemsize
                flat = flat.set_(storage, 0, (count,), (1,))
                self.copies[key] = flat.to(wide).untyped_storage()
        return self.copies[key]


def _no_elements(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor to be set to a storage; in another dtype, it would read beyond that."""
    empty_tensor = torch.empty(0, dtype=dtype, device=device)
    if empty_tensor.dtype is not dtype:
        raise RuntimeError(
            f"a mode makes {empty_tensor.dtype} of {dtype}: copy tensors outside of it"
        )
    return empty_tensor


class _NumpyState:
    """The state of NumPy's global generator, which takes long to read and to write.

    Its memory is read in no time, and shows whether the state is still the one that was read last.
    Only a second normal number that is kept for the next call is elsewhere; a state that has one is
    read each time. A generator that has none gets one by moving on.
    """

    _last: tuple[bytes | None, Any] = (None, None)

    @classmethod
    def read(cls) -> Any:
        """The current state, as `numpy.random.get_state` has it."""
        if not cls._is_at(cls._last[1]):
            cls._last = (_numpy_memory(), np.random.get_state())  # noqa: NPY002
        return cls._last[1]

    @classmethod
    def write(cls, state: Any) -> None:
        """Make it the current state."""
        if not cls._is_at(state):
            np.random.set_state(state)  # noqa: NPY002
            cls._last = (_numpy_memory(), state)

    @classmethod
    def _is_at(cls, state: Any) -> bool:
        memory, last = cls._last
        if memory is None or state is not last:
            return False
        keeps_one = bool(state[3])
        return not keeps_one and memory == _numpy_memory()


def _numpy_memory() -> bytes | None:
    """The memory of NumPy's global generator: 624 words and a position; None for another kind."""
    generator = mtrand.get_bit_generator()
    if type(generator) is not np.random.MT19937:
        return None
    return ctypes.string_at(generator.ctypes.state_address, 625 * 4)


@dataclasses.dataclass(frozen=True)
class RandomState:
    """The state of every random generator a program may draw from."""

    cpu: Tensor
    devices: tuple[Tensor, ...]
    python: Any = None
    numpy: Any = None

    @classmethod
    def now(cls) -> RandomState:
        """Read the current state."""
        devices = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else ()
        return cls(torch.get_rng_state(), devices, random.getstate(), _NumpyState.read())

    @classmethod
    def of_torch(cls) -> RandomState:
        """Read the state of torch's own generators only: graphs draw from no others."""
        devices = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else ()
        return cls(torch.get_rng_state(), devices)

    def after_call(self) -> RandomState:
        """The state after a call whose effects on Python and NumPy were undone: see `put_back`."""
        return dataclasses.replace(RandomState.of_torch(), python=self.python, numpy=self.numpy)

    def elsewhere(self, seed: int) -> RandomState:
        """A state in which every generator draws other numbers."""
        seed = zlib.crc32(self.cpu.numpy().tobytes(), seed)
        devices = tuple(
            torch.Generator(f"cuda:{number}").manual_seed(seed).get_state()
            for number in range(len(self.devices))
        )
        cpu = torch.Generator().manual_seed(seed).get_state()
        if self.python is None:
            return RandomState(cpu, devices)
        numpy = np.random.RandomState(seed).get_state()
        return RandomState(cpu, devices, random.Random(seed).getstate(), numpy)

    def restore(self) -> None:
        """Make it the current state."""
        torch.set_rng_state(self.cpu)
        if self.devices:
            torch.cuda.set_rng_state_all(list(self.devices))
        if self.python is None:
            return
        random.setstate(self.python)
        _NumpyState.write(self.numpy)

    def same_torch(self, other: RandomState) -> bool:
        """Whether torch's generators have the same states."""
        return torch.equal(self.cpu, other.cpu) and all(
            torch.equal(a, b) for a, b in zip(self.devices, other.devices, strict=True)
        )


def _is_plain_tensor(tensor: Tensor) -> bool:
    kinds = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
    strided = tensor.layout is torch.strided and not tensor.is_quantized
    return type(tensor) in kinds and strided


def generator_state(generator: Any) -> bytes:
    """The state of a generator of torch, Python or NumPy, as bytes that can be compared."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return pickle.dumps(random.Random.getstate(generator))
    state = generator.get_state() if hasattr(generator, "get_state") else None
    return pickle.dumps(generator.bit_generator.state if state is None else state)


def set_generator_state(generator: Any, state: bytes) -> None:
    """Put a generator into a state that `generator_state` has read."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        return
    # Written by `generator_state` in this process.
    loaded_state = pickle.loads(state)  # noqa: S301
    if isinstance(generator, random.Random):
        random.Random.setstate(generator, loaded_state)
    elif hasattr(generator, "set_state"):
        generator.set_state(loaded_state)
    else:
        generator.bit_generator.state = loaded_state


# --- The process around a call: settings, generators, patched functions ---------------------------

# These do not belong to a program, but change what every program computes afterwards. They are read
# before a call and restored right after it: our own code must not use a `torch.equal` that the
# candidate has replaced.


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """The modes of torch around a call, which change what it computes.

    Attributes:
        grad: whether gradients are recorded.
        autocast: kind of device -> whether autocast is on, and its dtype.
    """

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls) -> Self:
        """The present ones."""
        kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        autocast = tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
        )
        return cls(torch.is_grad_enabled(), autocast)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Set them."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, is_on, dtype in self.autocast:
                if is_on or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, enabled=is_on))
            yield


@dataclasses.dataclass(frozen=True)
class _Setting:
    """One setting of the process.

    Attributes:
        name: its name for users.
        get: reads its value.
        write: sets its value.
    """

    name: str
    get: Callable[[], Any]
    write: Callable[[Any], Any]

    def read(self) -> Any:
        """Its value, or None if torch raises, as when both APIs to allow TF32 were used."""
        try:
            return self.get()
        except RuntimeError:
            return None


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _set_default_device(device: torch.device) -> None:
    # The CPU is the default if no device was set.
    torch.set_default_device(None if device == torch.device("cpu") else device)


def _set_inference_mode(value: bool) -> None:  # noqa: FBT001
    # It lasts as long as the context, and ends with it.
    context = torch.inference_mode(value)
    context.__enter__()
    _ENTERED_FOR_GOOD.append(context)


_ENTERED_FOR_GOOD: list[Any] = []
_SMALLEST = [5e-324]  # in a list, so that Python does not multiply beforehand


def _keeps_denormal() -> bool:
    """Whether the processor keeps numbers that are too small to be normal; torch does not say."""
    return _SMALLEST[0] * 1.0 != 0.0


# Module in torch.backends -> its attributes that are settings.
_BACKEND_ATTRIBUTES = {
    "cudnn": ("enabled", "benchmark", "deterministic", "allow_tf32"),
    "cuda.matmul": (
        "allow_tf32",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    ),
    "mkldnn": ("enabled",),
    "opt_einsum": ("enabled",),
}


def _attribute_setting(path: str, name: str) -> _Setting:
    owner = operator.attrgetter(path)(torch.backends)
    get, write = functools.partial(getattr, owner, name), functools.partial(setattr, owner, name)
    return _Setting(f"torch.backends.{path}.{name}", get, write)


def _autocast_settings(device: str) -> list[_Setting]:
    return [
        _Setting(
            f"torch.is_autocast_enabled({device!r})",
            functools.partial(torch.is_autocast_enabled, device),
            functools.partial(torch.set_autocast_enabled, device),
        ),
        _Setting(
            f"torch.get_autocast_dtype({device!r})",
            functools.partial(torch.get_autocast_dtype, device),
            functools.partial(torch.set_autocast_dtype, device),
        ),
    ]


def _numpy_state() -> Any:
    return _comparable(_NumpyState.read())


def _comparable(numpy_state: Any) -> Any:
    name, keys, *rest = numpy_state
    return (name, np.asarray(keys).tobytes(), *rest)


def _set_numpy_state(state: Any) -> None:
    name, keys, *rest = state
    _NumpyState.write((name, np.frombuffer(keys, dtype=np.uint32), *rest))


_SETTINGS: tuple[_Setting, ...] = (
    _Setting("torch.get_default_dtype()", torch.get_default_dtype, torch.set_default_dtype),
    _Setting("torch.get_default_device()", torch.get_default_device, _set_default_device),
    # This one sets the grad mode too, so it comes first.
    _Setting(
        "torch.is_inference_mode_enabled()", torch.is_inference_mode_enabled, _set_inference_mode
    ),
    _Setting("torch.is_grad_enabled()", torch.is_grad_enabled, torch.set_grad_enabled),
    *_autocast_settings("cpu"),
    *_autocast_settings("cuda"),
    _Setting(
        "torch.is_autocast_cache_enabled()",
        torch.is_autocast_cache_enabled,
        torch.set_autocast_cache_enabled,
    ),
    _Setting(
        "torch.set_flush_denormal",
        lambda: not _keeps_denormal(),
        torch.set_flush_denormal,
    ),
    _Setting(
        "torch.use_deterministic_algorithms",
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        _set_deterministic,
    ),
    _Setting(
        "torch.get_float32_matmul_precision()",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    _Setting("torch.get_num_threads()", torch.get_num_threads, torch.set_num_threads),
    _Setting(
        "torch.is_anomaly_enabled()", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly
    ),
    *(
        _attribute_setting(path, name)
        for path, names in _BACKEND_ATTRIBUTES.items()
        for name in names
    ),
    _Setting(
        "torch.backends.mha.get_fastpath_enabled()",
        torch.backends.mha.get_fastpath_enabled,
        torch.backends.mha.set_fastpath_enabled,
    ),
    *(
        _Setting(
            f"torch.backends.cuda.enable_{kind}_sdp",
            getattr(torch.backends.cuda, f"{kind}_sdp_enabled"),
            getattr(torch.backends.cuda, f"enable_{kind}_sdp"),
        )
        for kind in ("flash", "mem_efficient", "cudnn", "math")
    ),
)
_PYTHON_RANDOM = _Setting("Python's random state", random.getstate, random.setstate)
_NUMPY_RANDOM = _Setting("NumPy's random state", _numpy_state, _set_numpy_state)

# Namespaces with functions that programs and paritas call by name.
_NAMESPACES: tuple[Any, ...] = (
    torch,
    torch.nn.functional,
    torch.linalg,
    torch.fft,
    torch.special,
    torch.autograd,
    torch.Tensor,
    torch.nn.Module,
    math,
    builtins,
)
# Of these, only `forward` is compared: they are many.
_MODULES: tuple[Any, ...] = tuple(
    member
    for member in vars(torch.nn).values()
    if isinstance(member, type) and "forward" in vars(member)
)
_MODULE_CONTENTS = [vars(module) for module in _MODULES]

# Bound before a candidate can replace them.
_all, _is, _len, _map, _zip = all, operator.is_, len, map, zip

# Longer values, such as the state of a random generator, are shown as a checksum.
_LONGEST_VALUE = 40


class ProcessState:
    """The settings and the functions of the process at one moment."""

    def __init__(self, drawn: RandomState | None = None) -> None:
        """Read them now; `drawn` is the current state of all generators, if it was read before."""
        self._settings = [(setting, setting.read()) for setting in _SETTINGS]
        at = RandomState.now() if drawn is None or drawn.python is None else drawn
        self._settings += [(_PYTHON_RANDOM, at.python), (_NUMPY_RANDOM, _comparable(at.numpy))]
        # As lists, which are quicker to make and to compare than dictionaries.
        self._names = [(space, [*vars(space)], [*vars(space).values()]) for space in _NAMESPACES]
        self._forwards = _forwards_now()

    def put_back(self) -> dict[str, str]:
        """Restore what has changed; returns name -> how it had changed."""
        changed: dict[str, str] = {}
        for space, keys, values in self._names:
            if _are_same_names(keys, values, vars(space)):
                continue
            names = dict(zip(keys, values, strict=True))
            before, now = _functions_among(names), _functions_among(vars(space))
            for name in {**before, **now}:
                same = now.get(name) is before.get(name)
                if same or _is_put_by_compiler(vars(space).get(name)):
                    continue
                if name in names:  # it may have been a class
                    setattr(space, name, names[name])
                else:
                    delattr(space, name)  # it hides an inherited function
                changed[_full_name(space, name)] = "replaced"
        forwards = _forwards_now()
        if not _all(_map(_is, forwards, self._forwards)):
            for module, now, forward in _zip(_MODULES, forwards, self._forwards):
                if now is not forward and not _is_put_by_compiler(now):
                    module.forward = forward
                    changed[_full_name(module, "forward")] = "replaced"
        for setting, value in self._settings:
            now = setting.read()
            if now != value:
                setting.write(value)
                changed[setting.name] = _describe_setting(now)
        return changed


def _forwards_now() -> list[Any]:
    return [names.get("forward") for names in _MODULE_CONTENTS]


def _are_same_names(keys: list[str], values: list[Any], now: Mapping[str, Any]) -> bool:
    """Whether all names refer to the same objects: the usual case, and quick to check."""
    if _len(keys) != _len(now):
        return False
    return keys == [*now] and _all(_map(_is, values, now.values()))


def _functions_among(names: Mapping[str, Any]) -> dict[str, Any]:
    kinds = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)
    return {name: value for name, value in names.items() if isinstance(value, kinds)}


def _is_put_by_compiler(function: Any) -> bool:
    """Whether torch's compiler has installed its own function, as it does when it is loaded."""
    module = str(getattr(function, "__module__", ""))
    return module.startswith(("torch._dynamo", "torch._inductor", "torch._functorch"))


def _full_name(space: Any, name: str) -> str:
    is_class = isinstance(space, type)
    parent = f"{space.__module__}.{space.__qualname__}" if is_class else space.__name__
    return f"{parent}.{name}"


def _describe_setting(value: Any) -> str:
    text = repr(value)
    if len(text) <= _LONGEST_VALUE:
        return f"set to {text}"
    # The checksum distinguishes two sides that draw different numbers.
    return f"moved on to state {zlib.crc32(text.encode()):08x}"
