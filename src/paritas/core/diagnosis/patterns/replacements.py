"""Replaced values: zeros, a constant, stale values, copies, garbage, other random numbers."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import torch

from paritas.core.diagnosis.calls import step_names
from paritas.core.diagnosis.case import holds_in_block, weigh, wrong_block
from paritas.core.diagnosis.held_operands import held_operands
from paritas.core.diagnosis.patterns.functions import UNARY
from paritas.core.numerics.criterion import MAX_Z
from paritas.core.results.findings import Pattern, PatternKind
from paritas.core.torch_private.operators import tensors_in

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.core.diagnosis.case import Case, Context


# --- Zeros, constants, stale values, copies, garbage ----------------------------------------------

_MOST = 0.98
# Fewer elements with one value may be chance.
_FEWEST_EQUAL = 3
_FEWEST_GARBAGE = 6
_SOME = 1 << 14
# How much more the binary exponents of random bits spread; 8 bits of exponent spread by 74.
_GARBAGE_SPREAD = 16.0
_GARBAGE_SPREAD_HALF = 5.0


def propose_constants(case: Case) -> list[Pattern]:
    """`zeros`, `constant`, `stale`, `copy` and `uninitialised`."""
    if not case.is_beyond_noise or case.is_boolean:
        return []
    patterns = _one_branch(case) or [*_stale(case), *_copies(case), *_one_value(case)]
    return patterns or _garbage(case)


# Operators that choose by a condition, and between what.
_CHOOSING = {"where": ("self", "other"), "masked_fill": ("self", "value")}


def _one_branch(case: Case) -> list[Pattern]:
    """`mask`: one branch is taken whatever the condition is."""
    case = case.first_run or case
    steps = () if case.context.call is None else case.context.call.steps
    if not steps or steps[-1][1].name not in _CHOOSING:
        return []
    values = steps[-1][1].values
    for name in _CHOOSING[steps[-1][1].name]:
        branch = torch.as_tensor(values[name]).to(case.right)
        if bool((case.given == branch).all()):
            weight = weigh(case, branch.expand(case.shape), cost=1.0)
            sentence = f"the condition is not read: {name} is taken everywhere"
            return [] if weight is None else [weight.pattern(PatternKind.MASK, sentence)]
    return []


def _one_value(case: Case) -> list[Pattern]:
    """`zeros` or `constant`: one value in all wrong elements."""
    some = case.given.reshape(-1)[case.some_wrong]
    if not some.is_complex() and float((some == some.median()).double().mean()) < _MOST:
        return []
    values = case.given[case.wrong]
    finite = values[torch.isfinite(values)]
    if not finite.numel() or finite.is_complex():
        zero = bool((values == 0).all())
        return _zeros(case) if zero else []
    if float((values == 0).double().mean()) >= _MOST:
        return _zeros(case)
    if _follows_nothing(case) or _has_one_value(case):
        return []  # it may hold all of its operands, as a module holds copies of its parameters
    value = float(finite.median())
    count = int((values == value).sum())
    if count < _FEWEST_EQUAL or count < _MOST * values.numel():
        return []
    weight = weigh(case, torch.full_like(case.right, value), parameters=1.0)
    if weight is None:
        return []
    # If all right values are beyond this value, clipping is the better explanation.
    wrong, clear = case.right[case.wrong], case.right[~case.wrong]
    room = MAX_Z * case.allowed[~case.wrong]
    above = bool((wrong >= value).all()) and bool((clear <= value + room).all())
    below = bool((wrong <= value).all()) and bool((clear >= value - room).all())
    one_sided = clear.numel() > 0 and (above or below)
    kind, sentence = PatternKind.CONSTANT, f"{value:.7g} in every wrong element"
    # What is one value everywhere has many reasons.
    if _gives_for_zeros(case.context) == value and not wrong_block(case).is_whole:
        kind, sentence = PatternKind.ZEROS, f"{sentence}, which is the result for an argument of 0"
    trust = 0.7 if one_sided else 1.0
    return [weight.pattern(kind, sentence, {"value": value}, trust=trust)]


def _follows_nothing(case: Case) -> bool:
    """Whether one number stays as it is, whatever the operands are."""
    context = None if case.first_run is None else case.first_run.context
    if context is None or context.runs is None or context.call is None:
        return False
    return len(held_operands(context.runs, context.call)) == len(context.runs.operands)


def _has_one_value(case: Case) -> bool:
    """Whether the operands show nothing: each has one value, and others cannot be tried."""
    steps = () if case.context.call is None else case.context.call.steps
    values = [tensor for _, step in steps for tensor in tensors_in(list(step.values.values()))]
    is_one = all(bool((value == value.reshape(-1)[:1]).all()) for value in values)
    return bool(values) and is_one and not case.repeated


def _gives_for_zeros(context: Context) -> float | None:
    """What a function of one tensor gives for 0; None if the call is not known as one."""
    steps = () if context.call is None else context.call.steps
    function = UNARY.get(steps[0][1].name) if len(steps) == 1 else None
    if function is None:
        return None
    return float(function(torch.zeros((), dtype=torch.float64)))


def _zeros(case: Case) -> list[Pattern]:
    zeros = torch.zeros_like(case.right)
    weight = weigh(case, zeros)
    if weight is None:
        return []
    trust = 0.8 if _looks_cut_off(case) else 1.0
    region: dict[str, float | str] = {"in a region": float(holds_in_block(case, zeros))}
    return [weight.pattern(PatternKind.ZEROS, "zero instead of a value", region, trust=trust)]


def _looks_cut_off(case: Case) -> bool:
    """Whether exactly the negative, or exactly the positive values are zero."""
    if case.right.is_complex():
        return False
    wrong, clear = case.right[case.wrong], case.right[~case.wrong]
    beyond = clear[clear.abs() > MAX_Z * case.allowed[~case.wrong]]
    if not beyond.numel():
        return False
    negative = bool((wrong < 0).all()) and float((beyond > 0).double().mean()) >= _MOST
    positive = bool((wrong > 0).all()) and float((beyond < 0).double().mean()) >= _MOST
    return negative or positive


def _stale(case: Case) -> list[Pattern]:
    patterns = []
    for name, value in case.context.earlier.items():
        if tuple(value.shape) != case.shape:
            continue
        weight = weigh(case, _widen_like(case, value), cost=math.log2(len(case.context.earlier)))
        if weight is not None:
            sentence = f"stale: still the value of {name}"
            patterns.append(weight.pattern(PatternKind.STALE, sentence, {"equals": name}))
    return sorted(patterns, key=lambda pattern: -pattern.confidence)[:1]


# Operators that write into their first operand.
_WRITING = step_names("writes at indices") | {
    *("index_fill", "diagonal_scatter", "masked_scatter", "copy", "put")
}


def _copies(case: Case) -> list[Pattern]:
    """`copy`: another tensor, or an input that was passed through."""
    named = {name: (tensor, f"it is {name} instead") for name, tensor in case.context.named.items()}
    for position, tensor in enumerate(case.context.inputs):
        text = f"it is input {position} unchanged: the operation was skipped"
        named[f"input {position}"] = (tensor, text)
    for name, (tensor, text) in named.items():
        if tuple(tensor.shape) != case.shape or (case.is_exact and tensor.is_floating_point()):
            continue
        value = _widen_like(case, tensor)
        taken = value[case.wrong]
        if bool((taken == taken[0]).all()):
            continue  # one value everywhere: zeros or a constant, which many tensors hold
        weight = weigh(case, value, cost=math.log2(len(named)))
        if weight is not None and holds_in_block(case, value):
            if name == "input 0" and case.context.operator_name in _WRITING:
                sentence = "what was there is kept: nothing is written"
                return [weight.pattern(PatternKind.STALE, sentence, {"equals": name})]
            return [weight.pattern(PatternKind.COPY, text, {"equals": name})]
    return []


def _garbage(case: Case) -> list[Pattern]:
    """`uninitialised`: exponents of all sizes, or denormal numbers."""
    if case.is_exact or case.given.is_complex():
        return []
    values = case.given.reshape(-1)[case.some_wrong]
    numbers = values[torch.isfinite(values) & (values != 0)].abs()
    right = case.right.reshape(-1)[:: max(1, case.right.numel() // _SOME)].abs()
    right = right[torch.isfinite(right) & (right != 0)]
    if numbers.numel() < _FEWEST_GARBAGE or not right.numel():
        return []
    info = torch.finfo(case.candidate.dtype)
    denormal = float((numbers < info.tiny).double().mean())
    usual = float((right < info.tiny).double().mean())
    narrow = case.candidate.dtype == torch.float16
    spread = float(numbers.log2().std(correction=0))
    normal = float(right.log2().std(correction=0)) if right.numel() > 1 else 0.0
    wide = spread > (_GARBAGE_SPREAD_HALF if narrow else _GARBAGE_SPREAD) + normal
    if not (wide or (denormal > 0.3 and usual < 0.01)):  # noqa: PLR2004
        return []
    what = "denormal numbers" if denormal > 0.3 else f"magnitudes over 2^{4 * spread:.0f}"  # noqa: PLR2004
    return [
        Pattern(
            kind=PatternKind.UNINITIALISED,
            confidence=0.9 * (1 - 2.0 ** (-numbers.numel() / 4)),
            sentence=f"uninitialised memory: {what} in the wrong elements",
            evidence={
                "denormal": denormal,
                "spread of exponents": spread,
                "usual spread": normal,
                "elements": float(case.wrong.sum()),
            },
        )
    ]


def _widen_like(case: Case, value: Tensor) -> Tensor:
    return value.detach().cpu().to(case.right.dtype)


# --- Other random numbers -------------------------------------------------------------------------

_FEWEST_DRAWN = 64
_DRAWING = re.compile(
    r"dropout|rand|bernoulli|normal\b|uniform|multinomial|exponential|poisson|gumbel|geometric|"
    r"cauchy|rrelu"
)
# How many standard deviations a figure may differ from that of independent draws.
_SIGMAS = 4.0
# How often two samples of one distribution differ by more than is allowed here.
_UNLIKELY = 0.01
_MOST_SAMPLED = 1 << 16
_SAME = 0.98


def propose_random_streams(case: Case) -> list[Pattern]:
    """`different random stream`: another mask of the same rate, or other random numbers.

    Only of an operator that draws, or of a program that does: other faults, such as a mask that is
    off by one, leave values that look drawn.
    """
    if not _draws(case.context) or not case.is_beyond_noise or case.given.is_complex():
        return []
    if case.right.numel() < _FEWEST_DRAWN or not case.is_finite or _is_rearranged(case):
        return []
    patterns = [_other_mask(case), _other_numbers(case)]
    return [pattern for pattern in patterns if pattern is not None][:1]


def _draws(context: Context) -> bool:
    """Whether the operator draws random numbers; if it is unknown, whether the program does."""
    if not context.operator:
        return context.draws
    name = context.operator_name
    if _DRAWING.search(name) and not name.endswith("backward"):
        return True
    share = context.arguments.get("dropout_p", 0.0)
    return isinstance(share, float) and share > 0


def _is_rearranged(case: Case) -> bool:
    """Whether the candidate has the reference's own values at other places.

    Whole numbers, as of `randperm`, may be drawn so.
    """
    if case.is_exact:
        return False
    actual, expected = case.given.flatten().sort(), case.right.flatten().sort()
    moved = (actual.values - expected.values).abs()
    nonzero = (actual.values != 0) | (expected.values != 0)
    allowed = MAX_Z * torch.maximum(
        case.allowed.flatten()[actual.indices], case.allowed.flatten()[expected.indices]
    )
    return bool(nonzero.any()) and bool((moved <= allowed)[nonzero].all())


def _other_mask(case: Case) -> Pattern | None:
    """Like dropout: equal where both keep a value, zero at independent places."""
    zeros, expected_zeros = case.given == 0, case.right == 0
    total = case.right.numel()
    rates = float(zeros.double().mean()), float(expected_zeros.double().mean())
    if min(rates) * total < 8 or max(rates) > 0.99:  # noqa: PLR2004
        return None
    both = ~zeros & ~expected_zeros
    apart = case.error[both].abs() <= MAX_Z * case.allowed[both]
    if not len(apart) or float(apart.double().mean()) < _SAME:
        return None
    rate = (rates[0] + rates[1]) / 2
    spread = math.sqrt(rate * (1 - rate) / total)
    together = float((zeros & expected_zeros).double().mean())
    expected = rates[0] * rates[1]
    strange = abs(rates[0] - rates[1]) / (spread * math.sqrt(2))
    linked = abs(together - expected) / (rate * (1 - rate) / math.sqrt(total))
    if strange > _SIGMAS or linked > _SIGMAS:
        return None
    return Pattern(
        kind=PatternKind.RANDOM_STREAM,
        confidence=0.95,
        sentence=(
            f"a different random mask of the same rate ({rates[0]:.1%} and {rates[1]:.1%} zeros): "
            "where both keep a value, it is the same"
        ),
        evidence={"zeros": rates[0], "zeros of the reference": rates[1], "both": together},
    )


def _other_numbers(case: Case) -> Pattern | None:
    """No correlation, but the same distribution."""
    named = bool(case.context.operator)
    wrong = float(case.wrong.double().mean())
    if wrong < 0.5 and not (named and case.is_exact):  # noqa: PLR2004
        return None
    step = max(1, case.right.numel() // _MOST_SAMPLED)
    actual, expected = case.given.flatten()[::step], case.right.flatten()[::step]
    count = len(actual)
    correlation = _correlation(actual, expected)
    if not abs(correlation) * math.sqrt(count) <= _SIGMAS:
        return None
    distance = _greatest_distance(actual, expected)
    # Two samples of size n differ by this much with probability 2 exp(-n d^2).
    likely = min(1.0, 2 * math.exp(-count * distance**2))
    # Draws have no structure along an axis: the means of rows must vary as by chance.
    if likely < _UNLIKELY or not (named or _is_shapeless(case.right)):
        return None
    return Pattern(
        kind=PatternKind.RANDOM_STREAM,
        confidence=0.9 if named else 0.6,
        sentence=(
            f"{'' if named else 'as if '}different random numbers were drawn: the values are "
            f"uncorrelated (correlation {correlation:.2g}) but have the same distribution"
        ),
        evidence={"correlation": correlation, "distance": distance, "likelihood": likely},
    )


def _correlation(actual: Tensor, expected: Tensor) -> float:
    a, b = actual - actual.mean(), expected - expected.mean()
    below = float(a.norm() * b.norm())
    return float(a @ b) / below if below else math.nan


def _greatest_distance(actual: Tensor, expected: Tensor) -> float:
    a, b = actual.sort().values, expected.sort().values
    points = torch.cat([a, b])
    left = torch.searchsorted(a, points, right=True)
    right = torch.searchsorted(b, points, right=True)
    return float((left - right).abs().max()) / len(a)


def _is_shapeless(values: Tensor) -> bool:
    """Whether the means of slices along each axis vary as those of independent draws."""
    spread = float(values.std())
    for axis in range(values.dim()):
        size = values.shape[axis]
        others = [dim for dim in range(values.dim()) if dim != axis]
        if size < 2 or not others:  # noqa: PLR2004
            continue
        length = values.numel() // size
        means = values.mean(dim=others)
        statistic = float((means - means.mean()).square().sum()) / (spread**2 / length)
        if statistic > size + _SIGMAS * math.sqrt(2 * size) + _SIGMAS:
            return False
    return spread > 0
