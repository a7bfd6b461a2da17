"""`paritas run`: an unmodified script with every `torch.compile` in it guarded."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import TYPE_CHECKING, Any

import click

from paritas.core.commands.options import (
    OutputFormat,
    format_options,
    json_option,
    options_as,
    strict_option,
)

if TYPE_CHECKING:
    from pathlib import Path

    from paritas.core.commands.scripts import Ending


ACTIONS = ("raise", "warn", "record", "fallback")


class _Every(click.ParamType[float]):
    """Every n-th call, or a share of the calls."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Parse it; `1.5` is neither."""
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (0 < number <= 1 or (math.isfinite(number) and number == int(number) > 0)):
            self.fail(
                f"{value!r} is neither an integer n (every n-th call is checked) nor a share of "
                "the calls between 0 and 1",
                param,
                ctx,
            )
        return number


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of the command, by their names."""

    is_module: bool
    on_mismatch: str
    every: float
    thorough: bool
    strict: bool
    json_path: Path | None
    form: OutputFormat


@click.command(
    short_help="Run a script with every torch.compile in it checked.",
    context_settings={"allow_interspersed_args": False},
)
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is a module, as in python -m.")
@click.option(
    "--on-mismatch",
    type=click.Choice(ACTIONS),
    default="record",
    show_default=True,
    help="Raise an error in the script, warn, only record, or return the reference's result to "
    "the script and continue.",
)
@click.option(
    "--every",
    type=_Every(),
    default=1,
    metavar="N|SHARE",
    help="Check every N-th call of a graph, or a share of its calls below 1. The first call of a "
    "graph is always checked.",
)
@click.option("--thorough", is_flag=True, help="Also check the compiler's graph passes.")
@strict_option
@json_option(or_stdout=False)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@format_options
@click.pass_context
@options_as(RunOptions)
def run(ctx: click.Context, *, script: str, args: tuple[str, ...], options: RunOptions) -> None:
    """Run SCRIPT ARGS... as python would, with every torch.compile in it checked.

    Each torch.compile keeps its backend, mode and options; each call of a compiled graph is
    compared with the graph run op by op, natively and in float64. Options of paritas come before
    SCRIPT; options after it belong to the script. The report goes to stderr when the script ends.
    Processes that the script starts are not checked, nor a program that it replaces itself with
    (os.exec).

    Several ranks: torchrun --nproc-per-node 2 --no-python paritas run script.py. Rank 0 reports
    for all.

    Exit codes: 0 pass, 1 different or degraded, 2 wrong usage or bad input, 3 unverified (also if
    the script itself fails), 130 interrupted.
    """
    from paritas.core.commands.ranks import Meeting, Ranks
    from paritas.core.commands.scripts import (
        ScriptProgram,
        StopSignals,
        check_program,
        run_last_program,
    )
    from paritas.core.compiled.guard_settings import SWITCH, GuardSettings, GuardWatch, is_enabled
    from paritas.guarding.leaving import ReportStreams, exits_reported
    from paritas.guarding.report import (
        GuardedRun,
        OutputFiles,
        report_run,
    )

    if not is_enabled(None):
        ctx.fail(f"{SWITCH}={os.environ[SWITCH]} in the environment disables guards: unset it")
    if options.form.takes_stdout:
        ctx.fail(f"--format {options.form.name} needs --format-file FILE: the script uses stdout")
    settings = GuardSettings(
        on_mismatch=options.on_mismatch,
        every=options.every,
        check_passes=options.thorough,
        strict=options.strict,
    )
    program = ScriptProgram(script, options.is_module, args)
    check_program(program)
    ranks = Ranks.from_environment(os.environ)
    meeting = None if ranks is None else Meeting(ranks, os.environ)
    watch, signals, streams = GuardWatch(settings), StopSignals(), ReportStreams()

    def finish(ending: Ending) -> int:
        signals.only_hurry()
        course = GuardedRun(program, ending, watch.journal, watch.failure, strict=options.strict)
        with streams.reporting():
            return report_run(
                course, meeting, OutputFiles(options.json_path, options.form), signals
            )

    with exits_reported(finish), signals:
        with watch:
            ending = run_last_program(program, signals)
        ctx.exit(finish(ending))
