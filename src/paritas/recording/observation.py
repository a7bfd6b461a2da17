"""Did looking at a program change what it computes? It is run both ways once, to know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paritas.dumps.records import Observed
from paritas.numerics.metrics import bitwise_equal
from paritas.recording.isolation import Copier, RandomState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["compare_results", "observe_once"]


def observe_once(
    label: str,
    plain: Callable[..., Sequence[Any]],
    watched: Callable[[list[Any]], Sequence[Any]],
    args: list[Any],
    changes: Iterable[int],
) -> tuple[Sequence[Any], Observed]:
    """Run a graph with and without recording on equal arguments, and compare bit for bit.

    The results, the written arguments and the random state handed on are those of the plain run.

    Args:
        label: what the graph is called.
        plain: the graph as it runs without recording; takes the arguments one by one.
        watched: the same with recording; takes them in a list.
        args: the arguments; those of the plain run are written to as it does.
        changes: positions of the arguments that may be written to.
    """
    copier = Copier()
    copies = [copier.copy_tensor(v) if isinstance(v, torch.Tensor) else v for v in args]
    before = RandomState.of_torch()
    seen = watched(list(copies))
    after_watched = RandomState.of_torch()
    before.restore()
    results = plain(*args)
    pairs = [(f"output {i}", a, b) for i, (a, b) in enumerate(zip(results, seen, strict=True))]
    pairs += [(f"input {i} after it", args[i], copies[i]) for i in changes]
    observed = compare_results(label, pairs)
    if observed.status == "unchanged" and not after_watched.same_torch(RandomState.of_torch()):
        observed = Observed(
            graph=label, status="changed", detail="the random state after it differs"
        )
    return results, observed


def compare_results(label: str, pairs: list[tuple[str, Any, Any]]) -> Observed:
    """What (name, plain value, watched value) triples say about the watching."""
    worst, changed = 0.0, []
    for name, plain, watched in pairs:
        if not isinstance(plain, torch.Tensor):
            if plain != watched:
                changed.append(name)
            continue
        mine, theirs = plain.detach(), watched.detach()
        same_shape = mine.shape == theirs.shape
        if same_shape and mine.dtype == theirs.dtype and bitwise_equal(mine, theirs):
            continue
        changed.append(name)
        if same_shape and mine.numel() and mine.is_floating_point():
            worst = max(worst, float((mine.double() - theirs.double()).abs().max()))
    if not changed:
        return Observed(
            graph=label, status="unchanged", detail=f"{len(pairs)} values equal bit for bit"
        )
    names = ", ".join(changed[:3]) + (", ..." if len(changed) > 3 else "")  # noqa: PLR2004
    detail = f"{len(changed)} of {len(pairs)} values differ ({names}), by {worst:.3g} at most"
    return Observed(graph=label, status="changed", detail=detail)
