"""Discrete results and the numbers that decided them, so that their margins can be told."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from paritas._torch.operators import CARRIERS, CHOICES, COMPARISONS, ROUNDINGS

_DIM_POSITION = {"topk": 2, "kthvalue": 2}
_QUANTIZING = {"quantize_per_tensor", "quantize_per_channel"}


@dataclasses.dataclass(frozen=True)
class Decision:
    """One operator's discrete result.

    Attributes:
        kind: the operator's name.
        left: what was compared, chosen among or rounded.
        right: what it was compared with.
        dim: the dimension chosen along; None for all of them.
    """

    kind: str
    left: Tensor
    right: Any = None
    dim: int | None = None

    def margin(self, reference: Tensor, candidate: Tensor) -> Tensor | None:
        """What separates the reference's result from the candidate's, in units of the operands.

        None if nothing does: no rounding of the operands leads from the one to the other.
        """
        if self.kind in COMPARISONS:
            difference: Tensor = self.left - self.right
            return difference.expand(reference.shape)
        if self.kind in CHOICES:
            return self._score_gap(reference, candidate)
        return self._distance_to_the_edge(reference, candidate)

    def _score_gap(self, reference: Tensor, candidate: Tensor) -> Tensor | None:
        scores, dim = self.left, self.dim
        if dim is None:
            scores, dim = scores.reshape(-1), 0
        if bool(((candidate < 0) | (candidate >= scores.shape[dim])).any()):
            return None
        reduced = reference.dim() < scores.dim()
        ours, theirs = (i.unsqueeze(dim) if reduced else i for i in (reference, candidate))
        gap = scores.gather(dim, ours) - scores.gather(dim, theirs)
        return gap.squeeze(dim) if reduced else gap

    def _distance_to_the_edge(self, reference: Tensor, candidate: Tensor) -> Tensor | None:
        if self.left.shape != reference.shape:
            return None
        ours, theirs = reference.double(), candidate.double()
        if bool(((ours - theirs).abs() > 1).any()):
            return None
        lower, upper = torch.minimum(ours, theirs), torch.maximum(ours, theirs)
        if self.kind == "round":
            edge = (lower + upper) / 2
        elif self.kind == "ceil":
            edge = lower
        elif self.kind == "floor":
            edge = upper
        else:  # towards zero
            edge = torch.where(upper > 0, upper, lower)
        return self.left - edge


class Decisions:
    """The decisions of one run, by the memory their results lie in."""

    def __init__(self) -> None:
        """Start with none."""
        self._table: dict[int, Decision] = {}
        # Results of relu, and what it was given: where it gives 0, how far from 0 that was.
        self._clipped: dict[int, Tensor] = {}
        # The memory of a result must not be handed to another tensor while it stands for one.
        self._alive: list[Tensor] = []

    def behind(self, result: Tensor) -> Decision | None:
        """What decided a result, if it was one operator."""
        return self._table.get(result.untyped_storage().data_ptr())

    def note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Remember what one operator decided, or carried over from its argument."""
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor):
            return
        chosen = result
        decision: Decision | None = None
        if name == "relu" and isinstance(result, torch.Tensor):
            self._clipped[result.untyped_storage().data_ptr()] = first
            self._alive.append(result)
        elif name in COMPARISONS:
            with_zero = isinstance(args[1], int | float) and args[1] == 0
            clipped = self._clipped.get(first.untyped_storage().data_ptr()) if with_zero else None
            decision = Decision(name, first if clipped is None else clipped, args[1])
        elif name in ROUNDINGS:
            decision = Decision(name, first)
        elif name in _QUANTIZING:
            decision = Decision("round", _before_rounding(name, *args[:4]))
        elif name in CHOICES:
            position = _DIM_POSITION.get(name, 1)
            last = -1 if name in {"sort", "topk"} else None
            dim = args[position] if len(args) > position else kwargs.get("dim", last)
            if isinstance(dim, bool) or not isinstance(dim, int | None):
                return
            decision = Decision(name, first, dim=dim)
            chosen = result[1] if isinstance(result, list | tuple) else result
        elif name in CARRIERS:
            decision = self.behind(first)
            truncates = name == "_to_copy" and first.is_floating_point()
            if decision is None and truncates and not result.is_floating_point():
                decision = Decision("trunc", first)
        if decision is not None and isinstance(chosen, torch.Tensor):
            self._table[chosen.untyped_storage().data_ptr()] = decision
            self._alive.append(chosen)


def _before_rounding(name: str, value: Tensor, scale: Any, zero_point: Any, axis: Any) -> Tensor:
    """What quantising rounds to whole numbers."""
    if name == "quantize_per_channel":
        shape = [-1 if dim == axis else 1 for dim in range(value.dim())]
        scale, zero_point = scale.view(shape), zero_point.view(shape)
    codes: Tensor = value / scale + zero_point
    return codes
