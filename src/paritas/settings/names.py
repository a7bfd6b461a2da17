"""Are all names known? A setting that is misspelt would otherwise be passed over in silence."""

from __future__ import annotations

import difflib
import os
from typing import TYPE_CHECKING

from paritas.errors import UsageError
from paritas.settings.vocabulary import (
    PREFIX,
    SWITCHES,
    as_variable,
    hint,
    settable,
    variables,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paritas.settings.files import SettingsFile
    from paritas.settings.in_force import Settings

__all__ = ["check_names", "known_variables"]

# How alike a variable is to one of ours before it is taken for a slip of the pen. Other programs
# may have variables that start as ours do; those of paritas's own tests are at 0.6.
_ALIKE = 0.8


def check_names(settings: Settings) -> None:
    """Refuse names that nothing answers to: tables and keys of the file, and variables.

    The commands are looked at only where something is set: importing them all takes a while.
    Whoever calls it knows all commands; a value is looked at by the command that takes it.

    Raises:
        UsageError: All of them, each in its line.
    """
    if settings.file is None and not any(name.startswith(PREFIX) for name in os.environ):
        return
    wrong = [] if settings.file is None else list(_wrong_in_file(settings, settings.file))
    wrong += _wrong_variables(settings)
    if wrong:
        raise UsageError("\n".join(wrong))


def _wrong_in_file(settings: Settings, file: SettingsFile) -> Iterator[str]:
    tables = dict(settings.commands)
    common = {key for command in tables.values() for key in settable(command)}
    for name, value in file.values.items():
        if isinstance(value, dict):
            if name not in tables:
                yield f"{file.full_place(name)}: no such table; {hint(name, tables)}"
                continue
            known = set(settable(tables[name]))
            yield from _wrong_keys(file, name, known)
        elif name in tables and name not in common:
            yield f"{file.full_place(name)} has to be a table; it is {value!r}"
    yield from _wrong_keys(file, None, common, other=frozenset(tables))


def _wrong_keys(
    file: SettingsFile, table: str | None, known: set[str], other: frozenset[str] = frozenset()
) -> Iterator[str]:
    for key in file.table(table):
        if key.replace("_", "-") not in known and key not in other:
            yield f"{file.full_place(table)}: no setting {key!r}; {hint(key, known)}"


def known_variables(settings: Settings) -> set[str]:
    """Every environment variable that sets something."""
    return {
        variable
        for name, command in settings.commands.items()
        for option in settable(command).values()
        for variable in variables(name, option)
    }


def _wrong_variables(settings: Settings) -> Iterator[str]:
    known = known_variables(settings) | SWITCHES
    short = [name.removeprefix(PREFIX) for name in known]
    for variable in sorted(os.environ):
        if not variable.startswith(PREFIX) or variable in known:
            continue
        # Without what all have in common, which would make any two of them alike.
        word = variable.removeprefix(PREFIX)
        near = difflib.get_close_matches(word, short, n=1, cutoff=_ALIKE)
        family = _family(settings, variable)
        if near:
            meant = f"did you mean {PREFIX}{near[0]}?"
        elif family:
            meant = f"known are {', '.join(family)}"
        else:
            continue
        yield f"environment variable {variable}={os.environ[variable]!r}: no such setting; {meant}"


def _family(settings: Settings, variable: str) -> list[str]:
    """The variables of the command that it starts with, if it does with one."""
    starts = {f"{PREFIX}{as_variable(name)}_": name for name in settings.commands}
    found = max((start for start in starts if variable.startswith(start)), key=len, default=None)
    if found is None:
        return []
    options = settable(settings.commands[starts[found]]).values()
    return sorted({variables(starts[found], option)[0] for option in options})
