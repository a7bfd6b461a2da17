"""Which of the patterns that fit is the one to say: the simplest, and how sure that is.

Every pattern that is proposed fits. So what decides is what it takes for granted: a formula that
has nothing to fit comes before a number that was fitted, one number before one per row, an order
with a name before any order, and what is only alike in distribution comes last.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import msgspec

from paritas.diagnosis.calibration import calibrated

if TYPE_CHECKING:
    from paritas.diagnosis.cases import Case
    from paritas.numerics.diagnoses import Pattern

__all__ = ["ORDER", "proposed", "ranked", "raw_ranked"]

# Each with the simplest kind that it can propose, in the order of these.
_MODULES = (
    ("ties", "tie-breaking"),
    ("nonfinite", "nonfinite"),
    ("integers", "wrapped"),
    ("clipping", "clipped"),
    ("constants", "zeros"),
    ("partial_sums", "doubled reduction"),
    ("operands", "swapped operands"),
    ("reductions", "off by one reduction"),
    ("norms", "off by one reduction"),
    ("masks", "mask"),
    ("signs", "sign"),
    ("scales", "scale"),
    ("offsets", "offset"),
    ("selections", "shift"),
    ("shifts", "shift"),
    ("permutations", "transpose"),
    ("precision", "precision"),
    ("random_streams", "different random stream"),
)
# From simple to anything goes; a kind that is not named here comes after all of them.
ORDER = (
    "tie-breaking",
    "nonfinite",
    "overflow",
    "wrapped",
    "clipped",
    "zeros",
    "doubled reduction",
    "partial sum",
    "swapped operands",
    "off by one reduction",
    "mask",
    "eps",
    "sign",
    "stale",
    "copy",
    "constant",
    "scale",
    "offset",
    "residual",
    "shift",
    "transpose",
    "permutation",
    "uninitialised",
    "axis offset",
    "axis scale",
    "precision",
    "different random stream",
)
# Below this a pattern is a guess, and gives way to every one that is not.
_GUESS = 0.5
# To be worth saying beside a simpler one, a pattern has to explain so much more.
_MORE = 0.01


def proposed(case: Case, *, enough: bool = False) -> list[Pattern]:
    """All that fits, with raw confidence, in no order.

    Args:
        enough: stop as soon as nothing that is still to be asked could be ranked before, or be
            worth saying beside, what has been found.
    """
    found: list[Pattern] = []
    for name, simplest in _MODULES:
        settled = (
            one.confidence >= _GUESS
            and _explained(one) + _MORE >= 1
            and _simplicity(one.kind) < _simplicity(simplest)
            for one in found
        )
        if enough and any(settled):
            break
        module = importlib.import_module(f"paritas.diagnosis.patterns.{name}")
        found += module.propose(case)
    return found


def raw_ranked(case: Case) -> list[Pattern]:
    """What fits, best first; what a simpler one explains as well is left out."""
    kept: list[Pattern] = []
    for pattern in sorted(proposed(case, enough=True), key=_place):
        if not kept or _explained(pattern) > max(map(_explained, kept)) + _MORE:
            kept.append(pattern)
    return kept


def ranked(case: Case) -> tuple[Pattern, ...]:
    """What fits, best first, each with how often such a statement turned out to be right."""
    return tuple(
        msgspec.structs.replace(pattern, confidence=calibrated(pattern.confidence))
        for pattern in raw_ranked(case)
    )


def _place(pattern: Pattern) -> tuple[bool, int, float, float]:
    guess = pattern.confidence < _GUESS
    return guess, _simplicity(pattern.kind), -_explained(pattern), -pattern.confidence


def _simplicity(kind: str) -> int:
    return ORDER.index(kind) if kind in ORDER else len(ORDER)


def _explained(pattern: Pattern) -> float:
    """Share of the wrong elements that it explains; what says nothing of it explains the least."""
    value = pattern.evidence.get("explained", 0.0)
    return value if isinstance(value, float) else 0.0
