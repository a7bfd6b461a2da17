"""What a user writes: an operator, its arguments, and the splits that are claimed to be right.

The names and the order of the fields are those of nnScaler's partition check, so that its users'
configurations run with another import line.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from paritas.errors import UsageError

__all__ = ["IRObject", "TensorInfo", "VerifyConfig", "unwrap"]

_OPTION_KEYS = {"idx", "dim", "num"}


@dataclasses.dataclass(frozen=True)
class IRObject:
    """A value that a graph knows by name: a size, a slice's end. Only the value takes part.

    Attributes:
        name: what the graph calls it.
        value: what it is; may hold further ones.
        is_constant: whether it is the same for every input of the graph.
    """

    name: str | None = None
    value: Any = None
    is_constant: bool = True


def unwrap(value: Any) -> Any:
    """The same value with the value of every `IRObject` in its place, however deep it is."""
    if isinstance(value, IRObject):
        return unwrap(value.value)
    if isinstance(value, slice):
        return slice(unwrap(value.start), unwrap(value.stop), unwrap(value.step))
    if isinstance(value, tuple):
        items = [unwrap(item) for item in value]
        # A named tuple takes its items one by one; torch.Size and plain ones take them all.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [unwrap(item) for item in value]
    if isinstance(value, dict):
        return {unwrap(key): unwrap(item) for key, item in value.items()}
    return value


@dataclasses.dataclass(slots=True)
class TensorInfo:
    """One argument: a tensor of a shape, filled with numbers that fit, or a value as it is.

    Attributes:
        value_type: 'shape' or 'value'.
        value: the shape, or the value.
        dtype: of a 'shape'; otherwise what the operator takes there (indices are int64, masks
            bool), and float32 where it takes any.
        requires_grad: False if no gradient is asked of it; otherwise each floating tensor has one.
        generator: what fills a 'shape': a `torch.Generator` to draw from, or a function that is
            given the shape and makes the tensor.
    """

    value_type: Literal["shape", "value"]
    value: Any
    dtype: torch.dtype | None = None
    requires_grad: bool | None = None
    generator: torch.Generator | Callable[[tuple[int, ...]], torch.Tensor] | None = None

    def __post_init__(self) -> None:
        if self.value_type not in {"shape", "value"}:
            raise UsageError(
                f"TensorInfo({self.value_type!r}, ...): the first argument must be 'shape' "
                "(a tensor is made) or 'value' (it is passed as it is)"
            )
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise UsageError(f"dtype must be a torch.dtype such as torch.int64, not {self.dtype!r}")
        if self.value_type == "value":
            if self.dtype is not None or self.generator is not None:
                raise UsageError(
                    f"TensorInfo('value', {self.value!r:.60}): a value has its own dtype and needs "
                    "no generator; leave them out, or say 'shape'"
                )
            return
        shape = unwrap(self.value)
        sizes = shape if isinstance(shape, Sequence) and not isinstance(shape, str) else [None]
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in sizes):
            raise UsageError(
                f"TensorInfo('shape', {self.value!r}): a shape is a tuple of sizes such as "
                "(8, 32); to pass the value itself, say 'value'"
            )

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the tensor that this is; None if it is none."""
        if self.value_type == "shape":
            return tuple(unwrap(self.value))
        value = unwrap(self.value)
        return tuple(value.shape) if isinstance(value, torch.Tensor) else None

    @property
    def numel(self) -> int:
        """How many elements that tensor has; 0 if it is none."""
        return 0 if self.shape is None else math.prod(self.shape)


@dataclasses.dataclass(slots=True)
class VerifyConfig:
    """An operator, its arguments, and the splits to check.

    Fields may be assigned until it is used, those of its arguments too; there they are checked
    again.

    Attributes:
        fsig: the operator by its full name, such as `torch.nn.functional.linear`; of a method,
            `torch.Tensor.view`, the first argument is the tensor.
        args: the positional arguments.
        kwargs: the arguments by name; a `TensorInfo` among them is a tensor too.
        noutputs: how many tensors the operator gives.
        parti_options: which dimension of which input is split: `{'idx': 1, 'dim': 0}`; `idx` goes
            on with the outputs after the inputs, and a `num` is the number of ranks for this one.
        import_customized_func: import statements that `fsig` needs.
        non_grad_indices: arguments of which no gradient is asked, such as running statistics.
    """

    fsig: str
    args: Sequence[TensorInfo]
    kwargs: Mapping[str, Any]
    noutputs: int
    parti_options: Sequence[Mapping[str, int]]
    import_customized_func: str = ""
    non_grad_indices: Sequence[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        if not isinstance(self.fsig, str) or not self.fsig:
            raise UsageError(f"fsig must be an operator's name such as 'torch.add': {self.fsig!r}")
        for position, info in enumerate(self.args):
            if not isinstance(info, TensorInfo):
                raise UsageError(
                    f"args[{position}] of {self.fsig} is {info!r:.60}; write "
                    "TensorInfo('shape', ...) or TensorInfo('value', ...)"
                )
        if _whole_number(self.noutputs, least=1) is None:
            raise UsageError(f"noutputs must be a whole number from 1 on, not {self.noutputs!r}")
        for index in self.non_grad_indices:
            if _whole_number(index) is None or index >= len(self.args):
                raise UsageError(
                    f"non_grad_indices names argument {index!r}, but {self.fsig} has arguments "
                    f"0 to {len(self.args) - 1}"
                )
        for option in self.parti_options:
            _check_option(option)

    def as_used(self) -> VerifyConfig:
        """A copy, checked again: fields may have been assigned since this one was made."""
        args = [_again(info) for info in self.args]
        kwargs = {name: _again(value) for name, value in self.kwargs.items()}
        return dataclasses.replace(self, args=args, kwargs=kwargs)


def _again(value: Any) -> Any:
    return dataclasses.replace(value) if isinstance(value, TensorInfo) else value


def _check_option(option: Any) -> None:
    """Raise `UsageError` unless it has the form of a split; whether it is one is checked later."""
    form = "write {'idx': 0, 'dim': 1}: input 0 is split along dimension 1"
    if not isinstance(option, Mapping):
        raise UsageError(f"parti_options has {option!r}; {form}")
    unknown = sorted(map(str, set(option) - _OPTION_KEYS))
    missing = [key for key in ("idx", "dim") if key not in option]
    if unknown or missing:
        fault = f"unknown key {unknown[0]!r}" if unknown else f"no {missing[0]!r}"
        raise UsageError(f"parti_options has {dict(option)!r} with {fault}; {form}")
    for key, value in option.items():
        if _whole_number(value, least=2 if key == "num" else 0) is None:
            least = "2" if key == "num" else "0"
            raise UsageError(
                f"parti_options has {dict(option)!r}: {key!r} must be a whole number from {least} "
                f"on; {form}"
            )


def _whole_number(value: Any, least: int = 0) -> int | None:
    """The value if it is a whole number of at least that; None otherwise (a bool is none)."""
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
    return value if fits else None
