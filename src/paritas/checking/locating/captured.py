"""Where a backend that cannot be looked into goes wrong: what it makes of parts of the graph.

It is given one node at a time, on the values that the reference had there, forward and backward.
If it does each of them right, it is given ever longer beginnings of the graph: the last node of the
shortest wrong one is where it starts.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

from paritas._torch.quiet import quietly
from paritas._torch.stances import taking_stance
from paritas.checking.origins import node_origin
from paritas.numerics.findings import Aspect, Finding, Origin, OriginKind, Status
from paritas.recording.isolation import RandomState

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.checking.guarding.captured_runs import CapturedRuns
    from paritas.numerics.findings import Verdict

# What is spent on it; a backend may take long for every part.
SECONDS = 30.0
# Some backends are right the first time and wrong from then on.
CALLS = 2


@dataclasses.dataclass(frozen=True)
class CapturedSuspect:
    """A call of a captured graph that differed.

    Attributes:
        runs: the reference's runs on the arguments of the call.
        label: what findings about the graph begin with.
        failures: the findings that do not pass.
        gradients: whether it is the gradients that differ.
        check: compiles a graph by the same backend, calls it so often on given arguments, with a
            backward pass or without, and gives the verdict.
    """

    runs: CapturedRuns
    label: str
    failures: tuple[Finding, ...]
    gradients: bool
    check: Callable[[GraphModule, list[Any], bool, int], Verdict]


def locate_captured(suspect: CapturedSuspect) -> list[Finding]:
    """What the difference starts with; always one finding with an origin."""
    now = RandomState.now()
    try:
        with quietly():
            return [_located(suspect)]
    finally:
        now.restore()


def _located(suspect: CapturedSuspect) -> Finding:
    deadline = time.monotonic() + SECONDS
    module = suspect.runs.reference.module
    values = _values(suspect)
    nodes = [node for node in module.graph.nodes if node.op.startswith("call_")]
    for node in nodes:
        if time.monotonic() > deadline:
            break
        worst = _worst(suspect, _part([node]), values)
        if worst is not None:
            return _finding(suspect, node, "is wrong by itself", worst)
    start, end = 0, len(nodes)
    if _worst(suspect, _part(nodes), values) is None:
        return _finding(suspect, None, "compiled once more, the graph does not show it", None)
    while end - start > 1 and time.monotonic() < deadline:
        middle = (start + end) // 2
        if _worst(suspect, _part(nodes[:middle]), values) is None:
            start = middle
        else:
            end = middle
    worst = _worst(suspect, _part(nodes[:end]), values)
    told = f"is right by itself, but not compiled together with the {end - 1} nodes before it"
    return _finding(suspect, nodes[end - 1], told, worst)


class _Recorder(Interpreter):
    """Remembers the value of every node as it was before anything wrote to it."""

    def __init__(self, module: GraphModule, values: dict[str, Any]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values = values

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            self.values[n.name] = result.detach().clone().requires_grad_(result.requires_grad)
        else:
            self.values[n.name] = result
        return result


def _values(suspect: CapturedSuspect) -> dict[str, Any]:
    values: dict[str, Any] = {}
    suspect.runs.rng.restore()
    with suspect.runs.surroundings.again(), taking_stance("force_eager"):
        _Recorder(suspect.runs.reference.module, values).run(*suspect.runs.arguments())
    return values


def _part(nodes: list[Node]) -> tuple[GraphModule, list[str]]:
    """A graph of some nodes of another one, and which values are its arguments."""
    graph = Graph()
    known: dict[Node, Node] = {}
    names: list[str] = []
    inside = set(nodes)
    for node in nodes:  # the placeholders come first, whenever they are first needed
        for given in node.all_input_nodes:
            if given not in known and given not in inside:
                known[given] = graph.placeholder(given.name)
                known[given].meta = dict(given.meta)
                names.append(given.name)
    for node in nodes:
        known[node] = graph.node_copy(node, known.__getitem__)
        known[node].meta = dict(node.meta)
    ends = [
        known[node]
        for node in nodes
        if not node.users or any(user not in inside for user in node.users)
    ]
    graph.output(tuple(ends))
    return GraphModule(nodes[0].graph.owning_module or {}, graph), names


def _worst(
    suspect: CapturedSuspect, part: tuple[GraphModule, list[str]], values: dict[str, Any]
) -> Finding | None:
    """The gravest finding about what the backend makes of a part; None if it passes."""
    module, names = part
    try:
        verdict = suspect.check(module, [values[name] for name in names], suspect.gradients, CALLS)
    except Exception:  # noqa: BLE001  (a part that does not work alone shows nothing)
        return None
    bad = [finding for finding in verdict.failures if finding.status is not Status.UNVERIFIED]
    gradients = [finding for finding in bad if "gradient of" in finding.path]
    return next(iter(gradients if suspect.gradients else bad), None)


def _finding(
    suspect: CapturedSuspect, node: Node | None, told: str, worst: Finding | None
) -> Finding:
    about = worst or suspect.failures[0]
    if node is None:
        origin = Origin(kind=OriginKind.GRAPH, name=suspect.label)
        reason = told
    else:
        origin = node_origin(node)
        what = "the gradient of " if suspect.gradients else ""
        reason = f"starts here: {what}{origin.operator} {told}; {about.reason}"
    return Finding(
        path=f"{suspect.label}: {origin.kind.value} {origin.name}",
        aspect=about.aspect if worst is not None else Aspect.VALUE,
        status=about.status,
        reason=reason,
        dtype=about.dtype,
        shape=about.shape,
        metrics=about.metrics if worst is not None else None,
        native=about.native if worst is not None else None,
        diagnosis=about.diagnosis if worst is not None else None,
        source=origin.source or None,
        origin=origin,
    )
