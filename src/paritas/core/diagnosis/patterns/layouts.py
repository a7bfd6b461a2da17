"""Padding and resizing with a mistake that no argument can express."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.patterns.steps import with_argument, with_order
from paritas.core.diagnosis.patterns.variations import Variation
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step

    _Choose = Callable[[Tensor, Tensor, tuple[int, int]], tuple[Tensor, Tensor]]

_MODES = {1: ("nearest", "linear"), 2: ("nearest", "bilinear", "bicubic", "area"), 3: ("nearest",)}


def layout_variations(step: Step) -> Iterator[Variation]:
    """The mistakes that are known of operators that pad or resize."""
    if step.name == "glu":
        axis = step.values["dim"]
        size = step.values["self"].shape[axis]
        half = torch.arange(size) % (size // 2)
        exchanged = torch.arange(size).roll(size // 2)
        for kind, sentence, order in (
            (PatternKind.SWAPPED_OPERANDS, "the halves are exchanged", exchanged),
            (PatternKind.COPY, "the first half is used for both", half),
            (PatternKind.COPY, "the second half is used for both", half + size // 2),
        ):
            yield Variation(kind, sentence, with_order("self", axis, order))
    elif step.name == "constant_pad_nd":
        for mode in ("reflect", "replicate", "circular"):
            sentence = f"the padding is {mode!r}, not a constant"
            yield Variation(PatternKind.ARGUMENT, sentence, partial(_pad_operand, mode=mode))
        sides = list(step.values["pad"])
        other = [side for at in range(0, len(sides), 2) for side in (sides[at + 1], sides[at])]
        if other != sides:
            sentence = "the padding is on the other side"
            yield Variation(PatternKind.SHIFT, sentence, with_argument("pad", other))
    elif not step.name.endswith("backward"):  # which is resized the other way round
        rank = next(iter(step.values.values())).dim() - 2
        for mode in _MODES.get(rank, ()):
            for corners in (False, True) if "linear" in mode or "cubic" in mode else (None,):
                sentence = f"it is resized by {mode!r}{' between corners' if corners else ''}"
                change = partial(_resize_operand, mode=mode, corners=corners)
                yield Variation(PatternKind.OTHER_FUNCTION, sentence, change)


def _pad_operand(step: Step, mode: str) -> Any:
    return torch.nn.functional.pad(step.values["self"], list(step.values["pad"]), mode=mode)


def _resize_operand(step: Step, mode: str, corners: bool | None) -> Any:  # noqa: FBT001
    x = next(iter(step.values.values()))
    size = step.run().shape[2:]
    return torch.nn.functional.interpolate(x, size=size, mode=mode, align_corners=corners)


# --- Sums over letters, `einsum`, with other letters ----------------------------------------------


# So many other letters are tried for one operand.
_MOST_TRIED = 120


def letter_variations(step: Step) -> Iterator[Variation]:
    """One operand, or the result, with other letters for axes of the same sizes."""
    equation = str(step.values["equation"]).replace(" ", "")
    tensors: Sequence[Tensor] = step.values["tensors"]
    if "->" not in equation or "." in equation:
        return
    before, result = equation.split("->")
    terms = before.split(",")
    if any(len(term) != tensor.dim() for term, tensor in zip(terms, tensors, strict=True)):
        return
    sizes = {
        letter: size
        for term, tensor in zip(terms, tensors, strict=True)
        for letter, size in zip(term, tensor.shape, strict=True)
    }
    for position, term in enumerate([*terms, result]):
        others = _other_letters(term, sizes, is_result=position == len(terms))
        for other in itertools.islice(others, _MOST_TRIED):
            changed = [*terms, result]
            changed[position] = other
            if not set(changed[-1]) <= set("".join(changed[:-1])):
                continue
            sentence = f"{term} is read as {other} in {equation}"
            is_turned = sorted(other) == sorted(term)
            kind = PatternKind.TRANSPOSE if is_turned else PatternKind.WRONG_INDEX
            other_equation = f"{','.join(changed[:-1])}->{changed[-1]}"
            yield Variation(kind, sentence, with_argument("equation", other_equation))


def _other_letters(term: str, sizes: dict[str, int], *, is_result: bool) -> Iterator[str]:
    """Orders of the same letters first, then other letters."""
    choices = [[size for size in sizes if sizes[size] == sizes[letter]] for letter in term]
    others = ["".join(letters) for letters in itertools.islice(itertools.product(*choices), 4096)]
    for is_turned in (True,) if is_result else (True, False):
        for other in others:
            is_order = sorted(other) == sorted(term)
            is_clear = len(set(other)) == len(other)
            if other != term and is_clear and is_order == is_turned:
                yield other


# --- Gradients of pools: another place of each window gets the gradient ---------------------------


_POOL_GRADIENT = "max_pool2d_with_indices_backward"
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
    if step.name != _POOL_GRADIENT:
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
