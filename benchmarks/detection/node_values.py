"""Every value of a graph as it runs: natively, as another backend would, or in float64."""

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from paritas.core.numerics.contents import map_leaves
from paritas.core.numerics.metrics import bitwise_equal
from paritas.core.operators.rounding import rounds
from paritas.core.torch_private.graphs import node_traits
from paritas.core.torch_private.operators import WIDE

if TYPE_CHECKING:
    from paritas.core.precision.lifting import LiftMode


@dataclasses.dataclass(frozen=True)
class Call:
    """What a candidate had at one node; all of it copied when it was so.

    Attributes:
        value: the result.
        before: inputs by the names of their nodes.
        after: those inputs that the call changed, as it left them.
        memory: where the result lies.
    """

    value: Any
    before: dict[str, Any]
    after: dict[str, Any]
    memory: frozenset[int]


class Recorder(Interpreter):
    """Runs a graph and remembers every value."""

    def __init__(self, module: GraphModule) -> None:
        # What is kept is not freed, so that no two values ever lie in the same place.
        super().__init__(module, garbage_collect_values=False)
        self.calls: dict[str, Call] = {}

    def run_node(self, n: Node) -> Any:
        """Run one node, with what was before and after it kept."""
        before = {node.name: copied(self.env[node]) for node in n.all_input_nodes}
        value = self.value_of(n, before)
        after = {
            node.name: copied(self.env[node])
            for node in n.all_input_nodes
            if not same(before[node.name], self.env[node])
        }
        self.calls[n.name] = Call(copied(value), before, after, memory_of(value))
        return value

    def value_of(self, node: Node, before: dict[str, Any]) -> Any:
        """What the node gives."""
        return super().run_node(node)


class Elsewhere(Recorder):
    """Runs a graph as another backend would: what rounds, in float64, and then rounded once."""

    def value_of(self, node: Node, before: dict[str, Any]) -> Any:
        """What the node gives there."""
        value = super().value_of(node, before)
        rounds = node.op == "call_function" and _rounds(node)
        return _rounded_once(node, before, value) if rounds else value


class Lifted(Recorder):
    """Runs a graph in float64."""

    def __init__(self, module: GraphModule, lifting: LiftMode) -> None:
        super().__init__(module)
        self.lifting = lifting

    def value_of(self, node: Node, before: dict[str, Any]) -> Any:
        """What the node gives in float64, parameters and constants being given so."""
        if node.op in {"placeholder", "get_attr"}:
            return widened(super().value_of(node, before))
        with self.lifting:
            return super().value_of(node, before)


def widened(value: Any) -> Any:
    """A value in float64, if it is a narrow one."""
    return map_leaves(
        value, lambda leaf: leaf.to(WIDE.get(leaf.dtype, leaf.dtype)) if is_tensor(leaf) else leaf
    )


def _rounds(node: Node) -> bool:
    kind = node_traits(node)
    return kind is not None and rounds(kind) and not kind.mutates and not kind.random


def _rounded_once(node: Node, before: dict[str, Any], native: Any) -> Any:
    """The result computed in float64; the native one where that cannot be."""

    def given(value: Node) -> Any:
        return widened(before[value.name])

    try:
        args = torch.fx.node.map_arg(node.args, given)
        kwargs = torch.fx.node.map_arg(node.kwargs, given)
        results = node.target(*args, **kwargs)
    except Exception:  # noqa: BLE001  (an operator that has no kernel for float64)
        return native
    if is_tensor(native):
        return _like(results, native)
    return type(native)(_like(new, old) for new, old in zip(results, native, strict=True))


def _like(value: Any, native: Any) -> Any:
    if not is_tensor(value) or not is_tensor(native) or value.shape != native.shape:
        return native
    if not native.is_floating_point() and not native.is_complex():
        return native
    return value.to(native.dtype)


def is_tensor(value: Any) -> bool:
    """Whether it is one."""
    return isinstance(value, Tensor)


def copied(value: Any) -> Any:
    """A copy of a tensor, or of all in a tuple."""
    return map_leaves(value, lambda leaf: leaf.detach().clone() if is_tensor(leaf) else leaf)


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal, bit for bit."""
    if is_tensor(left) and is_tensor(right):
        same_kind = left.shape == right.shape and left.dtype == right.dtype
        return same_kind and bitwise_equal(left.detach(), right.detach())
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


def memory_of(value: Any) -> frozenset[int]:
    values = value if isinstance(value, list | tuple) else [value]
    tensors = [one for one in values if is_tensor(one) and one.numel()]
    return frozenset(one.untyped_storage().data_ptr() for one in tensors)


def parent_of(node: Node) -> Node:
    """The call of which a node is one of several results; or the node."""
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return node.args[0]
    return node


def table_of(node: Node, call: Call) -> dict[Node, Any]:
    """What a node reads, as it was then; copies, since it may be written to again."""
    return {given: copied(call.before[given.name]) for given in node.all_input_nodes}


def called(node: Node, table: dict[Node, Any]) -> Any:
    """What a node gives for the values of a table."""
    args = torch.fx.node.map_arg(node.args, table.__getitem__)
    kwargs = torch.fx.node.map_arg(node.kwargs, table.__getitem__)
    return node.target(*args, **kwargs)


def same_call(left: Call, right: Call) -> bool:
    """Whether two calls were given the same and gave the same."""
    parts = ("value", "before", "after")
    return all(same(getattr(left, part), getattr(right, part)) for part in parts)
