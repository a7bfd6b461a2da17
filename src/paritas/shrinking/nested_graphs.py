"""Nested graphs, inlined."""

from __future__ import annotations

import copy
import dataclasses
import operator
from typing import TYPE_CHECKING

from torch.fx import GraphModule, Node

if TYPE_CHECKING:
    from paritas.shrinking.programs import FailingProgram, FailureSignature, Oracle

# Operators that only run a nested graph, whatever they mean for autograd.
_RUNS_BODY = ("tag_activation_checkpoint", "wrap", "invoke_subgraph")


def inline_bodies(
    oracle: Oracle, program: FailingProgram, failure_signature: FailureSignature
) -> FailingProgram:
    """The program with nested graphs inlined, if it still fails in the same way."""
    opened = with_bodies_inlined(program)
    return opened if opened is program or oracle.shows(opened, failure_signature) else program


def with_bodies_inlined(program: FailingProgram) -> FailingProgram:
    """The same program with nested graphs inlined."""
    if not any(_body_of(program.graph, node) is not None for node in program.graph.graph.nodes):
        return program
    module = copy.deepcopy(program.graph)
    while True:
        nodes_with_bodies = ((node, _body_of(module, node)) for node in module.graph.nodes)
        call, body = next((pair for pair in nodes_with_bodies if pair[1] is not None), (None, None))
        if call is None or body is None:
            break
        _inline_body(module, call, body)
    module.graph.lint()
    module.recompile()
    return dataclasses.replace(program, graph=module)


def _body_of(module: GraphModule, node: Node) -> GraphModule | None:
    if node.op != "call_function" or not str(node.target).endswith(_RUNS_BODY) or not node.args:
        return None
    first = node.args[0]
    if not isinstance(first, Node) or first.op != "get_attr":
        return None
    body = getattr(module, str(first.target), None)
    return body if isinstance(body, GraphModule) else None


def _inline_body(module: GraphModule, call: Node, body: GraphModule) -> None:
    """Put the calls of `body` before `call`, and their results in its place."""
    holder = call.args[0]
    call_operands = [arg for arg in call.args[1:] if not isinstance(arg, str)]
    table = dict(zip(body.graph.find_nodes(op="placeholder"), call_operands, strict=False))
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
