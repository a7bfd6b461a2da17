"""Match the leaves of two results and check each pair: structure first, then values."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING, Any

import torch

from paritas.numerics.checkers import NO_EVIDENCE, AutomaticValueChecker, ValueChecker
from paritas.numerics.findings import Aspect, Coverage, Finding, Status, Verdict
from paritas.numerics.trees import containers, leaves

if TYPE_CHECKING:
    from paritas.numerics.evidence import Evidence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checks:
    """What is compared of a pair.

    Attributes:
        size: the number of leaves.
        dtype: dtypes.
        shape: shapes.
        values: values.
        device: devices; otherwise a difference is only noted.
        containers: the classes of the containers; otherwise a difference is only noted.
        checkers: value checkers in order.
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
    """Pairs of leaves, and what has no partner."""

    pairs: list[tuple[str, Any, Any]]
    findings: list[Finding]
    unmatched: list[str]
    notes: list[str]


def judge(reference: Any, candidate: Any, *, value_checker: ValueChecker | None = None) -> Verdict:
    """Compare two values or nested containers of values, knowing nothing of their programs.

    Without a program there is no arbiter and no measured noise: floats that differ are judged by
    their dtype alone, which is weak; the findings say so.
    """
    checks = Checks(checkers=(value_checker or AutomaticValueChecker(),))
    matching = match(
        dict(leaves(reference, "value")),
        dict(leaves(candidate, "value")),
        dict(containers(reference, "value")),
        dict(containers(candidate, "value")),
        checks,
    )
    findings, notes = list(matching.findings), list(matching.notes)
    for path, left, right in matching.pairs:
        found, noted = check_pair(path, as_plain(left), as_plain(right), checks)
        findings += found
        notes += noted
    coverage = Coverage(compared=len(matching.pairs), unmatched=tuple(matching.unmatched))
    return Verdict(findings=tuple(findings), coverage=coverage, notes=tuple(notes))


def match(
    reference: dict[str, Any],
    candidate: dict[str, Any],
    reference_containers: dict[str, str],
    candidate_containers: dict[str, str],
    checks: Checks,
) -> Matching:
    """Pair leaves by path, or by order where the two name them differently."""
    findings: list[Finding] = []
    notes: list[str] = []
    root = re.split(r"[.\[]", next(iter([*reference, *candidate]), "output"))[0]
    if reference_containers != candidate_containers:
        differ = _container_difference(reference_containers, candidate_containers)
        if checks.containers:
            findings.append(_structure(root, differ))
        else:
            notes.append(differ)
    if len(reference) != len(candidate) and checks.size:
        left, right = len(reference), len(candidate)
        reason = f"the reference returns {left} values, the candidate {right}"
        findings.append(_structure(root, reason))
    if reference.keys() == candidate.keys():
        pairs = [(path, value, candidate[path]) for path, value in reference.items()]
        return Matching(pairs, findings, [], notes)
    common = reference.keys() & candidate.keys()
    if len(reference) == len(candidate) and not common:
        notes.append("outputs are matched by order: the two sides name them differently")
        ordered = zip(reference.items(), candidate.values(), strict=True)
        return Matching([(p, left, right) for (p, left), right in ordered], findings, [], notes)
    if len(reference) == len(candidate) and checks.size:
        findings.append(_structure(root, "the two sides name their values differently"))
    pairs = [(path, value, candidate[path]) for path, value in reference.items() if path in common]
    unmatched = [f"{path} (reference only)" for path in reference if path not in common]
    unmatched += [f"{path} (candidate only)" for path in candidate if path not in common]
    return Matching(pairs, findings, unmatched, notes)


def check_pair(
    path: str, reference: Any, candidate: Any, checks: Checks, evidence: Evidence = NO_EVIDENCE
) -> tuple[list[Finding], list[str]]:
    """Every finding about one pair of leaves, and what is worth a note."""
    findings: list[Finding] = []
    notes: list[str] = []
    about: dict[str, Any] = {"path": path}
    if isinstance(reference, torch.Tensor) and isinstance(candidate, torch.Tensor):
        about |= {"dtype": _name(reference.dtype), "shape": tuple(reference.shape)}
        if reference.shape != candidate.shape:
            asked = checks.shape or reference.numel() != candidate.numel()
            reason = f"shape {list(candidate.shape)} instead of {list(reference.shape)}"
            if asked:
                found = Finding(
                    **about, aspect=Aspect.SHAPE, status=Status.DIFFERENT, reason=reason
                )
                return [found], notes
            notes.append(f"{path}: {reason}; compared in order, as asked")
            candidate = candidate.reshape(reference.shape)
        if reference.dtype is not candidate.dtype:
            reason = f"dtype {_name(candidate.dtype)} instead of {_name(reference.dtype)}"
            if checks.dtype:
                findings.append(
                    Finding(**about, aspect=Aspect.DTYPE, status=Status.DIFFERENT, reason=reason)
                )
            else:
                notes.append(f"{path}: {reason}")
        if reference.device != candidate.device:
            reason = f"on {candidate.device} instead of {reference.device}"
            if checks.device:
                findings.append(
                    Finding(**about, aspect=Aspect.DEVICE, status=Status.DIFFERENT, reason=reason)
                )
            else:
                notes.append(f"{path}: {reason}")
    if checks.values:
        findings.append(_check_value(about, reference, candidate, checks, evidence))
    elif not findings:
        reason = "values not compared, as asked"
        findings.append(
            Finding(**about, aspect=Aspect.STRUCTURE, status=Status.IDENTICAL, reason=reason)
        )
    return findings, notes


def as_plain(leaf: Any) -> Any:
    """A leaf as a strided tensor where it is a number or an exotic layout; else as it is.

    Python floats become float64 scalars, so that they are judged like any other value.
    """
    if isinstance(leaf, float | complex):
        wide = torch.complex128 if isinstance(leaf, complex) else torch.float64
        return torch.tensor(leaf, dtype=wide, device="cpu")
    if not isinstance(leaf, torch.Tensor):
        return leaf
    tensor = leaf.detach()
    if hasattr(tensor, "full_tensor"):  # a distributed tensor: all of it
        tensor = tensor.full_tensor()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.is_nested:
        tensor = torch.nested.to_padded_tensor(tensor, math.nan)
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.resolve_conj().resolve_neg()


def _check_value(
    about: dict[str, Any], reference: Any, candidate: Any, checks: Checks, evidence: Evidence
) -> Finding:
    if isinstance(reference, torch.Tensor) and isinstance(candidate, torch.Tensor):
        candidate = candidate.to(reference.device)
    for checker in checks.checkers:
        judgement = checker.check(reference, candidate, evidence)
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
    reason = f"no value checker claims a {type(reference).__name__}"
    return Finding(
        **about,
        aspect=Aspect.VALUE,
        status=Status.UNVERIFIED,
        reason=reason,
        advice="end the list of checkers with AutomaticValueChecker(), which claims everything",
    )


def _structure(root: str, reason: str) -> Finding:
    return Finding(path=root, aspect=Aspect.STRUCTURE, status=Status.DIFFERENT, reason=reason)


def _container_difference(reference: dict[str, str], candidate: dict[str, str]) -> str:
    for path in [*reference, *candidate]:
        left, right = reference.get(path, "a value"), candidate.get(path, "a value")
        if left != right:
            return f"{path} is {right} instead of {left}"
    return "the containers come in another order"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
