"""The dtype of what a program makes without stating one.

Torch has one default for the whole process: while it is changed, every thread's `torch.ones(3)` is
of another dtype. So a lifted run states float64 call by call, where a mode can see that the default
would decide; the default itself is changed only for programs that ask it where no mode looks.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch._ops import OpOverload

__all__ = ["default_dtype", "is_of_default", "own_default", "stated", "takes_dtype"]

# What was in force before each change of the default dtype that is not over yet, of all threads.
_defaults: list[torch.dtype] = []
_lock = threading.Lock()

# By call signature: the dtype of the results, where it is the default that decides it.
_decided: dict[tuple[Any, ...], torch.dtype | None] = {}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Another default dtype for a while, in all threads.

    Where threads overlap in here, what the last one restores has to be what the first one found,
    or the other dtype would stay for good.
    """
    with _lock:
        _defaults.append(torch.get_default_dtype())
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        with _lock:
            torch.set_default_dtype(_defaults.pop())


def own_default() -> torch.dtype:
    """The default dtype of the process, whatever another thread's check has made of it just now."""
    with _lock:
        return _defaults[0] if _defaults else torch.get_default_dtype()


def is_of_default(fresh: Tensor, default: torch.dtype) -> bool:
    """Whether the default dtype may have decided what a tensor made of numbers is.

    A mode hears of `torch.tensor(0.1)` when it is made: rounded to the default dtype, for good.
    """
    dtype = fresh.dtype
    return bool(dtype == (default.to_complex() if dtype.is_complex else default))


def stated(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call without a floating tensor, such that its floats are float64.

    Only for operators that neither draw nor write: what it gives is found out by calling it.
    """
    if kwargs.get("dtype") is not None:
        return args, kwargs
    key = (func, *_signature(args), *_signature(sorted(kwargs.items())))
    if key not in _decided:
        _decided[key] = _floating_result(func, args, kwargs)
    dtype = _decided[key]
    if dtype is None:
        return args, kwargs
    if takes_dtype(func):
        return args, {**kwargs, "dtype": dtype}
    # Torch itself turns integers into floats of the default dtype before it computes.
    return _in_floats(args), {name: _in_floats(value) for name, value in kwargs.items()}


def takes_dtype(func: OpOverload) -> bool:
    """Whether an operator can be told the dtype of its result."""
    return any(argument.name == "dtype" for argument in func._schema.arguments)


def _floating_result(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.dtype | None:
    if "device" in kwargs:  # made from nothing: its size does not matter here
        kwargs = {**kwargs, "device": torch.device("meta")}
        kwargs.pop("pin_memory", None)
    with _disable_current_modes():
        result = func(*args, **kwargs)
    for item in result if isinstance(result, list | tuple) else [result]:
        if isinstance(item, torch.Tensor) and item.is_complex():
            return torch.complex128
        if isinstance(item, torch.Tensor) and item.is_floating_point():
            return torch.float64
    return None


def _signature(values: Any) -> Iterator[Any]:
    """What decides the dtype of a result: kinds of numbers and dtypes, no values."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield (value.dtype, value.dim() == 0)
        elif isinstance(value, list | tuple):
            yield tuple(_signature(value))
        else:
            yield value if isinstance(value, str | torch.dtype) else type(value)


def _in_floats(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(torch.float64)
    if isinstance(value, list | tuple):
        return type(value)(_in_floats(item) for item in value)
    return value
