"""Runs of a whole model that look at its blocks: recording their calls, and moving their values.

While a model runs natively, hooks record what each call of a block gets and returns and, in the
backward pass, the gradients that flow through it. What waits to be checked waits in the memory of
the host.
"""

from __future__ import annotations

import dataclasses
import weakref
import zlib
from typing import TYPE_CHECKING, Any, Self

import torch

from paritas.core.execution.module_hooks import ModuleHooks
from paritas.core.execution.observation import INPUT, OUTPUT, Observation
from paritas.core.execution.saved_state import Copier, RandomState, Surroundings
from paritas.core.execution.subjects import Inputs
from paritas.core.numerics.automatic import MOST_RUNS
from paritas.core.numerics.bits import is_inexact
from paritas.core.numerics.contents import contents, leaves, map_leaves
from paritas.core.numerics.flattening import flattened, is_dense
from paritas.core.numerics.judge_evidence import NoEvidence
from paritas.core.numerics.metrics import promotable
from paritas.core.results.items import Item, gradient, output

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor, nn

# --- Values that wait -----------------------------------------------------------------------------


class Parked:
    """A copy of a tensor that waits on the host until it is needed on its device."""

    __slots__ = ("_device", "_shape", "_value")

    def __init__(self, tensor: Tensor) -> None:
        """Copy it; an expanded tensor is copied once and expanded again."""
        self._device, self._shape = tensor.device, tensor.shape
        plain = tensor.detach()
        if is_dense(plain):
            for axis, (size, stride) in enumerate(zip(plain.shape, plain.stride(), strict=True)):
                plain = plain.narrow(axis, 0, 1) if stride == 0 and size > 1 else plain
        copied = Copier().copy_tensor(plain) if not is_dense(plain) else plain.clone()
        self._value = copied.to("cpu").requires_grad_(tensor.requires_grad)

    def on_host(self) -> Tensor:
        """The copy itself; an expanded axis has one element."""
        return self._value

    def back(self) -> Tensor:
        """The tensor, on its device; it may share memory with this copy."""
        value = self._value.detach().to(self._device)
        value = value.expand(self._shape) if value.shape != self._shape else value
        return value.requires_grad_(self._value.requires_grad)


class Garage:
    """Parks tensors; a tensor that many blocks get, such as a mask, is parked once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Parked]] = {}

    def park(self, tensor: Tensor) -> Parked:
        """The copy of a tensor as it is now."""
        version = version_of(tensor)
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == version >= 0:
            return known[2]
        parked = Parked(tensor)
        self._known[id(tensor)] = weakref.ref(tensor), version, parked
        return parked


def bring_back(tree: Any) -> Any:
    """Nested values with parked tensors on their devices."""
    return map_leaves(tree, lambda leaf: leaf.back() if isinstance(leaf, Parked) else leaf)


def left_on_host(tree: Any) -> Any:
    """Nested values with parked tensors as they wait, to look at the structure only."""
    return map_leaves(tree, lambda leaf: leaf.on_host() if isinstance(leaf, Parked) else leaf)


def version_of(tensor: Tensor) -> int:
    """The number of in-place writes to a tensor; -1 for an inference tensor, which counts none."""
    return -1 if tensor.is_inference() else int(tensor._version)  # noqa: SLF001


# --- Recording ------------------------------------------------------------------------------------


@dataclasses.dataclass
class BlockCall:
    """One call of a block in the reference's own run.

    Attributes:
        name: the block.
        number: which of its calls, from 0.
        args: its parked positional arguments.
        kwargs: its parked keyword arguments.
        around: the modes of torch around it.
        draws: the state of the random generators before and after.
        buffers: its parked buffers before, if it was called before.
        result: what it returned, parked.
        upstream: output -> its upstream gradient, parked.
        returned: (0 for positional or 1 for keyword, path) -> the gradient that it computes for
            that argument, parked; known once it has run alone.
    """

    name: str
    number: int
    args: list[Any]
    kwargs: dict[str, Any]
    around: Surroundings
    draws: tuple[RandomState, RandomState]
    buffers: dict[str, Any]
    result: Any = None
    upstream: dict[Item, Parked] = dataclasses.field(default_factory=dict)
    returned: dict[tuple[int, str], Parked] = dataclasses.field(default_factory=dict)

    @property
    def is_random(self) -> bool:
        """Whether it drew random numbers."""
        return not self.draws[0].same_torch(self.draws[1])

    def keep_returned(self, native: Observation) -> None:
        """Keep the gradients of its arguments, from a run of the block alone."""
        for place, tree in enumerate((self.args, self.kwargs)):
            for path, _ in leaves(tree):
                value = native.gradients.get(gradient(f"{INPUT}{path}"))
                if value is not None:
                    self.returned[place, path] = Parked(value)

    def inputs(self) -> Inputs:
        """Its inputs, on their devices."""
        return Inputs(tuple(bring_back(self.args)), bring_back(self.kwargs))


# What is remembered about a block that another one calls.
_INSIDE = object()


class BlockHooks(ModuleHooks):
    """Hooks around the calls of blocks, for one run of the model.

    A block that another one calls is a part of that one: nothing happens around its call.
    """

    def enter_call(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Enter an outermost block."""
        if self.open_calls():
            return _INSIDE, args, kwargs
        return self.enter_block(name, module, args, kwargs)

    def leave_call(
        self, name: str, entered: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        """Leave an outermost block."""
        return None if entered is _INSIDE else self.leave_block(name, entered, args, kwargs, result)

    def enter_block(
        self, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """What to remember about a call, and the arguments to call the block with."""
        raise NotImplementedError

    def leave_block(
        self, name: str, opened: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        """The result to return instead; None for its own."""
        raise NotImplementedError


class Recorder(BlockHooks):
    """Records the calls of blocks in the first run that it is around.

    Tensors are kept by `keep` and `keep_gradient`, which park them on the host.

    Attributes:
        calls: block -> its calls, in order.
        uncut: block -> why the model cannot be cut there.
    """

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        """Record these blocks."""
        super().__init__(blocks)
        self.calls: dict[str, list[BlockCall]] = {name: [] for name in blocks}
        self.uncut: dict[str, str] = {}
        self._garage = Garage()
        self._is_done = False

    def __enter__(self) -> Self:
        # The backward pass may call blocks again, to recompute activations.
        return self if self._is_done else super().__enter__()

    def __exit__(self, *error: object) -> None:
        self._is_done = True
        super().__exit__(*error)

    def enter_block(
        self, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Copy the arguments."""
        number = len(self.calls[name])
        now = RandomState.of_torch()
        call = BlockCall(
            name=name,
            number=number,
            args=self.keep_tree(list(args)),
            kwargs=self.keep_tree(kwargs),
            around=Surroundings.now(),
            draws=(now, now),
            buffers=self.keep_tree(dict(block.named_buffers())) if number else {},
        )
        given = args, kwargs
        return (call, given, _marks(*given)), *given

    def leave_block(
        self, name: str, opened: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        """Copy the result, and watch for its upstream gradients."""
        call, given, marks = opened
        now = _marks(*given)
        written = [path for path in {**marks, **now} if marks.get(path) != now.get(path)]
        if written:
            self.uncut[name] = f"it writes to its argument {written[0]}"
        # A tensor that goes through unchanged would show the gradients of both its uses.
        own = {id(leaf) for tree in given for _, leaf in leaves(tree)}
        result = _map_tuples(result, lambda leaf: leaf.view_as(leaf) if id(leaf) in own else leaf)
        call.result = self.keep_tree(result)
        call.draws = call.draws[0], RandomState.of_torch()
        watched: set[int] = set()
        for path, leaf in self.results(result):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and id(leaf) not in watched:
                watched.add(id(leaf))
                leaf.register_hook(self._keep_in(call.upstream, output(path)))
        self.calls[name].append(call)
        return result

    def results(self, result: Any) -> Iterable[tuple[str, Any]]:
        """The results whose upstream gradients are kept, by path."""
        return flattened(result, OUTPUT).leaves.items()

    def keep(self, tensor: Tensor) -> Any:
        """A copy of a tensor as it is now."""
        return self._garage.park(tensor)

    def keep_gradient(self, value: Tensor) -> Any:
        """A copy of a gradient, which no other block gets."""
        return Parked(value)

    def keep_tree(self, tree: Any) -> Any:
        """A copy of nested values; objects of unknown classes are copied as a whole."""
        return map_leaves(
            tree,
            lambda leaf: (
                self.keep(leaf) if isinstance(leaf, torch.Tensor) else Copier().copy_tree(leaf)
            ),
        )

    def _keep_in(self, table: dict[Any, Any], key: Any) -> Callable[[Tensor], None]:
        def keep(value: Tensor) -> None:
            table[key] = self.keep_gradient(value)

        return keep


class TrainingRecorder(Recorder):
    """Records also the gradients that each call sends back to its own arguments.

    Each tensor among the arguments is replaced by a view: its gradient is what this call alone
    sends back, without that of other readers of the same tensor.
    """

    def enter_block(
        self, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Copy the arguments, and watch for their gradients."""
        (call, _, _), args, kwargs = super().enter_block(name, block, args, kwargs)
        places = {
            id(leaf): (place, path)
            for place, tree in reversed([*enumerate((list(args), kwargs))])
            for path, leaf in reversed([*leaves(tree)])
        }
        views: dict[int, Tensor] = {}

        def other(leaf: Tensor) -> Tensor:
            if not (leaf.requires_grad and torch.is_grad_enabled()):
                return leaf
            if id(leaf) not in views:
                view = views[id(leaf)] = leaf.view_as(leaf)
                view.register_hook(self._keep_in(call.returned, places[id(leaf)]))
            return views[id(leaf)]

        given = with_other_tensors(args, kwargs, other)
        return (call, given, _marks(*given)), *given

    def results(self, result: Any) -> Iterable[tuple[str, Any]]:
        """Each tensor as it is, also if it has parts, as a distributed one."""
        return leaves(result, OUTPUT)


def with_other_tensors(
    args: tuple[Any, ...], kwargs: dict[str, Any], other: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with other tensors; lists and objects stay the same: a block may write to them."""
    return (
        tuple(_map_tuples(value, other) for value in args),
        {key: _map_tuples(value, other) for key, value in kwargs.items()},
    )


def _map_tuples(value: Any, other: Callable[[Any], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return other(value)
    if type(value) is not tuple:
        return value
    mapped = tuple(_map_tuples(one, other) for one in value)
    same = all(new is old for new, old in zip(mapped, value, strict=True))
    return value if same else mapped


def _marks(args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What changes if a block writes to its arguments: values, objects and their contents."""
    marks: dict[str, Any] = {}
    for tree in (list(args), kwargs):
        for path, leaf in contents(tree, INPUT):
            marks[path] = (
                (id(leaf), version_of(leaf)) if isinstance(leaf, torch.Tensor) else repr(leaf)[:200]
            )
    return marks


# --- The noise of all blocks together -------------------------------------------------------------


class Shaken(BlockHooks):
    """Moves what blocks get and return, by as much as rounding moves it.

    The arguments of a block move by a random part of their last bit, its results by the error that
    was measured for this block alone, with random signs. What follows then rounds differently in
    every run.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        errors: Mapping[tuple[str, int], Mapping[str, Parked]],
        seed: int,
    ) -> None:
        """`errors` are the errors of results, by block and call and then by path."""
        super().__init__(blocks)
        self.errors = errors
        self.seed = seed
        self._calls: dict[str, int] = {}

    def enter_block(
        self, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Move the arguments."""
        number = self._calls.get(name, 0)
        self._calls[name] = number + 1
        seed = zlib.crc32(f"{self.seed} {name} {number}".encode())
        moved: dict[int, Tensor] = {}

        def move(leaf: Any) -> Any:
            if id(leaf) not in moved:
                moved[id(leaf)] = _moved(leaf, None, seed + len(moved))
            return moved[id(leaf)]

        return (number, seed), *with_other_tensors(args, kwargs, move)

    def leave_block(
        self, name: str, opened: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        """Move the results."""
        number, seed = opened
        known = self.errors.get((name, number), {})
        errors = {
            id(leaf): known[path]
            for path, leaf in flattened(result, OUTPUT).leaves.items()
            if path in known
        }
        return map_leaves(result, lambda leaf: _moved(leaf, errors.get(id(leaf)), seed + 7919))


def _moved(leaf: Any, error: Parked | None, seed: int) -> Any:
    """A real tensor moved at random; other values stay the same."""
    if not is_inexact(leaf) or leaf.is_complex() or not is_dense(leaf):
        return leaf
    generator = torch.Generator(leaf.device).manual_seed(seed)

    def uniform() -> Tensor:
        return torch.rand(leaf.shape, generator=generator, device=leaf.device, dtype=torch.float64)

    with torch.no_grad():
        step = torch.finfo(leaf.dtype).eps * leaf.detach().abs().double()
        noise = (uniform() - 0.5) * step
        if error is not None:
            size = error.back().double()
            noise += torch.where(uniform() < 0.5, size, -size)  # noqa: PLR2004
        target = (leaf.detach().double() + noise).to(leaf.dtype)
        difference = torch.nan_to_num(target - leaf.detach(), 0.0, 0.0, 0.0)
    return leaf + difference


class ComposedNoise:
    """How far the noise of all blocks moves the results of the whole model.

    The reference runs natively a few more times. Each run moves the values between its blocks, so
    the spread of the results is what the noise of the blocks becomes on its way through the model.
    """

    def __init__(
        self,
        run: Callable[[int], Observation],
        base: Observation,
        seed: int,
        tell: Callable[[str], None],
    ) -> None:
        """Measure on demand.

        Args:
            run: runs the reference natively under `Shaken` with a seed.
            base: the plain native run.
            seed: of the first run.
            tell: called before each run.
        """
        self._run_once = run
        self._base, self._seed, self._tell = base, seed, tell
        self.runs = 0
        self._is_broken = False
        self._squares: dict[Item, Tensor] = {}
        self._discrete: dict[Item, list[Any]] = {}

    def around(self, base: Observation) -> ComposedNoise:
        """The same noise measured again, around another plain run."""
        return ComposedNoise(self._run_once, base, self._seed, self._tell)

    def spread(self, item: Item, runs: int) -> Tensor | None:
        """The rms deviation of an item over the runs, or None if there are none."""
        self._run(runs)
        squares = self._squares.get(item)
        return None if squares is None or self._is_broken else (squares / self.runs).sqrt()

    def values(self, item: Item, runs: int) -> list[Any]:
        """The values of a discrete item in the runs."""
        self._run(runs)
        return self._discrete.get(item, [])

    def _run(self, runs: int) -> None:
        while self.runs < runs and not self._is_broken:
            self._tell("measuring the noise of the whole model")
            seen = self._run_once(self._seed + self.runs)
            if seen.error is not None or seen.gradient_error is not None:
                self._is_broken = True
                return
            self.runs += 1
            for item, still in self._base.items():
                self._add(item, still, seen.value(item))

    def _add(self, item: Item, still: Any, moved: Any) -> None:
        both = isinstance(still, torch.Tensor) and isinstance(moved, torch.Tensor)
        if not both or still.shape != moved.shape:
            return
        if not is_inexact(still):
            self._discrete.setdefault(item, []).append(moved)
            return
        square = (moved.double() - still.double()).square().nan_to_num(0.0, 0.0, 0.0)
        known = self._squares.get(item)
        self._squares[item] = square if known is None else known.add_(square)


class ComposedEvidence(NoEvidence):
    """The composed noise of one item of the whole model."""

    def __init__(self, noise: ComposedNoise, item: Item, native: Any, unit: float) -> None:
        self.noise = noise
        self.item = item
        self.native = native
        self.unit = unit
        self.is_gradient = item.kind.is_gradient

    def spread(self, unit: float, runs: int) -> Tensor | None:
        """The spread over native runs in which the blocks round differently."""
        return self.noise.spread(self.item, runs)

    def runs_made(self, unit: float) -> int:
        """The number of these runs so far."""
        return self.noise.runs

    def undecided(self, candidate: Tensor, unit: float) -> Tensor | None:
        """Where one of these runs gives the candidate's value."""
        if not isinstance(self.native, torch.Tensor) or self.native.shape != candidate.shape:
            return None
        reference, candidate = promotable(self.native, candidate.to(self.native.device))
        reached = torch.zeros_like(reference, dtype=torch.bool)
        contested = reference != candidate
        for runs in range(1, MOST_RUNS + 1):
            for value in self.noise.values(self.item, runs)[runs - 1 :]:
                if isinstance(value, torch.Tensor) and value.shape == reference.shape:
                    reached |= torch.eq(*promotable(value, candidate))
            if bool(reached[contested].all()):
                break
        return reached & contested
