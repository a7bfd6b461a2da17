"""The settings file: which one is in force, and what stands in it, not yet understood."""

from __future__ import annotations

import dataclasses
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SettingsFile", "find_file", "read_file"]

OWN, SHARED = "paritas.toml", "pyproject.toml"
# Where one of these lies, the project ends: what is above it was written for something else.
_REPOSITORY = (".git", ".hg")
_WITHOUT = "to go without settings files: PARITAS_NO_CONFIG=1"


@dataclasses.dataclass(frozen=True)
class SettingsFile:
    """A file that was read.

    Attributes:
        path: Where it lies, in full.
        prefix: What its tables are below: `tool.paritas` in a pyproject.toml, else nothing.
        values: What stands below that, as TOML gives it.
    """

    path: Path
    prefix: str
    values: Mapping[str, Any]

    def table(self, name: str | None) -> Mapping[str, Any]:
        """What is said for one command, or, under no name, for all of them."""
        if name is None:
            return {key: it for key, it in self.values.items() if not isinstance(it, dict)}
        found = self.values.get(name, {})
        return found if isinstance(found, dict) else {}

    def place(self, table: str | None) -> str:
        """The file by its short name and the table by its header, as a person looks for it."""
        header = ".".join(part for part in (self.prefix, table) if part)
        return f"{self.path.name} [{header}]" if header else f"{self.path.name}, above its tables"

    def full_place(self, table: str | None) -> str:
        """The same with the folder: an error may be read far from it."""
        return f"{self.path.parent / self.place(table)}"


def find_file(start: Path) -> SettingsFile | None:
    """The nearest settings file, from a folder upwards.

    A pyproject.toml counts only with a table [tool.paritas]: those of the packages in a repository
    are passed over on the way to the one of the whole.

    Raises:
        UsageError: A file is malformed, cannot be read or is a stranger's, or a folder has two.
    """
    for folder in (start, *start.parents):
        found = [it for name in (OWN, SHARED) if (it := read_file(folder / name)) is not None]
        if len(found) > 1:
            raise UsageError(
                f"settings in two places: {folder / OWN} and [tool.paritas] of {folder / SHARED}; "
                "move them to one of these"
            )
        if found:
            _refuse_strangers(found[0].path, start)
            return found[0]
        if any(_mode(folder / name) is not None for name in _REPOSITORY):
            return None
    return None


def read_file(path: Path) -> SettingsFile | None:
    """Read one file; None where there is none, or it is a pyproject.toml that says nothing to us.

    Raises:
        UsageError: It is malformed, or cannot be read.
    """
    import tomllib  # here, because most runs have no file

    mode = _mode(path)
    if mode is None:
        return None
    if not stat.S_ISREG(mode):
        raise UsageError(f"{path} is no file; rename it, or, {_WITHOUT}")
    try:
        read = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; {_WITHOUT}") from error
    except UnicodeDecodeError as error:
        where = f"byte {error.start} ({error.object[error.start]:#04x})"
        raise UsageError(f"{path} is no TOML: it is not UTF-8 at {where}; {_WITHOUT}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is no TOML: {error}; {_WITHOUT}") from error
    if path.name != SHARED:
        return SettingsFile(path, "", read)
    tools = read.get("tool", {})
    ours = tools.get("paritas") if isinstance(tools, dict) else None
    if ours is None:
        return None
    if not isinstance(ours, dict):
        raise UsageError(f"{path}: tool.paritas is {ours!r}; it has to be a table, [tool.paritas]")
    return SettingsFile(path, "tool.paritas", ours)


def _refuse_strangers(path: Path, start: Path) -> None:
    """Settings name code to run and files to write: not for whoever may write to /tmp to say.

    The owner of the folder that one works in may, be it a checkout that was mounted.
    """
    if path.parent == start or not hasattr(os, "geteuid"):
        return
    owner = path.stat().st_uid
    if owner not in {0, os.geteuid(), start.stat().st_uid}:
        raise UsageError(
            f"{path} belongs to another user (uid {owner}); to take it all the same: "
            f"PARITAS_CONFIG={path}; {_WITHOUT}"
        )


def _mode(path: Path) -> int | None:
    """What lies there; a folder that may not be looked into is not one that has nothing."""
    try:
        return os.stat(path).st_mode  # noqa: PTH116  (Path.is_file says no where it cannot tell)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(
            f"{path.parent} cannot be searched for settings: {error.strerror}; {_WITHOUT}"
        ) from error
