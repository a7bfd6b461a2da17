"""`paritas inspect` and `paritas convert`: what a dump contains, and another layout of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from paritas.core.commands.options import (
    INTERRUPTED,
    KINDS,
    UNVERIFIED,
    NumberRange,
    json_option,
    json_takes_stdout,
    options_as,
    progress,
    write_json,
)

if TYPE_CHECKING:
    from rich.console import Console

    from paritas.formats.dumps.survey import DumpSurvey, ExaminedRecord, RecordFilter
    from paritas.recording.conversion import Conversion
    from paritas.recording.rewriting import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """The options of `paritas inspect`, by their names."""

    layers: tuple[str, ...]
    steps: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]
    phase: Literal["forward", "backward"] | None
    kind: str | None
    records: bool
    check: bool
    json_path: Path | None


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
@options_as(InspectOptions)
def inspect(ctx: click.Context, *, dump: Path, options: InspectOptions) -> None:
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

    from paritas.core.reporting.terminal import Printable
    from paritas.formats.dumps.opening import open_dump
    from paritas.formats.dumps.report import dump_report
    from paritas.formats.dumps.survey import DumpSurvey, RecordFilter

    record_filter = RecordFilter(
        layers=options.layers, steps=options.steps, ranks=options.ranks, phase=options.phase
    )
    survey = DumpSurvey(open_dump(dump, options.kind), record_filter, check=options.check)
    console = Console(highlight=False, stderr=json_takes_stdout())
    keep = options.records and options.json_path is not None
    listed = _walk(survey, console if options.records else None, keep=keep)
    summary = survey.summary()
    if summary.records and not summary.selected:
        ctx.fail(_describe_no_match(survey, record_filter, dump, summary.records))
    content = {"summary": summary, "records": listed if options.records else None}
    write_json(options.json_path, lambda: msgspec.json.encode(content))
    console.print(Printable(dump_report(summary)), crop=False)
    ctx.exit(0 if summary.is_sound else UNVERIFIED)


def _walk(survey: DumpSurvey, console: Console | None, *, keep: bool) -> list[ExaminedRecord]:
    """Survey all records; print them if there is a console, and return them if `keep`."""
    from paritas.core.errors import plain
    from paritas.formats.dumps.report import record_lines

    examined_records: list[ExaminedRecord] = []
    for examined in survey.walk():
        if keep:
            examined_records.append(examined)
        if console is not None:
            lines = "\n".join(record_lines(examined, console.width))
            click.echo(plain(lines), err=console.stderr)
    if console is not None:
        click.echo(err=console.stderr)
    return examined_records


def _describe_no_match(
    survey: DumpSurvey, record_filter: RecordFilter, dump: Path, records: int
) -> str:
    import difflib

    names = survey.names_seen()
    hints = []
    for glob in record_filter.layers:
        near = difflib.get_close_matches(glob, names, n=3, cutoff=0.3) or names[:3]
        hints.append(f"names similar to --layer {glob!r}: {', '.join(map(repr, near))}")
    hint = "; ".join(hints) or "choose other steps, ranks or phases"
    return f"none of the {records} records in {str(dump)!r} is selected; {hint}"


# --- convert: to statistics or another layout, also while it grows --------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """The options of `paritas convert`, by their names."""

    target: Target
    output: Path | None
    kind: str | None
    watch: bool
    delete: bool
    interval: float


@click.command(short_help="Convert a dump to statistics or another layout.")
@click.argument("dump", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "target",
    type=click.Choice(["stats", "packed", "msit", "ge"]),
    required=True,
    help="stats: statistics and sketches, no tensors. packed: a few large safetensors files. msit: "
    "one .npy file per tensor, in torchair's folders. ge: folders and bin files as Ascend's GE "
    "writes them.",
)
@click.option(
    "--output",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Where to write. Default: DUMP_stats, DUMP_packed, DUMP_msit or DUMP_ge.",
)
@click.option("--kind", type=KINDS, help="The tool that wrote DUMP. Default: detected.")
@click.option(
    "--watch",
    is_flag=True,
    help="Follow a dump that is being written until every rank has closed its part; a dump of "
    "another tool until Ctrl-C.",
)
@click.option(
    "--delete",
    is_flag=True,
    help="Delete each file of DUMP once its content is converted and on disk.",
)
@click.option(
    "--interval",
    type=click.FloatRange(0, min_open=True),
    default=0.5,
    show_default=True,
    metavar="S",
    help="With --watch: seconds between checks.",
)
@click.pass_context
@options_as(ConvertOptions)
def convert(ctx: click.Context, *, dump: Path, options: ConvertOptions) -> None:
    """Convert DUMP to another kind of dump, in a folder of its own.

    DUMP is any dump that `paritas inspect` reads. Every record keeps its names and metadata. The
    result of an interrupted conversion is readable, and the same command resumes it; this is also
    true for a dump that was not closed.

    --watch reads only complete data. In a dump of paritas, a record is listed in the index after
    its values are written. For other tools, a file is complete when its size and time did not
    change between two checks and its header matches its length. These tools do not mark the end
    of a dump: stop with Ctrl-C, then run the same command without --watch to convert the rest.
    --watch may be started before the program. It also stops when the program was killed.

    --delete deletes a file of DUMP once its content is converted and on disk, even while the
    program runs. Indexes, graphs and unreadable files are kept, and all files of a rank whose
    index has a damaged line. A packed file is emptied when the program has moved on to the next
    one (after 1 GiB).

    Exit codes: 0 everything is converted, 2 no dump or wrong usage, 3 something could not be read
    or DUMP is not closed, 130 interrupted.
    """
    from paritas.recording.conversion import Converter

    where = options.output or dump.with_name(f"{dump.name}_{options.target}")
    converter = Converter(dump, where, options.target, kind=options.kind, delete=options.delete)
    with progress() as tell:
        interrupted = False
        try:
            converter.run(interval=options.interval if options.watch else None, on_progress=tell)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            converter.close()
    done = converter.result()
    _show_conversion(done, dump, where, interrupted=interrupted)
    if interrupted:
        ctx.exit(INTERRUPTED)
    ctx.exit(0 if done.closed and not done.problems else UNVERIFIED)


def _show_conversion(done: Conversion, dump: Path, where: Path, *, interrupted: bool) -> None:
    from paritas.core.results.wording import count_things, size

    for problem in done.problems:
        click.echo(f"problem: {problem}")
    if done.freed_files:
        freed = f"{size(done.freed_bytes)} in {count_things(done.freed_files, 'file')}"
        click.echo(f"deleted {freed} of {dump}{'; its index is kept' if done.is_ours else ''}")
    earlier = f", {done.earlier} of them from an earlier run" if done.earlier else ""
    amount = f"{count_things(done.records, 'record')} of {count_things(done.ranks, 'rank')}"
    sizes = f"{size(done.value_bytes)} of values became {size(done.written_bytes)}, plus the index"
    click.echo(f"{amount} in {where}{earlier}; {sizes}")
    if interrupted:
        click.echo("interrupted: run the same command to resume", err=True)
    elif not done.closed:
        click.echo(f"{dump} is not closed: it was cut off, or is still being written (use --watch)")
