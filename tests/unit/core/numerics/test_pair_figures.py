"""Figures of pairs: against `pair_metrics`, which is held to exact arithmetic, and definitions."""

from __future__ import annotations

import math
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import given

from paritas.core.errors import UsageError
from paritas.core.numerics import bits
from paritas.core.numerics.block_sums import BLOCK, dot, total
from paritas.core.numerics.metrics import bitwise_equal, pair_metrics
from paritas.core.numerics.pair_figures import measure_pair, pair_figures, quick_figures
from paritas.core.numerics.statistics import summarize
from paritas.core.results.items import Extremes
from unit.core.numerics.exact import DTYPES, INF, NAN, SHAPES, arrays, elements, laid_out, pairs
from unit.core.numerics.noisy_pairs import EXACT, LARGE, NARROW, approx, noisy, use_tiny_blocks

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

WORST = {"max_abs_index", "max_abs_reference", "max_abs_candidate"}
WIDE = (torch.int64, torch.uint64)


def check(reference, candidate, tolerance=EXACT):
    """Compare with `pair_metrics` and with the definitions of the rest."""
    figures = pair_figures(reference, candidate)
    assert figures.identical == bitwise_equal(reference, candidate)
    for side, found in ((reference, figures.reference), (candidate, figures.candidate)):
        stats = summarize(side)
        ends = (found.minimum, found.maximum)
        assert ends == (stats.minimum, stats.maximum)
        if stats.mean is None:
            assert found.mean is None
            continue
        spread = max(abs(stats.minimum), abs(stats.maximum))
        assert found.mean == approx(stats.mean, rel=tolerance, absolute=tolerance * spread)
    check_quick(reference, candidate, figures, tolerance)
    if figures.identical:
        finite = all(summarize(side).is_finite for side in (reference, candidate))
        assert (figures.metrics, figures.mean_rel) == (None, 0.0)
        assert figures.kl_divergence == approx(0.0 if finite else NAN)
        return figures
    check_metrics(figures.metrics, pair_metrics(reference, candidate), tolerance)
    expected = mean_ratio(reference, candidate, figures.metrics)
    assert figures.mean_rel == approx(expected, rel=tolerance)
    return figures


def check_metrics(found, expected, tolerance):
    for name in expected.__struct_fields__:
        value = getattr(expected, name)
        if isinstance(value, float) and name != "max_ulp":
            absolute = tolerance / 10 if name in {"cosine", "pcc"} else 0.0
            value = approx(value, rel=tolerance, absolute=absolute)
        if name == "max_ulp" and value is not None:
            value = approx(value, rel=1e-15)  # which float64 holds up to 2**53
        if tolerance > EXACT and name in WORST:
            continue  # another may be as bad, up to the rounding of float32
        assert getattr(found, name) == value, name
    if tolerance > EXACT and found.max_abs_index is not None and found.max_abs < INF:
        assert abs(found.max_abs_candidate - found.max_abs_reference) == found.max_abs


def check_quick(reference, candidate, figures, tolerance):
    quick, measured = quick_figures(reference, candidate), measure_pair(reference, candidate)
    assert quick.identical == figures.identical
    assert quick.rms_reference == approx(measured.rms_reference, rel=tolerance)
    metrics = figures.metrics
    for name in ("max_abs", "rel_l2", "rmse", "nonfinite_mismatches"):
        expected = 0.0 if metrics is None else getattr(metrics, name)
        assert getattr(quick, name) == approx(expected, rel=tolerance), name


def mean_ratio(reference, candidate, metrics):
    if metrics.nonfinite_mismatches:
        return INF
    if {reference.dtype, candidate.dtype} <= set(WIDE):  # float64 does not hold their differences
        sides = (elements(side, pairs=False) for side in (reference, candidate))
        exact = [(x, y) for (x,), (y,) in zip(*sides, strict=True)]
        ratios = [(abs(y - x) / abs(x) if x else INF) if x != y else 0 for x, y in exact]
        return float(sum(ratios)) / len(ratios) if ratios else 0.0
    wide = torch.complex128 if reference.is_complex() or candidate.is_complex() else torch.float64
    r, c = (side.to(wide).reshape(-1) for side in (reference, candidate))
    kept = r.isfinite() & c.isfinite()
    r, c = r[kept], c[kept]
    ratios = torch.where(r == c, 0.0, (c - r).abs() / r.abs())
    return ratios.mean().item() if ratios.numel() else 0.0


@pytest.fixture
def _tiny_blocks(monkeypatch):
    use_tiny_blocks(monkeypatch)


# --- any tensors ----------------------------------------------------------------------------------


@given(pairs())
def test_figures_are_right_for_any_dtype_and_stride(pair):
    check(*pair)


@given(SHAPES, st.data())
def test_figures_are_right_between_different_dtypes(shape, data):
    dtypes = st.sampled_from(
        [dtype for dtype in DTYPES if dtype not in (torch.int64, torch.uint64)]
    )
    pair = [data.draw(dtypes.flatmap(lambda dtype: arrays(dtype, shape))) for _ in range(2)]
    check(*pair)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("layout", ["contiguous", "permuted", "stepped", "unaligned"])
@pytest.mark.usefixtures("_tiny_blocks")
def test_blocks_are_put_together(dtype, layout):
    reference, candidate = (x.reshape(5, 4, 6) for x in noisy(120, 0.1, dtype=dtype))
    candidate[1] = reference[1]
    check(reference, laid_out(candidate, layout), NARROW)
    reference[0, 0, 2], candidate[0, 0, 2], reference[4] = NAN, NAN, INF
    check(laid_out(reference, layout), candidate, NARROW)
    candidate[4] = INF
    figures = check(laid_out(reference, layout), candidate, NARROW)
    assert math.isnan(figures.kl_divergence)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("noise", [1e-7, 1e-5, 1e-3, 0.1, 3.0, 100.0])
@pytest.mark.parametrize("scale", [1e-30, 1e-9, 1.0, 1e12, 1e30])
def test_large_float32_tensors_are_right_to_a_millionth(noise, scale):
    check(*noisy(noise=noise, scale=scale), NARROW)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_large_tensors_of_other_dtypes(dtype):
    check(*noisy(noise=0.01, dtype=dtype), NARROW)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool])
def test_large_tensors_of_integers(dtype):
    reference, candidate = (x.abs().to(dtype) for x in noisy(noise=0.5, scale=2.0))
    check(reference, candidate, NARROW)


def test_one_difference_among_equal_blocks():
    reference, _ = noisy()
    candidate = reference.clone()
    candidate[BLOCK + 5] += 1.0
    figures = check(reference, candidate, NARROW)
    assert figures.metrics.mismatched == 1
    assert figures.metrics.max_abs_index == (BLOCK + 5,)


# --- where sums cancel, or leave their range ------------------------------------------------------


@pytest.mark.parametrize("mean", [3.0, 1e3, 1e5])
def test_a_large_mean_does_not_ruin_the_correlation(mean):
    reference, candidate = noisy(noise=0.1, mean=mean)
    figures = check(reference, candidate, NARROW)
    assert 0.99 < figures.metrics.pcc < 0.999
    reference[0] = -1e9
    check(reference, candidate, NARROW)


def test_a_shift_leaves_the_correlation_at_one():
    reference, _ = noisy(scale=0.25)
    shifted = check(reference.double(), reference.double() + 1000.0).metrics
    assert shifted.pcc == approx(1.0, rel=1e-15)
    check(reference, reference + 1000.0, NARROW)


def test_means_that_differ_from_block_to_block():
    reference, candidate = noisy(noise=0.1)
    steps = torch.arange(LARGE) // BLOCK * 500.0
    check(reference + steps, candidate + steps, NARROW)


@pytest.mark.parametrize("numel", [1000, LARGE])
def test_a_constant_has_no_correlation(numel):
    constant, varied = torch.full((numel,), 0.1), torch.linspace(0, 1, numel)
    for pair in ((constant, varied), (varied, constant), (constant, constant + 1)):
        assert math.isnan(check(*pair, NARROW).metrics.pcc)


def test_one_minus_the_cosine_keeps_its_digits():
    reference, candidate = noisy(noise=1e-6)
    r, c = reference.double(), candidate.double()
    expected = ((c - r).square().sum() - (c.norm() - r.norm()) ** 2) / (2 * r.norm() * c.norm())
    assert expected < 1e-12
    found = pair_figures(reference, candidate).metrics.cosine
    assert 1.0 - found == approx(expected.item(), rel=1e-3)  # a cosine has no more digits


def test_values_at_odd_addresses():
    reference, candidate = noisy()
    odd = bytearray(4 * LARGE + 1)
    odd[1:] = candidate.numpy().tobytes()
    check(reference, torch.frombuffer(odd, dtype=torch.float32, offset=1), NARROW)


def test_relative_differences_that_float32_does_not_hold():
    reference, candidate = noisy()
    reference[3], candidate[3] = 1e-40, 1.0
    assert check(reference, candidate, NARROW).metrics.max_rel > 1e39
    reference[3] = 0.0
    assert check(reference, candidate, NARROW).mean_rel == INF


def test_squares_that_leave_float64():
    reference, candidate = noisy(100, 0.1, dtype=torch.float64)
    for scale in (1e-200, 1e200):
        figures = check(reference * scale, candidate * scale)
        assert figures.kl_divergence >= 0.0
        assert check(reference * scale, reference * scale).identical


def test_integers_that_float64_does_not_hold():
    reference = torch.tensor([2**62 + 1, 5, -(2**60) - 3])
    candidate = reference + torch.tensor([2, 0, -1])
    metrics = check(reference, candidate).metrics
    assert (metrics.mismatched, metrics.max_abs) == (2, 2.0)


def test_sums_in_float32_lose_less_than_a_millionth():
    generator = torch.Generator().manual_seed(0)
    for numel in (5, 4096, 4097, BLOCK):
        x, y = torch.rand(2, numel, generator=generator)
        assert total(x.numpy()) == approx(x.double().sum().item(), rel=NARROW)
        assert dot(x.numpy(), y.numpy()) == approx(x.double().dot(y.double()).item(), rel=NARROW)


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [10, LARGE])
def test_zeros_of_different_signs_are_not_identical_but_do_not_differ(numel):
    reference = torch.zeros(numel)
    figures = check(reference, -reference)
    assert not figures.identical
    assert (figures.metrics.mismatched, figures.metrics.cosine) == (0, 1.0)
    assert (figures.mean_rel, figures.kl_divergence) == (0.0, 0.0)


@pytest.mark.parametrize("numel", [10, LARGE])
def test_nans_are_the_same_whatever_their_bits(numel):
    reference, _ = noisy(numel)
    reference[7] = NAN
    candidate = reference.clone()
    candidate[7] = -candidate[7]
    figures = check(reference, candidate, NARROW)
    assert figures.identical
    candidate[8] += 1.0
    assert not check(reference, candidate, NARROW).identical


def test_bits_are_compared_without_the_help_of_the_c_library(monkeypatch):
    monkeypatch.setattr(bits, "_memcmp", None)
    reference, _ = noisy()
    candidate = reference.clone()
    assert check(reference, candidate, NARROW).identical
    candidate[-1] += 1.0
    assert check(reference, candidate, NARROW).metrics.max_abs_index == (LARGE - 1,)


def test_the_first_of_several_largest_differences_is_named():
    reference = torch.zeros(LARGE)
    candidate = reference.clone()
    candidate[[5, 9, BLOCK + 1]] = torch.tensor([-3.0, 3.0, 3.0])
    assert pair_figures(reference, candidate).metrics.max_abs_index == (5,)
    candidate[BLOCK + 1] = NAN
    metrics = check(reference, candidate).metrics
    assert metrics.max_abs_index == (BLOCK + 1,)
    assert math.isnan(metrics.max_abs_candidate)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)])
def test_empty_tensors_and_scalars(shape):
    check(torch.ones(shape), torch.ones(shape))
    check(torch.ones(shape), torch.zeros(shape))
    check(torch.ones(shape), torch.ones(shape, dtype=torch.float64))


def test_nothing_finite():
    reference = torch.full((5,), NAN)
    assert check(reference, torch.full((5,), INF)).reference == Extremes()
    assert check(reference, reference.clone()).identical


def test_complex_numbers_have_no_divergence():
    reference = torch.tensor([1 + 1j, 2 - 3j])
    figures = check(reference, reference * 1j)
    assert math.isnan(figures.kl_divergence)
    assert check(reference, reference.clone()).kl_divergence == 0.0
    assert figures.reference.maximum == approx(math.sqrt(13))


def test_numbers_packed_by_two_can_be_identical_and_nothing_else():
    packed = torch.arange(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    other = torch.arange(1, 5, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert pair_figures(packed, packed.clone()).identical
    with pytest.raises(UsageError, match="float4_e2m1fn_x2"):
        pair_figures(packed, other)


@pytest.mark.parametrize("figures", [pair_figures, quick_figures])
def test_nothing_is_broadcast(figures):
    with pytest.raises(UsageError, match="the shapes must be equal"):
        figures(torch.ones(3), torch.ones(3, 1))
    with pytest.raises(UsageError, match="only plain strided tensors"):
        figures(torch.ones(3).to_sparse(), torch.ones(3).to_sparse())


def test_tensors_that_require_gradients_and_lazy_views():
    reference = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    assert check(reference.detach(), reference + 1).metrics.max_abs == 1.0
    negated = torch.tensor([1j, 2j, 3j]).conj().imag
    assert negated.is_neg()
    assert check(negated, reference.detach()).metrics.max_abs == 6.0


# --- at scale -------------------------------------------------------------------------------------


def test_threads_do_not_disturb_each_other():
    all_pairs = [noisy(noise=10.0**-k, scale=2.0**k) for k in range(6)]
    expected = [measure_pair(*pair) for pair in all_pairs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda pair: measure_pair(*pair), all_pairs * 3))
    assert [msgspec.structs.asdict(each.figures.metrics) for each in found] == [
        msgspec.structs.asdict(each.figures.metrics) for each in expected
    ] * 3


def test_memory_stays_flat():
    reference, candidate = noisy(1 << 21, noise=1.0)
    permuted = candidate.view(1 << 10, 1 << 11).t().contiguous().t()
    tracemalloc.start()
    try:
        pair_figures(reference, candidate)
        pair_figures(reference.view(1 << 10, 1 << 11), permuted)
        pair_figures(reference, reference.clone())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("size", [0, 1, 300, 5000])
def test_a_tensor_and_itself_have_the_figures_of_a_tensor_and_its_copy(dtype, size):
    torch.manual_seed(0)
    values = (torch.randn(size, 3) * 10).to(dtype)
    for tensor in (values, values.T, values[::2]):
        assert pair_figures(tensor, tensor) == pair_figures(tensor, tensor.clone())
