"""Run an operator whole, and split over ranks in one process: results, gradients, what it wrote."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.operators import WIDE, default_dtype, map_tensors
from paritas.errors import UsageError, in_one_line
from paritas.execution.observation import AFTER
from paritas.numerics.contents import leaves
from paritas.numerics.metrics import bitwise_equal
from paritas.placement.assembly import join
from paritas.placement.placement import RankCut, Terms, bounds
from paritas.placement.recipes import (
    RankError,
    agreed_object,
    device_of,
    name_of,
    split_values,
    tensors_in,
)
from paritas.precision.lifting import LiftMode
from paritas.results.placements import Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from paritas.placement.recipes import OperatorCall, Place, Recipe, Values


# --- Operators that end the process, not the call, when they are given parts that do not fit ------

_ATTENTION = {
    torch.nn.functional.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
}
_KEY, _VALUE = 1, 2


def refuse_hazards(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Raise what torch should have raised.

    Fused attention on the CPU reads as many values as there are keys, whether they are there or
    not: a rule that splits only one of the two would take the whole process with it.

    Raises:
        ValueError: there are not as many values as keys.
    """
    if function not in _ATTENTION:
        return
    found = [
        args[place] if place < len(args) else kwargs.get(name)
        for place, name in ((_KEY, "key"), (_VALUE, "value"))
    ]
    if not all(isinstance(one, torch.Tensor) and one.dim() > 1 for one in found):
        return
    keys, values = (one.shape[-2] for one in found if one is not None)
    if keys != values:
        raise ValueError(f"attention is given {keys} keys and {values} values")


# --- Random numbers that correspond: a rank draws its part of what the whole drew -----------------

# Ranks of their own draw from streams of their own, which says nothing about the rule. Here the
# draws of the whole are kept, and a rank's draw is the slice of them that its part of the arguments
# is.

# A size, and the part of it that a rank has.
Reach = tuple[int, int, int]
# What these give is drawn and nothing else: no argument's value is in it but a probability.
_PURE = frozenset(
    {
        "bernoulli",
        "cauchy",
        "exponential",
        "geometric",
        "log_normal",
        "normal",
        "normal_functional",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "random",
        "uniform",
    }
)


@dataclasses.dataclass(frozen=True)
class Streams:
    """Where the generators stand that a call may draw from: the host's, and its device's."""

    host: Tensor
    device: torch.device
    own: Tensor | None

    @classmethod
    def of(cls, call: OperatorCall) -> Streams:
        """As they stand now."""
        device = device_of(call)
        own = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), device, own)

    def restore(self) -> None:
        """Make them stand there again."""
        torch.set_rng_state(self.host)
        if self.own is not None:
            torch.cuda.set_rng_state(self.own, self.device)

    def moved_by(self, call: OperatorCall) -> bool:
        """Whether they stand elsewhere now."""
        now = Streams.of(call)
        if not torch.equal(self.host, now.host):
            return True
        return self.own is not None and now.own is not None and not torch.equal(self.own, now.own)


class Draws:
    """What the whole drew, draw by draw; None before it has run."""

    def __init__(self) -> None:
        """Nothing is drawn yet."""
        self.kept: list[Tensor] | None = None

    def keep(self) -> PinnedDraws:
        """A mode under which the whole's draws are kept."""
        self.kept = []
        return PinnedDraws(self.kept, reach=None)

    def pinned(self, reach: list[Reach]) -> PinnedDraws:
        """A mode under which a rank draws its part of them."""
        return PinnedDraws(self.kept or [], reach=reach)


class PinnedDraws(LiftMode):
    """Keeps what is drawn, or gives what was kept."""

    def __init__(self, kept: list[Tensor], reach: list[Reach] | None) -> None:
        """Without a reach the draws are added to `kept`."""
        super().__init__(torch.get_default_dtype(), torch.get_default_dtype(), widen=False)
        self.kept = kept
        self.reach = reach
        self._next = 0

    def compute(self, func: Any, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator; one that draws gives what was drawn for the whole."""
        result = func(*args, **kwargs)
        if not kind.random:
            return result
        if kind.name == "native_dropout":  # what dropout is on a GPU
            return self._dropped(result, *args, **kwargs)
        if not isinstance(result, torch.Tensor) or kind.name not in _PURE:
            message = f"it draws random numbers inside {kind.name}"
            raise UsageError(f"{message}, where they cannot be matched; check it without them")
        if self.reach is None:
            self.kept.append(result.detach().clone())
            return result
        kept = self._kept_for(result, kind.name)
        return result.copy_(kept) if kind.mutates else kept.to(result.device, result.dtype)

    def _dropped(
        self,
        drawn: tuple[Tensor, Tensor],
        tensor: Tensor,
        p: float,
        train: bool | None = True,  # noqa: FBT001, FBT002  (aten's own)
    ) -> tuple[Tensor, Tensor]:
        """Of such an operator the mask is what was drawn."""
        if train is False:
            return drawn
        if self.reach is None:
            self.kept.append(drawn[1].detach().clone())
            return drawn
        mask = self._kept_for(drawn[1], "native_dropout").to(tensor.device)
        return tensor * mask * (1 / (1 - p) if p < 1 else 0.0), mask

    def _kept_for(self, drawn: Tensor, name: str) -> Tensor:
        if self._next >= len(self.kept):
            raise UsageError(f"a rank draws more often than the whole (by {name})")
        whole = self.kept[self._next]
        self._next += 1
        ours, theirs = list(drawn.shape), list(whole.shape)
        for dim, size in enumerate(ours if len(ours) == len(theirs) else []):
            if size == theirs[dim]:
                continue
            for total, begin, end in self.reach or []:
                if total == theirs[dim] and end - begin == size:
                    whole = whole.narrow(dim, begin, size)
                    break
        if whole.shape != drawn.shape:
            message = f"a rank draws {ours} where the whole draws {theirs} (by {name})"
            raise UsageError(f"{message}, which is no part of it; check it without random numbers")
        return whole


def reaches(values: Values, recipe: Recipe, ranks: int) -> list[list[Reach]]:
    """For each rank the parts that it has of the arguments that are split."""
    each: list[list[Reach]] = [[] for _ in range(ranks)]
    for place, placement in recipe.inputs:
        value = values.get(place)
        if not isinstance(placement, Shard) or not isinstance(value, torch.Tensor):
            continue
        size = value.shape[placement.dim]
        cuts = bounds(size, placement.unit, ranks, name_of(place))
        for mine, (begin, end) in zip(each, cuts, strict=True):
            mine.append((size, begin, end))
    return each


# --- The runs -------------------------------------------------------------------------------------

OUTPUT, GRADIENT, COTANGENTS = "output", "gradient of ", 2
# What runners of one call for several recipes have in common.
_OF_THE_CALL = (
    "narrow", "lifting", "written", "precisions", "draws", "is_first", "_kept", "_cotangents",
    "_streams",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RankLeaf:
    """What one rank is given.

    Attributes:
        reach: which parts of the arguments those are.
        where: which rank it is, for people.
    """

    values: Values
    reach: tuple[Reach, ...]
    where: str


@dataclasses.dataclass(frozen=True)
class RankAxis:
    """An axis of ranks: what is split along it, and what is at each of its places."""

    recipe: Recipe
    values: Values
    below: tuple[RankAxis | RankLeaf, ...]


def _leaves(tree: RankAxis | RankLeaf) -> list[RankLeaf]:
    if isinstance(tree, RankLeaf):
        return [tree]
    return [leaf for part in tree.below for leaf in _leaves(part)]


@dataclasses.dataclass
class OperatorRun:
    """What one run gave.

    Attributes:
        results: path -> result, or argument after the call where the operator wrote to it.
        gradients: for each cotangent, path -> gradient; None where none arrives.
        error: why the forward pass ended.
        gradient_error: why the backward pass ended.
    """

    results: dict[str, Any] = dataclasses.field(default_factory=dict)
    gradients: list[dict[str, Tensor | None]] = dataclasses.field(default_factory=list)
    error: Exception | None = None
    gradient_error: Exception | None = None


@dataclasses.dataclass(frozen=True)
class Own:
    """What each rank wrote to an argument that the rule leaves to it."""

    place: Place
    parts: list[Tensor]


class Runner:
    """The runs of one check.

    Attributes:
        narrow: whether float64 is wider than an argument.
        lifting: whether wide runs also widen what the operator narrows inside.
        written: the arguments that the operator writes to, known from its first run.
        precisions: path of a result -> its dtype in the first run, in which cotangents are drawn.
        cuts: path -> how it lies on the ranks of the first axis.
        own: path of an argument that the rule leaves to each rank -> what each wrote there.
        lost: how a rank was lost, where ranks are more than a loop; there is no verdict then.
    """

    def __init__(
        self, call: OperatorCall, levels: tuple[tuple[Recipe, int], ...], seed: int
    ) -> None:
        """Prepare the runs of a call that is split along one or more axes."""
        self.call = call
        self.levels = levels
        self.seed = seed
        values: list[Any] = [*call.args, *call.kwargs.values()]
        self.narrow = any(t.dtype in WIDE for value in values for t in tensors_in(value))
        self.lifting = False
        self.written: tuple[Place, ...] = ()
        self.precisions: dict[str, torch.dtype] = {}
        self.cuts: dict[str, RankCut] = {}
        self.own: dict[str, Own] = {}
        self.draws: Draws | None = None
        self.lost: Exception | None = None
        self.is_first = True
        self._kept: dict[bool, Values] = {}
        self._cotangents: dict[tuple[str, int], Tensor] = {}
        self._streams = Streams.of(call)

    def take_over(self, known: Runner) -> None:
        """Go on from a runner of the same call: arguments, draws and cotangents are one."""
        for name in _OF_THE_CALL:
            setattr(self, name, getattr(known, name))

    # --- the two sides ---------------------------------------------------------------------------

    def whole(
        self,
        *,
        wide: bool,
        cotangents: int = COTANGENTS,
        around: contextlib.AbstractContextManager[Any] | None = None,
        shake: bool = False,
    ) -> OperatorRun:
        """Run the operator as it is called, or with the last bits of its arguments shaken."""
        given = self._shaken() if shake else self._given(wide=wide)
        terms = Terms(self.seed, lifted=wide or not self.narrow)

        def forward() -> dict[str, Any]:
            values = self.cloned(given)
            with self.drawing([]):
                result = self.invoke(values)
            if self.is_first:
                self.is_first = False
                self.written = tuple(p for p in values if _differ(values[p], given[p]))
            return self.named(result, values)

        return self._run(forward, given, terms, cotangents, wide=wide, around=around)

    def split(
        self,
        *,
        wide: bool,
        cotangents: int = COTANGENTS,
        around: contextlib.AbstractContextManager[Any] | None = None,
    ) -> OperatorRun:
        """Run it rank by rank and put the results together."""
        given = self._given(wide=wide)
        terms = Terms(self.seed, lifted=wide or not self.narrow)

        def forward() -> dict[str, Any]:
            return self.ranked(given, terms)

        return self._run(forward, given, terms, cotangents, wide=wide, around=around)

    def _run(
        self,
        forward: Callable[[], dict[str, Any]],
        given: Values,
        terms: Terms,
        cotangents: int,
        *,
        wide: bool,
        around: contextlib.AbstractContextManager[Any] | None,
    ) -> OperatorRun:
        seen = OperatorRun()
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
                seen.error = error
                return seen
            for path, value in live.items():
                seen.results[path] = value.detach() if isinstance(value, torch.Tensor) else value
            self._differentiate(live, given, terms, cotangents, seen)
        return seen

    # --- forward ---------------------------------------------------------------------------------

    def _given(self, *, wide: bool) -> Values:
        """Copies of the arguments for all runs in a precision: what is written to, is copied."""
        if wide not in self._kept:
            self._kept[wide] = self._leaves(wide=wide)
        return self._kept[wide]

    def _leaves(self, *, wide: bool) -> Values:
        """Copies of the arguments, of which gradients can be asked."""
        values: Values = dict(enumerate(self.call.args))
        values.update(self.call.kwargs)
        for place, value in values.items():
            asked = place not in self.call.without_gradient

            def leaf(tensor: Tensor, asked: bool = asked) -> Tensor:  # noqa: FBT001
                dtype = WIDE.get(tensor.dtype, tensor.dtype) if wide else tensor.dtype
                copied = tensor.detach().to(dtype)
                if copied is tensor or copied.data_ptr() == tensor.data_ptr():
                    copied = copied.clone()
                inexact = copied.is_floating_point() or copied.is_complex()
                return copied.requires_grad_(asked and inexact)

            if isinstance(value, torch.Tensor | list | tuple):
                values[place] = map_tensors(value, leaf)
            elif wide and isinstance(value, torch.dtype):
                values[place] = WIDE.get(value, value)
        return values

    def _shaken(self) -> Values:
        values = self._leaves(wide=True)
        generator = torch.Generator("cpu").manual_seed(self.seed + 1)
        for value in values.values():
            for tensor in tensors_in(value):
                if tensor.is_floating_point() or tensor.is_complex():
                    shape = tensor.shape
                    by = torch.rand(shape, generator=generator, dtype=torch.float64) * 4 - 2
                    with torch.no_grad():
                        tensor.mul_(1 + by.to(tensor.device) * torch.finfo(tensor.dtype).eps)
        return values

    def cloned(self, values: Values) -> Values:
        """What the operator may write to, as a copy; before the first run that is not known."""
        places = tuple(values) if self.is_first else self.written
        return {
            place: map_tensors(value, torch.clone)
            if place in places and isinstance(value, torch.Tensor | list | tuple)
            else value
            for place, value in values.items()
        }

    def invoke(self, values: Values) -> Any:
        """Call the operator."""
        args = [value for place, value in values.items() if isinstance(place, int)]
        named = {place: value for place, value in values.items() if isinstance(place, str)}
        refuse_hazards(self.call.function, args, named)
        return self.call.function(*args, **named)

    def named(self, result: Any, values: Values) -> dict[str, Any]:
        """Results, and arguments that were written to, each by its path."""
        named = {} if result is None and self.written else dict(leaves(result, OUTPUT))
        for place in self.written:
            for path, tensor in leaves(values[place], name_of(place)):
                if isinstance(tensor, torch.Tensor):
                    named[f"{path}{AFTER}"] = tensor
        return named

    def ranked(self, values: Values, terms: Terms) -> dict[str, Any]:
        """The results of all ranks, put together."""
        tree = self._taken_apart(values, self.levels, terms, (), "")
        return self._folded(tree, iter(self.run_leaves(_leaves(tree))), terms)

    def run_leaves(self, ranks: list[RankLeaf]) -> Iterable[dict[str, Any]]:
        """What each rank gives, one after the other."""
        return map(self._run_leaf, ranks)

    def _run_leaf(self, rank: RankLeaf) -> dict[str, Any]:
        mine = self.cloned(rank.values)
        try:
            with self.drawing(list(rank.reach)):
                result = self.invoke(mine)
        except UsageError:
            raise
        except Exception as error:
            raise RankError(f"{rank.where} raised {in_one_line(error)}") from error
        return self.named(result, mine)

    def _taken_apart(
        self,
        values: Values,
        levels: tuple[tuple[Recipe, int], ...],
        terms: Terms,
        reach: tuple[Reach, ...],
        where: str,
    ) -> RankAxis | RankLeaf:
        """One axis of ranks; below it, the next."""
        if not levels:
            return RankLeaf(values, reach, where)
        (recipe, ranks), below = levels[0], levels[1:]
        parts = split_values(values, recipe, ranks, terms)
        reached = reaches(values, recipe, ranks) if self.draws else [[] for _ in range(ranks)]
        made = []
        for rank, (part, more) in enumerate(zip(parts, reached, strict=True)):
            here = f"{where}, {rank} of {ranks}" if where else f"rank {rank} of {ranks}"
            made.append(self._taken_apart(part, below, terms, (*reach, *more), here))
        return RankAxis(recipe, values, tuple(made))

    def _folded(
        self, tree: RankAxis | RankLeaf, results: Iterator[dict[str, Any]], terms: Terms
    ) -> dict[str, Any]:
        if isinstance(tree, RankLeaf):
            return next(results)
        below = [self._folded(part, results, terms) for part in tree.below]
        return self.together(below, tree.recipe, tree.values, terms)

    def together(
        self, results: list[dict[str, Any]], recipe: Recipe, values: Values, terms: Terms
    ) -> dict[str, Any]:
        """What the results of the ranks are together, as the recipe says."""
        first = results[0]
        for rank, other in enumerate(results):
            if other.keys() != first.keys():
                counts = f"{len(other)} results, rank 0 gives {len(first)}"
                raise RankError(f"rank {rank} of {len(results)} gives {counts}")
        places = {name_of(place): place for place in self.written}
        placed = {name: recipe.placement(place) for name, place in places.items()}
        wholes = {name_of(place): values[place] for place in self.written}
        rules = iter(recipe.outputs)
        together: dict[str, Any] = {}
        for path, value in first.items():
            if not isinstance(value, torch.Tensor):
                together[path] = agreed_object(path, [result[path] for result in results])
                continue
            parts = [result[path] for result in results]
            name = path.removesuffix(AFTER)
            try:
                if name == path:
                    rule = next(rules, None)
                    if rule is None:
                        break
                    together[path] = join(parts, rule, terms=terms)
                    if isinstance(rule, Shard):
                        self.cuts[path] = RankCut.of(parts, rule.dim)
                else:
                    root = next(key for key in placed if name == key or name.startswith(f"{key}["))
                    whole = dict(leaves(wholes[root], root))[name]
                    if placed[root] == Replicate(own=True):
                        self.own[path] = Own(places[root], [part.detach() for part in parts])
                    together[path] = join(parts, placed[root], terms=terms, shape=whole.shape)
            except Exception as error:
                shapes = ", ".join(str(list(part.shape)) for part in parts)
                reason = f"{path}: the parts, of shapes {shapes}, cannot be put together"
                raise RankError(f"{reason}: {in_one_line(error)}") from error
        outputs = sum(isinstance(first[path], torch.Tensor) for path in first if AFTER not in path)
        if outputs != len(recipe.outputs):
            message = f"the rule tells of {len(recipe.outputs)} results, the operator gives"
            raise RankError(f"{message} {outputs}")
        return together

    @contextlib.contextmanager
    def drawing(self, reach: list[Reach]) -> Iterator[None]:
        """Let a rank draw its part of what the whole drew."""
        if self.draws is not None:
            self._streams.restore()
        if self.draws is None:
            yield
        elif self.draws.kept is None:
            with self.draws.keep():
                yield
        else:
            with self.draws.pinned(reach):
                yield

    # --- backward --------------------------------------------------------------------------------

    def _differentiate(
        self, live: dict[str, Any], given: Values, terms: Terms, cotangents: int, seen: OperatorRun
    ) -> None:
        outputs = {
            path: value
            for path, value in live.items()
            if isinstance(value, torch.Tensor) and value.requires_grad
        }
        targets = {
            f"{GRADIENT}{path}": tensor
            for place, value in given.items()
            for path, tensor in leaves(value, name_of(place))
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad
        }
        if not outputs or not targets:
            return
        claimed = self.claimed(targets)
        try:
            for turn in range(cotangents):
                terms.turn, terms.full = turn, False
                upstream = [self._cotangent(path, outputs[path], turn) for path in outputs]
                keep = turn + 1 < cotangents or bool(claimed)
                found = _find_gradients(outputs, targets, upstream, keep=keep)
                if claimed:
                    terms.full = True
                    found |= _find_gradients(outputs, claimed, upstream, keep=True)
                seen.gradients.append(found)
        except Exception as error:  # noqa: BLE001  (becomes a finding)
            seen.gradient_error = error

    def claimed(self, targets: dict[str, Tensor]) -> dict[str, Tensor]:
        """Arguments whose gradient each rank claims to have, where results are had by all.

        There each rank goes back from all of the cotangent, not from a share of it.
        """
        places: set[str] = set()
        for recipe, _ in self.levels:
            if not any(isinstance(rule, Replicate) for rule in recipe.outputs):
                continue
            places |= {
                name_of(place)
                for place, placement in recipe.inputs
                if isinstance(placement, Replicate) and not placement.summed
            }
        if not places:
            return {}
        return {
            path: tensor
            for path, tensor in targets.items()
            if any(path.startswith(f"{GRADIENT}{place}") for place in places)
        }

    def _cotangent(self, path: str, output: Tensor, turn: int) -> Tensor:
        """The same numbers on both sides and in every run."""
        drawn = self._cotangents.get((path, turn))
        if drawn is None or drawn.shape != output.shape:
            precision = self.precisions.setdefault(path, output.dtype)
            place = list(self.precisions).index(path)
            generator = torch.Generator("cpu").manual_seed(self.seed * 7919 + 97 * place + turn)
            dtype = torch.complex64 if precision.is_complex else torch.float32
            drawn = torch.randn(output.shape, generator=generator, dtype=dtype).to(precision)
            self._cotangents[path, turn] = drawn
        return drawn.to(output.device, output.dtype)


def _find_gradients(
    outputs: dict[str, Tensor], targets: dict[str, Tensor], upstream: list[Tensor], *, keep: bool
) -> dict[str, Tensor | None]:
    found = torch.autograd.grad(
        list(outputs.values()),
        list(targets.values()),
        upstream,
        retain_graph=keep,
        allow_unused=True,
    )
    return dict(zip(targets, found, strict=True))


def _differ(after: Any, before: Any) -> bool:
    pairs = zip(tensors_in(after), tensors_in(before), strict=True)
    return any(not (torch.equal(a, b) or bitwise_equal(a, b)) for a, b in pairs)
