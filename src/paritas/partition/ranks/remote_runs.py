"""The runs of a check whose split side is run by real ranks.

The arguments are split and the verdict is taken as in one process; between the two, each rank runs
its part, and results and gradients go through collectives. So where the two ways disagree, it is
the ranks and not the check.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any, Protocol

import torch

from paritas._torch.lifting import map_tensors
from paritas.errors import UsageError
from paritas.partition.ranks.pool import LostRankError
from paritas.partition.ranks.working import Back, Done, Sent, Work, go_back, go_forward
from paritas.partition.recipes import Recipe, Split, Whole
from paritas.partition.running.draws import reaches
from paritas.partition.running.placing import device_of, moved, split_values, tensors_in
from paritas.partition.running.runner import COTANGENTS, RankError, Runner

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from paritas.partition.recipes import OperatorCall, Placement
    from paritas.partition.running.draws import Reach
    from paritas.partition.running.placing import Terms, Values
    from paritas.partition.running.runner import Seen

__all__ = ["RemoteRunner", "Team"]

_HOST = torch.device("cpu")


class Team(Protocol):
    """Ranks of any kind, each of which can be given something to do."""

    def __call__(self, task: Callable[[int, int, Any], Done], payloads: list[Any]) -> list[Done]:
        """Have each rank do the task with its payload."""

    def sent(self, function: Callable[..., Any], name: str) -> Sent:
        """An operator, as these ranks can have it."""


@dataclasses.dataclass(frozen=True)
class _Leaf:
    values: Values
    reach: tuple[Reach, ...]


@dataclasses.dataclass(frozen=True)
class _Axis:
    """An axis of ranks: what is split along it, and what is at each of its places."""

    recipe: Recipe
    values: Values
    below: tuple[_Axis | _Leaf, ...]


class RemoteRunner(Runner):
    """Runs the whole here and the parts on a team of ranks."""

    def __init__(
        self,
        call: OperatorCall,
        levels: tuple[tuple[Recipe, int], ...],
        seed: int,
        team: Team,
        program: Callable[..., Any] | None = None,
    ) -> None:
        """`program` is what the ranks run; without it, the operator itself."""
        super().__init__(call, levels, seed)
        self.team = team
        self.operator = team.sent(program or call.function, "" if program else call.name)
        self.device = device_of(call)
        self.is_program = program is not None
        self.exchanges = any(recipe.exchanges for recipe, _ in levels)
        self.ranks = math.prod(ranks for _, ranks in levels)
        self._together_by_ranks: dict[str, Tensor] = {}
        self._here = False

    def split(
        self,
        *,
        wide: bool,
        cotangents: int = COTANGENTS,
        around: contextlib.AbstractContextManager[Any] | None = None,
    ) -> Seen:
        """On the ranks; here where the operator's own rounding is shaken, which only adds noise.

        What talks to its peers runs among them or not at all.
        """
        self._here = around is not None and not self.is_program and not self.exchanges
        return super().split(wide=wide, cotangents=cotangents, around=around)

    def ranked(
        self,
        values: Values,
        levels: tuple[tuple[Recipe, int], ...],
        terms: Terms,
        reach: list[Reach],
        where: str,
    ) -> dict[str, Any]:
        """The results of all ranks, run by the team, and put together."""
        if self._here:
            return super().ranked(values, levels, terms, reach, where)
        tree = self._taken_apart(values, levels, terms, tuple(reach))
        results = self._run_leaves(_leaves(tree))
        return self._folded(tree, iter(results), terms)

    def claimed(self, targets: dict[str, Tensor]) -> dict[str, Tensor]:
        """Each rank of a program has a loss of its own, and goes back from all of it."""
        return targets if self.is_program else super().claimed(targets)

    def _taken_apart(
        self,
        values: Values,
        levels: tuple[tuple[Recipe, int], ...],
        terms: Terms,
        reach: tuple[Reach, ...],
    ) -> _Axis | _Leaf:
        if not levels:
            return _Leaf(values, reach)
        (recipe, ranks), below = levels[0], levels[1:]
        parts = split_values(values, recipe, ranks, terms)
        reached = reaches(values, recipe, ranks) if self.draws else [[] for _ in range(ranks)]
        made = [
            self._taken_apart(part, below, terms, (*reach, *more))
            for part, more in zip(parts, reached, strict=True)
        ]
        return _Axis(recipe, values, tuple(made))

    def _folded(self, tree: _Axis | _Leaf, results: Any, terms: Terms) -> dict[str, Any]:
        if isinstance(tree, _Leaf):
            found: dict[str, Any] = next(results)
            return found
        below = [self._folded(part, results, terms) for part in tree.below]
        together = self.together(below, tree.recipe, tree.values, terms)
        if len(self.levels) == 1:
            for path, value in self._together_by_ranks.items():
                together[path] = _carried(path, together[path], value)
        return together

    def _run_leaves(self, leaves: list[_Leaf]) -> list[dict[str, Any]]:
        """Every rank's results, in one graph with what it was given."""
        flat = [
            [tensor for value in leaf.values.values() for tensor in tensors_in(value)]
            for leaf in leaves
        ]
        run = _Run(self, leaves, [len(tensors) for tensors in flat])
        made = _OnRanks.apply(run, *[tensor for tensors in flat for tensor in tensors])  # type: ignore[no-untyped-call]
        found = dict(zip(run.order, made, strict=True))
        return [
            {path: found.get((rank, path), value) for path, value in done.own.items()}
            for rank, done in enumerate(run.done)
        ]

    def works(self, leaves: list[_Leaf]) -> list[Work]:
        """What each rank is sent: its own part, and nothing of the others'."""
        single = len(self.levels) == 1
        return [
            Work(
                operator=self.operator,
                values={
                    place: map_tensors(value, _copied)
                    if isinstance(value, torch.Tensor | list | tuple)
                    else value
                    for place, value in leaf.values.items()
                },
                asked=tuple(
                    tensor.requires_grad
                    for value in leaf.values.values()
                    for tensor in tensors_in(value)
                ),
                written=self.written,
                outputs=self.levels[0][0].outputs if single else (),
                default=torch.get_default_dtype(),
                device=self.device.type,
                seed=self.seed,
                draws=None if self.draws is None else moved(self.draws.kept, _HOST),
                reach=leaf.reach,
                exchanges=self.exchanges,
            )
            for leaf in leaves
        ]

    def placements(self, leaf: _Leaf) -> tuple[Placement, ...]:
        """Of each tensor of a rank; over several axes each rank's gradient is put together here."""
        recipe = self.levels[0][0] if len(self.levels) == 1 else None
        return tuple(
            recipe.placement(place) if recipe else Whole(summed=False)
            for place, value in leaf.values.items()
            for _ in tensors_in(value)
        )

    def ask(self, task: Callable[[int, int, Any], Done], payloads: list[Any]) -> list[Done]:
        """Have the ranks do something; that one was lost is remembered, whoever catches it."""
        try:
            told = self.team(task, payloads)
        except LostRankError as error:
            self.lost = error
            raise
        return [self._back_here(done) for done in told]

    def _back_here(self, done: Done) -> Done:
        """What came from a rank on the host, where the call has its tensors."""
        if self.device == _HOST:
            return done
        own, together = (
            {key: moved(item, self.device) for key, item in items.items()}
            for items in (done.own, done.together)
        )
        return dataclasses.replace(done, own=own, together=together)

    def keep_together(self, together: dict[str, Tensor]) -> None:
        """What the collectives of the forward pass gave."""
        self._together_by_ranks = together


@dataclasses.dataclass
class _Run:
    """One forward pass on the ranks, and the way back through it."""

    runner: RemoteRunner
    leaves: list[_Leaf]
    counts: list[int]
    done: list[Done] = dataclasses.field(default_factory=list)
    order: list[tuple[int, str]] = dataclasses.field(default_factory=list)

    def forward(self) -> list[Tensor]:
        self.done = self.runner.ask(go_forward, list(self.runner.works(self.leaves)))
        _raise_first(self.done)
        self.runner.keep_together(self.done[0].together)
        self.order = [
            (rank, path)
            for rank, done in enumerate(self.done)
            for path, value in done.own.items()
            if isinstance(value, torch.Tensor)
        ]
        return [self.done[rank].own[path] for rank, path in self.order]

    def backward(self, cotangents: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        sent = dict(zip(self.order, cotangents, strict=True))
        backs = [
            Back(
                {
                    path: torch.zeros_like(done.own[path], device=_HOST)
                    if (given := sent[rank, path]) is None
                    else given.contiguous().cpu()
                    for path in done.live
                },
                self.runner.placements(self.leaves[rank]),
                self.runner.exchanges,
            )
            for rank, done in enumerate(self.done)
        ]
        found = self.runner.ask(go_back, list(backs))
        _raise_first(found)
        own = [
            [done.own.get(place) for place in range(count)]
            for done, count in zip(found, self.counts, strict=True)
        ]
        for place, whole in found[0].together.items():
            self._place_collective(own, place, whole, backs[0].placements[place])
        return [gradient for gradients in own for gradient in gradients]

    def _place_collective(
        self, own: list[list[Tensor | None]], place: int, whole: Tensor, placement: Placement
    ) -> None:
        """Put what a collective gave where adding up and putting side by side give it back."""
        if all(gradients[place] is None for gradients in own):
            return
        if isinstance(placement, Split):
            sizes = [
                [t for value in leaf.values.values() for t in tensors_in(value)][place].shape[
                    placement.dim
                ]
                for leaf in self.leaves
            ]
            for gradients, part in zip(own, whole.split(sizes, placement.dim), strict=True):
                gradients[place] = part
            return
        for rank, gradients in enumerate(own):
            gradients[place] = whole if rank == 0 else torch.zeros_like(whole)


class _OnRanks(torch.autograd.Function):
    """All ranks' parts of an operator as one node of the graph of this process."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *_: Tensor) -> tuple[Tensor, ...]:
        made = tuple(run.forward())
        live = [path in run.done[rank].live for rank, path in run.order]
        ctx.run = run
        ctx.mark_non_differentiable(
            *[tensor for tensor, keeps in zip(made, live, strict=True) if not keeps]
        )
        ctx.set_materialize_grads(False)
        return made

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        return (None, *ctx.run.backward(cotangents))


class _Carried(torch.autograd.Function):
    """What a collective gave, with the way back of what was put together here."""

    @staticmethod
    def forward(_: Any, __: Tensor, there: Tensor) -> Tensor:
        return there.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _carried(path: str, here: Tensor, there: Tensor) -> Tensor:
    if here.shape != there.shape or here.dtype != there.dtype:
        shapes = f"{list(there.shape)} by collectives, {list(here.shape)} put together here"
        raise RankError(f"{path}: shape {shapes}")
    if not here.requires_grad:
        return there
    return _Carried.apply(here, there)  # type: ignore[no-any-return, no-untyped-call]


def _copied(tensor: Tensor) -> Tensor:
    # A view would be pickled with all of the memory that it looks at.
    return tensor.detach().clone(memory_format=torch.contiguous_format).cpu()


def _leaves(tree: _Axis | _Leaf) -> list[_Leaf]:
    if isinstance(tree, _Leaf):
        return [tree]
    return [leaf for part in tree.below for leaf in _leaves(part)]


def _raise_first(done: list[Done]) -> None:
    for rank, answer in enumerate(done):
        if answer.error is not None:
            if answer.refused:
                raise UsageError(answer.error.partition(": ")[2])
            raise RankError(f"rank {rank} of {len(done)} raised {answer.error}")
