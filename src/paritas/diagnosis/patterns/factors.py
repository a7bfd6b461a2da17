"""Numbers by which programs are wrong, and what they are called."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from paritas.diagnosis.patterns.weighing import own_unit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paritas.diagnosis.cases import Case

__all__ = ["Factor", "name_factor", "named_factors"]

_STANDARD_ERRORS = 4.0
# A name is given only if the estimate is at least so close to it...
_CLOSEST = 0.02
# ... and so much nearer to it than it is to no fault at all.
_APART = 0.25
_SIZES = 16


@dataclasses.dataclass(frozen=True)
class Factor:
    """A number with a meaning."""

    value: float
    name: str


def named_factors(case: Case) -> list[Factor]:
    """The factors that have a meaning here, the likeliest first; neither 0 nor 1 nor -1."""
    found: dict[float, Factor] = {}
    for factor in (*_of_ranks(case), *_of_arguments(case), *_plain(), *_of_sizes(case)):
        if factor.value not in {0.0, 1.0, -1.0}:
            found.setdefault(round(factor.value, 12), factor)
    return list(found.values())


def name_factor(case: Case, value: float, error: float) -> list[Factor]:
    """The names of an estimated factor, the likeliest first; empty if it is none of them.

    A constant that was kept in the candidate's own dtype is off by a rounding: that much is
    allowed beside the error of the estimate.
    """
    names = []
    for factor in named_factors(case):
        size = abs(factor.value)
        tolerance = max(_STANDARD_ERRORS * error, 2 * own_unit(case) * size, 1e-12 * size)
        tolerance = min(tolerance, _CLOSEST * size, _APART * abs(factor.value - 1))
        if abs(value - factor.value) <= tolerance:
            names.append(factor)
    return names


def _of_ranks(case: Case) -> Iterator[Factor]:
    world = case.context.world
    total = math.prod(world.values())
    whole = [("the world size", total)] if total > 1 else []
    axes = [(f"the size of the mesh axis {name}", size) for name, size in world.items()]
    for name, size in whole + (axes if len(axes) > 1 else []):
        if size > 1:
            yield Factor(float(size), f"{name}, {size}")
            yield Factor(1 / size, f"1 / {size}, one over {name}")
            yield Factor(float(size * size), f"{size}^2, {name} squared")
            yield Factor(1 / size**2, f"1 / {size}^2, one over {name} squared")


def _of_arguments(case: Case) -> Iterator[Factor]:
    for name, value in case.context.arguments.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        number = float(value)
        if not math.isfinite(number) or number == 0:
            continue
        if 0 < number < 1 and (name in {"p", "1"} or "drop" in name):
            yield Factor(1 / (1 - number), f"1 / (1 - {name}), one over the share that is kept")
            yield Factor(1 - number, f"1 - {name}, the share that is kept")
        if isinstance(value, float):
            yield Factor(number, f"the argument {name}")
            yield Factor(1 / number, f"one over the argument {name}")


def _plain() -> Iterator[Factor]:
    yield Factor(2.0, "twice")
    yield Factor(0.5, "one half")
    yield Factor(math.log(2), "ln 2")
    yield Factor(1 / math.log(2), "log2 e")
    yield Factor(math.sqrt(2), "sqrt(2)")
    yield Factor(math.sqrt(0.5), "1 / sqrt(2)")


def _of_sizes(case: Case) -> Iterator[Factor]:
    sizes = _sizes(case)
    for size, where in sizes.items():
        yield Factor(math.sqrt(size), f"sqrt({size}), of {where}")
        yield Factor(1 / math.sqrt(size), f"1 / sqrt({size}), of {where}")
    for size, where in sizes.items():
        yield Factor(float(size), f"{size}, {where}: a sum for a mean")
        yield Factor(1 / size, f"1 / {size}, of {where}: a mean for a sum")
    for size, where in sizes.items():
        yield Factor(size / (size - 1), f"n / (n - 1) for n = {size}, {where}")
        yield Factor((size - 1) / size, f"(n - 1) / n for n = {size}, {where}")


def _sizes(case: Case) -> dict[int, str]:
    """The lengths that occur, and where."""
    found: dict[int, str] = {}
    for dim in reversed(range(len(case.shape))):
        found.setdefault(case.shape[dim], f"the size of dimension {dim}")
    for position, tensor in enumerate(case.context.inputs):
        for dim in reversed(range(tensor.dim())):
            found.setdefault(tensor.shape[dim], f"the size of input {position}'s dimension {dim}")
    for name, value in case.context.arguments.items():
        if isinstance(value, int) and not isinstance(value, bool):
            found.setdefault(value, f"the argument {name}")
    found.setdefault(math.prod(case.shape), "the number of elements")
    return {size: where for size, where in list(found.items())[:_SIZES] if size > 1}
