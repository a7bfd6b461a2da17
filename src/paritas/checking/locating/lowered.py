"""Find where compiled code first goes wrong: the first bad node, a pass, or a fused set."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from paritas._torch.graphs import provenance, returned
from paritas._torch.quiet import quietly
from paritas.checking.locating.isolating import remedies, smallest_set
from paritas.checking.locating.nodes import Tapping, is_wrong_alone, tap
from paritas.checking.locating.variants import run_variant, shows_it
from paritas.checking.origins import origin
from paritas.checking.passes.checks import check_graph_passes
from paritas.numerics.findings import Aspect, Finding, Origin, OriginKind, Status

if TYPE_CHECKING:
    from torch.fx import Node

    from paritas.checking.guarding.lowered import Suspect

# What is spent on finding a smallest set; a larger one is given when it runs out.
SECONDS = 40.0
MOST_NAMED = 3
# Among nodes that are wrong by themselves, one this much less wrong than the worst is passed over:
# it may be just over what noise explains.
CLEARLY = 50.0


@quietly()
def locate(suspect: Suspect) -> list[Finding]:
    """What the difference starts with; always at least one finding with an origin."""
    tapping = tap(suspect)
    passes = _wrong_passes(suspect)
    node = _first_node(tapping)
    if node is not None and node.origin is not None:
        if is_wrong_alone(suspect, node.origin.name) or passes:
            return [node, *passes]
        told = f"{node.origin.name} is wrong, but not when it is compiled alone"
        fused = _smallest(suspect, told, ())
        return [node if fused is None else fused]
    return passes or [_isolated(suspect, tapping)]


def _wrong_passes(suspect: Suspect) -> list[Finding]:
    found = check_graph_passes(suspect.lowered)
    return [finding for finding in found if finding.status is Status.DIFFERENT]


def _first_node(tapping: Tapping) -> Finding | None:
    """The first node that is clearly wrong; others are named in its reason."""
    if not tapping.findings:
        return None
    worst = max(map(_excess, tapping.findings))
    clear = [finding for finding in tapping.findings if _excess(finding) * CLEARLY >= worst]
    first = clear[0]
    others = [finding for finding in tapping.findings if finding is not first]
    extra = []
    if others:
        named = ", ".join(f.origin.name for f in others[:MOST_NAMED] if f.origin is not None)
        more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
        extra.append(f"other nodes wrong by themselves: {named}{more}")
    if tapping.changed:
        extra.append("observation changed the program: its outputs have other bits when tapped")
    reason = "; ".join([first.reason, *extra])
    return msgspec.structs.replace(first, reason=reason)


def _excess(finding: Finding) -> float:
    """How far over its limit a node is; a wrong integer or shape is as wrong as can be."""
    return math.inf if finding.native is None else finding.native.excess


def _isolated(suspect: Suspect, tapping: Tapping) -> Finding:
    """A difference that no node shows by itself: in a fusion, a layout, the wiring of outputs."""
    again = run_variant(suspect)
    if not shows_it(suspect, again):
        return _whole_graph(suspect, "it does not show when the graph is compiled once more", ())
    if tapping.error:
        seen = f"the graph could not be tapped ({tapping.error})"
    elif tapping.shows:
        seen = "no node is wrong by itself"
    else:
        seen = "observation changed the program: with every value as an output it is right"
    away = tuple(remedies(suspect))
    found = _smallest(suspect, seen, away)
    if found is not None:
        return found
    return _whole_graph(suspect, f"{seen}, and no set of compiled nodes shows it", away)


def _smallest(suspect: Suspect, seen: str, away: tuple[str, ...]) -> Finding | None:
    """The nodes that have to be compiled together; None if no set of nodes shows it."""
    nodes = smallest_set(suspect, SECONDS)
    if not nodes:
        return None
    by_name = {node.name: node for node in suspect.lowered.module.graph.nodes}
    where = provenance(by_name[nodes[0]])
    kind = OriginKind.NODE if len(nodes) == 1 else OriginKind.FUSION
    told = f"it takes {_listed(nodes)} compiled together" if len(nodes) > 1 else "compiled alone"
    found = origin(kind, ", ".join(nodes), where, tuple(nodes), away)
    return _finding(suspect, f"{seen}; {told} to show it", found)


def _whole_graph(suspect: Suspect, why: str, away: tuple[str, ...]) -> Finding:
    """No less than the graph; the node behind the first failing output is the nearest place."""
    outputs = dict(
        zip(suspect.runs.reference.outputs, returned(suspect.lowered.module), strict=False)
    )
    prefix = f"{suspect.label}: "
    node: Node | None = None
    for finding in suspect.failures:
        node = node or outputs.get(finding.path.removeprefix(prefix))
    where = provenance(node) if node is not None else None
    named = (node.name,) if node is not None else ()
    return _finding(
        suspect,
        why,
        origin(OriginKind.GRAPH, suspect.label, where, named, away),
    )


def _finding(suspect: Suspect, reason: str, where: Origin) -> Finding:
    worst = suspect.failures[0]
    return Finding(
        path=f"{suspect.label}: {where.kind.value} {where.name}",
        aspect=Aspect.VALUE,
        status=worst.status,
        reason=reason,
        source=where.source or None,
        origin=where,
    )


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
