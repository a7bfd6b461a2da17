"""Which collective is missing, doubled or mis-scaled, where the numbers show it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import msgspec
import torch

from paritas.parallel.assembling import (
    BUFFER,
    GRADIENT,
    LOSS,
    PARAMETER,
    assemble,
    is_partial,
    natural_chunk,
)
from paritas.parallel.relating import factor_of, mean_of
from paritas.results.findings import Diagnosis, Pattern

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.numerics.gates import Near
    from paritas.parallel.causes import Location
    from paritas.parallel.plan import ParallelProgram
    from paritas.parallel.verify import Judge, Judged


# --- What is wrong --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CollectiveCase:
    """Something that is wrong.

    Attributes:
        what: `loss`, `output`, `gradient`, `parameter`, `buffer`, `initial` or `module`.
        expected: what the ranks should hold together.
        value: what they do hold together; None if that cannot be said.
        held: rank -> its own.
        everywhere: rank -> its own, of all ranks, and `wholes` rank -> what it should hold, where
            ranks have different samples.
        terms: name -> parameter of one dim that may have been added too often.
        beside: in words -> what may have been added after the fault: a bias of the module, or what
            goes past it; the likeliest last.
        earlier: in words -> what the reference had before.
        parts: rank -> term of the sum that should have been taken.
    """

    program: ParallelProgram
    what: str
    expected: Tensor
    value: Tensor | None
    held: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    everywhere: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    wholes: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    terms: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    beside: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    earlier: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    parts: dict[int, Tensor] = dataclasses.field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """How many ranks there are, in words -> number, the likeliest first."""
        mesh = self.program.mesh
        along = {f"ranks along {axis}": size for axis, size in mesh.items() if size > 1}
        world = self.program.ranks
        return {"ranks": world} if len(mesh) == 1 else {**along, "ranks": world}


def case_of_item(judge: Judge, judged: Judged) -> CollectiveCase | None:
    """An item that is wrong; None if there is nothing to set against each other."""
    item = judged.best
    if item.reference is None:
        return None
    earlier: dict[str, Tensor] = {}
    if item.kind in {PARAMETER, BUFFER}:
        wide = judged.lifted is not None and item is judged.lifted
        trace = judge.lifted[0] if wide and judge.lifted is not None else judge.reference
        if item.name in trace.initial:
            earlier["the initial value"] = trace.initial[item.name].local
        for number, step in enumerate(trace.steps[: judged.step - 1], start=1):
            table = step.parameters if item.kind == PARAMETER else step.buffers
            if item.name in table:
                earlier[f"the value after step {number}"] = table[item.name].local
    value = item.ranks.value
    if item.ranks.disagreement is not None and judged.ranks:
        value = item.ranks.by_rank[judged.ranks[0]]
    return CollectiveCase(
        judge.program,
        item.kind,
        item.reference,
        value,
        # Ranks with other samples have another loss: that says nothing.
        held={} if item.kind == LOSS else item.ranks.by_rank,
        earlier=earlier,
    )


def case_of_module(judge: Judge, location: Location, number: int) -> CollectiveCase | None:
    """What a module gave, on the ranks that have the same samples as the first that is wrong."""
    related, program = location.related, judge.program
    first = next(iter(related.ranks or related.pieces))
    group = [r for r in related.pieces if program.data_rank(r) == program.data_rank(first)]
    expected = related.expected[first]
    held = {rank: related.pieces[rank].local for rank in group}
    value: Tensor | None = held[first]
    if not expected.dim() and program.data_ranks > 1:
        value, held = mean_of(related.pieces), {}
    elif related.pieces[first].placements is not None:
        value = assemble({rank: related.pieces[rank] for rank in group}, expected.shape).value
        if is_partial(related.pieces[first]):
            held = {}  # terms that are known to be terms: it is their sum that is wrong
    elif held[first].shape != expected.shape:
        expected, held = _part_of(judge, first, held[first], expected), {first: held[first]}
    wide = judge.lifted is not None
    trace = judge.lifted[0] if wide and judge.lifted is not None else judge.reference
    before = trace.steps[number - 1].parameters if number else trace.initial
    own = {n: p.local for n, p in before.items() if n.startswith(f"{location.module}.")}
    other = {n: p.local for n, p in before.items() if n not in own}
    terms = {n: t for n, t in {**own, **other}.items() if t.dim() == 1}
    parts = {} if location.backward else location.parts
    biases = {} if location.backward else {n: t for n, t in own.items() if n in terms}
    return CollectiveCase(
        program,
        GRADIENT if location.module == LOSS else "module",
        expected,
        value,
        held=held,
        everywhere=related.held,
        wholes=related.expected,
        terms=terms,
        beside={**location.passing, **biases},
        parts=parts,
    )


def _part_of(judge: Judge, rank: int, value: Tensor, whole: Tensor) -> Tensor:
    """The part that a rank should hold of the whole, in the order of ranks."""
    dims = [d for d in range(whole.dim()) if value.shape[d] != whole.shape[d]]
    dim = dims[0]
    length = value.shape[dim]
    chunk = natural_chunk(judge.program, rank, whole.shape[dim] // length)
    return whole.narrow(dim, chunk * length, min(length, whole.shape[dim] - chunk * length))


def swapped_shards(judge: Judge, module: str) -> tuple[Diagnosis, tuple[int, ...]] | None:
    """Parameters of a module, split by hand, that other ranks should have; None if there are none.

    Where most parameters lie in another order than the ranks', that is how the model is split.
    """
    split = {
        name: {rank: slots for rank, slots in table.items() if slots.chunk is not None}
        for name, table in judge.slots.items()
    }
    moved = {
        name: {rank: s for rank, s in table.items() if s.chunk != s.natural}
        for name, table in split.items()
    }
    odd = [name for name, table in moved.items() if table]
    if 2 * len(odd) > len([name for name, table in split.items() if table]) and len(split) > 1:
        return None
    name = next((n for n in odd if n == module or n.startswith(f"{module}.")), None)
    if name is None:
        return None
    rank, slots = next(iter(moved[name].items()))
    sentence = (
        f"rank {rank} holds part {slots.chunk} of {name} along dim {slots.dim}, where its place is "
        f"part {slots.natural}: the shard of another rank"
    )
    evidence: dict[str, float | str] = {"parameter": name, "dim": float(slots.dim or 0)}
    pattern = Pattern(
        kind="wrong rank's shard", confidence=0.9, sentence=sentence, evidence=evidence
    )
    return Diagnosis(patterns=(pattern,)), tuple(moved[name])


# --- What became of a sum over ranks --------------------------------------------------------------


def unreduced(case: CollectiveCase, near: Near) -> Iterator[Pattern]:
    """The ranks' values are terms whose sum, or mean, is what each of them should hold."""
    held = list(case.held.values())
    if not _are_terms(case) or _all_same(held, near):
        return
    stacked = torch.stack([value.double() for value in held])
    expected = case.expected.double()
    noise = near.reach * float(stacked.abs().max())
    along = _differing_axes(case, near)
    if near(stacked.sum(dim=0), expected, noise):
        yield Pattern(
            kind="missing reduction",
            confidence=0.95,
            sentence="the ranks' values add up to the reference: they were never reduced, an "
            f"all-reduce (sum){along} is missing",
            evidence={"collective": "all_reduce", "operator": "sum", "ranks": len(held)},
        )
    elif near(stacked.mean(dim=0), expected, noise):
        own = ": each rank has that of its own samples" if case.program.data_ranks > 1 else ""
        yield Pattern(
            kind="missing reduction",
            confidence=0.95,
            sentence=f"the ranks' values average to the reference{own}; an all-reduce "
            f"(mean){along} is missing",
            evidence={"collective": "all_reduce", "operator": "mean", "ranks": len(held)},
        )


def some_ranks_only(case: CollectiveCase, near: Near) -> Iterator[Pattern]:
    """Ranks fall into groups that hold the same, and the groups' values add up."""
    if not _are_terms(case):
        return
    groups: list[list[int]] = []
    for rank, value in case.held.items():
        group = next((g for g in groups if near(value, case.held[g[0]])), None)
        if group is None:
            groups.append([rank])
        else:
            group.append(rank)
    if not 1 < len(groups) < len(case.held):
        return
    if any(factor_of(case.held[group[0]], case.expected, near) is not None for group in groups):
        return  # shares of the whole, not sums of some terms
    stacked = torch.stack([case.held[group[0]].double() for group in groups])
    noise = near.reach * float(stacked.abs().max())
    if not near(stacked.sum(dim=0), case.expected.double(), noise):
        return
    told = " and ".join(f"({_listed(group)})" for group in groups)
    yield Pattern(
        kind="missing reduction",
        confidence=0.9,
        sentence=f"ranks {told} each hold one sum, and these add up to the reference: the "
        "all-reduce went over these groups, not over all of the ranks",
        evidence={"collective": "all_reduce", "operator": "sum", "groups": told},
    )


def wrong_axis(case: CollectiveCase, near: Near) -> Iterator[Pattern]:
    """Summed over ranks along another axis of the mesh than the one that has the terms."""
    wholes, mesh = case.wholes, case.program.mesh
    if len(wholes) != case.program.ranks or len(mesh) < 2:  # noqa: PLR2004
        return
    held = {rank: value.double() for rank, value in case.everywhere.items()}
    if held.keys() != wholes.keys():
        return
    if any(held[rank].shape != wholes[rank].shape for rank in wholes):
        return
    size = max(float(value.abs().max()) for value in held.values()) if case.expected.numel() else 0
    noise = near.reach * size
    for due in mesh:
        for taken in mesh:
            if taken == due or mesh[taken] < 2 or mesh[due] < 2:  # noqa: PLR2004
                continue
            # Each sum along the axis that was left out is one of what should be there, along the
            # axis over which ranks were added up.
            rows = [
                (
                    sum(held[one] for one in _ranks_along(case, rank, due)),
                    sum(wholes[one].double() for one in _ranks_along(case, rank, taken)),
                )
                for rank in wholes
            ]
            same = all(
                near(held[one], held[rank], noise)
                for rank in wholes
                for one in _ranks_along(case, rank, taken)
            )
            if same and all(near(_as_tensor(a), _as_tensor(b), noise) for a, b in rows):
                yield Pattern(
                    kind="wrong axis",
                    confidence=0.9,
                    sentence=f"summed over the ranks along {taken}, where the terms are those of "
                    f"the ranks along {due}: an all-reduce over the wrong axis of the mesh",
                    evidence={"collective": "all_reduce", "axis": taken, "due": due},
                )
                return


def one_ranks_part(case: CollectiveCase, near: Near) -> Iterator[Pattern]:
    """One term in the place of the sum."""
    for rank, part in case.parts.items():
        if case.value is not None and near(case.value, part) and not near(part, case.expected):
            yield Pattern(
                kind="one rank's part",
                confidence=0.9,
                sentence=f"it is the term of rank {rank} alone: the terms of the others were "
                "never added, an all-reduce (sum) is missing or was a broadcast",
                evidence={"rank": rank},
            )
            return


def _are_terms(case: CollectiveCase) -> bool:
    """Whether what ranks hold can be terms of what is expected, and is not that itself."""
    held = list(case.held.values())
    if len(held) < 2 or case.what in {"parameter", "buffer", "initial", "loss"}:  # noqa: PLR2004
        return False
    return all(value.shape == case.expected.shape for value in held)


def _all_same(held: list[Tensor], near: Near) -> bool:
    return all(near(value, held[0]) for value in held[1:])


def _ranks_along(case: CollectiveCase, rank: int, axis: str) -> list[int]:
    """The ranks that are where a rank is, but for their place along one axis."""
    program = case.program
    place = list(program.mesh).index(axis)

    def rest(one: int) -> tuple[int, ...]:
        coordinate = program.coordinate(one)
        return coordinate[:place] + coordinate[place + 1 :]

    return [one for one in range(program.ranks) if rest(one) == rest(rank)]


def _as_tensor(value: Tensor | int) -> Tensor:
    return torch.as_tensor(value)


def _differing_axes(case: CollectiveCase, near: Near) -> str:
    """Over which ranks the terms are: along the axes on which they differ."""
    mesh = case.program.mesh
    if len(mesh) > 1 and len(case.held) == case.program.ranks:
        apart = [
            axis
            for axis in mesh
            if not all(
                near(case.held[one], value)
                for rank, value in case.held.items()
                for one in _ranks_along(case, rank, axis)
            )
        ]
        if 0 < len(apart) < len(mesh):
            return f" over the ranks along {' and '.join(apart)}"
    if len(case.held) == case.program.ranks:
        return f" over the {case.program.ranks} ranks"
    return f" over ranks {_listed(list(case.held))}"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


# --- Explanations ---------------------------------------------------------------------------------

# Each pattern is an equation between what ranks hold and what the reference has; it is claimed only
# where it holds in every element.

# A factor of a handful of numbers fits anything: it has to be a size of the mesh then.
_FEW = 4
_MOST_PARTS = 8


def explain(case: CollectiveCase, near: Near) -> Diagnosis | None:
    """The patterns that fit, the most specific first; None if none does."""
    if not case.expected.is_floating_point():
        found = [*_stale(case, near)]
        return Diagnosis(patterns=tuple(found)) if found else None
    checks: tuple[Callable[[CollectiveCase, Near], Iterator[Pattern]], ...] = (
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


def _apart_from(case: CollectiveCase, name: str, term: Tensor, near: Near) -> Iterator[Pattern]:
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


def _zeros(case: CollectiveCase, near: Near) -> Iterator[Pattern]:
    del near
    value = case.value
    if value is not None and not bool(value.any()) and bool(case.expected.any()):
        yield Pattern(kind="zero", confidence=0.9, sentence="all zero: nothing arrives there")


def _stale(case: CollectiveCase, near: Near) -> Iterator[Pattern]:
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


def _permuted(case: CollectiveCase, near: Near) -> Iterator[Pattern]:
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


def _alike(case: CollectiveCase, value: Tensor, near: Near) -> bool:
    """Whether all ranks that are wrong are wrong in the same way."""
    whole = [held for held in case.held.values() if held.shape == case.expected.shape]
    return all(near(held, value) or near(held, case.expected) for held in whole)


def factor_name(case: CollectiveCase, factor: float, near: Near) -> tuple[str, float] | None:
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


def _scaled(case: CollectiveCase, near: Near) -> Iterator[Pattern]:
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
        sentence=f"{exact:g} times the reference, which is {words}: {_factor_meaning(case, exact)}",
        evidence={"factor": factor, "equals": words},
    )


def _factor_meaning(case: CollectiveCase, factor: float) -> str:
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


def _repeated_term(case: CollectiveCase, near: Near) -> Iterator[Pattern]:
    """The difference is a parameter, so many times, broadcast: a bias that every rank adds."""
    value = case.value
    if value is None or value.shape != case.expected.shape or not value.dim():
        return
    if not _alike(case, value, near):
        return
    difference = (value - case.expected).double()
    noise = near.reach * float(case.expected.double().square().mean().sqrt())
    for name, term in case.terms.items():
        times = _multiple_of_term(difference, term, near, noise)
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
