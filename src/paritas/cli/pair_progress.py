"""What `paritas compare` shows while it works: how far it is, how fast, how long it will take."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from paritas.reporting.dump_records import size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paritas.comparison.progress import Progress as Told

__all__ = ["Lines", "pair_progress", "rate_words"]

SECONDS_BETWEEN_LINES = 10.0
_MINUTE = 60
_MANY = 100


@contextlib.contextmanager
def pair_progress() -> Iterator[Callable[[Told], None]]:
    """Give a function that shows progress, on stderr; a terminal is left clean at the end."""
    console = Console(stderr=True)
    if not console.is_interactive:
        yield Lines(lambda words: click.echo(words, err=True))
        return
    stage = Column(no_wrap=True, max_width=20, overflow="ellipsis")
    columns = (
        TextColumn("{task.description}", markup=False, table_column=stage),
        BarColumn(bar_width=8),
        MofNCompleteColumn(),
        _Rate(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, transient=True) as display:
        yield Bar(display)


class Bar:
    """A bar on a terminal, which begins anew with every stage."""

    def __init__(self, display: Progress) -> None:
        self._display = display
        self._task = display.add_task("starting", total=None, nbytes=0, failing=0)
        self._stage = ""

    def __call__(self, told: Told) -> None:
        """Show it."""
        if told.stage != self._stage:
            self._stage = told.stage
            self._display.reset(self._task, description=told.stage)
        self._display.update(
            self._task,
            completed=told.done,
            total=told.total or None,
            nbytes=told.nbytes,
            failing=told.failing,
        )


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        """Pairs and bytes a second, and how many rows fail."""
        fields = task.fields
        words = rate_words(task.completed, fields["nbytes"], task.elapsed or 0.0)
        failing = f", {fields['failing']} failing" if fields["failing"] else ""
        return Text(f"{words}{failing}", style="red" if failing else "")


class Lines:
    """Plain lines, for a log: one for every stage, then one every few seconds."""

    def __init__(
        self, echo: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._echo, self._clock = echo, clock
        self._stage, self._began, self._last = "", 0.0, 0.0

    def __call__(self, told: Told) -> None:
        """Show it, if it is time."""
        now = self._clock()
        if told.stage != self._stage:
            self._stage, self._began, self._last = told.stage, now, now
            of = f" {told.total}" if told.total else ""
            self._echo(f"{told.stage}{of} ...")
        elif now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            self._echo(f"{told.stage} {_line(told, now - self._began)}")


def _line(told: Told, seconds: float) -> str:
    words = [f"{told.done} of {told.total}" if told.total else str(told.done)]
    words.append(rate_words(told.done, told.nbytes, seconds))
    if 0 < told.done < told.total:
        words.append(f"{_clock_words(seconds * (told.total - told.done) / told.done)} left")
    if told.failing:
        words.append(f"{told.failing} failing")
    return ", ".join(filter(None, words))


def rate_words(done: float, nbytes: int, seconds: float) -> str:
    """How fast it goes; nothing as long as that cannot be told."""
    if seconds <= 0 or not done:
        return ""
    rate = done / seconds
    pairs = f"{rate:.0f}/s" if rate >= _MANY else f"{rate:.3g}/s"
    return f"{pairs}, {size(nbytes / seconds)}/s" if nbytes else pairs


def _clock_words(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), _MINUTE)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
