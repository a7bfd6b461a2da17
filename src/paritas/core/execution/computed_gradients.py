"""The gradients of one backward pass: copies of them, or sketches that are made while it runs."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.execution.observation import is_sketched, keep_gradient, keep_leaf
from paritas.core.torch_private.watching import unseen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from paritas.core.execution.observation import RunConditions
    from paritas.core.results.items import Item


@dataclasses.dataclass
class ComputedGradients:
    """What a backward pass has computed.

    Attributes:
        values: item -> its gradient, or a stand-in if it was sketched.
        sketches: item -> the sketch of its gradient.
    """

    values: dict[Item, Tensor | None]
    sketches: Mapping[Item, Tensor] = dataclasses.field(default_factory=dict)

    def keep_all(self, conditions: RunConditions) -> dict[Item, Tensor | None]:
        """Copies or sketches of all of them; each gradient is released once it is copied."""
        keep = keep_gradient if conditions.sketches else keep_leaf
        kept_gradients: dict[Item, Tensor | None] = {}
        for item in list(self.values):
            gradient = self.values.pop(item)
            kept_gradients[item] = self.sketches[item] if item in self.sketches else keep(gradient)
        return kept_gradients


@contextlib.contextmanager
def sketching_gradients(targets: Mapping[Item, Any]) -> Iterator[dict[Item, Tensor]]:
    """Sketch the large gradients of leaves as soon as a backward pass inside has computed them.

    Each is then replaced by a stand-in, so that they are not all held until its end. Hooks of the
    leaves have run before.
    """
    sketches: dict[Item, Tensor] = {}
    items_by_leaf: dict[int, list[Item]] = {}
    handles = []
    for item, leaf in targets.items():
        if not is_sketched(leaf):
            continue
        items = items_by_leaf.setdefault(id(leaf), [])
        items.append(item)
        if len(items) == 1:
            handles.append(leaf.register_hook(_make_hook(items, sketches)))
    try:
        yield sketches
    finally:
        for handle in handles:
            handle.remove()


def _make_hook(
    items: list[Item], sketches: dict[Item, Tensor]
) -> Callable[[Tensor], Tensor | None]:
    def sketch_gradient(gradient: Tensor) -> Tensor | None:
        # A stand-in must have the layout of the gradient.
        if type(gradient) is not torch.Tensor or gradient.layout is not torch.strided:
            return None
        with unseen(), torch.no_grad():  # the modes of a run are about the program only
            sketches.update(dict.fromkeys(items, keep_gradient(gradient)))
            return stand_in_for(gradient)

    return sketch_gradient


def stand_in_for(gradient: Tensor) -> Tensor:
    """A tensor of the same shape, dtype and device, of one number in memory."""
    number = torch.zeros((), dtype=gradient.dtype, device=gradient.device)
    return number.expand(gradient.shape)
