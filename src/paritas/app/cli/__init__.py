"""The command `paritas`: a click group that imports each command on first use.

Exit codes of every command: 0 pass, 1 different or degraded, 2 wrong usage or bad input,
3 unverified (also if paritas itself fails), 130 interrupted.
"""

from __future__ import annotations

import errno
import importlib
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from paritas.core.commands.options import INTERRUPTED, UNVERIFIED
from paritas.core.errors import ClusterLostError, ParitasError, did_you_mean, plain
from paritas.core.settings import NO_TABLE, PLUGINS, Settings, bind_variables, check_names, load

# --- Settings as the defaults of options ----------------------------------------------------------


class _Tables(Mapping[str, click.Command]):
    """Commands and plugins that have settings, by name; a command is imported on access."""

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


def load_settings(ctx: click.Context, group: click.Group, command: str) -> Settings:
    """Load the settings and make them the defaults of the command's options.

    Raises:
        UsageError: a file cannot be read, a name is unknown, or a value does not fit its option.
    """
    chosen, no_file = ctx.params["settings_file"], ctx.params["no_config"]
    if chosen is not None and no_file:
        ctx.fail(f"--config {str(chosen)!r} and --no-config exclude each other: give one of them")
    settings = load(commands=_Tables(group, ctx), chosen=chosen, no_file=no_file)
    check_names(settings)
    if command not in NO_TABLE:
        settings.for_command(command)  # its errors name the file and the key, click's do not
        ctx.default_map = {command: settings.default_map(command)}
    return settings


# --- The group ------------------------------------------------------------------------------------

_HOMES = {
    "demo": "paritas.app.cli.getting_started:demo",
    "verify": "paritas.verification.command:verify",
    "invariants": "paritas.relations.command:invariants",
    "engine": "paritas.engines.command:engine",
    "sweep": "paritas.sweeping.command:sweep",
    "kernel": "paritas.kernels.command:kernel",
    "run": "paritas.guarding.command:run",
    "inspect": "paritas.recording.commands:inspect",
    "convert": "paritas.recording.commands:convert",
    "compare": "paritas.comparison.commands:compare",
    "partition": "paritas.sharding.commands:partition",
    "verify-graph": "paritas.sharding.commands:verify_graph",
    "verify-parallel": "paritas.sharding.commands:verify_parallel",
    "power": "paritas.mutants.command:power",
    "report": "paritas.app.cli.results:report",
    "explain": "paritas.app.cli.results:explain",
    "shrink": "paritas.shrinking.command:shrink",
    "config": "paritas.app.cli.getting_started:config",
    "doctor": "paritas.app.cli.getting_started:doctor",
}


# Options that people know from other tools. Click would suggest the one that is spelled alike.
_OTHER_TOOLS_OPTIONS = dict.fromkeys(
    ("--tolerance", "--atol", "--rtol", "--pcc"),
    "the limit is measured, not given; for a fixed one call paritas.verify from Python with "
    "VerifyConfig(value_checker=AllCloseValueChecker(rtol=..., atol=...))",
)


class _Refusal(click.ClickException):
    """One message on stderr, without a traceback."""

    exit_code = 2


class LazyGroup(click.Group):
    """A group that imports a command on first use and maps errors to exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the commands."""
        return list(_HOMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in _HOMES:
            return None
        module, _, name = _HOMES[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        if cmd_name not in NO_TABLE:
            bind_variables(cmd_name, command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command and load its settings; suggest a name for a misspelled one."""
        if args and args[0] not in _HOMES and not args[0].startswith("-"):
            ctx.fail(f"no command {args[0]!r}; {did_you_mean(args[0], _HOMES)}")
        command = super().resolve_command(ctx, args)
        # Help works even with broken settings: the user may need it to fix them.
        if not ctx.resilient_parsing and command[2][:1] not in (["-h"], ["--help"]):
            ctx.obj = load_settings(ctx, self, str(command[0]))
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command without the guard that PARITAS_GUARD would install."""
        from paritas.core.compiled.guard_settings import environment_set_aside

        try:
            with environment_set_aside():
                return super().invoke(ctx)
        except click.NoSuchOption as error:
            advice = _OTHER_TOOLS_OPTIONS.get(error.option_name)
            if advice is None:
                raise
            raise click.UsageError(f"no option {error.option_name}: {advice}", error.ctx) from error
        except (click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        except ClusterLostError as error:  # nobody's usage was wrong
            click.echo(f"Error: {plain(str(error))}", err=True)
            ctx.exit(UNVERIFIED)
        except ParitasError as error:
            raise _Refusal(plain(str(error))) from error
        except KeyboardInterrupt:
            click.echo("interrupted: there is no verdict", err=True)
            ctx.exit(INTERRUPTED)
        except Exception as error:  # python's exit code 1 would look like a verdict
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # click closes the pipe quietly
            click.echo(traceback.format_exc(), err=True, nl=False)
            click.echo("Error: paritas itself failed (see above): nothing was verified", err=True)
            ctx.exit(UNVERIFIED)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="paritas", message="%(prog)s %(version)s")
@click.option(
    "--config",
    "settings_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Read settings from this file instead of the nearest pyproject.toml or paritas.toml.",
)
@click.option("--no-config", is_flag=True, help="Read no settings file.")
def main(settings_file: Path | None, *, no_config: bool) -> None:
    """Does the candidate still compute what the reference computes?

    Options that a project always uses can be set in a file: see `paritas config`.

    Exit codes: 0 pass, 1 different or degraded, 2 wrong usage or bad input, 3 unverified.
    """
