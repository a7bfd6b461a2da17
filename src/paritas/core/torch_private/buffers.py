"""Report every tensor that Inductor's fused code materializes, while the code runs.

A graph is compiled again, with the same fusion. Its generated Python calls a listener before each
kernel with the tensors it reads, and after it with those it wrote.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from typing import TYPE_CHECKING, Any, Literal

import torch

from paritas.core.errors import UnsupportedTorchError
from paritas.core.torch_private.generated_code import WrapperLines, instrumenting
from paritas.core.torch_private.graphs import is_view, node_traits
from paritas.core.torch_private.inductor import compile_again
from paritas.core.torch_private.passes import POST_GRAD, listening_to_passes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.fx import GraphModule, Node

    from paritas.core.torch_private.generated_code import HeldTensor, KernelUnit
    from paritas.core.torch_private.inductor import LoweredGraph


# --- Listening to compiled code -------------------------------------------------------------------

Side = Literal["input", "output"]

# Generate one Python function with all kernels of the graph, without caches.
_PLAIN_OPTIONS = {
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "cpp_wrapper": False,
    "graph_partition": False,
    "memory_planning": False,
}


def compile_listening(
    lowered: LoweredGraph,
    listener: Callable[[SeenBuffer], None],
    options: dict[str, Any] | None = None,
) -> ListeningCode:
    """Compile a graph again into code that reports every buffer it reads and writes.

    For use while the program runs, like `compile_again`. Fusion and memory reuse are the same as in
    the graph's own code.
    """
    key = f"graph {next(_graph_numbers)}"
    ear = _BufferListener(listener)
    _listeners[key] = ear
    lines = WrapperLines(key)
    lineage = NodeLineage(lowered.module)
    with listening_to_passes(lineage), instrumenting(lines):
        code = compile_again(lowered, {**(options or {}), **_PLAIN_OPTIONS})
    if lines.wrappers == 0 or lineage.rewritten is None:
        message = (
            f"torch {torch.__version__} compiled a graph without showing its code, so the buffers "
            "of fused code cannot be recorded; use source='fx' instead"
        )
        raise UnsupportedTorchError(message)
    ear.kernels = _describe_kernels(lines, lineage)
    return ListeningCode(code, ear.kernels, tuple(lines.missed), ear)


@dataclasses.dataclass(frozen=True)
class ListeningCode:
    """A compiled graph that reports its buffers; call it like any compiled graph.

    Attributes:
        code: the compiled graph.
        kernels: the kernels it runs, in order.
        missed: names of buffers that are used by code that cannot be instrumented.
        ear: the receiver of the reports, kept alive here.
    """

    code: Callable[[list[Any]], Sequence[Any]]
    kernels: tuple[Kernel, ...]
    missed: tuple[str, ...]
    ear: _BufferListener

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run it; the list of arguments is cleared."""
        return self.code(args)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All buffers that the kernels write, in order."""
        return tuple(buffer for kernel in self.kernels for buffer in kernel.writes)


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A tensor in the memory of the compiled code.

    Attributes:
        name: Inductor's name for it, for example `buf3`; an input of the graph has its own.
        kernel: the kernel that writes it; "" for an input or a constant.
        nodes: the graph nodes that its kernel computes for it, in order.
        exact: the node with exactly its value, None if unknown.
        reads: names of the buffers that its kernel reads.
    """

    name: str
    kernel: str = ""
    nodes: tuple[str, ...] = ()
    exact: str | None = None
    reads: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A call of the compiled code.

    Attributes:
        name: name of the kernel or operator.
        nodes: the graph nodes that it computes.
        reads: the buffers it reads.
        writes: the buffers it writes.
        unseen: names of buffers that it wrote and then overwrote itself.
    """

    name: str
    nodes: tuple[str, ...]
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    unseen: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class SeenBuffer:
    """A tensor just before it is read or after it was written; only valid during the call.

    Attributes:
        position: its position in the kernel's reads or writes.
    """

    kernel: Kernel
    buffer: Buffer
    side: Side
    position: int
    tensor: Tensor


class _BufferListener:
    """Only the compiled callable keeps it alive: generated modules are never freed."""

    def __init__(self, listener: Callable[[SeenBuffer], None]) -> None:
        self.listener = listener
        self.kernels: tuple[Kernel, ...] = ()

    def hear(self, index: int, side: Side, tensors: tuple[Any, ...]) -> None:
        kernel = self.kernels[index]
        buffers = kernel.reads if side == "input" else kernel.writes
        for position, (buffer, tensor) in enumerate(zip(buffers, tensors, strict=True)):
            if isinstance(tensor, torch.Tensor):
                self.listener(SeenBuffer(kernel, buffer, side, position, tensor))


_listeners: weakref.WeakValueDictionary[str, _BufferListener] = weakref.WeakValueDictionary()
_graph_numbers = itertools.count()


def hook(key: str) -> Callable[[int, Side, tuple[Any, ...]], None]:
    """The function that generated code calls, by the key in the code."""
    return functools.partial(_pass_to_listener, key)


def _pass_to_listener(key: str, index: int, side: Side, tensors: tuple[Any, ...]) -> None:
    ear = _listeners.get(key)
    if ear is not None:
        ear.hear(index, side, tensors)


def _describe_kernels(lines: WrapperLines, lineage: NodeLineage) -> tuple[Kernel, ...]:
    naming = BufferNaming(lineage, lines)
    given_buffers = {
        name: Buffer(name, "", (node,), node) for name, node in lineage.input_names().items()
    }
    result = []
    for unit in lines.units:
        reads = tuple(given_buffers.get(read.name) or Buffer(read.name) for read in unit.reads)
        names = tuple(buffer.name for buffer in reads)
        kernel_name = naming.of_kernel(unit)
        writes = tuple(
            Buffer(write.name, unit.kernel, standing.nodes, standing.exact, names)
            for write, standing in zip(unit.writes, naming.name(unit), strict=True)
        )
        given_buffers |= {buffer.name: buffer for buffer in writes}
        unseen = tuple(tensor.name for tensor in unit.unseen)
        result.append(Kernel(unit.kernel, kernel_name, reads, writes, unseen))
    return tuple(result)


# --- The graph nodes of a buffer ------------------------------------------------------------------

# Inductor rewrites the graph before it creates buffers. Replacements of nodes are recorded as they
# happen, so a buffer can be named after nodes of the original graph.


class NodeLineage:
    """Follows a graph through the post-grad passes, as their listener.

    Attributes:
        rewritten: the lowered graph, once known.
    """

    def __init__(self, module: GraphModule) -> None:
        """`module` is the graph before the passes, which must not change."""
        self.rewritten: GraphModule | None = None
        self._before = {node.name: node for node in module.graph.nodes}
        self._order = {name: index for index, name in enumerate(self._before)}
        self._replaced: dict[str, list[str]] = {}
        self._depth = 0

    # --- while the passes run -----------------------------------------------------------------

    def enter_stage(
        self, stage: str, module: GraphModule, constants: dict[str, Tensor] | None = None
    ) -> None:
        """The outermost stage is that of the graph; inner ones are those of its branches."""
        if self._depth == 0 and stage == POST_GRAD and self.rewritten is None:
            self.rewritten = module
            module._register_replace_node_hook(self._note)
        self._depth += 1

    def leave_stage(self, module: GraphModule) -> None:
        """See `enter_stage`."""
        self._depth -= 1
        if self._depth == 0 and self.rewritten is not None:
            self.rewritten._unregister_replace_node_hook(self._note)

    def abandon_stage(self) -> None:
        """See `enter_stage`."""
        self._depth -= 1

    def enter_pass(self, name: str, module: GraphModule) -> None:
        """Single passes do not matter here."""

    def leave_pass(self, module: GraphModule) -> None:
        """Single passes do not matter here."""

    def split(self, outputs: int, forward: GraphModule, backward: GraphModule) -> None:
        """Post-grad passes split nothing."""

    def _note(self, old: Node, new: str, user: Node) -> None:
        before = self._replaced.setdefault(new, [])
        if old.name not in before:
            before.append(old.name)

    # --- afterwards ---------------------------------------------------------------------------

    def is_known(self, node: Any) -> bool:
        """Whether a node belongs to the lowered graph itself, and not to a branch."""
        return self.rewritten is not None and node.graph is self.rewritten.graph

    def input_names(self) -> dict[str, str]:
        """Inductor's names of the graph's inputs and constants -> their nodes."""
        input_ops = {"placeholder", "get_attr"}
        return {
            str(node.target): node.name for node in self._before.values() if node.op in input_ops
        }

    def same_value(self, node: Node) -> str | None:
        """The node before the passes with the same value as one after them."""
        node = _find_computing_node(node)
        if node.name in self._before:
            return node.name if _have_same_spec(node, self._before[node.name]) else None
        for name in reversed(self._ancestors(node.name)):
            # If the old node still exists, the new one was inserted after it, not in its place.
            if name not in self._alive and _have_same_spec(node, self._before[name]):
                return name
        return None

    def origins(self, node: Node) -> list[str]:
        """The nodes before the passes that one after them comes from."""
        node = _find_computing_node(node)
        if node.name in self._before:
            return [node.name]
        return self._ancestors(node.name)

    def in_order(self, names: set[str]) -> list[str]:
        """Sort names by their order in the graph."""
        return sorted(names, key=self._order.__getitem__)

    def leading_to(self, name: str, within: set[str], until: set[str]) -> set[str]:
        """The nodes in `within`, or removed by rewriting, that one node is computed from."""
        reached: set[str] = set()
        waiting = [self._before[name]]
        while waiting:
            node = waiting.pop()
            skipped = node.op in {"placeholder", "get_attr"} or node.name in until
            if node.name in reached or (skipped and node.name != name):
                continue
            inside = node.name == name or node.name in within or node.name not in self._alive
            if not inside and not is_view(node):
                continue
            reached.add(node.name)
            waiting += node.all_input_nodes
        return reached

    @functools.cached_property
    def _alive(self) -> set[str]:
        if self.rewritten is None:
            return set()
        return {node.name for node in self.rewritten.graph.nodes}

    def _ancestors(self, name: str, visited: frozenset[str] = frozenset()) -> list[str]:
        ancestors: list[str] = []
        for old in self._replaced.get(name, ()):
            if old in self._before:
                ancestors.append(old)
            elif old not in visited:
                ancestors += self._ancestors(old, visited | {name})
        return ancestors


@dataclasses.dataclass(frozen=True)
class BufferNodes:
    """The graph nodes of a buffer, in order, and the node with exactly its value, if known."""

    nodes: tuple[str, ...] = ()
    exact: str | None = None


class BufferNaming:
    """Names the buffers of one compile, kernel by kernel in the order in which they run."""

    def __init__(self, lineage: NodeLineage, lines: WrapperLines) -> None:
        self._lineage = lineage
        self._lines = lines
        self._done: set[str] = set()
        # Name of a buffer that an extern kernel reads -> the nodes of that kernel.
        self._called: dict[str, set[Node]] = {}
        for unit in lines.units:
            for leaf in unit.leaves():
                if leaf.is_extern():
                    for read in unit.reads:
                        self._called.setdefault(read.name, set()).update(self._origins(leaf.node))

    def name(self, unit: KernelUnit) -> list[BufferNodes]:
        """The nodes of each buffer that a kernel writes."""
        within = self._within(unit)
        standing = [self._standing(write, within) for write in unit.writes]
        self._done |= {buffer.exact for buffer in standing if buffer.exact is not None}
        return standing

    def of_kernel(self, unit: KernelUnit) -> tuple[str, ...]:
        """All nodes of a kernel."""
        return tuple(self._lineage.in_order(self._within(unit)))

    def _within(self, unit: KernelUnit) -> set[str]:
        """The nodes computed in a kernel; inside a branch, the node with the branch."""
        names: set[str] = set()
        for leaf in unit.leaves():
            nodes = self._origins(leaf.node)
            # The arguments of an extern kernel were computed before.
            names |= self._names(_find_sinks(nodes) if leaf.is_extern() else nodes)
        if not names and unit.parent is not None:
            return self._within(unit.parent)
        return names

    def _standing(self, held_tensor: HeldTensor, within: set[str]) -> BufferNodes:
        exact = self._exact(held_tensor)
        own_names = (
            {exact} if exact is not None else self._names(self._origins(held_tensor.ir)) or within
        )
        if not own_names:
            return BufferNodes()
        last = self._lineage.in_order(own_names)[-1]
        nodes = self._lineage.leading_to(last, within, self._done)
        return BufferNodes(tuple(self._lineage.in_order(nodes)), exact)

    def _origins(self, ir: Any) -> set[Node]:
        nodes = getattr(ir, "origins", None) or ()
        return {node for node in nodes if self._lineage.is_known(node)}

    def _names(self, nodes: set[Node]) -> set[str]:
        return {name for node in nodes for name in self._lineage.origins(node)}

    def _exact(self, held_tensor: HeldTensor) -> str | None:
        """The node with exactly a buffer's value, if Inductor's information is reliable."""
        writes = self._lines.mutated.get(held_tensor.variable, [])
        if held_tensor.name != held_tensor.variable:
            node = self._writer(held_tensor) if writes and writes[-1] == held_tensor.name else None
        elif writes:
            return None  # its name refers to a later write
        else:
            node = held_tensor.ir.get_origin_node() or self._argument(held_tensor)
        if node is None or not self._lineage.is_known(node) or not _has_spec_of(held_tensor, node):
            return None
        return self._lineage.same_value(node)

    def _writer(self, held_tensor: HeldTensor) -> Node | None:
        """The node that overwrites the whole memory of another buffer."""
        origins = self._origins(held_tensor.ir)
        named = held_tensor.place.get_origin_node()
        if named is not None and _find_computing_node(named) in origins:
            return _find_computing_node(named)
        writers = [
            node
            for node in origins
            if node.op == "call_function"
            and (kind := node_traits(node)) is not None
            and 0 in kind.mutates
            and getattr(node.args[0], "name", "") == held_tensor.variable
        ]
        return writers[0] if len(writers) == 1 else None

    def _argument(self, held_tensor: HeldTensor) -> Node | None:
        """A value that was copied to another layout for an extern kernel."""
        nodes = self._origins(held_tensor.ir)
        callers = _find_sinks(nodes)
        if len(callers) != 1 or not callers <= self._called.get(held_tensor.name, set()):
            return None
        (caller,) = callers
        values = _find_sinks(nodes - callers)
        if len(values) != 1 or not values <= set(caller.all_input_nodes):
            return None
        return next(iter(values))


def _find_sinks(nodes: set[Node]) -> set[Node]:
    """The nodes that no other of these nodes uses."""
    return {node for node in nodes if not any(user in nodes for user in node.users)}


# Operators that return their argument's values unchanged.
_PASSES_VALUE_ON = {
    "prims.inductor_force_stride_order.default",
    "aten.alias.default",
    "aten.detach.default",
}


def _find_computing_node(node: Node) -> Node:
    """The node that computes a value, behind nodes that only pass it on."""
    while str(node.target) in _PASSES_VALUE_ON:
        node = node.all_input_nodes[0]
    return node


def _have_same_spec(new: Node, old: Node) -> bool:
    new_value, old_value = new.meta.get("val"), old.meta.get("val")
    if not isinstance(new_value, torch.Tensor) or not isinstance(old_value, torch.Tensor):
        return False
    return new_value.dtype is old_value.dtype and _describe_sizes(
        new_value.shape
    ) == _describe_sizes(old_value.shape)


def _has_spec_of(held_tensor: HeldTensor, node: Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    memory = held_tensor.ir if held_tensor.place is None else held_tensor.place
    return memory.get_dtype() is value.dtype and _describe_sizes(
        memory.get_size()
    ) == _describe_sizes(value.shape)


def _describe_sizes(sizes: Any) -> list[str]:
    return [str(getattr(getattr(size, "node", None), "expr", size)) for size in sizes]
