"""Sums that lack terms: parts of ranks never added up, or the tail of a contraction."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.patterns.contractions import Contraction, contraction_of
from paritas.diagnosis.patterns.hypotheses import Probe, stated
from paritas.diagnosis.patterns.operations import attempted, operation_of, trusted
from paritas.diagnosis.patterns.weighing import beyond_noise
from paritas.numerics.criterion import MAX_Z, unit_roundoff

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.diagnosis.cases import Case
    from paritas.numerics.diagnoses import Pattern

__all__ = ["propose"]

_KIND = "partial sum"
# Elements for which the terms of a contraction are written out.
_WRITTEN_OUT = 64
_LONGEST = 1 << 14
_TILES = (8, 16, 32, 64, 128, 256)
_NEAR = 0.95
# The ranks' parts may be added up in their own dtype: that is so many roundings more.
_ADDED_UP = 4.0
_MUCH_NEARER = 0.25


def propose(case: Case) -> list[Pattern]:
    """Parts that explain the right value by their sum, and the candidate by one of them."""
    if not beyond_noise(case) or case.given.is_complex():
        return []
    found = _of_parts(case)
    if not found:
        tail = _of_terms(case)
        found = [] if tail is None else [tail]
    return found


def _of_parts(case: Case) -> list[Pattern]:
    parts = [one.detach().cpu().double() for one in case.context.parts]
    if len(parts) < 2 or any(tuple(one.shape) != case.shape for one in parts):  # noqa: PLR2004
        return []
    total = torch.stack(parts).sum(dim=0)
    count = len(parts)
    if all(_is_right(case, part) for part in parts):
        said = f"reduced once too often: {count} ranks held the right value, and were added up"
        return _listed(_stated(case, total, "doubled reduction", said, ranks=count))
    for name, whole in (("sum", total), ("mean", total / count)):
        if _is_right(case, whole):
            found = _one_part(case, parts, name)
            return _listed(found or _wrong_sum(case, parts, total, name))
    return []


def _listed(pattern: Pattern | None) -> list[Pattern]:
    return [] if pattern is None else [pattern]


def _stated(case: Case, value: Tensor, kind: str, said: str, **known: int) -> Pattern | None:
    """The parts are rounded each for itself, which their sum cannot be better than."""
    ranks = len(case.context.parts)
    size = torch.stack([one.detach().cpu().double().abs() for one in case.context.parts]).sum(0)
    scale = torch.where(size > 0, value.abs() / size, 0.0).clamp(min=1.0)
    unit = max(_unit(one) for one in (case.candidate, *case.context.parts))
    noise = unit * size * scale
    cost = math.log2(4 * ranks)
    return stated(case, value, kind, said, cost=cost, noise=noise, evidence=dict(known))


def _unit(value: Tensor) -> float:
    return unit_roundoff(value.dtype) if value.is_floating_point() else 0.0


def _one_part(case: Case, parts: list[Tensor], name: str) -> Pattern | None:
    count = len(parts)
    for rank, part in enumerate(parts):
        said = (
            f"never reduced: this is the part of rank {rank} alone, and the {name} of the "
            f"{count} ranks' parts is right"
        )
        variants = [(part, said)]
        if name == "mean":
            variants.append((part / count, f"{said} (divided by {count} already)"))
        for value, sentence in variants:
            found = _stated(case, value, _KIND, sentence, ranks=count, rank=rank)
            if found is not None:
                return found
    return None


def _wrong_sum(case: Case, parts: list[Tensor], total: Tensor, name: str) -> Pattern | None:
    """The parts were added up, but not all of them, or more than once."""
    count = len(parts)
    scale = 1.0 if name == "sum" else 1.0 / count
    for rank, part in enumerate(parts):
        for sign, said in (
            (-1, f"the part of rank {rank} is missing from the {name} over {count} ranks"),
            (1, f"the part of rank {rank} is in the {name} over {count} ranks twice"),
        ):
            value = (total + sign * part) * scale
            found = _stated(case, value, _KIND, said, ranks=count, rank=rank)
            if found is not None:
                return found
    if name == "sum":
        said = f"reduced twice: {count} times the sum of the {count} ranks' parts"
        return _stated(case, total * count, "doubled reduction", said, ranks=count)
    return None


def _is_right(case: Case, value: Tensor) -> bool:
    """Within the noise, and much nearer to the right value than the candidate is."""
    apart = (value - case.right).abs()
    near = (apart <= _ADDED_UP * MAX_Z * case.allowed) | (value == case.right)
    ratio = float(apart.square().mean()) / float(case.error.square().mean())
    return float(near.double().mean()) >= _NEAR and ratio <= _MUCH_NEARER**2


# --- contractions -------------------------------------------------------------------------------


def _of_terms(case: Case) -> Pattern | None:
    operation = operation_of(case)
    if operation is None or not case.shape:
        return None
    sums = contraction_of(operation, case.shape)
    if sums is None or not 2 <= sums.length <= _LONGEST:  # noqa: PLR2004
        return None
    everything = torch.ones(sums.length, dtype=torch.bool)
    if trusted(case, lambda: sums.product(everything)) is None:
        return None
    return _twice(case, sums, everything) or _without_some(case, sums)


def _twice(case: Case, sums: Contraction, everything: Tensor) -> Pattern | None:
    """Twice the sum, and once what is added to it: ranks added up what each had whole."""
    if not sums.adds:
        return None  # a scale, and called so
    said = "reduced twice: two times the sum of products, and once what is added to it"
    value = sums.product(everything, 2.0)
    return stated(case, value, "doubled reduction", said, cost=1.0, evidence={"times": 2.0})


def _without_some(case: Case, sums: Contraction) -> Pattern | None:
    probe = Probe(case)
    terms = attempted(lambda: sums.terms(probe.flat[:_WRITTEN_OUT]))
    if terms is None:
        return None
    length = sums.length
    for missing, words in _missing(case, probe, terms, length):
        found = stated(
            case,
            sums.product(~missing),
            _KIND,
            f"{words} of the {length} terms of each sum are missing",
            cost=math.log2(length) + 2,
            evidence={"terms": length, "missing": int(missing.sum())},
        )
        if found is not None:
            return found
    return None


def _missing(case: Case, probe: Probe, terms: Tensor, length: int) -> list[tuple[Tensor, str]]:
    """Which terms, if left out, explain the probed elements."""
    error = case.error.flatten()[probe.flat[:_WRITTEN_OUT]]
    allowed = probe.allowed[:_WRITTEN_OUT]
    running = torch.cat([torch.zeros(len(terms), 1, dtype=terms.dtype), terms.cumsum(dim=1)], dim=1)
    spans = [(stop, length) for stop in range(1, length)]
    spans += [(0, start) for start in range(1, length)]
    for tile in _TILES:
        spans += [(at, min(at + tile, length)) for at in range(tile, length - tile, tile)]
    starts, stops = (torch.tensor(side) for side in zip(*spans, strict=True))
    lost = running[:, stops] - running[:, starts]
    near = ((lost + error[:, None]).abs() <= allowed[:, None]).double().mean(dim=0)
    apart = (lost + error[:, None]).square().sum(dim=0)
    good = (near >= _NEAR).nonzero().flatten()
    best = good[apart[good].argsort()][:2].tolist()
    index = torch.arange(length)
    found = []
    for start, stop in (spans[one] for one in best):
        words = f"terms {start} to {stop - 1}"
        if stop == length:
            words = f"the last {length - start}"
        elif start == 0:
            words = f"the first {stop}"
        found.append(((index >= start) & (index < stop), words))
    return found
