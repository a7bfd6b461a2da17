"""Gradients of pools: another place of each window gets the gradient."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.patterns.variations import Variation
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step

    _Choose = Callable[[Tensor, Tensor, tuple[int, int]], tuple[Tensor, Tensor]]

_NAME = "max_pool2d_with_indices_backward"
# The row and the column in the window, by the right ones and the size of the window.
_CHOICES: dict[str, _Choose] = {
    "the first element of its window": lambda row, column, _: (0 * row, 0 * column),
    "the last element of its window": lambda row, column, size: (
        0 * row + size[0] - 1,
        0 * column + size[1] - 1,
    ),
    "the element in the middle of its window": lambda row, column, size: (
        0 * row + size[0] // 2,
        0 * column + size[1] // 2,
    ),
    "the element with row and column exchanged": lambda row, column, _: (column, row),
    "the first element of its row of the window": lambda row, column, _: (row, 0 * column),
    "the first element of its column of the window": lambda row, column, _: (0 * row, column),
    "the element on the opposite side of its window": lambda row, column, size: (
        size[0] - 1 - row,
        size[1] - 1 - column,
    ),
}


def window_variations(step: Step) -> Iterator[Variation]:
    """The gradient of the largest element of each window goes to another one."""
    if step.name != _NAME:
        return
    for words, choose in _CHOICES.items():
        change = partial(_elsewhere, choose=choose)
        yield Variation(PatternKind.WRONG_INDEX, f"the gradient goes to {words}", change)
    sentence = "the gradient goes to the smallest element of its window, not to the largest"
    yield Variation(PatternKind.WRONG_INDEX, sentence, _to_the_smallest)


def _elsewhere(step: Step, choose: _Choose) -> Any:
    size, stride, padding = (_pair(step, name) for name in ("kernel_size", "stride", "padding"))
    if _pair(step, "dilation") != (1, 1):
        raise ValueError("its windows have gaps")
    indices, (height, width) = step.values["indices"], step.values["self"].shape[-2:]
    rows, columns = (
        torch.arange(indices.shape[axis], device=indices.device) * stride[axis] - padding[axis]
        for axis in (-2, -1)
    )
    top, residual = rows[:, None], columns[None, :]
    row, column = choose(indices // width - top, indices % width - residual, size)
    row, column = (row + top).clamp(0, height - 1), (column + residual).clamp(0, width - 1)
    return step.run(indices=row * width + column)


def _to_the_smallest(step: Step) -> Any:
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    args = [step.values[name] for name in names]
    _, indices = torch.ops.aten.max_pool2d_with_indices(-step.values["self"], *args)
    return step.run(indices=indices)


def _pair(step: Step, name: str) -> tuple[int, int]:
    value = step.values[name] or step.values["kernel_size"]
    return value[0], value[-1]
