"""Both programs at a place, to be called again with other values."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.calls import is_same_tensor
from paritas.core.diagnosis.case import same
from paritas.core.numerics.metrics import bitwise_equal
from paritas.core.numerics.random_tensors import HUGE, redraw_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from paritas.core.diagnosis.calls import LiveCall
    from paritas.core.diagnosis.case import InnerValues

    Program = Callable[[Sequence[Tensor]], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class PlaceRuns:
    """The reference and the candidate at a place, as functions of the values that they read.

    Ask `is_faithful` before the candidate: what only fails together with its surroundings gives
    right results alone.

    Attributes:
        operands: the values that both read there.
        run_reference: its result for other operands of the same shapes and dtypes.
        make_candidate: prepares the candidate, which may have to be compiled first.
        expected: the reference's result for the operands.
        given: the candidate's result for the operands, in the whole program.
        reads_all: whether the candidate reads all operands. What it does not read it may compute
            by itself from the others.
        recall: the reference's call at the place with other operands, if its arguments are not the
            operands themselves.
        inner: the values on the candidate's way to its result for other operands, if they are seen.
        earlier: the operands of the run that this one repeats.
        remake_candidate: prepares the candidate for operands of other shapes; None if neither
            program can be prepared for them.
        settle: computes again those operands that follow from others, in the way the reference does
            before the place: with others, the candidate would compute something else.
    """

    operands: tuple[Tensor, ...]
    run_reference: Program
    make_candidate: Callable[[], Program]
    expected: Tensor
    given: Tensor
    reads_all: bool = True
    recall: Callable[[Sequence[Tensor]], LiveCall | None] | None = None
    inner: Callable[[Sequence[Tensor]], InnerValues] | None = None
    earlier: tuple[Tensor, ...] | None = None
    remake_candidate: Callable[[Sequence[Tensor]], Program] | None = None
    settle: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None = None

    @functools.cached_property
    def is_faithful(self) -> bool:
        """Whether both give at the place, alone and twice, what they gave in the whole program."""
        for _ in range(2):
            pair = self.both(self.operands)
            if pair is None or not (
                bitwise_equal(pair[0], self.expected) and bitwise_equal(pair[1], self.given)
            ):
                return False
        return not bool(same(self.expected, self.given).all())

    def reference(self, operands: Sequence[Tensor]) -> Tensor | None:
        """The reference's result; None if it cannot be called so."""
        return _run(self.run_reference, operands, self.expected)

    def candidate(self, operands: Sequence[Tensor]) -> Tensor | None:
        """The candidate's result; None if it cannot be called so."""
        return None if self._program is None else _run(self._program, operands, self.given)

    def both(self, operands: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
        """Both results; None if one of them cannot be computed."""
        right = self.reference(operands)
        wrong = None if right is None else self.candidate(operands)
        return None if right is None or wrong is None else (right, wrong)

    def with_operands(self, operands: tuple[Tensor, ...], pair: tuple[Tensor, Tensor]) -> PlaceRuns:
        """The same programs at the same place with other operands, which gave these results."""
        return dataclasses.replace(
            self, operands=operands, expected=pair[0], given=pair[1], earlier=self.operands
        )

    def vary(
        self, seed: int, *, growth: float = 1.0, held: Sequence[int] = ()
    ) -> tuple[Tensor, ...]:
        """Other operands of the same kind.

        Args:
            seed: see `vary_operands`.
            growth: likewise.
            held: the places of those that stay as they are.
        """
        varied = list(vary_operands(self.operands, seed, growth=growth))
        for position in held:
            varied[position] = self.operands[position]
        return self.settle_operands(varied)

    def settle_operands(self, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The operands, with those that follow from others."""
        if self.settle is None:
            return tuple(operands)
        with torch.no_grad():
            return tuple(self.settle([operand.detach() for operand in operands]))

    def both_anew(self, operands: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
        """Both results for operands of other shapes; None if the programs are for the first only.

        A program that was recorded, or compiled for fixed shapes, has lengths among its numbers.
        """
        if self.remake_candidate is None:
            return None
        right = _call(self.run_reference, operands, self.expected.dtype)
        make = functools.partial(self.remake_candidate, operands)
        program = None if right is None else _prepare(make)
        candidate_result = None if program is None else _call(program, operands, self.given.dtype)
        if right is None or candidate_result is None or right.shape != candidate_result.shape:
            return None
        return right, candidate_result

    def place_of(self, tensor: Tensor) -> int | None:
        """Where a value is among the operands; None if it is not clear."""
        places = [
            position
            for position, operand in enumerate(self.operands)
            if is_same_tensor(operand, tensor)
        ]
        return places[0] if len(places) == 1 else None

    @functools.cached_property
    def _program(self) -> Program | None:
        return _prepare(self.make_candidate)


def _prepare(make: Callable[[], Program]) -> Program | None:
    try:
        return make()
    except Exception:  # noqa: BLE001  (a backend raises what it likes; then nothing is asked)
        return None


def vary_operands(
    operands: Sequence[Tensor], seed: int, *, growth: float = 1.0
) -> tuple[Tensor, ...]:
    """Other values of the same kind: the same shapes, dtypes, signs and limits.

    What holds by chance for the values of one run (a maximum that one operand always has, a factor
    that is 1 everywhere) does not hold for these. Integers, masks and what is not finite stay:
    they say which elements are read.

    Args:
        seed: the first keeps the size of the values, and tensors of two values, such as masks. With
            others, each operand is also smaller as a whole, where a limit has no effect.
        growth: how many times larger they are, where a rounding to whole numbers shows. Small ones
            become so many units large.
    """
    draw = torch.Generator().manual_seed(seed)
    varied = (
        redraw_values(operand, draw, keeps_choices=seed <= 1, shrinks=seed > 1)
        for operand in operands
    )
    return tuple(operand if growth == 1 else _enlarge(operand, growth) for operand in varied)


def _enlarge(operand: Tensor, growth: float) -> Tensor:
    if not operand.is_floating_point():
        return operand
    sizes = operand.detach().abs()
    is_usual = sizes < HUGE
    largest = float(sizes[is_usual].max()) if bool(is_usual.any()) else 0.0
    factor = growth / min(largest, 1.0) if largest else growth
    return torch.where(is_usual, factor * operand, operand)


# So many of the different lengths are made longer, each by itself.
_MOST_LENGTHS = 3


def lengthen_operands(operands: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """The operands twice as long along all axes of the same length; the shortest length first.

    What is true for two rows only (the other one, the last one, all but one) is not true for four,
    while halves, pairs and tiles stay what they are. No operand gets fewer elements: code for fixed
    shapes would read beyond their ends.
    """
    lengths = sorted({size for operand in operands for size in operand.shape if size > 1})
    for length in lengths[:_MOST_LENGTHS]:
        yield tuple(
            operand.repeat([2 if size == length else 1 for size in operand.shape])
            for operand in operands
        )


def _run(program: Program, operands: Sequence[Tensor], like: Tensor) -> Tensor | None:
    result = _call(program, operands, like.dtype)
    return None if result is None or result.shape != like.shape else result


def _call(program: Program, operands: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """The result of a program, if it can be computed and has this dtype."""
    copies = [
        operand.detach().clone() for operand in operands
    ]  # a program may write to what it reads
    try:
        with torch.no_grad():
            result = program(copies)
    except Exception:  # noqa: BLE001  (not every value can be computed with: such a run says nothing)
        return None
    is_alike = isinstance(result, torch.Tensor) and result.dtype is dtype
    return result.detach() if is_alike else None
