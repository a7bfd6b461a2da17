"""Match the leaves of two results and check each pair: structure first, then values."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.core.errors import UsageError
from paritas.core.numerics.automatic import fault_in_float64
from paritas.core.numerics.bits import dtype_name, is_inexact
from paritas.core.numerics.checkers import NO_EVIDENCE, AutomaticValueChecker, ValueChecker
from paritas.core.numerics.contents import SEQUENCE, Opaque
from paritas.core.numerics.flattening import Flat, flattened
from paritas.core.numerics.judge_evidence import NoEvidence
from paritas.core.results.findings import Aspect, Coverage, Finding, Status, Verdict
from paritas.core.results.items import Item, ItemKind
from paritas.core.results.wording import enumerated

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.core.numerics.judge_evidence import JudgeEvidence

_MOST_NAMED = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checks:
    """What to compare.

    Attributes:
        size: the number of leaves.
        device: devices; otherwise a difference is only noted.
        containers: the classes of interchangeable containers, such as lists and tuples; otherwise
            a difference is only noted.
        checkers: value checkers, in order.
    """

    size: bool = True
    dtype: bool = True
    shape: bool = True
    values: bool = True
    device: bool = False
    containers: bool = False
    checkers: tuple[ValueChecker, ...] = (AutomaticValueChecker(),)


@dataclasses.dataclass(frozen=True)
class Matching:
    """Pairs of leaves, and the leaves without a partner."""

    pairs: list[tuple[Item, Any, Any]]
    findings: list[Finding]
    unmatched: list[str]
    notes: list[str]


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
    left, right = (flattened(side, root.name) for side in (reference, candidate))
    wide = None if fp64_ref is None else flattened(fp64_ref, root.name)
    matching = match(left, right, checks, root)
    findings, notes = list(matching.findings), list(matching.notes)
    for item, left, right in matching.pairs:
        evidence, noted = _find_arbiter(item, left, wide)
        notes += noted
        found, noted = check_pair(item, left, right, checks, evidence)
        findings += found
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
    error, size = (one[torch.isfinite(one)] for one in (error, value.abs()))
    if float(error.norm()) > _FAR_FROM_ARBITER * float(size.norm()):
        distance = float(error.norm()) / float(size.norm()) if bool(size.any()) else math.inf
        far = f"the reference is far from fp64_ref (relative L2 {distance:.2g})"
        return NO_EVIDENCE, [f"{item}: {far}, so it is not used"]
    return _GivenArbiter(value), []


def match(reference: Flat, candidate: Flat, checks: Checks, like: Item) -> Matching:
    """Pair leaves by path; leaves that one side lacks, or has as another kind, are different.

    `like` is the item of the whole value. All paths begin with its name, and each leaf gets a copy
    of it with the leaf's path as name.
    """
    findings: list[Finding] = []
    notes: list[str] = []
    unlike: list[str] = []
    for path, words, is_grave in _find_unlike_kinds(reference, candidate, checks):
        if is_grave:
            unlike.append(path)
        if is_grave or checks.containers:
            kind = candidate.kinds.get(path)
            is_list = kind is not None and kind.family == SEQUENCE
            findings.append(
                _structure_finding(
                    like.named(path), words, _ORDER_ADVICE if is_grave and is_list else ""
                )
            )
        else:
            notes.append(words)
    left, right = (
        {path: leaf for path, leaf in side.leaves.items() if not _is_below(path, unlike)}
        for side in (reference, candidate)
    )
    findings += _find_unlike_names(left, right, checks, like)
    pairs = [(like.named(path), leaf, right[path]) for path, leaf in left.items() if path in right]
    unmatched = [f"{path} (reference only)" for path in left if path not in right]
    unmatched += [f"{path} (candidate only)" for path in right if path not in left]
    return Matching(pairs, findings, unmatched, notes)


_ORDER_ADVICE = (
    "if the candidate's compiler always returns lists, set match_by_order=True in VerifyConfig"
)


def _find_unlike_kinds(
    reference: Flat, candidate: Flat, checks: Checks
) -> Iterator[tuple[str, str, bool]]:
    """Where the kinds of the two sides differ: the path, the difference, whether it fails."""
    grave: list[str] = []
    for path in dict.fromkeys((*reference.kinds, *candidate.kinds)):
        left, right = reference.kinds.get(path), candidate.kinds.get(path)
        if left == right or _is_below(path, grave):
            continue
        words = f"{path} is {_kind_name(candidate, path)} instead of {_kind_name(reference, path)}"
        if left is not None and right is not None:
            is_grave = left.family != right.family
        else:
            known, other = (reference, candidate) if right is None else (candidate, reference)
            if path not in other.leaves:
                if not checks.size or any(_is_below(leaf, [path]) for leaf in known.leaves):
                    continue  # its leaves, or their number, are reported by their names
                words = f"{path} is {'missing' if right is None else 'new'}"
            stands_for = isinstance(other.leaves.get(path), torch.Tensor)
            is_grave = not (known.kinds[path].is_tensor and stands_for)
        if is_grave:
            grave.append(path)
        yield path, words, is_grave


def _find_unlike_names(
    left: dict[str, Any], right: dict[str, Any], checks: Checks, like: Item
) -> list[Finding]:
    """A finding about leaves that only one side has."""
    gone = [path for path in left if path not in right]
    new = [path for path in right if path not in left]
    if not gone and not new:
        return []
    if len(left) != len(right):
        reason = f"the reference returns {len(left)} values, the candidate {len(right)}"
        return [_structure_finding(like, reason)] if checks.size else []
    theirs, ours = (enumerated(paths, _MOST_NAMED) for paths in (gone, new))
    reason = f"the reference returns {theirs}, the candidate {ours}"
    return [_structure_finding(like, reason)]


def _is_below(path: str, tops: list[str]) -> bool:
    return any(path == top or path.startswith((f"{top}.", f"{top}[")) for top in tops)


def _kind_name(side: Flat, path: str) -> str:
    if path in side.kinds:
        return side.kinds[path].name
    leaf = side.leaves.get(path)
    return "a dense tensor" if isinstance(leaf, torch.Tensor) else type(leaf).__name__


def check_pair(
    item: Item,
    reference: Any,
    candidate: Any,
    checks: Checks,
    evidence: JudgeEvidence = NO_EVIDENCE,
) -> tuple[list[Finding], list[str]]:
    """All findings about one pair of leaves, and notes."""
    findings: list[Finding] = []
    notes: list[str] = []
    about: dict[str, Any] = {"item": item}
    if isinstance(reference, torch.Tensor) and isinstance(candidate, torch.Tensor):
        about |= {"dtype": dtype_name(reference.dtype), "shape": tuple(reference.shape)}
        if reference.shape != candidate.shape:
            asked = checks.shape or reference.numel() != candidate.numel()
            reason = f"shape {list(candidate.shape)} instead of {list(reference.shape)}"
            if asked:
                return [_check_shape(about, candidate.shape, reason, evidence)], notes
            notes.append(f"{item}: {reason}; compared in memory order, as requested")
            candidate = candidate.reshape(reference.shape)
        if reference.dtype is not candidate.dtype:
            reason = f"dtype {dtype_name(candidate.dtype)} instead of {dtype_name(reference.dtype)}"
            if checks.dtype:
                findings.append(
                    Finding(**about, aspect=Aspect.DTYPE, status=Status.DIFFERENT, reason=reason)
                )
            else:
                notes.append(f"{item}: {reason}")
        if reference.device != candidate.device:
            reason = f"on {candidate.device} instead of {reference.device}"
            if checks.device:
                findings.append(
                    Finding(**about, aspect=Aspect.DEVICE, status=Status.DIFFERENT, reason=reason)
                )
            else:
                notes.append(f"{item}: {reason}")
    if checks.values:
        findings.append(_check_value(about, reference, candidate, checks, evidence))
    elif not findings:
        reason = "values not compared, as requested"
        findings.append(
            Finding(**about, aspect=Aspect.STRUCTURE, status=Status.IDENTICAL, reason=reason)
        )
    return findings, notes


def _check_shape(
    about: dict[str, Any], shape: torch.Size, reason: str, evidence: JudgeEvidence
) -> Finding:
    """A finding about another shape: a fault, unless the reference's own rounding decides it."""
    found = Finding(**about, aspect=Aspect.SHAPE, status=Status.DIFFERENT, reason=reason)
    if not evidence.may_have_shape(shape):
        return found
    fault = fault_in_float64(evidence)
    if fault:
        return msgspec.structs.replace(found, reason=f"{reason}: {fault}")
    reason = f"{reason}: the reference's own rounding decides how large it is"
    if fault is None:
        return msgspec.structs.replace(
            found,
            status=Status.UNVERIFIED,
            reason=f"{reason}, and there is no lifted run in which values can be compared",
            advice="compare the values from which the program selects these",
        )
    return msgspec.structs.replace(found, status=Status.UNSTABLE, reason=reason)


def _check_value(
    about: dict[str, Any], reference: Any, candidate: Any, checks: Checks, evidence: JudgeEvidence
) -> Finding:
    if isinstance(reference, torch.Tensor) and isinstance(candidate, torch.Tensor):
        candidate = candidate.to(reference.device)
    for checker in checks.checkers:
        judgement = checker.check(_unwrap_object(reference), _unwrap_object(candidate), evidence)
        if judgement is not None:
            return Finding(
                **about,
                aspect=Aspect.VALUE,
                status=judgement.status,
                reason=judgement.reason,
                advice=judgement.advice,
                metrics=judgement.metrics,
                native=judgement.native,
                lifted=judgement.lifted,
            )
    reason = f"no value checker accepts a {type(reference).__name__}"
    return Finding(
        **about,
        aspect=Aspect.VALUE,
        status=Status.UNVERIFIED,
        reason=reason,
        advice="end the list of checkers with AutomaticValueChecker(), which accepts everything",
    )


def _unwrap_object(leaf: Any) -> Any:
    """The value for a checker: the object inside, unless it is a tensor."""
    is_object = isinstance(leaf, Opaque) and not isinstance(leaf.value, torch.Tensor)
    return leaf.value if is_object else leaf


def _structure_finding(item: Item, reason: str, advice: str = "") -> Finding:
    return Finding(
        item=item, aspect=Aspect.STRUCTURE, status=Status.DIFFERENT, reason=reason, advice=advice
    )
