"""What a call can change in the process around it: torch's settings, generators, patched functions.

None of it belongs to a program, and all of it changes what every program computes afterwards. It is
read before a call and put back after it, at once: our own code must not run on a `torch.equal` that
the candidate has replaced.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import math
import operator
import random
import types
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["ProcessState"]


@dataclasses.dataclass(frozen=True)
class _Setting:
    """One setting of the process.

    Attributes:
        name: as a user knows it.
        get: gives its value.
        write: sets it.
    """

    name: str
    get: Callable[[], Any]
    write: Callable[[Any], Any]

    def read(self) -> Any:
        """Its value, or None where torch cannot say: of two ways to allow TF32, both were used."""
        try:
            return self.get()
        except RuntimeError:
            return None


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _set_default_device(device: torch.device) -> None:
    # The CPU is what is in force where nobody has set anything.
    torch.set_default_device(None if device == torch.device("cpu") else device)


def _attribute(owner: Any, name: str, label: str) -> _Setting:
    return _Setting(
        label, functools.partial(getattr, owner, name), functools.partial(setattr, owner, name)
    )


def _autocast(device: str) -> list[_Setting]:
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
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    return (name, np.asarray(keys).tobytes(), *rest)


def _set_numpy_state(state: Any) -> None:
    name, keys, *rest = state
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))  # noqa: NPY002


_SETTINGS: tuple[_Setting, ...] = (
    _Setting("torch.get_default_dtype()", torch.get_default_dtype, torch.set_default_dtype),
    _Setting("torch.get_default_device()", torch.get_default_device, _set_default_device),
    _Setting("torch.is_grad_enabled()", torch.is_grad_enabled, torch.set_grad_enabled),
    *_autocast("cpu"),
    *_autocast("cuda"),
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
    _attribute(torch.backends.cudnn, "enabled", "torch.backends.cudnn.enabled"),
    _attribute(torch.backends.cudnn, "benchmark", "torch.backends.cudnn.benchmark"),
    _attribute(torch.backends.cudnn, "deterministic", "torch.backends.cudnn.deterministic"),
    _attribute(torch.backends.cudnn, "allow_tf32", "torch.backends.cudnn.allow_tf32"),
    _attribute(torch.backends.cuda.matmul, "allow_tf32", "torch.backends.cuda.matmul.allow_tf32"),
    _Setting(
        "torch.backends.cuda.enable_flash_sdp",
        torch.backends.cuda.flash_sdp_enabled,
        torch.backends.cuda.enable_flash_sdp,
    ),
    _Setting(
        "torch.backends.cuda.enable_mem_efficient_sdp",
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    _Setting(
        "torch.backends.cuda.enable_math_sdp",
        torch.backends.cuda.math_sdp_enabled,
        torch.backends.cuda.enable_math_sdp,
    ),
    _Setting("Python's random state", random.getstate, random.setstate),
    _Setting("NumPy's random state", _numpy_state, _set_numpy_state),
)

# Functions that programs, and we, call by their names.
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

# As they are before a candidate may replace them.
_all, _is, _len, _map = all, operator.is_, len, map

# The state of a random generator is longer.
_LONGEST_VALUE = 40


class ProcessState:
    """The settings and the functions of the process as they were at one moment."""

    def __init__(self) -> None:
        """Read them now."""
        self._settings = [(setting, setting.read()) for setting in _SETTINGS]
        self._names = [(space, dict(vars(space))) for space in _NAMESPACES]

    def put_back(self) -> dict[str, str]:
        """Put back what is no longer as it was, and say what that is: name -> what it became."""
        changed: dict[str, str] = {}
        for space, names in self._names:
            if _is_same(names, vars(space)):
                continue
            before, now = _functions(names), _functions(vars(space))
            for name in {**before, **now}:
                same = now.get(name) is before.get(name)
                if same or _is_torchs_doing(vars(space).get(name)):
                    continue
                if name in names:  # maybe a class, in whose place there is a function now
                    setattr(space, name, names[name])
                else:
                    delattr(space, name)  # in front of one that the class inherits
                changed[_full_name(space, name)] = "replaced"
        for setting, value in self._settings:
            now = setting.read()
            if now != value:
                setting.write(value)
                changed[setting.name] = _shown(now)
        return changed


def _is_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether all names stand for the very same things: nearly always, and quickly seen."""
    if _len(before) != _len(now):
        return False
    names, values = _map(_is, before, now), _map(_is, before.values(), now.values())
    return _all(names) and _all(values)


def _functions(names: Mapping[str, Any]) -> dict[str, Any]:
    kinds = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)
    return {name: value for name, value in names.items() if isinstance(value, kinds)}


def _is_torchs_doing(function: Any) -> bool:
    """Whether torch's compiler has put its own function there, as it does when it is loaded."""
    module = str(getattr(function, "__module__", ""))
    return module.startswith(("torch._dynamo", "torch._inductor", "torch._functorch"))


def _full_name(space: Any, name: str) -> str:
    is_class = isinstance(space, type)
    parent = f"{space.__module__}.{space.__qualname__}" if is_class else space.__name__
    return f"{parent}.{name}"


def _shown(value: Any) -> str:
    text = repr(value)
    if len(text) <= _LONGEST_VALUE:
        return f"set to {text}"
    # Two sides that draw other numbers leave other states.
    return f"moved on to state {zlib.crc32(text.encode()):08x}"
