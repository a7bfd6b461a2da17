"""What the ranks hold against what they should hold: reductions missing, doubled or misdirected.

`explain_by_parts` looks at one tensor and each rank's part of it, within the noise the judge
measured. `propose_collectives` looks at a value of a training step on all ranks, which usually ran
in float64: each equation between the ranks' values and the reference predicts what a rank holds,
and is weighed like every other prediction.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

import msgspec
import torch

from paritas.core.diagnosis.case import (
    Case,
    Extent,
    first_supported,
    near,
    roundoff,
    supported_pattern,
    weigh,
    widen,
)
from paritas.core.numerics.criterion import RMS_Z, rms
from paritas.core.numerics.gates import Near
from paritas.core.results.findings import Pattern, PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from paritas.core.diagnosis.case import Context


# --- Sums of ranks' parts, within the measured noise ----------------------------------------------

_NEARLY_ALL = 0.95
# The ranks' parts may be summed in their own dtype, with this many more roundings.
_ADDED_UP = 4.0
_MUCH_NEARER = 0.25


def explain_by_parts(case: Case) -> list[Pattern]:
    """Parts whose sum is the right value, and one of which, or a wrong sum, is the candidate."""
    parts = {rank: widen(value) for rank, value in case.context.held.items()}
    if len(parts) < 2 or any(tuple(part.shape) != case.shape for part in parts.values()):  # noqa: PLR2004
        return []
    total = torch.stack(list(parts.values())).sum(dim=0)
    count = len(parts)
    if all(_is_right(case, part) for part in parts.values()):
        sentence = (
            f"reduced once too often: {count} ranks already held the right value, and were summed"
        )
        kind = PatternKind.DOUBLED_REDUCTION
        return first_supported([_supported_sum(case, total, kind, sentence, ranks=count)])
    for name, expected in (("sum", total), ("mean", total / count)):
        if _is_right(case, expected):
            return first_supported(
                itertools.chain(_one_part(case, parts, name), _wrong_sum(case, parts, total, name))
            )
    return []


def _supported_sum(
    case: Case, value: Tensor, kind: PatternKind, sentence: str, **evidence: int
) -> Pattern | None:
    """The pattern of a sum of parts; each part is rounded, so the sum is no more accurate."""
    parts = list(case.context.held.values())
    size = torch.stack([widen(part).abs() for part in parts]).sum(0)
    scale = torch.where(size > 0, value.abs() / size, 0.0).clamp(min=1.0)
    noise = max(roundoff(tensor) for tensor in (case.candidate, *parts)) * size * scale
    cost = math.log2(4 * len(parts))
    return supported_pattern(case, value, kind, sentence, cost=cost, noise=noise, evidence=evidence)


def _one_part(case: Case, parts: Mapping[int, Tensor], name: str) -> Iterator[Pattern | None]:
    count = len(parts)
    for rank, part in parts.items():
        text = (
            f"never reduced: this is the part of rank {rank} alone, and the {name} of the "
            f"{count} ranks' parts is right"
        )
        variants = [(part, text)]
        if name == "mean":
            variants.append((part / count, f"{text} (divided by {count} already)"))
        for value, sentence in variants:
            kind = PatternKind.PARTIAL_SUM
            yield _supported_sum(case, value, kind, sentence, ranks=count, rank=rank)


def _wrong_sum(
    case: Case, parts: Mapping[int, Tensor], total: Tensor, name: str
) -> Iterator[Pattern | None]:
    """Not all parts were summed, or one more than once."""
    count = len(parts)
    scale = 1.0 if name == "sum" else 1.0 / count
    for rank, part in parts.items():
        for sign, sentence in (
            (-1, f"the part of rank {rank} is missing from the {name} over {count} ranks"),
            (1, f"the part of rank {rank} is in the {name} over {count} ranks twice"),
        ):
            value = (total + sign * part) * scale
            kind = PatternKind.PARTIAL_SUM
            yield _supported_sum(case, value, kind, sentence, ranks=count, rank=rank)
    if name == "sum":
        sentence = f"reduced twice: {count} times the sum of the {count} ranks' parts"
        kind = PatternKind.DOUBLED_REDUCTION
        yield _supported_sum(case, total * count, kind, sentence, ranks=count)


def _is_right(case: Case, value: Tensor) -> bool:
    """Whether a value is within the noise, and much closer than the candidate."""
    fits = near(value, case.right, case.allowed, slack=_ADDED_UP)
    ratio = float((value - case.right).square().mean()) / float(case.error.square().mean())
    return float(fits.double().mean()) >= _NEARLY_ALL and ratio <= _MUCH_NEARER**2


# --- Equations between what ranks hold and what the reference has ---------------------------------

# A factor fitted to a handful of numbers fits anything, so there it must be a size of the mesh.
_FEW = 4
_MOST_PARTS = 8
# A count that stands still shows one bit. But a skipped update is by far the most likely fault of a
# state, which is worth more than the bits that chance could give.
_COST_OF_STALE_COUNT = -8.0
_STATE = frozenset({"parameter", "buffer"})
_NEVER_TERMS = frozenset({"parameter", "buffer", "initial", "loss"})


def factor_of(value: Tensor, expected: Tensor, near: Near) -> float | None:
    """K where the value is k times the expected one in every element; None if it is not."""
    if value.shape != expected.shape or not value.numel():
        return None
    value, expected = value.double(), expected.double()
    square = float(expected.square().sum())
    if not square or not bool(torch.isfinite(value).all()):
        return None
    factor = float((value * expected).sum()) / square
    if abs(factor) < near.reach or abs(factor - 1) < 10 * near.reach:
        return None
    return factor if near(value, expected * factor) else None


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a rank would hold, were the pattern right.

    Attributes:
        values: of the tensor that it holds.
        size: the largest number that went into them, if that is not the result.
        parameters: how many numbers were fitted to make them.
        cost: log2 of how many predictions were tried.
    """

    values: Tensor
    size: float = 0.0
    parameters: float = 0.0
    cost: float = 0.0


def claim(
    case: Case,
    candidate: Tensor,
    prediction: Prediction,
    kind: PatternKind,
    sentence: str,
    evidence: Mapping[str, int | float | str] | None = None,
) -> list[Pattern]:
    """The pattern, if the prediction of what a rank holds is right in every element.

    Args:
        candidate: what the rank holds.
    """
    # The rms of what is left may be half the reach, one element 2.4 times the reach.
    reach = Near(case.context.unit).reach / (2 * RMS_Z)
    right, predicted = widen(case.reference), widen(prediction.values)
    noise, predicted_noise = (
        reach * (tensor.abs() + rms(tensor) + prediction.size) for tensor in (right, predicted)
    )
    scored = Case(candidate, case.reference, noise=noise)
    weight = weigh(
        scored,
        predicted,
        parameters=prediction.parameters,
        cost=prediction.cost,
        noise=predicted_noise,
        extent=Extent.ALL,
    )
    if weight is None or weight.explained < 1 or weight.spoiled:
        return []
    return [weight.pattern(kind, sentence, evidence)]


def propose_collectives(case: Case) -> list[Pattern]:
    """What the ranks did with a value of a training step; empty if no equation holds.

    If the candidate has another shape than the reference, the ranks hold no value together.
    """
    if not case.context.item:
        return []
    near = Near(case.context.unit)
    patterns = _stale(case, near)
    if patterns or not case.reference.is_floating_point():
        return patterns
    patterns = [pattern for propose in _EQUATIONS for pattern in propose(case, near)]
    for name, term in () if patterns else reversed(list(case.context.added.items())):
        rest = _without_term(case, term, near)
        if rest is None:
            continue
        for pattern in itertools.chain(*(propose(rest, near) for propose in _OF_A_REST)):
            sentence = f"apart from {name}, {pattern.sentence}"
            evidence = {**pattern.evidence, "apart from": name}
            patterns.append(msgspec.structs.replace(pattern, sentence=sentence, evidence=evidence))
        if patterns:
            break
    return patterns


def _without_term(case: Case, term: Tensor, near: Near) -> Case | None:
    """The case less a term that is added at the end; None if the values do not contain it."""
    context = case.context
    values = [case.reference, *context.held.values()]
    if _has_whole(case):
        values.append(case.candidate)
    fits = {tuple(value.shape[-term.dim() :]) == tuple(term.shape) for value in values}
    if fits != {True} or near(case.reference, term):
        return None
    rank_values = {rank: value - term for rank, value in context.held.items()}
    return dataclasses.replace(
        case,
        candidate=case.candidate - term if _has_whole(case) else case.candidate,
        reference=case.reference - term,
        context=dataclasses.replace(context, held=rank_values),
    )


def _has_whole(case: Case) -> bool:
    return case.candidate.shape == case.reference.shape


def _zeros(case: Case, _near: Near) -> list[Pattern]:
    if not _has_whole(case) or bool(case.candidate.any()):
        return []
    sentence = "all zero: nothing arrives there"
    zeros = torch.zeros_like(case.reference)
    return claim(case, case.candidate, Prediction(zeros), PatternKind.ZEROS, sentence)


def _stale(case: Case, near: Near) -> list[Pattern]:
    """All ranks, or some of them, still hold what the reference had before."""
    if case.context.item not in _STATE:
        return []
    holders = case.context.held
    for when, earlier in case.context.earlier.items():
        if torch.equal(earlier, case.reference):
            continue
        late = [rank for rank, value in holders.items() if near(value, earlier)]
        is_everywhere = near(case.candidate, earlier)
        if not late and not is_everywhere:
            continue
        everywhere = is_everywhere and len(late) in {0, len(holders)}
        who = "" if everywhere else f" on rank{'s' * (len(late) > 1)} {_join(late)}"
        return claim(
            case,
            case.candidate if is_everywhere else holders[late[0]],
            Prediction(
                earlier,
                cost=_COST_OF_STALE_COUNT
                if case.is_exact
                else math.log2(len(case.context.earlier)),
            ),
            PatternKind.STALE,
            f"it is still {when}{who}: never updated there",
            {"equals": when, "ranks": _join(late) if late else "all"},
        )
    return []


def _find_unreduced_terms(case: Case, near: Near) -> list[Pattern]:
    """The ranks' values are terms, and each rank should hold their sum or mean."""
    values = list(case.context.held.values())
    if not _are_terms(case) or all(near(value, values[0]) for value in values[1:]):
        return []
    along = _differing_axes(case, near)
    evidence: dict[str, int | str] = {"collective": "all_reduce", "ranks": len(values)}
    remark = ": each rank has that of its own samples" if case.context.splits_samples else ""
    claim_terms = _claim_terms(
        case,
        values,
        1,
        "the ranks' values add up to the reference: they were never reduced, an "
        f"all-reduce (sum){along} is missing",
        {**evidence, "operator": "sum"},
    )
    return claim_terms or _claim_terms(
        case,
        values,
        len(values),
        f"the ranks' values average to the reference{remark}; "
        f"an all-reduce (mean){along} is missing",
        {**evidence, "operator": "mean"},
    )


def _claim_terms(
    case: Case, terms: list[Tensor], times: int, sentence: str, evidence: Mapping[str, int | str]
) -> list[Pattern]:
    """That the terms add up to so many times the reference: each is what the others leave of it."""
    stacked = torch.stack([widen(term) for term in terms])
    right = widen(case.reference)
    farthest = max(range(len(terms)), key=lambda n: float((stacked[n] - right).abs().sum()))
    left = times * right - (stacked.sum(dim=0) - stacked[farthest])
    size = float(stacked.abs().max()) if stacked.numel() else 0.0
    kind = PatternKind.MISSING_REDUCTION
    return claim(
        case, terms[farthest], Prediction(left, size=size, cost=1.0), kind, sentence, evidence
    )


def _some_ranks_only(case: Case, near: Near) -> list[Pattern]:
    """Ranks form groups that hold the same value, and the groups' values add up."""
    rank_values = case.context.held
    if not _are_terms(case):
        return []
    groups: list[list[int]] = []
    for rank, value in rank_values.items():
        group = next((g for g in groups if near(value, rank_values[g[0]])), None)
        if group is None:
            groups.append([rank])
        else:
            group.append(rank)
    if not 1 < len(groups) < len(rank_values):
        return []
    if any(factor_of(rank_values[group[0]], case.reference, near) is not None for group in groups):
        return []  # shares of the whole, not sums of some terms
    listed = " and ".join(f"({_join(group)})" for group in groups)
    return _claim_terms(
        case,
        [rank_values[group[0]] for group in groups],
        1,
        f"ranks {listed} each hold one sum, and these add up to the reference: the all-reduce ran "
        "within these groups, not over all ranks",
        {"collective": "all_reduce", "operator": "sum", "groups": listed},
    )


def _wrong_axis(case: Case, near: Near) -> list[Pattern]:
    """Summed along another axis of the mesh than the one along which the terms lie."""
    context = case.context
    mesh, wholes = context.world, context.wholes
    if len(wholes) != context.ranks or len(mesh) < 2:  # noqa: PLR2004
        return []
    rank_values = {rank: value.double() for rank, value in context.everywhere.items()}
    if rank_values.keys() != wholes.keys():
        return []
    if any(rank_values[rank].shape != wholes[rank].shape for rank in wholes):
        return []
    size = (
        max(float(value.abs().max()) for value in rank_values.values())
        if case.reference.numel()
        else 0
    )
    noise = near.reach * size
    farthest = max(wholes, key=lambda rank: float((rank_values[rank] - wholes[rank]).abs().sum()))
    for due, taken in itertools.permutations(mesh, 2):
        if mesh[taken] < 2 or mesh[due] < 2:  # noqa: PLR2004
            continue
        # The sum of the ranks' values along the axis that was left out must be the sum of what
        # they should hold along the axis that was summed over.
        sums = {
            rank: (
                _sum_along(rank_values, context, rank, due),
                _sum_along(wholes, context, rank, taken),
            )
            for rank in wholes
        }
        alike = all(
            near(rank_values[other_rank], rank_values[rank], noise)
            for rank in wholes
            for other_rank in context.ranks_along(rank, taken)
        )
        if alike and all(
            near(actual_sum, expected_sum, noise) for actual_sum, expected_sum in sums.values()
        ):
            actual, expected = sums[farthest]
            return claim(
                dataclasses.replace(case, reference=wholes[farthest]),
                rank_values[farthest],
                Prediction(
                    expected - (actual - rank_values[farthest]),
                    size=size,
                    cost=math.log2(len(mesh) * (len(mesh) - 1)),
                ),
                PatternKind.WRONG_AXIS,
                f"summed over the ranks along {taken}, but the terms lie on the ranks along {due}: "
                "an all-reduce over the wrong axis of the mesh",
                {"collective": "all_reduce", "axis": taken, "due": due},
            )
    return []


def _sum_along(values: Mapping[int, Tensor], context: Context, rank: int, axis: str) -> Tensor:
    return torch.stack(
        [values[other_rank].double() for other_rank in context.ranks_along(rank, axis)]
    ).sum(0)


def _one_ranks_part(case: Case, near: Near) -> list[Pattern]:
    summands = case.context.summands
    for rank, part in summands.items():
        if near(case.candidate, part):
            return claim(
                case,
                case.candidate,
                Prediction(part, cost=math.log2(len(summands))),
                PatternKind.ONE_RANKS_PART,
                f"it is the term of rank {rank} alone: the other ranks' terms were never added, an "
                "all-reduce (sum) is missing or was a broadcast",
                {"rank": rank},
            )
    return []


def _are_terms(case: Case) -> bool:
    """Whether the values on the ranks can be terms of the reference."""
    values = list(case.context.held.values())
    if len(values) < 2 or case.context.item in _NEVER_TERMS:  # noqa: PLR2004
        return False
    return all(value.shape == case.reference.shape for value in values)


def _differing_axes(case: Case, near: Near) -> str:
    """Over which ranks the terms lie: along the axes on which they differ."""
    context = case.context
    mesh, rank_values = context.world, context.held
    if len(mesh) > 1 and len(rank_values) == context.ranks:
        differing = [
            axis
            for axis in mesh
            if not all(
                near(rank_values[other_rank], value)
                for rank, value in rank_values.items()
                for other_rank in context.ranks_along(rank, axis)
            )
        ]
        if 0 < len(differing) < len(mesh):
            return f" over the ranks along {' and '.join(differing)}"
    if len(rank_values) == context.ranks:
        return f" over the {context.ranks} ranks"
    return f" over ranks {_join(list(rank_values))}"


def _find_permuted_parts(case: Case, near: Near) -> list[Pattern]:
    """Equal parts along a dim, in another order."""
    value = case.candidate
    if not _has_whole(case):
        return []
    # If a rank has all of it, the parts were joined before.
    joined = any(rank_value.shape == value.shape for rank_value in case.context.held.values())
    if joined and not _alike(case, near):
        return []
    sizes = dict.fromkeys(_mesh_sizes(case).values())
    for parts, dim in itertools.product(sizes, range(value.dim())):
        if value.shape[dim] % parts or not 1 < parts <= _MOST_PARTS:
            continue
        chunks, right = value.chunk(parts, dim), case.reference.chunk(parts, dim)
        order: list[int] = []
        for position, chunk in enumerate(chunks):
            fits = [n for n in (position, *range(parts)) if near(chunk, right[n])]
            order.append(fits[0] if fits else -1)
        if min(order) < 0 or order == list(range(parts)):
            continue
        first = next(n for n in range(parts) if order[n] != n)
        happened = f"rank {first} holds the shard of rank {order[first]}"
        if joined:
            happened = f"the ranks' parts are joined in the order {_join(order)}"
        return claim(
            case,
            value,
            Prediction(torch.cat([right[n] for n in order], dim), cost=parts * math.log2(parts)),
            PatternKind.WRONG_RANKS_SHARD,
            f"part {first} of {parts} along dim {dim} is what part {order[first]} should be: "
            f"{happened}",
            {"dim": dim, "order": _join(order)},
        )
    return []


def _alike(case: Case, near: Near) -> bool:
    """Whether all ranks that are wrong are wrong in the same way."""
    full_values = [
        rank_value
        for rank_value in case.context.held.values()
        if rank_value.shape == case.reference.shape
    ]
    return all(
        near(rank_value, case.candidate) or near(rank_value, case.reference)
        for rank_value in full_values
    )


def _mesh_sizes(case: Case) -> dict[str, int]:
    """Which ranks, in words -> how many there are; the most likely first."""
    mesh, ranks = case.context.world, case.context.ranks
    along = {f"ranks along {axis}": size for axis, size in mesh.items() if size > 1}
    return {"ranks": ranks} if len(mesh) == 1 else {**along, "ranks": ranks}


def _mesh_factors(case: Case) -> dict[str, float]:
    """In words -> a factor that a wrong reduction can make."""
    return {
        words: exact
        for name, size in _mesh_sizes(case).items()
        for words, exact in (
            (f"the number of {name}", float(size)),
            (f"1 / the number of {name}", 1 / size),
            (f"the square of the number of {name}", float(size * size)),
            (f"1 / the square of the number of {name}", 1 / (size * size)),
        )
    }


def _find_scaled_values(case: Case, near: Near) -> list[Pattern]:
    if not _has_whole(case) or not _alike(case, near):
        return []
    factor = factor_of(case.candidate, case.reference, near)
    if factor is None:
        return []
    mesh_factors = _mesh_factors(case)
    reference, kind = widen(case.reference), PatternKind.SCALE
    for words, exact in mesh_factors.items():
        if abs(factor - exact) <= 10 * near.reach * exact:
            return claim(
                case,
                case.candidate,
                Prediction(exact * reference, cost=math.log2(len(mesh_factors))),
                kind,
                f"{exact:g} times the reference, which is {words}: {_factor_meaning(case, exact)}",
                {"factor": factor, "equals": words},
            )
    if case.reference.numel() < _FEW or case.context.item == "loss":
        return []
    sentence = f"{factor:.6g} times the reference in every element, which is no size of the mesh"
    prediction, evidence = factor * reference, {"factor": factor}
    return claim(
        case, case.candidate, Prediction(prediction, parameters=1.0), kind, sentence, evidence
    )


def _factor_meaning(case: Case, factor: float) -> str:
    """What probably happened if a value of this kind is so many times too large."""
    sizes = set(_mesh_sizes(case).values())
    square = factor not in sizes and factor in {size * size for size in sizes}
    if case.context.item == "module":
        if factor > 1:
            return "all-reduced once too often: every rank already had the sum"
        return "divided by the number of ranks instead of summed"
    if factor > 1:
        again = "twice " if square else ""
        return f"{again}summed over ranks instead of averaged, or reduced once too often"
    return "divided by the number of ranks once too often, or averaged instead of summed"


def _repeated_term(case: Case, near: Near) -> list[Pattern]:
    """The difference is a multiple of a parameter: a bias that every rank adds, or none."""
    value, expected = case.candidate, case.reference
    if not _has_whole(case) or not value.dim() or not _alike(case, near):
        return []
    difference = (value - expected).double()
    noise = near.reach * rms(expected)
    sizes = {size - 1: words for words, size in _mesh_sizes(case).items()}
    biases = case.context.biases
    for name, term in biases.items():
        added = _multiple_of_term(difference, term, near, noise)
        if added is None or (added.number not in sizes and added.number != -1):
            continue
        kind, sentence = PatternKind.MISSING_BIAS, f"the difference is -1 x {name}: nobody adds it"
        number = added.number
        if number in sizes:
            kind = PatternKind.REPEATED_BIAS
            sentence = (
                f"the difference is {number} x {name}: each of the {number + 1} {sizes[number]} "
                "adds it before the all-reduce; add it on one rank, or after the all-reduce"
            )
        return claim(
            case,
            value,
            Prediction(
                widen(expected) + added.value,
                size=float(added.value.abs().max()),
                cost=math.log2(len(biases) * (len(sizes) + 1)),
            ),
            kind,
            sentence,
            {"parameter": name, "times": added.times},
        )
    return []


@dataclasses.dataclass(frozen=True)
class _Multiple:
    """A whole number of times a term: `times` as fitted, `value` broadcast."""

    times: float
    number: int
    value: Tensor


def _multiple_of_term(
    difference: Tensor, term: Tensor, near: Near, noise: float
) -> _Multiple | None:
    """The difference as a multiple of a vector along the last dim or the channels."""
    term = term.double()
    if term.dim() != 1 or not bool(term.any()):
        return None
    for dim in (difference.dim() - 1, 1):
        if dim >= difference.dim() or difference.shape[dim] != len(term):
            continue
        shape = [1] * difference.dim()
        shape[dim] = -1
        spread = term.view(shape).expand_as(difference)
        times = float((difference * spread).sum()) / float(spread.square().sum())
        number = round(times)
        if number and near(difference, spread * number, noise):
            return _Multiple(times, number, spread * number)
    return None


def _join(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


_EQUATIONS: tuple[Callable[[Case, Near], list[Pattern]], ...] = (
    _zeros,
    _find_unreduced_terms,
    _some_ranks_only,
    _wrong_axis,
    _one_ranks_part,
    _find_permuted_parts,
    _find_scaled_values,
    _repeated_term,
)
# These can also hold for the rest, once a term that is added at the end is subtracted.
_OF_A_REST = (_find_unreduced_terms, _some_ranks_only, _find_scaled_values)
