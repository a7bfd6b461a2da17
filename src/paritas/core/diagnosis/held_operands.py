"""Operands that must not be varied, because the candidate does not read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paritas.core.diagnosis.calls import is_same_tensor
from paritas.core.diagnosis.case import same
from paritas.core.diagnosis.dependence import is_of_slices
from paritas.core.numerics.random_tensors import FEW_VALUES

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.core.diagnosis.calls import LiveCall
    from paritas.core.diagnosis.place_runs import PlaceRuns

_SEEDS_OF_LARGE, _LARGE = (3, 4), 64.0


def held_operands(runs: PlaceRuns, call: LiveCall) -> list[int]:
    """The places of the operands that stay as they are when both programs are asked again.

    They are those that the reference's call does not show, and those that the candidate may hold
    itself: a module that replaces another one has copies of its parameters.
    """
    return [
        number
        for number, operand in enumerate(runs.operands)
        if not _is_shown(runs, call, operand) or _is_held(runs, number)
    ]


def _is_shown(runs: PlaceRuns, call: LiveCall, operand: Tensor) -> bool:
    return runs.recall is not None or any(
        is_same_tensor(operand, tensor) for tensor in call.floating
    )


def _is_held(runs: PlaceRuns, number: int) -> bool:
    """Whether whole slices of the candidate do not follow an operand that the reference follows.

    A small one may be rounded to nothing, and each of several large ones only by chance. A choice,
    such as a sign, is not held in a part: what does not follow it there may not read it.
    """
    unmoved = torch.ones((), dtype=torch.bool)
    for seed in _SEEDS_OF_LARGE:
        others = [position for position in range(len(runs.operands)) if position != number]
        varied = runs.vary(seed, growth=_LARGE, held=others)
        pair = runs.both(varied)
        if pair is None:
            return False
        moves, follows = (
            ~same(after, before).cpu()
            for after, before in zip(pair, (runs.expected, runs.given), strict=True)
        )
        unmoved = unmoved & moves & ~follows
    may_be_copied = len(runs.operands[number].unique()) > FEW_VALUES
    is_of_part = may_be_copied and is_of_slices(unmoved)
    return bool(unmoved.any()) and (is_of_part or bool((unmoved == moves).all()))
