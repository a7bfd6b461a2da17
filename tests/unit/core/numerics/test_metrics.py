"""Metrics against exact arithmetic: what is expected comes from fractions, never from floats."""

from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import given

from paritas.core.numerics import metrics as engine
from paritas.core.numerics.flat_blocks import blocks
from paritas.core.numerics.metrics import bitwise_equal, pair_metrics
from paritas.core.numerics.pair_sums import sums_by_torch
from paritas.core.results.items import Metrics
from unit.core.numerics.exact import (
    BLOCK_SIZES,
    DTYPES,
    INF,
    NAN,
    SHAPES,
    arrays,
    check,
    from_bytes,
    pairs,
)

REAL = [dtype for dtype in DTYPES if not dtype.is_complex]

# complex32 is as good as any other dtype here, whatever torch says of it.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

# --- metrics --------------------------------------------------------------------------------------


@given(pairs(), BLOCK_SIZES)
def test_metrics_are_right_for_any_dtype_stride_and_block(pair, block_size):
    check(*pair, block_size=block_size)


def by_torch(reference, candidate, block_size):
    """As on a device, or of a large tensor where threads are many."""
    return sums_by_torch(reference, candidate, block_size).metrics(reference.shape)


@given(pairs(), BLOCK_SIZES)
def test_metrics_by_torch_are_right_for_any_dtype_stride_and_block(pair, block_size):
    check(*pair, measure=by_torch, block_size=block_size)


@given(pairs(REAL), BLOCK_SIZES)
def test_numpy_and_torch_find_the_same(pair, block_size):
    # What numpy leaves to torch, such as large integers, is torch's twice.
    found, expected = (
        engine.sum_pair(*pair, block_size=block_size),
        sums_by_torch(*pair, block_size),
    )
    assert found.mean_rel == pytest.approx(expected.mean_rel, rel=1e-12, abs=0.0)
    shape = pair[0].shape
    figures = msgspec.structs.asdict(expected.metrics(shape))
    for name, value in msgspec.structs.asdict(found.metrics(shape)).items():
        # A cosine is of order one; every other figure has a scale of its own to be right to.
        absolute = 1e-13 if name in {"cosine", "pcc"} else 0.0
        is_sum = isinstance(value, float)
        like = pytest.approx(value, rel=1e-12, abs=absolute, nan_ok=True) if is_sum else value
        assert figures[name] == like, name


def test_many_threads_of_torch_take_what_is_large(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    reference, noise = torch.randn(2, 3000, generator=generator, dtype=torch.float64)
    pair = reference, reference + 1e-3 * noise
    expected = pair_metrics(*pair)
    monkeypatch.setattr(engine, "_MANY", 1000)
    monkeypatch.setattr(engine, "_FEW_THREADS", 0)
    monkeypatch.setattr(engine, "walk_pair", None)
    found = pair_metrics(*pair)
    assert found.max_abs_index == expected.max_abs_index
    for name in ("max_abs", "rmse", "rel_l2", "cosine", "pcc", "max_ulp"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-12), name


@given(SHAPES, st.data())
def test_metrics_are_right_between_different_dtypes(shape, data):
    reference, candidate = (
        data.draw(st.sampled_from(DTYPES).flatmap(lambda dtype: arrays(dtype, shape)))
        for _ in range(2)
    )
    check(reference, candidate, block_size=7)


@given(pairs((torch.float64, torch.complex128)), st.integers(-900, 900), BLOCK_SIZES)
def test_rescaling_both_sides_changes_no_relative_metric(pair, exponent, block_size):
    check(*(side * 2.0**exponent for side in pair), block_size=block_size)


@pytest.mark.parametrize("numel", [6, 7, 8, 14, 15])
@pytest.mark.parametrize("changed", [0, 5, -1])
def test_one_wrong_element_is_found_around_a_block_boundary(numel, changed):
    reference = torch.arange(1.0, numel + 1)
    candidate = reference.clone()
    candidate[changed] += 0.5
    metrics = check(reference, candidate, block_size=7)
    assert metrics.mismatched == 1
    assert metrics.max_abs_index == (changed % numel,)


def test_the_first_of_several_largest_differences_is_named():
    reference = torch.zeros(4, 5)
    candidate = reference.clone()
    candidate[[1, 1, 3], [2, 4, 0]] = torch.tensor([-3.0, 3.0, 3.0])
    for block_size in (1, 7, 100):
        metrics = pair_metrics(reference, candidate, block_size=block_size)
        assert metrics.max_abs_index == (1, 2)
        assert (metrics.max_abs_reference, metrics.max_abs_candidate) == (0.0, -3.0)


def test_expanded_tensors():
    row = torch.randn(5, generator=torch.Generator().manual_seed(0))
    check(row.expand(4, 5), torch.ones(()).expand(4, 5), block_size=7)
    check(row[:, None].expand(5, 4), row[:, None].expand(5, 4), block_size=3)


@pytest.mark.parametrize("noise", [1.0, 1e-3, 1e-6])
@pytest.mark.parametrize("block_size", [300, None])
def test_a_large_mean_does_not_ruin_the_correlation(noise, block_size):
    generator = torch.Generator().manual_seed(0)
    x, e = torch.randn(2, 700, generator=generator, dtype=torch.float64)
    reference, candidate = 1e8 + noise * x, 1e8 + noise * (x + 0.1 * e)
    assert 0.99 < check(reference, candidate, block_size=block_size).pcc < 0.999
    # The first value is an outlier, or a side has a mean of its own.
    reference[0] = -1e12
    check(reference, candidate, block_size=block_size)
    check(x, candidate, block_size=block_size)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_constant_has_no_correlation(dtype):
    constant = torch.full((1000,), 0.1, dtype=dtype)
    varied = torch.linspace(0, 1, 1000, dtype=dtype)
    for a, b in (
        (constant, varied),
        (varied, constant),
        (constant, constant),
        (constant, constant + 1),
    ):
        assert math.isnan(pair_metrics(a, b, block_size=64).pcc)


def test_zeros():
    zeros, ones = torch.zeros(3), torch.ones(3)
    assert pair_metrics(zeros, -zeros).mismatched == 0
    assert pair_metrics(zeros, zeros).cosine == 1.0
    assert math.isnan(pair_metrics(zeros, ones).cosine)
    assert math.isnan(pair_metrics(ones, zeros).cosine)
    assert pair_metrics(zeros, zeros).rel_l2 == 0.0
    assert pair_metrics(zeros, ones).rel_l2 == INF
    assert pair_metrics(zeros, ones).max_rel == INF
    assert pair_metrics(ones, zeros).max_rel == 1.0


def test_identical_tensors_score_exactly():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e-3 + 7
    metrics = pair_metrics(x, x.clone(), block_size=64)
    assert (metrics.cosine, metrics.pcc, metrics.rel_l2, metrics.max_ulp) == (1.0, 1.0, 0.0, 0.0)


def test_a_candidate_of_nothing_but_nan_passes_no_limit():
    reference = torch.ones(10)
    metrics = check(reference, torch.full_like(reference, NAN))
    assert metrics.mismatched == metrics.nonfinite_mismatches == 10
    figures = (metrics.max_abs, metrics.max_rel, metrics.mean_abs, metrics.rmse, metrics.rel_l2)
    assert not any(figure <= 1e30 for figure in (*figures, metrics.max_ulp))
    assert not any(figure >= -1.0 for figure in (metrics.cosine, metrics.pcc))


@pytest.mark.parametrize("good", [NAN, INF, -INF, 1.0])
@pytest.mark.parametrize("bad", [NAN, INF, -INF, 1.0])
def test_nonfinite_values_are_compared_by_place_and_sign(good, bad):
    reference = torch.tensor([2.0, 3.0, good, 4.0, good])
    candidate = torch.tensor([2.0, 3.5, good, 4.0, bad])
    for block_size in (1, 2, 5):
        metrics = check(reference, candidate, block_size=block_size)
    agree = str(good) == str(bad)
    assert metrics.max_abs_index == ((1,) if agree else (4,))
    assert metrics.max_abs == (0.5 if agree else INF)


def test_a_tensor_that_starts_with_nothing_finite():
    masked = torch.full((20,), -INF)
    masked[15:] = torch.arange(5.0)
    check(masked, masked.clone(), block_size=7)
    check(masked, masked + 1, block_size=7)
    check(masked[:15], masked[:15].clone(), block_size=7)


def test_64_bit_integers_do_not_wrap():
    low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    reference = torch.tensor([low, high, high, low, 0, 2**53, -1])
    candidate = torch.tensor([high, low, high - 1, low, 1, 2**53 + 1, -1])
    metrics = check(reference, candidate, block_size=4)
    assert metrics.max_abs == 2.0**64
    assert metrics.mismatched == 5
    assert pair_metrics(reference[2:], candidate[2:]).max_abs == 1.0
    largest = torch.tensor([2**64 - 1, 0, 2**63], dtype=torch.uint64)
    smaller = torch.tensor([2**64 - 2, 0, 2**63 - 1], dtype=torch.uint64)
    assert check(largest, smaller).max_abs == 1.0
    # A float cannot hold the integer; the difference is seen all the same.
    assert check(torch.tensor([high]), torch.tensor([2.0**63])).max_abs == 1.0
    check(torch.tensor([4, 3, 9]), torch.tensor([1e120, 5.0, 3e120], dtype=torch.float64))


def test_float64_that_overflows_when_squared_or_subtracted():
    top = torch.full((3,), torch.finfo(torch.float64).max, dtype=torch.float64)
    metrics = pair_metrics(top * torch.tensor([1, -1, 1]), top)
    assert (metrics.mismatched, metrics.max_abs, metrics.max_abs_index) == (1, INF, (1,))
    assert metrics.rel_l2 == pytest.approx(2 / math.sqrt(3))
    assert metrics.cosine == pytest.approx(1 / 3)


def test_views_that_are_lazily_conjugated_or_negated():
    z = torch.randn(6, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    check(z.conj(), z, block_size=7)
    check(z.conj().imag, z.imag, block_size=7)
    assert bitwise_equal(z.conj(), z.conj().resolve_conj())
    assert bitwise_equal(z.conj().imag, -z.imag)


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_tensors_and_scalars(dtype):
    empty = pair_metrics(torch.empty(0, 3, dtype=dtype), torch.empty(0, 3, dtype=dtype))
    assert (empty.numel, empty.max_abs, empty.rel_l2, empty.cosine) == (0, 0.0, 0.0, 1.0)
    assert math.isnan(empty.pcc)
    one = torch.ones((), dtype=dtype)
    assert check(one, one.clone()).max_abs_index is None
    if dtype is not torch.float8_e8m0fnu:  # which has no zero
        assert check(one, torch.zeros((), dtype=dtype)).max_abs_index == ()


@pytest.mark.parametrize("other", [(1, 3), (3, 1), (), (4,), (3, 3)])
def test_nothing_is_broadcast(other):
    with pytest.raises(ValueError, match=r"\(3,\).*got|got \(3,\)") as error:
        pair_metrics(torch.ones(3), torch.ones(other))
    assert str(other) in str(error.value)
    assert not bitwise_equal(torch.ones(3), torch.ones(other))


def test_a_sparse_tensor_has_no_metrics_of_its_own():
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(ValueError, match=r"torch\.sparse_coo"):
        pair_metrics(sparse, sparse)


def test_sparse_tensors_are_equal_if_all_their_parts_are():
    sparse = torch.eye(3).to_sparse()
    assert bitwise_equal(sparse, torch.eye(3).to_sparse())
    assert not bitwise_equal(sparse, torch.eye(3))
    assert not bitwise_equal(sparse, 2 * sparse)
    assert not bitwise_equal(sparse, torch.eye(3).flip(0).to_sparse())


def test_wide_unsigned_integers_are_measured_against_any_other():
    unsigned = torch.tensor([1, 2, 65535], dtype=torch.int32).to(torch.uint16)
    signed = torch.tensor([1, 3, -1], dtype=torch.int16)
    assert pair_metrics(unsigned, signed).mismatched == 2
    huge = torch.tensor([2**63 + 5], dtype=torch.uint64)
    assert pair_metrics(huge, huge.view(torch.int64)).mismatched == 1


def test_inputs_are_left_alone():
    reference = torch.tensor([1.0, NAN, 3.0], dtype=torch.float64, requires_grad=True)
    candidate = torch.tensor([1.0, NAN, 4.0], dtype=torch.float64)
    before = reference.detach().clone(), candidate.clone()
    pair_metrics(reference, candidate)
    assert bitwise_equal(reference, before[0])
    assert bitwise_equal(candidate, before[1])


def test_metrics_are_frozen_and_refuse_unknown_fields():
    metrics = pair_metrics(torch.ones(2), torch.ones(2))
    with pytest.raises(AttributeError):
        metrics.numel = 3
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(msgspec.structs.asdict(metrics) | {"extra": 1}, Metrics)


# --- blocks ---------------------------------------------------------------------------------------


@given(pairs(), st.integers(1, 30))
def test_blocks_cover_every_element_once_and_in_order(pair, block_size):
    walked = list(blocks(*pair, block_size=block_size))
    position = 0
    for offset, chunks in walked:
        assert offset == position
        assert {chunk.shape for chunk in chunks} == {chunks[0].shape}
        assert 0 < chunks[0].numel() <= block_size
        position += chunks[0].numel()
    assert position == pair[0].numel()
    for k, tensor in enumerate(pair):
        if walked:
            assert bitwise_equal(torch.cat([chunks[k] for _, chunks in walked]), tensor.reshape(-1))


def test_tensors_larger_than_memory_are_walked_a_block_at_a_time():
    # Terabytes each, were anything made of them as a whole.
    a, b = torch.arange(1.0, 4.0).expand(2**40, 3), torch.zeros(()).expand(2**40, 3)
    for _, chunks in itertools.islice(blocks(a, b, block_size=1000), 3):
        assert all(chunk.numel() == 999 for chunk in chunks)
        assert all(chunk.untyped_storage().nbytes() <= 4000 for chunk in chunks)
    assert not bitwise_equal(a, b)


def test_chunks_of_contiguous_tensors_are_views():
    x = torch.arange(20.0).view(4, 5)
    for offset, (chunk,) in blocks(x, block_size=7):
        assert chunk.data_ptr() == x.data_ptr() + 4 * offset


def test_a_block_size_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="got 0"):
        blocks(torch.ones(3), block_size=0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_devices_may_differ(dtype):
    raw = torch.randint(0, 256, (64 * 16,), generator=torch.Generator().manual_seed(0)).tolist()
    reference, candidate = from_bytes(raw, dtype, (8, 4)), from_bytes(raw[1:], dtype, (8, 4))
    expected = msgspec.structs.asdict(pair_metrics(reference, candidate, block_size=7))
    for left, right in (("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")):
        sides = reference.to(left), candidate.to(right)
        got = msgspec.structs.asdict(pair_metrics(*sides, block_size=7))
        for name, value in expected.items():
            is_float = isinstance(value, float)
            same = pytest.approx(value, rel=1e-12, nan_ok=True) if is_float else value
            assert got[name] == same, name
        assert bitwise_equal(sides[0], reference.to(right))
        assert not bitwise_equal(*sides)
