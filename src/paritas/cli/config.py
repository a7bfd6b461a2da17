"""`paritas config`: the settings in effect, and where each comes from."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from paritas.cli.options import STDOUT, json_option, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from paritas.settings import Setting, Settings


@click.command(short_help="Show the settings in effect, and where they come from.")
@click.argument("command", required=False)
@json_option("Write them to this file; - is stdout, instead of the table.", or_stdout=True)
@click.pass_obj
def config(settings: Settings, command: str | None, json_path: Path | None) -> None:
    """Print every setting of COMMAND, or of all commands: its value, and where it comes from.

    The settings file is the nearest paritas.toml, or pyproject.toml with a table [tool.paritas],
    from the working directory upwards. Keys are the long options of the commands: in the command's
    table, or above the tables for every command that has the option. Environment variables
    (PARITAS_VERIFY_DTYPE, PARITAS_DTYPE) override the file, and the command line overrides both.

    Exit codes: 0 if all settings are valid, else 2.
    """
    shown = [command] if command is not None else list(settings.commands)
    found = [setting for name in shown for setting in settings.in_force(name)]
    path = None if settings.file is None else settings.file.path
    if json_path is not None:
        _write(json_path, path, found)
    if json_path != STDOUT:
        none = "none (looked for paritas.toml, and pyproject.toml with [tool.paritas])"
        click.echo(f"settings file: {path or none}")
        for line in _lines(found):
            click.echo(line)


def _write(target: Path, file: Path | None, found: Sequence[Setting]) -> None:
    names = {"command": "command", "key": "key", "value": "given"}
    names |= {"source": "source", "origin": "origin"}
    rows = [{name: getattr(it, field) for name, field in names.items()} for it in found]
    whole = {"file": None if file is None else str(file), "settings": rows}
    text = json.dumps(whole, indent=2, default=str)
    write_json(target, text.encode)


def _lines(found: Sequence[Setting]) -> Iterator[str]:
    """A block of lines for each command, with columns aligned over all blocks."""
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
    """The value as TOML."""
    if value is None:
        return "not set"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_as_toml(item) for item in value)}]"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return json.dumps(str(value), ensure_ascii=False)
