"""Values between the operators of a call that are rounded to a narrower format."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.case import roundoff
from paritas.core.diagnosis.formats import FORMATS
from paritas.core.diagnosis.patterns.quantising import quantisations
from paritas.core.diagnosis.patterns.variations import Variation
from paritas.core.numerics.bits import dtype_name
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step
    from paritas.core.diagnosis.formats import NarrowFormat

# The fewest different values that are rounded: one constant may be another for any reason.
_FEWEST = 4


def _formats(step: Step) -> Iterator[NarrowFormat]:
    units = [
        roundoff(value)
        for value in step.values.values()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    ]
    yield from (form for form in FORMATS if units and all(form.unit > unit for unit in units))


def rounding_variations(step: Step) -> Iterator[Variation]:
    """The result of one of several operators in a narrower format."""
    for form in _formats(step):
        sentence = f"the result is rounded to {form.name}"
        yield Variation(PatternKind.PRECISION, sentence, partial(_round_to_format, form=form))


_PRODUCTS = frozenset({"linear", "addmm", "baddbmm", "convolution"})


def computed_variations(step: Step) -> Iterator[Variation]:
    """A product that is computed in a narrower format, before something else is done with it."""
    if step.name not in _PRODUCTS:
        return
    for dtype in (torch.bfloat16, torch.float16):
        sentence = f"computed in {dtype_name(dtype)}"
        yield Variation(PatternKind.PRECISION, sentence, partial(_compute_in_dtype, dtype=dtype))


def _compute_in_dtype(step: Step, dtype: torch.dtype) -> Any:
    result = step.run()
    narrow = {
        name: value.to(dtype)
        for name, value in step.values.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    return step.run(**narrow).to(result)


def _round_to_format(step: Step, form: NarrowFormat) -> Any:
    result = step.run()
    first = result if isinstance(result, torch.Tensor) else result[0]
    value = form.rounded(first)
    if len(first[value != first].unique()) < _FEWEST:
        raise ValueError("too few values are rounded")
    value = torch.where(value.abs() > form.largest, torch.copysign(value + torch.inf, value), value)
    return value if first is result else (value, *result[1:])


def saved_variations(step: Step) -> Iterator[Variation]:
    """A tensor that a backward kernel got from the forward pass, kept with fewer bits."""
    if "backward" not in step.name:
        return
    for name, value in step.values.items():
        is_saved = isinstance(value, torch.Tensor) and value.is_floating_point()
        if not is_saved or value.numel() < _FEWEST:
            continue
        for form in _formats(step):
            sentence = f"{name} is rounded to {form.name}"
            change = partial(_with_rounded, name=name, rounded=form.rounded)
            yield Variation(PatternKind.PRECISION, sentence, change)
        for words, rounded in quantisations([value]):
            change = partial(_with_rounded, name=name, rounded=rounded)
            yield Variation(PatternKind.PRECISION, f"{name} is rounded to {words}", change)


def _with_rounded(step: Step, name: str, rounded: Callable[[Tensor], Tensor]) -> Any:
    value = step.values[name]
    narrow = rounded(value)
    if len(value[narrow != value].unique()) < _FEWEST:
        raise ValueError("too few values are rounded")
    return step.run(**{name: narrow})


def reciprocal_variations(step: Step) -> Iterator[Variation]:
    """A division as a product with a reciprocal in a narrower format."""
    if step.name != "div" or step.values.get("rounding_mode") is not None:
        return
    for form in _formats(step):
        sentence = f"the reciprocal of other is rounded to {form.name}"
        yield Variation(PatternKind.PRECISION, sentence, partial(_by_reciprocal, form=form))


def _by_reciprocal(step: Step, form: NarrowFormat) -> Any:
    x, other = step.values["self"], step.values["other"]
    reciprocal = 1 / torch.as_tensor(other, dtype=x.dtype, device=x.device)
    narrow = form.rounded(reciprocal)
    if len(reciprocal[narrow != reciprocal].unique()) < _FEWEST:
        raise ValueError("too few values are rounded")
    return x * narrow
