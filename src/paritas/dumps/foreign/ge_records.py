"""The records of one rank of a dump of Ascend's graph engine."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from paritas.dumps.foreign.dump import rank_of
from paritas.dumps.foreign.finding import natural_key
from paritas.dumps.foreign.ge_formats import FORMATS
from paritas.dumps.foreign.ge_headers import read_header
from paritas.dumps.foreign.ge_names import spelled
from paritas.dumps.foreign.ge_provenance import Nodes, Provenance
from paritas.dumps.foreign.ge_stats import read_min_max, read_table
from paritas.dumps.foreign.ge_tensors import facts_of
from paritas.dumps.records import Payload, Record, Site
from paritas.errors import UsageError

if TYPE_CHECKING:
    from typing import Any

    from paritas.dumps.foreign.finding import Folder, Problems
    from paritas.dumps.foreign.ge_graphs import GeGraph
    from paritas.dumps.foreign.ge_headers import GeTensor
    from paritas.dumps.foreign.ge_names import FileName, Levels
    from paritas.dumps.foreign.ge_provenance import Fusion
    from paritas.dumps.foreign.ge_stats import Summary
    from paritas.dumps.index import RankDump

__all__ = ["MIN_MAX", "TABLE", "DumpFile", "RankRecords"]

MIN_MAX, TABLE = "_min_max.npz", ".csv"
_PLAIN_LAYOUTS = {"", "ND", "NCHW", "NHWC", "HWCN", "NCDHW", "NDHWC"}


@dataclasses.dataclass(frozen=True, slots=True)
class DumpFile:
    """A file of the dump, whose name was understood.

    Attributes:
        path: inside the dump.
        suffix: what its name ends in, where that says what it is.
    """

    path: str
    size: int
    name: FileName
    levels: Levels
    suffix: str

    @property
    def when(self) -> tuple[Any, ...]:
        """To sort by: the order in which the program came by."""
        levels, name = self.levels, self.name
        return levels.step, name.time, name.numbers, levels.time, natural_key(self.path)


@dataclasses.dataclass(frozen=True, slots=True)
class _Item:
    """One tensor of a file: what a record says of it besides its place in the program."""

    side: str
    index: int
    facts: dict[str, Any]
    place: tuple[GeTensor, int] | str | None = None


class RankRecords:
    """Makes the records of a rank, in the order of its program.

    Attributes:
        tensors: where the values of a record are, by its sequence number, and the size of the
            file; or why they cannot be read.
    """

    def __init__(
        self,
        folder: Folder,
        rank: int,
        files: list[DumpFile],
        graphs: list[GeGraph],
        problems: Problems,
    ) -> None:
        """`graphs` are those of this rank; what cannot be read goes to `problems`."""
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
            label: Provenance(graphs, label, of_model) for label, of_model in names.items()
        }
        for provenance in self._provenance.values():
            for text in provenance.unclear:
                problems.add(f"rank {rank}: {text}")
        for file, op_name, items in read:
            self._add(file, op_name, items)
        self._note_doubts()

    def finish(self) -> RankDump:
        """The rank as part of a dump."""
        sizes = [file.levels.world_size for file in self._files]
        is_summary = any(record.statistics is not None for record in self._records)
        has_values = not is_summary or any(isinstance(one, tuple) for one in self.tensors.values())
        return rank_of(
            self._folder.path,
            "ge",
            self._rank,
            self._records,
            world_size=max([self._rank + 1, *sizes]),
            data="tensor" if has_values else "stats",
        )

    def fusion(self, site: Site) -> Fusion | None:
        """What the operator of a site is made of, where a graph tells."""
        provenance = self._provenance.get(site.graph)
        return provenance.fusion(site.name) if provenance is not None else None

    # --- what a file holds ------------------------------------------------------------------------

    def _read(self, file: DumpFile) -> tuple[str, list[_Item]]:
        """The operator's name, as the header spells it, and the tensors of a file."""
        try:
            path = self._folder.locate(file.path)
            if file.suffix == TABLE:
                return file.name.op_name, [self._of_summary(one) for one in read_table(path)]
            if file.suffix == MIN_MAX:
                return file.name.op_name, [self._of_summary(one) for one in read_min_max(path)]
            header = read_header(path)
        except (UsageError, OSError) as error:
            self._problems.add(f"{file.path}: {error}")
            payload = Payload(file=file.path, nbytes=file.size, shape=())
            item = _Item("output", 0, {"payload": payload}, f"{file.path}: {error}")
            return file.name.op_name, [item]
        if header.end != file.size:
            self._problems.add(
                f"{file.path} has {file.size} bytes, and its header speaks of {header.end}"
            )
        wanted = [one for one in header.tensors if one.kind in ("input", "output")]
        if not wanted:
            self._problems.add(f"{file.path} lists no tensors")
        # A file name has no slashes: the header knows better, if it means the same.
        op_name = header.op_name
        if spelled(op_name) != spelled(file.name.op_name):
            op_name = file.name.op_name
        return op_name, [self._of_tensor(file, one) for one in wanted]

    def _of_tensor(self, file: DumpFile, tensor: GeTensor) -> _Item:
        payload = Payload(
            file=file.path,
            key=tensor.key,
            begin=tensor.begin,
            nbytes=tensor.nbytes,
            shape=tensor.shape,
        )
        facts: dict[str, Any] = {"payload": payload}
        end = tensor.begin + tensor.nbytes
        place: tuple[GeTensor, int] | str = (tensor, file.size)
        try:
            if end > file.size:
                raise UsageError(f"the file ends at byte {file.size}, before byte {end}")
            facts["tensor"] = facts_of(tensor)
        except UsageError as error:
            place = f"{tensor.key} of {file.path}: {error}"
            self._problems.add(place)
        if not tensor.original_shape and len(tensor.shape) > 1:
            self._note_layout(FORMATS.get(tensor.format & 0xFF, f"number {tensor.format}"))
        return _Item(tensor.kind, tensor.index, facts, place)

    def _of_summary(self, one: Summary) -> _Item:
        if one.tensor is not None and math.prod(one.tensor.shape) > 1:
            self._note_layout(one.layout)
        facts: dict[str, Any] = {"tensor": one.tensor, "statistics": one.statistics}
        if one.tensor is None:
            facts["dtype"] = one.dtype
        return _Item(one.kind, one.index, facts)

    def _note_layout(self, layout: str) -> None:
        if layout not in _PLAIN_LAYOUTS:
            self._blocked.add(layout)

    # --- where in the program it is ---------------------------------------------------------------

    def _add(self, file: DumpFile, op_name: str, items: list[_Item]) -> None:
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

    def _nodes(self, label: str, op_name: str, item: _Item, count: int) -> Nodes:
        provenance = self._provenance[label]
        ask = provenance.argument if item.side == "input" else provenance.output
        return ask(op_name, item.index, count) if item.index < count else Nodes()

    def _label_models(self) -> dict[tuple[str, str], str]:
        """A model goes by its name, and by its number too where several have that name."""
        ids: dict[str, set[str]] = {}
        for file in self._files:
            ids.setdefault(file.levels.model, set()).add(file.levels.model_id)
        return {
            (model, one): f"{model}_{one}" if len(found) > 1 else model
            for model, found in ids.items()
            for one in found
        }

    def _label(self, file: DumpFile) -> str:
        return self._labels[file.levels.model, file.levels.model_id]

    def _note_doubts(self) -> None:
        runs: dict[tuple[str, int], set[str]] = {}
        for file in self._files:
            runs.setdefault((self._label(file), file.levels.step), set()).add(file.levels.time)
        mixed = sorted({time for times in runs.values() if len(times) > 1 for time in times})
        if mixed:
            self._problems.add(
                f"rank {self._rank}: runs that began at {', '.join(mixed[:5])} have the same "
                f"steps; the later ones count as further calls. Give the folder of one of them"
            )
        if self._blocked:
            self._problems.add(
                f"rank {self._rank}: some tensors are known in the device's layout only "
                f"({', '.join(sorted(self._blocked)[:5])}), with its padding"
            )
