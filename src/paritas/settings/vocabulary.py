"""What can be set: the long options of the commands, by key and by environment variable.

The commands themselves are the list, so that an option is a setting as soon as it exists, and has
one type wherever its value comes from.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["as_variable", "bind_variables", "hint", "key_of", "settable", "variables"]

PREFIX = "PARITAS_"
# What the environment says to paritas besides settings; PARITAS_GUARD switches every guard.
SWITCHES = frozenset({"PARITAS_CONFIG", "PARITAS_NO_CONFIG", "PARITAS_GUARD"})
# What they replace cannot be had again: a setting that was forgotten must not ask for it.
ASKED_EACH_TIME = frozenset({"delete", "overwrite", "update"})
# Whose own options would say how to show the settings.
NO_TABLE = frozenset({"config"})


def settable(command: click.Command) -> dict[str, click.Option]:
    """Its options by their keys, of which one with two spellings has two."""
    return {
        key: option
        for option in command.params
        if isinstance(option, click.Option)
        for key in _long_names(option)
        if key not in ASKED_EACH_TIME
    }


def key_of(option: click.Option) -> str:
    """The one key that is shown: its first spelling."""
    return _long_names(option)[0]


def _long_names(option: click.Option) -> list[str]:
    return [name[2:] for name in option.opts if name.startswith("--")]


def variables(command_name: str, option: click.Option) -> list[str]:
    """The environment variables that set it: the command's own first, then that of all commands."""
    key = as_variable(key_of(option))
    own, common = f"{PREFIX}{as_variable(command_name)}_{key}", PREFIX + key
    return [own] if common in SWITCHES else [own, common]


def as_variable(name: str) -> str:
    """A command or a key as variables spell it."""
    return name.replace("-", "_").upper()


def bind_variables(command_name: str, command: click.Command) -> None:
    """Let click itself read the variables; its automatic names are those of Python's arguments."""
    for option in settable(command).values():
        option.envvar = variables(command_name, option)


def hint(word: str, known: Iterable[str]) -> str:
    """What to say of an unknown word."""
    word = word.replace("_", "-")
    if word in ASKED_EACH_TIME:
        return f"what --{word} replaces is asked for on the command line, each time"
    if word in NO_TABLE:
        return "that shows settings, and has none"
    listed = sorted(known)
    near = difflib.get_close_matches(word, listed, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(listed) or 'none'}"
