"""Which collective is missing, doubled or mis-scaled, where the numbers show it.

Each pattern is an equation between what ranks hold and what the reference has; it is claimed only
where it holds in every element.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import msgspec
import torch

from paritas.numerics.diagnoses import Diagnosis, Pattern
from paritas.partition.plans.reductions import (
    one_ranks_part,
    some_ranks_only,
    unreduced,
    wrong_axis,
)
from paritas.partition.plans.relating import factor_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.partition.plans.cases import Case
    from paritas.partition.plans.relating import Near

__all__ = ["explain", "factor_name"]

# A factor of a handful of numbers fits anything: it has to be a size of the mesh then.
_FEW = 4
_MOST_PARTS = 8


def explain(case: Case, near: Near) -> Diagnosis | None:
    """The patterns that fit, the most specific first; None if none does."""
    if not case.expected.is_floating_point():
        found = [*_stale(case, near)]
        return Diagnosis(patterns=tuple(found)) if found else None
    checks: tuple[Callable[[Case, Near], Iterator[Pattern]], ...] = (
        _stale,
        _zeros,
        unreduced,
        some_ranks_only,
        wrong_axis,
        one_ranks_part,
        _permuted,
        _scaled,
        _repeated_term,
    )
    found = [pattern for check in checks for pattern in check(case, near)]
    for name, term in () if found else reversed(case.beside.items()):
        found = list(_apart_from(case, name, term, near))
        if found:
            break
    return Diagnosis(patterns=tuple(found)) if found else None


def _apart_from(case: Case, name: str, term: Tensor, near: Near) -> Iterator[Pattern]:
    """What holds for the rest once a term that is added at the end is taken away."""
    values = [case.expected, *case.held.values(), *([] if case.value is None else [case.value])]
    fits = {tuple(value.shape[-term.dim() :]) == tuple(term.shape) for value in values}
    if fits != {True} or near(case.expected, term):
        return
    rest = dataclasses.replace(
        case,
        expected=case.expected - term,
        value=None if case.value is None else case.value - term,
        held={rank: value - term for rank, value in case.held.items()},
    )
    for pattern in (*unreduced(rest, near), *some_ranks_only(rest, near), *_scaled(rest, near)):
        sentence = f"apart from {name}, {pattern.sentence}"
        yield msgspec.structs.replace(
            pattern, sentence=sentence, evidence={**pattern.evidence, "apart from": name}
        )


def _zeros(case: Case, near: Near) -> Iterator[Pattern]:
    del near
    value = case.value
    if value is not None and not bool(value.any()) and bool(case.expected.any()):
        yield Pattern(kind="zero", confidence=0.9, sentence="all zero: nothing arrives there")


def _stale(case: Case, near: Near) -> Iterator[Pattern]:
    """What the reference had before, and still the ranks', or one of them."""
    if case.what not in {"parameter", "buffer"}:
        return
    holders = case.held if case.value is None or case.held else {}
    for when, earlier in case.earlier.items():
        if torch.equal(earlier, case.expected):
            continue
        late = [rank for rank, value in holders.items() if near(value, earlier)]
        whole = case.value is not None and near(case.value, earlier)
        if not late and not whole:
            continue
        everywhere = whole and len(late) in {0, len(holders)}
        who = "" if everywhere else f" on rank{'s' * (len(late) > 1)} {_listed(late)}"
        yield Pattern(
            kind="stale",
            confidence=0.9,
            sentence=f"it is still {when}{who}: never updated there",
            evidence={"equals": when, "ranks": _listed(late) if late else "all"},
        )
        return


def _permuted(case: Case, near: Near) -> Iterator[Pattern]:
    """Equal parts along a dim, in another order."""
    value = case.value
    if value is None or value.shape != case.expected.shape:
        return
    # Where every rank has all of it, the parts were put together before.
    joined = any(held.shape == value.shape for held in case.held.values())
    if joined and not _alike(case, value, near):
        return
    for parts, dim in itertools.product(dict.fromkeys(case.sizes.values()), range(value.dim())):
        if value.shape[dim] % parts or not 1 < parts <= _MOST_PARTS:
            continue
        mine, right = value.chunk(parts, dim), case.expected.chunk(parts, dim)
        order: list[int] = []
        for chunk in mine:
            place = len(order)
            fits = [n for n in (place, *range(parts)) if near(chunk, right[n])]
            order.append(fits[0] if fits else -1)
        if min(order) < 0 or order == list(range(parts)):
            continue
        moved = [n for n in range(parts) if order[n] != n]
        first = moved[0]
        yield Pattern(
            kind="wrong rank's shard",
            confidence=0.9,
            sentence=f"part {first} of {parts} along dim {dim} is what part {order[first]} should "
            + (
                f"be: parts of ranks joined in the order {_listed(order)}"
                if joined
                else f"be: rank {first} holds the shard of rank {order[first]}"
            ),
            evidence={"dim": dim, "order": _listed(order)},
        )
        return


def _alike(case: Case, value: Tensor, near: Near) -> bool:
    """Whether all ranks that are wrong are wrong in the same way."""
    whole = [held for held in case.held.values() if held.shape == case.expected.shape]
    return all(near(held, value) or near(held, case.expected) for held in whole)


def factor_name(case: Case, factor: float, near: Near) -> tuple[str, float] | None:
    """A factor in terms of the mesh, and its exact value."""
    for name, size in case.sizes.items():
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
    value, expected = case.value, case.expected
    if value is None or not _alike(case, value, near):
        return
    factor = factor_of(value, expected, near)
    if factor is None:
        return
    named = factor_name(case, factor, near)
    if named is None:
        if expected.numel() >= _FEW and case.what != "loss":
            yield Pattern(
                kind="scale",
                confidence=0.7,
                sentence=f"{factor:.6g} times the reference in every element; no size of the mesh",
                evidence={"factor": factor},
            )
        return
    words, exact = named
    yield Pattern(
        kind="scale",
        confidence=0.95 if expected.numel() >= _FEW else 0.8,
        sentence=f"{exact:g} times the reference, which is {words}: {_reading(case, exact)}",
        evidence={"factor": factor, "equals": words},
    )


def _reading(case: Case, factor: float) -> str:
    """What such a factor means for a value of that kind."""
    square = factor in {float(size * size) for size in case.sizes.values()} and not any(
        factor == size for size in case.sizes.values()
    )
    if case.what == "module":
        if factor > 1:
            return "all-reduced once too often, where every rank had the sum already"
        return "divided by the number of ranks, where the sum is wanted"
    if factor > 1:
        again = "twice " if square else ""
        return f"{again}summed over ranks where it should be averaged, or reduced once too often"
    return "divided by the number of ranks once too often, or averaged where it should be summed"


def _repeated_term(case: Case, near: Near) -> Iterator[Pattern]:
    """The difference is a parameter, so many times, broadcast: a bias that every rank adds."""
    value = case.value
    if value is None or value.shape != case.expected.shape or not value.dim():
        return
    if not _alike(case, value, near):
        return
    difference = (value - case.expected).double()
    noise = near.reach * float(case.expected.double().square().mean().sqrt())
    for name, term in case.terms.items():
        times = _times(difference, term, near, noise)
        if times is None:
            continue
        number = round(times)
        sizes = {size - 1: words for words, size in case.sizes.items()}
        if number in sizes:
            sentence = (
                f"the difference is {number} x {name}: each of the {number + 1} {sizes[number]} "
                "adds it before the all-reduce, where one rank should (or all of them after it)"
            )
            kind = "repeated bias"
        elif number == -1:
            sentence = f"the difference is -1 x {name}: it is never added"
            kind = "missing bias"
        else:
            continue
        evidence: dict[str, float | str] = {"parameter": name, "times": times}
        yield Pattern(kind=kind, confidence=0.95, sentence=sentence, evidence=evidence)
        return


def _times(difference: Tensor, term: Tensor, near: Near, noise: float) -> float | None:
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
