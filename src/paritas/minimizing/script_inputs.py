"""Inputs as lines of code: a formula or a short list if there is one, a file otherwise."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import torch
from torch import Tensor

from paritas.errors import UsageError
from paritas.graphs.scripts.storing import is_storable, stored_form, taken_back

__all__ = ["InputLines", "input_lines"]

# A list of so many numbers can still be read.
_LISTED = 64


@dataclasses.dataclass(frozen=True)
class InputLines:
    """How a script gets its inputs.

    Attributes:
        expressions: one for each input.
        stored: tensors that have to be put into a file, by name.
    """

    expressions: tuple[str, ...]
    stored: dict[str, Tensor]


def input_lines(names: list[str], values: tuple[Any, ...]) -> InputLines:
    """Write each input as an expression; `stored` holds those that have none.

    Raises:
        UsageError: one is of a dtype that no file holds.
    """
    expressions, stored = [], {}
    for position, (name, value) in enumerate(zip(names, values, strict=True)):
        if not isinstance(value, Tensor):
            expressions.append(repr(value))
            continue
        if not is_storable(value.dtype):
            raise UsageError(
                f"input {name!r} is of dtype {value.dtype}, of which a script can neither write "
                "nor store the values; make such tensors inside the program"
            )
        text = _expression(value.detach(), position)
        if text is None:
            stored[name] = stored_form(value)
            text = taken_back(f"stored[{name!r}]", value.dtype)
        text = _laid_out(text, value)
        if value.device.type != "cpu":
            text += f".to({str(value.device)!r})"
        expressions.append(text + (".requires_grad_()" if value.requires_grad else ""))
    return InputLines(tuple(expressions), stored)


def _expression(value: Tensor, position: int) -> str | None:
    value = value.cpu()
    shape = ", ".join(map(str, value.shape))
    for text in _formulas(value, shape, position):
        if _gives(text, value):
            return text
    if value.numel() <= _LISTED and not value.is_quantized:
        text = f"torch.tensor({_listed(value.tolist())}, dtype={value.dtype})"
        return text if value.numel() and _gives(text, value) else None
    return None


def _formulas(value: Tensor, shape: str, position: int) -> list[str]:
    if value.numel() == 0:
        return [f"torch.empty({tuple(value.shape)}, dtype={value.dtype})"]
    first = value.reshape(-1)[0].item()
    cast = "" if value.dtype == torch.float32 else f".to({value.dtype})"
    shaped = f".reshape({shape})" if value.dim() != 1 else ""
    count = value.numel()
    start = f"{position}, {position + count}" if position else f"{count}"
    texts = []
    if value.dtype == torch.bool or math.isfinite(abs(first)):
        texts.append(f"torch.full({tuple(value.shape)}, {first!r}, dtype={value.dtype})")
    if value.is_floating_point():
        drawn = f"torch.randn({shape}{', ' if shape else '(), '}"
        drawn += f"generator=torch.Generator().manual_seed({position})){cast}"
        texts.append(f"(torch.arange({start}) % 7 - 3).to({value.dtype}){shaped}")
        texts.append(drawn)
    elif not value.is_complex() and value.dtype != torch.bool:
        texts.append(f"torch.arange({count}, dtype={value.dtype}){shaped}")
    return texts if count > 1 else texts[:1]


def _gives(text: str, value: Tensor) -> bool:
    """Whether an expression that we wrote gives these bits."""
    try:
        made = eval(text, {"torch": torch})  # noqa: S307  (ours)
    except (RuntimeError, TypeError, ValueError, SyntaxError):
        return False
    if made.dtype != value.dtype or made.shape != value.shape:
        return False
    same = made.contiguous().reshape(-1).view(torch.uint8)
    return torch.equal(same, value.contiguous().reshape(-1).view(torch.uint8))


def _listed(value: Any) -> str:
    """Numbers as Python spells them; `repr` of a float is exact."""
    return re.sub(r"\b(nan|inf)\b", r'float("\1")', repr(value))


def _laid_out(text: str, value: Tensor) -> str:
    if value.is_contiguous():
        return text
    laid = f"torch.empty_strided({tuple(value.shape)}, {value.stride()}, dtype={value.dtype})"
    return f"{laid}.copy_({text})"
