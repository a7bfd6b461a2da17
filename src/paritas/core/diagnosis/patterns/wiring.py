"""The values of a formula in each other's places: a gradient for a saved value, an early end.

A kernel that is written out computes a handful of values from its operands. Any of them may be read
where another one belongs, or be returned before the formula has come to its end.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.calls import is_same_tensor
from paritas.core.diagnosis.patterns.steps import with_output
from paritas.core.diagnosis.patterns.variations import Variation
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step
    from paritas.core.diagnosis.patterns.formulas import Formula


@dataclasses.dataclass(frozen=True)
class _Wire:
    """One operand of one of the simple operators, and the value that it gets instead.

    Attributes:
        role: the simple operator.
        operand: the number of its argument.
        source: the role or the name of the value.
    """

    role: str
    operand: int
    source: str


class _Wiring:
    """Writes out a formula with one wire in another place, and notes all values."""

    def __init__(self, step: Step, wire: _Wire | None = None) -> None:
        self.values: dict[str, Tensor] = operands_of(step)
        self.arguments: dict[str, tuple[Any, ...]] = {}
        self.operators: dict[str, Any] = {}
        self.wire = wire

    def __call__(self, role: str, operator: Any, *args: Any, **kwargs: Any) -> Tensor:
        wire = self.wire
        if wire is not None and role == wire.role:
            other = self.values[wire.source].reshape(args[wire.operand].shape)
            args = (*args[: wire.operand], other, *args[wire.operand + 1 :])
        self.arguments[role], self.operators[role] = args, operator
        value: Tensor = operator(*args, **kwargs)
        self.values[role] = value
        return value


def operands_of(step: Step) -> dict[str, Tensor]:
    """The floating-point tensors among the arguments, by name."""
    return {
        name: value
        for name, value in step.values.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim()
    }


def wiring_variations(step: Step, formula: Formula) -> Iterator[Variation]:
    """The operator with one value of its formula in the place of another one."""
    record = _Wiring(step)
    result = formula.compute(step, record)
    last = record.arguments[list(record.arguments)[-1]]
    for source, value in record.values.items():
        if any(
            isinstance(tensor, torch.Tensor) and is_same_tensor(tensor, value) for tensor in last
        ):
            continue  # only the last operator is left out
        if value.numel() == result.numel() and not torch.equal(value.reshape(result.shape), result):
            sentence = f"{source} is the result: nothing else is done"
            change = partial(_end_at_source, formula=formula, source=source)
            yield Variation(PatternKind.MISSING_OPERAND, sentence, change)
    for wire in _wires(record.arguments, record.values):
        right = _called_argument(record.arguments[wire.role][wire.operand], record.values)
        sentence = f"{wire.role}: {wire.source} is used in the place of {right}"
        change = partial(_rewire_formula, formula=formula, wire=wire)
        yield Variation(PatternKind.MISSING_OPERAND, sentence, change)


def moving_variations(step: Step, formula: Formula) -> Iterator[Variation]:
    """The operator with a factor that is an operand applied behind a later value instead."""
    record = _Wiring(step)
    formula.compute(step, record)
    roles = list(record.arguments)
    for number, role in enumerate(roles):
        is_scaled = record.operators[role] in _SCALING
        factor = record.arguments[role][1] if is_scaled else None
        if not any(_is_view_of(factor, operand) for operand in operands_of(step).values()):
            continue
        for later in roles[number + 1 :]:
            sentence = f"{role}: it is only applied to {later}"
            change = partial(_move_operand, formula=formula, role=role, later=later)
            yield Variation(PatternKind.FACTOR, sentence, change)


_SCALING = (torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor)


def _is_view_of(value: Any, other: Tensor) -> bool:
    is_one = isinstance(value, torch.Tensor) and value.dim() > 0
    return is_one and value.data_ptr() == other.data_ptr() and value.numel() == other.numel()


class _Moving:
    def __init__(self, role: str, later: str) -> None:
        self._role, self._later = role, later
        self._apply: Callable[[Tensor], Tensor] | None = None

    def __call__(self, role: str, operator: Any, *args: Any, **kwargs: Any) -> Tensor:
        if role == self._role:
            self._apply = lambda value: operator(value, args[1], **kwargs)
            value: Tensor = args[0]
            return value
        value = operator(*args, **kwargs)
        if role == self._later and self._apply is not None:
            moved = self._apply(value)
            if moved.shape != value.shape:
                raise ValueError("the factor does not fit there")
            return moved
        return value


def _move_operand(step: Step, formula: Formula, role: str, later: str) -> Any:
    return formula.rewrite(step, _Moving(role, later))


def _wires(
    arguments: Mapping[str, tuple[Any, ...]], values: Mapping[str, Tensor]
) -> Iterator[_Wire]:
    roles = list(arguments)
    for number, (role, args) in enumerate(arguments.items()):
        for operand, value in enumerate(args):
            if not isinstance(value, torch.Tensor) or not value.dim():
                continue
            for source, other in values.items():
                is_later = source in roles and roles.index(source) >= number
                is_alike = not is_later and other.numel() == value.numel()
                if not is_alike or torch.equal(other.reshape(value.shape), value):
                    continue
                if not _is_operand_of(other, value, arguments, values):
                    yield _Wire(role, operand, source)


def _is_operand_of(
    other: Tensor,
    value: Tensor,
    arguments: Mapping[str, tuple[Any, ...]],
    values: Mapping[str, Tensor],
) -> bool:
    """Whether one operator makes a value of the other: if it is used once, it is left out, then."""
    maker = next((role for role in arguments if values[role] is value), None)
    uses = sum(argument is value for args in arguments.values() for argument in args)
    return (
        maker is not None and uses == 1 and any(argument is other for argument in arguments[maker])
    )


def _called_argument(value: Tensor, values: Mapping[str, Tensor]) -> str:
    names = (name for name, argument in values.items() if argument is value)
    return next(names, "the right value")


def _end_at_source(step: Step, formula: Formula, source: str) -> Any:
    record = _Wiring(step)
    result = formula.compute(step, record)
    return with_output(step, formula.output, record.values[source].reshape(result.shape))


def _rewire_formula(step: Step, formula: Formula, wire: _Wire) -> Any:
    return formula.rewrite(step, _Wiring(step, wire))
