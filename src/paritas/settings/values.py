"""A value of TOML as the option takes it: as if it had been written on the command line."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["as_given"]

# How the help calls what may be a path, where a URL or a name of Python may stand, too.
_PATHS = {"DIR", "DUMP", "FILE"}


def as_given(option: click.Option, value: Any, folder: Path) -> Any:
    """Make a value into what click is to convert.

    Click is lenient where a file should not be: it would cut 2.7 down to 2 and take a word for the
    list of its letters. As text, each value meets the check that the command line has.

    Args:
        folder: Where the file lies: a relative path is meant from there.

    Raises:
        click.BadParameter: It is not of the shape that the option takes.
    """
    if option.multiple:
        if not isinstance(value, list):
            raise click.BadParameter('it has to be an array, as in ["a", "b"]')
        return [_text(option, item, folder) for item in value]
    if option.is_flag:
        if not isinstance(value, bool):
            raise click.BadParameter("it has to be true or false")
        return value
    return _text(option, value, folder)


def _text(option: click.Option, value: Any, folder: Path) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise click.BadParameter("it has to be a string or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise click.BadParameter("it has to be finite")
    text = str(value)
    if "\0" in text:
        raise click.BadParameter("it has to be without a NUL")  # which no command line can hold
    return str(folder / text) if text and _is_path(option, text) else text


def _is_path(option: click.Option, text: str) -> bool:
    if isinstance(option.type, click.Path):
        return not (option.type.allow_dash and text == "-")
    return ":" not in text and not _PATHS.isdisjoint((option.metavar or "").split("|"))
