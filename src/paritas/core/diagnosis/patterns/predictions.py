"""The operator with a mistake, run again: what it gives is the prediction.

Every mistake that the operator's arguments and its family suggest is tried in float64 and compared
with the candidate, right elements as well as wrong ones. The mistake that reproduces the candidate
is the explanation. If mistakes of different kinds reproduce it equally well, none is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import operator
import re
from typing import TYPE_CHECKING

import numpy as np
import torch

from paritas.core.diagnosis import effort
from paritas.core.diagnosis.calls import UNUSABLE, WHOLE, step_names
from paritas.core.diagnosis.case import (
    Extent,
    count_partial_axes,
    near,
    same,
    supported_pattern,
    weigh,
    widen,
    wrong_block,
)
from paritas.core.diagnosis.leftovers import fits_honestly, mean_square_left
from paritas.core.diagnosis.patterns.aggregates import aggregate_variations
from paritas.core.diagnosis.patterns.deductions import deduced_variations
from paritas.core.diagnosis.patterns.equivalents import equivalent_calls
from paritas.core.diagnosis.patterns.expressions import altered_variations, expressed_variations
from paritas.core.diagnosis.patterns.families import family_variations, function_call_variations
from paritas.core.diagnosis.patterns.functions import UNARY
from paritas.core.diagnosis.patterns.operations import trusted_formula
from paritas.core.diagnosis.patterns.rivals import (
    Reproduction,
    is_decided,
    is_rival,
    most_likely,
    preference,
)
from paritas.core.diagnosis.patterns.unknowns import shorter_numbers
from paritas.core.diagnosis.patterns.variations import Variation, argument_variations
from paritas.core.diagnosis.patterns.written import changed_values, inner_mistakes, inner_numbers
from paritas.core.diagnosis.repetitions import RepeatedCall, first_runs, may_give_first
from paritas.core.diagnosis.second_look import holds_again
from paritas.core.diagnosis.stating import INSIDE
from paritas.core.execution.saved_state import Copier
from paritas.core.execution.scouting import FatalAttemptError, attempt_apart
from paritas.core.numerics.bits import is_inexact
from paritas.core.results.findings import PatternKind
from paritas.core.torch_private.global_state import quietly
from paritas.core.torch_private.operators import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from paritas.core.diagnosis.calls import LiveCall, Step
    from paritas.core.diagnosis.case import Case
    from paritas.core.diagnosis.patterns.unknowns import Unknown
    from paritas.core.results.findings import Pattern
    from paritas.core.time_limit import TimeLimit

    _Search = Callable[["Predictor"], Sequence["Reproduction | None"]]
    _Suggesting = Callable[["Predictor"], Iterator[tuple[int, Variation]]]
    _Expressing = Callable[[], tuple[int, Sequence[tuple[float, int, Variation]]]]
    from collections.abc import Sequence


# Mistakes are tried for at most this long.
_MOST_SECONDS = 6.0
_MOST_SECONDS_OF_CHANGES = 1.5
_MOST_SECONDS_AGAIN = 1.0
# How close a prediction must be to be tried in the program's own dtype, as a share of the values.
_CLOSE = 1e-5
# Mistakes whose freedom differs by no more than this are equally simple.
_FEW_CHOICES = 4
# Kinds that are seen in several values only: one value everywhere is zeros, or a constant.
_OF_SEVERAL_VALUES = {PatternKind.OTHER_FUNCTION, PatternKind.CLIPPED}
# Predictions that agree in this share of the elements are the same.
_SAME_NUMBERS = 0.98
# Mistakes that are made in all of the result, or not at all: what is left out in a part is a copy.
_OF_ALL = frozenset(
    {
        PatternKind.SWAPPED_OPERANDS,
        PatternKind.MISSING_OPERAND,
        PatternKind.SHIFT,
        PatternKind.PERMUTATION,
        PatternKind.TRANSPOSE,
        PatternKind.WRONG_INDEX,
        PatternKind.STATISTICS,
    }
)
# Operators that put all elements elsewhere: other arguments in a part of the result say nothing.
_MOVING = step_names("orders") | {"flip", "roll"}
# Mistakes that hand an operand on where they are made in a part only: the last element of a
# product from the other end is itself.
_GIVE_A_COPY = {
    *(PatternKind.OTHER_FUNCTION, PatternKind.ARGUMENT, PatternKind.WRONG_REDUCTION),
    *(PatternKind.PARTIAL_SUM, PatternKind.OFF_BY_ONE),
}
# Mistakes that are a number, which does not follow from the operands.
_OF_A_NUMBER = {PatternKind.CLIPPED, PatternKind.SCALE, PatternKind.OFFSET, PatternKind.FACTOR}
# A factor of some indices along one axis is one of that axis.
_FACTORS = {PatternKind.SCALE, PatternKind.FACTOR}
# Fewer numbers than this, of a part, may be those of some mistake by chance.
_FEWEST_IN_PART = 4


class UndecidedError(Exception):
    """Mistakes of several kinds give the candidate on these inputs only, so none can be stated."""


def propose_predictions(case: Case) -> list[Pattern]:
    """What the operator would give with a mistake; many kinds.

    Raises:
        UndecidedError: different mistakes give the same on these inputs.
    """
    call = case.context.call
    if call is None or not case.is_beyond_noise or case.given.is_complex():
        return []
    if is_inexact(case.given) and not bool(torch.isfinite(case.given).any()):
        return []  # many mistakes give nothing but NaN
    calls = itertools.chain([call], call.operators_alone())
    prediction = next(
        filter(None, (Predictor.of(case, candidate_call) for candidate_call in calls)), None
    )
    if prediction is None:
        return _propose_items(case, call)
    with quietly():
        predictor, tried = prediction, 0
        # What is known of one operator says more than what is known of its parts.
        for prediction in filter(None, (predictor.equivalent(), predictor)):
            more, reproductions = prediction.reproductions()
            tried += more
            if reproductions:
                break
    best = most_likely(case, prediction.on_the_way_back(reproductions))
    if not best:
        return _propose_items(case, call)
    chosen = min(best, key=preference)
    if any(is_rival(reproduction, chosen) for reproduction in best):
        return []
    if not is_decided(prediction, best, chosen):
        raise UndecidedError
    weight = chosen.weight.subtract_costs(cost=math.log2(1 + tried))
    if weight is None:
        return []
    evidence: dict[str, float | str] = {"operator": case.context.operator, "tried": float(tried)}
    equal = prediction.share_equal(chosen)
    if equal is not None:
        weight = dataclasses.replace(weight, exact=equal)
    if _is_inside(prediction, chosen):
        evidence[INSIDE] = dict(prediction.steps)[chosen.place].name
    kind, sentence = _describe(case, prediction, chosen)
    return [weight.pattern(kind, sentence, evidence)]


def _is_inside(prediction: Predictor, chosen: Reproduction) -> bool:
    """Whether a mistake says less than a plain word about the whole result, if there is one."""
    is_of_one = len(prediction.steps) > 1 and not chosen.of_call and chosen.place != WHOLE
    return is_of_one or chosen.of_formula or chosen.variation.chosen > 0


def _describe(case: Case, prediction: Predictor, chosen: Reproduction) -> tuple[PatternKind, str]:
    """The kind and the sentence of a mistake, with the operator and the part that it is in."""
    kind, sentence = chosen.variation.kind, chosen.variation.sentence
    steps = dict(prediction.steps)
    function = prediction.function_of_right(chosen) if chosen.of_formula else ""
    if function:
        return PatternKind.OTHER_FUNCTION, f"{function} of the right result"
    if len(steps) > 1 and not chosen.of_call and chosen.place in steps:
        sentence = f"in {steps[chosen.place].operator}: {sentence}"
    if chosen.in_part:
        copied = _copied_operand(case, steps.get(chosen.place))
        if kind in _GIVE_A_COPY and copied:
            kind, sentence = PatternKind.COPY, f"{copied} is handed on as it is"
        if kind in _FACTORS and count_partial_axes(case) == 1:
            kind = PatternKind.AXIS_SCALE
    number = _number_that_is_left(steps.get(chosen.place), chosen)
    if kind is PatternKind.OTHER_FUNCTION and number is not None:
        kind, sentence = PatternKind.MISSING_OPERAND, f"all but {number:.6g} is left out"
    if chosen.in_part:
        sentence = f"{sentence}, but only in a part of the result"
    return kind, sentence


def _number_that_is_left(step: Step | None, chosen: Reproduction) -> float | None:
    """The number among the arguments that a function gives everywhere, as a minimum may."""
    numbers = (
        []
        if step is None
        else [float(number) for number in step.values.values() if type(number) in (int, float)]
    )
    try:
        value = chosen.variation.change(step) if step is not None and numbers else None
    except UNUSABLE:
        return None
    if not isinstance(value, torch.Tensor) or value.numel() < _FEWEST_IN_PART:
        return None
    return next((number for number in numbers if bool((value == number).all())), None)


def _copied_operand(case: Case, step: Step | None) -> str:
    """The operand that the wrong elements are equal to, whichever function gives it there."""
    for name, value in ({} if step is None else step.values).items():
        if isinstance(value, torch.Tensor) and value.shape == case.shape and is_inexact(value):
            is_equal = near(case.given, widen(value), case.allowed)
            if bool(is_equal[case.wrong].all()):
                return name
    return ""


def _propose_items(case: Case, call: LiveCall) -> list[Pattern]:
    try:
        items = call.items
    except UNUSABLE:
        return []
    return propose_items(case, items, is_picked=call.target is operator.getitem)


def _form(sentence: str) -> str:
    """How a mistake is written, whatever its numbers are."""
    return re.sub(r"-?\b\d[\d.e+-]*", "#", sentence)


@dataclasses.dataclass(frozen=True, eq=False)
class Predictor:
    """Runs a call with mistakes, and compares what it gives.

    Attributes:
        output: which of the tensors that the call returns is the one in question.
        is_equivalent: the call is one that stands for the call at the place.
        is_second: it is a second look itself, which needs none.
    """

    case: Case
    call: LiveCall
    output: int
    is_equivalent: bool = False
    is_second: bool = False

    @classmethod
    def of(cls, case: Case, call: LiveCall) -> Predictor | None:
        """None if the call, without a mistake, does not give the right values."""
        try:
            plain = call.results(wide=True) if call.may_be_changed else []
        except UNUSABLE:
            return None
        for output, value in enumerate(plain):
            fits = tuple(value.shape) == case.shape and not value.is_complex()
            if fits and trusted_formula(case, functools.partial(widen, value)) is not None:
                predictor = cls(case, call, output)
                return predictor if predictor.steps or call.function_step is not None else None
        return None

    @functools.cached_property
    def steps(self) -> tuple[tuple[int, Step], ...]:
        """The operators that the value depends on."""
        return self.call.steps_towards(self.output)

    def on_the_way_back(self, reproductions: list[Reproduction]) -> list[Reproduction]:
        """Of a gradient, the mistakes in backward kernels: what came before was right."""
        steps = dict(self.steps)
        back = [
            reproduction
            for reproduction in reproductions
            if reproduction.place in steps
            and "backward" in steps[reproduction.place].name
            and not reproduction.in_part
        ]
        return back or reproductions

    def equivalent(self) -> Predictor | None:
        """The same with one operator instead of several, if it is known."""
        predictors = (
            Predictor.of(self.case, equivalent_call)
            for equivalent_call in equivalent_calls(self.call)
        )
        predictor = next((attempt for attempt in predictors if attempt is not None), None)
        return None if predictor is None else dataclasses.replace(predictor, is_equivalent=True)

    def value(
        self, position: int, change: Callable[[Step], object] | None, *, wide: bool
    ) -> Tensor | None:
        """The value in question with a mistake; None if that cannot be computed."""
        try:
            value = self.call.results(position, change, wide=wide)[self.output]
        except UNUSABLE:
            return None
        if value.numel() != self.case.reference.numel() or value.is_complex():
            return None
        return value.reshape(self.case.shape)

    def with_operand(self, number: int, operand: Tensor) -> Tensor | None:
        """The value in question, in float64, with another floating-point tensor of the call."""
        # The call is also run as it is, where all must have one dtype.
        operands = [
            tensor.to(torch.promote_types(tensor.dtype, operand.dtype))
            for tensor in self.call.floating
        ]
        operands[number] = operand
        try:
            call = self.call.with_floating(operands)
        except UNUSABLE:
            return None
        value = dataclasses.replace(self, call=call).value(WHOLE, None, wide=True)
        return None if value is None else widen(value)

    def reproductions(self) -> tuple[int, list[Reproduction]]:
        """How many mistakes were tried, and those that reproduce the candidate."""
        tried, reproductions = self._known_mistakes()
        if not all(reproduction.in_part for reproduction in reproductions):
            return tried, reproductions
        # One expression for all elements says more than a mistake in a part of them.
        more, expressions = self._expressions
        return tried + more, reproductions + [
            expression for expression in expressions if not (reproductions and expression.in_part)
        ]

    def _known_mistakes(self) -> tuple[int, list[Reproduction]]:
        limit = effort.limit_search(_MOST_SECONDS * self.case.context.patience)
        tried, reproductions = self._try_all(Predictor._variations, limit)
        if reproductions:
            return tried, reproductions
        for position, step in self.steps:
            with contextlib.suppress(FatalAttemptError):
                deduce = functools.partial(self._deductions, position, step, limit)
                deductions = attempt_apart(deduce)
                tried += len(deductions)
                reproductions += filter(None, deductions)
        if reproductions:
            return tried, reproductions
        more, reproductions = self._try_all(Predictor._inner_mistakes, limit)
        tried += more
        if reproductions:
            return tried, [
                dataclasses.replace(reproduction, of_formula=True) for reproduction in reproductions
            ]
        more, reproductions = self._changes()
        tried += more
        if reproductions:
            return tried, reproductions
        for which, (position, unknown) in enumerate(inner_numbers(self.steps)):
            if limit.is_over:
                break
            tried += 1
            with contextlib.suppress(FatalAttemptError):
                solution = attempt_apart(
                    functools.partial(self._solution, position, unknown, which)
                )
                reproductions += [] if solution is None else [solution]
        return tried, [
            dataclasses.replace(reproduction, of_formula=True) for reproduction in reproductions
        ]

    def _changes(self) -> tuple[int, list[Reproduction]]:
        """Something that was done to the result, to an operand or to a value on the way."""
        limit = effort.limit_search(_MOST_SECONDS_OF_CHANGES * self.case.context.patience)
        tried = 0
        for number, _ in enumerate(self._changed_values()):
            make = functools.partial(Predictor._changes_of, number=number)
            more, reproductions = self._try_all(make, limit)
            tried += more
            if reproductions or limit.is_over:
                # What is done to the result of the last operator is done to that of the call.
                of_call = number == 0 and self._last_output is not None
                return tried, [
                    dataclasses.replace(reproduction, of_call=of_call)
                    for reproduction in reproductions
                ]
        return tried, []

    def _changed_values(self) -> Iterator[Iterator[tuple[int, Variation]]]:
        shape = None
        if self._last_output is not None:
            shape = self.case.shape[1:] if isinstance(self.call, RepeatedCall) else self.case.shape
        return changed_values(self.steps, self._last_output or 0, shape)

    def _changes_of(self, *, number: int) -> Iterator[tuple[int, Variation]]:
        return next(itertools.islice(self._changed_values(), number, None), iter(()))

    def _inner_mistakes(self) -> Iterator[tuple[int, Variation]]:
        return inner_mistakes(self.steps)

    def _found_expressions(self) -> list[Reproduction]:
        return self._expressions[1]

    @functools.cached_property
    def _expressions(self) -> tuple[int, list[Reproduction]]:
        """How many expressions were tried, and the shortest ones that reproduce the candidate."""
        part = torch.ones(self.case.shape, dtype=torch.bool)
        part = self._limit_to_block(part, torch.zeros_like(part))
        tried = 0
        for of_call, position, search in self._expression_searches(part):
            more, expressions = search()
            tried += more
            reproductions = self._shortest(position, expressions)
            if reproductions:
                return tried, [
                    dataclasses.replace(reproduction, of_call=of_call)
                    for reproduction in reproductions
                ]
        return tried, []

    def _expression_searches(self, part: Tensor) -> Iterator[tuple[bool, int, _Expressing]]:
        """What is searched for expressions: the last operator, and a function as a whole."""
        if self._last_output == 0:
            position, step = self.steps[-1]
            yield False, position, functools.partial(altered_variations, step, self.case)
            yield False, position, functools.partial(expressed_variations, step, self.case, part)
            aggregates = functools.partial(aggregate_variations, self.case, self.call.floating)
            yield True, position, aggregates
        function_step = self.call.function_step
        if function_step is not None:
            yield (
                True,
                WHOLE,
                functools.partial(expressed_variations, function_step, self.case, part),
            )

    def _shortest(
        self, position: int, expressions: Sequence[tuple[float, int, Variation]]
    ) -> list[Reproduction]:
        """The shortest expressions that reproduce the candidate."""
        for _, alike in itertools.groupby(expressions, key=operator.itemgetter(0)):
            reproductions = []
            for _, numbers, variation in alike:
                may_hold = self._may_reproduce(position, variation)
                prediction = self._prediction(position, variation) if may_hold else None
                if prediction is not None:
                    reproductions.append(
                        self._reproduction(
                            position,
                            variation,
                            prediction,
                            parameters=numbers,
                            search=Predictor._found_expressions,
                        )
                    )
            if any(reproductions):
                return [reproduction for reproduction in reproductions if reproduction is not None]
        return []

    @functools.cached_property
    def _last_output(self) -> int | None:
        """Which result of the last operator is the value in question; None if more is done."""
        if not self.steps:
            return None
        _, step = self.steps[-1]
        right, allowed = self.case.right, self.case.allowed
        if isinstance(self.call, RepeatedCall):
            right, allowed = right[0], allowed[0]
        for output, value in enumerate(self._results_of(step)):
            is_alike = value.numel() == right.numel() and not value.is_complex()
            if is_alike and bool(near(widen(value).reshape(right.shape), right, allowed).all()):
                return output
        return None

    def _results_of(self, step: Step) -> list[Tensor]:
        """What an operator gives, in float64 if that is what the value in question is held to."""
        if self.case.candidate.dtype != torch.float64:
            return tensors_in(step.run())
        values = Copier(widen=True).copy_tree(dict(step.values))
        with contextlib.suppress(*UNUSABLE):
            return tensors_in(dataclasses.replace(step, values=values).run())
        return tensors_in(step.run())

    def _try_all(self, suggest: _Suggesting, limit: TimeLimit) -> tuple[int, list[Reproduction]]:
        """How many of these were tried in time, and those that reproduce the candidate."""
        tried = 0
        reproductions: list[Reproduction] = []
        for position, variation in suggest(self):
            with contextlib.suppress(FatalAttemptError):
                trial = attempt_apart(functools.partial(self._trial, position, variation, suggest))
                tried += trial is not None
                reproductions += trial or []
            if limit.is_over:
                break
        return tried, reproductions

    def _trial(
        self, position: int, variation: Variation, suggest: _Suggesting
    ) -> list[Reproduction] | None:
        """The mistake if it reproduces the candidate; None if it cannot be made."""
        if not self._may_reproduce(position, variation):
            return []
        prediction = self._prediction(position, variation)
        if prediction is None:
            return None
        reproduction = self._reproduction(position, variation, prediction, suggest=suggest)
        return [] if reproduction is None else [reproduction]

    def _may_reproduce(self, position: int, variation: Variation) -> bool:
        """Whether a mistake gives the first of several runs, which most of them do not."""
        if not isinstance(self.call, RepeatedCall):
            return True
        try:
            value = self.call.first.results(position, variation.change, wide=True)[self.output]
        except UNUSABLE:
            return False
        return may_give_first(self.case, value)

    def _prediction(self, position: int, variation: Variation) -> Tensor | None:
        value = self.value(position, variation.change, wide=True)
        return None if value is None else widen(value)

    def _reproduction(
        self,
        position: int,
        variation: Variation,
        prediction: Tensor,
        *,
        parameters: int = 0,
        search: _Search | None = None,
        suggest: _Suggesting | None = None,
    ) -> Reproduction | None:
        """The mistake if it reproduces the candidate, for these operands and for others.

        Args:
            parameters: how many numbers were fitted to make it.
            search: how it was found, if it was made from the candidate's values.
            suggest: what suggested it, if it was made from the operands; those of another length
                may need it in another form.
        """
        if not (self._may_hold(prediction) or self._is_near_natively(prediction)):
            return None  # as most of them
        if variation.kind in _OF_SEVERAL_VALUES and self._is_one_value(prediction):
            return None
        if not bool(prediction.any()) and variation.kind is not PatternKind.MISSING_OPERAND:
            return None  # every factor gives zeros: they are a kind of their own
        if variation.kind is PatternKind.OTHER_FUNCTION and self._is_multiple(prediction):
            return None
        slack = self._growth(prediction)
        for in_part in (False, True) if self._may_be_local(position, variation) else (False,):
            if in_part:
                if not bool(prediction[self.case.wrong].any()):
                    break  # zeros in a part are a kind of their own
                prediction, slack = self._limit_to_block(prediction, self.case.right), 1.0
            weight = weigh(
                self.case, prediction, extent=Extent.ALL, parameters=parameters, slack=slack
            )
            if weight is not None and fits_honestly(self.case, prediction, slack=slack):
                residual = mean_square_left(self.case, prediction)
                reproduction = Reproduction(variation, position, weight, residual, in_part)
                # What is refuted as a whole is no mistake in a part either.
                return reproduction if self._holds_again(reproduction, search, suggest) else None
        found_natively = self._native_reproduction(position, variation, prediction, parameters)
        if found_natively is None or not self._holds_again(found_natively, search, suggest):
            return None
        return found_natively

    def _may_be_local(self, position: int, variation: Variation) -> bool:
        """Whether a mistake may be made in a part of the result only."""
        step = dict(self.steps).get(position)
        is_moving = step is not None and step.name in _MOVING
        return self._block is not None and variation.kind not in _OF_ALL and not is_moving

    def _is_one_value(self, prediction: Tensor) -> bool:
        """Whether one value is predicted everywhere, where there should be several.

        Many functions give it, and none of them shows.
        """
        values, right = prediction.flatten(), self.case.right.flatten()
        return bool((values == values[0]).all()) and not bool((right == right[0]).all())

    def _is_multiple(self, prediction: Tensor) -> bool:
        """Whether it is the right value with another sign or a short factor, which have kinds."""
        right = self.case.right
        size = right.abs()
        if not bool(torch.isfinite(prediction).all()) or not float(size.max()) > 0:
            return False
        largest = size.flatten().argmax()
        factor = float((prediction / right).flatten()[largest])
        short = float(f"{factor:.2g}")
        is_same = torch.allclose(prediction, short * right, rtol=_CLOSE, atol=0.0)
        return short != 0 and is_same and len(size.unique()) > 1

    def _native_reproduction(
        self,
        position: int,
        variation: Variation,
        prediction: Tensor,
        parameters: int,
    ) -> Reproduction | None:
        """The mistake in the program's own dtype, whose noise may be larger than the right one's.

        As where 1 + erf(x) is nearly 0: there, no other value has the rounding of this one.
        """
        if not self._is_near_natively(prediction):
            return None
        value = self.value(position, variation.change, wide=False)
        if value is None:
            return None
        value = widen(value)
        weight = weigh(self.case, value, extent=Extent.ALL, parameters=parameters)
        if weight is None or not fits_honestly(self.case, value):
            return None
        return Reproduction(variation, position, weight, mean_square_left(self.case, value))

    def _is_near_natively(self, prediction: Tensor) -> bool:
        """Whether a prediction in float64 may be that of the program's own dtype."""
        if self.case.is_exact or self.case.candidate.dtype == torch.float64:
            return False
        candidate, limit = self.case.given, self._native_limit
        is_near = (candidate - prediction).abs() <= limit
        if 2 * int(is_near.count_nonzero()) < is_near.numel() - 1:
            return False  # without the median, which takes longer
        return float((candidate - prediction).abs().median()) <= limit

    @functools.cached_property
    def _native_limit(self) -> float:
        return _CLOSE * float(self.case.given.abs().median())

    def _holds_again(
        self, reproduction: Reproduction, search: _Search | None, suggest: _Suggesting | None
    ) -> bool:
        """Whether the mistake gives what the candidate gives for other operands, too."""
        if not self._again and not self.is_second and self.case.shows_again:
            return False  # the call is not what the reference computes with other operands
        for predictor, is_longer in self._again:
            if is_longer and suggest is not None:  # lengths may be among its numbers
                holds = reproduction.in_part or predictor._makes_again(reproduction, suggest)  # noqa: SLF001
            else:
                holds = predictor._is_met(reproduction, self)  # noqa: SLF001
            if not holds and not predictor._finds(reproduction, search):  # noqa: SLF001
                return False
        return True

    def _is_met(self, reproduction: Reproduction, first: Predictor) -> bool:
        """Whether a mistake that was found with other operands holds; also if it cannot be made."""
        for wide in (True, False):
            value = self.value(reproduction.place, reproduction.variation.change, wide=wide)
            if value is None:
                return True
            prediction = widen(value)
            if reproduction.in_part:
                if prediction.shape != first.case.shape:
                    return True  # it is not known which part that would be
                prediction = first._limit_to_block(prediction, self.case.right)
            if holds_again(self.case, prediction, fitted=reproduction.weight.fitted > 0):
                return True
        return False

    def _finds(self, reproduction: Reproduction, search: _Search | None) -> bool:
        """Whether a search finds the same kind of mistake; a number must be the same one.

        Expressions are the same only if they are written alike: any function of an element is
        another function.
        """
        first = reproduction.variation
        if search is None or first.kind in _OF_A_NUMBER:
            return False
        with contextlib.suppress(*UNUSABLE):
            others = [
                reproduction_found.variation
                for reproduction_found in search(self)
                if reproduction_found is not None
            ]
            if search is Predictor._found_expressions:
                others = [
                    variation
                    for variation in others
                    if _form(variation.sentence) == _form(first.sentence)
                ]
            return any(variation.kind is first.kind for variation in others)
        return False

    def _makes_again(self, reproduction: Reproduction, suggest: _Suggesting) -> bool:
        """Whether the same mistake, made for these operands, reproduces the candidate.

        Also if there is no time to find out.
        """
        form = _form(reproduction.variation.sentence)

        def suggest_alike(predictor: Predictor) -> Iterator[tuple[int, Variation]]:
            every = suggest(predictor)
            return ((position, each) for position, each in every if _form(each.sentence) == form)

        limit = effort.limit_search(_MOST_SECONDS_AGAIN)
        return bool(self._try_all(suggest_alike, limit)[1]) or limit.is_over

    def function_of_right(self, reproduction: Reproduction) -> str:
        """The function of the right values that a mistake gives, if it is one that has a name."""
        prediction, right = (
            self._prediction(reproduction.place, reproduction.variation),
            self.case.right,
        )
        if prediction is None or reproduction.in_part or len(right.unique()) <= _FEW_CHOICES:
            return ""
        is_given = functools.partial(torch.allclose, prediction, rtol=_CLOSE, atol=0.0)
        return next((name for name, function in UNARY.items() if is_given(function(right))), "")

    @functools.cached_property
    def _again(self) -> list[tuple[Predictor, bool]]:
        """The same call with other operands, where both programs were asked again.

        With each, whether its operands are longer.
        """
        predictors: list[tuple[Predictor, bool]] = []
        others = [*self.case.repeated, *self.case.lengthened]
        for number, other in enumerate([] if self.is_second else others):
            call = other.context.call
            predictor = None if call is None else Predictor.of(other, call)
            if predictor is not None and self.is_equivalent:
                predictor = predictor.equivalent()
            if predictor is not None and predictor.output == self.output:
                is_longer = number >= len(self.case.repeated)
                predictors.append((dataclasses.replace(predictor, is_second=True), is_longer))
        return predictors

    @functools.cached_property
    def _block(self) -> Tensor | None:
        """The block that is wrong; None if it is the whole, or has one value or few only."""
        inside = self._inside
        candidate = self.case.given[inside]
        if bool(inside.all()) or bool((candidate == candidate[0]).all()):
            return None
        return inside if int(torch.isfinite(candidate).sum()) >= _FEWEST_IN_PART else None

    @functools.cached_property
    def _inside(self) -> Tensor:
        inside = torch.ones((), dtype=torch.bool)
        for axis, index in enumerate(wrong_block(self.case).indices):
            hit = torch.zeros(self.case.shape[axis], dtype=torch.bool)
            hit[index] = True
            inside = inside.unsqueeze(-1) & hit
        return inside

    def _limit_to_block(self, prediction: Tensor, elsewhere: Tensor) -> Tensor:
        """The prediction in the block that is wrong, and something else around it."""
        return (
            prediction if self._block is None else torch.where(self._block, prediction, elsewhere)
        )

    def _deductions(self, position: int, step: Step, limit: TimeLimit) -> list[Reproduction | None]:
        """The mistakes that the candidate itself shows; None for one that does not reproduce it."""

        def predict(variation: Variation) -> Tensor | None:
            is_late = limit.is_over
            return None if is_late else self._prediction(position, variation)

        def deduce(other: Predictor) -> list[Reproduction | None]:
            steps = dict(other.steps)
            return other._deductions(position, steps[position], limit) if position in steps else []

        reproductions = []
        for variation in deduced_variations(
            step, predict, self.case.given, self._inside, self.call.floating
        ):
            prediction = predict(variation)
            if prediction is not None:
                fitted = max(1, variation.fitted)
                reproductions.append(
                    self._reproduction(
                        position, variation, prediction, parameters=fitted, search=deduce
                    )
                )
        return reproductions

    def _may_hold(self, prediction: Tensor) -> bool:
        """Whether it may hold for the whole or a part, after a look at some elements."""
        look, sizes = self.case.first_look, self._some_right_sizes
        told = sizes > 0
        if not told.any():
            return look.may_hold(prediction, slack=self._growth(prediction))
        with np.errstate(all="ignore"):
            # Of all elements, it grows by no more than this.
            growth = float((np.abs(look.values_of(prediction)) / sizes)[told].min())
        return look.may_hold(prediction, slack=max(1.0, growth))

    @functools.cached_property
    def _some_right_sizes(self) -> np.ndarray:
        sizes: np.ndarray = np.abs(self.case.first_look.values_of(self.case.right))
        return sizes

    def _growth(self, prediction: Tensor) -> float:
        """How much larger every element is, and its noise with it, as in a sum for a mean."""
        size, told, is_finite = self._right_sizes
        # A prediction or a right value that is infinite says nothing about noise.
        if not (is_finite and bool(torch.isfinite(prediction).all())):
            return 1.0
        ratios = prediction.abs() / size if told is None else prediction.abs()[told] / size
        return max(1.0, float(ratios.min())) if ratios.numel() else 1.0

    @functools.cached_property
    def _right_sizes(self) -> tuple[Tensor, Tensor | None, bool]:
        """Of the right values that are not zero; where these are, None for everywhere."""
        size = self.case.right.abs()
        told = size > 0
        is_finite = bool(torch.isfinite(size).all())
        return (size, None, is_finite) if bool(told.all()) else (size[told], told, is_finite)

    def _solution(self, position: int, unknown: Unknown, which: int) -> Reproduction | None:
        """The mistake with the shortest number that reproduces the candidate.

        Args:
            which: the place of the unknown number among all.
        """
        if not self._again and self._is_one_difference:
            return None  # one number is solved for, and there is one equation
        # Of longer operands it may be another one, such as the root of a length.
        again = functools.partial(Predictor._solved_again, which=which)
        for short in self._solve(position, unknown):
            variation = unknown.variation(short)
            prediction = self._prediction(position, variation)
            if prediction is not None:
                reproduction = self._reproduction(
                    position, variation, prediction, parameters=1, suggest=again
                )
                if reproduction is not None:
                    return None if self._may_be_larger(position, unknown, short) else reproduction
        return None

    def _solve(self, position: int, unknown: Unknown) -> Iterator[float]:
        """The number that is nearest to the candidate, the shortest first."""
        brief = self._of_few_runs
        predict = functools.partial(brief._prediction, position)  # noqa: SLF001  (its own)
        number = unknown.solve(predict, brief.case.given)
        shorter = () if number is None else shorter_numbers(number)
        return (
            solution for solution in shorter if not unknown.whole or solution == round(solution)
        )

    def _solved_again(self, which: int) -> Iterator[tuple[int, Variation]]:
        position, unknown = next(itertools.islice(inner_numbers(self.steps), which, None))
        return (
            (position, unknown.variation(solution)) for solution in self._solve(position, unknown)
        )

    @functools.cached_property
    def _is_one_difference(self) -> bool:
        """Whether all wrong elements are wrong by the same number."""
        error, noise = self.case.error[self.case.wrong], self.case.allowed[self.case.wrong]
        if isinstance(self.call, RepeatedCall) or error.numel() < 1:
            return False
        return bool(near(error, error.flatten()[0].expand_as(error), 2 * noise).all())

    @functools.cached_property
    def _of_few_runs(self) -> Predictor:
        """The same for as many runs as it takes to solve for a number."""
        if not isinstance(self.call, RepeatedCall):
            return self
        case, call = first_runs(self.case, self.call)
        return dataclasses.replace(self, case=case, call=call)

    def _may_be_larger(self, position: int, unknown: Unknown, number: float) -> bool:
        """Whether a large number twice as large would give the same: then it is not that number."""
        if abs(number) <= 1:
            return False
        values = [
            self._prediction(position, unknown.variation(solution))
            for solution in (number, 2 * number)
        ]
        first, second = values
        if first is None or second is None:
            return False
        return float(near(first, second, self.case.unit).double().mean()) >= _SAME_NUMBERS

    def _variations(self) -> Iterator[tuple[int, Variation]]:
        # In this order and in turns, because the time may not suffice for all.
        if self.call.function_step is not None:
            for variation in function_call_variations(self.call.function_step):
                yield WHOLE, variation
        for position, step in self.steps:
            if len(self.steps) > 1 and not tensors_in(list(step.values.values())):
                continue  # a number made inside of a call, such as what a mask becomes
            turns = itertools.zip_longest(family_variations(step), argument_variations(step))
            for variation in itertools.chain.from_iterable(turns):
                if variation is not None:
                    yield position, variation

    def share_equal(self, reproduction: Reproduction) -> float | None:
        """The share of elements that are reproduced bit for bit in the program's own dtype."""
        value = self.value(reproduction.place, reproduction.variation.change, wide=False)
        candidate, reference = self.case.candidate.detach(), self.case.reference.detach()
        if value is None or value.dtype != candidate.dtype:
            return None
        if reproduction.in_part and reference.dtype == value.dtype:
            value = self._limit_to_block(value.cpu(), reference.cpu())
        return float(same(value.cpu(), candidate.cpu()).double().mean())


# --- A value that is picked from several tensors --------------------------------------------------


# The most numbers that are compared to find where slices come from.
_MOST_COMPARED = 1 << 24


def propose_items(case: Case, items: Sequence[Tensor], *, is_picked: bool) -> list[Pattern]:
    """Another of several tensors than the right one.

    Args:
        is_picked: the reference picks one of them.
    """
    cost = math.log2(1 + len(items))
    alike = [
        (index, widen(item)) for index, item in enumerate(items) if tuple(item.shape) == case.shape
    ]
    right = next(
        (
            index
            for index, operand in alike
            if trusted_formula(case, functools.partial(widen, operand)) is not None
        ),
        None,
    )
    for position, tensor in alike:
        if right is not None and position != right:
            sentence = f"item {position} instead of item {right}"
            kind = PatternKind.WRONG_INDEX
            pattern = supported_pattern(case, tensor, kind, sentence, cost=cost)
            if pattern is not None:
                return [pattern]
    is_known = is_picked and right is not None
    return _propose_slices(case, [operand for _, operand in alike]) if is_known else []


def _propose_slices(case: Case, items: list[Tensor]) -> list[Pattern]:
    """Slices of several tensors: they were divided in another way."""
    for axis, size in enumerate(case.shape):
        every = torch.cat(items, axis) if len(items) > 1 and size > 1 else None
        if every is None or every.numel() * size > _MOST_COMPARED:
            continue
        rows, target = (tensor.movedim(axis, 0).flatten(1) for tensor in (every, case.given))
        source = torch.cdist(target.nan_to_num(0.0), rows.nan_to_num(0.0)).argmin(dim=1)
        sentence = f"the slices along axis {axis} are those of other items"
        cost = size * math.log2(len(rows))
        value = every.index_select(axis, source)
        pattern = supported_pattern(case, value, PatternKind.WRONG_INDEX, sentence, cost=cost)
        if pattern is not None:
            return [pattern]
    return []
