"""Statistics and sketches of recorded values, each set of bytes looked at once."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from paritas.numerics.sketch import PendingSketch, begin_sketch
from paritas.numerics.statistics import Statistics, begin, summarize

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from paritas.dumps.records import Placement, TensorFacts

__all__ = ["Asked", "PendingSummary", "Summaries", "Summary"]


@dataclasses.dataclass(frozen=True)
class Summary:
    """What is kept of a tensor, beside or instead of its values."""

    statistics: Statistics | None = None
    sketch: Tensor | None = None


class Asked(NamedTuple):
    """Values to be summarised; None for those are that were met under the same key."""

    values: Tensor | None
    key: Hashable
    facts: TensorFacts
    part: Placement | None


class Summaries:
    """Summarises tensors on the writer's thread, and remembers what it found.

    In a dump of modules and operators most tensors come by several times: as an output, as the next
    one's input, as an operator's result.
    """

    def __init__(self, *, sketches: bool) -> None:
        """Sketches are made where no values are kept: from those they can be made later."""
        self.sketches = sketches
        self._found: dict[Hashable, Summary] = {}

    def forget(self) -> None:
        """Make room, once no earlier bytes can be met again."""
        self._found.clear()

    def of(self, asked: list[Asked]) -> list[Summary]:
        """Summarise values, in order."""
        return [self._one(*one) for one in asked]

    def _one(
        self, values: Tensor | None, key: Hashable, facts: TensorFacts, part: Placement | None
    ) -> Summary:
        if values is None:
            return self._found[key]
        statistics = _repeated(summarize(values), facts)
        drawn = None
        if self.sketches:
            drawn = _begin_sketch(values.expand(facts.shape), part).finish()
        self._found[key] = Summary(statistics, drawn)
        return self._found[key]


class PendingSummary:
    """A summary that a GPU is at work on: the program does not wait for it."""

    def __init__(self, tensor: Tensor, part: Placement | None) -> None:
        """Queue the work behind what the program has queued."""
        self._statistics = begin(tensor)
        self._sketch = _begin_sketch(tensor, part)

    def finish(self) -> Summary:
        """Wait for it."""
        return Summary(self._statistics.finish(), self._sketch.finish())


def _begin_sketch(tensor: Tensor, part: Placement | None) -> PendingSketch:
    if part is None:
        return begin_sketch(tensor)
    return begin_sketch(tensor, global_shape=part.global_shape, global_offset=part.global_offset)


def _repeated(statistics: Statistics, facts: TensorFacts) -> Statistics:
    """The statistics of a tensor some of whose values were stored once for many."""
    numel = 1
    for extent in facts.shape:
        numel *= extent
    if statistics.count in (numel, 0):
        return statistics
    times = numel // statistics.count
    counts = {
        name: getattr(statistics, name) * times
        for name in ("count", "zeros", "nans", "positive_infinities", "negative_infinities")
    }
    return msgspec.structs.replace(
        statistics,
        **counts,
        l2=None if statistics.l2 is None else statistics.l2 * times**0.5,
        exponents=tuple((exponent, many * times) for exponent, many in statistics.exponents),
    )
