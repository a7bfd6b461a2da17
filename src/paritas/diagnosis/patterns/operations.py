"""An operator computed again in float64 by its plain formula, so that a variant of it can be.

Names only choose among the formulas here: nothing that a file says is run. A formula is believed
only if, unvaried, it gives the right values.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from paritas.diagnosis.patterns.hypotheses import stated
from paritas.numerics.criterion import MAX_Z

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paritas.diagnosis.cases import Case, Context
    from paritas.numerics.diagnoses import Pattern

__all__ = ["Operation", "attempted", "first_variant", "operation_of", "trusted"]

# Of the right values, as many have to come out of the plain formula.
_MOST_UNLIKE = 0.02
_OVERLOADED = ("aten", "prims")


@dataclasses.dataclass(frozen=True)
class Operation:
    """What made a tensor: its bare name, its inputs in float64, its other arguments."""

    name: str
    inputs: tuple[Tensor, ...]
    context: Context

    def argument(self, name: str, position: int, default: Any = None) -> Any:
        """An argument by its name, or by its position where only that is known."""
        arguments = self.context.arguments
        for key in (name, str(position)):
            if key in arguments:
                return arguments[key]
        return default

    @functools.cached_property
    def dims(self) -> tuple[int, ...]:
        """The dimensions that it reduces or works along; all of them where none is named."""
        rank = self.inputs[0].dim()
        given = self.argument("dim", 1, self.context.arguments.get("axis"))
        if isinstance(given, int) and not isinstance(given, bool):
            given = [given]
        if not isinstance(given, list | tuple) or not given:
            return tuple(range(rank))
        if not all(isinstance(one, int) and -rank <= one < rank for one in given):
            return ()
        return tuple(sorted(one % rank for one in given))

    def shaped(self, value: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        """A result in the shape that it has to have, whether dimensions were kept or not."""
        return value.reshape(shape) if value.numel() == math.prod(shape) else None


def operation_of(case: Case, inputs: int = 1) -> Operation | None:
    """The operator of a case, if it is known with at least so many inputs."""
    context = case.context
    if not context.operator or len(context.inputs) < inputs or case.given.is_complex():
        return None
    parts = context.operator.replace("::", ".").split(".")
    name = parts[1] if len(parts) > 1 and parts[0] in _OVERLOADED else parts[-1]
    wide = tuple(_wide(one) for one in context.inputs)
    if any(one.is_complex() for one in wide):
        return None
    return Operation(name.lower().strip("_"), wide, context)


def _wide(value: Tensor) -> Tensor:
    value = value.detach().cpu()
    if value.dtype == torch.bool or value.is_complex():
        return value
    return value.to(torch.float64)


def trusted(case: Case, compute: Callable[[], Tensor | None]) -> Tensor | None:
    """What a plain formula gives, if that is right: only then may a variant of it be tried."""
    value = attempted(compute)
    if value is None or tuple(value.shape) != case.shape:
        return None
    value = value.double()
    apart = (value - case.right).abs()
    same = (value == case.right) | (value.isnan() & case.right.isnan())
    near = same | (apart <= MAX_Z * case.allowed)
    return value if float((~near).double().mean()) <= _MOST_UNLIKE else None


def first_variant(
    case: Case,
    operation: Operation,
    kind: str,
    plain: Callable[[], Tensor] | None,
    variants: Sequence[tuple[str, Callable[[], Tensor]]],
) -> list[Pattern]:
    """The first of the variants of a formula that is what came out, with what to say of it."""
    if plain is None or trusted(case, plain) is None:
        return []
    for sentence, compute in variants:
        value = attempted(compute)
        if value is None or tuple(value.shape) != case.shape:
            continue
        pattern = stated(
            case,
            value.double(),
            kind,
            sentence,
            cost=math.log2(1 + len(variants)),
            evidence={"operator": operation.context.operator},
        )
        if pattern is not None:
            return [pattern]
    return []


def attempted(compute: Callable[[], Tensor | None]) -> Tensor | None:
    """A variant's value; None where inputs and arguments do not go together so."""
    try:
        return compute()
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
