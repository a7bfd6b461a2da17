"""Which lines of Inductor's generated Python run which kernel, and calls put around those.

The generated code is a list of lines: allocations, kernel calls, frees. While it is written, each
line that runs a kernel is marked with the nodes of the scheduler that it runs; once memory has been
planned, so that nothing done here has a say in that, calls of a hook are put before and after.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor.virtualized import V

from paritas._torch.variables import Held, Names, find_buffer, is_tensor, line_kinds, never_stored
from paritas.errors import UnsupportedTorchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HOOK = "_paritas_hear"
_MARK = "_paritas_unit"


@dataclasses.dataclass
class Unit:
    """What a run of lines executes: one kernel.

    Attributes:
        wrapper: the generated function it is in.
        nodes: of the scheduler.
        kernel: its name.
        parent: the kernel that calls the subgraph this one is in.
        reads: what it reads from outside.
        writes: what is there when it has run.
        unseen: what it wrote and overwrote again.
    """

    wrapper: Any
    nodes: list[Any]
    kernel: str = ""
    parent: Unit | None = None
    reads: list[Held] = dataclasses.field(default_factory=list)
    writes: list[Held] = dataclasses.field(default_factory=list)
    unseen: list[Held] = dataclasses.field(default_factory=list)

    def leaves(self) -> Iterator[Any]:
        """The nodes of the scheduler, none of them a fusion of others."""
        for node in self.nodes:
            yield from node.get_nodes()


class Lines:
    """What is known of the code that one compile generates.

    Attributes:
        units: the kernels, in the order in which they run.
        mutated: buffers that a later kernel writes into, to the names of those writes in order.
        wrappers: how many functions were generated.
        missed: names of buffers that no kernel was seen to write, or that could not be read.
    """

    def __init__(self, key: str) -> None:
        """`key` finds the listener when the generated code runs."""
        self.key = key
        self.units: list[Unit] = []
        self.mutated: dict[str, list[str]] = {}
        self.wrappers = 0
        self.missed: list[str] = []
        self._open: list[Unit] = []
        self._by_node: dict[int, Unit] = {}
        self._latest: dict[int, Unit] = {}
        self._waiting: dict[int, list[Any]] = {}

    @contextlib.contextmanager
    def running(self, nodes: list[Any], kernel: str) -> Iterator[None]:
        """All that is written meanwhile runs these nodes."""
        wrapper = V.graph.wrapper_code
        unit = Unit(wrapper, [*nodes, *self._waiting.pop(id(wrapper), ())], kernel, self._parent())
        self._open.append(unit)
        try:
            yield
        finally:
            self._open.pop()

    def marked(self, wrapper: Any, line: Any) -> Any:
        """The line, marked with what it runs."""
        kinds = line_kinds()
        is_call = isinstance(line, kinds.call)
        unit = self._open[-1] if self._open else None
        if unit is None or unit.wrapper is not wrapper:
            node = V.graph.scheduler.current_node if is_call else None
            if node is None:
                return line
            unit = self._by_node.setdefault(id(node), Unit(wrapper, [node], parent=self._parent()))
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
        """A buffer that others wrote the parts of is whole once what is pending has run."""
        wrapper = V.graph.wrapper_code
        groups = [getattr(b, "kernel_group", None) for b in V.graph.scheduler.backends.values()]
        latest = self._latest.get(id(wrapper))
        if any(getattr(group, "scheduled_nodes", None) for group in groups) or latest is None:
            self._waiting.setdefault(id(wrapper), []).append(node)
        else:
            latest.nodes.append(node)

    def insert(self, wrapper: Any) -> None:
        """Put the calls of the hook into a function that is otherwise ready."""
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
        names = Names(wrapper)
        lines: list[Any] = []
        for index, line in enumerate(wrapper.lines):
            unit = getattr(line, _MARK, None)
            if unit is not None and first[id(unit)] == index:
                self.units.append(unit)
                lines += self._call(unit, "input", _reads(unit, scheduler), names)
            lines.append(line)
            names.follow(line)
            if unit is not None and last[id(unit)] == index:
                names.made |= {
                    out.get_name()
                    for node in unit.leaves()
                    for out in node.outputs
                    if not out.get_mutations()
                }
                lines += self._call(unit, "output", _writes(unit, scheduler), names)
        wrapper.lines = lines
        heard = {held.variable for unit in self.units for held in (*unit.writes, *unit.unseen)}
        made = names.made - names.given - never_stored() - heard
        self.missed += sorted(name for name in made if is_tensor(find_buffer(name)))
        if not hasattr(wrapper, "parent_wrapper"):
            wrapper.header.writeline(
                f"from paritas._torch.buffers import hook as _paritas_hook\n"
                f"{HOOK} = _paritas_hook({self.key!r})"
            )

    def _call(self, unit: Unit, side: str, held: list[Held], names: Names) -> list[str]:
        texts: list[str] = []
        for one in held:
            text = names.expression(one)
            if text is None and side == "input":
                self.missed.append(one.name)
            elif text is None:
                unit.unseen.append(one)
            if text is None:
                continue
            (unit.reads if side == "input" else unit.writes).append(one)
            texts.append(text)
        if not texts:
            return []
        index = next(index for index, known in enumerate(self.units) if known is unit)
        return [f"{HOOK}({index}, {side!r}, ({', '.join(texts)},))"]

    def _parent(self) -> Unit | None:
        return self._open[-1] if self._open else None


class _MarkedText(str):
    """A line of text that knows what it runs."""

    __slots__ = (_MARK,)


def _reads(unit: Unit, scheduler: Any) -> list[Held]:
    """What comes from outside; a dependency for the sake of order alone brings nothing."""
    from torch._inductor.dependencies import WeakDep

    own = {out.get_name() for node in unit.leaves() for out in node.outputs}
    found: dict[str, Held] = {}
    for node in unit.leaves():
        for dependency in node.read_writes.reads:
            name = dependency.name
            if name in own or isinstance(dependency, WeakDep):
                continue
            real = scheduler.mutation_real_name.get(name, name)
            if is_tensor(find_buffer(real)):
                found[name] = Held(name, real)
    return list(found.values())


def _writes(unit: Unit, scheduler: Any) -> list[Held]:
    found: dict[str, Held] = {}
    for node in unit.leaves():
        for out in node.outputs:
            name = out.get_name()
            mutations = list(out.get_mutations())
            if name in never_stored():
                continue
            for target in mutations:
                real = scheduler.mutation_real_name.get(target, target)
                place = find_buffer(real)
                if is_tensor(place):
                    found[real] = Held(name, real, out.node, place)
            if not mutations and is_tensor(out.node):
                found[name] = Held(name, name, out.node)
    return list(found.values())


# --- torch's own methods, with an ear in them ------------------------------------------------

_hearing = threading.local()
_lock = threading.RLock()


@contextlib.contextmanager
def written_into(lines: Lines) -> Iterator[None]:
    """Mark and fill the code that this thread generates meanwhile; other threads' stays plain."""
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
    _patch(stack, wrapper.PythonWrapperCodegen, "writeline", _write)
    _patch(stack, wrapper.PythonWrapperCodegen, "run_wrapper_ir_passes", _plan)
    _patch(stack, scheduler.Scheduler, "codegen_extern_call", _call_extern)
    _patch(stack, scheduler.NopKernelSchedulerNode, "mark_run", _mark_nop)
    _patch(stack, cpp.CppScheduling, "flush", _flush)


def _patch(stack: contextlib.ExitStack, owner: type, name: str, wrap: Callable[..., Any]) -> None:
    original = getattr(owner, name, None)
    if not callable(original):
        message = f"torch {torch.__version__} has no {owner.__name__}.{name}, which writes kernels"
        raise UnsupportedTorchError(message)
    inherited = name not in vars(owner)

    @functools.wraps(original)
    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        lines = getattr(_hearing, "lines", None)
        if lines is None:
            return original(self, *args, **kwargs)
        return wrap(lines, original, self, *args, **kwargs)

    setattr(owner, name, patched)
    if inherited:
        stack.callback(delattr, owner, name)
    else:
        stack.callback(setattr, owner, name, original)


def _write(lines: Lines, original: Callable[..., Any], self: Any, line: Any) -> Any:
    return original(self, lines.marked(self, line))


def _plan(lines: Lines, original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    lines.insert(self)
    return result


def _call_extern(lines: Lines, original: Callable[..., Any], self: Any, node: Any) -> Any:
    with lines.running([node], _extern_name(node)):
        return original(self, node)


def _mark_nop(lines: Lines, original: Callable[..., Any], self: Any) -> Any:
    result = original(self)
    lines.complete(self)
    return result


def _flush(lines: Lines, original: Callable[..., Any], self: Any) -> Any:
    if not self.kernel_group.scheduled_nodes:
        return original(self)
    with lines.running(list(self.kernel_group.scheduled_nodes), ""):
        return original(self)


def _extern_name(node: Any) -> str:
    """The operator that an extern kernel calls; a part of a result is called after the whole."""
    described = node.node
    if not hasattr(described, "try_get_kernel_name") and not hasattr(described, "inputs"):
        return type(described).__name__
    name = getattr(described, "python_kernel_name", None)
    if not name and getattr(described, "inputs", None):
        name = getattr(described.inputs[0], "python_kernel_name", None)
    return str(name or type(described).__name__)
