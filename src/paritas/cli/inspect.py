"""`paritas inspect`: show what a dump contains, and what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from paritas.cli.options import KINDS, UNVERIFIED, NumberRange, json_option, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from paritas.dumps.survey import DumpSurvey, ExaminedRecord, RecordFilter


@click.command(short_help="Show what a dump contains, its first NaN, and what is missing.")
@click.argument("dump", type=click.Path(path_type=Path))
@click.option(
    "--layer",
    "layers",
    multiple=True,
    metavar="GLOB",
    help="Only matching names, and everything in matching modules; may be repeated.",
)
@click.option(
    "--step",
    "steps",
    multiple=True,
    type=NumberRange("step"),
    help="Only these steps; may be repeated.",
)
@click.option(
    "--rank", "ranks", multiple=True, type=click.IntRange(0), help="Only this; may be repeated."
)
@click.option("--phase", type=click.Choice(["forward", "backward"]), help="Only this phase.")
@click.option("--kind", type=KINDS, help="The tool that wrote DUMP. Default: detected.")
@click.option("--records", is_flag=True, help="Also list every record with its statistics.")
@click.option("--check", is_flag=True, help="Read all stored values and verify their checksums.")
@json_option("Write the result to this file; with --records, also the records.")
@click.pass_context
def inspect(  # noqa: PLR0913  (one for each option)
    ctx: click.Context,
    *,
    dump: Path,
    layers: tuple[str, ...],
    steps: tuple[tuple[int, int], ...],
    ranks: tuple[int, ...],
    phase: str | None,
    kind: str | None,
    records: bool,
    check: bool,
    json_path: Path | None,
) -> None:
    """Show what DUMP contains: run, ranks, steps, sizes, names, the first NaN or infinity.

    DUMP is a dump of paritas, msprobe, Ascend's GE or FX mode or SGLang, or plain .safetensors,
    .npy, .npz or .pt files.

    The dump may still be growing, or its program may have been killed: the report says what is
    there and what is missing. Statistics come from the index; if it has none, the values are read.

    With --check every stored value is read and compared with its checksum. Dumps of paritas have
    one per value, .pt and .npz files one per member; other files have none.

    Exit codes: 0 complete, 2 no dump or wrong usage, 3 incomplete: something is missing, unreadable
    or not closed; with --check also if a value has no checksum or does not match it.
    """
    import msgspec
    from rich.console import Console

    from paritas.dumps.opening import open_dump
    from paritas.dumps.survey import DumpSurvey, RecordFilter
    from paritas.reports.dumps import dump_report

    wanted = RecordFilter(layers=layers, steps=steps, ranks=ranks, phase=phase)  # type: ignore[arg-type]
    survey = DumpSurvey(open_dump(dump, kind), wanted, check=check)
    console = Console(highlight=False)
    listed = _walk(survey, console if records else None, keep=records and json_path is not None)
    summary = survey.summary()
    if summary.records and not summary.selected:
        ctx.fail(_describe_no_match(survey, wanted, dump, summary.records))
    content = {"summary": summary, "records": listed if records else None}
    write_json(json_path, lambda: msgspec.json.encode(content))
    console.print(dump_report(summary), crop=False)
    ctx.exit(0 if summary.is_sound else UNVERIFIED)


def _walk(survey: DumpSurvey, console: Console | None, *, keep: bool) -> list[ExaminedRecord]:
    """Survey all records; print them if there is a console, and return them if `keep`."""
    from paritas.reports.dumps import record_lines

    kept: list[ExaminedRecord] = []
    for examined in survey.walk():
        if keep:
            kept.append(examined)
        if console is not None:
            click.echo("\n".join(record_lines(examined, console.width)))
    if console is not None:
        click.echo()
    return kept


def _describe_no_match(survey: DumpSurvey, wanted: RecordFilter, dump: Path, records: int) -> str:
    import difflib

    names = survey.names_seen()
    hints = []
    for glob in wanted.layers:
        near = difflib.get_close_matches(glob, names, n=3, cutoff=0.3) or names[:3]
        hints.append(f"names similar to --layer {glob!r}: {', '.join(map(repr, near))}")
    hint = "; ".join(hints) or "choose other steps, ranks or phases"
    return f"none of the {records} records in {str(dump)!r} is selected; {hint}"
