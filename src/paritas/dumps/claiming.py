"""Taking a folder for a rank, and refusing one that is in use."""

from __future__ import annotations

import contextlib
import re
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from paritas.dumps.folders import (
    DATA,
    HEADER,
    INDEX,
    RANK,
    STEP,
    TIME,
    TORCHAIR,
    discard,
    index_home,
    rank_name,
    read_header,
    write_header,
)
from paritas.dumps.locks import LOCK, alone_in, is_locked
from paritas.errors import ParitasError, UsageError

if TYPE_CHECKING:
    from paritas.dumps.records import Header

__all__ = ["claim"]

_PASSING = re.compile(r"\.(starting|removing)-.+")
_MOST_NAMED = 5
_ADVICE = "give a new folder, or overwrite=True to replace the dump in it"


def claim(root: Path, header: Header, *, overwrite: bool) -> Path:
    """Make the folder of a rank with its header in it, at once and for this process alone.

    Raises:
        UsageError: the folder has something else in it.
    """
    home = index_home(root, header.layout)
    try:
        for folder in (root, home):
            folder.mkdir(parents=True, exist_ok=True)
        # Ranks that start together and replace an older dump must not take each other for it.
        with alone_in(home):
            _clear(root, home, header, overwrite=overwrite)
            return _make(home, header)
    except OSError as error:
        raise ParitasError(
            f"cannot record into {root}: {error.strerror or error}; give a folder that can be made "
            f"and written to"
        ) from error


def _make(root: Path, header: Header) -> Path:
    """The folder, which others see with its header in it or not at all."""
    mine = root / rank_name(header.rank)
    starting = root / f".starting-{header.rank}-{uuid.uuid4().hex}"
    starting.mkdir()
    try:
        write_header(starting, header)
        starting.rename(mine)
    except BaseException as error:
        shutil.rmtree(starting, ignore_errors=True)
        if isinstance(error, OSError) and mine.exists():
            raise UsageError(f"{mine} was made by another process just now: {_ADVICE}") from error
        raise
    return mine


class _Part(NamedTuple):
    """What one rank has in a folder already."""

    path: Path
    header: Header

    def is_in_the_way_of(self, header: Header) -> bool:
        """Whether it is the same rank's, or another run's."""
        mine, its = header, self.header
        other_run = (its.run, its.world_size) != (mine.run, mine.world_size)
        return other_run or its.rank == mine.rank

    def told(self, header: Header) -> str:
        """Why it is in the way."""
        when = f", recorded {self.header.created}" if self.header.created else ""
        if self.header.rank == header.rank:
            return f"{self.path.name} is there already{when}"
        run, size = self.header.run[:8], self.header.world_size
        return f"{self.path.name} is of another run, {run} of {size} rank(s){when}"


def _clear(root: Path, home: Path, header: Header, *, overwrite: bool) -> None:
    """Refuse a folder that is in use, or remove the dump that is in it."""
    parts, foreign = _survey(home)
    if home != root:
        known = any(part.header.layout == header.layout for part in parts)
        foreign += [path for path in root.iterdir() if not (known and _is_of_old_tree(path))]
    if foreign:
        raise UsageError(
            f"{root} is not empty: it holds {_listed(foreign)}, which is not of a dump of paritas "
            f"and would not be removed: give a new folder"
        )
    others = [part for part in parts if part.is_in_the_way_of(header)]
    if others and not overwrite:
        told = "; ".join(other.told(header) for other in others[:_MOST_NAMED])
        more = f"; and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
        raise UsageError(f"{root} is not empty: {told}{more}: {_ADVICE}")
    for other in others:
        _refuse_removal(other.path)
    for other in others:
        _remove(root, other)


def _survey(root: Path) -> tuple[list[_Part], list[Path]]:
    """The parts of ranks, and what is nobody's."""
    parts: list[_Part] = []
    foreign: list[Path] = []
    for path in sorted(root.iterdir()):
        if path.name.startswith(".removing-"):
            shutil.rmtree(path, ignore_errors=True)  # of a process that died over it
            continue
        match = RANK.fullmatch(path.name)
        found = _header_or_none(path) if match else None
        if found is not None:
            parts.append(_Part(path, found))
        elif not (path.name.startswith(".starting-") or _is_of_torchair_layout(path)):
            foreign.append(path)
    return parts, foreign


def _is_of_torchair_layout(path: Path) -> bool:
    """Whether it is the tree, or a graph, of a rank of ours, whose own folder came before it."""
    match = TORCHAIR.fullmatch(path.name)
    if match is None:
        return False
    found = _header_or_none(path.with_name(rank_name(int(match[1] or match[2]))))
    return found is not None and found.layout in ("msit", "ge")


def _is_of_old_tree(path: Path) -> bool:
    return bool(TIME.fullmatch(path.name) or TORCHAIR.fullmatch(path.name))


def _refuse_removal(folder: Path) -> None:
    stray = [path for path in folder.rglob("*") if not _is_ours(path, folder)]
    if stray:
        raise UsageError(
            f"{folder} holds {_listed(stray)}, which paritas did not write: it is not overwritten; "
            f"give a new folder"
        )
    if is_locked(folder / LOCK):
        raise UsageError(
            f"{folder} is being written by a process that is still running: end it, or give "
            f"another folder"
        )


def _remove(root: Path, part: _Part) -> None:
    if part.header.layout != "packed":
        for path in root.iterdir():
            if TIME.fullmatch(path.name):
                discard(path / str(part.header.rank))
                with contextlib.suppress(OSError):  # another rank's is in it
                    path.rmdir()
            match = TORCHAIR.fullmatch(path.name)
            if match is None or int(match[1] or match[2]) != part.header.rank:
                continue
            discard(path) if path.is_dir() else path.unlink(missing_ok=True)
    discard(part.path)


def _is_ours(path: Path, folder: Path) -> bool:
    """Whether something in the folder of a rank is what a writer puts there."""
    for name in path.relative_to(folder).parts[:-1]:
        if not (STEP.fullmatch(name) or _PASSING.fullmatch(name)):
            return False
    if path.is_symlink():
        return False
    if path.is_dir():
        return bool(STEP.fullmatch(path.name) or _PASSING.fullmatch(path.name))
    return path.name in (HEADER, INDEX, LOCK, f".{HEADER}.part") or bool(DATA.fullmatch(path.name))


def _header_or_none(folder: Path) -> Header | None:
    try:
        return read_header(folder)
    except UsageError:
        return None


def _listed(paths: list[Path]) -> str:
    names = ", ".join(path.name for path in paths[:_MOST_NAMED])
    return names if len(paths) <= _MOST_NAMED else f"{names} and {len(paths) - _MOST_NAMED} more"
