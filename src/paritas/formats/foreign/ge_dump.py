"""Dumps of Ascend's graph engine: a tree of tensor files, with text graphs beside it."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from paritas.core.errors import UsageError
from paritas.core.file_trees import Folder, Problems, glimpse, natural_key
from paritas.formats.files.records import Payload, Record, Site
from paritas.formats.files.tensor_bytes import OpenFiles
from paritas.formats.foreign.foreign_dump import ForeignDump, rank_of
from paritas.formats.foreign.ge_files import (
    MAPPING,
    parse_levels,
    parse_name,
    read_ge_header,
    read_mapping,
    spell_name,
)
from paritas.formats.foreign.ge_graphs import GeNodes, GeProvenance, graph_label, read_graph
from paritas.formats.foreign.ge_layouts import FORMATS
from paritas.formats.foreign.ge_tensors import facts_of, read_ge_values, read_min_max, read_table

if TYPE_CHECKING:
    from typing import Any

    from torch import Tensor

    from paritas.core.file_trees import FoundFile
    from paritas.formats.files.records import RankDump
    from paritas.formats.foreign.ge_files import FileName, GeTensor, Levels
    from paritas.formats.foreign.ge_graphs import GeGraph
    from paritas.formats.foreign.ge_tensors import GeSummary


# --- Records of one rank --------------------------------------------------------------------------

MIN_MAX, TABLE = "_min_max.npz", ".csv"
_PLAIN_LAYOUTS = {"", "ND", "NCHW", "NHWC", "HWCN", "NCDHW", "NDHWC"}


@dataclasses.dataclass(frozen=True, slots=True)
class DumpFile:
    """A file of the dump whose name was understood.

    Attributes:
        path: inside the dump.
        suffix: the end of its name, if that says what it is.
    """

    path: str
    size: int
    name: FileName
    levels: Levels
    suffix: str

    @property
    def when(self) -> tuple[Any, ...]:
        """A sort key for program order."""
        levels, name = self.levels, self.name
        return levels.step, name.time, name.numbers, levels.time, natural_key(self.path)


@dataclasses.dataclass(frozen=True, slots=True)
class _FileTensor:
    """One tensor of a file: the fields of its record other than its site."""

    side: str
    index: int
    facts: dict[str, Any]
    place: tuple[GeTensor, int] | str | None = None


class RankRecords:
    """Makes the records of a rank, in program order.

    Attributes:
        tensors: where the values of a record are and the size of the file, or why they cannot be
            read, by sequence number.
    """

    def __init__(
        self,
        folder: Folder,
        rank: int,
        files: list[DumpFile],
        graphs: list[GeGraph],
        problems: Problems,
    ) -> None:
        """`graphs` are those of this rank; `problems` receives what cannot be read."""
        self.tensors: dict[int, tuple[GeTensor, int] | str] = {}
        self._folder, self._rank, self._problems = folder, rank, problems
        self._files = sorted(files, key=lambda file: file.when)
        self._records: list[Record] = []
        self._calls: dict[tuple[int, str, str], int] = {}
        self._blocked: set[str] = set()
        self._labels = self._label_models()
        read = [(file, *self._read(file)) for file in self._files]
        names: dict[str, list[str]] = {}
        for file, op_name, _ in read:
            names.setdefault(self._label(file), []).append(op_name)
        self._provenance = {
            label: GeProvenance(graphs, label, of_model) for label, of_model in names.items()
        }
        for provenance in self._provenance.values():
            for text in provenance.unclear:
                problems.add(f"rank {rank}: {text}", is_loss=False)
        for file, op_name, items in read:
            self._add(file, op_name, items)
        self._report_doubts()

    def finish(self) -> RankDump:
        """The rank as part of a dump."""
        sizes = [file.levels.world_size for file in self._files]
        is_summary = any(record.statistics is not None for record in self._records)
        has_values = not is_summary or any(
            isinstance(tensor, tuple) for tensor in self.tensors.values()
        )
        return rank_of(
            self._folder.path,
            "ge",
            self._rank,
            self._records,
            world_size=max([self._rank + 1, *sizes]),
            data="tensor" if has_values else "stats",
        )

    # --- The contents of a file -------------------------------------------------------------------

    def _read(self, file: DumpFile) -> tuple[str, list[_FileTensor]]:
        """The operator's name, spelt as in the header, and the tensors of a file."""
        try:
            path = self._folder.locate(file.path)
            if file.suffix == TABLE:
                return file.name.op_name, [self._make_summary(row) for row in read_table(path)]
            if file.suffix == MIN_MAX:
                return file.name.op_name, [self._make_summary(row) for row in read_min_max(path)]
            header = read_ge_header(path)
        except (UsageError, OSError) as error:
            self._problems.add(f"{file.path}: {error}", is_loss=False)
            payload = Payload(file=file.path, nbytes=file.size, shape=())
            item = _FileTensor("output", 0, {"payload": payload}, f"{file.path}: {error}")
            return file.name.op_name, [item]
        if header.end != file.size:
            self._problems.add(
                f"{file.path} has {file.size} bytes, but its header says {header.end}"
            )
        tensors = [tensor for tensor in header.tensors if tensor.kind in ("input", "output")]
        if not tensors:
            self._problems.add(f"{file.path} lists no tensors")
        # A file name has no slashes, so prefer the header's spelling if it means the same.
        op_name = header.op_name
        if spell_name(op_name) != spell_name(file.name.op_name):
            op_name = file.name.op_name
        return op_name, [self._make_tensor(file, tensor) for tensor in tensors]

    def _make_tensor(self, file: DumpFile, tensor: GeTensor) -> _FileTensor:
        payload = Payload(
            file=file.path,
            key=tensor.key,
            begin=tensor.begin,
            nbytes=tensor.nbytes,
            shape=tensor.shape,
        )
        facts: dict[str, Any] = {"payload": payload}
        end = tensor.begin + tensor.nbytes
        position: tuple[GeTensor, int] | str = (tensor, file.size)
        try:
            if end > file.size:
                raise UsageError(f"the file ends at byte {file.size}, before byte {end}")
            facts["tensor"] = facts_of(tensor)
        except UsageError as error:
            position = f"{tensor.key} of {file.path}: {error}"
            self._problems.add(position, is_loss=False)
        if not tensor.original_shape and len(tensor.shape) > 1:
            self._note_layout(FORMATS.get(tensor.format & 0xFF, f"number {tensor.format}"))
        return _FileTensor(tensor.kind, tensor.index, facts, position)

    def _make_summary(self, ge_summary: GeSummary) -> _FileTensor:
        if ge_summary.tensor is not None and math.prod(ge_summary.tensor.shape) > 1:
            self._note_layout(ge_summary.layout)
        facts: dict[str, Any] = {"tensor": ge_summary.tensor, "statistics": ge_summary.statistics}
        if ge_summary.tensor is None:
            facts["dtype"] = ge_summary.dtype
        return _FileTensor(ge_summary.kind, ge_summary.index, facts)

    def _note_layout(self, layout: str) -> None:
        if layout not in _PLAIN_LAYOUTS:
            self._blocked.add(layout)

    # --- The place in the program -----------------------------------------------------------------

    def _add(self, file: DumpFile, op_name: str, items: list[_FileTensor]) -> None:
        label = self._label(file)
        key = (file.levels.step, label, op_name)
        call = self._calls.get(key, 0)
        self._calls[key] = call + 1
        counts = {side: sum(item.side == side for item in items) for side in ("input", "output")}
        for item in items:
            nodes = self._nodes(label, op_name, item, counts[item.side])
            site = Site(
                source="fused",
                level="buffer",
                name=op_name,
                side="input" if item.side == "input" else "output",
                position=str(item.index),
                op=file.name.op_type,
                graph=label,
                nodes=nodes.names,
                exact=nodes.exact,
                call=call,
            )
            sequence = len(self._records)
            if item.place is not None:
                self.tensors[sequence] = item.place
            self._records.append(
                Record(
                    sequence=sequence,
                    step=file.levels.step,
                    rank=self._rank,
                    id=site.id,
                    site=site,
                    **item.facts,
                )
            )

    def _nodes(self, label: str, op_name: str, item: _FileTensor, count: int) -> GeNodes:
        provenance = self._provenance[label]
        ask = provenance.argument if item.side == "input" else provenance.output
        return ask(op_name, item.index, count) if item.index < count else GeNodes()

    def _label_models(self) -> dict[tuple[str, str], str]:
        """Models are labelled by name, and also by number if several have the same name."""
        ids: dict[str, set[str]] = {}
        for file in self._files:
            ids.setdefault(file.levels.model, set()).add(file.levels.model_id)
        return {
            (model, model_id): f"{model}_{model_id}" if len(model_ids) > 1 else model
            for model, model_ids in ids.items()
            for model_id in model_ids
        }

    def _label(self, file: DumpFile) -> str:
        return self._labels[file.levels.model, file.levels.model_id]

    def _report_doubts(self) -> None:
        runs: dict[tuple[str, int], set[str]] = {}
        for file in self._files:
            runs.setdefault((self._label(file), file.levels.step), set()).add(file.levels.time)
        mixed = sorted({time for times in runs.values() if len(times) > 1 for time in times})
        if mixed:
            self._problems.add(
                f"rank {self._rank}: runs that began at {', '.join(mixed[:5])} have the same "
                f"steps; the later ones count as further calls. Give the folder of one run",
                is_loss=False,
            )
        if self._blocked:
            self._problems.add(
                f"rank {self._rank}: some tensors are known only in the device's layout "
                f"({', '.join(sorted(self._blocked)[:5])}), including its padding",
                is_loss=False,
            )


# --- The dump -------------------------------------------------------------------------------------

KIND = "ge"
_SUFFIXES = (MIN_MAX, TABLE, ".bin")
# Of all stages that the engine may write, the one it executes.
_BUILT_GRAPH = re.compile(r"ge_proto_.+_Build\.(txt|json)")
_MOST_NAMED = 3


def looks_like(path: Path) -> bool:
    """Whether there are files with such names."""
    mapped: set[str] = set()
    numbers: set[str] = set()
    for name in glimpse(path):
        pure = PurePosixPath(name)
        if parse_name(_cut_suffix(pure.name)) is not None:
            return True
        if pure.name == MAPPING:
            mapped.add(str(pure.parent))
        elif _cut_suffix(pure.name).isdecimal():
            numbers.add(str(pure.parent))
        if mapped & numbers:
            return True
    return False


def open_dump(path: Path) -> ForeignDump:
    """Read the headers of all files of a dump, and the graphs beside them.

    `path` is any level of the tree, from the folder given to the tool down to a step, or one file.
    Tensors have the layout of the program, without the device's padding. Scratch space and buffers
    are omitted: only the operator itself knows what they mean.
    """
    problems = Problems()
    folder = Folder(path)
    paths = folder.find(lambda _: True, problems)
    files = _tensor_files(folder, paths, problems)
    if not files:
        reasons = "; ".join(problems.all()[:_MOST_NAMED])
        raise UsageError(
            f"{path} has no tensor files of the graph engine, with names like "
            f"Add.Add_2.44.6.1706596912161941{'; ' + reasons if reasons else ''}"
        )
    graphs = _read_graphs(folder, paths, problems)
    by_rank: dict[int, list[DumpFile]] = {}
    for file in files:
        by_rank.setdefault(file.levels.rank, []).append(file)
    ranks: dict[int, RankRecords] = {}
    for rank, of_rank in sorted(by_rank.items()):
        rank_graphs = [graph for graph in graphs if graph.rank in (rank, None)]
        if not rank_graphs and len(by_rank) == 1 and len({graph.rank for graph in graphs}) == 1:
            rank_graphs = graphs  # the folders name the device, the graphs the rank
        ranks[rank] = RankRecords(folder, rank, of_rank, rank_graphs, problems)
    opened = OpenFiles()

    def read(record: Record, files: OpenFiles | None = None) -> Tensor:
        position = ranks[record.rank].tensors.get(record.sequence)
        if isinstance(position, str):
            raise UsageError(position)
        if position is None or record.payload is None:
            raise UsageError("it has no values: only statistics were recorded")
        tensor, size = position
        return read_ge_values(folder.locate(record.payload.file), tensor, size, files)

    def view(record: Record, _: bool) -> Tensor:  # noqa: FBT001  (there are no checksums)
        return read(record, opened)

    dumps = {rank: part.finish() for rank, part in ranks.items()}
    return ForeignDump(path, KIND, dumps, problems.all(), problems.losses(), read, view)


def _cut_suffix(name: str) -> str:
    return next((name.removesuffix(end) for end in _SUFFIXES if name.endswith(end)), name)


def _tensor_files(
    folder: Folder, found_files: list[FoundFile], problems: Problems
) -> list[DumpFile]:
    mappings: dict[tuple[str, ...], dict[str, str]] = {}
    files: list[DumpFile] = []
    unknown: list[str] = []
    for found_file in found_files:
        if found_file.parts[-1] == MAPPING:
            try:
                mappings[found_file.parts[:-1]] = read_mapping(folder.locate(found_file.name))
            except (UsageError, OSError) as error:
                problems.add(f"{found_file.name}: {error}")
    # A single file may be given without the folders it came from.
    root = folder.path if folder.is_folder else folder.path.parent
    for found_file in found_files:
        inside, name = found_file.parts[:-1], found_file.parts[-1]
        names = mappings.get(inside, {})
        written = names.get(name) or names.get(_cut_suffix(name)) or name
        parsed = parse_name(_cut_suffix(written))
        if parsed is not None:
            suffix = next((end for end in _SUFFIXES if name.endswith(end)), "")
            levels = parse_levels(root, inside)
            files.append(DumpFile(found_file.name, found_file.size, parsed, levels, suffix))
        elif name.isdecimal():
            problems.add(f"{found_file.name} has a number for a name, but no {MAPPING} explains it")
        elif name != MAPPING and not name.endswith((".txt", ".json", ".swp")):
            unknown.append(found_file.name)
    if unknown and files:
        names_shown = ", ".join(unknown[:_MOST_NAMED])
        text = f"{len(unknown)} files have names that the engine never uses: {names_shown}"
        problems.add(text, is_loss=False)
    return files


def _read_graphs(folder: Folder, found_files: list[FoundFile], problems: Problems) -> list[GeGraph]:
    graphs: list[GeGraph] = []
    for found_file in found_files:
        name = Path(found_file.parts[-1])
        is_named = graph_label(name) is not None or _BUILT_GRAPH.fullmatch(name.name) is not None
        if not is_named and name.suffix != ".json":
            continue
        try:
            graphs.append(read_graph(folder.locate(found_file.name)))
        except (UsageError, OSError) as error:
            if is_named:  # other files in JSON are not about the graph
                problems.add(f"{found_file.name}: {error}", is_loss=False)
    return graphs
