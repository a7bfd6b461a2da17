"""Which places of its operands a program's result depends on, by calls with other values."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING

import torch

from paritas.core.diagnosis.case import any_along, unravel
from paritas.core.numerics.bits import is_inexact
from paritas.core.numerics.criterion import unit_roundoff
from paritas.core.numerics.metrics import bitwise_equal
from paritas.core.numerics.random_tensors import HUGE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from paritas.core.diagnosis.case import Context
    from paritas.core.diagnosis.place_runs import PlaceRuns
    from paritas.core.time_limit import TimeLimit

# The time for all experiments at one place.
SECONDS = 2.0
# All indices of a short axis are tried, and some of a long one.
_MOST_PROBES = 8
# An effect below this share of the usual one is none: a rounding that depends on all values.
_FAINT = 0.1
# A permuted sum rounds otherwise; a fault is far beyond this many roundings.
_ROUNDINGS = 1000.0
# Two slopes are the same up to this.
_SAME_SLOPE = 0.01
_MOSTLY = 0.98
# What an operand may be taken for that is not read.
_NEUTRAL = (0.0, 1.0, 0.5, 0.25, 2.0, -1.0)
_MOST_UNREAD = 2


# --- The experiments ------------------------------------------------------------------------------


class Laboratory:
    """Calls both programs at a place with other values.

    Attributes:
        runs: the programs.
        names: of their operands.
        limit: the time for it.
        calls: how often the candidate was called.
    """

    def __init__(self, runs: PlaceRuns, names: Sequence[str], limit: TimeLimit) -> None:
        self.runs = runs
        self.names = list(names)
        self.operands = runs.operands
        self.calls = 0
        self.limit = limit
        self._draw = torch.Generator().manual_seed(0)
        self._wholes: dict[int, Effect | None] = {}

    def both(self, operands: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
        """Both results for other operands; None if one of them cannot be computed."""
        self.calls += 1
        return self.runs.both(operands)

    def with_operand(self, number: int, value: Tensor) -> list[Tensor]:
        """The operands with another one of them."""
        changed = list(self.operands)
        changed[number] = value
        return changed

    def with_operands(self, operands: tuple[Tensor, ...], limit: TimeLimit) -> Laboratory | None:
        """The same with other operands; None if nothing is wrong with these."""
        pair = self.both(operands)
        if pair is None or are_close(*pair):
            return None
        return Laboratory(self.runs.with_operands(operands, pair), self.names, limit)

    def gives_without(self, numbers: Sequence[int], part: Tensor | None = None) -> bool:
        """Whether the reference gives the candidate's result if some operands are one number each.

        Only asked of floating-point tensors: which number an index would be is not known.

        Args:
            part: which outputs do not depend on them; there, another operand may be handed on.
        """
        chosen = [number for number in numbers if self.operands[number].is_floating_point()]
        expected, candidate = self.runs.expected, self.runs.given
        results = (
            []
            if part is None
            else [operand for operand in self.operands if operand.shape == candidate.shape]
        )
        for values in itertools.product(_NEUTRAL, repeat=min(len(chosen), _MOST_UNREAD)):
            changed = list(self.operands)
            for number, value in zip(chosen, values, strict=False):
                changed[number] = torch.full_like(changed[number], value)
            right = self.runs.reference(changed)
            results += [] if right is None else [right]
        if part is not None:
            results = [torch.where(part.to(tensor.device), tensor, expected) for tensor in results]
        is_given = any(
            result.dtype is candidate.dtype and are_close(result, candidate) for result in results
        )
        return is_given or len(chosen) < len(numbers)

    def has_effect(self, number: int) -> bool:
        """Whether an operand has an effect on one of the results."""
        effect = self.effect_of_whole(number)
        return effect is None or bool((effect.reference | effect.candidate).any())

    def effect_of_whole(self, number: int) -> Effect | None:
        """The effect of all of an operand; None if it was not found out."""
        if number not in self._wholes:
            everywhere = torch.ones(self.operands[number].shape, dtype=torch.bool)
            self._wholes[number] = self.effect(number, everywhere)
        return self._wholes[number]

    def reads_all_numbers(self) -> bool:
        """Whether all operands but integers and masks have an effect on the candidate."""
        for number, operand in enumerate(self.operands):
            effect = self.effect_of_whole(number) if is_inexact(operand) else None
            if is_inexact(operand) and (effect is None or not bool(effect.candidate.any())):
                return False
        return True

    def is_unread(self, number: int) -> bool:
        """Whether an operand has no effect either if the others have other values.

        A result that is clipped, or rounded to whole numbers, has the same value for many operands.
        """
        for factor in (0.5, -1.0, 0.1):
            others = [
                operand * factor if operand.is_floating_point() else operand
                for operand in self.operands
            ]
            before = self.runs.candidate(others)
            for probe_factor in (-2.0, 0.3, 64.0):
                if self.limit.is_over or before is None:
                    return False
                changed = list(others)
                if changed[number].is_floating_point():
                    changed[number] = changed[number] * probe_factor + probe_factor
                after = self.runs.candidate(changed)
                if after is None or not bitwise_equal(after, before):
                    return False
        return True

    def effect(self, number: int, mask: Tensor) -> Effect | None:
        """The effect of some elements of an operand; None if it was not found out."""
        before = self.runs.expected, self.runs.given
        pairs: list[tuple[Tensor, Tensor]] = []
        steps: tuple[Tensor, Tensor] | None = None
        for value in self._other_values(number, mask):
            if self.limit.is_over:
                return None
            after = self.both(self.with_operand(number, value))
            if after is None:
                continue
            moved = [distance(tensor, other) for tensor, other in zip(after, before, strict=True)]
            pairs.append((moved[0] != 0, moved[1] != 0))
            if steps is not None:
                moved = [torch.maximum(*pair) for pair in zip(moved, steps, strict=True)]
            steps = moved[0], moved[1]
        if not pairs or steps is None:
            return None
        right, wrong = (
            functools.reduce(torch.logical_or, side) for side in zip(*pairs, strict=True)
        )
        return Effect(right, wrong, steps)

    def is_of_keys_and_values(self, reading: Reading) -> bool:
        """Whether keys and values of an attention are read in the same other places."""
        if reading.name not in ("key", "value") or not {"key", "value"} <= {*self.names}:
            return False
        partner = self.names.index("value" if reading.name == "key" else "key")
        shape, axis = self.operands[partner].shape, reading.axis
        differs = (reading.reference != reading.candidate).flatten(1).sum(1)
        number = int(differs.argmax())
        index = list(reading.effects)[number]
        if axis is None or len(shape) != len(reading.shape) or index >= shape[axis]:
            return False
        mask = torch.zeros(shape, dtype=torch.bool)
        mask.select(axis, index).fill_(value=True)
        effect = self.effect(partner, mask)
        if effect is None:
            return False
        wrong = reading.reference[number] != reading.candidate[number]
        return bool((effect.reference != effect.candidate)[wrong].any())

    def _other_values(self, number: int, mask: Tensor) -> Iterator[Tensor]:
        """The operand with other values where the mask is: its own ones, larger and smaller."""
        operand = self.operands[number].detach()
        flat = operand.flatten()
        picked = torch.randint(len(flat), (len(flat),), generator=self._draw)
        yield torch.where(mask, flat[picked].view(operand.shape), operand)
        if operand.is_floating_point():
            # What a mask writes is as good as infinite: nothing is further outside.
            usual = flat[flat.abs() < HUGE].float()
            if usual.numel():
                low, high = float(usual.min()), float(usual.max())
                width = max(high - low, abs(high), 1e-3)
                noise = torch.rand(operand.shape, generator=self._draw)
                # Far outside on either side: an element that never wins a maximum may win one now.
                far = torch.where(noise < 0.5, low - width, high + width)  # noqa: PLR2004
                other = (far + 0.1 * width * noise).to(operand.dtype)
                yield torch.where(mask, other, operand)
        elif operand.dtype is torch.bool:
            yield torch.where(mask, ~operand, operand)

    # --- Elements ---

    def is_elementwise(self) -> bool:
        """Whether each element of both results follows from the same element of the operands."""
        shape = self.runs.expected.shape
        count = self.runs.expected.numel()
        full = [number for number, operand in enumerate(self.operands) if operand.shape == shape]
        rest = [number for number, operand in enumerate(self.operands) if operand.shape != shape]
        if not full or count < 4:  # noqa: PLR2004
            return False
        if any(self.operands[number].numel() != 1 and self.has_effect(number) for number in rest):
            return False
        return self._is_local(full) and self._follows_order(full)

    def _is_local(self, full: Sequence[int]) -> bool:
        """Whether other values in half of the places change nothing in the other half."""
        shape = self.runs.expected.shape
        for _ in range(2):
            mask = torch.rand(shape, generator=self._draw) < 0.5  # noqa: PLR2004
            for number in full:
                effect = self.effect(number, mask)
                if effect is None or bool(((effect.reference | effect.candidate) & ~mask).any()):
                    return False
        return True

    def _follows_order(self, full: Sequence[int]) -> bool:
        order = torch.randperm(self.runs.expected.numel(), generator=self._draw)

        def reorder(value: Tensor) -> Tensor:
            return value.flatten()[order].view(value.shape)

        changed = [
            reorder(operand) if number in full else operand
            for number, operand in enumerate(self.operands)
        ]
        after = self.both(changed)
        if after is None:
            return False
        before = self.runs.expected, self.runs.given
        return all(
            are_close(value, reorder(other)) for value, other in zip(after, before, strict=True)
        )

    def relative_error(self) -> float:
        """The root mean square of the error, as a share of that of the right values."""
        right, wrong = (
            tensor.to("cpu", torch.float64) for tensor in (self.runs.expected, self.runs.given)
        )
        usable = torch.isfinite(right) & torch.isfinite(wrong)
        size = right[usable].square().mean().sqrt()
        error = (wrong - right)[usable].square().mean().sqrt()
        return float(error / size) if float(size) else float("inf")

    def is_affine(self) -> bool:
        """Whether the candidate is the reference times a number plus a number."""
        right, wrong = (
            tensor.to("cpu", torch.float64).flatten()
            for tensor in (self.runs.expected, self.runs.given)
        )
        usable = torch.isfinite(right) & torch.isfinite(wrong)
        right, wrong = right[usable], wrong[usable]
        if len(right) < 3:  # noqa: PLR2004
            return False
        right, wrong = right - right.mean(), wrong - wrong.mean()
        factor = (right @ wrong) / (right @ right).clamp(min=torch.finfo(torch.float64).tiny)
        left = (wrong - factor * right).square().mean().sqrt()
        limit = _ROUNDINGS * unit_roundoff(self.runs.given.dtype)
        return bool(left <= limit * wrong.square().mean().sqrt())

    def is_coarse(self) -> bool:
        """Whether the candidate has few different values, or short ones, unlike the reference."""
        right, wrong = self.runs.expected, self.runs.given
        if not right.is_floating_point():
            return False
        few = len(wrong.unique()) < len(right.unique()) / 2
        return few or (_is_short(wrong) and not _is_short(right))

    # --- Lines ---

    def symmetries(self) -> Symmetries | None:
        """What the candidate makes of operands in another order; None if it is not found out."""
        shape = self.operands[0].shape
        if any(operand.shape != shape for operand in self.operands if operand.numel() != 1):
            return None
        keeps_lines = is_symmetric = True
        for axis, size in enumerate(shape):
            if size < 2:  # noqa: PLR2004
                continue
            if self.limit.is_over:
                return None
            sides = self._axes_that_follow(axis)
            if sides is None:
                return None
            follows, candidate_axes = sides
            is_symmetric &= follows <= candidate_axes
            for target in follows - {None}:
                keeps_lines &= target in candidate_axes and self._keeps_apart(axis, target)
        return Symmetries(keeps_lines, is_symmetric)

    def _axes_that_follow(self, axis: int) -> list[set[int | None]] | None:
        """The axes of both results that are in another order if an axis of the operands is.

        None among them stands for no change. None instead of them: one cannot be computed.
        """
        size = self.operands[0].shape[axis]
        sides: list[set[int | None]] = []
        # No index stays where it is in the first order; the second one has no other regularity.
        for order in (torch.arange(size).roll(1), torch.randperm(size, generator=self._draw)):
            changed = [
                operand if operand.numel() == 1 else operand.index_select(axis, order)
                for operand in self.operands
            ]
            after = self.both(changed)
            if after is None:
                return None
            before = self.runs.expected, self.runs.given
            following = [_following(*pair, order) for pair in zip(after, before, strict=True)]
            sides = [
                side & other for side, other in zip(sides or following, following, strict=True)
            ]
        return sides

    def _keeps_apart(self, axis: int, target: int | None) -> bool:
        """Whether lines of the candidate depend on no other lines, as those of the reference.

        Only asked where the reference follows the order, which a normalised axis does, too.
        """
        if target is None:
            return True
        for number, operand in enumerate(self.operands):
            if operand.numel() == 1 or not operand.is_floating_point():
                continue
            mask = torch.zeros(operand.shape, dtype=torch.bool)
            mask.select(axis, 0).fill_(True)
            effect = self.effect(number, mask)
            if effect is None:
                return False
            right, wrong = effect.reference, effect.candidate
            others = torch.arange(1, right.shape[target])
            apart = not bool(right.index_select(target, others).any())
            if apart and bool(wrong.index_select(target, others).any()):
                return False
        return True

    # --- Indices along the axes of operands ---

    def readings(self, *, last_first: bool = False) -> Iterator[Reading]:
        """What outputs depend on along each axis of each operand, and for some single elements.

        Args:
            last_first: begin with the last operand.
        """
        numbered = list(enumerate(self.operands))
        for number, operand in reversed(numbered) if last_first else numbered:
            if not operand.is_floating_point() or not self.has_effect(number):
                continue
            places = [axis for axis, size in enumerate(operand.shape) if size > 1]
            for axis in places if len(places) < 2 else [*places, None]:  # noqa: PLR2004
                reading = self.read(number, axis)
                if reading is None:
                    return
                yield reading

    @functools.cache  # noqa: B019  (it lives as long as the laboratory)
    def read(self, number: int, axis: int | None) -> Reading | None:
        """What outputs depend on along an axis of an operand; None: which of its elements."""
        operand = self.operands[number]
        size = operand.numel() if axis is None else operand.shape[axis]
        probes = list(range(size))
        if size > _MOST_PROBES:
            some = torch.randperm(size - 2, generator=self._draw)[: _MOST_PROBES - 2] + 1
            probes = sorted({0, size - 1, *some.tolist()})
        effects: dict[int, Effect] = {}
        for index in probes:
            mask = torch.zeros(operand.shape, dtype=torch.bool)
            part = mask.view(-1)[index] if axis is None else mask.select(axis, index)
            part.fill_(True)
            effect = self.effect(number, mask)
            if effect is None:
                return None
            effects[index] = effect
        right, wrong = (
            torch.stack([getattr(read_effect, side) for read_effect in effects.values()])
            for side in ("reference", "candidate")
        )
        shape = tuple(operand.shape)
        return Reading(self.names[number], number, axis, shape, effects, right, wrong)

    def takes_as_zeros(self, reading: Reading) -> bool:
        """Whether the reference gives the candidate's result if what is not read is zero."""
        unread = [
            index for index, effect in reading.effects.items() if not bool(effect.candidate.any())
        ]
        if not unread or reading.axis is None:
            return False
        changed = list(self.operands)
        for number, operand in enumerate(self.operands):
            other = self.read(number, reading.axis) if operand.shape == reading.shape else None
            if other and not any(bool(other.effects[index].candidate.any()) for index in unread):
                changed[number] = operand.index_fill(reading.axis, torch.tensor(unread), 0.0)
        right = self.runs.reference(changed)
        return right is not None and are_close(right, self.runs.given)

    def has_same_slopes(self, reading: Reading) -> bool:
        """Whether what the candidate depends on has the reference's effect on it."""
        same = total = 0
        for effect in reading.effects.values():
            right, wrong = effect.steps
            use = (right > 0) & (wrong > 0)
            total += int(use.sum())
            same += int(((right - wrong).abs()[use] <= _SAME_SLOPE * right[use]).sum())
        return total > 0 and same >= _MOSTLY * total


def _following(after: Tensor, before: Tensor, order: Tensor) -> set[int | None]:
    """The axes of a result that are in a new order now; None stands for no change."""
    axes: set[int | None] = {None} if are_close(after, before) else set()
    for axis, size in enumerate(before.shape):
        if size == len(order) and are_close(after, before.index_select(axis, order)):
            axes.add(axis)
    return axes


def distance(left: Tensor, right: Tensor) -> Tensor:
    """By how much two tensors differ; infinite where only one is finite, 0 where the same."""
    if not is_inexact(left):
        return (left != right).double().cpu()
    left, right = (tensor.to("cpu", torch.float64) for tensor in (left, right))
    same = (left == right) | (torch.isnan(left) & torch.isnan(right))
    return torch.where(same, 0.0, (left - right).abs().nan_to_num(torch.inf, torch.inf))


def are_close(left: Tensor, right: Tensor) -> bool:
    """Whether two results are the same up to the rounding of another order."""
    if not is_inexact(left):
        return bitwise_equal(left, right)
    finite = right[torch.isfinite(right)].double()
    size = float(finite.square().mean().sqrt()) if finite.numel() else 0.0
    limit = _ROUNDINGS * unit_roundoff(right.dtype)
    return bool(
        (distance(left, right) <= limit * (right.double().cpu().abs().nan_to_num() + size)).all()
    )


def _is_short(value: Tensor) -> bool:
    """Whether almost all numbers have the digits of bfloat16 or float16."""
    if unit_roundoff(value.dtype) >= unit_roundoff(torch.float16):
        return False
    return any(
        float((value.to(short).to(value.dtype) == value).double().mean()) >= 0.9  # noqa: PLR2004
        for short in (torch.bfloat16, torch.float16)
    )


# --- What a change of an operand changes ----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Effect:
    """Which elements of the results change, in the reference and in the candidate.

    Attributes:
        reference: where the reference's result changes.
        candidate: where the candidate's does.
        steps: by how much each changes at most.
    """

    reference: Tensor
    candidate: Tensor
    steps: tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class Reading:
    """What outputs depend on along one axis of an operand.

    Attributes:
        name: the operand.
        number: its place among the operands.
        axis: its axis; None for single elements.
        shape: its shape.
        effects: of some indices along the axis, or of some elements.
        reference: index x element of the result: where the reference depends on it.
        candidate: the same for the candidate.
    """

    name: str
    number: int
    axis: int | None
    shape: tuple[int, ...]
    effects: dict[int, Effect]
    reference: Tensor
    candidate: Tensor

    @functools.cached_property
    def is_of_one(self) -> bool:
        """Whether each output of the reference depends on one index."""
        return len(self.reference) > 1 and int(self.reference.sum(0).max()) <= 1

    @functools.cached_property
    def is_of_one_in_candidate(self) -> bool:
        """Whether each output of the candidate depends on one index, right or wrong.

        Only known if all indices were tried: it may depend on its own one as well.
        """
        is_complete = self.axis is not None and len(self.effects) == self.shape[self.axis]
        return is_complete and int(self.candidate.sum(0).max()) <= 1

    @functools.cached_property
    def lacks(self) -> bool:
        """Whether the candidate does not depend on something that the reference depends on."""
        lost = self.reference & ~self.candidate
        return bool((lost & self._strong(0)).any())

    @functools.cached_property
    def has_more(self) -> bool:
        """Whether the candidate depends on something that the reference does not depend on."""
        more = self.candidate & ~self.reference
        return bool((more & self._strong(1)).any())

    def _strong(self, side: int) -> Tensor:
        """Where a change has an effect as large as is usual, not that of a shared rounding."""
        steps = torch.stack([effect.steps[side] for effect in self.effects.values()])
        own_steps = torch.stack([effect.steps[0] for effect in self.effects.values()])
        usual = own_steps[self.reference & torch.isfinite(own_steps) & (own_steps > 0)]
        if not usual.numel():
            return torch.zeros_like(self.reference)
        return steps > _FAINT * usual.median()

    @functools.cached_property
    def is_kept(self) -> bool:
        """Whether the axis is one of the result, with the same indices."""
        if self.axis is None:
            return False
        size = self.shape[self.axis]
        indices = torch.tensor(list(self.effects))
        for axis, length in enumerate(self.reference.shape[1:], start=1):
            others = [dim for dim in range(1, self.reference.dim()) if dim != axis]
            hit = self.reference.any(dim=others) if others else self.reference
            if length == size and bool((hit.int().argmax(1) == indices).all()):
                return True
        return False

    @functools.cached_property
    def blind(self) -> Tensor:
        """The outputs of the candidate that depend on none of the indices that they should."""
        return self.reference.any(0) & ~self.candidate.any(0)

    @property
    def reads_as_much(self) -> bool:
        """Whether nearly all outputs change in both: which do not is a matter of rounding."""
        shares = (mask.double().mean() for mask in (self.reference, self.candidate))
        return min(map(float, shares)) >= _MOSTLY

    def words(self) -> str:
        """One index for which the two differ, with the outputs that change; empty if none does."""
        differs = (self.reference != self.candidate).flatten(1).sum(1)
        number = int(differs.argmax())
        index = list(self.effects)[number]
        right, wrong = self.reference[number], self.candidate[number]
        changed = f"other values at index {index} along axis {self.axis} of {self.name}"
        if self.axis is None:
            at = _place_words(index, self.shape)
            changed = f"other values of the element ({at}) of {self.name}"
        if not bool(wrong.any()):
            return f"{changed} have no effect on the candidate"
        if not bool(right.any()):
            return f"{changed} should have no effect, but change {describe_mask(wrong)}"
        lost, more = right & ~wrong, wrong & ~right
        if not bool(more.any()):
            return f"{changed} do not change {describe_mask(lost)}"
        if not bool(lost.any()):
            return f"{changed} also change {describe_mask(more)}"
        sides = describe_mask(wrong), describe_mask(right)
        return (
            self._words_of_output()
            if sides[0] == sides[1]
            else f"{changed} change {sides[0]} instead of {sides[1]}"
        )

    def _words_of_output(self) -> str:
        """One output that depends on one index instead of another; empty if there is none."""
        sides = [side.flatten(1) for side in (self.candidate, self.reference)]
        is_of_one = (sides[0].sum(0) == 1) & (sides[1].sum(0) == 1) & (sides[0] != sides[1]).any(0)
        if self.axis is None or not bool(is_of_one.any()):
            return ""
        position = int(is_of_one.nonzero()[0])
        wrong, right = (list(self.effects)[int(side[:, position].int().argmax())] for side in sides)
        at = _place_words(position, self.reference.shape[1:])
        which = f"index {wrong} along axis {self.axis} of {self.name} instead of index {right}"
        return f"the output at ({at}) depends on {which}"


def _place_words(position: int, shape: Sequence[int]) -> str:
    return ", ".join(str(int(index)) for index in unravel(torch.tensor(position), shape))


def is_of_slices(mask: Tensor) -> bool:
    """Whether some elements are all those at some indices along one axis."""
    for axis in range(mask.dim()):
        hit, whole_slices = any_along(mask, axis), ~any_along(~mask, axis)
        if bool((hit == whole_slices).all()) and bool(hit.any()) and not bool(hit.all()):
            return True
    return False


def describe_mask(mask: Tensor) -> str:
    """Some elements of a result, by the axis along which they are fewest."""
    best, words = 1.0, "all outputs"
    for axis, size in enumerate(mask.shape):
        hit = any_along(mask, axis).nonzero().flatten().tolist()
        if len(hit) / size < best:
            best = len(hit) / size
            words = f"the outputs at {_indices(hit)} along axis {axis}"
    return words


def _indices(hit: list[int]) -> str:
    if len(hit) == 1:
        return f"index {hit[0]}"
    if hit[-1] - hit[0] == len(hit) - 1:
        return f"indices {hit[0]} to {hit[-1]}"
    return f"{len(hit)} indices from {hit[0]} to {hit[-1]}"


@dataclasses.dataclass(frozen=True)
class Symmetries:
    """What happens to the candidate's result if its operands are reordered along each axis.

    Attributes:
        keeps_lines: lines that are independent in the reference are so in the candidate.
        is_symmetric: it follows every order that the reference follows.
    """

    keeps_lines: bool
    is_symmetric: bool


# --- Names ----------------------------------------------------------------------------------------


def name_operands(context: Context, operands: Sequence[Tensor]) -> list[str]:
    """The names of operands in the schema of the operator that reads them, if that is known."""
    named_tensors: list[tuple[str, Tensor]] = []
    try:
        steps = [] if context.call is None else [step for _, step in context.call.steps]
    except Exception:  # noqa: BLE001  (a call that cannot be run again has no names)
        steps = []
    for step in steps:
        named_tensors += [
            (key, tensor) for key, tensor in step.values.items() if isinstance(tensor, torch.Tensor)
        ]
    names: list[str] = []
    for number, operand in enumerate(operands):
        alike = [
            name
            for name, tensor in named_tensors
            if name not in names and bitwise_equal(tensor, operand.detach())
        ]
        names.append(alike[0] if alike else f"operand {number + 1}")
    return names
