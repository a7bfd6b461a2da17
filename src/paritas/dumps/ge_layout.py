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

import shutil
from typing import TYPE_CHECKING, NamedTuple

import torch

from paritas.dumps.dtypes import digest, known_dtype, stored_dtype, stored_shape
from paritas.dumps.foreign.ge_headers import MOST_DIMS
from paritas.dumps.foreign.ge_tensors import code_of_dtype
from paritas.dumps.foreign.ge_writing import GeCall, GeTree
from paritas.dumps.msit_layout import model_name
from paritas.dumps.records import Payload
from paritas.errors import ParitasError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from paritas.dumps.foreign.ge_headers import GeTensor
    from paritas.dumps.records import Layout, Site, TensorFacts
    from paritas.dumps.writing import Entry

__all__ = ["CallFiles", "Operator", "Place", "fused_name"]

FUSED_TYPE, PARTIAL_TYPE = "AutomaticBufferFusionOp", "Reformat"
GIVEN_TYPE, RESULT_TYPE = "Data", "NetOutput"
# Phase, graph and name of a site.
Place = tuple[str, str, str]


class Operator(NamedTuple):
    """What the engine would call what is recorded under one name.

    Attributes:
        takes: the nodes whose values it is given, in the order of the graph.
    """

    type: str
    name: str
    takes: tuple[str, ...] = ()


class _Earlier(NamedTuple):
    """Where bytes lie that are known by their digest."""

    payload: Payload
    facts: TensorFacts


class CallFiles:
    """Collects the values of a call, and writes them into one file."""

    def __init__(self, root: Path, layout: Layout, rank: int, world_size: int) -> None:
        """`root` is the folder of the dump."""
        self._root = root
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
        files: dict[tuple[object, ...], list[Entry]] = {}
        for entry in waiting:
            files.setdefault(_file(entry), []).append(entry)
        placed = [one for entries in files.values() for one in self._write_file(entries)]
        return sorted(placed, key=lambda found: found[0].sequence)

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

    def _write_file(self, entries: list[Entry]) -> list[tuple[Entry, Payload | None]]:
        operator = self._operator(entries)
        fitting = [entry for entry in entries if _fits(entry)]
        rest: list[tuple[Entry, Payload | None]] = [
            (entry, None) for entry in entries if not _fits(entry)
        ]
        if not fitting:
            return rest
        inputs = _in_order([one for one in fitting if _is_given(one.site)], operator.takes)
        outputs = [one for one in fitting if not _is_given(one.site)]
        site = entries[0].site
        call = GeCall(
            step=entries[0].step,
            model=model_name(site.graph, site.phase),
            op_type=operator.type,
            op_name=operator.name,
            inputs=[self._values(entry) for entry in inputs],
            outputs=[self._values(entry) for entry in outputs],
        )
        file, written = self._tree.write(call)
        self._folders.add(file.rpartition("/")[0])
        found = {one.key: one for one in written.tensors}
        named = [(f"input.{at}", entry) for at, entry in enumerate(inputs)]
        named += [(f"output.{at}", entry) for at, entry in enumerate(outputs)]
        return [*rest, *(self._placed(entry, file, found[key]) for key, entry in named)]

    def _placed(self, entry: Entry, file: str, tensor: GeTensor) -> tuple[Entry, Payload]:
        facts = entry.tensor
        assert facts is not None  # noqa: S101  (`_fits` has seen to it)
        begin, nbytes = tensor.begin, tensor.nbytes
        payload = Payload(file=file, key=tensor.key, begin=begin, nbytes=nbytes, shape=facts.shape)
        if not entry.digest and entry.stored is not None:
            entry.digest = digest(entry.stored)
        self._earlier.setdefault(entry.digest, _Earlier(payload, facts))
        return entry, payload

    def _operator(self, entries: list[Entry]) -> Operator:
        site = entries[0].site
        if _is_result(site):
            return Operator(RESULT_TYPE, RESULT_TYPE)
        if site.op == "placeholder":
            return Operator(GIVEN_TYPE, site.name)
        known = self._operators.get((site.phase, site.graph, site.name))
        if known is not None and site.level == "buffer":
            return known
        results = [one.site for one in entries if one.site.side == "output"]
        if site.level == "buffer" and results:
            return Operator(*fused_name(results[0]))
        return Operator(site.op or site.level, site.name)

    def _values(self, entry: Entry) -> Tensor:
        facts = entry.tensor
        assert facts is not None  # noqa: S101
        if entry.stored is not None:
            return entry.stored.expand(facts.shape)
        found = self._earlier.get(entry.digest)
        if found is None:
            raise ParitasError(
                f"{entry.site.id} of step {entry.step} came without its values, and no file of "
                f"this dump holds their digest {entry.digest!r}"
            )
        payload, before = found
        with (self._root / payload.file).open("rb") as file:
            file.seek(payload.begin)
            raw = torch.frombuffer(bytearray(file.read(payload.nbytes)), dtype=torch.uint8)
        whole = raw.view(stored_dtype(known_dtype(before.dtype))).reshape(payload.shape)
        once = whole[tuple(map(slice, stored_shape(before.shape, before.stride)))].contiguous()
        dtype = stored_dtype(known_dtype(facts.dtype))
        shape = stored_shape(facts.shape, facts.stride)
        return once.reshape(-1).view(torch.uint8).view(dtype).reshape(shape).expand(facts.shape)


def fused_name(site: Site) -> tuple[str, str]:
    """Type and name of the operator that writes a buffer of fused code.

    A buffer that holds no node's value must not be taken for one: its name is none of the graph's,
    its type that of what the engine puts in by itself.
    """
    if not site.exact or not site.nodes:
        return PARTIAL_TYPE, f"{site.name}.part"
    if len(site.nodes) > 1:
        return FUSED_TYPE, "".join(site.nodes)
    return site.op or site.level, site.nodes[0]


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
    if entry.tensor is None or (entry.stored is None and not entry.digest):
        return False
    if len(entry.tensor.shape) > MOST_DIMS:
        return False
    try:
        code_of_dtype(stored_dtype(known_dtype(entry.tensor.dtype)))
    except UsageError:
        return False
    return True


def _in_order(inputs: list[Entry], takes: tuple[str, ...]) -> list[Entry]:
    """What a kernel reads, as the graph has it; what is not known there comes last."""
    places = {name: at for at, name in enumerate(takes)}
    return sorted(inputs, key=lambda one: places.get(_made_by(one.site), len(places)))


def _made_by(site: Site) -> str:
    return site.nodes[-1] if site.nodes and site.exact else ""
