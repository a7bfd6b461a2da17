"""A traced graph rewritten to compute in float64: the arbiter without a mode around every call.

A dispatch mode sees every operator, and costs more than small operators do. A graph from below
autograd says all its dtypes, so that they can be rewritten once. Whatever that does not cover is
refused here, and run under the mode instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Node

from paritas._torch.default_dtypes import takes_dtype
from paritas._torch.graphs import copy_graph, node_draws, output_node, placeholders, returned
from paritas._torch.kernels import float64_kernel
from paritas._torch.lifting import WIDE
from paritas._torch.operators import traits

if TYPE_CHECKING:
    from torch.fx import GraphModule

# These look at how a tensor lies in memory, which widening an input may change.
_BY_LAYOUT = frozenset({"as_strided", "as_strided_copy", "as_strided_scatter", "set", "resize"})


def widened(module: GraphModule, written: frozenset[int]) -> GraphModule | None:
    """The graph in float64, on arguments as they are; None if it cannot be rewritten.

    It returns its outputs and then, in order, the new values of the `written` inputs. Each input is
    widened where it is first used, so that no more of them than needed are held at once.
    """
    result = copy_graph(module)
    if not all(_is_plain(node) for node in result.graph.nodes):
        return None
    inputs = placeholders(result)
    originals = {node: index for index, node in enumerate(inputs)}
    for node in list(result.graph.nodes):
        if node.op == "call_function":
            _widen_dtypes(node)
            if _asks_default(node):
                _state_dtype(result, node)
    after = {originals[node]: _widen_value(result, node) for node in inputs}
    for node in list(result.graph.nodes):
        if node.op == "get_attr" or (node.op == "call_function" and _draws(node)):
            _widen_value(result, node)
    out = output_node(result)
    ends = [after[position] for position in sorted(written)]
    out.args = ((*returned(result), *ends),)
    result.graph.lint()
    result.recompile()
    return result


def _is_plain(node: Node) -> bool:
    if node.op not in {"placeholder", "output", "get_attr", "call_function"}:
        return False
    target = node.target
    if isinstance(target, HigherOrderOperator):
        return False
    if not isinstance(target, OpOverload):
        return True
    kind = traits(target)
    if kind.name in _BY_LAYOUT or (kind.name == "view" and target._overloadname == "dtype"):
        return False
    return not node_draws(node) and kind.namespace in {"aten", "prims"}


def _widen_dtypes(node: Node) -> None:
    node.args = _wide(node.args)
    node.kwargs = _wide(node.kwargs)
    if not isinstance(node.target, OpOverload):
        return
    kind = traits(node.target)
    if kind.name in {"_softmax", "_log_softmax"} and len(node.args) > 2:  # noqa: PLR2004
        node.args = (*node.args[:2], False)
    if kind.rounds:
        values = [_example(value) for value in node.args]
        kernel = float64_kernel(node.target, tuple(values))
        if kernel is not node.target:
            node.target = kernel


def _asks_default(node: Node) -> bool:
    """Whether torch's default dtype decides what it gives: floats, made of none.

    That one is of the whole process, and other threads make tensors, too.
    """
    if not isinstance(node.target, OpOverload) or node.kwargs.get("dtype") is not None:
        return False
    given = [value.meta.get("val") for value in node.all_input_nodes]
    return _is_inexact(node.meta.get("val")) and not any(_is_inexact(value) for value in given)


def _state_dtype(module: GraphModule, node: Node) -> None:
    if isinstance(node.target, OpOverload) and takes_dtype(node.target):
        traced = node.meta["val"]
        node.kwargs = {**node.kwargs, "dtype": WIDE.get(traced.dtype, traced.dtype)}
        return
    for given in node.all_input_nodes:
        if isinstance(given.meta.get("val"), torch.Tensor):
            with module.graph.inserting_before(node):
                wide = module.graph.call_method("to", (given, torch.float64))
            node.replace_input_with(given, wide)


def _is_inexact(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_is_inexact(item) for item in value)
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _example(value: Any) -> Any:
    """What a float64 kernel would be given: only shape, dtype and device are looked at."""
    if not isinstance(value, Node):
        return value
    traced = value.meta.get("val")
    if not isinstance(traced, torch.Tensor) or not traced.is_floating_point():
        return traced
    sizes = [size if isinstance(size, int) else 2 for size in traced.shape]
    return torch.zeros((), dtype=torch.float64, device=traced.device).expand(sizes)


def _widen_value(module: GraphModule, node: Node) -> Node:
    """Let everything that uses a value use it in float64."""
    traced = node.meta.get("val")
    dtype = traced.dtype if isinstance(traced, torch.Tensor) else None
    if dtype not in WIDE:
        return node
    users = [user for user in node.users if user.op != "output"]
    first = next((user for user in module.graph.nodes if user in users), None)
    place = output_node(module) if first is None else first
    with module.graph.inserting_before(place):
        wide = module.graph.call_method("to", (node, WIDE[dtype]))
    node.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not wide)
    return wide


def _draws(node: Node) -> bool:
    """Whether a value comes from a random twin, which is a plain function."""
    return not isinstance(node.target, OpOverload) and "draw" in getattr(
        node.target, "__name__", ""
    )


def _wide(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return WIDE.get(value, value)
    if isinstance(value, dict):
        return {key: _wide(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_wide(item) for item in value)
    if isinstance(value, list):
        return [_wide(item) for item in value]
    return value
