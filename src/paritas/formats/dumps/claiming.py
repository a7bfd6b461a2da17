"""Claim a folder of a dump for a rank: make it, or clear what paritas wrote there before."""

from __future__ import annotations

import contextlib
import re
import shutil
import uuid
from typing import TYPE_CHECKING, NamedTuple

from paritas.core.errors import ParitasError, UsageError
from paritas.core.results.wording import list_first
from paritas.formats.files.records import (
    DATA,
    HEADER,
    INDEX,
    LOCK,
    OLD_FX_TOP,
    RANK,
    STEP,
    TIME,
    TORCHAIR,
    discard,
    exclusive,
    index_home,
    is_locked,
    rank_name,
    read_header,
    write_header,
)

if TYPE_CHECKING:
    from pathlib import Path

    from paritas.formats.files.records import Header

_PASSING = re.compile(r"\.(starting|removing)-.+")
_MOST_NAMED = 5
_ADVICE = "give a new folder, or overwrite=True to replace the dump"


def claim(root: Path, header: Header, *, overwrite: bool) -> Path:
    """Create the folder of a rank with its header, atomically and for this process only."""
    home = index_home(root, header.layout)
    try:
        for folder in (root, home):
            folder.mkdir(parents=True, exist_ok=True)
        # Ranks that start together and replace an older dump must not remove each other.
        with exclusive(home):
            _clear_folder(root, home, header, overwrite=overwrite)
            return _make_folder(home, header)
    except OSError as error:
        raise ParitasError(
            f"cannot record into {root}: {error.strerror or error}; give a folder that can be "
            f"created and written to"
        ) from error


def _make_folder(root: Path, header: Header) -> Path:
    """Create the folder; others see it with its header or not at all."""
    rank_folder = root / rank_name(header.rank)
    starting = root / f".starting-{header.rank}-{uuid.uuid4().hex}"
    starting.mkdir()
    try:
        write_header(starting, header)
        starting.rename(rank_folder)
    except BaseException as error:
        shutil.rmtree(starting, ignore_errors=True)
        if isinstance(error, OSError) and rank_folder.exists():
            raise UsageError(
                f"another process has just created {rank_folder}: {_ADVICE}"
            ) from error
        raise
    return rank_folder


class _ClaimedPart(NamedTuple):
    """The part of a rank that is already in a folder."""

    path: Path
    header: Header

    def conflicts_with(self, header: Header) -> bool:
        """Whether it belongs to the same rank, or to another run."""
        its = self.header
        other_run = (its.run, its.world_size) != (header.run, header.world_size)
        return other_run or its.rank == header.rank

    def describe_conflict(self, header: Header) -> str:
        """Why it conflicts."""
        when = f", recorded {self.header.created}" if self.header.created else ""
        if self.header.rank == header.rank:
            return f"{self.path.name} exists already{when}"
        run, size = self.header.run[:8], self.header.world_size
        return f"{self.path.name} belongs to another run, {run} with {size} rank(s){when}"


def _clear_folder(root: Path, home: Path, header: Header, *, overwrite: bool) -> None:
    """Refuse a folder that is in use, or remove the dump in it."""
    parts, foreign = _survey_folder(home)
    if home != root:
        has_layout = any(part.header.layout == header.layout for part in parts)
        foreign += [
            path
            for path in root.iterdir()
            if not has_layout or not (TIME.fullmatch(path.name) or TORCHAIR.fullmatch(path.name))
        ]
    if foreign:
        names = list_first((path.name for path in foreign), _MOST_NAMED)
        raise UsageError(
            f"{root} is not empty: it contains {names}, which is not part of a paritas dump and "
            f"would not be removed: give a new folder"
        )
    others = [part for part in parts if part.conflicts_with(header)]
    if others and not overwrite:
        conflicts = "; ".join(other.describe_conflict(header) for other in others[:_MOST_NAMED])
        more = f"; and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
        raise UsageError(f"{root} is not empty: {conflicts}{more}: {_ADVICE}")
    for other in others:
        _refuse_removal(other.path)
    for other in others:
        _remove_part(root, other)


def _survey_folder(root: Path) -> tuple[list[_ClaimedPart], list[Path]]:
    """The parts of ranks, and paths that belong to no dump."""
    parts: list[_ClaimedPart] = []
    foreign: list[Path] = []
    for path in sorted(root.iterdir()):
        if path.name.startswith(".removing-"):
            shutil.rmtree(path, ignore_errors=True)  # left by a process that died
            continue
        match = RANK.fullmatch(path.name)
        header = _header_or_none(path) if match else None
        if header is not None:
            parts.append(_ClaimedPart(path, header))
        elif not (path.name.startswith(".starting-") or _is_of_torchair_layout(path)):
            foreign.append(path)
    return parts, foreign


def _is_of_torchair_layout(path: Path) -> bool:
    """Whether it is the tree or a graph of one of our ranks, whose own folder comes first."""
    if path.name == OLD_FX_TOP:
        header = _header_or_none(path.with_name(rank_name(0)))
        return header is not None and header.layout == "msit-7.1.0"
    match = TORCHAIR.fullmatch(path.name)
    if match is None:
        return False
    header = _header_or_none(path.with_name(rank_name(int(match[1] or match[2]))))
    return header is not None and header.layout in ("msit", "ge")


def _refuse_removal(folder: Path) -> None:
    stray = [path for path in folder.rglob("*") if not _is_ours(path, folder)]
    if stray:
        names = list_first((path.name for path in stray), _MOST_NAMED)
        raise UsageError(
            f"{folder} contains {names}, which paritas did not write, so it is not overwritten: "
            f"give a new folder"
        )
    if is_locked(folder / LOCK):
        raise UsageError(
            f"{folder} is being written by a running process: stop it, or give another folder"
        )


def _remove_part(root: Path, part: _ClaimedPart) -> None:
    if part.header.layout == "msit-7.1.0":
        discard(root / OLD_FX_TOP)
    elif part.header.layout != "packed":
        for path in root.iterdir():
            if TIME.fullmatch(path.name):
                discard(path / str(part.header.rank))
                with contextlib.suppress(OSError):  # another rank is in it
                    path.rmdir()
            match = TORCHAIR.fullmatch(path.name)
            if match is None or int(match[1] or match[2]) != part.header.rank:
                continue
            discard(path) if path.is_dir() else path.unlink(missing_ok=True)
    discard(part.path)


def _is_ours(path: Path, folder: Path) -> bool:
    """Whether a path in the folder of a rank was written by paritas."""
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
