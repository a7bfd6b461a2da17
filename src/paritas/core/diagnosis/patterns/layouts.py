"""Padding and resizing with a mistake that no argument can express."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.patterns.variations import Variation
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paritas.core.diagnosis.calls import Step

_MODES = {1: ("nearest", "linear"), 2: ("nearest", "bilinear", "bicubic", "area"), 3: ("nearest",)}


def layout_variations(step: Step) -> Iterator[Variation]:
    """The mistakes that are known of operators that pad or resize."""
    if step.name == "glu":
        size = step.values["self"].shape[step.values["dim"]]
        half = torch.arange(size) % (size // 2)
        for kind, sentence, order in (
            (
                PatternKind.SWAPPED_OPERANDS,
                "the halves are exchanged",
                torch.arange(size).roll(size // 2),
            ),
            (PatternKind.COPY, "the first half is used for both", half),
            (PatternKind.COPY, "the second half is used for both", half + size // 2),
        ):
            yield Variation(kind, sentence, partial(_with_order, order=order))
    elif step.name == "constant_pad_nd":
        for mode in ("reflect", "replicate", "circular"):
            sentence = f"the padding is {mode!r}, not a constant"
            yield Variation(PatternKind.ARGUMENT, sentence, partial(_pad_operand, mode=mode))
        sides = list(step.values["pad"])
        other = [side for at in range(0, len(sides), 2) for side in (sides[at + 1], sides[at])]
        if other != sides:
            sentence = "the padding is on the other side"
            yield Variation(PatternKind.SHIFT, sentence, partial(_padded_as, sides=other))
    elif not step.name.endswith("backward"):  # which is resized the other way round
        rank = next(iter(step.values.values())).dim() - 2
        for mode in _MODES.get(rank, ()):
            for corners in (False, True) if "linear" in mode or "cubic" in mode else (None,):
                sentence = f"it is resized by {mode!r}{' between corners' if corners else ''}"
                change = partial(_resize_operand, mode=mode, corners=corners)
                yield Variation(PatternKind.OTHER_FUNCTION, sentence, change)


def _with_order(step: Step, order: torch.Tensor) -> Any:
    x = step.values["self"]
    return step.run(self=x.index_select(step.values["dim"], order.to(x.device)))


def _pad_operand(step: Step, mode: str) -> Any:
    return torch.nn.functional.pad(step.values["self"], list(step.values["pad"]), mode=mode)


def _padded_as(step: Step, sides: list[int]) -> Any:
    return step.run(pad=sides)


def _resize_operand(step: Step, mode: str, corners: bool | None) -> Any:  # noqa: FBT001
    x = next(iter(step.values.values()))
    size = step.run().shape[2:]
    return torch.nn.functional.interpolate(x, size=size, mode=mode, align_corners=corners)
