"""Torchair's tree of `.npy` files, in the place of packed ones, for tools that read only that.

::

    worldsize{W}_global_rank{r}/{model}/{step}/{name}-{op}.INPUT.{i}[.{j}].{time}.npy
    worldsize{W}_global_rank{r}/{model}/{step}/{name}-{op}.OUTPUT.{i}.{time}.npy

`model` is the graph, its backward pass a model of its own, and `eager` where there is no graph.
What one call takes and gives bears one time. A name that no file system would take is replaced by
a number, which `mapping.csv` beside it explains. The index of the dump stays what it always is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import os
import re
import shutil
from typing import TYPE_CHECKING

import torch

from paritas.dumps.dtypes import known_dtype, stored_dtype, stored_shape
from paritas.dumps.folders import TORCHAIR
from paritas.dumps.foreign.ge_names import fitting_name
from paritas.dumps.npy_files import array_of, array_of_value, read_array, tensor_of, write_array
from paritas.dumps.records import Payload
from paritas.errors import ParitasError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from paritas.dumps.mapped_files import OpenFiles
    from paritas.dumps.records import Phase, Record, Site, TensorFacts
    from paritas.dumps.writing import Entry

    _Kind = tuple[str, tuple[int, ...], tuple[int, ...]]

__all__ = ["NpyTree", "call_name", "is_of_tree", "model_name", "read_npy", "time_stamp"]

_LONGEST_NAME = 255
_SIDES = {"input": "INPUT", "output": "OUTPUT"}


@dataclasses.dataclass(frozen=True)
class _Earlier:
    """A file that holds bytes known by their digest."""

    file: str
    facts: TensorFacts


class NpyTree:
    """Writes the payloads of one rank.

    Bytes that are there already, in the same dtype and shape, become a second name of the same
    file, where the file system has hard links: the tree is whole, and the disk holds them once.
    """

    def __init__(self, root: Path, rank: int, world_size: int) -> None:
        """`root` is the folder of the dump."""
        self._root = root
        self._top = f"worldsize{world_size}_global_rank{rank}"
        self._step: int | None = None
        self._times: dict[tuple[str, str, str, str, int], str] = {}
        self._taken: set[tuple[str, str]] = set()
        self._last_time = dt.datetime.min.replace(tzinfo=dt.UTC)
        self._folders: set[str] = set()
        self._earlier: dict[str, dict[_Kind, _Earlier]] = {}

    def write(self, entry: Entry) -> Payload:
        """Write what an entry holds; one without its bytes must have had them written before."""
        if entry.step != self._step:
            self._step = entry.step
            self._times.clear()
            self._taken.clear()
        file = self._place(entry)
        if entry.tensor is None:
            array = array_of_value(entry.value or "")
            size = write_array(self._root / file, array)
            return Payload(file=file, nbytes=size, shape=array.shape)
        return self._write_tensor(file, entry, entry.tensor)

    def drop_step(self, step: int) -> None:
        """Remove the files of a step."""
        for folder in sorted(self._folders):
            if not folder.endswith(f"/{step}"):
                continue
            # Renamed first: a reader finds the whole of it, or nothing.
            leaving = self._root / f"{folder}.leaving"
            (self._root / folder).rename(leaving)
            shutil.rmtree(leaving)
            self._folders.discard(folder)
            for known in self._earlier.values():
                gone = [key for key, one in known.items() if one.file.startswith(f"{folder}/")]
                for key in gone:
                    del known[key]

    def _write_tensor(self, file: str, entry: Entry, facts: TensorFacts) -> Payload:
        path = self._root / file
        known = self._earlier.setdefault(entry.digest, {})
        # The same bytes in the same shape are other values, if they are repeated otherwise.
        kind = (facts.dtype, facts.shape, stored_shape(facts.shape, facts.stride))
        same = known.get(kind)
        if same is not None:
            # Some file systems have no links, and all have a limit to them.
            with contextlib.suppress(OSError):
                os.link(self._root / same.file, path)
                return Payload(file=file, nbytes=path.stat().st_size, shape=facts.shape)
        stored = entry.stored
        if stored is None:
            earlier = self._holder(entry)
            if not (self._root / earlier.file).exists():
                # Somebody converts the dump as it grows, and deleted what he had taken over. The
                # record says which bytes it were: by their digest he has them.
                return Payload(file=earlier.file, nbytes=0, shape=facts.shape)
            stored = self._recover(earlier, facts)
        size = write_array(path, array_of(stored, facts.shape))
        if entry.digest:
            known[kind] = _Earlier(file, facts)
        return Payload(file=file, nbytes=size, shape=facts.shape)

    def _recover(self, earlier: _Earlier, facts: TensorFacts) -> Tensor:
        """The bytes of an entry that came without, from the file of an earlier one."""
        whole = tensor_of(read_array(self._root / earlier.file), earlier.facts)
        once = whole[_first(stored_shape(earlier.facts.shape, earlier.facts.stride))].contiguous()
        dtype = stored_dtype(known_dtype(facts.dtype))
        shape = stored_shape(facts.shape, facts.stride)
        return once.reshape(-1).view(torch.uint8).view(dtype).reshape(shape)

    def _holder(self, entry: Entry) -> _Earlier:
        """The earlier file with the bytes of an entry; one that is there, if there is any."""
        found = list(self._earlier.get(entry.digest, {}).values())
        for one in found:
            if (self._root / one.file).exists():
                return one
        if found:
            return found[0]
        raise ParitasError(
            f"{entry.site.id} of step {entry.step} came without its values, and no file of this "
            f"dump holds their digest {entry.digest!r}"
        )

    def _place(self, entry: Entry) -> str:
        site = entry.site
        folder = f"{self._top}/{model_name(site.graph, site.phase)}/{entry.step}"
        if folder not in self._folders:
            (self._root / folder).mkdir(parents=True, exist_ok=True)
            self._folders.add(folder)
        name = self._file_name(site)
        if (folder, name) in self._taken:
            # The place was seen before in this call. Nothing is ever written over.
            self._times.pop(_call(site))
            name = self._file_name(site)
        self._taken.add((folder, name))
        return f"{folder}/{fitting_name(self._root / folder, name, '.npy')}"

    def _file_name(self, site: Site) -> str:
        call = call_name(_name(site), site.op or site.level)
        return f"{call}.{_SIDES[site.side]}.{_plain(site.position)}.{self._time(site)}.npy"

    def _time(self, site: Site) -> str:
        """One for all that a call takes and gives, and another for each call."""
        call = _call(site)
        if call not in self._times:
            moment = dt.datetime.now(dt.UTC)
            self._last_time = max(moment, self._last_time + dt.timedelta(microseconds=1))
            self._times[call] = time_stamp(self._last_time)
        return self._times[call]


def _name(site: Site) -> str:
    """What stands where torchair has the name of a node, which has no dots."""
    if site.level == "module":
        return site.name.replace(".", "_")
    if site.level == "op":
        module, _, op = site.name.rpartition("/")
        short = op.split(".")[1] if "." in op else op
        return f"{module}_{short}".replace(".", "_") if module else short
    if (site.source, site.level) == ("fused", "node") and site.op != "placeholder":
        return f"{site.name}.node"  # the plain name is that of the buffer with the same value
    return site.name


def _first(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(size) for size in shape)


def _call(site: Site) -> tuple[str, str, str, str, int]:
    return (site.phase, site.graph, site.level, site.name, site.call)


def read_npy(path: Path, record: Record, files: OpenFiles | None = None) -> Tensor:
    """The tensor of a record, in its own dtype and shape, bit for bit.

    Args:
        files: to map the values by, rather than to read them.
    """
    if record.tensor is None:
        raise ParitasError(f"{record.id} is no tensor: its value is {record.value}")
    try:
        return tensor_of(read_array(path, files), record.tensor)
    except ParitasError as error:
        raise ParitasError(f"{record.id} of step {record.step}: {error}") from error


def is_of_tree(name: str) -> bool:
    """Whether what bears that name at the top of a dump belongs to this layout."""
    return TORCHAIR.fullmatch(name) is not None


def call_name(name: str, op: str) -> str:
    """What the files of one call are named after."""
    return f"{_plain(name)}-{_plain(op)}"


def model_name(graph: str, phase: Phase) -> str:
    """The folder for what a graph computes; torchair's rule for what a name may not hold."""
    name = re.sub(r"[./\\ ]", "_", graph) or "eager"
    return _plain(f"{name}_backward" if phase == "backward" else name)[:_LONGEST_NAME]


def time_stamp(moment: dt.datetime) -> str:
    """Twenty digits, down to the microsecond."""
    return moment.strftime("%Y%m%d%H%M%S%f")


def _plain(name: str) -> str:
    """A name without what means something to a shell, a file system or a reader of these names."""
    return re.sub(r"[^\w.\-]", "_", name, flags=re.ASCII)
