"""What a task is worth: would a candidate that computes nothing pass?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.errors import in_one_line
from paritas.execution.item_evidence import ItemEvidence
from paritas.execution.observation import input_tensors
from paritas.numerics.judge import Checks, check_pair
from paritas.numerics.metrics import bitwise_equal
from paritas.results.kernels import CaseFamily, TaskRating, TrivialCandidate
from paritas.results.power_reports import CAUGHT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paritas.kernels.references import JudgedCase
    from paritas.results.items import Item

_CHECKS = Checks()


def rate_task(cases: Sequence[JudgedCase]) -> TaskRating:
    """Judge the trivial candidates on all cases, the given ones first."""
    finite = [
        one
        for one in cases
        if (one.case.family is not CaseFamily.NONFINITE or _returns_no_nan(one))
        and all(tensor.numel() for _, tensor in input_tensors(one.case.inputs))
    ]
    ordered = sorted(finite, key=lambda one: one.case.family is not CaseFamily.GIVEN)
    if not ordered:
        return TaskRating()
    first = ordered[0]
    found = [_judged(name, make, ordered, first) for name, make in TRIVIAL.items()]
    return TaskRating(trivial=tuple(one for one in found if one is not None))


def _returns_no_nan(judged: JudgedCase) -> bool:
    """Whether what goes in as NaN comes out as something else: a count, or whether it is NaN.

    NaN comes out of almost anything that it goes into, and out of the mean of nothing: that shows
    no more than that an input is used.
    """
    tensors = (x for x in judged.run.native.outputs.values() if isinstance(x, torch.Tensor))
    return not any(one.is_floating_point() or one.is_complex() for one in tensors)


def _judged(
    name: str, make: Any, cases: Sequence[JudgedCase], first: JudgedCase
) -> TrivialCandidate | None:
    """Try one on each case until one refutes it."""
    tried = passed = 0
    given = True
    same_bits = True
    caught_by = ""
    for judged in cases:
        outcome = _passes(make, judged, first)
        if outcome is None:
            continue
        tried += 1
        passes, is_same = outcome
        same_bits &= is_same
        if passes:
            passed += 1
            continue
        caught_by = judged.case.name
        given &= judged.case.family is not CaseFamily.GIVEN
        break
    if not tried:
        return None
    if name == "the input" and passed == tried and same_bits:
        # It is the function itself: the reference copies its input.
        return None
    return TrivialCandidate(
        name=name,
        given=given and tried > 0,
        passed=passed,
        cases=tried,
        caught_by=caught_by,
    )


def _passes(make: Any, judged: JudgedCase, first: JudgedCase) -> tuple[bool, bool] | None:
    """Whether it passes a case, and with the same bits; None if it does not apply."""
    same_bits = True
    applied = False
    for item, value in judged.run.native.outputs.items():
        if not isinstance(value, torch.Tensor) or not value.numel():
            continue
        made = make(value, item, judged, first)
        if made is None:
            return None
        applied = True
        made = made.to(value.dtype).contiguous()
        if bitwise_equal(value, made):
            continue
        same_bits = False
        evidence = ItemEvidence(judged.run.evidence, item)
        findings, _ = check_pair(item, value, made, _CHECKS, evidence)
        if not all(finding.status.passes() for finding in findings):
            return False, False
    return (True, same_bits) if applied else None


def _zeros(value: Tensor, *_: Any) -> Tensor:
    return torch.zeros_like(value)


def _constant(value: Tensor, *_: Any) -> Tensor | None:
    if value.numel() == 1:  # one number is always a constant
        return None
    return value.reshape(-1)[:1].clone().expand(value.numel()).reshape(value.shape)


def _mean(value: Tensor, *_: Any) -> Tensor | None:
    if value.numel() == 1:
        return None
    wide = value.to(torch.complex128 if value.is_complex() else torch.float64)
    return torch.full_like(wide, wide.mean().item()).to(value.dtype)


def _input(value: Tensor, _: Item, judged: JudgedCase, __: JudgedCase) -> Tensor | None:
    for _path, tensor in input_tensors(judged.case.inputs):
        if tensor.shape == value.shape and tensor.dtype is value.dtype:
            return tensor.detach().clone()
    return None


def _first_output(
    value: Tensor, item: Item, judged: JudgedCase, first: JudgedCase
) -> Tensor | None:
    """The first output, where the inputs are others."""
    other = first.run.native.outputs.get(item)
    if judged is first or not isinstance(other, torch.Tensor) or other.shape != value.shape:
        return None
    ours, theirs = (dict(input_tensors(one.case.inputs)) for one in (judged, first))
    same = ours.keys() == theirs.keys() and all(
        ours[path].numel() == theirs[path].numel()
        and torch.equal(ours[path].reshape(-1), theirs[path].to(ours[path].dtype).reshape(-1))
        for path in ours
    )
    return None if same else other


TRIVIAL: dict[str, Any] = {
    "zeros": _zeros,
    "a constant": _constant,
    "the mean": _mean,
    "the input": _input,
    "the first case's output": _first_output,
}


# --- Planted faults -------------------------------------------------------------------------------

_MOST_FAULTS, _MOST_SECONDS = 60, 30.0


def plant_faults(rating: TaskRating, cases: Sequence[JudgedCase], seed: int) -> TaskRating:
    """Plant faults in the reference, and count those that the given inputs show."""
    from paritas.mutants.power import power

    given = next((one for one in cases if one.case.family is CaseFamily.GIVEN), None)
    if given is None:
        return rating
    try:
        report = power(
            given.case.inputs,
            given.run.subject.call,
            faults=_MOST_FAULTS,
            seconds=_MOST_SECONDS,
            gradients=False,
            seed=seed,
        )
    except Exception as error:  # noqa: BLE001  (the rating says why there are none)
        note = f"no faults could be planted: {in_one_line(error, 160)}"
        return msgspec.structs.replace(rating, note=note)
    # A fault that changes nothing on these inputs is one that the task cannot show.
    planted = len(report.judged) + len(report.silent)
    caught = sum(one.status in CAUGHT for one in report.judged)
    return msgspec.structs.replace(rating, planted=planted, caught=caught)
