"""Values that are right and stand in the wrong place: moved by k along an axis, or in memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.cases import Case
from paritas.diagnosis.patterns.hypotheses import (
    Part,
    Probe,
    axis_name,
    part_of,
    stated,
    unravelled,
)
from paritas.diagnosis.patterns.weighing import beyond_noise

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.numerics.diagnoses import Pattern

__all__ = ["propose"]

# Lines along an axis that are correlated to find the distance, and their greatest length.
_LINES = 32
_LOOKED_AT = 2048
_LONGEST = 1 << 15
_PEAKS = 4
_FILLS = ("wrap", "zeros", "edge", "kept")


def propose(case: Case) -> list[Pattern]:
    """Rolled or shifted by k along an axis, in the whole or inside the block that is wrong."""
    if not beyond_noise(case) or not case.shape or case.given.is_complex():
        return []
    part = part_of(case)
    axes = range(len(case.shape))
    inner = Probe(part.case)
    # A roll of few slices, or of some that are not neighbours, is an exchange of them.
    found = [_along(part.case, axis, inner) for axis in axes if part.is_run(axis)]
    found += [
        _from_outside(case, part, axis)
        for axis in axes
        if len(part.indices[axis]) < case.shape[axis] and part.is_run(axis)
    ]
    if len(case.shape) > 1 and not any(found):
        found.append(_in_memory(case))
    return [pattern for pattern in found if pattern is not None]


def _along(case: Case, axis: int, probe: Probe) -> Pattern | None:
    size = case.shape[axis]
    if size < 2:  # noqa: PLR2004
        return None
    name = axis_name(case.context, axis, len(case.shape))
    found = []
    for distance in _distances(case.given, case.right, case.wrong, axis):
        # The ends may hold anything after a shift: the rest decides whether it is one.
        inside = _source(size, distance, "zeros")
        wrapped = _source(size, distance, "wrap")
        if not (probe.meets_map(axis, inside, partly=True) or probe.meets_map(axis, wrapped)):
            continue
        for fill in _FILLS:
            source = _source(size, distance, fill)
            prediction, noise = _taken(case, axis, source)
            pattern = stated(
                case,
                prediction,
                "shift",
                _sentence(distance, name, fill),
                cost=math.log2(size * 4),
                noise=noise,
                evidence={"distance": distance, "axis": axis, "fill": fill},
            )
            if pattern is not None:
                found.append(pattern)
                if _goodness(pattern) == 1:
                    break
        if found:
            return max(found, key=_goodness)
    return None


def _goodness(pattern: Pattern) -> float:
    """What fills the gap shows in a few elements only."""
    return float(pattern.evidence["explained"]) - float(pattern.evidence["spoiled"])


def _from_outside(case: Case, part: Part, axis: int) -> Pattern | None:
    """Inside the block stand the values of places beside it, some of them outside of it."""
    size = case.shape[axis]
    probe = Probe(case)
    for distance in _distances(case.given, case.right, case.wrong, axis):
        if not probe.meets_map(axis, _source(size, distance, "wrap")):
            continue
        source = (part.indices[axis] - distance) % size
        prediction, noise = case.right, case.allowed
        for one, kept in enumerate(part.indices):
            prediction = prediction.index_select(one, source if one == axis else kept)
            noise = noise.index_select(one, source if one == axis else kept)
        name = axis_name(case.context, axis, len(case.shape))
        pattern = stated(
            part.case,
            prediction,
            "shift",
            _sentence(distance, name, "block"),
            cost=math.log2(size * 4) + 1,
            noise=noise,
            evidence={"distance": distance, "axis": axis, "fill": "from beside the block"},
        )
        if pattern is not None:
            return pattern
    return None


def _in_memory(case: Case) -> Pattern | None:
    """The whole tensor read from k elements further on: a wrong pointer, not a wrong index."""
    flat = Case(
        case.candidate.detach().cpu().flatten(),
        case.reference.detach().cpu().flatten(),
        case.right.flatten(),
        case.allowed.flatten(),
    )
    pattern = _along(flat, 0, Probe(flat))
    if pattern is None:
        return None
    distance = int(pattern.evidence["distance"])
    many = f"{abs(distance)} element{'s' * (abs(distance) != 1)}"
    sentence = f"every value stands {many} {_way(distance)} in memory of where it belongs"
    return type(pattern)(
        kind="shift",
        confidence=pattern.confidence,
        sentence=sentence,
        evidence={**pattern.evidence, "axis": "memory"},
    )


def _distances(given: Tensor, right: Tensor, wrong: Tensor, axis: int) -> list[int]:
    """Where the correlation along an axis is highest: the few distances worth a test."""
    size = right.shape[axis]
    if size < 2:  # noqa: PLR2004
        return []
    kept = min(size, _LONGEST)

    # Few lines are enough, if they are among those that are wrong most.
    others = [length for dim, length in enumerate(right.shape) if dim != axis]
    step = max(1, math.prod(others) // _LOOKED_AT)
    starts = torch.arange(0, math.prod(others), step)
    at = list(unravelled(starts, others))

    def lines(value: Tensor) -> Tensor:
        moved = value.narrow(axis, 0, kept).movedim(axis, -1)
        return moved[tuple(at)] if at else moved.unsqueeze(0)

    hit = lines(wrong).sum(dim=-1)
    chosen = hit.topk(min(_LINES, len(hit))).indices
    at = [one[chosen] for one in at]
    left, source = lines(given), lines(right)
    bad = ~(torch.isfinite(left) & torch.isfinite(source))
    left, source = left.masked_fill(bad, 0.0), source.masked_fill(bad, 0.0)
    left = left - left.mean(dim=-1, keepdim=True)
    source = source - source.mean(dim=-1, keepdim=True)
    spectrum = torch.fft.rfft(left, n=kept) * torch.fft.rfft(source, n=kept).conj()
    correlation = torch.fft.irfft(spectrum.sum(dim=0), n=kept)
    peaks = correlation.topk(min(_PEAKS, kept)).indices.tolist()
    found = [peak if peak <= kept // 2 else peak - kept for peak in peaks]
    # Next to none, what loops are off by: the correlation of smooth values cannot tell them apart.
    return [one for one in dict.fromkeys([*found, 1, -1]) if one % size]


def _source(size: int, distance: int, fill: str) -> Tensor:
    """From which index each index takes its value; -1 for zeros."""
    index = torch.arange(size)
    plain = index - distance
    inside = (plain >= 0) & (plain < size)
    match fill:
        case "zeros":
            return torch.where(inside, plain, -1)
        case "edge":
            return plain.clamp(0, size - 1)
        case "kept":
            return torch.where(inside, plain, index)
    return plain % size


def _taken(case: Case, axis: int, source: Tensor) -> tuple[Tensor, Tensor]:
    """The tensor read so, and the noise that the values bring with them."""
    values = case.right.index_select(axis, source.clamp(min=0))
    if bool((source < 0).any()):
        shape = [1] * len(case.shape)
        shape[axis] = len(source)
        values = torch.where((source < 0).reshape(shape), 0.0, values)
    return values, case.allowed.index_select(axis, source.clamp(min=0))


def _way(distance: int) -> str:
    return "after" if distance > 0 else "before"


def _sentence(distance: int, name: str, fill: str) -> str:
    if fill == "wrap":
        return f"rolled by {distance} along {name}: every value stands {_places(distance)}"
    ends = {
        "zeros": ", with zeros where nothing was moved to",
        "edge": ", with the last value repeated at the end",
        "kept": ", and the end left as it was",
    }
    off = "off by one" if abs(distance) == 1 else f"shifted by {distance}"
    return f"{off} along {name}: every value stands {_places(distance)}{ends.get(fill, '')}"


def _places(distance: int) -> str:
    count = abs(distance)
    return f"{count} place{'s' * (count != 1)} {_way(distance)} its own"
