"""What the index of a dump says: of the run, of each rank, of each recorded value."""

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

# What has `gc=False` below holds no cycles, and there are tens of thousands of each: Python's
# collector would walk them all, again and again, while an index is read.

# "file" and "tensor": what a file of another tool does not say.
Source = Literal["eager", "fx", "fused", "file"]
Level = Literal["module", "op", "node", "buffer", "parameter", "tensor"]
Phase = Literal["forward", "backward"]
Side = Literal["input", "output"]
State = Literal["closed", "being written", "ended early"]
Layout = Literal["packed", "msit", "ge", "ge-7.1.0"]


class Site(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """The place in a program at which a value was seen.

    In the backward pass of eager code a site holds the gradient of what the same name holds in the
    forward pass; graphs of the backward pass have nodes of their own.

    Attributes:
        source: which program was looked at: eager code, a graph run op by op, fused code.
        level: what is named: a module's or an operator's call, a graph's node, a buffer of fused
            code, a parameter (its gradient).
        name: path of the module; module path and operator; node; parameter.
        position: which argument or result, dotted where it lies in a container: "0", "1.0", "mask".
        op: the operator, for example `aten.mm.default`, or the class of the module.
        module: path of the module that it belongs to.
        line: the user's line, `file.py:18, in forward`.
        code: the text of that line.
        graph: the graph that a node or buffer belongs to.
        kernel: the kernel or operator of the compiled code that wrote a buffer.
        nodes: the nodes of the graph that a value stands for, in order; the last is its value. Of
            what a node or a kernel is given, that is the node which made it.
        exact: whether the buffer is known to hold the very value of that last node.
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
        """The canonical name, unique within a step of a rank."""
        scope = f"{self.graph}/" if self.graph else ""
        tapped = "~" if self.level == "node" and self.source == "fused" else ""
        place = f"{self.side}.{self.position}"
        return f"{self.phase}/{scope}{tapped}{self.name}#{self.call}/{place}"


class TensorFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """What a tensor was, besides its values.

    Attributes:
        dtype: torch's name without `torch.`.
        offset: elements into the storage.
        device: where it was.
        requires_grad: as it was.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    device: str = "cpu"
    requires_grad: bool = False


class Payload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Where the values are.

    Attributes:
        file: path relative to the folder of the dump.
        key: the name of the tensor in that file.
        begin: byte in the file at which they begin (packed), 0 for a file of their own.
        nbytes: how many bytes there are.
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
        tensor: None for a number, a string and the like.
        value: what is no tensor, as text that Python reads back.
        digest: hash of the stored bytes, 32 hexadecimal digits.
        payload: None where statistics are all that was asked for.
        dtype: of a tensor of which statistics are all that is known, its shape is not; else it is
            in `tensor`.
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
        """Whether statistics of a tensor are all that is known, not even its shape."""
        return self.tensor is None and self.value is None and self.statistics is not None

    @property
    def is_tensor(self) -> bool:
        """Whether it was a tensor, and no number, string or the like."""
        return self.tensor is not None or self.is_summary

    @property
    def kind(self) -> str:
        """What it was, as `float32[2,3]`; a question mark is for a shape that is not known."""
        if self.tensor is not None:
            return f"{self.tensor.dtype}[{','.join(map(str, self.tensor.shape))}]"
        return f"{self.dtype or 'tensor'}[?]" if self.is_summary else "value"


class Observed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether looking at a graph changed what it computes.

    Attributes:
        graph: its name, with the phase.
        status: what a comparison of its outputs with and without recording said.
        detail: in words.
    """

    graph: str
    status: Literal["unchanged", "changed", "unchecked"]
    detail: str = ""


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank says of its part of the dump; written first, and once more when it is closed.

    Attributes:
        format: the version of all this.
        run: the same for all ranks of one run.
        data: whole tensors, or statistics of them.
        taps: whether every node of fused code was materialised, which may change the fusion.
        selection: what was asked for, in words.
        observed: per graph, whether recording changed its outputs.
        notes: what a reader should know.
        closed: whether the run came to its end; otherwise the dump ends where the run did.
        records: how many there are, once closed.
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
    """A value to be written; a struct, as one is made in a fourth of the time of a dataclass.

    Attributes:
        stored: contiguous, on the CPU, as `as_stored` gives it. None for statistics alone, for
            what is no tensor, and for bytes of a digest that was written before.
        digest: of those bytes; empty, it is found out, best for large tensors that are likely new.
        sketch: float32 or float64, of one dimension.

    The others are as in `Record`.
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
        state: closed by the run; still being written; or cut off when the run was.
        records: in the order of recording.
        problems: what is damaged or missing.
    """

    rank: int
    folder: Path
    header: Header
    state: State
    records: list[Record]
    problems: list[str]
