"""The text graphs beside a dump of Ascend's graph engine, and the nodes of each operator."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import TYPE_CHECKING, Literal

from paritas.core.errors import UsageError
from paritas.formats.foreign.ge_files import spell_name
from paritas.formats.foreign.text_messages import parse_json, parse_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path


# --- Graphs ---------------------------------------------------------------------------------------

# They say which nodes of the captured graph an operator of the engine stands for. The syntax is
# protobuf's text format; only the fields needed are kept.

GraphKind = Literal["original", "optimized", "other"]

_FILE = re.compile(
    r"dynamo_(?P<kind>original|optimized)_(?P<graph>.+?)"
    r"(?:_rank_(?P<rank>\d{1,9}))?(?:_pid_\d+)?(?:_ts_\d+)?\.txt"
)
_FX_NAME, _ORIGINALS = b"_fx_tensor_name", b"_datadump_original_op_names"
_MOST_OPS = 1_000_000
_MOST_VALUES = 100_000
# A fused name, and a name within it; longer ones would take too long to split.
_LONGEST_NAME, _LONGEST_PART = 4096, 512


@dataclasses.dataclass(frozen=True)
class GeGraph:
    """A text graph.

    Attributes:
        label: its name in the file name.
        kind: as captured, as rewritten, or another stage.
        rank: None if the file name does not say.
        name: its name in the text.
        ops: by name, in order.
    """

    path: Path
    label: str
    kind: GraphKind
    rank: int | None
    name: str
    ops: dict[str, GeOp]

    def find(self, name: str) -> GeOp | None:
        """The operator of that name, also in the spelling of file names."""
        return self.ops.get(name) or self._spellings.get(spell_name(name))

    def split(self, name: str) -> tuple[GeOp, ...]:
        """The operators whose names, joined, make that name; empty if there are none.

        The name of a fused operator joins the names of all its parts, without a separator. The
        longest name that leaves a rest which can be split is tried first.
        """
        operator = self.find(name)
        if operator is not None:
            return (operator,)
        text = spell_name(name)
        if len(text) > _LONGEST_NAME:
            return ()
        end = len(text)
        taken = [0] * end + [-1]  # how much to take at each place; 0 for a dead end
        for at in range(end - 1, -1, -1):
            for length in self._lengths.get(text[at], ()):
                after = at + length
                if after <= end and taken[after] and text[at:after] in self._spellings:
                    taken[at] = length
                    break
        parts: list[GeOp] = []
        at = 0
        while at < end and taken[at]:
            parts.append(self._spellings[text[at : at + taken[at]]])
            at += taken[at]
        return tuple(parts)

    def outside(self, parts: tuple[GeOp, ...]) -> list[tuple[str, int]]:
        """The external inputs of a fused operator, in the order of its parts."""
        inside = {part.name for part in parts}
        return [source for part in parts for source in part.sources if source[0] not in inside]

    def fx_name(self, op: str, index: int) -> str:
        """The file stem of one result in a dump of the captured graph, if known."""
        operator = self.find(op)
        outputs = operator.outputs if operator else ()
        return outputs[index].fx_name if 0 <= index < len(outputs) else ""

    @functools.cached_property
    def _spellings(self) -> dict[str, GeOp]:
        return {spell_name(name): op for name, op in self.ops.items()}

    @functools.cached_property
    def _lengths(self) -> dict[str, list[int]]:
        """The lengths of names by their first letter, longest first."""
        lengths_by_letter: dict[str, set[int]] = {}
        for name in self._spellings:
            if len(name) <= _LONGEST_PART:
                lengths_by_letter.setdefault(name[0], set()).add(len(name))
        return {
            letter: sorted(lengths, reverse=True) for letter, lengths in lengths_by_letter.items()
        }


@dataclasses.dataclass(frozen=True, slots=True)
class GeOp:
    """An operator of the engine.

    Attributes:
        inputs: the sources of its arguments, `Add_2:0` for the first result of `Add_2`.
        originals: the operators that were fused into it, if the graph says so.
    """

    name: str
    type: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[GeOutput, ...] = ()
    originals: tuple[str, ...] = ()

    @property
    def sources(self) -> list[tuple[str, int]]:
        """Its arguments as (operator, which result), without control dependencies."""
        sources = [source.rpartition(":") for source in self.inputs]
        return [(name, int(index)) for name, _, index in sources if name and index.isdecimal()]


@dataclasses.dataclass(frozen=True, slots=True)
class GeOutput:
    """One result of an operator.

    Attributes:
        dtype: the engine's name, `DT_FLOAT16`.
        shape: -1 for a dynamic size.
        fx_name: the file stem of that value in a dump of the captured graph, for example
            `add_1-aten.add.Tensor.OUTPUT.0`. Only the last operator that a node was lowered to
            has one.
    """

    dtype: str = ""
    shape: tuple[int, ...] = ()
    fx_name: str = ""


def read_graph(path: Path) -> GeGraph:
    """Read a text graph, or the same in JSON, as the engine's converter prints an OM model."""
    kind, label, rank = graph_label(path) or ("other", path.stem, None)
    collected = _Collector()
    is_json = path.suffix == ".json"
    try:
        (parse_json if is_json else parse_text)(path, collected)
    except ValueError as error:
        expected = "an OM model in JSON" if is_json else "a text graph"
        raise UsageError(f"{path.name} is not {expected}: {error}") from error
    return GeGraph(path, label, kind, rank, collected.name, collected.ops)


def fx_node(fx_name: str) -> str:
    """The node of the captured graph of a file stem."""
    return fx_name.partition("-")[0]


def graph_label(path: Path) -> tuple[GraphKind, str, int | None] | None:
    """Parse the file name of a graph; None if it is not torchair's."""
    match = _FILE.fullmatch(path.name)
    if match is None:
        return None
    kind: GraphKind = "original" if match["kind"] == "original" else "optimized"
    return kind, match["graph"], None if match["rank"] is None else int(match["rank"])


def is_graph(path: Path) -> bool:
    """Whether a file is a graph with operators, in text or JSON."""
    if path.suffix not in (".txt", ".pbtxt", ".json"):
        return False
    try:
        return bool(read_graph(path).ops)
    except (UsageError, OSError):
        return False


# --- Collecting operators -------------------------------------------------------------------------


class _OpenMessage:
    """A message that is being read."""

    __slots__ = ("kind", "values")

    def __init__(self, kind: bytes) -> None:
        self.kind = kind
        self.values: dict[bytes, list[bytes]] = {}

    def first(self, key: bytes) -> str:
        return next((_decode(value) for value in self.values.get(key, ())), "")

    def all(self, key: bytes) -> tuple[str, ...]:
        return tuple(_decode(value) for value in self.values.get(key, ()))


# The plain fields to keep, by message.
_KEPT = {
    b"op": {b"name", b"type", b"input"},
    b"output_desc": {b"dtype"},
    b"shape": {b"dim"},
    b"attr": {b"key"},
    b"value": {b"s"},
    b"list": {b"s"},
    b"graph": {b"name"},
    b"": {b"name"},
}


class _Collector:
    """Collects operators from the contents of a text."""

    def __init__(self) -> None:
        self.name = ""
        self.ops: dict[str, GeOp] = {}
        self._outputs: list[list[GeOutput]] = []
        self._frames = [_OpenMessage(b"")]

    def begin(self, field: bytes) -> None:
        self._frames.append(_OpenMessage(field))
        if field == b"op":
            self._outputs.append([])

    def value(self, field: bytes, text: bytes) -> None:
        frame = self._frames[-1]
        if field in _KEPT.get(frame.kind, ()):
            values = frame.values.setdefault(field, [])
            if len(values) < _MOST_VALUES:
                values.append(text)
            if field == b"name" and frame.kind in (b"graph", b"") and not self.name:
                self.name = _decode(text)

    def end(self) -> None:
        frame = self._frames.pop()
        above = self._frames[-1]
        if frame.kind in (b"value", b"list") and above.kind in (b"attr", b"value"):
            above.values.setdefault(b"s", []).extend(frame.values.get(b"s", ()))
        elif frame.kind == b"attr" and above.kind in (b"op", b"output_desc"):
            key = frame.first(b"key").encode()
            if key in (_FX_NAME, _ORIGINALS):
                above.values[key] = frame.values.get(b"s", [])
        elif frame.kind == b"shape" and above.kind == b"output_desc":
            above.values[b"shape"] = frame.values.get(b"dim", [])
        elif frame.kind == b"output_desc" and above.kind == b"op":
            self._outputs[-1].append(_make_output(frame))
        elif frame.kind == b"op":
            self._add(frame, tuple(self._outputs.pop()))

    def _add(self, frame: _OpenMessage, outputs: tuple[GeOutput, ...]) -> None:
        name = frame.first(b"name")
        if not name or name in self.ops:
            return
        if len(self.ops) >= _MOST_OPS:
            raise ValueError(f"it has more than {_MOST_OPS} operators")
        self.ops[name] = GeOp(
            name=name,
            type=frame.first(b"type"),
            inputs=frame.all(b"input"),
            outputs=outputs,
            originals=frame.all(_ORIGINALS),
        )


def _make_output(frame: _OpenMessage) -> GeOutput:
    dims = frame.all(b"shape")
    shape = tuple(int(dim) for dim in dims if re.fullmatch(r"-?[0-9]{1,19}", dim))
    return GeOutput(
        dtype=frame.first(b"dtype"),
        shape=shape if len(shape) == len(dims) else (),
        fx_name=frame.first(_FX_NAME),
    )


def _decode(text: bytes) -> str:
    return text.decode("utf-8", "replace")


# --- The nodes of a tensor ------------------------------------------------------------------------

# The order of preference.
_KINDS: tuple[GraphKind, ...] = ("original", "optimized", "other")


@dataclasses.dataclass(frozen=True)
class Fusion:
    """What an operator of a dump consists of.

    Attributes:
        graph: the graph with its parts.
        parts: operators of that graph, in order; only one if nothing was fused.
    """

    graph: GeGraph
    parts: tuple[GeOp, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of the captured graph that the parts compute, in order."""
        names = (fx_node(output.fx_name) for part in self.parts for output in part.outputs)
        return tuple(dict.fromkeys(name for name in names if name))


@dataclasses.dataclass(frozen=True)
class GeNodes:
    """The nodes of one tensor.

    Attributes:
        names: nodes of the captured graph, in order; the last is the tensor's value.
        exact: whether the tensor is known to be that value.
    """

    names: tuple[str, ...] = ()
    exact: bool = False


class GeProvenance:
    """The origin of the operators of one model on one rank."""

    def __init__(self, graphs: Sequence[GeGraph], model: str, op_names: Iterable[str]) -> None:
        """`graphs` are those of the rank; `op_names` help to find those of the model."""
        names = list(dict.fromkeys(op_names))
        self.unclear: list[str] = []
        chosen = [self._choose(graphs, kind, model, names) for kind in _KINDS]
        self._graphs = [graph for graph in chosen if graph is not None]
        self._fusions: dict[str, Fusion | None] = {}

    def fusion(self, op_name: str) -> Fusion | None:
        """What an operator consists of, if a graph says so."""
        if op_name not in self._fusions:
            self._fusions[op_name] = self._find_listed(op_name) or self._find_joined(op_name)
        return self._fusions[op_name]

    def output(self, op_name: str, index: int, count: int) -> GeNodes:
        """The nodes of the n-th of `count` results, which the last part computes."""
        fusion = self.fusion(op_name)
        if fusion is None:
            return GeNodes()
        outputs = fusion.parts[-1].outputs
        node = fx_node(outputs[index].fx_name) if index < len(outputs) == count else ""
        if not node:
            return GeNodes(fusion.nodes)
        return GeNodes((*(name for name in fusion.nodes if name != node), node), exact=True)

    def argument(self, op_name: str, index: int, count: int) -> GeNodes:
        """The nodes of the n-th of `count` arguments, which come from outside the parts."""
        fusion = self.fusion(op_name)
        if fusion is None:
            return GeNodes()
        sources = fusion.graph.outside(fusion.parts)
        if len(sources) != count:
            # The whole may take once what two parts take.
            sources = list(dict.fromkeys(sources))
        if len(sources) != count:
            return GeNodes()
        producer, result = sources[index]
        node = fx_node(fusion.graph.fx_name(producer, result))
        if node:
            return GeNodes((node,), exact=True)
        producer_op = fusion.graph.find(producer)
        # The inputs of the program are named after the placeholders.
        return (
            GeNodes((producer,))
            if producer_op is not None and producer_op.type == "Data"
            else GeNodes()
        )

    def _find_listed(self, op_name: str) -> Fusion | None:
        """The parts that a graph lists."""
        operators = (graph.find(op_name) for graph in self._graphs)
        originals = next((op.originals for op in operators if op is not None and op.originals), ())
        for graph in self._graphs if originals else ():
            parts = [graph.find(name) for name in originals]
            present_parts = tuple(part for part in parts if part is not None)
            if len(present_parts) == len(parts):
                return Fusion(graph, present_parts)
        return None

    def _find_joined(self, op_name: str) -> Fusion | None:
        """The parts whose names make the name of the operator."""
        for graph in self._graphs:
            parts = graph.split(op_name)
            if parts:
                return Fusion(graph, parts)
        return None

    def _choose(
        self, graphs: Sequence[GeGraph], kind: GraphKind, model: str, names: list[str]
    ) -> GeGraph | None:
        """The graph of a kind that the model was made from."""
        candidates = [graph for graph in graphs if graph.kind == kind]
        if len(candidates) < 2:  # noqa: PLR2004  (there is a choice among two)
            return candidates[0] if candidates else None
        named = [candidate for candidate in candidates if candidate.label == model]
        named = named or [
            candidate for candidate in candidates if f"_{candidate.label}_" in f"_{model}_"
        ]
        if len(named) == 1:
            return named[0]
        scores = [sum(bool(graph.split(name)) for name in names) for graph in candidates]
        best = max(scores)
        if best and scores.count(best) == 1:
            return candidates[scores.index(best)]
        if best:
            names_shown = ", ".join(graph.path.name for graph in candidates[:3])
            self.unclear.append(
                f"model {model!r} may come from any of {scores.count(best)} graphs "
                f"({names_shown}): its operators are not traced to nodes"
            )
        return None
