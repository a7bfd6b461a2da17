"""Benign rewrites of more than one call: fusing, sharing, reordering, moving factors."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.detection.benign_kinds import NARROW, is_float, value_of
from torch.fx import Node

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph, GraphModule

    from paritas.mutants.programs import FlatProgram

aten = torch.ops.aten
TO_COPY = aten._to_copy.default  # noqa: SLF001
PRODUCTS = (aten.mm.default, aten.bmm.default)
VIEWS = (aten.view.default, aten._unsafe_view.default)  # noqa: SLF001
TURNS = (aten.t.default, aten.transpose.int, aten.permute.default)
MULTIPLIES = (aten.mul.Tensor, aten.mul.Scalar)
# Writes to its buffers, although its schema does not say so.
WRITES_QUIETLY = (aten.native_batch_norm.default,)
ELEMENTWISE = {
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.neg.default,
    aten.rsub.Scalar,
    aten.exp.default,
    aten.sigmoid.default,
    aten.tanh.default,
    aten.silu.default,
    aten.gelu.default,
    aten.relu.default,
    aten.rsqrt.default,
    aten.pow.Tensor_Scalar,
    aten.sin.default,
    aten.cos.default,
    aten.abs.default,
    aten.sigmoid_backward.default,
    aten.tanh_backward.default,
    aten.silu_backward.default,
    aten.gelu_backward.default,
    aten.threshold_backward.default,
}


@dataclasses.dataclass(frozen=True)
class GraphRewrite:
    """A rewrite of several calls at once.

    Attributes:
        text: what it does, for people.
        sites: (node, detail) of a program, where node is `*` for the whole of it.
        apply: changes a graph in place; gives False if there was nothing to change.
    """

    text: str
    sites: Callable[[FlatProgram], list[tuple[str, str]]]
    apply: Callable[[GraphModule, Node | None, str], bool]


def _at(wanted: Callable[[Node], bool]) -> Callable[[FlatProgram], list[tuple[str, str]]]:
    return lambda program: [(node.name, "") for node in program.calls if wanted(node)]


def _is_fusible(node: Any) -> bool:
    known = isinstance(node, Node) and node.target in ELEMENTWISE
    return known and value_of(node).dtype in NARROW


def _fused_into(node: Node) -> list[Node]:
    """What can be computed together with `node`, without a rounding between: `node` is last."""
    group = [node]
    for one in node.all_input_nodes:
        if _is_fusible(one) and set(one.users) == {node}:
            group = [*(inner for inner in _fused_into(one) if inner not in group), *group]
    return group


def _is_chain_end(node: Node) -> bool:
    if not _is_fusible(node) or len(_fused_into(node)) < 2:
        return False
    (first, *more) = node.users or (None,)
    return first is None or bool(more) or not _is_fusible(first)


def _widen(graph: Graph, group: list[Node]) -> None:
    """Let every node of `group` work in float32: what comes in from elsewhere is cast."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    casts: dict[Node, Node] = {}
    for node in sorted(group, key=order.__getitem__):
        # Just before it is read: a cast made earlier would miss what is written in between.
        with graph.inserting_before(node):
            for given in node.all_input_nodes:
                if given not in group and value_of(given).dtype in NARROW and given not in casts:
                    casts[given] = graph.call_function(TO_COPY, (given,), {"dtype": torch.float32})
        node.args = torch.fx.map_arg(node.args, lambda one: casts.get(one, one))


def _fuse(module: GraphModule, node: Node | None, _: str) -> bool:
    """One rounding at the end of a chain."""
    if node is None or not _is_chain_end(node):
        return False
    dtype = value_of(node).dtype
    _widen(module.graph, _fused_into(node))
    _cast_after(module.graph, node, dtype)
    return True


def _cast_after(graph: Graph, node: Node, dtype: torch.dtype) -> None:
    with graph.inserting_after(node):
        cast = graph.call_function(TO_COPY, (node,), {"dtype": dtype})
    cast.meta = dict(node.meta)
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)


def _fuse_all(module: GraphModule, _: Node | None, __: str) -> bool:
    """Every chain, as one pass of a compiler does."""
    ends = [node for node in module.graph.nodes if _is_chain_end(node)]
    groups = {end: _fused_into(end) for end in ends}
    for end, group in groups.items():
        dtype = value_of(end).dtype
        _widen(module.graph, group)
        _cast_after(module.graph, end, dtype)
    return bool(ends)


_chains = _at(_is_chain_end)


def _is_elidable(node: Node) -> bool:
    """A cast back to float32 of what was rounded for nobody else."""
    (given,) = node.all_input_nodes if node.target is TO_COPY else (None,)
    back = node.kwargs.get("dtype") is torch.float32
    return back and _is_fusible(given) and set(given.users) == {node}


def _elide(module: GraphModule, node: Node | None, _: str) -> bool:
    if node is None:
        return False
    (given,) = node.all_input_nodes
    _widen(module.graph, _fused_into(given))
    node.replace_all_uses_with(given)
    module.graph.erase_node(node)
    return True


def _is_pure(program_or_graph: Any) -> bool:
    graph = getattr(program_or_graph, "module", program_or_graph).graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    return not any(
        node.target in WRITES_QUIETLY
        or getattr(getattr(node.target, "_schema", None), "is_mutable", False)
        for node in calls
    )


def _whole(program: FlatProgram) -> list[tuple[str, str]]:
    return [("*", "")] if _is_pure(program) and len(program.calls) > 8 else []


def _reorder(module: GraphModule, _: Node | None, detail: str) -> bool:
    """Any order in which everything comes after what it needs."""
    graph, draw = module.graph, random.Random(detail)
    calls = [node for node in graph.nodes if node.op == "call_function"]
    waiting = {node: set(node.all_input_nodes) & set(calls) for node in calls}
    (end,) = graph.find_nodes(op="output")
    while waiting:
        node = draw.choice([node for node, needs in waiting.items() if not needs])
        end.prepend(node)
        del waiting[node]
        for needs in waiting.values():
            needs.discard(node)
    return True


def _share(module: GraphModule, _: Node | None, __: str) -> bool:
    """What is computed twice is computed once, and what nobody asks for not at all."""
    seen: dict[Any, Node] = {}
    for node in list(module.graph.nodes):
        if node.op != "call_function" or not _is_sharable(node):
            continue
        key = (node.target, str(node.args), str(node.kwargs))
        if key in seen:
            node.replace_all_uses_with(seen[key])
            module.graph.erase_node(node)
        else:
            seen[key] = node
    for node in reversed(list(module.graph.nodes)):
        if node.op == "call_function" and not node.users:
            module.graph.erase_node(node)
    return True


def _is_sharable(node: Node) -> bool:
    """Results that are given out stay tensors of their own."""
    return not any(user.op == "output" for user in node.users)


def _is_turn(node: Node) -> bool:
    return node.target in TURNS and any(user.target in PRODUCTS for user in node.users)


def _lay_out(module: GraphModule, node: Node | None, _: str) -> bool:
    """The products read a contiguous copy of what was only a view."""
    if node is None:
        return False
    with module.graph.inserting_after(node):
        told = {"memory_format": torch.contiguous_format}
        copy = module.graph.call_function(aten.clone.default, (node,), told)
    copy.meta = dict(node.meta)
    for user in [user for user in node.users if user.target in PRODUCTS]:
        user.replace_input_with(node, copy)
    return True


def _scaled_product(node: Node) -> Node | None:
    """The product that a multiplication by a number scales, through views of it."""
    if node.target not in MULTIPLIES or not isinstance(node.args[1], float):
        return None
    below = node.args[0]
    while isinstance(below, Node) and below.target in VIEWS and len(below.users) == 1:
        below = below.args[0]
    known = isinstance(below, Node) and below.target in PRODUCTS and len(below.users) == 1
    return below if known and is_float(below) else None


def _move_scale(module: GraphModule, node: Node | None, _: str) -> bool:
    product = None if node is None else _scaled_product(node)
    if node is None or product is None:
        return False
    left, right = product.args
    with module.graph.inserting_before(product):
        scaled = module.graph.call_function(aten.mul.Tensor, (left, node.args[1]))
    product.args = (scaled, right)
    node.replace_all_uses_with(node.args[0])
    module.graph.erase_node(node)
    return True


def _inner_product(node: Node) -> Node | None:
    """The product of tensors that is a factor of another."""
    if node.target is not aten.mul.Tensor or not is_float(node):
        return None
    inner, other = node.args[:2]
    mine = isinstance(inner, Node) and inner.target is aten.mul.Tensor and len(inner.users) == 1
    tensors = mine and isinstance(inner.args[1], Node) and isinstance(other, Node)
    return inner if tensors and _same_dtype(node, inner, other, *inner.args) else None


def _same_dtype(*nodes: Node) -> bool:
    return len({value_of(node).dtype for node in nodes}) == 1


def _reassociate(module: GraphModule, node: Node | None, _: str) -> bool:
    """(a b) c as a (b c)."""
    inner = None if node is None else _inner_product(node)
    if node is None or inner is None:
        return False
    first, second = inner.args
    with module.graph.inserting_before(node):
        later = module.graph.call_function(aten.mul.Tensor, (second, node.args[1]))
    node.args = (first, later)
    module.graph.erase_node(inner)
    return True


def _added_product(node: Node) -> Node | None:
    """The product of tensors that something is added to."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return None
    for product, other in (node.args, node.args[::-1]):
        mine = isinstance(product, Node) and product.target is aten.mul.Tensor
        plain = mine and len(product.users) == 1 and isinstance(other, Node)
        if plain and isinstance(product.args[1], Node) and is_float(product):
            return product if _same_dtype(node, product, other, *product.args) else None
    return None


def _fuse_addition(module: GraphModule, node: Node | None, _: str) -> bool:
    """A multiplication and an addition in one."""
    product = None if node is None else _added_product(node)
    if node is None or product is None:
        return False
    (other,) = [one for one in node.args if one is not product] or [product]
    node.target, node.args = aten.addcmul.default, (other, *product.args)
    module.graph.erase_node(product)
    return True


GRAPH_REWRITES: dict[str, GraphRewrite] = {
    "fused_chain": GraphRewrite(
        "a chain of elementwise calls in float32, with one rounding at its end", _chains, _fuse
    ),
    "fused_chains": GraphRewrite(
        "all chains of elementwise calls in float32",
        lambda program: [("*", "")] if _chains(program) else [],
        _fuse_all,
    ),
    "elided_rounding": GraphRewrite(
        "no rounding of what is cast back to float32 at once", _at(_is_elidable), _elide
    ),
    "reordered": GraphRewrite(
        "independent calls in another order",
        lambda program: [("*", str(i)) for i in range(2) if _whole(program)],
        _reorder,
    ),
    "shared": GraphRewrite("common calls once, dead ones never", _whole, _share),
    "contiguous_operand": GraphRewrite(
        "a product reads a contiguous copy of a transposed operand", _at(_is_turn), _lay_out
    ),
    "moved_scale": GraphRewrite(
        "a product's factor moved to its operand",
        _at(lambda node: _scaled_product(node) is not None),
        _move_scale,
    ),
    "reassociated_product": GraphRewrite(
        "(a b) c as a (b c)", _at(lambda node: _inner_product(node) is not None), _reassociate
    ),
    "fused_multiply_add": GraphRewrite(
        "a product and a sum in one call",
        _at(lambda node: _added_product(node) is not None),
        _fuse_addition,
    ),
}
