"""`paritas engine`: did a serving engine return what the reference model computes?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paritas.core.candidates.loading import BuildOptions
from paritas.core.commands.options import (
    OutputFormat,
    device_option,
    dtype_option,
    emit_model_report,
    format_options,
    html_option,
    json_option,
    options_as,
    progress,
    strict_option,
    tell_result,
)

if TYPE_CHECKING:
    from paritas.engines.rows import EngineReport


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions(BuildOptions):
    """The options of the command, by their names."""

    older: tuple[str, ...]
    explain: bool
    seconds: float
    strict: bool
    inputs: str | None = None
    train: bool = False


@click.command(short_help="Check the log probabilities of a serving engine against the model.")
@click.argument("target", metavar="TARGET")
@click.argument("records", metavar="RECORDS", type=click.Path(path_type=Path))
@click.option(
    "--older",
    multiple=True,
    metavar="MODULE:FUNCTION",
    help="Function that returns the model with earlier weights, which the engine may still run; "
    "may be repeated.",
)
@click.option(
    "--explain/--no-explain",
    default=True,
    show_default=True,
    help="Look for the cause if a request fails.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    help="The time limit. After it, no further request is compared and no further cause is tried; "
    "what is known is reported.",
)
@dtype_option
@device_option
@strict_option
@html_option
@json_option("Write every request with its findings, and the causes, to this file.")
@format_options
@click.pass_context
@options_as(EngineOptions)
def engine(
    ctx: click.Context,
    /,
    target: str,
    records: Path,
    html_path: Path | None,
    json_path: Path | None,
    form: OutputFormat,
    options: EngineOptions,
) -> None:
    """Check the log probabilities of a serving engine against the model that it should serve.

    TARGET is package.module:factory as for paritas verify, but its inputs are not needed. RECORDS
    is a file with one JSON object for each request: prompt, output (token ids), logprobs, and, if
    there are any, prompt_logprobs, top_logprobs, sampling and logprobs_mode; or the JSON that
    vLLM's server got and returned, {"request": ..., "response": ...}. If a request differs by more
    than rounding, the model is run with one thing changed after the other, until a run gives what
    the engine returned.

    Exit codes: 0 rounding only, 1 different or degraded, 2 wrong usage or bad input, 3 unverified.
    """
    report = _run_engine(target, records, options)
    from paritas.engines.report import engine_report

    shown = engine_report(report)
    emit_model_report(
        report, "engine", target, form, shown=shown, json_path=json_path, html_path=html_path
    )
    ctx.exit(report.exit_code)


def _run_engine(target: str, records: Path, options: EngineOptions) -> EngineReport:
    from paritas.core.candidates.loading import check_forms

    check_forms(
        {
            "TARGET": target,
            **{f"--older {older_target}": older_target for older_target in options.older},
        }
    )
    with progress() as tell:
        tell("importing torch")
        from paritas.core.candidates.makers import build_reference
        from paritas.engines.check import check_engine

        tell(f"building {target}")
        model, _ = build_reference(target, options, model_alone=True)
        older = {
            older_target: build_reference(older_target, options, model_alone=True)[0]
            for older_target in options.older
        }
        return check_engine(
            model,
            records,
            older=older,
            explain=options.explain,
            strict=options.strict,
            seconds=options.seconds,
            target=target,
            on_progress=tell,
            on_result=tell_result,
        )
