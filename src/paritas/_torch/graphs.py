"""FX graphs as compilers pass them round: copies that stay as they are, and what nodes stand for.

Compilers rewrite the graph they are given in place, so whoever wants to know what it meant takes a
copy before. Its constants stay shared: they may be the whole model.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
import re
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from paritas._torch.operators import Traits, traits

if TYPE_CHECKING:
    from collections.abc import Iterator

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
class Provenance:
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
                value = node.kwargs.get(place) if isinstance(place, str) else _at(node.args, place)
                for given in _nodes_in(value):
                    written |= positions.get(given, set())
            if kind.view or kind.mutates:
                positions[node] = reached
        elif (
            isinstance(node.target, HigherOrderOperator)
            or node.op != "call_function"
            or not _is_pure(node)
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


def provenance(node: Node) -> Provenance:
    """Module path and source line of a node, as far as tracing kept them."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    module = ""
    if stack:
        entry = list(stack.values())[-1]
        module = module_path(str(entry[0] if isinstance(entry, tuple) else entry))
    source, code = _user_line(node.meta.get("stack_trace") or "")
    return Provenance(node.name, operator_name(node), module, source, code)


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
        return not _argument(parent, "dropout_p")
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
    return "dropout_p" not in takes or bool(_argument(node, "dropout_p"))


def _argument(node: Node, name: str) -> Any:
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
            source, _ = _user_line(node.meta.get("stack_trace") or "")
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


def _at(args: tuple[Any, ...], place: int) -> Any:
    return args[place] if place < len(args) else None


def _nodes_in(value: Any) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _nodes_in(item)


def _is_pure(node: Node) -> bool:
    """Whether a node of a captured graph leaves its arguments alone, by its name."""
    if node.op == "call_module" or isinstance(node.target, HigherOrderOperator):
        return False
    if isinstance(node.target, str):
        return not node.target.endswith("_")
    name = getattr(node.target, "__name__", "")
    return not name.endswith("_") and name not in {"setitem", "iadd", "imul", "isub", "itruediv"}


def _user_line(trace: str) -> tuple[str, str]:
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
