"""Dumps of Ascend's graph engine: a tree of tensor files, with graphs in words beside it."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from paritas.dumps.foreign.dump import ForeignDump
from paritas.dumps.foreign.finding import Folder, Problems, glimpse
from paritas.dumps.foreign.ge_graphs import graph_label, read_graph
from paritas.dumps.foreign.ge_names import MAPPING, parse_levels, parse_name, read_mapping
from paritas.dumps.foreign.ge_records import MIN_MAX, TABLE, DumpFile, RankRecords
from paritas.dumps.foreign.ge_tensors import read_values
from paritas.dumps.mapped_files import OpenFiles
from paritas.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.dumps.foreign.finding import Found
    from paritas.dumps.foreign.ge_graphs import GeGraph
    from paritas.dumps.foreign.ge_provenance import Fusion
    from paritas.dumps.index import RankDump
    from paritas.dumps.records import Record

__all__ = ["GeDump", "looks_like", "open_dump"]

KIND = "ge"
_SUFFIXES = (MIN_MAX, TABLE, ".bin")
# Of all stages that the engine may write, the one it runs.
_BUILT_GRAPH = re.compile(r"ge_proto_.+_Build\.txt")
_MOST_NAMED = 3


class GeDump(ForeignDump):
    """A dump of Ascend's graph engine.

    A tensor is given in the layout of the program, without the padding of the device. Scratch
    space and buffers are left out: nobody but the operator itself knows what they mean.

    Attributes:
        graphs: the graphs in words, of all ranks.
    """

    def __init__(
        self, path: Path, ranks: dict[int, RankRecords], graphs: list[GeGraph], problems: list[str]
    ) -> None:
        """Use `open_dump`."""
        made: dict[int, RankDump] = {rank: found.finish() for rank, found in ranks.items()}
        super().__init__(path, KIND, made, problems, self._values, self._mapped)
        self.graphs = tuple(graphs)
        self._made = ranks
        self._folder = Folder(path)
        self._files = OpenFiles()

    def fusion(self, record: Record) -> Fusion | None:
        """What the operator of a record is made of, where a graph in words tells."""
        found = self._made.get(record.rank)
        return found.fusion(record.site) if found is not None else None

    def _mapped(self, record: Record, _: bool) -> Tensor:  # noqa: FBT001  (there are no checksums)
        return self._values(record, self._files)

    def _values(self, record: Record, files: OpenFiles | None = None) -> Tensor:
        self.header(record.rank)  # refuses a rank that is not there
        place = self._made[record.rank].tensors.get(record.sequence)
        if isinstance(place, str):
            raise UsageError(place)
        if place is None or record.payload is None:
            raise UsageError("it has no values: statistics are all that was recorded")
        tensor, size = place
        return read_values(self._folder.locate(record.payload.file), tensor, size, files)


def looks_like(path: Path) -> bool:
    """Whether there are files of such names."""
    mapped: set[str] = set()
    numbers: set[str] = set()
    for name in glimpse(path):
        pure = PurePosixPath(name)
        if parse_name(_stem(pure.name)) is not None:
            return True
        if pure.name == MAPPING:
            mapped.add(str(pure.parent))
        elif _stem(pure.name).isdecimal():
            numbers.add(str(pure.parent))
        if mapped & numbers:
            return True
    return False


def open_dump(path: Path) -> GeDump:
    """Read the headers of all files of a dump, and the graphs beside them.

    Args:
        path: any level of the tree, from the folder given to the tool down to that of a step, or
            one file.

    Raises:
        UsageError: there are no such files.
    """
    problems = Problems()
    folder = Folder(path)
    found = folder.find(lambda _: True, problems)
    files = _tensor_files(folder, found, problems)
    if not files:
        told = "; ".join(problems.all()[:_MOST_NAMED])
        raise UsageError(
            f"{path} has no tensor files of the graph engine: names like "
            f"Add.Add_2.44.6.1706596912161941 were looked for{'; ' + told if told else ''}"
        )
    graphs = _graphs(folder, found, problems)
    by_rank: dict[int, list[DumpFile]] = {}
    for file in files:
        by_rank.setdefault(file.levels.rank, []).append(file)
    ranks: dict[int, RankRecords] = {}
    for rank, of_rank in sorted(by_rank.items()):
        own = [graph for graph in graphs if graph.rank in (rank, None)]
        if not own and len(by_rank) == 1 and len({graph.rank for graph in graphs}) == 1:
            own = graphs  # the folders say which device it was, the graphs which rank
        ranks[rank] = RankRecords(folder, rank, of_rank, own, problems)
    return GeDump(path, ranks, graphs, problems.all())


def _stem(name: str) -> str:
    return next((name.removesuffix(end) for end in _SUFFIXES if name.endswith(end)), name)


def _tensor_files(folder: Folder, found: list[Found], problems: Problems) -> list[DumpFile]:
    mappings: dict[tuple[str, ...], dict[str, str]] = {}
    files: list[DumpFile] = []
    unknown: list[str] = []
    for one in found:
        if one.parts[-1] == MAPPING:
            try:
                mappings[one.parts[:-1]] = read_mapping(folder.locate(one.name))
            except (UsageError, OSError) as error:
                problems.add(f"{one.name}: {error}")
    # One file may be given without the folders that it came from, as if it were a dump.
    root = folder.path if folder.is_folder else folder.path.parent
    for one in found:
        inside, name = one.parts[:-1], one.parts[-1]
        names = mappings.get(inside, {})
        written = names.get(name) or names.get(_stem(name)) or name
        parsed = parse_name(_stem(written))
        if parsed is not None:
            suffix = next((end for end in _SUFFIXES if name.endswith(end)), "")
            levels = parse_levels(root, inside)
            files.append(DumpFile(one.name, one.size, parsed, levels, suffix))
        elif name.isdecimal():
            problems.add(f"{one.name} has a number for a name, and no {MAPPING} explains it")
        elif name != MAPPING and not name.endswith((".txt", ".json", ".swp")):
            unknown.append(one.name)
    if unknown and files:
        told = ", ".join(unknown[:_MOST_NAMED])
        problems.add(f"{len(unknown)} files have names that the engine does not give: {told}")
    return files


def _graphs(folder: Folder, found: list[Found], problems: Problems) -> list[GeGraph]:
    graphs: list[GeGraph] = []
    for one in found:
        name = Path(one.parts[-1])
        if graph_label(name) is None and not _BUILT_GRAPH.fullmatch(name.name):
            continue
        try:
            graphs.append(read_graph(folder.locate(one.name)))
        except (UsageError, OSError) as error:
            problems.add(f"{one.name}: {error}")
    return graphs
