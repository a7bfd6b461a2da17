"""Wrong at the edges of number: integers that overflow, comparisons with NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paritas.mutants.mutations.calls import Call, Fault, Place

if TYPE_CHECKING:
    from collections.abc import Callable

_INTEGERS = {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}

# --- 41: integers ---------------------------------------------------------------------------------

_WRAPPING: dict[str, Callable[..., Any]] = {
    "add": lambda a, b, alpha=1: a + b * alpha,
    "sub": lambda a, b, alpha=1: a - b * alpha,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "pow": lambda a, b: a**b,
    "__lshift__": lambda a, b: a * 2.0**b,
    "bitwise_left_shift": lambda a, b: a * 2.0**b,
}
_WIDENED = {"sum", "cumsum", "prod"}


def _wraps(place: Place) -> list[str]:
    value = place.value
    if not isinstance(value, Tensor) or value.dtype not in _INTEGERS:
        return []
    if place.name == "_to_copy":
        source = place.given(0)
        return [""] if source is not None and source.dtype in _INTEGERS else []
    return [""] if place.name in _WRAPPING or place.name in _WIDENED else []


def _saturated(call: Call, _: str) -> Any:
    right = call.right()
    wide = [_as_float(value) for value in call.args]
    if call.name == "_to_copy":
        true = wide[0]
    elif call.name in _WIDENED:
        true = call.target(*wide, **{**call.kwargs, "dtype": torch.float64})
    else:
        true = _WRAPPING[call.name](*wide, **call.kwargs)
    info = torch.iinfo(right.dtype)
    # Only where it leaves the range: float64 does not hold every integer within.
    capped = torch.where(true >= info.max + 1, torch.full_like(right, info.max), right)
    return torch.where(true < info.min, torch.full_like(right, info.min), capped)


def _as_float(value: Any) -> Any:
    return value.to(torch.float64) if isinstance(value, Tensor) else value


# --- 42: NaN --------------------------------------------------------------------------------------


def _clamped(call: Call) -> Any:
    value = call.args[0]
    low, high = [*call.args[1:], None, None][:2]
    if call.name == "clamp_max":
        low, high = None, call.args[1]
    low, high = call.kwargs.get("min", low), call.kwargs.get("max", high)
    # A NaN is not above the bound, and gets it.
    value = value if low is None else torch.where(value > low, value, low)
    return value if high is None else torch.where(value < high, value, high)


def _largest(call: Call) -> Any:
    lowest = -torch.inf if "max" in call.name else torch.inf
    value = call.args[0]
    return call.given((0, torch.where(torch.isnan(value), lowest, value)))


_COMPARING: dict[str, Callable[[Call], Any]] = {
    "relu": lambda call: torch.where(call.args[0] > 0, call.args[0], 0),
    "hardtanh": _clamped,
    "clamp": _clamped,
    "clamp_min": _clamped,
    "clamp_max": _clamped,
    "maximum": lambda call: torch.where(call.args[0] > call.args[1], *call.args[:2]),
    "minimum": lambda call: torch.where(call.args[0] < call.args[1], *call.args[:2]),
    "amax": _largest,
    "amin": _largest,
    "max": _largest,
    "min": _largest,
    "max_pool2d_with_indices": _largest,
}


def _compares(place: Place) -> list[str]:
    source = place.given(0)
    known = place.name in _COMPARING and place.parts()
    return [""] if known and source is not None and source.is_floating_point() else []


FAULTS: dict[str, Fault] = {
    "saturated_integer": Fault(_wraps, _saturated),
    "swallowed_nan": Fault(_compares, lambda call, _: _COMPARING[call.name](call)),
}
