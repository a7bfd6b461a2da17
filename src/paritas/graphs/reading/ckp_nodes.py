"""The nodes of a checkpoint as calls of a graph."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from paritas.dumps.foreign.pickles import Name
from paritas.errors import UsageError
from paritas.graphs.calls import GraphCall, tensor_values
from paritas.graphs.reading.ckp_annotations import declared_annotation
from paritas.graphs.reading.ckp_records import Record, records_of, text_of

if TYPE_CHECKING:
    from paritas.graphs.reading.ckp_values import Values

__all__ = ["Nodes", "flat_nodes", "module_classes"]

_DEEPEST = 64
_LONGEST_CODE = 500
_COMMENT = re.compile(
    r'File "(?P<file>[^"]*)", line (?P<line>\d+), in [^,]*, *(?P<code>.*)', re.DOTALL
)
_IDLE = {
    "IRDataOperation": "it loads data: there is nothing to split",
    "IRGraphAnchor": "a mark in the graph, which computes nothing",
}
# Written to all of torch's softmax functions, and taken by those in `torch.nn.functional` alone.
_ONLY_FOR_WARNINGS = "_stacklevel"
_CONTAINERS = ("IRSegment", "IRGraph")
_TAKING_APART = ("builtins.getattr", "_operator.getitem", "operator.getitem")


def flat_nodes(graph: Record) -> Iterator[Record]:
    """Every node in order; those of a segment in its place.

    Raises:
        UsageError: one stands at two places, as in a segment that contains itself; or segments are
            nested deeper than they can be.
    """
    waiting = [records_of(graph, "_nodes")]
    seen = {graph.identity}
    while waiting:
        node = next(waiting[-1], None)
        if node is None:
            waiting.pop()
            continue
        if node.identity in seen or len(waiting) > _DEEPEST:
            raise UsageError(f"{node.words} stands twice, or deeper than in {_DEEPEST} segments")
        seen.add(node.identity)
        if node.kind in _CONTAINERS:
            waiting.append(records_of(node, "_nodes"))
        else:
            yield node


def module_classes(nodes: list[Record]) -> Iterator[str]:
    """The names of the classes of the modules in which nodes were made."""
    for node in nodes:
        stack = node.get("_module_stack")
        if isinstance(stack, dict):
            yield from (item.path for item in stack.values() if isinstance(item, Name))


class Nodes:
    """Makes calls of nodes.

    Attributes:
        counts: how many nodes there are of each class.
        notes: what could not be said of a node, and why.
    """

    def __init__(self, values: Values) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.notes: list[str] = []
        self._values = values
        self._names: set[str] = set()

    def call(self, node: Record, position: int) -> GraphCall:
        """A node as a call."""
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
        idle = _idle(node, gives_tensors=bool(outputs))
        source, code = _source(node)
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
            module=_module(node),
            idle=idle,
            obstacle="" if idle else obstacle,
        )

    def _name(self, node: Record, position: int) -> str:
        name = _label(node)
        if name in self._names:
            name = f"{name}_at_{position}"
        self._names.add(name)
        return name


def _label(node: Record) -> str:
    return f"{node.text('name')[:80]}_{node.number('_id')}"


def _idle(node: Record, *, gives_tensors: bool) -> str:
    if node.kind == "IRBpOperation":
        return "a backward pass, checked with its forward call"
    if node.kind == "IRPyFunc":
        if node.text("signature") in _TAKING_APART:
            return "it reads a part or an attribute of a value: there is nothing to split"
        if not gives_tensors:
            return "Python on plain values, which gives no tensor"
    return _IDLE.get(node.kind, "")


def _source(node: Record) -> tuple[str, str]:
    """File and line, and the code of the line."""
    comment = node.get("_comment")
    text = text_of(comment) or ""
    found = _COMMENT.match(text)
    if found is None:
        return "", text.strip()[:_LONGEST_CODE]
    return f"{found['file']}:{found['line']}", found["code"].strip()[:_LONGEST_CODE]


def _module(node: Record) -> str:
    stack = node.get("_module_stack")
    if not isinstance(stack, dict) or not stack:
        return ""
    return text_of(list(stack)[-1]) or ""
