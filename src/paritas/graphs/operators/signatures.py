"""A call in a line for people, and as a key by which identical calls are known."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from paritas.graphs.calls import TensorValue
from paritas.partition.library.registry import registration

if TYPE_CHECKING:
    from paritas.graphs.calls import GraphCall
    from paritas.graphs.settings import Settings

__all__ = ["ADDRESS", "key_of", "signature_of"]

_LONGEST = 120
# An object without a text of its own shows where it lies, which is elsewhere each time.
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.complex64: "c64",
    torch.complex128: "c128",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}


def signature_of(call: GraphCall) -> str:
    """`linear(f32[16, 8], f32[32, 8], bias=None)`, cut at the end where it is too long."""
    name = call.operator
    parts = name.split(".")
    # Of `aten.mm.default` the overload says nothing alone.
    short = ".".join(parts[-2:]) if _is_overload(name) else parts[-1]
    told = [_words(value) for value in call.args]
    told += [f"{key}={_words(value)}" for key, value in call.kwargs.items()]
    text = f"{short}({', '.join(told)})"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 5]} ...)"


def _is_overload(name: str) -> bool:
    return name.removeprefix("torch.ops.").startswith(("aten.", "prims."))


def _words(value: Any) -> str:
    if isinstance(value, TensorValue):
        dtype = _SHORT.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}{list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_words(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(_words, value))
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return ":".join(
            "" if part is None else _words(part) for part in parts[: 2 + bool(value.step)]
        )
    if isinstance(value, torch.dtype):
        return _SHORT.get(value, str(value))
    return f"{value!r:.40}"


def key_of(call: GraphCall, settings: Settings) -> str:
    """The same for calls of which the same is asked, and for no others.

    Names of values do not count, but which of them are one and the same does.
    """
    names: dict[str, int] = {}

    def told(value: Any) -> Any:
        if isinstance(value, TensorValue):
            same = names.setdefault(value.name, len(names))
            return ("tensor", same, value.shape, str(value.dtype), value.requires_grad)
        if isinstance(value, Mapping):
            return ("dict", [(str(key), told(item)) for key, item in value.items()])
        if isinstance(value, (list, tuple)):
            return (type(value).__name__, [told(item) for item in value])
        if isinstance(value, slice):
            return ("slice", told(value.start), told(value.stop), told(value.step))
        return (type(value).__name__, repr(value))

    if call.idle:  # nothing is asked of it
        return _digest((call.operator, call.idle))
    question = (
        call.operator,
        _body(call.function),
        _claimed(call),
        told(call.args),
        sorted((str(key), told(value)) for key, value in call.kwargs.items()),
        [(value.shape, str(value.dtype)) for value in call.outputs],
        call.annotation,
        call.idle,
        call.obstacle,
        sorted(dataclasses.asdict(settings).items(), key=lambda item: item[0]),
    )
    return _digest(question)


def _digest(question: tuple[Any, ...]) -> str:
    return hashlib.sha256(repr(question).encode()).hexdigest()[:24]


def _body(function: Any) -> tuple[Any, ...]:
    """Tells functions of one name from each other: lambdas, and what a script defines twice."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ()
    held = list(map(_held, function.__closure__ or ()))
    said = (code.co_consts, function.__defaults__, function.__kwdefaults__, held)
    return (
        code.co_filename,
        code.co_firstlineno,
        code.co_code.hex(),
        ADDRESS.sub("", _text(said)),
    )


def _text(said: Any) -> str:
    try:
        return repr(said)
    except Exception as error:  # noqa: BLE001  (an object's own: its key says that it has no text)
        return type(error).__name__


def _held(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


def _claimed(call: GraphCall) -> tuple[Any, ...]:
    """The rule that a user registered for the operator: another one is another question."""
    rules = [registration(call.operator)]
    if call.function is not None:
        rules.append(registration(call.function))
    return tuple(rule if isinstance(rule, str) else _body(rule) for rule in rules if rule)
