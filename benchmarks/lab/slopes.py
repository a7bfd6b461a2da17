"""How something grows: the slope of a line through measurements on two logarithmic scales.

A slope of 1 is linear, 2 quadratic, 0 flat. Nothing is subtracted: a fixed cost makes a slope
smaller, so the sizes have to be large enough that it does not matter, and the range is told.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from benchmarks.lab.figures import Figure

if TYPE_CHECKING:
    from collections.abc import Mapping

LINEAR, FLAT = 1.1, 0.2


def slope(points: Mapping[int, float]) -> float:
    """Least squares of log(value) over log(size).

    Raises:
        ValueError: the sizes span less than 16 times, or a value is not positive.
    """
    if len(points) < 3 or max(points) < 16 * min(points):
        raise ValueError(f"sizes {sorted(points)}: three or more, over 16 times, are needed")
    if any(not value > 0 for value in points.values()):
        raise ValueError(f"values {list(points.values())}: a logarithm needs them to be positive")
    xs, ys = [math.log(size) for size in points], [math.log(value) for value in points.values()]
    x0, y0 = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((x - x0) * (y - y0) for x, y in zip(xs, ys, strict=True))
    return above / sum((x - x0) ** 2 for x in xs)


def growth(name: str, points: Mapping[int, float], unit: str, bar: float = LINEAR) -> Figure:
    """The slope as a figure; its note has both ends of the range."""
    low, high = min(points), max(points)
    note = f"{low:,} to {high:,}: {points[low]:.3g} to {points[high]:.3g} {unit}"
    return Figure(name, slope(points), "slope", bar, note=note)
