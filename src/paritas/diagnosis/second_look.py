"""The place again with other operands: what reproduces a candidate by chance does not do so twice.

On the values of one run, many formulas give the same: a maximum is the operand that is always the
larger one, a square of ones is left out, any order of a few values is found in them. An explanation
is a prediction, so it is also compared with what the candidate gives for values it was not made
from.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.calls import is_same_tensor
from paritas.diagnosis.case import Case, near, noise_of_prediction, same
from paritas.diagnosis.dependence import is_of_slices
from paritas.diagnosis.place_runs import vary_operands
from paritas.diagnosis.stating import OPERAND
from paritas.execution.scouting import is_scout

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from paritas.diagnosis.calls import LiveCall
    from paritas.diagnosis.place_runs import PlaceRuns
    from paritas.results.findings import Pattern

# Larger places take too long to be called again.
_MOST_ELEMENTS = 1 << 20
# What a prediction must explain of the elements that it is about.
_MOST = 0.9
# An element is explained if this share of its error is left, or the noise.
_LEFT = 0.05
# The noise of sums is larger than that of one rounding.
_SLACK = 8.0
# Two different second looks: one of them may not show the fault.
_SEEDS = (1, 2)


def repeat_case(case: Case) -> tuple[Case, ...]:
    """The same place with other operands; empty if it cannot be asked again."""
    context, runs = case.context, case.context.runs
    call = context.call
    if runs is None or call is None or context.draws or not runs.reads_all:
        return ()
    if runs.expected.numel() > _MOST_ELEMENTS or not (is_scout() or call.is_safe_here):
        return ()
    if tuple(runs.expected.shape) != case.shape or not runs.is_faithful:
        return ()
    made = (_repeat(case, runs, call, operands) for operands in _other_operands(runs, call))
    return tuple(one for one in made if one is not None)


def _other_operands(runs: PlaceRuns, call: LiveCall) -> list[tuple[Tensor, ...]]:
    """Operands to ask again with.

    What the reference's call does not show stays as it is, and what the candidate may hold itself:
    a module that replaces another one has copies of its parameters.
    """
    is_shown = [
        (runs.recall is not None or any(is_same_tensor(operand, one) for one in call.floating))
        and not _is_held(runs, number)
        for number, operand in enumerate(runs.operands)
    ]
    if not any(is_shown):
        return []
    varied = [
        tuple(
            other if shown else operand
            for operand, other, shown in zip(
                runs.operands, vary_operands(runs.operands, seed), is_shown, strict=True
            )
        )
        for seed in _SEEDS
    ]
    return varied if runs.earlier is None else [runs.earlier, varied[-1]]


def _is_held(runs: PlaceRuns, number: int) -> bool:
    """Whether whole slices of the candidate do not follow an operand that the reference follows."""
    varied = list(runs.operands)
    varied[number] = vary_operands(runs.operands, _SEEDS[0])[number]
    right, given = runs.reference(varied), runs.candidate(varied)
    if right is None or given is None:
        return False
    moves, follows = ~same(right, runs.expected), ~same(given, runs.given)
    kept = (moves & ~follows).cpu()
    return bool(kept.any()) and (is_of_slices(kept) or bool((kept == moves.cpu()).all()))


def _repeat(
    case: Case, runs: PlaceRuns, call: LiveCall, operands: tuple[Tensor, ...]
) -> Case | None:
    """The case with these operands; None if the programs cannot take them."""
    reference, candidate = runs.reference(operands), runs.candidate(operands)
    if reference is None or candidate is None:
        return None
    # Of a candidate that writes in place, the result may have been taken from the first run.
    has_values = bool((candidate != candidate.reshape(-1)[:1]).any())
    if has_values and torch.equal(candidate, runs.given):
        return None

    def exchange(tensor: Tensor) -> Tensor:
        pairs = zip(runs.operands, operands, strict=True)
        return next((other for one, other in pairs if is_same_tensor(one, tensor)), tensor)

    other = runs.recall(operands) if runs.recall else call.with_operands(runs.operands, operands)
    again = dataclasses.replace(
        runs, operands=operands, expected=reference, given=candidate, earlier=runs.operands
    )
    context = dataclasses.replace(
        case.context,
        call=other,
        inputs=tuple(map(exchange, case.context.inputs)),
        named={name: exchange(one) for name, one in case.context.named.items()},
        inner=None if runs.inner is None else runs.inner(operands),
        runs=again,
    )
    return Case(candidate, reference, context=context)


def holds_again(case: Case, prediction: Tensor) -> bool:
    """Whether a prediction made elsewhere holds here too, or nothing can be seen here.

    It is about the elements that are wrong here, or that it says are wrong.
    """
    noise = noise_of_prediction(case, prediction, None)
    about = ~near(case.given, case.right, noise, slack=_SLACK)
    about |= ~near(prediction, case.right, noise, slack=_SLACK)
    if not bool(about.any()):
        return True
    left = (case.given - prediction).abs()
    fits = near(case.given, prediction, noise, slack=_SLACK) | (left <= _LEFT * case.error.abs())
    return float(fits[about].double().mean()) >= _MOST


def is_found_again(case: Case, pattern: Pattern, propose: Callable[[Case], list[Pattern]]) -> bool:
    """Whether a pattern is proposed for other operands as well, if a fault is seen there."""
    other = next((one for one in case.repeated if one.is_beyond_noise), None)
    return other is None or any(_says_the_same(one, pattern) for one in propose(other))


# What of a pattern's evidence is a number that the candidate was made with.
_NUMBERS = ("factor", "offset", "times", "lower bound", "upper bound", "modulus", "value")
_SAME_NUMBER = 0.02


def _says_the_same(one: Pattern, other: Pattern) -> bool:
    """Whether two patterns are of one kind, with the same numbers.

    A limit that is another number for other operands is no limit, but follows from them; that of
    an operand that is solved for may follow from the operand.
    """
    if one.kind != other.kind:
        return False
    if OPERAND in one.evidence:
        return True
    for name in _NUMBERS:
        first, second = (pattern.evidence.get(name, 0.0) for pattern in (one, other))
        if isinstance(first, str) or isinstance(second, str):
            continue
        if abs(first - second) > _SAME_NUMBER * max(abs(first), abs(second)):
            return False
    return True
