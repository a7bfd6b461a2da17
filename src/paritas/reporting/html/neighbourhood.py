"""The calls around the first divergence, as a graph that a person can still read."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paritas.numerics.comparisons import Comparison, Row

__all__ = ["MOST_NODES", "neighbourhood"]

MOST_NODES = 150
# Where no data flow is known: how many calls before and after are shown.
_IN_ORDER = 8

Call = tuple[int, int | None, str]


def neighbourhood(comparison: Comparison) -> dict[str, Any] | None:
    """Nodes, nearest to the first divergence first, and edges between them.

    A node is a call: all its inputs and outputs. Nothing where there is no divergence.
    """
    start = comparison.first or comparison.first_non_finite
    rows = comparison.rows
    by_index = {row.index: place for place, row in enumerate(rows)}
    if start is None or start.row not in by_index:
        return None
    centre = _call(rows[by_index[start.row]])
    members: dict[Call, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        # Data does not flow between steps or ranks as far as is recorded.
        if (row.step, row.rank) == centre[:2]:
            members[_call(row)].append(place)
    edges = _edges(rows, by_index, members)
    flows = any(centre in edge for edge in edges)
    if not flows:
        edges = _in_order(list(members), centre)
    chosen = _nearest(centre, edges)
    numbers = {call: place for place, call in enumerate(chosen)}
    return {
        "flows": flows,
        "calls": len(members),
        "nodes": [_node(rows, members[call], by_index[start.row]) for call in chosen],
        "edges": [[numbers[a], numbers[b]] for a, b in edges if a in numbers and b in numbers],
    }


def _call(row: Row) -> Call:
    return (row.step, row.rank, row.call or row.name)


def _edges(
    rows: Sequence[Row], by_index: dict[int, int], members: dict[Call, list[int]]
) -> list[tuple[Call, Call]]:
    found = {
        (_call(rows[by_index[source]]), call): None
        for call, places in members.items()
        for place in places
        for source in rows[place].sources
        if source in by_index
    }
    return [(a, b) for a, b in found if a != b and a in members]


def _in_order(calls: list[Call], centre: Call) -> list[tuple[Call, Call]]:
    place = calls.index(centre)
    near = calls[max(0, place - _IN_ORDER) : place + _IN_ORDER + 1]
    return list(itertools.pairwise(near))


def _nearest(centre: Call, edges: Iterable[tuple[Call, Call]]) -> list[Call]:
    beside: dict[Call, list[Call]] = defaultdict(list)
    for a, b in edges:
        beside[a].append(b)
        beside[b].append(a)
    found, waiting = {centre: None}, deque([centre])
    while waiting and len(found) < MOST_NODES:
        for call in beside[waiting.popleft()]:
            if call not in found and len(found) < MOST_NODES:
                found[call] = None
                waiting.append(call)
    return list(found)


def _node(rows: Sequence[Row], places: list[int], start: int) -> dict[str, Any]:
    """A call: its gravest status, and the row to go to: the gravest of its outputs."""
    worst = max(places, key=lambda place: rows[place].status.gravity)
    outputs = [place for place in places if rows[place].side == "output"] or places
    shown = max(outputs, key=lambda place: rows[place].status.gravity)
    row = rows[start if start in places else shown]
    return {
        "row": start if start in places else shown,
        "status": rows[worst].status.gravity,
        "op": row.op,
        "label": row.module or row.call or row.name,
        "fused": len(row.nodes) if len(row.nodes) > 1 else 0,
        "made": row.made,
    }
