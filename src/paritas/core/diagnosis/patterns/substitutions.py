"""Another value in the place of the right one: an operand used twice, a limit exceeded."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.patterns.losses import loss_variations
from paritas.core.diagnosis.patterns.norms import cosine_variations
from paritas.core.diagnosis.patterns.variations import Variation, argument_variations
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.core.diagnosis.calls import FunctionStep, Step

# Of more operands, only these are tried in the place of each other.
_MOST_OPERANDS = 5


def _operands(step: Step) -> dict[str, Tensor]:
    operands_by_name = {
        name: value
        for name, value in step.values.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    return dict(itertools.islice(operands_by_name.items(), _MOST_OPERANDS))


# --- Operands -------------------------------------------------------------------------------------


def substitution_variations(step: Step) -> Iterator[Variation]:
    """One operand in the place of another as well, which is then used nowhere."""
    for used, lost in itertools.permutations(_operands(step), 2):
        sentence = f"{used} is used in the place of {lost}, too"
        change = partial(_with_substitute, kept=used, lost=lost)
        yield Variation(PatternKind.MISSING_OPERAND, sentence, change)


def _with_substitute(step: Step, kept: str, lost: str) -> Any:
    result = step.run(**{lost: step.values[kept]})
    if not isinstance(result, torch.Tensor):
        return result
    if result.numel() and bool((result == result.flatten()[0]).all()):
        raise ValueError("one value everywhere has many reasons")
    # The lost operand may be the one with the larger shape.
    return result.expand_as(step.run())


def function_call_variations(step: FunctionStep) -> Iterator[Variation]:
    """A function of several operators with other arguments, or with two of them exchanged."""
    for left, right in itertools.combinations(_operands(step), 2):
        sentence = f"{left} and {right} are swapped"
        change = partial(_exchange_operands, left=left, right=right)
        yield Variation(PatternKind.SWAPPED_OPERANDS, sentence, change)
    yield from substitution_variations(step)
    yield from loss_variations(step)
    yield from cosine_variations(step)
    yield from argument_variations(step, tensors=False)


def _exchange_operands(step: Step, left: str, right: str) -> Any:
    return step.run(**{left: step.values[right], right: step.values[left]})


# --- Limits ---------------------------------------------------------------------------------------

_LIMITING = frozenset({"clamp", "clamp_min", "hardtanh"})
# A least value that is not larger keeps a divisor from being 0.
_LARGEST_EPS = 0.1


def limit_variations(step: Step) -> Iterator[Variation]:
    """A limit that is added, or beyond which values wrap around."""
    if step.name not in _LIMITING:
        return
    least, most = (step.values.get(name, step.values.get(f"{name}_val")) for name in ("min", "max"))
    if not isinstance(least, int | float) or isinstance(most, torch.Tensor):
        return
    if most is None and 0 < least <= _LARGEST_EPS:
        sentence = f"{least:.7g} is added instead of being the least value"
        yield Variation(PatternKind.EPS, sentence, partial(_add_number, number=least))
    if most is None or most <= least:
        return
    sentence = f"values beyond {least:.7g} and {most:.7g} wrap around instead of being limited"
    widths = [(most - least, False)]
    if least == round(least) and most == round(most):  # a format has both limits
        widths += [(most - least + 1, is_cut) for is_cut in (False, True)]
    for width, is_cut in widths:
        change = partial(_wrap_into_range, least=least, width=width, is_cut=is_cut)
        yield Variation(PatternKind.WRAPPED, sentence, change)


def _add_number(step: Step, number: float) -> Any:
    return step.values["self"] + number


def _wrap_into_range(step: Step, least: float, width: float, *, is_cut: bool) -> Any:
    value = step.values["self"]
    value = value.trunc() if is_cut else value
    return (value - least) % width + least
