"""What each rank receives, and how the results of the ranks are joined."""

from __future__ import annotations

import pytest
import torch

from paritas.core.errors import UsageError
from paritas.core.operators.calls import OperatorCall
from paritas.core.placement.assembly import join
from paritas.core.placement.placement import (
    Divided,
    Range,
    Recipe,
    Terms,
    bounds,
    parts_of,
    split_values,
)
from paritas.core.results.items import Once, Partial, Replicate, Shard, gradient, nth_output
from paritas.sharding.operators.runner import Runner


@pytest.fixture
def terms():
    return Terms(3, lifted=True)


def given(value, placement, ranks, terms):
    return parts_of(value, placement, ranks, terms, "args[0]")


def test_an_uneven_split_gives_the_first_ranks_more():
    assert bounds(7, 1, 3, "it") == [(0, 3), (3, 5), (5, 7)]
    assert [part.numel() for part in torch.tensor_split(torch.arange(7), 3)] == [3, 2, 2]


def test_parts_are_multiples_of_the_unit():
    assert bounds(14, 2, 3, "it") == [(0, 6), (6, 10), (10, 14)]


@pytest.mark.parametrize(
    ("size", "unit", "message"),
    [
        (7, 2, "the size of it must be a multiple of 2, got 7"),
        (4, 2, "it has 2 parts, too few for 3 ranks; use fewer ranks or a larger shape"),
    ],
)
def test_an_impossible_split_is_refused_with_the_reason(size, unit, message):
    with pytest.raises(UsageError) as caught:
        bounds(size, unit, 3, "it")
    assert str(caught.value) == message


def test_a_halo_is_cut_off_at_the_ends(terms):
    parts = given(torch.arange(8), Shard(0, halo=(1, 2)), 2, terms)
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3, 4, 5], [3, 4, 5, 6, 7]]


def test_what_is_given_once_is_zero_elsewhere(terms):
    parts = given(torch.ones(2), Once(), 3, terms)
    assert [part.tolist() for part in parts] == [[1, 1], [0, 0], [0, 0]]


@pytest.mark.parametrize("lifted", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("reduction", ["sum", "avg", "max", "min", "product"])
def test_terms_and_their_gradients_are_reduced_to_the_whole(reduction, ranks, lifted):
    terms = Terms(3, lifted=lifted)
    whole = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole.requires_grad_()
    upstream = torch.rand(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parts = given(whole, Partial(reduction), ranks, terms)
    together = join(parts, Partial(reduction), terms=terms)
    torch.testing.assert_close(together, whole)
    torch.testing.assert_close(torch.autograd.grad(together, whole, upstream)[0], upstream)
    assert ranks == 1 or not lifted or not torch.equal(parts[0], parts[1])


def test_terms_of_the_native_run_add_up_without_rounding():
    whole = torch.randn(100, generator=torch.Generator().manual_seed(0)).bfloat16()
    parts = given(whole, Partial(), 4, Terms(0, lifted=False))
    assert torch.equal(torch.stack(parts).double().sum(dim=0), whole.double())


def test_a_claimed_gradient_is_right_only_if_it_is_on_every_rank(terms):
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    agreed = sum(part.sum() for part in given(x, Replicate(summed=False), 3, terms))
    torch.testing.assert_close(torch.autograd.grad(agreed, x)[0], torch.ones_like(x))
    parts = given(x, Replicate(summed=False), 3, terms)
    off = parts[0].sum() + parts[1].sum() * 1.001 + parts[2].sum()
    assert (torch.autograd.grad(off, x)[0] - 1).abs().min() > 1e-4


def test_a_result_on_which_ranks_disagree_is_that_of_none(terms):
    ones = torch.ones(3, dtype=torch.float64)
    other = torch.tensor([1.0, 1.5, torch.nan], dtype=torch.float64)
    together = join([ones, other], Replicate(), terms=terms)
    assert together[0] == 1
    assert together[1] not in (1, 1.5)
    assert together[2].isnan()
    numbers = [torch.tensor([1, 2]), torch.tensor([1, 3])]
    assert join(numbers, Replicate(), terms=terms).tolist() == [1, 1]


def test_results_that_would_broadcast_are_not_added(terms):
    with pytest.raises(RuntimeError):
        join([torch.ones(3), torch.ones(1)], Partial(), terms=terms)


def test_numbers_go_with_the_split(terms):
    recipe = Recipe(
        ((0, Shard(0)),),
        (Shard(0),),
        (
            (1, Divided(1)),
            ("heads", Divided()),
            ("start", Range(0, "begin")),
            ("stop", Range(0, "end")),
        ),
    )
    values = {0: torch.zeros(7), 1: (2, 7, -1), "heads": 8, "start": 100, "stop": 107}
    each = split_values(values, recipe, 2, terms)
    assert [rank[1] for rank in each] == [(2, 4, -1), (2, 3, -1)]
    assert [rank["heads"] for rank in each] == [4, 4]
    assert [(rank["start"], rank["stop"]) for rank in each] == [(100, 104), (104, 107)]


def test_lists_of_tensors_are_split_tensor_by_tensor(terms):
    parts = given([torch.zeros(4, 2), torch.zeros(4, 3)], Shard(0), 2, terms)
    assert [[tuple(tensor.shape) for tensor in part] for part in parts] == [[(2, 2), (2, 3)]] * 2


def test_the_split_run_has_the_results_and_gradients_of_the_whole():
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    call = OperatorCall(lambda x: (x * 2, x.sum(dim=1)), (x,))
    recipe = Recipe(((0, Shard(0)),), (Shard(0), Shard(0)))
    runner = Runner(call, ((recipe, 2),), seed=0)
    whole, split = runner.whole(wide=True), runner.split(wide=True)
    assert list(whole.results) == [nth_output(0), nth_output(1)]
    torch.testing.assert_close(split.results, whole.results)
    torch.testing.assert_close(split.gradients, whole.gradients)
    assert len(whole.gradients) == 2
    first, second = (gradients[gradient("args[0]")] for gradients in whole.gradients)
    assert not torch.equal(first, second)
