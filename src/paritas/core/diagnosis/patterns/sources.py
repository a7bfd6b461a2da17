"""Operators that only move elements: which element of which operand each result is."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

import torch

from paritas.core.diagnosis.calls import UNUSABLE
from paritas.core.diagnosis.case import first_supported, near, supported_pattern, unravel, widen
from paritas.core.diagnosis.dependence import name_operands
from paritas.core.diagnosis.repetitions import RepeatedCall, split_runs
from paritas.core.diagnosis.second_look import holds_again
from paritas.core.numerics.criterion import MAX_Z
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from paritas.core.diagnosis.calls import LiveCall
    from paritas.core.diagnosis.case import Case
    from paritas.core.results.findings import Pattern

_MOST_ELEMENTS = 1 << 18
# Fewer different values than this may be those of some element by chance.
_FEWEST_VALUES = 2
# Values that occur more than once, or are this much of the noise apart, do not say where they come
# from.
_DISTINCT = 0.9
_APART = 4.0
# So many places on either side are tried along an axis.
_FARTHEST = 8
# The place of what is no element of an operand, such as padding.
_NOWHERE = -1


def propose_sources(case: Case) -> list[Pattern]:
    """`wrong index` and others: elements of the operands that were taken from other places."""
    call = case.context.call
    if call is None or case.is_exact or not case.is_beyond_noise or case.given.is_complex():
        return []
    others: Sequence[Case] = case.repeated
    if isinstance(call, RepeatedCall):
        case, *others = split_runs(case, call)
        call = call.first
    pool = _Pool.of(case, call)
    places = None if pool is None else _right_places(case, call, pool)
    if pool is None or places is None:
        return []
    return first_supported(_taken_elsewhere(case, pool, places, others))


@dataclasses.dataclass(frozen=True)
class _Pool:
    """All elements of the floating-point operands of a call, one after the other."""

    operands: tuple[Tensor, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, case: Case, call: LiveCall) -> _Pool | None:
        operands = tuple(call.floating)
        if not 1 < sum(operand.numel() for operand in operands) <= _MOST_ELEMENTS:
            return None
        return cls(operands, tuple(name_operands(case.context, operands)))

    @property
    def values(self) -> Tensor:
        return torch.cat([widen(operand).reshape(-1) for operand in self.operands])

    @property
    def starts(self) -> list[int]:
        """Where each operand begins."""
        return list(itertools.accumulate([0, *(operand.numel() for operand in self.operands)]))

    def number_operands(self, sign: int) -> list[Tensor]:
        """The operands with the numbers of their elements, from 1 on, as values."""
        return [
            torch.arange(start, start + operand.numel(), dtype=torch.float64, device=operand.device)
            .add(1)
            .mul(sign)
            .reshape(operand.shape)
            for start, operand in zip(self.starts, self.operands, strict=False)
        ]

    def owner_of(self, places: Tensor) -> int | None:
        """The operand that all of these places are in; None if there are several."""
        owners = torch.bucketize(places, torch.tensor(self.starts[1:]), right=True).unique()
        return int(owners[0]) if len(owners) == 1 and int(places.min()) >= 0 else None

    def place_words(self, position: int) -> str:
        owner = self.owner_of(torch.tensor([position]))
        if owner is None:
            return "a constant"
        shape = self.operands[owner].shape
        at = unravel(torch.tensor(position - self.starts[owner]), shape)
        index = ", ".join(str(int(coordinate)) for coordinate in at)
        return f"{self.names[owner]}[{index}]"


def _right_places(case: Case, call: LiveCall, pool: _Pool) -> Tensor | None:
    """The place in the pool of each right element; None if it is not an element of an operand.

    Elements that are moved follow any values, so they are numbered, with both signs.
    """
    try:
        outputs = call.results(wide=True)
        which = [
            number
            for number, output in enumerate(outputs)
            if tuple(output.shape) == case.shape
            and bool(near(widen(output), case.right, case.allowed).all())
        ]
        more = len(pool.values)
        first, second = (
            call.with_floating(pool.number_operands(sign)).results(wide=True)[which[0]]
            for sign in (1, -1)
        )
    except UNUSABLE:
        return None
    first, second = widen(first).reshape(-1), widen(second).reshape(-1)
    is_moved, is_constant = (second == -first) & (first != 0), second == first
    if first.numel() != case.reference.numel() or not bool((is_moved | is_constant).all()):
        return None
    places = torch.where(is_moved, first - 1, float(_NOWHERE)).to(torch.long)
    if not bool(is_moved.any()) or int(places.max()) >= more or int(places.min()) < _NOWHERE:
        return None
    # An odd function of the numbers would also change its sign with them.
    moved, right, noise = (
        tensor.reshape(-1)[is_moved] for tensor in (places, case.right, MAX_Z * case.allowed)
    )
    return places if bool(near(pool.values[moved], right, noise).all()) else None


def _taken_elsewhere(
    case: Case, pool: _Pool, places: Tensor, others: Sequence[Case]
) -> Iterator[Pattern | None]:
    """The prediction that elements come from where their values are found."""
    values, wrong = pool.values, case.wrong.reshape(-1)
    candidate, noise = (tensor.reshape(-1)[wrong] for tensor in (case.given, MAX_Z * case.allowed))
    taken = _move_regularly(pool, places[wrong], candidate, noise)
    if taken is None:
        taken = _search(candidate, noise, values)
    if taken is None:
        return
    source = places.clone()
    source[wrong] = taken
    for other in others:
        call = other.context.call
        again = None if call is None else _Pool.of(other, call)
        if again is None or not holds_again(
            other, _with_taken(other.right, again.values, source, wrong)
        ):
            return
    kind, words = _describe(pool, case.shape, places[wrong], taken, wrong)
    prediction = _with_taken(case.right, values, source, wrong)
    yield supported_pattern(case, prediction, kind, words, cost=math.log2(1 + len(values)))


def _with_taken(right: Tensor, values: Tensor, source: Tensor, wrong: Tensor) -> Tensor:
    result = right.reshape(-1).clone()
    result[wrong] = torch.where(source >= 0, values[source.clamp(min=0)], 0.0)[wrong]
    return result.reshape(right.shape)


def _move_regularly(pool: _Pool, right: Tensor, candidate: Tensor, noise: Tensor) -> Tensor | None:
    """The places that are as far from the right ones along one axis, if they have the values."""
    owner = pool.owner_of(right)
    if owner is None or len(candidate.unique()) < _FEWEST_VALUES:
        return None
    start, shape, values = pool.starts[owner], pool.operands[owner].shape, pool.values
    for axis, size in enumerate(shape):
        farthest = min(size // 2, _FARTHEST)
        stride = math.prod(shape[axis + 1 :])
        at = (right - start) // stride % size
        for by in sorted((offset for offset in range(-farthest, farthest + 1) if offset), key=abs):
            moved = right + ((at + by) % size - at) * stride
            if bool(near(values[moved], candidate, noise).all()):
                return moved
    return None


def _search(target: Tensor, noise: Tensor, values: Tensor) -> Tensor | None:
    """The place of each value among others, or `_NOWHERE` for 0; None if it is not clear."""
    order = values.argsort()
    ordered = values[order]
    above = torch.searchsorted(ordered, target.contiguous())
    around = torch.stack([above + by for by in (-2, -1, 0, 1)]).clamp(0, len(values) - 1)
    apart = (ordered[around] - target).abs()
    nearest = apart.argmin(0, keepdim=True)
    at = around.gather(0, nearest)
    is_hit = (apart.gather(0, nearest)[0] <= noise) & (target != 0)
    if not bool((is_hit | (target == 0)).all()):
        return None
    # Zeros are padding, or were not written.
    others = apart.masked_fill(around == at, torch.inf).amin(0)
    is_clear = is_hit & (others > _APART * noise)
    enough = float(is_clear.sum()) >= _DISTINCT * float(is_hit.sum())
    if not enough or len(at[0, is_hit].unique()) < _FEWEST_VALUES:
        return None
    return torch.where(is_hit, order[at[0]], _NOWHERE)


def _describe(
    pool: _Pool, shape: Sequence[int], right: Tensor, taken: Tensor, wrong: Tensor
) -> tuple[PatternKind, str]:
    """The kind and the words for elements that were taken from other places.

    Args:
        right: the places of the elements that are wrong.
        taken: the places that they were taken from.
        wrong: which elements of the result these are.
    """
    example = f"{pool.place_words(int(taken[0]))} instead of {pool.place_words(int(right[0]))}"
    owner, right_owner = pool.owner_of(taken), pool.owner_of(right)
    if owner is None or right_owner is None:
        return PatternKind.WRONG_INDEX, f"other elements are read: {example}"
    name, operand, start = pool.names[owner], pool.operands[owner], pool.starts[owner]
    if owner != right_owner:
        positions = wrong.nonzero().reshape(-1) + start
        if tuple(operand.shape) == tuple(shape) and torch.equal(positions, taken):
            lost = pool.names[right_owner]
            return PatternKind.STALE, f"{lost} is not written everywhere: {name} is kept there"
        return PatternKind.WRONG_INDEX, f"elements of another operand are read: {example}"
    axis = _only_axis(right - start, taken - start, operand.shape)
    if axis is not None:
        number, by = axis
        distance = f"{abs(by)} place{'s' if abs(by) > 1 else ''} {'after' if by > 0 else 'before'}"
        words = f"{name} is read {distance} the right one along axis {number}"
        return PatternKind.SHIFT, words
    if torch.equal(taken.sort().values, right.sort().values):
        return PatternKind.PERMUTATION, f"elements of {name} are in another order: {example}"
    return PatternKind.WRONG_INDEX, f"other elements of {name} are read: {example}"


def _only_axis(right: Tensor, taken: Tensor, shape: Sequence[int]) -> tuple[int, int] | None:
    pairs = zip(unravel(right, shape), unravel(taken, shape), shape, strict=True)
    moves = [((there - here) % size, size) for here, there, size in pairs]
    axes = [number for number, (by, _) in enumerate(moves) if bool(by.any())]
    if len(axes) != 1:
        return None
    by, size = moves[axes[0]]
    if not bool((by == by[0]).all()):
        return None
    distance = int(by[0])
    return axes[0], distance if 2 * distance <= size else distance - size
