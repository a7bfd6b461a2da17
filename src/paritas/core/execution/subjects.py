"""The subjects of a check: inputs, configuration, device, and the two sides."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import math
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.errors import UsageError, first_line
from paritas.core.execution.isolation import ProgramState
from paritas.core.execution.reachable import reachable_modules
from paritas.core.numerics.checkers import AutomaticValueChecker, ValueChecker, validate_checker
from paritas.core.numerics.contents import map_leaves
from paritas.core.settings import default_locate_seconds
from paritas.core.torch_private import dynamo

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
            raise UsageError(
                f"args must be a list or tuple of arguments, not {type(self.args).__name__}"
            )
        if not isinstance(self.kwargs, dict):
            raise UsageError(f"kwargs must be a dict, not {type(self.kwargs).__name__}")
        object.__setattr__(self, "args", tuple(self.args))

    def map_leaves(self, function: Callable[[Any], Any]) -> Inputs:
        """The same arguments with `function` applied to each leaf.

        An argument that is passed twice stays one object.
        """
        args, kwargs = map_leaves([list(self.args), self.kwargs], function)
        return dataclasses.replace(self, args=tuple(args), kwargs=kwargs)


@dataclasses.dataclass(kw_only=True, slots=True)
class VerifyConfig:
    """What `verify` compares, and whether it raises.

    Fields may be assigned later; `verify` validates them again and works on a copy.

    Attributes:
        enabled: if False, both sides run, nothing is compared, and the verdict says so.
        verify_size: the number of outputs.
        match_by_order: match outputs that the two sides name differently by their order, for
            compilers known to return lists; otherwise different names are `different`.
        verify_dtype: dtypes.
        verify_shape: shapes. If False, values are compared in order if the counts agree.
        verify_values: values, by `value_checker`.
        value_checker: one checker, or several in order, each of which may decline a pair.
        verify_gradients: gradients of inputs and parameters under random cotangents; by default,
            if anything requires grad.
        verify_input_gradients: where gradients are compared, also those of floating inputs that do
            not require grad: the model may follow another one.
        verify_double_backward: gradients of these gradients; by default, if the reference has them
            and parameters, inputs and outputs are at most 2^18 numbers. If the candidate raises,
            they are listed as not compared; with True, that is a failure. Unless it is False, the
            gradients of a second backward pass over the same graph are compared, too, where the
            candidate has backward functions of its own.
        verify_mutation: inputs after the call and after backward.
        verify_state: the program's state after the call and after backward: parameters and
            buffers, their `.grad`, attributes, variables of closures, globals; also torch's
            settings and functions.
        verify_aliasing: which outputs share memory with inputs, parameters, each other or the
            outputs of the next call, and which are written to later.
        verify_strides: output strides; otherwise a difference is only noted.
        verify_device: output devices; otherwise a difference is only noted.
        verify_requires_grad: whether outputs require grad; by default, unless gradients are
            switched off.
        verify_rng: the state of the random generators after the call and after backward.
        verify_second_call: a second call, which continues from the state after the first.
        lift: compare also in float64, to distinguish faults from rounding.
        strict: count `unstable` as a failure.
        raise_on_mismatch: raise `MismatchError` on anything that does not pass.
        seed: seed of the cotangents and of the perturbed runs.
        locate_seconds: on a failure, look for where it starts for at most this time; 0 turns it
            off. By default 60, or what PARITAS_LOCATE_SECONDS in the environment says.
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
    locate_seconds: float = dataclasses.field(default_factory=default_locate_seconds)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type not in {"bool", "bool | None"}:
                continue
            value = getattr(self, field.name)
            if not isinstance(value, bool) and not (value is None and "None" in str(field.type)):
                raise UsageError(f"{field.name} must be True or False, not {value!r}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise UsageError(f"seed must be an integer, not {self.seed!r}")
        seconds = self.locate_seconds
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not is_number or not 0 <= seconds < math.inf:
            raise UsageError(
                f"locate_seconds must be a number of seconds, 0 to turn it off, not {seconds!r}"
            )
        for checker in self.checkers:
            if isinstance(checker, type) or not isinstance(checker, ValueChecker):
                raise UsageError(
                    f"value_checker must be a checker such as AutomaticValueChecker(), or a list "
                    f"of them, not {checker!r}"
                )
            validate_checker(checker)

    def as_used(self) -> VerifyConfig:
        """A validated copy: fields may have been assigned since it was made."""
        return dataclasses.replace(self)

    @property
    def compares_requires_grad(self) -> bool:
        """Whether outputs must require grad if the reference's do."""
        if self.verify_requires_grad is None:
            return self.verify_gradients is not False
        return self.verify_requires_grad

    @property
    def checkers(self) -> tuple[ValueChecker, ...]:
        """The value checkers in order."""
        value_checker = self.value_checker
        return tuple(value_checker) if isinstance(value_checker, list | tuple) else (value_checker,)

    @classmethod
    def from_options(cls, **options: Any) -> VerifyConfig:
        """Make a configuration from names and values; the error for an unknown name has a hint."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"the options are {names}"
                raise UsageError(f"unknown option {name!r}; {hint}")
        return cls(**options)


def input_sets(inputs: Any) -> list[Inputs]:
    """Parse the caller's inputs: one set, or several."""
    if isinstance(inputs, Inputs):
        return [inputs]
    if isinstance(inputs, Mapping):  # also the result of a tokenizer
        for key in inputs:
            if not isinstance(key, str):
                raise UsageError(
                    f"inputs is a dict of keyword arguments: its keys must be names, not {key!r}"
                )
        return [Inputs((), dict(inputs))]
    if isinstance(inputs, torch.Tensor) or not isinstance(inputs, list | tuple):
        raise UsageError(
            f"inputs must be a list or tuple of positional inputs, a dict of keyword arguments, "
            f"Inputs(args, kwargs), or a list of Inputs, not {type(inputs).__name__}; for one "
            f"tensor x, pass [x]"
        )
    if not inputs:
        raise UsageError(
            f"inputs is empty: {inputs!r}; pass [x, ...], or Inputs() to call both sides without "
            f"arguments"
        )
    are_input_sets = [isinstance(item, Inputs) for item in inputs]
    if all(are_input_sets):
        return list(inputs)
    if any(are_input_sets):
        raise UsageError("inputs mixes Inputs(...) with bare values; wrap every set in Inputs")
    return [Inputs(tuple(inputs))]


# --- The device -----------------------------------------------------------------------------------


def usable_device(name: str | torch.device, option_prefix: str = "--device ") -> torch.device:
    """Return a device that can hold tensors with values.

    Args:
        name: `cuda`, `cuda:1`.
        option_prefix: how the user named it, for the message: an option, or `device=` in Python.

    Raises:
        UsageError: it cannot be used; the message says why.
    """
    shown = f"{option_prefix}{str(name)!r}"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise UsageError(f"{shown} cannot be used: {first_line(error, 160)}") from error
    if device.type == "meta":
        raise UsageError(
            f"{shown} holds no values, so nothing can be compared: use a device such as cpu or cuda"
        )
    return device


# --- A candidate in a runtime other than torch ----------------------------------------------------

# Such a runtime returns values only: no gradients, no views of its inputs. It cannot be lifted from
# outside either, so it brings a function that makes it once more in float64.


@dataclasses.dataclass(frozen=True)
class LiftedProgram:
    """A candidate in float64.

    Attributes:
        call: the callable, for arguments in float64.
        leaks: descriptions of parts that may still compute in less precision; if there are any, it
            is judged at float32 noise.
    """

    call: Callable[..., Any]
    leaks: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, eq=False)
class ForeignProgram:
    """A candidate of another runtime, called like the model.

    Attributes:
        name: the runtime, for messages.
        call: takes the model's arguments and returns the model's results.
        lift: makes the same program in float64, if that is possible. Its argument are the floating
            dtypes that the reference uses: a cast to one of them is only rounding.
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
    """Limit `config` to what a candidate supports; also returns a note and a context for the runs.

    Raises:
        UsageError: verify_gradients=True, but the candidate has no gradients.
    """
    if not isinstance(candidate, ForeignProgram):
        return config, "", contextlib.nullcontext()
    if config.verify_gradients:
        raise UsageError(
            f"verify_gradients=True, but {candidate.name} computes no gradients; drop the option"
        )
    fewer = dataclasses.replace(config, verify_gradients=False, verify_aliasing=False)
    note = f"{candidate.name} returns values only: gradients and aliases were not compared"
    # Without gradients, no output is expected to require grad.
    return fewer, note, torch.no_grad()


# --- One side of a comparison ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Subject:
    """A reference or a candidate.

    Attributes:
        call: the callable.
        role: "reference" or "candidate", for messages.
        state: everything that it computes with apart from its inputs.
        backends: the `torch.compile` backends that it uses; empty for an eager program.
        is_wholly_compiled: it is a result of `torch.compile`, not eager code around one.
        is_module: it is an nn.Module, compiled or not.
        is_foreign: it is an object of a class unknown to torch, perhaps of another runtime.
        family: the callable with which it shares its compiled float64 form; None for itself.
    """

    call: Callable[..., Any]
    role: str
    state: ProgramState
    backends: tuple[Callable[..., Any], ...]
    is_wholly_compiled: bool
    is_module: bool
    is_foreign: bool
    family: Any = None

    @property
    def is_compiled(self) -> bool:
        """Whether any of it is compiled by `torch.compile`."""
        return bool(self.backends)

    @property
    def is_faithful(self) -> bool:
        """Whether it is known to compute in float64 on float64 inputs."""
        return not self.is_foreign and all(map(dynamo.is_faithful, self.backends))

    @property
    def description(self) -> str:
        """A short description."""
        if self.is_compiled:
            names = ", ".join(dict.fromkeys(map(dynamo.backend_name, self.backends)))
            return f"torch.compile ({names})"
        if isinstance(self.call, ForeignProgram):
            return self.call.name
        name = getattr(self.call, "__qualname__", None)
        return str(name or type(self.call).__name__)


def inspect_subject(
    function: Any,
    role: str,
    parameter: str,
    program_state: ProgramState | None = None,
    *,
    lends_parameters: bool = False,
) -> Subject:
    """Inspect one side that the caller passed.

    `program_state` is the other side's state: shared objects have one name and are copied once.
    With `lends_parameters`, the state has no copies of parameters.
    """
    if not callable(function) or isinstance(function, type):
        what = "a class; pass an instance" if isinstance(function, type) else "not callable"
        raise UsageError(f"{parameter} is {what}: {function!r:.120}")
    original = dynamo.original_of(function)
    plain = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
    is_module = isinstance(original, torch.nn.Module)
    is_compiled = original is not function
    backends: list[Callable[..., Any]] = []

    def unwrap_compiled(value: Any) -> Any:
        """Collect the backends of compiled code while searching a closure for modules."""
        backends.extend(b for b in dynamo.backends_of(value) if b not in backends)
        return dynamo.original_of(value)

    modules = reachable_modules(function, unwrap_compiled)
    if program_state is not None and program_state.is_of(function, modules):
        state = program_state
    else:
        state = ProgramState(modules, function, program_state, lends_parameters=lends_parameters)
    return Subject(
        call=function,
        role=role,
        state=state,
        backends=tuple(backends),
        is_wholly_compiled=is_compiled or dynamo.is_compiled_in_place(function),
        is_module=is_module,
        is_foreign=not (is_module or is_compiled or isinstance(function, plain)),
    )
