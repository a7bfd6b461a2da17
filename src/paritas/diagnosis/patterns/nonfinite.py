"""NaN and infinity where a number should be, or the other way round, and what made them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.patterns.nonfinite_causes import Cause, nan_causes
from paritas.numerics.diagnoses import Pattern

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.diagnosis.cases import Case

__all__ = ["propose"]

# Beyond which a number rounds to infinity.
_OVERFLOWS = {"float8_e5m2": 61440.0, "float16": 65520.0, "float32": 3.4028235677973366e38}
_MOST = 0.98
_HALF = 0.5
_NEAR = 256.0


def propose(case: Case) -> list[Pattern]:
    """`overflow` and `nonfinite`."""
    wrong = case.wrong
    if not bool(wrong.any()) or case.is_exact or case.given.is_complex():
        return []
    infinite = wrong & torch.isinf(case.given)
    made = wrong & torch.isnan(case.given)
    swallowed = wrong & torch.isfinite(case.given) & ~torch.isfinite(case.right)
    found = _overflow(case) if bool(infinite.any()) else []
    for mask, name in ((made, "NaN"), (infinite, "an infinity"), (swallowed, "")):
        share = float(mask.sum()) / float(wrong.sum())
        if share < _HALF or (found and name == "an infinity"):
            continue
        found.append(_swallowed(case, mask, share) if not name else _made(case, mask, name, share))
    return found


def _overflow(case: Case) -> list[Pattern]:
    """Infinite where it should be beyond a format's range, and only there.

    What is within the range may be wrong in its own way: a format that is too narrow rounds, too.
    """
    infinite = torch.isinf(case.given) & torch.isfinite(case.right)
    share = float((infinite & case.wrong).sum()) / float(case.wrong.sum())
    own = str(case.candidate.dtype).removeprefix("torch.")
    for name, limit in sorted(_OVERFLOWS.items(), key=lambda item: item[0] != own):
        beyond = case.right.abs() > limit
        if name != own and not _is_tried(case.right.abs(), limit):
            continue
        prediction = torch.where(beyond, torch.copysign(_infinity(case), case.right), case.given)
        agreed = float((infinite & (case.given == prediction) & beyond).sum())
        if agreed < _MOST * float(infinite.sum()) or agreed < _MOST * float(beyond.sum()):
            continue
        count = int(infinite.sum())
        return [
            Pattern(
                kind="overflow",
                confidence=(0.99 if share > _MOST else 0.9) * (1 - 2.0 ** -(count + 3)),
                sentence=f"overflow: what is too large for {name} comes out as infinity",
                evidence={
                    "format": name,
                    "limit": limit,
                    "elements": float(count),
                    "share of the wrong": share,
                },
            )
        ]
    return []


def _is_tried(sizes: Tensor, limit: float) -> bool:
    """Whether some value is near a format's limit: a gap of many powers of ten tells of no limit.

    The dtype's own limit needs no such evidence.
    """
    return bool(((sizes > limit / _NEAR) & (sizes < limit * _NEAR)).any())


def _infinity(case: Case) -> Tensor:
    return torch.full_like(case.right, torch.inf)


def _made(case: Case, mask: Tensor, name: str, share: float) -> Pattern:
    """What came to be not finite, with the cause if the inputs show one."""
    count = int(mask.sum())
    evidence: dict[str, float | str] = {"elements": float(count), "share of the wrong": share}
    cause = _cause(case, mask)
    if cause is None:
        sentence = f"{name} where a number should be"
        if bool((case.right[mask] == 0).all()):
            sentence += ", everywhere 0"
        confidence = 0.9
    else:
        sentence = f"{name} {cause.sentence}"
        evidence["cause"] = cause.name
        # Of few elements many conditions hold.
        confidence = (0.97 if cause.is_specific else 0.9) * (1 - 2.0 ** -(count + 3))
    return Pattern(
        kind="nonfinite", confidence=confidence * share, sentence=sentence, evidence=evidence
    )


def _cause(case: Case, mask: Tensor) -> Cause | None:
    """The first condition on the inputs that holds where it is not finite, and nowhere else."""
    count, others = int(mask.sum()), int((~mask).sum())
    for cause in nan_causes(case):
        here = int((cause.mask & mask).sum())
        elsewhere = int((cause.mask & ~mask & torch.isfinite(case.given)).sum())
        # A condition that holds everywhere says nothing.
        if here >= _MOST * count and elsewhere <= (1 - _MOST) * min(count, others) and others:
            return cause
    return None


def _swallowed(case: Case, mask: Tensor, share: float) -> Pattern:
    right, given = case.right[mask], case.given[mask]
    lost = "NaN" if bool(torch.isnan(right).all()) else "infinity"
    if not (bool(torch.isnan(right).all()) or bool(torch.isinf(right).all())):
        lost = "NaN or infinity"
    value = float(given[0])
    constant = bool((given == value).all())
    sentence = (
        f"{value:.6g} in the place of {lost}" if constant else f"a number in the place of {lost}"
    )
    evidence: dict[str, float | str] = {
        "elements": float(mask.sum()),
        "share of the wrong": share,
        "cause": f"{lost} swallowed",
    }
    return Pattern(kind="nonfinite", confidence=0.97 * share, sentence=sentence, evidence=evidence)
