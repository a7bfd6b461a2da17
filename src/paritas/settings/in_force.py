"""The settings in force: file and environment together, as click resolves them."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from paritas.errors import UsageError
from paritas.settings.values import as_given
from paritas.settings.vocabulary import hint, key_of, settable, variables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paritas.settings.files import SettingsFile

__all__ = ["Setting", "Settings"]

Source = Literal["default", "file", "environment"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One option of one command, with what it has before a command line is read.

    Attributes:
        key: As it is written in a file.
        name: As Python calls it.
        given: As it was written, a flag as true or false; of a default, the default.
        value: What the command gets.
        origin: In words: `default`, a file and its table, or an environment variable.
    """

    command: str
    key: str
    name: str
    given: Any
    value: Any
    source: Source
    origin: str


@dataclasses.dataclass(frozen=True)
class Settings:
    """What file and environment say.

    Attributes:
        file: None where there is none, or none was to be read.
        commands: Those that have a table, by name.
    """

    file: SettingsFile | None
    commands: Mapping[str, click.Command]

    def for_command(self, command: str) -> dict[str, Any]:
        """What is set for a command, by Python's names; what is left at its default is not in it.

        Raises:
            UsageError: A key of its table is unknown, or a value is not what the option takes.
        """
        found = self.in_force(command)
        return {setting.name: setting.value for setting in found if setting.source != "default"}

    def origin(self, command: str, key: str) -> str:
        """Where a setting comes from, in words; the key as in a file, or as Python spells it."""
        wanted = key.replace("_", "-")
        options = settable(self._command(command))
        if wanted not in options:
            raise UsageError(f"{command} has no setting {key!r}; {hint(key, options)}")
        found = self.in_force(command)
        return next(it.origin for it in found if it.key == key_of(options[wanted]))

    def in_force(self, command: str) -> list[Setting]:
        """Every setting of a command; likewise."""
        context = click.Context(self._command(command), info_name=command)
        context.default_map = self.default_map(command)
        options = settable(context.command).items()
        return [_resolve(self, context, it) for key, it in options if key == key_of(it)]

    def default_map(self, command: str) -> dict[str, Any]:
        """What the file alone says, as a context of click takes it; the variables it reads itself.

        Raises:
            UsageError: Likewise.
        """
        if self.file is None:
            return {}
        options = settable(self._command(command))
        said: dict[str, Any] = {}
        for table in (None, command):
            keys: dict[str, str] = {}
            for key, value in self.file.table(table).items():
                option = options.get(key.replace("_", "-"))
                if option is None and table is None:
                    continue  # for other commands
                place = self.file.full_place(table)
                if option is None:
                    raise UsageError(f"{place}: no setting {key!r}; {hint(key, options)}")
                if (twin := keys.setdefault(key_of(option), key)) != key:
                    raise UsageError(f"{place}: {twin!r} and {key!r} are one setting; keep one")
                try:
                    said[str(option.name)] = as_given(option, value, self.file.path.parent)
                except click.BadParameter as error:
                    raise _refusal(f"{place} {key} = {value!r}", error) from error
        return said

    def _command(self, name: str) -> click.Command:
        if name not in self.commands:
            raise UsageError(f"no settings for {name!r}; {hint(name, self.commands)}")
        return self.commands[name]


def _resolve(settings: Settings, context: click.Context, option: click.Option) -> Setting:
    """Ask click what the option would get from an empty command line, and why."""
    given, came = option.consume_value(context, {})
    command, key = str(context.info_name), key_of(option)

    def setting(given: Any, value: Any, source: Source, origin: str) -> Setting:
        return Setting(
            command=command,
            key=key,
            name=str(option.name),
            given=given,
            value=value,
            source=source,
            origin=origin,
        )

    if came is ParameterSource.ENVIRONMENT:
        variable = next(name for name in variables(command, option) if os.environ.get(name))
        value = _convert(option, context, given, f"{variable}={os.environ[variable]!r}")
        return setting(value if option.is_flag else given, value, "environment", variable)
    if came is ParameterSource.DEFAULT_MAP and settings.file is not None:
        table = command if _says(settings.file, command, option) else None
        place = f"{settings.file.full_place(table)} {key} = {given!r}"
        value = _convert(option, context, given, place)
        return setting(given, value, "file", settings.file.place(table))
    default = option.to_info_dict()["default"]
    return setting(default, default, "default", "default")


def _says(file: SettingsFile, table: str, option: click.Option) -> bool:
    spellings = {name.removeprefix("--") for name in option.opts}
    return any(key.replace("_", "-") in spellings for key in file.table(table))


def _convert(option: click.Option, context: click.Context, given: Any, said: str) -> Any:
    try:
        return option.type_cast_value(context, given)
    except click.BadParameter as error:
        raise _refusal(said, error) from error


def _refusal(said: str, error: click.BadParameter) -> UsageError:
    return UsageError(f"{said}: {error.message}")
