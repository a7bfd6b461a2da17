"""Which slices were taken in the place of which, in words."""

from __future__ import annotations

import torch

from paritas.core.diagnosis.patterns.arrangements import describe_order
from paritas.core.results.findings import PatternKind


def describe_places(source: torch.Tensor) -> tuple[PatternKind, str]:
    """The kind and the words of slices that were taken from other places.

    Args:
        source: where each slice was taken from.
    """
    size = len(source)
    positions = torch.arange(size)
    moved = source != positions
    by = (source - positions)[moved]
    if size > 2 and bool((source == source[0]).all()):  # noqa: PLR2004
        return PatternKind.WRONG_INDEX, f"slice {int(source[0])} is taken everywhere"
    for distance in (int(by[0]), int(by[0]) % size, int(by[0]) % size - size):
        if torch.equal(source, (positions + distance) % size) and 2 * abs(distance) < size:
            return PatternKind.SHIFT, f"rolled by {-distance}"
    if len(torch.unique(source)) == size:
        return PatternKind.PERMUTATION, describe_order(source)
    # What lies before was read again: a buffer that was not loaded.
    if bool((by < 0).all()) and len(torch.unique(by)) == 1 and not bool(moved[source[moved]].any()):
        first = int(moved.nonzero()[0])
        some = f"slices {first} to {first + int(moved.sum()) - 1}"
        return (
            PatternKind.STALE,
            f"{some} are not loaded, those {-int(by[0])} before are used again",
        )
    return PatternKind.WRONG_INDEX, describe_order(source)
