"""The check of a recipe on ranks: processes that talk by gloo or NCCL, and threads."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, Self

from paritas._torch.simulated_ranks import RankThreads, run_in_threads
from paritas.errors import UsageError, in_one_line
from paritas.parallel.rank_pool import MOST_RANKS, NO_ANSWER, LostRankError, warm_pool
from paritas.partition.ranks.remote_runs import Done, RemoteRunner, Sent
from paritas.partition.recipe_checks import RecipeCheck, mesh_levels
from paritas.partition.runner import Streams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paritas._torch.simulated_ranks import ThreadOutcome
    from paritas.parallel.rank_pool import RankAnswer
    from paritas.partition.ranks.remote_runs import Team
    from paritas.placement.recipes import OperatorCall, Recipe
    from paritas.results.findings import Verdict
    from paritas.results.graph_reports import Confirm


# --- The check of a recipe on real processes that talk by gloo, or by NCCL ------------------------


def confirm_on_gloo(
    call: OperatorCall,
    recipe: Recipe | tuple[Recipe, ...],
    ranks: int | tuple[int, ...] = 2,
    *,
    seed: int = 0,
    strict: bool = False,
    timeout: float = 60.0,
    program: Callable[..., Any] | None = None,
) -> Verdict:
    """What `check_recipe` asks, of ranks that are processes of their own.

    Each rank is sent its part of the arguments; results and gradients are put together by
    collectives, as the recipe says. The processes are kept for the next check. A call whose
    tensors are on GPUs is run on GPUs, which the ranks share if there are fewer.

    Args:
        timeout: seconds that the ranks have for each pass; a rank that dies or does not answer
            makes the verdict `unverified`, with what is known of it.
        program: what each rank runs instead of the operator, on its part of the arguments; it may
            ask for its rank and use collectives itself.

    Raises:
        UsageError: the operator cannot be sent to another process, or the recipe makes no sense.
    """
    return confirm_on_ranks(
        "gloo",
        call,
        recipe,
        ranks,
        seed=seed,
        strict=strict,
        timeout=timeout,
        program=program,
    )


def confirm_on_ranks(  # noqa: PLR0913  (what can be asked)
    backend: Confirm,
    call: OperatorCall,
    recipe: Recipe | tuple[Recipe, ...],
    ranks: int | tuple[int, ...],
    *,
    seed: int = 0,
    strict: bool = False,
    timeout: float = 60.0,
    program: Callable[..., Any] | None = None,
    imports: Sequence[str] = (),
) -> Verdict:
    """What `confirm_on_gloo` asks, of ranks that talk by either backend.

    Args:
        imports: modules that a rank imports first: they bring the operator.
    """
    team = ProcessTeam(backend, timeout, tuple(imports))
    return check_on_team(call, recipe, ranks, team=team, seed=seed, strict=strict, program=program)


@dataclasses.dataclass(frozen=True)
class ProcessTeam:
    """Ranks that are processes; they are kept for the next check."""

    backend: Confirm
    timeout: float
    imports: tuple[str, ...] = ()

    def __call__(self, task: Callable[[int, int, Any], Done], payloads: list[Any]) -> list[Done]:
        """Have each rank do the task with its payload."""
        told = warm_pool(len(payloads), self.backend).run(task, payloads, self.timeout)
        return [_done(one) for one in told]

    def sent(self, function: Callable[..., Any], name: str) -> Sent:
        """An operator, pickled or by its name."""
        return Sent.pack(function, name, self.imports)


def _done(told: RankAnswer) -> Done:
    if told.error is None:
        return told.value  # type: ignore[no-any-return]
    # One that was let go, because another rank has failed, has nothing to tell.
    return Done() if told.waited else Done(error=told.error)


def check_on_team(
    call: OperatorCall,
    recipe: Recipe | tuple[Recipe, ...],
    ranks: int | tuple[int, ...],
    *,
    team: Team,
    seed: int = 0,
    strict: bool = False,
    program: Callable[..., Any] | None = None,
) -> Verdict:
    """Check a recipe, its split side run by a team of ranks of any kind."""
    runner = RemoteRunner(call, mesh_levels(call, recipe, ranks), seed, team, program)
    state = Streams.of(call)
    try:
        return RecipeCheck(runner, strict=strict).verdict()
    finally:
        state.restore()


# --- Programs that ask for their rank, run as threads of this process -----------------------------


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
        return [_done_of_thread(outcome) for outcome in _all_ended(outcomes, self.timeout)]

    def sent(self, function: Callable[..., Any], name: str) -> Sent:
        """The operator itself."""
        return Sent(itself=function)


def _done_of_thread(outcome: ThreadOutcome) -> Done:
    if outcome.error is not None:
        return Done(error=in_one_line(outcome.error, 300))
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
            f"rank {names} of {len(outcomes)} had {timeout:g} s: {NO_ANSWER}; it waits for a "
            "collective that not all ranks take part in, or is still busy"
        )
    return outcomes
