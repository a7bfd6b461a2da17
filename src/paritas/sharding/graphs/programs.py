"""Reads a graph in memory, from torch.export or torch.fx."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from paritas.core.errors import UsageError
from paritas.core.torch_private.graphs import (
    is_higher_order,
    module_path,
    predict_values,
    size_number,
    symbol_ranges,
)
from paritas.core.torch_private.named_operators import is_operator
from paritas.sharding.graphs.calls import (
    Graph,
    GraphCall,
    Kind,
    TensorValue,
    map_items,
    tensor_values,
)
from paritas.sharding.graphs.exported import (
    HIGHER_ORDER,
    UNPACKS,
    computes_no_tensor,
    idle_reason,
    source_of,
)
from paritas.sharding.graphs.exported_values import SymbolRange, Symbols, makes_gradients
from paritas.sharding.graphs.module_inlining import with_modules_inlined
from paritas.sharding.operators.library.registry import name_of

if TYPE_CHECKING:
    from torch.export import ExportedProgram


# --- A graph in memory, from torch.export or torch.fx ---------------------------------------------

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
    ranges = {name: SymbolRange(*ends) for name, ends in symbol_ranges(program).items()}
    stored_tensors = {**program.constants, **program.state_dict}
    state = {
        name: stored_tensors[target] for name, target in targets.items() if target in stored_tensors
    }
    reader = _FxReader(with_modules_inlined(program.graph_module), {}, kinds, Symbols(ranges))
    reader.read()
    read = reader.graph(name or "exported program", "torch.export", state)
    returned = tuple(
        str(user_output)
        for user_output in program.graph_signature.user_outputs
        if user_output in reader.seen
    )
    return dataclasses.replace(read, outputs=returned, names=targets)


def read_fx(module: GraphModule, inputs: Mapping[str, Any] | None = None) -> Graph:
    """The graph of an FX module.

    Args:
        inputs: placeholder values by name, to infer shapes if the graph has none.
    """
    unknown = all(recorded_value(node) is UNKNOWN for node in module.graph.nodes)
    if unknown and inputs is None:
        raise UsageError(
            f"the graph of {type(module).__name__} has no shapes (no node has meta['val']); "
            "pass sample inputs with it"
        )
    inlined = with_modules_inlined(module)
    reader = _FxReader(inlined, {}, {}, Symbols({}))
    if inputs is not None:
        names = [node.name for node in inlined.graph.find_nodes(op="placeholder")]
        sample_inputs = [inputs.get(name) for name in names]
        reader.found, reader.unpredicted = predict_values(inlined, sample_inputs)
    reader.read()
    return reader.graph(type(module).__name__, "fx", reader.state)


@dataclasses.dataclass(eq=False)
class _FxReader:
    """Reads the nodes of one graph in order."""

    module: GraphModule
    found: Mapping[Node, Any]
    kinds: Mapping[str, Kind]
    symbols: Symbols
    prefix: str = ""
    calls: list[GraphCall] = dataclasses.field(default_factory=list)
    values: dict[str, TensorValue] = dataclasses.field(default_factory=dict)
    state: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    made: dict[Node, Any] = dataclasses.field(default_factory=dict)
    unpredicted: Mapping[Node, str] = dataclasses.field(default_factory=dict)

    @property
    def seen(self) -> set[str]:
        """The names of all tensors."""
        return {
            value.name for described in self.made.values() for value in tensor_values(described)
        }

    def graph(self, name: str, kind: str, state: Mapping[str, torch.Tensor]) -> Graph:
        """The graph that was read."""
        notes = (f"read from memory, torch {torch.__version__}", *self.symbols.notes())
        returned = self.module.graph.find_nodes(op="output")[0].args
        outputs = tuple(value.name for value in tensor_values(self._argument(returned)))
        return Graph(name, kind, tuple(self.calls), self.values, lambda: state, notes, outputs)

    def read(self) -> None:
        """Read all nodes."""
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self._read_input(node)
            elif node.op == "get_attr":
                self._read_attribute(node)
            elif node.op != "output":
                self._read_call(node)

    def _value(self, node: Node) -> Any:
        return self.found[node] if node in self.found else recorded_value(node)

    def _describe(self, value: Any, name: str, kind: Kind = "intermediate") -> Any:
        """A tensor as its description, a symbol as its number, anything else unchanged."""
        if isinstance(value, torch.Tensor) or _is_metadata(value):
            shape = tuple(self._describe(size, name) for size in value.shape)
            grad = makes_gradients(value.dtype, kind, stored=bool(value.requires_grad))
            return TensorValue(f"{self.prefix}{name}", shape, value.dtype, kind, grad)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return size_number(value, self.symbols.guess)
        if isinstance(value, list | tuple):
            parts = [
                self._describe(element, f"{name}_{at}", kind) for at, element in enumerate(value)
            ]
            return parts if isinstance(value, list) else tuple(parts)
        if isinstance(value, Mapping):
            return {
                key: self._describe(entry, f"{name}_{key}", kind) for key, entry in value.items()
            }
        return value

    def _describe_result(self, value: Any, node: Node) -> Any:
        """The result of a node; its parts have the names of the nodes that unpack it."""
        if not isinstance(value, list | tuple) or _is_metadata(value):
            return self._describe(value, node.name)
        named = {user.args[1]: user.name for user in node.users if user.target is operator.getitem}
        parts = [
            self._describe(element, named.get(at, f"{node.name}_unused_{at}"))
            for at, element in enumerate(value)
        ]
        return parts if isinstance(value, list) else tuple(parts)

    def _read_input(self, node: Node) -> None:
        value = self._value(node)
        kind = self.kinds.get(node.name, "input")
        if isinstance(value, torch.nn.Parameter):
            kind = "parameter"
        if self.prefix:
            kind = "intermediate"  # passed in by the enclosing operator
        described = self._describe(value, node.name, kind)
        self.made[node] = None if described is UNKNOWN else described
        if isinstance(described, TensorValue) and not self.prefix:
            self.values[described.name] = described

    def _read_attribute(self, node: Node) -> None:
        attribute: Any = self.module
        for part in str(node.target).split("."):
            attribute = getattr(attribute, part, None)
        if isinstance(attribute, torch.Tensor):
            is_buffer = node.target in dict(self.module.named_buffers())
            kind: Kind = "buffer" if is_buffer else "constant"
            if isinstance(attribute, torch.nn.Parameter):
                kind = "parameter"
            name = f"{self.prefix}{node.target}"
            self.state[name] = attribute
            self.values[name] = attribute = self._describe(attribute, str(node.target), kind)
        self.made[node] = attribute

    def _read_call(self, node: Node) -> None:
        args = tuple(self._argument(node_arg) for node_arg in node.args)
        kwargs = {key: self._argument(node_arg) for key, node_arg in node.kwargs.items()}
        apart = (
            node.target is operator.getitem
            and not isinstance(args[0], TensorValue)
            and any(True for _ in tensor_values(args[0]))
        )
        value = self._value(node)
        described = _unpacked_item(args) if apart else self._describe_result(value, node)
        self.made[node] = None if described is UNKNOWN else described
        outputs = tuple(tensor_values(described))
        name, function, obstacle = self._resolve_call(node)
        idle = UNPACKS if apart else idle_reason(name, outputs)
        if described is UNKNOWN and not apart and not computes_no_tensor(name):
            why = self.unpredicted.get(node, "pass sample inputs with the graph")
            idle, obstacle = "", f"its shapes are unknown: {why}"
        source, code = source_of(node.meta.get("stack_trace") or "")
        call = GraphCall(
            position=len(self.calls),
            name=f"{self.prefix}{node.name}",
            operator=name,
            args=_without_graphs(args),
            kwargs=_without_graphs(kwargs),
            outputs=outputs,
            source=source,
            code=code,
            module=_module_path_of(node),
            function=function,
            idle="" if obstacle else idle,
            obstacle=obstacle,
        )
        self.calls.append(call)
        for operand in (*node.args, *node.kwargs.values()):
            inner = self.made.get(operand) if isinstance(operand, Node) else None
            if isinstance(inner, GraphModule):
                self._read_inside(inner, f"{call.name}.{operand}.")

    def _read_inside(self, module: GraphModule, prefix: str) -> None:
        shared_tables = (self.calls, self.values, self.state)
        _FxReader(module, {}, {}, self.symbols, prefix, *shared_tables).read()

    def _resolve_call(self, node: Node) -> tuple[str, Callable[..., Any] | None, str]:
        """The name of what a node calls, the function, and why it cannot be checked."""
        if node.op == "call_method":
            method = getattr(torch.Tensor, str(node.target), None)
            return f"torch.Tensor.{node.target}", method, ""
        if node.op == "call_module":
            module = self.module.get_submodule(str(node.target))
            name = f"{type(module).__module__}.{type(module).__qualname__}"
            why = f"module {node.target} cannot be traced: its control flow depends on its inputs"
            return name, module, f"{why}; export the model with torch.export"
        target: Any = node.target
        if is_higher_order(target):
            return full_name(target), None, HIGHER_ORDER
        return full_name(target), target, ""

    def _argument(self, node_argument: Any) -> Any:
        def item(leaf: Any) -> Any:
            if isinstance(leaf, slice):
                return slice(*map(item, (leaf.start, leaf.stop, leaf.step)))
            return self.made[leaf] if isinstance(leaf, Node) else leaf

        return map_items(node_argument, item)


def _unpacked_item(args: tuple[Any, ...]) -> Any:
    try:
        return args[0][args[1]]
    except (LookupError, TypeError):
        return UNKNOWN


def _without_graphs(tree: Any) -> Any:
    if isinstance(tree, tuple):
        return tuple(None if isinstance(argument, GraphModule) else argument for argument in tree)
    return {
        key: None if isinstance(argument, GraphModule) else argument
        for key, argument in tree.items()
    }


def _module_path_of(node: Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    entry = list(stack.values())[-1]
    path = module_path(str(entry[0] if isinstance(entry, tuple) else entry))
    return "" if path.startswith("_empty_nn_module_stack") else path


# --- The full name of what a node of an FX graph calls --------------------------------------------

# The public modules, to which torch adds functions from elsewhere.
_HOMES = {
    "torch.nn.functional": torch.nn.functional,
    "torch": torch,
    "torch.special": torch.special,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
}


def full_name(target: Callable[..., Any]) -> str:
    """The name of a function: `torch.nn.functional.linear`, `aten.mm.default`, `operator.add`."""
    if is_higher_order(target):
        return f"higher_order.{getattr(target, '__name__', target)}"
    if is_operator(target):
        return str(target)
    name = name_of(target)
    if name.startswith(("_operator.", "builtins.")):
        return name.removeprefix("_").removeprefix("builtins.")
    if not name.startswith("torch."):
        return name
    short = str(getattr(target, "__name__", ""))
    for home, module in _HOMES.items():
        for spelt in (short, short.partition("_")[2]):  # the name of torch.fft.fft is fft_fft
            if spelt and getattr(module, spelt, None) is target:
                return f"{home}.{spelt}"
    return name


# --- The values of the nodes of an FX graph -------------------------------------------------------

# None is a value too: that of a node without a result.
UNKNOWN = object()


def recorded_value(node: Node) -> Any:
    """The value that the graph records for a node, or `UNKNOWN`."""
    for key in ("val", "example_value", "tensor_meta"):
        if key in node.meta:
            return node.meta[key]
    return UNKNOWN


def _is_metadata(value: Any) -> bool:
    """Whether a value is a `TensorMetadata` of torch.fx's ShapeProp."""
    return hasattr(value, "_fields") and hasattr(value, "shape") and hasattr(value, "dtype")
