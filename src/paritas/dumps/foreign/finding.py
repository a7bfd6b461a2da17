"""The files of a foreign dump: found without leaving its folder, in an order that people expect."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import stat
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Folder", "Found", "Problems", "find_files", "glimpse", "locate", "natural_key"]

_DEEPEST = 32
_MOST_FILES = 2_000_000
_MOST_GLIMPSED = 4_000
_MOST_TOLD = 50
_DIGITS = re.compile(r"(\d+)")


@dataclasses.dataclass(frozen=True)
class Found:
    """A file of the dump.

    Attributes:
        name: its path inside the folder of the dump, with `/`.
        size: in bytes.
    """

    name: str
    size: int

    @property
    def parts(self) -> tuple[str, ...]:
        """The folders it is in, and its own name."""
        return tuple(self.name.split("/"))


class Problems:
    """What could not be understood: the first ones in words, of the rest the number."""

    def __init__(self) -> None:
        self._told: list[str] = []
        self._more = 0

    def add(self, text: str) -> None:
        """Note one."""
        if len(self._told) < _MOST_TOLD:
            self._told.append(text)
        else:
            self._more += 1

    def all(self) -> list[str]:
        """All of them, as far as they are told."""
        return self._told + ([f"and {self._more} more problems"] if self._more else [])


def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """To sort by: `INPUT.10` comes after `INPUT.2`."""
    parts = (part for part in _DIGITS.split(text) if part)
    return tuple((0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts)


class Folder:
    """The files of a dump. Nothing outside of its folder is a part of it."""

    def __init__(self, path: Path) -> None:
        """`path` is the folder, or the only file; somebody named it, so it may be a link."""
        self.path = path
        self.is_folder = path.is_dir()
        self._real = os.path.realpath(path if self.is_folder else path.parent)
        # Folders that were looked at: to follow each path from its root takes long.
        self._inside: dict[str, bool] = {}

    def find(self, accepts: Callable[[str], bool], problems: Problems) -> list[Found]:
        """The files whose names are accepted, sorted as people count.

        Args:
            accepts: whether a file of this name (without folders) is wanted.
            problems: what is wanted but cannot be taken is noted here.

        Raises:
            UsageError: there are more files than any dump has.
        """
        if not self.is_folder:
            return [Found(self.path.name, self.path.stat().st_size)]
        found: list[Found] = []
        waiting = [("", 0)]
        while waiting:
            folder, depth = waiting.pop()
            for entry in _entries(self.path / folder, problems):
                name = f"{folder}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    if depth >= _DEEPEST:
                        problems.add(f"{name} lies deeper than {_DEEPEST} folders")
                    else:
                        waiting.append((f"{name}/", depth + 1))
                elif accepts(entry.name):
                    self._take(name, found, problems)
                if len(found) > _MOST_FILES:
                    raise UsageError(f"{self.path} has more than {_MOST_FILES} files: give a part")
        return sorted(found, key=lambda one: natural_key(one.name))

    def locate(self, name: str) -> Path:
        """A file of the dump, which may have changed since it was found.

        Raises:
            UsageError: it is gone, or leads out of the dump.
        """
        place = os.path.join(self._real, name)  # noqa: PTH118  (asked for each tensor)
        try:
            is_plain = stat.S_ISREG(os.stat(place).st_mode)  # noqa: PTH116
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"{name} is missing: {reason}") from error
        if not is_plain:
            raise UsageError(f"{name} is no file")
        if self.is_folder and not self._is_inside(place):
            raise UsageError(f"{name} is a link to outside of the dump")
        return Path(place)

    def _is_inside(self, place: str) -> bool:
        if os.path.islink(place):  # noqa: PTH114
            return self._holds(os.path.realpath(place))
        folder = os.path.dirname(place)  # noqa: PTH120
        if folder not in self._inside:
            self._inside[folder] = self._holds(os.path.realpath(folder))
        return self._inside[folder]

    def _holds(self, real: str) -> bool:
        return real == self._real or real.startswith(self._real.rstrip(os.sep) + os.sep)

    def _take(self, name: str, found: list[Found], problems: Problems) -> None:
        try:
            name.encode()
            found.append(Found(name, self.locate(name).stat().st_size))
        except UnicodeEncodeError:
            problems.add(f"the name {name!a} is no text; it is left out")
        except (UsageError, OSError) as error:
            problems.add(f"{error}; it is left out")


def find_files(path: Path, accepts: Callable[[str], bool], problems: Problems) -> list[Found]:
    """See `Folder.find`."""
    return Folder(path).find(accepts, problems)


def locate(path: Path, name: str) -> Path:
    """See `Folder.locate`, which is quicker for many files."""
    return Folder(path).locate(name)


def glimpse(path: Path) -> Iterator[str]:
    """Names of some of the files of a dump, relative to its folder: enough to tell its kind."""
    if not path.is_dir():
        yield path.name
        return
    waiting = deque([""])
    seen = 0
    while waiting and seen < _MOST_GLIMPSED:
        folder = waiting.popleft()
        for entry in itertools.islice(_entries(path / folder), _MOST_GLIMPSED):
            seen += 1
            if entry.is_dir(follow_symlinks=False):
                waiting.append(f"{folder}{entry.name}/")
            else:
                yield f"{folder}{entry.name}"


def _entries(folder: Path, problems: Problems | None = None) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError as error:
        if problems is not None:
            problems.add(f"{folder} cannot be read: {error.strerror or error}")
