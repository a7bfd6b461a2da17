"""Trees of files: found in a folder without leaving it, or fetched from a URL.

Nothing here imports torch: the command line uses it before it loads anything large.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib
import itertools
import os
import posixpath
import re
import shutil
import stat
import tempfile
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paritas.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO


# --- Files in a folder ----------------------------------------------------------------------------

_DEEPEST = 32
_MOST_FILES = 2_000_000
_MOST_GLIMPSED = 4_000
_MOST_LISTED = 50
_DIGITS = re.compile(r"(\d+)")


@dataclasses.dataclass(frozen=True)
class FoundFile:
    """A file of the dump; `name` is its path inside the dump's folder, with `/`."""

    name: str
    size: int

    @property
    def parts(self) -> tuple[str, ...]:
        """The folders it is in, and its name."""
        return tuple(self.name.split("/"))


class Problems:
    """Collects descriptions of problems; beyond a limit, it only counts them.

    A problem is a loss unless it says otherwise: a comparison of the dump then cannot pass.
    """

    def __init__(self, most: int = _MOST_LISTED) -> None:
        self._all = _LimitedList(most)
        self._losses = _LimitedList(most)

    def add(self, text: str, *, is_loss: bool = True) -> None:
        """Add one.

        Args:
            is_loss: whether something is missing that no record stands for. It is not if reading
                a record fails, or if only the origin of values is unknown.
        """
        self._all.append(text)
        if is_loss:
            self._losses.append(text)

    def all(self) -> list[str]:
        """The first ones, and the number of the rest."""
        return self._all.texts()

    def losses(self) -> list[str]:
        """The first ones that are losses, and the number of the rest."""
        return self._losses.texts()


class _LimitedList:
    """The first texts, and the number of the rest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._first: list[str] = []
        self._more = 0

    def append(self, text: str) -> None:
        if len(self._first) < self._most:
            self._first.append(text)
        else:
            self._more += 1

    def texts(self) -> list[str]:
        return self._first + ([f"and {self._more} more problems"] if self._more else [])


def open_plain(path: Path) -> BinaryIO:
    """Open a regular file: reading a pipe may block, and a device may never end.

    Raises:
        OSError: it is something else, or cannot be opened.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    return path.open("rb")


def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key that puts `INPUT.10` after `INPUT.2`."""
    parts = (part for part in _DIGITS.split(text) if part)
    return tuple((0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts)


class Folder:
    """The files of a dump. Nothing outside its folder belongs to it."""

    def __init__(self, path: Path) -> None:
        """`path` is the folder, or the only file; the user named it, so it may be a link."""
        self.path = path
        self.is_folder = path.is_dir()
        self._real = os.path.realpath(path if self.is_folder else path.parent)
        # Folders already checked: resolving every path takes long.
        self._inside: dict[str, bool] = {}

    def find(self, accepts: Callable[[str], bool], problems: Problems) -> list[FoundFile]:
        """The files with accepted names, in natural order.

        Args:
            accepts: whether a file of this name (without folders) is wanted.
            problems: receives the wanted files that cannot be used.
        """
        if not self.is_folder:
            return [FoundFile(self.path.name, self.path.stat().st_size)]
        found_files: list[FoundFile] = []
        waiting = [("", 0)]
        while waiting:
            folder, depth = waiting.pop()
            for entry in _list_entries(self.path / folder, problems):
                name = f"{folder}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    if depth >= _DEEPEST:
                        problems.add(f"{name} is nested deeper than {_DEEPEST} folders")
                    else:
                        waiting.append((f"{name}/", depth + 1))
                elif accepts(entry.name):
                    self._take(name, found_files, problems)
                if len(found_files) > _MOST_FILES:
                    raise UsageError(
                        f"{self.path} has more than {_MOST_FILES} files: give one of its folders"
                    )
        return sorted(found_files, key=lambda found_file: natural_key(found_file.name))

    def locate(self, name: str) -> Path:
        """The path of a file of the dump, checked again."""
        file_path = os.path.join(self._real, name)  # noqa: PTH118  (called for each tensor)
        try:
            is_plain = stat.S_ISREG(os.stat(file_path).st_mode)  # noqa: PTH116
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"{name} is missing: {reason}") from error
        if not is_plain:
            raise UsageError(f"{name} is not a regular file")
        if self.is_folder and not self._is_inside(file_path):
            raise UsageError(f"{name} is a link to outside the dump")
        return Path(file_path)

    def _is_inside(self, file_path: str) -> bool:
        if os.path.islink(file_path):  # noqa: PTH114
            return self._holds(os.path.realpath(file_path))
        folder = os.path.dirname(file_path)  # noqa: PTH120
        if folder not in self._inside:
            self._inside[folder] = self._holds(os.path.realpath(folder))
        return self._inside[folder]

    def _holds(self, real: str) -> bool:
        return real == self._real or real.startswith(self._real.rstrip(os.sep) + os.sep)

    def _take(self, name: str, found_files: list[FoundFile], problems: Problems) -> None:
        try:
            name.encode()
            found_files.append(FoundFile(name, self.locate(name).stat().st_size))
        except UnicodeEncodeError:
            problems.add(f"skipped {name!a}: its name is not valid text")
        except (UsageError, OSError) as error:
            problems.add(f"skipped: {error}")


def glimpse(path: Path) -> Iterator[str]:
    """The relative names of some of the files of a dump, to detect its kind."""
    if not path.is_dir():
        yield path.name
        return
    waiting = deque([""])
    entry_count = 0
    while waiting and entry_count < _MOST_GLIMPSED:
        folder = waiting.popleft()
        for entry in itertools.islice(_list_entries(path / folder), _MOST_GLIMPSED):
            entry_count += 1
            if entry.is_dir(follow_symlinks=False):
                waiting.append(f"{folder}{entry.name}/")
            else:
                yield f"{folder}{entry.name}"


def _list_entries(folder: Path, problems: Problems | None = None) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError as error:
        if problems is not None:
            problems.add(f"{folder} cannot be read: {error.strerror or error}")


# --- Files at a URL -------------------------------------------------------------------------------

# A store chooses its own file names; none may lead out of the target folder.

# A scheme has at least two letters: one letter is a Windows drive.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+(?:://|::)")
_COPIED_BLOCK = 4 << 20
_LOCAL = ("file", "local")
# Characters that the name of a single file or folder cannot contain.
_FORBIDDEN = "/\\:\0" if os.name == "nt" else "/\0"


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether this is a URL for fsspec rather than a local path."""
    return isinstance(path, str) and _URL.match(path) is not None


@contextlib.contextmanager
def local_copy(path_or_url: str | os.PathLike[str]) -> Iterator[Path]:
    """A local path: the given one, or a temporary copy.

    A URL of a local file (`file://`) is not copied.
    """
    if not is_url(path_or_url):
        yield Path(path_or_url)
        return
    url = str(path_or_url)
    with tempfile.TemporaryDirectory(prefix="paritas-", ignore_cleanup_errors=True) as folder:
        with _translate_errors(url):
            tree = _copy_tree(url, Path(folder))
        yield tree


def write_to(url_or_path: str | os.PathLike[str], folder: Path) -> None:
    """Copy the files of a local folder to a folder, which is created; other files there stay."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not is_url(url_or_path):
        for file in files:
            target = Path(url_or_path) / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
        return
    url = str(url_or_path)
    with _translate_errors(url):
        store, root = _connect(url)
        for file in files:
            there = posixpath.join(root.rstrip("/"), file.relative_to(folder).as_posix())
            store.makedirs(posixpath.dirname(there), exist_ok=True)
            with file.open("rb") as read, store.open(there, "wb") as written:
                shutil.copyfileobj(read, written, _COPIED_BLOCK)


def names_at(url: str) -> set[str]:
    """The names at a URL; empty if nothing is there."""
    with _translate_errors(url):
        store, root = _connect(url)
        if not store.exists(root):
            return set()
        return {posixpath.basename(str(name).rstrip("/")) for name in store.ls(root, detail=False)}


@contextlib.contextmanager
def _translate_errors(url: str) -> Iterator[None]:
    """Turn whatever a store raises into one message: every store has its own exceptions."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise UsageError(f"{_without_password(url)} cannot be reached: {reason}") from error


def _without_password(url: str) -> str:
    """The URL without a password that may be in it."""
    return re.sub(r"(?<=://)[^/@\s]+@", "", url)


def _connect(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it."""
    try:
        fsspec: Any = importlib.import_module("fsspec")  # untyped
    except ImportError as error:
        raise UsageError(
            f"{_without_password(url)} needs fsspec, which is not installed: pip install fsspec"
        ) from error
    try:
        store, path = fsspec.core.url_to_fs(url)
    except ValueError as error:  # an unknown protocol
        protocols = ", ".join(sorted(fsspec.available_protocols()))
        raise UsageError(
            f"{_without_password(url)}: fsspec does not know this protocol ({error}): install the "
            f"package that provides it, or use one of {protocols}"
        ) from error
    except ImportError as error:  # it says which package is missing
        raise UsageError(f"{_without_password(url)}: {error}") from error
    return store, str(path)


def _copy_tree(url: str, folder: Path) -> Path:
    store, root = _connect(url)
    if _is_local(store) and store.exists(root):
        return Path(root)
    # Drop cached listings: the dump may have grown.
    store.invalidate_cache()
    if not store.exists(root):
        raise UsageError(f"{_without_password(url)} does not exist: give the URL of a dump")
    if store.isfile(root):
        target = folder / _check_name(posixpath.basename(root.rstrip("/")), url)
        _fetch(store, root, target)
        return target
    # Keep the name: it may contain the step or rank.
    name = posixpath.basename(root.rstrip("/"))
    top = folder / (name if name and _is_plain(name) else "dump")
    top.mkdir()
    names = store.find(root)
    if not names:
        raise UsageError(f"{_without_password(url)} is empty: give the URL of a dump")
    if len(names) > _MOST_FILES:
        raise UsageError(
            f"{_without_password(url)} has more than {_MOST_FILES} files: give one of its folders"
        )
    for name in names:
        target = top.joinpath(*_parts_inside(str(name), root, url))
        target.parent.mkdir(parents=True, exist_ok=True)
        _fetch(store, name, target)
    return top


def _is_local(store: Any) -> bool:
    protocols = (store.protocol,) if isinstance(store.protocol, str) else store.protocol
    return any(protocol in _LOCAL for protocol in protocols)


def _fetch(store: Any, name: str, target: Path) -> None:
    with store.open(name, "rb") as read, target.open("xb") as written:
        shutil.copyfileobj(read, written, _COPIED_BLOCK)


def _parts_inside(name: str, root: str, url: str) -> list[str]:
    """The path of a file relative to the dump, as parts."""
    above = root.rstrip("/") + "/"
    if not name.startswith(above):
        raise UsageError(f"{_without_password(url)} lists {name!r}, which is not below {root!r}")
    parts = name.removeprefix(above).split("/")
    return [_check_name(part, url) for part in parts]


def _check_name(part: str, url: str) -> str:
    if not _is_plain(part):
        raise UsageError(
            f"{_without_password(url)} has a file with {part!r} in its name, which is not allowed"
        )
    return part


def _is_plain(part: str) -> bool:
    return part not in ("", ".", "..") and not any(letter in part for letter in _FORBIDDEN)
