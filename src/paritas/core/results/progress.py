"""Progress of long work, and how a terminal, a log and a notebook show it.

The work reports each step in words, with a count if there is something to count. Remaining time is
shown only if it follows from that count or from a time limit.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import html
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypedDict, TypeVar, Unpack

from paritas.core.results.wording import list_first, size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rich.console import Console
    from rich.progress import Progress as Display

SECONDS_BETWEEN_LINES = 60.0
# In a notebook cell: nothing for short work, then no more often than one can read.
SECONDS_BEFORE_CELL = 1.0
SECONDS_BETWEEN_CELLS = 0.25
_SECONDS_BETWEEN_LOOKS = 1.0
_MOST_RUNNING = 4
_MINUTE = 60
_MANY = 100

# Set inside work that already shows its progress.
_is_shown = contextvars.ContextVar("paritas_progress_shown", default=False)
_P = ParamSpec("_P")
_R = TypeVar("_R")


class PlanFacts(TypedDict):
    """Where a step is in the plan of the work; see `Progress`."""

    step: int
    steps: int
    is_between: bool
    seconds: float | None
    later: float | None
    compiles_later: bool


class ProgressFacts(TypedDict, total=False):
    """What is known of a step besides its count; see `Progress`."""

    nbytes: int
    failing: int
    at_most: float | None
    peak: int
    running: tuple[str, ...]


_NO_FACTS: ProgressFacts = {
    "nbytes": 0,
    "failing": 0,
    "at_most": None,
    "peak": 0,
    "running": (),
}
_NO_PLAN: PlanFacts = {
    "step": 0,
    "steps": 0,
    "is_between": False,
    "seconds": None,
    "later": None,
    "compiles_later": False,
}


class Progress(str):
    """A step of long work, in words, with a count if there is one.

    Attributes:
        stage: what is being done; the words without the count.
        done: number of items of this stage that are done.
        total: number of items; 0 if unknown.
        nbytes: bytes of values processed so far.
        failing: number of failures so far.
        at_most: seconds after which the work is stopped; None without a limit.
        peak: the most memory in use so far on the device, in bytes; 0 if unknown.
        running: what is in progress, the oldest first, if several things are at a time.
        plan: where it is in the plan of the work, if there is one: `step` is its number of `steps`,
            or the last one before it if it `is_between` them and not planned; `seconds` is the
            estimate for it and `later` that for the planned steps after it, None if unknown;
            `compiles_later`: a compiler will work on one of these, for a time that is not counted.
    """

    __slots__ = (
        "at_most",
        "done",
        "failing",
        "nbytes",
        "peak",
        "plan",
        "running",
        "stage",
        "total",
    )

    stage: str
    done: int
    total: int
    nbytes: int
    failing: int
    at_most: float | None
    peak: int
    running: tuple[str, ...]
    plan: PlanFacts

    def __new__(
        cls, stage: str, done: int = 0, total: int = 0, **facts: Unpack[ProgressFacts]
    ) -> Self:
        """See the attributes."""
        instance = super().__new__(cls, f"{stage} ({done} of {total})" if total else stage)
        instance.stage, instance.done, instance.total = stage, done, total
        for name, value in {**_NO_FACTS, **facts}.items():
            setattr(instance, name, value)
        instance.plan = _NO_PLAN
        return instance

    def with_plan(self, **plan: Unpack[PlanFacts]) -> Progress:
        """The same step, in a plan."""
        facts: Any = {name: getattr(self, name) for name in _NO_FACTS}
        planned = Progress(self.stage, self.done, self.total, **facts)
        planned.plan = plan
        return planned


class Pace:
    """Running work: its current step, and the time that it takes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.step = Progress("starting")
        self._clock = clock
        self._began = self._updated = clock()
        self._first = 0

    def update(self, text: str) -> None:
        """Set the next step, of the same stage or of a new one."""
        step = text if isinstance(text, Progress) else Progress(text)
        self._updated = self._clock()
        if step.stage != self.step.stage:
            # Items done before this stage do not count for its rate.
            self._began, self._first = self._updated, step.done
        self.step = step

    def words(self) -> str:
        """`3 of 12, 8/s, 40 s left` if known, else how long the stage has taken so far."""
        step, seconds = self.step, self._clock() - self._began
        words = [_position_words(step.plan)] if step.plan["steps"] else []
        words += [f"{step.done} of {step.total}"] if step.total else []
        words.append(rate_words(step.done - self._first, step.nbytes, seconds))
        time_left = self._time_left()
        if step.plan["steps"] and step.at_most is None:
            words.append(self._planned_time(seconds))
        elif time_left is not None:
            words.append(time_left)
        elif seconds >= 1:
            words.append(f"{clock_words(seconds)} so far")
        if step.peak:
            words.append(f"peak {size(step.peak)}")
        if step.failing:
            words.append(f"{step.failing} failing")
        return ", ".join(filter(None, words))

    def _time_left(self) -> str | None:
        step, now = self.step, self._clock()
        stopped = None if step.at_most is None else max(0.0, step.at_most - (now - self._updated))
        counted = self._counted_seconds()
        if counted is not None:
            remaining = counted if stopped is None else min(counted, stopped)
            return f"{clock_words(remaining)} left"
        return None if stopped is None else f"at most {clock_words(stopped)} left"

    def _counted_seconds(self) -> float | None:
        """The seconds to the end of this stage, as its count shows them."""
        step, done = self.step, self.step.done - self._first
        if done <= 0 or step.total <= step.done:
            return None
        # Up to the last update: nothing is known to be done since.
        total_seconds = (self._updated - self._began) / done * (step.total - self._first)
        return max(0.0, total_seconds - (self._clock() - self._began))

    def _planned_time(self, elapsed: float) -> str:
        """The time to the end of the plan; if this step takes longer, what follows after it."""
        plan, remaining = self.step.plan, self._counted_seconds()
        compiles = " + compilation" if plan["compiles_later"] else ""
        later = plan["later"]
        if remaining is None and plan["seconds"] is not None and elapsed <= plan["seconds"]:
            remaining = plan["seconds"] - elapsed
        if remaining is not None and later is not None:
            left = remaining + later
            words = f"about {clock_words(left)}{compiles or ' left'}"
            return words if left >= 1 or compiles else ""
        parts = [f"{clock_words(elapsed)} so far"] if elapsed >= 1 else []
        if later is not None and (later >= 1 or compiles):
            parts.append(f"then {clock_words(later)}{compiles}")
        return ", ".join(parts)


def _position_words(plan: PlanFacts) -> str:
    """`step 3 of 5`; `after step 3 of 5` for what is not planned."""
    return f"{'after ' if plan['is_between'] else ''}step {plan['step']} of {plan['steps']}"


def rate_words(done: float, nbytes: int, seconds: float) -> str:
    """The rate; empty while it is unknown, or if each item takes seconds."""
    if seconds <= 0 or done < seconds:
        return ""
    rate = done / seconds
    pairs = f"{rate:.0f}/s" if rate >= _MANY else f"{rate:.3g}/s"
    return f"{pairs}, {size(nbytes / seconds)}/s" if nbytes else pairs


def clock_words(seconds: float) -> str:
    """`40 s`, `1 min 30 s`."""
    minutes, rest = divmod(round(seconds), _MINUTE)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


# --- a log ----------------------------------------------------------------------------------------


class LogLines:
    """Plain lines for a log: one a minute, and none for short work."""

    def __init__(
        self, echo: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pace = Pace(clock)
        self._echo, self._clock = echo, clock
        self._last = clock()
        self._lock = threading.Lock()

    def __call__(self, text: str) -> None:
        """Set the step, and write a line if it is time."""
        self._pace.update(text)
        self.write_if_due()

    def write_if_due(self) -> None:
        """Write a line about the current step, if a minute has passed since the last one."""
        with self._lock:
            now = self._clock()
            if now - self._last < SECONDS_BETWEEN_LINES:
                return
            self._last = now
            step, words = self._pace.step, self._pace.words()
            doing = f"; running: {list_first(step.running, _MOST_RUNNING)}" if step.running else ""
            self._echo(f"{step.stage}{f': {words}' if words else ' ...'}{doing}")

    @contextlib.contextmanager
    def on_time(self) -> Iterator[None]:
        """Write a line a minute inside the block, also while a step takes long."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(_SECONDS_BETWEEN_LOOKS):
                self.write_if_due()

        thread = threading.Thread(target=watch, name="paritas-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


# --- a terminal -----------------------------------------------------------------------------------


class ProgressBar:
    """One line of a terminal that is overwritten, with a bar if there is a count."""

    def __init__(self, display: Display, clock: Callable[[], float] = time.monotonic) -> None:
        self._pace = Pace(clock)
        self._display = display
        self._task = display.add_task("starting", total=None, pace=self._pace)

    def __call__(self, text: str) -> None:
        """Show the step."""
        self._pace.update(text)
        step = self._pace.step
        self._display.update(
            self._task, description=step.stage, completed=step.done, total=step.total or None
        )


def bar_display(console: Console) -> Display:
    """The display of a `ProgressBar`; it leaves the terminal clean."""
    from rich.progress import BarColumn, ProgressColumn, SpinnerColumn
    from rich.progress import Progress as RichProgress
    from rich.table import Column
    from rich.text import Text

    class Stage(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(task.description, no_wrap=True, overflow="ellipsis")

    class CountedBar(BarColumn):
        def render(self, task: Any) -> Any:
            return Text() if task.total is None else super().render(task)

    class Words(ProgressColumn):
        def render(self, task: Any) -> Text:
            pace: Pace = task.fields["pace"]
            return Text(pace.words(), style="red" if pace.step.failing else "")

    # Its text does not wrap, but on a narrow terminal it alone is shortened.
    stage = Column(max_width=40)
    return RichProgress(
        SpinnerColumn("line"),
        Stage(table_column=stage),
        CountedBar(bar_width=10),
        Words(table_column=Column(no_wrap=True)),
        console=console,
        transient=True,
    )


# --- a notebook -----------------------------------------------------------------------------------


class NotebookLine:
    """One line below the running cell, removed when the work is done."""

    def __init__(self, display: Any, clock: Callable[[], float] = time.monotonic) -> None:
        """`display` is the module `IPython.display`."""
        self._pace = Pace(clock)
        self._display, self._clock = display, clock
        self._handle: Any = None
        self._next = clock() + SECONDS_BEFORE_CELL

    def __call__(self, text: str) -> None:
        """Show the step, if it is time."""
        self._pace.update(text)
        now = self._clock()
        if now < self._next:
            return
        self._next = now + SECONDS_BETWEEN_CELLS
        shown = self._display.HTML(self._html())
        if self._handle is None:
            self._handle = self._display.display(shown, display_id=True)
        else:
            self._handle.update(shown)

    def close(self) -> None:
        """Remove the line."""
        if self._handle is not None:
            self._handle.update(self._display.HTML(""))

    def _html(self) -> str:
        step, words = self._pace.step, self._pace.words()
        bar = f'<progress value="{step.done}" max="{step.total}"></progress> ' if step.total else ""
        return f"{bar}{html.escape(': '.join(filter(None, (step.stage, words))))}"


def shows_progress(work: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a function show its progress in a notebook, unless the caller passes `on_progress`."""

    @functools.wraps(work)
    def shown(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        __tracebackhide__ = True
        is_shown = kwargs.get("on_progress") is not None or _is_shown.get()
        display = None if is_shown else _notebook_display(sys.modules)
        line = None if display is None else NotebookLine(display)
        if line is not None:
            kwargs["on_progress"] = line
        token = _is_shown.set(True)
        try:
            return work(*args, **kwargs)
        finally:
            _is_shown.reset(token)
            if line is not None:
                line.close()

    return shown


def _notebook_display(modules: Mapping[str, Any]) -> Any:
    """The module `IPython.display`, if this process serves a notebook."""
    ipython = modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    # A shell in a terminal has no kernel.
    return None if getattr(shell, "kernel", None) is None else modules.get("IPython.display")
