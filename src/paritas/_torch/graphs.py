"""FX graphs as compilers pass them round: copies, what nodes stand for, names, traces.

Compilers rewrite the graph they are given in place, so whoever wants to know what it meant takes a
copy before. Its constants stay shared: they may be the whole model.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen
from torch.utils._python_dispatch import _disable_current_modes

from paritas._torch.operators import Traits, traits
from paritas.errors import UnsupportedTorchError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.export import ExportedProgram

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)')
# Frames of torch's own that stand between the user's line and the operator.
_INTERNAL = re.compile(r"[/\\]torch[/\\](nn|_dynamo|functional|fx|_higher_order_ops|utils)\b")
# After a graph break Dynamo goes on in a function of its own, named after the user's.
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")
_UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
)
_GENERATOR_STATES = frozenset(
    {"philox_seed", "philox_offset", "rng_state", "unused", "debug_attn_mask"}
)
_LOCAL = re.compile(r"[LG]\['(?P<name>\w+)'\]")
_SLOT = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")
_KEY = re.compile(r"\['([^'\]]+)'\]")


def computes_tensors(graph: GraphModule) -> bool:
    """Whether a captured graph has an operator that gives a tensor.

    Between two graph breaks Dynamo may capture a graph of sizes alone: a compiler makes nothing of
    it that could be wrong.
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
    """The same graph, which no later pass over the original changes; tensors are shared."""
    result = GraphModule(module, copy.deepcopy(module.graph), type(module).__name__)
    for name, child in list(result.named_children()):
        if isinstance(child, GraphModule):  # the branches of a higher-order operator
            setattr(result, name, copy_graph(child))
    result.meta.update(getattr(module, "meta", {}))
    return result


def placeholders(module: GraphModule) -> list[Node]:
    """The inputs of a graph, in order."""
    return module.graph.find_nodes(op="placeholder")


def output_node(module: GraphModule) -> Node:
    """The node that holds what the graph returns."""
    node: Node = module.graph.find_nodes(op="output")[0]
    return node


def returned(module: GraphModule) -> list[Any]:
    """What a graph returns: nodes and constants, flat."""
    result = output_node(module).args[0]
    return list(result) if isinstance(result, list | tuple) else [result]


def written_placeholders(module: GraphModule) -> frozenset[int]:
    """The positions of the inputs that running the graph may write to.

    Followed through views; an operator that is not understood may write to all it is given.
    """
    positions = {node: {index} for index, node in enumerate(placeholders(module))}
    written: set[int] = set()
    for node in module.graph.nodes:
        if node.op in {"placeholder", "output", "get_attr"}:
            continue
        reached = {index for given in node.all_input_nodes for index in positions.get(given, ())}
        if not reached:
            continue
        if isinstance(node.target, OpOverload):
            kind = traits(node.target)
            for place in kind.mutates:
                value = (
                    node.kwargs.get(place)
                    if isinstance(place, str)
                    else _argument_at(node.args, place)
                )
                for given in _nodes_in(value):
                    written |= positions.get(given, set())
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
    """The floating dtypes that a traced graph computes in, with how many values of each."""
    counts: dict[torch.dtype, int] = {}
    for node in module.graph.nodes:
        value = node.meta.get("val", node.meta.get("example_value"))
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
            counts[value.dtype] = counts.get(value.dtype, 0) + 1
    return counts


def provenance(node: Node) -> NodeProvenance:
    """Module path and source line of a node, as far as tracing kept them."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    module = ""
    if stack:
        entry = list(stack.values())[-1]
        module = module_path(str(entry[0] if isinstance(entry, tuple) else entry))
    source, code = _find_user_line(node.meta.get("stack_trace") or "")
    return NodeProvenance(node.name, operator_name(node), module, source, code)


def is_undefined(node: Any) -> bool:
    """Whether a value is whatever lay in memory: nothing can be said against any other.

    Fused attention gives the state of the generator it would have drawn from; without dropout it
    draws nothing, and sets nothing.
    """
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    if node.target is operator.getitem:
        parent, position = node.args
        if not isinstance(parent, Node) or not isinstance(parent.target, OpOverload):
            return False
        returns = parent.target._schema.returns
        index = int(str(position))
        # Operators that return a list (split, unbind) have but one return, without a name.
        if index >= len(returns) or returns[index].name not in _GENERATOR_STATES:
            return False
        return not _argument_named(parent, "dropout_p")
    kind = node_traits(node)
    if kind is None:
        return False
    if kind.view:
        return is_undefined(node.args[0])
    return kind.name in _UNINITIALISED


def node_draws(node: Node) -> bool:
    """Whether a node moves a random generator: attention without dropout does not."""
    kind = node_traits(node)
    if kind is None or not kind.random:
        return False
    takes = {argument.name for argument in node.target._schema.arguments}  # type: ignore[union-attr]
    return "dropout_p" not in takes or bool(_argument_named(node, "dropout_p"))


def _argument_named(node: Node, name: str) -> Any:
    """An argument by its name in the schema of the operator."""
    schema = node.target._schema  # type: ignore[union-attr]
    names = [argument.name for argument in schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}.get(name)


def ancestors(nodes: list[Any]) -> set[str]:
    """The names of the nodes that given ones are computed from, and their own."""
    found: set[str] = set()
    waiting = [node for node in nodes if isinstance(node, Node)]
    while waiting:
        node = waiting.pop()
        if node.name not in found:
            found.add(node.name)
            waiting += node.all_input_nodes
    return found


def node_traits(node: Node) -> Traits | None:
    """The traits of the operator a node calls, if it calls one of torch's."""
    return traits(node.target) if isinstance(node.target, OpOverload) else None


def is_view(node: Node) -> bool:
    """Whether a node computes nothing: it shares the memory of what it is given."""
    if node.target is operator.getitem:
        return True
    kind = node_traits(node)
    return kind is not None and kind.view


def graph_source(module: GraphModule) -> str:
    """The first of the user's lines that a graph comes from."""
    for node in module.graph.nodes:
        if node.op not in {"placeholder", "output", "get_attr"}:
            source, _ = _find_user_line(node.meta.get("stack_trace") or "")
            if source:
                return source
    return ""


def operator_name(node: Node) -> str:
    """What a node calls, in words."""
    if isinstance(node.target, str):
        return node.target
    name = getattr(node.target, "__name__", None)
    return str(node.target) if isinstance(node.target, OpOverload) or not name else str(name)


def module_path(text: str) -> str:
    """`L['self']._modules['layers'].0` as the user would write it: `layers.0`."""
    # A module of torch's own that is compiled is `fn` to the wrapper that Dynamo puts around it.
    text = _LOCAL.sub(lambda found: "" if found["name"] in {"self", "fn"} else found["name"], text)
    text = _SLOT.sub(r".\1", text)
    text = _KEY.sub(r".\1", text)
    return text.strip(".")


@contextlib.contextmanager
def as_traced() -> Iterator[None]:
    """Conditions under which a graph from below autograd means what it says.

    Casts of autocast are nodes of it already; what modes do was done when it was traced.
    """
    with torch.no_grad(), torch._C._DisableAutocast(), _disable_current_modes():
        yield


def _argument_at(args: tuple[Any, ...], place: int) -> Any:
    return args[place] if place < len(args) else None


def _nodes_in(value: Any) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _nodes_in(item)


def _leaves_arguments_alone(node: Node) -> bool:
    """Whether a node of a captured graph leaves its arguments alone, by its name."""
    if node.op == "call_module" or isinstance(node.target, HigherOrderOperator):
        return False
    if isinstance(node.target, str):
        return not node.target.endswith("_")
    name = getattr(node.target, "__name__", "")
    return not name.endswith("_") and name not in {"setitem", "iadd", "imul", "isub", "itruediv"}


def _find_user_line(trace: str) -> tuple[str, str]:
    """The innermost line of the traceback that is not torch's own."""
    lines = trace.splitlines()
    best = ("", "")
    for position, text in enumerate(lines):
        found = _FRAME.search(text)
        if found is None:
            continue
        code = lines[position + 1].strip() if position + 1 < len(lines) else ""
        code = "" if _FRAME.search(code) else code
        if best[0] and _INTERNAL.search(found["file"]):
            continue
        function = _RESUMED.sub(r"\1", found["function"])
        best = (f"{found['file']}:{found['line']}, in {function}", code)
    return best


# --- Names of inputs and outputs ------------------------------------------------------------------

# AOTAutograd numbers everything (`primals_5`), but leaves descriptions that lead back to the
# captured graph, whose inputs know their place in the user's program.


def captured_input_names(module: GraphModule) -> list[str]:
    """The inputs of a graph that Dynamo captured, as the user would write them."""
    return [_source_name(node) or node.name for node in placeholders(module)]


def lowered_input_names(module: GraphModule, captured: list[str]) -> list[str]:
    """The inputs of a graph below AOTAutograd."""
    return [
        _describe_value(node.meta.get("desc"), captured) or node.name
        for node in placeholders(module)
    ]


def lowered_output_names(module: GraphModule, captured: list[str]) -> list[str]:
    """The outputs of a graph below AOTAutograd, each named once."""
    values = returned(module)
    described = output_node(module).meta.get("desc") or [None] * len(values)
    names: list[str] = []
    for position, (value, description) in enumerate(zip(values, described, strict=False)):
        name = _describe_value(description, captured)
        if not name:
            name = f"output[{position}]" if value is None else f"value {value}"
        if name in names:
            name = f"{name} (output {position})"
        names.append(name)
    return names


def _describe_value(description: Any, captured: list[str]) -> str:
    kind = type(description).__name__
    if kind in {"PlainAOTInput", "ParamAOTInput", "BufferAOTInput"}:
        position = getattr(description, "idx", None)
        if isinstance(position, int) and position < len(captured):
            return captured[position]
        return str(getattr(description, "target", "") or "")
    if kind == "PlainAOTOutput":
        return f"output[{description.idx}]"
    if kind == "GradAOTOutput":
        of = _describe_value(description.grad_of, captured)
        return f"gradient of {of}" if of else ""
    if kind == "TangentAOTInput":
        of = _describe_value(description.output, captured)
        return f"upstream gradient of {of}" if of else ""
    if kind == "InputMutationAOTOutput":
        of = _describe_value(description.mutated_input, captured)
        return f"{of}, as changed" if of else ""
    return ""


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
    out.args = ((*returned(result), *inside),)
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


# --- What torch knows of values without running the graph -----------------------------------------


def is_bracket(target: Any, args: Sequence[Any]) -> bool:
    """Whether a node only says whether gradients are kept inside the graph that it is given."""
    return (
        is_higher_order(target)
        and getattr(target, "__name__", "") == "wrap_with_set_grad_enabled"
        and len(args) > 1
    )


def is_operator(target: Any) -> bool:
    """Whether a node's target is an operator of torch's dispatcher: `aten.mm.default`."""
    return isinstance(target, OpOverload | OpOverloadPacket)


def is_higher_order(target: Any) -> bool:
    """Whether a node's target is an operator that is given graphs: `cond`, `flex_attention`."""
    return isinstance(target, HigherOrderOperator)


def size_number(
    value: torch.SymInt | torch.SymFloat | torch.SymBool, guess: Callable[[str], int]
) -> int | float | bool | None:
    """The number that a size had when its graph was made.

    Args:
        guess: the number for a symbol that had none, because it depends on values.
    """
    node = value.node
    if not hasattr(node, "hint"):
        raise UnsupportedTorchError(
            f"torch {torch.__version__}: {type(node).__name__} has no `hint`, which says the "
            "number behind a symbolic size"
        )
    hint = node.hint
    if isinstance(hint, int | float):
        return hint
    settled = node.expr.subs({one: guess(str(one)) for one in node.expr.free_symbols})
    try:
        if isinstance(value, torch.SymBool):
            return bool(settled)
        return int(settled) if isinstance(value, torch.SymInt) else float(settled)
    except TypeError:
        return None  # an expression that does not come to a number


def symbol_ranges(program: ExportedProgram) -> dict[str, tuple[int | None, int | None]]:
    """Between which numbers the symbols of a program lie; None where there is no end."""

    def whole(bound: Any) -> int | None:
        return int(bound) if getattr(bound, "is_Integer", False) else None

    return {
        str(symbol): (whole(within.lower), whole(within.upper))
        for symbol, within in program.range_constraints.items()
    }


def predict_values(module: GraphModule, inputs: Sequence[Any]) -> dict[Node, Any]:
    """What each node of a graph gives on inputs like these: shapes and dtypes, no values.

    A node that fails leaves its value, and those that depend on it, out. Nothing of the module is
    written to.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def hollow(value: Any) -> Any:
        # A fake of torch's own would belong to another mode, and not mix with ours.
        if isinstance(value, FakeTensor):
            with mode:
                return torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=value.device
                )
        return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    found = _ShapeInterpreter(module, hollow)
    with mode:
        found.run(*[hollow(one) for one in inputs])
    return found.values


class _ShapeInterpreter(Interpreter):
    """Runs a graph on tensors without contents, with parameters that have none either."""

    def __init__(self, module: GraphModule, hollow: Callable[[Any], Any]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._hollow = functools.cache(hollow)
        self.values: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        if n.op == "output" or any(one not in self.values for one in n.all_input_nodes):
            return None
        try:
            self.values[n] = super().run_node(n)
        except Exception:  # noqa: BLE001  (told of as a call whose shapes are unknown)
            return None
        return self.values[n]

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        found = super().get_attr(target, args, kwargs)
        return self._hollow(found) if isinstance(found, torch.Tensor) else found

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        submodule = self.fetch_attr(target)
        tensors = {**dict(submodule.named_parameters()), **dict(submodule.named_buffers())}
        held = {name: self._hollow(tensor) for name, tensor in tensors.items()}
        return torch.func.functional_call(submodule, held, args, kwargs)


# --- Tracing a program into one flat graph --------------------------------------------------------


def trace_calls(function: Callable[..., Any], inputs: Sequence[Any]) -> GraphModule:
    """Run `function` on flat `inputs` and keep every aten call it makes, gradients included.

    The graph has one placeholder for each input and gives what the function gave, as a flat tuple.
    Tensors that the function holds by itself become attributes of the module.
    """
    # The tracer runs the function for real: what it does depends on values as it always does.
    module: GraphModule = make_fx(
        function, tracing_mode="real", _error_on_data_dependent_ops=False
    )(*inputs)
    module.graph.set_codegen(CodeGen())
    for node in module.graph.find_nodes(op="output"):
        (results,) = node.args
        node.args = (tuple(torch.utils._pytree.tree_leaves(results)),)
    module.recompile()
    return module
