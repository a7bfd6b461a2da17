"""The noise of all blocks together: what it becomes on its way through the whole model."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.execution.block_runs import BlockHooks, Parked
from paritas.core.execution.observation import OUTPUT, Observation
from paritas.core.numerics.automatic import MOST_RUNS
from paritas.core.numerics.bits import is_inexact
from paritas.core.numerics.contents import map_arguments, map_leaves
from paritas.core.numerics.flattening import flatten_value, is_dense
from paritas.core.numerics.judge_evidence import NoEvidence
from paritas.core.numerics.metrics import promotable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    from paritas.core.results.items import Item


def measure_error(native: Any, arbiter: Any) -> Parked | None:
    """The error of a result of a block, element by element; None unless both are inexact."""
    if not is_inexact(native) or not is_inexact(arbiter) or native.shape != arbiter.shape:
        return None
    error = (native.to(arbiter.dtype) - arbiter).abs().nan_to_num(0.0, 0.0, 0.0)
    return Parked(error.float())


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

        def move(_: str, leaf: Tensor) -> Any:
            if id(leaf) not in moved:
                moved[id(leaf)] = _move_leaf(leaf, None, seed + len(moved))
            return moved[id(leaf)]

        return (number, seed), *map_arguments(args, kwargs, move)

    def leave_block(
        self, name: str, opened: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        """Move the results."""
        number, seed = opened
        call_errors = self.errors.get((name, number), {})
        errors = {
            id(leaf): call_errors[path]
            for path, leaf in flatten_value(result, OUTPUT).leaves.items()
            if path in call_errors
        }
        return map_leaves(result, lambda leaf: _move_leaf(leaf, errors.get(id(leaf)), seed + 7919))


def _move_leaf(leaf: Any, error: Parked | None, seed: int) -> Any:
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
    The error that a piece makes in the gradient of a parameter comes on top: these runs move
    nothing in the backward pass.
    """

    def __init__(
        self,
        run: Callable[[int], Observation],
        base: Observation,
        seed: int,
        tell: Callable[[str], None],
        errors: Mapping[Item, Tensor],
    ) -> None:
        """Measure on demand.

        Args:
            run: runs the reference natively under `Shaken` with a seed.
            base: the plain native run.
            seed: of the first run.
            tell: called before each run.
            errors: gradient -> the square of its error in the pieces that compute it.
        """
        self._run_once = run
        self._base, self._seed, self._tell = base, seed, tell
        self._errors = errors
        self.runs = 0
        self._is_broken = False
        self._squares: dict[Item, Tensor] = {}
        self._discrete: dict[Item, list[Any]] = {}

    def around(self, base: Observation) -> ComposedNoise:
        """The same noise measured again, around another plain run."""
        return ComposedNoise(self._run_once, base, self._seed, self._tell, self._errors)

    def spread(self, item: Item, runs: int) -> Tensor | None:
        """The rms deviation of an item over the runs, or None if there are none."""
        self._run(runs)
        squares = self._squares.get(item)
        if squares is None or self._is_broken:
            return None
        error = self._errors.get(item)
        own = error.to(squares.device) if error is not None and error.shape == squares.shape else 0
        return (squares / self.runs + own).sqrt()

    def values(self, item: Item, runs: int) -> list[Any]:
        """The values of a discrete item in the runs."""
        self._run(runs)
        return self._discrete.get(item, [])

    def _run(self, runs: int) -> None:
        while self.runs < runs and not self._is_broken:
            self._tell("measuring the noise of the whole model")
            once = self._run_once(self._seed + self.runs)
            if once.error is not None or once.gradient_error is not None:
                self._is_broken = True
                return
            self.runs += 1
            for item, still in self._base.items():
                self._add(item, still, once.value(item))

    def _add(self, item: Item, still: Any, moved: Any) -> None:
        both = isinstance(still, torch.Tensor) and isinstance(moved, torch.Tensor)
        if not both or still.shape != moved.shape:
            return
        if not is_inexact(still):
            self._discrete.setdefault(item, []).append(moved)
            return
        square = (moved.double() - still.double()).square().nan_to_num(0.0, 0.0, 0.0)
        square_sum = self._squares.get(item)
        self._squares[item] = square if square_sum is None else square_sum.add_(square)


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

    def find_undecided(self, candidate: Tensor, unit: float) -> Tensor | None:
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
