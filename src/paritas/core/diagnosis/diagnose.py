"""The diagnosis of a wrong tensor: where it is wrong, what explains it, how confidently."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

import msgspec

from paritas.core.diagnosis import effort
from paritas.core.diagnosis.boxes import MOST_ELEMENTS, cut_case
from paritas.core.diagnosis.case import Case, Context, count_partial_axes, wrong_block
from paritas.core.diagnosis.patterns.affine import propose_offsets, propose_scales, propose_signs
from paritas.core.diagnosis.patterns.approximations import propose_approximations, propose_curves
from paritas.core.diagnosis.patterns.arrangements import propose_permutations, propose_shifts
from paritas.core.diagnosis.patterns.dropping import propose_dropped
from paritas.core.diagnosis.patterns.effective import propose_effective
from paritas.core.diagnosis.patterns.limits import (
    propose_clipping,
    propose_limited_lengths,
    propose_nonfinite,
    propose_wrapped,
)
from paritas.core.diagnosis.patterns.operations import (
    propose_masks,
    propose_operands,
    propose_selections,
    propose_ties,
)
from paritas.core.diagnosis.patterns.precision import propose_precision, propose_rounded_inputs
from paritas.core.diagnosis.patterns.predictions import UndecidedError, propose_predictions
from paritas.core.diagnosis.patterns.ranks import propose_collectives
from paritas.core.diagnosis.patterns.readings import propose_lanes, propose_readings
from paritas.core.diagnosis.patterns.reductions import (
    propose_norms,
    propose_partial_sums,
    propose_reductions,
)
from paritas.core.diagnosis.patterns.replacements import propose_constants, propose_random_streams
from paritas.core.diagnosis.patterns.sources import propose_sources
from paritas.core.diagnosis.repetitions import stack_runs
from paritas.core.diagnosis.second_look import is_found_again
from paritas.core.diagnosis.stating import (
    GUESS,
    INSIDE,
    OPERAND,
    is_of_whole,
    is_plain,
    may_be_stated,
    with_confidence,
)
from paritas.core.execution.scouting import run_apart
from paritas.core.numerics.random_tensors import FEW_VALUES
from paritas.core.results.findings import Diagnosis, PatternKind
from paritas.core.torch_private.global_state import quietly

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from paritas.core.diagnosis.calls import LiveCall
    from paritas.core.diagnosis.search import CaseSurvey
    from paritas.core.results.findings import Pattern


# --- The diagnosis --------------------------------------------------------------------------------


# Beyond this many elements, mistakes of an operator are not tried: each takes the whole tensor.
_LARGEST = 1 << 21


@quietly()
def diagnose(
    candidate: Tensor,
    reference: Tensor,
    *,
    arbiter: Tensor | None = None,
    noise: Tensor | None = None,
    context: Context | None = None,
) -> Diagnosis:
    """Find where a tensor is wrong and what kind of wrong it is; empty if no pattern fits.

    Args:
        candidate: the computed tensor.
        reference: the reference's native result.
        arbiter: the same in float64, if it is known.
        noise: the noise the judge measured, per element.
        context: the operator, its inputs, the ranks and what else is known.
    """
    from paritas.core.diagnosis.region import find_region
    from paritas.core.diagnosis.search import CaseSurvey

    if candidate.shape != reference.shape:
        return Diagnosis()
    case = Case(candidate, reference, arbiter, noise, context or Context())
    survey = CaseSurvey(case, MOST_ELEMENTS)
    if not survey.base.number:
        return Diagnosis()
    # In a large tensor, patterns are looked for in the part that is most wrong.
    where = find_region(case, survey)
    if case.context.only_where:
        return Diagnosis(where=where)
    at_output = not case.context.operator
    if survey.is_one_box:
        patterns, note = _rank_apart(case, at_output=at_output)
        return Diagnosis(where=where, patterns=patterns, note=note)
    # The operator's mistakes are predictions of the whole.
    proposers: Proposers = ((propose_predictions, PatternKind.SWAPPED_OPERANDS),)
    is_small = case.reference.numel() <= _LARGEST
    patterns, note = _rank_apart(case, proposers) if is_small else ((), "")
    part = _most_wrong_part(survey)
    patterns = patterns or rank_patterns(part, at_output=at_output)
    return Diagnosis(where=where, patterns=patterns, note=note)


# --- Which of the patterns that fit is reported ---------------------------------------------------

# Every proposed pattern fits, so the one that assumes least comes first: the operator's own formula
# with another argument or operand before what could happen to any value, a formula with nothing to
# fit before a fitted number, one number before one per row, a named order before any order, and
# what only has the same distribution last.

Proposers = tuple[tuple["Callable[[Case], list[Pattern]]", PatternKind], ...]
# The proposers that compare a value of a training step with what each rank holds of it.
ACROSS_RANKS: Proposers = ((propose_collectives, PatternKind.ZEROS),)
# All proposers with the simplest kind of each, in the order of these.
PROPOSERS: Proposers = (
    (propose_ties, PatternKind.TIE_BREAKING),
    # What reproduces every element also says where infinities come from.
    (propose_predictions, PatternKind.NONFINITE),
    (propose_nonfinite, PatternKind.NONFINITE),
    (propose_wrapped, PatternKind.WRAPPED),
    (propose_clipping, PatternKind.CLIPPED),
    (propose_limited_lengths, PatternKind.CLIPPED),
    (propose_operands, PatternKind.SWAPPED_OPERANDS),
    (propose_reductions, PatternKind.OFF_BY_ONE),
    (propose_norms, PatternKind.OFF_BY_ONE),
    (propose_masks, PatternKind.MASK),
    (propose_dropped, PatternKind.MASK),
    *ACROSS_RANKS,
    (propose_constants, PatternKind.ZEROS),
    (propose_partial_sums, PatternKind.DOUBLED_REDUCTION),
    (propose_signs, PatternKind.SIGN),
    (propose_lanes, PatternKind.COPY),
    (propose_rounded_inputs, PatternKind.SCALE),
    (propose_scales, PatternKind.SCALE),
    (propose_offsets, PatternKind.OFFSET),
    (propose_selections, PatternKind.SHIFT),
    (propose_shifts, PatternKind.SHIFT),
    (propose_permutations, PatternKind.TRANSPOSE),
    (propose_approximations, PatternKind.APPROXIMATION),
    (propose_precision, PatternKind.PRECISION),
    (propose_random_streams, PatternKind.RANDOM_STREAM),
)
# They say what happened to the result as a whole, which comes before a step inside of its operator,
# or which of its terms are read.
_OF_RESULTS = (propose_constants, propose_signs, propose_scales, propose_shifts, propose_lanes)
_OF_TERMS = {PatternKind.MASK, PatternKind.PARTIAL_SUM, PatternKind.STATISTICS}
_CHOOSES = re.compile(r"\b(where|masked_fill|tril|triu)\b")
# What is looked for if nothing else fits.
_LAST_RESORTS = (propose_readings, propose_sources, propose_curves)
# From the simplest to what fits almost anything.
ORDER = tuple(PatternKind)
# What is seen in the values alone, and is the result of a mistake that reproduces them.
_SEEN_IN_VALUES = {PatternKind.NONFINITE, PatternKind.CLIPPED}
# A pattern is reported beside a simpler one if it explains this much more.
_MORE = 0.01


def propose_all(
    case: Case, *, enough: bool = False, proposers: Proposers = PROPOSERS
) -> list[Pattern]:
    """All patterns that fit, with raw confidence, in no order; none if the inputs decide nothing.

    Args:
        enough: stop as soon as no further proposer could give a pattern that ranks before those
            found, or that is worth reporting beside them.
    """
    patterns: list[Pattern] = []
    for propose, simplest in proposers:
        settled = [
            pattern
            for pattern in patterns
            if pattern.confidence >= GUESS
            and _explained_share(pattern) + _MORE >= 1
            and _simplicity(pattern) < ORDER.index(simplest)
        ]
        gives_way = all(_is_of_step(pattern) or _is_of_terms(pattern) for pattern in settled)
        is_inside = gives_way and propose in _OF_RESULTS
        if enough and settled and not is_inside:
            continue
        try:
            proposed = propose(case)
        except UndecidedError:
            return []
        # The mistakes of an operator were compared with a second run already.
        is_tried = propose is propose_predictions
        patterns += [
            pattern for pattern in proposed if is_tried or is_found_again(case, pattern, propose)
        ]
    for propose in _LAST_RESORTS if proposers is PROPOSERS else ():
        if not patterns:
            patterns += [
                pattern for pattern in propose(case) if is_found_again(case, pattern, propose)
            ]
    return patterns


def rank_raw(case: Case, proposers: Proposers = PROPOSERS) -> list[Pattern]:
    """The patterns that fit, best first, without those that explain no more than a simpler one."""
    patterns: list[Pattern] = []
    proposed_patterns = propose_all(case, enough=True, proposers=proposers)
    explained = {pattern.kind for pattern in proposed_patterns if _reproduces_all(pattern)}
    if explained:
        proposed_patterns = [
            pattern
            for pattern in proposed_patterns
            if not _is_seen_in_values(pattern) or _reproduces_all(pattern)
        ]
    if PatternKind.MISSING_OPERAND in explained:  # what is left if nothing is added to zeros
        proposed_patterns = [
            pattern for pattern in proposed_patterns if pattern.kind != PatternKind.ZEROS
        ]
    plain = {
        proposed.kind
        for proposed in proposed_patterns
        if is_plain(proposed) and _is_of_blocks(case, proposed)
    }
    if plain:
        proposed_patterns = [pattern for pattern in proposed_patterns if not _is_of_step(pattern)]
    if PatternKind.COPY in plain:
        proposed_patterns = [pattern for pattern in proposed_patterns if not _is_of_terms(pattern)]
    for pattern in sorted(proposed_patterns, key=_rank_key):
        if not patterns or _explained_share(pattern) > max(map(_explained_share, patterns)) + _MORE:
            patterns.append(pattern)
    return patterns


def _is_of_step(pattern: Pattern) -> bool:
    """Whether it is about a step inside of the operator, or numbers were solved for in it."""
    is_solved = "tried" in pattern.evidence and float(pattern.evidence.get("fitted", 0.0)) > 1
    return INSIDE in pattern.evidence or is_solved


def _is_of_terms(pattern: Pattern) -> bool:
    """Whether it is about which of its terms an operator reads, if it has any."""
    is_choice = _CHOOSES.search(str(pattern.evidence.get("operator", "")))
    return "tried" in pattern.evidence and pattern.kind in _OF_TERMS and not is_choice


def _is_of_blocks(case: Case, pattern: Pattern) -> bool:
    """Whether whole slices have it: wrong elements among right ones have a reason inside."""
    is_whole = pattern.evidence.get("extent") == "whole tensor"
    return is_whole or bool(wrong_block(case).case.wrong.all())


def rank_patterns(
    case: Case, proposers: Proposers = PROPOSERS, *, at_output: bool = False
) -> tuple[Pattern, ...]:
    """The patterns that may be stated, best first, with measured confidence.

    Args:
        at_output: the operator that computed the value is not known.
    """
    # Of few numbers, the results of further runs decide.
    several = stack_runs(case) or case
    ranked = _statable(several, rank_raw(several, proposers), at_output=at_output)
    if not ranked and proposers is PROPOSERS:
        # It is not in the result that the mistake has a name.
        solved = _propose_solved(case)
        solved = [pattern for pattern in solved if is_found_again(case, pattern, _propose_solved)]
        ranked = _statable(case, solved, at_output=at_output)
    if not ranked and proposers is PROPOSERS and several is case:
        ranked = _rank_repeated(case)
    return with_confidence(ranked, at_output=at_output)


def _propose_solved(case: Case) -> list[Pattern]:
    return propose_effective(case, rank_raw)


def _rank_repeated(case: Case) -> list[Pattern]:
    """What explains the place with other operands, and the operands of the program as well.

    These may show little: one number, or values that are all alike. If they show enough, little
    more is found, and less time is spent on it.
    """
    patience = case.context.patience * (1.0 if _shows_little(case) else _PATIENCE_AGAIN)
    for repeated_case in case.repeated[:1]:
        context = dataclasses.replace(repeated_case.context, patience=patience)
        other = dataclasses.replace(repeated_case, context=context)
        return _statable(other, rank_raw(other), at_output=False)
    return []


_PATIENCE_AGAIN = 0.3
# With fewer wrong values than this, other operands may show more.
_FEW_WRONG = 64


def _shows_little(case: Case) -> bool:
    call = case.context.call
    operands = call.floating if call is not None else case.context.inputs
    is_alike = any(
        operand.numel() > 1 and len(operand.unique()) <= FEW_VALUES for operand in operands
    )
    return is_alike or int(case.wrong.sum()) < _FEW_WRONG


def _statable(case: Case, patterns: list[Pattern], *, at_output: bool) -> list[Pattern]:
    operator, repeated = case.context.operator_name, case.context.call is not None
    return [
        pattern if at_output else _of_its_axis(case, pattern)
        for pattern in patterns
        if may_be_stated(
            pattern,
            at_output=at_output,
            operator=operator,
            repeated=repeated,
            held=bool(case.repeated),
        )
    ]


def _of_its_axis(case: Case, pattern: Pattern) -> Pattern:
    """A factor of some indices along one axis is one of that axis."""
    is_of_part = pattern.kind == PatternKind.SCALE and not is_of_whole(pattern)
    if not is_of_part or OPERAND in pattern.evidence or count_partial_axes(case) != 1:
        return pattern
    return msgspec.structs.replace(pattern, kind=PatternKind.AXIS_SCALE)


def _is_seen_in_values(pattern: Pattern) -> bool:
    """Whether it may be the result of a mistake: zeros that are no region were chosen by it."""
    is_scattered = pattern.evidence.get("in a region") == 0
    return pattern.kind in _SEEN_IN_VALUES or is_scattered


def _reproduces_all(pattern: Pattern) -> bool:
    """Whether it is the operator with a mistake, which gives the candidate bit for bit."""
    return "tried" in pattern.evidence and pattern.evidence.get("bit for bit") == 1


def _rank_key(pattern: Pattern) -> tuple[bool, float, float, float]:
    guess = pattern.confidence < GUESS
    return guess, _simplicity(pattern), -_explained_share(pattern), -pattern.confidence


def _simplicity(pattern: Pattern) -> float:
    """The place of its kind; a rounding that is repeated comes before all fitted numbers."""
    if pattern.kind == PatternKind.PRECISION and pattern.evidence.get("fitted") == 0:
        return ORDER.index(PatternKind.SCALE) - 0.5
    return ORDER.index(PatternKind(pattern.kind))


def _explained_share(pattern: Pattern) -> float:
    """Share of the wrong elements that it explains; 0 if its evidence does not say."""
    value = pattern.evidence.get("explained", 0.0)
    return value if isinstance(value, float) else 0.0


# --- An operator in another process, and a part of a large tensor ---------------------------------

# The time for all patterns of an operator that is called in another process, which is ended then;
# its searches end before.
_MOST_SECONDS = 30.0
_MOST_SECONDS_OF_SEARCHES = 24.0


def _rank_apart(
    case: Case, proposers: Proposers = PROPOSERS, *, at_output: bool = False
) -> tuple[tuple[Pattern, ...], str]:
    """The patterns that may be stated, and a note if mistakes could not all be tried.

    An operator that does not check its arguments is called with others in another process only.
    """
    call = case.context.call
    if call is None or call.checks_arguments or not call.can_be_scouted:
        return rank_patterns(case, proposers, at_output=at_output), ""

    def rank() -> tuple[Pattern, ...]:
        # That process may call operators that this one must not call: it asks anew which.
        anew = dataclasses.replace(call)
        _ = anew.steps  # raises if it cannot be called there
        with effort.ending_within(_MOST_SECONDS_OF_SEARCHES):
            return rank_patterns(_with_call(case, anew), proposers, at_output=at_output)

    report = run_apart(rank, seconds=_MOST_SECONDS)
    if report.result is not None:
        return report.result, ""
    if not report.lost:  # it could not be forked, or autograd does not work there
        return rank_patterns(case, proposers, at_output=at_output), ""
    note = f"not all mistakes could be tried: {report.failure}"
    return rank_patterns(_with_call(case, None), proposers, at_output=at_output), note


def _with_call(case: Case, call: LiveCall | None) -> Case:
    return dataclasses.replace(case, context=dataclasses.replace(case.context, call=call))


def _most_wrong_part(survey: CaseSurvey) -> Case:
    """Neighbouring slices along the longest axis, where most elements are wrong.

    The context's tensors cannot be cut in the same way and are left out.
    """
    case = survey.case
    axis = max(range(len(case.shape)), key=lambda dim: case.shape[dim])
    size = case.shape[axis]
    counts = survey.base.axes[axis]
    groups = max(1, size * MOST_ELEMENTS // case.reference.numel() // counts.each)
    total = counts.counts.cumsum()
    within = total[groups - 1 :].copy()
    within[1:] -= total[:-groups]
    width = groups * counts.each
    start = min(int(within.argmax()) * counts.each, size - width)
    part = cut_case(case, (), axis, start, width, survey.scale)
    context = dataclasses.replace(
        case.context, operator="", inputs=(), held={}, named={}, earlier={}, call=None
    )
    return Case(part.candidate, part.reference, part.right, part.allowed, context)
