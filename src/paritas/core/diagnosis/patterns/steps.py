"""What an operator gives with another argument, another operand or another result.

A mistake is a function of the operator and its arguments. Most mistakes are made of these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step

    Alter = Callable[[Tensor], Tensor]
    StepChange = Callable[[Step], Any]


def first_of(result: Any) -> Tensor:
    """The first of several results, or the only one."""
    first: Tensor = result if isinstance(result, torch.Tensor) else result[0]
    return first


def with_argument(name: str, value: Any) -> StepChange:
    """The change of one argument."""
    return lambda step: step.run(**{name: value})


def with_arguments(**arguments: Any) -> StepChange:
    """The change of several arguments."""
    return lambda step: step.run(**arguments)


def with_altered(name: str, alter: Callable[[Tensor], Any]) -> StepChange:
    """The change of one tensor."""
    return lambda step: step.run(**{name: alter(step.values[name])})


def with_factor(name: str, factor: float) -> StepChange:
    """One tensor times a number."""
    return with_altered(name, lambda value: value * factor)


def with_all_altered(names: Iterable[str], alter: Alter) -> StepChange:
    """The same change of several tensors."""
    return lambda step: step.run(**{name: alter(step.values[name]) for name in names})


def with_swapped(left: str, right: str) -> StepChange:
    """Two arguments in each other's places."""
    return lambda step: step.run(**{left: step.values[right], right: step.values[left]})


def with_order(name: str, axis: int, order: Tensor) -> StepChange:
    """One tensor with its slices along an axis in another order, or some of them only."""
    return with_altered(name, lambda value: take_slices(value, axis, order))


def with_result(alter: Alter) -> StepChange:
    """The change of the first result."""
    return lambda step: step.with_first(alter(first_of(step.run())))


def then(alter: Alter) -> StepChange:
    """The change of the only result."""
    return lambda step: alter(step.run())


def with_formula(formula: Callable[[Step], Tensor]) -> StepChange:
    """The first result by a formula."""
    return lambda step: step.with_first(formula(step))


def with_output(step: Step, output: int, value: Tensor) -> Any:
    """All results of the operator, with this value as one of them."""
    if output == 0:
        return step.with_first(value)
    results = list(step.run())
    results[output] = value
    return tuple(results)


def take_slices(value: Tensor, axis: int, order: Tensor) -> Tensor:
    """The slices of a tensor along an axis, in this order."""
    return value.index_select(axis, order.to(value.device))


def spread_slice(value: Tensor, axis: int, position: int) -> Tensor:
    """One slice of a tensor along an axis in the place of all."""
    return value.narrow(axis, position, 1).expand(value.shape)


def flat_padding(sizes: Iterable[int]) -> list[int]:
    """The padding on both sides of each axis as `pad` takes it: of the last axis first."""
    return [side for size in reversed(list(sizes)) for side in (size, size)]


def check_varied(value: Tensor) -> Tensor:
    """The tensor itself.

    Raises:
        ValueError: it has one value everywhere, which has many reasons.
    """
    if value.numel() > 1 and bool((value == value.flatten()[0]).all()):
        raise ValueError("one value everywhere has many reasons")
    return value
