"""Tensors that are wrong in a known way, and tensors that are not wrong: for the diagnosis.

Every planted case has a kind, a name that says how it was made, and a `Case` as the judge would
hand it over: with its measured noise, or without. `effect` says how far above the noise it is.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from paritas.core.diagnosis.case import Case, Context
from paritas.core.numerics.criterion import unit_roundoff

__all__ = ["Planted", "benign_cases", "planted_cases"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((24,), (6, 16), (4, 5, 32), (2, 3, 16, 16), (64, 200))


@dataclasses.dataclass(frozen=True)
class Planted:
    """A case and what is wrong with it."""

    kind: str
    name: str
    case: Case

    @property
    def effect(self) -> float:
        """The rms of the error over its noise on the wrong elements; infinite if not finite."""
        case = self.case
        if case.is_exact:
            return math.inf
        z = (case.error.abs() / case.allowed.clamp(min=1e-300))[case.wrong]
        if not bool(torch.isfinite(z).all()):
            return math.inf
        return float(z.square().mean().sqrt()) if z.numel() else 0.0


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where a fault is planted: values, how they are stored, and what the judge measured."""

    right: Tensor
    dtype: torch.dtype
    generator: torch.Generator
    with_noise: bool
    region: tuple[slice | int, ...] | None

    def case(self, wrong: Tensor, context: Context | None = None) -> Case:
        """The case of a candidate that should be `right` and is `wrong` in the region."""
        candidate = wrong
        if self.region is not None:
            candidate = self.right.clone()
            candidate[self.region] = wrong[self.region]
        noise = measured_noise(self.right, self.dtype) if self.with_noise else None
        candidate = candidate * (1 + unit_roundoff(self.dtype) * self.uniform() / 2)
        reference = self.right * (1 + unit_roundoff(self.dtype) * self.uniform() / 2)
        return Case(
            candidate.to(self.dtype),
            reference.to(self.dtype),
            self.right,
            noise,
            context or Context(),
        )

    def uniform(self) -> Tensor:
        """Between -1 and 1, one for each element."""
        return 2 * torch.rand(self.right.shape, generator=self.generator, dtype=torch.float64) - 1

    def normal(self, *shape: int) -> Tensor:
        """Normally distributed numbers in float64, representable in the dtype."""
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return drawn.to(self.dtype).double()


Make = Callable[[Setting], tuple[str, Case]]


def measured_noise(right: Tensor, dtype: torch.dtype) -> Tensor:
    """As the judge has it of a program of few roundings."""
    unit = unit_roundoff(dtype)
    spread = unit * right.abs() / math.sqrt(3)
    return torch.maximum(spread, spread.square().mean().sqrt() / 2) + unit * right.abs() / 2


def settings(seed: int, *, regional: bool = True) -> Iterator[Setting]:
    """Sizes, dtypes, with and without noise, the whole tensor and a region of it."""
    generator = torch.Generator().manual_seed(seed)
    for shape in SHAPES:
        for dtype in FLOATS:
            for with_noise in (True, False):
                region: list[tuple[slice | int, ...] | None] = [None]
                if regional:
                    region.append((slice(shape[0] // 2, None),))
                for where in region:
                    right = torch.randn(shape, generator=generator, dtype=torch.float64)
                    scale = 2.0 ** int(torch.randint(-3, 4, (), generator=generator))
                    yield Setting(right * scale, dtype, generator, with_noise, where)


def planted_cases(seed: int, step: int = 1) -> Iterator[Planted]:
    """All faults, each in all settings that it can be planted in; of these each `step`-th."""
    from quality.diagnosis_values_faults import FAULTS, exact_faults

    places = itertools.count()
    for kind, regional, makers in FAULTS:
        for number, make in enumerate(makers):
            for setting in settings(seed + number, regional=regional):
                if kind.startswith("axis") and setting.right.dim() == 1:
                    continue  # one number for each element: there is nothing along which to see it
                if next(places) % step:
                    continue
                name, case = make(setting)
                extent = "whole" if setting.region is None else "region"
                noise = "measured" if setting.with_noise else "by dtype"
                dtype = str(setting.dtype).removeprefix("torch.")
                shape = "x".join(map(str, case.shape))
                yield Planted(kind, f"{name}, {shape} {dtype}, {extent}, noise {noise}", case)
    yield from exact_faults(seed)


def benign_cases(seed: int, count: int) -> Iterator[Planted]:
    """Candidates that differ by rounding only, of 1 to 100 000 elements."""
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        dtype = FLOATS[number % 3]
        sizes = ((1,), (2,), (3, 1), (7,), (4, 8), (16, 16), (3, 5, 17), (1, 96), (100, 100))
        shape = (100, 1000) if number % 50 == 0 else sizes[number % len(sizes)]
        right = torch.randn(shape, generator=generator, dtype=torch.float64)
        styles = (
            right,
            torch.full(shape, 1 / 3, dtype=torch.float64),
            right.softmax(-1),
            right.relu(),
            right * 10.0 ** torch.randint(-4, 4, shape, generator=generator),
        )
        right = styles[number % len(styles)]
        yield Planted(
            "benign", f"{number} {shape} {dtype}", _benign(right, dtype, generator, number)
        )


def _benign(right: Tensor, dtype: torch.dtype, generator: torch.Generator, number: int) -> Case:
    unit = unit_roundoff(dtype)

    def rounded() -> Tensor:
        # One rounding shared by all, as of a constant, and one of each element.
        shared = 2 * torch.rand((), generator=generator, dtype=torch.float64) - 1
        each = 2 * torch.rand(right.shape, generator=generator, dtype=torch.float64) - 1
        return (right * (1 + unit * shared / 2) * (1 + unit * each / 2)).to(dtype)

    with_noise = number % 2 == 0
    noise = measured_noise(right, dtype) if with_noise else None
    arbiter = right if number % 3 else None
    factors = torch.randn(right.shape, generator=generator, dtype=torch.float64)
    context = Context(
        operator="aten.mul.Tensor",
        inputs=(right.to(dtype), factors.to(dtype)),
        world={"dp": 4},
        named={"bias": factors[:1].flatten()[: right.shape[-1]].to(dtype)},
        earlier={"step 1": (right * 2).to(dtype)},
    )
    return Case(rounded(), rounded(), arbiter, noise, context)
