"""Values that no computation made: zeros, a constant, what was there before, garbage."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.patterns.weighing import beyond_noise, sample, weigh
from paritas.numerics.criterion import MAX_Z
from paritas.numerics.diagnoses import Pattern

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.diagnosis.cases import Case

__all__ = ["propose"]

_MOST = 0.98
# Fewer elements of one value may be chance.
_FEWEST = 3
_FEWEST_GARBAGE = 6
_SOME = 1 << 14
# Spread of the binary exponents of random bits over that of numbers: 8 bits of exponent give 74.
_GARBAGE_SPREAD = 16.0
_GARBAGE_SPREAD_HALF = 5.0


def propose(case: Case) -> list[Pattern]:
    """`zeros`, `constant`, `stale`, `copy` and `uninitialised`."""
    if not beyond_noise(case) or case.reference.dtype == torch.bool:
        return []
    found = [*_stale(case), *_copies(case), *_one_value(case)]
    return found or _garbage(case)


def _one_value(case: Case) -> list[Pattern]:
    """Zeros or another constant where it is wrong."""
    some = case.given.reshape(-1)[sample(case)]
    if not some.is_complex() and float((some == some.median()).double().mean()) < _MOST:
        return []
    values = case.given[case.wrong]
    finite = values[torch.isfinite(values)]
    if not finite.numel() or finite.is_complex():
        zero = bool((values == 0).all())
        return _zeros(case) if zero else []
    if float((values == 0).double().mean()) >= _MOST:
        return _zeros(case)
    value = float(finite.median())
    count = int((values == value).sum())
    if count < _FEWEST or count < _MOST * values.numel():
        return []
    weight = weigh(case, torch.full_like(case.right, value), parameters=1.0)
    if weight is None:
        return []
    # Cut off at a bound is the better word where all of it should be beyond the value.
    wrong, clear = case.right[case.wrong], case.right[~case.wrong]
    room = MAX_Z * case.allowed[~case.wrong]
    above = bool((wrong >= value).all()) and bool((clear <= value + room).all())
    below = bool((wrong <= value).all()) and bool((clear >= value - room).all())
    one_sided = clear.numel() > 0 and (above or below)
    evidence = {"value": value, **weight.evidence}
    return [
        Pattern(
            kind="constant",
            confidence=weight.confidence * (0.7 if one_sided else 1.0),
            sentence=f"{value:.7g} in every wrong element",
            evidence=evidence,
        )
    ]


def _zeros(case: Case) -> list[Pattern]:
    weight = weigh(case, torch.zeros_like(case.right))
    if weight is None:
        return []
    factor = 0.8 if _looks_cut_off(case) else 1.0
    return [
        Pattern(
            kind="zeros",
            confidence=factor * weight.confidence,
            sentence="zero instead of a value",
            evidence=weight.evidence,
        )
    ]


def _looks_cut_off(case: Case) -> bool:
    """Whether it is the negative ones that are zero, or the positive ones, and only these."""
    if case.right.is_complex():
        return False
    wrong, clear = case.right[case.wrong], case.right[~case.wrong]
    beyond = clear[clear.abs() > MAX_Z * case.allowed[~case.wrong]]
    if not beyond.numel():
        return False
    negative = bool((wrong < 0).all()) and float((beyond > 0).double().mean()) >= _MOST
    positive = bool((wrong > 0).all()) and float((beyond < 0).double().mean()) >= _MOST
    return negative or positive


def _stale(case: Case) -> list[Pattern]:
    """What it was before."""
    found = []
    for name, value in case.context.earlier.items():
        if tuple(value.shape) != case.shape:
            continue
        weight = weigh(case, _wide(case, value), bits=math.log2(len(case.context.earlier)))
        if weight is not None:
            evidence = {"equals": name, **weight.evidence}
            found.append(
                Pattern(
                    kind="stale",
                    confidence=weight.confidence,
                    sentence=f"stale: still the value of {name}",
                    evidence=evidence,
                )
            )
    return sorted(found, key=lambda pattern: -pattern.confidence)[:1]


def _copies(case: Case) -> list[Pattern]:
    """Another tensor in its place, or an operator's input that went through untouched."""
    known = {name: (tensor, f"it is {name} instead") for name, tensor in case.context.named.items()}
    for place, tensor in enumerate(case.context.inputs):
        text = f"it is input {place} as it was: the operation is skipped"
        known[f"input {place}"] = (tensor, text)
    for name, (tensor, text) in known.items():
        if tuple(tensor.shape) != case.shape or not bool((tensor != 0).any()):
            continue
        weight = weigh(case, _wide(case, tensor), bits=math.log2(len(known)))
        if weight is not None:
            return [
                Pattern(
                    kind="copy",
                    confidence=weight.confidence,
                    sentence=text,
                    evidence={"equals": name, **weight.evidence},
                )
            ]
    return []


def _garbage(case: Case) -> list[Pattern]:
    """Random bits: exponents of all sizes, or numbers too small to have been computed."""
    if case.is_exact or case.given.is_complex():
        return []
    values = case.given.reshape(-1)[sample(case)]
    numbers = values[torch.isfinite(values) & (values != 0)].abs()
    right = case.right.reshape(-1)[:: max(1, case.right.numel() // _SOME)].abs()
    right = right[torch.isfinite(right) & (right != 0)]
    if numbers.numel() < _FEWEST_GARBAGE or not right.numel():
        return []
    info = torch.finfo(case.candidate.dtype)
    denormal = float((numbers < info.tiny).double().mean())
    usual = float((right < info.tiny).double().mean())
    narrow = case.candidate.dtype == torch.float16
    spread = float(numbers.log2().std(correction=0))
    normal = float(right.log2().std(correction=0)) if right.numel() > 1 else 0.0
    wide = spread > (_GARBAGE_SPREAD_HALF if narrow else _GARBAGE_SPREAD) + normal
    if not (wide or (denormal > 0.3 and usual < 0.01)):  # noqa: PLR2004
        return []
    what = "denormal numbers" if denormal > 0.3 else f"sizes over 2^{4 * spread:.0f}"  # noqa: PLR2004
    return [
        Pattern(
            kind="uninitialised",
            confidence=0.9 * (1 - 2.0 ** (-numbers.numel() / 4)),
            sentence=f"memory that nobody wrote: {what} in the wrong elements",
            evidence={
                "denormal": denormal,
                "spread of exponents": spread,
                "usual spread": normal,
                "elements": float(case.wrong.sum()),
            },
        )
    ]


def _wide(case: Case, value: Tensor) -> Tensor:
    return value.detach().cpu().to(case.right.dtype)
