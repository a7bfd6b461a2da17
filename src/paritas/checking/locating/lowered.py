"""Find where compiled code first goes wrong: the first bad node, a pass, or a fused set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paritas._torch.graphs import provenance, returned
from paritas.checking.locating.isolating import remedies, smallest_set
from paritas.checking.locating.nodes import Tapping, tap
from paritas.checking.locating.variants import run_variant, shows_it
from paritas.numerics.findings import Aspect, Finding, Origin, OriginKind, Status

if TYPE_CHECKING:
    from torch.fx import Node

    from paritas.checking.guarding.lowered import Suspect

# What is spent on finding a smallest set; a larger one is given when it runs out.
SECONDS = 40.0
MOST_NAMED = 3


def locate(suspect: Suspect) -> list[Finding]:
    """What the difference starts with; always at least one finding with an origin."""
    tapping = tap(suspect)
    passes = _wrong_passes(suspect)
    nodes = _first_nodes(tapping)
    if nodes:
        return [*nodes, *passes]
    if passes:
        return passes
    return [_isolated(suspect, tapping)]


def _wrong_passes(suspect: Suspect) -> list[Finding]:
    try:
        from paritas.checking.passes import check_graph_passes
    except ImportError:
        return []

    found = check_graph_passes(suspect.lowered)
    return [finding for finding in found if finding.status is Status.DIFFERENT]


def _first_nodes(tapping: Tapping) -> list[Finding]:
    """The first wrong node; later ones are named in its reason."""
    if not tapping.findings:
        return []
    first, *others = tapping.findings
    extra = []
    if others:
        named = ", ".join(f.origin.name for f in others[:MOST_NAMED] if f.origin is not None)
        more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
        extra.append(f"other nodes wrong by themselves: {named}{more}")
    if tapping.changed:
        extra.append("observation changed the program: its outputs have other bits when tapped")
    if not extra:
        return [first]
    reason = "; ".join([first.reason, *extra])
    return [_with_reason(first, reason)]


def _isolated(suspect: Suspect, tapping: Tapping) -> Finding:
    """A difference that no node shows by itself: in a fusion, a layout, the wiring of outputs."""
    again = run_variant(suspect)
    if not shows_it(suspect, again):
        return _whole_graph(suspect, "it does not show when the graph is compiled once more", ())
    away = tuple(remedies(suspect))
    nodes = smallest_set(suspect, SECONDS)
    seen = (
        f"the graph could not be tapped ({tapping.error})"
        if tapping.error
        else "no node is wrong by itself"
        if tapping.shows
        else "observation changed the program: with every value as an output it is right"
    )
    if not nodes:
        reason = f"{seen}, and no set of compiled nodes shows it"
        return _whole_graph(suspect, reason, away)
    by_name = {node.name: node for node in suspect.lowered.module.graph.nodes}
    where = provenance(by_name[nodes[0]])
    kind = OriginKind.NODE if len(nodes) == 1 else OriginKind.FUSION
    told = f"it takes {_listed(nodes)} compiled together" if len(nodes) > 1 else "compiled alone"
    return _finding(
        suspect,
        f"{seen}; {told} to show it",
        Origin(
            kind=kind,
            name=", ".join(nodes),
            operator=where.operator,
            module=where.module,
            source=where.source,
            code=where.code,
            nodes=tuple(nodes),
            remedies=away,
        ),
    )


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
    return _finding(
        suspect,
        why,
        Origin(
            kind=OriginKind.GRAPH,
            name=suspect.label,
            operator=where.operator if where else "",
            module=where.module if where else "",
            source=where.source if where else "",
            code=where.code if where else "",
            nodes=(node.name,) if node is not None else (),
            remedies=away,
        ),
    )


def _finding(suspect: Suspect, reason: str, origin: Origin) -> Finding:
    worst = suspect.failures[0]
    if origin.remedies:
        reason = f"{reason}; it goes away with {' or '.join(origin.remedies)}"
    return Finding(
        path=f"{suspect.label}: {origin.kind.value} {origin.name}",
        aspect=Aspect.VALUE,
        status=worst.status,
        reason=reason,
        source=origin.source or None,
        origin=origin,
    )


def _with_reason(finding: Finding, reason: str) -> Finding:
    import msgspec

    return msgspec.structs.replace(finding, reason=reason)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
