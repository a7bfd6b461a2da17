"""The trace of one run: every operator, what it read and what it gave, forward and backward.

Values are kept as a few figures each, so that the traces of two programs can be compared value by
value in little memory; whole tensors are kept up to a limit, or where they are asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from paritas._torch.operators import map_tensors, traits
from paritas._torch.watching import (
    OperatorWatch,
    has_values,
    in_backward,
    running_function,
    running_node,
    unseen,
    upcoming_node,
    watch_module_calls,
)
from paritas.execution.observation import storage_address as _address
from paritas.numerics.sketch import signs_from
from paritas.recording.module_calls import (
    NOWHERE,
    ModuleNames,
    UserLine,
    format_line,
    result_values,
    user_frames,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from torch import Tensor

    from paritas._torch.operators import Operator


# --- Figures of a value ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """A few sums by which a tensor is recognized.

    The sums are taken of log(1 + |x|), with the sign of x: the huge numbers of masks would hide all
    others. They are as exact as float64, and an error of each element moves them by no more than
    its share of the norm.

    Attributes:
        shape: the shape.
        dtype: the dtype.
        signed: two sums with pseudo-random signs, which depend on the order of the elements.
        plain: the sum of the values and of their cubes, which do not depend on it.
        norm: the root of the sum of the squares.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    signed: tuple[float, float]
    plain: tuple[float, float]
    norm: float

    @property
    def is_exact(self) -> bool:
        """Whether it has integers or truth values."""
        return not (self.dtype.is_floating_point or self.dtype.is_complex)

    def distance(self, other: Figures, *, ordered: bool = True) -> float:
        """How far two values are apart, as a share of their norm; infinite for other kinds."""
        if self.is_exact is not other.is_exact:
            return float("inf")
        pairs = zip(
            self.signed if ordered else self.plain,
            other.signed if ordered else other.plain,
            strict=True,
        )
        size = max(self.norm, other.norm)
        apart = max(abs(self.norm - other.norm), *(abs(a - b) for a, b in pairs))
        return apart / size if size else apart


# NaN and infinities, as numbers that no logarithm of a finite number gives.
_NOT_FINITE = {"nan": 1537.25, "posinf": 1021.5, "neginf": -1021.5}
_SECOND_SIGNS = 1 << 40


@torch.no_grad()
def figures_of(tensor: Tensor) -> Figures | None:
    """The figures of a tensor; None if it holds no plain values."""
    if tensor.layout is not torch.strided or tensor.is_quantized or not has_values(tensor):
        return None
    if tensor.is_nested:
        return None
    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    if plain.dtype.is_floating_point and plain.dtype.itemsize == 1:
        plain = plain.float()
    flat = plain.reshape(-1)
    sums, largest = [0.0] * 5, 0.0
    for start in range(0, flat.numel(), _BLOCK):
        values = flat[start : start + _BLOCK].to(torch.float64)
        if flat.dtype.is_floating_point:
            values = (values.sign() * values.abs().log1p()).nan_to_num(**_NOT_FINITE)
        count, device = values.numel(), values.device
        squares = values * values
        block = torch.stack(
            [
                torch.dot(values, _signs(start, count, device)),
                torch.dot(values, _signs(_SECOND_SIGNS + start, count, device)),
                values.sum(),
                torch.dot(squares, values),
                squares.sum(),
                squares.max(),
            ]
        ).tolist()
        sums = [one + other for one, other in zip(sums, block[:5], strict=True)]
        largest = max(largest, block[5])
    # Cubes are compared with the norm like the others.
    cubes = sums[3] / largest if largest else 0.0
    shape, norm = tuple(tensor.shape), sums[4] ** 0.5
    return Figures(shape, tensor.dtype, (sums[0], sums[1]), (sums[2], cubes), norm)


# How many elements are summed at a time, and how many signs are kept.
_BLOCK = 1 << 22
_MOST_CACHED = 1 << 20


def _signs(start: int, count: int, device: torch.device) -> Tensor:
    if count > _MOST_CACHED:
        return signs_from(start, count, device).to(torch.float64)
    return _cached_signs(start, count, device)


@functools.lru_cache(maxsize=128)
def _cached_signs(start: int, count: int, device: torch.device) -> Tensor:
    return signs_from(start, count, device).to(torch.float64)


# --- Traces ---------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class TracedValue:
    """A tensor at one time of a run.

    Attributes:
        index: its place in the trace.
        figures: None if it has no plain values, or none yet, like the result of `empty`.
        makers: the operators that gave it, or wrote to its memory; empty if it is from outside.
        requires_grad: whether autograd follows it, as far as later operators show it.
        tensor: a copy, if it was kept.
    """

    index: int
    figures: Figures | None
    makers: tuple[int, ...]
    requires_grad: bool = False
    tensor: Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ValueRef:
    """Stands for a traced value in the arguments of an operator."""

    index: int


_UNSET = ("empty", "new_empty")
_COPIES = {"_to_copy", "clone", "copy", "lift_fresh", "_unsafe_view"}


@dataclasses.dataclass(slots=True)
class Operation:
    """One call of an operator.

    Attributes:
        index: its place in the trace.
        args: its arguments, with a `ValueRef` for each tensor.
        inputs: the values it read.
        outputs: the values it gave or wrote to.
        module: the path of the running module; "" for the outermost one.
        line: the user's line; that of the forward pass for an operator of the backward pass.
        frames: the user's lines that were running, the outermost first.
        is_backward: whether the backward pass called it.
        forward: the operator of the forward pass whose gradient it computes, if known.
        function: the user's autograd function whose backward pass called it, or "".
        is_finished: whether it returned.
    """

    index: int
    func: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...] = ()
    module: str = ""
    line: UserLine = NOWHERE
    frames: tuple[Any, ...] = ()
    is_backward: bool = False
    forward: int | None = None
    function: str = ""
    is_finished: bool = False

    @property
    def name(self) -> str:
        """The operator: `aten.mul.Tensor`."""
        return str(self.func)

    @property
    def only_moves(self) -> bool:
        """Whether it is a view or a copy, perhaps to another dtype."""
        kind = traits(self.func)
        return kind.view or kind.name in _COPIES

    @property
    def computes(self) -> bool:
        """Whether it neither only moves values nor only makes memory for some."""
        return not (self.only_moves or traits(self.func).name.startswith(_UNSET))


@dataclasses.dataclass(slots=True)
class TracedCall:
    """A call that the program makes of a function of torch, or of a module, in the forward pass.

    Functions that a function of torch calls are not listed.

    Attributes:
        target: the function or the module.
        path: of the module; None for a function.
        args: its arguments, with a `ValueRef` for each tensor.
        inputs: the values among its arguments.
        start: its first operator.
        stop: the operator after its last one.
        outputs: the values that it returned.
    """

    target: Any
    path: str | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    start: int
    stop: int = -1
    outputs: tuple[int, ...] = ()

    def __contains__(self, operation: Operation) -> bool:
        """Whether it called an operator."""
        return self.start <= operation.index < self.stop


@dataclasses.dataclass
class Trace:
    """The operators of a run in order, their values, and the calls that they belong to."""

    operations: list[Operation] = dataclasses.field(default_factory=list)
    values: list[TracedValue] = dataclasses.field(default_factory=list)
    calls: list[TracedCall] = dataclasses.field(default_factory=list)

    def outputs_of(self, operation: Operation) -> Iterator[TracedValue]:
        """The values that an operator gave."""
        return (self.values[index] for index in operation.outputs)

    def inputs_of(self, operation: Operation) -> Iterator[TracedValue]:
        """The values that an operator read."""
        return (self.values[index] for index in operation.inputs)

    def last_like(self, figures: Figures, tolerance: float) -> TracedValue | None:
        """The last value of a shape with these figures, among those that an operator gave."""
        best: TracedValue | None = None
        for value in reversed(self.values):
            known = value.figures
            if known is None or known.shape != figures.shape or not value.makers:
                continue
            if known.signed == figures.signed:
                return value
            if best is None and known.distance(figures) <= tolerance:
                best = value
        return best


class OutOfTimeError(Exception):
    """The run was ended because its time was over."""


# The frames between the program and paritas: what called them is not the program.
_BELOW_PROGRAM = frozenset({"_observe_call", "_engine_run_backward"})


@dataclasses.dataclass(slots=True)
class _RunningCall:
    """A call that has not returned; `traced` once it has an operator."""

    target: Any
    path: str | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    traced: TracedCall | None = None


class _FunctionWatch(TorchFunctionMode):
    """Routes the program's calls of torch's functions through another function."""

    def __init__(
        self, around: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
    ) -> None:
        super().__init__()
        self._around = around

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self._around(func, args, kwargs or {})


class TraceRecorder(contextlib.AbstractContextManager["TraceRecorder"]):
    """Records a trace; entered around the forward pass, and again around the backward pass.

    Attributes:
        trace: what was recorded so far.
    """

    def __init__(
        self,
        *,
        deadline: float = float("inf"),
        keep: Collection[int] | None = None,
        room: int = 0,
        instead: Mapping[int, Mapping[int, Tensor]] | None = None,
        like: tuple[Trace, int] | None = None,
    ) -> None:
        """Record nothing yet.

        Args:
            deadline: when the run is ended with `OutOfTimeError`, by `time.monotonic`.
            keep: the values to keep whole; None for as many as there is room for.
            room: how many bytes of values to keep whole.
            instead: by the index of an operator and the place among its results: the value to
                continue with instead of the program's own.
            like: an earlier run of the same program, and the operator up to which this one is the
                same; its figures are not computed again.
        """
        self.trace = Trace()
        self._deadline = deadline
        self._keep = None if keep is None else frozenset(keep)
        self._room = room
        self._instead = instead or {}
        self._like = like
        self._names = ModuleNames()
        self._modules: list[str] = []
        # The calls that are running; they are part of the trace from their first operator on.
        self._running: list[_RunningCall] = []
        self._nodes: dict[int, int] = {}
        # A tensor is known by its place in memory; what is written there makes it another value.
        self._known: dict[tuple[Any, ...], int] = {}
        self._writes: dict[int, list[int]] = {}
        self._ages: dict[int, int] = {}
        # What the running operator reads, by address, and writes to.
        self._read: dict[int, Tensor] = {}
        self._written: list[Tensor] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._stack = contextlib.ExitStack()
        self._stack.callback(watch_module_calls(self._around))
        self._stack.enter_context(_FunctionWatch(self._around_function))
        self._stack.enter_context(OperatorWatch(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _around(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[..., Any],
    ) -> Any:
        is_root = not self._modules and not in_backward()
        named = self._names.of_root(module) if is_root else self._names.of(module)
        path = "" if is_root and not named.prefix else named.path
        self._modules.append(path)
        try:
            return self._call(_RunningCall(module, path, args, kwargs), call)
        finally:
            self._modules.pop()

    def _around_function(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self._call(_RunningCall(function, None, args, kwargs), function)

    def _call(self, running: _RunningCall, call: Callable[..., Any]) -> Any:
        """Make a call, and note what it returns if it has operators."""
        if in_backward():
            return call(*running.args, **running.kwargs)
        self._running.append(running)
        try:
            result = call(*running.args, **running.kwargs)
        finally:
            self._running.pop()
        traced = running.traced
        if traced is not None:
            with unseen():
                tensors = [one for _, one in result_values(result) if isinstance(one, torch.Tensor)]
                traced.outputs = tuple(map(self._value_of, tensors))
            traced.stop = len(self.trace.operations)
        return result

    def _note_calls(self) -> None:
        """Note what the running calls read, before their first operator can write to it."""
        for running in self._running:
            if running.traced is not None:
                continue
            read: list[int] = []

            def refer(tensor: Tensor, read: list[int] = read) -> ValueRef:
                read.append(self._value_of(tensor))
                return ValueRef(read[-1])

            running.traced = TracedCall(
                running.target,
                running.path,
                map_tensors(running.args, refer),
                {name: map_tensors(value, refer) for name, value in running.kwargs.items()},
                tuple(read),
                len(self.trace.operations),
            )
            self.trace.calls.append(running.traced)

    def listens(self) -> bool:
        """Every operator is recorded."""
        return True

    def before(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation:
        """Record what an operator reads, before it can write to it."""
        if time.monotonic() > self._deadline:
            raise OutOfTimeError
        operations = self.trace.operations
        if not in_backward():
            with unseen():
                self._note_calls()
        self._read, self._written = {}, written_tensors(func, args, kwargs)
        read: list[int] = []

        def refer(tensor: Tensor) -> ValueRef:
            read.append(self._value_of(tensor))
            return ValueRef(read[-1])

        with unseen():
            if traits(func).name == "lift_fresh":  # new memory that no operator allocated
                self._renew(args[0], [])
            operation = Operation(
                len(operations),
                func,
                map_tensors(args, refer),
                {name: map_tensors(value, refer) for name, value in kwargs.items()},
                tuple(read),
                module=self._modules[-1] if self._modules else "",
            )
        self._note_place(operation)
        operations.append(operation)
        return operation

    def after(self, token: Operation, result: Any) -> Any:
        """Record what an operator gave; returns the value to continue with, if it is another."""
        with unseen():
            instead = self._replace_result(token, result)
            token.outputs = tuple(self._note_results(token, result if instead is None else instead))
        token.is_finished = True
        return instead

    def _note_place(self, operation: Operation) -> None:
        """Note where an operator is called."""
        operation.is_backward = in_backward()
        operation.frames = user_frames(above=2, within=_BELOW_PROGRAM)
        operation.line = format_line(*operation.frames[-1]) if operation.frames else NOWHERE
        if not operation.is_backward:
            node = upcoming_node()
            if node >= 0:
                self._nodes.setdefault(node, operation.index)
            return
        operation.function = running_function()
        node, leaf = running_node()
        operation.forward = self._nodes.get(node) if leaf is None else None
        if operation.forward is not None:
            origin = self.trace.operations[operation.forward]
            operation.module = operation.module or origin.module
            if not operation.function:
                operation.line = origin.line
        elif leaf is not None:
            operation.module = self._names.owner(leaf)

    def _replace_result(self, operation: Operation, result: Any) -> Any:
        """Replace results, and what the operator wrote to, by the places of its outputs."""
        wanted = self._instead.get(operation.index)
        if wanted is None:
            return None
        written = {_address(tensor) for tensor in self._written}
        slots = itertools.count()

        def choose(tensor: Tensor) -> Tensor:
            value = wanted.get(next(slots))
            if value is None:
                return tensor
            if _address(tensor) in written:
                return tensor.copy_(value)
            return value.to(tensor.device, tensor.dtype, copy=True)

        instead = map_tensors(result, choose)
        for tensor in self._only_written(result):
            choose(tensor)
        return instead

    def _only_written(self, result: Any) -> list[Tensor]:
        """The tensors that the operator wrote to and does not return."""
        returned: set[int] = set()
        map_tensors(result, lambda tensor: returned.add(_address(tensor)))
        return [tensor for tensor in self._written if _address(tensor) not in returned]

    def _note_results(self, operation: Operation, result: Any) -> Iterator[int]:
        results: list[Tensor] = []
        map_tensors(result, results.append)
        written = {_address(tensor) for tensor in self._written}
        for address in written:
            self._writes.setdefault(address, []).append(operation.index)
        for tensor in results:
            if _address(tensor) not in self._read:
                self._renew(tensor, [operation.index])
        results += self._only_written(result)
        unset = traits(operation.func).name.startswith(_UNSET)
        for tensor in results:
            figures = None if unset else self._figures_of(tensor, (operation.index,))
            yield self._add(tensor, figures, (operation.index,))
        self._read, self._written = {}, []

    def _renew(self, tensor: Tensor, writes: list[int]) -> None:
        """Note that the memory of a tensor was allocated anew."""
        address = _address(tensor)
        self._ages[address] = self._ages.get(address, 0) + 1
        self._writes[address] = writes

    def _value_of(self, tensor: Tensor) -> int:
        """The value that a tensor holds now."""
        self._read[_address(tensor)] = tensor
        index = self._known.get(self._key(tensor))
        if index is None:
            makers = tuple(self._writes.get(_address(tensor), ()))
            index = self._add(tensor, self._figures_of(tensor, makers), makers)
        value = self.trace.values[index]
        value.requires_grad = value.requires_grad or tensor.requires_grad
        return index

    def _figures_of(self, tensor: Tensor, makers: tuple[int, ...]) -> Figures | None:
        """The figures of the next value, perhaps those of an earlier run."""
        if self._like is not None:
            trace, same = self._like
            index = len(self.trace.values)
            earlier = trace.values[index] if index < len(trace.values) else None
            is_same = not makers or len(self.trace.operations) <= same
            if is_same and earlier is not None and earlier.makers == makers:
                known = earlier.figures
                if known is not None and known.shape == tuple(tensor.shape):
                    return known
        return figures_of(tensor)

    def _add(self, tensor: Tensor, figures: Figures | None, makers: tuple[int, ...]) -> int:
        values = self.trace.values
        value = TracedValue(len(values), figures, makers)
        size = tensor.numel() * tensor.element_size()
        wanted = size <= self._room if self._keep is None else value.index in self._keep
        if wanted and figures is not None:
            value.tensor = tensor.detach().clone()
            if self._keep is None:
                self._room -= size
        values.append(value)
        self._known[self._key(tensor)] = value.index
        return value.index

    def _key(self, tensor: Tensor) -> tuple[Any, ...]:
        address = _address(tensor)
        if not address:
            return (id(tensor),)
        return (
            address,
            self._ages.get(address, 0),
            len(self._writes.get(address, ())),
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )


def written_tensors(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among its arguments that an operator writes to."""
    written: list[Tensor] = []
    for place in traits(func).mutates:
        if isinstance(place, str):
            map_tensors(kwargs.get(place), written.append)
        elif place < len(args):
            map_tensors(args[place], written.append)
    return written
