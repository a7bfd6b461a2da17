"""Where in a tensor mismatches lie: regions planted in tensors of all kinds."""

from __future__ import annotations

import math

import pytest
import torch

from drawing import normal
from paritas.core.errors import UsageError
from paritas.core.numerics.mismatch_maps import Marginal, mismatch_detail, telling_axes

# Warnings of torch about dtypes that it knows only in part.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")


def planted(shape, where, by=1.0):
    reference = normal(*shape)
    candidate = reference.clone()
    candidate[where] += by
    return mismatch_detail(reference, candidate)


def total(detail):
    return sum(map(sum, detail.heat.counts))


def test_equal_tensors_have_no_map_and_one_bin():
    tensor = normal(4, 5)
    detail = mismatch_detail(tensor, tensor.clone())
    assert detail.heat is None
    assert detail.worst == ()
    assert detail.region == ()
    assert detail.ulps == ((-1, 20),)


def test_one_row_is_seen():
    detail = planted((2, 6, 7), (slice(None), 4))
    assert detail.region == ((0, 2), (4, 5), (0, 7))
    assert detail.heat.axes == (1, 2)
    assert detail.heat.extents == (6, 7)
    assert [sum(row) for row in detail.heat.counts] == [0, 0, 0, 0, 14, 0]
    assert all(cell == 0 for row in detail.heat.cells[:4] for cell in row)


def test_one_column_is_seen():
    detail = planted((2, 6, 7), (..., 3))
    assert detail.region == ((0, 2), (0, 6), (3, 4))
    assert [sum(column) for column in zip(*detail.heat.counts, strict=True)] == [
        0, 0, 0, 12, 0, 0, 0,
    ]  # fmt: skip


def test_the_tail_of_a_tile_is_seen_on_both_its_axes():
    detail = planted((3, 64, 5, 200), (slice(None), slice(60, 64), slice(None), slice(192, 200)))
    assert detail.region == ((0, 3), (60, 64), (0, 5), (192, 200))
    assert detail.heat.axes == (1, 3)
    assert (len(detail.heat.counts), len(detail.heat.counts[0])) == (48, 96)
    assert total(detail) == 3 * 4 * 5 * 8
    assert all(not any(row) for row in detail.heat.counts[:45])


def test_one_head_of_many_is_seen_though_its_axis_is_short():
    detail = planted((4, 8, 30, 40), (slice(None), 5))
    assert 1 in detail.heat.axes
    assert detail.region[1] == (5, 6)


def test_every_fourth_index_of_a_long_axis_is_seen_though_the_bins_hide_it():
    detail = planted((12, 4, 1000), (..., slice(None, None, 4)))
    assert 2 in detail.heat.axes
    assert detail.region == ((0, 12), (0, 4), (0, 997))


def test_a_single_element_is_named_with_both_values():
    reference = normal(3, 4, 5)
    candidate = reference.clone()
    candidate[2, 1, 3] = 9.0
    detail = mismatch_detail(reference, candidate)
    assert detail.region == ((2, 3), (1, 2), (3, 4))
    (worst,) = detail.worst
    assert worst.index == (2, 1, 3)
    assert worst.my == 9.0
    assert worst.golden == float(reference[2, 1, 3])
    assert total(detail) == 1


def test_the_worst_are_the_twenty_largest_in_order_and_the_first_of_equals():
    reference = torch.zeros(10, 30)
    candidate = torch.ones(10, 30)
    candidate[4, 7] = 3.0
    worst = mismatch_detail(reference, candidate).worst
    assert len(worst) == 20
    assert worst[0].index == (4, 7)
    assert [one.index for one in worst[1:4]] == [(0, 0), (0, 1), (0, 2)]


def test_nan_and_infinity_come_before_any_number():
    reference, candidate = torch.zeros(4, 6), torch.zeros(4, 6)
    candidate[0, 0] = 1e30
    candidate[3, 2] = math.nan
    reference[1, 1] = math.inf
    detail = mismatch_detail(reference, candidate)
    assert [one.index for one in detail.worst] == [(1, 1), (3, 2), (0, 0)]
    assert detail.worst[0].ulps == math.inf
    assert math.isnan(detail.worst[1].my)
    # Beside these, a number is nothing; it is counted all the same.
    assert detail.heat.cells[0][0] == 0.0
    assert detail.heat.counts[0][0] == 1
    assert detail.heat.cells[3][2] == 1.0


def test_the_same_nan_and_infinity_on_both_sides_are_no_mismatch():
    tensor = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1.0])
    other = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1.0])
    detail = mismatch_detail(tensor, other)
    assert detail.worst == ()
    assert detail.ulps == ((-1, 5),)


def test_nan_alone_makes_a_map():
    reference = normal(6, 8)
    candidate = reference.clone()
    candidate[:, 2] = math.nan
    detail = mismatch_detail(reference, candidate)
    assert detail.region == ((0, 6), (2, 3))
    assert {cell for row in detail.heat.cells for cell in row} == {0.0, 1.0}


def test_ulps_are_counted_by_powers_of_two():
    reference = torch.ones(8)
    steps = torch.tensor([0, 0, 1, 2, 3, 4, 7, 8], dtype=torch.int32)
    candidate = (reference.view(torch.int32) + steps).view(torch.float32)
    assert mismatch_detail(reference, candidate).ulps == ((-1, 2), (0, 1), (1, 2), (2, 2), (3, 1))


def test_a_number_has_no_map_but_a_worst_element():
    detail = mismatch_detail(torch.tensor(1.0), torch.tensor(2.0))
    assert detail.heat is None
    assert detail.worst[0].index == ()
    assert detail.region == ()


def test_a_vector_has_a_map_of_one_row_in_even_bins():
    detail = planted((1000,), slice(500, 510))
    assert detail.heat.axes == (0,)
    assert len(detail.heat.counts) == 1
    assert len(detail.heat.counts[0]) == 96
    assert {at for at, count in enumerate(detail.heat.counts[0]) if count} == {48}
    assert detail.region == ((500, 510),)


def test_five_dimensions_and_a_row_longer_than_a_block(monkeypatch):
    detail = planted((2, 3, 4, 5, 6), (1, slice(None), 2))
    assert detail.region == ((1, 2), (0, 3), (2, 3), (0, 5), (0, 6))
    assert detail.heat.axes == (0, 2)
    whole = planted((2, 3, 4, 5, 600), (..., slice(70, 90)))
    monkeypatch.setattr("paritas.core.numerics.mismatch_maps._BLOCK", 64)
    assert planted((2, 3, 4, 5, 600), (..., slice(70, 90))) == whole


@pytest.mark.parametrize("block", [7, 40, 1 << 18])
def test_strides_and_the_size_of_blocks_change_nothing(monkeypatch, block):
    monkeypatch.setattr("paritas.core.numerics.mismatch_maps._BLOCK", block)
    reference, candidate = normal(5, 6, 8), normal(5, 6, 8)
    candidate[1:3, 2:, 5] -= 2.0
    expected = mismatch_detail(reference.clone(), candidate.clone())
    moved = candidate.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert mismatch_detail(reference, moved) == expected
    assert total(expected) == 8


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4, 5)])
def test_nothing_has_nothing(shape):
    detail = mismatch_detail(torch.zeros(shape), torch.zeros(shape))
    assert (detail.heat, detail.ulps, detail.worst, detail.region) == (None, (), (), ())


def test_axes_of_length_one_are_not_shown():
    detail = planted((1, 5, 1), (0, 3, 0))
    assert detail.heat.axes == (1,)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool, torch.uint8, torch.int16, torch.int64, torch.uint16, torch.uint64,
        torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.complex32, torch.complex64, torch.complex128,
    ],
)  # fmt: skip
def test_every_dtype_can_be_looked_at(dtype):
    reference = torch.ones(4, 5).to(dtype)
    candidate = torch.ones(4, 5)
    candidate[2, 3] = 0.0
    detail = mismatch_detail(reference, candidate.to(dtype))
    assert [one.index for one in detail.worst] == [(2, 3)]
    assert (detail.worst[0].golden, detail.worst[0].my) == (1.0, 0.0)
    assert (detail.worst[0].ulps is not None) == dtype.is_floating_point
    assert bool(detail.ulps) == dtype.is_floating_point


def test_complex_numbers_are_told_apart_by_their_parts():
    reference = torch.tensor([3 + 4j, 1 + 1j, complex(math.nan, 1)])
    candidate = torch.tensor([3 - 4j, 1 + 1j, complex(math.nan, 1)])
    (worst,) = mismatch_detail(reference, candidate).worst
    assert (worst.index, worst.my, worst.golden) == ((0,), 5.0, 5.0)


def test_integers_that_are_one_float_are_told_apart():
    reference = torch.tensor([2**60, 2**60])
    detail = mismatch_detail(reference, torch.tensor([2**60, 2**60 + 1]))
    assert detail.region == ((1, 2),)


def test_dtypes_may_differ_and_then_there_are_no_ulps():
    detail = mismatch_detail(torch.ones(3), torch.tensor([1.0, 2.0, 1.0], dtype=torch.bfloat16))
    assert detail.region == ((1, 2),)
    assert detail.ulps == ()


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(UsageError, match="shapes must be equal"):
        mismatch_detail(torch.zeros(3, 1), torch.zeros(3, 4))


def test_mismatches_at_random_do_not_make_a_long_axis_telling():
    # 60 of them, all in one half of a short axis, anywhere along a long one: seed 0.
    generator = torch.Generator().manual_seed(0)
    short, long, other = Marginal(8, 96), Marginal(5000, 96), Marginal(64, 96)
    ones = torch.ones(60, dtype=torch.int64)
    short.add(torch.randint(0, 4, (60,), generator=generator), ones)
    long.add(torch.randint(0, 5000, (60,), generator=generator), ones)
    other.add(torch.randint(32, 64, (60,), generator=generator), ones)
    assert telling_axes([short, long, other]) == (0, 2)
