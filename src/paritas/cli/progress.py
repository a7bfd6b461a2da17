"""What a command shows while it works: a spinner on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Give a function that shows a step, on stderr; a terminal is left clean at the end."""
    console = Console(stderr=True)
    if not console.is_interactive:
        yield lambda words: click.echo(f"{words} ...", err=True)
        return
    columns = (
        SpinnerColumn("line"),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as display:
        task = display.add_task("starting", total=None)
        yield lambda words: display.update(task, description=words)
