"""Compare two values, or nested containers of values, without their programs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.errors import UsageError
from paritas.core.judging.matching import match
from paritas.core.judging.pairs import Checks, Pair, judge_pair
from paritas.core.numerics.bits import dtype_name, is_inexact
from paritas.core.numerics.checkers import NO_EVIDENCE, AutomaticValueChecker, ValueChecker
from paritas.core.numerics.flattening import Flat, flatten_value
from paritas.core.numerics.judge_evidence import NoEvidence
from paritas.core.results.findings import Coverage, Verdict
from paritas.core.results.items import Item, ItemKind

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.core.numerics.judge_evidence import JudgeEvidence


def judge(
    reference: Any,
    candidate: Any,
    *,
    value_checker: ValueChecker | None = None,
    fp64_ref: Any = None,
) -> Verdict:
    """Compare two values or nested containers of values, without their programs.

    Without a program there is no measured noise: floats that differ are judged by their dtype
    alone. That is weak, and the findings say so.

    Args:
        value_checker: default: `AutomaticValueChecker()`.
        fp64_ref: the reference's values computed in float64, in the same containers. They are the
            arbiter: the candidate may be as far from them as the reference is.

    Raises:
        UsageError: `fp64_ref` lacks a value of the reference, or has it in another shape.
    """
    checks = Checks(checkers=(value_checker or AutomaticValueChecker(),))
    root = Item(ItemKind.NAMED, "value")
    left, right = (flatten_value(side, root.name) for side in (reference, candidate))
    wide = None if fp64_ref is None else flatten_value(fp64_ref, root.name)
    matching = match(left, right, checks, root)
    findings, notes = list(matching.findings), list(matching.notes)
    for item, left, right in matching.pairs:
        evidence, noted = _find_arbiter(item, left, wide)
        notes += noted
        item_findings, noted = judge_pair(Pair(item, left, right, evidence), checks)
        findings += item_findings
        notes += noted
    coverage = Coverage(compared=len(matching.pairs), unmatched=tuple(matching.unmatched))
    return Verdict(findings=tuple(findings), coverage=coverage, notes=tuple(notes))


# A reference this far from `fp64_ref` is not a rounded one of it: with such an arbiter, its own
# error would excuse almost any candidate.
_FAR_FROM_ARBITER = 0.25


class _GivenArbiter(NoEvidence):
    """A value in float64, and no program."""

    def __init__(self, value: Tensor) -> None:
        self._value = value

    def arbiter(self) -> Tensor:
        """The value as given."""
        return self._value


def _find_arbiter(item: Item, leaf: Any, wide: Flat | None) -> tuple[JudgeEvidence, list[str]]:
    """The arbiter of a leaf in `fp64_ref`, and a note if it cannot serve as one."""
    if wide is None or not isinstance(leaf, torch.Tensor) or not is_inexact(leaf):
        return NO_EVIDENCE, []
    value = wide.leaves.get(str(item))
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"fp64_ref has no tensor {item}: give it in the containers of reference")
    if value.shape != leaf.shape:
        raise UsageError(
            f"fp64_ref: {item} has shape {list(value.shape)}, in reference {list(leaf.shape)}: "
            "give the reference's values, computed in float64"
        )
    if value.dtype not in (torch.float64, torch.complex128):
        note = f"{item}: fp64_ref is {dtype_name(value.dtype)} there, so it is not used"
        return NO_EVIDENCE, [note]
    value = value.detach().to(leaf.device)
    error = (leaf.detach().to(value.dtype) - value).abs()
    error, size = (tensor[torch.isfinite(tensor)] for tensor in (error, value.abs()))
    if float(error.norm()) > _FAR_FROM_ARBITER * float(size.norm()):
        distance = float(error.norm()) / float(size.norm()) if bool(size.any()) else math.inf
        far = f"the reference is far from fp64_ref (relative L2 {distance:.2g})"
        return NO_EVIDENCE, [f"{item}: {far}, so it is not used"]
    return _GivenArbiter(value), []
