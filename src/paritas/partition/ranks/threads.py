"""Programs that ask for their rank, run as threads of this process."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Self

from paritas._torch.simulated_ranks import RankThreads, run_in_threads
from paritas.errors import UsageError
from paritas.partition.ranks.gloo import check_on_team
from paritas.partition.ranks.pool import MOST_RANKS, LostRankError
from paritas.partition.ranks.serving import described
from paritas.partition.ranks.working import Done, Sent

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas._torch.simulated_ranks import ThreadOutcome
    from paritas.numerics.findings import Verdict
    from paritas.partition.recipes import OperatorCall, Recipe

__all__ = ["ThreadTeam", "check_on_threads", "run_on_threads"]


def run_on_threads(
    program: Callable[[int], Any], ranks: int = 2, timeout: float = 60.0
) -> list[Any]:
    """Call `program(rank)` once for each rank, and give what each gave.

    In each thread `torch.distributed` knows its rank, and collectives join the threads. Random
    numbers, modules and all else of the process are shared.

    Raises:
        UsageError: no such number of ranks, or this process is a rank already.
        LostRankError: a rank did not come to an end in time.
        Exception: what the program of the first failing rank raised.
    """
    _check_count(ranks)
    outcomes = _all_ended(run_in_threads(program, ranks, timeout), timeout)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in outcomes]


def check_on_threads(
    call: OperatorCall,
    program: Callable[..., Any],
    recipe: Recipe,
    ranks: int = 2,
    *,
    seed: int = 0,
    strict: bool = False,
    timeout: float = 60.0,
) -> Verdict:
    """Whether a program of ranks, with collectives of its own, computes what an operator does.

    Args:
        call: the operator, whole.
        program: what each rank runs on its part of the arguments.
        recipe: which part of the arguments each rank has, and what its results are.
    """
    with ThreadTeam(ranks, timeout) as team:
        return check_on_team(
            call, recipe, ranks, team=team, seed=seed, strict=strict, program=program
        )


class ThreadTeam(contextlib.AbstractContextManager["ThreadTeam"]):
    """Ranks that are threads of this process, and one group for as long as they are held."""

    def __init__(self, ranks: int, timeout: float = 60.0) -> None:
        """`timeout` is how long the ranks have for each pass."""
        self.ranks, self.timeout = ranks, timeout
        self._threads = RankThreads(ranks)

    def __enter__(self) -> Self:
        _check_count(self.ranks)
        self._threads.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.__exit__(*error)

    def __call__(self, task: Callable[[int, int, Any], Done], payloads: list[Any]) -> list[Done]:
        """Have each rank do the task with its payload."""
        outcomes = self._threads.run(
            lambda rank: task(rank, self.ranks, payloads[rank]), self.timeout
        )
        return [_told(outcome) for outcome in _all_ended(outcomes, self.timeout)]

    def sent(self, function: Callable[..., Any], name: str) -> Sent:
        """The operator itself."""
        return Sent(itself=function)


def _told(outcome: ThreadOutcome) -> Done:
    if outcome.error is not None:
        return Done(error=described(outcome.error))
    # One that was let go, because another rank has failed, has nothing to tell.
    return outcome.value if outcome.done else Done()


def _check_count(ranks: int) -> None:
    if not 1 <= ranks <= MOST_RANKS:
        raise UsageError(f"{ranks} ranks: give a number from 1 to {MOST_RANKS}")


def _all_ended(outcomes: list[ThreadOutcome], timeout: float) -> list[ThreadOutcome]:
    """The same outcomes, unless a rank is lost for no other's fault."""
    failed = any(outcome.error is not None for outcome in outcomes)
    late = [str(rank) for rank, outcome in enumerate(outcomes) if not outcome.done]
    if late and not failed:
        names = ", ".join(late)
        raise LostRankError(
            f"rank {names} of {len(outcomes)} had {timeout:g} s: no answer; it waits for a "
            "collective that not all ranks take part in, or is still busy"
        )
    return outcomes
