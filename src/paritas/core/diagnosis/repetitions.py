"""A result of few numbers, with those of further runs beside it.

Of one number, such as a loss, any of hundreds of mistakes may be the reason. If both programs can
be called again, their results for other operands are stacked along a new first axis. A mistake must
then give all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.calls import UNUSABLE, WHOLE, LiveCall
from paritas.core.diagnosis.case import Case, near, widen
from paritas.core.diagnosis.held_operands import held_operands
from paritas.core.numerics.bits import is_inexact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step
    from paritas.core.diagnosis.place_runs import PlaceRuns

# A result of so many numbers decides by itself, unless it only has so many different ones.
_ENOUGH = 16
_FEW_VALUES = 3
_MOST_RESULTS = 1 << 12
# So many runs are asked for, with the one that is known, and so many results must be finite.
_RUNS = 24
_FEWEST_RUNS = 5
# A call that has to be repeated for each of them is repeated so often.
_CALLS = 8
# Larger operands take too long to be run so often.
_MOST_ELEMENTS = 1 << 16


def stack_runs(case: Case) -> Case | None:
    """The case with further runs of both programs; None if it needs none or has none."""
    runs, call = case.context.runs, case.context.call
    if runs is None or call is None or not _may_be_stacked(case, runs):
        return None
    fixed_operands = held_operands(runs, call)
    if len(fixed_operands) == len(runs.operands):
        fixed_operands = []  # it reads nothing, or holds all: a mistake that reads them is refuted
    every = [
        runs.operands,
        *(_other_operands(runs, fixed_operands, seed) for seed in range(1, _RUNS)),
    ]
    usable: list[Sequence[Tensor]] = []
    pairs: list[tuple[Tensor, Tensor]] = []
    for operands in every:
        pair = runs.both(operands)
        if pair is not None and _are_finite(*pair):
            usable.append(operands)
            pairs.append(pair)
    # What has the same result again, such as that of a mask, is no further evidence.
    is_new = any(not torch.equal(right, pairs[0][0]) for right, _ in pairs[1:])
    if len(pairs) < _FEWEST_RUNS or not is_new:
        return None
    right, candidate_result = (torch.stack(side) for side in zip(*pairs, strict=True))
    for number, calls in _repeated_calls(call, runs, usable):
        context = dataclasses.replace(
            case.context,
            call=calls,
            inputs=(),
            arguments={},
            named={},
            earlier={},
            inner=None,
            stacked=True,
        )
        repeated = Case(candidate_result[:number], right[:number], context=context, first_run=case)
        if _gives(calls, repeated):
            return repeated
    return None


# The noise of one run may be larger than the mean of several says.
_SLACK = 100.0


def may_give_first(case: Case, value: Tensor) -> bool:
    """Whether a prediction of the first of several runs is near enough to predict the others."""
    candidate, right, allowed = (tensor[0] for tensor in (case.given, case.right, case.allowed))
    if value.numel() != candidate.numel() or value.is_complex():
        return False
    value = widen(value).reshape(candidate.shape)
    # What is larger everywhere, as a sum for a mean, has a larger noise.
    growth = float((value.abs() / right.abs()).nan_to_num(1.0, 1.0).max())
    return bool(near(candidate, value, allowed, slack=_SLACK * max(1.0, growth)).any())


def _may_be_stacked(case: Case, runs: PlaceRuns) -> bool:
    if not is_inexact(runs.expected) or not _has_few_values(case.reference):
        return False
    count = sum(operand.numel() for operand in runs.operands)
    return 0 < count <= _MOST_ELEMENTS and case.context.can_be_run_again


def _has_few_values(reference: Tensor) -> bool:
    """Whether it has few elements, or few different ones, as the gradient of a mean."""
    if reference.numel() < _ENOUGH:
        return True
    return reference.numel() <= _MOST_RESULTS and len(reference.unique()) <= _FEW_VALUES


def _are_finite(*values: Tensor) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in values)


def _other_operands(runs: PlaceRuns, unchanged: Sequence[int], seed: int) -> tuple[Tensor, ...]:
    """Other values of the same kind; in half of the runs single numbers of any sign and size."""
    varied = runs.vary(seed, held=unchanged)
    if seed % 2:
        return varied
    draw = torch.Generator().manual_seed(seed)
    factors = (3 * torch.rand(len(varied), generator=draw) - 1.5).tolist()
    return runs.settle_operands(
        [
            operand * factor if _is_one_number(operand) and position not in unchanged else operand
            for position, (operand, factor) in enumerate(zip(varied, factors, strict=True))
        ]
    )


def _is_one_number(operand: Tensor) -> bool:
    return operand.numel() == 1 and operand.is_floating_point()


# --- The call with several sets of operands -------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class RepeatedCall(LiveCall):
    """A call, and the same call with other operands; its results are stacked.

    Attributes:
        others: the calls with other operands.
    """

    others: tuple[LiveCall, ...] = ()

    def results(
        self,
        position: int = WHOLE,
        change: Callable[[Step], Any] | None = None,
        *,
        wide: bool,
    ) -> list[Tensor]:
        """The tensors that the calls return, stacked, with one operator changed in all of them."""
        every = [super().results(position, change, wide=wide)]
        every += (call.results(position, change, wide=wide) for call in self.others)
        return [torch.stack(alike) for alike in zip(*every, strict=True)]

    @property
    def floating(self) -> list[Tensor]:
        """The floating-point tensors among the arguments of all calls, stacked."""
        every = [super().floating, *(call.floating for call in self.others)]
        return [torch.stack(alike) for alike in zip(*every, strict=True)]

    def with_floating(self, values: Sequence[Tensor]) -> RepeatedCall:
        """The calls with other floating-point tensors, stacked as these are."""
        number = 1 + len(self.others)
        return _join_repeated_calls(
            [
                call.with_floating([value[position] for value in values])
                for position, call in zip(range(number), (self.first, *self.others), strict=True)
            ]
        )

    @functools.cached_property
    def first(self) -> LiveCall:
        """The call with the operands that are known."""
        return LiveCall(self.target, self.args, self.kwargs)


# Numbers are solved for with so many runs.
_SOLVED_WITH = 3


def first_runs(case: Case, call: RepeatedCall) -> tuple[Case, RepeatedCall]:
    """The first runs of a case that is repeated, to solve for a number."""
    calls = [call.first, *call.others][:_SOLVED_WITH]
    noise = None if case.noise is None else case.noise[:_SOLVED_WITH]
    candidate, reference = (tensor[:_SOLVED_WITH] for tensor in (case.candidate, case.reference))
    few = dataclasses.replace(case, candidate=candidate, reference=reference, noise=noise)
    return few, _join_repeated_calls(calls)


def split_runs(case: Case, call: RepeatedCall) -> list[Case]:
    """The runs of a case that is repeated, each by itself."""
    return [
        Case(
            candidate,
            reference,
            context=dataclasses.replace(case.context, call=other_call, stacked=False),
        )
        for candidate, reference, other_call in zip(
            case.candidate, case.reference, (call.first, *call.others), strict=True
        )
    ]


def _repeated_calls(
    call: LiveCall, runs: PlaceRuns, every: Sequence[Sequence[Tensor]]
) -> Iterator[tuple[int, LiveCall]]:
    """One call of stacked operands, the call as it is, then what the reference runs there.

    With each, how many of the runs it is for.
    """
    replaced = [call.with_operands(runs.operands, operands) for operands in every]
    # Of a result with axes, those of its operators would be others.
    is_number = runs.expected.dim() == 0
    if is_number and all(tensor.dim() == 0 for tensor in call.floating):
        with contextlib.suppress(ValueError):
            yield len(every), call.with_floating(_join_repeated_calls(replaced).floating)
    number = min(_CALLS, len(every))
    yield number, _join_repeated_calls(replaced[:number])
    live_calls = [
        LiveCall(functools.partial(_run_all, runs), tuple(operands), {})
        for operands in every[:number]
    ]
    yield number, _join_repeated_calls(live_calls)


def _join_repeated_calls(calls: Sequence[LiveCall]) -> RepeatedCall:
    first, *others = calls
    return RepeatedCall(first.target, first.args, first.kwargs, tuple(others))


def _run_all(runs: PlaceRuns, *operands: Tensor) -> Any:
    return runs.run_reference(operands)


def _gives(calls: LiveCall, case: Case) -> bool:
    """Whether one of the results is the reference's in all runs."""
    try:
        results = calls.results(wide=False) if calls.may_be_changed else []
    except UNUSABLE:
        return False
    return any(
        tuple(tensor.shape) == case.shape
        and not tensor.is_complex()
        and bool(near(widen(tensor), case.right, case.allowed).all())
        for tensor in results
    )
