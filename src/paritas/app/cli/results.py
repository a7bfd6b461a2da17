"""The command about saved results: `paritas explain`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paritas.core.commands.options import html_option, print_report

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
    from paritas.core.reporting.files import read_report, write_whole

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
    from paritas.core.results.comparisons import Comparison
    from paritas.core.results.graph_reports import GraphReport
    from paritas.core.results.model_reports import KernelReport

    if isinstance(report, KernelReport):
        return report.script, ""
    if isinstance(report, Comparison | GraphReport):
        folder = result if result.is_dir() else result.parent
        return "", f"paritas shrink {folder}"
    return "", str(getattr(report, "shrink_command", ""))
