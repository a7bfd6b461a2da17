"""What a dump should have and lacks: ranks, steps, records.

Values that are recorded but cannot be read are not listed here: their records show it.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import TYPE_CHECKING

from paritas.core.results.wording import joined_ranges, ranges

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from paritas.formats.dumps.opening import ReadableDump
    from paritas.formats.files.records import Header

    Range = tuple[int, int]

# Tools that record every step on every rank. Plain files may be arranged in any way.
_EVEN = ("ge", "fx", "msprobe", "sglang")


@dataclasses.dataclass(frozen=True)
class Loss:
    """Something that was recorded, or should have been, and has no record.

    Attributes:
        ranks: the first and the last rank that it concerns; None for the dump as a whole.
        step: None for all of them.
    """

    text: str
    ranks: Range | None = None
    step: int | None = None

    def concerns(self, ranks: Collection[int] | None, steps: Collection[int] | None) -> bool:
        """Whether it concerns some of these ranks and steps; None stands for all."""
        if ranks is not None and self.ranks is not None:
            first, last = self.ranks
            if not any(first <= rank <= last for rank in ranks):
                return False
        return steps is None or self.step is None or self.step in steps


def find_losses(dump: ReadableDump) -> list[Loss]:
    """Everything that the dump lacks."""
    headers = [dump.header(rank) for rank in sorted(dump.ranks)]
    losses = [Loss(text) for text in dump.losses]
    for rank, part in dump.ranks.items():
        losses += [Loss(f"rank {rank}: {text}", (rank, rank)) for text in part.losses]
    unreadable = dump.unreadable.items()
    losses += [Loss(f"rank {rank}: {why}", (rank, rank)) for rank, why in unreadable]
    losses += [
        Loss(describe_missing(span), span)
        for span in missing_ranks(headers, {*dump.ranks, *dump.unreadable})
    ]
    return [*losses, *_find_uneven(dump)]


def list_problems(dump: ReadableDump) -> list[str]:
    """The problems of the dump, and what it lacks."""
    reported = set(dump.problems)
    lacking = (loss.text for loss in find_losses(dump))
    return [*dump.problems, *(text for text in lacking if text not in reported)]


def describe_missing(span: Range) -> str:
    """Ranks without records, in words."""
    return f"{'rank' if span[0] == span[1] else 'ranks'} {ranges([span])} left nothing"


def missing_ranks(headers: Sequence[Header], there: Collection[int]) -> tuple[Range, ...]:
    """Ranges of the ranks that should have recorded: those selected, or all of the run.

    As ranges, because a header can claim any number of ranks.

    Args:
        headers: of the ranks that can be read.
        there: the ranks that left something.
    """
    world = max(header.world_size for header in headers)
    requested = headers[0].selection.get("ranks")
    if requested is not None:
        numbers = {int(number) for number in re.findall(r"(?<!\d)\d{1,9}(?!\d)", requested)}
        return joined_ranges(sorted(rank for rank in numbers - set(there) if rank < world))
    ends = [-1, *sorted(rank for rank in there if rank < world), world]
    gaps = ((before + 1, after - 1) for before, after in itertools.pairwise(ends))
    return tuple((first, last) for first, last in gaps if first <= last)


def _find_uneven(dump: ReadableDump) -> Iterator[Loss]:
    """Steps that some ranks recorded and others did not; our own index counts its records."""
    if dump.kind not in _EVEN or len(dump.ranks) == 1:
        return
    steps = {rank: {record.step for record in part.records} for rank, part in dump.ranks.items()}
    for step in sorted(set().union(*steps.values())):
        for rank, rank_steps in steps.items():
            if step not in rank_steps:
                text = f"rank {rank} has nothing of step {step}, which other ranks recorded"
                yield Loss(text, (rank, rank), step)
