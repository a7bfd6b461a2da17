"""What ranks hold against what they should: reductions missing, doubled, or over other ranks.

Two kinds of question are asked. Of one tensor with what each rank has of it, how well a sum of the
parts explains the candidate, within the noise that the judge measured. And of ranks that run in
float64, or close to it, which equation between their values and the reference's holds in every
element.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

import msgspec
import torch

from paritas.diagnosis.case import near, roundoff, widen
from paritas.diagnosis.scores import first_supported, supported_pattern
from paritas.numerics.gates import Near
from paritas.results.findings import Pattern, PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from paritas.diagnosis.case import Case, Context


# --- Sums of ranks' parts, within the measured noise ----------------------------------------------

_NEARLY_ALL = 0.95
# The ranks' parts may be added up in their own dtype: that is so many roundings more.
_ADDED_UP = 4.0
_MUCH_NEARER = 0.25


def explain_by_parts(case: Case) -> list[Pattern]:
    """Parts that explain the right value by their sum, and the candidate by one of them."""
    parts = {rank: widen(one) for rank, one in case.context.held.items()}
    if len(parts) < 2 or any(tuple(one.shape) != case.shape for one in parts.values()):  # noqa: PLR2004
        return []
    total = torch.stack(list(parts.values())).sum(dim=0)
    count = len(parts)
    if all(_is_right(case, part) for part in parts.values()):
        said = f"reduced once too often: {count} ranks held the right value, and were added up"
        kind = PatternKind.DOUBLED_REDUCTION
        return first_supported([_supported_sum(case, total, kind, said, ranks=count)])
    for name, whole in (("sum", total), ("mean", total / count)):
        if _is_right(case, whole):
            return first_supported(
                itertools.chain(_one_part(case, parts, name), _wrong_sum(case, parts, total, name))
            )
    return []


def _supported_sum(
    case: Case, value: Tensor, kind: PatternKind, said: str, **known: int
) -> Pattern | None:
    """The parts are rounded each for itself, which their sum cannot be better than."""
    parts = list(case.context.held.values())
    size = torch.stack([widen(one).abs() for one in parts]).sum(0)
    scale = torch.where(size > 0, value.abs() / size, 0.0).clamp(min=1.0)
    noise = max(roundoff(one) for one in (case.candidate, *parts)) * size * scale
    cost = math.log2(4 * len(parts))
    return supported_pattern(case, value, kind, said, cost=cost, noise=noise, evidence=known)


def _one_part(case: Case, parts: Mapping[int, Tensor], name: str) -> Iterator[Pattern | None]:
    count = len(parts)
    for rank, part in parts.items():
        said = (
            f"never reduced: this is the part of rank {rank} alone, and the {name} of the "
            f"{count} ranks' parts is right"
        )
        variants = [(part, said)]
        if name == "mean":
            variants.append((part / count, f"{said} (divided by {count} already)"))
        for value, sentence in variants:
            kind = PatternKind.PARTIAL_SUM
            yield _supported_sum(case, value, kind, sentence, ranks=count, rank=rank)


def _wrong_sum(
    case: Case, parts: Mapping[int, Tensor], total: Tensor, name: str
) -> Iterator[Pattern | None]:
    """The parts were added up, but not all of them, or more than once."""
    count = len(parts)
    scale = 1.0 if name == "sum" else 1.0 / count
    for rank, part in parts.items():
        for sign, said in (
            (-1, f"the part of rank {rank} is missing from the {name} over {count} ranks"),
            (1, f"the part of rank {rank} is in the {name} over {count} ranks twice"),
        ):
            value = (total + sign * part) * scale
            kind = PatternKind.PARTIAL_SUM
            yield _supported_sum(case, value, kind, said, ranks=count, rank=rank)
    if name == "sum":
        said = f"reduced twice: {count} times the sum of the {count} ranks' parts"
        kind = PatternKind.DOUBLED_REDUCTION
        yield _supported_sum(case, total * count, kind, said, ranks=count)


def _is_right(case: Case, value: Tensor) -> bool:
    """Within the noise, and much nearer to the right value than the candidate is."""
    fits = near(value, case.right, case.allowed, slack=_ADDED_UP)
    ratio = float((value - case.right).square().mean()) / float(case.error.square().mean())
    return float(fits.double().mean()) >= _NEARLY_ALL and ratio <= _MUCH_NEARER**2


# --- Equations between what ranks hold and what the reference has ---------------------------------

# Each is claimed only where it holds in every element. How often such a claim is right has not been
# counted: these are estimates, and not the calibrated shares of `paritas.diagnosis.diagnose`.
_CONFIDENCES = {
    PatternKind.STALE: 0.9,
    PatternKind.ZEROS: 0.9,
    PatternKind.MISSING_REDUCTION: 0.95,
    PatternKind.WRONG_AXIS: 0.9,
    PatternKind.ONE_RANKS_PART: 0.9,
    PatternKind.WRONG_RANKS_SHARD: 0.9,
    PatternKind.SCALE: 0.95,
    PatternKind.REPEATED_BIAS: 0.95,
    PatternKind.MISSING_BIAS: 0.95,
}
_OF_GROUPS = 0.9
_OF_FEW_ELEMENTS = 0.8
_OF_ANY_FACTOR = 0.7
# A factor of a handful of numbers fits anything: it has to be a size of the mesh then.
_FEW = 4
_MOST_PARTS = 8
_STATE = frozenset({"parameter", "buffer"})
_NEVER_TERMS = frozenset({"parameter", "buffer", "initial", "loss"})


def factor_of(value: Tensor, expected: Tensor, near: Near) -> float | None:
    """K where the value is k times what is expected in every element; None if it is not."""
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


def state_equation(
    kind: PatternKind,
    sentence: str,
    evidence: Mapping[str, int | float | str] | None = None,
    confidence: float | None = None,
) -> Pattern:
    """The pattern of an equation that holds."""
    stated = _CONFIDENCES[kind] if confidence is None else confidence
    return Pattern(kind=kind, confidence=stated, sentence=sentence, evidence=dict(evidence or {}))


def explain_by_equations(case: Case) -> tuple[Pattern, ...]:
    """What ranks did with their values, the most specific first; empty if no equation holds.

    A case whose candidate has another shape is one of which ranks hold nothing together.
    """
    near = Near(case.context.unit)
    if not case.reference.is_floating_point():
        return tuple(_stale(case, near))
    found = [pattern for check in _EQUATIONS for pattern in check(case, near)]
    for name, term in () if found else reversed(list(case.context.added.items())):
        rest = _without_term(case, term, near)
        told = () if rest is None else itertools.chain(*(one(rest, near) for one in _OF_A_REST))
        for pattern in told:
            sentence = f"apart from {name}, {pattern.sentence}"
            known = {**pattern.evidence, "apart from": name}
            found.append(msgspec.structs.replace(pattern, sentence=sentence, evidence=known))
        if found:
            break
    return tuple(found)


def _without_term(case: Case, term: Tensor, near: Near) -> Case | None:
    """The case once a term that is added at the end is taken away; None if it is not in it."""
    context = case.context
    values = [case.reference, *context.held.values()]
    if case.candidate.shape == case.reference.shape:
        values.append(case.candidate)
    fits = {tuple(value.shape[-term.dim() :]) == tuple(term.shape) for value in values}
    if fits != {True} or near(case.reference, term):
        return None
    held = {rank: value - term for rank, value in context.held.items()}
    whole = case.candidate.shape == case.reference.shape
    return dataclasses.replace(
        case,
        candidate=case.candidate - term if whole else case.candidate,
        reference=case.reference - term,
        context=dataclasses.replace(context, held=held),
    )


def _zeros(case: Case, _near: Near) -> Iterator[Pattern]:
    whole = case.candidate.shape == case.reference.shape
    if whole and not bool(case.candidate.any()) and bool(case.reference.any()):
        yield state_equation(PatternKind.ZEROS, "all zero: nothing arrives there")


def _stale(case: Case, near: Near) -> Iterator[Pattern]:
    """What the reference had before, and still the ranks', or one of them."""
    if case.context.item not in _STATE:
        return
    holders = case.context.held
    for when, earlier in case.context.earlier.items():
        if torch.equal(earlier, case.reference):
            continue
        late = [rank for rank, value in holders.items() if near(value, earlier)]
        whole = near(case.candidate, earlier)
        if not late and not whole:
            continue
        everywhere = whole and len(late) in {0, len(holders)}
        who = "" if everywhere else f" on rank{'s' * (len(late) > 1)} {_listed(late)}"
        yield state_equation(
            PatternKind.STALE,
            f"it is still {when}{who}: never updated there",
            {"equals": when, "ranks": _listed(late) if late else "all"},
        )
        return


def _unreduced(case: Case, near: Near) -> Iterator[Pattern]:
    """The ranks' values are terms whose sum, or mean, is what each of them should hold."""
    held = list(case.context.held.values())
    if not _are_terms(case) or all(near(value, held[0]) for value in held[1:]):
        return
    stacked, expected = torch.stack([value.double() for value in held]), case.reference.double()
    noise = near.reach * float(stacked.abs().max())
    along = _differing_axes(case, near)
    known: dict[str, int | str] = {"collective": "all_reduce", "ranks": len(held)}
    if near(stacked.sum(dim=0), expected, noise):
        yield state_equation(
            PatternKind.MISSING_REDUCTION,
            "the ranks' values add up to the reference: they were never reduced, an "
            f"all-reduce (sum){along} is missing",
            {**known, "operator": "sum"},
        )
    elif near(stacked.mean(dim=0), expected, noise):
        own = ": each rank has that of its own samples" if case.context.splits_samples else ""
        yield state_equation(
            PatternKind.MISSING_REDUCTION,
            f"the ranks' values average to the reference{own}; an all-reduce "
            f"(mean){along} is missing",
            {**known, "operator": "mean"},
        )


def _some_ranks_only(case: Case, near: Near) -> Iterator[Pattern]:
    """Ranks fall into groups that hold the same, and the groups' values add up."""
    held = case.context.held
    if not _are_terms(case):
        return
    groups: list[list[int]] = []
    for rank, value in held.items():
        group = next((g for g in groups if near(value, held[g[0]])), None)
        if group is None:
            groups.append([rank])
        else:
            group.append(rank)
    if not 1 < len(groups) < len(held):
        return
    if any(factor_of(held[group[0]], case.reference, near) is not None for group in groups):
        return  # shares of the whole, not sums of some terms
    stacked = torch.stack([held[group[0]].double() for group in groups])
    noise = near.reach * float(stacked.abs().max())
    if not near(stacked.sum(dim=0), case.reference.double(), noise):
        return
    told = " and ".join(f"({_listed(group)})" for group in groups)
    yield state_equation(
        PatternKind.MISSING_REDUCTION,
        f"ranks {told} each hold one sum, and these add up to the reference: the "
        "all-reduce went over these groups, not over all of the ranks",
        {"collective": "all_reduce", "operator": "sum", "groups": told},
        _OF_GROUPS,
    )


def _wrong_axis(case: Case, near: Near) -> Iterator[Pattern]:
    """Summed over ranks along another axis of the mesh than the one that has the terms."""
    context = case.context
    mesh, wholes = context.world, context.wholes
    if len(wholes) != context.ranks or len(mesh) < 2:  # noqa: PLR2004
        return
    held = {rank: value.double() for rank, value in context.everywhere.items()}
    if held.keys() != wholes.keys():
        return
    if any(held[rank].shape != wholes[rank].shape for rank in wholes):
        return
    size = max(float(value.abs().max()) for value in held.values()) if case.reference.numel() else 0
    noise = near.reach * size
    for due, taken in itertools.permutations(mesh, 2):
        if mesh[taken] < 2 or mesh[due] < 2:  # noqa: PLR2004
            continue
        # Each sum along the axis that was left out is one of what should be there, along the
        # axis over which ranks were added up.
        rows = [
            (
                _sum_along(held, context, rank, due),
                _sum_along(wholes, context, rank, taken),
            )
            for rank in wholes
        ]
        alike = all(
            near(held[one], held[rank], noise)
            for rank in wholes
            for one in context.ranks_along(rank, taken)
        )
        if alike and all(near(mine, theirs, noise) for mine, theirs in rows):
            yield state_equation(
                PatternKind.WRONG_AXIS,
                f"summed over the ranks along {taken}, where the terms are those of "
                f"the ranks along {due}: an all-reduce over the wrong axis of the mesh",
                {"collective": "all_reduce", "axis": taken, "due": due},
            )
            return


def _sum_along(values: Mapping[int, Tensor], context: Context, rank: int, axis: str) -> Tensor:
    return torch.stack([values[one].double() for one in context.ranks_along(rank, axis)]).sum(0)


def _one_ranks_part(case: Case, near: Near) -> Iterator[Pattern]:
    """One term in the place of the sum."""
    for rank, part in case.context.summands.items():
        if near(case.candidate, part) and not near(part, case.reference):
            yield state_equation(
                PatternKind.ONE_RANKS_PART,
                f"it is the term of rank {rank} alone: the terms of the others were "
                "never added, an all-reduce (sum) is missing or was a broadcast",
                {"rank": rank},
            )
            return


def _are_terms(case: Case) -> bool:
    """Whether what ranks hold can be terms of what is expected, and is not that itself."""
    held = list(case.context.held.values())
    if len(held) < 2 or case.context.item in _NEVER_TERMS:  # noqa: PLR2004
        return False
    return all(value.shape == case.reference.shape for value in held)


def _differing_axes(case: Case, near: Near) -> str:
    """Over which ranks the terms are: along the axes on which they differ."""
    context = case.context
    mesh, held = context.world, context.held
    if len(mesh) > 1 and len(held) == context.ranks:
        apart = [
            axis
            for axis in mesh
            if not all(
                near(held[one], value)
                for rank, value in held.items()
                for one in context.ranks_along(rank, axis)
            )
        ]
        if 0 < len(apart) < len(mesh):
            return f" over the ranks along {' and '.join(apart)}"
    if len(held) == context.ranks:
        return f" over the {context.ranks} ranks"
    return f" over ranks {_listed(list(held))}"


def _permuted(case: Case, near: Near) -> Iterator[Pattern]:
    """Equal parts along a dim, in another order."""
    value = case.candidate
    if value.shape != case.reference.shape:
        return
    # Where every rank has all of it, the parts were put together before.
    joined = any(held.shape == value.shape for held in case.context.held.values())
    if joined and not _alike(case, near):
        return
    sizes = dict.fromkeys(_mesh_sizes(case).values())
    for parts, dim in itertools.product(sizes, range(value.dim())):
        if value.shape[dim] % parts or not 1 < parts <= _MOST_PARTS:
            continue
        mine, right = value.chunk(parts, dim), case.reference.chunk(parts, dim)
        order: list[int] = []
        for place, chunk in enumerate(mine):
            fits = [n for n in (place, *range(parts)) if near(chunk, right[n])]
            order.append(fits[0] if fits else -1)
        if min(order) < 0 or order == list(range(parts)):
            continue
        first = next(n for n in range(parts) if order[n] != n)
        yield state_equation(
            PatternKind.WRONG_RANKS_SHARD,
            f"part {first} of {parts} along dim {dim} is what part {order[first]} should "
            + (
                f"be: parts of ranks joined in the order {_listed(order)}"
                if joined
                else f"be: rank {first} holds the shard of rank {order[first]}"
            ),
            {"dim": dim, "order": _listed(order)},
        )
        return


def _alike(case: Case, near: Near) -> bool:
    """Whether all ranks that are wrong are wrong in the same way."""
    whole = [held for held in case.context.held.values() if held.shape == case.reference.shape]
    return all(near(held, case.candidate) or near(held, case.reference) for held in whole)


def _mesh_sizes(case: Case) -> dict[str, int]:
    """How many ranks there are, in words -> number, the likeliest first."""
    mesh, ranks = case.context.world, case.context.ranks
    along = {f"ranks along {axis}": size for axis, size in mesh.items() if size > 1}
    return {"ranks": ranks} if len(mesh) == 1 else {**along, "ranks": ranks}


def _factor_name(case: Case, factor: float, near: Near) -> tuple[str, float] | None:
    """A factor in terms of the mesh, and its exact value."""
    for name, size in _mesh_sizes(case).items():
        known = {
            f"the number of {name}": float(size),
            f"1 / the number of {name}": 1.0 / size,
            f"the square of the number of {name}": float(size * size),
            f"1 / the square of the number of {name}": 1.0 / (size * size),
        }
        for words, exact in known.items():
            if abs(factor - exact) <= 10 * near.reach * exact:
                return words, exact
    return None


def _scaled(case: Case, near: Near) -> Iterator[Pattern]:
    if case.candidate.shape != case.reference.shape or not _alike(case, near):
        return
    factor = factor_of(case.candidate, case.reference, near)
    if factor is None:
        return
    few = case.reference.numel() < _FEW
    named = _factor_name(case, factor, near)
    if named is not None:
        words, exact = named
        yield state_equation(
            PatternKind.SCALE,
            f"{exact:g} times the reference, which is {words}: {_factor_meaning(case, exact)}",
            {"factor": factor, "equals": words},
            _OF_FEW_ELEMENTS if few else None,
        )
    elif not few and case.context.item != "loss":
        yield state_equation(
            PatternKind.SCALE,
            f"{factor:.6g} times the reference in every element; no size of the mesh",
            {"factor": factor},
            _OF_ANY_FACTOR,
        )


def _factor_meaning(case: Case, factor: float) -> str:
    """What such a factor means for a value of that kind."""
    sizes = set(_mesh_sizes(case).values())
    square = factor not in sizes and factor in {size * size for size in sizes}
    if case.context.item == "module":
        if factor > 1:
            return "all-reduced once too often, where every rank had the sum already"
        return "divided by the number of ranks, where the sum is wanted"
    if factor > 1:
        again = "twice " if square else ""
        return f"{again}summed over ranks where it should be averaged, or reduced once too often"
    return "divided by the number of ranks once too often, or averaged where it should be summed"


def _repeated_term(case: Case, near: Near) -> Iterator[Pattern]:
    """The difference is a parameter, so many times, broadcast: a bias that every rank adds."""
    value, expected = case.candidate, case.reference
    if value.shape != expected.shape or not value.dim() or not _alike(case, near):
        return
    difference = (value - expected).double()
    noise = near.reach * float(expected.double().square().mean().sqrt())
    sizes = {size - 1: words for words, size in _mesh_sizes(case).items()}
    for name, term in case.context.biases.items():
        times = _multiple_of_term(difference, term, near, noise)
        number = 0 if times is None else round(times)
        if times is None or (number not in sizes and number != -1):
            continue
        kind, sentence = (
            PatternKind.MISSING_BIAS,
            f"the difference is -1 x {name}: it is never added",
        )
        if number in sizes:
            kind = PatternKind.REPEATED_BIAS
            sentence = (
                f"the difference is {number} x {name}: each of the {number + 1} {sizes[number]} "
                "adds it before the all-reduce, where one rank should (or all of them after it)"
            )
        yield state_equation(kind, sentence, {"parameter": name, "times": times})
        return


def _multiple_of_term(difference: Tensor, term: Tensor, near: Near, noise: float) -> float | None:
    """How many times a term is the difference, along the last dim or the channels."""
    term = term.double()
    square = float(term.square().sum())
    if term.dim() != 1 or not square:
        return None
    for dim in (difference.dim() - 1, 1):
        if dim >= difference.dim() or difference.shape[dim] != len(term):
            continue
        shape = [1] * difference.dim()
        shape[dim] = -1
        spread = term.view(shape).expand_as(difference)
        times = float((difference * spread).sum()) / float(spread.square().sum())
        whole = round(times)
        if whole and near(difference, spread * whole, noise):
            return times
    return None


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


_EQUATIONS: tuple[Callable[[Case, Near], Iterator[Pattern]], ...] = (
    _stale,
    _zeros,
    _unreduced,
    _some_ranks_only,
    _wrong_axis,
    _one_ranks_part,
    _permuted,
    _scaled,
    _repeated_term,
)
# What can also be asked of the rest, once a term that is added at the end is taken away.
_OF_A_REST = (_unreduced, _some_ranks_only, _scaled)
