"""Graphs inside a graph, as checkpointing makes them: laid open, they can be cut like any other."""

from __future__ import annotations

import copy
import dataclasses
import operator
from typing import TYPE_CHECKING

from torch.fx import GraphModule, Node

if TYPE_CHECKING:
    from paritas.minimizing.oracle import Oracle
    from paritas.minimizing.programs import Program, Signature

__all__ = ["lay_open"]

# Calls that only run the graph they are given, whatever else they ask of autograd.
_RUN = ("tag_activation_checkpoint", "wrap", "invoke_subgraph")


def lay_open(oracle: Oracle, program: Program, wanted: Signature) -> Program:
    """The program with the bodies of such calls in their place, if it fails the same way then."""
    if not any(_body(program.graph, node) is not None for node in program.graph.graph.nodes):
        return program
    opened = laid_open(program)
    return opened if oracle.shows(opened, wanted) else program


def laid_open(program: Program) -> Program:
    """The same program without such calls."""
    module = copy.deepcopy(program.graph)
    while True:
        found = ((node, _body(module, node)) for node in module.graph.nodes)
        call, body = next((pair for pair in found if pair[1] is not None), (None, None))
        if call is None or body is None:
            break
        _open(module, call, body)
    module.graph.lint()
    module.recompile()
    return dataclasses.replace(program, graph=module)


def _body(module: GraphModule, node: Node) -> GraphModule | None:
    if node.op != "call_function" or not str(node.target).endswith(_RUN) or not node.args:
        return None
    first = node.args[0]
    if not isinstance(first, Node) or first.op != "get_attr":
        return None
    body = getattr(module, str(first.target), None)
    return body if isinstance(body, GraphModule) else None


def _open(module: GraphModule, call: Node, body: GraphModule) -> None:
    """Put the calls of `body` before `call`, and their results in its place."""
    holder = call.args[0]
    given = [arg for arg in call.args[1:] if not isinstance(arg, str)]
    table = dict(zip(body.graph.find_nodes(op="placeholder"), given, strict=False))
    with module.graph.inserting_before(call):
        results = module.graph.graph_copy(body.graph, table)
    values = results if isinstance(results, tuple | list) else (results,)
    for user in list(call.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(values[user.args[1]])  # type: ignore[index]
            module.graph.erase_node(user)
    module.graph.erase_node(call)
    if isinstance(holder, Node) and not holder.users:
        module.graph.erase_node(holder)
