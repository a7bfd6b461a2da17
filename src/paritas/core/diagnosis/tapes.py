"""A call in float64, written down: with one operator changed, only what follows is run again.

Hundreds of mistakes are tried in the same call. Without the record, each runs all of its operators,
and each of these through two dispatch modes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.precision.lifting import LiftMode
from paritas.core.torch_private.kernels import float64_kernel
from paritas.core.torch_private.operators import (
    DispatchMode,
    Operator,
    map_call,
    own_default,
    tensors_in,
    traits,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# What identifies a tensor: autograd hands out saved results as new objects.
_Key = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


@dataclasses.dataclass(frozen=True, eq=False)
class _Entry:
    """One operator with its arguments and results."""

    operator: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]

    @functools.cached_property
    def is_wide(self) -> bool:
        """Whether it computes in float64 by itself."""
        return computes_wide(self.operator, self.args, self.kwargs)

    @functools.cached_property
    def keys(self) -> list[_Key]:
        """Those of its results."""
        return list(map(_key, self.results))


@dataclasses.dataclass(frozen=True, eq=False)
class Tape:
    """All operators of a call, in their order, and the tensors that it returned."""

    entries: tuple[_Entry, ...]
    outputs: tuple[Tensor, ...]

    @classmethod
    def record(
        cls, run: Callable[[contextlib.AbstractContextManager[Any]], list[Tensor]]
    ) -> Tape | None:
        """None if something happens between the operators that is not recorded.

        Args:
            run: runs the call within a mode.
        """
        recorder = _TapeMode()
        outputs = run(recorder)
        if not recorder.is_complete or any(
            _storage(output) in recorder.written for output in outputs
        ):
            return None
        return cls(tuple(recorder.entries), tuple(outputs))

    def results(
        self,
        position: int,
        compute: Callable[[Operator, tuple[Any, ...], dict[str, Any]], Any],
        is_checking: Callable[[Operator], bool],
    ) -> list[Tensor]:
        """What the call returns if the operator at this place gives something else.

        Args:
            compute: what it gives, by its arguments.
            is_checking: whether an operator raises for arguments that it cannot take.

        Raises:
            ValueError: that has other shapes.
        """
        entry = self.entries[position]
        args, kwargs = entry.args, entry.kwargs
        if traits(entry.operator).mutates:
            args, kwargs = copy_arguments(args, kwargs)
        with lifted_unless(entry.is_wide):
            changed = tensors_in(compute(entry.operator, args, kwargs))
        later_ones = self.entries[position + 1 :]
        trusts_shapes = not all(is_checking(later_one.operator) for later_one in later_ones)
        check_alike(entry.results, changed, shapes=trusts_shapes)
        substitutes = dict(zip(entry.keys, changed, strict=True))
        for later in later_ones:
            args, kwargs, hit = _substitute(later, substitutes)
            if hit:
                with lifted_unless(computes_wide(later.operator, args, kwargs)):
                    results = tensors_in(later.operator(*args, **kwargs))
                substitutes |= zip(later.keys, results, strict=True)
        outputs = zip(self._output_keys, self.outputs, strict=True)
        return [substitutes.get(key, output) for key, output in outputs]

    @functools.cached_property
    def _output_keys(self) -> list[_Key]:
        return list(map(_key, self.outputs))

    def reaching(self, output: int) -> set[int]:
        """The places of the operators that an output depends on."""
        needed, places = {_key(self.outputs[output])}, set()
        for position in reversed(range(len(self.entries))):
            entry = self.entries[position]
            if not needed.isdisjoint(entry.keys):
                places.add(position)
                tensors = tensors_in([entry.args, list(entry.kwargs.values())])
                needed |= {_key(tensor) for tensor in tensors}
        return places


class _TapeMode(DispatchMode):
    """Records every operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[_Entry] = []
        self.is_complete = True
        self.written: set[int] = set()
        self._made: dict[int, set[_Key]] = {}
        # Tensors from outside: a view of them may be made before they are used again.
        self._outside: set[_Key] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in([args, list(kwargs.values())])
        self._outside |= {_key(tensor) for tensor in tensors if _storage(tensor) not in self._made}
        fits = isinstance(func, Operator) and not any(map(self._is_lost, tensors))
        arguments = args, kwargs
        if fits and traits(func).mutates:
            # Nothing that is recorded may be written to, nor what is written to be used later.
            fits = not any(_storage(tensor) in self._made for tensor in tensors)
            arguments = copy_arguments(args, kwargs)
            self.written |= {_storage(tensor) for tensor in tensors}
        result = func(*args, **kwargs)
        results = tensors_in(result)
        fits = (
            fits
            and bool(results)
            and not any(_storage(tensor) in self.written for tensor in results)
        )
        self.is_complete = self.is_complete and fits
        self.entries.append(_Entry(func, *arguments, results))
        for operand in results:
            self._made.setdefault(_storage(operand), set()).add(_key(operand))
        return result

    def _is_lost(self, tensor: Tensor) -> bool:
        """Whether it has changed, or is a part of an earlier result that no operator took."""
        keys = self._made.get(_storage(tensor))
        is_part = keys is not None and _key(tensor) not in keys | self._outside
        return is_part or _storage(tensor) in self.written


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def copy_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call that is going to write to some of them."""
    return map_call(args, kwargs, torch.clone)


def _key(tensor: Tensor) -> _Key:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _substitute(
    entry: _Entry, substitutes: dict[_Key, Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    hit = False

    def replace(tensor: Tensor) -> Tensor:
        nonlocal hit
        other = substitutes.get(_key(tensor))
        hit = hit or other is not None
        return tensor if other is None else other

    return (*map_call(entry.args, entry.kwargs, replace), hit)


def computes_wide(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether all arguments are in float64, and the kernel computes in it."""
    call_arguments = [*args, *kwargs.values()]
    is_wide = all(
        tensor.dtype == torch.float64 or not (tensor.is_floating_point() or tensor.is_complex())
        for tensor in tensors_in(call_arguments)
    )
    # Flags and dtypes say what to compute in.
    states = any(
        isinstance(argument, torch.dtype) or argument is True for argument in call_arguments
    )
    return is_wide and not states and float64_kernel(operator, args) is operator


def lifted_unless(is_wide: bool) -> contextlib.AbstractContextManager[Any]:  # noqa: FBT001
    """A mode that computes in float64, unless what is computed does so already."""
    if is_wide:
        return contextlib.nullcontext()
    default = own_default()
    return LiftMode(default, default)


def check_alike(target: list[Tensor], candidate: list[Tensor], *, shapes: bool = True) -> None:
    """Check what comes instead of a result.

    Args:
        shapes: whether they must be the same.

    Raises:
        ValueError: what comes next might end the process.
    """
    # What comes next may trust the shapes, as a backward pass does.
    right, others = ([tensor.shape for tensor in result] for result in (target, candidate))
    if shapes and others != right:
        raise ValueError(f"the shapes are {others}, not {right}")
    # ... and may take integers as indices: an accelerator does not survive those out of range.
    if not all(
        tensor.is_cpu or is_within(tensor, other)
        for tensor, other in zip(target, candidate, strict=True)
    ):
        raise ValueError("there are integers outside of the range of the right ones")


def is_within(value: Tensor, other: Tensor) -> bool:
    """Whether integers, which may be indices, stay within the range of the right ones."""
    is_index = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    if not is_index or not value.numel():
        return True
    least, most = value.aminmax()
    return bool(((other >= least) & (other <= most)).all())
