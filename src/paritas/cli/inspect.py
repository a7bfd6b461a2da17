"""`paritas inspect`: what is in a dump, and what is not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from paritas.cli.options import KINDS, UNVERIFIED, NumberRange, json_option, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from paritas.dumps.survey import DumpSurvey, ExaminedRecord, RecordFilter


@click.command(short_help="What is in a dump, its first NaN, and what is missing.")
@click.argument("dump", type=click.Path(path_type=Path))
@click.option(
    "--layer",
    "layers",
    multiple=True,
    metavar="GLOB",
    help="Only names, modules or what is inside of modules like this; may be repeated.",
)
@click.option(
    "--step", "steps", multiple=True, type=NumberRange("step"), help="Only these; may be repeated."
)
@click.option("--rank", "ranks", multiple=True, type=click.IntRange(0), help="Only this; likewise.")
@click.option("--phase", type=click.Choice(["forward", "backward"]), help="Only this.")
@click.option(
    "--kind",
    type=KINDS,
    help="Which tool made it; found out unless it is given.",
)
@click.option("--records", is_flag=True, help="List single records with their statistics, too.")
@click.option("--check", is_flag=True, help="Read all stored values, and check their checksums.")
@json_option("Write the same to this file, with the records if these are asked for.")
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
    """Say what is in DUMP: run, ranks, steps, sizes, names, the first NaN or infinity.

    DUMP is one of paritas, or of another tool: msprobe, Ascend's GE or FX mode, SGLang, or plain
    .safetensors, .npy, .npz and .pt files.

    A dump that is still being written, or whose program was killed, can be looked at too: what is
    there is told, and what is missing. Statistics come from the index; where it has none, the
    values are read.

    With --check every stored value is read and held against its checksum. Dumps of paritas have
    one for each value, .pt and .npz files one for each member; other files have none.

    Exit codes: 0 complete, 2 no dump or wrong usage, 3 incomplete: something is missing, cannot be
    read, or was not closed; with --check also if a value does not fit its checksum, or has none.
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
        ctx.fail(_nothing(survey, wanted, dump, summary.records))
    content = {"summary": summary, "records": listed if records else None}
    write_json(json_path, lambda: msgspec.json.encode(content))
    console.print(dump_report(summary), crop=False)
    ctx.exit(0 if summary.is_sound else UNVERIFIED)


def _walk(survey: DumpSurvey, console: Console | None, *, keep: bool) -> list[ExaminedRecord]:
    """Go through the dump; list its records on the way where there is a console."""
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


def _nothing(survey: DumpSurvey, wanted: RecordFilter, dump: Path, records: int) -> str:
    import difflib

    names = survey.names_seen()
    hints = []
    for glob in wanted.layers:
        near = difflib.get_close_matches(glob, names, n=3, cutoff=0.3) or names[:3]
        hints.append(f"near to --layer {glob!r} are {', '.join(map(repr, near))}")
    asked = "; ".join(hints) or "ask for other steps, ranks or phases"
    return f"none of the {records} records in {str(dump)!r} is asked for; {asked}"
