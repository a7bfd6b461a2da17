"""Pairs on a CUDA device, measured by kernels of our own, against the same pairs on the CPU."""

from __future__ import annotations

import math
import warnings

import msgspec
import pytest
import torch
from torch import Tensor

from paritas.core.numerics import metrics
from paritas.core.numerics.metrics import pair_metrics
from paritas.core.results.items import Metrics

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SUMS = {"mean_abs", "rmse", "rel_l2", "cosine", "pcc"}
# Sums of float32 numbers are taken in float64, those of 16 narrow ones in float32.
WITHIN = {torch.float32: 1e-12, torch.bfloat16: 16 * 2.0**-24, torch.float16: 16 * 2.0**-24}


def assert_same(reference: Tensor, candidate: Tensor) -> None:
    """What kernels find on the device is what torch's operators find on the CPU."""
    left, right = reference.cuda(), candidate.cuda()
    if not metrics.fits_kernels(left, right):
        pytest.skip("needs Triton and a device of the Hopper generation or later")
    got, want = pair_metrics(left, right), pair_metrics(reference, candidate)
    for name in Metrics.__struct_fields__:
        mine, theirs = getattr(got, name), getattr(want, name)
        if name in SUMS:
            error = WITHIN[reference.dtype]
            slack = error if name in {"cosine", "pcc"} else 0.0
            assert mine == pytest.approx(theirs, rel=error, abs=slack, nan_ok=True), name
        elif isinstance(theirs, float) and math.isnan(theirs):
            assert math.isnan(mine), name
        else:
            assert mine == theirs, name


def pair(dtype: torch.dtype, numel: int, noise: float = 1e-2) -> tuple[Tensor, Tensor]:
    torch.manual_seed(numel)
    reference = torch.randn(numel)
    return reference.to(dtype), (reference * (1 + noise * torch.randn(numel))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 3, 4096, 3_000_001])
def test_every_figure_is_that_of_the_cpu_whatever_the_size(dtype: torch.dtype, numel: int) -> None:
    assert_same(*pair(dtype, numel))


def unrelated(r: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return r, r.flip(0).contiguous()


def equal(r: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return r, r.clone()


def sparse(r: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return r.relu(), torch.where(c > 1, c, 0)


def negative_zeros(r: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return r * 0, -(c * 0).abs()


def far_mean(r: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return r * 0.1 + 30, c * 0.1 + 30


def other_means(r: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return r * 0.1 + 30, c * 0.1 - 900


def other_scale(r: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return r, r * 3000


def constant(r: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return torch.full_like(r, 3.5), c


def zeroed(r: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    c = r.clone()
    c[::977] = 0
    return r, c


def faint(r: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return r * 2.0**-70, c * 2.0**-70


def large(r: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return r * 2.0**66, c * 2.0**66


def one_large(r: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    r, c = r.clone(), c.clone()
    r[123_456], c[123_457] = 60_000.0, -60_000.0
    return r, c


def one_step_apart(r: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return r, (r.view(torch.int16 if r.itemsize == 2 else torch.int32) ^ 1).view(r.dtype)


def tiny(r: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    least = torch.finfo(r.dtype).tiny
    return r * least, c * least


def huge(r: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    most = torch.finfo(r.dtype).max / 8
    return (r * most).clamp(-7 * most, 7 * most), (-c * most).clamp(-7 * most, 7 * most)


def alike_infinities(r: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    r, c = r.clone(), c.clone()
    for place, value in ((7, math.inf), (70_001, -math.inf), (150_000, math.nan)):
        r[place] = c[place] = value
    return r, c


def lost_numbers(r: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    r, c = alike_infinities(r, c)
    c[180_000], c[150_000], r[190_000] = math.nan, 1.0, -math.inf
    return r, c


def one_tie_after_another(r: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    c = r.clone()
    c[100_003::1000] = 0
    r = r.clone()
    r[100_003::1000] = 64
    return r, c


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "change",
    [
        unrelated, equal, sparse, negative_zeros, far_mean, other_means, other_scale, constant,
        zeroed, faint, large, one_large, one_step_apart, tiny, huge, alike_infinities,
        lost_numbers, one_tie_after_another,
    ],
)  # fmt: skip
def test_every_figure_is_that_of_the_cpu_whatever_the_numbers(dtype: torch.dtype, change) -> None:
    assert_same(*change(*pair(dtype, 200_003)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_bits_at_all(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(-(2**31), 2**31, (2, 100_000), generator=generator, dtype=torch.int32)
    assert_same(raw[0].view(dtype), raw[1].view(dtype))
    near = raw[0] ^ (raw[1] & 0x00010001)
    assert_same(raw[0].view(dtype), near.view(dtype))


def test_the_shape_is_that_of_the_index() -> None:
    reference, candidate = pair(torch.float32, 60_000)
    assert_same(reference.view(30, 40, 50), candidate.view(30, 40, 50))


def test_other_strides_and_dtypes_go_another_way() -> None:
    x = torch.randn(64, 64, device="cuda")
    assert not metrics.fits_kernels(x.T, x.T)
    assert not metrics.fits_kernels(x.double(), x.double())
    assert not metrics.fits_kernels(x, x.half())
    assert not metrics.fits_kernels(x.view(-1)[1:], x.view(-1)[1:])
    want = msgspec.structs.asdict(pair_metrics(x.T.cpu(), (x.T * 1.01).cpu()))
    got = msgspec.structs.asdict(pair_metrics(x.T, x.T * 1.01))
    assert got.pop("max_abs_index") == want.pop("max_abs_index")
    assert got == pytest.approx(want, rel=1e-5)


def test_nothing_waits_for_the_device_before_the_figures_are_asked_for() -> None:
    reference, candidate = (side.cuda() for side in pair(torch.bfloat16, 100_000))
    if not metrics.fits_kernels(reference, candidate):
        pytest.skip("needs Triton and a device of the Hopper generation or later")
    metrics.begin_pair(reference, candidate).finish()  # compiled now
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        pending = [metrics.begin_pair(reference, candidate) for _ in range(3)]
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("default")
    assert all(one.finish() is not None for one in pending)
