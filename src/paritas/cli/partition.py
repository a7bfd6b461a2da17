"""`paritas partition`: an operator split over ranks against the operator that is not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from paritas.cli.options import (
    DTYPES,
    OutputFormat,
    confirm_option,
    device_option,
    emit_verdict,
    format_options,
    json_option,
    progress,
    strict_option,
    write_json,
)

if TYPE_CHECKING:
    from paritas.cli.partition_checks import CheckedOperator


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionOptions:
    """The options of the command, by their names."""

    args: tuple[str, ...]
    kwargs: tuple[str, ...]
    dtype: str
    options: tuple[str, ...]
    annotation: str | None
    discover: bool
    ranks: int
    without_gradient: tuple[int, ...]
    seed: int
    strict: bool
    device: str | None
    confirm: Literal["gloo", "nccl"] | None


@click.command(short_help="Check how an operator can be split over ranks, or find out.")
@click.argument("operator", metavar="package.module.operator")
@click.option(
    "--arg",
    "args",
    multiple=True,
    metavar="SHAPE|NUMBER|value=...",
    help="A positional argument; see above. Repeated, in their order.",
)
@click.option(
    "--kwarg",
    "kwargs",
    multiple=True,
    metavar="NAME=...",
    help="An argument by name; may be repeated.",
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="float32",
    show_default=True,
    help="Of floating tensors that say no other.",
)
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="IDX,DIM",
    help="Only the split of this dimension of this argument; may be repeated.",
)
@click.option("--annotation", metavar="TEXT", help="How it can be split: 'm k+, k+ n -> m n'.")
@click.option("--discover", is_flag=True, help="Find out, though the library knows the operator.")
@click.option(
    "--ranks", type=click.IntRange(2), default=2, show_default=True, help="Over how many."
)
@click.option(
    "--without-gradient",
    type=click.IntRange(0),
    multiple=True,
    metavar="IDX",
    help="An argument that has no gradient, such as a running mean; may be repeated.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the tensors.")
@strict_option
@device_option
@confirm_option
@click.option(
    "--shrink",
    "outdir",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write a script of the first wrong split there, on the smallest shapes.",
)
@json_option()
@format_options
@click.pass_context
def partition(
    ctx: click.Context,
    /,
    operator: str,
    outdir: Path | None,
    json_path: Path | None,
    form: OutputFormat,
    **given: object,
) -> None:
    """Check an operator that is split over ranks against the operator that is not.

    The operator is named as Python names it (torch.conv2d, torch.Tensor.view), or with a colon
    behind its module (my.ops:attend). nnScaler's names mean the same functions here
    (nnscaler.runtime.function.embedding), whether it is installed or not.

    The splits are those of --annotation, else those that the library knows, else those that are
    found by running the operator. Each is checked forward and backward, in float64 and in its
    dtype.

    \b
    An argument is one of
      8x32x32           a tensor, filled with what the operator takes there
      16                a vector: a bias; as a --kwarg, the number
      8x32:int64<100    a tensor of another dtype; here indices below 100
      2.5, value=16     a number
      value=(8, 4)      any Python literal, and slices: value=slice(0, 9)

    Exit codes: 0 pass, 1 different or degraded, 2 wrong usage or bad input, 3 unverified.
    """  # noqa: D301  (click's mark for lines that are not to be wrapped)
    options = PartitionOptions(**given)  # type: ignore[arg-type]
    from paritas.partition.configuration.resolving import check_name

    check_name(operator, "OPERATOR")
    if options.annotation is not None and options.discover:
        ctx.fail("--annotation says how it can be split; leave it out to --discover that")
    checked = _run(operator, options)
    write_json(json_path, checked.verdict.to_json)
    shrunk = [] if outdir is None else _shrunk(checked, outdir)
    from paritas.cli.partition_checks import partition_report

    shown = partition_report(checked, shrunk)
    emit_verdict(checked.verdict, form, "partition", operator, shown)
    ctx.exit(checked.verdict.exit_code)


def _run(operator: str, options: PartitionOptions) -> CheckedOperator:
    with progress() as tell:
        tell("importing torch")
        from paritas.candidates.loading import look_here
        from paritas.cli.partition_checks import check, operator_call
        from paritas.partition.configuration.resolving import resolve_operator
        from paritas.partition.recipe_checks import check_confirm
        from paritas.placement.recipes import device_of

        look_here()
        function = resolve_operator(operator, parameter="OPERATOR")
        call = operator_call(operator, function, options)
        check_confirm(options.confirm, device_of(call), options.ranks)
        return check(call, options, tell)


def _shrunk(checked: CheckedOperator, outdir: Path) -> list[str]:
    """What came of shrinking, in words: the verdict stands whatever it is."""
    from paritas.cli.shrink import report_lines
    from paritas.errors import UsageError

    try:
        with progress() as tell:
            return report_lines(checked.verdict.shrink(outdir=outdir, on_progress=tell))
    except UsageError as error:
        return [f"no script in {outdir}: {error}"]
