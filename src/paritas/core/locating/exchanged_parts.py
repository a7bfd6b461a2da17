"""Parts of an operator's result that the candidate reads in another order.

`up, gate = both.chunk(2, -1)` for `gate, up = ...` gives values that both sides have: only who
reads them differs. By itself, each reader seems to be called with another input, or to be left out.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from paritas.core.diagnosis.stating import with_confidence
from paritas.core.locating.call_words import call_name
from paritas.core.locating.partings import Parting, Spot
from paritas.core.locating.trace_matching import plain_name, readers_of
from paritas.core.results.findings import Pattern, PatternKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paritas.core.tracing.traces import Operation, Trace

# Of more orders that all fit the readers, none is likely.
_MOST_ORDERS = 6


@dataclasses.dataclass(frozen=True)
class ExchangedParts:
    """An operator with several results, and the order in which the candidate reads them.

    Attributes:
        order: for each part of the candidate, the part that the reference reads in its place.
    """

    reference: Operation
    candidate: Operation
    order: tuple[int, ...]

    def spot(self, parting: Parting) -> Spot:
        """The place of it."""
        # What the candidate reads where the reference reads the first part, the second ...
        parts = [str(self.order.index(number) + 1) for number in range(len(self.order))]
        words = f"the candidate reads the parts of {call_name(self.reference)} in another order"
        pattern = Pattern(
            kind=PatternKind.PERMUTATION,
            confidence=1.0,
            sentence=f"the parts are read in the order {', '.join(parts)}",
            evidence={"within the noise": 1.0},  # in the right order, the results are right
        )
        (pattern,) = with_confidence([pattern], at_output=False)
        return Spot(parting, words, self.reference, self.candidate, seen=pattern)


def exchanged_parts(parting: Parting, *, alike: bool = False) -> Iterator[ExchangedParts]:
    """The operators whose parts other operators read than in the reference, with likely orders.

    Args:
        alike: those whose parts are read by operators of the same names on both sides instead, with
            two parts exchanged.
    """
    reference_trace, candidate_trace = parting.theirs.trace, parting.mine.trace
    right, wrong = _readers(reference_trace), _readers(candidate_trace)
    operations_by_outputs: dict[tuple[int | None, ...], Operation] = {
        tuple(
            parting.known.classes[index] for index in reference_operation.outputs
        ): reference_operation
        for reference_operation in reference_trace.operations
        if len(reference_operation.outputs) > 1 and not reference_operation.is_backward
    }
    for operation in candidate_trace.operations:
        twin = operations_by_outputs.get(
            tuple(parting.classes[index] for index in operation.outputs)
        )
        if twin is None or operation.is_backward or plain_name(twin) != plain_name(operation):
            continue
        expected = [right.get(index, []) for index in twin.outputs]
        actual = [wrong.get(index, []) for index in operation.outputs]
        if alike is not (expected == actual) or sorted(expected) != sorted(actual):
            continue
        places = range(len(expected))
        orders = (
            order
            for order in itertools.permutations(places)
            if all(actual[position] == expected[order[position]] for position in places)
            and (not alike or sum(slot != part for slot, part in enumerate(order)) == 2)  # noqa: PLR2004
        )
        for order in itertools.islice(orders, _MOST_ORDERS):
            yield ExchangedParts(twin, operation, order)


def _readers(trace: Trace) -> dict[int, list[str]]:
    """The names of the forward operators that read each value, in their order."""
    forward = (operation for operation in trace.operations if not operation.is_backward)
    readers = readers_of(forward)
    return {index: sorted(map(plain_name, by)) for index, by in readers.items()}
