"""Settings: options that a project sets once instead of on every command line.

They are the long options of the commands. A file sets them ([tool.paritas] of pyproject.toml, or
paritas.toml), then the environment, then the command line; each overrides the one before. Nothing
here imports torch or knows the commands: the caller passes them in.

click reads the values, from its `default_map` and the variables. What it does not do is here: find
the file, hold TOML values to the type of their option, refuse unknown names, and say where each
value comes from.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.metadata
import math
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from paritas.core.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


@functools.cache
def own_version() -> str:
    """The installed version, looked up once because the lookup reads package folders."""
    return importlib.metadata.version("paritas")


# --- What can be set: the long options of the commands, by key and by environment variable --------

# The commands define the settings: every option is one, with the same type wherever it is set.

PREFIX = "PARITAS_"
# Other environment variables of paritas; PARITAS_GUARD switches every guard.
SWITCHES = frozenset({"PARITAS_CONFIG", "PARITAS_NO_CONFIG", "PARITAS_GUARD"})
# These destroy data, so a forgotten setting must not turn them on.
COMMAND_LINE_ONLY = frozenset({"delete", "overwrite", "update"})
# Commands without settings: this one shows them.
NO_TABLE = frozenset({"config"})


def settable(command: click.Command) -> dict[str, click.Option]:
    """The options of a command by key; an option with two spellings has two keys.

    An option that does something else instead, such as `--list`, is not a setting.
    """
    return {
        key: option
        for option in command.params
        if isinstance(option, click.Option) and option.expose_value
        for key in _long_names(option)
        if key not in COMMAND_LINE_ONLY
    }


def key_of(option: click.Option) -> str:
    """The key to show: the first spelling."""
    return _long_names(option)[0]


def _long_names(option: click.Option) -> list[str]:
    return [name[2:] for name in option.opts if name.startswith("--")]


def variables(command_name: str, option: click.Option) -> list[str]:
    """The environment variables of an option: the command's own, then the one of all commands."""
    key = as_variable(key_of(option))
    own_variable, common = f"{PREFIX}{as_variable(command_name)}_{key}", PREFIX + key
    return [own_variable] if common in SWITCHES else [own_variable, common]


def as_variable(name: str) -> str:
    """A command or key as spelt in a variable."""
    return name.replace("-", "_").upper()


def bind_variables(command_name: str, command: click.Command) -> None:
    """Let click read the variables; its automatic names would be those of Python's arguments."""
    for option in settable(command).values():
        option.envvar = variables(command_name, option)


def hint(word: str, known_words: Iterable[str]) -> str:
    """The advice for an unknown word."""
    word = word.replace("_", "-")
    if word in COMMAND_LINE_ONLY:
        return f"--{word} can only be given on the command line"
    if word in NO_TABLE:
        return f"the command {word!r} has no settings"
    return did_you_mean(word, sorted(known_words))


# --- A setting that Python reads, too -------------------------------------------------------------

_LOCATE_SECONDS = PREFIX + "LOCATE_SECONDS"
LOCATE_SECONDS = 60.0


def default_locate_seconds() -> float:
    """How long a failing `verify` looks for where the failure starts, unless it is told.

    The variable of the commands also holds for `verify()` in Python: a suite of tests can set it
    without a change of its tests.

    Raises:
        UsageError: The variable is not a number of seconds.
    """
    raw_seconds = os.environ.get(_LOCATE_SECONDS) or str(LOCATE_SECONDS)
    try:
        seconds = float(raw_seconds)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise UsageError(
            f"{_LOCATE_SECONDS} must be a number of seconds, 0 to turn it off, not {raw_seconds!r}"
        )
    return seconds


# --- The table of the pytest plugin, in the form of a command -------------------------------------

# Updating goldens is not a setting: with it, no test that compares with them could fail.

_PYTEST = click.Command(
    "pytest",
    params=[
        click.Option(["--guard"], is_flag=True, help="Check every torch.compile of the tests."),
        click.Option(
            ["--every"],
            type=click.FloatRange(min=0, min_open=True),
            metavar="N|SHARE",
            help="Check every N-th call of a guarded graph, or a share of the calls.",
        ),
        click.Option(["--strict"], is_flag=True, help="Count unstable findings as failures."),
        click.Option(
            ["--locate-seconds"],
            type=click.FloatRange(min=0),
            metavar="SECONDS",
            help="The time limit for finding where a failure of parity.verify starts; 0 turns it "
            "off.",
        ),
        click.Option(
            ["--golden-dir"],
            type=click.Path(file_okay=False, path_type=Path),
            help="Folder of the goldens; default: a folder beside the test.",
        ),
        click.Option(
            ["--report"],
            type=click.Path(file_okay=False, path_type=Path),
            help="Folder for a page per failure.",
        ),
    ],
)
bind_variables("pytest", _PYTEST)

PLUGINS = {"pytest": _PYTEST}


# --- The settings file ----------------------------------------------------------------------------

OWN, SHARED = "paritas.toml", "pyproject.toml"
# A folder with one of these is the top of the project: files above it belong to something else.
_REPOSITORY = (".git", ".hg")
_WITHOUT = "to ignore settings files: PARITAS_NO_CONFIG=1"


@dataclasses.dataclass(frozen=True)
class SettingsFile:
    """A settings file.

    Attributes:
        path: Its full path.
        prefix: The parent of its tables: `tool.paritas` in a pyproject.toml, otherwise empty.
        values: The contents below the prefix.
    """

    path: Path
    prefix: str
    values: Mapping[str, Any]

    def table(self, name: str | None) -> Mapping[str, Any]:
        """The settings of one command, or of all commands if the name is None."""
        if name is None:
            return {key: it for key, it in self.values.items() if not isinstance(it, dict)}
        section = self.values.get(name, {})
        return section if isinstance(section, dict) else {}

    def place(self, table: str | None) -> str:
        """The short name of the file and the header of the table, for messages."""
        header = ".".join(part for part in (self.prefix, table) if part)
        return f"{self.path.name} [{header}]" if header else f"{self.path.name}, top level"

    def full_place(self, table: str | None) -> str:
        """Like `place`, with the folder."""
        return f"{self.path.parent / self.place(table)}"


def find_file(start: Path) -> SettingsFile | None:
    """The nearest settings file, from a folder upwards.

    A pyproject.toml counts only with a table [tool.paritas], so that the packages of a repository
    use the settings of the whole repository.

    Raises:
        UsageError: A file is malformed, unreadable or another user's, or a folder has two.
    """
    for folder in (start, *start.parents):
        settings_files = [
            it for name in (OWN, SHARED) if (it := read_file(folder / name)) is not None
        ]
        if len(settings_files) > 1:
            raise UsageError(
                f"settings in two files: {folder / OWN} and [tool.paritas] in {folder / SHARED}; "
                "keep one of them"
            )
        if settings_files:
            _refuse_strangers(settings_files[0].path, start)
            return settings_files[0]
        if any(_file_mode(folder / name) is not None for name in _REPOSITORY):
            return None
    return None


def read_file(path: Path) -> SettingsFile | None:
    """Read one file; None if it does not exist, or is a pyproject.toml without our table.

    Raises:
        UsageError: It is malformed or unreadable.
    """
    import tomllib  # here, because most runs have no file

    mode = _file_mode(path)
    if mode is None:
        return None
    if not stat.S_ISREG(mode):
        raise UsageError(f"{path} is not a regular file; rename it, or, {_WITHOUT}")
    try:
        read = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; {_WITHOUT}") from error
    except UnicodeDecodeError as error:
        where = f"byte {error.start} ({error.object[error.start]:#04x})"
        raise UsageError(f"{path} is not TOML: invalid UTF-8 at {where}; {_WITHOUT}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}; {_WITHOUT}") from error
    if path.name != SHARED:
        return SettingsFile(path, "", read)
    tools = read.get("tool", {})
    ours = tools.get("paritas") if isinstance(tools, dict) else None
    if ours is None:
        return None
    if not isinstance(ours, dict):
        raise UsageError(f"{path}: tool.paritas is {ours!r}; it must be a table, [tool.paritas]")
    return SettingsFile(path, "tool.paritas", ours)


def _refuse_strangers(path: Path, start: Path) -> None:
    """Refuse another user's file: settings name code to run and files to write.

    Accepted owners: the current user, root, and the owner of the working folder (a mounted
    checkout, for example).
    """
    if path.parent == start or not hasattr(os, "geteuid"):
        return
    owner = path.stat().st_uid
    if owner not in {0, os.geteuid(), start.stat().st_uid}:
        raise UsageError(
            f"{path} belongs to another user (uid {owner}); to use it anyway: "
            f"PARITAS_CONFIG={path}; {_WITHOUT}"
        )


def _file_mode(path: Path) -> int | None:
    """The mode of a path, or None if nothing is there; raises if that cannot be determined."""
    try:
        return os.stat(path).st_mode  # noqa: PTH116  (Path.is_file hides permission errors)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(
            f"{path.parent} cannot be searched for settings: {error.strerror}; {_WITHOUT}"
        ) from error


# --- TOML values, converted as if they had been given on the command line -------------------------

# Metavars of options that take a path, among others a URL or a Python name.
_PATHS = {"DIR", "DUMP", "FILE"}


def as_given(option: click.Option, value: Any, folder: Path) -> Any:
    """Convert a TOML value to what click expects.

    Click itself is too lenient: it would truncate 2.7 to 2 and split a word into letters. As text,
    every value passes the same check as on the command line.

    Args:
        folder: The folder of the file; relative paths start there.

    Raises:
        click.BadParameter: The option does not take such a value.
    """
    if option.multiple:
        if not isinstance(value, list):
            raise click.BadParameter('must be an array such as ["a", "b"]')
        return [_as_text(option, item, folder) for item in value]
    if option.is_flag:
        if not isinstance(value, bool):
            raise click.BadParameter("must be true or false")
        return value
    return _as_text(option, value, folder)


def _as_text(option: click.Option, value: Any, folder: Path) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise click.BadParameter("must be a string or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise click.BadParameter("must be finite")
    text = str(value)
    if "\0" in text:
        raise click.BadParameter("must not contain a NUL character")
    return str(folder / text) if text and _is_path(option, text) else text


def _is_path(option: click.Option, text: str) -> bool:
    if isinstance(option.type, click.Path):
        return not (option.type.allow_dash and text == "-")
    return ":" not in text and not _PATHS.isdisjoint((option.metavar or "").split("|"))


# --- The settings in force: file and environment together, resolved by click ----------------------

Source = Literal["default", "file", "environment"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One option of one command, with its value before the command line is read.

    Attributes:
        key: The name in a file.
        name: The name in Python.
        given: The value as written, a flag as true or false.
        value: The value that the command receives.
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
    """The settings from file and environment.

    Attributes:
        file: None if there is none, or none was to be read.
        commands: The commands with a table, by name.
    """

    file: SettingsFile | None
    commands: Mapping[str, click.Command]

    def for_command(self, command: str) -> dict[str, Any]:
        """The settings of a command by Python name, without those left at their default.

        Raises:
            UsageError: A key of its table is unknown, or the option does not take a value.
        """
        settings_in_force = self.in_force(command)
        return {
            setting.name: setting.value
            for setting in settings_in_force
            if setting.source != "default"
        }

    def origin(self, command: str, key: str) -> str:
        """Where a setting comes from, in words; the key as in a file, or as in Python."""
        option_name = key.replace("_", "-")
        options = settable(self._command(command))
        if option_name not in options:
            raise UsageError(f"{command} has no setting {key!r}; {hint(key, options)}")
        settings_in_force = self.in_force(command)
        return next(it.origin for it in settings_in_force if it.key == key_of(options[option_name]))

    def in_force(self, command: str) -> list[Setting]:
        """Every setting of a command; raises like `for_command`."""
        context = click.Context(self._command(command), info_name=command)
        context.default_map = self.default_map(command)
        options = settable(context.command).items()
        return [_resolve(self, context, it) for key, it in options if key == key_of(it)]

    def default_map(self, command: str) -> dict[str, Any]:
        """The settings of the file for a click context; click reads the variables itself."""
        if self.file is None:
            return {}
        options = settable(self._command(command))
        values: dict[str, Any] = {}
        for table in (None, command):
            keys: dict[str, str] = {}
            for key, value in self.file.table(table).items():
                option = options.get(key.replace("_", "-"))
                if option is None and table is None:
                    continue  # for other commands
                table_place = self.file.full_place(table)
                if option is None:
                    raise UsageError(f"{table_place}: no setting {key!r}; {hint(key, options)}")
                if (twin := keys.setdefault(key_of(option), key)) != key:
                    raise UsageError(
                        f"{table_place}: {twin!r} and {key!r} are one setting; keep one"
                    )
                try:
                    values[str(option.name)] = as_given(option, value, self.file.path.parent)
                except click.BadParameter as error:
                    raise UsageError(f"{table_place} {key} = {value!r}: {error.message}") from error
        return values

    def _command(self, name: str) -> click.Command:
        if name not in self.commands:
            raise UsageError(f"no settings for {name!r}; {hint(name, self.commands)}")
        return self.commands[name]


def _resolve(settings: Settings, context: click.Context, option: click.Option) -> Setting:
    """Ask click what the option would get from an empty command line, and from where."""
    raw_value, came = option.consume_value(context, {})
    command, key = str(context.info_name), key_of(option)
    setting = functools.partial(Setting, command=command, key=key, name=str(option.name))
    if came is ParameterSource.ENVIRONMENT:
        variable = next(name for name in variables(command, option) if os.environ.get(name))
        value = _convert(option, context, raw_value, f"{variable}={os.environ[variable]!r}")
        if option.is_flag:
            raw_value = value
        return setting(given=raw_value, value=value, source="environment", origin=variable)
    if came is ParameterSource.DEFAULT_MAP and settings.file is not None:
        table = command if _file_sets(settings.file, command, option) else None
        source_text = f"{settings.file.full_place(table)} {key} = {raw_value!r}"
        value = _convert(option, context, raw_value, source_text)
        return setting(
            given=raw_value, value=value, source="file", origin=settings.file.place(table)
        )
    default = option.to_info_dict()["default"]
    return setting(given=default, value=default, source="default", origin="default")


def _file_sets(file: SettingsFile, table: str, option: click.Option) -> bool:
    spellings = {name.removeprefix("--") for name in option.opts}
    return any(key.replace("_", "-") in spellings for key in file.table(table))


def _convert(option: click.Option, context: click.Context, raw_value: Any, source: str) -> Any:
    try:
        return option.type_cast_value(context, raw_value)
    except click.BadParameter as error:
        raise UsageError(f"{source}: {error.message}") from error


# --- Unknown names --------------------------------------------------------------------------------

# How similar a variable must be to one of ours to count as misspelt. Other programs may use the
# same prefix; the variables of paritas's own tests are at 0.6.
_ALIKE = 0.8


def check_names(settings: Settings) -> None:
    """Refuse unknown tables and keys of the file, and misspelt variables.

    `settings` must know all commands. They are inspected only if something is set, since importing
    them takes a while. Values are checked by the command that uses them.

    Raises:
        UsageError: All of them, one per line.
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
            setting_names = set(settable(tables[name]))
            yield from _wrong_keys(file, name, setting_names)
        elif name in tables and name not in common:
            yield f"{file.full_place(name)} must be a table; it is {value!r}"
    yield from _wrong_keys(file, None, common, other=frozenset(tables))


def _wrong_keys(
    file: SettingsFile,
    table: str | None,
    setting_names: set[str],
    other: frozenset[str] = frozenset(),
) -> Iterator[str]:
    for key in file.table(table):
        if key.replace("_", "-") not in setting_names and key not in other:
            yield f"{file.full_place(table)}: no setting {key!r}; {hint(key, setting_names)}"


def _wrong_variables(settings: Settings) -> Iterator[str]:
    known_variables = SWITCHES | {
        variable
        for name, command in settings.commands.items()
        for option in settable(command).values()
        for variable in variables(name, option)
    }
    short = [name.removeprefix(PREFIX) for name in known_variables]
    for variable in sorted(os.environ):
        if not variable.startswith(PREFIX) or variable in known_variables:
            continue
        # Without the prefix, which would make any two of them similar.
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
    """The variables of the command whose prefix this variable has, if any."""
    starts = {f"{PREFIX}{as_variable(name)}_": name for name in settings.commands}
    longest_start = max(
        (start for start in starts if variable.startswith(start)), key=len, default=None
    )
    if longest_start is None:
        return []
    options = settable(settings.commands[starts[longest_start]]).values()
    return sorted({variables(starts[longest_start], option)[0] for option in options})


# --- Reading the settings -------------------------------------------------------------------------


def load(
    start: Path | None = None,
    *,
    commands: Mapping[str, click.Command] | None = None,
    chosen: Path | None = None,
    no_file: bool = False,
) -> Settings:
    """Read the settings.

    Args:
        start: The folder where the search for a file begins; default: the working directory.
        commands: The commands with a table; default: only the pytest plugin, which has no command.
        chosen: Read this file and no other, like PARITAS_CONFIG.
        no_file: Read no file, like PARITAS_NO_CONFIG=1.

    Raises:
        UsageError: A file is malformed, missing or unreadable, or a folder has two.
    """
    file = _choose_file(start, chosen, no_file=no_file)
    return Settings(file, PLUGINS if commands is None else commands)


def _choose_file(start: Path | None, chosen: Path | None, *, no_file: bool) -> SettingsFile | None:
    if chosen is not None:
        return _read_chosen(chosen, f"--config {str(chosen)!r}")
    if no_file or _is_switched_off():
        return None
    if named := os.environ.get("PARITAS_CONFIG"):
        return _read_chosen(Path(named), f"PARITAS_CONFIG={named!r}")
    return find_file(_resolve_folder(start or Path()))


def _read_chosen(path: Path, source: str) -> SettingsFile:
    full = _resolve_folder(path.parent) / path.name
    file = read_file(full)
    if file is None:
        why = f"{full} has no table [tool.paritas]" if full.exists() else f"{full} does not exist"
        raise UsageError(f"{source}: {why}; give a file with settings")
    return file


def _resolve_folder(folder: Path) -> Path:
    try:
        return folder.resolve()
    except OSError as error:
        raise UsageError(
            f"the working directory no longer exists ({error.strerror}); change to another one"
        ) from error


def _is_switched_off() -> bool:
    value = os.environ.get("PARITAS_NO_CONFIG") or "0"
    if value not in {"0", "1"}:
        raise UsageError(f"PARITAS_NO_CONFIG must be 0 or 1, not {value!r}")
    return value == "1"
