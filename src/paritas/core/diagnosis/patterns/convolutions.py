"""Convolutions with a mistake in their kernel, their padding, their groups or their channels."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.patterns.steps import (
    flat_padding,
    with_altered,
    with_arguments,
    with_order,
)
from paritas.core.diagnosis.patterns.sums import left_out, words_of, zero_ends
from paritas.core.diagnosis.patterns.variations import Variation
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step


def convolution_variations(step: Step) -> Iterator[Variation]:
    """The mistakes that are known of convolutions, and of their gradients."""
    yield from _kernel_variations(step)
    if step.name == "convolution_backward":
        yield from _gradient_variations(step)
        return
    if step.values["transposed"]:
        yield from _cut_elsewhere(step)
    else:
        yield from _padding_variations(step)
        yield from _dilation_variations(step)
    yield from _channel_variations(step)
    yield from _missing_variations(step)


# --- The kernel -----------------------------------------------------------------------------------


def _kernel_variations(step: Step) -> Iterator[Variation]:
    weight = step.values["weight"]
    spatial = [axis for axis in range(2, weight.dim()) if weight.shape[axis] > 1]
    if spatial:
        sentence = "the kernel is flipped: a true convolution, not a correlation"
        change = with_altered("weight", partial(torch.flip, dims=spatial))
        yield Variation(PatternKind.PERMUTATION, sentence, change)
    for axis in spatial:
        for position in range(min(weight.shape[axis] - 1, 6)):
            order = torch.arange(weight.shape[axis])
            order[[position, position + 1]] = order[[position + 1, position]]
            sentence = f"{position} and {position + 1} of the kernel are swapped along axis {axis}"
            yield Variation(PatternKind.PERMUTATION, sentence, with_order("weight", axis, order))
    if weight.shape[0] == weight.shape[1]:
        sentence = "the kernel's input and output channels are swapped"
        change = with_altered("weight", partial(torch.transpose, dim0=0, dim1=1))
        yield Variation(PatternKind.SWAPPED_OPERANDS, sentence, change)


def _gradient_variations(step: Step) -> Iterator[Variation]:
    grad = step.values["grad_output"]
    for axis in range(2, grad.dim()):
        for first, last in left_out(grad.shape[axis]):
            some = f"{words_of(first, last)} of the {grad.shape[axis]} places along axis {axis}"
            change = with_altered("grad_output", zero_ends(axis, first, last))
            yield Variation(PatternKind.PARTIAL_SUM, f"{some} of the gradient are left out", change)


# --- Padding, stride, dilation --------------------------------------------------------------------


def _padding_variations(step: Step) -> Iterator[Variation]:
    padding, stride = list(step.values["padding"]), list(step.values["stride"])
    if any(padding):
        for mode in ("replicate", "reflect", "circular"):
            sentence = f"the padding is {mode!r}, not zeros"
            yield Variation(PatternKind.ARGUMENT, sentence, partial(_pad_input, mode=mode))
        sentence = "the padding is ones, not zeros"
        change = partial(_pad_input, mode="constant", value=1.0)
        yield Variation(PatternKind.ARGUMENT, sentence, change)
        sentence = "windows that reach into the padding are scaled by what they miss"
        yield Variation(PatternKind.FACTOR, sentence, _scaled_at_the_border)
    axes = range(len(padding))
    for by in dict.fromkeys((1, -1, max(padding), -max(padding), max(stride) - 1, 1 - max(stride))):
        for chosen in (*([axis] for axis in axes), list(axes)):
            if by and (len(chosen) == 1 or len(padding) > 1):
                where = f"axis {chosen[0] + 2}" if len(chosen) == 1 else "all axes"
                sentence = (
                    f"the windows along {where} begin {abs(by)} too {'early' if by > 0 else 'late'}"
                )
                change = partial(_padded_unevenly, axes=chosen, by=by)
                yield Variation(PatternKind.SHIFT, f"{sentence}: uneven padding", change)


def _pad_input(step: Step, mode: str, value: float | None = None) -> Any:
    sides = flat_padding(step.values["padding"])
    x = torch.nn.functional.pad(step.values["input"], sides, mode=mode, value=value)
    return step.run(input=x, padding=[0] * len(step.values["padding"]))


def _scaled_at_the_border(step: Step) -> Any:
    x, padding = step.values["input"], step.values["padding"]
    ones = torch.ones_like(step.values["weight"])
    counts = [
        step.run(input=torch.ones_like(value), weight=ones, bias=None, padding=sides)
        for value, sides in (
            (x, padding),
            (torch.nn.functional.pad(x, flat_padding(padding)), [0] * len(padding)),
        )
    ]
    result = step.run(bias=None) * (counts[1] / counts[0].clamp(min=1))
    bias = step.values["bias"]
    return result if bias is None else result + bias.view(-1, *[1] * (x.dim() - 2))


def _padded_unevenly(step: Step, axes: list[int], by: int) -> Any:
    sides = [[size, size] for size in step.values["padding"]]
    for axis in axes:
        sides[axis] = [sides[axis][0] + by, sides[axis][1] - by]
    flat = [side for pair in reversed(sides) for side in pair]
    x = torch.nn.functional.pad(step.values["input"], flat)
    return step.run(input=x, padding=[0] * len(sides))


def _dilation_variations(step: Step) -> Iterator[Variation]:
    """With as much padding as another dilation needs for a result of the same shape."""
    right, padding = list(step.values["dilation"]), list(step.values["padding"])
    sizes = step.values["weight"].shape[2:]
    for dilation in (1, 2, 3):
        other = [dilation] * len(right)
        wider = [
            (size - 1) * (dilation - right_dilation)
            for size, right_dilation in zip(sizes, right, strict=True)
        ]
        sides = [extent + more // 2 for extent, more in zip(padding, wider, strict=True)]
        if other != right and min(sides) >= 0 and not any(more % 2 for more in wider):
            sentence = f"dilation is {other} instead of {right}"
            change = with_arguments(dilation=other, padding=sides)
            yield Variation(PatternKind.ARGUMENT, sentence, change)


def _cut_elsewhere(step: Step) -> Iterator[Variation]:
    """A transposed convolution whose result is cut out of the whole at another place."""
    padding = list(step.values["padding"])
    for by in range(-max(padding), max(padding) + 1):
        if by:
            way = "early" if by < 0 else "late"
            sentence = f"the result is cut out of the whole {abs(by)} too {way}"
            yield Variation(PatternKind.SHIFT, sentence, partial(_cut_moved, by=by))


def _cut_moved(step: Step, by: int) -> Any:
    shape = step.run().shape
    result = step.run(padding=[0] * len(step.values["padding"]))
    for axis, size in enumerate(step.values["padding"], start=2):
        result = result.narrow(axis, size + by, shape[axis])
    return result


# --- Channels and groups --------------------------------------------------------------------------


def _channel_variations(step: Step) -> Iterator[Variation]:
    groups, channels = step.values["groups"], step.values["input"].shape[1]
    each = channels // groups
    index = torch.arange(channels)
    orders: dict[str, Tensor] = {}
    if groups > 1:
        orders |= {
            "of the next group": index.roll(-each),
            "of the group before": index.roll(each),
            "of the first group": index % each,
            "of all groups in turn": index.reshape(each, groups).T.flatten(),
            "of all groups, taken in turn the other way": index.reshape(groups, each).T.flatten(),
        }
    for position in range(min(channels - 1, 8)):
        order = index.clone()
        order[[position, position + 1]] = index[[position + 1, position]]
        orders[f"{position} and {position + 1} exchanged"] = order
    for words, order in orders.items():
        sentence = f"the input channels {words} are read"
        yield Variation(PatternKind.WRONG_INDEX, sentence, with_order("input", 1, order))


def _missing_variations(step: Step) -> Iterator[Variation]:
    weight = step.values["weight"]
    for first, last in left_out(weight.shape[1]):
        some = f"{words_of(first, last)} {'channel is' if first + last == 1 else 'channels are'}"
        sentence = f"{some} left out of each sum over the {weight.shape[1]} input channels"
        change = with_altered("weight", zero_ends(1, first, last))
        yield Variation(PatternKind.PARTIAL_SUM, sentence, change)
    for dim, end in itertools.product(sliding_axes(step), (False, True)):
        for count in range(1, min(weight.shape[dim], 3)):
            first, last = (0, count) if end else (count, 0)
            some = f"{words_of(first, last)} of the kernel's {weight.shape[dim]} along axis {dim}"
            change = with_altered("weight", zero_ends(dim, first, last))
            verb = "is" if count == 1 else "are"
            yield Variation(PatternKind.PARTIAL_SUM, f"{some} {verb} left out", change)


def sliding_axes(step: Step) -> list[int]:
    """The axes along which the kernel meets more than one part of the input.

    Along others, an element of the kernel and what it meets in the input cannot be told apart.
    """
    return [axis for axis, size in enumerate(step.run().shape) if axis > 1 and size > 1]
