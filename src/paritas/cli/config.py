"""`paritas config`: which settings are in force, and who says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paritas.cli.options import STDOUT, json_option, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paritas.settings import Setting, Settings


@click.command(short_help="Which settings are in force, and where they come from.")
@click.argument("command", required=False)
@json_option(
    "Write them to this file; to stdout, in place of the table, if it is -.", or_stdout=True
)
@click.pass_obj
def config(settings: Settings, command: str | None, json_path: Path | None) -> None:
    """Print every setting of COMMAND, or of all: its value, and where that comes from.

    A settings file is the nearest paritas.toml, or pyproject.toml with a table [tool.paritas], from
    the working directory upwards. Keys are the long options of the commands, in a table for each,
    or above the tables for all that have the option. The environment (PARITAS_VERIFY_DTYPE,
    PARITAS_DTYPE) overrides the file, and the command line both.

    Exit codes: 0 if all can be understood, else 2.
    """
    shown = [command] if command is not None else list(settings.commands)
    found = [setting for name in shown for setting in settings.in_force(name)]
    path = None if settings.file is None else settings.file.path
    if json_path is not None:
        _write(json_path, path, found)
    if json_path != STDOUT:
        none = "none (a paritas.toml, or a pyproject.toml with [tool.paritas], would be one)"
        click.echo(f"settings file: {path or none}")
        for line in _lines(found):
            click.echo(line)


def _write(target: Path, file: Path | None, found: Sequence[Setting]) -> None:
    rows = [
        {
            "command": it.command,
            "key": it.key,
            "value": it.given,
            "source": it.source,
            "origin": it.origin,
        }
        for it in found
    ]
    whole = {"file": None if file is None else str(file), "settings": rows}
    text = json.dumps(whole, indent=2, default=str)
    write_json(target, text.encode)


def _lines(found: Sequence[Setting]) -> Iterator[str]:
    """A block for each command, in columns that all of them share."""
    texts = [_as_toml(it.given) for it in found]
    keys = max((len(it.key) for it in found), default=0)
    values = max((len(text) for text in texts), default=0)
    command = None
    for it, text in zip(found, texts, strict=True):
        if it.command != command:
            command = it.command
            yield f"\n{command}"
        yield f"  {it.key:<{keys}}  {text:<{values}}  {it.origin}"


def _as_toml(value: Any) -> str:
    """As it could stand in the file."""
    if value is None:
        return "not set"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_as_toml(item) for item in value)}]"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return json.dumps(str(value), ensure_ascii=False)
