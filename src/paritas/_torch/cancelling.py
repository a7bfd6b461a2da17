"""Sums of which so little is left that even float64 loses what else goes into them.

(a + b) + c may be exact as it stands where a + (b + c) is not: if a and b cancel, and c lies below
the last digit of b. A perturbed run rounds the sum that is made, so it sees nothing of this. Here
sums of sums are taken for one sum, which may be added up in any order.

Only what is far apart counts. Masks, counts and positions add up to nothing as well, and are exact
in every order: of terms that fit float32 and lie within some 2^29 of each other, float64 holds
every partial sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from paritas._torch.accumulation import Call

__all__ = ["Cancelled", "is_exact_in_any_order"]

_SUMS_OF_TWO = frozenset({"add", "sub", "rsub"})
# The digits of float64 beyond those of float32: 53 - 24.
_APART = 2.0**29


class Cancelled:
    """What was lost in the sums of one run, by the memory their results lie in."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._lost: dict[int, Tensor] = {}
        # The memory of a result must not be handed to another tensor while it stands for one.
        self._alive: list[Tensor] = []

    def amplitude(self, call: Call) -> Tensor | None:
        """The size of the terms that cancelled in an operand, where it is far above what is left.

        None where nothing of the kind happened: nearly always.
        """
        lost = self._before(call)
        if lost is None:
            return None
        size = torch.maximum(*(term.abs() for term in call.args[:2]))
        return torch.where(lost > _APART * size, lost, 0.0).expand(call.result.shape)

    def note(self, call: Call, result: Any) -> None:
        """Remember a sum of two of which nothing, or the last digits, are left."""
        if not _is_sum_of_two(call):
            return
        size = torch.maximum(*(term.abs() for term in call.args[:2]))
        before = self._before(call)
        if before is not None:
            size = torch.maximum(size, before)
        gone = (size > _APART * call.result.abs()) & torch.isfinite(size)
        if bool(gone.any()):
            self._lost[result.untyped_storage().data_ptr()] = torch.where(gone, size, 0.0)
            self._alive.append(result)

    def _before(self, call: Call) -> Tensor | None:
        """What was lost in the operands, if anything."""
        if not self._lost or not _is_sum_of_two(call):
            return None
        found: Tensor | None = None
        for term in call.args[:2]:
            lost = self._lost.get(term.untyped_storage().data_ptr())
            if lost is not None and lost.shape == term.shape:
                found = lost if found is None else torch.maximum(found, lost)
        return found


def is_exact_in_any_order(terms: Any, result: Tensor) -> bool:
    """Whether float64 holds every partial sum of such terms."""
    if not isinstance(terms, torch.Tensor) or terms.is_complex() or not terms.numel():
        return True
    sizes = terms.abs()
    some = sizes[sizes > 0]
    length = terms.numel() / max(1, result.numel())
    return not some.numel() or bool(some.max() * length <= _APART * some.min())


def _is_sum_of_two(call: Call) -> bool:
    return (
        call.name in _SUMS_OF_TWO
        and isinstance(call.result, torch.Tensor)
        and call.result.is_floating_point()
        and all(isinstance(term, torch.Tensor) for term in call.args[:2])
        and len(call.args) > 1
        and call.result.numel() > 0
    )
