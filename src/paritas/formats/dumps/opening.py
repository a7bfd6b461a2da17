"""Open a dump of any kind, from paritas or another tool, for its names and values."""

from __future__ import annotations

import difflib
import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paritas.core.errors import UsageError
from paritas.core.numerics.statistics import summarize
from paritas.formats.dumps.reading import Dump
from paritas.formats.files.records import HEADER, INDEX, index_home, rank_folders
from paritas.formats.foreign import ge_dump, msprobe, npy_tree, plain_files, sglang
from paritas.formats.foreign.ge_graphs import is_graph

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.core.numerics.statistics import Statistics
    from paritas.formats.files.records import Phase, Record, Side
    from paritas.formats.foreign.foreign_dump import ForeignDump

    ReadableDump = Dump | ForeignDump


# --- Readers --------------------------------------------------------------------------------------

# The readers of other tools' dumps, tried in this order.
_READERS: dict[str, Any] = {
    "msprobe": msprobe,
    "ge": ge_dump,
    "fx": npy_tree,
    "sglang": sglang,
    "files": plain_files,
}
KINDS = ("paritas", *_READERS)


def open_dump(path: str | os.PathLike[str], kind: str | None = None) -> ReadableDump:
    """Open a dump and detect its kind, unless it is given."""
    root = Path(path)
    if kind is not None and kind not in KINDS:
        raise UsageError(f"kind={kind!r}: give one of {', '.join(KINDS)}")
    if not root.exists():
        raise UsageError(f"{root} does not exist: give the path of a dump")
    if kind == "paritas" or (kind is None and is_ours(root)):
        return Dump.open(root)
    for name, reader in _READERS.items():
        if kind == name or (kind is None and reader.looks_like(root)):
            readable_dump: ReadableDump = reader.open_dump(root)
            return readable_dump
    if root.is_file() and is_graph(root):
        raise UsageError(
            f"{root} is a graph of Ascend's engine, which has no tensors: put it into the folder "
            "of the tensor files, and give that folder"
        )
    raise UsageError(
        f"{root} is not a known dump: found neither rank0/{HEADER} of paritas nor a dump of "
        f"{', '.join(_READERS)}"
    )


def is_known(root: Path) -> bool:
    """Whether another tool's reader knows what is there."""
    return any(reader.looks_like(root) for reader in _READERS.values())


def is_ours(root: Path) -> bool:
    """Whether it is a paritas dump, or one rank of it."""
    if not root.is_dir():
        return False
    # Other tools also have folders of that name.
    home = index_home(root)
    folders = [home, *rank_folders(home).values()]
    return any((folder / name).is_file() for folder in folders for name in (HEADER, INDEX))


# --- Names and values, for programs ---------------------------------------------------------------

_MOST_NEAR = 3


def open(path: str | os.PathLike[str], kind: str | None = None) -> OpenedDump:  # noqa: A001
    """Open a dump of any supported layout.

    Names and metadata are read now, values when they are used.

    Args:
        path: a folder, or a file of tensors: whatever `paritas inspect` accepts.
        kind: `paritas`, `msprobe`, `ge`, `fx`, `sglang` or `files`; None detects it.

    Raises:
        UsageError: no reader knows what is there.
    """
    return OpenedDump(open_dump(path, kind))


class OpenedDump:
    """A dump, opened by `paritas.dumps.open`; iterating yields its values as recorded.

    Attributes:
        path: its folder or file.
        kind: the tool that wrote it.
        problems: what is missing or damaged, in words. The rest can be read.
    """

    def __init__(self, dump: ReadableDump) -> None:
        """Use `open`."""
        self._dump = dump
        self.path: Path = dump.path
        self.kind = dump.kind
        self.problems = tuple(dump.problems)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in the dump."""
        return tuple(sorted(self._dump.ranks))

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps with values."""
        return tuple(sorted({record.step for record in self._dump.records()}))

    @property
    def names(self) -> tuple[str, ...]:
        """The ids of all values, each once, in the recorded order."""
        return tuple(dict.fromkeys(record.id for record in self._dump.records()))

    def __len__(self) -> int:
        """The number of values, of all steps and ranks."""
        return sum(len(rank.records) for rank in self._dump.ranks.values())

    def __iter__(self) -> Iterator[DumpValue]:
        """The values, rank by rank; no values are read."""
        return (DumpValue(record, self._dump) for record in self._dump.records())

    def find(
        self,
        name: str = "*",
        *,
        step: int | None = None,
        rank: int | None = None,
        side: Side | None = None,
        phase: Phase | None = None,
    ) -> Iterator[DumpValue]:
        """The values that match all criteria.

        Args:
            name: a glob for the id, or for the name of the operator, node or module.
            step: only this step.
            rank: only this rank.
            side: `input` or `output`.
            phase: `forward` or `backward`.
        """
        expected = {"step": step, "rank": rank, "side": side, "phase": phase}
        criteria = {key: value for key, value in expected.items() if value is not None}
        for value in self:
            fits = any(fnmatch.fnmatchcase(label, name) for label in (value.id, value.name))
            if fits and all(
                getattr(value, key) == criterion for key, criterion in criteria.items()
            ):
                yield value

    def get(self, name: str, *, step: int | None = None, rank: int | None = None) -> DumpValue:
        """The only value of that id or name; for a name, its output.

        Raises:
            UsageError: there is none, or more than one; the message lists candidates.
        """
        values = list(self.find(name, step=step, rank=rank))
        outputs = [value for value in values if value.side == "output"]
        chosen = values if len(values) == 1 else outputs
        if len(chosen) == 1:
            return chosen[0]
        if not values:
            near = difflib.get_close_matches(name, self.names, n=_MOST_NEAR, cutoff=0.3)
            names = ", ".join(near or self.names[:_MOST_NEAR]) or "nothing"
            raise UsageError(
                f"{self.path} has no value {name!r} of that step and rank; it has {names}"
            )
        names = ", ".join(
            f"{value.id} (step {value.step}, rank {value.rank})" for value in values[:_MOST_NEAR]
        )
        raise UsageError(
            f"{len(values)} values of {self.path} match {name!r}: {names}; give the whole id, "
            f"step= and rank="
        )


class DumpValue:
    """One value of a dump. Its metadata is known; `tensor()` reads it."""

    def __init__(self, record: Record, dump: ReadableDump) -> None:
        """Use `OpenedDump`."""
        self._record = record
        self._dump = dump

    def __repr__(self) -> str:
        """Which one it is, and what it holds."""
        contents = self._record.kind if self._record.is_tensor else repr(self.value)
        return f"<{self.id}, step {self.step}, rank {self.rank}: {contents}>"

    @property
    def id(self) -> str:
        """Its full name, unique within a step of a rank: `forward/graph_0/mm#0/output.0`."""
        return self._record.id

    @property
    def name(self) -> str:
        """The operator, node, module or parameter."""
        return self._record.site.name

    @property
    def op(self) -> str:
        """The kind of operator, for example `aten.mm.default`; empty if unknown."""
        return self._record.site.op

    @property
    def graph(self) -> str:
        """The graph or model it belongs to; empty if there is none."""
        return self._record.site.graph

    @property
    def side(self) -> Side:
        """Whether it is an `input` or an `output` of the call."""
        return self._record.site.side

    @property
    def position(self) -> str:
        """Which argument or result: `0`, `1.0`, `mask`."""
        return self._record.site.position

    @property
    def phase(self) -> Phase:
        """`forward` or `backward`."""
        return self._record.site.phase

    @property
    def step(self) -> int:
        """The step, or token."""
        return self._record.step

    @property
    def rank(self) -> int:
        """The rank that recorded it."""
        return self._record.rank

    @property
    def value(self) -> str | None:
        """A value that is not a tensor, as a Python literal; None for a tensor."""
        return self._record.value

    @property
    def dtype(self) -> str:
        """Its dtype as torch names it; empty if it is unknown or not a tensor."""
        facts = self._record.tensor
        return facts.dtype if facts is not None else self._record.dtype or ""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Its shape; None if it is unknown or not a tensor."""
        return None if self._record.tensor is None else self._record.tensor.shape

    @property
    def has_values(self) -> bool:
        """Whether `tensor()` can read values; otherwise only statistics were recorded."""
        return self._record.payload is not None and self._record.tensor is not None

    def tensor(self) -> Tensor:
        """Its values, on the CPU, in their dtype and shape; verified if there is a checksum.

        Raises:
            UsageError: they are missing, damaged, or were not recorded.
        """
        return self._dump.read(self._record)

    def statistics(self) -> Statistics:
        """The recorded statistics, or those of the values if none were recorded.

        Raises:
            UsageError: there are neither statistics nor values.
        """
        return self._record.statistics or summarize(self.tensor())
