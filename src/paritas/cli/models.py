"""The commands that check models: `paritas verify`, `power` and `sweep`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paritas.cli.options import (
    DTYPES,
    INTERRUPTED,
    BuildOptions,
    OutputFormat,
    blocks_option,
    by_option,
    device_option,
    dtype_option,
    emit,
    emit_verdict,
    format_options,
    inputs_option,
    json_option,
    print_report,
    progress,
    refuse,
    strict_option,
    train_option,
    write_json,
)

if TYPE_CHECKING:
    from paritas.results.findings import Verdict
    from paritas.results.power_reports import PowerReport
    from paritas.results.sweeps import SweepReport


# --- verify: compare a model with its compiled form -----------------------------------------------

# Options of `torch.compile`, which --candidate replaces.
_COMPILES = ("backend", "mode", "dynamic", "fullgraph")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyOptions(BuildOptions):
    """The options of the command, by their names."""

    backend: str
    mode: str | None
    dynamic: bool | None
    fullgraph: bool
    candidate: str | None
    strict: bool
    no_gradients: bool
    no_lift: bool
    by: str | None
    blocks: tuple[str, ...]


@click.command(short_help="Compare a model with its compiled form.")
@click.argument("factory", metavar="package.module:factory")
@inputs_option
@click.option(
    "--backend", default="inductor", show_default=True, help="The backend of torch.compile."
)
@click.option("--mode", help="The mode of torch.compile, for example max-autotune.")
@click.option("--dynamic/--no-dynamic", default=None, help="torch.compile with dynamic shapes.")
@click.option("--fullgraph", is_flag=True, help="torch.compile without graph breaks.")
@click.option(
    "--candidate",
    metavar="NAME|MODULE:FUNCTION",
    help="Instead of torch.compile: onnxruntime, aot_inductor, export or export-decomposed; or a "
    "function that takes a copy of the model and returns the candidate.",
)
@dtype_option
@device_option
@train_option
@strict_option
@click.option("--no-gradients", is_flag=True, help="Do not compare gradients.")
@by_option
@blocks_option
@click.option("--no-lift", is_flag=True, help="Skip the float64 comparison: faster, but weaker.")
@json_option()
@format_options
@click.pass_context
def verify(
    ctx: click.Context, /, factory: str, json_path: Path | None, form: OutputFormat, **given: Any
) -> None:
    """Compare a model with its compiled form.

    The factory takes no arguments and returns (model, inputs), where inputs is a list of
    positional inputs, a paritas.Inputs(args, kwargs), or a list of these; with --inputs it may
    return the model alone. Random seeds are set to 0 before it is called. hf:LlamaForCausalLM (any
    class of transformers), timm:resnet18 and torchvision:resnet18 stand for small models of that
    name with random weights.

    Exit codes: 0 pass, 1 different or degraded, 2 wrong usage or bad input, 3 unverified.
    """
    options = VerifyOptions(**given)
    if options.candidate is not None:
        replaced = f"--candidate {options.candidate!r}, which replaces torch.compile"
        refuse(ctx, _COMPILES, f"cannot be combined with {replaced}")
    _check_forms(factory, options)
    verdict = _run_verify(factory, options)
    write_json(json_path, verdict.to_json)
    emit_verdict(verdict, form, "verify", factory)
    ctx.exit(verdict.exit_code)


def _check_forms(factory: str, options: VerifyOptions) -> None:
    """Report a typo before torch is imported."""
    from paritas.candidates.loading import check_forms, check_name, is_named

    named = {"FACTORY": factory, "--inputs": options.inputs, "--candidate": options.candidate}
    if options.candidate is not None and is_named(options.candidate):
        check_name(named.pop("--candidate") or "")
    check_forms(named)


def _run_verify(factory: str, options: VerifyOptions) -> Verdict:
    with progress() as tell:
        tell("importing torch")
        from paritas.candidates.building import build_candidate, build_reference
        from paritas.checks import verify as verifying
        from paritas.execution import subjects

        tell(f"building {factory}")
        model, inputs = build_reference(factory, options)
        candidate = build_candidate(model, inputs, options)
        asked = subjects.VerifyConfig(
            verify_gradients=False if options.no_gradients else None,
            lift=not options.no_lift,
            strict=options.strict,
            raise_on_mismatch=False,
        )
        by: Any = options.by
        return verifying.verify(
            inputs,
            model,
            candidate,
            asked,
            by=by,
            blocks=options.blocks or None,
            on_progress=tell,
        )


# --- power: which planted faults would the check catch in your model? -----------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerOptions(BuildOptions):
    """The options of the command, by their names."""

    autocast: str | None
    no_gradients: bool
    by: str | None
    blocks: tuple[str, ...]
    faults: int
    seconds: float
    seed: int


@click.command(short_help="Plant faults in a model, and count those that are caught.")
@click.argument("factory", metavar="package.module:factory")
@inputs_option
@dtype_option
@click.option(
    "--autocast",
    type=click.Choice(DTYPES[2:]),
    help="Run the forward pass under torch.autocast with this dtype.",
)
@device_option
@train_option
@click.option("--no-gradients", is_flag=True, help="Skip the backward pass.")
@by_option
@blocks_option
@click.option(
    "--faults",
    type=click.IntRange(1),
    default=200,
    show_default=True,
    metavar="N",
    help="The maximum number of faults.",
)
@click.option(
    "--time",
    "seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="The time limit; after it, the results so far are reported.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the faults.")
@click.option(
    "--at-least",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    help="Exit with 1 if a smaller share of the faults above 8 times the noise is caught, for "
    "example 0.99.",
)
@json_option("Write every fault and its result to this file.")
@click.pass_context
def power(
    ctx: click.Context,
    /,
    factory: str,
    at_least: float | None,
    json_path: Path | None,
    **given: Any,
) -> None:
    """Plant faults in a model, one at a time, and count those that paritas verify catches.

    The factory takes no arguments and returns (model, inputs), or only the model with --inputs, as
    for paritas verify. Ctrl-C stops the search and reports the results so far.

    Exit codes: 0 there is a report, 1 a smaller share than --at-least is caught, 2 wrong usage or
    bad input, 3 no fault could be planted and judged, 130 interrupted.
    """
    from paritas.candidates.loading import check_forms

    options = PowerOptions(**given)
    check_forms({"FACTORY": factory, "--inputs": options.inputs})
    report = _run_power(factory, options)
    from paritas.reports.terminal import power_report

    write_json(json_path, report.to_json)
    print_report(power_report(report))
    ctx.exit(INTERRUPTED if report.stopped == "interrupt" else report.exit_code(at_least))


def _run_power(factory: str, options: PowerOptions) -> PowerReport:
    with progress() as tell:
        tell("importing torch")
        import torch

        from paritas.candidates.building import build_reference
        from paritas.mutants import power as searching

        tell(f"building {factory}")
        model, inputs = build_reference(factory, options)
        by: Any = options.by
        return searching.power(
            inputs,
            model,
            faults=options.faults,
            seconds=options.seconds,
            gradients=not options.no_gradients,
            autocast=None if options.autocast is None else getattr(torch, options.autocast),
            by=by,
            blocks=options.blocks or None,
            seed=options.seed,
            on_progress=tell,
        )


# --- sweep: many models at once, and what changed since last time ---------------------------------


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
    **asked: Any,
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
    report = _sweep(targets, output, **asked)
    write_json(json_path, report.to_json)
    from paritas.reports.model_reports import sweep_account, sweep_report

    remark = f"written to {output}: report.html, sweep.json, junit.xml"
    emit(form, lambda: sweep_account(report, subject=str(targets)), sweep_report(report, remark))
    ctx.exit(INTERRUPTED if report.stopped else report.exit_code)


def _sweep(targets: Path, output: Path, **asked: Any) -> SweepReport:
    with progress() as tell:
        from paritas.sweeping import sweep as sweeping

        return sweeping.sweep(targets, output=output, on_progress=tell, **asked)
