"""Arguments and functions, written as Python that needs torch alone."""

from __future__ import annotations

import inspect
import math
import operator
import textwrap
from typing import TYPE_CHECKING, Any

import torch

from paritas.graphs.scripts.storing import stored_form
from paritas.numerics.trees import map_leaves

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

__all__ = ["NoScriptError", "drawn", "function_text", "literal", "stored_tensors"]

# A tensor that is written down element by element has no more than this.
_MOST_ELEMENTS = 16
_OWN_MODULE = "paritas.partition.configuration.nnscaler_functions"


class NoScriptError(Exception):
    """Why a failure cannot be shown by a script of its own."""


# --- arguments ------------------------------------------------------------------------------------


def literal(value: Any) -> str:
    """A plain value, as it is written.

    Raises:
        NoScriptError: it has no such form.
    """
    match value:
        case float() if not math.isfinite(value):
            return f'float("{value}")'
        case None | bool() | int() | float() | complex() | str():
            return repr(value)
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(value)
        case torch.device():
            return f"torch.device({str(value)!r})"
        case slice():
            return f"slice({literal(value.start)}, {literal(value.stop)}, {literal(value.step)})"
        case tuple():
            inside = ", ".join(map(literal, value))
            return f"({inside},)" if len(value) == 1 else f"({inside})"
        case list():
            return f"[{', '.join(map(literal, value))}]"
        case dict():
            return f"{{{', '.join(f'{literal(k)}: {literal(v)}' for k, v in value.items())}}}"
    raise NoScriptError(f"an argument of type {type(value).__name__} cannot be written down")


def drawn(tensor: torch.Tensor, dtype: torch.dtype) -> str:
    """A tensor of this shape and with values in this range, drawn by `generator`."""
    shape, cast = list(tensor.shape), f".to({dtype})"
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return f"torch.empty({shape}, dtype={dtype})"
    if tensor.dtype is torch.bool:
        return f"torch.rand({shape}, generator=generator) > 0.5"
    if tensor.numel() <= _MOST_ELEMENTS and not tensor.is_floating_point():
        return f"torch.tensor({map_leaves(tensor.tolist(), _Verbatim)}, dtype={dtype})"
    if tensor.is_complex():
        return f"torch.randn({shape}, generator=generator, dtype=torch.complex128){cast}"
    low, high = tensor.min().item(), tensor.max().item()
    if low == high or not (math.isfinite(low) and math.isfinite(high)):
        return f"torch.full({shape}, {literal(low)}, dtype={dtype})"
    if not tensor.is_floating_point():
        return f"torch.randint({low}, {high + 1}, {shape}, generator=generator){cast}"
    if low < 0:
        return f"torch.randn({shape}, generator=generator){cast}"
    scale = "" if high <= 1 else f" * {high:.3g}"
    return f"(torch.rand({shape}, generator=generator){scale}){cast}"


class _Verbatim:
    """An element in a list of lists, shown as it is written."""

    def __init__(self, value: Any) -> None:
        self._text = literal(value)

    def __repr__(self) -> str:
        return self._text


def stored_tensors(value: Any, path: str) -> dict[str, torch.Tensor]:
    """The tensors of an argument by their paths, ready to be put into a file."""
    if isinstance(value, torch.Tensor):
        return {path: stored_form(value)}
    if isinstance(value, list | tuple):
        found: dict[str, torch.Tensor] = {}
        for place, item in enumerate(value):
            found |= stored_tensors(item, f"{path}[{place}]")
        return found
    return {}


# --- functions ------------------------------------------------------------------------------------


def function_text(
    name: str, function: Callable[..., Any], imports: tuple[str, ...] = ()
) -> tuple[list[str], str]:
    """Lines that make `compute` the operator, and the module of yours that they need, if any.

    Args:
        name: the operator, as the graph names it.
        function: what was run for it.
        imports: modules that bring operators.

    Raises:
        NoScriptError: it lives in memory alone.
    """
    module, short = inspect.getmodule(function), getattr(function, "__name__", "")
    if module is not None and module.__name__ == _OWN_MODULE:
        return [*_source_lines(module, short), "", "", f"compute = {short}"], ""
    if name.startswith("torch.") and callable(_at(torch, name.split(".")[1:])):
        return [f"compute = {name}"], ""
    if short and getattr(operator, short, None) is function:
        return ["import operator", "", f"compute = operator.{short}"], ""
    plain = name.replace("::", ".").removeprefix("torch.ops.")
    if plain.startswith(("aten.", "prims.")) and all(map(str.isidentifier, plain.split("."))):
        overload = plain if plain.count(".") > 1 else f"{plain}.default"
        return [f"compute = torch.ops.{overload}"], ""
    if type(function).__name__ in {"OpOverload", "OpOverloadPacket"}:
        return _registered(str(function), imports)
    qualified, home = getattr(function, "__qualname__", ""), getattr(module, "__name__", "")
    if home and home != "__main__" and _at(module, qualified.split(".")) is function:
        first = qualified.partition(".")[0]
        return [f"from {home} import {first}", "", f"compute = {qualified}"], home
    raise NoScriptError(f"{name} was made in memory: no script can import it")


def _at(owner: Any, parts: list[str]) -> Any:
    for part in parts:
        owner = getattr(owner, part, None)
    return owner


def _registered(name: str, imports: tuple[str, ...]) -> tuple[list[str], str]:
    """An operator that a program put into torch's registry: the module that does so is needed."""
    if not imports:
        raise NoScriptError(f"{name} is registered by a program that a script does not know")
    lines = [f"import {module}  # registers the operator" for module in imports]
    return [*lines, "", f"compute = torch.ops.{name}"], ", ".join(imports)


def _source_lines(module: ModuleType, name: str) -> list[str]:
    """The text of a function, and of what it uses of its module."""
    needed: dict[str, str] = {}
    waiting = [name]
    while waiting:
        one = waiting.pop()
        value = getattr(module, one)
        if inspect.isfunction(value) and value.__module__ == module.__name__:
            needed[one] = textwrap.dedent(inspect.getsource(value)).rstrip()
            waiting += [
                used
                for used in value.__code__.co_names
                if hasattr(module, used) and used not in needed
            ]
        elif inspect.ismodule(value):
            needed[one] = _import_line(value, one)
        elif isinstance(value, type):
            needed[one] = f"{one} = ValueError"
        else:
            needed[one] = f"{one} = {literal(value)}"
    functions = [text for text in needed.values() if text.startswith("def ")]
    others = sorted(text for text in needed.values() if not text.startswith("def "))
    lines = [*others, *("\n\n" + text for text in reversed(functions))]
    return [line for text in lines for line in text.splitlines()]


def _import_line(module: ModuleType, name: str) -> str:
    parent, _, last = module.__name__.rpartition(".")
    if not parent:
        return f"import {module.__name__}" + (f" as {name}" if name != module.__name__ else "")
    return f"from {parent} import {last}" + (f" as {name}" if name != last else "")
