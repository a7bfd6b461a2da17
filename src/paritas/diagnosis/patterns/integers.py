"""Whole numbers that ran over: what is left of them in 8, 16 or 32 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.patterns.weighing import beyond_noise, sample, weigh
from paritas.numerics.diagnoses import Pattern

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.diagnosis.cases import Case

__all__ = ["propose"]

_WIDTHS = (4, 8, 16, 32)


def propose(case: Case) -> list[Pattern]:
    """`wrapped`: modulo a power of two, signed or not; also of whole numbers kept in floats."""
    if case.reference.dtype == torch.bool or case.right.is_complex() or not beyond_noise(case):
        return []
    some = case.given.reshape(-1)[sample(case)]
    if not case.is_exact and not (_whole(some) and _differ(some)):
        return []
    # Of floats, the rounding to whole numbers came before.
    whole = case.right if case.is_exact else case.right.round()
    for bits in _WIDTHS:
        for signed in (True, False):
            wrapped = _wrap(_integers(case, whole), bits, signed=signed)
            weight = weigh(case, wrapped.double(), bits=3.0)
            if weight is None:
                continue
            name = f"{'' if signed else 'u'}int{bits}"
            evidence = {"bits": float(bits), "signed": str(signed).lower(), **weight.evidence}
            return [
                Pattern(
                    kind="wrapped",
                    confidence=weight.confidence,
                    sentence=f"wrapped around: what should be, modulo 2^{bits}, as {name} keeps it",
                    evidence=evidence,
                )
            ]
    return []


def _whole(values: Tensor) -> bool:
    finite = bool(torch.isfinite(values).all())
    return finite and bool((values == values.round()).all()) and values.numel() > 0


def _differ(values: Tensor) -> bool:
    """Zeros or another constant are no remainders."""
    return bool((values != values[0]).any())


def _integers(case: Case, whole: Tensor) -> Tensor:
    """As int64; from the reference itself where float64 is too short."""
    if case.is_exact and case.arbiter is None:
        return case.reference.detach().cpu().to(torch.int64)
    finite = torch.where(torch.isfinite(whole), whole, 0.0)
    return finite.clamp(-(2.0**62), 2.0**62).to(torch.int64)


def _wrap(value: Tensor, bits: int, *, signed: bool) -> Tensor:
    modulus = 1 << bits
    kept = value.remainder(modulus)
    return torch.where(kept >= modulus // 2, kept - modulus, kept) if signed else kept
