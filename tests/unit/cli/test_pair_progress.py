"""What is shown while two dumps are compared."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import Progress as Display

from paritas.cli.pair_progress import Bar, Lines, pair_progress, rate_words
from paritas.comparison.progress import Progress


class Clock:
    """Time that passes when told to."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def told(clock):
    """Lines that were shown, and a function that shows progress after some seconds."""
    lines = []
    show = Lines(lines.append, clock)

    def after(seconds, *progress):
        clock.now += seconds
        show(Progress(*progress))

    return lines, after


def test_a_stage_is_told_when_it_begins(told):
    lines, after = told
    after(0, 0, 0, 0, 0, "matching")
    after(1, 0, 500, 0, 0, "comparing")
    assert lines == ["matching ...", "comparing 500 ..."]


def test_a_log_is_not_flooded(told):
    lines, after = told
    for done in range(100):
        after(0.05, done, 100, 0, 0, "comparing")
    assert lines == ["comparing 100 ..."]


def test_rate_time_left_and_failures_are_told_now_and_then(told):
    lines, after = told
    after(0, 0, 1000, 0, 0, "comparing")
    after(10, 100, 1000, 25_000_000_000, 3, "comparing")
    assert lines[1] == "comparing 100 of 1000, 10/s, 2.5 GB/s, 1 min 30 s left, 3 failing"


def test_what_is_not_known_is_left_out(told):
    lines, after = told
    after(0, 0, 0, 0, 0, "opening the dumps")
    after(11, 7, 0, 0, 0, "opening the dumps")
    assert lines[1] == "opening the dumps 7, 0.636/s"


def test_no_rate_is_made_up():
    assert rate_words(0, 0, 3.0) == rate_words(5, 100, 0.0) == ""


def test_a_terminal_shows_a_bar_with_rates():
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with Display(console=console, auto_refresh=False) as display:
        bar = Bar(display)
        bar(Progress(0, 0, 0, 0, "matching"))
        bar(Progress(40, 80, 10**9, 2, "comparing"))
        (task,) = display.tasks
        assert (task.description, task.completed, task.total) == ("comparing", 40, 80)
        assert task.fields == {"nbytes": 10**9, "failing": 2}


def test_without_a_terminal_lines_go_to_stderr(capsys):
    with pair_progress() as tell:
        tell(Progress(0, 0, 0, 0, "matching"))
    assert capsys.readouterr() == ("", "matching ...\n")
