"""A part of a program as a program of its own: what it does not compute, it is given."""

from __future__ import annotations

import dataclasses
import numbers
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, GraphModule, Node

from paritas.minimizing.programs import Program, is_call

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from paritas.minimizing.reducing.recorded import Recorded

__all__ = ["Part", "islands", "part_of"]

_LITERALS: tuple[type, ...] = (
    *(numbers.Number, str, type(None), slice),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)


@dataclasses.dataclass(frozen=True)
class Part:
    """A part, and where its nodes come from.

    Attributes:
        program: the part.
        output_of: for each output in order, the index of the island it belongs to.
        input_of: for each placeholder in order, likewise.
    """

    program: Program
    output_of: tuple[int, ...]
    input_of: tuple[int, ...]


def part_of(
    program: Program, recorded: Recorded, kept: Collection[Node], *, all_outputs: bool = False
) -> Program | None:
    """The part of a program that computes `kept`; None if it cannot be called by itself.

    Args:
        all_outputs: give back every value that the rest of the program reads, not the last ones
            alone.
    """
    part = islands(program, recorded, [kept], all_outputs=all_outputs)
    return None if part is None else part.program


def islands(
    program: Program,
    recorded: Recorded,
    sets: Iterable[Collection[Node]],
    *,
    all_outputs: bool = False,
) -> Part | None:
    """Several parts side by side in one graph, none of which reads what another computes."""
    builder = _Builder(program, recorded)
    for index, kept in enumerate(sets):
        try:
            builder.add(index, set(kept), all_outputs=all_outputs)
        except _NotAloneError:
            if index == 0:
                return None
    return builder.finished()


class _NotAloneError(Exception):
    """A part needs something that can be neither written down nor given."""


class _Builder:
    def __init__(self, program: Program, recorded: Recorded) -> None:
        self.program = program
        self.recorded = recorded
        self.graph = Graph()
        self.root: dict[str, Any] = {}
        self.inputs: list[tuple[Node, Any, int]] = []
        self.outputs: list[tuple[Any, int]] = []
        self.dynamic: dict[str, tuple[int, ...]] = {}

    def add(self, index: int, kept: set[Node], *, all_outputs: bool) -> None:
        """Copy one set of nodes; what they read from outside becomes a placeholder."""
        kept = _completed(self.program, kept)
        ordered = [node for node in self.program.graph.graph.nodes if node in kept]
        for node in ordered:
            for read in node.all_input_nodes:
                if read not in kept:
                    self._literal_or_tensor(self.recorded.given[node][read], read)
        table: dict[Node, Any] = {}
        for node in ordered:
            for read in node.all_input_nodes:
                if read not in table and read not in kept:
                    value = self.recorded.given[node][read]
                    table[read] = self._given(read, value, index)
                    if self.program.gradients and _writes(node) and _differentiable(value):
                        # Autograd refuses writes to a leaf; in the program it was none.
                        table[read] = self.graph.call_method("clone", (table[read],))
            args = torch.fx.node.map_arg(node.args, table.__getitem__)
            kwargs = torch.fx.node.map_arg(node.kwargs, table.__getitem__)
            made = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
            made.meta = dict(node.meta)
            table[node] = made
        for node in ordered:
            if self._is_result(node, kept, all_outputs=all_outputs):
                self.outputs.append((table[node], index))

    def finished(self) -> Part | None:
        """The whole as a program."""
        if not self.outputs and not any(map(_writes, self.graph.nodes)):
            return None
        self.graph.output(tuple(node for node, _ in self.outputs))
        module = GraphModule(self.root, self.graph)
        values = [value for _, value, _ in self.inputs]
        gradients = self.program.gradients and any(map(_differentiable, values))
        program = dataclasses.replace(
            self.program,
            graph=module,
            inputs=tuple(values if gradients else map(_detached, values)),
            dynamic=self.dynamic,
            gradients=gradients,
        )
        owners = tuple(index for _, index in self.outputs)
        return Part(program, owners, tuple(index for _, _, index in self.inputs))

    def _given(self, node: Node, value: Any, index: int) -> Any:
        if node.op == "get_attr":
            self.root[str(node.target)] = getattr(self.program.graph, str(node.target))
            return self.graph.create_node("get_attr", node.target, (), {}, node.name)
        symbol = isinstance(value, int) and not isinstance(value, bool) and self.program.dynamic
        if not isinstance(value, torch.Tensor) and not symbol:
            return value
        elsewhere = (known for _, known, owner in self.inputs if owner != index)
        if isinstance(value, torch.Tensor) and any(value is known for known in elsewhere):
            # Parts that share a tensor which one of them writes to would not be apart.
            value = value.detach().clone().requires_grad_(value.requires_grad)
        last = self.inputs[-1][0] if self.inputs else None
        start = next(iter(self.graph.nodes), None)
        with self.graph.inserting_after(last) if last else self.graph.inserting_before(start):
            made = self.graph.placeholder(node.name)
        made.target = made.name  # which is unique, as names of arguments have to be
        self.inputs.append((made, value, index))
        dims = self.program.dynamic.get(node.name)
        if dims is None and self.program.dynamic and isinstance(value, torch.Tensor):
            dims = tuple(range(value.dim()))
        if dims is not None:
            self.dynamic[made.name] = dims
        return made

    @staticmethod
    def _literal_or_tensor(value: Any, node: Node) -> None:
        fine = node.op == "get_attr" or isinstance(value, torch.Tensor)
        if not fine and not _is_literal(value):
            raise _NotAloneError

    def _is_result(self, node: Node, kept: set[Node], *, all_outputs: bool) -> bool:
        value = self.recorded.made.get(node)
        if not _holds_tensor(value) or (_writes(node) and not node.users):
            return False  # what is written is seen in the input; it would be seen twice
        if isinstance(value, tuple) and any(user in kept for user in node.users):
            return False
        inside = [user for user in node.users if user in kept]
        if not inside:
            return True
        return all_outputs and any(user not in kept for user in node.users)


def _writes(node: Node) -> bool:
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in {"setitem", "iadd", "isub", "imul", "itruediv"}


def _completed(program: Program, kept: set[Node]) -> set[Node]:
    """With the items of kept tuples, without items of others, and with the switches around."""
    result = {node for node in kept if not _is_item(node) or node.args[0] in kept}
    for node in list(result):
        result |= {user for user in node.users if _is_item(user)}
    return result | _switches(program, result)


def _is_item(node: Node) -> bool:
    return node.target is operator.getitem and not is_call(node)


def _switches(program: Program, kept: set[Node]) -> set[Node]:
    """Calls that turn gradients or autocast off and on around a kept node."""
    found: set[Node] = set()
    opened: list[tuple[Node, bool]] = []
    for node in program.graph.graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name == "_set_grad_enabled" and opened and node.args[0] is not opened[-1][0].args[0]:
            start, used = opened.pop()
            found |= {start, node} if used else set()
        elif name in {"_set_grad_enabled", "_enter_autocast"}:
            opened.append((node, False))
        elif name == "_exit_autocast" and opened:
            start, used = opened.pop()
            found |= {start, node} if used else set()
        elif node in kept:
            opened = [(start, True) for start, _ in opened]
    return found


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


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
