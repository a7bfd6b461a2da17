"""The contents of a dump's index: the run, each rank, each recorded value."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

import msgspec
from torch import Tensor

from paritas.numerics.statistics import Statistics
from paritas.results.placements import LocalPlacement

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1

# The structs with `gc=False` hold no cycles, and an index has tens of thousands of them: Python's
# garbage collector would walk them all again and again.

# "file" and "tensor": values from another tool's file that does not say more.
Source = Literal["eager", "fx", "fused", "file"]
Level = Literal["module", "op", "node", "buffer", "parameter", "tensor"]
Phase = Literal["forward", "backward"]
Side = Literal["input", "output"]
State = Literal["closed", "being written", "ended early"]
Layout = Literal["packed", "msit", "ge", "ge-7.1.0"]


class Site(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """The place in a program where a value was recorded.

    In the backward pass of eager code, a site holds the gradient of what the same name holds in the
    forward pass; backward graphs have nodes of their own.

    Attributes:
        source: the program: eager code, a graph run op by op, fused code.
        level: what `name` names: the call of a module or operator, a graph node, a buffer of fused
            code, a parameter (its gradient).
        name: module path; module path and operator; node; parameter.
        position: which argument or result, dotted inside a container: "0", "1.0", "mask".
        op: the operator, for example `aten.mm.default`, or the class of the module.
        module: path of the module it belongs to.
        line: the user's line, `file.py:18, in forward`.
        code: the text of that line.
        graph: the graph of a node or buffer.
        kernel: the kernel or operator of the compiled code that wrote a buffer.
        nodes: the graph nodes that the value stands for, in order; it is the value of the last. For
            an input of a node or kernel, the node that made it.
        exact: whether the buffer is known to hold exactly the value of that last node.
        call: which call of that name in this step, from 0.
    """

    source: Source
    level: Level
    name: str
    phase: Phase = "forward"
    side: Side = "output"
    position: str = "0"
    op: str = ""
    module: str = ""
    line: str = ""
    code: str = ""
    graph: str = ""
    kernel: str = ""
    nodes: tuple[str, ...] = ()
    exact: bool = True
    call: int = 0

    @property
    def id(self) -> str:
        """The canonical name, unique within one step of a rank."""
        scope = f"{self.graph}/" if self.graph else ""
        tapped = "~" if self.level == "node" and self.source == "fused" else ""
        place = f"{self.side}.{self.position}"
        return f"{self.phase}/{scope}{tapped}{self.name}#{self.call}/{place}"


class TensorFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """The properties of a tensor other than its values.

    Attributes:
        dtype: torch's name without `torch.`.
        offset: elements into the storage.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    device: str = "cpu"
    requires_grad: bool = False


class Payload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Where values are stored.

    Attributes:
        file: path relative to the dump's folder.
        key: the name of the tensor in that file.
        begin: first byte in the file (packed); 0 if the file holds one tensor.
        shape: as stored: dimensions of stride 0 are stored once.
    """

    file: str
    nbytes: int
    shape: tuple[int, ...]
    key: str = ""
    begin: int = 0


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One recorded value.

    Attributes:
        sequence: counts the records of a rank, from 0.
        id: the site's canonical name.
        tensor: None for numbers, strings and other values.
        value: a value that is not a tensor, as a Python literal.
        digest: hash of the stored bytes, 32 hexadecimal digits.
        payload: None if only statistics were recorded.
        dtype: of a tensor known only by its statistics; otherwise see `tensor`.
        sketch: where the linear sketch of the values is.
        alias_of: sequence number of the first record in this step that shares its memory.
    """

    sequence: int
    step: int
    rank: int
    id: str
    site: Site
    tensor: TensorFacts | None = None
    value: str | None = None
    digest: str = ""
    payload: Payload | None = None
    statistics: Statistics | None = None
    sketch: Payload | None = None
    alias_of: int | None = None
    placement: LocalPlacement | None = None
    dtype: str | msgspec.UnsetType = msgspec.UNSET

    @property
    def is_summary(self) -> bool:
        """Whether only the statistics of a tensor are known, not even its shape."""
        return self.tensor is None and self.value is None and self.statistics is not None

    @property
    def is_tensor(self) -> bool:
        """Whether it was a tensor."""
        return self.tensor is not None or self.is_summary

    @property
    def kind(self) -> str:
        """For example `float32[2,3]`; a question mark stands for an unknown shape."""
        if self.tensor is not None:
            return f"{self.tensor.dtype}[{','.join(map(str, self.tensor.shape))}]"
        return f"{self.dtype or 'tensor'}[?]" if self.is_summary else "value"


class Observed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether recording a graph changed what it computes.

    Attributes:
        graph: its name, with the phase.
        status: from comparing its outputs with and without recording.
    """

    graph: str
    status: Literal["unchanged", "changed", "unchecked"]
    detail: str = ""


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The header of one rank's part of a dump; written first, and again when it is closed.

    Attributes:
        format: version of this format.
        run: the same for all ranks of a run.
        data: whole tensors, or statistics of them.
        taps: whether every node of fused code was materialised, which may change the fusion.
        selection: what to record, in words.
        observed: per graph, whether recording changed its outputs.
        notes: remarks for the reader.
        closed: whether the run finished; otherwise the dump ends where the run stopped.
        records: number of records, once closed.
    """

    run: str
    format: int = FORMAT
    rank: int = 0
    world_size: int = 1
    created: str = ""
    torch: str = ""
    paritas: str = ""
    program: str = ""
    data: Literal["tensor", "stats"] = "tensor"
    layout: Layout = "packed"
    sources: tuple[Source, ...] = ()
    taps: bool = False
    fusion: str = "on"
    selection: dict[str, str] = {}
    observed: tuple[Observed, ...] = ()
    notes: tuple[str, ...] = ()
    closed: bool = False
    records: int = 0


class Entry(msgspec.Struct, kw_only=True, gc=False):
    """A value to be written; see `Record`. A struct is four times faster to make than a dataclass.

    Attributes:
        stored: contiguous and on the CPU, from `as_stored`. None for statistics alone, for values
            other than tensors, and for bytes that were written before under the same digest.
        digest: of those bytes; if empty, it is computed, which suits large new tensors.
        sketch: float32 or float64, one-dimensional.
    """

    sequence: int
    step: int
    site: Site
    tensor: TensorFacts | None = None
    value: str | None = None
    stored: Tensor | None = None
    digest: str = ""
    statistics: Statistics | None = None
    sketch: Tensor | None = None
    alias_of: int | None = None
    placement: LocalPlacement | None = None
    dtype: str | msgspec.UnsetType = msgspec.UNSET


@dataclasses.dataclass(frozen=True)
class RankDump:
    """What one rank recorded.

    Attributes:
        state: closed by the run; still being written; or cut off with the run.
        records: in the order of recording.
        problems: descriptions of damaged or missing data.
    """

    rank: int
    folder: Path
    header: Header
    state: State
    records: list[Record]
    problems: list[str]
