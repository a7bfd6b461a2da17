"""`paritas report`: the report of a comparison, made again."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(short_help="Make the HTML report of a comparison again.")
@click.argument("comparison", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write it to this file; by default report.html beside comparison.json.",
)
def report(*, comparison: Path, output: Path | None) -> None:
    """Make the HTML report of a comparison again, from its comparison.json.

    OUT is the folder that paritas compare wrote, or the file comparison.json itself.

    Exit codes: 0 the report is written, whatever it says; 2 no comparison or wrong usage.
    """
    from paritas.numerics.wording import headline
    from paritas.reporting import comparison_files
    from paritas.reporting.json_file import check_writable

    folder = comparison if comparison.is_dir() else comparison.parent
    target = output or folder / comparison_files.HTML
    check_writable(target)
    found = comparison_files.read(comparison)
    comparison_files.write_html(target, found)
    click.echo(headline(found.verdict))
    click.echo(f"written: {target}")
