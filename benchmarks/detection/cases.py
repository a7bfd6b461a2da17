"""Which faults and which rewrites are tried: drawn by seed, half of them to tune by."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, TypeVar

import msgspec
from benchmarks.detection.benign import BenignSite, benign_sites
from benchmarks.detection.families import FAMILIES
from benchmarks.detection.programs import DTYPES, impossible, names

from paritas.mutants.planting import FaultSite, sites

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from paritas.mutants.programs import FlatProgram

S = TypeVar("S")

# A seed is another program: other weights, inputs, widths, activations. What is tuned is tuned on
# the even ones, and what is reported was never looked at before: the odd ones.
HALVES = {"tuning": 0, "held out": 1}


class Unit(msgspec.Struct, frozen=True):
    """One program, with how many cases of it are tried.

    Attributes:
        name: as `programs.names()` has it.
        seed: even for tuning, odd for what is held out.
        dtype: float32, bfloat16, float16, autocast, tf32.
        device: where it runs.
        mutants: how many faults are planted, one at a time.
        graded: how many faults of sizes near the limit.
        benign: how many rewrites are made, one at a time.
    """

    name: str
    seed: int
    dtype: str
    device: str
    mutants: int
    graded: int
    benign: int

    @property
    def half(self) -> str:
        """Which half the seed belongs to."""
        return next(half for half, parity in HALVES.items() if self.seed % 2 == parity)

    @property
    def is_family(self) -> bool:
        """Whether it is a model, not a single operator."""
        return self.name in FAMILIES

    def __str__(self) -> str:
        where = "" if self.device == "cpu" else f" on {self.device}"
        return f"{self.name} {self.seed} {self.dtype}{where}"


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is drawn of a program, in each half."""

    seeds: int
    mutants: int
    graded: int
    benign: int


# So many times as many sites are looked at as are taken.
CHOICE = 3
# A model has hundreds of places for a fault, an operator a handful.
MODEL, OPERATOR = (
    Size(seeds=3, mutants=16, graded=4, benign=10),
    Size(1, mutants=5, graded=2, benign=4),
)


def units(
    *,
    halves: Iterable[str] = tuple(HALVES),
    dtypes: Iterable[str] = DTYPES,
    device: str = "cpu",
    share: float = 1.0,
    only: Iterable[str] = (),
    seeds: Iterable[int] = (),
) -> list[Unit]:
    """Every program that is tried, in an order in which any beginning is a fair sample.

    Args:
        halves: of `HALVES`.
        dtypes: of `EVERY_DTYPE`.
        device: where programs run.
        share: of the units, drawn.
        only: names of programs; all by default.
        seeds: of every program, each in the half it belongs to; as many as its `Size` says by
            default.
    """
    seeds = tuple(seeds)
    wanted = [name for name in names() if not only or name in set(only)]
    found = [
        Unit(name, seed, dtype, device, size.mutants, size.graded, size.benign)
        for name in wanted
        for size in [MODEL if name in FAMILIES else OPERATOR]
        for half in halves
        for seed in seeds or range(2 * size.seeds)
        if seed % 2 == HALVES[half]
        for dtype in dtypes
        if impossible(name, dtype) is None
    ]
    found.sort(key=lambda unit: random.Random(str(unit)).random())
    return found[: max(1, round(share * len(found)))]


def drawn_mutants(unit: Unit, program: FlatProgram) -> list[FaultSite]:
    """Faults of a unit, kinds of fault in turn; more than it takes, to choose from by effect."""
    return _in_turns(sites(program), lambda site: site.mutation, unit)[: CHOICE * unit.mutants]


def drawn_benign(unit: Unit, program: FlatProgram) -> list[BenignSite]:
    """Rewrites of a unit, kinds of rewrite in turn; more than it takes, as some do not apply."""
    return _in_turns(benign_sites(program), lambda site: site.rewrite, unit)[: CHOICE * unit.benign]


def _in_turns(found: list[S], kind_of: Callable[[S], str], unit: Unit) -> list[S]:
    """The sites in an order by chance in which each kind comes once before any comes twice."""
    draw = random.Random(f"{unit} {len(found)}")
    by_kind: dict[str, list[S]] = {}
    for site in draw.sample(found, len(found)):
        by_kind.setdefault(kind_of(site), []).append(site)
    kinds = draw.sample(sorted(by_kind), len(by_kind))
    rounds = max(map(len, by_kind.values()), default=0)
    return [
        by_kind[kind][turn] for turn in range(rounds) for kind in kinds if turn < len(by_kind[kind])
    ]
