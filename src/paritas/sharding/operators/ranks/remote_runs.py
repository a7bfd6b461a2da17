"""The runs of a check whose parts run on real ranks.

Arguments are split and judged as in one process. In between, each rank runs its part, and results
and gradients go through collectives. So if the two ways disagree, the reason is the ranks and not
the check.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import distributed

from paritas.core.errors import UsageError, first_line, in_one_line
from paritas.core.importing import import_dotted, import_module
from paritas.core.operators.calls import OperatorCall
from paritas.core.placement.placement import Group, RankError, Recipe, device_of, move_argument
from paritas.core.results.items import Item, ItemKind, Partial, Replicate, Shard
from paritas.core.results.rank_backends import backend_of_group
from paritas.core.torch_private.operators import default_dtype, map_tensors, tensors_in
from paritas.sharding.operators.runner import COTANGENTS, Draws, Runner
from paritas.sharding.plans.rank_pool import LostRankError

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from paritas.core.operators.calls import Place
    from paritas.core.placement.placement import Terms, Values
    from paritas.core.results.items import Role
    from paritas.sharding.operators.runner import OperatorRun, RankLeaf, Reach


# --- The runs -------------------------------------------------------------------------------------

_HOST = torch.device("cpu")


class Team(Protocol):
    """Ranks of any kind that can run a task."""

    def __call__(self, task: Callable[[int, int, Any], Done], payloads: list[Any]) -> list[Done]:
        """Run the task on each rank with its payload."""

    def pack_operator(self, function: Callable[..., Any], name: str) -> Sent:
        """An operator in a form that these ranks can receive."""


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
        """`program` is what the ranks run instead of the operator."""
        super().__init__(call, levels, seed)
        self.team = team
        self.operator = team.pack_operator(program or call.function, "" if program else call.name)
        self.device = device_of(call)
        self.is_program = program is not None
        self.exchanges = any(recipe.exchanges for recipe, _ in levels)
        self.ranks = math.prod(ranks for _, ranks in levels)
        self.joined_by_ranks: dict[Item, Tensor] = {}
        self._here = False

    def split(
        self,
        *,
        wide: bool,
        cotangents: int = COTANGENTS,
        around: contextlib.AbstractContextManager[Any] | None = None,
    ) -> OperatorRun:
        """Run on the ranks; here if rounding is perturbed and the ranks do not communicate."""
        self._here = around is not None and not self.is_program and not self.exchanges
        return super().split(wide=wide, cotangents=cotangents, around=around)

    def run_ranks(self, values: Values, terms: Terms) -> dict[Item, Any]:
        """The results of all ranks; with a single axis, as their own collectives joined them."""
        together = super().run_ranks(values, terms)
        if not self._here and len(self.levels) == 1:
            for item, value in self.joined_by_ranks.items():
                together[item] = _carry_collective(item, together[item], value)
        return together

    def claimed_gradients(self, targets: dict[Item, Tensor]) -> dict[Item, Tensor]:
        """Each rank of a program starts its backward pass from the whole cotangent."""
        return targets if self.is_program else super().claimed_gradients(targets)

    def run_leaves(self, ranks: list[RankLeaf]) -> Iterable[dict[Item, Any]]:
        """The results of all ranks, connected to their arguments by autograd."""
        if self._here:
            return super().run_leaves(ranks)
        flat = [_all_tensors(leaf.values) for leaf in ranks]
        run = _RanksPass(self, ranks, [len(tensors) for tensors in flat])
        result_tensors = _OnRanks.apply(run, *[tensor for tensors in flat for tensor in tensors])  # type: ignore[no-untyped-call]
        tensor_by_item = dict(zip(run.order, result_tensors, strict=True))
        return [
            {item: tensor_by_item.get((rank, item), value) for item, value in done.own.items()}
            for rank, done in enumerate(run.done)
        ]

    def works(self, leaves: list[RankLeaf]) -> list[RankWork]:
        """The work of each rank, with its own part of the arguments only."""
        single = len(self.levels) == 1
        return [
            RankWork(
                operator=self.operator,
                values={
                    argument_place: map_tensors(value, _copy_to_host)
                    if isinstance(value, torch.Tensor | list | tuple)
                    else value
                    for argument_place, value in leaf.values.items()
                },
                asked=tuple(tensor.requires_grad for tensor in _all_tensors(leaf.values)),
                written=self.written,
                outputs=self.levels[0][0].outputs if single else (),
                default=torch.get_default_dtype(),
                device=self.device.type,
                seed=self.seed,
                draws=None if self.draws is None else move_argument(self.draws.kept, _HOST),
                reach=leaf.reach,
                exchanges=self.exchanges,
            )
            for leaf in leaves
        ]

    def placements(self, leaf: RankLeaf) -> tuple[Role, ...]:
        """The role of each tensor of a rank; with several axes, gradients are joined here."""
        recipe = self.levels[0][0] if len(self.levels) == 1 else None
        return tuple(
            recipe.placement(argument_place) if recipe else Replicate(summed=False)
            for argument_place, value in leaf.values.items()
            for _ in tensors_in(value)
        )

    def ask(self, task: Callable[[int, int, Any], Done], payloads: list[Any]) -> list[Done]:
        """Run a task on the ranks; remember a lost rank even if the error is caught."""
        try:
            answers = self.team(task, payloads)
        except LostRankError as error:
            self.lost = error
            raise
        return [self._move_to_device(done) for done in answers]

    def _move_to_device(self, done: Done) -> Done:
        """Move the answer of a rank from the CPU to the device of the call."""
        if self.device == _HOST:
            return done
        own_items, together = (
            {key: move_argument(item, self.device) for key, item in items.items()}
            for items in (done.own, done.together)
        )
        return dataclasses.replace(done, own=own_items, together=together)


@dataclasses.dataclass
class _RanksPass:
    """One forward pass on the ranks, and its backward pass."""

    runner: RemoteRunner
    leaves: list[RankLeaf]
    counts: list[int]
    done: list[Done] = dataclasses.field(default_factory=list)
    order: list[tuple[int, Item]] = dataclasses.field(default_factory=list)

    def forward(self) -> list[Tensor]:
        self.done = self.runner.ask(go_forward, list(self.runner.works(self.leaves)))
        _raise_first(self.done)
        self.runner.joined_by_ranks = self.done[0].together
        self.order = [
            (rank, item)
            for rank, done in enumerate(self.done)
            for item, value in done.own.items()
            if isinstance(value, torch.Tensor)
        ]
        return [self.done[rank].own[item] for rank, item in self.order]

    def backward(self, cotangents: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        sent = dict(zip(self.order, cotangents, strict=True))
        backs = [
            Back(
                {
                    item: torch.zeros_like(done.own[item], device=_HOST)
                    if (cotangent := sent[rank, item]) is None
                    else cotangent.contiguous().cpu()
                    for item in done.live
                },
                self.runner.placements(self.leaves[rank]),
                self.runner.exchanges,
            )
            for rank, done in enumerate(self.done)
        ]
        answers = self.runner.ask(go_back, list(backs))
        _raise_first(answers)
        rank_gradients = [
            [done.own.get(tensor_position) for tensor_position in range(count)]
            for done, count in zip(answers, self.counts, strict=True)
        ]
        for position, whole_gradient in answers[0].together.items():
            self._place_collective(
                rank_gradients, position, whole_gradient, backs[0].placements[position]
            )
        return [gradient for gradients in rank_gradients for gradient in gradients]

    def _place_collective(
        self,
        rank_gradients: list[list[Tensor | None]],
        position: int,
        whole_gradient: Tensor,
        placement: Role,
    ) -> None:
        """Distribute what a collective gave so that autograd joins it to the same value again."""
        if all(gradients[position] is None for gradients in rank_gradients):
            return
        if isinstance(placement, Shard):
            parts = [_all_tensors(leaf.values)[position] for leaf in self.leaves]
            sizes = [part.shape[placement.dim] for part in parts]
            for gradients, part in zip(
                rank_gradients, whole_gradient.split(sizes, placement.dim), strict=True
            ):
                gradients[position] = part
            return
        for rank, gradients in enumerate(rank_gradients):
            gradients[position] = whole_gradient if rank == 0 else torch.zeros_like(whole_gradient)


class _OnRanks(torch.autograd.Function):
    """The parts of all ranks as one node of the autograd graph of this process."""

    @staticmethod
    def forward(ctx: Any, run: _RanksPass, *_: Tensor) -> tuple[Tensor, ...]:
        rank_outputs = tuple(run.forward())
        live = [item in run.done[rank].live for rank, item in run.order]
        ctx.run = run
        ctx.mark_non_differentiable(
            *[tensor for tensor, keeps in zip(rank_outputs, live, strict=True) if not keeps]
        )
        ctx.set_materialize_grads(False)
        return rank_outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        return (None, *ctx.run.backward(cotangents))


class _Carried(torch.autograd.Function):
    """The value of a collective, with the backward pass of the value that was joined here."""

    @staticmethod
    def forward(_: Any, __: Tensor, there: Tensor) -> Tensor:
        return there.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _carry_collective(item: Item, here: Tensor, there: Tensor) -> Tensor:
    if here.shape != there.shape or here.dtype != there.dtype:
        shapes = f"{list(there.shape)} from collectives, but {list(here.shape)} when joined here"
        raise RankError(f"{item}: shape {shapes}")
    if not here.requires_grad:
        return there
    return _Carried.apply(here, there)  # type: ignore[no-any-return, no-untyped-call]


def _all_tensors(values: Values) -> list[Tensor]:
    return [tensor for value in values.values() for tensor in tensors_in(value)]


def _copy_to_host(tensor: Tensor) -> Tensor:
    # A view would be pickled with its whole storage.
    return tensor.detach().clone(memory_format=torch.contiguous_format).cpu()


def _raise_first(done: list[Done]) -> None:
    for rank, answer in enumerate(done):
        if answer.error is not None:
            if answer.refused:
                raise UsageError(answer.error)
            raise RankError(f"rank {rank} of {len(done)} raised {answer.error}")


# --- What a rank does: run the operator on its part, then join the results by collectives ---------

# Processes and threads run the same code. Before each collective, the ranks exchange their errors
# and shapes. Otherwise a rank that failed, or holds another shape, would block or crash its peers.


@dataclasses.dataclass(frozen=True)
class Sent:
    """An operator as it is sent to a rank: by its name, pickled, or, to a thread, as it is."""

    pickled: bytes | None = None
    name: str = ""
    imports: tuple[str, ...] = ()
    itself: Callable[..., Any] | None = None

    @classmethod
    def pack(cls, function: Callable[..., Any], name: str, imports: Sequence[str] = ()) -> Sent:
        """Pack an operator by its name, or else pickled.

        Args:
            imports: modules to import first, because they register the operator.
        """
        function_name = f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', '')}"
        for candidate_name in (
            name,
            function_name,
            f"torch.ops.{function}",
        ):  # the last one for aten and custom ones
            if _find_by_name(candidate_name) is function:
                return cls(name=candidate_name, imports=tuple(imports))
        try:
            return cls(pickled=pickle.dumps(function), imports=tuple(imports))
        except Exception:  # noqa: BLE001  (pickling may raise anything)
            shown = name or getattr(function, "__qualname__", repr(function))
        raise UsageError(
            f"{shown} can neither be imported by its name nor pickled, so it cannot be sent to "
            "real ranks; define it at the top level of a module"
        )

    def unpack(self) -> Callable[..., Any]:
        """The operator, on the rank."""
        if self.itself is not None:
            return self.itself
        operator_function: Any = None
        reason = "there is nothing with that name"
        try:
            for module in self.imports:
                import_module(module)
            if self.pickled:
                operator_function = pickle.loads(self.pickled)  # noqa: S301
            else:
                operator_function = _find_by_name(self.name)
        except Exception as error:  # noqa: BLE001  (an import may raise anything)
            reason = f"{type(error).__name__}: {error}"
        if not callable(operator_function):
            raise UsageError(
                f"a rank cannot import the operator ({reason}); define it in a module before the "
                "first check on real ranks"
            )
        return operator_function  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class RankWork:
    """What a rank needs for its forward pass.

    Tensors are sent on the CPU, and the rank moves them to its own device.

    Attributes:
        exchanges: whether the operator communicates. If it raises, its peers may wait inside of it;
            the error must then leave the task, which stops them.
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
    """What a rank needs for its backward pass; `exchanges` as in `RankWork`."""

    cotangents: dict[Item, Tensor]
    placements: tuple[Role, ...]
    exchanges: bool = False


@dataclasses.dataclass(frozen=True)
class Done:
    """What a rank returns.

    Attributes:
        own: its results, or its gradients in the order of its tensors.
        live: results that can be differentiated.
        together: what collectives made of the results of all ranks; only from rank 0.
        error: what its part raised.
        refused: whether that was a `UsageError`, and not a fault of the operator.
    """

    own: dict[Any, Any] = dataclasses.field(default_factory=dict)
    live: frozenset[Item] = frozenset()
    together: dict[Any, Any] = dataclasses.field(default_factory=dict)
    error: str | None = None
    refused: bool = False


class _RankRunner(Runner):
    """Runs one part, as the check in one process does."""

    def run_part(self, work: RankWork, values: Values) -> dict[Item, Any]:
        self.is_first, self.written = False, work.written
        if work.draws is not None:
            self.draws = Draws(work.draws)
        with default_dtype(work.default), torch.enable_grad():
            rank_values = {
                argument_place: _own_group() if isinstance(value, Group) else value
                for argument_place, value in self.clone_written(values).items()
            }
            with self.drawing(list(work.reach)):
                return self.name_results(self.invoke(rank_values), rank_values)


# The graph of each rank between forward and backward; ranks that are threads share this module.
_KEPT: dict[int, tuple[dict[Item, Tensor], list[Tensor]]] = {}


def go_forward(rank: int, ranks: int, work: RankWork) -> Done:
    """Run the operator on this rank's part, and join the results by collectives."""
    _KEPT.pop(rank, None)
    done, live = Done(), {}
    tensors: list[Tensor] = []
    try:
        device = _own_device(work, rank)
        values = {
            argument_place: _to_own_device(value, device)
            for argument_place, value in work.values.items()
        }
        tensors = _all_tensors(values)
        for tensor, needs_gradient in zip(tensors, work.asked, strict=True):
            tensor.requires_grad_(needs_gradient)
        call = OperatorCall(work.operator.unpack())
        live = _RankRunner(call, (), work.seed).run_part(work, values)
    except Exception as error:
        refused = isinstance(error, UsageError)
        done = Done(error=first_line(error) if refused else in_one_line(error), refused=refused)
        if work.exchanges and not refused:
            raise
    if not _all_ranks_succeeded(done, ranks):
        return done
    tensor_items = {item: value for item, value in live.items() if isinstance(value, torch.Tensor)}
    _KEPT[rank] = (
        {item: value for item, value in tensor_items.items() if value.requires_grad},
        tensors,
    )
    own_results = {
        item: value.detach() if item in tensor_items else value for item, value in live.items()
    }
    results = [item for item in tensor_items if item.kind is ItemKind.OUTPUT]
    together = {}
    for item, rule in zip(results, work.outputs, strict=False):
        value = _by_collective(own_results[item], rule, ranks)
        if value is not None:
            together[item] = value
    sent_together = together if rank == 0 else {}
    return Done(_on_the_host(own_results), frozenset(_KEPT[rank][0]), _on_the_host(sent_together))


def go_back(rank: int, ranks: int, back: Back) -> Done:
    """Send cotangents back through this rank's part, and join the gradients."""
    outputs, tensors = _KEPT[rank]
    gradient_positions = [
        tensor_position for tensor_position, tensor in enumerate(tensors) if tensor.requires_grad
    ]
    ends = {item: end for item, end in outputs.items() if item in back.cotangents}
    done, own_gradients = Done(), {}
    try:
        if ends and gradient_positions:
            gradients = torch.autograd.grad(
                list(ends.values()),
                [tensors[tensor_position] for tensor_position in gradient_positions],
                [back.cotangents[item].to(end.device) for item, end in ends.items()],
                retain_graph=True,
                allow_unused=True,
            )
            own_gradients = dict(zip(gradient_positions, gradients, strict=True))
    except Exception as error:
        done = Done(error=in_one_line(error))
        if back.exchanges:
            raise
    if not _all_ranks_succeeded(done, ranks):
        return done
    together = {}
    for position, placement in enumerate(back.placements):
        role = _gradient_role(placement)
        if role is None or not tensors[position].requires_grad:
            continue
        # A rank without a gradient contributes zeros.
        gradient = own_gradients.get(position)
        rank_gradient = torch.zeros_like(tensors[position]) if gradient is None else gradient
        value = _by_collective(rank_gradient, role, ranks)
        if value is not None:
            together[position] = value
    return Done(_on_the_host(own_gradients), together=_on_the_host(together if rank == 0 else {}))


def _own_device(work: RankWork, rank: int) -> torch.device:
    """The device of a rank: its own GPU, or a shared one if there are too few.

    Threads share one device, because their collectives do not move tensors.
    """
    if work.device != "cuda" or work.operator.itself is not None:
        return torch.device(work.device)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _to_own_device(value: Any, device: torch.device) -> Any:
    """Move an argument to the device of the rank; a device of another kind is not changed."""
    if isinstance(value, torch.device) and value.type != device.type:
        return value
    return move_argument(value, device)


def _on_the_host(items: dict[Any, Any]) -> dict[Any, Any]:
    return {
        key: item.cpu() if isinstance(item, torch.Tensor) else item for key, item in items.items()
    }


def _by_collective(tensor: Tensor, role: Role, ranks: int) -> Tensor | None:
    """Join the values of all ranks, if a program would use a collective for it."""
    match role:
        case Shard(dim=dim, halo=(0, 0)):
            return gather_parts(tensor, dim, ranks)
        case Partial(reduction=reduction):
            return all_reduce(tensor, reduction, ranks)
        case _:
            return None


def _gradient_role(role: Role) -> Role | None:
    """The role of the gradients of an argument; None if no collective joins them."""
    if isinstance(role, Replicate) and role.summed:
        return Partial("sum")
    return role if isinstance(role, Shard) else None


# For each rank, the world and the group that its operators get.
_GROUPS: dict[int, tuple[Any, Any]] = {}


def _own_group() -> Any:
    """A group of all ranks that only the operator uses."""
    rank, world = distributed.get_rank(), distributed.group.WORLD
    known_world, group = _GROUPS.get(rank, (None, None))
    if known_world is not world:
        group = distributed.new_group()
        _GROUPS[rank] = world, group
    return group


def _all_ranks_succeeded(done: Done, ranks: int) -> bool:
    errors: list[Any] = [None] * ranks
    distributed.all_gather_object(errors, done.error)
    return all(error is None for error in errors)


def _find_by_name(name: str) -> Any:
    """The object with a dotted name, or None."""
    try:
        return import_dotted(name)
    except (ImportError, AttributeError):
        return None


# --- Collectives for tensors of any dtype and for parts of different sizes ------------------------

_OPERATIONS = {
    "sum": distributed.ReduceOp.SUM,
    "avg": distributed.ReduceOp.SUM,  # gloo has no average
    "max": distributed.ReduceOp.MAX,
    "min": distributed.ReduceOp.MIN,
    "product": distributed.ReduceOp.PRODUCT,
}


def gather_parts(tensor: Tensor, dim: int, ranks: int) -> Tensor | None:
    """The concatenated parts of all ranks; None if they do not fit together."""
    shapes = _gather_shapes(tensor, ranks)
    if not -tensor.dim() <= dim < tensor.dim():
        return None
    dim %= tensor.dim()
    rests = {(dtype, shape[:dim], shape[dim + 1 :]) for dtype, shape in shapes if len(shape) > dim}
    if len(rests) != 1 or any(len(shape) != tensor.dim() for _, shape in shapes):
        return None
    sizes = [shape[dim] for _, shape in shapes]
    # An all-gather needs parts of equal size, so all ranks pad to the largest.
    padded = tensor.new_zeros((*tensor.shape[:dim], max(sizes), *tensor.shape[dim + 1 :]))
    padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    sent = _on_sending_device(_plain(padded))
    parts = [torch.empty_like(sent) for _ in range(ranks)]
    distributed.all_gather(parts, sent)
    trimmed_parts = [
        _as_before(part, tensor).narrow(dim, 0, size)
        for part, size in zip(parts, sizes, strict=True)
    ]
    return torch.cat(trimmed_parts, dim)


def all_reduce(tensor: Tensor, reduction: str, ranks: int) -> Tensor | None:
    """The reduced terms of all ranks; None if they do not fit together."""
    shapes = _gather_shapes(tensor, ranks)
    if len(set(shapes)) != 1 or (tensor.is_complex() and reduction not in {"sum", "avg"}):
        return None
    small = not tensor.is_floating_point() and not tensor.is_complex()
    sent = tensor.to(torch.int64) if small else _plain(tensor.detach()).clone()
    sent = _on_sending_device(sent.contiguous())
    distributed.all_reduce(sent, op=_OPERATIONS[reduction])
    if small:
        return sent.to(tensor.dtype)
    reduced_tensor = _as_before(sent, tensor)
    return reduced_tensor / ranks if reduction == "avg" else reduced_tensor


def _gather_shapes(tensor: Tensor, ranks: int) -> list[tuple[str, tuple[int, ...]]]:
    """The dtype and shape that each rank holds."""
    shapes_by_rank: list[Any] = [None] * ranks
    distributed.all_gather_object(shapes_by_rank, (str(tensor.dtype), tuple(tensor.shape)))
    return shapes_by_rank


def _on_sending_device(tensor: Tensor) -> Tensor:
    backend = backend_of_group(distributed.get_backend())
    return tensor if backend.needs_own_device else tensor.to(backend.device)


def _plain(tensor: Tensor) -> Tensor:
    """The same bits in a dtype that can be sent."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).contiguous()
    if tensor.dtype is torch.bool:
        return tensor.to(torch.uint8)
    return tensor.contiguous()


def _as_before(sent: Tensor, tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_complex(sent)
    return sent.to(tensor.dtype)
