"""The commands about saved results: `paritas explain` and `paritas report`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paritas.core.commands.options import html_option, print_report
from paritas.core.errors import UsageError

if TYPE_CHECKING:
    from paritas.core.results.report import Report


@click.command(short_help="Explain a saved verdict: where it starts, what kind, a picture.")
@click.argument("result", metavar="VERDICT.json", type=click.Path(path_type=Path))
@click.option(
    "--finding",
    metavar="N|PATH",
    default="",
    help="Only this one: its number in the explanation, or its path, such as 'output[0]'.",
)
@html_option
def explain(*, result: Path, finding: str, html_path: Path | None) -> None:
    """Explain a saved verdict: where a failure starts, what kind of wrong it is, what to do next.

    VERDICT.json is a file that --json of verify, run, kernel, partition, verify-parallel,
    invariants or engine wrote, or an output folder of compare, verify-graph or sweep.

    For each cause it shows the source line, the operator with its arguments, what the fault passes
    through, a picture of reference, candidate and difference, what results from it, and the script.

    Exit codes: 0 it is explained, whatever its verdict; 2 no verdict or wrong usage.
    """
    from paritas.core.reporting.explanations import explanation, next_steps
    from paritas.core.reporting.files import write_whole

    report = read_report(result)
    verdict = report.verdict
    script, shrink = _script_of(report, result)
    steps = next_steps(verdict, script=script, shrink=shrink)
    shown = explanation(verdict, steps, finding)
    if html_path is not None:
        from paritas.core.reporting.pages import verdict_page

        page = verdict_page(verdict, result.name, "", _link(result, html_path), steps)
        write_whole(html_path, page.encode(errors="backslashreplace"))
    print_report(shown)


def _link(result: Path, page: Path) -> str:
    return Path(os.path.relpath(result, page.parent)).as_posix()


def _script_of(report: Report, result: Path) -> tuple[str, str]:
    """A script that shows the failure, if one was written, and the command that writes one."""
    from paritas.comparison.rows import Comparison
    from paritas.kernels.rows import KernelReport
    from paritas.sharding.graphs.rows import GraphReport

    if isinstance(report, KernelReport):
        return report.script, ""
    if isinstance(report, Comparison | GraphReport):
        folder = result if result.is_dir() else result.parent
        return "", f"paritas shrink {folder}"
    return "", str(getattr(report, "shrink_command", ""))


# --- report: write the report of a comparison again, or for Model Explorer ------------------------


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
    from paritas.comparison.results_folder import HTML, read_comparison, write_html
    from paritas.core.reporting.files import check_writable
    from paritas.core.results.wording import headline

    folder = comparison if comparison.is_dir() else comparison.parent
    target = output or folder / HTML
    check_writable(target)
    comparison_record = read_comparison(comparison)
    write_html(target, comparison_record)
    click.echo(headline(comparison_record.verdict))
    click.echo(f"written: {target}")


def _write_for_model_explorer(source: Path, target: Path) -> None:
    from paritas.comparison.model_explorer import write_comparison
    from paritas.comparison.results_folder import read_comparison
    from paritas.core.reporting.files import GRAPH_JSON, check_writable
    from paritas.core.results.wording import headline

    check_writable(target)
    results = source / GRAPH_JSON if source.is_dir() else source
    if results.name == GRAPH_JSON and results.is_file():
        from paritas.sharding.graphs.page import write_graph_report
        from paritas.sharding.graphs.rows import GraphReport

        graph = GraphReport.from_json(results.read_bytes())
        write_graph_report(target, graph)
        click.echo(headline(graph.verdict))
        click.echo(f"written: {target}, node data for {graph.graph}")
        return
    comparison = read_comparison(source)
    written = write_comparison(target, comparison)
    click.echo(headline(comparison.verdict))
    click.echo(f"written: {', '.join(map(str, written))}")


# --- Reading any result ---------------------------------------------------------------------------

# The JSON files that commands write into a folder of their choice.
_IN_FOLDERS = ("comparison.json", "results.json", "sweep.json")


def read_report(path: Path) -> Report:
    """Read a result that a command wrote with `--json` or into its output folder.

    Raises:
        UsageError: it does not exist, is damaged, or is not a result with a verdict.
    """
    from paritas.comparison.results_folder import COMPARISON_JSON, read_comparison
    from paritas.core.file_trees import open_plain

    names = [path / name for name in _IN_FOLDERS] if path.is_dir() else [path]
    file = next((name for name in names if name.is_file()), None)
    if file is None:
        missing = f"the folder {str(path)!r} has none of {', '.join(_IN_FOLDERS)}"
        where = missing if path.is_dir() else f"{str(path)!r} does not exist"
        raise UsageError(f"{where}: give a file that --json wrote")
    if file.name == COMPARISON_JSON:
        return read_comparison(file)
    try:
        with open_plain(file) as opened:
            data = opened.read()
    except OSError as error:
        raise UsageError(f"cannot read {str(file)!r}: {error.strerror or error}") from error
    try:
        return _kind_of_result(data).from_json(data)
    except (UsageError, RecursionError) as error:
        raise UsageError(f"{file} is damaged or from another version: {error}") from None


def _kind_of_result(data: bytes) -> type[Report]:
    """The class of a result, by a field that no other one has."""
    import msgspec

    from paritas.comparison.rows import Comparison
    from paritas.core.results.findings import Verdict
    from paritas.engines.rows import EngineReport
    from paritas.kernels.rows import KernelReport
    from paritas.relations.rows import InvariantsReport
    from paritas.sharding.graphs.rows import GraphReport
    from paritas.sweeping.rows import SweepReport

    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).keys()
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(
            f"it is not a JSON object: {error}; it starts with {data[:60]!r}"
        ) from None
    kinds: dict[str, type[Report]] = {
        "golden": Comparison,
        "operators": GraphReport,
        "rating": KernelReport,
        "planned": SweepReport,
        "tried": EngineReport,
        "findings": Verdict,
        "rows": InvariantsReport,
    }
    for field, kind in kinds.items():
        if field in fields:
            return kind
    field_names = ", ".join(sorted(fields)[:5]) or "none"
    raise UsageError(
        f"it has no verdict (its fields: {field_names}); give a file that paritas verify, "
        "run, kernel, "
        "compare, partition, verify-parallel, invariants or engine wrote"
    )
