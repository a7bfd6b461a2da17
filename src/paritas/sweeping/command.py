"""`paritas sweep`: many models at once, and what changed since last time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from paritas.core.commands.options import (
    INTERRUPTED,
    OutputFormat,
    emit,
    format_options,
    json_option,
    progress,
    strict_option,
    write_json,
)


@click.command(short_help="Verify many models under many settings; what changed since last time?")
@click.argument("targets", metavar="targets.toml", type=click.Path(path_type=Path))
@click.option(
    "--output",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Folder for the journal and the reports; a sweep that was cut short goes on from there.",
)
@click.option(
    "--against",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="The --output of an earlier sweep: report what is newly different, fixed or slow.",
)
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="How many runs at a time.")
@click.option(
    "--executor",
    default="processes",
    show_default=True,
    metavar="processes|dask://HOST:PORT",
    help="Who does the work.",
)
@click.option(
    "--time",
    "seconds",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Time limit of each run, in place of that of [defaults]; otherwise 900.",
)
@click.option(
    "--memory",
    metavar="SIZE",
    help="Memory limit of each run, such as 8GB, in place of that of [defaults]; otherwise its "
    "share of the machine's.",
)
@strict_option
@click.option("--restart", is_flag=True, help="Delete the rows that --output holds.")
@json_option("Write every row with its findings to this file.")
@format_options
@click.pass_context
def sweep(
    ctx: click.Context,
    /,
    targets: Path,
    output: Path,
    json_path: Path | None,
    form: OutputFormat,
    **sweep_options: Any,
) -> None:
    """Verify many models under many settings, each run in a process of its own.

    targets.toml has a row [[target]] for each model: its name (package.module:factory, hf:Class,
    timm:name, torchvision:name or a .pt2 file), dtypes, devices, modes and candidates, of which
    every combination is a run. A row [[kernel]] judges kernels against their references. A run
    that crashes, takes too long or too much memory is a row of the report, never a pass. Called
    again, a sweep that was cut short goes on where it stopped.

    Written to --output are sweep.json, junit.xml and report.html.

    Exit codes: 0 all pass, 1 different or degraded, 2 wrong usage or bad input, 3 unverified, 130
    interrupted; with --against by what is newly wrong alone.
    """
    with progress() as tell:
        from paritas.sweeping import sweep as sweeping

        report = sweeping.sweep(targets, output=output, on_progress=tell, **sweep_options)
    write_json(json_path, report.to_json)
    from paritas.sweeping.report import sweep_account, sweep_report

    remark = f"written to {output}: report.html, sweep.json, junit.xml"
    emit(form, lambda: sweep_account(report, subject=str(targets)), sweep_report(report, remark))
    ctx.exit(INTERRUPTED if report.stopped == "interrupt" else report.exit_code)
