"""Check a recipe on real ranks: processes with gloo or NCCL, or threads."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, Self

from paritas.core.errors import UsageError, in_one_line
from paritas.core.results.rank_backends import GLOO
from paritas.core.torch_private.ranks import RankThreads
from paritas.sharding.operators.ranks.remote_runs import Done, RemoteRunner, Sent
from paritas.sharding.operators.recipe_checks import RecipeCheck, mesh_levels
from paritas.sharding.operators.runner import Streams
from paritas.sharding.plans.rank_pool import MOST_RANKS, NO_ANSWER, LostRankError, warm_pool

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.core.operators.calls import OperatorCall
    from paritas.core.placement.placement import Recipe
    from paritas.core.results.findings import Verdict
    from paritas.core.results.rank_backends import BackendName
    from paritas.core.torch_private.ranks import ThreadOutcome
    from paritas.sharding.operators.ranks.remote_runs import Team
    from paritas.sharding.plans.rank_pool import RankAnswer


# --- Ranks that are processes ---------------------------------------------------------------------


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
    """Like `check_recipe`, with ranks that are separate processes.

    Each rank gets its part of the arguments. Collectives join results and gradients as the recipe
    says. The processes are kept for the next check. If the tensors are on GPUs, the ranks use GPUs,
    and share them if there are too few.

    Args:
        timeout: seconds for each pass; if a rank dies or does not answer, the verdict is
            `unverified` and describes what is known.
        program: function that each rank runs on its part instead of the operator; it may use its
            rank and collectives.

    Raises:
        UsageError: the operator cannot be sent to another process, or the recipe does not fit.
    """
    team = ProcessTeam(GLOO.name, timeout)
    return check_on_team(call, recipe, ranks, team=team, seed=seed, strict=strict, program=program)


@dataclasses.dataclass(frozen=True)
class ProcessTeam:
    """Ranks that are processes; they are kept for the next check."""

    backend: BackendName
    timeout: float = 60.0
    imports: tuple[str, ...] = ()

    def __call__(self, task: Callable[[int, int, Any], Done], payloads: list[Any]) -> list[Done]:
        """Run the task on each rank with its payload."""
        answers = warm_pool(len(payloads), self.backend).run(task, payloads, self.timeout)
        return [_done_of_process(answer) for answer in answers]

    def pack_operator(self, function: Callable[..., Any], name: str) -> Sent:
        """The operator, by its name or pickled."""
        return Sent.pack(function, name, self.imports)


def _done_of_process(answer: RankAnswer) -> Done:
    if answer.error is None:
        return answer.value  # type: ignore[no-any-return]
    # A rank that was stopped because another one failed has no error of its own.
    return Done() if answer.waited else Done(error=answer.error)


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
    """Check a recipe on a team of ranks of any kind."""
    runner = RemoteRunner(call, mesh_levels(call, recipe, ranks), seed, team, program)
    state = Streams.of(call)
    try:
        return RecipeCheck(runner, strict=strict).verdict()
    finally:
        state.restore()


# --- Ranks that are threads -----------------------------------------------------------------------


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
    """Check that a program with its own collectives computes the same as an operator.

    Args:
        call: the whole operator.
        program: function that each rank runs on its part of the arguments.
        recipe: the part of the arguments that each rank has, and the roles of its results.
    """
    with ThreadTeam(ranks, timeout) as team:
        return check_on_team(
            call, recipe, ranks, team=team, seed=seed, strict=strict, program=program
        )


class ThreadTeam(contextlib.AbstractContextManager["ThreadTeam"]):
    """Ranks that are threads of this process, with one process group while it is entered."""

    def __init__(self, ranks: int, timeout: float = 60.0) -> None:
        """`timeout` is the number of seconds for each pass."""
        self.ranks, self.timeout = ranks, timeout
        self._threads = RankThreads(ranks)

    def __enter__(self) -> Self:
        if not 1 <= self.ranks <= MOST_RANKS:
            raise UsageError(f"the number of ranks must be 1 to {MOST_RANKS}, got {self.ranks}")
        self._threads.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.__exit__(*error)

    def __call__(self, task: Callable[[int, int, Any], Done], payloads: list[Any]) -> list[Done]:
        """Run the task on each rank with its payload."""
        outcomes = self._threads.run(
            lambda rank: task(rank, self.ranks, payloads[rank]), self.timeout
        )
        return [_done_of_thread(outcome) for outcome in _all_ended(outcomes, self.timeout)]

    def pack_operator(self, function: Callable[..., Any], name: str) -> Sent:
        """The operator itself."""
        return Sent(itself=function)


def _done_of_thread(outcome: ThreadOutcome) -> Done:
    if outcome.error is not None:
        return Done(error=in_one_line(outcome.error, 300))
    # A rank that was stopped because another one failed has no error of its own.
    return outcome.value if outcome.done else Done()


def _all_ended(outcomes: list[ThreadOutcome], timeout: float) -> list[ThreadOutcome]:
    """The outcomes, unless a rank is late although no other rank failed."""
    failed = any(outcome.error is not None for outcome in outcomes)
    late = [str(rank) for rank, outcome in enumerate(outcomes) if not outcome.done]
    if late and not failed:
        raise LostRankError(
            f"rank {', '.join(late)} of {len(outcomes)} had {timeout:g} s: {NO_ANSWER}; it is "
            "busy, or waits for a collective that not all ranks call"
        )
    return outcomes
