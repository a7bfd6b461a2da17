"""Random numbers that correspond: a rank draws its part of what the whole drew.

Ranks of their own draw from streams of their own, which says nothing about the rule. Here the draws
of the whole are kept, and a rank's draw is the slice of them that its part of the arguments is.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.lifting import LiftMode
from paritas.errors import UsageError
from paritas.partition.recipes import Split
from paritas.partition.running.placing import bounds, device_of, name_of

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.partition.recipes import OperatorCall, Recipe
    from paritas.partition.running.placing import Values

__all__ = ["Draws", "PinnedDraws", "Reach", "Streams", "reaches"]

# A size, and the part of it that a rank has.
Reach = tuple[int, int, int]
# What these give is drawn and nothing else: no argument's value is in it but a probability.
_PURE = frozenset(
    {
        "bernoulli",
        "cauchy",
        "exponential",
        "geometric",
        "log_normal",
        "normal",
        "normal_functional",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "random",
        "uniform",
    }
)


@dataclasses.dataclass(frozen=True)
class Streams:
    """Where the generators stand that a call may draw from: the host's, and its device's."""

    host: Tensor
    device: torch.device
    own: Tensor | None

    @classmethod
    def of(cls, call: OperatorCall) -> Streams:
        """As they stand now."""
        device = device_of(call)
        own = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), device, own)

    def restore(self) -> None:
        """Make them stand there again."""
        torch.set_rng_state(self.host)
        if self.own is not None:
            torch.cuda.set_rng_state(self.own, self.device)

    def moved_by(self, call: OperatorCall) -> bool:
        """Whether they stand elsewhere now."""
        now = Streams.of(call)
        if not torch.equal(self.host, now.host):
            return True
        return self.own is not None and now.own is not None and not torch.equal(self.own, now.own)


class Draws:
    """What the whole drew, draw by draw; None before it has run."""

    def __init__(self) -> None:
        """Nothing is drawn yet."""
        self.kept: list[Tensor] | None = None

    def keep(self) -> PinnedDraws:
        """A mode under which the whole's draws are kept."""
        self.kept = []
        return PinnedDraws(self.kept, reach=None)

    def pinned(self, reach: list[Reach]) -> PinnedDraws:
        """A mode under which a rank draws its part of them."""
        return PinnedDraws(self.kept or [], reach=reach)


class PinnedDraws(LiftMode):
    """Keeps what is drawn, or gives what was kept."""

    def __init__(self, kept: list[Tensor], reach: list[Reach] | None) -> None:
        """Without a reach the draws are added to `kept`."""
        super().__init__(torch.get_default_dtype(), torch.get_default_dtype(), widen=False)
        self.kept = kept
        self.reach = reach
        self._next = 0

    def compute(self, func: Any, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator; one that draws gives what was drawn for the whole."""
        result = func(*args, **kwargs)
        if not kind.random:
            return result
        if kind.name == "native_dropout":  # what dropout is on a GPU
            return self._dropped(result, *args, **kwargs)
        if not isinstance(result, torch.Tensor) or kind.name not in _PURE:
            message = f"it draws random numbers inside {kind.name}"
            raise UsageError(f"{message}, where they cannot be matched; check it without them")
        if self.reach is None:
            self.kept.append(result.detach().clone())
            return result
        kept = self._kept_for(result, kind.name)
        return result.copy_(kept) if kind.mutates else kept.to(result.device, result.dtype)

    def _dropped(
        self,
        drawn: tuple[Tensor, Tensor],
        tensor: Tensor,
        p: float,
        train: bool | None = True,  # noqa: FBT001, FBT002  (aten's own)
    ) -> tuple[Tensor, Tensor]:
        """Of such an operator the mask is what was drawn."""
        if train is False:
            return drawn
        if self.reach is None:
            self.kept.append(drawn[1].detach().clone())
            return drawn
        mask = self._kept_for(drawn[1], "native_dropout").to(tensor.device)
        return tensor * mask * (1 / (1 - p) if p < 1 else 0.0), mask

    def _kept_for(self, drawn: Tensor, name: str) -> Tensor:
        if self._next >= len(self.kept):
            raise UsageError(f"a rank draws more often than the whole (by {name})")
        whole = self.kept[self._next]
        self._next += 1
        ours, theirs = list(drawn.shape), list(whole.shape)
        for dim, size in enumerate(ours if len(ours) == len(theirs) else []):
            if size == theirs[dim]:
                continue
            for total, begin, end in self.reach or []:
                if total == theirs[dim] and end - begin == size:
                    whole = whole.narrow(dim, begin, size)
                    break
        if whole.shape != drawn.shape:
            message = f"a rank draws {ours} where the whole draws {theirs} (by {name})"
            raise UsageError(f"{message}, which is no part of it; check it without random numbers")
        return whole


def reaches(values: Values, recipe: Recipe, ranks: int) -> list[list[Reach]]:
    """For each rank the parts that it has of the arguments that are split."""
    each: list[list[Reach]] = [[] for _ in range(ranks)]
    for place, placement in recipe.inputs:
        value = values.get(place)
        if not isinstance(placement, Split) or not isinstance(value, torch.Tensor):
            continue
        size = value.shape[placement.dim]
        cuts = bounds(size, placement.unit, ranks, name_of(place))
        for mine, (begin, end) in zip(each, cuts, strict=True):
            mine.append((size, begin, end))
    return each
