"""Bits and ulps: what counts as the same number, and how many numbers lie in between."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from paritas.core.numerics.bits import ulp_distance
from paritas.core.numerics.metrics import bitwise_equal, pair_metrics
from unit.core.numerics.exact import BITS, BLOCK_SIZES, COMPLEX, FLOAT8, FLOATS, INF, NAN, pairs

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

# --- bits -----------------------------------------------------------------------------------------


@given(pairs(), BLOCK_SIZES)
def test_bitwise_equal_is_equality_of_bits_up_to_nan(pair, block_size):
    def marks(tensor):
        flat = tensor.reshape(-1)
        parts = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        codes = parts.view(BITS[parts.dtype.itemsize]).tolist()
        is_nan = parts.double().isnan().tolist()
        return [NAN if nan else code for code, nan in zip(codes, is_nan, strict=True)]

    reference, candidate = pair
    # A list compares by identity first, so that the one NaN object above equals itself.
    expected = marks(reference) == marks(candidate)
    assert bitwise_equal(reference, candidate, block_size=block_size) == expected
    assert bitwise_equal(reference, reference.clone(), block_size=block_size)


@pytest.mark.parametrize("dtype", [*FLOATS[:4], *COMPLEX[1:]])
def test_signs_of_zero_count_and_signs_of_nan_do_not(dtype):
    x = torch.tensor([0.0, 1.0, NAN], dtype=dtype)
    assert bitwise_equal(x, torch.tensor([0.0, 1.0, -NAN], dtype=dtype))
    assert not bitwise_equal(x, torch.tensor([-0.0, 1.0, NAN], dtype=dtype))
    assert not bitwise_equal(x, torch.tensor([0.0, NAN, NAN], dtype=dtype))


def test_payloads_of_nan_do_not_count():
    quiet, other = (
        torch.tensor([code, 0]).int().view(torch.float32) for code in (0x7FC00000, 0x7FC00001)
    )
    assert not torch.equal(quiet.view(torch.int32), other.view(torch.int32))
    assert bitwise_equal(quiet, other)
    assert pair_metrics(quiet, other).mismatched == 0


def test_bits_of_different_dtypes_are_never_equal():
    assert not bitwise_equal(torch.zeros(3), torch.zeros(3, dtype=torch.int32))


def test_bitwise_equal_of_packed_and_empty_tensors():
    packed = torch.arange(8, dtype=torch.uint8)
    assert bitwise_equal(*(packed.clone().view(torch.float4_e2m1fn_x2) for _ in range(2)))
    assert not bitwise_equal(
        packed.view(torch.float4_e2m1fn_x2), packed.flip(0).view(torch.float4_e2m1fn_x2)
    )
    assert bitwise_equal(torch.empty(0, 2), torch.empty(0, 2))


# --- ulps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *FLOAT8])
def test_neighbours_are_one_ulp_apart_over_a_whole_dtype(dtype):
    codes = torch.arange(1 << 8 * dtype.itemsize, dtype=torch.int32)
    values = codes.to(torch.uint8 if dtype.itemsize == 1 else torch.int16).view(dtype)
    wide = values.double()
    values, wide = values[wide.isfinite()], wide[wide.isfinite()]
    order = wide.argsort()
    distances = ulp_distance(values[order[:-1]], values[order[1:]])
    # -0.0 and +0.0 are the only pair of equals.
    assert torch.equal(distances, (wide[order].diff() > 0).double())


@given(st.sampled_from([torch.float32, torch.float64]), st.floats(-(2.0**126), 2.0**126, width=32))
def test_the_next_number_is_one_ulp_away(dtype, value):
    x = torch.tensor(value, dtype=dtype)
    after = x.nextafter(torch.tensor(INF, dtype=dtype))
    assert ulp_distance(x, after).item() == ulp_distance(after, x).item() == 1.0


@pytest.mark.parametrize("dtype", FLOATS[:4])
def test_ulps_across_zero_and_over_the_whole_range(dtype):
    least = torch.ones((), dtype=BITS[dtype.itemsize]).view(dtype)
    assert ulp_distance(-least, least).item() == 2.0
    assert ulp_distance(least * 0, -least * 0).item() == 0.0
    top = torch.tensor(torch.finfo(dtype).max, dtype=dtype)
    assert ulp_distance(-top, top).item() == float(2 * int(top.view(BITS[dtype.itemsize])))
    assert ulp_distance(top, torch.tensor(INF, dtype=dtype)).item() == INF


def test_large_float64_distances_keep_their_last_step():
    a = torch.tensor([1e300, -1e300], dtype=torch.float64)
    b = a.nextafter(torch.zeros(2, dtype=torch.float64))
    assert ulp_distance(a, b).tolist() == [1.0, 1.0]


def test_nan_and_infinity_are_no_ulps_from_themselves_and_infinitely_many_from_the_rest():
    a = torch.tensor([NAN, INF, -INF, NAN, INF, INF])
    b = torch.tensor([-NAN, INF, -INF, 1.0, -INF, NAN])
    assert ulp_distance(a, b).tolist() == [0.0, 0.0, 0.0, INF, INF, INF]


def test_ulps_of_integers_or_mixed_dtypes_are_refused():
    for other in (torch.zeros(2, dtype=torch.float64), torch.zeros(3), torch.zeros(1)):
        with pytest.raises(ValueError, match="one shape and dtype"):
            ulp_distance(torch.zeros(2), other)
    with pytest.raises(ValueError, match=r"torch\.int32"):
        ulp_distance(torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
