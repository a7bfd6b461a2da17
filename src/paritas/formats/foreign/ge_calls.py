"""Write a dump of paritas in the layout of Ascend's graph engine: one file per call."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from paritas.core.errors import ParitasError, UsageError
from paritas.formats.files.records import RANK, Payload, index_home
from paritas.formats.files.tensor_bytes import digest, known_dtype, stored_dtype, stored_shape
from paritas.formats.foreign.ge_files import MOST_DIMS
from paritas.formats.foreign.ge_tensors import code_of_dtype
from paritas.formats.foreign.ge_writing import GeTree
from paritas.formats.foreign.npy_tree import model_name

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor

    from paritas.formats.files.records import Entry, Layout, Record, Site, TensorFacts
    from paritas.formats.foreign.ge_files import GeTensor


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


def call_key(entry: Entry | Record) -> tuple[object, ...]:
    """The same for entries of one call; a kernel writes several buffers."""
    site = entry.site
    what = RESULT_TYPE if _is_result(site) else site.kernel or (site.level, site.name)
    return entry.step, site.phase, site.graph, what, site.call


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
