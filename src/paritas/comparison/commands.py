"""`paritas compare`: the values of two dumps."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paritas.core.commands.options import (
    KINDS,
    Assignment,
    NumberRange,
    OutputFormat,
    emit,
    format_options,
    options_as,
    progress,
)

if TYPE_CHECKING:
    from paritas.comparison.rows import Comparison


RULE = Assignment("REGEX: EXPRESSION", ": ", r"layers\..*\.attn: rel_l2 <= 1e-3 and max_abs < 1")
RENAME = Assignment("REGEX=REPLACEMENT", "=", r"encoder\.block=layers")
DIMS = Assignment("REGEX: DIMS", ": ", r"attn\.q: b s[cp] h[tp] d")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What the command writes, and where."""

    output: str
    parquet: bool
    no_html: bool
    overwrite: bool
    quiet: bool
    form: OutputFormat


@click.command(short_help="Compare two dumps: a table, the first divergence, a report.")
@click.option("--my-path", "my", required=True, metavar="DUMP", help="The candidate's dump.")
@click.option("--golden-path", "golden", required=True, metavar="DUMP", help="The reference's.")
@click.option(
    "--output",
    default=".",
    show_default="the current directory",
    metavar="DIR",
    help="Where the table and the report go: a folder, or a URL.",
)
@click.option("--my-kind", type=KINDS, help="The tool that wrote --my-path. Default: detected.")
@click.option(
    "--golden-kind", type=KINDS, help="The tool that wrote --golden-path. Default: detected."
)
@click.option(
    "--config",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML file with rules, renames and other options.",
)
@click.option(
    "--rule", "rules", multiple=True, type=RULE, help="Tolerance for values with matching names."
)
@click.option(
    "--rename", "renames", multiple=True, type=RENAME, help="Map names of mine to golden names."
)
@click.option(
    "--dims",
    multiple=True,
    type=DIMS,
    help="How values with matching names are split over ranks.",
)
@click.option("--mesh", default="", metavar="tp=2,cp=2", help="The mesh of the ranks in --dims.")
@click.option(
    "--steps",
    multiple=True,
    metavar="N|A-B|MY:GOLDEN",
    help="Only these steps; 1:0 compares my step 1 with golden step 0.",
)
@click.option(
    "-r", "--ranks", "--rank", multiple=True, type=NumberRange("rank"), help="Only these ranks."
)
@click.option("--ignore", multiple=True, metavar="REGEX", help="Skip values with matching names.")
@click.option(
    "--unmatched",
    type=click.Choice(["fail", "list"]),
    default="fail",
    show_default=True,
    help="Whether a value without a counterpart fails or is only listed.",
)
@click.option(
    "--no-replay", is_flag=True, help="Do not rerun operators: faster, but less is explained."
)
@click.option("--quick", is_flag=True, help="Compute fewer metrics for rows that clearly pass.")
@click.option("--strict", is_flag=True, help="Count unstable rows as failures.")
@click.option(
    "--trust-digests",
    is_flag=True,
    help="Do not verify checksums, and do not read data whose digests are equal.",
)
@click.option(
    "--executor",
    default="threads",
    show_default=True,
    metavar="threads|processes|dask://HOST:PORT",
    help="Where the work runs.",
)
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Number of workers.")
@click.option("--parquet", is_flag=True, help="Also write comparison.parquet.")
@click.option("--no-html", is_flag=True, help="Do not write report.html.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier comparison.")
@click.option("--quiet", is_flag=True, help="Print only the verdict line, no progress.")
@format_options
@click.pass_context
@options_as(OutputOptions)
def compare(
    ctx: click.Context,
    /,
    *,
    my: str,
    golden: str,
    ranks: tuple[tuple[int, int], ...],
    no_replay: bool,
    options: OutputOptions,
    **compare_options: Any,
) -> None:
    """Compare the values of two dumps, and find where they start to differ.

    Options that take a REGEX, --steps and --ranks may be repeated. DUMP is a dump of paritas,
    msprobe, Ascend's GE or FX mode or SGLang, or plain .safetensors, .npy, .npz or .pt files. The
    two dumps may be of different kinds.

    The command writes comparison.csv, comparison.json and report.html.

    Exit codes: 0 pass, 1 different or degraded, 2 wrong usage or bad input, 3 unverified.
    """
    _check_output(options)
    from paritas.core.execution.executors import few_full_collections

    chosen = [rank for first, last in ranks for rank in range(first, last + 1)] or None
    with few_full_collections():
        with progress(quiet=options.quiet) as tell:
            from paritas.comparison.compare import compare as compare_dumps

            comparison = compare_dumps(
                my, golden, ranks=chosen, replay=not no_replay, on_progress=tell, **compare_options
            )
        names = _write(comparison, options)
    _show_comparison(comparison, f"written to {options.output}: {', '.join(names)}", options)
    ctx.exit(comparison.exit_code)


def _check_output(options: OutputOptions) -> None:
    """Raise `UsageError` now if the results could not be written later."""
    from paritas.comparison import results_folder
    from paritas.core.file_trees import is_url, names_at

    output, overwrite, parquet = options.output, options.overwrite, options.parquet
    if not is_url(output):
        results_folder.check_output(Path(output), overwrite=overwrite, parquet=parquet)
        return
    with tempfile.TemporaryDirectory() as folder:
        results_folder.check_output(Path(folder), parquet=parquet)
    results_folder.check_names(output, names_at(output), overwrite=overwrite)


def _write(comparison: Comparison, options: OutputOptions) -> list[str]:
    from paritas.comparison import results_folder
    from paritas.core.file_trees import is_url, write_to

    output, html = options.output, not options.no_html
    with contextlib.ExitStack() as stack:
        folder = Path(output)
        if is_url(output):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        written = results_folder.write_all(folder, comparison, parquet=options.parquet, html=html)
        if is_url(output):
            write_to(output, folder)
    return [path.name for path in written]


def _show_comparison(comparison: Comparison, remark: str, options: OutputOptions) -> None:
    from paritas.comparison.report import (
        comparison_account,
        comparison_report,
        comparison_verdict_line,
    )

    quiet = options.quiet
    shown = comparison_verdict_line(comparison) if quiet else comparison_report(comparison, remark)
    subject = f"{comparison.my.path} {comparison.golden.path}"
    emit(
        options.form,
        lambda: comparison_account(comparison, subject=subject),
        shown,
        soft_wrap=quiet,
    )
