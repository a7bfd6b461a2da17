"""Clocks: what is compared takes turns, so that all of it meets the same weather."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Take = Literal["least", "quartile", "median"]


class Spent(NamedTuple):
    """Seconds of the processor, which a busy machine hardly changes, and of the wall clock."""

    processor: float
    wall: float


def measured(function: Callable[[], object]) -> Spent:
    """What one call takes."""
    wall, processor = time.perf_counter(), time.process_time()
    function()
    return Spent(time.process_time() - processor, time.perf_counter() - wall)


def in_turns(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    take: Take = "quartile",
    calls: int = 1,
    warm: bool = True,
) -> dict[str, Spent]:
    """What each function takes, over rounds in which all take turns.

    Args:
        take: which of the timings counts. What disturbs only ever adds, so the least or the lower
            quartile is nearest to what the machine can do; the median is what a user meets.
        calls: how often each is called in its turn, each call timed: from the second on, a function
            finds as much of its tensors in the caches as any other would.
        warm: whether each is called once before, untimed.
    """
    timings: dict[str, list[Spent]] = {name: [] for name in functions}
    for function in functions.values() if warm else ():
        function()
    for _ in range(rounds):
        for name, function in functions.items():
            timings[name] += [measured(function) for _ in range(calls)]
    return {name: taken(values, take) for name, values in timings.items()}


def best(
    function: Callable[[], object], rounds: int, *, calls: int = 1, warm: bool = True
) -> Spent:
    """The least that a call takes; a round is so many calls, for what is too short to time."""
    found = in_turns({"": repeated(function, calls)}, rounds, take="least", warm=warm)[""]
    return Spent(found.processor / calls, found.wall / calls)


def repeated(function: Callable[[], object], calls: int) -> Callable[[], None]:
    """A function that calls it so often."""

    def run() -> None:
        for _ in range(calls):
            function()

    return run


def taken(values: Sequence[Spent], take: Take) -> Spent:
    """One of several timings, each clock by itself."""
    pick = {"least": min, "quartile": _quartile, "median": statistics.median}[take]
    return Spent(*(pick(clock) for clock in zip(*values, strict=True)))


def _quartile(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=4)[0] if len(values) > 1 else values[0]
