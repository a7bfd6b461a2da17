"""Reads nnScaler graph checkpoints, without nnScaler and without running their code."""

from __future__ import annotations

import collections
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from paritas.core.errors import UsageError
from paritas.formats.files.torch_files import Name, follow
from paritas.sharding.graphs.calls import Graph, GraphCall, TensorValue, tensor_values
from paritas.sharding.graphs.checkpoint_records import (
    CheckpointRecord,
    CheckpointValues,
    NameGuard,
    record_of,
    records_of,
    text_of,
)
from paritas.sharding.graphs.declared_annotations import declared_annotation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


# --- The checkpoint -------------------------------------------------------------------------------

# A checkpoint is a dill pickle of `(counters, IRGraph)`: the nodes and tensors of a traced model as
# plain attribute objects. It is parsed, not unpickled (`files.torch_files`), and every name in it
# is checked against those that such a file has (`NameGuard`).

_LONGEST = 32 << 20
_FIRST_BYTE = 0x80
_MOST_NOTES = 20


def read_checkpoint(path: str | Path, *, modules: Iterable[str] = ()) -> Graph:
    """Read a graph that nnScaler wrote with `IRGraph.dump`.

    It may refer to names of `modules`, which are not imported.
    """
    path = Path(path)
    data = _bytes_of(path)
    try:
        return _read_graph(path.name, data, tuple(modules))
    except UsageError as why:
        _refuse_file(path, str(why))
    except RecursionError:
        _refuse_file(path, "it is nested too deep")


def _refuse_file(path: Path, why: str) -> NoReturn:
    hint = "None of its code was run. Write it again with nnScaler's `IRGraph.dump`"
    raise UsageError(f"{path} is not a readable graph checkpoint: {why}\n  {hint}") from None


def _bytes_of(path: Path) -> bytes:
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give the graph checkpoint (.ckp) itself")
    try:
        size = path.stat().st_size
        if not path.is_file():
            _refuse_file(path, "it is not a regular file")
        if size > _LONGEST:
            _refuse_file(path, f"it has {size} bytes; {_LONGEST} are allowed")
        data = path.read_bytes()
    except OSError as why:
        raise UsageError(
            f"{path} cannot be read: {why.strerror or why}; give a graph checkpoint (.ckp)"
        ) from why
    if not data:
        _refuse_file(path, "it is empty")
    if data[0] != _FIRST_BYTE:
        _refuse_file(path, f"it starts with {data[:8]!r}, which is not a pickle of protocol 2 to 5")
    return data


def _read_graph(name: str, data: bytes, modules: tuple[str, ...]) -> Graph:
    guard = NameGuard(modules)
    tree, end = follow(data, watch=guard)
    if end != len(data):
        raise UsageError(f"{len(data) - end} bytes follow the end of its pickle")
    graph = _top_record(tree)
    records = list(flat_nodes(graph))
    guard.close(module_classes(records))
    values = CheckpointValues(most=len(data))
    graph_inputs = values.inputs(graph.items("_inputs"))
    nodes = CheckpointNodes(values)
    calls = tuple(nodes.call(node, position) for position, node in enumerate(records))
    known_outputs = graph.items("_outputs") if graph.get("_outputs") is not None else ()
    returned = tuple(tensor_values(values.arguments(known_outputs)))
    values_by_name: dict[str, TensorValue] = {value.name: value for value in graph_inputs}
    for call in calls:
        for tensor in call.tensors():
            if tensor.kind in ("input", "parameter", "buffer"):
                values_by_name.setdefault(tensor.name, tensor)
    return Graph(
        name=name,
        kind="nnscaler",
        calls=calls,
        values=values_by_name,
        notes=_checkpoint_notes(graph, nodes, data),
        outputs=tuple(value.name for value in returned),
    )


def _top_record(tree: Any) -> CheckpointRecord:
    match tree:
        case (tuple(counters), described) if all(type(n) is int for n in counters):
            record = record_of(described)
            if record is not None and record.kind == "IRGraph":
                return record
    have = record_of(tree)
    what = have.kind if have is not None else type(tree).__name__
    raise UsageError(f"it is a pickle of a {what}, not of a graph with its counters")


def _checkpoint_notes(
    graph: CheckpointRecord, nodes: CheckpointNodes, data: bytes
) -> tuple[str, ...]:
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(nodes.counts.items()))
    version = f"a checkpoint in the format of nnScaler 0.9, pickle protocol {data[1]}"
    notes = [
        f"graph {graph.text('name')[:80]}: {version}; its code was not run",
        f"nodes: {counts or 'none'}",
        *nodes.notes[:_MOST_NOTES],
    ]
    if len(nodes.notes) > _MOST_NOTES:
        notes.append(f"and {len(nodes.notes) - _MOST_NOTES} more such notes")
    return tuple(notes)


# --- The nodes of a checkpoint as calls of a graph ------------------------------------------------

_DEEPEST = 64
_LONGEST_CODE = 500
_COMMENT = re.compile(
    r'File "(?P<file>[^"]*)", line (?P<line>\d+), in [^,]*, *(?P<code>.*)', re.DOTALL
)
_IDLE = {
    "IRDataOperation": "it loads data: there is nothing to split",
    "IRGraphAnchor": "it marks a place in the graph and computes nothing",
}
# nnScaler passes it to all softmax functions; only those in `torch.nn.functional` accept it.
_ONLY_FOR_WARNINGS = "_stacklevel"
_CONTAINERS = ("IRSegment", "IRGraph")
_UNPACKING = ("builtins.getattr", "_operator.getitem", "operator.getitem")


def flat_nodes(graph: CheckpointRecord) -> Iterator[CheckpointRecord]:
    """Every node in order, with the nodes of a segment in its place."""
    waiting = [records_of(graph, "_nodes")]
    seen_identities = {graph.identity}
    while waiting:
        node = next(waiting[-1], None)
        if node is None:
            waiting.pop()
            continue
        if node.identity in seen_identities or len(waiting) > _DEEPEST:
            raise UsageError(
                f"{node.words} occurs twice, or is nested in more than {_DEEPEST} segments"
            )
        seen_identities.add(node.identity)
        if node.kind in _CONTAINERS:
            waiting.append(records_of(node, "_nodes"))
        else:
            yield node


def module_classes(nodes: list[CheckpointRecord]) -> Iterator[str]:
    """The class names of the modules in which nodes were made."""
    for node in nodes:
        stack = node.get("_module_stack")
        if isinstance(stack, dict):
            yield from (item.path for item in stack.values() if isinstance(item, Name))


class CheckpointNodes:
    """Converts nodes to calls; counts their classes, and notes what could not be read."""

    def __init__(self, values: CheckpointValues) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.notes: list[str] = []
        self._values = values
        self._names: set[str] = set()

    def call(self, node: CheckpointRecord, position: int) -> GraphCall:
        """Convert one node."""
        self.counts[node.kind] += 1
        args = self._values.arguments(node.items("_inputs"))
        missing = list(self._values.missing)
        kwargs = self._values.arguments(node.mapping("_kwargs"))
        kwargs.pop(_ONLY_FOR_WARNINGS, None)
        missing += self._values.missing
        results = self._values.arguments(node.items("_outputs"))
        outputs = tuple(tensor_values(results))
        annotation = None
        if node.kind == "IRDimops":
            declared = declared_annotation(node, args, kwargs, results)
            annotation = declared.text
            self.notes += [declared.note] if declared.note else []
        idle = _idle_reason(node, returns_tensors=bool(outputs))
        source, code = _node_source(node)
        stack = node.get("_module_stack")
        module = list(stack)[-1] if isinstance(stack, dict) and stack else None
        obstacle = f"the file has no value for {', '.join(missing[:5])}" if missing else ""
        return GraphCall(
            position=position,
            name=self._name(node, position),
            operator=node.text("signature"),
            args=args,
            kwargs=kwargs,
            outputs=outputs,
            annotation=annotation,
            source=source,
            code=code,
            module=text_of(module) or "",
            idle=idle,
            obstacle="" if idle else obstacle,
        )

    def _name(self, node: CheckpointRecord, position: int) -> str:
        name = f"{node.text('name')[:80]}_{node.number('_id')}"
        if name in self._names:
            name = f"{name}_at_{position}"
        self._names.add(name)
        return name


def _idle_reason(node: CheckpointRecord, *, returns_tensors: bool) -> str:
    if node.kind == "IRBpOperation":
        return "a backward pass, checked with its forward call"
    if node.kind == "IRPyFunc":
        if node.text("signature") in _UNPACKING:
            return "it reads a part or an attribute of a value: there is nothing to split"
        if not returns_tensors:
            return "Python code on plain values, which returns no tensor"
    return _IDLE.get(node.kind, "")


def _node_source(node: CheckpointRecord) -> tuple[str, str]:
    """The file and line, and the code of that line."""
    text = text_of(node.get("_comment")) or ""
    match = _COMMENT.match(text)
    if match is None:
        return "", text.strip()[:_LONGEST_CODE]
    return f"{match['file']}:{match['line']}", match["code"].strip()[:_LONGEST_CODE]
