"""Settings handed to click, as what the options of a command default to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import click

from paritas.settings import NO_TABLE, PLUGINS, Settings, check_names, load

__all__ = ["settle"]


class _Tables(Mapping[str, click.Command]):
    """All that has settings; a command is imported when one looks."""

    def __init__(self, group: click.Group, ctx: click.Context) -> None:
        self._group, self._ctx = group, ctx
        self._names = [name for name in group.list_commands(ctx) if name not in NO_TABLE]

    def __getitem__(self, name: str) -> click.Command:
        command = self._group.get_command(self._ctx, name) if name in self._names else None
        return PLUGINS[name] if command is None else command

    def __iter__(self) -> Iterator[str]:
        yield from self._names
        yield from PLUGINS

    def __len__(self) -> int:
        return len(self._names) + len(PLUGINS)


def settle(ctx: click.Context, group: click.Group, command: str) -> Settings:
    """Read the settings, and give the command its own.

    Raises:
        UsageError: A file cannot be read, a name is unknown, or the command cannot take a value.
    """
    chosen, no_file = ctx.params["settings_file"], ctx.params["no_config"]
    if chosen is not None and no_file:
        ctx.fail(f"--config {str(chosen)!r} and --no-config contradict each other; give one")
    settings = load(commands=_Tables(group, ctx), chosen=chosen, no_file=no_file)
    check_names(settings)
    if command not in NO_TABLE:
        settings.for_command(command)  # its errors name file and key, which click's cannot
        ctx.default_map = {command: settings.default_map(command)}
    return settings
