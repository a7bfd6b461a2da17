"""A part of a program as a separate program, with the values that it has in a run."""

from __future__ import annotations

import dataclasses
import numbers
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

from paritas.core.numerics.contents import detach_value
from paritas.shrinking.programs import FailingProgram, fresh_copy, is_call

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


# --- A part of a program as a separate program ----------------------------------------------------

_LITERALS: tuple[type, ...] = (
    *(numbers.Number, str, type(None), slice),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)


@dataclasses.dataclass(frozen=True)
class ProgramPart:
    """Parts of a program side by side; for each output and input, the index of its part."""

    program: FailingProgram
    output_of: tuple[int, ...]
    input_of: tuple[int, ...]


def extract_part(
    program: FailingProgram,
    recorded: RecordedValues,
    nodes: Collection[Node],
    *,
    all_outputs: bool = False,
) -> FailingProgram | None:
    """The part of a program that computes `nodes`; None if it cannot run on its own.

    Args:
        all_outputs: return every value that the rest of the program reads, not only the last ones.
    """
    part = islands(program, recorded, [nodes], all_outputs=all_outputs)
    return None if part is None else part.program


def islands(
    program: FailingProgram,
    recorded: RecordedValues,
    sets: Iterable[Collection[Node]],
    *,
    all_outputs: bool = False,
) -> ProgramPart | None:
    """Several parts side by side in one graph, none of which reads the results of another."""
    builder = _PartBuilder(program, recorded)
    for index, node_set in enumerate(sets):
        try:
            builder.add(index, set(node_set), all_outputs=all_outputs)
        except _NotAloneError:
            if index == 0:
                return None
    return builder.finish()


class _NotAloneError(Exception):
    """A part needs a value that can be neither a literal nor an input."""


class _PartBuilder:
    def __init__(self, program: FailingProgram, recorded: RecordedValues) -> None:
        self.program = program
        self.recorded = recorded
        self.graph = Graph()
        self.root: dict[str, Any] = {}
        self.inputs: list[tuple[Node, Any, int]] = []
        self.outputs: list[tuple[Any, int]] = []
        self.dynamic: dict[str, tuple[int, ...]] = {}

    def add(self, index: int, nodes: set[Node], *, all_outputs: bool) -> None:
        """Copy one set of nodes; what they read from outside becomes a placeholder."""
        nodes = _complete_nodes(self.program, nodes)
        ordered = [node for node in self.program.graph.graph.nodes if node in nodes]
        for node in ordered:
            for read in node.all_input_nodes:
                value = self.recorded.given[node][read]
                fine = read in nodes or read.op == "get_attr" or isinstance(value, torch.Tensor)
                if not fine and not _is_literal(value):
                    raise _NotAloneError
        table: dict[Node, Any] = {}
        for node in ordered:
            for read in node.all_input_nodes:
                if read not in table and read not in nodes:
                    value = self.recorded.given[node][read]
                    table[read] = self._add_input(read, value, index)
                    if self.program.gradients and _writes(node) and _differentiable(value):
                        # Autograd refuses writes to a leaf; in the program it was not a leaf.
                        table[read] = self.graph.call_method("clone", (table[read],))
            args = torch.fx.node.map_arg(node.args, table.__getitem__)
            kwargs = torch.fx.node.map_arg(node.kwargs, table.__getitem__)
            new_node = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
            new_node.meta = dict(node.meta)
            table[node] = new_node
        for node in ordered:
            if self._is_result(node, nodes, all_outputs=all_outputs):
                self.outputs.append((table[node], index))

    def finish(self) -> ProgramPart | None:
        """The parts as one program."""
        if not self.outputs and not any(map(_writes, self.graph.nodes)):
            return None
        self.graph.output(tuple(node for node, _ in self.outputs))
        module = GraphModule(self.root, self.graph)
        values = [value for _, value, _ in self.inputs]
        gradients = self.program.gradients and any(map(_differentiable, values))
        program = dataclasses.replace(
            self.program,
            graph=module,
            inputs=tuple(values if gradients else map(detach_value, values)),
            dynamic=self.dynamic,
            gradients=gradients,
        )
        owners = tuple(index for _, index in self.outputs)
        return ProgramPart(program, owners, tuple(index for _, _, index in self.inputs))

    def _add_input(self, node: Node, value: Any, index: int) -> Any:
        if node.op == "get_attr":
            self.root[str(node.target)] = getattr(self.program.graph, str(node.target))
            return self.graph.create_node("get_attr", node.target, (), {}, node.name)
        symbol = isinstance(value, int) and not isinstance(value, bool) and self.program.dynamic
        if not isinstance(value, torch.Tensor) and not symbol:
            return value
        elsewhere = (input_value for _, input_value, owner in self.inputs if owner != index)
        if isinstance(value, torch.Tensor) and any(
            value is input_value for input_value in elsewhere
        ):
            # Parts must not share a tensor: one of them may write to it.
            value = fresh_copy(value)
        last = self.inputs[-1][0] if self.inputs else None
        start = next(iter(self.graph.nodes), None)
        with self.graph.inserting_after(last) if last else self.graph.inserting_before(start):
            placeholder = self.graph.placeholder(node.name)
        placeholder.target = placeholder.name  # unique, as argument names must be
        self.inputs.append((placeholder, value, index))
        dims = self.program.dynamic.get(node.name)
        if dims is None and self.program.dynamic and isinstance(value, torch.Tensor):
            dims = tuple(range(value.dim()))
        if dims is not None:
            self.dynamic[placeholder.name] = dims
        return placeholder

    def _is_result(self, node: Node, nodes: set[Node], *, all_outputs: bool) -> bool:
        value = self.recorded.made.get(node)
        if not _holds_tensor(value) or (_writes(node) and not node.users):
            return False  # the comparison of the input already covers what it writes
        if isinstance(value, tuple) and any(user in nodes for user in node.users):
            return False
        inside = [user for user in node.users if user in nodes]
        if not inside:
            return True
        return all_outputs and any(user not in nodes for user in node.users)


def _writes(node: Node) -> bool:
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in {"setitem", "iadd", "isub", "imul", "itruediv"}


def _complete_nodes(program: FailingProgram, nodes: set[Node]) -> set[Node]:
    """Add the items of kept tuples and the enclosing switches; drop items of other tuples."""
    result = {node for node in nodes if not _is_item(node) or node.args[0] in nodes}
    for node in list(result):
        result |= {user for user in node.users if _is_item(user)}
    return result | _switches(program, result)


def _is_item(node: Node) -> bool:
    return node.target is operator.getitem and not is_call(node)


def _switches(program: FailingProgram, nodes: set[Node]) -> set[Node]:
    """Calls that turn gradients or autocast off and on around a kept node."""
    switch_nodes: set[Node] = set()
    opened: list[tuple[Node, bool]] = []
    for node in program.graph.graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name == "_set_grad_enabled" and opened and node.args[0] is not opened[-1][0].args[0]:
            start, used = opened.pop()
            switch_nodes |= {start, node} if used else set()
        elif name in {"_set_grad_enabled", "_enter_autocast"}:
            opened.append((node, False))
        elif name == "_exit_autocast" and opened:
            start, used = opened.pop()
            switch_nodes |= {start, node} if used else set()
        elif node in nodes:
            opened = [(start, True) for start, _ in opened]
    return switch_nodes


def _is_literal(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_literal(item) for item in value)
    return isinstance(value, _LITERALS)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(_holds_tensor(item) for item in value)
    return isinstance(value, torch.Tensor)


def _differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


# --- The values of a program when its reference runs ----------------------------------------------


@dataclasses.dataclass(frozen=True)
class RecordedValues:
    """The values of an eager run: the value of each node, and what it read.

    An in-place operator may change what a node has read later.
    """

    given: dict[Node, dict[Node, Any]]
    made: dict[Node, Any]


def record_values(program: FailingProgram) -> RecordedValues:
    """Run the reference operator by operator and keep every value; raises what it raises."""
    recorder = _ValueRecorder(program.graph)
    with program.conditions():
        recorder.run(*map(fresh_copy, program.inputs))
    return RecordedValues(recorder.given, recorder.made)


class _ValueRecorder(Interpreter):
    """Keeps one copy of each version of each tensor."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.given: dict[Node, dict[Node, Any]] = {}
        self.made: dict[Node, Any] = {}
        # The tensor itself is kept too, because its id could be reused otherwise.
        self._copies: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def run_node(self, n: Node) -> Any:
        """Record the inputs, run, record the result."""
        self.given[n] = {node: self._snapshot(self.env[node]) for node in n.all_input_nodes}
        result = super().run_node(n)
        if n.op != "output":
            self.made[n] = self._snapshot(result)
        return result

    def _snapshot(self, value: Any) -> Any:
        if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
            return tuple(self._snapshot(item) for item in value)
        if not isinstance(value, torch.Tensor):
            return value
        version = 0 if value.is_inference() else value._version  # noqa: SLF001  (no other counter)
        key = (id(value), version)
        if key not in self._copies:
            copied = value.detach().clone()
            if value.requires_grad and copied.is_floating_point() | copied.is_complex():
                copied.requires_grad_()
            self._copies[key] = (value, copied)
        return self._copies[key][1]
