"""`paritas compare`: two dumps against each other."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paritas.cli.options import (
    KINDS,
    Assignment,
    NumberRange,
    OutputFormat,
    emit,
    format_options,
    progress,
)

if TYPE_CHECKING:
    from paritas.results.comparisons import Comparison

RULE = Assignment("REGEX: EXPRESSION", ": ", r"layers\..*\.attn: rel_l2 <= 1e-3 and max_abs < 1")
RENAME = Assignment("REGEX=REPLACEMENT", "=", r"encoder\.block=layers")
DIMS = Assignment("REGEX: DIMS", ": ", r"attn\.q: b s[cp] h[tp] d")


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
@click.option("--my-kind", type=KINDS, help="Which tool made it; found out unless it is given.")
@click.option("--golden-kind", type=KINDS, help="Likewise.")
@click.option(
    "--config",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML with rules, renames and the like.",
)
@click.option("--rule", "rules", multiple=True, type=RULE, help="What names like this must keep.")
@click.option(
    "--rename", "renames", multiple=True, type=RENAME, help="From my names to the golden ones."
)
@click.option(
    "--dims", multiple=True, type=DIMS, help="How values of names like this are split over ranks."
)
@click.option("--mesh", default="", metavar="tp=2,cp=2", help="How the ranks of --dims are laid.")
@click.option(
    "--steps", multiple=True, metavar="N|A-B|MY:GOLDEN", help="Only these; 1:0 is mine 1, golden 0."
)
@click.option(
    "-r", "--ranks", "--rank", multiple=True, type=NumberRange("rank"), help="Only these ranks."
)
@click.option("--ignore", multiple=True, metavar="REGEX", help="Leave names like this out.")
@click.option(
    "--unmatched",
    type=click.Choice(["fail", "list"]),
    default="fail",
    show_default=True,
    help="What a value without a counterpart is: a failure, or listed only.",
)
@click.option("--no-replay", is_flag=True, help="Run no operator again: faster, tells less.")
@click.option("--quick", is_flag=True, help="Few figures of rows that surely pass: faster.")
@click.option("--strict", is_flag=True, help="Count unstable rows as failures.")
@click.option(
    "--trust-digests",
    is_flag=True,
    help="Do not check data against its checksums; with equal digests, do not read it.",
)
@click.option(
    "--executor",
    default="threads",
    show_default=True,
    metavar="threads|processes|dask://HOST:PORT",
    help="Who does the work.",
)
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="How many workers.")
@click.option("--parquet", is_flag=True, help="Write comparison.parquet, too.")
@click.option("--no-html", is_flag=True, help="Leave report.html out.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier comparison.")
@click.option("--quiet", is_flag=True, help="Print the verdict's line alone, and no progress.")
@format_options
@click.pass_context
def compare(  # noqa: PLR0913  (what is not handed on)
    ctx: click.Context,
    /,
    *,
    output: str,
    ranks: tuple[tuple[int, int], ...],
    no_replay: bool,
    parquet: bool,
    no_html: bool,
    overwrite: bool,
    quiet: bool,
    form: OutputFormat,
    **asked: Any,
) -> None:
    """Compare the values of two dumps, and find where they part.

    Options that take a REGEX, --steps and --ranks may be repeated. DUMP is one of paritas, or of
    another tool: msprobe, Ascend's GE or FX mode, SGLang, or plain .safetensors, .npy, .npz and .pt
    files; the two need not be of one kind.

    Written are comparison.csv, comparison.json and report.html.

    Exit codes: 0 pass, 1 different or degraded, 2 wrong usage or bad input, 3 unverified.
    """
    _check_output(output, overwrite=overwrite, parquet=parquet)
    from paritas.execution.executors import few_full_collections

    chosen = [rank for first, last in ranks for rank in range(first, last + 1)] or None
    with few_full_collections():
        found = _compare(quiet=quiet, ranks=chosen, replay=not no_replay, **asked)
        names = _write(output, found, parquet=parquet, html=not no_html)
    _show(found, f"written to {output}: {', '.join(names)}", form, quiet=quiet)
    ctx.exit(found.exit_code)


def _compare(*, quiet: bool, my: str, golden: str, **asked: Any) -> Comparison:
    with progress(quiet=quiet) as tell:
        from paritas.comparison import compare as comparing

        return comparing.compare(my, golden, progress=tell, **asked)


def _check_output(output: str, *, overwrite: bool, parquet: bool) -> None:
    """Refuse what could not be written, before the work."""
    from paritas.files.trees import is_url, names_at
    from paritas.reports import files

    if not is_url(output):
        files.check_output(Path(output), overwrite=overwrite, parquet=parquet)
        return
    with tempfile.TemporaryDirectory() as folder:
        files.check_output(Path(folder), parquet=parquet)
    files.check_names(output, names_at(output), overwrite=overwrite)


def _write(output: str, comparison: Comparison, *, parquet: bool, html: bool) -> list[str]:
    from paritas.files.trees import is_url, write_to
    from paritas.reports import files

    if not is_url(output):
        written = files.write_all(Path(output), comparison, parquet=parquet, html=html)
        return [path.name for path in written]
    with tempfile.TemporaryDirectory() as folder:
        written = files.write_all(Path(folder), comparison, parquet=parquet, html=html)
        write_to(output, Path(folder))
    return [path.name for path in written]


def _show(comparison: Comparison, remark: str, form: OutputFormat, *, quiet: bool) -> None:
    from paritas.reports.annotations import comparison_account
    from paritas.reports.dumps import comparison_report, comparison_verdict_line

    shown = comparison_verdict_line(comparison) if quiet else comparison_report(comparison, remark)
    subject = f"{comparison.my.path} {comparison.golden.path}"
    emit(form, lambda: comparison_account(comparison, subject=subject), shown, soft_wrap=quiet)
