"""Opening a dump of any kind, ours or another tool's, for its names and values."""

from __future__ import annotations

import difflib
import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paritas.dumps.reading import Dump
from paritas.errors import UsageError
from paritas.files.folders import HEADER, INDEX, index_home, rank_folders
from paritas.numerics.statistics import summarize

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.files.records import Header, Phase, RankDump, Record, Side
    from paritas.numerics.statistics import Statistics


# --- Readers --------------------------------------------------------------------------------------

# Other tools' kinds, asked in this order; `_reader` says which module reads each.
_READERS = ("msprobe", "ge", "fx", "sglang", "files")
KINDS = ("paritas", *_READERS)


class ReadableDump(Protocol):
    """What can be asked of every dump; `Dump` says it in full."""

    path: Path
    kind: str
    ranks: dict[int, RankDump]
    problems: list[str]

    def header(self, rank: int) -> Header:
        """What a rank says of its part."""

    def records(self) -> Iterator[Record]:
        """All records, rank by rank."""

    def read(self, record: Record) -> Tensor:
        """The values of a record."""

    def view(self, record: Record, *, check: bool = False) -> Tensor:
        """The values of a record, mapped from the file where that can be."""

    def verify(self, record: Record) -> bool:
        """Hold a record's bytes against their checksum; False where there is none."""

    def check_files(self) -> list[str]:
        """What is wrong with the files beside the values in them."""

    def read_sketch(self, record: Record) -> Tensor:
        """The linear sketch of a record's values."""


def open_dump(path: str | os.PathLike[str], kind: str | None = None) -> ReadableDump:
    """Open a dump; its kind is found out, unless it is given.

    Raises:
        UsageError: there is nothing there that any reader knows.
    """
    root = Path(path)
    if kind is not None and kind not in KINDS:
        raise UsageError(f"kind={kind!r}: give one of {', '.join(KINDS)}")
    if not root.exists():
        raise UsageError(f"{root} is not there: give a dump")
    if kind == "paritas" or (kind is None and is_ours(root)):
        return Dump.open(root)
    for name in _READERS:
        reader = _reader(name)
        if kind == name or (kind is None and reader.looks_like(root)):
            found: ReadableDump = reader.open_dump(root)
            return found
    raise UsageError(
        f"{root} holds nothing that is known: looked for rank0/{HEADER} of paritas, and for what "
        f"{', '.join(_READERS)} leave"
    )


def is_known(root: Path) -> bool:
    """Whether a reader of another tool's dumps knows what is there."""
    return any(_reader(name).looks_like(root) for name in _READERS)


def _reader(name: str) -> Any:
    """The module that reads a kind: it has `looks_like(path)` and `open_dump(path)`."""
    from paritas.compat import ge_dump, msprobe, npy_tree, plain_files, sglang

    readers = {
        "msprobe": msprobe,
        "ge": ge_dump,
        "fx": npy_tree,
        "sglang": sglang,
        "files": plain_files,
    }
    return readers[name]


def is_ours(root: Path) -> bool:
    """Whether it is a dump of paritas, or one rank of one."""
    if not root.is_dir():
        return False
    # Other tools have folders of that name too.
    home = index_home(root)
    folders = [home, *rank_folders(home).values()]
    return any((folder / name).is_file() for folder in folders for name in (HEADER, INDEX))


# --- Names and values, for programs ---------------------------------------------------------------

_MOST_NEAR = 3


def open(path: str | os.PathLike[str], kind: str | None = None) -> OpenedDump:  # noqa: A001
    """Open a dump of any layout that is read.

    Names and facts are read now, values when they are asked for.

    Args:
        path: a folder, or a file of tensors: whatever `paritas inspect` takes.
        kind: `paritas`, `msprobe`, `ge`, `fx`, `sglang` or `files`; None finds out.

    Raises:
        UsageError: there is nothing that a reader knows.
    """
    return OpenedDump(open_dump(path, kind))


class OpenedDump:
    """A dump, opened by `paritas.dumps.open`; iterating gives its values in the recorded order.

    Attributes:
        path: its folder or file.
        kind: which tool's it is.
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
        """The ranks that are there."""
        return tuple(sorted(self._dump.ranks))

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of which there are values."""
        return tuple(sorted({record.step for record in self._dump.records()}))

    @property
    def names(self) -> tuple[str, ...]:
        """The ids of all values, each once, in the recorded order."""
        return tuple(dict.fromkeys(record.id for record in self._dump.records()))

    def __len__(self) -> int:
        """How many values there are, of all steps and ranks."""
        return sum(len(found.records) for found in self._dump.ranks.values())

    def __iter__(self) -> Iterator[DumpValue]:
        """The values, rank by rank; nothing is read for it."""
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
        """The values that fit all that is given.

        Args:
            name: a glob for the id, or for the name of the operator, node or module.
            step: only this one.
            rank: only this one.
            side: `input` or `output`.
            phase: `forward` or `backward`.
        """
        wanted = {"step": step, "rank": rank, "side": side, "phase": phase}
        asked = {key: value for key, value in wanted.items() if value is not None}
        for value in self:
            fits = any(fnmatch.fnmatchcase(one, name) for one in (value.id, value.name))
            if fits and all(getattr(value, key) == one for key, one in asked.items()):
                yield value

    def get(self, name: str, *, step: int | None = None, rank: int | None = None) -> DumpValue:
        """The one value of that id or name; of a name, its output.

        Raises:
            UsageError: there is none, or more than one; the message says which there are.
        """
        found = list(self.find(name, step=step, rank=rank))
        outputs = [value for value in found if value.side == "output"]
        chosen = found if len(found) == 1 else outputs
        if len(chosen) == 1:
            return chosen[0]
        if not found:
            near = difflib.get_close_matches(name, self.names, n=_MOST_NEAR, cutoff=0.3)
            told = ", ".join(near or self.names[:_MOST_NEAR]) or "nothing"
            raise UsageError(
                f"{self.path} has no value {name!r} of that step and rank; it has {told}"
            )
        told = ", ".join(
            f"{one.id} (step {one.step}, rank {one.rank})" for one in found[:_MOST_NEAR]
        )
        raise UsageError(
            f"{len(found)} values of {self.path} are called {name!r}: {told}; give the whole id, "
            f"step= and rank="
        )


class DumpValue:
    """One value of a dump. Its facts are known; `tensor()` reads it."""

    def __init__(self, record: Record, dump: ReadableDump) -> None:
        """Use `OpenedDump`."""
        self._record = record
        self._dump = dump

    def __repr__(self) -> str:
        """Which one it is, and what it holds."""
        held = self._record.kind if self._record.is_tensor else repr(self.value)
        return f"<{self.id}, step {self.step}, rank {self.rank}: {held}>"

    @property
    def id(self) -> str:
        """Its name in full, unique within a step of a rank: `forward/graph_0/mm#0/output.0`."""
        return self._record.id

    @property
    def name(self) -> str:
        """The operator, node, module or parameter."""
        return self._record.site.name

    @property
    def op(self) -> str:
        """What kind of operator it is, for example `aten.mm.default`; empty where not known."""
        return self._record.site.op

    @property
    def graph(self) -> str:
        """The graph or model that it belongs to; empty where there is none."""
        return self._record.site.graph

    @property
    def side(self) -> Side:
        """Whether it was taken (`input`) or given (`output`)."""
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
        """Which step, or token."""
        return self._record.step

    @property
    def rank(self) -> int:
        """Whose it is."""
        return self._record.rank

    @property
    def value(self) -> str | None:
        """What is no tensor, as text that Python reads back; None for a tensor."""
        return self._record.value

    @property
    def dtype(self) -> str:
        """Torch's name of its dtype; empty where it is no tensor, or that is not known."""
        facts = self._record.tensor
        return facts.dtype if facts is not None else self._record.dtype or ""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Its shape; None where it is no tensor, or that is not known."""
        return None if self._record.tensor is None else self._record.tensor.shape

    @property
    def has_values(self) -> bool:
        """Whether `tensor()` has something to read, and not statistics alone."""
        return self._record.payload is not None and self._record.tensor is not None

    def tensor(self) -> Tensor:
        """Its values, on the CPU, in their dtype and shape; checked where there is a checksum.

        Raises:
            UsageError: they are missing, damaged, or were not recorded.
        """
        return self._dump.read(self._record)

    def statistics(self) -> Statistics:
        """The recorded statistics, or those of the values where none were recorded.

        Raises:
            UsageError: there are none, and no values either.
        """
        return self._record.statistics or summarize(self.tensor())
