"""What a check is given: inputs, what to compare, a device, and the two sides."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch import dynamo
from paritas.errors import UsageError, first_line
from paritas.execution.isolation import ProgramState
from paritas.execution.reachable import reachable_modules
from paritas.numerics.checkers import AutomaticValueChecker, ValueChecker, validate_checker

if TYPE_CHECKING:
    from collections.abc import Callable


# --- Inputs and configuration ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arguments of one call.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.args, torch.Tensor) or not isinstance(self.args, list | tuple):
            message = f"args must be a list or tuple of arguments, not {type(self.args).__name__}"
            raise UsageError(message)
        if not isinstance(self.kwargs, dict):
            message = f"kwargs must be a dict, not {type(self.kwargs).__name__}"
            raise UsageError(message)
        object.__setattr__(self, "args", tuple(self.args))


@dataclasses.dataclass(kw_only=True, slots=True)
class VerifyConfig:
    """What `verify` compares, and how it ends.

    Fields may be assigned until it is used; `verify` checks them again, and works on a copy.

    Attributes:
        enabled: off, both sides run, nothing is compared, and the verdict says so.
        verify_size: the number of outputs.
        match_by_order: outputs that the two sides name differently are matched by their order, for
            compilers known to return lists; otherwise other names are `different`.
        verify_dtype: dtypes.
        verify_shape: shapes. Off, values are compared in order where the counts agree.
        verify_values: values, by `value_checker`.
        value_checker: one checker, or several in order, each of which may decline a pair.
        verify_gradients: gradients of inputs and parameters under random cotangents; by default
            where anything requires grad.
        verify_input_gradients: wherever gradients are compared, also those of floating inputs that
            do not require grad: the model may stand behind another.
        verify_double_backward: gradients of these gradients; by default where the reference has
            them and parameters, inputs and outputs are no more than 2^18 numbers. What the
            candidate then refuses is listed as not compared; asked for by True, it is a failure.
        verify_mutation: inputs after the call and after backward.
        verify_state: what the program keeps, after the call and after backward: parameters and
            buffers, their `.grad`, attributes, variables of closures, globals; and torch's settings
            and functions.
        verify_aliasing: which outputs share memory with inputs, parameters and each other, with
            those of the next call, or are written to later.
        verify_strides: output strides; otherwise a difference is only noted.
        verify_device: output devices; otherwise a difference is only noted.
        verify_requires_grad: whether outputs require grad; by default unless gradients are
            switched off.
        verify_rng: the state of the random generators after the call and after backward.
        verify_second_call: a second call, going on from the state the first one left.
        lift: compare in float64 as well, which tells meaning from rounding.
        strict: count `unstable` as a failure.
        raise_on_mismatch: raise `MismatchError` on anything that does not pass.
        seed: seed of the cotangents and of the perturbed runs.
    """

    enabled: bool = True
    verify_size: bool = True
    match_by_order: bool = False
    verify_dtype: bool = True
    verify_shape: bool = True
    verify_values: bool = True
    value_checker: ValueChecker | tuple[ValueChecker, ...] | list[ValueChecker] = dataclasses.field(
        default_factory=AutomaticValueChecker
    )
    verify_gradients: bool | None = None
    verify_input_gradients: bool = True
    verify_double_backward: bool | None = None
    verify_mutation: bool = True
    verify_state: bool = True
    verify_aliasing: bool = True
    verify_strides: bool = False
    verify_device: bool = False
    verify_requires_grad: bool | None = None
    verify_rng: bool = True
    verify_second_call: bool = True
    lift: bool = True
    strict: bool = False
    raise_on_mismatch: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type not in {"bool", "bool | None"}:
                continue
            value = getattr(self, field.name)
            if not isinstance(value, bool) and not (value is None and "None" in str(field.type)):
                message = f"{field.name} must be True or False, not {value!r}"
                raise UsageError(message)
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            message = f"seed must be an integer, not {self.seed!r}"
            raise UsageError(message)
        for checker in self.checkers:
            if isinstance(checker, type) or not isinstance(checker, ValueChecker):
                message = (
                    f"value_checker must be a checker such as AutomaticValueChecker(), or a list "
                    f"of them, not {checker!r}"
                )
                raise UsageError(message)
            validate_checker(checker)

    def as_used(self) -> VerifyConfig:
        """A copy, checked again: fields may have been assigned since this one was made."""
        return dataclasses.replace(self)

    @property
    def compares_requires_grad(self) -> bool:
        """Whether outputs must require grad where the reference's do."""
        if self.verify_requires_grad is None:
            return self.verify_gradients is not False
        return self.verify_requires_grad

    @property
    def checkers(self) -> tuple[ValueChecker, ...]:
        """The value checkers in order."""
        given = self.value_checker
        return tuple(given) if isinstance(given, list | tuple) else (given,)

    @classmethod
    def from_options(cls, **options: Any) -> VerifyConfig:
        """Make a configuration from names and values; a misspelt name is told its nearest."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known are {known}"
                message = f"unknown option {name!r}{hint}"
                raise UsageError(message)
        return cls(**options)


def _check_keywords(inputs: Mapping[Any, Any]) -> dict[str, Any]:
    for key in inputs:
        if not isinstance(key, str):
            message = f"inputs is a dict of keyword arguments, so its keys are names, not {key!r}"
            raise UsageError(message)
    return dict(inputs)


def input_sets(inputs: Any) -> list[Inputs]:
    """Read what the caller passed as inputs: one set, or several sets of them."""
    if isinstance(inputs, Inputs):
        return [inputs]
    if isinstance(inputs, Mapping):  # what a tokenizer returns
        return [Inputs((), _check_keywords(inputs))]
    if isinstance(inputs, torch.Tensor) or not isinstance(inputs, list | tuple):
        message = (
            f"inputs must be a list or tuple of positional inputs, a dict of keyword arguments, "
            f"Inputs(args, kwargs), or a list of Inputs, not {type(inputs).__name__}; for one "
            f"tensor x, pass [x]"
        )
        raise UsageError(message)
    if not inputs:
        message = (
            f"inputs is empty: {inputs!r}; pass [x, ...], or Inputs() to call both sides without "
            f"arguments"
        )
        raise UsageError(message)
    given = [isinstance(item, Inputs) for item in inputs]
    if all(given):
        return list(inputs)
    if any(given):
        message = "inputs mixes Inputs(...) with bare values; wrap every set in Inputs"
        raise UsageError(message)
    return [Inputs(tuple(inputs))]


# --- The device -----------------------------------------------------------------------------------


def usable_device(name: str | torch.device, said: str = "--device ") -> torch.device:
    """A device on which a tensor with values can be made.

    Args:
        name: `cuda`, `cuda:1`.
        said: how the user said it, for the message: an option, or `device=` in Python.

    Raises:
        UsageError: it cannot be used; the message says why.
    """
    shown = f"{said}{str(name)!r}"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise UsageError(f"{shown} cannot be used: {first_line(error, 160)}") from error
    if device.type == "meta":
        raise UsageError(f"{shown} holds no values, so there is nothing to compare")
    return device


# --- A candidate that a runtime other than torch computes -----------------------------------------

# Such a runtime gives values: no gradients, no views of what it was given. It cannot be lifted from
# the outside either, so it says itself how it is made once more in float64, where meaning is told
# from rounding.


@dataclasses.dataclass(frozen=True)
class LiftedProgram:
    """A candidate in float64.

    Attributes:
        call: what is called, with arguments in float64.
        leaks: what of it may still compute in less, in words; it is judged at float32 noise then.
    """

    call: Callable[..., Any]
    leaks: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, eq=False)
class ForeignProgram:
    """A candidate of another runtime, to be called like the model.

    Attributes:
        name: of the runtime, for messages.
        call: takes what the model takes and gives what the model gives.
        lift: makes the same program in float64; it is told the floating dtypes that the reference
            uses, a cast to any of which is mere rounding. None where that cannot be had.
    """

    name: str
    call: Callable[..., Any]
    lift: Callable[[frozenset[torch.dtype]], LiftedProgram] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        return self.call(*args, **kwargs)


def limit_to_candidate(
    config: VerifyConfig, candidate: Any
) -> tuple[VerifyConfig, str, contextlib.AbstractContextManager[Any]]:
    """What of `config` can be asked of a candidate, the note that says what not, how both run.

    Raises:
        UsageError: gradients are asked for by name, and there are none.
    """
    if not isinstance(candidate, ForeignProgram):
        return config, "", contextlib.nullcontext()
    if config.verify_gradients:
        raise UsageError(
            f"verify_gradients=True, but {candidate.name} computes no gradients; leave it out"
        )
    fewer = dataclasses.replace(config, verify_gradients=False, verify_aliasing=False)
    note = f"{candidate.name} gives values only: gradients and aliases were not compared"
    # Without gradients on either side, no output is expected to require any.
    return fewer, note, torch.no_grad()


# --- One side of a comparison ---------------------------------------------------------------------


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
        return not self.is_foreign and all(map(dynamo.is_faithful, self.backends))

    @property
    def description(self) -> str:
        """What it is, in a few words."""
        if self.is_compiled:
            names = ", ".join(dict.fromkeys(map(dynamo.backend_name, self.backends)))
            return f"torch.compile ({names})"
        if isinstance(self.call, ForeignProgram):
            return self.call.name
        name = getattr(self.call, "__qualname__", None)
        return str(name or type(self.call).__name__)


def inspect_subject(
    function: Any, role: str, parameter: str, known: ProgramState | None = None
) -> Subject:
    """Look at what the caller passed as one side.

    `known` is the other side's state: what the two share has one name, and one copy is enough.
    """
    if not callable(function) or isinstance(function, type):
        what = "a class; pass an instance" if isinstance(function, type) else "not callable"
        message = f"{parameter} is {what}: {function!r:.120}"
        raise UsageError(message)
    original = dynamo.original_of(function)
    plain = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
    is_module = isinstance(original, torch.nn.Module)
    is_compiled = original is not function
    backends: list[Callable[..., Any]] = []

    def unwrapped(value: Any) -> Any:
        """Note what compiled code a closure holds while looking for the modules in it."""
        backends.extend(b for b in dynamo.backends_of(value) if b not in backends)
        return dynamo.original_of(value)

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
        is_wholly_compiled=is_compiled or dynamo.is_compiled_in_place(function),
        is_module=is_module,
        is_foreign=not (is_module or is_compiled or isinstance(function, plain)),
    )
