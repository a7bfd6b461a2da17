"""Calls of modules, written out as the functions that the modules call.

A graph of `torch.fx.symbolic_trace` calls torch's own modules whole. A rule for splitting speaks of
`torch.nn.functional.linear`, not of a `Linear` somewhere in a model.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node, Tracer

from paritas._torch.exported_programs import is_bracket
from paritas._torch.graphs import copy_graph
from paritas.errors import UsageError

__all__ = ["written_out"]

_MOST_ROUNDS = 32
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class _IntoEverything(Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False


def written_out(module: GraphModule) -> GraphModule:
    """The same graph with modules taken apart, as far as they can be traced.

    What is changed is a copy, which shares the tensors. Taken apart are also operators that only
    put brackets around calls, as `torch.no_grad()` does.
    """
    if not any(_inside(node) for node in module.graph.nodes):
        return module
    result = copy_graph(module)
    left: set[Node] = set()
    for _ in range(_MOST_ROUNDS):  # a module inside a module comes to light one round later
        nodes = [node for node in result.graph.nodes if node not in left and _inside(node)]
        if not nodes:
            break
        left.update(node for node in nodes if not _write_out(result, node))
    return result


def _inside(node: Node) -> str:
    """The path of the module that a node runs."""
    if node.op == "call_module":
        return str(node.target)
    inner = node.args[1] if is_bracket(node.target, node.args) else None
    return str(inner.target) if isinstance(inner, Node) and inner.op == "get_attr" else ""


def _write_out(module: GraphModule, node: Node) -> bool:
    """Replace one call; False if its module cannot be traced."""
    path = _inside(node)
    try:
        target = module.get_submodule(path)
        graph = _traced(target)
        given = _bound(target, node)
    except Exception:  # noqa: BLE001  (a module that decides by values; the call says so)
        return False
    if not _replaceable(node, graph):
        return False
    stack = dict(node.meta.get("nn_module_stack") or {})
    if node.op == "call_module":
        stack[node.name] = (path, type(target))
    told = {"nn_module_stack": stack, "stack_trace": node.meta.get("stack_trace")}
    made: dict[Node, Any] = {}
    with module.graph.inserting_before(node):
        for inner in graph.nodes:
            if inner.op == "placeholder":
                made[inner] = given.get(str(inner.target), inner.args[0] if inner.args else None)
            elif inner.op != "output":
                made[inner] = copied = module.graph.node_copy(inner, made.__getitem__)
                if inner.op in {"get_attr", "call_module"}:
                    copied.target = f"{path}.{inner.target}"
                copied.meta = {**told, **inner.meta}
    _replace(node, torch.fx.node.map_arg(_result(graph), made.__getitem__))
    module.graph.erase_node(node)
    return True


def _result(graph: torch.fx.Graph) -> Any:
    return graph.find_nodes(op="output")[0].args[0]


def _replaceable(node: Node, graph: torch.fx.Graph) -> bool:
    """Whether the users of a node can be given what a graph returns."""
    if isinstance(_result(graph), Node):
        return True
    return isinstance(_result(graph), list | tuple) and all(
        user.target is operator.getitem and isinstance(user.args[1], int) for user in node.users
    )


def _replace(node: Node, result: Any) -> None:
    if isinstance(result, Node):
        if "val" in node.meta:
            result.meta.setdefault("val", node.meta["val"])
        node.replace_all_uses_with(result)
        return
    for user in list(node.users):
        part = result[user.args[1]]
        if not isinstance(part, Node):
            raise UsageError(f"{node.name} gives {part!r:.40}, which is computed by nothing")
        user.replace_all_uses_with(part)
        user.graph.erase_node(user)


def _traced(module: nn.Module) -> torch.fx.Graph:
    if isinstance(module, GraphModule):
        return module.graph
    return _by_hand(module) or _IntoEverything().trace(module)


def _bound(module: nn.Module, node: Node) -> Mapping[str, Any]:
    """The arguments of a call by the names of the module's parameters."""
    if node.op == "call_module":
        return inspect.signature(module.forward).bind(*node.args, **node.kwargs).arguments
    names = [str(one.target) for one in module.graph.find_nodes(op="placeholder")]  # type: ignore[union-attr,operator]
    return dict(zip(names, node.args[2:], strict=True))


def _by_hand(module: Any) -> torch.fx.Graph | None:
    """The graph of a module whose own code looks at its input to check it; None of any other."""
    graph = torch.fx.Graph()
    x = graph.placeholder("input")

    def held(*names: str) -> list[Any]:
        return [graph.get_attr(n) if getattr(module, n) is not None else None for n in names]

    if isinstance(module, _TRANSPOSED):
        function = getattr(nn.functional, f"conv_transpose{len(module.kernel_size)}d")
        sizes = (module.stride, module.padding, module.output_padding)
        made = (x, *held("weight", "bias"), *sizes, module.groups, module.dilation)
    elif isinstance(module, _BATCH_NORMS + _INSTANCE_NORMS) and module.momentum is not None:
        of_batch = isinstance(module, _BATCH_NORMS)
        function = nn.functional.batch_norm if of_batch else nn.functional.instance_norm
        tensors = held("running_mean", "running_var", "weight", "bias")
        training = module.training or module.running_mean is None
        made = (x, *tensors, training, module.momentum, module.eps)
    else:
        return None
    graph.output(graph.call_function(function, made))
    return graph
