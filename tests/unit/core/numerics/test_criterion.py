from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from paritas.core.numerics import criterion
from paritas.core.numerics.criterion import (
    MAX_Z,
    RMS_Z,
    Noise,
    rms,
    rms_difference,
    score,
    slice_limit,
)
from paritas.core.numerics.gates import own_error_score
from paritas.core.numerics.pooling import CLASSES, Pooled

U32 = 2.0**-24
SHAPES = [(), (1,), (7,), (64,), (5, 8), (3, 4, 6), (2, 1, 9)]

# --- the rule, once more, in plain words ----------------------------------------------------------


def plain_rms(values):
    return math.sqrt(sum(v * v for v in values) / len(values)) if values else 0.0


def plain_pools(values, rs):
    """For each element, the rms of normal values with the mean of those of like magnitude."""
    typical = sorted(abs(r) for r in rs)[(len(rs) - 1) // 2] / math.sqrt(2)
    octaves = [math.floor(math.log2(abs(r) / typical)) for r in rs]
    pools = []
    for octave in octaves:
        for reach in (1, 2, 4):
            near = [
                v for v, other in zip(values, octaves, strict=True) if abs(other - octave) <= reach
            ]
            if len(near) >= 32:
                break
        pools.append(math.sqrt(math.pi / 2) * sum(near) / len(near))
    return pools


def plain_rule(c, r, noise):
    """z by z, in Python floats, straight from the docstring of the module."""
    cs, rs = c.double().flatten().tolist(), r.double().flatten().tolist()
    spread = None if noise.spread is None else noise.spread.flatten().tolist()
    scale = plain_rms(rs)
    whole = max(plain_rms(spread) if spread else 0.0, noise.own.whole) / 2
    own = float(noise.own.by_class[0])  # the same for all magnitudes
    pools = plain_pools(spread, rs) if spread else [0.0] * len(rs)
    share = noise.unit**0.75 / 4
    zs = []
    for i, (cv, rv) in enumerate(zip(cs, rs, strict=True)):
        s = spread[i] if spread else 0.0
        d = max(s, pools[i] / 2, own / 2, min(whole, share * abs(rv)))
        d += noise.unit * abs(rv) / 2 + noise.inner * scale / 2
        d += noise.step + noise.relative * (abs(rv) + scale)
        zs.append(abs(cv - rv) / (noise.factor * d) if cv != rv else 0.0)
    return torch.tensor(zs, dtype=torch.float64).reshape(r.shape)


def evenly(noise):
    """An error of the reference that is the same for all magnitudes."""
    everywhere = torch.full((CLASSES,), noise, dtype=torch.float64)
    return Pooled(noise, everywhere, everywhere)


def worst_slice(z):
    """(ratio to its limit, axis, index, rms, limit) of the slice most over its limit."""
    found = []
    for axis in range(z.dim()):
        count = z.shape[axis]
        length = z.numel() // count
        for index in range(count if count > 1 and z.dim() > 1 else 0):
            value = plain_rms(z.select(axis, index).flatten().tolist())
            worst_of_many = max(1.0, math.sqrt(2 * math.log(count)))
            limit = min(12.0, 2.5 * (1 + 2 / math.sqrt(length)) * worst_of_many)
            found.append((value / limit, axis, index, value, limit))
    return max(found, default=None)


def drawn(shape, seed=0, noise_of=1.0):
    """An arbiter, a candidate within a few times its noise, and that noise."""
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    r = normal()
    spread = 1e-6 * (0.2 + normal().abs())
    c = r + noise_of * spread * normal()
    return c, r, Noise(unit=U32, own=evenly(1e-6), spread=spread, source="the test")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"spread": None},
        {"spread": None, "own": evenly(0.0)},
        {"factor": 8.0},
        {"relative": 1e-5, "step": 1e-7},
        {"inner": 1e-5},
        {"own": evenly(1e-3)},
    ],
)
def test_the_figures_are_those_of_the_rule(shape, changes):
    c, r, noise = drawn(shape)
    noise = dataclasses.replace(noise, **changes)
    result = score(c, r, noise)
    z = plain_rule(c, r, noise)
    count = r.numel()
    assert result.score.max_z == pytest.approx(float(z.max()), rel=1e-12)
    assert result.score.rms_z == pytest.approx(plain_rms(z.flatten().tolist()), rel=1e-12)
    assert result.score.max_limit == 12.0
    assert result.score.rms_limit == pytest.approx(2.5 * (1 + 2 / math.sqrt(count)))
    assert result.score.index == tuple(map(int, torch.unravel_index(z.argmax(), z.shape)))
    assert result.over == int((z > 12).sum())
    assert result.score.noise == "the test"
    worst = worst_slice(z)
    if worst is None:
        assert result.score.slice_z is None
    else:
        _, axis, index, value, limit = worst
        assert (result.score.slice_axis, result.score.slice_index) == (axis, index)
        assert result.score.slice_z == pytest.approx(value, rel=1e-12)
        assert result.score.slice_limit == pytest.approx(limit, rel=1e-12)


def test_an_error_of_the_size_of_its_noise_passes_and_one_of_fifty_times_fails():
    for shape, seed in itertools.product(SHAPES, range(3)):
        assert score(*drawn(shape, seed)).score.passed
        _, r, noise = drawn(shape, seed)
        assert not score(r + 50 * noise.spread.clamp(min=1e-6), r, noise).score.passed


# --- no absolute constant -------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1e-4, 1e3, 2.0**-30, 1e-60, 1e60, 1e-200, 1e200])
@pytest.mark.parametrize("shape", [(64,), (5, 8)])
@pytest.mark.parametrize("relative", [0.0, 1e-6])
def test_rescaling_everything_changes_nothing(factor, shape, relative):
    c, r, noise = drawn(shape, noise_of=30.0)
    noise = dataclasses.replace(noise, relative=relative)
    scaled = dataclasses.replace(noise, spread=noise.spread * factor, own=noise.own.times(factor))
    here, there = score(c, r, noise), score(c * factor, r * factor, scaled)
    for name in ("max_z", "rms_z", "slice_z"):
        left, right = getattr(here.score, name), getattr(there.score, name)
        assert right == (None if left is None else pytest.approx(left, rel=1e-6)), name
    assert there.score.index == here.score.index
    assert there.score.slice_index == here.score.slice_index
    assert there.score.passed == here.score.passed
    assert (there.over, there.knife_edges) == (here.over, here.knife_edges)


@pytest.mark.parametrize("factor", [1e-200, 1e-30, 1.0, 1e30, 1e200])
def test_root_mean_squares_neither_overflow_nor_vanish(factor):
    x = torch.tensor([3.0, 4.0], dtype=torch.float64) * factor
    assert rms(x) == pytest.approx(math.sqrt(12.5) * factor, rel=1e-12, abs=0)
    assert rms_difference(2 * x, x) == pytest.approx(math.sqrt(12.5) * factor, rel=1e-12, abs=0)


# --- slices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_one_bad_slice_among_many_is_seen_where_no_other_figure_sees_it(axis):
    r = torch.ones(24, 24, 24, dtype=torch.float64)
    c = r.clone()
    c.select(axis, 17).add_(9e-6)
    result = score(c, r, Noise(unit=0.0, own=evenly(2e-6))).score
    assert result.max_z == pytest.approx(9.0)
    assert result.max_z < result.max_limit
    assert result.rms_z < result.rms_limit
    assert not result.passed
    assert (result.slice_axis, result.slice_index) == (axis, 17)
    assert result.slice_z == pytest.approx(9.0)
    assert result.slice_z > result.slice_limit


def test_the_same_error_spread_over_all_slices_is_no_finding():
    r = torch.ones(24, 24, 24, dtype=torch.float64)
    c = r.clone()
    c.reshape(-1)[::24] += 9e-6
    c = c.reshape(-1)[torch.randperm(c.numel(), generator=torch.Generator().manual_seed(0))]
    assert score(c.reshape(r.shape), r, Noise(unit=0.0, own=evenly(2e-6))).score.passed


def test_the_limit_of_a_slice_grows_with_how_many_there_are_and_shrinks_with_their_length():
    assert slice_limit(2, 10_000) == pytest.approx(RMS_Z * 1.02 * math.sqrt(2 * math.log(2)))
    assert slice_limit(1000, 64) > slice_limit(10, 64) > slice_limit(10, 4096)
    assert slice_limit(10**9, 1) == MAX_Z


# --- against the reference's own errors -----------------------------------------------------------


def errors(factor, shape=(16, 16), seed=5):
    """Errors of the size of `factor`, over a reference whose own are of size one."""
    generator = torch.Generator().manual_seed(seed)
    r, own, mine = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    return r + 1e-6 * factor * mine, r + 1e-6 * own, r


def test_errors_of_the_size_of_the_reference_s_own_lose_no_accuracy():
    same = own_error_score(*errors(1.0))
    assert same.passed
    assert same.rms_z == pytest.approx(1.0, rel=0.2)
    assert own_error_score(*errors(0.01)).passed
    assert not own_error_score(*errors(3.0)).passed
    c, _, r = errors(1.0)
    assert not own_error_score(c, r, r).passed, "a reference without an error allows none"
    assert own_error_score(r, r, r).passed


@pytest.mark.parametrize("factor", [1e-60, 2.0**-30, 1e3, 1e60])
def test_rescaling_changes_no_comparison_of_errors(factor):
    sides = errors(1.2)
    here, there = own_error_score(*sides), own_error_score(*(side * factor for side in sides))
    assert there.max_z == pytest.approx(here.max_z, rel=1e-6)
    assert there.rms_z == pytest.approx(here.rms_z, rel=1e-6)
    assert there.slice_z == pytest.approx(here.slice_z, rel=1e-6)


def test_a_row_worse_than_the_reference_s_own_is_seen_where_no_other_figure_sees_it():
    c, e, r = errors(0.1, shape=(64, 64))
    c[9] = r[9] + 2.5e-6
    result = own_error_score(c, e, r)
    assert result.max_z < result.max_limit
    assert result.rms_z < result.rms_limit
    assert (result.slice_axis, result.slice_index) == (0, 9)
    assert not result.passed


# --- what cannot be a number ----------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 3, 19])
@pytest.mark.parametrize("chunk", [7, 1 << 21])
def test_a_nan_in_the_noise_fails(position, chunk, monkeypatch):
    monkeypatch.setattr(criterion, "CHUNK", chunk)
    c, r, noise = drawn((20,))
    noise.spread[position] = math.nan
    result = score(c, r, noise).score
    assert math.isnan(result.max_z)
    assert math.isnan(result.rms_z)
    assert not result.passed


def test_positions_that_are_not_finite_are_left_to_others():
    c, r, noise = drawn((6,))
    c[0], r[1], c[2] = math.nan, math.inf, -math.inf
    r[2] = -math.inf
    result = score(c, r, noise).score
    assert math.isfinite(result.max_z)
    assert result.passed
    assert result.index not in {(0,), (1,), (2,)}


def test_any_error_is_too_much_where_there_is_no_noise():
    r = torch.zeros(4, dtype=torch.float64)
    c = torch.tensor([0.0, 0.0, 1e-300, 0.0], dtype=torch.float64)
    result = score(c, r, Noise(unit=U32))
    assert result.score.max_z == math.inf
    assert result.score.index == (2,)
    assert result.over == 1
    assert not result.score.passed
    assert score(r, r, Noise(unit=U32)).score.passed


def test_a_step_around_zero_is_rounding_and_more_is_not():
    step = criterion.smallest_step(torch.float32)
    r = torch.zeros(4, dtype=torch.float64)
    assert score(r + step, r, Noise(unit=U32, step=step)).score.passed
    assert not score(r + 100 * step, r, Noise(unit=U32, step=step)).score.passed


def test_an_infinite_spread_excuses_no_finite_error():
    c, r, noise = drawn((8,))
    noise.spread[5] = math.inf
    assert score(c, r, noise).score.passed
    c[5] += 1.0
    assert not score(c, r, noise).score.passed


def test_a_knife_edge_counts_only_where_it_saves_the_candidate():
    c, r, noise = drawn((8,))
    noise.spread[5] = 10.0  # rounding decides this element, yet the candidate is where it should be
    noise = dataclasses.replace(noise, own=evenly(0.0))
    steady = dataclasses.replace(noise, spread=noise.spread.clamp(max=1e-6))
    assert score(c, r, steady).score.passed
    assert score(c, r, noise).knife_edges == 0


def test_where_rounding_decides_every_element_every_wrong_one_is_a_knife_edge():
    r = torch.ones(8, 8, dtype=torch.float64)
    result = score(r + 0.3, r, Noise(unit=U32, own=evenly(1e-7), spread=torch.full_like(r, 0.5)))
    assert result.score.passed
    assert result.knife_edges == 64


# --- kinds and shapes -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5, 2)])
def test_an_empty_tensor_passes_with_nothing_over(shape):
    empty = torch.empty(shape)
    result = score(empty, empty, Noise(unit=U32, spread=torch.empty(shape)))
    assert result.score.passed
    assert (result.score.max_z, result.score.rms_z, result.score.index) == (0.0, 0.0, None)
    assert rms(empty) == 0.0
    assert rms_difference(empty, empty) == 0.0


def test_a_single_number_is_indexed_by_nothing():
    r = torch.tensor(2.0, dtype=torch.float64)
    result = score(r + 1, r, Noise(unit=0.0, own=evenly(0.2))).score
    assert result.index == ()
    assert result.max_z == pytest.approx(10.0)
    assert result.rms_limit == pytest.approx(7.5)
    assert result.slice_z is None
    assert not result.passed


@pytest.mark.parametrize("shape", [(), (16,), (4, 6)])
@pytest.mark.parametrize("part", ["real", "imag"])
def test_the_index_is_an_index_of_the_complex_tensor(shape, part):
    r = torch.complex(*torch.randn(2, *shape, generator=torch.Generator().manual_seed(1)))
    where = tuple(length // 2 for length in shape)
    c = r.clone()
    getattr(c, part)[where] += 1.0
    result = score(c, r, Noise(unit=U32, own=evenly(1e-6))).score
    assert not result.passed
    assert result.index == where


def test_both_parts_of_a_complex_value_are_held_to_its_spread():
    generator = torch.Generator().manual_seed(2)
    r = torch.complex(*torch.randn(2, 50, generator=generator, dtype=torch.float64))
    spread = torch.full((50,), 1e-6, dtype=torch.float64)
    noise = Noise(unit=U32, spread=spread)
    good = r + torch.complex(spread, -spread)
    bad = r + torch.complex(torch.zeros_like(spread), 100 * spread)
    assert score(good, r, noise).score.passed
    assert not score(bad, r, noise).score.passed
    assert score(bad, r, noise).score.max_z == pytest.approx(100, rel=0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_tensors_are_scored_in_float64(dtype):
    r = torch.randn(64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    c = r.to(dtype)
    u = criterion.unit_roundoff(dtype)
    result = score(c, r, Noise(unit=u)).score
    # Correct rounding is off by at most u|r|: twice the u|r|/2 that stands for it.
    assert 0.5 < result.max_z <= 2.0
    assert result.passed


def test_strides_do_not_matter():
    c, r, noise = drawn((6, 8), noise_of=30.0)
    turned = score(c.t(), r.t(), dataclasses.replace(noise, spread=noise.spread.t()))
    straight = score(c, r, noise)
    assert turned.score.max_z == straight.score.max_z
    assert turned.score.index == straight.score.index[::-1]


# --- chunks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [*SHAPES, (1, 50), (50, 1), (7, 7), (30, 2, 3)])
@pytest.mark.parametrize("spread", [True, False])
def test_chunking_changes_no_figure(shape, spread, monkeypatch):
    c, r, noise = drawn(shape, seed=4, noise_of=20.0)
    noise = noise if spread else dataclasses.replace(noise, spread=None)
    whole, size = score(c, r, noise), rms(r)
    monkeypatch.setattr(criterion, "CHUNK", 7)
    cut = score(c, r, noise)
    for name in whole.score.__struct_fields__:
        left = getattr(whole.score, name)
        expected = pytest.approx(left, rel=1e-12) if isinstance(left, float) else left
        assert getattr(cut.score, name) == expected, name
    assert (cut.over, cut.knife_edges) == (whole.over, whole.knife_edges)
    assert rms(r) == pytest.approx(size, rel=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_cover_every_element_once_and_stay_small(shape, monkeypatch):
    monkeypatch.setattr(criterion, "CHUNK", 7)
    x = torch.arange(math.prod(shape)).reshape(shape)
    pieces = [part for _, (part,) in criterion.chunks(x)]
    seen = torch.cat([piece.flatten() for piece in pieces])
    assert seen.sort().values.tolist() == list(range(x.numel()))
    if shape:
        rest = x.numel() // max(shape)  # one slice of the longest axis is never cut
        assert max(piece.numel() for piece in pieces) <= max(7, rest)


# --- how many runs a decision needs ---------------------------------------------------------------


@pytest.mark.parametrize("runs", [1, 2, 5, 12])
@pytest.mark.parametrize("rate", [0.05, 0.01])
def test_a_measured_spread_leaves_its_bounds_no_more_often_than_stated(runs, rate):
    generator = torch.Generator().manual_seed(runs)
    deviations = torch.randn(40_000, runs, generator=generator, dtype=torch.float64)
    measured = deviations.square().mean(dim=1).sqrt()
    hidden = float((1 / measured > criterion.most_hidden(runs, rate)).double().mean())
    shown = float((measured > criterion.most_shown(runs, rate)).double().mean())
    assert hidden <= 1.2 * rate
    assert shown <= 1.2 * rate
    assert hidden >= rate / 8, "a bound that is never reached costs runs"


def test_the_more_runs_the_less_can_be_hidden():
    bounds = [criterion.most_hidden(runs, 1e-6) for runs in range(1, 13)]
    assert bounds == sorted(bounds, reverse=True)


def test_a_nan_will_never_pass():
    score = criterion.Score(max_z=math.nan, max_limit=12.0, rms_z=1.0, rms_limit=2.5)
    assert not criterion.may_still_pass(score, torch.Size([4]), 1)
