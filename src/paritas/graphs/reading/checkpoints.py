"""Reads graph checkpoints of nnScaler, without nnScaler and without doing what is in them.

A checkpoint is a pickle by dill of `(counters, IRGraph)`: the nodes and tensors of a traced model
as plain attribute objects. It is followed, not unpickled (`dumps.foreign.pickles`); every name in
it is held against what such a file has (`ckp_names`); the rest of `ckp_*` reads the records.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from paritas.dumps.foreign.pickles import follow
from paritas.errors import UsageError
from paritas.graphs.calls import Graph, TensorValue
from paritas.graphs.reading.ckp_names import Gate
from paritas.graphs.reading.ckp_nodes import Nodes, flat_nodes, module_classes
from paritas.graphs.reading.ckp_records import Record, record_of
from paritas.graphs.reading.ckp_values import Values

__all__ = ["read_checkpoint"]

_LONGEST = 32 << 20
_FIRST_BYTE = 0x80
_MOST_NOTES = 20


def read_checkpoint(path: str | Path, *, modules: Iterable[str] = ()) -> Graph:
    """Read a graph that nnScaler wrote with `IRGraph.dump`.

    Args:
        modules: modules of yours that the file may refer to. They are not imported.

    Raises:
        UsageError: there is no such file, it is damaged, it is something else, or it asks for
            anything that a graph does not need.
    """
    path = Path(path)
    data = _bytes_of(path)
    try:
        return _graph(path.name, data, tuple(modules))
    except UsageError as why:
        _refuse(path, str(why))
    except RecursionError:
        _refuse(path, "it is nested deeper than any graph")


def _refuse(path: Path, why: str) -> NoReturn:
    hint = "nothing of it was run; write it again with `IRGraph.dump` of nnScaler"
    raise UsageError(f"{path} is no graph checkpoint that can be read: {why}\n  {hint}") from None


def _bytes_of(path: Path) -> bytes:
    if path.is_dir():
        raise UsageError(f"{path} is a folder: give the graph checkpoint (.ckp) itself")
    try:
        size = path.stat().st_size
        if not path.is_file():
            _refuse(path, "it is no plain file")
        if size > _LONGEST:
            _refuse(path, f"it has {size} bytes, more than {_LONGEST}")
        data = path.read_bytes()
    except OSError as why:
        raise UsageError(
            f"{path} cannot be read: {why.strerror or why}; give a graph checkpoint (.ckp)"
        ) from why
    if not data:
        _refuse(path, "it is empty")
    if data[0] != _FIRST_BYTE:
        _refuse(path, f"it is no pickle of version 2 to 5, but begins with {data[:8]!r}")
    return data


def _graph(name: str, data: bytes, modules: tuple[str, ...]) -> Graph:
    gate = Gate(modules)
    tree, end = follow(data, watch=gate)
    if end != len(data):
        raise UsageError(f"{len(data) - end} bytes follow the end of its pickle")
    graph = _top(tree)
    records = list(flat_nodes(graph))
    gate.close(module_classes(records))
    values = Values(most=len(data))
    given = values.inputs(graph.items("_inputs"))
    nodes = Nodes(values)
    calls = tuple(nodes.call(node, position) for position, node in enumerate(records))
    kept: dict[str, TensorValue] = {value.name: value for value in given}
    for call in calls:
        for tensor in call.tensors():
            if tensor.kind in ("input", "parameter", "buffer"):
                kept.setdefault(tensor.name, tensor)
    return Graph(
        name=name, kind="nnscaler", calls=calls, values=kept, notes=_notes(graph, nodes, data)
    )


def _top(tree: Any) -> Record:
    match tree:
        case (tuple(counters), described) if all(type(n) is int for n in counters):
            found = record_of(described)
            if found is not None and found.kind == "IRGraph":
                return found
    have = record_of(tree)
    what = have.kind if have is not None else type(tree).__name__
    raise UsageError(f"it is a pickle of a {what}, not of a graph with its counters")


def _notes(graph: Record, nodes: Nodes, data: bytes) -> tuple[str, ...]:
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(nodes.counts.items()))
    version = f"a checkpoint as nnScaler 0.9 writes it, pickle version {data[1]}"
    notes = [
        f"graph {graph.text('name')[:80]}: {version}; its code was not run",
        f"nodes: {counts or 'none'}",
        *nodes.notes[:_MOST_NOTES],
    ]
    if len(nodes.notes) > _MOST_NOTES:
        notes.append(f"and {len(nodes.notes) - _MOST_NOTES} more notes of this kind")
    return tuple(notes)
