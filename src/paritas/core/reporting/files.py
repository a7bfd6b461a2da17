"""Writing result files atomically."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from typing import TYPE_CHECKING, Any

import msgspec

from paritas.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


def check_writable(path: Path) -> None:
    """Raise `UsageError` now, not after a long run, if the file cannot be written."""
    if path.is_dir():
        raise UsageError(f"cannot write {str(path)!r}: it is a directory; give a file")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error.strerror or error}") from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a text file and a final newline atomically."""
    with replacing(path) as unfinished:
        unfinished.write_bytes(content + b"\n")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which replaces the file at the end of the block.

    Raises:
        UsageError: it cannot be written.
    """
    # Not `tempfile`, which makes files readable only by their owner.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        yield unfinished
        unfinished.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    finally:  # also after Ctrl-C
        unfinished.unlink(missing_ok=True)


def write_certificates(folder: Path, certificates: Mapping[str, dict[str, Any]]) -> None:
    """Write each certificate of a proof to a file of its own.

    Raises:
        UsageError: the folder cannot be written.
    """
    create_folder(folder)
    for name, certificate in certificates.items():
        file = re.sub(r"\W+", "_", name).strip("_")[:_LONGEST_NAME]
        write_whole(folder / f"{file}.json", msgspec.json.encode(certificate))


_LONGEST_NAME = 120


def create_folder(folder: Path) -> None:
    """Create a folder and its parents; raise `UsageError` if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create {str(folder)!r}: {error.strerror or error}") from error


# What `paritas verify-graph` writes.
GRAPH_JSON = "results.json"
