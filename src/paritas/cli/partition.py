"""`paritas partition`: compare an operator with the same operator split over ranks."""

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
    prove: bool


@click.command(short_help="Check or discover how an operator can be split over ranks.")
@click.argument("operator", metavar="package.module.operator")
@click.option(
    "--arg",
    "args",
    multiple=True,
    metavar="SHAPE|NUMBER|value=...",
    help="A positional argument, see above; repeat it for each, in order.",
)
@click.option(
    "--kwarg",
    "kwargs",
    multiple=True,
    metavar="NAME=...",
    help="A keyword argument; may be repeated.",
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="float32",
    show_default=True,
    help="The dtype of floating tensors that do not name another.",
)
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="IDX,DIM",
    help="Check only splits of this dimension of this argument; may be repeated.",
)
@click.option("--annotation", metavar="TEXT", help="The splitting rule: 'm k+, k+ n -> m n'.")
@click.option(
    "--discover", is_flag=True, help="Find splits by running it, even if the library has a rule."
)
@click.option(
    "--ranks", type=click.IntRange(2), default=2, show_default=True, help="The number of ranks."
)
@click.option(
    "--without-gradient",
    type=click.IntRange(0),
    multiple=True,
    metavar="IDX",
    help="An argument without a gradient, such as a running mean; may be repeated.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of random tensors.")
@strict_option
@device_option
@confirm_option
@click.option(
    "--prove",
    is_flag=True,
    help="Also prove each split for all shapes and numbers of ranks, or find a counterexample.",
)
@click.option(
    "--certificates",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the certificate of each proof there; implies --prove.",
)
@click.option(
    "--shrink",
    "outdir",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write a script there that shows the first wrong split, with the smallest shapes.",
)
@json_option()
@format_options
@click.pass_context
def partition(
    ctx: click.Context,
    /,
    operator: str,
    outdir: Path | None,
    certificates: Path | None,
    json_path: Path | None,
    form: OutputFormat,
    **given: object,
) -> None:
    """Compare an operator with the same operator split over ranks.

    The operator has its Python name (torch.conv2d, torch.Tensor.view), or a colon after its module
    (my.ops:attend). nnScaler's names (nnscaler.runtime.function.embedding) refer to the same
    functions, even if nnScaler is not installed.

    The splits come from --annotation, else from the library's rule, else from running the operator
    to discover them. Each is checked forward and backward, in float64 and in the given dtype.

    With --prove, each split is also proved over the real numbers, for all shapes and numbers of
    ranks. A split that is neither proved nor refuted is unverified.

    \b
    An argument is one of
      8x32x32           a tensor with values that suit the operator
      16                a vector such as a bias; as a --kwarg, the number
      8x32:int64<100    a tensor of another dtype; here indices below 100
      2.5, value=16     a number
      value=(8, 4)      any Python literal or slice: value=slice(0, 9)

    Exit codes: 0 pass, 1 different or degraded, 2 wrong usage or bad input, 3 unverified.
    """  # noqa: D301  (\b tells click not to wrap the lines)
    given["prove"] = bool(given["prove"]) or certificates is not None
    options = PartitionOptions(**given)  # type: ignore[arg-type]
    from paritas.partition.configuration.resolving import check_name

    check_name(operator, "OPERATOR")
    if options.annotation is not None and options.discover:
        ctx.fail("--annotation and --discover exclude each other: give one of them")
    checked = _run(operator, options)
    if certificates is not None:
        from paritas.reports.files import write_certificates

        write_certificates(certificates, checked.certificates())
    write_json(json_path, checked.verdict.to_json)
    shrunk = [] if outdir is None else _shrink(checked, outdir)
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


def _shrink(checked: CheckedOperator, outdir: Path) -> list[str]:
    """Shrink the first failure and describe the result; a failure to shrink is not an error."""
    from paritas.cli.shrink import report_lines
    from paritas.errors import UsageError

    try:
        with progress() as tell:
            return report_lines(checked.verdict.shrink(outdir=outdir, on_progress=tell))
    except UsageError as error:
        return [f"no script in {outdir}: {error}"]
