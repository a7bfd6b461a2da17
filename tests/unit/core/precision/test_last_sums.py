"""What adding up must have rounded, told while the arbiter is made."""

from __future__ import annotations

import pytest
import torch

from drawing import normal64
from paritas.core.precision import summing
from paritas.core.precision.lifting import LiftMode
from paritas.core.precision.perturbing import NoisePool, PerturbMode

U = 2.0**-24


def least(program, *given):
    mode = LiftMode(torch.float32, torch.float32, remember_sums=True)
    with mode:
        result = program(*given)
    return mode.least_noise_of(result)


def measured(program, *given, runs=200):
    """The rms deviation over perturbed runs."""
    plain, squares, pool = program(*given), 0.0, NoisePool(0)
    for seed in range(runs):
        with PerturbMode(torch.float32, torch.float32, U, seed, pool=pool):
            squares = squares + (program(*given) - plain).square()
    return (squares / runs).sqrt()


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.sum(dim=0),
        lambda x: x.sum(dim=0, keepdim=True).view(-1),
        lambda x: torch.ops.aten.sum.dim_IntList(x, dim=[0]),
        lambda x: x.mean(dim=(0,)),
        lambda x: x.T.contiguous().sum(dim=-1),
    ],
)
def test_a_sum_is_told_its_part_of_the_noise_and_no_more(program):
    x = normal64(300, 40)
    part, whole = least(program, x), measured(program, x)
    assert part.shape == whole.shape
    # 200 runs tell a deviation to 5 %, and the worst of 40 to some 15 %.
    assert (part <= 1.2 * whole).all()
    assert part.square().mean().sqrt() >= 0.9 * whole.square().mean().sqrt()


def test_a_sum_over_everything_and_one_in_pieces_are_told_alike():
    long = normal64(1 << 17)
    assert float(least(torch.sum, long)) == pytest.approx(
        float(least(torch.sum, long.view(1 << 7, -1)))
    )


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.sum(dim=0) * 1e-6,
        lambda x: x.sum(dim=0).mul_(1e-6),
        lambda x: x.sum(dim=0)[1:],
        lambda x: x.sum(dim=0).view(5, 8).t(),
        lambda x: x.amax(dim=0),
        lambda x: x[:8].sum(dim=0),
        lambda x: x.float().sum(dim=0).uniform_(),
    ],
    ids=["scaled", "scaled in place", "sliced", "transposed", "chosen", "short", "overwritten"],
)
def test_nothing_is_told_of_what_is_not_the_sum_itself(program):
    assert least(program, normal64(300, 40)) is None


def test_sums_that_round_nothing_have_no_noise():
    x = torch.ones(300, 40, dtype=torch.float64)
    x[:, 1] = 0.1
    part = least(lambda x: x.sum(dim=0), x)
    assert part.count_nonzero() == 1
    assert part[1] > 0


def test_a_plain_lifted_run_remembers_no_sums():
    mode = LiftMode(torch.float32, torch.float32)
    with mode:
        result = normal64(300, 40).sum(dim=0)
    assert mode.least_noise_of(result) is None


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(summing, "_MOST_REMEMBERED", 400)
    mode = LiftMode(torch.float32, torch.float32, remember_sums=True)
    x = normal64(32, 100)
    with mode:
        first, *rest = [x.sum(dim=0) for _ in range(3)]
    assert mode.least_noise_of(first) is None
    assert mode.least_noise_of(rest[-1]) is not None
