"""Settings: what a project says once, in place of options on every command line.

They are the long options of the commands. A file says them ([tool.paritas] of pyproject.toml, or
paritas.toml), then the environment, then the command line; each overrides the one before. Nothing
here imports torch, and nothing here knows the commands: those who do hand them in.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    "settings_for",
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
        start: The folder to look for a file from; the working directory by default.
        commands: Those that have a table; by default the pytest plugin alone, which is no command.
        chosen: This file and no other; PARITAS_CONFIG says the same, less loudly.
        no_file: The environment alone; PARITAS_NO_CONFIG=1 says the same, likewise.

    Raises:
        UsageError: A file is malformed, missing or cannot be read, or a folder has two.
    """
    file = _choose_file(start, chosen, no_file=no_file)
    return Settings(file, PLUGINS if commands is None else commands)


def settings_for(table: str, start: Path | None = None) -> dict[str, Any]:
    """What is set in a table that is no command's, by Python's names: that of the pytest plugin.

    Raises:
        UsageError: Likewise; or a key is unknown, or a value is not what it takes.
    """
    return load(start).for_command(table)


def _choose_file(start: Path | None, chosen: Path | None, *, no_file: bool) -> SettingsFile | None:
    if chosen is not None:
        return _read_chosen(chosen, f"--config {str(chosen)!r}")
    if no_file or _is_switched_off():
        return None
    if named := os.environ.get("PARITAS_CONFIG"):
        return _read_chosen(Path(named), f"PARITAS_CONFIG={named!r}")
    return find_file(_resolve_folder(start or Path()))


def _read_chosen(path: Path, asked: str) -> SettingsFile:
    full = _resolve_folder(path.parent) / path.name
    found = read_file(full)
    if found is None:
        why = f"{full} has no table [tool.paritas]" if full.exists() else f"there is no {full}"
        raise UsageError(f"{asked}: {why}; name a file with settings")
    return found


def _resolve_folder(folder: Path) -> Path:
    try:
        return folder.resolve()
    except OSError as error:
        raise UsageError(f"the working directory is gone ({error.strerror}); go to one") from error


def _is_switched_off() -> bool:
    said = os.environ.get("PARITAS_NO_CONFIG") or "0"
    if said not in {"0", "1"}:
        raise UsageError(f"PARITAS_NO_CONFIG must be 0 or 1, not {said!r}")
    return said == "1"
