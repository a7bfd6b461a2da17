"""Loss of precision: the result, its inputs or its sums rounded to a narrower format.

It is stated if the rounding is repeated and gives the candidate, or if the fault vanishes when the
candidate runs in float64 (`Context.lifted_agrees`) and its errors have the size of a rounding. Many
small faults look like noise at an output; in float64 they stay as wrong as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import TYPE_CHECKING

import torch

from paritas.core.diagnosis import effort
from paritas.core.diagnosis.calls import WHOLE, step_names
from paritas.core.diagnosis.case import (
    Context,
    first_supported,
    round_down,
    roundoff,
    same,
    weigh,
    widen,
)
from paritas.core.diagnosis.formats import FORMATS, NarrowFormat
from paritas.core.diagnosis.patterns.levels import propose_steps
from paritas.core.diagnosis.patterns.operations import (
    Operation,
    attempt,
    convolution_of,
    operation_of,
    product_of,
    trusted_formula,
)
from paritas.core.diagnosis.patterns.quantising import quantisations
from paritas.core.diagnosis.repetitions import RepeatedCall, may_give_first
from paritas.core.diagnosis.stating import LIFTED_RUN
from paritas.core.numerics.criterion import unit_roundoff
from paritas.core.results.findings import Pattern, PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from paritas.core.diagnosis.calls import LiveCall
    from paritas.core.diagnosis.case import Case


# --- Which of these it is -------------------------------------------------------------------------

_MOST = 0.98
_FEWEST = 3
# The spacing of results shows the format of a sum, which may be off by this share of it.
_STILL_ROUNDING = 0.2
# By how many units of its format an operator's result may be off if no lifted run tells more.
_FEW_UNITS = 4.0
# The largest share of the reference's own values in the format; masks and counts are all in it.
_HELD_ANYWAY = 0.5
_ENOUGH_BITS = 20.0
# Repeated sums are rounded in another order, so that some results are a step away.
_SAME_SUMS = 0.9


def propose_precision(case: Case) -> list[Pattern]:
    """`precision`: of the output, the inputs, by levels, and last what only looks like it."""
    if not _may_be_rounding(case):
        return []
    # A call is run again by `propose_rounded_inputs` alone, before numbers are fitted.
    by_formula = propose_rounded_inputs if case.context.call is None else lambda _: []
    reproduced = (
        _rounded_output(case)
        or by_formula(case)
        or _on_scaled_levels(case)
        or (first_supported(propose_steps(case)) if case.context.operator else [])
    )
    agrees = case.context.lifted_agrees
    if reproduced or agrees is False:
        return reproduced
    if agrees is None:
        return _computed_narrowly(case, units=_FEW_UNITS) if case.context.operator else []
    return _computed_narrowly(case) or propose_noise(case)


def propose_rounded_inputs(case: Case) -> list[Pattern]:
    """`precision`: the operator with rounded inputs or partial sums gives the candidate."""
    if not _may_be_rounding(case):
        return []
    patterns = _run_in_format(case) or _rounded_sums(case)
    if patterns:
        return patterns
    for recomputed in recomputations(case):
        figures: dict[str, float | str] = {"format": recomputed.format, "inputs": recomputed.which}
        weight = weigh(case, recomputed.value, cost=4.0)
        if weight is not None:
            sentence = f"computed on {recomputed.which} {recomputed.how} to {recomputed.format}"
            patterns.append(weight.pattern(PatternKind.PRECISION, sentence, figures))
        elif recomputed.which == "inputs" and recomputed.how == "rounded":
            patterns += _rounded_inside_and_out(case, recomputed, figures)
    return sorted(patterns, key=lambda pattern: -pattern.confidence)[:1]


def _may_be_rounding(case: Case) -> bool:
    if case.is_exact or case.given.is_complex() or not case.is_beyond_noise:
        return False
    return bool(torch.isfinite(case.error.reshape(-1)[case.some_wrong]).all())


def _rounded_output(case: Case) -> list[Pattern]:
    """Every wrong value is the right one, or the reference's, in a narrower format."""
    candidate = case.given[case.wrong]
    if candidate.numel() < _FEWEST or not bool((candidate != 0).any()):
        return []
    some = case.given.reshape(-1)[case.some_wrong]
    for form in FORMATS:
        if form.unit <= unit_roundoff(case.candidate.dtype):
            break
        if float(form.holds(some).double().mean()) < _MOST:
            continue
        pattern = _explain_by_format(case, form, candidate)
        if pattern is not None:
            return [pattern]
    return []


def _explain_by_format(case: Case, form: NarrowFormat, candidate: Tensor) -> Pattern | None:
    """Rounded or cut off; the candidate may have been a rounding of its own away before that."""
    right, usual = case.right[case.wrong], widen(case.reference)[case.wrong]
    noise = 2 * case.allowed[case.wrong]
    for how, change in (("rounded", form.round_to_nearest), ("truncated", form.round_to_zero)):
        equal = same(candidate, change(right)) | same(candidate, change(usual))
        step = torch.maximum(form.spacing(candidate), form.spacing(right))
        reach = 0.5001 if how == "rounded" else 1.0001
        apart = (candidate - right).abs()
        near = apart <= step * reach + noise
        if how == "truncated":
            near &= candidate.abs() <= right.abs() + noise
        within, exact = (float(mask.double().mean()) for mask in (equal | near, equal))
        if within < _MOST or (exact < _MOST and case.context.lifted_agrees is not True):
            continue
        # The probability that an element is in a narrower format by chance.
        certain = 1 - 2.0 ** -min(candidate.numel(), 60)
        name = "float16 or tf32" if form.name == "float16" else form.name
        evidence: dict[str, float | str] = {
            "format": form.name,
            "bit for bit": round_down(exact),
            "within the noise": round_down(within),
            "error to value": _error_to_value(candidate, right),
            "elements": float(candidate.numel()),
        }
        return _pattern(0.99 * certain * within, f"{how} to {name}", evidence)
    return None


def _error_to_value(candidate: Tensor, right: Tensor) -> float:
    share = (candidate - right).square().mean() / right.square().mean().clamp(min=1e-300)
    return float(f"{float(share) ** 0.5:.3g}")


def _computed_narrowly(case: Case, units: float = math.inf) -> list[Pattern]:
    """Every value is a number of a narrower format, though not the nearest: its inputs were, too.

    The elements that are not wrong by themselves bear witness as well: by chance each is such a
    number once in 2^b times, with b the bits that the format lacks.

    Args:
        units: the largest error, in multiples of the format's unit roundoff.
    """
    told = (case.given != 0) & torch.isfinite(case.given) & torch.isfinite(case.right)
    candidate, right = case.given[told], case.right[told]
    if bool((candidate == candidate.round()).all()):
        return []  # small whole numbers are in every format
    digits = -math.log2(2 * unit_roundoff(case.candidate.dtype))
    for form in FORMATS:
        if form.unit <= unit_roundoff(case.candidate.dtype):
            break
        bits = candidate.numel() * (digits - form.digits)
        representable_share = float(form.holds(candidate).double().mean())
        usual = widen(case.reference)[told]
        is_telling = bits >= _ENOUGH_BITS and representable_share >= _MOST
        if not is_telling or float(form.holds(usual).double().mean()) > _HELD_ANYWAY:
            continue
        share = _error_to_value(candidate, right)
        if not share <= min(_STILL_ROUNDING, units * form.unit):
            continue
        name = "float16 or tf32" if form.name == "float16" else form.name
        evidence: dict[str, float | str] = {
            "format": form.name,
            "representable": representable_share,
            "elements": float(candidate.numel()),
            "error to value": share,
        }
        sentence = f"computed in {name}: it can represent every value"
        return [_pattern(0.85 * representable_share, sentence, evidence)]
    return []


def _rounded_inside_and_out(
    case: Case, recomputed: Recomputed, figures: dict[str, float | str]
) -> list[Pattern]:
    """The operator runs in the format: inputs and result are rounded, sums in float32."""
    form = next((each for each in FORMATS if each.name in recomputed.format), None)
    if form is None:
        return []
    value = form.round_to_nearest(recomputed.value)
    return _match_format(case, value, form, f"computed in {recomputed.format}", figures)


def _match_format(
    case: Case,
    value: Tensor,
    form: NarrowFormat,
    sentence: str,
    evidence: Mapping[str, float | str],
) -> list[Pattern]:
    """A prediction in a format: most elements bit for bit, and the others a step away."""
    predicted, candidate = value[case.wrong], case.given[case.wrong]
    equal = float(same(candidate, predicted).double().mean())
    step = 1.0001 * torch.maximum(form.spacing(candidate), form.spacing(predicted))
    within = float(((candidate - predicted).abs() <= step).double().mean())
    if candidate.numel() < _FEWEST or equal < _SAME_SUMS or within < _MOST:
        return []
    figures = {"bit for bit": round_down(equal), "within a step": round_down(within)}
    certain = 1 - 2.0 ** -min(candidate.numel(), 60)
    every = {**evidence, **figures, "explained": equal, "fitted": 0.0}
    return [_pattern(0.98 * equal * certain, sentence, every)]


def _run_in_format(case: Case) -> list[Pattern]:
    """The very call on inputs in a half-precision dtype, as the device computes it."""
    rerun = Rerun.of(case)
    if rerun is None:
        return []
    for form, dtype in zip(FORMATS[2:4], (torch.bfloat16, torch.float16), strict=True):
        if any(form.unit <= roundoff(tensor) for tensor in rerun.call.floating):
            continue
        values = [tensor.to(dtype) for tensor in rerun.call.floating]
        value = attempt(functools.partial(rerun.value, values, wide=False), case.shape)
        evidence = {"format": form.name, "inputs": "inputs"}
        if value is not None:
            sentence = f"computed in {form.name}"
            patterns = _match_format(case, value, form, sentence, evidence)
            if patterns:
                return patterns
    return []


# --- The operator on rounded inputs ---------------------------------------------------------------

_MOST_WORK = 1 << 30
_MOST_SECONDS = 3.0
# The fewest different values that are rounded, of one operand.
_FEWEST_ROUNDED = 4
# The results of an operator that are looked at.
_MOST_OUTPUTS = 3
_ELEMENTWISE: dict[str, Callable[..., Tensor]] = {
    "mul": torch.mul,
    "add": torch.add,
    "sub": torch.sub,
    "div": torch.div,
}


def recomputations(case: Case) -> Iterator[Recomputed]:
    """The results on rounded inputs; none if the operator is unknown or too large."""
    rerun = Rerun.of(case)
    if rerun is None:
        yield from _by_formula(case)
        return
    floating = rerun.call.floating
    wide = [widen(tensor) for tensor in floating]
    every = tuple(range(len(floating)))
    choices = _choices(every)
    limit = effort.limit_search(_MOST_SECONDS)
    tables = tuple(position for position in every if floating[position].dim() > 1)
    changes = [
        *((_name_format(form), how, change, choices) for form, how, change in _roundings(floating)),
        # A vector is kept as it is.
        *((name, "rounded", change, _choices(tables)) for name, change in quantisations(wide)),
    ]
    # The float64 run of a candidate quantises in float64, too.
    if case.candidate.dtype == torch.float64:
        floating = [
            tensor.to(original.device) for original, tensor in zip(floating, wide, strict=True)
        ]
    for name, how, change, chosen_ones in changes:
        for chosen in filter(None, chosen_ones):
            changed = [
                _change_in_own_dtype(change, tensor) if position in chosen else tensor
                for position, tensor in enumerate(floating)
            ]
            if not all(
                _shows_rounding(floating[position], changed[position]) for position in chosen
            ):
                continue
            value = None
            if rerun.may_give_first(changed):
                value = attempt(functools.partial(rerun.value, changed), case.shape)
            if value is not None:
                yield Recomputed(value, name, _name_inputs(chosen, every), how)
            if limit.is_over:
                return


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """The result if some inputs are rounded."""

    value: Tensor
    format: str
    which: str
    how: str


@dataclasses.dataclass(frozen=True)
class Rerun:
    """A call that is run again on other values.

    Attributes:
        output: which of the tensors that it returns is the one in question.
    """

    case: Case
    call: LiveCall
    output: int

    @classmethod
    def of(cls, case: Case) -> Rerun | None:
        """None if there is no call, or if it does not give the right values."""
        call = case.context.call
        if call is None or not call.floating:
            return None
        reruns = (cls(case, call, output) for output in range(_MOST_OUTPUTS))
        return next(
            (rerun for rerun in reruns if trusted_formula(case, rerun.value) is not None), None
        )

    def value(self, values: Sequence[Tensor] = (), *, wide: bool = True) -> Tensor | None:
        """The result on other floating-point tensors, in float64 or in their own dtype.

        None if the call draws random numbers, or is a whole program.
        """
        if not self.call.steps:
            return None
        call = self.call.with_floating(values) if values else self.call
        result = call.results(wide=wide)[self.output]
        return None if result.is_complex() else widen(result)

    def may_give_first(self, values: Sequence[Tensor]) -> bool:
        """Whether such values give the first of several runs; also if there is one only."""
        if not isinstance(self.call, RepeatedCall):
            return True
        call, shape = self.call.first, self.case.shape[1:]
        first = [value[0] for value in values]
        result = attempt(lambda: call.with_floating(first).results(wide=True)[self.output], shape)
        return result is not None and may_give_first(self.case, result)


def _choices(places: tuple[int, ...]) -> dict[tuple[int, ...], None]:
    """All of them, each, and all but one: a bias is often added at full precision."""
    but_one = (places[:number] + places[number + 1 :] for number in range(len(places)))
    return dict.fromkeys([places, *((position,) for position in places), *but_one])


def _change_in_own_dtype(change: Callable[[Tensor], Tensor], candidate: Tensor) -> Tensor:
    """In the program's own dtype, in which a scale is rounded, or in float32 if that is wider."""
    on_cpu = candidate.detach().cpu()
    return change(on_cpu.to(torch.promote_types(on_cpu.dtype, torch.float32))).to(candidate)


def _roundings(
    operands: Sequence[Tensor],
) -> Iterator[tuple[NarrowFormat, str, Callable[[Tensor], Tensor]]]:
    for form in FORMATS:
        if form.name == "float16" or any(form.unit <= roundoff(tensor) for tensor in operands):
            continue  # tf32 has as many digits and the wider range
        yield form, "rounded", form.round_to_nearest
        yield form, "cut off", form.round_to_zero


def _shows_rounding(value: Tensor, rounded: Tensor) -> bool:
    """Whether enough different values are rounded: one constant may be another for any reason."""
    return len(value[value != rounded].unique()) >= _FEWEST_ROUNDED


def _name_format(form: NarrowFormat) -> str:
    return "tf32 or float16" if form.name == "tf32" else form.name


def _by_formula(case: Case) -> Iterator[Recomputed]:
    operation = operation_of(case, inputs=2)
    inputs = case.context.inputs
    if operation is None or not all(tensor.is_floating_point() for tensor in inputs):
        return
    compute = functools.partial(_compute, work=math.prod(case.shape))
    # The formula must be the one the reference used.
    if trusted_formula(case, functools.partial(compute, operation)) is None:
        return
    operands = (1, 2) if operation.name in {"addmm", "baddbmm"} else (0, 1)
    choices = [operands, *((operand,) for operand in operands)]
    for form, how, change in _roundings([inputs[operand] for operand in operands]):
        for chosen in choices:
            changed = tuple(
                change(tensor) if position in chosen else tensor
                for position, tensor in enumerate(operation.inputs)
            )
            changed_operation = dataclasses.replace(operation, inputs=changed)
            value = attempt(functools.partial(compute, changed_operation), case.shape)
            if value is not None:
                yield Recomputed(value, _name_format(form), _name_inputs(chosen, operands), how)


def _name_inputs(chosen: Sequence[int], operands: Sequence[int]) -> str:
    if len(chosen) == len(operands):
        return "inputs" if len(operands) > 1 else "its input"
    numbers = " and ".join(map(str, chosen))
    return f"inputs {numbers}" if len(chosen) > 1 else f"input {numbers}"


def _compute(operation: Operation, *, work: int) -> Tensor | None:
    """The result of its formula; None if there is none, or it takes too long."""
    if operation.name in _ELEMENTWISE:
        return _ELEMENTWISE[operation.name](*operation.inputs)
    if work * max(max(tensor.shape, default=1) for tensor in operation.inputs) > _MOST_WORK:
        return None
    product = product_of(operation)
    if product is not None:
        return product.value()
    convolve = convolution_of(operation)
    return None if convolve is None else convolve(*operation.inputs)


# --- Sums whose partial results are rounded -------------------------------------------------------

_CHUNKS = (1, 8, 16, 32, 64, 128, 256)
_MOST_CHUNKS = 1024
# Of the partial sums of one prediction.
_MOST_PARTIAL = 1 << 26
# Operators that leave the values as they are; a copy to another dtype rounds them.
_MOVING = (step_names("copies") - {"to_copy"}) | {"unsafe_view"}


@dataclasses.dataclass(frozen=True)
class Summation:
    """A sum over k, of the products of a matrix product or of the elements of a tensor.

    Attributes:
        length: the number of terms.
        part: the sum of the terms from a start up to an end.
        added: what is added to the sum.
    """

    length: int
    part: Callable[[int, int], Tensor]
    added: Tensor | None = None

    def round_chunks(self, chunk: int, dtype: torch.dtype, *, each: bool) -> Tensor:
        """The sum if it is rounded after each chunk of terms.

        Args:
            each: the sum of each chunk is rounded as well, before it is added.
        """
        total = torch.zeros((), dtype=torch.float32)
        for start in range(0, self.length, chunk):
            term = self.part(start, min(start + chunk, self.length))
            term = term.to(dtype).float() if each else term
            total = (total + term).to(dtype).float()
        return total if self.added is None else total + self.added


def _summation_of(case: Case) -> Summation | None:
    call = case.context.call
    if (
        call is None
        or not call.steps
        or any(tensor.dtype != torch.float32 for tensor in call.floating)
    ):
        return None
    steps = [
        step for position, step in call.steps if position != WHOLE and step.name not in _MOVING
    ]
    if len(steps) != 1:
        return None
    (step,) = steps
    tensors = [
        value.detach().cpu() for value in step.values.values() if isinstance(value, torch.Tensor)
    ]
    others = {k: v for k, v in step.values.items() if not isinstance(v, torch.Tensor)}
    operation = Operation(step.name, tuple(tensors), Context(arguments=others))
    product = product_of(operation)
    if product is not None and product.right.dim() > 1:
        left, right = product.left, product.right
        return Summation(
            left.shape[-1],
            lambda start, end: left[..., start:end] @ right[..., start:end, :],
            product.added,
        )
    if operation.name != "sum" or len(operation.dims) != 1 or len(tensors) != 1:
        return None
    terms = tensors[0].movedim(operation.dims[0], -1)
    return Summation(terms.shape[-1], lambda start, end: terms[..., start:end].sum(-1))


def _rounded_sums(case: Case) -> list[Pattern]:
    """`precision`: the partial sums over k are rounded to a half-precision format."""
    sums = _summation_of(case)
    if sums is None or sums.length * case.reference.numel() > _MOST_WORK:
        return []
    limit = effort.limit_search(_MOST_SECONDS)
    halves = zip(FORMATS[2:4], (torch.bfloat16, torch.float16), strict=True)
    for (form, dtype), chunk, each in itertools.product(halves, _CHUNKS, (False, True)):
        chunks = -(-sums.length // chunk)
        most = min(_MOST_CHUNKS, _MOST_PARTIAL // case.reference.numel())
        if not 1 < chunks <= most or limit.is_over:
            continue
        value = sums.round_chunks(chunk, dtype, each=each)
        if value.numel() != case.reference.numel():
            return []
        sentence = f"accumulated in {form.name}: the sum is rounded after every "
        sentence += f"{chunk} terms" if chunk > 1 else "term"
        evidence: dict[str, float | str] = {"format": form.name, "terms": float(chunk)}
        patterns = _match_format(case, widen(value).reshape(case.shape), form, sentence, evidence)
        if patterns:
            return patterns
    return []


# --- Few levels: quantised with a scale -----------------------------------------------------------

_MOST_ON_LEVELS = 0.95
_FEWEST_ON_LEVELS = 8


def _on_scaled_levels(case: Case) -> list[Pattern]:
    """`precision`: each value is the nearest level of a scaled int8 or float8."""
    if int(case.wrong.sum()) < _FEWEST_ON_LEVELS or case.own_unit > 2.0**-11:
        return []  # a half-precision value is near a level of int8 by chance
    places = case.some_wrong
    candidate, error = (tensor.reshape(-1)[places] for tensor in (case.given, case.error.abs()))
    right, allowed = (tensor.reshape(-1)[places] for tensor in (case.right, case.allowed))
    for full, extent in _scales(case):
        scale = full.expand(case.shape).reshape(-1)[places] if full.dim() else full
        for name, levels in _nearest_levels(right / scale):
            predicted = levels * scale
            room = 8 * case.own_unit * predicted.abs() + 2 * allowed
            share = float(((candidate - predicted).abs() <= room).double().mean())
            # Levels as close as the noise would fit anything.
            if share >= _MOST_ON_LEVELS and bool((error > 4 * room).any()):
                evidence: dict[str, float | str] = {
                    "format": name,
                    "explained": share,
                    "within the noise": round_down(share),
                    "scale": extent,
                }
                sentence = f"quantised to {name} with {extent}"
                return [_pattern(0.97 * share, sentence, evidence)]
    return []


def _scales(case: Case) -> Iterator[tuple[Tensor, str]]:
    right = torch.where(torch.isfinite(case.right), case.right, 0.0).abs()
    if not bool((right > 0).any()):
        return
    yield right.amax(), "one scale for the tensor"
    for dim in range(right.dim()):
        if right.dim() > 1 and right.shape[dim] > 1:
            largest = right.amax(dim=dim, keepdim=True)
            yield torch.where(largest > 0, largest, 1.0), f"a scale per slice along dimension {dim}"


def _nearest_levels(share: Tensor) -> Iterator[tuple[str, Tensor]]:
    for count in (127.0, 128.0, 7.0):
        name = "int4" if count == 7.0 else "int8"  # noqa: PLR2004
        yield name, (share * count).round() / count
    for form in FORMATS[:2]:
        yield form.name, form.round_to_nearest(share * form.largest) / form.largest


# --- Nothing but larger noise ---------------------------------------------------------------------

# Here no candidate can be predicted. In float64 the fault vanishes, so that only the native code of
# the candidate can be wrong: its errors must have none of the traces of such a fault (bias, another
# formula, a region, a few large errors). On their way to an output, errors of one rounding become
# alike in places that share inputs, and small beside what is added to them.

_FEWEST_NOISY = 64
_SAMPLE = 1 << 16
_LARGEST_SHARE = 0.15
_MOST_BIAS = 0.3
_MOST_LIKENESS = 0.3
_MOST_KURTOSIS = 6.0
# The rms of one rounding is about a third of the unit, and many of them add up.
_LEAST_UNITS = 0.1
_USUAL_LENGTH = 256


def propose_noise(case: Case) -> list[Pattern]:
    """`precision`: the errors are noise everywhere in the tensor, and vanish in float64."""
    right, error = case.right.flatten(), case.error.flatten()
    telling = torch.isfinite(error) & (right != 0)
    right, error = right[telling], error[telling]
    if error.numel() < _FEWEST_NOISY or float((error != 0).double().mean()) < 0.9:  # noqa: PLR2004
        return []
    size = _rms(error)
    share = size / _rms(right)
    if not case.own_unit < share <= _LARGEST_SHARE:
        return []
    relative = error / right.abs().clamp(min=share * _rms(right))
    evener = min(_kurtosis(_even_out(case)), _kurtosis(error), _kurtosis(relative))
    lean = abs(float((error * right).mean())) / float(right.square().mean()) / share
    bias = abs(float(error.mean())) / size
    likeness = _likeness_by_value(right, error)
    slack = 3 / math.sqrt(error.numel())
    if (
        max(lean, bias) > _MOST_BIAS + slack
        or likeness > _MOST_LIKENESS + slack
        or evener > _MOST_KURTOSIS
        or not _is_everywhere(case)
    ):
        return []
    evidence: dict[str, float | str] = {
        "error to value": float(f"{share:.3g}"),
        "bias": float(f"{bias:.2g}"),
        "likeness by value": float(f"{likeness:.2g}"),
        LIFTED_RUN: "agrees",
    }
    sentence = f"less precise everywhere, by {share:.2g} of the values; in float64 it agrees"
    form = _coarsest_format(case, share) if case.context.operator else None
    if form is not None:
        evidence["format"] = form.name
        sentence += f": as of sums in {form.name}"
    return [_pattern(0.8, sentence, evidence)]


def _pattern(confidence: float, sentence: str, evidence: dict[str, float | str]) -> Pattern:
    kind = PatternKind.PRECISION
    return Pattern(kind=kind, confidence=confidence, sentence=sentence, evidence=evidence)


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _kurtosis(values: Tensor) -> float:
    values = values - values.mean()
    squares = values.square()
    return float(squares.square().mean() / squares.mean().square().clamp(min=1e-300))


def _even_out(case: Case) -> Tensor:
    """The errors with all slices scaled to one size, since large rows have large errors."""
    error = torch.where(torch.isfinite(case.error), case.error, 0.0)
    squares = error.square()
    for dim, size in enumerate(case.shape):
        others = [other for other in range(error.dim()) if other != dim]
        if size > 1 and others:
            error = error / squares.mean(dim=others, keepdim=True).sqrt().clamp(min=1e-300)
    return error.flatten()


def _likeness(values: Tensor) -> float:
    """Correlation of neighbours: 1 for a smooth curve, 0 for noise."""
    below = float(values.square().sum())
    return abs(float((values[1:] * values[:-1]).sum())) / below if below else 1.0


def _likeness_by_value(right: Tensor, error: Tensor) -> float:
    """Whether the errors follow a curve over the values, as those of another formula do."""
    step = max(1, right.numel() // _SAMPLE)
    order = right[::step].argsort()
    return _likeness(error[::step][order])


def _is_everywhere(case: Case) -> bool:
    """Whether no slice has far smaller errors than the others, as with a faulty region."""
    z = torch.where(torch.isfinite(case.error), case.error, 0.0).square()
    for dim, size in enumerate(case.shape):
        others = [other for other in range(z.dim()) if other != dim]
        if size > 1 and others and z.numel() // size >= 16:  # noqa: PLR2004
            means = z.mean(dim=others).sqrt()
            if float(means.min()) < 0.05 * float(means.median()):
                return False
    return True


def _coarsest_format(case: Case, share: float) -> NarrowFormat | None:
    """The coarsest format whose rounding explains the errors."""
    length = max((max(tensor.shape, default=1) for tensor in case.context.inputs), default=0)
    most = math.sqrt(length or _USUAL_LENGTH)
    for form in FORMATS[2:4]:
        if case.own_unit < form.unit and _LEAST_UNITS * form.unit <= share <= most * form.unit:
            return form
    return None
