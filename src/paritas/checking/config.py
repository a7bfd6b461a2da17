"""What the caller says: the inputs, and what to compare."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

import torch

from paritas.errors import UsageError
from paritas.numerics.checkers import AutomaticValueChecker, ValueChecker, validate_checker


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


def _keywords(inputs: Mapping[Any, Any]) -> dict[str, Any]:
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
        return [Inputs((), _keywords(inputs))]
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
