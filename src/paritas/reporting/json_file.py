"""Results as JSON files, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

from paritas.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from paritas.numerics.findings import Verdict


def check_writable(path: Path) -> None:
    """Raise `UsageError` now, not after a long run, where the file could not be written."""
    if path.is_dir():
        raise UsageError(f"cannot write {str(path)!r}: it is a directory; name a file in it")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error.strerror or error}") from error


def write_verdict(path: Path, verdict: Verdict) -> None:
    """Write what `Verdict.from_json` reads."""
    write_whole(path, verdict.to_json())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file of JSON; a reader never sees half of it."""
    # Not `tempfile`, which would leave the file readable to its owner alone.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_bytes(content + b"\n")
        unfinished.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    finally:  # Ctrl-C, too, leaves no part of it
        unfinished.unlink(missing_ok=True)
