"""Fewer outputs: only what is wrong is given back."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import TYPE_CHECKING

from paritas.minimizing.programs import OUTPUT, Program, Signature

if TYPE_CHECKING:
    from paritas.minimizing.oracle import Oracle

__all__ = ["drop_outputs"]


def drop_outputs(oracle: Oracle, program: Program, wanted: Signature) -> Program:
    """Keep the first wrong output alone, if the failure is in an output and stays."""
    answer = oracle.ask(program)
    if wanted.role != OUTPUT or answer.verdict is None or _count(program) <= 1:
        return program
    for finding in answer.verdict.failures:
        found = re.match(r"output\[(\d+)\]", finding.path)
        if found is not None:
            smaller = with_output(program, int(found[1]))
            return smaller if oracle.shows(smaller, wanted) else program
    return program


def with_output(program: Program, position: int) -> Program:
    """The program that gives back one of its outputs, without what only the others needed."""
    module = copy.deepcopy(program.graph)
    last = next(iter(module.graph.find_nodes(op="output")))
    last.args = ((last.args[0][position],),)
    module.graph.eliminate_dead_code(is_impure_node=lambda node: node.op == "placeholder")
    given = program.given
    kept = []
    for node in list(module.graph.find_nodes(op="placeholder")):
        if node.users:
            kept.append(given[node.name])
        else:
            module.graph.erase_node(node)
    module.recompile()
    names = {node.name for node in module.graph.find_nodes(op="placeholder")}
    dynamic = {name: dims for name, dims in program.dynamic.items() if name in names}
    return dataclasses.replace(program, graph=module, inputs=tuple(kept), dynamic=dynamic)


def _count(program: Program) -> int:
    last = next(iter(program.graph.graph.find_nodes(op="output")))
    returned = last.args[0]
    return len(returned) if isinstance(returned, tuple | list) else 1
