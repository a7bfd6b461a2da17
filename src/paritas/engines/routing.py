"""Experts that the engine chose otherwise: single decisions of the routers are turned."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from paritas.engines.changes import Change, Runner
from paritas.relations.token_models import config_parts

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from paritas.engines.readout import Request

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_MOST_FLIPS = 6
_MOST_TRIED = 24
# A flip is kept if it leaves at most this share of what was unexplained.
_KEPT = 0.7


def number_of_experts(config: Any) -> int:
    """The number of experts of each layer; 0 for a dense model."""
    for part in config_parts(config):
        for name in _COUNTS:
            found = getattr(part, name, None)
            if isinstance(found, int) and found > 1:
                return found
    return 0


@dataclasses.dataclass(frozen=True)
class Flip:
    """A token's last chosen expert in one call of a router, replaced by the next best.

    Attributes:
        call: the number of the router's call.
        token: the token.
        margin: how far the two are apart, relative to the spread of all.
    """

    call: int
    token: int
    margin: float


class _Routers(torch.overrides.TorchFunctionMode):
    """Sees all choices among experts, and turns some of them."""

    def __init__(self, experts: int, flips: list[Flip]) -> None:
        super().__init__()
        self.experts, self.flips = experts, flips
        self.calls = 0
        self.seen: list[Flip] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return found
        scores = args[0]
        count = found[1].shape[-1]
        if scores.shape[-1] != self.experts or count >= self.experts:
            return found
        call, self.calls = self.calls, self.calls + 1
        more = torch.Tensor.topk(scores, count + 1, dim=-1)
        values, indices = (one.reshape(-1, count + 1) for one in more)
        gaps = (values[:, count - 1] - values[:, count]) / scores.double().std().clamp(min=1e-30)
        self.seen += [Flip(call, token, float(gap)) for token, gap in enumerate(gaps)]
        wanted = [flip.token for flip in self.flips if flip.call == call]
        if not wanted:
            return found
        chosen = [one.reshape(-1, count).clone() for one in found]
        for token in wanted:
            chosen[0][token, -1] = values[token, count]
            chosen[1][token, -1] = indices[token, count]
        shape = found[1].shape
        return type(found)([one.reshape(shape) for one in chosen])


def search_flips(
    runner: Runner,
    experts: int,
    request: Request,
    rest_of: Callable[[Callable[[Any, Request], Tensor]], float],
) -> Change | None:
    """Turn decisions of routers one by one, as long as they explain more of the record.

    `rest_of` runs the reference in this way, and returns how much of the record it leaves
    unexplained.
    """
    flips: list[Flip] = []
    seen: list[Flip] = []

    def way(turned: list[Flip]) -> Callable[[Any, Request], Tensor]:
        def logits(model: Any, own: Request) -> Tensor:
            routers = _Routers(experts, turned if own is request else [])
            with routers:
                found = runner.plain(model, own)
            seen[:] = routers.seen
            return found

        return logits

    left = rest_of(way([]))
    first_left = left
    while len(flips) < _MOST_FLIPS and left > 0:
        known = {(one.call, one.token) for one in flips}
        tried = sorted(seen, key=lambda one: one.margin)
        tried = [one for one in tried if (one.call, one.token) not in known][:_MOST_TRIED]
        results = [(rest_of(way([*flips, one])), one) for one in tried]
        best, flip = min(results, key=lambda pair: pair[0], default=(left, None))
        if flip is None or best > _KEPT * left:
            break
        left = best
        flips.append(flip)
        with contextlib.suppress(Exception):
            rest_of(way(flips))  # later choices are seen anew
    if not flips or left > _KEPT * first_left:
        return None
    places = ", ".join(f"token {one.token} in router {one.call}" for one in flips)
    widest = max(one.margin for one in flips)
    text = (
        f"{request.record.name}: other experts are chosen for {places}, where the next best is "
        f"behind by {widest:.2g} of the scores' spread"
    )

    def only_this(model: Any, own: Request) -> Tensor | None:
        return way(flips)(model, own) if own is request else None

    return Change("routing", text, only_this)
