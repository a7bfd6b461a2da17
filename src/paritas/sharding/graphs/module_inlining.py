"""Module calls of an FX graph, replaced by the functions that the modules call."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node, Tracer

from paritas.core.errors import UsageError
from paritas.core.torch_private.graphs import copy_graph, is_bracket

# A graph of `torch.fx.symbolic_trace` calls torch's own modules as leaves. Split rules are about
# `torch.nn.functional.linear`, not about a `Linear` in a model.

_MOST_ROUNDS = 32
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class _IntoEverything(Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False


def with_modules_inlined(module: GraphModule) -> GraphModule:
    """The same graph with module calls replaced by the functions inside, where they can be traced.

    The result is a copy that shares the tensors. Operators that only switch a mode for the calls
    inside, such as `torch.no_grad()`, are inlined too.
    """
    if not any(_inner_path(node) for node in module.graph.nodes):
        return module
    result = copy_graph(module)
    uninlined: set[Node] = set()
    for _ in range(_MOST_ROUNDS):  # each round exposes the modules one level deeper
        nodes = [node for node in result.graph.nodes if node not in uninlined and _inner_path(node)]
        if not nodes:
            break
        uninlined.update(node for node in nodes if not _inline_call(result, node))
    return result


def _inner_path(node: Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    inner = node.args[1] if is_bracket(node.target, node.args) else None
    return str(inner.target) if isinstance(inner, Node) and inner.op == "get_attr" else ""


def _inline_call(module: GraphModule, node: Node) -> bool:
    """Replace one call; False if its module cannot be traced."""
    path = _inner_path(node)
    try:
        target = module.get_submodule(path)
        if isinstance(target, GraphModule):
            graph = target.graph
        else:
            graph = _graph_by_hand(target) or _IntoEverything().trace(target)
        bind_module_call = _bind_module_call(target, node)
    except Exception:  # noqa: BLE001  (its control flow depends on values; the call says so)
        return False
    returned = graph.find_nodes(op="output")[0].args[0]
    is_unpacked = isinstance(returned, list | tuple) and all(
        user.target is operator.getitem and isinstance(user.args[1], int) for user in node.users
    )
    if not isinstance(returned, Node) and not is_unpacked:
        return False
    stack = dict(node.meta.get("nn_module_stack") or {})
    if node.op == "call_module":
        stack[node.name] = (path, type(target))
    origin = {"nn_module_stack": stack, "stack_trace": node.meta.get("stack_trace")}
    copies: dict[Node, Any] = {}
    with module.graph.inserting_before(node):
        for inner in graph.nodes:
            if inner.op == "placeholder":
                copies[inner] = bind_module_call.get(
                    str(inner.target), inner.args[0] if inner.args else None
                )
            elif inner.op != "output":
                copies[inner] = copied = module.graph.node_copy(inner, copies.__getitem__)
                if inner.op in {"get_attr", "call_module"}:
                    copied.target = f"{path}.{inner.target}"
                copied.meta = {**origin, **inner.meta}
    _replace(node, torch.fx.node.map_arg(returned, copies.__getitem__))
    module.graph.erase_node(node)
    return True


def _replace(node: Node, result: Any) -> None:
    if isinstance(result, Node):
        if "val" in node.meta:
            result.meta.setdefault("val", node.meta["val"])
        node.replace_all_uses_with(result)
        return
    for user in list(node.users):
        part = result[user.args[1]]
        if not isinstance(part, Node):
            raise UsageError(f"{node.name} returns {part!r:.40}, which no node computes")
        user.replace_all_uses_with(part)
        user.graph.erase_node(user)


def _bind_module_call(module: nn.Module, node: Node) -> Mapping[str, Any]:
    """The arguments of a call by the names of the module's parameters."""
    if node.op == "call_module":
        return inspect.signature(module.forward).bind(*node.args, **node.kwargs).arguments
    names = [str(placeholder.target) for placeholder in module.graph.find_nodes(op="placeholder")]  # type: ignore[union-attr,operator]
    return dict(zip(names, node.args[2:], strict=True))


def _graph_by_hand(module: Any) -> torch.fx.Graph | None:
    """The graph of a module that reads its input to check it; None for other modules."""
    graph = torch.fx.Graph()
    x = graph.placeholder("input")

    def get_attributes(*names: str) -> list[Any]:
        return [graph.get_attr(n) if getattr(module, n) is not None else None for n in names]

    if isinstance(module, _TRANSPOSED):
        function = getattr(nn.functional, f"conv_transpose{len(module.kernel_size)}d")
        sizes = (module.stride, module.padding, module.output_padding)
        call_args = (x, *get_attributes("weight", "bias"), *sizes, module.groups, module.dilation)
    elif isinstance(module, _BATCH_NORMS + _INSTANCE_NORMS) and module.momentum is not None:
        of_batch = isinstance(module, _BATCH_NORMS)
        function = nn.functional.batch_norm if of_batch else nn.functional.instance_norm
        tensors = get_attributes("running_mean", "running_var", "weight", "bias")
        training = module.training or module.running_mean is None
        call_args = (x, *tensors, training, module.momentum, module.eps)
    else:
        return None
    graph.output(graph.call_function(function, call_args))
    return graph
