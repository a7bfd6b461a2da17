"""Wrong precision: a narrower dtype inside, another dtype outside."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from paritas.mutants.mutations.calls import Call, Fault, Place, part_of

# What a careless kernel computes in.
_NARROWER = {
    torch.float64: torch.float32,
    torch.float32: torch.bfloat16,
    torch.bfloat16: torch.float8_e4m3fn,
    torch.float16: torch.float8_e4m3fn,
}
_OTHER = {
    torch.float64: torch.float32,
    torch.float32: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.int64: torch.int32,
    torch.int32: torch.int64,
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*_NARROWER.values(), *_OTHER)}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_in(detail: str) -> torch.dtype:
    return _DTYPES[detail.rsplit(" ", 1)[1]]


# --- 27: inside -----------------------------------------------------------------------------------


def _narrowable(place: Place) -> list[str]:
    if not (place.computes and place.kind.rounds):
        return []
    dtypes = {part.dtype for _, part in place.parts()}
    # Which one is said here, since a run in float64 does not know what the program ran in.
    return [f"in {_name(_NARROWER[dtype])}" for dtype in dtypes if dtype in _NARROWER][:1]


def _narrowed(call: Call, detail: str) -> Any:
    narrow = _dtype_in(detail)

    def cast(value: Tensor) -> Tensor:
        limit = torch.finfo(narrow).max
        # As such casts are written: what is too large stops at the largest number there is.
        kept = value.clamp(-limit, limit) if narrow is torch.float8_e4m3fn else value
        return kept.to(narrow).to(value.dtype)

    return _through(call, cast)


def _rounded(call: Call, detail: str) -> Any:
    """The same by arithmetic: a float64 run would undo a cast."""
    info = torch.finfo(_dtype_in(detail))

    def cast(value: Tensor) -> Tensor:
        limit = value.clamp(-info.max, info.max) if info.bits == 8 else value  # noqa: PLR2004
        _, exponent = torch.frexp(limit)
        smallest = round(math.log2(info.tiny)) + 1
        step = torch.ldexp(torch.full_like(limit, info.eps), exponent.clamp(min=smallest) - 1)
        rounded = torch.mul(torch.round(torch.div(limit, step)), step)
        return torch.where(torch.isfinite(limit), rounded, limit)

    return _through(call, cast)


def _through(call: Call, cast: Any) -> Any:
    """The call with every float that goes in or comes out cast."""

    def each(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return cast(value)
        return [each(item) for item in value] if isinstance(value, list | tuple) else value

    written = call.writes
    given = [value if i in written else each(value) for i, value in enumerate(call.args)]
    result = call.given(*enumerate(given))
    return cast(result) if isinstance(result, Tensor) else tuple(each(result))


# --- 31: outside ----------------------------------------------------------------------------------


def _outputs(place: Place) -> list[str]:
    if place.kind.mutates or place.kind.view or not place.only_given_back:
        return []
    found = []
    for part, part_value in place.parts(floating=False):
        dtype = part_value.dtype
        key = part_of(part) if part else None
        if key in place.ends and dtype in _OTHER:
            found.append(", ".join(filter(None, [part, f"as {_name(_OTHER[dtype])}"])))
    return found


def _in_other_dtype(call: Call, detail: str) -> Any:
    return call.spoil(detail, lambda part: part.to(_dtype_in(detail)))


FAULTS: dict[str, Fault] = {
    "internal_downcast": Fault(_narrowable, _narrowed, exact=_rounded),
    "output_dtype": Fault(_outputs, _in_other_dtype),
}
