"""Scaled or offset: a factor, a sign, a number or a known tensor too much or too little."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from paritas.core.diagnosis.case import (
    Extent,
    Weight,
    axis_number,
    exact_share,
    holds_in_block,
    weigh,
    widen,
    wrong_block,
)
from paritas.core.diagnosis.leftovers import fits_honestly
from paritas.core.diagnosis.patterns.fits import weigh_fit
from paritas.core.diagnosis.proportions import proportion, refined_proportion, robust_proportion
from paritas.core.numerics.criterion import unit_roundoff
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.diagnosis.case import Case
    from paritas.core.results.findings import Pattern


# --- Signs ----------------------------------------------------------------------------------------


def propose_signs(case: Case) -> list[Pattern]:
    """`sign`: negated; for booleans inverted, for complex numbers conjugated."""
    if not case.is_beyond_noise:
        return []
    if case.is_boolean:
        # A wrong boolean is always the inverse, which only means something for the whole tensor.
        if case.right.numel() < 2 or not bool(case.wrong.all()):  # noqa: PLR2004
            return []
        weight = weigh(case, 1.0 - case.right)
        sentence = "every boolean is inverted"
    else:
        weight = weigh(case, -case.right, cost=1.0)
        sentence = _describe_sign(case)
        if weight is None and case.right.is_complex():
            weight = weigh(case, case.right.conj().resolve_conj(), cost=1.0)
            sentence = "the sign of the imaginary part is flipped: the complex conjugate"
    if weight is None or not _is_of_a_side_or_block(case):
        return []
    return [weight.pattern(PatternKind.SIGN, sentence)]


def _is_of_a_side_or_block(case: Case) -> bool:
    """Whether values of one sign are wrong, or all of a block: what is negated may be neither.

    Wrong elements of both signs among right ones were multiplied by something else.
    """
    if case.right.is_complex() or case.is_boolean:
        return True
    wrong = case.right[case.wrong]
    one_sided = bool((wrong <= 0).all()) or bool((wrong >= 0).all())
    return one_sided or holds_in_block(case, -case.right)


def _describe_sign(case: Case) -> str:
    if case.right.is_complex():
        return "the sign is flipped"
    wrong, clear = case.right[case.wrong], case.right[~case.wrong]
    one_sided = bool((wrong < 0).all()) or bool((wrong > 0).all())
    same = clear[(clear != 0) & (torch.sign(clear) == torch.sign(wrong[0]))]
    if one_sided and clear.numel() and same.numel() <= 0.02 * case.right.numel():
        lost = "negative" if bool((wrong < 0).all()) else "positive"
        return f"the sign is lost: {lost} values come out with the other sign, as after abs()"
    return "the sign is flipped"


# --- Factors that have a name ---------------------------------------------------------------------

_STANDARD_ERRORS = 4.0
# An estimate gets a name only if it is this close to it...
_CLOSEST = 0.02
# ... and this much closer to it than to 1.
_APART = 0.25
_SIZES = 16


@dataclasses.dataclass(frozen=True)
class NamedFactor:
    """A number with a meaning."""

    value: float
    name: str


_USUAL_FACTORS = (
    *(NamedFactor(2.0, "twice"), NamedFactor(0.5, "one half")),
    *(NamedFactor(math.log(2), "ln 2"), NamedFactor(1 / math.log(2), "log2 e")),
    *(NamedFactor(math.sqrt(2), "sqrt(2)"), NamedFactor(math.sqrt(0.5), "1 / sqrt(2)")),
)


def named_factors(case: Case) -> list[NamedFactor]:
    """The factors that have a meaning here, the most likely first; without 0, 1 and -1."""
    factors: dict[float, NamedFactor] = {}
    for factor in (
        *_rank_factors(case),
        *_argument_factors(case),
        *_USUAL_FACTORS,
        *_size_factors(case),
    ):
        if factor.value not in {0.0, 1.0, -1.0}:
            factors.setdefault(round(factor.value, 12), factor)
    return list(factors.values())


def name_factor(case: Case, value: float, error: float) -> list[NamedFactor]:
    """The names of an estimated factor, the most likely first; empty if it has none.

    A constant in the candidate's own dtype is off by a rounding, which is allowed in addition to
    the error of the estimate.
    """
    names = []
    for factor in named_factors(case):
        size = abs(factor.value)
        tolerance = max(_STANDARD_ERRORS * error, 2 * case.own_unit * size, 1e-12 * size)
        tolerance = min(tolerance, _CLOSEST * size, _APART * abs(factor.value - 1))
        if abs(value - factor.value) <= tolerance:
            names.append(factor)
    return names


def _rank_factors(case: Case) -> Iterator[NamedFactor]:
    world = case.context.world
    total = math.prod(world.values())
    world_factors = [("the world size", total)] if total > 1 else []
    axes = [(f"the size of the mesh axis {name}", size) for name, size in world.items()]
    for name, size in world_factors + (axes if len(axes) > 1 else []):
        if size > 1:
            yield NamedFactor(float(size), f"{name}, {size}")
            yield NamedFactor(1 / size, f"1 / {size}, one over {name}")
            yield NamedFactor(float(size * size), f"{size}^2, {name} squared")
            yield NamedFactor(1 / size**2, f"1 / {size}^2, one over {name} squared")


def _argument_factors(case: Case) -> Iterator[NamedFactor]:
    for name, value in case.context.arguments.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        number = float(value)
        if not math.isfinite(number) or number == 0:
            continue
        if 0 < number < 1 and (name in {"p", "1"} or "drop" in name):
            yield NamedFactor(
                1 / (1 - number), f"1 / (1 - {name}), one over the share that is kept"
            )
            yield NamedFactor(1 - number, f"1 - {name}, the share that is kept")
        if isinstance(value, float):
            words = f"{number:g}, an argument" if name.isdigit() else f"the argument {name}"
            yield NamedFactor(number, words)
            yield NamedFactor(1 / number, f"one over {words}")


def _size_factors(case: Case) -> Iterator[NamedFactor]:
    sizes = _known_sizes(case)
    for size, where in sizes.items():
        yield _of_size(math.sqrt(size), f"sqrt({size}), of {where}")
        yield _of_size(1 / math.sqrt(size), f"1 / sqrt({size}), of {where}")
    for size, where in sizes.items():
        yield NamedFactor(float(size), f"{size}, {where}: a sum for a mean")
        yield NamedFactor(1 / size, f"1 / {size}, of {where}: a mean for a sum")
    for size, where in sizes.items():
        yield _of_size(size / (size - 1), f"n / (n - 1) for n = {size}, {where}")
        yield _of_size((size - 1) / size, f"(n - 1) / n for n = {size}, {where}")


def _of_size(value: float, name: str) -> NamedFactor:
    """A factor that may follow from a size; a short number may be itself and nothing else."""
    is_short = value == float(f"{value:.3g}")
    return NamedFactor(value, f"{value:g}, which is {name}" if is_short else name)


def _known_sizes(case: Case) -> dict[int, str]:
    """The sizes that occur, and where."""
    names: dict[int, str] = {}
    # Several runs are stacked along an axis that the result does not have.
    runs = 1 if case.context.stacked else 0
    for dim, size in reversed(list(enumerate(case.shape[runs:]))):
        names.setdefault(size, f"the size of dimension {dim}")
    for position, tensor in enumerate(case.context.inputs):
        for dim in reversed(range(tensor.dim())):
            names.setdefault(tensor.shape[dim], f"the size of input {position}'s dimension {dim}")
    for name, value in case.context.arguments.items():
        if isinstance(value, int) and not isinstance(value, bool):
            names.setdefault(value, f"the argument {name}")
    names.setdefault(math.prod(case.shape), "the number of elements")
    return {size: where for size, where in list(names.items())[:_SIZES] if size > 1}


# --- Scales: one factor for all, or one per index -------------------------------------------------

# A factor must be this many standard errors away from 0.
_NOT_ZERO = 8.0
# How far sums of float64 in another order may move a factor; the digits of a float64.
_LAST_DIGITS = 1e-14
_MOST_DIGITS = 15
# `propose_signs` handles this factor.
_SIGN = -1.0


def propose_scales(case: Case) -> list[Pattern]:
    """`scale`, or else `axis scale`."""
    if case.is_boolean or not case.is_beyond_noise:
        return []
    return _one_factor(case) or _factor_per_index(case)


def _one_factor(case: Case) -> list[Pattern]:
    factor, error = robust_proportion(case, case.right, case.given)
    if not math.isfinite(factor) or abs(factor) <= _NOT_ZERO * error:
        return []
    weight = _weigh_factor(case, factor)
    if weight is None:
        return []
    if weight.whole:
        # An estimate from the elements with the largest errors is biased, so fit all of them.
        factor, error = refined_proportion(case, case.right, case.given, factor)
    if abs(factor - _SIGN) <= max(4 * error, 0.01) or factor == 0:
        return []
    factor, weight = _shortest(case, factor, error, weight, _weigh_factor)
    if case.is_exact and not holds_in_block(case, (factor * case.right).round()):
        return []
    names = name_factor(case, factor, error)
    if names:
        weight = weight.subtract_costs(cost=math.log2(len(named_factors(case)) + 1))
        text, factor_name = f"scaled by {names[0].name}", names[0].name
    else:
        tight = fits_honestly(case, factor * case.right, slack=max(1.0, abs(factor)))
        weight = weight.subtract_costs(parameters=1.0) if tight else None
        text, factor_name = f"scaled by {factor:.{_known_digits(factor, error)}g}", ""
    if weight is None:
        return []
    side = "" if weight.whole else _side_of_wrong(case)
    text += f", but only {side} values" if side else ""
    figures: dict[str, float | str] = {"factor": factor, "standard error": error}
    if factor_name:
        figures["name"] = factor_name
    if len(names) > 1:
        figures["or"] = "; ".join(other.name for other in names[1:3])
    return [weight.pattern(PatternKind.SCALE, text, figures)]


def _side_of_wrong(case: Case) -> str:
    """Which values are wrong, if it is those of one sign, as behind a leaky relu."""
    if case.right.is_complex() or bool(wrong_block(case).case.wrong.all()):
        return ""
    for side, which in (("negative", case.right < 0), ("positive", case.right > 0)):
        others = which & ~case.wrong  # so near to zero that it is not seen
        if not bool((case.wrong & ~which).any()) and int(others.sum()) <= 0.05 * int(which.sum()):
            return side
    return ""


def _shortest(
    case: Case,
    number: float,
    error: float,
    weight: Weight,
    weigh_number: Callable[[Case, float], Weight | None],
    largest: float = 1.0,
) -> tuple[float, Weight]:
    """The shortest decimal within the error of the fit that reproduces as many elements exactly.

    The last digits of a fit depend on how its values are rounded and in which order it adds them,
    which is another one on each machine.

    Args:
        largest: the size of the values that are rounded with it, in units of the number.
    """
    unit = max(case.own_unit, _LAST_DIGITS) * max(1.0, largest)
    tolerance = max(_STANDARD_ERRORS * error, unit * abs(number))
    for digits in range(1, _MOST_DIGITS + 1):
        decimal = float(f"{number:.{digits}g}")
        if abs(decimal - number) <= tolerance:
            shorter = weigh_number(case, decimal)
            if shorter is not None and shorter.exact >= weight.exact:
                return decimal, shorter
    return number, weight


def _weigh_factor(case: Case, factor: float) -> Weight | None:
    if case.is_exact:
        factor = round(factor, 9)
    weight = weigh(case, factor * case.right, slack=max(1.0, abs(factor)))
    if weight is None or case.arbiter is None:
        return weight
    # The candidate is made of native values, which are rounded where the arbiter's are not.
    native = exact_share(case, factor * widen(case.reference))
    return dataclasses.replace(weight, exact=max(weight.exact, native))


def _known_digits(factor: float, error: float) -> int:
    digits = math.log10(abs(factor) / error) if error > 0 else math.inf
    return int(min(max(digits, 3), 7))


def _factor_per_index(case: Case) -> list[Pattern]:
    best: list[Pattern] = []
    over, under = _in_units_of_noise(case)
    for axis, size in enumerate(case.shape):
        if size == 1 or case.right.dim() == 1 or case.given.is_complex():
            continue
        factors = _factors_along(over, under, axis)
        view = [size if dim == axis else 1 for dim in range(case.right.dim())]
        others = [dim for dim in range(case.right.dim()) if dim != axis]
        touched = case.wrong.any(dim=others)
        used = factors[touched]
        if float(used.abs().max()) <= case.own_unit or bool(((used + 1).abs() < 1e-3).all()):  # noqa: PLR2004
            continue  # zeros and signs are other kinds
        turns = _turns(factors)
        count = 0 if turns else int(touched.sum())
        factors = torch.tensor(turns, dtype=factors.dtype).repeat(size)[:size] if turns else factors
        scaled = factors.view(view) * case.right
        slack = max(1.0, float(used.abs().median()))
        weight = weigh_fit(
            case, scaled, parameters=count, counted=count, slack=slack, extent=Extent.WRONG
        )
        if weight is None:
            continue
        low, high = float(used.min()), float(used.max())
        if count == size and f"{low:.4g}" == f"{high:.4g}":
            continue  # one factor for all
        where = axis_number(case.context, axis)
        each = f"at each index of dimension {where}: {low:.4g} to {high:.4g}"
        text = f"scaled by a different factor {each}"
        if turns:
            sentence = ", ".join(f"{turn:g}" for turn in turns)
            text = f"multiplied by {sentence} in turn along dimension {where}"
        text = _name_vector(case, factors) or text
        figures = {"axis": float(axis), "least": low, "most": high}
        pattern = weight.pattern(PatternKind.AXIS_SCALE, text, figures, trust=0.95)
        best = max(best, [pattern], key=lambda ranked: ranked[0].confidence if ranked else 0.0)
    return best


# So many factors may take turns along an axis, as where a stride is wrong.
_MOST_TURNS = 4


def _turns(factors: Tensor) -> list[float]:
    """Short factors that take turns along an axis; empty if they do not."""
    short = [float(f"{number:.2g}") + 0.0 for number in factors.tolist()]
    if not torch.allclose(factors, torch.tensor(short, dtype=factors.dtype), atol=1e-3):
        return []
    for period in range(2, min(_MOST_TURNS, len(short) // 2) + 1):
        turns = short[:period]
        if all(number == turns[position % period] for position, number in enumerate(short)):
            return turns
    return []


def _in_units_of_noise(case: Case) -> tuple[Tensor, Tensor]:
    """The right values and the candidate where it is wrong; 0 elsewhere."""
    if case.given.is_complex():
        return case.right, case.given
    weight = torch.where(case.wrong & case.both_finite, 1 / case.unit, 0.0)
    return (case.right * weight).nan_to_num(0.0), (case.given * weight).nan_to_num(0.0)


def _factors_along(over: Tensor, under: Tensor, axis: int) -> Tensor:
    """One factor per index of an axis, from its wrong elements; 1 where none is wrong."""
    others = [dim for dim in range(over.dim()) if dim != axis]
    below = over.square().sum(dim=others)
    return torch.where(below > 0, (over * under).sum(dim=others) / below, 1.0)


def _name_vector(case: Case, factors: Tensor) -> str:
    """Name the factors if they are a known vector: a weight applied twice or not at all."""
    named = {f"input {i}": tensor for i, tensor in enumerate(case.context.inputs)}
    for name, tensor in {**named, **case.context.named}.items():
        vector = widen(tensor).flatten()
        if vector.numel() != factors.numel() or not bool((vector != 0).all()):
            continue
        for other, text in ((vector, "applied once too often"), (1 / vector, "missing")):
            apart = float((factors / other - 1).abs().max())
            if apart < 0.02:  # noqa: PLR2004
                return f"the factor {name} is {text}"
    return ""


# --- Known tensors that are missing or added too often --------------------------------------------

# A tensor that resembles the right values to this share is really a scale.
_ALIKE = 0.25


def propose_addends(case: Case) -> list[Pattern]:
    """`residual` and `axis offset`: the error is a multiple of a known tensor."""
    patterns = []
    for name, tensor, kind in _broadcast_known(case):
        times, error = robust_proportion(case, tensor, case.error)
        if not math.isfinite(times) or abs(times) <= 2 * _STANDARD_ERRORS * error:
            continue
        text = _describe_times(case, name, times, error)
        weight = weigh(
            case,
            case.right + times * tensor,
            parameters=0.0 if text else 1.0,
            slack=max(1.0, abs(times)),
            cost=3.0 if text else 0.0,
        )
        moved = case.right + times * tensor
        if weight is None or _is_like(case, tensor) or not holds_in_block(case, moved):
            continue
        sentence = text or f"{times:.4g} times {name} is added to the right value"
        figures: dict[str, float | str] = {"times": times, "standard error": error, "tensor": name}
        patterns.append(weight.pattern(kind, sentence, figures, trust=1.0 if text else 0.9))
    return sorted(patterns, key=lambda pattern: -pattern.confidence)[:2]


def _broadcast_known(case: Case) -> Iterator[tuple[str, Tensor, PatternKind]]:
    """The known tensors, broadcast in every way in which they may have been added."""
    named = dict(case.context.named)
    named |= {f"input {position}": tensor for position, tensor in enumerate(case.context.inputs)}
    for name, tensor in named.items():
        if tensor.dtype == torch.bool or not tensor.numel() or not bool((tensor != 0).any()):
            continue
        value = tensor.detach().cpu()
        value = value.to(torch.complex128 if case.given.is_complex() else torch.float64)
        for shape in _broadcast_shapes(case.shape, tuple(value.shape)):
            kind = PatternKind.AXIS_OFFSET
            if value.numel() == case.right.numel():
                kind = PatternKind.RESIDUAL
            elif value.numel() == 1:
                kind = PatternKind.OFFSET
            yield name, value.reshape(shape).expand(case.shape), kind


def _broadcast_shapes(target: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes in which a tensor can be broadcast; a vector also along each axis of its size."""
    shapes = []
    padded = (1,) * (len(target) - len(shape)) + shape
    if len(padded) == len(target) and all(
        extent in {1, target_size} for extent, target_size in zip(padded, target, strict=True)
    ):
        shapes.append(padded)
    if len(shape) == 1:
        for axis, size in enumerate(target):
            view = tuple(size if dim == axis else 1 for dim in range(len(target)))
            if size == shape[0] and view not in shapes:
                shapes.append(view)
    return shapes


def _is_like(case: Case, tensor: Tensor) -> bool:
    finite = torch.isfinite(tensor) & torch.isfinite(case.right)
    factor, _ = proportion(case, tensor, case.right, finite)
    if not math.isfinite(factor):
        return True
    squared_residual = (case.right - factor * tensor)[finite].abs().square().sum()
    return float(squared_residual) <= _ALIKE**2 * float(case.right[finite].abs().square().sum())


def _describe_times(case: Case, name: str, times: float, error: float) -> str:
    """What a person says of so many times too much of it; nothing if the number has no meaning."""
    mesh = case.context.world.values()
    meanings = [
        (-1.0, f"{name} is missing"),
        (1.0, f"{name} is added once too often"),
        (-2.0, f"{name} is subtracted instead of added"),
        (2.0, f"{name} is added instead of subtracted, or twice too often"),
    ]
    for size in dict.fromkeys([math.prod(mesh), *mesh]):
        if size > 1:
            meanings += [
                (size - 1.0, f"{name} is added {size} times: once per rank"),
                (1 / size - 1.0, f"only 1 / {size} of {name} is added: divided by the world size"),
                (1 - 1.0 / size, f"all of {name} is added instead of 1 / {size} of it"),
            ]
    for value, text in meanings:
        tolerance = max(_STANDARD_ERRORS * error, 2 * case.own_unit * abs(value), 1e-9)
        if abs(times - value) <= min(tolerance, 0.05 * abs(value)):
            return text
    return ""


# --- Offsets: one number, or a vector along an axis -----------------------------------------------

_OFFSET_STANDARD_ERRORS = 8.0


def propose_offsets(case: Case) -> list[Pattern]:
    """Known tensors first, then one number, then an unknown vector."""
    if case.is_boolean or not case.is_beyond_noise:
        return []
    addends = propose_addends(case)
    number = _one_number(case) or _number_away_from_zero(case)
    return addends + (number or ([] if addends else _offsets_along_axes(case)))


def _number_away_from_zero(case: Case) -> list[Pattern]:
    """A number with the sign of each element, as of a penalty on magnitudes."""
    if case.is_exact or case.right.is_complex() or not case.is_finite:
        return []
    # Of what is zero within the noise, the candidate shows the sign.
    signs = torch.where(case.right.abs() > 2 * case.unit, case.right, case.given).sign()
    if bool((signs[case.wrong] >= 0).all()) or bool((signs[case.wrong] <= 0).all()):
        return []
    size, error = robust_proportion(case, signs, case.error)
    if not math.isfinite(size) or abs(size) <= _OFFSET_STANDARD_ERRORS * error:
        return []
    slack = _noise_growth(case, size)
    weight = weigh_fit(case, case.right + size * signs, parameters=1.0, slack=slack)
    if weight is None:
        return []
    amount, word = _describe_amount(case, size, error), "larger" if size > 0 else "smaller"
    sentence = f"the magnitude of each element is {word} by {amount}"
    figures = {"offset": size, "standard error": error}
    return [weight.pattern(PatternKind.OFFSET, sentence, figures)]


def _one_number(case: Case) -> list[Pattern]:
    if bool(case.filled[case.wrong].all()):
        return []  # anything is nothing beside the number that a mask fills in
    ones = torch.ones_like(case.right)
    offset, error = robust_proportion(case, ones, case.error)
    if not math.isfinite(offset) or abs(offset) <= _OFFSET_STANDARD_ERRORS * error:
        return []
    weight = _weigh_offset(case, offset)
    if weight is None:
        return []
    if case.is_exact and not holds_in_block(case, case.right + round(offset)):
        return []  # whole numbers are one apart for many reasons
    if weight.whole:
        offset, error = refined_proportion(case, ones, case.error, offset)
    largest = float(case.given[torch.isfinite(case.given)].abs().max() / abs(offset))
    offset, weight = _shortest(case, offset, error, weight, _weigh_offset, largest)
    sentence = (
        f"{_describe_amount(case, offset, error)} is {'added' if offset > 0 else 'subtracted'}"
    )
    return [
        weight.pattern(PatternKind.OFFSET, sentence, {"offset": offset, "standard error": error})
    ]


def _weigh_offset(case: Case, offset: float) -> Weight | None:
    if case.is_exact:
        offset = round(offset)
    return weigh(case, case.right + offset, parameters=1.0, slack=_noise_growth(case, offset))


def _noise_growth(case: Case, offset: float) -> float:
    """The factor on the noise: sums with a large number are rounded at its size."""
    if case.is_exact:
        return 1.0
    usual = float(case.unit.median())
    return max(1.0, unit_roundoff(case.candidate.dtype) * abs(offset) / usual)


def _describe_amount(case: Case, offset: float, error: float) -> str:
    """The number, or its name."""
    for name, value in case.context.arguments.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and value:
            tolerance = min(max(4 * error, 1e-6 * abs(value)), 0.02 * abs(value))
            if abs(abs(offset) - abs(value)) <= tolerance:
                return f"the argument {name} ({value:g})"
    finite = case.right[torch.isfinite(case.right)]
    mean = float(finite.mean().real) if finite.is_complex() else float(finite.mean())
    spread = float(finite.std(correction=0)) if finite.numel() else 0.0
    if spread and mean and abs(abs(offset) - abs(mean)) <= min(4 * error, 0.02 * abs(mean)):
        return f"the tensor's mean ({mean:.4g})"
    return f"{abs(offset):.{_known_digits(offset, error)}g}"


def _offsets_along_axes(case: Case) -> list[Pattern]:
    dims = [dim for dim, size in enumerate(case.shape) if size > 1]
    if len(dims) < 2:  # noqa: PLR2004
        return []
    axis_sets: list[tuple[int, ...]] = [(dim,) for dim in dims]
    if len(dims) > 2:  # noqa: PLR2004
        axis_sets += [tuple(other for other in dims if other != dim) for dim in dims]
    mask = case.wrong & case.both_finite
    weight = torch.where(mask, case.unit**-2, 0.0)
    error = (weight * torch.where(mask, case.error, torch.zeros_like(case.error)), weight)
    patterns = [
        pattern for keep in axis_sets if (pattern := _axis_offset(case, keep, error)) is not None
    ]
    # Among those that explain as much, the one with the fewest numbers.
    return sorted(patterns, key=lambda pattern: -round(pattern.confidence, 2))[:1]


def _axis_offset(
    case: Case, keep: tuple[int, ...], weighted: tuple[Tensor, Tensor]
) -> Pattern | None:
    """Fit from the weighted errors and the weights."""
    dims = [dim for dim in range(case.right.dim()) if dim not in keep]
    above, below = (part.sum(dim=dims, keepdim=True) for part in weighted)
    vector = above / torch.where(below > 0, below, 1.0)
    touched = int((below > 0).sum())
    moved, slack = case.right + vector, _noise_growth(case, float(vector.abs().median()))
    weight = weigh_fit(
        case, moved, parameters=touched, counted=touched, slack=slack, extent=Extent.WRONG
    )
    if weight is None:
        return None
    axis_numbers = tuple(axis_number(case.context, dim) for dim in keep)
    name = f"dimension{'s' * (len(keep) > 1)} {_join_axes(axis_numbers)}"
    size = float(vector.abs().square().mean().sqrt())
    return weight.pattern(
        PatternKind.AXIS_OFFSET,
        f"off by a vector along {name}, like a bias that is missing or added twice",
        {"axis": _join_axes(keep), "rms": size},
        trust=0.95 if len(keep) == 1 else 0.9,
    )


def _join_axes(keep: tuple[int, ...]) -> str:
    return " and ".join(map(str, keep))
