"""Experiments with results that are sums of terms, or the largest of some elements."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from paritas.core.diagnosis import effort
from paritas.core.diagnosis.linear_terms import are_same, read_terms
from paritas.core.diagnosis.term_differences import TermName, name_difference
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paritas.core.diagnosis.linear_terms import Terms
    from paritas.core.diagnosis.place_runs import PlaceRuns
    from paritas.core.time_limit import TimeLimit

# Operators whose sums have the weights of another operand: see `patterns.linear_maps`.
_PRODUCTS = re.compile(r"^(linear|bilinear|t?mm|bmm|addmm|baddbmm|matmul|einsum|conv.*|mv|dot"
                       r"|mul|div|.*attention.*|.*sdpa.*)$|conv.*backward")  # fmt: skip
_REDUCING = re.compile(r"^(amax|amin|max|min|prod|median|nanmedian|mode|kthvalue|logsumexp|norm"
                       r"|linalg_vector_norm|std|var|cum(prod|max|min)|logcumsumexp"
                       r"|.*max_pool\dd.*|lp_pool\dd)$")  # fmt: skip
_SORTING = re.compile(r"^(sort|msort|topk)$")
_SEED = 1
# The time for all operands, of this thread.
_SECONDS = 2.0


def find_other_terms(
    runs: PlaceRuns, names: Sequence[str], operator: str
) -> tuple[PatternKind, str] | None:
    """The kind and the sentence, if a result consists of other terms; None if it has no name."""
    if _PRODUCTS.match(operator):
        return None
    limit = effort.limit_search(_SECONDS)
    findings: list[TermName | None] = []  # of the operands whose terms differ
    for number, name in enumerate(names):
        right, wrong = _both_terms(runs, number, runs.operands, limit)
        finding = None
        if right is not None and wrong is not None:
            finding = _other_terms(runs, number, (right, wrong), name, limit)
        elif wrong is not None:
            finding = _linear_instead(wrong, name, operator, len(names))
        elif right is None:
            finding = _other_members(runs, number, name, operator)
        if finding is not None and finding.ratios is None and not findings:
            return finding.kind, finding.words
        is_same = right is None or wrong is None or right.is_same_as(wrong)
        if finding is not None or not is_same:
            findings.append(finding)
    # Another factor of one operand explains nothing if another one differs in another way.
    kinds = {None if term_finding is None else term_finding.kind for term_finding in findings}
    first = findings[0] if len(kinds) == 1 else None
    return None if first is None else (first.kind, first.words)


def _both_terms(
    runs: PlaceRuns, number: int, operands: Sequence[Tensor], limit: TimeLimit
) -> tuple[Terms | None, Terms | None]:
    right = read_terms(runs, number, operands, limit, of_candidate=False)
    return right, read_terms(runs, number, operands, limit, of_candidate=True)


def _other_terms(
    runs: PlaceRuns, number: int, pair: tuple[Terms, Terms], name: str, limit: TimeLimit
) -> TermName | None:
    """What holds for these values of the other operands and for others."""
    right, wrong = pair
    finding = name_difference(right, wrong, name)
    if len(runs.operands) == 1:
        return finding or _name_rest(right, wrong, name)
    if finding is None:
        return _name_rest_of_all(runs, number, pair, name, limit)
    others = runs.vary(_SEED)
    again = _both_terms(runs, number, others, limit)
    if again[0] is None or again[1] is None:
        return None
    # Factors that are values of another operand are compared by those who know what it is.
    if not again[0].is_same_as(right) and not are_same(right.factors, right.factors[0]):
        return None
    second = name_difference(again[0], again[1], name)
    if second is None or second.kind is not finding.kind:
        return None
    if finding.ratios is not None and not _have_same_ratios(finding, second):
        return None
    return finding


def _have_same_ratios(finding: TermName, second: TermName) -> bool:
    left, right = finding.ratios, second.ratios
    if left is None or right is None:
        return False
    if len(left) == len(right):
        return are_same(left, right)
    return are_same(left, left[0]) and are_same(right, left[0])


def _name_rest_of_all(
    runs: PlaceRuns, number: int, pair: tuple[Terms, Terms], name: str, limit: TimeLimit
) -> TermName | None:
    """A number that is added whatever the other operands are."""
    rest = _name_rest(*pair, name)
    if rest is None:
        return None
    others = runs.vary(_SEED)
    right, wrong = _both_terms(runs, number, others, limit)
    if right is None or wrong is None:
        return None
    return rest if _name_rest(right, wrong, name) == rest else None


def _name_rest(right: Terms, wrong: Terms, name: str) -> TermName | None:
    """A number that is added to the right terms."""
    added = wrong.rest - right.rest
    if not wrong.is_same_as(right) or not float(added.abs().max()):
        return None
    if not are_same(added, added[0]):
        return None
    words = f"{float(added[0]):.4g} is added to what is computed from {name}"
    return TermName(PatternKind.OFFSET, words)


# --- A sum where something else is asked for ------------------------------------------------------


def _linear_instead(wrong: Terms, name: str, operator: str, operands: int) -> TermName | None:
    """The candidate adds up elements where the operator picks or multiplies them."""
    reduces, sorts = _REDUCING.match(operator), _SORTING.match(operator)
    if not (reduces or sorts) or operands > 1 or not len(wrong.keys):
        return None
    counts = wrong.counts[wrong.rows].double()
    most = int(counts.max())
    if most == 1 and are_same(wrong.factors, 1.0):
        words = f"each result is always the same element of {name}, whatever the values are"
        return TermName(PatternKind.WRONG_INDEX if sorts else PatternKind.WRONG_REDUCTION, words)
    if sorts:
        return None
    words = f"a sum of up to {most} elements of {name} with factors"
    if are_same(wrong.factors, 1.0):
        words = f"the sum of up to {most} elements of {name}"
    elif wrong.asked is None and are_same(wrong.factors, 1 / counts):
        words = f"the mean of up to {most} elements of {name}"
    return TermName(PatternKind.WRONG_REDUCTION, f"{words} instead of {operator}")


# --- The largest of other elements ----------------------------------------------------------------

_LARGEST = re.compile(r"^(amax|max|cummax|.*max_pool\dd.*)$")
_SMALLEST = re.compile(r"^(amin|min|cummin)$")
_MOST_ASKED = 256


def _other_members(runs: PlaceRuns, number: int, name: str, operator: str) -> TermName | None:
    """The largest of fewer, more or other elements: one that is larger than all shows up."""
    sign = 1.0 if _LARGEST.match(operator) else -1.0
    if not (_LARGEST.match(operator) or _SMALLEST.match(operator)):
        return None
    operand = runs.operands[number]
    if not operand.is_floating_point() or len(runs.operands) > 1:
        return None
    sides: list[list[Tensor]] = [[], []]
    far = 16 * (1 + operand.detach().abs().max())
    for column in _spread_indices(operand.numel()):
        value = operand.detach().clone(memory_format=torch.contiguous_format)
        value.view(-1)[column] = sign * far
        for side, program in zip(sides, (runs.reference, runs.candidate), strict=True):
            result = program([value])
            if result is None:
                return None
            side.append((result == value.view(-1)[column]).flatten())
    right, wrong = (torch.stack(side) for side in sides)
    return _name_members(right, wrong, name, "largest" if sign > 0 else "smallest")


def _spread_indices(count: int) -> list[int]:
    if count <= _MOST_ASKED:
        return list(range(count))
    draw = torch.Generator().manual_seed(0)
    return sorted(torch.randperm(count, generator=draw)[:_MOST_ASKED].tolist())


def _name_members(right: Tensor, wrong: Tensor, name: str, which: str) -> TermName | None:
    lost, more = right & ~wrong, wrong & ~right
    if not bool(wrong.any()) or not (bool(lost.any()) or bool(more.any())):
        return None
    if bool(lost.any()) and bool(more.any()):
        words = f"the {which} of other elements of {name}"
        return TermName(PatternKind.WRONG_INDEX, words)
    much = "fewer" if bool(lost.any()) else "more"
    share = f"{int(wrong.sum())} instead of {int(right.sum())} of those that were tried"
    words = f"the {which} of {much} elements of {name}: {share} count"
    return TermName(PatternKind.WRONG_REDUCTION, words)
