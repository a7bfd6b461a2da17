"""`paritas power`: which planted faults would the check catch in your model?"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from paritas.core.candidates.loading import BuildOptions
from paritas.core.commands.options import (
    DTYPES,
    INTERRUPTED,
    blocks_option,
    by_option,
    device_option,
    dtype_option,
    inputs_option,
    json_option,
    print_report,
    progress,
    train_option,
    write_json,
)

if TYPE_CHECKING:
    from pathlib import Path

    from paritas.mutants.rows import PowerReport


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
    **option_values: Any,
) -> None:
    """Plant faults in a model, one at a time, and count those that paritas verify catches.

    The factory takes no arguments and returns (model, inputs), or only the model with --inputs, as
    for paritas verify. Ctrl-C stops the search and reports the results so far.

    Exit codes: 0 there is a report, 1 a smaller share than --at-least is caught, 2 wrong usage or
    bad input, 3 no fault could be planted and judged, 130 interrupted.
    """
    from paritas.core.candidates.loading import check_forms

    options = PowerOptions(**option_values)
    check_forms({"FACTORY": factory, "--inputs": options.inputs})
    report = _run_power(factory, options)
    from paritas.mutants.report import power_report

    write_json(json_path, report.to_json)
    print_report(power_report(report))
    ctx.exit(INTERRUPTED if report.stopped == "interrupt" else report.exit_code(at_least))


def _run_power(factory: str, options: PowerOptions) -> PowerReport:
    with progress() as tell:
        tell("importing torch")
        import torch

        from paritas.core.candidates.makers import build_reference
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
