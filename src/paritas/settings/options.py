"""Settings: the file that holds them, the options they set, and what is in force."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from paritas.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


# --- What can be set: the long options of the commands, by key and by environment variable --------

# The commands themselves are the list, so that an option is a setting as soon as it exists, and has
# one type wherever its value comes from.

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
    return did_you_mean(word, sorted(known))


# --- The table of the pytest plugin: in the form of a command, so that it is read as the others ---

# Whether goldens are written anew is no setting: with it, no test that compares with them could
# fail.

_PYTEST = click.Command(
    "pytest",
    params=[
        click.Option(["--guard"], is_flag=True, help="Check every torch.compile of the suite."),
        click.Option(
            ["--every"],
            type=click.FloatRange(min=0, min_open=True),
            metavar="N|SHARE",
            help="Of the guarded graphs, check each N-th call, or a share of the calls.",
        ),
        click.Option(["--strict"], is_flag=True, help="Count unstable findings as failures."),
        click.Option(
            ["--golden-dir"],
            type=click.Path(file_okay=False, path_type=Path),
            help="Where goldens lie, in place of a folder beside the test.",
        ),
        click.Option(
            ["--report"],
            type=click.Path(file_okay=False, path_type=Path),
            help="Where a page for each failure goes.",
        ),
    ],
)
bind_variables("pytest", _PYTEST)

PLUGINS = {"pytest": _PYTEST}


# --- The settings file ----------------------------------------------------------------------------

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
        if any(_file_mode(folder / name) is not None for name in _REPOSITORY):
            return None
    return None


def read_file(path: Path) -> SettingsFile | None:
    """Read one file; None where there is none, or it is a pyproject.toml that says nothing to us.

    Raises:
        UsageError: It is malformed, or cannot be read.
    """
    import tomllib  # here, because most runs have no file

    mode = _file_mode(path)
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


def _file_mode(path: Path) -> int | None:
    """What lies there; a folder that may not be looked into is not one that has nothing."""
    try:
        return os.stat(path).st_mode  # noqa: PTH116  (Path.is_file says no where it cannot tell)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(
            f"{path.parent} cannot be searched for settings: {error.strerror}; {_WITHOUT}"
        ) from error


# --- A value of TOML as the option takes it: as if it had been written on the command line --------

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
        return [_as_text(option, item, folder) for item in value]
    if option.is_flag:
        if not isinstance(value, bool):
            raise click.BadParameter("it has to be true or false")
        return value
    return _as_text(option, value, folder)


def _as_text(option: click.Option, value: Any, folder: Path) -> str:
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


# --- The settings in force: file and environment together, as click resolves them -----------------

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
                    raise _usage_error(f"{place} {key} = {value!r}", error) from error
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
        table = command if _file_sets(settings.file, command, option) else None
        place = f"{settings.file.full_place(table)} {key} = {given!r}"
        value = _convert(option, context, given, place)
        return setting(given, value, "file", settings.file.place(table))
    default = option.to_info_dict()["default"]
    return setting(default, default, "default", "default")


def _file_sets(file: SettingsFile, table: str, option: click.Option) -> bool:
    spellings = {name.removeprefix("--") for name in option.opts}
    return any(key.replace("_", "-") in spellings for key in file.table(table))


def _convert(option: click.Option, context: click.Context, given: Any, said: str) -> Any:
    try:
        return option.type_cast_value(context, given)
    except click.BadParameter as error:
        raise _usage_error(said, error) from error


def _usage_error(said: str, error: click.BadParameter) -> UsageError:
    return UsageError(f"{said}: {error.message}")


# --- Names that nothing answers to ----------------------------------------------------------------

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
        family = _variables_of_command(settings, variable)
        if near:
            meant = f"did you mean {PREFIX}{near[0]}?"
        elif family:
            meant = f"known are {', '.join(family)}"
        else:
            continue
        yield f"environment variable {variable}={os.environ[variable]!r}: no such setting; {meant}"


def _variables_of_command(settings: Settings, variable: str) -> list[str]:
    """The variables of the command that it starts with, if it does with one."""
    starts = {f"{PREFIX}{as_variable(name)}_": name for name in settings.commands}
    found = max((start for start in starts if variable.startswith(start)), key=len, default=None)
    if found is None:
        return []
    options = settable(settings.commands[starts[found]]).values()
    return sorted({variables(starts[found], option)[0] for option in options})
