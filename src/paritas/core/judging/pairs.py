"""Judge a pair of values: gates, then the general rule, then the rules of a question, then why.

This is the only place where a value gets its status. A question that knows more than the general
rule gives it a gate, which settles a pair early, or a rule, which rules on what was found.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch

from paritas.core.numerics.automatic import fault_in_float64
from paritas.core.numerics.bits import dtype_name
from paritas.core.numerics.checkers import NO_EVIDENCE, AutomaticValueChecker, ValueChecker
from paritas.core.numerics.contents import Opaque
from paritas.core.results.findings import Aspect, Finding, Status, agreement, mismatch, unverified

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from paritas.core.diagnosis.case import Context
    from paritas.core.judging.failures import Explainer
    from paritas.core.numerics.judge_evidence import JudgeEvidence
    from paritas.core.results.items import Item

    PairGate = Callable[["Pair"], "Ruling | None"]
    FindingRule = Callable[[Finding], "Ruling | None"]


CaseT = TypeVar("CaseT")
# A finding, or a row of a table that has a finding's status and reason.
JudgedT = TypeVar("JudgedT", bound=msgspec.Struct)


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """Two values that should be the same.

    Attributes:
        item: what they are, as findings name it.
        evidence: further runs of both sides.
        context: tells a diagnosis where the values come from; called only if they differ.
    """

    item: Item
    reference: Any
    candidate: Any
    evidence: JudgeEvidence = NO_EVIDENCE
    context: Callable[[], Context | None] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Ruling:
    """What a gate makes of a pair, or a rule of a finding.

    Attributes:
        reason: None keeps the reason of the finding.
        about: other fields of the finding.
    """

    status: Status
    reason: str | None = None
    about: dict[str, Any] = dataclasses.field(default_factory=dict)


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


ALL_CHECKS = Checks()
# For a ruling that leaves out which dtype and shape the reference has.
UNTYPED: dict[str, Any] = {"dtype": None, "shape": None}


def judge_pair(
    pair: Pair,
    checks: Checks = ALL_CHECKS,
    *,
    gates: Iterable[PairGate] = (),
    rules: Iterable[FindingRule] = (),
    explainer: Explainer | None = None,
) -> tuple[list[Finding], list[str]]:
    """All findings about one pair of values, and notes.

    Args:
        gates: the first that gives a ruling settles the pair; nothing else is compared.
        rules: they rule on each finding, one after the other.
        explainer: diagnoses the values that fail.
    """
    notes: list[str] = []

    def check(pair: Pair) -> list[Finding]:
        findings, new_notes = _check_pair(pair, checks)
        notes.extend(new_notes)
        return findings

    findings = judge_case(pair, gates, settle_pair, check, rules)
    return explain_pair(findings, pair, explainer), notes


def judge_case(
    case: CaseT,
    gates: Iterable[Callable[[CaseT], Ruling | None]],
    settle: Callable[[CaseT, Ruling], JudgedT],
    check: Callable[[CaseT], Iterable[JudgedT]],
    rules: Iterable[Callable[[JudgedT], Ruling | None]] = (),
) -> list[JudgedT]:
    """What is found about anything that can be judged: a `Pair`, or two values yet to be read.

    Args:
        gates: the first that gives a ruling settles the case; nothing else is looked at.
        settle: what is found if a gate settles the case.
        check: what is found otherwise.
        rules: they rule on what was found, one after the other.
    """
    ruling = next((ruling for gate in gates if (ruling := gate(case)) is not None), None)
    return reconsider(check(case) if ruling is None else [settle(case, ruling)], *rules)


def explain_pair(findings: list[Finding], pair: Pair, explainer: Explainer | None) -> list[Finding]:
    """The findings about a pair, with a diagnosis of what fails."""
    if explainer is None or all(finding.status.passes() for finding in findings):
        return findings
    context = None if pair.context is None else pair.context()
    return explainer.explain(findings, pair.reference, pair.candidate, pair.evidence, context)


def settle_pair(pair: Pair, ruling: Ruling) -> Finding:
    """The finding about a pair whose ruling is known without a look at its values."""
    dtype = shape = None
    for value in (pair.candidate, pair.reference):  # the reference's, if it is a tensor
        if isinstance(value, torch.Tensor):
            dtype, shape = dtype_name(value.dtype), tuple(value.shape)
    if not ruling.reason and not ruling.about:
        return _plain_finding(pair.item, ruling.status, dtype, shape)
    about = {"aspect": Aspect.VALUE, "dtype": dtype, "shape": shape} | ruling.about
    return Finding(item=pair.item, status=ruling.status, reason=ruling.reason or "", **about)


def reconsider(
    findings: Iterable[JudgedT], *rules: Callable[[JudgedT], Ruling | None]
) -> list[JudgedT]:
    """The findings under rules that may need more than was known when they were judged."""
    for rule in rules:
        findings = [
            finding if (ruling := rule(finding)) is None else apply_ruling(finding, ruling)
            for finding in findings
        ]
    return list(findings)


def sketch_rule(full_value: torch.Tensor, words: str, **about: Any) -> FindingRule:
    """A rule for random sums of a large tensor: what was found is about the tensor itself.

    The sums have no rows and columns in which a pattern could be seen: nothing explains them.
    """
    about |= {"shape": tuple(full_value.shape), "metrics": None}

    def rule_on_sketch(finding: Finding) -> Ruling:
        reason = finding.reason
        if not finding.status.passes():
            reason = f"{reason} ({words})"
        return Ruling(finding.status, reason, about)

    return rule_on_sketch


def apply_ruling(judged: JudgedT, ruling: Ruling) -> JudgedT:
    """A finding or a row under a ruling."""
    about = ruling.about if ruling.reason is None else {"reason": ruling.reason} | ruling.about
    return msgspec.structs.replace(judged, status=ruling.status, **about)


# --- Gates ----------------------------------------------------------------------------------------

# The number of findings kept for reuse: a guard settles the same values in every call.
_MOST_FINDINGS = 4096


@functools.lru_cache(maxsize=_MOST_FINDINGS)
def _plain_finding(
    item: Item, status: Status, dtype: str | None, shape: tuple[int, ...] | None
) -> Finding:
    return Finding(item=item, aspect=Aspect.VALUE, status=status, dtype=dtype, shape=shape)


# --- The general rule: structure first, then values -----------------------------------------------


def _check_pair(pair: Pair, checks: Checks) -> tuple[list[Finding], list[str]]:
    item, reference, candidate = pair.item, pair.reference, pair.candidate
    findings: list[Finding] = []
    notes: list[str] = []
    about: dict[str, Any] = {}
    if isinstance(reference, torch.Tensor) and isinstance(candidate, torch.Tensor):
        about = {"dtype": dtype_name(reference.dtype), "shape": tuple(reference.shape)}
        if reference.shape != candidate.shape:
            is_checked = checks.shape or reference.numel() != candidate.numel()
            reason = f"shape {list(candidate.shape)} instead of {list(reference.shape)}"
            if is_checked:
                finding = mismatch(item, Aspect.SHAPE, reason, **about)
                return reconsider([finding], lambda _: _rule_on_shape(pair, reason)), notes
            notes.append(f"{item}: {reason}; compared in memory order, as requested")
            candidate = candidate.reshape(reference.shape)
        if reference.dtype is not candidate.dtype:
            reason = f"dtype {dtype_name(candidate.dtype)} instead of {dtype_name(reference.dtype)}"
            if checks.dtype:
                findings.append(mismatch(item, Aspect.DTYPE, reason, **about))
            else:
                notes.append(f"{item}: {reason}")
        if reference.device != candidate.device:
            reason = f"on {candidate.device} instead of {reference.device}"
            if checks.device:
                findings.append(mismatch(item, Aspect.DEVICE, reason, **about))
            else:
                notes.append(f"{item}: {reason}")
        candidate = candidate.to(reference.device)
    if checks.values:
        findings.append(_check_value(pair, candidate, checks, about))
    elif not findings:
        reason = "values not compared, as requested"
        findings.append(agreement(item, Aspect.STRUCTURE, reason, **about))
    return findings, notes


def _rule_on_shape(pair: Pair, reason: str) -> Ruling | None:
    """Another shape is a fault, unless the reference's own rounding decides it."""
    if not pair.evidence.may_have_shape(pair.candidate.shape):
        return None
    fault = fault_in_float64(pair.evidence)
    if fault:
        return Ruling(Status.DIFFERENT, f"{reason}: {fault}")
    reason = f"{reason}: the reference's own rounding decides how large it is"
    if fault is None:
        reason += ", and there is no lifted run in which values can be compared"
        advice = "compare the values from which the program selects these"
        return Ruling(Status.UNVERIFIED, reason, {"advice": advice})
    return Ruling(Status.UNSTABLE, reason)


def _check_value(pair: Pair, candidate: Any, checks: Checks, about: dict[str, Any]) -> Finding:
    for checker in checks.checkers:
        judgement = checker.check(
            _unwrap_object(pair.reference), _unwrap_object(candidate), pair.evidence
        )
        if judgement is not None:
            return Finding(
                item=pair.item,
                aspect=Aspect.VALUE,
                status=judgement.status,
                reason=judgement.reason,
                advice=judgement.advice,
                metrics=judgement.metrics,
                native=judgement.native,
                lifted=judgement.lifted,
                **about,
            )
    reason = f"no value checker accepts a {type(pair.reference).__name__}"
    advice = "end the list of checkers with AutomaticValueChecker(), which accepts everything"
    return unverified(pair.item, reason, advice, Aspect.VALUE, **about)


def _unwrap_object(leaf: Any) -> Any:
    """The value for a checker: the object inside, unless it is a tensor."""
    is_object = isinstance(leaf, Opaque) and not isinstance(leaf.value, torch.Tensor)
    return leaf.value if is_object else leaf
