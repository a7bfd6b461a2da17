"""The tree and the tensor files of Ascend's graph engine, in the place of packed ones.

::

    worldsize{W}_global_rank{r}/{time}/{device}/{model}/{model id}/{step}/
        {operator's type}.{operator}.{task}.{stream}.{time}

A file holds all that one call takes and gives, so values wait until their call is over. Fused code
is named as the engine names it: after all nodes that it computes, without a mark between. Old
releases had no folder of the rank, and took every folder for a part of the tree: there the index of
the dump lies beside the tree and not in it.
"""

from __future__ import annotations

import dataclasses
import shutil
from typing import TYPE_CHECKING, NamedTuple

import torch

from paritas.dumps.dtypes import digest, known_dtype, stored_dtype, stored_shape
from paritas.dumps.folders import RANK, index_home
from paritas.dumps.foreign.ge_headers import MOST_DIMS
from paritas.dumps.foreign.ge_tensors import code_of_dtype
from paritas.dumps.foreign.ge_writing import GeCall, GeTree
from paritas.dumps.msit_layout import model_name
from paritas.dumps.records import Payload
from paritas.errors import ParitasError, UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from paritas.dumps.foreign.ge_headers import GeTensor
    from paritas.dumps.records import Layout, Record, Site, TensorFacts
    from paritas.dumps.writing import Entry

__all__ = ["CallFiles", "Operator", "Place"]

FUSED_TYPE, PARTIAL_TYPE = "AutomaticBufferFusionOp", "Reformat"
GIVEN_TYPE, RESULT_TYPE = "Data", "NetOutput"
# Phase, graph and name of a site.
Place = tuple[str, str, str]


class Operator(NamedTuple):
    """What the engine would make of what is recorded under one name.

    Attributes:
        nodes: the nodes that it computes, in order.
        takes: the nodes whose values it is given, in the order of the graph.
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
        """The operator that writes a buffer of fused code; with views alone, nothing is fused.

        A buffer that holds no node's value must not be taken for one: its name is none of the
        graph's, its type that of what the engine puts in by itself.
        """
        if not site.exact or not nodes:
            return cls(PARTIAL_TYPE, f"{site.name}.part", nodes)
        is_fused = sum(node not in views for node in nodes) > 1
        kind = FUSED_TYPE if is_fused else site.op or site.level
        return cls(kind, "".join(nodes), nodes, takes)


class _Earlier(NamedTuple):
    """Where bytes lie that are known by their digest."""

    payload: Payload
    facts: TensorFacts


@dataclasses.dataclass
class _File:
    """What goes into one file; `first` says of which step and graph it is."""

    operator: Operator
    first: Entry
    inputs: list[Entry] = dataclasses.field(default_factory=list)
    outputs: list[Entry] = dataclasses.field(default_factory=list)


class CallFiles:
    """Collects the values of a call, and writes them into one file."""

    def __init__(self, root: Path, layout: Layout, rank: int, world_size: int) -> None:
        """`root` is the folder of the dump."""
        self._root, self._home = root, index_home(root, layout)
        self._tree = GeTree(root, rank=rank, world_size=world_size, has_ranks=layout == "ge")
        self._operators: dict[Place, Operator] = {}
        self._pending: list[Entry] = []
        self._earlier: dict[str, _Earlier] = {}
        self._folders: set[str] = set()

    @property
    def step(self) -> int | None:
        """The step of what waits; None where nothing does."""
        return self._pending[-1].step if self._pending else None

    def name_operators(self, operators: Mapping[Place, Operator]) -> None:
        """Say how the engine would call what is to come."""
        self._operators.update(operators)

    def is_over(self, entry: Entry) -> bool:
        """Whether an entry belongs to another call than those that wait."""
        return bool(self._pending) and _call(entry) != _call(self._pending[-1])

    def put(self, entry: Entry) -> None:
        """Have an entry wait for the others of its call."""
        self._pending.append(entry)

    def detach(self) -> None:
        """Copy what waits: its memory is used again by whoever made it."""
        for entry in self._pending:
            if entry.stored is not None:
                entry.stored = entry.stored.clone()

    def write(self) -> list[tuple[Entry, Payload | None]]:
        """Write what waits, and give it back with its place, in the order of the program.

        What the format has no dtype for has no place: it is to be kept elsewhere.

        Raises:
            OSError: a file cannot be written.
        """
        waiting, self._pending = self._pending, []
        for entry in waiting:
            if entry.stored is None and entry.tensor is not None and entry.digest:
                entry.stored = self._recovered(entry, entry.tensor, waiting)
        places: dict[int, Payload] = {}
        for file in self._files(waiting):
            # What several operators are given is read where it was found first.
            for sequence, payload in self._write_file(file).items():
                places.setdefault(sequence, payload)
        return [(entry, places.get(entry.sequence)) for entry in waiting]

    def _files(self, waiting: list[Entry]) -> list[_File]:
        """What belongs into one file each."""
        files: dict[tuple[object, ...], _File] = {}
        readings = [one for one in waiting if _is_reading(one.site)]
        for entry in waiting:
            if _fits(entry) and not _is_reading(entry.site):
                file = files.setdefault(_file(entry), _File(self._operator(entry.site), entry))
                (file.inputs if _is_given(entry.site) else file.outputs).append(entry)
        values = {_held(one.site): one for one in reversed(waiting) if _fits(one)}
        taken: set[int] = set()
        for file in files.values():
            # A kernel is one operator for each value that it writes: each is given what it takes,
            # be it from memory or from another of them.
            given = [values[name] for name in file.operator.takes if name in values and readings]
            file.inputs += given
            taken.update(one.sequence for one in given)
        for entry in readings:
            if _fits(entry) and entry.sequence not in taken:
                file = files.setdefault(_file(entry), _File(self._operator(entry.site), entry))
                file.inputs.append(entry)
        return list(files.values())

    def remember(self, records: Sequence[Record]) -> None:
        """Know where bytes are by now: they may come again without their values."""
        for record in records:
            if record.payload is not None and record.tensor is not None and record.digest:
                place = _Earlier(record.payload, record.tensor)
                self._earlier.setdefault(record.digest, place)

    def drop_step(self, step: int) -> None:
        """Remove the files of a step."""
        for folder in sorted(self._folders):
            if folder.endswith(f"/{step}"):
                shutil.rmtree(self._root / folder, ignore_errors=True)
                self._folders.discard(folder)
                gone = [
                    key
                    for key, one in self._earlier.items()
                    if one.payload.file.startswith(f"{folder}/")
                ]
                for key in gone:
                    del self._earlier[key]

    def _write_file(self, file: _File) -> dict[int, Payload]:
        """Write it; where in it the values of entries are, by their number."""
        site = file.first.site
        call = GeCall(
            step=file.first.step,
            model=model_name(site.graph, site.phase),
            op_type=file.operator.type,
            op_name=file.operator.name,
            inputs=[_written_out(entry) for entry in file.inputs],
            outputs=[_written_out(entry) for entry in file.outputs],
        )
        path, written = self._tree.write(call)
        self._folders.add(path.rpartition("/")[0])
        found = {one.key: one for one in written.tensors}
        places: dict[int, Payload] = {}
        for side, entries in (("input", file.inputs), ("output", file.outputs)):
            for at, entry in enumerate(entries):
                # The value of another operator has its place in that one's file.
                if side == "output" or _is_given(entry.site):
                    places[entry.sequence] = _placed(entry, path, found[f"{side}.{at}"])
        return places

    def _operator(self, site: Site) -> Operator:
        if _is_result(site):
            return Operator(RESULT_TYPE, RESULT_TYPE)
        if site.op == "placeholder":
            return Operator(GIVEN_TYPE, site.name)
        if site.level != "buffer":
            return Operator(site.op or site.level, site.name)
        known = self._operators.get((site.phase, site.graph, site.name))
        if known is not None:
            return known
        # Of what is read, the nodes are those that made it.
        return Operator.of_buffer(site, (site.name,) if site.side == "input" else site.nodes)

    def _recovered(self, entry: Entry, facts: TensorFacts, waiting: Sequence[Entry]) -> Tensor:
        """The bytes of an entry that came without, from one that waits too or was written."""
        dtype, shape = (
            stored_dtype(known_dtype(facts.dtype)),
            stored_shape(facts.shape, facts.stride),
        )
        for one in waiting:
            if one.digest == entry.digest and one.stored is not None:
                return one.stored.reshape(-1).view(torch.uint8).view(dtype).reshape(shape)
        found = self._earlier.get(entry.digest)
        if found is None:
            raise ParitasError(
                f"{entry.site.id} of step {entry.step} came without its values, and no file of "
                f"this dump holds their digest {entry.digest!r}"
            )
        payload, before = found
        root = self._home if RANK.fullmatch(payload.file.partition("/")[0]) else self._root
        with (root / payload.file).open("rb") as file:
            file.seek(payload.begin)
            raw = torch.frombuffer(bytearray(file.read(payload.nbytes)), dtype=torch.uint8)
        whole = raw.view(stored_dtype(known_dtype(before.dtype))).reshape(payload.shape)
        kept = tuple(map(slice, stored_shape(before.shape, before.stride)))
        return whole[kept].contiguous().reshape(-1).view(torch.uint8).view(dtype).reshape(shape)


def _written_out(entry: Entry) -> Tensor:
    assert entry.stored is not None  # noqa: S101  (`_fits` has seen to it)
    assert entry.tensor is not None  # noqa: S101
    if not entry.digest:
        entry.digest = digest(entry.stored)
    return entry.stored.expand(entry.tensor.shape)


def _placed(entry: Entry, file: str, tensor: GeTensor) -> Payload:
    shape = () if entry.tensor is None else entry.tensor.shape
    begin, nbytes = tensor.begin, tensor.nbytes
    return Payload(file=file, key=tensor.key, begin=begin, nbytes=nbytes, shape=shape)


def _call(entry: Entry) -> tuple[object, ...]:
    """The same for what comes together; a kernel writes several buffers."""
    site = entry.site
    what = RESULT_TYPE if _is_result(site) else site.kernel or (site.level, site.name)
    return entry.step, site.phase, site.graph, what, site.call


def _file(entry: Entry) -> tuple[object, ...]:
    site = entry.site
    return (RESULT_TYPE,) if _is_result(site) else (site.level, site.name, site.call)


def _is_result(site: Site) -> bool:
    """Whether it is what compiled code gives back, which the engine hands to its last operator."""
    return (site.source, site.level) == ("fused", "node") and site.op != "placeholder"


def _is_given(site: Site) -> bool:
    return site.side == "input" or _is_result(site)


def _fits(entry: Entry) -> bool:
    """Whether the format can hold it."""
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
    """Whether it is what a kernel reads: which of its operators take it, the graph says."""
    return site.level == "buffer" and site.side == "input"


def _held(site: Site) -> str:
    """The node whose value it is; empty where that is not known."""
    if site.level == "buffer" and site.exact and site.nodes:
        return site.nodes[-1]
    return ""
