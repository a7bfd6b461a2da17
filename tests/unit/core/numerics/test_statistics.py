"""Statistics against exact arithmetic: what is expected comes from fractions, never from floats."""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from fractions import Fraction

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import given

from paritas.core.errors import UsageError
from paritas.core.numerics.statistics import Statistics, begin_statistics, summarize
from unit.core.numerics.exact import (
    BITS,
    DTYPES,
    FLOATS,
    INF,
    LAYOUTS,
    NAN,
    SHAPES,
    arrays,
    as_float,
    elements,
    laid_out,
    root,
    size,
)

WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))

# complex32 is as good as any other dtype here, whatever torch says of it.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def exponent(number):
    """The e with 2^e <= number < 2^(e+1), of a positive fraction."""
    e = number.numerator.bit_length() - number.denominator.bit_length()
    return e if Fraction(2) ** e <= number else e - 1


def oracle(tensor):
    """Every figure by its definition; a magnitude is a root, to more digits than a float has."""
    kinds, finite = Counter(), []
    for element in elements(tensor, pairs=tensor.is_complex()):
        odd = [part for part in element if not math.isfinite(part)]
        if not odd:
            # float(): the widest integers are taken for their nearest float64.
            finite.append(size(element) if len(element) == 2 else Fraction(float(element[0])))
        elif tensor.is_complex():
            kinds["inf" if any(map(math.isinf, odd)) else "nan"] += 1
        else:
            kinds[str(odd[0])] += 1
    nonzero = [abs(number) for number in finite if number]
    figures = {}
    if finite:
        figures = {
            "minimum": as_float(min(finite)),
            "maximum": as_float(max(finite)),
            "mean": as_float(Fraction(sum(finite), len(finite))),
            "l2": as_float(root(sum(number * number for number in finite))),
        }
    return Statistics(
        count=tensor.numel(),
        zeros=len(finite) - len(nonzero),
        nans=kinds["nan"],
        positive_infinities=kinds["inf"],
        negative_infinities=kinds["-inf"],
        exponents=tuple(sorted(Counter(map(exponent, nonzero)).items())),
        **figures,
    )


def check(tensor):
    found, expected = summarize(tensor), oracle(tensor)
    for name, value in msgspec.structs.asdict(expected).items():
        got = getattr(found, name)
        if isinstance(value, float):
            # What cancels in the mean is as large as the largest value.
            slack = 1e-15 * max(abs(expected.maximum), abs(expected.minimum))
            value = pytest.approx(value, rel=1e-13, abs=slack if name == "mean" else 0.0)  # noqa: PLW2901
        assert got == value, name
    return found


# --- right for everything -------------------------------------------------------------------------


@given(st.sampled_from(DTYPES), SHAPES, LAYOUTS, st.data())
def test_statistics_are_right_for_any_dtype_and_stride(dtype, shape, layout, data):
    check(laid_out(data.draw(arrays(dtype, shape)), layout))


@pytest.mark.parametrize("dtype", [d for d in FLOATS if d.itemsize < 4], ids=str)
def test_every_number_of_a_narrow_float_is_counted_in_its_place(dtype):
    bits = 8 * dtype.itemsize
    # Of those with 16 bits, all exponents and the last digits of all; the rest takes seconds.
    step = 1 if bits == 8 or WHOLE else 5
    codes = torch.arange(-(1 << (bits - 1)), 1 << (bits - 1), step).to(
        torch.int8 if bits == 8 else torch.int16
    )
    check(codes.view(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_subnormals_have_their_true_exponent(dtype):
    codes = [0, 1, 2, 3, 5, 1 << 10, (1 << 22) - 1, 1 << 22, (1 << 23) - 1, 1 << 23]
    found = check(torch.tensor(codes, dtype=BITS[dtype.itemsize]).view(dtype))
    assert found.exponents[0] == ((-149, 1) if dtype == torch.float32 else (-1074, 1))
    assert found.zeros == 1


@pytest.mark.parametrize("numel", [(1 << 16) - 1, 1 << 16, (1 << 16) + 1, (1 << 17) + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_nothing_is_lost_between_blocks(dtype, numel):
    generator = torch.Generator().manual_seed(numel)
    tensor = torch.randn(numel, generator=generator).to(dtype)
    tensor[[0, (1 << 16) - 3, numel - 1]] = torch.tensor([0.0, NAN, INF], dtype=dtype)
    found = summarize(tensor)
    finite = tensor.double()[tensor.isfinite()]
    assert (found.count, found.nans, found.positive_infinities) == (numel, 1, 1)
    assert found.zeros == int((finite == 0).sum())
    assert sum(count for _, count in found.exponents) == numel - 2 - found.zeros
    assert (found.minimum, found.maximum) == (finite.min(), finite.max())
    assert found.mean == pytest.approx(math.fsum(finite.tolist()) / (numel - 2), rel=1e-12)
    assert found.l2 == pytest.approx(math.sqrt(math.fsum((finite**2).tolist())), rel=1e-14)
    powers = Counter((finite[finite != 0].abs().log2().floor().int()).tolist())
    assert dict(found.exponents) == powers


def test_a_block_of_nothing_but_nans_leaves_the_others_alone():
    tensor = torch.ones((1 << 16) + 2)
    tensor[: 1 << 16] = NAN
    found = summarize(tensor)
    assert (found.nans, found.minimum, found.maximum, found.mean) == (1 << 16, 1.0, 1.0, 1.0)


# --- numbers at the edges -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        *((value, torch.float32) for value in (1e30, 1e-30, 1e-45)),
        *((value, torch.float64) for value in (1e300, 1e-300, 5e-324)),
    ],
)
def test_squares_neither_overflow_nor_vanish(value, dtype):
    found = check(torch.tensor([value, -value, value / 2, 3.0 * value], dtype=dtype))
    assert 0.0 < found.l2 < INF


def test_the_largest_floats_have_a_mean_but_no_norm():
    top = torch.finfo(torch.float64).max
    found = summarize(torch.full((4,), top, dtype=torch.float64))
    assert (found.mean, found.l2) == (top, INF)


def test_blocks_of_very_different_size_are_weighed_together():
    tensor = torch.full((3 << 16,), 1e-200, dtype=torch.float64)
    tensor[1 << 16 : 2 << 16] = 1e200
    tensor[2 << 16 :] = 1.0
    found = summarize(tensor)
    assert found.l2 == pytest.approx(1e200 * 256, rel=1e-14)
    assert found.mean == pytest.approx(1e200 / 3, rel=1e-14)


def test_tiny_values_beside_a_block_of_zeros_keep_their_norm():
    tensor = torch.zeros(2 << 16, dtype=torch.float64)
    tensor[1 << 16 :] = 1e-300
    assert summarize(tensor).l2 == pytest.approx(1e-300 * 256, rel=1e-14)


def test_the_mean_of_values_that_nearly_cancel_is_a_float64s():
    tensor = torch.tensor([1e8, 1.0, -1e8, 1e-3]).repeat(5000)
    assert summarize(tensor).mean == pytest.approx(1.001 / 4, rel=1e-8)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64], ids=str)
def test_the_widest_integers_are_the_nearest_float64s(dtype):
    limits = torch.iinfo(dtype)
    found = check(torch.tensor([limits.min, 0, 1, limits.max], dtype=dtype))
    assert found.maximum == float(limits.max)
    assert found.exponents[-1][0] == (64 if dtype == torch.uint64 else 63)


def test_integers_are_ever_finite():
    found = summarize(torch.tensor([7, -7, 0]))
    assert found == Statistics(
        count=3, minimum=-7.0, maximum=7.0, mean=0.0, l2=found.l2, zeros=1, exponents=((2, 2),)
    )
    assert found.is_finite


def test_a_complex_number_is_its_magnitude_and_infinite_if_a_part_is():
    values = [3 + 4j, complex(NAN, INF), complex(-INF, 0.0), complex(NAN, 1.0), 0j]
    found = check(torch.tensor(values, dtype=torch.complex64))
    assert (found.maximum, found.positive_infinities, found.nans, found.zeros) == (5.0, 2, 1, 1)


def test_large_complex_numbers_have_magnitudes():
    assert summarize(torch.tensor([3e38 + 3e38j])).maximum == pytest.approx(3e38 * 2**0.5)


def test_conjugates_and_negatives_are_looked_through():
    z = torch.tensor([3 + 4j, 1j])
    assert summarize(z.conj()) == summarize(z)
    assert summarize(z.conj().imag).minimum == -4.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_an_empty_tensor_there_is_nothing_to_say(dtype):
    assert summarize(torch.empty(0, 3, dtype=dtype)) == Statistics(count=0)


def test_a_tensor_of_nans_alone_has_no_extremes():
    found = summarize(torch.tensor([NAN, INF, -INF]))
    assert found == Statistics(count=3, nans=1, positive_infinities=1, negative_infinities=1)
    assert not found.is_finite


# --- manners --------------------------------------------------------------------------------------


def test_each_repeated_value_of_an_expanded_tensor_counts():
    found = summarize(torch.tensor([[2.0], [0.0]]).expand(2, 5))
    assert (found.count, found.zeros, found.mean, found.exponents) == (10, 5, 1.0, ((1, 5),))


def test_the_tensor_is_left_as_it_was_and_needs_no_gradient():
    tensor = torch.tensor([1.0, NAN, -0.0], requires_grad=True)
    before = tensor.detach().clone()
    assert summarize(tensor * 1).zeros == 1
    assert torch.equal(tensor.detach().view(torch.int32), before.view(torch.int32))


def test_on_the_cpu_it_is_done_when_it_begins():
    tensor = torch.ones(4)
    pending = begin_statistics(tensor)
    tensor.zero_()
    assert pending.finish().mean == 1.0


def test_threads_do_not_share_their_room():
    tensors = [torch.full((50_000,), float(i)) for i in range(8)]
    results = [None] * 8

    def work(i):
        for _ in range(20):
            results[i] = summarize(tensors[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found.mean for found in results] == [float(i) for i in range(8)]


def test_a_dtype_without_numbers_is_refused():
    packed = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pytest.raises(UsageError, match=r"cannot summarize a tensor of torch\.float4_e2m1fn_x2"):
        summarize(packed)


def test_a_sparse_tensor_is_refused():
    with pytest.raises(UsageError, match="only plain strided tensors"):
        summarize(torch.eye(2).to_sparse())


def test_statistics_survive_their_file():
    found = summarize(torch.tensor([1.0, NAN]))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Statistics) == found


# --- on a device ----------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_device_finds_what_the_cpu_finds(dtype):
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (70_000 * dtype.itemsize,), generator=generator).to(torch.uint8)
    tensor = (raw & 1 if dtype is torch.bool else raw).view(dtype)
    for side in (tensor, tensor[:0], tensor[:70_000].view(70, -1).t()):
        here, there = summarize(side), summarize(side.cuda())
        for name, value in msgspec.structs.asdict(here).items():
            exact = not isinstance(value, float)
            got = getattr(there, name)
            assert got == (value if exact else pytest.approx(value, rel=1e-12, nan_ok=True)), name


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_device_is_not_waited_for_before_the_end():
    tensor = torch.randn(9 << 20, device="cuda")
    try:
        torch.cuda.set_sync_debug_mode("error")
        pending = begin_statistics(tensor)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = summarize(tensor.cpu())
    assert pending.finish().exponents == expected.exponents
