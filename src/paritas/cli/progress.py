"""What a command shows while it works, on stderr: one line on a terminal, few lines in a log."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(*, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Give a function that shows a step; a terminal is left clean at the end."""
    if quiet:
        yield lambda _: None
        return
    from rich.console import Console

    from paritas.reporting.progress import Bar, Lines, bar_display

    console = Console(stderr=True)
    if not console.is_interactive:
        yield Lines(lambda words: click.echo(words, err=True))
        return
    with bar_display(console) as display:
        yield Bar(display)
