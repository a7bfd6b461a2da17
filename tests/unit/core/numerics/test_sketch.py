"""Sketches against their definition, and as estimates of distances that are known."""

from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from paritas.core.errors import UsageError
from paritas.core.numerics.sketch import (
    add_sketches,
    begin_sketch,
    buckets,
    signs,
    signs_from,
    sketch,
    sketch_distance,
    sketch_norm,
)
from unit.core.numerics.exact import DTYPES, INF, LAYOUTS, NAN, SHAPES, arrays, laid_out

# complex32 is as good as any other dtype here, whatever torch says of it.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


# --- the definition, written down a second time ---------------------------------------------------


def mix(number):
    number = (number ^ number >> 16) * 0x7FEB352D % 2**32
    number = (number ^ number >> 15) * 0x846CA68B % 2**32
    return number ^ number >> 16


def sign(index):
    first = mix(2**20 + index // 2**16) % 2**16
    return -1 if mix(first + index % 2**16) >= 2**31 else 1


# Pinned: a change of any of them makes old dumps incomparable.
SIGNS_OF_THE_FIRST_40 = [0, 1, 4, 7, 12, 15, 16, 20, 22, 23, 24, 25, 26, 37, 39]
SIGNS_FAR_OUT = [-1, -1, -1, 1, 1, -1]
SKETCH_OF_A_HUNDRED = [
    -194.0,
    0.0,
    -204.0,
    -208.0,
    37.0,
    -38.0,
    25.0,
    120.0,
    105.0,
    -42.0,
    21.0,
    -132.0,
    -19.0,
    18.0,
    -141.0,
    144.0,
    -113.0,
    -150.0,
    115.0,
    -156.0,
    -11.0,
    -162.0,
    165.0,
    -120.0,
    -121.0,
    58.0,
    59.0,
    -60.0,
    125.0,
    2.0,
    127.0,
    0.0,
]
SKETCH_FAR_OUT = {989: 1.0, 990: 1.0, 991: -1.0}


def by_definition(values, indices, width):
    sums = [[] for _ in range(width)]
    for value, index in zip(values, indices, strict=True):
        sums[index % width].append(sign(index) * value if math.isfinite(value) else 0.0)
    return [math.fsum(terms) for terms in sums]


def reals(tensor):
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return flat.double().tolist()


def check(tensor):
    found, values = sketch(tensor), reals(tensor)
    expected = by_definition(values, range(len(values)), buckets(len(values)))
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    precision = 1e-6 if found.dtype == torch.float32 else 1e-14
    assert found.tolist() == pytest.approx(expected, rel=precision, abs=1e-14 * largest)
    return found


@given(st.sampled_from(DTYPES), SHAPES, LAYOUTS, st.data())
def test_a_sketch_is_as_defined_for_any_dtype_and_stride(dtype, shape, layout, data):
    check(laid_out(data.draw(arrays(dtype, shape)), layout))


@pytest.mark.parametrize("numel", [65_535, 65_537, 131_073])
def test_a_sketch_is_as_defined_around_the_blocks_of_signs(numel):
    generator = torch.Generator().manual_seed(numel)
    check(torch.randn(numel, generator=generator))


def test_signs_stay_what_they_were_in_dumps_already_written():
    ones = [i for i in range(40) if sign(i) == 1]
    assert ones == SIGNS_OF_THE_FIRST_40
    assert [sign(i) for i in (65_535, 65_536, 131_071, 131_072, 2**31, 2**40)] == SIGNS_FAR_OUT


def test_sketches_stay_what_they_were_in_dumps_already_written():
    assert sketch(torch.arange(1.0, 101.0)).tolist() == SKETCH_OF_A_HUNDRED
    far = sketch(torch.ones(1, 3), global_shape=(100_000, 3), global_offset=(99_999, 0))
    assert {i: v for i, v in enumerate(far.tolist()) if v} == SKETCH_FAR_OUT


def test_signs_are_as_often_plus_as_minus_and_blocks_have_their_own():
    blocks = [[sign(b * 2**16 + i) for i in range(1000)] for b in range(20)]
    for i, block in enumerate(blocks):
        assert abs(sum(block)) < 130
        for other in blocks[:i]:
            assert abs(sum(a * b for a, b in zip(block, other, strict=True))) < 150


@pytest.mark.parametrize(("start", "count"), [(0, 5), (65_530, 20), (70_000, 200_000), (2**31, 3)])
def test_signs_in_a_row_are_those_of_their_indices(start, count):
    indices = torch.arange(start, start + count)
    found = signs_from(start, count, indices.device)
    assert torch.equal(found, signs(indices))
    assert found[:100].tolist() == [sign(index) for index in indices[:100].tolist()]


@pytest.mark.parametrize(
    ("numel", "width"),
    [(0, 16), (1, 16), (64, 16), (65, 32), (128, 32), (4096, 1024), (2049, 1024), (1 << 40, 1024)],
)
def test_the_number_of_sums_follows_from_the_number_of_elements(numel, width):
    assert buckets(numel) == width


# --- what it is good for --------------------------------------------------------------------------


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def swapped(tensor, i, j):
    other = tensor.clone()
    other[[i, j]] = tensor[[j, i]]
    return other


FAULTS = {
    "noise": lambda x: x + 1e-3 * normal(*x.shape, seed=1),
    "one element": lambda x: x.index_put((torch.tensor(3), torch.tensor(5)), x[3, 5] + 1.0),
    "two rows swapped": lambda x: swapped(x, 7, 100),
    "reversed": lambda x: x.flatten().flip(0).view_as(x),
    "transposed": lambda x: x.t().contiguous(),
    "two blocks of signs swapped": lambda x: swapped(x.view(-1, 1 << 16), 1, 2).view_as(x),
    "shifted by one": lambda x: x.flatten().roll(1).view_as(x),
    "scaled": lambda x: x * 1.01,
    "a constant added": lambda x: x + 0.01,
    "half of it zero": lambda x: x * (torch.arange(len(x)) % 2)[:, None],
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_distance_of_two_tensors_is_estimated_from_their_sketches(name):
    reference = normal(512, 512)
    candidate = FAULTS[name](reference)
    true = float((candidate - reference).norm() / reference.norm())
    found = sketch_distance(sketch(reference), sketch(candidate))
    assert found == pytest.approx(true, rel=0.15)


@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (40, 50)])
def test_a_small_tensor_with_one_wrong_element_is_not_the_same(shape):
    reference = normal(*shape)
    candidate = reference.clone()
    candidate.view(-1)[0] += 1e-3
    assert sketch_distance(sketch(reference), sketch(candidate)) > 1e-6


def test_the_norm_is_estimated():
    tensor = normal(300, 300)
    assert sketch_norm(sketch(tensor)) == pytest.approx(float(tensor.norm()), rel=0.1)


def test_equal_tensors_are_no_distance_apart():
    tensor = normal(100, 100)
    assert sketch_distance(sketch(tensor), sketch(tensor.t().contiguous().t())) == 0.0


def test_from_zero_everything_is_infinitely_far_but_zero():
    zero, other = sketch(torch.zeros(100)), sketch(torch.ones(100))
    assert sketch_distance(zero, zero) == 0.0
    assert sketch_distance(zero, other) == INF
    assert sketch_distance(other, zero) == 1.0


def test_float64_is_compared_to_its_own_precision():
    reference = normal(64, 64, dtype=torch.float64)
    candidate = reference * (1 + 1e-12)
    assert sketch_distance(sketch(reference), sketch(candidate)) == pytest.approx(1e-12, rel=1e-2)


# --- linear ---------------------------------------------------------------------------------------


def test_partial_sums_add_up():
    parts = [normal(70, 1000, seed=seed) for seed in range(4)]
    whole = sketch(sum(part.double() for part in parts).float())
    assert sketch_distance(whole, add_sketches(map(sketch, parts))) < 1e-6


def shards(tensor, cuts):
    """Cut at the given places along each axis: every piece with its offset."""
    pieces = [((), tensor)]
    for axis, places in enumerate(cuts):
        edges = [0, *places, tensor.shape[axis]]
        pieces = [
            ((*offset, begin), piece.narrow(axis, begin, end - begin))
            for offset, piece in pieces
            for begin, end in itertools.pairwise(edges)
        ]
    return pieces


def from_shards(tensor, cuts):
    shape = tensor.shape
    return add_sketches(
        sketch(piece, global_shape=shape, global_offset=offset)
        for offset, piece in shards(tensor, cuts)
    )


@pytest.mark.parametrize(
    "cuts",
    [([5], [], []), ([], [5, 6], []), ([], [], [1000]), ([1, 2, 3], [7], [600, 1100])],
    ids=["first axis", "middle axis", "last axis", "every axis"],
)
def test_shards_add_up_to_the_whole(cuts):
    tensor = normal(20, 9, 1200)
    assert sketch_distance(sketch(tensor), from_shards(tensor, cuts)) < 1e-6


@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
    st.data(),
)
def test_any_shards_of_any_dtype_add_up_to_the_whole(dtype, shape, data):
    tensor = data.draw(arrays(dtype, shape))
    cuts = [sorted(data.draw(st.lists(st.integers(0, n), max_size=2))) for n in shape]
    whole, merged = sketch(tensor), from_shards(tensor, cuts)
    assert whole.shape == merged.shape
    assert sketch_norm(whole.double() - merged.double()) <= 1e-6 * sketch_norm(whole)


def test_a_shard_put_into_the_wrong_place_is_seen():
    tensor = normal(64, 64)
    (_, first), (_, second) = shards(tensor, [[32], []])
    wrong = add_sketches(
        sketch(piece, global_shape=(64, 64), global_offset=offset)
        for piece, offset in ((first, (32, 0)), (second, (0, 0)))
    )
    assert sketch_distance(sketch(tensor), wrong) == pytest.approx(2**0.5, rel=0.15)


# --- at the edges ---------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [10, 5000])
def test_nan_and_infinities_count_as_zero(numel):
    tensor = normal(numel)
    tensor[[1, 3, numel - 1]] = torch.tensor([NAN, INF, -INF])
    zeroed = tensor.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    assert torch.equal(sketch(tensor), sketch(zeroed))


@pytest.mark.parametrize("numel", [10, 5000])
@pytest.mark.parametrize("step", [1, 2], ids=["contiguous", "strided"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_nan_and_infinities_stay_in_the_sums_on_request(numel, step, value):
    tensor = normal(numel * step)[::step]
    assert torch.equal(sketch(tensor, keeps_nonfinite=True), sketch(tensor))
    tensor[numel // 2] = value
    assert not sketch(tensor, keeps_nonfinite=True).isfinite().all()


def test_sums_beyond_float32_are_float64s():
    lowest = torch.finfo(torch.float32).min
    mask = torch.full((64, 64), lowest).triu(1)
    found = sketch(mask)
    assert found.dtype == torch.float64
    assert sketch_norm(found) == pytest.approx(float(mask.double().norm()), rel=0.15)
    assert sketch_distance(found, sketch(mask.triu(2))) > 0.1


def test_sums_beyond_float64_do_not_become_infinite():
    found = sketch(torch.full((5000,), 1.7e308, dtype=torch.float64))
    assert found.isfinite().all()
    assert 0.0 < sketch_norm(found) < INF


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sketch_is_as_wide_as_the_numbers_need(dtype):
    wide = {torch.float64, torch.complex128, torch.int32, torch.int64, torch.uint32, torch.uint64}
    found = sketch(torch.ones(100).to(dtype))
    assert found.dtype == (torch.float64 if dtype in wide else torch.float32)
    assert len(found) == (64 if dtype.is_complex else 32)
    assert found.device.type == "cpu"


def test_bools_and_integers_are_numbers():
    bits = normal(1000) > 0
    assert torch.equal(sketch(bits), sketch(bits.float()))
    assert sketch(bits).tolist() == sketch(bits.long()).tolist()


def test_the_tensor_needs_no_gradient_and_may_change_afterwards():
    tensor = torch.ones(100, requires_grad=True)
    pending = begin_sketch(tensor)
    expected = sketch(torch.ones(100))
    with torch.no_grad():
        tensor.zero_()
    assert torch.equal(pending.finish(), expected)
    assert not pending.finish().requires_grad


# --- wrong usage ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "offset"), [((4, 4), (3, 0)), ((4,), (0,)), ((4, 4), (-1, 0)), (None, (1, 0))]
)
def test_a_part_outside_the_whole_is_refused(shape, offset):
    with pytest.raises(UsageError, match=r"a shard of shape \(2, 2\) at .* is not inside"):
        sketch(torch.ones(2, 2), global_shape=shape, global_offset=offset)


def test_sketches_of_different_length_are_not_compared():
    with pytest.raises(UsageError, match="sketches must have one length, got 16 and 32"):
        sketch_distance(sketch(torch.ones(10)), sketch(torch.ones(100)))


def test_no_sketches_are_merged_to_nothing():
    with pytest.raises(UsageError, match="sketches must have one length, got none"):
        add_sketches([])


# --- on a device ----------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_device_makes_the_same_sketch(dtype):
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (70_001 * dtype.itemsize,), generator=generator).to(torch.uint8)
    tensor = (raw & 1 if dtype is torch.bool else raw).view(dtype)
    for side in (tensor, tensor[:0], tensor[:70_000].view(70, -1).t()):
        assert sketch_distance(sketch(side), sketch(side.cuda())) < 1e-6


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("cuts", [([50], []), ([], [500, 501]), ([3], [90_000])])
def test_shards_on_a_device_add_up(cuts):
    tensor = normal(60, 100_000)
    assert sketch_distance(sketch(tensor), from_shards(tensor.cuda(), cuts)) < 1e-6


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_device_is_not_waited_for_before_the_end():
    tensor = normal(100, 1000).cuda()
    sketch(tensor)  # by now the signs are there
    try:
        torch.cuda.set_sync_debug_mode("error")
        whole = begin_sketch(tensor)
        part = begin_sketch(tensor, global_shape=(100, 2000), global_offset=(0, 0))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(whole.finish(), sketch(tensor.cpu()))
    assert sketch_norm(part.finish()) > 0.0
