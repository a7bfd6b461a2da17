"""Tensors that are wrong in a known region, of every kind, and tensors that are not.

Each fault has a mask made by a rule of its own, and one of four errors put there: a factor, an
offset, zeros, other values. The rest of the tensor is the reference rounded another way.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator

import torch

from paritas.core.diagnosis.case import Case, Context

__all__ = ["Planted", "benign", "planted"]

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
Spoil = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Planted:
    """A case and where it is wrong.

    Attributes:
        name: kind, shape, variant, dtype and error.
        kinds: what the region may be called.
        region: its elements; None where they have no form.
        case: what is to be diagnosed.
    """

    name: str
    kinds: tuple[str, ...]
    region: torch.Tensor | None
    case: Case


def _doubled(value: torch.Tensor, _: torch.Generator) -> torch.Tensor:
    return value * 2


def _a_little_off(value: torch.Tensor, _: torch.Generator) -> torch.Tensor:
    return value * 1.3 if value.is_floating_point() else value + 1


def _zeroed(value: torch.Tensor, _: torch.Generator) -> torch.Tensor:
    return torch.zeros_like(value)


def _others(value: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    mixed = torch.randperm(value.numel(), generator=draw)
    return value.reshape(-1)[mixed].reshape(value.shape)


SPOILS: tuple[Spoil, ...] = (_doubled, _a_little_off, _zeroed, _others)

# kind, what it may be called, shape, the region as an index
BOXES: tuple[tuple[str, tuple[str, ...], tuple[int, ...], object], ...] = (
    ("row", ("row",), (12, 40), 5),
    ("row", ("row",), (64, 33), (slice(None), 20)),
    ("row", ("row",), (4, 6, 50), (slice(None), 2)),
    ("row", ("row",), (2, 8, 24, 16), (slice(None), 3)),
    ("row", ("row",), (2, 3, 5, 16, 8), (slice(None), slice(None), 4)),
    ("row", ("row",), (40, 7), 0),
    ("row", ("row", "tile tail"), (30, 129), (slice(None), 128)),
    ("row", ("row",), (128, 128), 127),
    ("slices", ("slices",), (200,), slice(37, 90)),
    ("slices", ("slices",), (50, 60), (slice(None), slice(11, 29))),
    ("slices", ("slices",), (2, 4, 130, 8), (slice(None), slice(None), slice(127, None))),
    ("slices", ("slices",), (48, 48), (slice(5, 20), slice(7, 41))),
    ("slices", ("slices",), (3, 20, 30), (1, slice(4, 9))),
    ("slices", ("slices",), (2, 3, 4, 9, 20), (1, slice(None), slice(None), slice(3, 7))),
    ("slices", ("slices",), (64, 20), ([3, 7],)),
    ("slices", ("slices",), (6, 90, 5), (slice(None), slice(None, 11))),
    ("slices", ("slices",), (40, 40), slice(1, None)),
    ("stride", ("stride",), (256,), slice(None, None, 4)),
    ("stride", ("stride",), (30, 64), (slice(None), slice(1, None, 2))),
    ("stride", ("stride",), (99, 8), slice(2, None, 3)),
    ("stride", ("stride",), (2, 50, 6), (slice(None), slice(4, None, 5))),
    ("stride", ("stride",), (4, 3, 8, 64), (..., slice(None, None, 8))),
    ("stride", ("stride",), (2, 2, 3, 40, 9), (..., slice(3, None, 7), slice(None))),
    ("stride", ("stride",), (128, 16), slice(15, None, 16)),
    ("stride", ("stride",), (60, 60), (slice(10, 50, 3), slice(None))),
    ("tile tail", ("tile tail",), (100,), slice(96, None)),
    ("tile tail", ("tile tail",), (20, 100), (slice(None), slice(96, None))),
    ("tile tail", ("tile tail",), (70, 9), slice(64, None)),
    ("tile tail", ("tile tail",), (3, 300, 4), (slice(None), slice(256, None))),
    ("tile tail", ("tile tail",), (2, 2, 130, 8), (slice(None), slice(None), slice(128, None))),
    ("tile tail", ("tile tail",), (2, 2, 2, 3, 40), (..., slice(32, None))),
    ("tile tail", ("tile tail",), (16, 128), (slice(None), slice(112, None))),
    ("tile tail", ("tile tail",), (19, 19), slice(16, None)),
)


def _diagonals() -> Iterator[tuple[str, tuple[str, ...], torch.Tensor]]:
    for shape in ((20, 20), (3, 24, 17), (2, 4, 16, 16), (30, 45)):
        for offset in (0, 1, -2):
            ones = torch.ones(shape)
            above = ones.triu(offset + 1)
            yield "diagonal", ("diagonal",), above.logical_xor(ones.triu(offset))
            yield "above diagonal", ("above diagonal",), above.bool()
            yield "below diagonal", ("below diagonal",), ones.tril(offset - 1).bool()
    one_head = torch.zeros(2, 4, 20, 20, dtype=torch.bool)
    one_head[:, 2] = torch.ones(20, 20).triu(1).bool()
    yield "above diagonal", ("above diagonal",), one_head


def _borders() -> Iterator[tuple[str, tuple[str, ...], torch.Tensor]]:
    for shape, width in (((40, 40), 1), ((3, 30, 50), 2), ((2, 3, 24, 24), 3), ((5, 64, 9), 1)):
        axis = len(shape) - 2
        inner = torch.zeros(shape, dtype=torch.bool)
        inner.narrow(axis, width, shape[axis] - 2 * width).fill_(value=True)
        yield "border", ("border",), ~inner
        both = inner.clone()
        side = torch.zeros_like(inner)
        side.narrow(axis + 1, width, shape[axis + 1] - 2 * width).fill_(value=True)
        yield "border", ("border",), ~(both & side)
    where = torch.arange(128)
    for tile, mask in ((16, where % 16 < 2), (32, where % 32 >= 29), (64, where % 64 < 1)):
        both = mask | (where % tile == tile - 1) if tile == 64 else mask
        yield "border", ("border", "stride"), both[None, :].expand(12, 128).clone()


def _flat_tails() -> Iterator[tuple[str, tuple[str, ...], torch.Tensor]]:
    for shape, start in (((30, 30), 830), ((4, 8, 25), 640 + 9), ((7, 11, 13), 900)):
        flat = torch.zeros(torch.Size(shape).numel(), dtype=torch.bool)
        flat[start:] = True
        yield "flat", ("flat",), flat.reshape(shape)


def _shapes() -> Iterator[tuple[str, tuple[str, ...], torch.Tensor]]:
    for kind, kinds, shape, index in BOXES:
        mask = torch.zeros(shape, dtype=torch.bool)
        mask[index] = True  # type: ignore[index]
        yield kind, kinds, mask
    yield from _diagonals()
    yield from _borders()
    yield from _flat_tails()
    for shape in ((64,), (9, 30), (3, 4, 20), (2, 2, 3, 4, 10)):
        yield "everywhere", ("everywhere",), torch.ones(shape, dtype=torch.bool)


def planted(seed: int) -> Iterator[Planted]:
    """All faults, each in three dtypes, with an error and a share of zeros that the seed draws."""
    for number, (kind, kinds, mask) in enumerate(_shapes()):
        for dtype in DTYPES:
            name = f"{kind} {number} {tuple(mask.shape)} {str(dtype).removeprefix('torch.')}"
            draw = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            yield _planted(name, kinds, mask, dtype, draw)
        yield _measured(f"{kind} {number} {tuple(mask.shape)} measured", kinds, mask, seed)
    yield from _ranks(seed)
    yield from _paddings(seed)
    yield from _lost(seed)


def _planted(
    name: str,
    kinds: tuple[str, ...],
    mask: torch.Tensor,
    dtype: torch.dtype,
    draw: torch.Generator,
    context: Context | None = None,
) -> Planted:
    pick, zeros = (int(torch.randint(4, (), generator=draw)) for _ in range(2))
    right = _values(mask.shape, dtype, draw)
    if zeros == 0:
        right = right.clamp(min=0)
    elif zeros == 1:
        right = torch.where(torch.rand(mask.shape, generator=draw) < 0.03, 0, right)
    spoil = SPOILS[pick]
    native = right.to(dtype)
    wrong = torch.where(mask, spoil(right, draw), right).to(dtype)
    candidate = torch.where(mask, wrong, _rounded(native, draw))
    kind = f"{name} {spoil.__name__} zeros={('relu', 'few', 'no', 'no')[zeros]}"
    return Planted(kind, kinds, mask, Case(candidate, native, context=context or Context()))


def _measured(name: str, kinds: tuple[str, ...], mask: torch.Tensor, seed: int) -> Planted:
    """With an arbiter and the noise that a judge measured; the error is 5 to 40 times that."""
    draw = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    right = torch.randn(mask.shape, generator=draw, dtype=torch.float64)
    noise = 2.0**-9 * (right.abs() + 0.5)
    native, candidate = (
        right + noise * torch.randn(mask.shape, generator=draw, dtype=torch.float64)
        for _ in range(2)
    )
    size = 5 + 35 * torch.rand(mask.shape, generator=draw)
    candidate = torch.where(mask, candidate + size * noise, candidate)
    case = Case(candidate.float(), native.float(), right, noise)
    return Planted(name, kinds, mask, case)


def _values(shape: torch.Size, dtype: torch.dtype, draw: torch.Generator) -> torch.Tensor:
    if dtype == torch.int64:
        return torch.randint(-50, 50, shape, generator=draw)
    return torch.randn(shape, generator=draw)


def _rounded(native: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Up to a rounding up or down, as another order of summing gives."""
    if not native.is_floating_point():
        return native
    by = torch.rand(native.shape, generator=draw) * 2 - 1
    return (native.double() * (1 + torch.finfo(native.dtype).eps * by)).to(native.dtype)


def _ranks(seed: int) -> Iterator[Planted]:
    cases = [((32, 20), 0, 4, 2), ((6, 64), 1, 8, 3), ((2, 24, 10), 1, 2, 0), ((40,), 0, 4, 3)]
    cases += [((16, 16), 0, 2, 1), ((3, 4, 8, 6), 2, 4, 1), ((96, 5), 0, 3, 1), ((8, 30), 0, 8, 5)]
    for shape, axis, ranks, rank in cases:
        mask = torch.zeros(shape, dtype=torch.bool)
        part = shape[axis] // ranks
        mask.narrow(axis, rank * part, part).fill_(value=True)
        name = f"rank {rank} of {ranks} {shape}"
        draw = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        context = Context(world={"tp": ranks})
        yield _planted(name, ("rank",), mask, torch.float32, draw, context)


def _paddings(seed: int) -> Iterator[Planted]:
    for number, (shape, pad) in enumerate(
        (
            ((12, 30), 0.0),
            ((8, 24), -1.0),
            ((4, 20, 6), 0.0),
            ((16, 50), 0.0),
            ((3, 5, 40), 2.5),
            ((6, 16, 16), 0.0),
            ((20, 20), 7.0),
            ((2, 3, 30, 4), 0.0),
        )
    ):
        draw = torch.Generator().manual_seed(1000 * seed + number)
        axis = 1 if len(shape) < 4 else 2
        length = shape[axis]
        kept = torch.randint(length // 2, length - 1, (shape[0],), generator=draw)
        where = torch.arange(length).reshape([-1 if i == axis else 1 for i in range(len(shape))])
        mask = (where >= kept.reshape([-1] + [1] * (len(shape) - 1))).expand(shape)
        right = torch.where(mask, pad, torch.randn(shape, generator=draw))
        leaked = torch.where(mask, torch.randn(shape, generator=draw), right)
        case = Case(leaked, right)
        kinds = ("padding", "zeros") if pad == 0 else ("padding",)
        yield Planted(f"padding {number} {shape} {pad}", kinds, mask.clone(), case)


def _lost(seed: int) -> Iterator[Planted]:
    for number, shape in enumerate([(200,), (20, 30), (4, 8, 16), (2, 3, 4, 30)] * 2):
        draw = torch.Generator().manual_seed(1000 * seed + number)
        right = torch.randn(shape, generator=draw)
        mask = torch.rand(shape, generator=draw) < 0.07
        bad = torch.where(mask, torch.nan if number < 4 else torch.inf, right)
        yield Planted(f"nonfinite {number} {shape}", ("nonfinite",), None, Case(bad, right))


def benign(seed: int) -> Iterator[Planted]:
    """Rounding alone, and wrong elements here and there by chance: no form may be seen in them."""
    for number, shape in enumerate(
        [(50,), (300,), (10, 10), (20, 33), (64, 64), (3, 16, 16), (2, 4, 8, 8), (2, 2, 3, 5, 9)]
    ):
        for dtype in DTYPES:
            for share in (0.0, 0.01, 0.05, 0.3):
                draw = torch.Generator().manual_seed(
                    zlib.crc32(f"{seed} {number} {share}".encode())
                )
                right = _values(torch.Size(shape), dtype, draw)
                native = right.to(dtype)
                stray = torch.rand(shape, generator=draw) < share
                candidate = torch.where(stray, (right + 9).to(dtype), _rounded(native, draw))
                name = f"benign {number} {shape} {dtype} {share}"
                yield Planted(name, ("scatter",), None, Case(candidate, native))
