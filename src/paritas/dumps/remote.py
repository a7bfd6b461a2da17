"""Dumps that are elsewhere: whatever fsspec reaches is brought here, and results are put there.

What a store calls its files is its own affair: no name leads out of the folder that they go to.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import posixpath
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["is_url", "local_copy", "names_at", "write_to"]

# A scheme has two letters at least: one is a drive of Windows'.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+(?:://|::)")
_BLOCK = 4 << 20
_MOST_FILES = 2_000_000
_LOCAL = ("file", "local")
# What would be more than the name of one file or folder.
_FORBIDDEN = "/\\:\0" if os.name == "nt" else "/\0"


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether it is to be reached by fsspec, rather than a path of this machine."""
    return isinstance(path, str) and _URL.match(path) is not None


@contextlib.contextmanager
def local_copy(path_or_url: str | os.PathLike[str]) -> Iterator[Path]:
    """A path on this machine: the given one, or that of a copy, which is removed in the end.

    A URL of a place on this machine (`file://`) is that place: it is not copied.

    Raises:
        UsageError: nothing is there, or nobody knows how to get there.
    """
    if not is_url(path_or_url):
        yield Path(path_or_url)
        return
    url = str(path_or_url)
    with tempfile.TemporaryDirectory(prefix="paritas-", ignore_cleanup_errors=True) as folder:
        with _naming(url):
            found = _copy(url, Path(folder))
        yield found


def write_to(url_or_path: str | os.PathLike[str], folder: Path) -> None:
    """Put the files of a folder somewhere; what is there of other names stays.

    Args:
        url_or_path: the folder that they go to, which is made where it is missing.
        folder: on this machine.

    Raises:
        UsageError: it cannot be written to.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not is_url(url_or_path):
        for file in files:
            target = Path(url_or_path) / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
        return
    url = str(url_or_path)
    with _naming(url):
        store, root = _reached(url)
        for file in files:
            there = posixpath.join(root.rstrip("/"), file.relative_to(folder).as_posix())
            store.makedirs(posixpath.dirname(there), exist_ok=True)
            with file.open("rb") as read, store.open(there, "wb") as written:
                shutil.copyfileobj(read, written, _BLOCK)


def names_at(url: str) -> set[str]:
    """The names of what is at a URL; none where nothing is there yet.

    Raises:
        UsageError: it cannot be reached.
    """
    with _naming(url):
        store, root = _reached(url)
        if not store.exists(root):
            return set()
        return {posixpath.basename(str(name).rstrip("/")) for name in store.ls(root, detail=False)}


@contextlib.contextmanager
def _naming(url: str) -> Iterator[None]:
    """Whatever a store raises becomes one message: each has exceptions of its own."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        told = str(error) or type(error).__name__
        raise UsageError(f"{_shown(url)} cannot be reached: {told}") from error


def _shown(url: str) -> str:
    """The URL without a password that may be in it."""
    return re.sub(r"(?<=://)[^/@\s]+@", "", url)


def _reached(url: str) -> tuple[Any, str]:
    """The store that a URL is of, and the path there."""
    try:
        fsspec: Any = importlib.import_module("fsspec")  # it has no types
    except ImportError as error:
        raise UsageError(
            f"{_shown(url)} needs fsspec, which is not installed: pip install fsspec"
        ) from error
    try:
        store, path = fsspec.core.url_to_fs(url)
    except ValueError as error:  # a protocol that it has never heard of
        known = ", ".join(sorted(fsspec.available_protocols()))
        raise UsageError(
            f"{_shown(url)}: fsspec knows no such place ({error}): install the package that brings "
            f"it, or give one of {known}"
        ) from error
    except ImportError as error:  # it says which package is missing
        raise UsageError(f"{_shown(url)}: {error}") from error
    return store, str(path)


def _copy(url: str, folder: Path) -> Path:
    store, root = _reached(url)
    if _is_local(store) and store.exists(root):
        return Path(root)
    # Otherwise an earlier listing may be remembered, of a dump that has grown since.
    store.invalidate_cache()
    if not store.exists(root):
        raise UsageError(f"{_shown(url)} is not there: give a dump")
    if store.isfile(root):
        target = folder / _own_name(posixpath.basename(root.rstrip("/")), url)
        _fetch(store, root, target)
        return target
    # Of the same name, which may say which step or rank it is.
    name = posixpath.basename(root.rstrip("/"))
    top = folder / (name if name and _is_plain(name) else "dump")
    top.mkdir()
    names = store.find(root)
    if not names:
        raise UsageError(f"{_shown(url)} is empty: give a dump")
    if len(names) > _MOST_FILES:
        raise UsageError(f"{_shown(url)} has more than {_MOST_FILES} files: give a part")
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
        shutil.copyfileobj(read, written, _BLOCK)


def _parts_inside(name: str, root: str, url: str) -> list[str]:
    """The folders and the name of a file, below that of the dump."""
    above = root.rstrip("/") + "/"
    if not name.startswith(above):
        raise UsageError(f"{_shown(url)} lists {name!r}, which is not below {root!r}")
    parts = name.removeprefix(above).split("/")
    return [_own_name(part, url) for part in parts]


def _own_name(part: str, url: str) -> str:
    if not _is_plain(part):
        raise UsageError(f"{_shown(url)} has a file with {part!r} in its name: it is not copied")
    return part


def _is_plain(part: str) -> bool:
    return part not in ("", ".", "..") and not any(letter in part for letter in _FORBIDDEN)
