"""Run an operator whole, and split over ranks in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.errors import UsageError, in_one_line
from paritas.core.execution.cotangents import draw_cotangent
from paritas.core.numerics.bits import is_inexact
from paritas.core.numerics.contents import leaves
from paritas.core.numerics.metrics import bitwise_equal
from paritas.core.operators.catalogue import operators_of
from paritas.core.placement.assembly import join
from paritas.core.placement.placement import (
    RankCut,
    RankError,
    Terms,
    agreed_object,
    bounds,
    device_of,
    name_of,
    split_values,
)
from paritas.core.precision.lifting import LiftMode
from paritas.core.results.items import (
    Item,
    ItemKind,
    Replicate,
    Shard,
    after_call,
    gradient,
    output,
)
from paritas.core.torch_private.operators import WIDE, default_dtype, map_tensors, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from paritas.core.operators.calls import OperatorCall, Place
    from paritas.core.placement.placement import Recipe, Values


# --- Operators that crash the process when they are given parts that do not fit -------------------

_ATTENTION = {
    torch.nn.functional.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
}
_KEY, _VALUE = 1, 2


def refuse_hazards(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Raise the `ValueError` that torch should raise.

    Fused attention on the CPU reads as many values as there are keys, even if there are fewer. A
    rule that splits only one of the two would crash the process.
    """
    if function not in _ATTENTION:
        return
    keys_and_values = [
        args[position] if position < len(args) else kwargs.get(name)
        for position, name in ((_KEY, "key"), (_VALUE, "value"))
    ]
    if not all(isinstance(tensor, torch.Tensor) and tensor.dim() > 1 for tensor in keys_and_values):
        return
    keys, values = (tensor.shape[-2] for tensor in keys_and_values if tensor is not None)
    if keys != values:
        raise ValueError(
            f"attention needs as many values as keys, got {keys} keys and {values} values"
        )


# --- Random numbers: a rank draws its part of what the whole drew ---------------------------------

# Real ranks draw from streams of their own, which says nothing about the rule. Here, draws of the
# whole are kept, and a rank gets the slice that corresponds to its part of the arguments.

# The size of a dimension, and the start and end of a rank's part.
Reach = tuple[int, int, int]
# These operators return only random numbers; arguments decide at most their distribution.
_PURE = operators_of("random fills", "random numbers", "random integers")


@dataclasses.dataclass(frozen=True)
class Streams:
    """The state of the generators that a call may use: those of the CPU and of its device."""

    host: Tensor
    device: torch.device
    own: Tensor | None

    @classmethod
    def of(cls, call: OperatorCall) -> Streams:
        """The current state."""
        device = device_of(call)
        cuda_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), device, cuda_state)

    def restore(self) -> None:
        """Set the generators back to this state."""
        torch.set_rng_state(self.host)
        if self.own is not None:
            torch.cuda.set_rng_state(self.own, self.device)

    def moved_by(self, call: OperatorCall) -> bool:
        """Whether the generators have advanced since."""
        now = Streams.of(call)
        if not torch.equal(self.host, now.host):
            return True
        return self.own is not None and now.own is not None and not torch.equal(self.own, now.own)


@dataclasses.dataclass
class Draws:
    """What the whole drew, draw by draw; None before it has run."""

    kept: list[Tensor] | None = None


class PinnedDraws(LiftMode):
    """Keeps what is drawn, or replays what was kept."""

    def __init__(self, kept_draws: list[Tensor], reach: list[Reach] | None) -> None:
        """Without a reach, draws are added to `kept_draws`."""
        super().__init__(torch.get_default_dtype(), torch.get_default_dtype(), widen=False)
        self.kept = kept_draws
        self.reach = reach
        self._next = 0

    def compute(self, func: Any, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator; random numbers are replaced by those of the whole."""
        result = func(*args, **kwargs)
        if not kind.random:
            return result
        if kind.name == "native_dropout":  # dropout on a GPU
            return self._replay_dropout(result, *args, **kwargs)
        if not isinstance(result, torch.Tensor) or kind.name not in _PURE:
            raise UsageError(
                f"random numbers drawn inside {kind.name} cannot be split over ranks; check the "
                "operator without randomness"
            )
        if self.reach is None:
            self.kept.append(result.detach().clone())
            return result
        kept_draw = self._kept_for(result, kind.name)
        return (
            result.copy_(kept_draw) if kind.mutates else kept_draw.to(result.device, result.dtype)
        )

    def _replay_dropout(
        self,
        drawn: tuple[Tensor, Tensor],
        tensor: Tensor,
        p: float,
        train: bool | None = True,  # noqa: FBT001, FBT002  (aten's own)
    ) -> tuple[Tensor, Tensor]:
        """The mask is what was drawn."""
        if train is False:
            return drawn
        if self.reach is None:
            self.kept.append(drawn[1].detach().clone())
            return drawn
        mask = self._kept_for(drawn[1], "native_dropout").to(tensor.device)
        return tensor * mask * (1 / (1 - p) if p < 1 else 0.0), mask

    def _kept_for(self, drawn: Tensor, name: str) -> Tensor:
        if self._next >= len(self.kept):
            raise UsageError(f"a rank draws random numbers more often than the whole (in {name})")
        whole_draw = self.kept[self._next]
        self._next += 1
        ours, whole_shape = list(drawn.shape), list(whole_draw.shape)
        for dim, size in enumerate(ours if len(ours) == len(whole_shape) else []):
            if size == whole_shape[dim]:
                continue
            for total, begin, end in self.reach or []:
                if total == whole_shape[dim] and end - begin == size:
                    whole_draw = whole_draw.narrow(dim, begin, size)
                    break
        if whole_draw.shape != drawn.shape:
            raise UsageError(
                f"a rank draws {ours} where the whole draws {whole_shape} (in {name}), and "
                "no slice of "
                "it fits; check the operator without randomness"
            )
        return whole_draw


def reaches(values: Values, recipe: Recipe, ranks: int) -> list[list[Reach]]:
    """For each rank, its parts of the arguments that are split."""
    each: list[list[Reach]] = [[] for _ in range(ranks)]
    for argument_place, placement in recipe.inputs:
        value = values.get(argument_place)
        if not isinstance(placement, Shard) or not isinstance(value, torch.Tensor):
            continue
        size = value.shape[placement.dim]
        cuts = bounds(size, placement.unit, ranks, name_of(argument_place))
        for rank_reaches, (begin, end) in zip(each, cuts, strict=True):
            rank_reaches.append((size, begin, end))
    return each


# --- The runs -------------------------------------------------------------------------------------

OUTPUT, COTANGENTS = "output", 2
# What runners of one call share between recipes.
_OF_THE_CALL = (
    "narrow", "lifting", "written", "precisions", "draws", "is_first", "_kept",
    "_streams",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RankLeaf:
    """The arguments of one rank.

    Attributes:
        reach: its parts of the arguments that are split.
        where: description of the rank.
    """

    values: Values
    reach: tuple[Reach, ...]
    where: str


@dataclasses.dataclass(frozen=True)
class RankAxis:
    """An axis of ranks: the recipe along it, and what is below each of its positions."""

    recipe: Recipe
    values: Values
    below: tuple[RankAxis | RankLeaf, ...]


def _leaves(tree: RankAxis | RankLeaf) -> list[RankLeaf]:
    if isinstance(tree, RankLeaf):
        return [tree]
    return [leaf for part in tree.below for leaf in _leaves(part)]


@dataclasses.dataclass
class OperatorRun:
    """The outcome of one run.

    Attributes:
        results: results, and arguments after the call if the operator wrote to them.
        gradients: for each cotangent, the gradients; None for a missing one.
        error: what the forward pass raised.
        gradient_error: what the backward pass raised.
    """

    results: dict[Item, Any] = dataclasses.field(default_factory=dict)
    gradients: list[dict[Item, Tensor | None]] = dataclasses.field(default_factory=list)
    error: Exception | None = None
    gradient_error: Exception | None = None


@dataclasses.dataclass(frozen=True)
class Own:
    """What each rank wrote to an argument that the rule leaves to the ranks."""

    place: Place
    parts: list[Tensor]


class Runner:
    """The runs of one check.

    Attributes:
        narrow: whether an argument is narrower than float64.
        lifting: whether wide runs also widen what the operator narrows inside.
        written: arguments that the operator writes to, known after the first run.
        precisions: dtype of each result in the first run; cotangents are drawn in it.
        cuts: how each item is cut over the ranks of the first axis.
        own: what each rank wrote to the arguments that the rule leaves to the ranks.
        lost: the loss of a rank, if the ranks are processes or threads; there is no verdict then.
    """

    def __init__(
        self, call: OperatorCall, levels: tuple[tuple[Recipe, int], ...], seed: int
    ) -> None:
        self.call = call
        self.levels = levels
        self.seed = seed
        values: list[Any] = [*call.args, *call.kwargs.values()]
        self.narrow = any(t.dtype in WIDE for value in values for t in tensors_in(value))
        self.lifting = False
        self.written: tuple[Place, ...] = ()
        self.precisions: dict[Item, torch.dtype] = {}
        self.cuts: dict[Item, RankCut] = {}
        self.own: dict[Item, Own] = {}
        self.draws: Draws | None = None
        self.lost: Exception | None = None
        self.is_first = True
        self._kept: dict[bool, Values] = {}
        self._streams = Streams.of(call)

    def take_over(self, runner: Runner) -> None:
        """Continue a runner of the same call: share arguments and draws."""
        for name in _OF_THE_CALL:
            setattr(self, name, getattr(runner, name))

    # --- the two sides ---------------------------------------------------------------------------

    def whole(
        self,
        *,
        wide: bool,
        cotangents: int = COTANGENTS,
        around: contextlib.AbstractContextManager[Any] | None = None,
        shake: bool = False,
    ) -> OperatorRun:
        """Run the whole operator, optionally with the last bits of its arguments perturbed."""
        arguments = self._shaken() if shake else self._shared_arguments(wide=wide)
        terms = Terms(self.seed, lifted=wide or not self.narrow)

        def forward() -> dict[Item, Any]:
            values = self.clone_written(arguments)
            with self.drawing([]):
                result = self.invoke(values)
            if self.is_first:
                self.is_first = False
                self.written = tuple(p for p in values if _differ(values[p], arguments[p]))
            return self.name_results(result, values)

        return self._run(forward, arguments, terms, cotangents, wide=wide, around=around)

    def split(
        self,
        *,
        wide: bool,
        cotangents: int = COTANGENTS,
        around: contextlib.AbstractContextManager[Any] | None = None,
    ) -> OperatorRun:
        """Run the operator rank by rank, and join the results."""
        arguments = self._shared_arguments(wide=wide)
        terms = Terms(self.seed, lifted=wide or not self.narrow)
        forward = functools.partial(self.run_ranks, arguments, terms)
        return self._run(forward, arguments, terms, cotangents, wide=wide, around=around)

    def _run(
        self,
        forward: Callable[[], dict[Item, Any]],
        values: Values,
        terms: Terms,
        cotangents: int,
        *,
        wide: bool,
        around: contextlib.AbstractContextManager[Any] | None,
    ) -> OperatorRun:
        operator_run = OperatorRun()
        if wide and self.lifting and around is None:
            dtypes = [tensor.dtype for value in self.call.args for tensor in tensors_in(value)]
            native = next((dtype for dtype in dtypes if dtype in WIDE), torch.float32)
            around = LiftMode(native, torch.get_default_dtype())
        with (
            default_dtype(torch.float64) if wide else contextlib.nullcontext(),
            torch.enable_grad(),
            around or contextlib.nullcontext(),
        ):
            try:
                live = forward()
            except Exception as error:  # noqa: BLE001  (becomes a finding)
                operator_run.error = error
                return operator_run
            for item, value in live.items():
                operator_run.results[item] = (
                    value.detach() if isinstance(value, torch.Tensor) else value
                )
            self._differentiate(live, values, terms, cotangents, operator_run)
        return operator_run

    # --- forward ---------------------------------------------------------------------------------

    def _shared_arguments(self, *, wide: bool) -> Values:
        """Copies of the arguments, shared by all runs in a precision."""
        if wide not in self._kept:
            self._kept[wide] = self._leaves(wide=wide)
        return self._kept[wide]

    def _leaves(self, *, wide: bool) -> Values:
        """Copies of the arguments as leaves of an autograd graph."""
        values: Values = dict(enumerate(self.call.args))
        values.update(self.call.kwargs)
        for argument_place, value in values.items():
            wants_gradient = argument_place not in self.call.without_gradient

            def leaf(tensor: Tensor, needs_gradient: bool = wants_gradient) -> Tensor:  # noqa: FBT001
                dtype = WIDE.get(tensor.dtype, tensor.dtype) if wide else tensor.dtype
                copied = tensor.detach().to(dtype)
                if copied is tensor or copied.data_ptr() == tensor.data_ptr():
                    copied = copied.clone()
                return copied.requires_grad_(needs_gradient and is_inexact(copied))

            if isinstance(value, torch.Tensor | list | tuple):
                values[argument_place] = map_tensors(value, leaf)
            elif wide and isinstance(value, torch.dtype):
                values[argument_place] = WIDE.get(value, value)
        return values

    def _shaken(self) -> Values:
        values = self._leaves(wide=True)
        generator = torch.Generator("cpu").manual_seed(self.seed + 1)
        for value in values.values():
            for tensor in tensors_in(value):
                if is_inexact(tensor):
                    shape = tensor.shape
                    by = torch.rand(shape, generator=generator, dtype=torch.float64) * 4 - 2
                    with torch.no_grad():
                        tensor.mul_(1 + by.to(tensor.device) * torch.finfo(tensor.dtype).eps)
        return values

    def clone_written(self, values: Values) -> Values:
        """Copy what the operator may write to; before the first run, that is everything."""
        places = tuple(values) if self.is_first else self.written
        return {
            argument_place: map_tensors(value, torch.clone)
            if argument_place in places and isinstance(value, torch.Tensor | list | tuple)
            else value
            for argument_place, value in values.items()
        }

    def invoke(self, values: Values) -> Any:
        """Call the operator."""
        args = [
            value for argument_place, value in values.items() if isinstance(argument_place, int)
        ]
        named = {
            argument_place: value
            for argument_place, value in values.items()
            if isinstance(argument_place, str)
        }
        refuse_hazards(self.call.function, args, named)
        return self.call.function(*args, **named)

    def name_results(self, result: Any, values: Values) -> dict[Item, Any]:
        """The results and the arguments that were written to, by item."""
        returned = [] if result is None and self.written else leaves(result, OUTPUT)
        named = {output(path): value for path, value in returned}
        for argument_place in self.written:
            for path, tensor in leaves(values[argument_place], name_of(argument_place)):
                if isinstance(tensor, torch.Tensor):
                    named[after_call(path)] = tensor
        return named

    def run_ranks(self, values: Values, terms: Terms) -> dict[Item, Any]:
        """The joined results of all ranks."""
        tree = self._split_levels(values, self.levels, terms, (), "")
        return self._join_tree(tree, iter(self.run_leaves(_leaves(tree))), terms)

    def run_leaves(self, ranks: list[RankLeaf]) -> Iterable[dict[Item, Any]]:
        """The results of each rank, one after the other."""
        return map(self._run_leaf, ranks)

    def _run_leaf(self, rank: RankLeaf) -> dict[Item, Any]:
        rank_values = self.clone_written(rank.values)
        try:
            with self.drawing(list(rank.reach)):
                result = self.invoke(rank_values)
        except UsageError:
            raise
        except Exception as error:
            raise RankError(f"{rank.where} raised {in_one_line(error)}") from error
        return self.name_results(result, rank_values)

    def _split_levels(
        self,
        values: Values,
        levels: tuple[tuple[Recipe, int], ...],
        terms: Terms,
        reach: tuple[Reach, ...],
        where: str,
    ) -> RankAxis | RankLeaf:
        """Split the arguments along the first axis, and each part along the next."""
        if not levels:
            return RankLeaf(values, reach, where)
        (recipe, ranks), below = levels[0], levels[1:]
        parts = split_values(values, recipe, ranks, terms)
        reached = reaches(values, recipe, ranks) if self.draws else [[] for _ in range(ranks)]
        branches = []
        for rank, (part, more) in enumerate(zip(parts, reached, strict=True)):
            here = f"{where}, {rank} of {ranks}" if where else f"rank {rank} of {ranks}"
            branches.append(self._split_levels(part, below, terms, (*reach, *more), here))
        return RankAxis(recipe, values, tuple(branches))

    def _join_tree(
        self, tree: RankAxis | RankLeaf, results: Iterator[dict[Item, Any]], terms: Terms
    ) -> dict[Item, Any]:
        if isinstance(tree, RankLeaf):
            return next(results)
        below = [self._join_tree(part, results, terms) for part in tree.below]
        return self.together(below, tree.recipe, tree.values, terms)

    def together(
        self, results: list[dict[Item, Any]], recipe: Recipe, values: Values, terms: Terms
    ) -> dict[Item, Any]:
        """Join the results of the ranks as the recipe says."""
        first = results[0]
        for rank, other in enumerate(results):
            if other.keys() != first.keys():
                counts = f"{len(other)} results, rank 0 returns {len(first)}"
                raise RankError(f"rank {rank} of {len(results)} returns {counts}")
        places = {name_of(argument_place): argument_place for argument_place in self.written}
        placed = {name: recipe.placement(argument_place) for name, argument_place in places.items()}
        wholes = {
            name_of(argument_place): values[argument_place] for argument_place in self.written
        }
        rules = iter(recipe.outputs)
        together: dict[Item, Any] = {}
        for item, value in first.items():
            if not isinstance(value, torch.Tensor):
                together[item] = agreed_object(item.text, [result[item] for result in results])
                continue
            parts = [result[item] for result in results]
            try:
                if item.kind is ItemKind.OUTPUT:
                    rule = next(rules, None)
                    if rule is None:
                        break
                    together[item] = join(parts, rule, terms=terms)
                    if isinstance(rule, Shard):
                        self.cuts[item] = RankCut.of(parts, rule.dim)
                else:
                    name = item.name
                    root = next(key for key in placed if name == key or name.startswith(f"{key}["))
                    whole_tensor = dict(leaves(wholes[root], root))[name]
                    if placed[root] == Replicate(own=True):
                        self.own[item] = Own(places[root], [part.detach() for part in parts])
                    together[item] = join(
                        parts, placed[root], terms=terms, shape=whole_tensor.shape
                    )
            except Exception as error:
                shapes = ", ".join(str(list(part.shape)) for part in parts)
                reason = f"{item}: cannot join parts of shapes {shapes}"
                raise RankError(f"{reason}: {in_one_line(error)}") from error
        outputs = sum(
            isinstance(value, torch.Tensor)
            for item, value in first.items()
            if item.kind is ItemKind.OUTPUT
        )
        if outputs != len(recipe.outputs):
            raise RankError(
                f"the rule has {len(recipe.outputs)} results, but the operator returns {outputs}"
            )
        return together

    @contextlib.contextmanager
    def drawing(self, reach: list[Reach]) -> Iterator[None]:
        """Keep the draws of the first run; later, give a rank its part of them."""
        if self.draws is None:
            yield
            return
        self._streams.restore()
        is_whole = self.draws.kept is None
        if self.draws.kept is None:
            self.draws.kept = []
        with PinnedDraws(self.draws.kept, None if is_whole else reach):
            yield

    # --- backward --------------------------------------------------------------------------------

    def _differentiate(
        self,
        live: dict[Item, Any],
        values: Values,
        terms: Terms,
        cotangents: int,
        operator_run: OperatorRun,
    ) -> None:
        outputs = {
            item: value
            for item, value in live.items()
            if isinstance(value, torch.Tensor) and value.requires_grad
        }
        targets = {
            gradient(path): tensor
            for argument_place, value in values.items()
            for path, tensor in leaves(value, name_of(argument_place))
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad
        }
        if not outputs or not targets:
            return
        claimed = self.claimed_gradients(targets)
        try:
            for turn in range(cotangents):
                terms.turn, terms.full = turn, False
                upstream = [self._cotangent(item, value, turn) for item, value in outputs.items()]
                keep = turn + 1 < cotangents or bool(claimed)
                gradients = _find_gradients(outputs, targets, upstream, keep=keep)
                if claimed:
                    terms.full = True
                    gradients |= _find_gradients(outputs, claimed, upstream, keep=True)
                operator_run.gradients.append(gradients)
        except Exception as error:  # noqa: BLE001  (becomes a finding)
            operator_run.gradient_error = error

    def claimed_gradients(self, targets: dict[Item, Tensor]) -> dict[Item, Tensor]:
        """Arguments whose whole gradient each rank claims to have, if results are replicated.

        For these, each rank starts from the whole cotangent, not from a share of it.
        """
        places: set[str] = set()
        for recipe, _ in self.levels:
            if not any(isinstance(rule, Replicate) for rule in recipe.outputs):
                continue
            places |= {
                name_of(argument_place)
                for argument_place, placement in recipe.inputs
                if isinstance(placement, Replicate) and not placement.summed
            }
        if not places:
            return {}
        return {
            item: tensor
            for item, tensor in targets.items()
            if any(item.name.startswith(position) for position in places)
        }

    def _cotangent(self, item: Item, output: Tensor, turn: int) -> Tensor:
        """A cotangent, the same on both sides and in every run."""
        precision = self.precisions.setdefault(item, output.dtype)
        return draw_cotangent(item, output, self.seed + turn, precision)


def _find_gradients(
    outputs: dict[Item, Tensor], targets: dict[Item, Tensor], upstream: list[Tensor], *, keep: bool
) -> dict[Item, Tensor | None]:
    gradients = torch.autograd.grad(
        list(outputs.values()),
        list(targets.values()),
        upstream,
        retain_graph=keep,
        allow_unused=True,
    )
    return dict(zip(targets, gradients, strict=True))


def _differ(after: Any, before: Any) -> bool:
    pairs = zip(tensors_in(after), tensors_in(before), strict=True)
    return any(not (torch.equal(a, b) or bitwise_equal(a, b)) for a, b in pairs)
