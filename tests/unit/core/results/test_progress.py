"""What is shown of long work: on a terminal, in a log, in a notebook."""

from __future__ import annotations

import io
import sys
import threading
import types

import pytest
from rich.console import Console

from paritas.core.commands.options import progress
from paritas.core.results.progress import (
    LogLines,
    NotebookLine,
    Pace,
    Progress,
    ProgressBar,
    bar_display,
    clock_words,
    rate_words,
    shows_progress,
)


class Clock:
    """Time that passes when told to."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


# --- what is told ---------------------------------------------------------------------------------


def test_a_step_is_words_for_whoever_takes_words_and_data_for_others():
    step = Progress("comparing", 3, 12, nbytes=5, failing=1)
    assert isinstance(step, str)
    assert step == "comparing (3 of 12)"
    assert (step.stage, step.done, step.total, step.nbytes, step.failing) == (
        "comparing",
        3,
        12,
        5,
        1,
    )
    assert Progress("matching") == "matching"


# --- what follows from it -------------------------------------------------------------------------


def test_time_left_follows_from_what_is_done(clock):
    pace = Pace(clock)
    pace.update(Progress("measuring", 0, 12))
    assert pace.words() == "0 of 12"
    clock.now += 30
    pace.update(Progress("measuring", 3, 12))
    assert pace.words() == "3 of 12, 1 min 30 s left"
    clock.now += 10
    assert pace.words() == "3 of 12, 1 min 20 s left"
    clock.now += 100  # it takes longer than it did: nothing below zero
    assert pace.words() == "3 of 12, 0 s left"


def test_what_was_done_elsewhere_does_not_count(clock):
    pace = Pace(clock)
    pace.update(Progress("measuring", 3, 12))
    clock.now += 5
    assert pace.words() == "3 of 12, 5 s so far"
    pace.update(Progress("measuring", 4, 12))
    assert pace.words() == "4 of 12, 40 s left"


def test_a_stage_that_counts_nothing_says_how_long_it_takes(clock):
    pace = Pace(clock)
    pace.update("compiling")
    assert pace.words() == ""
    clock.now += 72
    assert pace.words() == "1 min 12 s so far"


def test_a_limit_of_time_bounds_what_is_left(clock):
    pace = Pace(clock)
    pace.update(Progress("shrinking", at_most=60))
    assert pace.words() == "at most 1 min 0 s left"
    clock.now += 15
    assert pace.words() == "at most 45 s left"
    pace.update(Progress("planting", 0, 100, at_most=60))
    clock.now += 20
    pace.update(Progress("planting", 1, 100, at_most=40))
    assert pace.words() == "1 of 100, 40 s left"


def test_rates_and_failures_are_shown(clock):
    pace = Pace(clock)
    pace.update(Progress("comparing", 0, 1000))
    clock.now += 10
    pace.update(Progress("comparing", 100, 1000, nbytes=25_000_000_000, failing=3))
    assert pace.words() == "100 of 1000, 10/s, 2.5 GB/s, 1 min 30 s left, 3 failing"


def test_no_rate_is_made_up_and_none_of_what_takes_seconds_each():
    assert rate_words(0, 0, 3.0) == rate_words(5, 100, 0.0) == rate_words(1, 0, 3.0) == ""


def test_minutes_are_shown_once_there_are_some():
    assert [clock_words(seconds) for seconds in (0.2, 59.4, 59.6)] == ["0 s", "59 s", "1 min 0 s"]


# --- the plan of the work -------------------------------------------------------------------------


def planned(stage, number, seconds=None, later=None, **others):
    facts = {"is_between": False, "compiles_later": False, **others}
    count = facts.pop("count", (0, 0))
    return Progress(stage, *count, failing=facts.pop("failing", 0)).with_plan(
        step=number, steps=5, seconds=seconds, later=later, **facts
    )


def test_a_planned_step_keeps_its_words_and_facts():
    step = planned("checking blocks", 3, count=(2, 9), failing=1)
    assert (step, step.stage, step.done, step.total, step.failing) == (
        "checking blocks (2 of 9)",
        "checking blocks",
        2,
        9,
        1,
    )
    assert step.plan["step"] == 3
    assert Progress("matching").plan["steps"] == 0


def test_the_time_left_is_that_of_this_step_and_of_those_after_it(clock):
    pace = Pace(clock)
    pace.update(planned("running the reference in float64", 3, 30.0, 10.0))
    assert pace.words() == "step 3 of 5, about 40 s left"
    clock.now += 25
    assert pace.words() == "step 3 of 5, about 15 s left"


def test_a_step_that_takes_longer_than_planned_says_what_comes_after_it(clock):
    pace = Pace(clock)
    pace.update(planned("running the reference in float64", 3, 30.0, 10.0))
    clock.now += 31
    assert pace.words() == "step 3 of 5, 31 s so far, then 10 s"


def test_a_time_that_is_not_known_is_not_promised(clock):
    pace = Pace(clock)
    pace.update(planned("running the reference", 1))
    assert pace.words() == "step 1 of 5"
    clock.now += 12
    assert pace.words() == "step 1 of 5, 12 s so far"
    pace.update(planned("running the candidate", 2, None, 8.0, compiles_later=True))
    clock.now += 3
    assert pace.words() == "step 2 of 5, 3 s so far, then 8 s + compilation"
    pace.update(planned("running the reference in float64", 3, 4.0, 6.0, compiles_later=True))
    assert pace.words() == "step 3 of 5, about 10 s + compilation"


def test_what_takes_less_than_a_second_has_no_time(clock):
    pace = Pace(clock)
    pace.update(planned("running the reference in float64", 3, 0.2, 0.3))
    assert pace.words() == "step 3 of 5"


def test_the_count_of_a_step_tells_its_time_better_than_the_plan(clock):
    pace = Pace(clock)
    pace.update(planned("checking blocks", 3, 1000.0, 7.0, count=(0, 4)))
    clock.now += 20
    pace.update(planned("checking blocks", 3, 1000.0, 7.0, count=(2, 4), failing=1))
    assert pace.words() == "step 3 of 5, 2 of 4, about 27 s left, 1 failing"


def test_a_step_that_is_not_planned_is_between_two_that_are(clock):
    pace = Pace(clock)
    pace.update(planned("measuring rounding, run 1", 4, 0.0, 9.0, is_between=True))
    clock.now += 5
    assert pace.words() == "after step 4 of 5, 5 s so far, then 9 s"


def test_a_limit_of_time_counts_more_than_the_plan(clock):
    pace = Pace(clock)
    step = Progress("looking for where it starts", at_most=60)
    plan = {"seconds": 0.0, "later": 0.0, "compiles_later": False, "is_between": True}
    pace.update(step.with_plan(step=5, steps=5, **plan))
    assert pace.words() == "after step 5 of 5, at most 1 min 0 s left"


def test_on_a_narrow_terminal_the_stage_is_shortened_before_the_time():
    console = Console(file=io.StringIO(), width=60, force_terminal=True)
    display = bar_display(console)
    ProgressBar(display)(planned("running the candidate in float64", 4, 60.0, 30.0))
    console.print(display.get_renderable())
    text = console.file.getvalue()
    assert "step 4 of 5, about 1 min 30 s left" in text
    assert "running the candid" in text
    assert text.count("\n") == 1


# --- a log ----------------------------------------------------------------------------------------


def test_short_work_leaves_no_line_in_a_log(clock):
    lines = []
    show = LogLines(lines.append, clock)
    for stage in ("importing torch", "running the reference", "running the candidate"):
        show(stage)
        clock.now += 19.9
    assert lines == []


def test_long_work_leaves_one_line_a_minute(clock):
    lines = []
    show = LogLines(lines.append, clock)
    for done in range(1000):
        show(Progress("comparing", done, 1000))
        clock.now += 0.25
    assert lines == [
        "comparing: 240 of 1000, 4/s, 3 min 10 s left",
        "comparing: 480 of 1000, 4/s, 2 min 10 s left",
        "comparing: 720 of 1000, 4/s, 1 min 10 s left",
        "comparing: 960 of 1000, 4/s, 10 s left",
    ]


def test_a_stage_that_begins_after_a_minute_is_named(clock):
    lines = []
    show = LogLines(lines.append, clock)
    show("running the candidate")
    clock.now += 75
    show("running the reference in float64")
    assert lines == ["running the reference in float64 ..."]


def test_a_step_that_takes_long_leaves_one_line_a_minute_that_says_what_is_running(clock):
    lines = []
    show = LogLines(lines.append, clock)
    show(Progress("sweeping", 1, 9, running=("a", "b", "c", "d", "e", "f")))
    for _ in range(130):
        clock.now += 1
        show.write_if_due()
    assert lines == [
        "sweeping: 1 of 9, 1 min 0 s so far; running: a, b, c, d and 2 more",
        "sweeping: 1 of 9, 2 min 0 s so far; running: a, b, c, d and 2 more",
    ]


def test_a_log_is_written_while_a_step_takes_long(monkeypatch, clock):
    from paritas.core.results import progress as module

    monkeypatch.setattr(module, "_SECONDS_BETWEEN_LOOKS", 0.001)
    written = threading.Event()
    show = LogLines(lambda _: written.set(), clock)
    with show.on_time():
        show("importing torch")
        clock.now += 61
        assert written.wait(600)


def test_without_a_terminal_short_work_prints_nothing(capsys):
    with progress() as tell:
        tell("matching")
    assert capsys.readouterr() == ("", "")


# --- a terminal -----------------------------------------------------------------------------------


def test_a_terminal_shows_one_line_with_a_bar_where_something_is_counted(clock):
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    display = bar_display(console)
    bar = ProgressBar(display, clock)
    bar("matching")
    assert drawn(display) == "| matching"
    bar(Progress("comparing", 0, 80))
    clock.now += 20
    bar(Progress("comparing", 40, 80, failing=2))
    line = drawn(display)
    assert line.startswith("| comparing ━━━━━")
    assert line.endswith("40 of 80, 2/s, 20 s left, 2 failing")


def test_words_of_a_stage_are_cut_to_keep_one_line(clock):
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    display = bar_display(console)
    bar = ProgressBar(display, clock)
    bar(Progress(f"running {'x' * 200} [red]", 3, 12))
    line = drawn(display)
    assert "\n" not in line
    assert "…" in line
    assert line.endswith("3 of 12")


def drawn(display) -> str:
    out = io.StringIO()
    Console(file=out, width=80, color_system=None).print(display.get_renderable())
    text = out.getvalue().strip()
    return f"|{text[1:]}" if text[:1] in "|/-\\" else text  # wherever the spinner is


def test_quiet_work_shows_nothing(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_INTERACTIVE", "1")
    with progress(quiet=True) as tell:
        tell("matching")
    assert capsys.readouterr() == ("", "")


# --- a notebook -----------------------------------------------------------------------------------


class Shown:
    """In place of IPython.display."""

    def __init__(self):
        self.texts = []

    def HTML(self, text):  # noqa: N802  (IPython's)
        return text

    def display(self, text, *, display_id):
        assert display_id is True
        self.texts.append(text)
        return types.SimpleNamespace(update=self.texts.append)


def test_a_cell_shows_one_line_that_goes_at_the_end(clock):
    shown = Shown()
    line = NotebookLine(shown, clock)
    line("running <the> reference")
    assert shown.texts == []  # short work shows nothing
    clock.now += 1.5
    line("running <the> reference")
    line("running <the> candidate")  # at once: nobody could read that
    clock.now += 1
    line(Progress("measuring", 3, 12))
    line.close()
    assert shown.texts == [
        "running &lt;the&gt; reference: 2 s so far",
        '<progress value="3" max="12"></progress> measuring: 3 of 12',
        "",
    ]


def test_short_work_in_a_cell_leaves_nothing(clock):
    shown = Shown()
    line = NotebookLine(shown, clock)
    line("running the reference")
    line.close()
    assert shown.texts == []


@pytest.fixture
def notebook(monkeypatch):
    """A process that serves a notebook, where time passes from step to step."""
    shown = Shown()
    ipython = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    monkeypatch.setattr("paritas.core.results.progress.SECONDS_BEFORE_CELL", 0.0)
    monkeypatch.setattr("paritas.core.results.progress.SECONDS_BETWEEN_CELLS", 0.0)
    return shown


def work(*, on_progress=None):
    if on_progress is not None:
        on_progress("working")
    return on_progress


def test_a_function_called_in_a_notebook_shows_its_progress(notebook):
    shows_progress(work)()
    assert notebook.texts == ["working", ""]


def test_whoever_listens_in_a_notebook_is_the_only_one_told(notebook):
    heard = []
    shows_progress(work)(on_progress=heard.append)
    assert (heard, notebook.texts) == (["working"], [])


def test_work_within_other_work_shows_nothing_of_its_own(notebook):
    def outer(*, on_progress=None):
        on_progress("working outside")
        shows_progress(work)()

    shows_progress(outer)()
    assert notebook.texts == ["working outside", ""]
    heard = []
    shows_progress(outer)(on_progress=heard.append)
    assert (heard, len(notebook.texts)) == (["working outside"], 2)


def test_a_line_goes_when_the_work_fails(notebook):
    def fails(*, on_progress=None):
        on_progress("working")
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011  (ours, above)
        shows_progress(fails)()
    assert notebook.texts == ["working", ""]


def test_a_shell_in_a_terminal_and_a_script_show_nothing(notebook, monkeypatch):
    ipython = types.SimpleNamespace(get_ipython=types.SimpleNamespace)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert shows_progress(work)() is None
    monkeypatch.delitem(sys.modules, "IPython")
    assert shows_progress(work)() is None
    assert notebook.texts == []


def test_verify_in_a_notebook_shows_its_steps(notebook):
    import torch

    import paritas

    paritas.verify([torch.ones(3)], torch.sin, lambda x: x.sin())
    assert notebook.texts[0].startswith("running the reference")
    assert notebook.texts[-1] == ""
