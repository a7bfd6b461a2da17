"""The backward pass of a captured graph, node by node.

A zero is added to each value where a node reads it. The gradient of that zero is what the node
hands back for the value. So one backward pass shows what each node makes of the gradients it gets.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from paritas.core.execution.node_runs import NodeProgram, tensors_by_path
from paritas.core.execution.program import ValueProgram
from paritas.core.execution.saved_state import Copier
from paritas.core.torch_private.graphs import copy_graph, placeholders, returned_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.fx import GraphModule

    from paritas.core.execution.graph_runs import Cotangent
    from paritas.core.execution.node_runs import GraphRun, NodeCall, ValuePath
    from paritas.core.execution.observation import RunOptions

    # A tensor in a graph: the node that computes it, and where it is in the value of that node.
    Place = tuple[str, ValuePath]


@dataclasses.dataclass(frozen=True)
class Use:
    """A value and a node that reads it; autograd records both."""

    source: str
    reader: str


class BackwardNodes:
    """The gradients that each node of a graph gets and hands back.

    Attributes:
        uses: where gradients can be seen.
    """

    def __init__(self, graph: GraphModule, run: GraphRun) -> None:
        """`run` is how the nodes of the graph ran."""
        self.graph = graph
        self.run = run
        self.uses = list(self._find_uses())

    def _find_uses(self) -> Iterator[Use]:
        for node in self.graph.graph.nodes:
            if node.op.startswith("call_") and self._can_be_seen(node):
                for source in node.all_input_nodes:
                    is_tensor = isinstance(self.run.nodes[source.name].value, torch.Tensor)
                    if is_tensor and self._needs_gradient(source.name):
                        yield Use(source.name, node.name)

    def _can_be_seen(self, node: Node) -> bool:
        """Whether what a node reads can be replaced by a sum: not if something writes to it."""
        run = self.run.nodes[node.name]
        is_plain = run.level is None and not run.is_hidden and not run.wrote
        reads = {source.name for source in node.all_input_nodes}
        return (
            is_plain and reads.isdisjoint(self.run.overwritten) and self._needs_gradient(node.name)
        )

    def _needs_gradient(self, name: str) -> bool:
        run = self.run.nodes[name]
        if run.is_hidden or run.is_batched:
            return False
        return any(tensor.requires_grad for _, tensor in tensors_by_path(run.value))

    def zeros(self) -> list[Tensor]:
        """The arguments that are added."""
        values = [self.run.nodes[use.source].value for use in self.uses]
        return [torch.zeros_like(value.detach()).requires_grad_() for value in values]

    def with_zeros(self) -> GraphModule:
        """The graph with further inputs, one for each use."""
        result = copy_graph(self.graph)
        nodes = {node.name: node for node in result.graph.nodes}
        last = placeholders(result)[-1]
        for number, use in enumerate(self.uses):
            source, reader = nodes[use.source], nodes[use.reader]
            with result.graph.inserting_after(last):
                last = result.graph.placeholder(f"zeros_{number}")
            with result.graph.inserting_before(reader):
                total = result.graph.call_function(torch.add, (source, last))
            reader.replace_input_with(source, total)
        result.recompile()
        return result

    def arriving_gradients(
        self, gradients: Mapping[Use, Tensor | None], cotangents: Mapping[int, Cotangent]
    ) -> dict[str, dict[ValuePath, Tensor]]:
        """The gradients that each node gets for its results; only nodes for which all are known.

        Args:
            gradients: of the zeros.
            cotangents: of the graph's outputs, by position.
        """
        parts: dict[Place, list[Tensor]] = {}
        unknown: set[str] = set()
        for node in self.graph.graph.nodes:
            if node.op.startswith("call_") and self._needs_gradient(node.name):
                for source in node.all_input_nodes:
                    if not self._needs_gradient(source.name) or self._takes_item(node, source):
                        continue
                    use = Use(source.name, node.name)
                    if use not in gradients:
                        unknown.add(source.name)
                    elif (part := gradients[use]) is not None:
                        parts.setdefault(self._place_of(source), []).append(part)
        for position, value in enumerate(returned_values(self.graph)):
            if position in cotangents and isinstance(value, Node):
                parts.setdefault(self._place_of(value), []).append(cotangents[position].outside())
        unknown = {
            self._place_of(node)[0] for node in self.graph.graph.nodes if node.name in unknown
        }
        gradients_by_node: dict[str, dict[ValuePath, Tensor]] = {}
        for (name, path), summands in parts.items():
            if name not in unknown:
                gradients_by_node.setdefault(name, {})[path] = _add_up(summands)
        return gradients_by_node

    def _takes_item(self, node: Node, source: Node) -> bool:
        """Whether a node only takes an item of several results."""
        is_tensor = isinstance(self.run.nodes[source.name].value, torch.Tensor)
        return node.target is operator.getitem and not is_tensor

    def _place_of(self, node: Node) -> Place:
        """Where a tensor is computed: an item of several results belongs to its operator."""
        path: ValuePath = ()
        while node.all_input_nodes and self._takes_item(node, node.all_input_nodes[0]):
            number: Any = node.args[1]
            path = (number, *path)
            node = node.all_input_nodes[0]
        return node.name, path


def _add_up(summands: Sequence[Tensor]) -> Tensor:
    total = summands[0].detach()
    for summand in summands[1:]:
        total = total + summand.detach()
    return total


class NodeGradient(NodeProgram):
    """What a node that runs alone hands back for one value that it reads."""

    records = True

    def __init__(self, call: NodeCall, source: str, arrived: Mapping[ValuePath, Tensor]) -> None:
        """`arrived` are the gradients of its results."""
        ValueProgram.__init__(self, self._prepare, [*call.inputs(), *arrived.values()])
        self.call = call
        self.source = source
        self.arrived = arrived

    def _prepare(self, options: RunOptions) -> Callable[[], Any]:
        copier = Copier(widen=options.wide)
        reads = self.call.copy_reads(copier)
        tensors = [
            copier.copy_tensor(arrived_gradient) for arrived_gradient in self.arrived.values()
        ]
        leaf = reads[self.source] = reads[self.source].detach().requires_grad_()

        def differentiate() -> Any:
            returned = dict(tensors_by_path(self.call.call(reads)))
            results = [returned[path] for path in self.arrived]
            pairs = [pair for pair in zip(results, tensors, strict=True) if pair[0].requires_grad]
            ends = [output for output, _ in pairs]
            (gradient,) = torch.autograd.grad(
                ends, [leaf], [output_gradient for _, output_gradient in pairs]
            )
            return gradient

        return differentiate
