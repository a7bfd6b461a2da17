"""Write the files of Ascend's graph engine: tensor files, their tree, text graphs."""

from __future__ import annotations

import dataclasses
import datetime as dt
import re
import shutil
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from paritas.core.errors import ParitasError, UsageError
from paritas.formats.files.records import RANK, Payload, index_home, whole_file
from paritas.formats.files.tensor_bytes import (
    as_stored,
    digest,
    known_dtype,
    raw_bytes,
    stored_dtype,
    stored_shape,
)
from paritas.formats.foreign import ge_files, ge_tensors
from paritas.formats.foreign.ge_files import (
    MOST_DIMS,
    MOST_TENSORS,
    decode_header,
    fitting_name,
    spell_name,
)
from paritas.formats.foreign.ge_tensors import code_of_dtype, name_of_dtype
from paritas.formats.foreign.npy_tree import call_name, model_name

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from paritas.formats.files.records import Entry, Layout, Record, Site, TensorFacts
    from paritas.formats.foreign.ge_files import GeFile, GeTensor


# --- Tensor files and folders ---------------------------------------------------------------------

# The format that `ge_files` reads: the length of the header in eight bytes, the header, and the
# bytes of the operator's inputs and outputs. A file appears only when it is complete.

_VERSION = b"2.0"
_ND = 2
_FLOAT4 = torch.float4_e2m1fn_x2
_VARINT, _BYTES = 0, 2
# Field numbers: see `ge_files`.
_OUTPUT, _INPUT = 3, 4


class GeTree:
    """Writes the files of one rank, in the folders of the engine.

    ::

        worldsize{W}_global_rank{r}/{time}/{device}/{model}/{model id}/{step}/
            {operator's type}.{operator}.{task}.{stream}.{time}
    """

    def __init__(
        self,
        root: Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        has_ranks: bool = True,
    ) -> None:
        """`has_ranks` is False for the tree of old releases, without the top folder."""
        when = f"{dt.datetime.now(dt.UTC):%Y%m%d%H%M%S}"
        self.top = f"worldsize{world_size}_global_rank{rank}" if has_ranks else when
        self._root = root
        self._run = f"{self.top}/{when}/{rank}" if has_ranks else f"{when}/{rank}"
        self._models: dict[str, int] = {}
        self._tasks: dict[str, int] = {}
        self._last_time = 0

    def write(
        self,
        *,
        step: int,
        model: str,
        op_type: str,
        op_name: str,
        inputs: Sequence[Tensor] = (),
        outputs: Sequence[Tensor] = (),
    ) -> tuple[str, GeFile]:
        """Write the file of one call; its path inside the dump, and its header.

        Names are spelt as the engine spells them in file names; the header keeps `op_name` as it
        is. Raises like `write_tensor_file`.
        """
        name = spell_name(model) or "graph"
        number = self._models.setdefault(name, len(self._models) + 1)
        folder = f"{self._run}/{name}/{number}/{step}"
        position = self._root / folder
        position.mkdir(parents=True, exist_ok=True)
        # No two files in a folder have the same name: the time always increases.
        self._last_time = max(time.time_ns() // 1000, self._last_time + 1)
        task = self._tasks[folder] = self._tasks.get(folder, 0) + 1
        kind = spell_name(op_type) or "Op"
        # The operator keeps its dots.
        operator = re.sub(r"[/\\ ]", "_", op_name) or "op"
        file_name = f"{kind}.{operator}.{task}.0.{self._last_time}"
        file = f"{folder}/{fitting_name(position, file_name)}"
        written = write_tensor_file(
            self._root / file, inputs, outputs, op_name=op_name, moment=self._last_time
        )
        return file, written


def write_tensor_file(
    path: str | os.PathLike[str],
    inputs: Sequence[Tensor] = (),
    outputs: Sequence[Tensor] = (),
    *,
    op_name: str = "",
    moment: int | None = None,
) -> GeFile:
    """Write one tensor file of Ascend's graph engine ("bin format").

    The file appears only when it is complete; an existing one is replaced. Tensors are written in
    the plain layout (`ND`), bit for bit.

    Args:
        path: its name describes the operator: `{type}.{operator}.{task}.{stream}.{time}`.
        op_name: the operator, for the header.
        moment: microseconds since 1970; default: now.

    Returns:
        The header, as `read_ge_header` returns it.

    Raises:
        UsageError: a tensor has an unsupported dtype, or no values.
        OSError: the file cannot be written.
    """
    if len(inputs) + len(outputs) > MOST_TENSORS:
        raise UsageError(
            f"a file holds at most {MOST_TENSORS} tensors, got {len(inputs) + len(outputs)}"
        )
    taken = [_store_row_major(tensor, f"input {at}") for at, tensor in enumerate(inputs)]
    store_row_majors = [
        _store_row_major(tensor, f"output {at}") for at, tensor in enumerate(outputs)
    ]
    when = time.time_ns() // 1000 if moment is None else moment
    header = _encode_bytes(1, _VERSION) + _encode_number(2, when)
    for at, store_row_major in enumerate(store_row_majors):
        header += _encode_bytes(_OUTPUT, _encode_output(store_row_major, op_name, at))
    header += b"".join(_encode_bytes(_INPUT, _encode_input(operand)) for operand in taken)
    header += _encode_bytes(6, op_name.encode())
    with whole_file(Path(path)) as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for tensor in (*taken, *store_row_majors):
            if tensor.numel():
                file.write(raw_bytes(tensor))
    return decode_header(header)


def _store_row_major(tensor: Tensor, which: str) -> Tensor:
    """The values in row-major order on the CPU, with repeated dimensions expanded."""
    try:
        values = as_stored(tensor.detach().cpu()).expand(tensor.shape).contiguous()
        code_of_dtype(values.dtype)
    except UsageError as error:
        raise UsageError(f"{which}: {error}") from error
    if values.dim() > MOST_DIMS:
        raise UsageError(f"{which} has {values.dim()} dimensions, the limit is {MOST_DIMS}")
    return values


def _encode_input(tensor: Tensor) -> bytes:
    size = tensor.numel() * tensor.dtype.itemsize
    return _encode_head(tensor) + _encode_number(5, size) + _encode_bytes(6, _encode_shape(tensor))


def _encode_output(tensor: Tensor, op_name: str, index: int) -> bytes:
    original = _encode_bytes(1, op_name.encode()) + _encode_number(2, index)
    original += _encode_number(3, code_of_dtype(tensor.dtype)) + _encode_number(4, _ND)
    size = tensor.numel() * tensor.dtype.itemsize
    body = _encode_head(tensor) + _encode_bytes(4, original)
    return body + _encode_number(6, size) + _encode_bytes(7, _encode_shape(tensor))


def _encode_head(tensor: Tensor) -> bytes:
    head = _encode_number(1, code_of_dtype(tensor.dtype)) + _encode_number(2, _ND)
    return head + _encode_bytes(3, _encode_shape(tensor))


def _encode_shape(tensor: Tensor) -> bytes:
    dims = list(tensor.shape)
    if tensor.dtype is _FLOAT4:  # torch counts bytes, the engine the two numbers in each
        dims = [*dims[:-1], 2 * dims[-1]] if dims else [2]
    return _encode_bytes(1, b"".join(map(_encode_varint, dims))) if dims else b""


def _encode_number(field: int, value: int) -> bytes:
    """A number field; protobuf omits zeros."""
    return _encode_varint(field << 3 | _VARINT) + _encode_varint(value) if value else b""


def _encode_bytes(field: int, value: bytes) -> bytes:
    return _encode_varint(field << 3 | _BYTES) + _encode_varint(len(value)) + value


def _encode_varint(value: int) -> bytes:
    parts = bytearray()
    while value > 127:  # noqa: PLR2004  (seven bits to a byte)
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


# --- One file as a whole: `paritas.dumps.read_bin` and `write_bin` --------------------------------


@dataclasses.dataclass(frozen=True)
class BinFile:
    """The inputs and outputs of one call of an operator.

    Attributes:
        op_name: as spelt in the header; empty if it does not say.
        inputs: in the layout and dtype of the program.
    """

    op_name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def read_bin(path: str | os.PathLike[str]) -> BinFile:
    """Read a bin file.

    Device layouts (NC1HWC0, FRACTAL_NZ and so on) are undone and padding is dropped. Buffers and
    scratch space are omitted. Sizes in the header are checked against the file.

    Raises:
        UsageError: the file is missing, truncated or damaged, or has a dtype that torch lacks.
    """
    file = Path(path)
    try:
        header = ge_files.read_ge_header(file)
        size = file.stat().st_size
        if header.end > size:
            raise UsageError(f"{file.name} has {size} bytes, but its header needs {header.end}")
        tensors: dict[str, list[Tensor]] = {"input": [], "output": []}
        for tensor in header.tensors:
            if tensor.kind in tensors:
                tensors[tensor.kind].append(ge_tensors.read_ge_values(file, tensor, size))
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error
    return BinFile(header.op_name, tuple(tensors["input"]), tuple(tensors["output"]))


def write_bin(
    path: str | os.PathLike[str],
    inputs: Sequence[Tensor] = (),
    outputs: Sequence[Tensor] = (),
    *,
    op_name: str = "",
) -> None:
    """Write a bin file; `read_bin` returns the same tensors, bit for bit.

    The file appears only when it is complete; an existing one is replaced. A tree needs names like
    `Add.Add_2.44.6.1706596912161941`: type, operator, task, stream, microseconds.

    Args:
        path: of the file.
        inputs: the operator's inputs, in order.
        outputs: the operator's outputs, in order.
        op_name: the operator, for the header.

    Raises:
        UsageError: a tensor has an unsupported dtype, no values, or over 32 dimensions.
        ParitasError: the file cannot be written.
    """
    try:
        write_tensor_file(path, inputs, outputs, op_name=op_name)
    except OSError as error:
        raise ParitasError(f"cannot write {path}: {error.strerror or error}") from error


# --- Our dump in that layout ----------------------------------------------------------------------

# ::
#
#     worldsize{W}_global_rank{r}/{time}/{device}/{model}/{model id}/{step}/
#         {operator's type}.{operator}.{task}.{stream}.{time}
#
# A file holds all inputs and outputs of one call, so values wait until their call is over. Fused
# code is named as the engine names it: the joined names of all its nodes, without a separator. Old
# releases have no rank folder and treat every folder as part of the tree; so the index of the dump
# is in a folder beside it.

FUSED_TYPE, PARTIAL_TYPE = "AutomaticBufferFusionOp", "Reformat"
GIVEN_TYPE, RESULT_TYPE = "Data", "NetOutput"
# Phase, graph and name of a site.
SiteKey = tuple[str, str, str]


class Operator(NamedTuple):
    """The engine's equivalent of what is recorded under one name.

    Attributes:
        nodes: the nodes that it computes, in order.
        takes: the nodes of its inputs, in graph order.
    """

    type: str
    name: str
    nodes: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()

    @classmethod
    def of_buffer(
        cls,
        site: Site,
        nodes: tuple[str, ...],
        takes: tuple[str, ...] = (),
        views: Collection[str] = (),
    ) -> Operator:
        """The operator that writes a buffer of fused code; views do not count as fused.

        A buffer that does not hold the value of a node must not look like one: it gets a name that
        no node has, and the type of operators that the engine inserts itself.
        """
        if not site.exact or not nodes:
            return cls(PARTIAL_TYPE, f"{site.name}.part", nodes)
        is_fused = sum(node not in views for node in nodes) > 1
        kind = FUSED_TYPE if is_fused else site.op or site.level
        return cls(kind, "".join(nodes), nodes, takes)


class _EarlierPayload(NamedTuple):
    """Where bytes with a known digest are."""

    payload: Payload
    facts: TensorFacts


@dataclasses.dataclass
class _CallFile:
    """The contents of one file; `first` has its step and graph."""

    operator: Operator
    first: Entry
    inputs: list[Entry] = dataclasses.field(default_factory=list)
    outputs: list[Entry] = dataclasses.field(default_factory=list)


class CallFiles:
    """Collects the values of a call and writes them into one file."""

    def __init__(self, root: Path, layout: Layout, rank: int, world_size: int) -> None:
        """`root` is the folder of the dump."""
        self._root, self._home = root, index_home(root, layout)
        self._tree = GeTree(root, rank=rank, world_size=world_size, has_ranks=layout == "ge")
        self._operators: dict[SiteKey, Operator] = {}
        self._pending: list[Entry] = []
        self._earlier: dict[str, _EarlierPayload] = {}
        self._folders: set[str] = set()

    @property
    def step(self) -> int | None:
        """The step of the pending entries; None if there are none."""
        return self._pending[-1].step if self._pending else None

    def name_operators(self, operators: Mapping[SiteKey, Operator]) -> None:
        """Set the names that the engine would use for operators."""
        self._operators.update(operators)

    def is_over(self, entry: Entry) -> bool:
        """Whether an entry belongs to another call than the pending ones."""
        return bool(self._pending) and call_key(entry) != call_key(self._pending[-1])

    def put(self, entry: Entry) -> None:
        """Add an entry to the pending call."""
        self._pending.append(entry)

    def detach(self) -> None:
        """Copy pending values: their producer will reuse the memory."""
        for entry in self._pending:
            if entry.stored is not None:
                entry.stored = entry.stored.clone()

    def write(self) -> list[tuple[Entry, Payload | None]]:
        """Write the pending entries; returns them with their places, in program order.

        An entry with an unsupported dtype has no place: it must be stored elsewhere.

        Raises:
            OSError: a file cannot be written.
        """
        waiting, self._pending = self._pending, []
        for entry in waiting:
            if entry.stored is None and entry.tensor is not None and entry.digest:
                entry.stored = self._recover(entry, entry.tensor, waiting)
        places: dict[int, Payload] = {}
        for file in self._files(waiting):
            # A value that several operators take is read where it was written first.
            for sequence, payload in self._write_file(file).items():
                places.setdefault(sequence, payload)
        return [(entry, places.get(entry.sequence)) for entry in waiting]

    def _files(self, waiting: list[Entry]) -> list[_CallFile]:
        """Group entries into files."""
        files: dict[tuple[object, ...], _CallFile] = {}

        def file_of(entry: Entry) -> _CallFile:
            new = _CallFile(self._operator(entry.site), entry)
            return files.setdefault(_file_key(entry), new)

        readings = [waiting_entry for waiting_entry in waiting if _is_reading(waiting_entry.site)]
        for entry in waiting:
            if _fits_format(entry) and not _is_reading(entry.site):
                file = file_of(entry)
                (file.inputs if _is_given(entry.site) else file.outputs).append(entry)
        values = {
            _find_held_node(waiting_entry.site): waiting_entry
            for waiting_entry in reversed(waiting)
            if _fits_format(waiting_entry)
        }
        taken: set[int] = set()
        for file in files.values():
            # A kernel is one operator for each value that it writes; each gets its inputs, from
            # memory or from another of them.
            kernel_inputs = [
                values[name] for name in file.operator.takes if name in values and readings
            ]
            file.inputs += kernel_inputs
            taken.update(waiting_entry.sequence for waiting_entry in kernel_inputs)
        for entry in readings:
            if _fits_format(entry) and entry.sequence not in taken:
                file_of(entry).inputs.append(entry)
        return list(files.values())

    def remember(self, records: Sequence[Record]) -> None:
        """Remember where bytes are: they may come again without their values."""
        for record in records:
            if record.payload is not None and record.tensor is not None and record.digest:
                earlier_payload = _EarlierPayload(record.payload, record.tensor)
                self._earlier.setdefault(record.digest, earlier_payload)

    def drop_step(self, step: int) -> None:
        """Remove the files of a step."""
        for folder in sorted(self._folders):
            if folder.endswith(f"/{step}"):
                shutil.rmtree(self._root / folder, ignore_errors=True)
                self._folders.discard(folder)
                gone = [
                    key
                    for key, stored in self._earlier.items()
                    if stored.payload.file.startswith(f"{folder}/")
                ]
                for key in gone:
                    del self._earlier[key]

    def _write_file(self, file: _CallFile) -> dict[int, Payload]:
        """Write a file; where the values of its entries are, by sequence number."""
        site = file.first.site
        path, written = self._tree.write(
            step=file.first.step,
            model=model_name(site.graph, site.phase),
            op_type=file.operator.type,
            op_name=file.operator.name,
            inputs=[_expand_stored(entry) for entry in file.inputs],
            outputs=[_expand_stored(entry) for entry in file.outputs],
        )
        self._folders.add(path.rpartition("/")[0])
        written_tensors = {tensor.key: tensor for tensor in written.tensors}
        places: dict[int, Payload] = {}
        for side, entries in (("input", file.inputs), ("output", file.outputs)):
            for at, entry in enumerate(entries):
                # The value of another operator has its place in the file of that operator.
                if side == "output" or _is_given(entry.site):
                    places[entry.sequence] = _make_payload(
                        entry, path, written_tensors[f"{side}.{at}"]
                    )
        return places

    def _operator(self, site: Site) -> Operator:
        if _is_result(site):
            return Operator(RESULT_TYPE, RESULT_TYPE)
        if site.op == "placeholder":
            return Operator(GIVEN_TYPE, site.name)
        if site.level != "buffer":
            return Operator(site.op or site.level, site.name)
        cached = self._operators.get((site.phase, site.graph, site.name))
        if cached is not None:
            return cached
        # The nodes of a buffer that is read are those that made it.
        return Operator.of_buffer(site, (site.name,) if site.side == "input" else site.nodes)

    def _recover(self, entry: Entry, facts: TensorFacts, waiting: Sequence[Entry]) -> Tensor:
        """The bytes of an entry without values, from a pending or written one."""
        dtype = stored_dtype(known_dtype(facts.dtype))
        shape = stored_shape(facts.shape, facts.stride)
        for waiting_entry in waiting:
            if waiting_entry.digest == entry.digest and waiting_entry.stored is not None:
                return waiting_entry.stored.reshape(-1).view(torch.uint8).view(dtype).reshape(shape)
        earlier = self._earlier.get(entry.digest)
        if earlier is None:
            raise ParitasError(
                f"{entry.site.id} of step {entry.step} has no values, and no file of this dump "
                f"has digest {entry.digest!r}"
            )
        payload, before = earlier
        root = self._home if RANK.fullmatch(payload.file.partition("/")[0]) else self._root
        with (root / payload.file).open("rb") as file:
            file.seek(payload.begin)
            raw = torch.frombuffer(bytearray(file.read(payload.nbytes)), dtype=torch.uint8)
        stored = raw.view(stored_dtype(known_dtype(before.dtype))).reshape(payload.shape)
        extents = tuple(map(slice, stored_shape(before.shape, before.stride)))
        return stored[extents].contiguous().reshape(-1).view(torch.uint8).view(dtype).reshape(shape)


def _expand_stored(entry: Entry) -> Tensor:
    assert entry.stored is not None  # noqa: S101  (`_fits_format` checked it)
    assert entry.tensor is not None  # noqa: S101
    if not entry.digest:
        entry.digest = digest(entry.stored)
    return entry.stored.expand(entry.tensor.shape)


def _make_payload(entry: Entry, file: str, tensor: GeTensor) -> Payload:
    shape = () if entry.tensor is None else entry.tensor.shape
    begin, nbytes = tensor.begin, tensor.nbytes
    return Payload(file=file, key=tensor.key, begin=begin, nbytes=nbytes, shape=shape)


def call_key(entry: Entry | Record) -> tuple[object, ...]:
    """The same for entries of one call; a kernel writes several buffers."""
    site = entry.site
    what = RESULT_TYPE if _is_result(site) else site.kernel or (site.level, site.name)
    return entry.step, site.phase, site.graph, what, site.call


def _file_key(entry: Entry) -> tuple[object, ...]:
    site = entry.site
    return (RESULT_TYPE,) if _is_result(site) else (site.level, site.name, site.call)


def _is_result(site: Site) -> bool:
    """Whether it is a result of compiled code, which the engine passes to its last operator."""
    return (site.source, site.level) == ("fused", "node") and site.op != "placeholder"


def _is_given(site: Site) -> bool:
    return site.side == "input" or _is_result(site)


def _fits_format(entry: Entry) -> bool:
    """Whether the format supports it."""
    if entry.tensor is None or entry.stored is None:
        return False
    if len(entry.tensor.shape) > MOST_DIMS:
        return False
    try:
        code_of_dtype(stored_dtype(known_dtype(entry.tensor.dtype)))
    except UsageError:
        return False
    return True


def _is_reading(site: Site) -> bool:
    """Whether it is an input of a kernel; the graph says which of its operators take it."""
    return site.level == "buffer" and site.side == "input"


def _find_held_node(site: Site) -> str:
    """The node whose value it is; empty if unknown."""
    if site.level == "buffer" and site.exact and site.nodes:
        return site.nodes[-1]
    return ""


# --- Text graphs ----------------------------------------------------------------------------------

# The syntax is protobuf's text format, the fields are those of Ascend's graphs. Tools find the
# files of an operator by the attribute `_fx_tensor_name` of its outputs, and the parts of a fused
# operator by `_datadump_original_op_names`.

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_PRINTABLE = range(0x20, 0x7F)
# Well-known readers of these files look for braces in a line before they look for quotes.
_BRACES = frozenset("{}")


@dataclasses.dataclass(frozen=True)
class ValueFacts:
    """One result of an operator.

    `dtype` is torch's name without `torch.`, or "" if it is unknown or not a tensor. In `shape`, -1
    is a dynamic size.
    """

    dtype: str = ""
    shape: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class NodeFacts:
    """An operator of a graph.

    Attributes:
        op: what the node calls, for example `aten.mm.default`.
        inputs: the sources of its arguments, `mm:0` for the first result of `mm`.
        module: path of the module it belongs to.
        line: the user's line.
        call: the beginning of its file names in a dump of the captured graph; default: made from
            name and operator.
    """

    name: str
    op: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[ValueFacts, ...] = ()
    module: str = ""
    line: str = ""
    call: str = ""


@dataclasses.dataclass(frozen=True)
class FusedFacts:
    """A buffer that fused code writes.

    Attributes:
        node: how the dump names the buffer.
        buffer: its name in the fused code.
        kernel: the kernel that wrote it.
        originals: its nodes of the captured graph, in order.
    """

    node: NodeFacts
    buffer: str
    kernel: str
    originals: tuple[str, ...]


def original_graph_text(name: str, nodes: Sequence[NodeFacts]) -> str:
    """The graph as captured."""
    return _format_graph(name, ((node, _format_origin(node)) for node in nodes))


def optimized_graph_text(name: str, buffers: Sequence[FusedFacts]) -> str:
    """The fused graph: an operator for each buffer."""
    return _format_graph(
        name,
        (
            (buffer.node, (*_format_origin(buffer.node), *_format_fusion(buffer)))
            for buffer in buffers
        ),
    )


def _format_origin(node: NodeFacts) -> Iterator[str]:
    for key, value in (("module", node.module), ("line", node.line)):
        if value:
            yield from _format_attribute(key, [f"s: {_quote(value)}"])


def _format_fusion(fused_facts: FusedFacts) -> Iterator[str]:
    yield from _format_attribute("buffer", [f"s: {_quote(fused_facts.buffer)}"])
    yield from _format_attribute("kernel", [f"s: {_quote(fused_facts.kernel)}"])
    names = [f"s: {_quote(name)}" for name in fused_facts.originals]
    listed = _format_block("list", [*names, "val_type: VT_LIST_STRING"])
    yield from _format_attribute("_datadump_original_op_names", listed)


def _format_graph(name: str, nodes: Iterable[tuple[NodeFacts, Iterable[str]]]) -> str:
    lines = [f"name: {_quote(name)}"]
    for node, attributes in nodes:
        lines += _format_block("op", [*_format_head(node), *attributes, *_format_outputs(node)])
    return "\n".join(lines) + "\n"


def _format_head(node: NodeFacts) -> Iterator[str]:
    yield f"name: {_quote(node.name)}"
    yield f"type: {_quote(node.op)}"
    for source in node.inputs:
        yield f"input: {_quote(source)}"


def _format_outputs(node: NodeFacts) -> Iterator[str]:
    for position, value in enumerate(node.outputs):
        stem = f"{node.call or call_name(node.name, node.op)}.OUTPUT.{position}"
        body = [
            f"dtype: {name_of_dtype(value.dtype)}",
            *_format_block("shape", [f"dim: {size}" for size in value.shape]),
            'layout: "ND"',
            *_format_attribute("_fx_tensor_name", [f"s: {_quote(stem)}"]),
        ]
        if value.dtype:
            meaning = f"torch.{value.dtype} of {list(value.shape)}"
            body += _format_attribute("_meta", [f"s: {_quote(meaning)}"])
        yield from _format_block("output_desc", body)


def _format_attribute(key: str, value: Iterable[str]) -> list[str]:
    return _format_block("attr", [f"key: {_quote(key)}", *_format_block("value", value)])


def _format_block(name: str, body: Iterable[str]) -> list[str]:
    return [f"{name} {{", *(f"  {line}" for line in body), "}"]


def _quote(text: str) -> str:
    """A string in the text format, in ASCII."""
    pieces: list[str] = []
    for character in text:
        if character == " " and pieces and pieces[-1] == ":":
            pieces.append("\\040")
        elif character in _ESCAPES:
            pieces.append(_ESCAPES[character])
        elif ord(character) in _PRINTABLE and character not in _BRACES:
            pieces.append(character)
        else:
            pieces += [f"\\{byte:03o}" for byte in character.encode("utf-8", "surrogateescape")]
    return '"' + "".join(pieces) + '"'
