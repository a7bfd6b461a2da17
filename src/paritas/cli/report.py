"""`paritas report`: write the report of a comparison again, or for Model Explorer."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(short_help="Write the HTML report of a comparison again.")
@click.argument("comparison", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Where to write. Default: report.html beside comparison.json.",
)
@click.option(
    "--model-explorer",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write JSON for Model Explorer instead: the graph, and data to colour its nodes.",
)
def report(*, comparison: Path, output: Path | None, model_explorer: Path | None) -> None:
    """Write the HTML report of a comparison again, from its comparison.json.

    OUT is the folder that paritas compare wrote, or the file comparison.json itself. With
    --model-explorer it may also be the folder of paritas verify-graph.

    Exit codes: 0 the report is written, whatever its verdict; 2 no comparison or wrong usage.
    """
    if model_explorer is not None:
        _write_for_model_explorer(comparison, model_explorer)
        return
    from paritas.reports import files
    from paritas.results.wording import headline

    folder = comparison if comparison.is_dir() else comparison.parent
    target = output or folder / files.HTML
    files.check_writable(target)
    found = files.read_comparison(comparison)
    files.write_html(target, found)
    click.echo(headline(found.verdict))
    click.echo(f"written: {target}")


def _write_for_model_explorer(source: Path, target: Path) -> None:
    from paritas.graphs import results_folder
    from paritas.reports import files, model_explorer
    from paritas.results.wording import headline

    files.check_writable(target)
    results = source / results_folder.JSON if source.is_dir() else source
    if results.name == results_folder.JSON and results.is_file():
        from paritas.results.graph_reports import GraphReport

        graph = GraphReport.from_json(results.read_bytes())
        model_explorer.write_graph_report(target, graph)
        click.echo(headline(graph.verdict))
        click.echo(f"written: {target}, node data for {graph.graph}")
        return
    found = files.read_comparison(source)
    written = model_explorer.write_comparison(target, found)
    click.echo(headline(found.verdict))
    click.echo(f"written: {', '.join(map(str, written))}")
