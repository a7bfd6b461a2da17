"""What a candidate depends on, found by calling it again with other values.

If no prediction reproduces the candidate, both programs are called with one operand changed in one
place. An output that changes in one of them and not in the other reads something else, whatever it
computes from it. If both read the same, the candidate computes something else from it. Values are
compared with those of the same program, bit for bit, so rounding does not matter.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

import torch

from paritas.core.diagnosis.dependence import (
    SECONDS,
    Laboratory,
    Reading,
    are_close,
    describe_mask,
    is_of_slices,
    name_operands,
)
from paritas.core.diagnosis.loss_terms import name_terms
from paritas.core.diagnosis.patterns.approximations import smoothness
from paritas.core.diagnosis.stating import with_confidence
from paritas.core.diagnosis.term_experiments import find_other_terms
from paritas.core.execution.scouting import can_scout, run_apart
from paritas.core.numerics.bits import is_inexact
from paritas.core.results.findings import Diagnosis, Pattern, PatternKind
from paritas.core.results.wording import list_first
from paritas.core.time_limit import TimeLimit
from paritas.core.torch_private.operators import Operator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.diagnosis.calls import LiveCall
    from paritas.core.diagnosis.case import Context
    from paritas.core.diagnosis.place_runs import PlaceRuns

    # A kind, or a sentence: what is seen, where nothing that was tried reproduces the candidate.
    Answer = Pattern | str
    Experiment = Callable[[Laboratory, str], Answer | None]

# Larger places take too long to be called a hundred times.
MOST_ELEMENTS = 1 << 20
# The raw confidence of what follows from experiments: it says what is read, and no values.
_RAW = 0.9

_ATTENTION = re.compile("attention|sdpa")
_REDUCING = re.compile(r"^(sum|nansum|mean|amax|amin|max|min|prod|median|cum(sum|prod|max|min)"
                       r"|.*_pool\dd.*)$")  # fmt: skip
_OF_LINES = re.compile("^(var|std|logsumexp|softmax|log_softmax|safe_softmax|softmin"
                       "|linalg_vector_norm|norm|normalize|cosine_similarity)$")  # fmt: skip
# A window that is moved, or the other half of a line, has other elements.
_WINDOW = re.compile(r"_pool\dd|^cum")
_WRITING = re.compile(r"^(index_copy|index_put|scatter|select_scatter|slice_scatter|copy)$")
_PICKING = re.compile("embedding|gather|index|take|slice|select|getitem")
_LINEAR = re.compile(
    r"^(linear|mm|bmm|addmm|baddbmm|matmul|einsum|conv.*|sum|mean|dot|mv)$|backward$"
)
_FEWEST_FIXED = 3
_LOSS = re.compile("loss|cross_entropy|kl_div")


def experiment(context: Context) -> Diagnosis:
    """The kind that follows from experiments with both programs at a place; empty if none does.

    Where they only show what the result follows from, that is the note, and no kind is stated.
    """
    runs = context.runs
    if runs is None or context.draws or context.lifted_agrees or not _can_be_asked(runs.operands):
        return Diagnosis()
    if runs.expected.numel() > MOST_ELEMENTS or not runs.is_faithful:
        return Diagnosis()
    answer = _answer_apart(context, runs)
    if isinstance(answer, str):
        return Diagnosis(note=answer)
    patterns = () if answer is None else with_confidence([answer], at_output=False)
    return Diagnosis(patterns=patterns)


def _answer_apart(context: Context, runs: PlaceRuns) -> Answer | None:
    """What experiments show; in another process if the operator does not check its arguments."""

    def find_answer() -> Answer | None:
        names = name_operands(context, runs.operands)
        lab = Laboratory(runs, names, TimeLimit(SECONDS))
        operator = _operator_name(context)
        for ask in _experiments(lab, operator, context.call):
            answer = ask(lab, operator)
            if answer is not None:
                return answer if _is_shown_again(lab, operator, ask, answer) else None
        return None

    if context.call is not None and context.call.is_safe_here:
        return find_answer()
    if not can_scout(runs.operands):
        return None
    return run_apart(find_answer, seconds=4 * SECONDS).result


def _operator_name(context: Context) -> str:
    """The bare name of the operator or function of torch that is called."""
    target = None if context.call is None else context.call.target
    name = context.operator_name if "backward" in context.operator else ""
    if not name and isinstance(target, Operator):
        name = context.operator_name
    return name or str(getattr(target, "__name__", "")).strip("_")


def _can_be_asked(operands: tuple[Tensor, ...]) -> bool:
    numbers = [operand.numel() for operand in operands]
    return 1 <= sum(numbers) <= MOST_ELEMENTS


def _experiments(lab: Laboratory, operator: str, call: LiveCall | None) -> Iterator[Experiment]:
    """What is asked, in this order."""
    if not lab.runs.reads_all:
        # What it computes by itself may follow from what is changed; indices do not follow from
        # an operand that it is linear in.
        if lab.reads_all_numbers():
            yield _other_terms
        return
    if operator.endswith("backward"):
        # Linear in the gradient: what an unread operand selects is seen in the terms.
        yield _other_terms
    yield _unread_operand
    if not operator.endswith("backward"):
        yield _other_terms
    yield functools.partial(_other_mean, call=call)
    yield _other_function_of_elements
    if not _LOSS.search(operator):
        yield _other_function_of_lines
    yield _other_places
    yield _other_function_of_results


_SEED = 1


def _is_shown_again(lab: Laboratory, operator: str, ask: Experiment, answer: Answer) -> bool:
    """Whether the same follows for other operands; also if nothing is wrong with these."""
    if ask not in _OF_ONE_RUN:
        return True  # it was asked with many operands
    other = lab.with_operands(lab.runs.vary(_SEED), TimeLimit(SECONDS))
    again = None if other is None else ask(other, operator)
    is_unknown = other is None or (again is None and other.limit.is_over)
    return is_unknown or (again is not None and _kind_of(again) == _kind_of(answer))


def _kind_of(answer: Answer) -> str:
    return "" if isinstance(answer, str) else answer.kind


def _state(kind: PatternKind, sentence: str, lab: Laboratory) -> Pattern:
    evidence: dict[str, int | float | str] = {"calls of the candidate": float(lab.calls)}
    return Pattern(kind=kind, confidence=_RAW, sentence=sentence, evidence=evidence)


# --- An operand that is not read ------------------------------------------------------------------


def _unread_operand(lab: Laboratory, operator: str) -> Pattern | None:
    """An operand without any effect on the candidate, while others have one."""
    effects = [lab.effect_of_whole(number) for number in range(len(lab.operands))]
    present = [effect for effect in effects if effect is not None]
    if not any(bool(effect.candidate.any()) for effect in present):
        return _fixed_result(lab)
    numbers = [
        number
        for number, effect in enumerate(effects)
        if effect is not None
        and bool(effect.reference.any())
        and not bool(effect.candidate.any())
        and lab.is_unread(number)
    ]
    unread = [lab.names[number] for number in numbers]
    # What computes something else altogether does not read all of it either.
    if unread and lab.gives_without(numbers):
        is_mask = _ATTENTION.search(operator) is not None and unread[0] == "attn_mask"
        kind = PatternKind.MASK if is_mask else PatternKind.MISSING_OPERAND
        verb = "has" if len(unread) == 1 else "have"
        sentence = f"{list_first(unread, 3)} {verb} no effect: the candidate does not depend on it"
        return _state(kind, sentence if len(unread) == 1 else sentence[:-2] + "them", lab)
    return None


# --- A mean of other terms ------------------------------------------------------------------------


def _other_mean(lab: Laboratory, _operator: str, call: LiveCall | None) -> Answer | None:
    """One number that is a mean of other terms, or of the same terms with other weights."""
    named = name_terms(lab, call)
    if named is None:
        return None
    kind, sentence = named
    return sentence if kind is None else _state(kind, sentence, lab)


def _fixed_result(lab: Laboratory) -> Pattern | None:
    """One value, or places that are counted through, whatever the values are.

    Anything else that does not change may be an old result.
    """
    candidate = lab.runs.given
    if not all(map(lab.is_unread, range(len(lab.operands)))) or candidate.numel() < _FEWEST_FIXED:
        return None
    which = f"whatever the values of {list_first(lab.names, 3)} are"
    if bool((candidate == candidate.flatten()[0]).all()):
        kind = PatternKind.CONSTANT if bool(candidate.any()) else PatternKind.ZEROS
        return _state(kind, f"{candidate.flatten()[0].item()} in every element, {which}", lab)
    for axis, size in enumerate(candidate.shape):
        line = torch.arange(size).view(
            [-1 if each_axis == axis else 1 for each_axis in range(candidate.dim())]
        )
        if size > 2 and not is_inexact(candidate) and bool((candidate == line).all()):  # noqa: PLR2004
            words = f"0, 1, 2 ... along axis {axis}, {which}"
            return _state(PatternKind.MISSING_OPERAND, words, lab)
    return None


# --- Other terms of sums --------------------------------------------------------------------------


def _other_terms(lab: Laboratory, operator: str) -> Pattern | None:
    """Results that are sums of other elements, or of the same ones with other factors."""
    with lab.limit.pausing():
        finding = find_other_terms(lab.runs, lab.names, operator)
    return None if finding is None else _state(*finding, lab)


# --- Another function of the same elements --------------------------------------------------------

# Below this share of the size, what differs may be an approximation.
_APPROXIMATE = 0.003
# Below this share, the words say how little it differs.
_CLOSE = 0.02
# Below this share, few different values are those of a rounding or of a table.
_ROUGH = 0.1
_EXAMPLES = 2


def _other_function_of_elements(lab: Laboratory, _operator: str) -> Pattern | None:
    """Each element of the result follows from the same element of the operands, but otherwise."""
    is_number = is_inexact(lab.runs.expected)
    if (is_number and lab.is_affine()) or not lab.is_elementwise():
        return None
    if int((lab.runs.expected != lab.runs.given).sum()) == 1:
        return None  # one element shows no function
    share = lab.relative_error()
    kind, words = PatternKind.OTHER_FUNCTION, "another function of the same element"
    if is_number and share < _ROUGH and lab.is_coarse():
        kind, words = PatternKind.PRECISION, "the same function with fewer digits"
    elif is_number and share < _CLOSE:
        kind = PatternKind.APPROXIMATION if share < _APPROXIMATE else kind
        words = f"{words}, off by {100 * share:.2g} % on average"
    return _state(kind, f"{words}: {_examples(lab)}", lab)


def _examples(lab: Laboratory) -> str:
    """What the candidate gives for two elements, and what it should give."""
    expected, candidate = (tensor.flatten() for tensor in (lab.runs.expected, lab.runs.given))
    wrong = (expected != candidate).nonzero().flatten()
    error = (candidate.double() - expected.double()).abs().nan_to_num(0.0, 0.0, 0.0)[wrong]
    order = wrong[error.argsort(descending=True)]
    shown = [int(order[0]), int(order[len(order) // 2])][: min(_EXAMPLES, len(order))]
    words = []
    for position in shown:
        at = ", ".join(
            f"{name} = {_number(operand.flatten()[position])}"
            for name, operand in zip(lab.names, lab.operands, strict=True)
            if operand.shape == lab.runs.expected.shape
        )
        words.append(
            f"at {at} it gives {_number(candidate[position])} "
            f"instead of {_number(expected[position])}"
        )
    return "; ".join(dict.fromkeys(words))


def _number(value: Tensor) -> str:
    return f"{value.item():.4g}" if is_inexact(value) else str(value.item())


# --- Another function of the right result ---------------------------------------------------------

_MOST_RUNS = 64
_FEWEST_RESULTS = 48
_MOST_RESULTS = 4096
# How well the errors of neighbouring results must agree: 1 for a function.
_LEAST_SMOOTH = 0.9


def _other_function_of_results(lab: Laboratory, _operator: str) -> Pattern | None:
    """Each element follows from what it should be: its root, its square, its logarithm."""
    if not is_inexact(lab.runs.expected) or lab.is_affine():
        return None
    pairs = [(lab.runs.expected, lab.runs.given)]
    for seed in range(1, _MOST_RUNS):
        if lab.limit.is_over or sum(tensor.numel() for tensor, _ in pairs) >= _MOST_RESULTS // 2:
            break
        pair = lab.both(lab.runs.vary(seed))
        if pair is not None:
            pairs.append(pair)
    right, wrong = (
        torch.cat([tensor.double().cpu().flatten() for tensor in side])
        for side in zip(*pairs, strict=True)
    )
    use = torch.isfinite(right) & torch.isfinite(wrong)
    order = right[use].argsort()
    right, wrong = right[use][order][:_MOST_RESULTS], wrong[use][order][:_MOST_RESULTS]
    if len(right) < _FEWEST_RESULTS or len(right.unique()) < 0.9 * len(right):
        return None
    # A factor that depends on the place leaves errors that grow with the result, in no order.
    smooth = min(map(smoothness, (wrong - right, wrong / right)))
    if len(wrong.unique()) < len(right) // 2 or smooth < _LEAST_SMOOTH:
        return None
    differs = (right != wrong).nonzero().flatten()
    at = differs[len(differs) // 2], differs[int(0.9 * len(differs))]
    examples = [(f"{right[sample_index]:.4g}", f"{wrong[sample_index]:.4g}") for sample_index in at]
    if any(expected == actual for expected, actual in examples):
        return None  # nobody would see it
    words = "; ".join(f"where it is {expected} it gives {actual}" for expected, actual in examples)
    return _state(PatternKind.OTHER_FUNCTION, f"a function of the right result: {words}", lab)


# --- Another function of the same lines -----------------------------------------------------------


def _other_function_of_lines(lab: Laboratory, operator: str) -> Answer | None:
    """Each line of a reduction follows from the same line, but otherwise.

    That says what is read, and not what is computed: any mistake with the elements of a line is
    another function of it.
    """
    reduces, of_lines = _REDUCING.match(operator), _OF_LINES.match(operator)
    if not (reduces or of_lines) or lab.relative_error() < _CLOSE or lab.is_coarse():
        return None
    if lab.is_affine():
        return None  # any fault of a factor or an offset
    symmetries = lab.symmetries()
    if symmetries is None or not symmetries.keeps_lines:
        return None
    if reduces:
        if _WINDOW.search(operator) and any(reading.has_more for reading in lab.readings()):
            return None
        if not symmetries.is_symmetric:
            lost = _lost_terms(lab, operator)
            if lost is not None:
                return lost
        words = "another reduction"
        return _state(PatternKind.WRONG_REDUCTION, f"{words}: {_results(lab)}", lab)
    if not symmetries.is_symmetric:
        return None
    return f"each line follows from the same line of the operand: {_results(lab)}"


def _results(lab: Laboratory) -> str:
    expected, candidate = (tensor.flatten() for tensor in (lab.runs.expected, lab.runs.given))
    error = (candidate.double() - expected.double()).abs().nan_to_num(0.0, 0.0, 0.0)
    position = int(error.argmax())
    return f"it gives {_number(candidate[position])} instead of {_number(expected[position])}"


# --- Other places of an operand -------------------------------------------------------------------


def _other_places(lab: Laboratory, operator: str) -> Pattern | None:
    """Outputs that depend on other places of an operand than the reference's do."""
    if not is_inexact(lab.runs.expected) and not _PICKING.search(operator):
        return None  # which elements a number of places depends on is decided by their values
    # In attention, the result is linear in the value only, which is the last.
    for reading in lab.readings(last_first=_ATTENTION.search(operator) is not None):
        pattern = _name_reading(lab, reading, operator)
        if pattern is not None:
            return pattern
    return None


def _lost_terms(lab: Laboratory, operator: str) -> Pattern | None:
    for reading in lab.readings():
        if reading.lacks and not reading.has_more:
            return _name_reading(lab, reading, operator)
    return None


def _name_reading(lab: Laboratory, reading: Reading, operator: str) -> Pattern | None:
    """The kind of a dependence that is not the reference's; None if it has several reasons."""
    if not (reading.lacks or reading.has_more):
        return None
    if bool(reading.blind.any()) and reading.axis is not None:
        return _unread_in_part(lab, reading)
    if _WRITING.match(operator):
        return _unwritten(lab, reading)
    kind = None
    is_exchanged = reading.lacks and reading.has_more
    # Which elements of a line matter depends on the values.
    is_of_lines = (_REDUCING.match(operator) or _OF_LINES.match(operator)) is not None
    is_of_lines &= not _WINDOW.search(operator)
    is_of_sums = _LINEAR.search(operator) is not None or not is_inexact(lab.runs.expected)
    if reading.is_of_one and is_exchanged and not is_of_lines:
        kind = PatternKind.WRONG_INDEX
    elif _ATTENTION.search(operator):
        kind = _kind_in_attention(lab, reading)
    elif not reading.has_more:
        kind = _kind_of_lost(lab, reading, operator)
    elif (is_exchanged or _picks_others(reading, operator)) and not is_of_lines:
        kind = PatternKind.WRONG_INDEX
    elif reading.is_of_one and is_of_lines and not is_of_sums:
        # More terms of a sum are seen in its terms; a limit or a wrap may follow from all values.
        is_reduction = _REDUCING.match(operator)
        kind = PatternKind.WRONG_REDUCTION if is_reduction else PatternKind.STATISTICS
    words = reading.words()
    if kind is None or reading.reads_as_much or not words:
        return None
    return _state(kind, words, lab)


def _unwritten(lab: Laboratory, reading: Reading) -> Pattern | None:
    """Places that should be written keep what was there."""
    target = lab.names.index("self") if "self" in lab.names else None
    is_kept = reading.number == target and reading.has_more and not reading.lacks
    if not is_kept or not reading.is_of_one_in_candidate:
        return None
    unread = (reading.candidate & ~reading.reference).any(0)
    for number in range(len(lab.operands)):
        effect = lab.effect_of_whole(number)
        is_written = effect is None or bool((effect.candidate & unread).any())
        if number != target and is_written:
            return None  # something is made of both
    return _state(PatternKind.STALE, f"what was there is kept: {reading.words()}", lab)


def _picks_others(reading: Reading, operator: str) -> bool:
    """Whether an operator that picks elements picks others; two for one are a sum."""
    is_picked = _PICKING.search(operator) is not None and not reading.is_kept
    return is_picked and reading.is_of_one_in_candidate


def _unread_in_part(lab: Laboratory, reading: Reading) -> Pattern | None:
    """Some slices of the result do not depend on an operand, and still do on others."""
    blind = reading.blind
    effect = lab.effect_of_whole(reading.number)
    if effect is None or bool((effect.candidate & blind).any()) or not is_of_slices(blind):
        return None
    if not lab.gives_without([reading.number], blind):
        return None  # it may hold what it does not read, or something else is wrong as well
    others = [lab.effect_of_whole(number) for number in range(len(lab.operands))]
    candidates = [other.candidate for other in others if other is not None]
    if not candidates or not bool((functools.reduce(torch.logical_or, candidates) | ~blind).all()):
        return None
    sentence = f"{reading.name} has no effect on {describe_mask(blind)}"
    return _state(PatternKind.MISSING_OPERAND, sentence, lab)


def _kind_in_attention(lab: Laboratory, reading: Reading) -> PatternKind | None:
    """Other keys take part, with weights that add up to one."""
    value = lab.names.index("value") if "value" in lab.names else None
    if reading.is_of_one or reading.axis is None or value is None:
        return None
    if not reading.has_more and lab.takes_as_zeros(reading):
        return PatternKind.ZEROS
    if not lab.is_of_keys_and_values(reading):
        return None  # of a key that is masked, the value does not matter either
    ones = torch.ones_like(lab.operands[value])
    results = lab.both(lab.with_operand(value, ones))
    if results is None:
        return None
    adds_up = all(are_close(tensor, torch.ones_like(tensor)) for tensor in results)
    return PatternKind.MASK if adds_up else None


def _kind_of_lost(lab: Laboratory, reading: Reading, operator: str) -> PatternKind | None:
    """A part of an operand that is not read."""
    if _LINEAR.search(operator) and not reading.is_of_one and lab.has_same_slopes(reading):
        return PatternKind.PARTIAL_SUM
    if reading.axis is not None and lab.takes_as_zeros(reading):
        return PatternKind.ZEROS
    return None


# What is concluded from one set of operands.
_OF_ONE_RUN = (_other_function_of_elements, _other_function_of_lines, _other_places)
