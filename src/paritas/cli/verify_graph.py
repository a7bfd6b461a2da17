"""`paritas verify-graph`: every operator of a graph, whole against split over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paritas.cli.options import (
    INTERRUPTED,
    OutputFormat,
    confirm_option,
    device_option,
    emit,
    format_options,
    progress,
    subject_file,
)

if TYPE_CHECKING:
    from paritas.results.graph_reports import GraphReport
    from paritas.results.progress import Progress

# Those of `paritas.graphs.calls`.
SOURCES = ("declared", "library", "discover", "all")


class RankCounts(click.ParamType[tuple[int, ...]]):
    """Numbers of ranks, with commas between them."""

    name = "N[,N...]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Read them."""
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            numbers = ()
        if not numbers or min(numbers) < 2:  # noqa: PLR2004
            self.fail(f"{value!r} is no number of ranks from 2 on, as in 2 or 2,4", param, ctx)
        return numbers


@click.command("verify-graph", short_help="Check every operator of a graph, split over ranks.")
@click.option(
    "--graph",
    required=True,
    metavar="FILE|module:factory",
    help="A torch.export program (.pt2), an nnScaler checkpoint (.ckp), or a function that "
    "returns (model, inputs), an ExportedProgram or a GraphModule.",
)
@click.option(
    "--outdir",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Where the results go; a run that was cut short there goes on, and another graph is "
    "registered beside those that DIR holds.",
)
@click.option(
    "--options",
    type=click.Choice(SOURCES),
    help="Where splits come from; by default from the graph, else from the library.",
)
@click.option("--ranks", type=RankCounts(), default="2", show_default=True, help="Over how many.")
@click.option(
    "--cap", type=click.IntRange(1), metavar="N", help="Shorten dimensions that are longer."
)
@click.option(
    "--inputs",
    metavar="FILE|DUMP|module:function",
    help="Inputs of the graph (.safetensors, .pt, a function), or a dump: operators are given the "
    "values of such a run.",
)
@click.option(
    "--import",
    "imports",
    multiple=True,
    metavar="MODULE",
    help="Brings operators, annotations and functions of yours; may be repeated.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of values that are drawn.")
@click.option("--strict", is_flag=True, help="Count unstable splits as failures.")
@device_option
@confirm_option
@click.option(
    "--executor",
    default="processes",
    show_default=True,
    metavar="processes|dask://HOST:PORT",
    help="Who does the work.",
)
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="How many workers; 1 by default.")
@click.option("--overwrite", is_flag=True, help="Start anew, whatever DIR holds.")
@click.option("--no-html", is_flag=True, help="Leave report.html out.")
@click.option("--quiet", is_flag=True, help="Print the verdict's line alone, and no progress.")
@format_options
@click.pass_context
def verify_graph(  # noqa: PLR0913  (what is not handed on)
    ctx: click.Context,
    /,
    *,
    graph: str,
    outdir: Path,
    inputs: str | None,
    device: str | None,
    overwrite: bool,
    no_html: bool,
    quiet: bool,
    form: OutputFormat,
    **asked: Any,
) -> None:
    """Check every operator of a graph: alone, and split over ranks in each way that it can be.

    Identical calls are checked once and counted. A file is only read: nothing in it is run but
    torch's operators, and what --import names.

    Written to DIR are results.json, results.csv, report.html and, for each failure, a script that
    shows it (repro/). Graphs that DIR holds results of stay in them, and operators that were
    verified for one of them are not verified again.

    Exit codes: 0 pass, 1 a split is wrong, 2 wrong usage or bad input, 3 something could not be
    checked, 130 interrupted.
    """
    last: list[Progress] = []
    try:
        report = _run(
            graph,
            outdir,
            inputs,
            last,
            device=device,
            quiet=quiet,
            html=not no_html,
            resume=not overwrite,
            **asked,
        )
    except KeyboardInterrupt:
        done = f" after {last[-1].done} of {last[-1].total} operators" if last else ""
        click.echo(f"interrupted{done}; the same command goes on from there", err=True)
        ctx.exit(INTERRUPTED)
    _show(report, graph, None if quiet else _written(outdir, html=not no_html), form)
    ctx.exit(report.exit_code)


def _run(
    graph: str,
    outdir: Path,
    inputs: str | None,
    last: list[Progress],
    *,
    device: str | None,
    quiet: bool,
    **asked: Any,
) -> GraphReport:
    from paritas.candidates.loading import find_graph, find_inputs, look_here

    look_here()  # for --import

    with progress(quiet=quiet) as show:

        def tell(told: Progress) -> None:
            last[:] = [told]
            show(told)

        if device is not None:
            from paritas.execution.subjects import usable_device

            asked["device"] = usable_device(device)
        source = find_graph(graph)
        given = None if inputs is None else find_inputs(inputs)
        from paritas.graphs import verify

        return verify.verify_graph(source, outdir, inputs=given, on_progress=tell, **asked)


def _written(outdir: Path, *, html: bool) -> list[str]:
    names = (*(["report.html"] if html else []), "results.csv", "results.json")
    return [str(outdir / name) for name in names]


def _show(report: GraphReport, graph: str, files: list[str] | None, form: OutputFormat) -> None:
    """Print it; the verdict's line alone where no files are to be named."""
    from rich.console import Console

    from paritas.reports.annotations import graph_account
    from paritas.reports.graphs import graph_report, graph_verdict_line

    emit(
        form,
        lambda: graph_account(report, subject=graph, file=subject_file(graph)),
        graph_verdict_line(report)
        if files is None
        else graph_report(report, Console(stderr=form.takes_stdout).width, files=files),
        soft_wrap=files is None,
    )
