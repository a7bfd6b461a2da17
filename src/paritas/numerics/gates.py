"""What is plain at once: a split that is right or wrong without any noise being measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paritas.numerics import criterion
from paritas.numerics.criterion import UNIT_F64
from paritas.results.findings import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# In float64 a difference of so many roundings of the value and of the typical value needs no
# measured noise: it is nine orders of magnitude below a fault of one in a million.
PLAIN_ROUNDINGS = 32.0
# Natively likewise, once the lifted run has settled the meaning.
NATIVE_ROUNDINGS = 4.0
# A difference in float64 of this share of the typical value, and as many times what a shake of the
# last bits of all arguments does, is no rounding: no noise has to be measured for that either.
GROSS_SHARE = 1e-3
GROSS_SHAKES = 1e6


def near_in_float64(whole: Any, split: Any) -> bool:
    """Whether two values of lifted runs differ by a few roundings at most."""
    if not isinstance(whole, torch.Tensor) or not isinstance(split, torch.Tensor):
        return whole is None and split is None
    if whole.shape != split.shape or whole.dtype != split.dtype:
        return False
    if torch.equal(whole, split):
        return True
    if whole.dtype not in (torch.float64, torch.complex128) or not whole.numel():
        return False
    size = whole.abs()
    typical = float(torch.linalg.vector_norm(size)) / whole.numel() ** 0.5
    allowed = size.add_(typical).mul_(PLAIN_ROUNDINGS * UNIT_F64)
    return bool(((split - whole).abs() <= allowed).all())


def near_natively(reference: Any, candidate: Any, arbiter: Any) -> Status | None:
    """Identical or equivalent where no noise has to be measured for that, otherwise None.

    Every element within a few roundings of the arbiter, or errors as large as the reference's own.
    """
    tensors = (reference, candidate, arbiter)
    if not all(isinstance(value, torch.Tensor) for value in tensors):
        return Status.IDENTICAL if reference is None and candidate is None else None
    if reference.shape != candidate.shape or reference.dtype != candidate.dtype:
        return None
    if torch.equal(reference, candidate):
        return Status.IDENTICAL
    inexact = reference.is_floating_point() or reference.is_complex()
    if not inexact or arbiter.shape != reference.shape:
        return None
    mine, own = (candidate - arbiter).abs(), (reference - arbiter).abs()
    size = arbiter.abs()
    typical = float(torch.linalg.vector_norm(size)) / max(1, size.numel()) ** 0.5
    unit = criterion.unit_roundoff(reference.dtype)
    if bool((mine <= size.add_(typical).mul_(NATIVE_ROUNDINGS * unit)).all()):
        return Status.EQUIVALENT
    worst = float(mine.max()) <= criterion.OWN_MAX * float(own.max())
    norm = torch.linalg.vector_norm
    usual = float(norm(mine)) <= criterion.OWN_RMS * float(norm(own))
    return Status.EQUIVALENT if worst and usual else None


def gross_difference(whole: Tensor, split: Tensor, limit: Callable[[], float | None]) -> str | None:
    """What to say of a difference in float64 that no rounding makes; None where it is not plain.

    Args:
        limit: what rounding comes to at the very most, asked if the difference is large enough;
            None where that is not known.
    """
    apart, typical = criterion.rms_difference(split, whole), criterion.rms(whole)
    if not apart > GROSS_SHARE * typical:
        return None
    rounding = limit()
    if rounding is None or not apart > rounding:
        return None
    share = f"{apart / typical:.2g} times the typical value" if typical else f"{apart:.3g}"
    return f"in float64, where rounding is negligible, it is off by {share}"
