"""A graph that is in memory: what torch.export or torch.fx made of a model."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from paritas._torch.exported_programs import foretell_values, is_higher_order, symbol_ranges
from paritas._torch.graphs import module_path
from paritas.errors import UsageError
from paritas.graphs.calls import Graph, GraphCall, Kind, TensorValue, tensor_values
from paritas.graphs.reading.exported import APART, BRANCHES, NO_TENSOR, idle_reason
from paritas.graphs.reading.exported_schema import Range
from paritas.graphs.reading.exported_sources import source_of
from paritas.graphs.reading.exported_symbols import Symbols
from paritas.graphs.reading.fx_modules import written_out
from paritas.graphs.reading.fx_names import full_name
from paritas.graphs.reading.fx_values import UNKNOWN, Describing, said_of

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["read_fx", "read_program"]

_KINDS: dict[str, Kind] = {
    "PARAMETER": "parameter",
    "BUFFER": "buffer",
    "CONSTANT_TENSOR": "constant",
    "USER_INPUT": "input",
}


def read_program(program: ExportedProgram, name: str = "") -> Graph:
    """The graph of an exported program."""
    kinds: dict[str, Kind] = {}
    targets: dict[str, str] = {}
    for spec in program.graph_signature.input_specs:
        kind = _KINDS.get(spec.kind.name)
        if kind is not None:
            kinds[spec.arg.name] = kind
            if spec.target is not None:
                targets[spec.arg.name] = spec.target
    ranges = {name: Range(*ends) for name, ends in symbol_ranges(program).items()}
    held = {**program.constants, **program.state_dict}
    state = {name: held[target] for name, target in targets.items() if target in held}
    reader = _Reader(written_out(program.graph_module), {}, kinds, Symbols(ranges))
    reader.read()
    return reader.graph(name or "exported program", "torch.export", state)


def read_fx(module: GraphModule, inputs: Mapping[str, Any] | None = None, name: str = "") -> Graph:
    """The graph of an FX module.

    Args:
        module: with `meta["val"]` at its nodes, as compilers pass it round, or without.
        inputs: values of its placeholders by name, to find shapes where it has none.

    Raises:
        UsageError: nothing is known of any shape.
    """
    unknown = all(said_of(node) is UNKNOWN for node in module.graph.nodes)
    if unknown and inputs is None:
        raise UsageError(
            f"the graph of {type(module).__name__} has no shapes (no node has meta['val']): "
            "give sample inputs with it"
        )
    whole = written_out(module)
    found: dict[Node, Any] = {}
    if inputs is not None:
        names = [node.name for node in whole.graph.find_nodes(op="placeholder")]
        found = foretell_values(whole, [inputs.get(name) for name in names])
    reader = _Reader(whole, found, {}, Symbols({}))
    reader.read()
    return reader.graph(name or type(module).__name__, "fx", reader.state)


class _Reader:
    """Reads the nodes of one graph in order."""

    def __init__(
        self,
        module: GraphModule,
        found: Mapping[Node, Any],
        kinds: Mapping[str, Kind],
        symbols: Symbols,
    ) -> None:
        self._symbols = symbols
        self._module = module
        self._found = found
        self._kinds = kinds
        self._made: dict[Node, Any] = {}
        self._prefix = ""
        self._describing = Describing(symbols)
        self.calls: list[GraphCall] = []
        self.values: dict[str, TensorValue] = {}
        self.state: dict[str, torch.Tensor] = {}

    def graph(self, name: str, kind: str, state: Mapping[str, torch.Tensor]) -> Graph:
        """What was read."""
        notes = (f"read from memory, torch {torch.__version__}", *self._symbols.notes())
        return Graph(name, kind, tuple(self.calls), self.values, lambda: state, notes)

    def read(self) -> None:
        """Read all nodes."""
        for node in self._module.graph.nodes:
            if node.op == "placeholder":
                self._read_input(node)
            elif node.op == "get_attr":
                self._read_attribute(node)
            elif node.op != "output":
                self._read_call(node)

    def _value(self, node: Node) -> Any:
        return self._found[node] if node in self._found else said_of(node)

    def _read_input(self, node: Node) -> None:
        value = self._value(node)
        kind = self._kinds.get(node.name, "input")
        if isinstance(value, torch.nn.Parameter):
            kind = "parameter"
        if self._prefix:
            kind = "intermediate"  # what the operator around this graph hands on
        made = self._describing.value(value, f"{self._prefix}{node.name}", kind)
        self._made[node] = None if made is UNKNOWN else made
        if isinstance(made, TensorValue) and not self._prefix:
            self.values[made.name] = made

    def _read_attribute(self, node: Node) -> None:
        held: Any = self._module
        for part in str(node.target).split("."):
            held = getattr(held, part, None)
        if isinstance(held, torch.Tensor):
            name = f"{self._prefix}{node.target}"
            self.state[name] = held
            self.values[name] = held = self._describing.value(held, name, self._kind_of(node, held))
        self._made[node] = held

    def _kind_of(self, node: Node, held: torch.Tensor) -> Kind:
        if isinstance(held, torch.nn.Parameter):
            return "parameter"
        return "buffer" if node.target in dict(self._module.named_buffers()) else "constant"

    def _read_call(self, node: Node) -> None:
        args = tuple(self._argument(one) for one in node.args)
        kwargs = {key: self._argument(one) for key, one in node.kwargs.items()}
        apart = node.target is operator.getitem and _holds_tensors(args[0])
        value = self._value(node)
        made = _picked(args) if apart else self._describing.result(value, node, self._prefix)
        self._made[node] = None if made is UNKNOWN else made
        outputs = tuple(tensor_values(made))
        name, function, obstacle = self._called(node)
        idle = APART if apart else idle_reason(name, outputs)
        if made is UNKNOWN and idle in {"", NO_TENSOR}:
            idle, obstacle = "", "its shapes are unknown: give sample inputs with the graph"
        source, code = source_of(node.meta.get("stack_trace") or "")
        call = GraphCall(
            position=len(self.calls),
            name=f"{self._prefix}{node.name}",
            operator=name,
            args=_without_graphs(args),
            kwargs=_without_graphs(kwargs),
            outputs=outputs,
            source=source,
            code=code,
            module=_module_of(node),
            function=function,
            idle="" if obstacle else idle,
            obstacle=obstacle,
        )
        self.calls.append(call)
        for one in (*node.args, *node.kwargs.values()):
            inner = self._made.get(one) if isinstance(one, Node) else None
            if isinstance(inner, GraphModule):
                self._read_inside(inner, f"{call.name}.{one}.")

    def _read_inside(self, module: GraphModule, prefix: str) -> None:
        reader = _Reader(module, {}, {}, self._symbols)
        reader._prefix = prefix
        reader.calls, reader.values, reader.state = self.calls, self.values, self.state
        reader.read()

    def _called(self, node: Node) -> tuple[str, Callable[..., Any] | None, str]:
        """What a node calls, the function, and why it cannot be checked."""
        if node.op == "call_method":
            method = getattr(torch.Tensor, str(node.target), None)
            return f"torch.Tensor.{node.target}", method, ""
        if node.op == "call_module":
            module = self._module.get_submodule(str(node.target))
            name = f"{type(module).__module__}.{type(module).__qualname__}"
            why = f"module {node.target} decides by what it is given, and cannot be taken apart"
            return name, module, f"{why}: export the model with torch.export"
        target: Any = node.target
        if is_higher_order(target):
            return full_name(target), None, BRANCHES
        return full_name(target), target, ""

    def _argument(self, given: Any) -> Any:
        if isinstance(given, Node):
            return self._made[given]
        if isinstance(given, Mapping):
            return {key: self._argument(one) for key, one in given.items()}
        if isinstance(given, list):
            return [self._argument(one) for one in given]
        if isinstance(given, tuple):
            return tuple(self._argument(one) for one in given)
        if isinstance(given, slice):
            return slice(*(self._argument(one) for one in (given.start, given.stop, given.step)))
        return given


def _holds_tensors(value: Any) -> bool:
    return not isinstance(value, TensorValue) and any(True for _ in tensor_values(value))


def _picked(args: tuple[Any, ...]) -> Any:
    try:
        return args[0][args[1]]
    except (LookupError, TypeError):
        return UNKNOWN


def _without_graphs(tree: Any) -> Any:
    if isinstance(tree, tuple):
        return tuple(None if isinstance(one, GraphModule) else one for one in tree)
    return {key: None if isinstance(one, GraphModule) else one for key, one in tree.items()}


def _module_of(node: Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    entry = list(stack.values())[-1]
    path = module_path(str(entry[0] if isinstance(entry, tuple) else entry))
    return "" if path.startswith("_empty_nn_module_stack") else path
