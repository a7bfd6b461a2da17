"""Inductor's generated Python: which tensor each variable holds, which lines run which kernel."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor.virtualized import V

from paritas.core.errors import UnsupportedTorchError
from paritas.core.torch_private.patching import patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# --- Variables ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class HeldTensor:
    """A tensor that a kernel reads or writes.

    Attributes:
        name: Inductor's name; a kernel that writes into another buffer has a name of its own.
        variable: the buffer that holds it.
        ir: Inductor's description of the writer, or None if it is read.
        place: Inductor's description of the memory, if that is another buffer.
    """

    name: str
    variable: str
    ir: Any = None
    place: Any = None


class WrapperVariables:
    """The variables of a generated function, followed from line to line.

    Attributes:
        given: inputs and constants.
        made: all assigned variables so far.
        gone: deleted variable -> the one that has its memory now.
    """

    def __init__(self, wrapper: Any) -> None:
        """`wrapper` is the function of the current graph."""
        self.wrapper = wrapper
        self.given = {*V.graph.graph_inputs, *V.graph.constants}
        self.made: set[str] = set(self.given)
        self.gone: dict[str, str | None] = {}

    def follow(self, line: Any) -> None:
        """Record what a line allocates and frees."""
        kinds = line_kinds()
        if isinstance(line, kinds.allocate):
            self._make(line.node)
        elif isinstance(line, kinds.reuse):
            self._make(line.reused_as)
            if line.delete_old:
                self.gone[line.node.get_name()] = line.reused_as.get_name()
        elif isinstance(line, kinds.reinterpret):
            self._make(line.reused_as)
        elif isinstance(line, kinds.free) or (
            isinstance(line, kinds.free_unless_reused) and not line.is_reused
        ):
            self.gone[line.node.get_name()] = None

    def _make(self, buffer: Any) -> None:
        self.made.add(buffer.get_name())
        self.gone.pop(buffer.get_name(), None)

    def expression(self, held_tensor: HeldTensor) -> str | None:
        """A Python expression for the tensor, or None if its memory is reused by now."""
        name = held_tensor.variable
        if name in V.graph.removed_buffers or name not in self.made:
            return None
        if name not in self.gone:
            return name
        # Its memory was passed to an output of the next kernel, which has not run yet.
        heir = self.gone[name]
        while heir is not None and heir in self.gone:
            heir = self.gone[heir]
        buffer = find_buffer(name)
        if heir is None or buffer is None or held_tensor.ir is not None:
            return None
        size, stride = (
            self.wrapper.codegen_shape_tuple(tuple(extent))
            for extent in (buffer.get_size(), buffer.get_stride())
        )
        return f"reinterpret_tensor({heir}, {size}, {stride}, 0)"


def never_stored() -> set[str]:
    """Buffers that exist only inside a kernel, though memory may be allocated for them."""
    return {*V.graph.removed_buffers, *V.graph.inplaced_to_remove}


def find_buffer(name: str) -> Any:
    """Inductor's description of a buffer, an input or a constant."""
    buffer: Any = V.graph.try_get_buffer(name)
    while hasattr(buffer, "data") and not hasattr(buffer, "layout"):
        buffer = buffer.data
    return buffer


def is_tensor(buffer: Any) -> bool:
    """Whether a buffer of Inductor is one tensor."""
    from torch._inductor import ir

    if buffer is None or isinstance(buffer, torch.Tensor):
        return buffer is not None
    layout = getattr(buffer, "layout", None)
    return isinstance(layout, ir.Layout) and not isinstance(
        layout, ir.NoneLayout | ir.MultiOutputLayout
    )


@dataclasses.dataclass(frozen=True)
class LineKinds:
    """The classes of lines."""

    call: Any
    allocate: Any
    reuse: Any
    reinterpret: Any
    free: Any
    free_unless_reused: Any
    silent: tuple[type, ...]


@functools.cache
def line_kinds() -> LineKinds:
    """The classes of the lines that Inductor writes."""
    from torch._inductor.codegen import wrapper
    from torch._inductor.utils import LineContext

    try:
        return LineKinds(
            call=wrapper.KernelCallLine,
            allocate=wrapper.AllocateLine,
            reuse=wrapper.ReuseLine,
            reinterpret=wrapper.ReinterpretLine,
            free=wrapper.FreeLine,
            free_unless_reused=wrapper.FreeIfNotReusedLine,
            silent=(
                wrapper.MemoryPlanningLine,
                wrapper.FreeLine,
                wrapper.CommentLine,
                wrapper.KernelDefinitionLine,
                wrapper.EnterDeviceContextManagerLine,
                wrapper.ExitDeviceContextManagerLine,
                LineContext,
            ),
        )
    except AttributeError as error:
        message = f"torch {torch.__version__} generates lines unknown to paritas: {error}"
        raise UnsupportedTorchError(message) from error


# --- Lines that run kernels, and calls put around them --------------------------------------------

# The generated code is a list of lines: allocations, kernel calls, frees. While it is generated,
# each line that runs a kernel is marked with its scheduler nodes. After memory planning, so as not
# to influence it, calls of a hook are inserted before and after.

HOOK = "_paritas_hear"
_MARK = "_paritas_unit"


@dataclasses.dataclass
class KernelUnit:
    """One kernel, executed by a sequence of lines.

    Attributes:
        wrapper: the generated function it is in.
        nodes: its scheduler nodes.
        kernel: its name.
        parent: the kernel that calls the subgraph of this one.
        reads: the tensors it reads from outside.
        writes: the tensors that exist after it has run.
        unseen: the tensors that it wrote and overwrote again.
    """

    wrapper: Any
    nodes: list[Any]
    kernel: str = ""
    parent: KernelUnit | None = None
    reads: list[HeldTensor] = dataclasses.field(default_factory=list)
    writes: list[HeldTensor] = dataclasses.field(default_factory=list)
    unseen: list[HeldTensor] = dataclasses.field(default_factory=list)

    def leaves(self) -> Iterator[Any]:
        """The scheduler nodes, with fused ones split up."""
        for node in self.nodes:
            yield from node.get_nodes()


class WrapperLines:
    """The code that one compile generates.

    Attributes:
        units: the kernels, in execution order.
        mutated: buffer that a later kernel writes into -> the names of those writes in order.
        wrappers: number of generated functions.
        missed: names of buffers without a known writing kernel, or that could not be read.
    """

    def __init__(self, key: str) -> None:
        """`key` finds the listener when the generated code runs."""
        self.key = key
        self.units: list[KernelUnit] = []
        self.mutated: dict[str, list[str]] = {}
        self.wrappers = 0
        self.missed: list[str] = []
        self._open: list[KernelUnit] = []
        self._by_node: dict[int, KernelUnit] = {}
        self._latest: dict[int, KernelUnit] = {}
        self._waiting: dict[int, list[Any]] = {}

    @contextlib.contextmanager
    def running(self, nodes: list[Any], kernel: str) -> Iterator[None]:
        """Lines generated in this context run these nodes."""
        wrapper = V.graph.wrapper_code
        unit = KernelUnit(
            wrapper, [*nodes, *self._waiting.pop(id(wrapper), ())], kernel, self._parent()
        )
        self._open.append(unit)
        try:
            yield
        finally:
            self._open.pop()

    def mark_line(self, wrapper: Any, line: Any) -> Any:
        """The line, marked with its kernel."""
        kinds = line_kinds()
        is_call = isinstance(line, kinds.call)
        unit = self._open[-1] if self._open else None
        if unit is None or unit.wrapper is not wrapper:
            node = V.graph.scheduler.current_node if is_call else None
            if node is None:
                return line
            unit = self._by_node.setdefault(
                id(node), KernelUnit(wrapper, [node], parent=self._parent())
            )
        elif isinstance(line, kinds.silent) or (
            isinstance(line, str) and line.lstrip().startswith(("#", "del "))
        ):
            return line
        if is_call:
            unit.kernel = line.kernel_name
        if isinstance(line, str):
            line = _MarkedText(line)
        setattr(line, _MARK, unit)
        self._latest[id(wrapper)] = unit
        return line

    def complete(self, node: Any) -> None:
        """Assign a buffer that others write in parts to the last of its kernels."""
        wrapper = V.graph.wrapper_code
        groups = [getattr(b, "kernel_group", None) for b in V.graph.scheduler.backends.values()]
        latest = self._latest.get(id(wrapper))
        if any(getattr(group, "scheduled_nodes", None) for group in groups) or latest is None:
            self._waiting.setdefault(id(wrapper), []).append(node)
        else:
            latest.nodes.append(node)

    def insert(self, wrapper: Any) -> None:
        """Insert the calls of the hook into a finished function."""
        self.wrappers += 1
        scheduler = V.graph.scheduler
        for name, real in scheduler.mutation_real_name.items():
            self.mutated.setdefault(real, []).append(name)
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for index, line in enumerate(wrapper.lines):
            unit = getattr(line, _MARK, None)
            if unit is not None:
                first.setdefault(id(unit), index)
                last[id(unit)] = index
        names = WrapperVariables(wrapper)
        lines: list[Any] = []
        for index, line in enumerate(wrapper.lines):
            unit = getattr(line, _MARK, None)
            if unit is not None and first[id(unit)] == index:
                self.units.append(unit)
                lines += self._call(unit, "input", _list_reads(unit, scheduler), names)
            lines.append(line)
            names.follow(line)
            if unit is not None and last[id(unit)] == index:
                names.made |= {
                    out.get_name()
                    for node in unit.leaves()
                    for out in node.outputs
                    if not out.get_mutations()
                }
                lines += self._call(unit, "output", _list_writes(unit, scheduler), names)
        wrapper.lines = lines
        heard = {tensor.variable for unit in self.units for tensor in (*unit.writes, *unit.unseen)}
        new_names = names.made - names.given - never_stored() - heard
        self.missed += sorted(name for name in new_names if is_tensor(find_buffer(name)))
        if not hasattr(wrapper, "parent_wrapper"):
            wrapper.header.writeline(
                f"from paritas.core.torch_private.buffers import hook as _paritas_hook\n"
                f"{HOOK} = _paritas_hook({self.key!r})"
            )

    def _call(
        self, unit: KernelUnit, side: str, held_tensors: list[HeldTensor], names: WrapperVariables
    ) -> list[str]:
        texts: list[str] = []
        for held_tensor in held_tensors:
            text = names.expression(held_tensor)
            if text is None and side == "input":
                self.missed.append(held_tensor.name)
            elif text is None:
                unit.unseen.append(held_tensor)
            if text is None:
                continue
            (unit.reads if side == "input" else unit.writes).append(held_tensor)
            texts.append(text)
        if not texts:
            return []
        index = next(index for index, each_unit in enumerate(self.units) if each_unit is unit)
        return [f"{HOOK}({index}, {side!r}, ({', '.join(texts)},))"]

    def _parent(self) -> KernelUnit | None:
        return self._open[-1] if self._open else None


class _MarkedText(str):
    """A line of text that can be marked with its kernel."""

    __slots__ = (_MARK,)


def _list_reads(unit: KernelUnit, scheduler: Any) -> list[HeldTensor]:
    """The tensors read from outside; dependencies for ordering only are skipped."""
    from torch._inductor.dependencies import WeakDep

    names = {out.get_name() for node in unit.leaves() for out in node.outputs}
    reads: dict[str, HeldTensor] = {}
    for node in unit.leaves():
        for dependency in node.read_writes.reads:
            name = dependency.name
            if name in names or isinstance(dependency, WeakDep):
                continue
            real = scheduler.mutation_real_name.get(name, name)
            if is_tensor(find_buffer(real)):
                reads[name] = HeldTensor(name, real)
    return list(reads.values())


def _list_writes(unit: KernelUnit, scheduler: Any) -> list[HeldTensor]:
    writes: dict[str, HeldTensor] = {}
    for node in unit.leaves():
        for out in node.outputs:
            name = out.get_name()
            mutations = list(out.get_mutations())
            if name in never_stored():
                continue
            for target in mutations:
                real = scheduler.mutation_real_name.get(target, target)
                buffer = find_buffer(real)
                if is_tensor(buffer):
                    writes[real] = HeldTensor(name, real, out.node, buffer)
            if not mutations and is_tensor(out.node):
                writes[name] = HeldTensor(name, name, out.node)
    return list(writes.values())


# --- Patched methods of torch ---------------------------------------------------------------------

_hearing = threading.local()
_lock = threading.RLock()


@contextlib.contextmanager
def instrumenting(lines: WrapperLines) -> Iterator[None]:
    """Instrument the code that this thread generates in this context; other threads are not."""
    with _lock, contextlib.ExitStack() as stack:
        _patch_all(stack)
        before = getattr(_hearing, "lines", None)
        _hearing.lines = lines
        try:
            yield
        finally:
            _hearing.lines = before


def _patch_all(stack: contextlib.ExitStack) -> None:
    from torch._inductor import scheduler
    from torch._inductor.codegen import cpp, wrapper

    line_kinds()
    wrappers: list[tuple[type, str, Callable[..., Any]]] = [
        (wrapper.PythonWrapperCodegen, "writeline", _mark_line),
        (wrapper.PythonWrapperCodegen, "run_wrapper_ir_passes", _insert_calls),
        (scheduler.Scheduler, "codegen_extern_call", _mark_extern_call),
        (scheduler.NopKernelSchedulerNode, "mark_run", _mark_nop),
        (cpp.CppScheduling, "flush", _flush),
    ]
    for owner, name, wrap in wrappers:
        patch(stack, owner, name, functools.partial(_if_hearing, wrap), "generates kernels")


def _if_hearing(wrap: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def call_patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        lines = getattr(_hearing, "lines", None)
        if lines is None:
            return original(self, *args, **kwargs)
        return wrap(lines, original, self, *args, **kwargs)

    return call_patched


def _mark_line(lines: WrapperLines, original: Callable[..., Any], self: Any, line: Any) -> Any:
    return original(self, lines.mark_line(self, line))


def _insert_calls(
    lines: WrapperLines, original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> Any:
    result = original(self, *args, **kwargs)
    lines.insert(self)
    return result


def _mark_extern_call(
    lines: WrapperLines, original: Callable[..., Any], self: Any, node: Any
) -> Any:
    with lines.running([node], _extern_name(node)):
        return original(self, node)


def _mark_nop(lines: WrapperLines, original: Callable[..., Any], self: Any) -> Any:
    result = original(self)
    lines.complete(self)
    return result


def _flush(lines: WrapperLines, original: Callable[..., Any], self: Any) -> Any:
    if not self.kernel_group.scheduled_nodes:
        return original(self)
    with lines.running(list(self.kernel_group.scheduled_nodes), ""):
        return original(self)


def _extern_name(node: Any) -> str:
    """The operator that an extern kernel calls; a part of a result has the name of the whole."""
    described = node.node
    if not hasattr(described, "try_get_kernel_name") and not hasattr(described, "inputs"):
        return type(described).__name__
    name = getattr(described, "python_kernel_name", None)
    if not name and getattr(described, "inputs", None):
        name = getattr(described.inputs[0], "python_kernel_name", None)
    return str(name or type(described).__name__)
