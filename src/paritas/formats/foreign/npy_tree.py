"""torchair's tree of `.npy` files, one per value of a node: written for msit, and read."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import os
import re
import shutil
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import torch

from paritas.core.errors import ParitasError, UsageError
from paritas.core.file_trees import glimpse, natural_key
from paritas.formats.files.npy_files import (
    array_place,
    object_text,
    python_text,
    read_npy_header,
    summary_of,
)
from paritas.formats.files.records import OLD_FX_TOP, TORCHAIR, Payload, Site
from paritas.formats.files.tensor_bytes import known_dtype, stored_dtype, stored_shape
from paritas.formats.files.torch_files import only_tensor
from paritas.formats.foreign.foreign_dump import Gathered
from paritas.formats.foreign.ge_files import fitting_name
from paritas.formats.foreign.npy_files import (
    array_of,
    array_of_value,
    read_array,
    tensor_of,
    write_array,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor

    from paritas.core.file_trees import FoundFile, Problems
    from paritas.formats.files.records import Entry, Level, Phase, Record, Side, Source, TensorFacts
    from paritas.formats.files.tensor_bytes import OpenFiles
    from paritas.formats.foreign.foreign_dump import ForeignDump


# --- Writing the tree -----------------------------------------------------------------------------

# ::
#
#     worldsize{W}_global_rank{r}/{model}/{step}/{name}-{op}.INPUT.{i}[.{j}].{time}.npy
#     worldsize{W}_global_rank{r}/{model}/{step}/{name}-{op}.OUTPUT.{i}.{time}.npy
#
# and up to torchair 7.1.0, without ranks::
#
#     data_dump/{step + 1}/gm_{time of the model}_dump/{name}-{op}.INPUT.{i}[.{j}].{time}.npy
#
# `model` is the graph, with its backward pass as a separate model, or `eager` without a graph. All
# files of one call have the same time. A name that is too long is replaced by a number, which
# `mapping.csv` in the same folder explains. The index of the dump is the usual one.

if TYPE_CHECKING:
    _Kind = tuple[str, tuple[int, ...], tuple[int, ...]]


_LONGEST_FILE_NAME = 255


@dataclasses.dataclass(frozen=True)
class _EarlierFile:
    """A file with bytes of a known digest."""

    file: str
    facts: TensorFacts


class NpyTree:
    """Writes the payloads of one rank.

    Bytes that are already stored, in the same dtype and shape, get a hard link where the file
    system supports it: the tree is complete, and the disk holds them once.
    """

    def __init__(self, root: Path, rank: int, world_size: int, *, has_ranks: bool = True) -> None:
        """`root` is the folder of the dump; without ranks it is torchair's tree up to 7.1.0."""
        if not has_ranks and world_size > 1:
            raise UsageError(
                f'layout="msit-7.1.0" has no place for {world_size} ranks: use layout="msit"'
            )
        self._root = root
        self._has_ranks = has_ranks
        self._model_times: dict[str, str] = {}
        self._top = f"worldsize{world_size}_global_rank{rank}"
        self._step: int | None = None
        self._times: dict[tuple[str, str, str, str, int], str] = {}
        self._taken: set[tuple[str, str]] = set()
        self._last_time = dt.datetime.min.replace(tzinfo=dt.UTC)
        self._folders: dict[str, int] = {}  # with their steps
        self._earlier: dict[str, dict[_Kind, _EarlierFile]] = {}

    def write(self, entry: Entry) -> Payload:
        """Write an entry; one without bytes must have been written before."""
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
            if self._folders[folder] != step:
                continue
            # Renamed first: a reader finds all of it or nothing.
            leaving = self._root / f"{folder}.leaving"
            (self._root / folder).rename(leaving)
            shutil.rmtree(leaving)
            del self._folders[folder]
            for earlier in self._earlier.values():
                gone = [
                    key
                    for key, file_facts in earlier.items()
                    if file_facts.file.startswith(f"{folder}/")
                ]
                for key in gone:
                    del earlier[key]

    def _write_tensor(self, file: str, entry: Entry, facts: TensorFacts) -> Payload:
        path = self._root / file
        by_kind = self._earlier.setdefault(entry.digest, {})
        # The same bytes in the same shape can be other values, if other dimensions are repeated.
        kind = (facts.dtype, facts.shape, stored_shape(facts.shape, facts.stride))
        same = by_kind.get(kind)
        if same is not None:
            # Some file systems have no links, and all limit their number.
            with contextlib.suppress(OSError):
                os.link(self._root / same.file, path)
                return Payload(file=file, nbytes=path.stat().st_size, shape=facts.shape)
        stored = entry.stored
        if stored is None:
            earlier = self._find_earlier(entry)
            if not (self._root / earlier.file).exists():
                # A converter that follows the growing dump has taken the file over and deleted it.
                # It finds these bytes by their digest.
                return Payload(file=earlier.file, nbytes=0, shape=facts.shape)
            stored = self._recover(earlier, facts)
        size = write_array(path, array_of(stored, facts.shape))
        if entry.digest:
            by_kind[kind] = _EarlierFile(file, facts)
        return Payload(file=file, nbytes=size, shape=facts.shape)

    def _recover(self, earlier: _EarlierFile, facts: TensorFacts) -> Tensor:
        """The bytes of an entry without values, from an earlier file."""
        tensor = tensor_of(read_array(self._root / earlier.file), earlier.facts)
        extents = tuple(map(slice, stored_shape(earlier.facts.shape, earlier.facts.stride)))
        once = tensor[extents].contiguous()
        dtype = stored_dtype(known_dtype(facts.dtype))
        shape = stored_shape(facts.shape, facts.stride)
        return once.reshape(-1).view(torch.uint8).view(dtype).reshape(shape)

    def _find_earlier(self, entry: Entry) -> _EarlierFile:
        """An earlier file with the bytes of an entry, preferably one that still exists."""
        earlier = list(self._earlier.get(entry.digest, {}).values())
        for waiting_entry in earlier:
            if (self._root / waiting_entry.file).exists():
                return waiting_entry
        if earlier:
            return earlier[0]
        raise ParitasError(
            f"{entry.site.id} of step {entry.step} has no values, and no file of this dump has "
            f"digest {entry.digest!r}"
        )

    def _place(self, entry: Entry) -> str:
        site = entry.site
        folder = self._folder(model_name(site.graph, site.phase), entry.step)
        if folder not in self._folders:
            (self._root / folder).mkdir(parents=True, exist_ok=True)
            self._folders[folder] = entry.step
        name = self._file_name(site)
        if (folder, name) in self._taken:
            # This place was already written in this call. Nothing is ever overwritten.
            self._times.pop(_call_key(site))
            name = self._file_name(site)
        self._taken.add((folder, name))
        return f"{folder}/{fitting_name(self._root / folder, name, '.npy')}"

    def _folder(self, model: str, step: int) -> str:
        if self._has_ranks:
            return f"{self._top}/{model}/{step}"
        if model not in self._model_times:
            self._model_times[model] = self._next_time()
        return f"{OLD_FX_TOP}/{step + 1}/gm_{self._model_times[model]}_dump"

    def _file_name(self, site: Site) -> str:
        call = call_name(_name_node(site), site.op or site.level)
        return f"{call}.{site.side.upper()}.{_plain_name(site.position)}.{self._time(site)}.npy"

    def _time(self, site: Site) -> str:
        """The same for all inputs and outputs of a call, and different for each call."""
        call = _call_key(site)
        if call not in self._times:
            self._times[call] = self._next_time()
        return self._times[call]

    def _next_time(self) -> str:
        """The time, and later than the last one."""
        moment = dt.datetime.now(dt.UTC)
        self._last_time = max(moment, self._last_time + dt.timedelta(microseconds=1))
        return time_stamp(self._last_time)


def _name_node(site: Site) -> str:
    """The part of the file name where torchair has the name of a node, without dots."""
    if site.level == "module":
        return site.name.replace(".", "_")
    if site.level == "op":
        module, _, op = site.name.rpartition("/")
        short = op.split(".")[1] if "." in op else op
        return f"{module}_{short}".replace(".", "_") if module else short
    if (site.source, site.level) == ("fused", "node") and site.op != "placeholder":
        return f"{site.name}.node"  # the buffer with the same value has the plain name
    return site.name


def _call_key(site: Site) -> tuple[str, str, str, str, int]:
    return (site.phase, site.graph, site.level, site.name, site.call)


def read_npy(path: Path, record: Record, files: OpenFiles | None = None) -> Tensor:
    """The tensor of a record, in its dtype and shape, bit for bit; with `files`, mapped."""
    if record.tensor is None:
        raise ParitasError(f"it is not a tensor: its value is {record.value}")
    return tensor_of(read_array(path, files), record.tensor)


def is_of_tree(name: str) -> bool:
    """Whether a name at the top of a dump belongs to this layout."""
    return TORCHAIR.fullmatch(name) is not None


def call_name(name: str, op: str) -> str:
    """The beginning of the file names of one call."""
    return f"{_plain_name(name)}-{_plain_name(op)}"


def model_name(graph: str, phase: Phase) -> str:
    """The folder of a graph's values; torchair's rule for forbidden characters."""
    name = re.sub(r"[./\\ ]", "_", graph) or "eager"
    return _plain_name(f"{name}_backward" if phase == "backward" else name)[:_LONGEST_FILE_NAME]


def time_stamp(moment: dt.datetime) -> str:
    """Twenty digits, down to the microsecond."""
    return moment.strftime("%Y%m%d%H%M%S%f")


def _plain_name(name: str) -> str:
    """A name without characters that are special to a shell, a file system or readers of names."""
    return re.sub(r"[^\w.\-]", "_", name, flags=re.ASCII)


# --- Reading the tree -----------------------------------------------------------------------------

# Three generations of the layout, with or without the folder `msit_fx_dump` or `msprobe_fx_dump`::
#
#     worldsize{W}_global_rank{r}/{model}/{token}/{file}.npy
#     data_dump/{token + 1}/gm_{time}_dump/{file}.npy
#     gm_{time}_dump/data_dump/{token + 1}/{file}.npy
#
# A file is `{node}-{target}.INPUT.{i}[.{j}].{time}.npy` or `….OUTPUT.{i}.{time}.npy`; all files of
# one call have the same time. A name that is too long is a number, which `mapping.csv` explains. A
# file `…_min_max.npy` has the minimum and maximum instead of all values. What torchair records of a
# graph captured on the device, `worldsize…/{node}_device_{d}_{count}.pt`, is also read; its count
# is the step.
#
# A Python number and a tensor without dimensions look the same in these files: an input with a
# dtype that numpy gives to Python numbers counts as a number, and can be read as a tensor.

MAPPING = "mapping.csv"
_LARGEST_MAPPING = 64 << 20
_LONGEST_MAPPED_NAME = 4096
_FILE = re.compile(
    r"(?P<node>[^-]+)-(?P<op>.*)\.(?P<side>INPUT|OUTPUT)\.(?P<position>\w+(?:\.\w+)*)"
    r"\.(?P<time>\d{10,20})(?P<summary>_min_max)?\.npy"
)
_DEVICE_FILE = re.compile(r"(?P<node>.+)_device_(?P<device>\d+)_(?P<count>\d{1,9})\.pt")
_RANK = re.compile(r"worldsize(\d{1,6})_global_rank(\d{1,6})")
_MODULE = re.compile(r"gm_(\d{1,20})_dump")
_TOPS = ("msit_fx_dump", "msprobe_fx_dump", OLD_FX_TOP)
_NUMBER = re.compile(r"\d{1,9}")
_SUMMARY = "_min_max.npy"


@dataclasses.dataclass(frozen=True)
class _FolderFacts:
    """Rank, step and graph of a file, from its folders."""

    rank: int
    step: int
    graph: str


@dataclasses.dataclass(frozen=True)
class _TreeFile:
    """A file, and the information in its name and folders."""

    file: FoundFile
    where: _FolderFacts
    node: str
    op: str
    side: Side
    position: str
    time: int
    is_summary: bool = False

    @property
    def call(self) -> tuple[_FolderFacts, str, str, int]:
        """The same for all files of one call of a node."""
        return self.where, self.node, self.file.name.rpartition("/")[0], self.time

    @property
    def order(self) -> tuple[object, ...]:
        """A sort key for program order."""
        side = 0 if self.side == "input" else 1
        where = (self.where.rank, self.where.step, self.time, self.where.graph, self.node)
        return (*where, side, natural_key(self.position), self.file.name)


def looks_like(path: Path) -> bool:
    """Whether files have torchair's names for the nodes of a graph."""
    for name in glimpse(path):
        *folders, file_name = PurePosixPath(name).parts
        if _FILE.fullmatch(file_name):
            return True
        in_rank = any(_RANK.fullmatch(folder) for folder in (*folders, path.name))
        if in_rank and (_DEVICE_FILE.fullmatch(file_name) or file_name.endswith(".npy")):
            return True
    return False


def open_dump(path: Path) -> ForeignDump:
    """Open such a tree, or a part of one."""
    gathered = Gathered(path, "fx")
    files = gathered.folder.find(
        lambda name: name.endswith((".npy", ".pt", MAPPING)), gathered.problems
    )
    names = _mapped_names(gathered, files)
    times = sorted(
        {match[1] for file in files for match in map(_MODULE.fullmatch, file.parts) if match},
        key=int,
    )
    modules = {time: f"gm_{position}" for position, time in enumerate(times)}
    above = path.resolve().parts[-4:] if path.is_dir() else ()
    items: list[_TreeFile] = []
    for file in files:
        if file.parts[-1] == MAPPING:
            continue
        where = _parse_folders(above, file, modules, gathered)
        items.append(
            _parse_file(file, names.get(file.name, file.parts[-1]), where, gathered.problems)
        )
    _add_files(gathered, _without_summaries_of_whole(items))
    return gathered.dump()


def _mapped_names(gathered: Gathered, files: list[FoundFile]) -> dict[str, str]:
    """The names of files that have numbers for names, by path."""
    names: dict[str, str] = {}
    problems = gathered.problems
    for file in files:
        if file.parts[-1] != MAPPING:
            continue
        if file.size > _LARGEST_MAPPING:
            problems.add(f"{file.name} has {file.size} bytes, too many for a list of names")
            continue
        folder = file.name.removesuffix(MAPPING)
        with gathered.folder.locate(file.name).open("rb") as opened:
            for line in opened.read(file.size).splitlines():
                short, comma, full = line.decode("utf-8", "replace").strip().partition(",")
                if not comma or len(full) > _LONGEST_MAPPED_NAME:
                    problems.add(f"{file.name} has a line without a name: {short[:80]!r}")
                    continue
                for ending in (".npy", _SUMMARY):
                    key = f"{folder}{short.strip().removesuffix('.npy')}{ending}"
                    names[key] = f"{full.strip().removesuffix('.npy')}{ending}"
    return names


def _parse_folders(
    above: tuple[str, ...], file: FoundFile, modules: dict[str, str], gathered: Gathered
) -> _FolderFacts:
    """Rank, step and graph from the folders, including those above the given one."""
    folders = [*above, *file.parts[:-1]]
    rank = 0
    step, graph = _model_and_token([name for name in file.parts[:-1] if name not in _TOPS])
    for position, folder in enumerate(folders):
        if match := _RANK.fullmatch(folder):
            gathered.world_size = max(gathered.world_size, int(match[1]))
            rank = int(match[2])
            step, graph = _model_and_token(folders[position + 1 :])
        elif match := _MODULE.fullmatch(folder):
            graph = modules.get(match[1], "gm_0")
        elif folder == OLD_FX_TOP:
            following = folders[position + 1 :][:1]
            # The folder of a token has a number one higher.
            if following and _NUMBER.fullmatch(following[0]):
                step = max(int(following[0]) - 1, 0)
    return _FolderFacts(rank, step, graph)


def _model_and_token(folders: list[str]) -> tuple[int, str]:
    if folders and _NUMBER.fullmatch(folders[-1]):
        return int(folders[-1]), "/".join(folders[:-1])
    return 0, "/".join(folders)


def _parse_file(file: FoundFile, name: str, where: _FolderFacts, problems: Problems) -> _TreeFile:
    if match := _FILE.fullmatch(name):
        side: Side = "input" if match["side"] == "INPUT" else "output"
        is_summary = match["summary"] is not None
        time = int(match["time"])
        return _TreeFile(
            file, where, match["node"], match["op"], side, match["position"], time, is_summary
        )
    if match := _DEVICE_FILE.fullmatch(name):
        there = dataclasses.replace(where, step=int(match["count"]))
        return _TreeFile(file, there, match["node"], "", "output", "0", 0)
    text = f"{file.name} is not named after a node of a graph; its own name is used"
    problems.add(text, is_loss=False)
    return _TreeFile(file, where, PurePosixPath(name).stem, "", "output", "0", 0)


def _without_summaries_of_whole(items: list[_TreeFile]) -> list[_TreeFile]:
    """Drop the summary of a tensor that is also there as a whole."""
    whole_values = {(*item.call, item.side, item.position) for item in items if not item.is_summary}
    return [
        item
        for item in items
        if not item.is_summary or (*item.call, item.side, item.position) not in whole_values
    ]


def _add_files(gathered: Gathered, items: Iterable[_TreeFile]) -> None:
    calls: dict[tuple[_FolderFacts, str], dict[tuple[object, ...], int]] = {}
    for item in sorted(items, key=lambda entry: entry.order):
        numbers = calls.setdefault((item.where, item.node), {})
        number = numbers.setdefault(item.call, len(numbers))
        try:
            _add_file(gathered, item, _make_site(item, number))
        except (UsageError, OSError) as error:
            where = item.where
            gathered.add_unreadable(
                where.step, where.rank, _make_site(item, number), item.file, str(error)
            )


def _make_site(item: _TreeFile, call: int) -> Site:
    graph = item.where.graph
    is_backward = graph.endswith("_backward")
    source: Source = "fx"
    level: Level = "node"
    if graph.removesuffix("_backward") == "eager":
        source, level = "eager", "op" if "." in item.op else "module"
    elif not item.op and not item.file.name.endswith(".pt"):
        source, level = "file", "tensor"
    return Site(
        source=source,
        level=level,
        name=item.node,
        phase="backward" if is_backward else "forward",
        side=item.side,
        position=item.position,
        op=item.op,
        graph="" if source == "eager" else graph.removesuffix("_backward"),
        call=call,
    )


def _add_file(gathered: Gathered, item: _TreeFile, site: Site) -> None:
    step, rank, file = item.where.step, item.where.rank, item.file
    path = gathered.folder.locate(file.name)
    if file.name.endswith(".pt"):
        gathered.add_tensor(step, rank, site, only_tensor(path, file.name))
        return
    with path.open("rb") as opened:
        header = read_npy_header(opened)
        if header.kind in "OUS":
            gathered.add_text(step, rank, site, object_text(opened, header, file.size), file)
            return
        position = array_place(file.name, header, file.size)
        if item.is_summary:
            gathered.add_statistics(step, rank, site, summary_of(path, position), position.dtype)
            return
        text = python_text(opened, header) if site.side == "input" else None
    if text is None:
        gathered.add_tensor(step, rank, site, position)
    else:
        gathered.add_value(step, rank, site, text, position)
