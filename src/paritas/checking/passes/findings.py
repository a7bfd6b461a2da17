"""What is said of a pass, or of a split, that is wrong or could not be checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paritas._torch.graphs import Provenance, provenance
from paritas.checking.origins import origin
from paritas.numerics.findings import Aspect, Finding, OriginKind, Status

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.fx import Node

    from paritas._torch.frozen import FrozenGraph
    from paritas.checking.passes.inputs import Inputs
    from paritas.checking.passes.runs import Comparison
    from paritas.checking.passes.splits import SplitProgram

SPLIT = "forward/backward split"
MOST_NAMED = 8


def could_not_check(path: str, reason: str) -> Finding:
    """A finding about something that was not compared."""
    return Finding(path=path, aspect=Aspect.HARNESS, status=Status.UNVERIFIED, reason=reason)


def wrong_pass(
    path: str,
    name: str,
    comparison: Comparison,
    inputs: Inputs,
    before: FrozenGraph,
    after: FrozenGraph,
) -> Finding:
    """A pass after which the graph computes something else."""
    nodes = changed_nodes(before, after)
    told = f"on made-up inputs ({inputs.numbers.value}), the graph after it computes something else"
    if nodes:
        told += f"; it changed {_listed([node.name for node in nodes])}"
    return _finding(path, OriginKind.PASS, name, told, comparison, nodes)


def wrong_split(comparison: Comparison, parts: SplitProgram) -> Finding:
    """A split whose parts together compute something else than the whole."""
    again = parts.drawn_again
    told = "forward and backward graph together compute something else than the joint graph"
    if again:
        told += (
            f"; the backward graph draws random numbers again that the forward graph drew already "
            f"({_listed(again)}), and gets others"
        )
    nodes = [node for node in parts.backward.nodes if node.name in again]
    return _finding(SPLIT, OriginKind.PARTITION, SPLIT, told, comparison, nodes)


def changed_nodes(before: FrozenGraph, after: FrozenGraph) -> list[Node]:
    """The nodes that two graphs do not share: as they were, or as they came to be."""
    old = {node.name: node for node in before.nodes}
    new = {node.name: node for node in after.nodes}
    kept = old.keys() & new.keys()
    changed = [new[name] for name in new if name in kept and _differ(old[name], new[name])]
    gone = [node for name, node in old.items() if name not in new]
    come = [node for name, node in new.items() if name not in old]
    # An output or a user that now takes another node says less than that node does.
    rewired = [node for node in changed if node.target == old[node.name].target]
    own = [node for node in changed if node.target != old[node.name].target]
    return [*own, *gone, *come] or rewired


def _finding(
    path: str,
    kind: OriginKind,
    name: str,
    told: str,
    comparison: Comparison,
    nodes: list[Node],
) -> Finding:
    worst = comparison.differ[0]
    where = _first_with_source(map(provenance, nodes))
    count = f"{len(comparison.differ)} of {comparison.compared} results differ"
    reason = f"{told}: {count}, the first in {worst.path}: {worst.reason}"
    return Finding(
        path=path,
        aspect=worst.aspect,
        status=Status.DIFFERENT,
        reason=reason,
        dtype=worst.dtype,
        shape=worst.shape,
        metrics=worst.metrics,
        native=worst.native,
        lifted=worst.lifted,
        diagnosis=worst.diagnosis,
        source=where.source or None,
        origin=origin(kind, name, where, tuple(node.name for node in nodes[:MOST_NAMED])),
    )


def _first_with_source(known: Iterable[Provenance]) -> Provenance:
    places = list(known)
    with_source = [place for place in places if place.source]
    return (with_source or places or [Provenance("", "")])[0]


def _differ(left: Node, right: Node) -> bool:
    return left.target != right.target or (str(left.args), str(left.kwargs)) != (
        str(right.args),
        str(right.kwargs),
    )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:MOST_NAMED])
    more = len(names) - MOST_NAMED
    return f"{shown} and {more} more" if more > 0 else shown
