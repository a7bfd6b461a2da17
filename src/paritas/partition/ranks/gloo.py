"""The check of a recipe on real processes that talk by gloo, or by NCCL."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from paritas.partition.checking import RecipeCheck, mesh_levels
from paritas.partition.ranks.pool import LET_GO, warm_pool
from paritas.partition.ranks.remote_runs import RemoteRunner
from paritas.partition.ranks.working import Done, Sent
from paritas.partition.running.draws import Streams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paritas.numerics.findings import Verdict
    from paritas.partition.ranks.pool import Told
    from paritas.partition.ranks.remote_runs import Team
    from paritas.partition.ranks.serving import Backend
    from paritas.partition.recipes import OperatorCall, Recipe

__all__ = ["check_on_team", "confirm_on_gloo", "confirm_on_ranks"]


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
    backend: Backend,
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

    backend: Backend
    timeout: float
    imports: tuple[str, ...] = ()

    def __call__(self, task: Callable[[int, int, Any], Done], payloads: list[Any]) -> list[Done]:
        """Have each rank do the task with its payload."""
        told = warm_pool(len(payloads), self.backend).run(task, payloads, self.timeout)
        return [_done(one) for one in told]

    def sent(self, function: Callable[..., Any], name: str) -> Sent:
        """An operator, pickled or by its name."""
        return Sent.pack(function, name, self.imports)


def _done(told: Told) -> Done:
    if told.error is None:
        return told.value  # type: ignore[no-any-return]
    # One that was let go, because another rank has failed, has nothing to tell.
    return Done() if told.error == LET_GO else Done(error=told.error)


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
