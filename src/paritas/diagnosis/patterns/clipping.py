"""Cut off: clamped to bounds, or saturated at what a format can hold."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.patterns.weighing import beyond_noise, noise_of, sample, weigh
from paritas.numerics.criterion import MAX_Z
from paritas.numerics.diagnoses import Pattern

if TYPE_CHECKING:
    from paritas.diagnosis.cases import Case

__all__ = ["LIMITS", "propose"]

# The largest numbers of formats, by what they are called.
LIMITS = {
    127.0: "the largest int8",
    -128.0: "the smallest int8",
    -127.0: "the smallest int8 of a symmetric range",
    255.0: "the largest uint8",
    32767.0: "the largest int16",
    -32768.0: "the smallest int16",
    65535.0: "the largest uint16",
    2.0**31 - 1: "the largest int32",
    -(2.0**31): "the smallest int32",
    2.0**32 - 1: "the largest uint32",
    448.0: "the largest float8_e4m3",
    -448.0: "the smallest float8_e4m3",
    240.0: "the largest float8_e4m3fnuz",
    -240.0: "the smallest float8_e4m3fnuz",
    57344.0: "the largest float8_e5m2",
    -57344.0: "the smallest float8_e5m2",
    65504.0: "the largest float16",
    -65504.0: "the smallest float16",
    float(torch.finfo(torch.bfloat16).max): "the largest bfloat16",
    float(torch.finfo(torch.bfloat16).min): "the smallest bfloat16",
    float(torch.finfo(torch.float32).max): "the largest float32",
    float(torch.finfo(torch.float32).min): "the smallest float32",
}
_MOST = 0.98


def propose(case: Case) -> list[Pattern]:
    """`clipped`: all beyond a bound is the bound, and nothing is beyond it."""
    if case.reference.dtype == torch.bool or case.right.is_complex() or not beyond_noise(case):
        return []
    if not _may_be_cut_off(case):
        return []
    high, low = _bound(case, 1.0), _bound(case, -1.0)
    if high is None and low is None:
        return []
    prediction = case.right.clamp(
        min=-math.inf if low is None else low, max=math.inf if high is None else high
    )
    inside = (prediction == case.right) & ~case.wrong
    if not bool(inside.any()):
        return []  # nothing that went through: a constant, rather
    bounds = [bound for bound in (low, high) if bound is not None]
    known = all(bound in LIMITS or bound in {0.0, 1.0, -1.0} for bound in bounds)
    weight = weigh(case, prediction, parameters=0.0 if known else len(bounds), bits=2.0)
    if weight is None or not weight.whole:
        return []
    evidence = dict(weight.evidence)
    if low is not None:
        evidence["lower bound"] = low
    if high is not None:
        evidence["upper bound"] = high
    return [
        Pattern(
            kind="clipped",
            confidence=weight.confidence,
            sentence=_words(low, high),
            evidence=evidence,
        )
    ]


def _may_be_cut_off(case: Case) -> bool:
    """Whether there are no more than two values, by a look at some of them."""
    some = case.given.reshape(-1)[sample(case)]
    ends = (some == some.amax()) | (some == some.amin()) | ~torch.isfinite(some)
    middle = some.median()
    return float((ends | (some == middle)).double().mean()) >= 1 - 2 * (1 - _MOST)


def _bound(case: Case, side: float) -> float | None:
    """The value at which it is cut off above (side 1) or below (-1)."""
    cut = case.wrong & (side * (case.right - case.given) > 0) & torch.isfinite(case.given)
    if not bool(cut.any()):
        return None
    values = case.given[cut]
    bound = float(values.median())
    if float((values == bound).double().mean()) < _MOST:
        return None
    # Nothing may be beyond a bound.
    beyond = side * (case.given - bound) > MAX_Z * noise_of(case) * (0 if case.is_exact else 1)
    return None if float(beyond.double().mean()) > 1 - _MOST else bound


def _words(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"cut off below {low:.7g} and above {high:.7g}{_called(high)}"
    side, bound = ("above", high) if low is None else ("below", low)
    if bound == 0.0:
        kind = "negative" if side == "below" else "positive"
        return f"cut off at 0: {kind} values come out as zero"
    return f"cut off {side} {bound:.7g}{_called(bound)}"


def _called(bound: float | None) -> str:
    name = LIMITS.get(bound) if bound is not None else None
    return f", {name}" if name else ""
