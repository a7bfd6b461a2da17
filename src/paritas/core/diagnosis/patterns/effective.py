"""What an operator read in the place of an operand, compared with the operand itself.

A mistake in a weight is spread over the whole result: pruned, normalised, read with other scales.
The weight that the candidate used shows it. It is among the values that the candidate computes, or
follows from its result. Put in the operand's place, it must give the candidate; then the operand is
a wrong tensor of its own, and what explains tensors explains it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.core.diagnosis.calls import UNUSABLE
from paritas.core.diagnosis.case import Case, Context, Extent, near, weigh, widen
from paritas.core.diagnosis.leftovers import fits_honestly
from paritas.core.diagnosis.patterns.approximations import propose_curves
from paritas.core.diagnosis.patterns.arguments import solve_arguments
from paritas.core.diagnosis.patterns.linear_maps import (
    is_linear,
    solve_bias,
    solve_input,
    solve_weight,
    summed_axis,
)
from paritas.core.diagnosis.patterns.predictions import Predictor
from paritas.core.diagnosis.patterns.variations import is_summand
from paritas.core.diagnosis.patterns.weights import propose_bends, propose_weights
from paritas.core.diagnosis.region import find_region
from paritas.core.diagnosis.stating import OPERAND
from paritas.core.results.findings import PatternKind
from paritas.core.torch_private.global_state import quietly
from paritas.core.torch_private.operators import Operator, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from paritas.core.diagnosis.calls import LiveCall, Step
    from paritas.core.diagnosis.patterns.linear_maps import SolvedOperand
    from paritas.core.results.findings import Pattern, Region

    Describe = Callable[[Case], list[Pattern]]

# Larger operands are not compared.
_MOST_ELEMENTS = 1 << 20
_FEW_VALUES = 2
# So many values of the candidate are tried in the place of an operand.
_MOST_VALUES = 64


def propose_effective(case: Case, describe: Describe) -> list[Pattern]:
    """What is wrong with an operand as the candidate used it; many kinds.

    Args:
        describe: the patterns that explain a wrong tensor, best first.
    """
    call = case.context.call
    if call is None or not case.is_beyond_noise or case.is_exact or case.given.is_complex():
        return []
    predictor = Predictor.of(case, call)
    if predictor is None:
        name = _name_of_operand(case, call)
        return [] if name is None else _name_patterns(case, name, call, describe)
    # A weight is the same for all inputs; what is one only for those of this run is an input.
    solved = (
        functools.partial(_solved_operands, solve)
        for solve in (solve_weight, solve_input, solve_bias)
    )
    searches: list[Callable[[Predictor], Iterator[_Operand]]] = [
        _visible_operands,
        *solved,
    ]
    with quietly():
        for search in searches:
            stated = [
                pattern
                for operand in search(predictor)
                for pattern in _state(predictor, operand, describe)[:1]
            ]
            # Two operands that explain it in different ways explain nothing.
            if stated:
                is_one = len({pattern.kind for pattern in stated}) == 1
                return stated[:1] if is_one else []
        # What is deeper inside of the call comes first, and explains what follows from it.
        for operand in _solved_arguments(predictor):
            stated = _state(predictor, operand, describe)[:1]
            if stated:
                return stated
    return propose_bends(case) if is_linear(call) else []


@dataclasses.dataclass(frozen=True, eq=False)
class _Operand:
    """An operand as the candidate used it.

    Attributes:
        name: of the operand.
        case: what was used, and the operand itself.
        predicted: what the call gives with what was used in the operand's place.
        outer: the result that it explains, if not that of the run.
    """

    name: str
    case: Case
    predicted: Tensor
    outer: Case | None = None


def _state(predictor: Predictor, operand: _Operand, describe: Describe) -> list[Pattern]:
    """What explains the operand, if the operand explains the candidate."""
    inner, outer = operand.case, operand.outer or predictor.case
    if not inner.is_beyond_noise or not inner.is_finite:
        return []
    weight = weigh(outer, operand.predicted, extent=Extent.ALL)
    if weight is None or not fits_honestly(outer, operand.predicted):
        return []
    call = predictor.call
    patterns = _name_patterns(inner, operand.name, call, describe)
    if not patterns and operand.outer is not None:
        patterns = _name_patterns(inner, operand.name, call, _propose_function)
    return [_with_exact(pattern, weight.exact) for pattern in patterns]


def _propose_function(case: Case) -> list[Pattern]:
    """An argument that is a function of the right one, where it is wrong."""
    candidate, right, noise = (
        tensor[case.wrong] for tensor in (case.given, case.right, case.allowed)
    )
    return propose_curves(Case(candidate, right, noise=noise, context=Context()), right)


def _name_patterns(case: Case, name: str, call: LiveCall, describe: Describe) -> list[Pattern]:
    """What explains an operand, in words about it."""
    alone = dataclasses.replace(case, context=Context())
    patterns = describe(alone) or propose_weights(alone)
    where = find_region(alone)
    stated = []
    # Of one value everywhere, many mistakes make another one, or two.
    few = len(case.right.unique()) == 1 and len(case.given[case.wrong].unique()) <= _FEW_VALUES
    for proposed in () if few else patterns:
        pattern = _of_a_part(proposed, alone, where)
        sentence = f"{name} is not the reference's: {pattern.sentence}"
        if pattern.kind == PatternKind.ZEROS and _is_added(name, call):
            kind = PatternKind.MISSING_BIAS if name == "bias" else PatternKind.MISSING_OPERAND
            pattern = msgspec.structs.replace(pattern, kind=kind)
            sentence = f"{name} is left out"
        elif pattern.kind == PatternKind.ZEROS and _is_of_terms(alone, summed_axis(call, name)):
            pattern = msgspec.structs.replace(pattern, kind=PatternKind.PARTIAL_SUM)
            sentence = f"terms of each sum are left out: {name} is read as zero"
        if where is not None and where.sentence:
            sentence = f"{sentence}, {where.sentence}"
        evidence = {**pattern.evidence, OPERAND: name}
        stated.append(msgspec.structs.replace(pattern, sentence=sentence, evidence=evidence))
    return stated


def _is_of_terms(case: Case, axis: int | None) -> bool:
    """Whether an operand is zero in all of some slices along an axis, and right in the others."""
    if axis is None or case.wrong.dim() < -axis:
        return False
    others = [dim for dim in range(case.wrong.dim()) if dim != axis % case.wrong.dim()]
    hit, zero = case.wrong, case.given == 0
    if others:
        hit, zero = hit.any(dim=others), zero.all(dim=others)
    return bool(zero[hit].all()) and not bool(hit.all())


def _is_added(name: str, call: LiveCall) -> bool:
    """Whether an operand of the call, or of one of its operators, is a summand."""
    argument, _, operator = name.partition(" of ")
    parts = operator.split(".")
    operator = parts[1] if len(parts) > 1 else getattr(call.target, "__name__", operator)
    return is_summand(operator.partition(".")[0].strip("_"), argument)


# The share of right values that may be on the side of the wrong ones.
_NEARLY_NONE = 0.02


def _of_a_part(pattern: Pattern, case: Case, where: Region | None) -> Pattern:
    """A factor or an offset of some indices along one axis, or of values on one side of a number.

    The first is one of that axis; the second another function of each element.
    """
    kinds = {
        PatternKind.SCALE: PatternKind.AXIS_SCALE,
        PatternKind.OFFSET: PatternKind.AXIS_OFFSET,
    }
    kind = kinds.get(PatternKind(pattern.kind))
    if kind is None or where is None:
        return pattern
    if where.kind == "diagonal" and pattern.kind == PatternKind.OFFSET:
        # A factor with more on its diagonal adds the other factor to the result.
        return msgspec.structs.replace(pattern, kind=PatternKind.RESIDUAL)
    if len(where.axes) == 1:
        return msgspec.structs.replace(pattern, kind=kind)
    side = _one_side(case)
    if not side:
        return pattern
    sentence = f"{pattern.sentence}, of {side} only"
    return msgspec.structs.replace(pattern, kind=PatternKind.OTHER_FUNCTION, sentence=sentence)


def _one_side(case: Case) -> str:
    """Which values are wrong, if it is those on one side of a number."""
    wrong, clear = case.right[case.wrong], case.right[~case.wrong]
    if not wrong.numel() or not clear.numel():
        return ""
    middle = float(clear.abs().min())
    for sign, words in ((1.0, "values above"), (-1.0, "values below")):
        # Of values near the limit, the error may be within the noise.
        limit = float((sign * wrong).min())
        if float((sign * clear > limit).double().mean()) <= _NEARLY_NONE:
            return f"{words} {0.0 if abs(limit) <= 2 * middle else sign * limit:.3g}"
    return ""


def _with_exact(pattern: Pattern, share: float) -> Pattern:
    """A pattern that is no more exact than what the operand gives."""
    exact = pattern.evidence.get("bit for bit", 0.0)
    least = min(share, exact if isinstance(exact, float | int) else 0.0)
    return msgspec.structs.replace(pattern, evidence={**pattern.evidence, "bit for bit": least})


def _name_of_operand(case: Case, call: LiveCall) -> str | None:
    """The name of the operand that a case is about, if it is about one and not about a result."""
    for name, operand in zip(_names_of(call), call.floating, strict=True):
        for turned in (operand, operand.mT) if operand.dim() > 1 else (operand,):
            is_alike = turned.shape == case.reference.shape
            if is_alike and torch.equal(widen(turned), widen(case.reference)):
                return name
    return None


# --- An operand of the call, or of one of its operators -------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Slot:
    """Where something else may be put.

    Attributes:
        name: of the operand.
        operand: what should be there.
        put: what the call gives with something else there; None if it cannot take it.
    """

    name: str
    operand: Tensor
    put: Callable[[Tensor], Tensor | None]


def _slots(predictor: Predictor) -> Iterator[_Slot]:
    call = predictor.call
    names = _names_of(call)
    for number, operand in enumerate(call.floating):
        if _can_be_compared(operand):
            put = functools.partial(predictor.with_operand, number)
            yield _Slot(names[number], operand, put)
    if len(predictor.steps) < 2:  # noqa: PLR2004
        return
    for position, step in predictor.steps:
        for name, operand in step.values.items():
            if _can_be_compared(operand):
                put = functools.partial(_put_in_step, predictor, position, name)
                yield _Slot(f"{name} of {step.operator}", operand, put)


def _names_of(call: LiveCall) -> list[str]:
    parameters = _parameters_of(call.target)
    names = [*parameters, *[""] * len(call.args)][: len(call.args)]
    named_arguments = [*zip(names, call.args, strict=True), *call.kwargs.items()]
    tensor_names: list[str] = []
    for name, value in named_arguments:
        tensors = [tensor for tensor in tensors_in(value) if tensor.is_floating_point()]
        is_plain = isinstance(value, torch.Tensor)
        tensor_names += [
            name if is_plain and name else f"tensor {len(tensor_names)}" for _ in tensors
        ]
    return tensor_names


def _parameters_of(target: Any) -> list[str]:
    """The names of what is called; of a function that is built in, by its operator."""
    if inspect.isfunction(target):
        return list(inspect.signature(target).parameters)
    if not isinstance(target, Operator):
        packet = getattr(torch.ops.aten, getattr(target, "__name__", ""), None)
        overloads = packet.overloads() if packet is not None else []
        target = getattr(packet, overloads[0]) if overloads else None
    schema = getattr(target, "_schema", None)
    return [] if schema is None else [argument.name for argument in schema.arguments]


def _put_in_step(predictor: Predictor, position: int, name: str, value: Tensor) -> Tensor | None:
    def change(step: Step) -> Any:
        return step.run(**{name: value.to(step.values[name])})

    result = predictor.value(position, change, wide=True)
    return None if result is None else widen(result)


# --- Among the values of the candidate ------------------------------------------------------------


def _visible_operands(predictor: Predictor) -> Iterator[_Operand]:
    """The operands that are among the values that the candidate computes."""
    case = predictor.case
    if case.context.inner is None:
        return
    wide = case.candidate.dtype == torch.float64
    try:
        values = list(case.context.inner(wide=wide))[-_MOST_VALUES:]
    except UNUSABLE:
        return
    is_any_visible = False
    for slot in _slots(predictor):
        if is_any_visible and " of " in slot.name:
            return  # the operand of the call says more than that of its operator
        right = widen(slot.operand) if wide else slot.operand.detach().cpu()
        for operand in _first_used(case, slot, right, values):
            is_any_visible = True
            yield operand


def _first_used(
    case: Case, slot: _Slot, right: Tensor, values: Sequence[Tensor]
) -> Iterator[_Operand]:
    """The value that gives the candidate in the operand's place; the last one was used."""
    for value in reversed(values):
        for turned in _arrangements(value, right):
            if torch.equal(turned, right):
                continue
            predicted = slot.put(turned)
            if predicted is not None and weigh(case, predicted, extent=Extent.ALL) is not None:
                yield _Operand(slot.name, Case(turned, right, context=Context()), predicted)
                return


def _arrangements(value: Tensor, right: Tensor) -> Iterator[Tensor]:
    """A value in the operand's shape: as it is, transposed, or with other axes in its memory."""
    if value.dtype != right.dtype or value.numel() != right.numel():
        return
    value = value.detach().cpu()
    yield value.reshape(right.shape)
    if value.dim() > 1 and 1 not in value.shape[-2:]:
        yield value.mT.reshape(right.shape)


def _can_be_compared(operand: Any) -> bool:
    is_tensor = isinstance(operand, torch.Tensor) and operand.is_floating_point()
    return is_tensor and 1 < operand.numel() <= _MOST_ELEMENTS


# --- From the result ------------------------------------------------------------------------------


def _solved_operands(
    solve: Callable[[Predictor], Iterator[SolvedOperand]], predictor: Predictor
) -> Iterator[_Operand]:
    """An operand of a linear operator, also from further results of the candidate."""
    for operand in solve(predictor):
        right = widen(predictor.call.floating[operand.number])
        predicted = predictor.with_operand(operand.number, operand.value)
        if predicted is not None:
            # The candidate computed it in its own dtype.
            native = Case(right.to(predictor.case.candidate.dtype), right).allowed
            noise = torch.maximum(operand.noise, native)
            value = _without_noise(operand.value, right, noise)
            inner = Case(value, right, noise=noise, context=Context())
            yield _Operand(_names_of(predictor.call)[operand.number], inner, predicted)


def _solved_arguments(predictor: Predictor) -> Iterator[_Operand]:
    """What a function was computed of, also for other operands."""
    for argument in solve_arguments(predictor):
        value = _without_noise(argument.value, argument.right, argument.noise)
        inner = Case(value, argument.right, noise=argument.noise, context=Context())
        yield _Operand(argument.words, inner, argument.predicted, argument.case)


def _without_noise(value: Tensor, right: Tensor, noise: Tensor) -> Tensor:
    """What is solved for, with zeros, right values and limits that are such within the noise."""
    for limit in (value.max(), value.min()):
        value = torch.where((value - limit).abs() <= noise, limit, value)
    value = torch.where(near(value, torch.zeros_like(value), noise), 0.0, value)
    return torch.where(near(value, right, noise), right, value)
