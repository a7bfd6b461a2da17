"""Opening a dump of whatever kind: ours, or another tool's."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paritas.dumps.folders import HEADER, INDEX, index_home, rank_folders
from paritas.dumps.reading import Dump
from paritas.errors import UsageError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.dumps.index import RankDump
    from paritas.dumps.records import Header, Record

__all__ = ["KINDS", "ReadableDump", "is_known", "is_ours", "open_dump"]

# Kind -> module of `paritas.dumps.foreign`; asked in this order. Each has `looks_like(path)` and
# `open_dump(path)`.
_READERS = {
    "msprobe": "msprobe",
    "ge": "ge_dump",
    "fx": "npy_tree",
    "sglang": "sglang",
    "files": "plain_files",
}
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
    return importlib.import_module(f"paritas.dumps.foreign.{_READERS[name]}")


def is_ours(root: Path) -> bool:
    """Whether it is a dump of paritas, or one rank of one."""
    if not root.is_dir():
        return False
    # Other tools have folders of that name too.
    home = index_home(root)
    folders = [home, *rank_folders(home).values()]
    return any((folder / name).is_file() for folder in folders for name in (HEADER, INDEX))
