"""FX graphs of compilers: copies, the origin and meaning of nodes, names, traces.

Compilers rewrite graphs in place, so a copy must be taken before. Constants stay shared: they may
be the whole model.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import operator
import re
from typing import TYPE_CHECKING, Any

import torch
from torch._guards import TracingContext, tracing
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen
from torch.utils._python_dispatch import _disable_current_modes

from paritas.core.errors import UnsupportedTorchError, in_one_line
from paritas.core.results.items import Item, ItemKind, input_of, nth_output
from paritas.core.torch_private.operators import Traits, traits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.export import ExportedProgram

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)')
# Frames of torch between the user's line and the operator.
_INTERNAL = re.compile(r"[/\\]torch[/\\](nn|_dynamo|functional|fx|_higher_order_ops|utils)\b")
# After a graph break Dynamo continues in a generated function, named after the user's.
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")
UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
)
_GENERATOR_STATES = frozenset(
    {"philox_seed", "philox_offset", "rng_state", "unused", "debug_attn_mask"}
)
_LOCAL = re.compile(r"[LG]\['(?P<name>\w+)'\]")
_SLOT = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")
_KEY = re.compile(r"\['([^'\]]+)'\]")


def computes_tensors(graph: GraphModule) -> bool:
    """Whether a captured graph has an operator that returns a tensor.

    Between two graph breaks Dynamo may capture a graph of sizes only, with nothing to compile.
    """
    return any(map(_gives_tensor, graph.graph.nodes))


def _gives_tensor(node: Node) -> bool:
    if not node.op.startswith("call_"):
        return False
    value = node.meta.get("example_value", node.meta.get("val"))
    sizes = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
    return not isinstance(value, sizes)


@dataclasses.dataclass(frozen=True)
class NodeProvenance:
    """Where a node comes from.

    Attributes:
        node: its name in the graph.
        operator: what it calls, for example `aten.relu.default`.
        module: path of the module it was called in, or "".
        source: the user's line, `file.py:18, in forward`, or "".
        code: the text of that line, or "".
    """

    node: str
    operator: str
    module: str = ""
    source: str = ""
    code: str = ""


def copy_graph(module: GraphModule) -> GraphModule:
    """A copy of a graph that later passes do not change; tensors are shared."""
    result = GraphModule(module, copy.deepcopy(module.graph), type(module).__name__)
    for name, child in list(result.named_children()):
        if isinstance(child, GraphModule):  # the branches of a higher-order operator
            setattr(result, name, copy_graph(child))
    result.meta.update(getattr(module, "meta", {}))
    return result


def lift_tensors(module: GraphModule) -> dict[str, torch.Tensor]:
    """Make inputs of the tensors that a graph has as attributes; returns these by name, in order.

    A compiled step of an optimizer has its parameters and states there, and writes to them.
    """
    lifted: dict[str, torch.Tensor] = {}
    inputs: dict[str, Node] = {}
    last: Node | None = next(reversed(placeholders(module)), None)
    for node in module.graph.find_nodes(op="get_attr"):
        name, value = str(node.target), _attribute_of(node)
        if not isinstance(value, torch.Tensor):
            continue
        if name not in inputs:
            position = (
                module.graph.inserting_before if last is None else module.graph.inserting_after
            )
            with position(last):
                last = inputs[name] = module.graph.placeholder(name.replace(".", "_"))
            last.meta = dict(node.meta)
            lifted[name] = value
        node.replace_all_uses_with(inputs[name])
        module.graph.erase_node(node)
    if lifted:
        module.recompile()
    return lifted


def placeholders(module: GraphModule) -> list[Node]:
    """The inputs of a graph, in order."""
    return module.graph.find_nodes(op="placeholder")


def output_node(module: GraphModule) -> Node:
    """The output node of a graph."""
    node: Node = module.graph.find_nodes(op="output")[0]
    return node


def returned_values(module: GraphModule) -> list[Any]:
    """The nodes and constants that a graph returns, flat."""
    result = output_node(module).args[0]
    return list(result) if isinstance(result, list | tuple) else [result]


def written_placeholders(module: GraphModule) -> frozenset[int]:
    """The positions of the inputs that the graph may write to.

    Writes are followed through views; an unknown operator may write to all its arguments.
    """
    positions = {node: {index} for index, node in enumerate(placeholders(module))}
    written: set[int] = set()
    for node in module.graph.nodes:
        if node.op in {"placeholder", "output", "get_attr"}:
            continue
        reached = {
            index for input_node in node.all_input_nodes for index in positions.get(input_node, ())
        }
        if not reached:
            continue
        if isinstance(node.target, OpOverload):
            kind = traits(node.target)
            for mutate in kind.mutates:
                value = (
                    node.kwargs.get(mutate)
                    if isinstance(mutate, str)
                    else _argument_at(node.args, mutate)
                )
                for argument_node in nodes_in(value):
                    written |= positions.get(argument_node, set())
            if kind.view or kind.mutates:
                positions[node] = reached
        elif (
            isinstance(node.target, HigherOrderOperator)
            or node.op != "call_function"
            or not _leaves_arguments_alone(node)
        ):
            written |= reached
            positions[node] = reached
    return frozenset(written)


def node_dtypes(module: GraphModule) -> dict[torch.dtype, int]:
    """The floating dtypes of a traced graph, with the number of values of each."""
    counts: dict[torch.dtype, int] = {}
    for node in module.graph.nodes:
        value = node.meta.get("val", node.meta.get("example_value"))
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
            counts[value.dtype] = counts.get(value.dtype, 0) + 1
    return counts


def provenance(node: Node) -> NodeProvenance:
    """Module path and source line of a node, if tracing recorded them."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    module = ""
    if stack:
        entry = list(stack.values())[-1]
        module = module_path(str(entry[0] if isinstance(entry, tuple) else entry))
    source, code = _find_user_line(node.meta.get("stack_trace") or "")
    return NodeProvenance(node.name, operator_name(node), module, source, code)


def is_undefined(node: Any) -> bool:
    """Whether a value is uninitialized memory: any other value is as good.

    Fused attention returns the state of its generator; without dropout it draws nothing, and does
    not set it.
    """
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    if node.target is operator.getitem:
        parent, position = node.args
        if not isinstance(parent, Node) or not isinstance(parent.target, OpOverload):
            return False
        returns = parent.target._schema.returns
        index = int(str(position))
        # Operators that return a list (split, unbind) have only one return, without a name.
        if index >= len(returns) or returns[index].name not in _GENERATOR_STATES:
            return False
        return not _argument_named(parent, "dropout_p")
    kind = node_traits(node)
    if kind is None:
        return False
    if kind.view:
        return is_undefined(node.args[0])
    return kind.name in UNINITIALISED


def node_draws(node: Node) -> bool:
    """Whether a node advances a random generator: attention without dropout does not."""
    kind = node_traits(node)
    if kind is None or not kind.random:
        return False
    takes = {argument.name for argument in node.target._schema.arguments}  # type: ignore[union-attr]
    return "dropout_p" not in takes or bool(_argument_named(node, "dropout_p"))


def _argument_named(node: Node, name: str) -> Any:
    schema = node.target._schema  # type: ignore[union-attr]
    names = [argument.name for argument in schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}.get(name)


# Functions of torch that draw, and whose name is not that of an operator that does.
_DRAWING_FUNCTIONS = ("dropout", "fractional", "gumbel", "rrelu")
# Where a function is told whether to draw: position, name, default.
_SWITCHES = {
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d"), (2, "training", True)),
    "multi_head_attention_forward": (13, "training", True),
    "scaled_dot_product_attention": (4, "dropout_p", 0.0),
}
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_HARMLESS_HOMES = frozenset({"_operator", "builtins", "math"})
_DRAWING_HOMES = ("torch.nn.init", "torch.random", "torch.cuda.random")


def captured_graph_may_draw(module: GraphModule) -> bool:
    """Whether running a graph as Dynamo captured it may advance torch's random generators."""
    graphs = [
        graph_module for graph_module in module.modules() if isinstance(graph_module, GraphModule)
    ]
    return any(_may_draw(node) for graph in graphs for node in graph.graph.nodes)


def captured_graph_uses_draws(module: GraphModule) -> bool:
    """Whether something may depend on the numbers that such a graph draws.

    `torch.rand([])` of which nothing is used is left out by compilers.
    """
    graphs = [
        graph_module for graph_module in module.modules() if isinstance(graph_module, GraphModule)
    ]
    drawing = [node for graph in graphs for node in graph.graph.nodes if _may_draw(node)]
    return any(node.users or str(node.target).endswith("_") for node in drawing)


def _may_draw(node: Node) -> bool:
    if node.op == "call_method":
        return _is_drawn_by_operator(str(node.target))
    if node.op == "call_module":
        return not isinstance(_attribute_of(node), GraphModule)
    if node.op != "call_function" or isinstance(node.target, HigherOrderOperator):
        return False  # the graphs that such an operator runs are looked at themselves
    if isinstance(node.target, OpOverload | OpOverloadPacket):
        is_known = str(node.target).partition(".")[0] in {"aten", "prims"}
        return not is_known or _is_drawn_by_operator(str(node.target).split(".")[1])
    name = getattr(node.target, "__name__", "")
    home = str(getattr(node.target, "__module__", None) or "torch")
    if home in _HARMLESS_HOMES or home.startswith(_DRAWING_HOMES):
        return home not in _HARMLESS_HOMES
    if name in _SWITCHES:
        position, switch, default = _SWITCHES[name]
        return bool(dict(enumerate(node.args)).get(position, node.kwargs.get(switch, default)))
    drawing = any(part in name for part in _DRAWING_FUNCTIONS) or name in _RECURRENT
    return drawing or home.partition(".")[0] != "torch" or _is_drawn_by_operator(name)


def _attribute_of(node: Node) -> Any:
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value


@functools.cache
def _is_drawn_by_operator(name: str) -> bool:
    """Whether torch has an operator of this name that draws random numbers."""
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if not isinstance(packet, OpOverloadPacket):
        return False
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def ancestors(nodes: list[Any]) -> set[str]:
    """The names of these nodes and of all nodes that they are computed from."""
    reached: set[str] = set()
    waiting = [node for node in nodes if isinstance(node, Node)]
    while waiting:
        node = waiting.pop()
        if node.name not in reached:
            reached.add(node.name)
            waiting += node.all_input_nodes
    return reached


def node_traits(node: Node) -> Traits | None:
    """The traits of a node's operator, if it is one of torch."""
    return traits(node.target) if isinstance(node.target, OpOverload) else None


def is_view(node: Node) -> bool:
    """Whether a node computes nothing, but shares the memory of its argument."""
    if node.target is operator.getitem:
        return True
    kind = node_traits(node)
    return kind is not None and kind.view


def graph_source(module: GraphModule) -> str:
    """The user's first line in a graph."""
    for node in module.graph.nodes:
        if node.op not in {"placeholder", "output", "get_attr"}:
            source, _ = _find_user_line(node.meta.get("stack_trace") or "")
            if source:
                return source
    return ""


def operator_name(node: Node) -> str:
    """The name of what a node calls."""
    if isinstance(node.target, str):
        return node.target
    name = getattr(node.target, "__name__", None)
    return str(node.target) if isinstance(node.target, OpOverload) or not name else str(name)


def parameter_names(node: Node) -> list[str]:
    """The names of the positional parameters of what a node calls, as far as they are known."""
    if isinstance(node.target, OpOverload):
        return [argument.name for argument in node.target._schema.arguments]
    if getattr(node.target, "__module__", None) == "_operator":
        return []  # a and b
    try:
        return list(inspect.signature(node.target).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return _names_in_operator(node)


def _names_in_operator(node: Node) -> list[str]:
    """The names in the first form of torch's operator of that name that takes these arguments."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    home = getattr(node.target, "__module__", None) or "torch"
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if not isinstance(packet, OpOverloadPacket) or not (
        node.op == "call_method" or home.startswith("torch")
    ):
        return []
    for overload in packet.overloads():
        arguments = getattr(packet, overload)._schema.arguments
        pairs = list(zip(arguments, node.args, strict=False))
        if len(pairs) == len(node.args) and all(
            _may_be(argument, value) for argument, value in pairs
        ):
            return [argument.name for argument in arguments]
    return []


def _may_be(argument: Any, value: Any) -> bool:
    """Whether a value has the type of an argument, as far as tensors are concerned."""
    return ("Tensor" in str(argument.type)) == any(True for _ in nodes_in(value))


def module_path(text: str) -> str:
    """`L['self']._modules['layers'].0` as the user would write it: `layers.0`."""
    # Dynamo's wrapper around a compiled module of torch calls it `fn`.
    text = _LOCAL.sub(lambda match: "" if match["name"] in {"self", "fn"} else match["name"], text)
    text = _SLOT.sub(r".\1", text)
    text = _KEY.sub(r".\1", text)
    return text.strip(".")


@contextlib.contextmanager
def as_traced() -> Iterator[None]:
    """Run a graph from below autograd as it was traced.

    Autocast's casts are already nodes of it, and modes were applied when it was traced.
    """
    with torch.no_grad(), torch._C._DisableAutocast(), _disable_current_modes():
        yield


def _argument_at(args: tuple[Any, ...], position: int) -> Any:
    return args[position] if position < len(args) else None


def nodes_in(value: Any) -> Iterator[Node]:
    """The nodes among the arguments of a node, also inside lists."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from nodes_in(item)


def _leaves_arguments_alone(node: Node) -> bool:
    """Whether a node of a captured graph does not write to its arguments, by its name."""
    if node.op == "call_module" or isinstance(node.target, HigherOrderOperator):
        return False
    if isinstance(node.target, str):
        return not node.target.endswith("_")
    name = getattr(node.target, "__name__", "")
    return not name.endswith("_") and name not in {"setitem", "iadd", "imul", "isub", "itruediv"}


def _find_user_line(trace: str) -> tuple[str, str]:
    """The innermost line of the traceback outside torch."""
    lines = trace.splitlines()
    best = ("", "")
    for position, text in enumerate(lines):
        match = _FRAME.search(text)
        if match is None:
            continue
        code = lines[position + 1].strip() if position + 1 < len(lines) else ""
        code = "" if _FRAME.search(code) else code
        if best[0] and _INTERNAL.search(match["file"]):
            continue
        function = _RESUMED.sub(r"\1", match["function"])
        best = (f"{match['file']}:{match['line']}, in {function}", code)
    return best


# --- Names of inputs and outputs ------------------------------------------------------------------

# AOTAutograd numbers everything (`primals_5`), but keeps descriptions that refer to the captured
# graph. The inputs of that graph know their names in the user's program.


def captured_input_names(module: GraphModule) -> list[str]:
    """The inputs of a graph that Dynamo captured, as the user would write them."""
    return [_source_name(node) or node.name for node in placeholders(module)]


def lowered_input_names(module: GraphModule, captured: list[str]) -> list[str]:
    """The inputs of a graph below AOTAutograd."""
    described = [_described_item(node.meta.get("desc"), captured) for node in placeholders(module)]
    return [
        node.name if item is None else item.text
        for node, item in zip(placeholders(module), described, strict=True)
    ]


def lowered_outputs(module: GraphModule, captured: list[str]) -> list[Item]:
    """The items of the outputs of a graph below AOTAutograd; all are different."""
    values = returned_values(module)
    described = output_node(module).meta.get("desc") or [None] * len(values)
    items: list[Item] = []
    for position, (value, description) in enumerate(zip(values, described, strict=False)):
        item = _described_item(description, captured)
        if item is None:
            item = nth_output(position) if value is None else Item(ItemKind.NAMED, f"value {value}")
        if item in items:
            item = item.named(f"{item.name} (output {position})")
        items.append(item)
    return items


# AOTAutograd's kind of output -> our kind, and the field with the value it refers to.
_KINDS_OF_OUTPUTS = {
    "GradAOTOutput": (ItemKind.GRADIENT, "grad_of"),
    "TangentAOTInput": (ItemKind.UPSTREAM_GRADIENT, "output"),
    "InputMutationAOTOutput": (ItemKind.CHANGED_INPUT, "mutated_input"),
}


def _described_item(description: Any, captured: list[str]) -> Item | None:
    kind = type(description).__name__
    if kind in {"PlainAOTInput", "ParamAOTInput", "BufferAOTInput"}:
        position = getattr(description, "idx", None)
        if isinstance(position, int) and position < len(captured):
            return input_of(captured[position])
        target = str(getattr(description, "target", "") or "")
        return input_of(target) if target else None
    if kind == "PlainAOTOutput":
        return nth_output(description.idx)
    if kind in _KINDS_OF_OUTPUTS:
        item_kind, field = _KINDS_OF_OUTPUTS[kind]
        of = _described_item(getattr(description, field), captured)
        return None if of is None else Item(item_kind, of.text)
    return None


def _source_name(node: Any) -> str:
    argument = node.meta.get("grapharg")
    source = getattr(argument, "source", None)
    name = getattr(source, "name", "")
    name = name() if callable(name) else name  # a method before torch 2.12
    return module_path(str(name)) if name else ""


# --- Every value as an output ---------------------------------------------------------------------


def tap_values(module: GraphModule) -> tuple[GraphModule, list[str]]:
    """A copy that returns its outputs and then the values of the named nodes."""
    result = copy_graph(module)
    inside = [node for node in result.graph.nodes if is_tappable(node)]
    out = output_node(result)
    out.args = ((*returned_values(result), *inside),)
    description = out.meta.get("desc")
    if description is not None:
        out.meta["desc"] = [*description, *([None] * len(inside))]
    result.recompile()
    return result, [node.name for node in inside]


def is_tappable(node: Node) -> bool:
    """Whether a node computes a single tensor."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return not traits(node.target).mutates
    return node.target is operator.getitem or isinstance(
        node.target, torch._ops.HigherOrderOperator
    )


# --- Properties of values without running the graph -----------------------------------------------


def is_bracket(target: Any, args: Sequence[Any]) -> bool:
    """Whether a node only sets grad mode for the graph among its arguments."""
    return (
        is_higher_order(target)
        and getattr(target, "__name__", "") == "wrap_with_set_grad_enabled"
        and len(args) > 1
    )


def erase_idle_autocast(module: GraphModule) -> None:
    """Erase what switches autocast off where it is not on, from a graph and all graphs inside it.

    It changes nothing, but AOTAutograd caches no graph that contains it.
    """
    modules = [part for part in module.modules() if isinstance(part, GraphModule)]
    entries = [
        (part, node)
        for part in modules
        for node in part.graph.find_nodes(op="call_function", target=_enter_autocast)
    ]
    may_be_on = any(
        len(node.args) <= _ENABLED
        or node.args[_ENABLED] is not False
        or torch.is_autocast_enabled(str(node.args[0]))
        or any(user.target is not _exit_autocast for user in node.users)
        for _, node in entries
    )
    for part, node in () if may_be_on else entries:
        for user in [*node.users, node]:
            part.graph.erase_node(user)


# The position of this argument of `torch.autocast` in a graph.
_ENABLED = 2


def is_higher_order(target: Any) -> bool:
    """Whether a node's target is an operator that takes graphs: `cond`, `flex_attention`."""
    return isinstance(target, HigherOrderOperator)


def size_number(
    value: torch.SymInt | torch.SymFloat | torch.SymBool, guess: Callable[[str], int]
) -> int | float | bool | None:
    """The value of a symbolic size when its graph was traced.

    Args:
        guess: gives the value of a symbol that depends on tensor values.
    """
    node = value.node
    if not hasattr(node, "hint"):
        raise UnsupportedTorchError(
            f"torch {torch.__version__}: {type(node).__name__} has no `hint`, which holds the "
            "value of a symbolic size"
        )
    hint = node.hint
    if isinstance(hint, int | float):
        return hint
    settled = node.expr.subs(
        {free_symbol: guess(str(free_symbol)) for free_symbol in node.expr.free_symbols}
    )
    try:
        if isinstance(value, torch.SymBool):
            return bool(settled)
        return int(settled) if isinstance(value, torch.SymInt) else float(settled)
    except TypeError:
        return None  # the expression has no numeric value


def symbol_ranges(program: ExportedProgram) -> dict[str, tuple[int | None, int | None]]:
    """The ranges of a program's symbols; None for an open end."""

    def whole(bound: Any) -> int | None:
        return int(bound) if getattr(bound, "is_Integer", False) else None

    return {
        str(symbol): (whole(within.lower), whole(within.upper))
        for symbol, within in program.range_constraints.items()
    }


def predict_values(
    module: GraphModule, inputs: Sequence[Any]
) -> tuple[dict[Node, Any], dict[Node, str]]:
    """The results of each node of a graph on such inputs: shapes and dtypes, no values.

    The module is not changed.

    Returns:
        The results, and for each node that fails or depends on one that does, the reason.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def hollow(value: Any) -> Any:
        # A fake tensor of torch belongs to another mode and cannot be mixed with ours.
        if isinstance(value, FakeTensor):
            with mode:
                return torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=value.device
                )
        return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    shape_interpreter = _ShapeInterpreter(module, hollow)
    with mode:
        shape_interpreter.run(*[hollow(value) for value in inputs])
    return shape_interpreter.values, shape_interpreter.reasons


class _ShapeInterpreter(Interpreter):
    """Runs a graph on fake tensors, with fake parameters."""

    def __init__(self, module: GraphModule, hollow: Callable[[Any], Any]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._hollow = functools.cache(hollow)
        self.values: dict[Node, Any] = {}
        self.reasons: dict[Node, str] = {}

    def run_node(self, n: Node) -> Any:
        failed = next(
            (input_node for input_node in n.all_input_nodes if input_node in self.reasons),
            None,
        )
        if n.op == "output":
            return None
        if failed is not None:
            self.reasons[n] = f"it depends on {failed.name}"
            return None
        try:
            self.values[n] = super().run_node(n)
        except Exception as error:  # noqa: BLE001  (the caller reports it with the call)
            self.reasons[n] = f"on fake tensors it raises {in_one_line(error, 160)}"
            return None
        return self.values[n]

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        attr = super().get_attr(target, args, kwargs)
        return self._hollow(attr) if isinstance(attr, torch.Tensor) else attr

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        submodule = self.fetch_attr(target)
        tensors = {**dict(submodule.named_parameters()), **dict(submodule.named_buffers())}
        hollow_tensors = {name: self._hollow(tensor) for name, tensor in tensors.items()}
        return torch.func.functional_call(submodule, hollow_tensors, args, kwargs)


# --- Tracing a program into one flat graph --------------------------------------------------------


def trace_calls(function: Callable[..., Any], inputs: Sequence[Any]) -> GraphModule:
    """Run `function` on flat `inputs` and record every aten call, including gradients.

    The graph has one placeholder for each input and returns the function's results as a flat tuple.
    Tensors that the function holds become attributes of the module.
    """
    # The tracer really runs the function, so it may depend on values as usual. Without a fake mode
    # around it, it makes one for each value, with a description of its stack.
    with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
        module: GraphModule = make_fx(
            function, tracing_mode="real", _error_on_data_dependent_ops=False
        )(*inputs)
    module.graph.set_codegen(CodeGen())
    for node in module.graph.find_nodes(op="output"):
        (results,) = node.args
        node.args = (tuple(torch.utils._pytree.tree_leaves(results)),)
    module.recompile()
    return module
