"""Whether the gradients of the ranks make those of the whole, under random cotangents."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from paritas.partition.discovery.combines import agree, combined
from paritas.partition.discovery.cuts import argument

if TYPE_CHECKING:
    from paritas.partition.discovery.cuts import Cut, Tensors
    from paritas.partition.discovery.trials import Bench, Draw
    from paritas.partition.recipes import Combine, Place

__all__ = ["Gradients"]

SEED = 1
# A gradient that is nothing but rounding is compared with what rounding comes to there.
ROUNDING = 1e-13


class Gradients:
    """The gradients of an operator on draws of its arguments."""

    def __init__(self, bench: Bench, without: Collection[Place]) -> None:
        self._bench = bench
        self._without = frozenset(without)
        self._generator = torch.Generator().manual_seed(SEED)
        self._cotangents: dict[int, list[torch.Tensor]] = {}
        self._truths: dict[int, Tensors | None] = {}

    def agree(self, cut: Cut, ways: list[Combine], draw: Draw, ranks: int) -> bool | None:
        """Whether they agree with the whole's; None if the operator has no gradient."""
        truth = self._truth(draw)
        if truth is None:
            return None
        leaves = _leaves(draw, truth)
        try:
            with torch.enable_grad():
                results = self._combined({**draw.tensors, **leaves}, cut, ways, ranks)
                found = self._differentiate(results, leaves, draw)
        except Exception:  # noqa: BLE001  (a backward that fails on a part does not agree)
            return False
        if found is None:
            return False
        return all(agree(found[place], truth[place], _rounding(draw, place)) for place in truth)

    def _combined(
        self, tensors: Tensors, cut: Cut, ways: list[Combine], ranks: int
    ) -> list[torch.Tensor]:
        outcomes = [self._bench.run_rank(tensors, cut, rank, ranks) for rank in range(ranks)]
        parts = zip(*(outcome.tensors for outcome in outcomes), strict=True)
        pairs = zip(ways, parts, strict=True)
        return [combined(way, list(part)) for way, part in pairs if _has_gradient(part[0])]

    def _truth(self, draw: Draw) -> Tensors | None:
        """The whole's gradients."""
        if id(draw) not in self._truths:
            floating = [place for place, one in draw.tensors.items() if _has_gradient(one)]
            asked = [place for place in floating if argument(place) not in self._without]
            truth = self._whole(draw, asked)
            if truth is None:  # one that takes no gradient, such as a running mean, refuses all
                asked = [place for place in asked if self._whole(draw, [place])]
                truth = self._whole(draw, asked)
            self._truths[id(draw)] = truth
        return self._truths[id(draw)]

    def _whole(self, draw: Draw, asked: list[Place]) -> Tensors | None:
        leaves = _leaves(draw, asked)
        if not leaves:
            return None
        try:
            with torch.enable_grad():
                given = {**draw.tensors, **leaves}
                outcome = self._bench.run_whole(given)
                results = [result for result in outcome.tensors if _has_gradient(result)]
                return self._differentiate(results, leaves, draw)
        except Exception:  # noqa: BLE001  (an operator without a gradient: there is none to compare)
            return None

    def _differentiate(
        self, results: list[torch.Tensor], leaves: Tensors, draw: Draw
    ) -> Tensors | None:
        """Gradients under the draw's cotangents; None if nothing can be differentiated."""
        if id(draw) not in self._cotangents:
            self._cotangents[id(draw)] = [
                torch.randn(result.shape, generator=self._generator, dtype=torch.float64).to(result)
                for result in results
            ]
        cotangents = self._cotangents[id(draw)]
        pairs = [
            (result, cotangent)
            for result, cotangent in zip(results, cotangents, strict=True)
            if result.requires_grad
        ]
        if not pairs:
            return None
        found = torch.autograd.grad(
            [result for result, _ in pairs],
            list(leaves.values()),
            [cotangent for _, cotangent in pairs],
            allow_unused=True,
        )
        return {
            place: torch.zeros_like(leaf) if gradient is None else gradient
            for (place, leaf), gradient in zip(leaves.items(), found, strict=True)
        }


def _has_gradient(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _leaves(draw: Draw, asked: Collection[Place]) -> Tensors:
    return {place: draw.tensors[place].detach().requires_grad_() for place in asked}


def _rounding(draw: Draw, place: Place) -> float:
    """What a gradient that is zero but for rounding may be: results over arguments."""
    size = max(map(_size, draw.whole.tensors))
    own = _size(draw.tensors[place])
    return ROUNDING * size / own if own else 0.0


def _size(tensor: torch.Tensor) -> float:
    if tensor.numel() == 0 or not _has_gradient(tensor):
        return 0.0
    size: float = tensor.detach().abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    return size
