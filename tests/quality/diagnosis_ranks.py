"""Values of a training step on several ranks, with a planted fault of a collective.

The exact values are computed in float64. What the reference and the ranks hold is rounded to the
precision of the run: float64, as in a lifted run, or float32 and bfloat16, where there is none.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

import torch

from paritas.core.diagnosis.case import Case, Context
from paritas.core.numerics.criterion import unit_roundoff
from quality.diagnosis_arrangements import Planted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
MESHES = ({"tp": 2}, {"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 4})
SHAPES = ((1,), (3,), (16,), (8, 5), (4, 8, 16))
# A value that went through several layers is so many roundings away from the exact one.
_ROUNDINGS = 2.0


@dataclasses.dataclass
class RankMaker:
    """Makes cases of one seed, one dtype and one mesh."""

    generator: torch.Generator
    dtype: torch.dtype
    mesh: dict[str, int]

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.values())

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def terms(self, shape: tuple[int, ...]) -> list[Tensor]:
        return [self.normal(*shape) for _ in range(self.ranks)]

    def rounded(self, value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        size = value.abs() + value.square().mean().sqrt()
        noise = _ROUNDINGS * unit_roundoff(self.dtype) * size
        return (value + noise * self.normal(*value.shape)).to(self.dtype)

    def case(self, item: str, wrong: Tensor, right: Tensor, **known: object) -> Case:
        """The case, with every tensor that is known rounded for itself."""
        rounded: dict[str, object] = {}
        for name, value in known.items():
            if isinstance(value, dict):
                # Replicas are equal bit for bit.
                copies = {id(one): self.rounded(one) for one in value.values()}
                rounded[name] = {key: copies[id(one)] for key, one in value.items()}
            else:
                rounded[name] = value
        unit = unit_roundoff(self.dtype)
        context = Context(world=self.mesh, item=item, unit=unit, **rounded)  # type: ignore[arg-type]
        return Case(self.rounded(wrong), self.rounded(right), context=context)


_Made = "Iterator[tuple[str, str, Case]]"


def _makers(seed: int) -> Iterator[RankMaker]:
    for number, (dtype, mesh) in enumerate(itertools.product(DTYPES, MESHES)):
        generator = torch.Generator().manual_seed(1000 * seed + number)
        yield RankMaker(generator, dtype, dict(mesh))


def _named(maker: RankMaker, made: _Made) -> Iterator[Planted]:
    mesh = "x".join(map(str, maker.mesh.values()))
    for name, kind, case in made:
        shape = "x".join(map(str, case.shape))
        title = f"{name}, mesh {mesh}, shape {shape}, {maker.dtype}"
        yield Planted(title, (kind,) if kind else (), case)


def planted(seed: int) -> Iterator[Planted]:
    """Every kind on every mesh, in every shape and precision."""
    for maker in _makers(seed):
        for shape in SHAPES:
            for source in (_scales, _reductions, _shards, _states, _biases):
                yield from _named(maker, source(maker, shape))
        yield from _named(maker, _losses(maker))


def _scales(make: RankMaker, shape: tuple[int, ...]) -> _Made:
    right = make.normal(*shape)
    factors = {float(n) ** power for n in make.mesh.values() for power in (-2, -1, 1, 2)}
    for factor, item in itertools.product(sorted(factors), ("gradient", "module")):
        yield f"{factor:g} times the {item}", "scale", make.case(item, factor * right, right)
    if right.numel() >= 4:
        yield "1.37 times the gradient", "scale", make.case("gradient", 1.37 * right, right)
    yield "no gradient", "zeros", make.case("gradient", 0 * right, right)


def _losses(make: RankMaker) -> _Made:
    right = make.normal().abs()
    for factor in (make.ranks, 1 / make.ranks):
        yield f"{factor:g} times the loss", "scale", make.case("loss", factor * right, right)


def _reductions(make: RankMaker, shape: tuple[int, ...]) -> _Made:
    kind, terms = "missing reduction", make.terms(shape)
    held, total = dict(enumerate(terms)), torch.stack(terms).sum(0)
    for item, right in (("module", total), ("gradient", total), ("gradient", total / make.ranks)):
        yield f"{item} never reduced", kind, make.case(item, terms[0], right, held=held)
    bias = make.normal(shape[-1])
    biased = {rank: term + bias for rank, term in held.items()}
    made = make.case("module", biased[0], total + bias, held=biased, added={"bias": bias})
    yield "never reduced, and a bias", kind, made
    made = make.case("module", terms[-1], total, summands=held)
    yield "the last term alone", "one rank's part", made
    if make.ranks > 2:
        some = total - terms[-1]
        groups = {**dict.fromkeys(range(make.ranks - 1), some), make.ranks - 1: terms[-1]}
        yield "one rank left out", kind, make.case("module", some, total, held=groups)
    if len(make.mesh) == 2:
        rows, columns = make.mesh.values()
        table = torch.stack(terms).reshape(rows, columns, *shape)
        along, across = table.sum(1), table.sum(0)
        places = list(itertools.product(range(rows), range(columns)))
        wholes = {rank: along[row] for rank, (row, _) in enumerate(places)}
        wrong = {rank: across[column] for rank, (_, column) in enumerate(places)}
        same = {rank: wrong[rank] for rank in range(columns)}
        made = make.case("module", wrong[0], wholes[0], held=same, everywhere=wrong, wholes=wholes)
        yield "summed along the other axis", "wrong axis", made


def _shards(make: RankMaker, shape: tuple[int, ...]) -> _Made:
    right = make.normal(make.ranks * shape[0], *shape[1:])
    parts = right.chunk(make.ranks)
    wrong = torch.cat([parts[1], parts[0], *parts[2:]])
    for item in ("initial", "gradient"):
        yield f"{item} of the next rank", "wrong rank's shard", make.case(item, wrong, right)
    backwards = torch.cat(parts[::-1])
    held = dict.fromkeys(range(make.ranks), backwards)
    made = make.case("module", backwards, right, held=held)
    yield "joined backwards", "wrong rank's shard", made


def _states(make: RankMaker, shape: tuple[int, ...]) -> _Made:
    before, right = make.normal(*shape), make.normal(*shape)
    earlier = {"the initial value": before}
    for item in ("parameter", "buffer"):
        yield f"a stale {item}", "stale", make.case(item, before, right, earlier=earlier)
    held = {rank: right if rank else before for rank in range(make.ranks)}
    made = make.case("buffer", before, right, earlier=earlier, held=held)
    yield "a buffer stale on rank 0", "stale", made
    zero = {"the initial value": torch.tensor(0)}
    made = make.case("buffer", torch.tensor(0), torch.tensor(1), earlier=zero)
    yield "a count that stands still", "stale", made


def _biases(make: RankMaker, shape: tuple[int, ...]) -> _Made:
    right, bias, other = make.normal(5, *shape), make.normal(shape[-1]), make.normal(shape[-1])
    known = {"bias": bias, "other.bias": other}
    made = make.case("module", right + (make.ranks - 1) * bias, right, biases=known)
    yield "a bias on every rank", "repeated bias", made
    yield "no bias", "missing bias", make.case("module", right - bias, right, biases=known)


def unexplained(seed: int) -> Iterator[Planted]:
    """Faults that have no name here: every claim about them is wrong."""
    for maker in _makers(seed):
        for shape in SHAPES:
            yield from _named(maker, _nameless(maker, shape))


def _nameless(make: RankMaker, shape: tuple[int, ...]) -> _Made:
    right, bias = make.normal(*shape), make.normal(shape[-1])
    terms = dict(enumerate(make.terms(shape)))
    known = {"held": terms, "biases": {"bias": bias}, "added": {"bias": bias}, "summands": terms}
    for item in ("module", "gradient"):
        yield f"another {item}", "", make.case(item, make.normal(*shape), right, **known)
        bent = right + 0.3 * torch.sin(20 * right)
        yield f"a bent {item}", "", make.case(item, bent, right, **known)
    missing = torch.stack([*terms.values(), make.normal(*shape)]).sum(0)
    yield "terms and something else", "", make.case("module", terms[0], missing, held=terms)
    if right.numel() > 4:
        spoiled = make.ranks * right
        spoiled.view(-1)[::4] += 1
        yield "not all of it scaled", "", make.case("gradient", spoiled, right)
    earlier = {"the initial value": make.normal(*shape)}
    made = make.case("parameter", make.normal(*shape), right, earlier=earlier)
    yield "a step in another direction", "", made
    loss = make.normal().abs()
    yield "another loss", "", make.case("loss", make.normal().abs(), loss)
    count = torch.randint(0, 8, (), generator=make.generator)
    zero = {"the initial value": torch.tensor(0)}
    if int(count) != 4:
        made = make.case("buffer", count, torch.tensor(4), earlier=zero)
        yield "another count", "", made


def benign(seed: int) -> Iterator[Planted]:
    """Nothing but rounding."""
    for maker in _makers(seed):
        for shape in SHAPES:
            right = maker.normal(*shape)
            held = dict(enumerate([right] * maker.ranks))
            made = maker.case("gradient", right, right, held=held)
            yield from _named(maker, iter([("rounding", "", made)]))
