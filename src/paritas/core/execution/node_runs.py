"""The nodes of a captured graph, one by one: how each ran among the others, and each alone."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from paritas.core.execution.observation import storage_address
from paritas.core.execution.program import ValueProgram
from paritas.core.execution.saved_state import Copier, RandomState, Surroundings
from paritas.core.torch_private.global_state import running_eagerly
from paritas.core.torch_private.graphs import copy_graph, output_node, returned_values
from paritas.core.torch_private.operators import map_tensors
from paritas.core.torch_private.vmapped import (
    VmapLevel,
    hide_dimension,
    inside_vmap,
    is_wrapped,
    leaving_transforms,
    show_dimension,
    transform_levels,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from torch import Tensor
    from torch.fx import Graph

    from paritas.core.execution.graph_runs import CapturedProgram
    from paritas.core.execution.observation import RunOptions

    # Where a tensor is in the value of a node: empty for the value itself.
    ValuePath = tuple[int, ...]


# --- How each node ran among the others -----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class NodeRun:
    """How a node ran in the whole graph.

    Attributes:
        value: its result before anything wrote to it.
        surroundings: grad mode and autocast at this node.
        rng: the generators before it ran, if the graph draws.
        wrote: the earlier nodes whose values it changed, in order.
        level: the `torch.vmap` around it.
        is_batched: a dimension of its value is hidden there.
        is_hidden: its value cannot be seen: it is inside other transforms of functorch.
        is_given: it is an input or an attribute of the graph.
    """

    value: Any
    surroundings: Surroundings
    rng: RandomState | None = None
    wrote: tuple[str, ...] = ()
    level: VmapLevel | None = None
    is_batched: bool = False
    is_hidden: bool = False
    is_given: bool = False

    def tensors(self) -> list[ValuePath]:
        """Where its value has tensors."""
        return [] if self.is_hidden else [path for path, _ in tensors_by_path(self.value)]


@dataclasses.dataclass(frozen=True)
class GraphRun:
    """How all nodes of a graph ran.

    Attributes:
        nodes: by name, in order.
        shared: the nodes whose value shares memory with another one.
        overwritten: the nodes whose value a later node changes.
    """

    nodes: dict[str, NodeRun]
    shared: frozenset[str]
    overwritten: frozenset[str]


def record_nodes(program: CapturedProgram) -> GraphRun:
    """Run the reference of a call once more, and record each node."""
    recording = _record(program, frozenset())
    # Values are copied only if they do not stay as they are.
    return _record(program, recording.overwritten) if recording.overwritten else recording


def _record(program: CapturedProgram, copied: frozenset[str]) -> GraphRun:
    program.restore_random()
    recorder = _Recorder(program.reference.module, draws=program.reference.draws, copied=copied)
    with program.surroundings.around(), running_eagerly(), leaving_transforms():
        recorder.run(*program.arguments())
    return recorder.result()


class _Recorder(Interpreter):
    """Runs a graph, and records how each node ran."""

    def __init__(self, module: GraphModule, *, draws: bool, copied: frozenset[str]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.draws = draws
        self.copied = copied
        self.levels = transform_levels(module)
        self.nodes: dict[str, NodeRun] = {}
        self.overwritten: set[str] = set()
        self.homes: dict[int, list[str]] = {}  # the nodes with a value in each storage

    def run_node(self, n: Node) -> Any:
        surroundings = Surroundings.now()
        rng = RandomState.of_torch() if self.draws else None
        operand_tensors = [
            operand
            for node in n.all_input_nodes
            for _, operand in tensors_by_path(self.env.get(node))
        ]
        before = [_version(operand) for operand in operand_tensors]
        result = super().run_node(n)
        if n.op == "output":
            return result
        after = [_version(operand) for operand in operand_tensors]
        wrote = dict.fromkeys(
            name
            for operand, old, new in zip(operand_tensors, before, after, strict=True)
            if old != new
            for name in self.homes.get(storage_address(operand), ())
        )
        self.overwritten |= wrote.keys()
        level = self.levels.get(n.name)
        is_hidden = n.name in self.levels and level is None
        for _, tensor in tensors_by_path(result):
            home = self.homes.setdefault(storage_address(tensor), [])
            home += [n.name] if n.name not in home else []
        value = result
        if level is None and not is_hidden:
            value = map_tensors(result, self._kept_copy(n.name))
        self.nodes[n.name] = NodeRun(
            value,
            surroundings,
            rng,
            tuple(wrote),
            level,
            is_batched=any(is_wrapped(tensor) for _, tensor in tensors_by_path(result)),
            is_hidden=is_hidden,
            is_given=not n.op.startswith("call_"),
        )
        return result

    def _kept_copy(self, name: str) -> Callable[[Tensor], Tensor]:
        def keep(value: Tensor) -> Tensor:
            detached_value = value.detach()
            return (
                detached_value.clone() if name in self.copied else detached_value
            ).requires_grad_(value.requires_grad)

        return keep

    def result(self) -> GraphRun:
        shared = {
            name
            for address, names in self.homes.items()
            if address and len(names) > 1
            for name in names
        }
        return GraphRun(self.nodes, frozenset(shared), frozenset(self.overwritten))


def tensors_by_path(value: Any, path: ValuePath = ()) -> Iterator[tuple[ValuePath, Tensor]]:
    """The tensors of a node's value, which may be a tuple of tensors."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from tensors_by_path(item, (*path, number))


def _version(tensor: Tensor) -> int:
    """How often a tensor was written to; unknown, and so always 0, in inference mode."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001


# --- More values as outputs -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tap:
    """A value inside a graph.

    Attributes:
        node: the node that computes it.
        path: where it is in the value of that node.
        after: the node that has written to it just before; "" for its first value.
    """

    node: str
    path: ValuePath = ()
    after: str = ""


def all_taps(run: GraphRun) -> list[Tap]:
    """The value of each call, and again the values that each node has changed."""
    taps = []
    for name, node in run.nodes.items():
        if not node.is_given:
            taps += [Tap(name, path) for path in node.tensors()]
        for changed in node.wrote:
            taps += [Tap(changed, path, after=name) for path in run.nodes[changed].tensors()]
    return taps


def tap_captured(module: GraphModule, taps: Collection[Tap], run: GraphRun) -> GraphModule:
    """A copy of a captured graph that also returns some of its values.

    What is inserted for that comes as late as possible: passes that count nodes see the same ones
    first. Values that share memory are returned as copies.
    """
    result = copy_graph(module)
    nodes = {node.name: node for node in result.graph.nodes}
    last = output_node(result)
    returning = [_insert_tap(result, tap, nodes, last, run) for tap in taps]
    last.args = ((*returned_values(result), *returning),)
    result.recompile()
    return result


def take_item(graph: Graph, node: Node, path: ValuePath) -> Node:
    """Insert nodes that give one item of a node's value."""
    for number in path:
        node = graph.call_function(operator.getitem, (node, number))
    return node


def _insert_tap(
    module: GraphModule, tap: Tap, nodes: dict[str, Node], last: Node, run: GraphRun
) -> Node:
    source = value = nodes[tap.node]
    node = run.nodes[tap.node]
    is_early = tap.node in run.overwritten or node.is_batched
    insertion_node = nodes[tap.after or tap.node].next if is_early else last
    while insertion_node.op == "placeholder":
        insertion_node = insertion_node.next
    with module.graph.inserting_before(insertion_node):
        value = take_item(module.graph, value, tap.path)
        if node.level is not None and node.is_batched:
            level = dataclasses.replace(node.level, entry=nodes[node.level.entry.name])
            value = level.show(module.graph, value)
        if tap.node in run.shared | run.overwritten:
            value = module.graph.call_function(torch.clone, (value,))
    if value is not source:
        value.meta = {key: source.meta[key] for key in ("stack_trace",) if key in source.meta}
    return value


# --- A node alone ---------------------------------------------------------------------------------


class NodeCall:
    """A node of a graph with values for what it reads, as it ran in the whole graph."""

    def __init__(
        self,
        module: GraphModule,
        node: Node,
        run: NodeRun,
        values: Mapping[str, Any],
        hidden: Collection[str] = (),
    ) -> None:
        """`values` are those of all nodes before it; `hidden` have a dimension that it hides."""
        self.node = node
        self.run = run
        self._module = module
        self.reads = {
            all_input_node.name: values[all_input_node.name]
            for all_input_node in node.all_input_nodes
        }
        size = None if self.run.level is None else self.run.level.size
        self._size: Any = values[size.name] if isinstance(size, Node) else size
        self._hidden = hidden

    @classmethod
    def in_run(
        cls, module: GraphModule, node: Node, run: GraphRun, values: Mapping[str, Any]
    ) -> NodeCall:
        """The node of a captured graph that ran as a whole."""
        reads = [read.name for read in node.all_input_nodes]
        hidden = {name for name in reads if run.nodes[name].is_batched}
        return cls(module, node, run.nodes[node.name], values, hidden)

    def inputs(self) -> list[Tensor]:
        """The tensors that it reads."""
        return [tensor for value in self.reads.values() for _, tensor in tensors_by_path(value)]

    def operands(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Its positional and keyword arguments."""
        return self._arguments(self.reads)

    def once(self) -> tuple[Any, dict[str, Any]]:
        """Run it; returns its result, and what it read after the run, by node."""
        reads = self.copy_reads(Copier()) if self.run.wrote else self.reads
        with self.around(), torch.no_grad():
            return self.call(reads), reads

    def program(self, path: ValuePath, after: str = "") -> NodeProgram:
        """One tensor of its result, or of what it read after the run, in several precisions."""
        return NodeProgram(self, path, after)

    def prepare(self, options: RunOptions, path: ValuePath, after: str) -> Callable[[], Any]:
        """Return the function to run."""
        copies = options.wide or bool(self.run.wrote)
        reads = self.copy_reads(Copier(widen=options.wide)) if copies else self.reads

        def call() -> Any:
            value = self.call(reads)
            value = reads[after] if after else value
            for number in path:
                value = value[number]
            return value

        return call

    def copy_reads(self, copier: Copier) -> dict[str, Any]:
        """Copies of what it reads, by node."""
        return {name: map_tensors(value, copier.copy_tensor) for name, value in self.reads.items()}

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Set what it had around it in the whole graph."""
        if self.run.rng is not None:
            self.run.rng.restore()
        with self.run.surroundings.around(), running_eagerly(), leaving_transforms():
            yield

    def call(self, reads: dict[str, Any]) -> Any:
        """Run it on values for what it reads."""
        level = self.run.level
        if level is None:
            return self._call_plain(reads)
        size = self._size
        with inside_vmap(size, level.randomness) as number:
            inside = {
                name: map_tensors(value, lambda tensor: hide_dimension(tensor, number))
                if name in self._hidden
                else value
                for name, value in reads.items()
            }
            inside[level.entry.name] = number
            result = self._call_plain(inside)
            if not self.run.is_batched:
                return result
            return map_tensors(result, lambda tensor: show_dimension(tensor, number, size))

    def _call_plain(self, reads: dict[str, Any]) -> Any:
        args, kwargs = self._arguments(reads)
        target: Any = self.node.target
        if self.node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        if self.node.op == "call_module":
            return self._module.get_submodule(target)(*args, **kwargs)
        return target(*args, **kwargs)

    def _arguments(self, reads: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args: Any = map_arg(self.node.args, lambda input_node: reads[input_node.name])
        kwargs: Any = map_arg(self.node.kwargs, lambda input_node: reads[input_node.name])
        return args, kwargs


class NodeProgram(ValueProgram):
    """One value of a node that runs alone.

    Attributes:
        records: whether autograd records the run.
    """

    records = False

    def __init__(self, call: NodeCall, path: ValuePath, after: str) -> None:
        """`path` is the place of the value; `after` a node that the call writes to."""
        super().__init__(lambda options: call.prepare(options, path, after), call.inputs())
        self.call = call

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Set the grad mode and autocast that it had in the whole graph."""
        with self.call.around(), torch.set_grad_enabled(self.records):
            yield
