"""One side of a comparison: a callable, the modules behind it, and how far we can see into it."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch import compiled
from paritas.checking.foreign import ForeignProgram
from paritas.checking.isolation import ProgramState
from paritas.checking.reaching import reachable_modules
from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Subject:
    """A reference or a candidate.

    Attributes:
        call: what is called.
        role: "reference" or "candidate", for messages.
        state: all that it computes with beside its inputs.
        backends: the `torch.compile` backends behind it, none for an eager program.
        is_wholly_compiled: it is itself what `torch.compile` made, not eager code around that.
        is_module: it is an nn.Module, or one that was compiled.
        is_foreign: it is an object of a class unknown to torch, another runtime perhaps.
    """

    call: Callable[..., Any]
    role: str
    state: ProgramState
    backends: tuple[Callable[..., Any], ...]
    is_wholly_compiled: bool
    is_module: bool
    is_foreign: bool

    @property
    def is_compiled(self) -> bool:
        """Whether `torch.compile` is anywhere in it."""
        return bool(self.backends)

    @property
    def is_faithful(self) -> bool:
        """Whether it is known to compute in float64 when it is given float64."""
        return not self.is_foreign and all(map(compiled.is_faithful, self.backends))

    @property
    def description(self) -> str:
        """What it is, in a few words."""
        if self.is_compiled:
            names = ", ".join(dict.fromkeys(map(compiled.backend_name, self.backends)))
            return f"torch.compile ({names})"
        if isinstance(self.call, ForeignProgram):
            return self.call.name
        name = getattr(self.call, "__qualname__", None)
        return str(name or type(self.call).__name__)


def subject(function: Any, role: str, parameter: str, known: ProgramState | None = None) -> Subject:
    """Look at what the caller passed as one side.

    `known` is the other side's state: what the two share has one name, and one copy is enough.
    """
    if not callable(function) or isinstance(function, type):
        what = "a class; pass an instance" if isinstance(function, type) else "not callable"
        message = f"{parameter} is {what}: {function!r:.120}"
        raise UsageError(message)
    original = compiled.original_of(function)
    plain = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
    is_module = isinstance(original, torch.nn.Module)
    is_compiled = original is not function
    backends: list[Callable[..., Any]] = []

    def unwrapped(value: Any) -> Any:
        """Note what compiled code a closure holds while looking for the modules in it."""
        backends.extend(b for b in compiled.backends_of(value) if b not in backends)
        return compiled.original_of(value)

    modules = reachable_modules(function, unwrapped)
    if known is not None and known.is_of(function, modules):
        state = known
    else:
        state = ProgramState(modules, function, known)
    return Subject(
        call=function,
        role=role,
        state=state,
        backends=tuple(backends),
        is_wholly_compiled=is_compiled or compiled.is_compiled_in_place(function),
        is_module=is_module,
        is_foreign=not (is_module or is_compiled or isinstance(function, plain)),
    )
