"""Statistics and sketches of recorded values, each set of bytes looked at once."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from paritas.numerics.floats import holds_numbers
from paritas.numerics.sketch import PendingSketch, begin_sketch
from paritas.numerics.statistics import Statistics, begin, summarize, summarize_all

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

    step: int
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
        self._met: dict[Hashable, int] = {}

    def forget(self, step: int) -> None:
        """Make room: bytes that were not met in this step will come with their values again."""
        for key in [key for key, met in self._met.items() if met < step]:
            del self._met[key], self._found[key]

    def of(self, asked: list[Asked]) -> list[Summary]:
        """Summarise values, in order."""
        self._met.update((one.key, one.step) for one in asked)
        found = self._found
        new = {one.key: one for one in asked if one.values is not None and one.key not in found}
        # Whole tensors whose every value was stored are looked at together.
        plain = {
            key: one.values
            for key, one in new.items()
            if one.values is not None
            and one.part is None
            and 0 not in one.facts.stride
            and holds_numbers(one.values.dtype)
        }
        rows = summarize_all(list(plain.values()), sketches=self.sketches)
        for key, row in zip(plain, rows, strict=True):
            found[key] = Summary(row.statistics, row.sketch)
        for key, one in new.items():
            if one.values is not None and key not in plain:
                found[key] = self._alone(one.values, one.facts, one.part)
        return [found[one.key] for one in asked]

    def _alone(self, values: Tensor, facts: TensorFacts, part: Placement | None) -> Summary:
        if not holds_numbers(values.dtype):
            return Summary()
        drawn = None
        if self.sketches:
            drawn = _begin_sketch(values.expand(facts.shape), part).finish()
        return Summary(_repeated(summarize(values), facts), drawn)


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
