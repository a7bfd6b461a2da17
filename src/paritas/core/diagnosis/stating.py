"""What may be stated: where, how sure it is, and how well it reproduces the candidate.

A pattern is a prediction of the candidate. Where one operator computed the value, any prediction
that holds may be stated. At an output, many operators after the fault, only what assumes nothing
and reproduces every element: a number fitted there fits the traces of other faults as well.
"""

from __future__ import annotations

import enum
import math
import re
from typing import TYPE_CHECKING

import msgspec

from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paritas.core.results.findings import Pattern


# --- How well a pattern reproduces the candidate --------------------------------------------------


class Grade(enum.StrEnum):
    """How well a pattern reproduces the candidate; the best first."""

    EXACT = "bit for bit"
    """Every element that it is about, bit for bit."""
    CLOSE = "within the noise"
    """Every element within the noise, with nothing fitted, far below the error."""
    LOOSE = "most of it"
    """Most elements, or few of them, or with fitted numbers, or by statistics."""


# The largest share of the error that is left where a prediction is close.
_CLOSE = 0.02
# A raw confidence below this is a guess, and below the second one it rests on few elements.
GUESS = 0.5
_WELL_SUPPORTED = 0.97


def grade(pattern: Pattern) -> Grade:
    """How well a pattern reproduces the candidate, by its evidence."""
    if pattern.confidence < _WELL_SUPPORTED:
        return Grade.LOOSE
    if _figure(pattern, "bit for bit") >= 1:
        return Grade.EXACT
    every = _figure(pattern, "within the noise") >= 1
    residual = _figure(pattern, "residual", math.inf)
    if every and residual <= _CLOSE and _fitted_numbers(pattern) == 0:
        return Grade.CLOSE
    return Grade.LOOSE


# A fitted number is as good as a known one if it is round and known to this share of it.
_ROUND_DIGITS = 3
_KNOWN = 1e-6
# It must also be this much closer to the round number than that is to changing nothing.
_APART = 0.01


def _fitted_numbers(pattern: Pattern) -> float:
    fitted = _figure(pattern, "fitted", math.inf)
    if fitted != 1:
        return fitted
    for name, nothing in (("factor", 1.0), ("offset", 0.0), ("times", 0.0)):
        value = _figure(pattern, name, math.nan)
        if math.isfinite(value) and _is_round(value, _figure(pattern, "standard error"), nothing):
            return 0.0
    return fitted


def _is_round(value: float, error: float, nothing: float) -> bool:
    """Whether a fitted number is a round one, such as 1.5, rather than any."""
    near = float(f"{value:.{_ROUND_DIGITS}g}")
    apart = abs(value - near)
    is_exact = max(4 * error, 1e-9 * abs(value)) <= _KNOWN * abs(value)
    return is_exact and apart <= _KNOWN * abs(value) and apart <= _APART * abs(near - nothing)


def _figure(pattern: Pattern, name: str, default: float = 0.0) -> float:
    value = pattern.evidence.get(name, default)
    return default if isinstance(value, str) else float(value)


# --- What may be stated ---------------------------------------------------------------------------

# Facts that can be seen in the candidate alone, or that explain each element by itself.
_FACTS = {PatternKind.NONFINITE, PatternKind.OVERFLOW, PatternKind.TIE_BREAKING}
_MOST = 0.98
# One number for each index, or as many as there are rows: fits the traces of many faults.
_FLEXIBLE = {PatternKind.AXIS_OFFSET, PatternKind.AXIS_SCALE}
# The evidence that names the operand that a pattern is about, if it is not about the result.
OPERAND = "operand"
# The evidence that names the operator in which a mistake was made, if it is one of several that the
# result is made of, or written out in its own steps.
INSIDE = "inside"
# The evidence of a pattern that rests on the candidate's run in float64, which agrees.
LIFTED_RUN = "lifted run"


# Any fault in the statistic of a row leaves a factor or an offset for that row.
_NORMALISING = re.compile("norm|softmax")
_OF_ROWS = {PatternKind.SCALE, PatternKind.OFFSET, *_FLEXIBLE}


def may_be_stated(
    pattern: Pattern,
    *,
    at_output: bool,
    operator: str = "",
    repeated: bool = False,
    held: bool = False,
) -> bool:
    """Whether a pattern that fits may be stated.

    Args:
        at_output: the operator that computed the value is not known: the fault may be far from it.
        operator: its name, if it is known.
        repeated: its call can be repeated, so its own mistakes were tried.
        held: the pattern was compared with what the candidate gives for other operands.
    """
    if pattern.confidence < GUESS:
        return False
    if OPERAND in pattern.evidence:
        # Nothing lies between the fault and the operand; but of a norm, any mistake in a statistic
        # is a factor or an offset for each row.
        return not (pattern.kind in _FLEXIBLE and _NORMALISING.search(operator))
    if not at_output:
        flexible = pattern.kind in _FLEXIBLE and repeated
        # One factor for all rows, also of other operands, is none of a row.
        is_of_all = pattern.kind == PatternKind.SCALE and held and is_of_whole(pattern)
        is_of_rows = pattern.kind in _OF_ROWS and not is_of_all
        fits_anyway = flexible or (is_of_rows and _NORMALISING.search(operator))
        # An offset of the result is one number for all elements, whatever it follows from.
        is_of_result = pattern.kind == PatternKind.OFFSET and "tried" not in pattern.evidence
        fits_anyway = fits_anyway or (is_of_result and not held)
        return not (fits_anyway and _fitted_numbers(pattern) > 0)
    if pattern.kind in _FACTS:
        return _figure(pattern, "share of the wrong", 1.0) >= _MOST
    if pattern.kind in {PatternKind.PRECISION, PatternKind.RANDOM_STREAM}:
        return True  # their proposers ask for more than a fit: a lifted run, a program that draws
    if pattern.kind in _FLEXIBLE and _figure(pattern, "fitted", math.inf) > 0:
        return False
    # Also bit for bit: a fit in float64 may hit every bit of a number that is not round.
    if pattern.kind in _OF_ROWS and _fitted_numbers(pattern) > 0:
        return False
    return grade(pattern) is not Grade.LOOSE


def is_of_whole(pattern: Pattern) -> bool:
    """Whether its numbers are the same for all elements."""
    return pattern.evidence.get("extent", "whole tensor") == "whole tensor"


# What a reader of the program says first, if it holds for the whole result: no step inside of it
# has to be known.
_PLAIN = {
    *(PatternKind.ZEROS, PatternKind.SIGN, PatternKind.COPY, PatternKind.SCALE),
    *(PatternKind.SHIFT, PatternKind.TRANSPOSE),
}


def is_plain(pattern: Pattern) -> bool:
    """Whether it says what happened to the result as a whole, with nothing fitted."""
    is_of_result = pattern.kind in _PLAIN and "tried" not in pattern.evidence
    if pattern.kind == PatternKind.SCALE and not _is_whole(_figure(pattern, "factor", math.nan)):
        return False
    return is_of_result and grade(pattern) is not Grade.LOOSE


def _is_whole(factor: float) -> bool:
    """Whether it is a whole number, or one over one: others, such as 7 / 8, come from counts."""
    numbers = (factor, 1 / factor) if factor and math.isfinite(factor) else ()
    return any(math.isclose(number, round(number), rel_tol=_KNOWN) for number in numbers)


# --- How sure it is -------------------------------------------------------------------------------

# The evidence that says in which class a statement was counted.
COUNTED = "counted as"
# The share of statements that was right, and the counts behind it (right, of all), by grade and by
# whether it is at an output. Counted by `benchmarks/bench_confidence.py` on faults drawn at random
# that nothing was built with; at an operator also on the third set of `benchmarks/places`, whose
# author had other ideas: 71 of 78, 51 of 51 and 19 of 23 by grade, true words that say less not
# counted. Part of that set had been looked at by then, so it is no first look. The wrong ones were
# looked at after the count: the next one needs other faults. The share is (right + 1) over
# (all + 2), since few cases prove little, and at most 0.99.
CONFIDENCE: dict[tuple[Grade, bool], tuple[float, int, int]] = {
    (Grade.EXACT, False): (0.95, 170, 177),
    (Grade.CLOSE, False): (0.96, 93, 95),
    (Grade.LOOSE, False): (0.83, 34, 40),
    (Grade.EXACT, True): (0.99, 154, 154),
    (Grade.CLOSE, True): (0.94, 15, 15),
    (Grade.LOOSE, True): (0.97, 39, 39),
}


def with_confidence(patterns: Iterable[Pattern], *, at_output: bool) -> tuple[Pattern, ...]:
    """The patterns with the share of such statements that was right, instead of the raw figure."""
    stated = []
    for pattern in patterns:
        counted = grade(pattern)
        evidence = {**pattern.evidence, COUNTED: str(counted)}
        confidence = CONFIDENCE[counted, at_output][0]
        stated.append(msgspec.structs.replace(pattern, confidence=confidence, evidence=evidence))
    return tuple(stated)
