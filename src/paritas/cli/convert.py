"""`paritas convert`: a dump made into statistics, or into another layout, also while it grows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from paritas.cli.options import INTERRUPTED, KINDS, UNVERIFIED, progress

if TYPE_CHECKING:
    from paritas.recording.conversion import Conversion, Target


@click.command(short_help="Make a dump into statistics or another layout.")
@click.argument("dump", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "target",
    type=click.Choice(["stats", "packed", "msit", "ge"]),
    required=True,
    help="stats: statistics and sketches, no tensors. packed: few large safetensors files. msit: "
    "one .npy file a tensor, in torchair's folders. ge: the folders and bin files of Ascend's GE.",
)
@click.option(
    "--output",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Where to; by default DUMP_stats, DUMP_packed, DUMP_msit or DUMP_ge.",
)
@click.option("--kind", type=KINDS, help="Which tool made DUMP; found out unless it is given.")
@click.option(
    "--watch",
    is_flag=True,
    help="Follow a dump that is being written, until every rank has closed its part; one of "
    "another tool until Ctrl-C.",
)
@click.option(
    "--delete",
    is_flag=True,
    help="Delete files of DUMP when all they hold is converted and on the disk.",
)
@click.option(
    "--interval",
    type=click.FloatRange(0, min_open=True),
    default=0.5,
    show_default=True,
    metavar="S",
    help="With --watch: seconds between looks.",
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
    """Make DUMP into a dump of another kind, in a folder of its own.

    DUMP is one of paritas, or of another tool: whatever `paritas inspect` reads. Every record keeps
    its names and facts. An interrupted conversion can be read, and goes on when the same command is
    given again; so does that of a dump that was not closed.

    --watch reads only what is whole. In a dump of paritas, a record is in the index once its values
    are written. Of other tools, a file counts when its size and time were the same at two looks
    and its own header fits its length; nothing says when they are done, so Ctrl-C ends the
    watching, and the same command without --watch converts what is left. It may be started before
    the program. It ends, too, when a program that was killed is not heard of any more.

    --delete deletes a file of DUMP once all that it holds is converted and on the disk, also while
    the program runs. Indexes, and files that could not be read, stay. A packed file is emptied
    when the next one is in use (after 1 GiB).

    Exit codes: 0 all is converted, 2 no dump or wrong usage, 3 something could not be read or DUMP
    is not closed, 130 interrupted.
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
        click.echo(f"deleted {freed} of {dump}{'; its index is left' if done.is_ours else ''}")
    earlier = f", {done.earlier} of them since before" if done.earlier else ""
    amount = f"{counted(done.records, 'record')} of {counted(done.ranks, 'rank')}"
    sizes = f"{size(done.value_bytes)} of values, now {size(done.written_bytes)} beside the index"
    click.echo(f"{amount} in {where}{earlier}; {sizes}")
    if interrupted:
        click.echo("interrupted: the same command goes on from here", err=True)
    elif not done.closed:
        click.echo(f"{dump} is not closed: cut off, or still being written (--watch follows it)")
