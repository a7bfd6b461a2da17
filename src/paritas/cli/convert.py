"""`paritas convert`: convert a dump to statistics or another layout, also while it grows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from paritas.cli.options import INTERRUPTED, KINDS, UNVERIFIED, progress

if TYPE_CHECKING:
    from paritas.recording.conversion import Conversion, Target


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
def convert(  # noqa: PLR0913  (one for each option)
    ctx: click.Context,
    *,
    dump: Path,
    target: Target,
    output: Path | None,
    kind: str | None,
    watch: bool,
    delete: bool,
    interval: float,
) -> None:
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
    program runs. Indexes and unreadable files are kept. A packed file is emptied when the program
    has moved on to the next one (after 1 GiB).

    Exit codes: 0 everything is converted, 2 no dump or wrong usage, 3 something could not be read
    or DUMP is not closed, 130 interrupted.
    """
    from paritas.recording.conversion import Converter

    where = output or dump.with_name(f"{dump.name}_{target}")
    converter = Converter(dump, where, target, kind=kind, delete=delete)
    with progress() as tell:
        interrupted = False
        try:
            converter.run(interval=interval if watch else None, on_progress=tell)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            converter.close()
    done = converter.result()
    _show(done, dump, where, interrupted=interrupted)
    if interrupted:
        ctx.exit(INTERRUPTED)
    ctx.exit(0 if done.closed and not done.problems else UNVERIFIED)


def _show(done: Conversion, dump: Path, where: Path, *, interrupted: bool) -> None:
    from paritas.results.wording import counted, size

    for problem in done.problems:
        click.echo(f"problem: {problem}")
    if done.freed_files:
        freed = f"{size(done.freed_bytes)} in {counted(done.freed_files, 'file')}"
        click.echo(f"deleted {freed} of {dump}{'; its index is kept' if done.is_ours else ''}")
    earlier = f", {done.earlier} of them from an earlier run" if done.earlier else ""
    amount = f"{counted(done.records, 'record')} of {counted(done.ranks, 'rank')}"
    sizes = f"{size(done.value_bytes)} of values became {size(done.written_bytes)}, plus the index"
    click.echo(f"{amount} in {where}{earlier}; {sizes}")
    if interrupted:
        click.echo("interrupted: run the same command to resume", err=True)
    elif not done.closed:
        click.echo(f"{dump} is not closed: it was cut off, or is still being written (use --watch)")
