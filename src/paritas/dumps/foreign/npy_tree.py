"""Trees of `.npy` files that torchair's graph interpreter leaves, node by node.

Three generations of the layout, with or without the folder `msit_fx_dump` or `msprobe_fx_dump`::

    worldsize{W}_global_rank{r}/{model}/{token}/{file}.npy
    data_dump/{token + 1}/gm_{time}_dump/{file}.npy
    gm_{time}_dump/data_dump/{token + 1}/{file}.npy

A file is `{node}-{target}.INPUT.{i}[.{j}].{time}.npy` or `….OUTPUT.{i}.{time}.npy`; all of one call
bear one time. A name that was too long is a number, which `mapping.csv` beside it explains. A file
`…_min_max.npy` has the least and the greatest value in the place of all. What torchair records of a
graph that it captured on the device, `worldsize…/{node}_device_{d}_{count}.pt`, is read too; its
count is taken for the step.

A number of Python's own and a tensor without dimensions look alike in these files: an input of one
of the dtypes that numpy gives to Python's numbers is taken for a number, and can be read as tensor.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from paritas.dumps.foreign.array_values import object_text, python_text, summary_of
from paritas.dumps.foreign.finding import glimpse, natural_key
from paritas.dumps.foreign.gathering import Gathered
from paritas.dumps.foreign.npy_headers import array_place, read_header
from paritas.dumps.foreign.torch_files import only_tensor
from paritas.dumps.records import Site
from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from paritas.dumps.foreign.dump import ForeignDump
    from paritas.dumps.foreign.finding import Found, Problems
    from paritas.dumps.records import Level, Side, Source

__all__ = ["looks_like", "open_dump"]

MAPPING = "mapping.csv"
_LARGEST_MAPPING = 64 << 20
_LONGEST_NAME = 4096
_FILE = re.compile(
    r"(?P<node>[^-]+)-(?P<op>.*)\.(?P<side>INPUT|OUTPUT)\.(?P<position>\w+(?:\.\w+)*)"
    r"\.(?P<time>\d{10,20})(?P<summary>_min_max)?\.npy"
)
_DEVICE_FILE = re.compile(r"(?P<node>.+)_device_(?P<device>\d+)_(?P<count>\d{1,9})\.pt")
_RANK = re.compile(r"worldsize(\d{1,6})_global_rank(\d{1,6})")
_MODULE = re.compile(r"gm_(\d{1,20})_dump")
_TOPS = ("msit_fx_dump", "msprobe_fx_dump", "data_dump")
_NUMBER = re.compile(r"\d{1,9}")
_SUMMARY = "_min_max.npy"


@dataclasses.dataclass(frozen=True)
class _Where:
    """What the folders of a file say."""

    rank: int
    step: int
    graph: str


@dataclasses.dataclass(frozen=True)
class _Item:
    """A file, and what its name and folders say."""

    file: Found
    where: _Where
    node: str
    op: str
    side: Side
    position: str
    time: int
    is_summary: bool = False

    @property
    def call(self) -> tuple[_Where, str, str, int]:
        """The same for all files of one call of a node."""
        return self.where, self.node, self.file.name.rpartition("/")[0], self.time

    @property
    def order(self) -> tuple[object, ...]:
        """By this, they are in the order of the program."""
        side = 0 if self.side == "input" else 1
        where = (self.where.rank, self.where.step, self.time, self.where.graph, self.node)
        return (*where, side, natural_key(self.position), self.file.name)


def looks_like(path: Path) -> bool:
    """Whether files are named as torchair names those of a graph's nodes."""
    for name in glimpse(path):
        *folders, own = PurePosixPath(name).parts
        if _FILE.fullmatch(own):
            return True
        in_rank = any(_RANK.fullmatch(folder) for folder in (*folders, path.name))
        if in_rank and (_DEVICE_FILE.fullmatch(own) or own.endswith(".npy")):
            return True
    return False


def open_dump(path: Path) -> ForeignDump:
    """Open such a tree, or a part of one.

    Raises:
        UsageError: there is nothing to read.
    """
    gathered = Gathered(path, "fx")
    found = gathered.folder.find(
        lambda name: name.endswith((".npy", ".pt", MAPPING)), gathered.problems
    )
    names = _mapped_names(gathered, found)
    times = sorted(
        {match[1] for file in found for match in map(_MODULE.fullmatch, file.parts) if match},
        key=int,
    )
    modules = {time: f"gm_{place}" for place, time in enumerate(times)}
    above = path.resolve().parts[-4:] if path.is_dir() else ()
    items: list[_Item] = []
    for file in found:
        if file.parts[-1] == MAPPING:
            continue
        where = _where(above, file, modules, gathered)
        items.append(_item(file, names.get(file.name, file.parts[-1]), where, gathered.problems))
    _add_all(gathered, _without_summaries_of_whole(items))
    return gathered.dump()


def _mapped_names(gathered: Gathered, files: list[Found]) -> dict[str, str]:
    """What files with numbers for names are called, by their paths."""
    names: dict[str, str] = {}
    problems = gathered.problems
    for file in files:
        if file.parts[-1] != MAPPING:
            continue
        if file.size > _LARGEST_MAPPING:
            problems.add(f"{file.name} has {file.size} bytes: no list of names")
            continue
        folder = file.name.removesuffix(MAPPING)
        with gathered.folder.locate(file.name).open("rb") as opened:
            for line in opened.read(file.size).splitlines():
                short, comma, full = line.decode("utf-8", "replace").strip().partition(",")
                if not comma or len(full) > _LONGEST_NAME:
                    problems.add(f"{file.name} has a line that names nothing: {short[:80]!r}")
                    continue
                for ending in (".npy", _SUMMARY):
                    key = f"{folder}{short.strip().removesuffix('.npy')}{ending}"
                    names[key] = f"{full.strip().removesuffix('.npy')}{ending}"
    return names


def _where(
    above: tuple[str, ...], file: Found, modules: dict[str, str], gathered: Gathered
) -> _Where:
    """Rank, step and graph from the folders; those above the given one count, too."""
    folders = [*above, *file.parts[:-1]]
    rank = 0
    step, graph = _model_and_token([name for name in file.parts[:-1] if name not in _TOPS])
    for place, folder in enumerate(folders):
        if match := _RANK.fullmatch(folder):
            gathered.world_size = max(gathered.world_size, int(match[1]))
            rank = int(match[2])
            step, graph = _model_and_token(folders[place + 1 :])
        elif match := _MODULE.fullmatch(folder):
            graph = modules.get(match[1], "gm_0")
        elif folder == "data_dump":
            following = folders[place + 1 :][:1]
            # The token's folder is named one higher than the token.
            if following and _NUMBER.fullmatch(following[0]):
                step = max(int(following[0]) - 1, 0)
    return _Where(rank, step, graph)


def _model_and_token(folders: list[str]) -> tuple[int, str]:
    if folders and _NUMBER.fullmatch(folders[-1]):
        return int(folders[-1]), "/".join(folders[:-1])
    return 0, "/".join(folders)


def _item(file: Found, name: str, where: _Where, problems: Problems) -> _Item:
    if match := _FILE.fullmatch(name):
        side: Side = "input" if match["side"] == "INPUT" else "output"
        is_summary = match["summary"] is not None
        time = int(match["time"])
        return _Item(
            file, where, match["node"], match["op"], side, match["position"], time, is_summary
        )
    if match := _DEVICE_FILE.fullmatch(name):
        there = dataclasses.replace(where, step=int(match["count"]))
        return _Item(file, there, match["node"], "", "output", "0", 0)
    problems.add(f"{file.name} is not named after a node of a graph; it goes by its own name")
    return _Item(file, where, PurePosixPath(name).stem, "", "output", "0", 0)


def _without_summaries_of_whole(items: list[_Item]) -> list[_Item]:
    """Where a tensor was to be replaced by its summary and was not yet, the whole is taken."""
    whole = {(*item.call, item.side, item.position) for item in items if not item.is_summary}
    return [
        item
        for item in items
        if not item.is_summary or (*item.call, item.side, item.position) not in whole
    ]


def _add_all(gathered: Gathered, items: Iterable[_Item]) -> None:
    calls: dict[tuple[_Where, str], dict[tuple[object, ...], int]] = {}
    for item in sorted(items, key=lambda one: one.order):
        numbers = calls.setdefault((item.where, item.node), {})
        number = numbers.setdefault(item.call, len(numbers))
        try:
            _add(gathered, item, _site(item, number))
        except (UsageError, OSError) as error:
            where = item.where
            gathered.add_unreadable(
                where.step, where.rank, _site(item, number), item.file, str(error)
            )


def _site(item: _Item, call: int) -> Site:
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


def _add(gathered: Gathered, item: _Item, site: Site) -> None:
    step, rank, file = item.where.step, item.where.rank, item.file
    path = gathered.folder.locate(file.name)
    if file.name.endswith(".pt"):
        gathered.add_tensor(step, rank, site, only_tensor(path, file.name))
        return
    with path.open("rb") as opened:
        header = read_header(opened)
        if header.kind in "OUS":
            gathered.add_text(step, rank, site, object_text(opened, header, file.size), file)
            return
        place = array_place(file.name, header, file.size)
        if item.is_summary:
            gathered.add_statistics(step, rank, site, summary_of(path, place), place.dtype)
            return
        text = python_text(opened, header) if site.side == "input" else None
    if text is None:
        gathered.add_tensor(step, rank, site, place)
    else:
        gathered.add_value(step, rank, site, text, place)
