"""One operator on one kind of input: what `verify` says about honest forms and degraded ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from benchmarks.inside.operators import DTYPES, OPERATORS, Fused, arguments
from benchmarks.inside.steps import Names, Rounded, exact
from torch import Tensor

import paritas

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RATIOS = (3, 5, 10, 30)
# Any rounding counts at least as one of the result.
ONE_ROUNDING = 0.29
# Coarser than this, an inner value has hardly any digits.
COARSEST, FINEST = 0.25, 2.0**-24
CONFIG = paritas.VerifyConfig(
    raise_on_mismatch=False, verify_second_call=False, verify_double_backward=False
)


class Case(msgspec.Struct, frozen=True):
    """An operator on inputs of one kind, in one dtype."""

    operator: str
    dtype: str
    regime: str

    def __str__(self) -> str:
        return f"{self.operator}, {self.dtype}, {self.regime}"

    @property
    def fused(self) -> Fused:
        """The operator itself."""
        return OPERATORS[self.operator]

    def inputs(self) -> list[Tensor]:
        """New ones, always the same."""
        return arguments(self.fused, DTYPES[self.dtype], self.regime)


class Outcome(msgspec.Struct, frozen=True):
    """What `verify` said about one candidate.

    Attributes:
        case: of which it is a candidate.
        form: the name of an honest form, or the inner value that was rounded.
        ratio: its error over that of honest ones; 0 for an honest one.
        status: the status of the verdict.
    """

    case: Case
    form: str
    ratio: float
    status: str

    @property
    def passed(self) -> bool:
        """Whether it counts as right."""
        return self.status in {"identical", "equivalent"}


def cases(
    operators: tuple[str, ...] = tuple(OPERATORS), dtypes: tuple[str, ...] = tuple(DTYPES)
) -> list[Case]:
    """All of them."""
    return [
        Case(name, dtype, regime)
        for dtype in dtypes
        for name in operators
        for regime in OPERATORS[name].regimes
    ]


def honest_outcomes(case: Case, further: dict[str, Callable[..., Any]]) -> Iterator[Outcome]:
    """The verdicts on all honest forms, and on further ones, which take the arguments alone."""
    for name, form in case.fused.forms.items():
        yield _judge(case, name, lambda *args, form=form: form(exact, *args))
    for name, candidate in further.items():
        yield _judge(case, name, candidate)


def degraded_outcomes(
    case: Case, ratios: tuple[int, ...] = RATIOS, only: tuple[str, ...] = ()
) -> Iterator[Outcome]:
    """The verdicts on forms whose error is so many times that of honest ones, site by site.

    Args:
        case: what is degraded.
        ratios: how many times.
        only: the names of the values that are rounded; all by default.
    """
    form = next(iter(case.fused.forms.values()))
    names = Names()
    form(names, *case.inputs())
    scale = Scale(case)
    for site in only or names.seen:
        for backward in (False, True):
            for ratio in ratios:
                unit = _unit_for(scale, form, site, ratio, backward=backward)
                if unit is None:
                    continue
                steps = Rounded(site, unit, backward)
                label = f"gradient of {site}" if backward else site
                found = _judge(case, label, lambda *args, steps=steps: form(steps, *args))
                yield msgspec.structs.replace(found, ratio=float(ratio))


def _judge(case: Case, name: str, candidate: Callable[..., Any]) -> Outcome:
    verdict = paritas.verify(case.inputs(), case.fused.reference, candidate, CONFIG)
    return Outcome(case, name, 0.0, str(verdict.status.value))


# --- Errors in multiples of honest ones -----------------------------------------------------------


class Scale:
    """The errors of honest forms, by which others are measured: of outputs and gradients."""

    def __init__(self, case: Case) -> None:
        self.case = case
        fused = case.fused
        inputs = [
            value.detach().double().requires_grad_() if value.is_floating_point() else value
            for value in case.inputs()
        ]
        self._truth = _values(fused.reference, inputs)
        unit = torch.finfo(DTYPES[case.dtype]).eps / 2
        self._usual = [ONE_ROUNDING * unit * _rms(value) for value in self._truth]
        form = next(iter(fused.forms.values()))
        for honest in (fused.reference, lambda *args: form(exact, *args)):
            errors = self._errors(honest)
            self._usual = list(map(max, zip(self._usual, errors, strict=True)))

    def ratio(self, candidate: Callable[..., Any]) -> float:
        """The largest error of an output or a gradient, over that of honest forms."""
        errors = zip(self._errors(candidate), self._usual, strict=True)
        return max(error / usual if usual else math.inf * error for error, usual in errors)

    def _errors(self, program: Callable[..., Any]) -> list[float]:
        values = _values(program, self.case.inputs())
        return [
            _rms(value.double() - true) for value, true in zip(values, self._truth, strict=True)
        ]


def _values(program: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    """The outputs and the gradients of all inputs, for cotangents that are the same each time."""
    result = program(*inputs)
    outputs = list(result) if isinstance(result, tuple) else [result]
    draws = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(out.shape, generator=draws).bfloat16().to(out) for out in outputs]
    wanted = [value for value in inputs if value.requires_grad]
    gradients = torch.autograd.grad(outputs, wanted, cotangents)
    return [value.detach() for value in (*outputs, *gradients)]


def _rms(value: Tensor) -> float:
    return float(value.double().square().mean().sqrt())


def _unit_for(
    scale: Scale, form: Callable[..., Any], site: str, ratio: float, *, backward: bool
) -> float | None:
    """How coarsely a value is rounded for errors that are so many times the honest ones."""

    def found(unit: float) -> float:
        steps = Rounded(site, unit, backward)
        ratio = scale.ratio(lambda *args: form(steps, *args))
        return ratio if math.isfinite(ratio) else math.inf

    low, high = math.log2(FINEST), math.log2(COARSEST)
    if found(2.0**high) < ratio:
        return None
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (low, middle) if found(2.0**middle) >= ratio else (middle, high)
    unit = 2.0**high
    # The error need not grow in small steps: a value that fits few digits is not rounded at all.
    return unit if found(unit) < _MOST_ABOVE * ratio else None


_MOST_ABOVE = 1.25
