"""What each element of a result is the sum of, found by calling a program with other values.

Where a result is linear in an operand (what moves values, sums, pools by the mean, interpolates,
and every gradient in the gradient that it gets), each of its elements is a sum of elements of the
operand with factors. Calls with one element and zeros give them exactly. If each is one element, a
few calls with numbered elements do.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import torch

from paritas.core.numerics.criterion import unit_roundoff

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paritas.core.diagnosis.place_runs import PlaceRuns
    from paritas.core.time_limit import TimeLimit

    Ask = Callable[[Tensor], Tensor | None]

# Operands of up to so many elements are asked one by one; of larger ones, some elements are.
_MOST_COLUMNS = 384
# Rows times columns: what is held at once.
_MOST_ENTRIES = 1 << 22
_ROUNDINGS = 200.0
# Two factors are the same up to this share.
SAME_FACTOR = 1e-3
# Elements are numbered by two digits of this base: the numbers are exact in float32.
_BASE = 1 << 10


@dataclasses.dataclass(frozen=True, eq=False)
class Terms:
    """The terms of a result: which elements of an operand it adds up, with which factors.

    Attributes:
        rows: of each term, the element of the result.
        columns: the element of the operand.
        factors: in float64.
        rest: the result if the operand is zero, in one line.
        result_shape: of the result.
        shape: of the operand.
        asked: the elements of the operand that were asked; None if all were.
    """

    rows: Tensor
    columns: Tensor
    factors: Tensor
    rest: Tensor
    result_shape: tuple[int, ...]
    shape: tuple[int, ...]
    asked: Tensor | None = None

    @functools.cached_property
    def keys(self) -> Tensor:
        """A number for each term, in ascending order."""
        return self.rows * math.prod(self.shape) + self.columns

    @functools.cached_property
    def counts(self) -> Tensor:
        """The number of terms of each element of the result."""
        return torch.bincount(self.rows, minlength=self.rest.numel())

    def restrict(self, requested: Tensor) -> Terms:
        """The terms in some elements of the operand only."""
        use = torch.isin(self.columns, requested)
        picked = {name: getattr(self, name)[use] for name in ("rows", "columns", "factors")}
        return dataclasses.replace(self, asked=requested, **picked)

    def is_same_as(self, other: Terms) -> bool:
        """Whether all terms are the same."""
        return torch.equal(self.keys, other.keys) and are_same(self.factors, other.factors)


def are_same(factors: Tensor, others: Tensor | float) -> bool:
    """Whether two lists of factors agree."""
    return bool(same_factors(factors, others).all())


def same_factors(factors: Tensor, others: Tensor | float) -> Tensor:
    """Which factors agree with others."""
    return (factors - others).abs() <= SAME_FACTOR * factors.abs()


def read_terms(
    runs: PlaceRuns,
    number: int,
    operands: Sequence[Tensor],
    limit: TimeLimit,
    *,
    of_candidate: bool,
) -> Terms | None:
    """The terms of a program in one operand; None if it is not linear in it, or takes too long.

    Args:
        number: the place of the operand.
        operands: the values of the others.
        limit: the time for it.
    """
    operand = operands[number]
    program = runs.candidate if of_candidate else runs.reference
    if not _can_be_read(operand, runs.given):
        return None

    def ask(value: Tensor) -> Tensor | None:
        if limit.is_over:
            return None
        changed = [*operands]
        changed[number] = value.to(operand.dtype).view(operand.shape)
        result = program(changed)
        return None if result is None else result.detach().to("cpu", torch.float64).flatten()

    rest = ask(torch.zeros(operand.numel()))
    if rest is None or not bool(torch.isfinite(rest).all()):
        return None
    size = _size_of(operand)
    noise = _ROUNDINGS * unit_roundoff(operand.dtype)
    shapes = tuple(runs.given.shape), tuple(operand.shape)
    reader = _Reader(ask, rest, size, noise, shapes)
    if not reader.is_linear:
        return None
    return reader.read_numbered() or reader.read_one_by_one()


def _can_be_read(operand: Tensor, result: Tensor) -> bool:
    exact = (torch.float32, torch.float64)
    return operand.dtype in exact and result.dtype in exact and operand.numel() > 0


def _size_of(operand: Tensor) -> float:
    """A power of two near the usual size, so that factors are exact."""
    finite = operand.detach()[torch.isfinite(operand)].double()
    size = float(finite.square().mean().sqrt()) if finite.numel() else 0.0
    return 2.0 ** round(math.log2(size)) if size > 0 else 1.0


@dataclasses.dataclass(frozen=True, eq=False)
class _Reader:
    """Asks one program for its terms in one operand.

    Attributes:
        ask: the result for a value of the operand.
        rest: that for zeros.
        size: of the values that are asked.
        noise: of a result, as a share of its size.
        shapes: of the result and of the operand.
    """

    ask: Ask
    rest: Tensor
    size: float
    noise: float
    shapes: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def count(self) -> int:
        """The number of elements of the operand."""
        return math.prod(self.shapes[1])

    @functools.cached_property
    def is_linear(self) -> bool:
        """Whether the effects of two values add up, and that of a multiple is a multiple."""
        draw = torch.Generator().manual_seed(0)
        first, second = (self.size * torch.randn(self.count, generator=draw) for _ in range(2))
        effects = [self._effect(number) for number in (first, second, first - 3 * second)]
        if any(effect is None or not bool(torch.isfinite(effect).all()) for effect in effects):
            return False
        left, right, both = (effect for effect in effects if effect is not None)
        scale = torch.stack([left, right, both, self.rest]).abs().amax()
        return bool(((left - 3 * right - both).abs() <= 4 * self.noise * scale).all())

    def _effect(self, value: Tensor) -> Tensor | None:
        result = self.ask(value)
        return None if result is None else result - self.rest

    def read_numbered(self) -> Terms | None:
        """The terms, if each element of the result is one of the operand with a factor."""
        numbers = torch.arange(self.count)
        draw = torch.Generator().manual_seed(1)
        check = self.size * torch.randn(self.count, generator=draw)
        digits = (numbers % _BASE + 1, numbers // _BASE % _BASE + 1, numbers // _BASE**2 + 1)
        requested = [
            torch.ones(self.count),
            *digits[: 1 + (self.count > _BASE) + (self.count > _BASE**2)],
        ]
        effects = [self._effect(self.size * number) for number in requested]
        if any(effect is None for effect in effects):
            return None
        ones, *parts = (effect for effect in effects if effect is not None)
        factors = ones / self.size
        largest = max(float(factors.abs().max()), float(self.rest.abs().max()) / self.size)
        is_read = factors.abs() > self.noise * largest * _BASE
        places = torch.zeros_like(numbers[:1]).expand(len(ones)).clone()
        for position, part in enumerate(parts):
            digit = (part[is_read] / ones[is_read]).round().long() - 1
            places[is_read] += digit * _BASE**position
        if bool(((places < 0) | (places >= self.count)).any()):
            return None
        after = self._effect(check)
        if after is None:
            return None
        predicted = torch.where(is_read, factors * check.double()[places], 0.0)
        if bool(((after - predicted).abs() > 4 * self.noise * largest * self.size).any()):
            return None
        rows = is_read.nonzero().flatten()
        return Terms(rows, places[rows], factors[rows], self.rest, *self.shapes)

    def read_one_by_one(self) -> Terms | None:
        """The terms of all elements of a small operand, or of some of a larger one."""
        requested = self._columns()
        if requested.numel() * self.rest.numel() > _MOST_ENTRIES:
            return None
        columns = []
        for column in requested.tolist():
            value = torch.zeros(self.count)
            value[column] = self.size
            effect = self._effect(value)
            if effect is None:
                return None
            columns.append(effect / self.size)
        matrix = torch.stack(columns, 1)
        floor = self.noise * max(
            float(matrix.abs().max()), float(self.rest.abs().max()) / self.size
        )
        rows, places = (matrix.abs() > floor).nonzero(as_tuple=True)
        is_complete = len(requested) == self.count
        return Terms(
            rows,
            requested[places],
            matrix[rows, places],
            self.rest,
            *self.shapes,
            None if is_complete else requested,
        )

    def _columns(self) -> Tensor:
        """The elements that are asked: all, or lines along each axis and some others."""
        if self.count <= _MOST_COLUMNS:
            return torch.arange(self.count)
        draw = torch.Generator().manual_seed(2)
        shape = self.shapes[1]
        numbers = torch.arange(self.count).view(shape)
        most = _MOST_COLUMNS // 2 // max(1, len(shape))
        chosen = [torch.randperm(self.count, generator=draw)[: _MOST_COLUMNS // 2]]
        for axis, size in enumerate(shape):
            lines = numbers.movedim(axis, -1).reshape(-1, size)
            chosen.append(lines[int(torch.randint(len(lines), (), generator=draw))][:most])
        columns: Tensor = torch.cat(chosen).unique()
        return columns
