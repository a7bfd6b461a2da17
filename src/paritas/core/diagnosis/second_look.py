"""The place again with other operands: what reproduces a candidate by chance does not do so twice.

On the values of one run, many formulas give the same: a maximum is the operand that is always the
larger one, a square of ones is left out, any order of a few values is found in them. An explanation
is a prediction, so it is also compared with what the candidate gives for values it was not made
from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING

import torch

from paritas.core.diagnosis.calls import exchanging
from paritas.core.diagnosis.case import Case, near, noise_of_prediction
from paritas.core.diagnosis.held_operands import held_operands
from paritas.core.diagnosis.place_runs import lengthen_operands, vary_operands
from paritas.core.diagnosis.repetitions import stack_runs
from paritas.core.diagnosis.stating import LIFTED_RUN, OPERAND, is_of_whole
from paritas.core.execution.scouting import FatalAttemptError, attempt_apart
from paritas.core.results.findings import PatternKind
from paritas.core.time_limit import TimeLimit

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from paritas.core.diagnosis.calls import LiveCall
    from paritas.core.diagnosis.place_runs import PlaceRuns
    from paritas.core.results.findings import Pattern

# Larger places take too long to be called again.
_MOST_ELEMENTS = 1 << 20
_MOST_TO_LENGTHEN = 1 << 17
_SECONDS_TO_LENGTHEN = 1.0
# What a prediction must explain of the elements that it is about.
_MOST = 0.9
# An element is explained if this share of its error is left, or the noise.
_LEFT = 0.05
_LEFT_OF_NUMBER = 0.002
# The noise of sums is larger than that of one rounding.
_SLACK = 8.0
# Different second looks, each with how many times larger the operands are: one of them may not show
# the fault.
_LOOKS = ((1, 1.0), (2, 1.0), (3, 16.0))


def repeat_case(case: Case) -> tuple[Case, ...]:
    """The same place with other operands; empty if it cannot be asked again."""
    runs, call = case.context.runs, case.context.call
    if runs is None or call is None or tuple(runs.expected.shape) != case.shape:
        return ()
    if runs.expected.numel() > _MOST_ELEMENTS or not case.context.can_be_run_again:
        return ()
    cases = (_repeat(case, runs, call, operands) for operands in _other_operands(runs, call))
    return tuple(repeated for repeated in cases if repeated is not None)


def lengthen_case(case: Case) -> tuple[Case, ...]:
    """The same place with longer operands; empty if it cannot be asked so."""
    if case.first_run is not None:
        stacked = map(stack_runs, case.first_run.lengthened)
        return tuple(stacked_case for stacked_case in stacked if stacked_case is not None)
    runs, call = case.context.runs, case.context.call
    if runs is None or call is None or runs.remake_candidate is None or not case.repeated:
        return ()
    if sum(operand.numel() for operand in runs.operands) > _MOST_TO_LENGTHEN:
        return ()
    cases = []
    limit = TimeLimit(_SECONDS_TO_LENGTHEN)
    for longer in lengthen_operands(runs.operands):
        if limit.is_over:
            break  # the candidate may have to be compiled anew for each
        operands = vary_operands(longer, _LOOKS[0][0])
        with contextlib.suppress(FatalAttemptError):
            cases.append(attempt_apart(functools.partial(_lengthen, case, runs, call, operands)))
    return tuple(
        longer_case
        for longer_case in cases
        if longer_case is not None and longer_case.is_beyond_noise
    )


def _other_operands(runs: PlaceRuns, call: LiveCall) -> list[tuple[Tensor, ...]]:
    """Operands to ask again with.

    What the reference's call does not show stays as it is, and what the candidate may hold itself:
    a module that replaces another one has copies of its parameters.
    """
    held_places = held_operands(runs, call)
    if len(held_places) == len(runs.operands):
        return []
    varied = [runs.vary(seed, growth=growth, held=held_places) for seed, growth in _LOOKS]
    return varied if runs.earlier is None else [runs.earlier, *varied[1:]]


def _repeat(
    case: Case, runs: PlaceRuns, call: LiveCall, operands: tuple[Tensor, ...]
) -> Case | None:
    """The case with these operands; None if the programs cannot take them."""
    pair = runs.both(operands)
    if pair is None:
        return None
    reference, candidate = pair
    if not bool(torch.isfinite(reference).any()):
        return None
    # Of a candidate that writes in place, the result may have been taken from the first run.
    has_values = bool((candidate != candidate.reshape(-1)[:1]).any())
    if has_values and torch.equal(candidate, runs.given):
        return None
    return _with_operands(case, runs, call, operands, pair)


def _lengthen(
    case: Case, runs: PlaceRuns, call: LiveCall, operands: tuple[Tensor, ...]
) -> Case | None:
    """The case with longer operands; None if the programs cannot take them."""
    pair = runs.both_anew(operands)
    return None if pair is None else _with_operands(case, runs, call, operands, pair)


def _with_operands(
    case: Case,
    runs: PlaceRuns,
    call: LiveCall,
    operands: tuple[Tensor, ...],
    pair: tuple[Tensor, Tensor],
) -> Case:
    """The case with other operands, for which the two programs gave these results."""
    reference, candidate = pair
    exchange = exchanging(runs.operands, operands)
    other = runs.recall(operands) if runs.recall else call.with_operands(runs.operands, operands)
    context = dataclasses.replace(
        case.context,
        call=other,
        inputs=tuple(map(exchange, case.context.inputs)),
        named={name: exchange(tensor) for name, tensor in case.context.named.items()},
        inner=None if runs.inner is None else runs.inner(operands),
        runs=runs.with_operands(operands, pair),
    )
    return Case(candidate, reference, context=context)


def holds_again(case: Case, prediction: Tensor, *, fitted: bool = False) -> bool:
    """Whether a prediction made elsewhere holds here too, or nothing can be seen here.

    It is about the elements that are wrong here, or that it says are wrong.

    Args:
        fitted: a number of it was solved for elsewhere, and so it is nearly right everywhere.
    """
    noise = noise_of_prediction(case, prediction, None)
    about = ~near(case.given, case.right, noise, slack=_SLACK)
    about |= ~near(prediction, case.right, noise, slack=_SLACK)
    if not bool(about.any()):
        return True
    residual = (case.given - prediction).abs()
    fits = near(case.given, prediction, noise, slack=_SLACK) | (
        residual <= (_LEFT_OF_NUMBER if fitted else _LEFT) * case.error.abs()
    )
    return float(fits[about].double().mean()) >= _MOST


def is_found_again(case: Case, pattern: Pattern, propose: Callable[[Case], list[Pattern]]) -> bool:
    """Whether a pattern is proposed for other operands as well, if a fault is seen there."""
    others = [repeated_case for repeated_case in case.repeated if repeated_case.is_beyond_noise]
    # The last one has large operands, which may be beyond the range of a format.
    last = others[1:2] if pattern.kind == PatternKind.PRECISION else others[1:][-1:]
    requested = [*others[:1], *last]
    # Of longer operands, no float64 run is known.
    longer = () if LIFTED_RUN in pattern.evidence else case.lengthened
    return all(
        any(
            _says_the_same(other_pattern, pattern, of_sizes=of_sizes)
            for other_pattern in propose(other)
        )
        for others, of_sizes in ((requested, False), (longer, True))
        for other in others
    )


# What of a pattern's evidence is a number that the candidate was made with.
_NUMBERS = ("factor", "offset", "times", "lower bound", "upper bound", "modulus", "value")
_SAME_NUMBER = 0.02


def _says_the_same(earlier: Pattern, other: Pattern, *, of_sizes: bool) -> bool:
    """Whether two patterns are of one kind, with the same numbers.

    A limit that is another number for other operands is no limit, but follows from them; that of
    an operand that is solved for may follow from the operand.

    Args:
        of_sizes: the sizes are other ones too, from which a factor of all elements may follow.
    """
    if earlier.kind != other.kind:
        return False
    if OPERAND in earlier.evidence or (
        of_sizes and _is_one_factor(earlier) and _is_one_factor(other)
    ):
        return True
    for name in _NUMBERS:
        first, second = (pattern.evidence.get(name, 0.0) for pattern in (earlier, other))
        if isinstance(first, str) or isinstance(second, str):
            continue
        if abs(first - second) > _SAME_NUMBER * max(abs(first), abs(second)):
            return False
    return True


def _is_one_factor(pattern: Pattern) -> bool:
    return pattern.kind == PatternKind.SCALE and is_of_whole(pattern)
