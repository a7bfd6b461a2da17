"""Snapshots of a graph during a compile, in an order in which it can run.

Passes rewrite graphs in place, leave them unsorted for a later pass to sort, and remove tensors and
branches from the module around them. So the nodes are copied in sorted order, together with the
attributes that they use. Sizes are those of the call that is being compiled: asking torch for a
number would add a guard.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor.pattern_matcher import Match
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paritas._torch.operators import traits

if TYPE_CHECKING:
    from collections.abc import Iterator

    Sizes = dict[Any, int]

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Stands for a size that is unknown before the program runs.
UNKNOWN_SIZE = 4
# Python operators that write to their argument.
_WRITING_PREFIXES = ("setitem", "delitem", "i")


class UnplayableError(RuntimeError):
    """A graph that cannot be run on made-up inputs, and why."""


@dataclasses.dataclass(frozen=True)
class FrozenGraph:
    """A copy of a graph that no pass changes.

    Attributes:
        graph: the nodes, sorted, under the names they had.
        attributes: target -> its value in the module; branches are frozen too.
        assumed: nodes that are assumed to compute what they replaced.
    """

    graph: Graph
    attributes: dict[str, Any]
    assumed: tuple[str, ...] = ()

    @property
    def nodes(self) -> list[Node]:
        """The nodes, in the order in which they run."""
        return list(self.graph.nodes)

    @property
    def placeholders(self) -> list[Node]:
        """The inputs, in order."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def returned(self) -> Any:
        """The returned nodes and constants, in their nesting."""
        return self.nodes[-1].args[0]

    def bodies(self, node: Node) -> Iterator[tuple[str, FrozenGraph]]:
        """The branches among a node's arguments, by name."""
        for given in node.all_input_nodes:
            body = self.attributes.get(str(given.target)) if given.op == "get_attr" else None
            if isinstance(body, FrozenGraph):
                yield str(given.target), body


def freeze(module: GraphModule, origin: FrozenGraph | None = None) -> FrozenGraph:
    """Copy a graph, sorted; raises `UnplayableError` if that is impossible.

    A node with a custom lowering of Inductor is not an operator: the nodes that it replaced are
    copied from `origin`, the graph before, and run in its place.
    """
    result = Graph()
    copies: dict[Node, Node] = {}
    by_name: dict[str, Node] = {}
    attributes: dict[str, Any] = {}
    assumed: list[str] = []
    for node in _sort_nodes(list(module.graph.nodes)):
        replaced = _names_replaced_by(node)
        if replaced:
            _restore_replaced(replaced, origin, result, by_name, attributes)
            copies[node] = by_name[replaced[-1]]
            assumed.append(node.name)
            continue
        copies[node] = by_name[node.name] = result.node_copy(node, copies.__getitem__)
        if node.op in {"get_attr", "call_module"}:
            target = str(node.target)
            attributes[target] = _freeze_attribute(module, target)
    return FrozenGraph(result, attributes, tuple(assumed))


def _names_replaced_by(node: Node) -> list[str]:
    """The names of the nodes replaced by one with a custom lowering, its value last."""
    match = node.target.args[0] if isinstance(node.target, functools.partial) else None
    return [old.name for old in match.nodes] if isinstance(match, Match) else []


def _restore_replaced(
    names: list[str],
    origin: FrozenGraph | None,
    graph: Graph,
    by_name: dict[str, Node],
    attributes: dict[str, Any],
) -> None:
    wanted = {*names} - by_name.keys()
    for node in origin.nodes if origin is not None else ():
        if node.name not in wanted:
            continue
        missing = [given.name for given in node.all_input_nodes if given.name not in by_name]
        if missing:
            message = f"{node.name} needs {missing[0]}, which the graph no longer has"
            raise UnplayableError(message)
        by_name[node.name] = graph.node_copy(node, lambda given: by_name[given.name])
        if origin is not None and str(node.target) in origin.attributes:
            attributes[str(node.target)] = origin.attributes[str(node.target)]
    if names[-1] not in by_name:
        message = f"the graph before has no {names[-1]}, which Inductor lowers by its own function"
        raise UnplayableError(message)


def may_write(graph: FrozenGraph) -> bool:
    """Whether running a graph may change its inputs."""
    for node in graph.nodes:
        if node.op in {"call_method", "call_module"}:
            return True
        if node.op == "call_function":
            target = node.target
            known = isinstance(target, OpOverload | HigherOrderOperator) or _is_arithmetic(target)
            if not known or (isinstance(target, OpOverload) and traits(target).mutates):
                return True
            if any(may_write(body) for _, body in graph.bodies(node)):
                return True
    return False


def _is_arithmetic(target: Any) -> bool:
    """Whether a function is Python arithmetic or one of `torch.sym_*`."""
    name = str(getattr(target, "__name__", ""))
    if getattr(target, "__module__", "") in {"_operator", "math", "builtins"}:
        return not name.startswith(_WRITING_PREFIXES)
    return name.startswith(("sym_", "_sym_"))


class Fingerprint:
    """A summary of a graph, to detect changes."""

    def __init__(self, module: GraphModule) -> None:
        """Remember the nodes of a graph and of its branches."""
        self._parts = list(_list_nodes(module))

    def same(self, other: Fingerprint) -> bool:
        """Whether the two graphs are equal, node for node."""
        if len(self._parts) != len(other._parts):
            return False
        # Arguments are never changed in place, so the same objects mean the same graph.
        return all(
            all(map(operator.is_, left, right)) or self._describe(left) == self._describe(right)
            for left, right in zip(self._parts, other._parts, strict=True)
        )

    @staticmethod
    def _describe(part: tuple[Any, ...]) -> tuple[Any, ...]:
        node, target, args, kwargs, attribute = part
        return node.op, node.name, target, str(args), str(kwargs), id(attribute)


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Shape, strides and dtype of a traced tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def traced_value(node: Node, sizes: Sizes | None = None) -> Any:
    """The traced value of a node: a tensor's spec, or a plain value."""
    known = node.meta.get("val", node.meta.get("example_value"))
    if known is None and not {"val", "example_value"} & node.meta.keys():
        message = f"the input {node.name} has no traced value"
        raise UnplayableError(message)
    if not isinstance(known, torch.Tensor):
        return concrete(known, sizes)
    is_plain = known.layout is torch.strided and not is_traceable_wrapper_subclass(known)
    if not is_plain or known.is_quantized:
        message = f"{node.name} is a {type(known).__name__}, layout {known.layout}"
        raise UnplayableError(message)
    shape = tuple(int(concrete(size, sizes)) for size in known.shape)
    stride = tuple(int(concrete(step, sizes)) for step in known.stride())
    return TensorSpec(shape, stride, known.dtype)


def has_known_size(node: Node) -> bool:
    """Whether a node's size or number is known before the program runs."""
    known = node.meta.get("val", node.meta.get("example_value"))
    parts = [*known.shape, *known.stride()] if isinstance(known, torch.Tensor) else [known]
    return all(part.node.hint is not None for part in parts if isinstance(part, SYMBOLS))


def concrete(value: Any, sizes: Sizes | None = None) -> Any:
    """The value of a symbol: in the call that is being compiled, or in `sizes`."""
    if not isinstance(value, SYMBOLS):
        return value
    node = value.node
    if node.hint is not None:
        return node.hint
    known = getattr(node.shape_env, "backed_var_to_val", None)
    known = node.shape_env.var_to_val if known is None else known
    known = {**known, **(sizes or {})}
    symbols = getattr(node.expr, "free_symbols", ())
    filled = {symbol: known.get(symbol, UNKNOWN_SIZE) for symbol in symbols}
    return node.pytype(node.expr.xreplace(filled))


def record_sizes(node: Node, value: Any, sizes: Sizes) -> None:
    """Record the actual sizes of a node's value."""
    known = node.meta.get("val", node.meta.get("example_value"))
    if isinstance(known, torch.Tensor) and isinstance(value, torch.Tensor):
        pairs: list[tuple[Any, Any]] = list(zip(known.shape, value.shape, strict=False))
    else:
        pairs = [(known, value)]
    for symbol, size in pairs:
        if isinstance(symbol, torch.SymInt) and symbol.node.hint is None:
            sizes[symbol.node.expr] = size


def _sort_nodes(nodes: list[Node]) -> list[Node]:
    """The nodes in their order, each moved after its inputs, as torch sorts them."""
    order: list[Node] = []
    done: set[Node] = set()
    waiting: dict[Node, list[Node]] = {}
    pending = list(reversed(nodes))
    while pending:
        node = pending.pop()
        missing = [given for given in node.all_input_nodes if given not in done]
        if missing:
            waiting.setdefault(missing[-1], []).append(node)
            continue
        done.add(node)
        order.append(node)
        pending.extend(reversed(waiting.pop(node, ())))
    if waiting:
        stuck = next(iter(waiting.values()))[0]
        message = f"{stuck.name} needs a node that is not in the graph, or needs itself"
        raise UnplayableError(message)
    return order


def _list_nodes(module: GraphModule) -> Iterator[tuple[Any, ...]]:
    for node in module.graph.nodes:
        value = None
        if node.op in {"get_attr", "call_module"}:
            value = _find_attribute(module, str(node.target))
        if isinstance(value, GraphModule):
            yield from _list_nodes(value)
            value = None
        yield node, node.target, node.args, node.kwargs, value


def _freeze_attribute(module: GraphModule, target: str) -> Any:
    try:
        value = functools.reduce(getattr, target.split("."), module)
    except AttributeError:
        message = f"the graph names {target}, which its module does not have"
        raise UnplayableError(message) from None
    return freeze(value) if isinstance(value, GraphModule) else value


def _find_attribute(module: GraphModule, target: str) -> Any:
    try:
        return functools.reduce(getattr, target.split("."), module)
    except AttributeError:
        return None
