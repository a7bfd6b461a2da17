"""Settings: options that a project sets once instead of on every command line.

They are the long options of the commands. A file sets them ([tool.paritas] of pyproject.toml, or
paritas.toml), then the environment, then the command line; each overrides the one before. Nothing
here imports torch or knows the commands: the caller passes them in.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from paritas.errors import UsageError
from paritas.settings.options import (
    NO_TABLE,
    PLUGINS,
    Setting,
    Settings,
    SettingsFile,
    bind_variables,
    check_names,
    find_file,
    read_file,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import click

__all__ = [
    "NO_TABLE",
    "PLUGINS",
    "Setting",
    "Settings",
    "bind_variables",
    "check_names",
    "load",
]


def load(
    start: Path | None = None,
    *,
    commands: Mapping[str, click.Command] | None = None,
    chosen: Path | None = None,
    no_file: bool = False,
) -> Settings:
    """Read the settings.

    Args:
        start: The folder where the search for a file begins; default: the working directory.
        commands: The commands with a table; default: only the pytest plugin, which has no command.
        chosen: Read this file and no other, like PARITAS_CONFIG.
        no_file: Read no file, like PARITAS_NO_CONFIG=1.

    Raises:
        UsageError: A file is malformed, missing or unreadable, or a folder has two.
    """
    file = _choose_file(start, chosen, no_file=no_file)
    return Settings(file, PLUGINS if commands is None else commands)


def _choose_file(start: Path | None, chosen: Path | None, *, no_file: bool) -> SettingsFile | None:
    if chosen is not None:
        return _read_chosen(chosen, f"--config {str(chosen)!r}")
    if no_file or _is_switched_off():
        return None
    if named := os.environ.get("PARITAS_CONFIG"):
        return _read_chosen(Path(named), f"PARITAS_CONFIG={named!r}")
    return find_file(_resolve_folder(start or Path()))


def _read_chosen(path: Path, source: str) -> SettingsFile:
    full = _resolve_folder(path.parent) / path.name
    found = read_file(full)
    if found is None:
        why = f"{full} has no table [tool.paritas]" if full.exists() else f"{full} does not exist"
        raise UsageError(f"{source}: {why}; give a file with settings")
    return found


def _resolve_folder(folder: Path) -> Path:
    try:
        return folder.resolve()
    except OSError as error:
        raise UsageError(
            f"the working directory no longer exists ({error.strerror}); change to another one"
        ) from error


def _is_switched_off() -> bool:
    value = os.environ.get("PARITAS_NO_CONFIG") or "0"
    if value not in {"0", "1"}:
        raise UsageError(f"PARITAS_NO_CONFIG must be 0 or 1, not {value!r}")
    return value == "1"
