"""Fused operators written out in simple ones, of which one has a mistake.

A norm, a softmax, a loss and their backward kernels are a few simple operators each. A mistake in
any of these is tried, and the same mistake in the two statistics of a norm at once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from paritas.core.diagnosis.calls import UNUSABLE, Step
from paritas.core.diagnosis.patterns.changes import (
    operand_changes,
    operand_pairs,
    result_changes,
    result_pairs,
)
from paritas.core.diagnosis.patterns.formulas import divisor_of, formulas_of
from paritas.core.diagnosis.patterns.functions import function_variations
from paritas.core.diagnosis.patterns.inner import (
    alteration_variations,
    moved_eps,
    neighbour_variations,
    reduction_variations,
    running_variations,
    selection_variations,
    step_variations,
)
from paritas.core.diagnosis.patterns.losses import SMOOTHING
from paritas.core.diagnosis.patterns.quantising import (
    computed_variations,
    rounding_variations,
    saved_variations,
)
from paritas.core.diagnosis.patterns.steps import first_of, with_factor
from paritas.core.diagnosis.patterns.sums import scale_result, sum_variations
from paritas.core.diagnosis.patterns.unknowns import Unknown, unknown_numbers
from paritas.core.diagnosis.patterns.variations import Variation, argument_variations
from paritas.core.diagnosis.patterns.wiring import moving_variations, wiring_variations
from paritas.core.results.findings import PatternKind
from paritas.core.torch_private.operators import bind_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from paritas.core.diagnosis.patterns.formulas import Formula

T = TypeVar("T")

# Kinds that say which statistic is wrong; any other mistake in a statistic is a wrong statistic.
_OWN_KINDS = frozenset(
    {
        *(PatternKind.EPS, PatternKind.OFF_BY_ONE, PatternKind.PARTIAL_SUM),
        *(PatternKind.DOUBLED_REDUCTION, PatternKind.WRONG_AXIS, PatternKind.STATISTICS),
        PatternKind.PRECISION,
    }
)
# How near a formula must be to the operator, in units of its largest value.
_SAME = 1e-4


# --- A call of one or more operators --------------------------------------------------------------


def inner_mistakes(steps: Sequence[tuple[int, Step]]) -> Iterator[tuple[int, Variation]]:
    """Mistakes inside of operators, and those that one of several operators can have."""
    for position, step in steps:
        yield from _at(position, _written_mistakes(step))
    for number, (position, step) in enumerate(steps):
        if len(steps) > 1:
            yield from _at(position, step_variations(step))
            if number < len(steps) - 1:
                yield from _at(position, rounding_variations(step))
            for _, before in steps[:number]:
                yield from _at(position, neighbour_variations(before, step))
        yield from _at(position, reduction_variations(step))
        yield from _at(position, running_variations(step))
        if step.name.startswith("nll_loss") and step.values.get("weight") is None:
            yield from _at(position, map(_smooth_labels, SMOOTHING))
    for position, step in steps:
        yield from _at(position, selection_variations(step))
        yield from _at(position, saved_variations(step))


def _at(position: int, suggestions: Iterable[T]) -> Iterator[tuple[int, T]]:
    """Suggestions for one operator, with its place."""
    return zip(itertools.repeat(position), suggestions, strict=False)


def _written_mistakes(step: Step) -> Iterator[Variation]:
    for written in Written.all_of(step):
        yield from written.variations()
        yield from wiring_variations(step, written.formula)
        if "backward" in step.name:
            yield from moving_variations(step, written.formula)


def changed_values(
    steps: Sequence[tuple[int, Step]], output: int, shape: tuple[int, ...] | None
) -> Iterator[Iterator[tuple[int, Variation]]]:
    """Something done to the result, to an operand, or to a value on the way; in this order.

    Args:
        output: which of the results of the last operator it is.
        shape: the shape in which that is returned; None if more is done to it.
    """
    position, last = steps[-1]
    yield _at(position, result_changes(last, output, shape))
    yield ((index, change) for index, step in steps for change in operand_changes(step))
    yield ((index, change) for index, step in steps[:-1] for change in result_changes(step))
    yield _at(position, result_pairs(last, output))
    yield ((index, pair) for index, step in steps for pair in operand_pairs(step))
    yield (
        (index, change)
        for index, step in steps
        for written in Written.all_of(step)
        for change in written.changes(step)
    )


def inner_numbers(steps: Sequence[tuple[int, Step]]) -> Iterator[tuple[int, Unknown]]:
    """The numbers of operators, or of the simple ones that they consist of, that may be wrong."""
    for position, step in steps:
        yield from _at(position, unknown_numbers(step))
    for position, step in steps:
        for written in Written.all_of(step):
            yield from _at(position, written.unknowns(scaled_inside="backward" in step.name))
        if len(steps) > 1 or step.name in ("rsqrt", "sqrt") or "nll_loss" in step.name:
            yield from _at(position, inner_unknowns(step))


# --- Operators written out ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Written:
    """An operator that is written out.

    Attributes:
        inner: the simple operators by their roles.
    """

    formula: Formula
    inner: dict[str, Step]
    # Of each operator that it was written out of, what comes before a change.
    before: weakref.WeakKeyDictionary[Step, list[Tensor]] = dataclasses.field(
        default_factory=weakref.WeakKeyDictionary
    )

    @classmethod
    def all_of(cls, step: Step) -> list[Written]:
        """All ways that are known to write it out, if they give the same."""
        written = []
        for formula in formulas_of(step):
            record = _Change()
            try:
                actual, right = formula.compute(step, record), step.run()
            except UNUSABLE:
                continue
            right = right if isinstance(right, torch.Tensor) else right[formula.output]
            if _is_same(actual, right):
                written.append(cls(formula, record.steps))
        return written

    def variations(self) -> Iterator[Variation]:
        """The operator with a mistake in one of the simple ones, or the same in several."""
        if "eps" in self.inner and "the root" in self.inner:
            for variation in moved_eps(float(self.inner["eps"].values["other"])):
                yield self._as_whole(("the root",), variation)
        for variations in (_variations_of, selection_variations):
            for roles in self._places():
                for variation in variations(self.inner[roles[0]]):
                    yield self._as_whole(roles, variation)
        for roles in self._rounded_places():
            inner = self.inner[roles[0]]
            for variation in (*rounding_variations(inner), *computed_variations(inner)):
                yield self._as_whole(roles, variation)

    def changes(self, step: Step) -> Iterator[Variation]:
        """The operator with something done to a value between the simple ones."""
        for roles in self._places():
            inner = self.inner[roles[0]]
            every = (result_changes(inner), operand_changes(inner, among=step))
            for variation in itertools.chain.from_iterable(every):
                yield self._as_whole(roles, variation)

    def unknowns(self, *, scaled_inside: bool) -> Iterator[Unknown]:
        """The numbers of the simple operators that may be wrong.

        Args:
            scaled_inside: also a factor on each value. In a forward pass, one on a value between is
                one on a weight as well.
        """
        for roles in self._places():
            step = self.inner[roles[0]]
            # A factor on the last one is a factor on the whole, which has a kind.
            is_inside = scaled_inside and roles[-1] != list(self.inner)[-1]
            scaled = (Unknown(_multiply_result, (1.0,)),) if is_inside else ()
            for unknown in (*unknown_numbers(step), *inner_unknowns(step), *scaled):
                variation = partial(self._with_number, roles, unknown.variation)
                yield dataclasses.replace(unknown, variation=variation)

    def _with_number(
        self, roles: tuple[str, ...], variation: Callable[[float], Variation], number: float
    ) -> Variation:
        return self._as_whole(roles, variation(number))

    def _places(self) -> Iterator[tuple[str, ...]]:
        yield from self._joint_roles()
        yield from ((role,) for role in self.inner if role not in self.formula.known)

    def _joint_roles(self) -> Iterator[tuple[str, ...]]:
        for roles in self.formula.joint:
            if all(role in self.inner for role in roles):
                yield roles

    def _rounded_places(self) -> Iterator[tuple[str, ...]]:
        """Each result, those of two statistics, those that belong together, all but the last."""
        roles = [*self.inner]
        yield from self._joint_roles()
        yield from ((role,) for role in roles[:-1])
        statistics = [role for role in ("the mean", "the variance", "the root") if role in roles]
        yield from itertools.combinations(statistics, 2)
        if len(roles) > 2:  # noqa: PLR2004
            yield tuple(roles[:-1])

    def _as_whole(self, roles: tuple[str, ...], variation: Variation) -> Variation:
        kind = variation.kind
        if kind not in _OWN_KINDS:
            if self.formula.statistics.issuperset(roles):
                kind = PatternKind.STATISTICS
            elif roles == ("eps",) and kind is not PatternKind.FACTOR:
                kind = PatternKind.EPS
            elif kind is PatternKind.MISSING_OPERAND and self._leaves_bias_out(roles, variation):
                kind = PatternKind.MISSING_BIAS
            elif kind is PatternKind.SWAPPED_OPERANDS and self._are_differences(roles):
                kind = PatternKind.SIGN  # nobody sees the operands of a step inside
        sentence = f"{' and '.join(roles)}: {variation.sentence}"

        def change(step: Step) -> Any:
            before = self.before.setdefault(step, [])
            return self.formula.rewrite(step, _Change(roles, variation.change, before))

        return Variation(kind, sentence, change)

    def _leaves_bias_out(self, roles: tuple[str, ...], variation: Variation) -> bool:
        """Whether what the bias is added to is handed on as it is."""
        if roles != ("the bias",):
            return False
        step = self.inner["the bias"]
        try:
            value = variation.change(step)
        except UNUSABLE:
            return False
        return isinstance(value, torch.Tensor) and torch.equal(value, step.values["self"])

    def _are_differences(self, roles: tuple[str, ...]) -> bool:
        return all(role in self.inner and self.inner[role].name == "sub" for role in roles)


@dataclasses.dataclass
class _Change:
    """Writes out a formula with the operators of some roles changed.

    Attributes:
        before: what comes before the first of them, which is the same for every change.
        steps: the operators that were called, by their roles.
    """

    roles: tuple[str, ...] = ()
    change: Callable[[Step], Any] | None = None
    before: list[Tensor] = dataclasses.field(default_factory=list)
    steps: dict[str, Step] = dataclasses.field(default_factory=dict)
    _number: int = 0

    def __call__(self, role: str, operator: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self.change is not None and role not in self.roles:
            if self.steps:
                return operator(*args, **kwargs)  # type: ignore[no-any-return]
            if self._number == len(self.before):
                self.before.append(operator(*args, **kwargs))
            self._number += 1
            return self.before[self._number - 1]
        step = Step(operator, bind_arguments(operator, args, kwargs))
        self.steps[role] = step
        if self.change is None:
            return operator(*args, **kwargs)  # type: ignore[no-any-return]
        value: Tensor = self.change(step)
        if not bool(torch.isfinite(value).all()):
            raise ValueError("what comes after it would hide the mistake")
        return value


def _is_same(actual: Tensor, right: Tensor) -> bool:
    if actual.shape != right.shape or not right.numel():
        return False
    size = float(right.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return float((actual - right).abs().nan_to_num(0.0, 0.0, 0.0).max()) <= _SAME * size


def _variations_of(step: Step) -> Iterator[Variation]:
    yield from step_variations(step)
    yield from reduction_variations(step)
    yield from sum_variations(step)
    yield from function_variations(step)
    yield from argument_variations(step)
    yield from alteration_variations()


# --- Numbers --------------------------------------------------------------------------------------


def inner_unknowns(step: Step) -> Iterator[Unknown]:
    """What a mean is divided by, and what is added to a sum or to a root."""
    if step.name == "mean" and isinstance(step.values.get("dim"), list | tuple):
        count = divisor_of(step)
        starts = tuple(float(number) for number in (count, 2 * count) if number)
        yield Unknown(partial(_divided_by, count), starts, whole=True)
    if step.name.startswith("nll_loss") and step.values["weight"] is None:
        yield Unknown(_smooth_labels, (0.1, 0.5), most=1.0)
    if step.name == "logsumexp":
        yield Unknown(_with_zeros, (1.0, 16.0), logarithmic=True)
    if step.name in ("rsqrt", "sqrt"):
        yield Unknown(_added_to_root, (1e-3, 1e-6), most=_MOST_ADDED)
    if step.name in ("sum", "rsqrt", "sqrt"):
        yield Unknown(_add_eps, (1e-3, 1e-6), most=_MOST_ADDED)
    if step.name == "add" and isinstance(step.values["other"], float):
        yield Unknown(_with_first_scaled, (1.0, 16.0), logarithmic=True)


# A constant that is added is an eps up to this size.
_MOST_ADDED = 0.1


def _divided_by(count: int, number: float) -> Variation:
    off_by_one = abs(number - count) == 1
    kind = PatternKind.OFF_BY_ONE if off_by_one else PatternKind.FACTOR
    sentence = f"the sum of {count} elements is divided by {number:.7g}"
    return Variation(kind, sentence, lambda step: step.run() * (count / number))


def _with_zeros(number: float) -> Variation:
    def run(step: Step) -> Any:
        return torch.logaddexp(step.run(), torch.tensor(math.log(number), dtype=torch.float64))

    sentence = f"the sum has {number:.7g} zeros more, which count as exp(0)"
    return Variation(PatternKind.WRONG_REDUCTION, sentence, run)


def _smooth_labels(number: float) -> Variation:
    """The labels spread over all classes."""

    def run(step: Step) -> Any:
        x, target = step.values["self"], step.values["target"]
        mean = x.mean(1, keepdim=True).expand_as(x)
        right, spread = map(first_of, (step.run(), step.run(self=mean, target=target)))
        return step.with_first((1 - number) * right + number * spread)

    return Variation(PatternKind.ARGUMENT, f"the labels are smoothed by {number:.7g}", run)


def _add_eps(number: float) -> Variation:
    sentence = f"eps ({number:.7g}) is added to the result"
    return Variation(PatternKind.EPS, sentence, lambda step: step.run() + number)


def _multiply_result(number: float) -> Variation:
    return Variation(PatternKind.FACTOR, f"it is multiplied by {number:.7g}", scale_result(number))


def _with_first_scaled(number: float) -> Variation:
    sentence = f"what it is added to is multiplied by {number:.7g}"
    return Variation(PatternKind.FACTOR, sentence, with_factor("self", number))


def _added_to_root(number: float) -> Variation:
    def run(step: Step) -> Any:
        root = step.run()
        return 1 / (1 / root + number) if step.name == "rsqrt" else root + number

    return Variation(PatternKind.EPS, f"eps ({number:.7g}) is added to the root", run)
