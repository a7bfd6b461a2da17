"""What calls were given when another program, the model itself, was recorded.

A dump has calls of its own. Where one of them is a call of the graph, what it was given and what it
made are values of the graph. It is one if the node bears the same name, calls the same operator and
comes from the same line; if it is the one call of a module; or if it is the n-th of an operator in
a module that has as many in both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from paritas.comparison.replaying.dataflow import Call, Calls
from paritas.dumps.dtypes import known_dtype
from paritas.dumps.opening import open_dump
from paritas.errors import UsageError
from paritas.graphs.calls import Graph, GraphCall, TensorValue
from paritas.graphs.operators.values import CallValues, map_values
from paritas.graphs.samples import Samples, copied, listed

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from paritas.dumps.opening import ReadableDump
    from paritas.dumps.records import Record, Site

__all__ = ["values_from_dump"]


def values_from_dump(graph: Graph, path: Path, keep: Collection[int]) -> Samples:
    """What a dump says that calls of a graph were given.

    The first step of the first rank is read. Calls of which it does not say everything are left
    out, and told in the notes.

    Raises:
        UsageError: it is no dump, or none of its calls is one of the graph's.
    """
    dump = open_dump(path)
    found = _matched(graph, _calls_of(dump))
    if not found:
        raise UsageError(
            f"{path}: none of its recorded calls is a call of {graph.name}. Record the model that "
            'the graph was made of, with paritas.capture(..., level="module") or level="op"'
        )
    state = {} if graph.state is None else graph.state()

    def tensor_of(value: TensorValue) -> torch.Tensor:
        return dump.read(found[value.name]) if value.name in found else state[value.name]

    kept: dict[int, CallValues] = {}
    missing: list[str] = []
    for call in graph.calls:
        if call.position not in keep or call.idle:
            continue
        if all(value.name in found or value.name in state for value in call.tensors()):
            args = map_values(call.args, tensor_of)
            kept[call.position] = copied(CallValues(args, map_values(dict(call.kwargs), tensor_of)))
        else:
            missing.append(call.name)
    notes = [f"recorded in {path.name}: what {len(kept)} of {len(kept) + len(missing)} are given"]
    if missing:
        notes.append(f"it does not say what these are given, which is drawn: {listed(missing)}")
    return Samples(kept, tuple(notes))


def _calls_of(dump: ReadableDump) -> list[Call]:
    """The forward calls of the first step of the first rank."""
    records = [one for one in dump.records() if one.site.phase == "forward"]
    first = min(((one.rank, one.step) for one in records), default=(0, 0))
    return list(Calls(one for one in records if (one.rank, one.step) == first))


def _matched(graph: Graph, calls: list[Call]) -> dict[str, Record]:
    """The record of each value of the graph that the dump is known to hold."""
    found: dict[str, Record] = {}
    for theirs, ours in _pairs(graph, calls):
        wanted = [*_placed(ours), *((f"made {at}", x) for at, x in enumerate(ours.outputs))]
        held = {**theirs.given, **{f"made {place}": one for place, one in theirs.made.items()}}
        if theirs.site.level == "module":
            # A module is given no parameters: its first argument is the first other tensor.
            moving = [one for one in wanted if one[1].kind in {"input", "intermediate"}]
            wanted = [("0", moving[0][1]), *wanted[-len(ours.outputs) :]] if moving else []
        for place, value in wanted:
            record = held.get(place)
            if record is not None and _fits(record, value):
                found.setdefault(value.name, record)
    return found


def _pairs(graph: Graph, calls: list[Call]) -> Iterator[tuple[Call, GraphCall]]:
    ours = [call for call in graph.calls if not call.idle and call.outputs]
    nodes = {call.name: call for call in ours}
    modules = {call.module for call in ours}
    for theirs in calls:
        node = nodes.get(theirs.site.name)
        if theirs.site.level == "node" and node is not None and _is_same(theirs.site, node):
            yield theirs, node
    by_operator = _grouped((call.module, call.operator, call) for call in ours)
    # The outermost module bears the name of its class in a dump, and none in a graph.
    recorded = _grouped(
        (one.site.module if one.site.module in modules else "", one.site.op, one)
        for one in calls
        if one.site.level == "op"
    )
    for key, group in recorded.items():
        if len(group) == len(by_operator.get(key, ())):
            yield from zip(group, by_operator[key], strict=True)
    by_module = _grouped((call.module, "", call) for call in ours)
    seen = _grouped((one.site.name, "", one) for one in calls if one.site.level == "module")
    for key, group in seen.items():
        if key[0] and len(group) == len(by_module.get(key, ())) == 1:
            yield group[0], by_module[key][0]


def _is_same(site: Site, call: GraphCall) -> bool:
    """Whether two nodes of one name are one: graphs number their nodes, each by itself."""
    if site.op != call.operator:
        return False
    if site.line and call.source:
        return site.line.partition(", in ")[0].replace("\\", "/").endswith(call.source)
    return site.module == call.module


def _grouped(items: Iterable[tuple[str, str, Any]]) -> Mapping[tuple[str, str], list[Any]]:
    groups: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for module, name, item in items:
        groups[module, name].append(item)
    return groups


def _placed(call: GraphCall) -> Iterator[tuple[str, TensorValue]]:
    """The tensors that a call is given, with their places as a dump writes them."""

    def below(place: str, value: Any) -> Iterator[tuple[str, TensorValue]]:
        if isinstance(value, TensorValue):
            yield place, value
        elif isinstance(value, list | tuple):
            for at, item in enumerate(value):
                yield from below(f"{place}.{at}", item)

    for at, value in enumerate(call.args):
        yield from below(str(at), value)
    for name, value in call.kwargs.items():
        yield from below(name, value)


def _fits(record: Record, value: TensorValue) -> bool:
    facts = record.tensor
    if facts is None or record.payload is None:
        return False
    return tuple(facts.shape) == value.shape and known_dtype(facts.dtype) == value.dtype
