"""Planting one fault into a program: every place where one fits, and the program with it."""

from __future__ import annotations

import copy
import dataclasses
import operator
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.fx import GraphModule, Node

from paritas._torch.graphs import node_traits, placeholders, returned
from paritas.errors import UsageError
from paritas.mutants.kinds import MUTATIONS
from paritas.mutants.mutations import (
    activations,
    arithmetic,
    contractions,
    indexing,
    precision,
    ranks,
    reductions,
    special,
    state,
)
from paritas.mutants.mutations.calls import FaultyCall, Place

if TYPE_CHECKING:
    from paritas.mutants.mutations.calls import Fault
    from paritas.mutants.programs import Program

_FAULTS: dict[str, Fault] = {
    name: fault
    for module in (
        activations,
        arithmetic,
        contractions,
        indexing,
        precision,
        ranks,
        reductions,
        special,
        state,
    )
    for name, fault in module.FAULTS.items()
}

# What changes its argument's shape in place: a fault cannot write its result there.
_RESHAPES = frozenset({"squeeze", "unsqueeze", "t", "transpose", "as_strided", "resize", "set"})


@dataclasses.dataclass(frozen=True)
class Site:
    """One place where one fault can be planted.

    Attributes:
        node: name of the call that goes wrong, and so where a wrong program starts to be wrong.
        mutation: a key of `MUTATIONS`.
        detail: which of several ways, where there are several.
    """

    node: str
    mutation: str
    detail: str = ""


def sites(program: Program) -> list[Site]:
    """Every fault that fits the program, in the order of its calls, then of the fault's numbers."""
    known = [(name, _FAULTS[name]) for name in MUTATIONS if name in _FAULTS]
    return [
        Site(place.node.name, name, detail)
        for place in _places(program)
        for name, fault in known
        for detail in fault.where(place)
    ]


def plant(program: Program, site: Site) -> GraphModule | None:
    """A copy of the program's module with the fault in it; None if it does not fit there.

    Raises:
        UsageError: there is no such fault.
    """
    fault = _FAULTS.get(site.mutation)
    if fault is None:
        message = f"there is no fault called {site.mutation!r}; known are {', '.join(MUTATIONS)}"
        raise UsageError(message)
    place = next((each for each in _places(program) if each.node.name == site.node), None)
    if place is None or site.detail not in fault.where(place):
        return None
    # The graph is changed before a module is made of it: writing its code is what takes time.
    graph = copy.deepcopy(program.module.graph)
    node = next(each for each in graph.nodes if each.name == site.node)
    node.target = FaultyCall(node.target, site.mutation, fault, site.detail, place)
    return GraphModule(program.module, graph)


def _places(program: Program) -> list[Place]:
    """The operator calls of a program, with what they are to its results and inputs."""
    ends = _ends(program)
    inputs = set(placeholders(program.module))
    results = dict(zip(returned(program.module), program.results, strict=True))
    found = []
    for node in program.calls:
        kind = node_traits(node)
        if kind is None or "out" in node.kwargs or (kind.mutates and kind.name in _RESHAPES):
            continue
        writes = {
            position: _named_result(value, results)
            for position, value in enumerate(node.args)
            if position in kind.mutates and isinstance(value, Node)
        }
        found.append(
            Place(
                node=node,
                kind=kind,
                backward=node.name in program.backward,
                ends=ends.get(node, {}),
                writes=writes,
                donor=_donor(node, inputs) if node in ends else None,
            )
        )
    return found


def _ends(program: Program) -> dict[Node, dict[int | None, str]]:
    """Calls whose value is a result of the program, seen through views and tuples."""
    found: dict[Node, dict[int | None, str]] = {}
    for node, name in zip(returned(program.module), program.results, strict=True):
        current: Any = node
        part: Any = None
        while isinstance(current, Node) and current.op == "call_function":
            found.setdefault(current, {}).setdefault(part, name)
            kind = node_traits(current)
            if current.target is operator.getitem:
                part = current.args[1]
            elif kind is None or not kind.view or part is not None:
                break
            current = current.args[0]
    return found


def _named_result(value: Node, results: dict[Node, str]) -> str:
    """The result that a written argument is, or is a view of."""
    waiting, seen = [value], set()
    while waiting:
        current = waiting.pop()
        if current in results:
            return results[current]
        seen.add(current)
        kind = node_traits(current)
        same = [current.args[0]] if kind is not None and (kind.view or 0 in kind.mutates) else []
        # What was written in place goes by the name of who wrote it last.
        same += [user for user in current.users if _gives_back(user, current)]
        waiting += [node for node in same if isinstance(node, Node) and node not in seen]
    return ""


def _gives_back(user: Node, written: Node) -> bool:
    kind = node_traits(user)
    return kind is not None and 0 in kind.mutates and user.args[0] is written


def _donor(node: Node, inputs: set[Node]) -> int | None:
    """An argument that is an input of the program, of the shape and dtype of the result."""
    result = node.meta.get("val")
    if not isinstance(result, Tensor):
        return None
    for position, given in enumerate(node.args):
        source = given
        while isinstance(source, Node) and source.op == "call_function":
            kind = node_traits(source)
            if kind is None or kind.name != "detach":
                break
            source = source.args[0]
        if source in inputs and isinstance(given, Node):
            traced = given.meta.get("val")
            if isinstance(traced, Tensor) and traced.shape == result.shape:
                return position if traced.dtype == result.dtype else None
    return None


def exact_form(mutant: GraphModule) -> GraphModule:
    """The mutant with what its fault amounts to in exact arithmetic: for a run in float64.

    Most are their own; but a cast to a narrower dtype, say, is undone in a float64 run.
    """
    faulty = [
        node.name
        for node in mutant.graph.nodes
        if isinstance(node.target, FaultyCall) and node.target.fault.exact is not None
    ]
    if not faulty:
        return mutant
    graph = copy.deepcopy(mutant.graph)
    for node in graph.nodes:
        if node.name in faulty:
            node.target = node.target.in_exact_arithmetic()
    return GraphModule(mutant, graph)
