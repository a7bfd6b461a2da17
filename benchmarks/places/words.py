"""Words for a fault, and the groups of them that many faults have.

A text has the kinds of `PatternKind` that name a fault, then those that are true and say less:
`"kind, kind; loose, loose"`.
"""

from __future__ import annotations

ROUNDED = "precision; approximation, other function, wrong argument"
REORDERED = (
    "permutation, wrong index; "
    "shift, swapped operands, transpose, wrong argument, wrong rank's shard"
)
REORDERED_OR_COPIED = (
    "permutation, wrong index; copy, shift, stale, swapped operands, transpose, wrong rank's shard"
)
EMPTY = "zeros, mask, uninitialised; axis scale, constant, missing operand, wrong factor"
EMPTY_IN_A_SUM = (
    "zeros, mask, uninitialised; axis scale, constant, missing operand, partial sum, wrong factor"
)
EMPTY_ON_A_RANK = (
    "zeros, mask, uninitialised; "
    "axis scale, constant, missing operand, one rank's part, wrong factor"
)
EMPTY_IN_A_RANKS_SUM = (
    "zeros, mask, uninitialised; "
    "axis scale, constant, missing operand, one rank's part, partial sum, wrong factor"
)
REPEATED = (
    "copy, stale, wrong index; constant, permutation, shift, wrong argument, wrong rank's shard"
)
MOVED = "shift, wrong index, permutation; copy, stale, wrong argument"
MOVED_SHARD = "shift, wrong index, permutation; copy, stale, wrong rank's shard"
MOVED_OPERAND = "shift, wrong index, permutation; copy, stale, wrong argument, wrong rank's shard"
MOVED_BY_ONE = (
    "shift, wrong index, permutation; "
    "copy, off by one reduction, stale, wrong argument, wrong rank's shard"
)
MOVED_OR_SWAPPED = (
    "shift, wrong index, permutation; "
    "copy, stale, swapped operands, wrong argument, wrong rank's shard"
)
SCALED = "scale, wrong factor; axis scale, wrong argument, wrong reduction"
LIMITED = "clipped; approximation, mask, other function, wrong argument"
SATURATED = "clipped; mask, other function, overflow, precision, wrong argument"
CURVE = "approximation, other function; precision, wrong argument, wrong factor"
ANOTHER_FACTOR = "other function, wrong factor, wrong argument; approximation, scale"


def split(words: str | None) -> tuple[frozenset[str] | None, frozenset[str]]:
    """The kinds and the loose words of a text; no kinds at all for None."""
    if words is None:
        return None, frozenset()
    kinds, _, loose = words.partition(";")
    return _set_of(kinds), _set_of(loose)


def _set_of(text: str) -> frozenset[str]:
    return frozenset(word.strip() for word in text.split(",") if word.strip())
