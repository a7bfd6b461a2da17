"""Value checkers: each judges a pair of values, or leaves it to the next one.

The names and arguments are familiar from other tools. The automatic criterion decides whatever a
checker's arguments leave open. Arguments may be assigned later: each `check` validates them again.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from paritas.core.errors import UsageError
from paritas.core.numerics.automatic import (
    Judgement,
    judge_exact,
    judge_floats,
)
from paritas.core.numerics.bits import dtype_name, halves, is_inexact
from paritas.core.numerics.contents import Opaque, as_leaf, parts, same_leaf
from paritas.core.numerics.judge_evidence import JudgeEvidence, NoEvidence
from paritas.core.numerics.metrics import pair_metrics
from paritas.core.results.findings import Status

if TYPE_CHECKING:
    from torch import Tensor

NO_EVIDENCE = NoEvidence()


@runtime_checkable
class ValueChecker(Protocol):
    """The interface of a custom checker."""

    def check(
        self, reference: Any, candidate: Any, evidence: JudgeEvidence = NO_EVIDENCE
    ) -> Judgement | None:
        """Judge a pair of values of equal shape, or return None to leave it to the next checker."""


@dataclasses.dataclass(kw_only=True, slots=True)
class AutomaticValueChecker:
    """Choose the check by the kind of value; the default, with no tolerance to guess.

    Attributes:
        pcc: tensors of more than one float pass if their Pearson correlation is at least this.
        rtol: single floats, and integers, pass within `atol + rtol * |reference|`.
        atol: as above. Of the two, the one that is not given is 0 for integers.
        dissimilarity_threshold: bool tensors pass if their Rogers-Tanimoto dissimilarity is at
            most this.

    Without its argument, a kind of value is judged by the automatic criterion. `pcc` does not apply
    to integers: a correlation of token ids means nothing.
    """

    pcc: float | None = None
    rtol: float | None = None
    atol: float | None = None
    dissimilarity_threshold: float | None = None

    def __post_init__(self) -> None:
        _check_range("pcc", self.pcc, -1.0, 1.0)
        _check_range("rtol", self.rtol, 0.0, math.inf)
        _check_range("atol", self.atol, 0.0, math.inf)
        _check_range("dissimilarity_threshold", self.dissimilarity_threshold, 0.0, 1.0)

    def check(
        self, reference: Any, candidate: Any, evidence: JudgeEvidence = NO_EVIDENCE
    ) -> Judgement | None:
        """Judge a pair of tensors, numbers or plain objects."""
        validate_checker(self)
        if not isinstance(reference, torch.Tensor) or not isinstance(candidate, torch.Tensor):
            return _check_objects(reference, candidate)
        is_tolerant = self.rtol is not None or self.atol is not None
        if not is_inexact(reference) and not is_inexact(candidate):
            if self.dissimilarity_threshold is not None and reference.dtype is torch.bool:
                return _check_dissimilarity(reference, candidate, self.dissimilarity_threshold)
            if is_tolerant and torch.bool not in (reference.dtype, candidate.dtype):
                closeness = AllCloseValueChecker(rtol=self.rtol or 0.0, atol=self.atol or 0.0)
                return closeness.check(reference, candidate)
            return judge_exact(reference, candidate, evidence)
        if reference.numel() == 1 and is_tolerant:
            return AllCloseValueChecker(**_drop_none(rtol=self.rtol, atol=self.atol)).check(
                reference, candidate
            )
        if reference.numel() > 1 and self.pcc is not None:
            return _check_pcc(reference, candidate, self.pcc)
        return judge_floats(_as_inexact(reference), _as_inexact(candidate), evidence)


@dataclasses.dataclass(kw_only=True, slots=True)
class AllCloseValueChecker:
    """`torch.allclose`, computed in float64: |c - r| <= atol + rtol |r| everywhere.

    As in `torch.allclose`, a NaN is never close, and an infinity only to itself. Shapes never
    broadcast. The tolerance also applies to integer tensors. Values other than tensors and floats
    must be equal.
    """

    rtol: float = 1e-5
    atol: float = 1e-8

    def __post_init__(self) -> None:
        _check_range("rtol", self.rtol, 0.0, math.inf, required=True)
        _check_range("atol", self.atol, 0.0, math.inf, required=True)

    def check(
        self,
        reference: Any,
        candidate: Any,
        evidence: JudgeEvidence = NO_EVIDENCE,
    ) -> Judgement | None:
        """Judge a pair of tensors, numbers or plain objects."""
        validate_checker(self)
        if not isinstance(reference, torch.Tensor) or not isinstance(candidate, torch.Tensor):
            return _check_objects(reference, candidate)
        metrics = pair_metrics(reference, candidate)
        if metrics.mismatched == 0 and metrics.nan_reference == 0:
            return Judgement(status=Status.IDENTICAL, metrics=metrics)
        close = _is_close(reference, candidate, self.rtol, self.atol)
        far = int((~close).sum())
        if far == 0:
            return Judgement(status=Status.EQUIVALENT, metrics=metrics)
        reason = (
            f"{far} of {metrics.numel} values are not within rtol={self.rtol:g}, "
            f"atol={self.atol:g} (NaN is never close)"
        )
        return Judgement(status=Status.DIFFERENT, reason=reason, metrics=metrics)


@dataclasses.dataclass(kw_only=True, slots=True)
class FullValueChecker:
    """`AutomaticValueChecker` and `AllCloseValueChecker`: both must pass."""

    pcc: float | None = None
    rtol: float | None = None
    atol: float | None = None
    dissimilarity_threshold: float | None = None

    def __post_init__(self) -> None:
        self._parts()  # validates the arguments

    def _parts(self) -> tuple[ValueChecker, ValueChecker]:
        closeness = _drop_none(rtol=self.rtol, atol=self.atol)
        automatic = AutomaticValueChecker(
            pcc=self.pcc,
            dissimilarity_threshold=self.dissimilarity_threshold,
            **closeness,
        )
        return automatic, AllCloseValueChecker(**closeness)

    def check(
        self, reference: Any, candidate: Any, evidence: JudgeEvidence = NO_EVIDENCE
    ) -> Judgement | None:
        """Judge by both and keep the graver judgement."""
        judgements = [part.check(reference, candidate, evidence) for part in self._parts()]
        return max(
            (judgement for judgement in judgements if judgement is not None),
            key=lambda judgement: judgement.status.gravity,
        )


def _check_pcc(reference: Tensor, candidate: Tensor, required: float) -> Judgement:
    metrics = pair_metrics(reference, candidate)
    if metrics.mismatched == 0:
        return Judgement(status=Status.IDENTICAL, metrics=metrics)
    if metrics.pcc >= required and metrics.nonfinite_mismatches == 0:
        return Judgement(status=Status.EQUIVALENT, metrics=metrics)
    reason = f"correlation {metrics.pcc:.6g} is below the required {required:g}"
    if math.isnan(metrics.pcc):
        reason = "the correlation is undefined (constant values), and the values differ"
    if metrics.nonfinite_mismatches:
        reason = f"{metrics.nonfinite_mismatches} NaN/Inf positions differ"
    return Judgement(status=Status.DIFFERENT, reason=reason, metrics=metrics)


def _check_dissimilarity(reference: Tensor, candidate: Tensor, allowed: float) -> Judgement:
    """Rogers-Tanimoto: 2d / (n + d) for d disagreements among n values."""
    metrics = pair_metrics(reference, candidate)
    if metrics.mismatched == 0:
        return Judgement(status=Status.IDENTICAL, metrics=metrics)
    dissimilarity = 2 * metrics.mismatched / (metrics.numel + metrics.mismatched)
    if dissimilarity <= allowed:
        return Judgement(status=Status.EQUIVALENT, metrics=metrics)
    reason = (
        f"{metrics.mismatched} of {metrics.numel} values differ: dissimilarity "
        f"{dissimilarity:.3g}, allowed {allowed:g}"
    )
    return Judgement(status=Status.DIFFERENT, reason=reason, metrics=metrics)


def _check_objects(reference: Any, candidate: Any) -> Judgement:
    """Strings, None and other leaves: equal, different, or not comparable."""
    left, right = _as_comparable_leaf(reference), _as_comparable_leaf(candidate)
    equal = same_leaf(left, right)
    if equal:
        return Judgement(status=Status.IDENTICAL)
    if equal is None:
        kind = type(reference).__name__
        return Judgement(
            status=Status.UNVERIFIED,
            reason=left.reason if isinstance(left, Opaque) else f"{kind} cannot be compared",
            advice="return tensors or plain values, or pass a value_checker that accepts this type",
        )
    left, right = _unwrap_opaque(left), _unwrap_opaque(right)
    if type(left) is not type(right):
        reason = f"the reference is {_describe_value(left)}, the candidate {_describe_value(right)}"
    else:
        reason = f"the reference is {left!r:.80}, the candidate {right!r:.80}"
    return Judgement(status=Status.DIFFERENT, reason=reason)


def _as_comparable_leaf(value: Any) -> Any:
    """A leaf; an object or container becomes `Opaque`, as it has to be compared by its parts."""
    if isinstance(value, Opaque) or parts(value) is None:
        return value if isinstance(value, Opaque) else as_leaf(value)
    return Opaque(value, f"paritas cannot compare objects of type {type(value).__name__}")


def _unwrap_opaque(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, Opaque) else leaf


def validate_checker(checker: ValueChecker) -> None:
    """Raise `UsageError` if a built-in checker was assigned an invalid value."""
    if isinstance(checker, AutomaticValueChecker | AllCloseValueChecker | FullValueChecker):
        checker.__post_init__()


def _is_close(reference: Tensor, candidate: Tensor, rtol: float, atol: float) -> Tensor:
    if not is_inexact(reference) and not is_inexact(candidate):
        return _integer_distance(reference, candidate) <= atol + rtol * reference.double().abs()
    wide = torch.complex128 if reference.is_complex() else torch.float64
    return torch.isclose(candidate.to(reference.device, wide), reference.to(wide), rtol, atol)


def _integer_distance(reference: Tensor, candidate: Tensor) -> Tensor:
    """|c - r| of integers: in float64 alone, 2^60 and 2^60 + 1 are equal."""
    (high, low), (my_high, my_low) = halves(reference), halves(candidate.to(reference.device))
    return ((my_high - high) * 2.0**32 + (my_low - low)).abs()


def _describe_value(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        return f"a tensor {dtype_name(value.dtype)}{list(value.shape)}"
    return f"{type(value).__name__} {value!r:.60}"


def _as_inexact(tensor: Tensor) -> Tensor:
    """An integer compared with a float is compared as a float; dtypes are checked elsewhere."""
    return tensor if is_inexact(tensor) else tensor.double()


def _drop_none(**arguments: float | None) -> dict[str, float]:
    return {name: value for name, value in arguments.items() if value is not None}


def _check_range(
    name: str, value: float | None, low: float, high: float, *, required: bool = False
) -> None:
    if value is None and not required:
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        message = f"{name} must be a number from {low:g} to {high:g}, got {value!r}"
        raise UsageError(message)
