"""The runs of a check whose split side is run by real ranks.

The arguments are split and the verdict is taken as in one process; between the two, each rank runs
its part, and results and gradients go through collectives. So where the two ways disagree, it is
the ranks and not the check.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import pickle
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import distributed

from paritas._torch.operators import default_dtype, map_tensors
from paritas.errors import UsageError, in_one_line
from paritas.parallel.rank_pool import LostRankError
from paritas.partition.runner import COTANGENTS, Draws, Runner
from paritas.placement.recipes import (
    Group,
    OperatorCall,
    RankError,
    Recipe,
    device_of,
    moved,
    tensors_in,
)
from paritas.results.placements import Partial, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from paritas.partition.runner import OperatorRun, RankLeaf, Reach
    from paritas.placement.placement import Terms
    from paritas.placement.recipes import Place, Values
    from paritas.results.placements import Role


# --- Collectives over tensors of any dtype and of parts that differ in size -----------------------

_OPERATIONS = {
    "sum": distributed.ReduceOp.SUM,
    "avg": distributed.ReduceOp.SUM,  # gloo has no average
    "max": distributed.ReduceOp.MAX,
    "min": distributed.ReduceOp.MIN,
    "product": distributed.ReduceOp.PRODUCT,
}


def gather_parts(tensor: Tensor, dim: int, ranks: int) -> Tensor | None:
    """The parts of all ranks one after the other; None if they do not fit together."""
    held = _gather_shapes(tensor, ranks)
    if not -tensor.dim() <= dim < tensor.dim():
        return None
    dim %= tensor.dim()
    rests = {(dtype, shape[:dim], shape[dim + 1 :]) for dtype, shape in held if len(shape) > dim}
    if len(rests) != 1 or any(len(shape) != tensor.dim() for _, shape in held):
        return None
    sizes = [shape[dim] for _, shape in held]
    # All ranks send as much as the largest has: an all-gather takes parts of one size.
    padded = tensor.new_zeros((*tensor.shape[:dim], max(sizes), *tensor.shape[dim + 1 :]))
    padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    sent = _where_it_travels(_plain(padded))
    parts = [torch.empty_like(sent) for _ in range(ranks)]
    distributed.all_gather(parts, sent)
    whole = [
        _as_before(part, tensor).narrow(dim, 0, size)
        for part, size in zip(parts, sizes, strict=True)
    ]
    return torch.cat(whole, dim)


def all_reduce(tensor: Tensor, reduction: str, ranks: int) -> Tensor | None:
    """What the terms of all ranks come to; None if they do not fit together."""
    held = _gather_shapes(tensor, ranks)
    if len(set(held)) != 1 or (tensor.is_complex() and reduction not in {"sum", "avg"}):
        return None
    small = not tensor.is_floating_point() and not tensor.is_complex()
    sent = tensor.to(torch.int64) if small else _plain(tensor.detach()).clone()
    sent = _where_it_travels(sent.contiguous())
    distributed.all_reduce(sent, op=_OPERATIONS[reduction])
    if small:
        return sent.to(tensor.dtype)
    found = _as_before(sent, tensor)
    return found / ranks if reduction == "avg" else found


def _gather_shapes(tensor: Tensor, ranks: int) -> list[tuple[str, tuple[int, ...]]]:
    """The dtype and shape of what each rank holds."""
    told: list[Any] = [None] * ranks
    distributed.all_gather_object(told, (str(tensor.dtype), tuple(tensor.shape)))
    return told


def _where_it_travels(tensor: Tensor) -> Tensor:
    """NCCL sends from GPU to GPU, every other backend here from the host."""
    return tensor if "nccl" in distributed.get_backend() else tensor.cpu()


def _plain(tensor: Tensor) -> Tensor:
    """The same bits in a dtype that is sent."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).contiguous()
    if tensor.dtype is torch.bool:
        return tensor.to(torch.uint8)
    return tensor.contiguous()


def _as_before(sent: Tensor, tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_complex(sent)
    return sent.to(tensor.dtype)


# --- What a real rank does for a check: run the operator on its part, then talk to the others -----

# The same code is run by processes and by threads. Before each collective the ranks tell each other
# how it went and what they hold: one that failed, or holds something of another shape, would
# otherwise leave its peers waiting, or bring them down.


@dataclasses.dataclass(frozen=True)
class Sent:
    """An operator on its way to a rank: pickled, or by a name under which it can be imported.

    Ranks that are threads of this process have it as it is.
    """

    pickled: bytes | None = None
    name: str = ""
    imports: tuple[str, ...] = ()
    itself: Callable[..., Any] | None = None

    @classmethod
    def pack(cls, function: Callable[..., Any], name: str, imports: Sequence[str] = ()) -> Sent:
        """Find out how it can be sent.

        Args:
            imports: modules that bring it, where it is known by what it is registered as.

        Raises:
            UsageError: in neither way.
        """
        own = f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', '')}"
        for known in (name, own, f"torch.ops.{function}"):  # the last of aten's, and of custom ones
            if _resolve_name(known) is function:
                return cls(name=known, imports=tuple(imports))
        try:
            return cls(pickled=pickle.dumps(function), imports=tuple(imports))
        except Exception:  # noqa: BLE001  (what an object raises when pickled is its own)
            shown = name or getattr(function, "__qualname__", repr(function))
        raise UsageError(
            f"{shown} can neither be imported by its name nor pickled, so real ranks cannot have "
            "it; define it at the top of a module"
        )

    def unpack(self) -> Callable[..., Any]:
        """The operator, where the rank can have it.

        Raises:
            UsageError: it cannot.
        """
        if self.itself is not None:
            return self.itself
        found: Any = None
        reason = "nothing of that name"
        try:
            for module in self.imports:
                importlib.import_module(module)
            found = pickle.loads(self.pickled) if self.pickled else _resolve_name(self.name)  # noqa: S301
        except Exception as error:  # noqa: BLE001  (an import may raise anything)
            reason = f"{type(error).__name__}: {error}"
        if not callable(found):
            raise UsageError(
                f"a rank cannot import the operator ({reason}); define it in a module, and before "
                "the first check on real ranks"
            )
        return found  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class RankWork:
    """What a rank needs to run its part forward.

    Tensors travel on the host, and are moved to the device of that kind that the rank has.

    Attributes:
        exchanges: whether the operator is given a group. If it raises, its peers may wait for it
            there and not for what it says; the error itself lets them go.
    """

    operator: Sent
    values: Values
    asked: tuple[bool, ...]
    written: tuple[Place, ...]
    outputs: tuple[Role, ...]
    default: torch.dtype
    device: str = "cpu"
    seed: int = 0
    draws: list[Tensor] | None = None
    reach: tuple[Reach, ...] = ()
    exchanges: bool = False


@dataclasses.dataclass(frozen=True)
class Back:
    """What a rank is sent for its part of the backward pass; `exchanges` as forward."""

    cotangents: dict[str, Tensor]
    placements: tuple[Role, ...]
    exchanges: bool = False


@dataclasses.dataclass(frozen=True)
class Done:
    """What a rank gives back.

    Attributes:
        own: its results by path, or its gradients in the order of its tensors.
        live: paths of results that can be differentiated.
        together: what collectives made of all ranks' own; from rank 0 alone.
        error: what its own part raised.
        refused: whether that was no fault of the operator.
    """

    own: dict[Any, Any] = dataclasses.field(default_factory=dict)
    live: frozenset[str] = frozenset()
    together: dict[Any, Any] = dataclasses.field(default_factory=dict)
    error: str | None = None
    refused: bool = False


class _RankRunner(Runner):
    """Runs one part as the check in one process does."""

    def run_part(self, work: RankWork, values: Values) -> dict[str, Any]:
        self.is_first, self.written = False, work.written
        if work.draws is not None:
            self.draws = Draws()
            self.draws.kept = work.draws
        with default_dtype(work.default), torch.enable_grad():
            mine = {
                place: _own_group() if isinstance(value, Group) else value
                for place, value in self.cloned(values).items()
            }
            with self.drawing(list(work.reach)):
                return self.named(self.invoke(mine), mine)


# The graph of a rank between forward and backward; ranks that are threads share this module.
_KEPT: dict[int, tuple[dict[str, Tensor], list[Tensor]]] = {}


def go_forward(rank: int, ranks: int, work: RankWork) -> Done:
    """Run the operator on this rank's part, and put the results together by collectives."""
    _KEPT.pop(rank, None)
    done, live = Done(), {}
    tensors: list[Tensor] = []
    try:
        device = _own_device(work, rank)
        values = {place: _to_own_device(value, device) for place, value in work.values.items()}
        tensors = [tensor for value in values.values() for tensor in tensors_in(value)]
        for tensor, asked in zip(tensors, work.asked, strict=True):
            tensor.requires_grad_(asked)
        call = OperatorCall(work.operator.unpack())
        live = _RankRunner(call, (), work.seed).run_part(work, values)
    except Exception as error:
        done = Done(error=in_one_line(error), refused=isinstance(error, UsageError))
        if work.exchanges and not done.refused:
            raise
    if not _all_ranks_succeeded(done, ranks):
        return done
    found = {path: value for path, value in live.items() if isinstance(value, torch.Tensor)}
    _KEPT[rank] = ({path: value for path, value in found.items() if value.requires_grad}, tensors)
    own = {path: value.detach() if path in found else value for path, value in live.items()}
    results = [path for path in found if path.startswith("output")]
    together = {}
    for path, rule in zip(results, work.outputs, strict=False):
        value = _by_collective(own[path], rule, ranks)
        if value is not None:
            together[path] = value
    kept = together if rank == 0 else {}
    return Done(_on_the_host(own), frozenset(_KEPT[rank][0]), _on_the_host(kept))


def go_back(rank: int, ranks: int, back: Back) -> Done:
    """Send cotangents back through this rank's part, and put the gradients together."""
    outputs, tensors = _KEPT[rank]
    asked = [place for place, tensor in enumerate(tensors) if tensor.requires_grad]
    ends = {path: end for path, end in outputs.items() if path in back.cotangents}
    done, own = Done(), {}
    try:
        if ends and asked:
            found = torch.autograd.grad(
                list(ends.values()),
                [tensors[place] for place in asked],
                [back.cotangents[path].to(end.device) for path, end in ends.items()],
                retain_graph=True,
                allow_unused=True,
            )
            own = dict(zip(asked, found, strict=True))
    except Exception as error:
        done = Done(error=in_one_line(error))
        if back.exchanges:
            raise
    if not _all_ranks_succeeded(done, ranks):
        return done
    together = {}
    for place, placement in enumerate(back.placements):
        role = _gradient_role(placement)
        if role is None or not tensors[place].requires_grad:
            continue
        # A rank without a gradient adds nothing.
        gradient = own.get(place)
        mine = torch.zeros_like(tensors[place]) if gradient is None else gradient
        value = _by_collective(mine, role, ranks)
        if value is not None:
            together[place] = value
    return Done(_on_the_host(own), together=_on_the_host(together if rank == 0 else {}))


def _own_device(work: RankWork, rank: int) -> torch.device:
    """The device that a rank has: of GPUs its own, or one that it shares if there are fewer.

    Threads share one: what they exchange is put together where it lies.
    """
    if work.device != "cuda" or work.operator.itself is not None:
        return torch.device(work.device)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _to_own_device(value: Any, device: torch.device) -> Any:
    """An argument where the rank has its device; another kind of device is the operator's own."""
    if isinstance(value, torch.device) and value.type != device.type:
        return value
    return moved(value, device)


def _on_the_host(items: dict[Any, Any]) -> dict[Any, Any]:
    return {
        key: item.cpu() if isinstance(item, torch.Tensor) else item for key, item in items.items()
    }


def _by_collective(tensor: Tensor, role: Role, ranks: int) -> Tensor | None:
    """What all ranks hold together, where a program would use a collective for it."""
    match role:
        case Shard(dim=dim, halo=(0, 0)):
            return gather_parts(tensor, dim, ranks)
        case Partial(reduction=reduction):
            return all_reduce(tensor, reduction, ranks)
        case _:
            return None


def _gradient_role(role: Role) -> Role | None:
    """What the ranks' gradients of an argument are; None where they are put together elsewhere."""
    if isinstance(role, Replicate) and role.summed:
        return Partial("sum")
    return role if isinstance(role, Shard) else None


# The group that operators of a rank are given, and the group of all ranks that it was made in.
_GROUPS: dict[int, tuple[Any, Any]] = {}


def _own_group() -> Any:
    """A group of all ranks for the operator alone: what it says there is for no one else's ears."""
    rank, world = distributed.get_rank(), distributed.group.WORLD
    known, group = _GROUPS.get(rank, (None, None))
    if known is not world:
        group = distributed.new_group()
        _GROUPS[rank] = world, group
    return group


def _all_ranks_succeeded(done: Done, ranks: int) -> bool:
    told: list[Any] = [None] * ranks
    distributed.all_gather_object(told, done.error)
    return all(error is None for error in told)


def _resolve_name(name: str) -> Any:
    """What a dotted name stands for, or None."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except (ImportError, ValueError):  # the latter of a name with nothing before a dot
            continue
        for part in parts[cut:]:
            found = getattr(found, part, None)
        return found
    return None


# --- The runs -------------------------------------------------------------------------------------

# The arguments are split and the verdict is taken as in one process; between the two, each rank
# runs its part, and results and gradients go through collectives. So where the two ways disagree,
# it is the ranks and not the check.

_HOST = torch.device("cpu")


class Team(Protocol):
    """Ranks of any kind, each of which can be given something to do."""

    def __call__(self, task: Callable[[int, int, Any], Done], payloads: list[Any]) -> list[Done]:
        """Have each rank do the task with its payload."""

    def sent(self, function: Callable[..., Any], name: str) -> Sent:
        """An operator, as these ranks can have it."""


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
    ) -> OperatorRun:
        """On the ranks; here where the operator's own rounding is shaken, which only adds noise.

        What talks to its peers runs among them or not at all.
        """
        self._here = around is not None and not self.is_program and not self.exchanges
        return super().split(wide=wide, cotangents=cotangents, around=around)

    def ranked(self, values: Values, terms: Terms) -> dict[str, Any]:
        """The results of all ranks; along one axis, as their own collectives gave them."""
        together = super().ranked(values, terms)
        if not self._here and len(self.levels) == 1:
            for path, value in self._together_by_ranks.items():
                together[path] = _carry_collective(path, together[path], value)
        return together

    def claimed(self, targets: dict[str, Tensor]) -> dict[str, Tensor]:
        """Each rank of a program has a loss of its own, and goes back from all of it."""
        return targets if self.is_program else super().claimed(targets)

    def run_leaves(self, ranks: list[RankLeaf]) -> Iterable[dict[str, Any]]:
        """Every rank's results, in one graph with what it was given."""
        if self._here:
            return super().run_leaves(ranks)
        flat = [
            [tensor for value in leaf.values.values() for tensor in tensors_in(value)]
            for leaf in ranks
        ]
        run = _RanksPass(self, ranks, [len(tensors) for tensors in flat])
        made = _OnRanks.apply(run, *[tensor for tensors in flat for tensor in tensors])  # type: ignore[no-untyped-call]
        found = dict(zip(run.order, made, strict=True))
        return [
            {path: found.get((rank, path), value) for path, value in done.own.items()}
            for rank, done in enumerate(run.done)
        ]

    def works(self, leaves: list[RankLeaf]) -> list[RankWork]:
        """What each rank is sent: its own part, and nothing of the others'."""
        single = len(self.levels) == 1
        return [
            RankWork(
                operator=self.operator,
                values={
                    place: map_tensors(value, _copy_to_host)
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

    def placements(self, leaf: RankLeaf) -> tuple[Role, ...]:
        """Of each tensor of a rank; over several axes each rank's gradient is put together here."""
        recipe = self.levels[0][0] if len(self.levels) == 1 else None
        return tuple(
            recipe.placement(place) if recipe else Replicate(summed=False)
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
class _RanksPass:
    """One forward pass on the ranks, and the way back through it."""

    runner: RemoteRunner
    leaves: list[RankLeaf]
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
        self, own: list[list[Tensor | None]], place: int, whole: Tensor, placement: Role
    ) -> None:
        """Put what a collective gave where adding up and putting side by side give it back."""
        if all(gradients[place] is None for gradients in own):
            return
        if isinstance(placement, Shard):
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
    def forward(ctx: Any, run: _RanksPass, *_: Tensor) -> tuple[Tensor, ...]:
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


def _carry_collective(path: str, here: Tensor, there: Tensor) -> Tensor:
    if here.shape != there.shape or here.dtype != there.dtype:
        shapes = f"{list(there.shape)} by collectives, {list(here.shape)} put together here"
        raise RankError(f"{path}: shape {shapes}")
    if not here.requires_grad:
        return there
    return _Carried.apply(here, there)  # type: ignore[no-any-return, no-untyped-call]


def _copy_to_host(tensor: Tensor) -> Tensor:
    # A view would be pickled with all of the memory that it looks at.
    return tensor.detach().clone(memory_format=torch.contiguous_format).cpu()


def _raise_first(done: list[Done]) -> None:
    for rank, answer in enumerate(done):
        if answer.error is not None:
            if answer.refused:
                raise UsageError(answer.error.partition(": ")[2])
            raise RankError(f"rank {rank} of {len(done)} raised {answer.error}")
