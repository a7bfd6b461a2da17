"""The graphs in words that stand beside a dump of Ascend's graph engine.

They tell which nodes of the captured graph an operator of the engine stands for. The syntax is
protobuf's text format; only what is needed of it is kept, as it goes by.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import TYPE_CHECKING, Literal

from paritas.dumps.foreign.ge_names import spelled
from paritas.dumps.foreign.text_format import parse_text
from paritas.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["GeGraph", "GeOp", "GeOutput", "GraphKind", "fx_node", "graph_label", "read_graph"]

GraphKind = Literal["original", "optimized", "other"]

_FILE = re.compile(
    r"dynamo_(?P<kind>original|optimized)_(?P<graph>.+?)"
    r"(?:_rank_(?P<rank>\d{1,9}))?(?:_pid_\d+)?(?:_ts_\d+)?\.txt"
)
_FX_NAME, _ORIGINALS = b"_fx_tensor_name", b"_datadump_original_op_names"
_MOST_OPS = 1_000_000
_MOST_VALUES = 100_000
# A fused name, and a name within it: to look for longer ones would take long.
_LONGEST_NAME, _LONGEST_PART = 4096, 512


@dataclasses.dataclass(frozen=True, slots=True)
class GeOutput:
    """One result of an operator.

    Attributes:
        dtype: the engine's name of it, `DT_FLOAT16`.
        shape: -1 where it varies.
        fx_name: the file stem of that value in a dump of the captured graph, for example
            `add_1-aten.add.Tensor.OUTPUT.0`. Only the last operator that a node was lowered to
            has one.
    """

    dtype: str = ""
    shape: tuple[int, ...] = ()
    fx_name: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class GeOp:
    """An operator of the engine.

    Attributes:
        inputs: where its arguments come from, `Add_2:0` for the first result of `Add_2`.
        originals: the operators that were fused into it, where the graph says so.
    """

    name: str
    type: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[GeOutput, ...] = ()
    originals: tuple[str, ...] = ()

    @property
    def sources(self) -> list[tuple[str, int]]:
        """Its arguments as (operator, which result); an order without a value is left out."""
        found = [source.rpartition(":") for source in self.inputs]
        return [(name, int(index)) for name, _, index in found if name and index.isdecimal()]


@dataclasses.dataclass(frozen=True)
class GeGraph:
    """A graph in words.

    Attributes:
        label: what its file calls it.
        kind: as captured, as rewritten, or another stage.
        rank: None where the name does not tell.
        name: what the graph calls itself.
        ops: by name, in order.
    """

    path: Path
    label: str
    kind: GraphKind
    rank: int | None
    name: str
    ops: dict[str, GeOp]

    def find(self, name: str) -> GeOp | None:
        """The operator of that name, also where a file name could not spell it."""
        return self.ops.get(name) or self._spellings.get(spelled(name))

    def split(self, name: str) -> tuple[GeOp, ...]:
        """The operators whose names, put together, make that name; nothing where none do.

        A fused operator is called after all that it does, without a mark between. The longest
        name that leaves a rest which can be split is taken first.
        """
        whole = self.find(name)
        if whole is not None:
            return (whole,)
        text = spelled(name)
        if len(text) > _LONGEST_NAME:
            return ()
        end = len(text)
        taken = [0] * end + [-1]  # how much to take at each place; 0 where it leads nowhere
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
        """What the parts of a fused operator take from outside of it, in their order."""
        inside = {part.name for part in parts}
        return [source for part in parts for source in part.sources if source[0] not in inside]

    def fx_name(self, op: str, index: int) -> str:
        """The file stem of one result in a dump of the captured graph, where it is known."""
        found = self.find(op)
        outputs = found.outputs if found else ()
        return outputs[index].fx_name if 0 <= index < len(outputs) else ""

    @functools.cached_property
    def _spellings(self) -> dict[str, GeOp]:
        return {spelled(name): op for name, op in self.ops.items()}

    @functools.cached_property
    def _lengths(self) -> dict[str, list[int]]:
        """By the first letter of a name, the lengths that such names have, longest first."""
        found: dict[str, set[int]] = {}
        for name in self._spellings:
            if len(name) <= _LONGEST_PART:
                found.setdefault(name[0], set()).add(len(name))
        return {letter: sorted(lengths, reverse=True) for letter, lengths in found.items()}


def fx_node(fx_name: str) -> str:
    """The node of the captured graph that a file stem belongs to."""
    return fx_name.partition("-")[0]


def graph_label(path: Path) -> tuple[GraphKind, str, int | None] | None:
    """What the name of a file says of the graph in it; None where it is none of torchair's."""
    found = _FILE.fullmatch(path.name)
    if found is None:
        return None
    kind: GraphKind = "original" if found["kind"] == "original" else "optimized"
    return kind, found["graph"], None if found["rank"] is None else int(found["rank"])


def read_graph(path: Path) -> GeGraph:
    """Read a graph in words.

    Raises:
        UsageError: it is damaged.
    """
    kind, label, rank = graph_label(path) or ("other", path.stem, None)
    collected = _Collector()
    try:
        parse_text(path, collected)
    except ValueError as error:
        raise UsageError(f"{path.name} is no graph in words: {error}") from error
    return GeGraph(path, label, kind, rank, collected.name, collected.ops)


# --- what is kept of a text -----------------------------------------------------------------------


class _Frame:
    """A message that is being read."""

    __slots__ = ("kind", "values")

    def __init__(self, kind: bytes) -> None:
        self.kind = kind
        self.values: dict[bytes, list[bytes]] = {}

    def first(self, key: bytes) -> str:
        return next((_decoded(value) for value in self.values.get(key, ())), "")

    def all(self, key: bytes) -> tuple[str, ...]:
        return tuple(_decoded(value) for value in self.values.get(key, ()))


# Message -> the plain fields of it that are kept.
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
    """Takes the events of a text and keeps what an operator is known by."""

    def __init__(self) -> None:
        self.name = ""
        self.ops: dict[str, GeOp] = {}
        self._outputs: list[list[GeOutput]] = []
        self._frames = [_Frame(b"")]

    def begin(self, field: bytes) -> None:
        self._frames.append(_Frame(field))
        if field == b"op":
            self._outputs.append([])

    def value(self, field: bytes, text: bytes) -> None:
        frame = self._frames[-1]
        if field in _KEPT.get(frame.kind, ()):
            values = frame.values.setdefault(field, [])
            if len(values) < _MOST_VALUES:
                values.append(text)
            if field == b"name" and frame.kind in (b"graph", b"") and not self.name:
                self.name = _decoded(text)

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
            self._outputs[-1].append(_output(frame))
        elif frame.kind == b"op":
            self._add(frame, tuple(self._outputs.pop()))

    def _add(self, frame: _Frame, outputs: tuple[GeOutput, ...]) -> None:
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


def _output(frame: _Frame) -> GeOutput:
    dims = frame.all(b"shape")
    shape = tuple(int(dim) for dim in dims if re.fullmatch(r"-?[0-9]{1,19}", dim))
    return GeOutput(
        dtype=frame.first(b"dtype"),
        shape=shape if len(shape) == len(dims) else (),
        fx_name=frame.first(_FX_NAME),
    )


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "replace")
