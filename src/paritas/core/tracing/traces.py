"""The trace of one run: every operator, what it read and what it gave, forward and backward.

Values are kept as a few figures each, so that the traces of two programs can be compared value by
value in little memory; whole tensors are kept up to a limit, or where they are asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import sys
import weakref
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from paritas.core.execution.observation import storage_address as _address
from paritas.core.operators.catalogue import operators_of
from paritas.core.time_limit import UNLIMITED, TimeLimit
from paritas.core.torch_private.operators import (
    map_call,
    map_tensors,
    takes_shape_only,
    tensors_in,
    traits,
)
from paritas.core.torch_private.unseen_kernels import (
    Launch,
    WatchedContext,
    module_state,
    unseen_kernel,
    watch_autograd_functions,
)
from paritas.core.torch_private.watching import (
    OperatorWatch,
    has_values,
    in_backward,
    running_function,
    running_node,
    unseen,
    upcoming_node,
    watch_module_calls,
)
from paritas.core.tracing.figures import Figures, figures_of
from paritas.core.tracing.module_names import ModuleNames, result_values
from paritas.core.tracing.source_lines import (
    NOWHERE,
    UserLine,
    format_line,
    function_of,
    user_frame,
    user_frames,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from types import CodeType, FrameType, FunctionType

    from torch import Tensor

    from paritas.core.torch_private.operators import Operator
    from paritas.core.torch_private.unseen_kernels import UnseenKernel


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
_ZEROS = ("zeros", "new_zeros")
_COPIES = operators_of("copies") | {"lift_fresh", "_unsafe_view"}


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
    func: Operator | UnseenKernel
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

    def maker_of(self, value: int) -> Operation | None:
        """The last operator that gave a value, or wrote to it; None if it is from outside."""
        makers = self.values[value].makers
        return self.operations[makers[-1]] if makers else None

    def operations_behind(self, values: Iterable[int], since: int = 0) -> set[int]:
        """The operators that lead to some values; `since` is the first that counts."""
        behind: set[int] = set()
        todo = list(values)
        while todo:
            for maker in self.values[todo.pop()].makers:
                if maker >= since and maker not in behind:
                    behind.add(maker)
                    todo += self.operations[maker].inputs
        return behind

    def last_like(self, figures: Figures, tolerance: float) -> TracedValue | None:
        """The last value of a shape with these figures, among those that an operator gave."""
        best: TracedValue | None = None
        for value in reversed(self.values):
            value_figures = value.figures
            if value_figures is None or value_figures.shape != figures.shape or not value.makers:
                continue
            if value_figures.signed == figures.signed:
                return value
            if best is None and value_figures.distance(figures) <= tolerance:
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


@dataclasses.dataclass(frozen=True, slots=True)
class _KernelCall:
    """A call that may launch a kernel: as an operator, with its arguments and what it reads."""

    kernel: UnseenKernel
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True)
class _Allocation:
    """The user's function that made some memory, with its arguments at that time."""

    code: CodeType
    function: FunctionType | None
    args: tuple[Any, ...]
    inputs: tuple[int, ...]

    def kernel_call(self) -> _KernelCall:
        """The function as a kernel; only as a part of it while it has not returned."""
        if self.function is None or self.code in _running_code():
            kernel = unseen_kernel(self.code, Launch.PART)
        else:
            kernel = unseen_kernel(self.function, Launch.FUNCTION)
        return _KernelCall(kernel, self.args, {}, self.inputs)


def _running_code() -> Iterator[CodeType]:
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  (as `user_frames`)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


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
        limit: TimeLimit = UNLIMITED,
        keep: Collection[int] | None = None,
        room: int = 0,
        instead: Mapping[int, Mapping[int, Tensor]] | None = None,
        like: tuple[Trace, int] | None = None,
    ) -> None:
        """Record nothing yet.

        Args:
            limit: the time for the run, which is ended with `OutOfTimeError`.
            keep: the values to keep whole; None for as many as there is room for.
            room: how many bytes of values to keep whole.
            instead: by the index of an operator and the place among its results: the value to
                continue with instead of the program's own.
            like: an earlier run of the same program, and the operator up to which this one is the
                same; its figures are not computed again.
        """
        self.trace = Trace()
        self._limit = limit
        self._keep = None if keep is None else frozenset(keep)
        self._room = room
        self._instead = instead or {}
        self._like = like
        self._names = ModuleNames()
        self._modules: list[str] = []
        # The calls that are running; they are part of the trace from their first operator on.
        self._running: list[_RunningCall] = []
        # What may write to memory without torch's knowledge: autograd functions that are running,
        # and the functions that allocated it.
        self._autograd_functions: set[Any] = set()
        self._launching: list[_KernelCall] = []
        self._allocations: dict[int, _Allocation] = {}
        self._nodes: dict[int, int] = {}
        # A tensor is known by its place in memory; what is written there makes it another value.
        self._known: dict[tuple[Any, ...], int] = {}
        self._writes: dict[int, list[int]] = {}
        self._ages: dict[int, int] = {}
        # Memory that was freed may be given to a tensor that no operator makes, as a gradient that
        # comes in from outside.
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        # What the running operator reads, by address, and writes to.
        self._read: dict[int, Tensor] = {}
        self._written: list[Tensor] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._stack = contextlib.ExitStack()
        self._stack.callback(watch_module_calls(self._around))
        self._stack.callback(
            watch_autograd_functions(
                self._around_apply, self._around_backward, self._autograd_functions
            )
        )
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

    def _around_apply(
        self,
        function: type[torch.autograd.Function],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[..., Any],
    ) -> Any:
        if in_backward():
            return call(*args, **kwargs)
        read: list[int] = []
        with unseen():
            noted = map_tensors(args, functools.partial(self._refer, read))
        launch = _KernelCall(unseen_kernel(function, Launch.APPLY), noted, kwargs, tuple(read))
        return self._launch(function, launch, functools.partial(call, *args, **kwargs))

    def _around_backward(
        self,
        function: type[torch.autograd.Function],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[..., Any],
    ) -> Any:
        context, *gradients = args
        read: list[int] = []
        refer = functools.partial(self._refer, read)
        saved: list[ValueRef | None] = []

        def look(tensors: tuple[Tensor | None, ...]) -> None:
            with unseen():
                saved.extend(map_tensors(tensors, refer))

        with unseen():
            noted = (saved, context, *map_tensors(gradients, refer))
        launch = _KernelCall(unseen_kernel(function, Launch.BACKWARD), noted, {}, read)
        watched = WatchedContext(context, look)
        return self._launch(
            function, launch, functools.partial(call, watched, *gradients, **kwargs)
        )

    def _launch(self, launcher: Any, launch: _KernelCall, call: Callable[[], Any]) -> Any:
        """Make a call that may launch kernels, and note one that wrote to its results."""
        part = unseen_kernel(launcher, Launch.PART)
        self._launching.append(dataclasses.replace(launch, kernel=part))
        try:
            result = call()
        finally:
            self._launching.pop()
        with unseen():
            tensors = _tensors_in(result)
            if any(map(self._is_written_unseen, tensors)):
                self._note_kernel(launch, tensors)
        return result

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
                tensors = _tensors_in(result)
                if running.path is not None:
                    self._note_module_kernel(traced, tensors)
                traced.outputs = tuple(map(self._value_of, tensors))
            traced.stop = len(self.trace.operations)
        return result

    def _note_module_kernel(self, call: TracedCall, tensors: list[Tensor]) -> None:
        """Note the kernel of a module that gave its results, if no operator did."""
        if not any(map(self._is_written_unseen, tensors)):
            return
        read = list(call.inputs)
        refer = functools.partial(self._refer, read)
        state = [(name, refer(tensor)) for name, tensor in module_state(call.target)]
        kernel = unseen_kernel(type(call.target), Launch.MODULE)
        args = (state, call.target, *call.args)
        self._note_kernel(_KernelCall(kernel, args, call.kwargs, tuple(read)), tensors)

    def _note_kernel(
        self, call: _KernelCall, tensors: list[Tensor], site: Operation | None = None
    ) -> None:
        """Note a kernel that wrote to some tensors, as the operator that gave them.

        Args:
            site: an operator in the place where it was launched; None if that is here.
        """
        operations = self.trace.operations
        operation = Operation(
            len(operations), call.kernel, call.args, call.kwargs, tuple(call.inputs)
        )
        if site is None:
            operation.module = self._modules[-1] if self._modules else ""
            self._note_place(operation)
        else:
            for name in ("module", "line", "frames", "is_backward", "forward", "function"):
                setattr(operation, name, getattr(site, name))
        operations.append(operation)
        expected = self._instead.get(operation.index, {})
        outputs: list[int] = []
        for slot, tensor in enumerate(tensors):
            if not self._is_written_unseen(tensor):
                outputs.append(self._value_of(tensor))
                continue
            if slot in expected:  # not as a write that autograd counts
                tensor.data.copy_(expected[slot])
            self._writes[_address(tensor)].append(operation.index)
            figures = self._figures_of(tensor, (operation.index,))
            outputs.append(self._add(tensor, figures, (operation.index,)))
        operation.outputs = tuple(outputs)
        operation.is_finished = True

    def _note_allocation(self, tensor: Tensor) -> None:
        """Note which function of the user allocates a tensor."""
        frame = user_frame(above=2)
        if frame is None or frame.f_code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
            return
        code, read = frame.f_code, list[int]()
        names = code.co_varnames[: code.co_argcount]
        values = [frame.f_locals.get(name) for name in names]
        args = tuple(map_tensors(values, functools.partial(self._refer, read)))
        self._allocations[_address(tensor)] = _Allocation(
            code, function_of(frame), args, tuple(read)
        )

    def _note_read(self, tensor: Tensor) -> None:
        """Note the kernel that wrote to what an operator is going to read, if one did."""
        if not self._is_written_unseen(tensor):
            return
        allocation = self._allocations.get(_address(tensor))
        if self._launching:
            call = self._launching[-1]
        elif allocation is not None:
            call = allocation.kernel_call()
        else:
            return
        self._note_kernel(call, [tensor], self.trace.operations[self._writes[_address(tensor)][-1]])

    def _is_written_unseen(self, tensor: Tensor) -> bool:
        """Whether a tensor has values that no operator gave it."""
        writers = self._writes.get(_address(tensor))
        if not writers or not tensor.numel() or not has_values(tensor):
            return False
        name = traits(self.trace.operations[writers[-1]].func).name
        if name.startswith(_UNSET):
            return True
        return name.startswith(_ZEROS) and bool(tensor.detach().any())

    def _refer(self, read: list[int], tensor: Tensor) -> ValueRef:
        read.append(self._value_of(tensor))
        return ValueRef(read[-1])

    def _note_calls(self) -> None:
        """Note what the running calls read, before their first operator can write to it."""
        for running in self._running:
            if running.traced is not None:
                continue
            read: list[int] = []
            refer = functools.partial(self._refer, read)
            running.traced = TracedCall(
                running.target,
                running.path,
                *map_call(running.args, running.kwargs, refer),
                tuple(read),
                len(self.trace.operations),
            )
            self.trace.calls.append(running.traced)

    def note_result(self, result: Any) -> None:
        """Note what the program returns: a kernel that torch does not see may have given it."""
        with unseen():
            for tensor in _tensors_in(result):
                self._note_read(tensor)

    def listens(self) -> bool:
        """Every operator is recorded."""
        return True

    def before(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation:
        """Record what an operator reads, before it can write to it."""
        if self._limit.is_over:
            raise OutOfTimeError
        operations = self.trace.operations
        if not in_backward():
            with unseen():
                self._note_calls()
        self._read, self._written = {}, written_tensors(func, args, kwargs)
        read: list[int] = []
        refer = functools.partial(self._refer, read)
        with unseen():
            if traits(func).name == "lift_fresh":  # new memory that no operator allocated
                self._renew(args[0], [])
            self._note_kernels_before(func, args, kwargs)
            noted, named = map_call(args, kwargs, refer)
        module = self._modules[-1] if self._modules else ""
        operation = Operation(len(operations), func, noted, named, tuple(read), module=module)
        self._note_place(operation)
        operations.append(operation)
        return operation

    def _note_kernels_before(
        self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Note the kernels that wrote to what an operator reads; a view reads nothing yet."""
        if traits(func).view or takes_shape_only(traits(func)):
            return
        written = {_address(tensor) for tensor in self._written}

        def note(tensor: Tensor) -> None:
            if _address(tensor) not in written:
                self._note_read(tensor)

        map_tensors([*args, *kwargs.values()], note)

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
        expected = self._instead.get(operation.index)
        if expected is None:
            return None
        written = {_address(tensor) for tensor in self._written}
        slots = itertools.count()

        def choose(tensor: Tensor) -> Tensor:
            value = expected.get(next(slots))
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
        returned = set(map(_address, tensors_in(result)))
        return [tensor for tensor in self._written if _address(tensor) not in returned]

    def _note_results(self, operation: Operation, result: Any) -> Iterator[int]:
        results = tensors_in(result)
        written = {_address(tensor) for tensor in self._written}
        for address in written:
            self._writes.setdefault(address, []).append(operation.index)
        for tensor in results:
            if _address(tensor) not in self._read:
                self._renew(tensor, [operation.index])
        results += self._only_written(result)
        kind = traits(operation.func)
        if kind.name.startswith((*_UNSET, *_ZEROS)):
            for tensor in results:
                self._note_allocation(tensor)
        for tensor in results:
            is_unset = kind.name.startswith(_UNSET) or (
                kind.view and self._is_written_unseen(tensor)
            )
            figures = None if is_unset else self._figures_of(tensor, (operation.index,))
            yield self._add(tensor, figures, (operation.index,))
        self._read, self._written = {}, []

    def _renew(self, tensor: Tensor, writes: list[int]) -> None:
        """Note that the memory of a tensor was allocated anew."""
        address = _address(tensor)
        self._ages[address] = self._ages.get(address, 0) + 1
        self._writes[address] = writes
        if address:
            self._storages[address] = weakref.ref(tensor.untyped_storage())

    def _value_of(self, tensor: Tensor) -> int:
        """The value that a tensor holds now."""
        address = _address(tensor)
        self._read[address] = tensor
        storage = self._storages.get(address)
        if storage is not None and storage() is None:
            self._renew(tensor, [])
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
                figures = earlier.figures
                if figures is not None and figures.shape == tuple(tensor.shape):
                    return figures
        return figures_of(tensor)

    def _add(self, tensor: Tensor, figures: Figures | None, makers: tuple[int, ...]) -> int:
        values = self.trace.values
        value = TracedValue(len(values), figures, makers)
        size = tensor.numel() * tensor.element_size()
        expected = size <= self._room if self._keep is None else value.index in self._keep
        if expected and figures is not None:
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


def _tensors_in(result: Any) -> list[Tensor]:
    return [tensor for _, tensor in result_values(result) if isinstance(tensor, torch.Tensor)]


def written_tensors(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among its arguments that an operator writes to."""
    written: list[Tensor] = []
    for mutate in traits(func).mutates:
        if isinstance(mutate, str):
            written += tensors_in(kwargs.get(mutate))
        elif mutate < len(args):
            written += tensors_in(args[mutate])
    return written
