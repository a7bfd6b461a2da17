"""`paritas verify-graph`: compare every operator of a graph with its splits over ranks."""

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

# Copied from `paritas.graphs.calls`, which imports torch.
SOURCES = ("declared", "library", "discover", "all")


class RankCounts(click.ParamType[tuple[int, ...]]):
    """Numbers of ranks, separated by commas."""

    name = "N[,N...]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Parse them."""
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            numbers = ()
        if not numbers or min(numbers) < 2:  # noqa: PLR2004
            self.fail(
                f"the number of ranks must be 2 or more, as in 2 or 2,4; got {value!r}", param, ctx
            )
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
    help="Where the results go. An interrupted run there is resumed; another graph is added to "
    "those in DIR.",
)
@click.option(
    "--options",
    type=click.Choice(SOURCES),
    help="Where splits come from. Default: the graph, else the library.",
)
@click.option("--ranks", type=RankCounts(), default="2", show_default=True, help="Rank counts.")
@click.option(
    "--cap", type=click.IntRange(1), metavar="N", help="Shorten longer dimensions to this length."
)
@click.option(
    "--inputs",
    metavar="FILE|DUMP|module:function",
    help="Inputs of the graph (.safetensors, .pt, a function), or a dump: operators then run on "
    "the values of that run.",
)
@click.option(
    "--import",
    "imports",
    multiple=True,
    metavar="MODULE",
    help="Import this module first: it defines your operators or annotations; may be repeated.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of random values.")
@click.option("--strict", is_flag=True, help="Count unstable splits as failures.")
@device_option
@confirm_option
@click.option(
    "--prove",
    is_flag=True,
    help="Also prove each split for all shapes and numbers of ranks, or find a counterexample.",
)
@click.option(
    "--placements",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A TOML file with placements of inputs and parameters, and the collectives after modules: "
    "prove the graph as a whole, or find numbers that refute it.",
)
@click.option(
    "--certificates",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the certificate of each proof there; implies --prove.",
)
@click.option(
    "--executor",
    default="processes",
    show_default=True,
    metavar="processes|dask://HOST:PORT",
    help="Where the work runs.",
)
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Number of workers. Default: 1.")
@click.option("--overwrite", is_flag=True, help="Start over and discard earlier results in DIR.")
@click.option("--no-html", is_flag=True, help="Do not write report.html.")
@click.option("--quiet", is_flag=True, help="Print only the verdict line, no progress.")
@format_options
@click.pass_context
def verify_graph(  # noqa: PLR0913  (one for each option that is not passed on)
    ctx: click.Context,
    /,
    *,
    graph: str,
    outdir: Path,
    inputs: str | None,
    device: str | None,
    certificates: Path | None,
    overwrite: bool,
    no_html: bool,
    quiet: bool,
    form: OutputFormat,
    **asked: Any,
) -> None:
    """Check every operator of a graph: unsplit, and with every split over ranks that it allows.

    Identical calls are checked once and counted. Code in a graph file is not executed: only torch's
    operators and the modules of --import run.

    The command writes results.json, results.csv and report.html to DIR and, for each failure, a
    script that reproduces it (repro/). Results of other graphs in DIR are kept, and operators
    verified for one of them are not verified again.

    With --prove, each split is also proved over the real numbers; one that is neither proved nor
    refuted counts as not checked. With --placements, so is the graph as a whole.

    Exit codes: 0 pass, 1 a split is wrong, 2 wrong usage or bad input, 3 something could not be
    checked, 130 interrupted.
    """
    asked["prove"] = bool(asked["prove"]) or certificates is not None
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
        click.echo(f"interrupted{done}; run the same command to resume", err=True)
        ctx.exit(INTERRUPTED)
    if certificates is not None:
        from paritas.reports.files import write_certificates

        write_certificates(certificates, report.certificates())
    names = (*([] if no_html else ["report.html"]), "results.csv", "results.json")
    _show(report, graph, None if quiet else [str(outdir / name) for name in names], form)
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

        def tell(step: Progress) -> None:
            last[:] = [step]
            show(step)

        if device is not None:
            from paritas.execution.subjects import usable_device

            asked["device"] = usable_device(device)
        source = find_graph(graph)
        given = None if inputs is None else find_inputs(inputs)
        from paritas.graphs import verify

        return verify.verify_graph(source, outdir, inputs=given, on_progress=tell, **asked)


def _show(report: GraphReport, graph: str, files: list[str] | None, form: OutputFormat) -> None:
    """Print the report with its files; only the verdict line if `files` is None."""
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
