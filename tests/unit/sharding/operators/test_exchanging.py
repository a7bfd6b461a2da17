"""Operators whose ranks share statistics: right ones pass, and each mistake is found."""

from __future__ import annotations

import pytest
import torch
from torch import distributed

from paritas import Status, UsageError
from paritas.core.operators.calls import OperatorCall
from paritas.core.placement.placement import Group, Recipe
from paritas.core.results.items import Replicate, Shard
from paritas.sharding.operators import nnscaler_functions
from paritas.sharding.operators.annotation import Annotation, Option
from paritas.sharding.operators.ranks import threads
from paritas.sharding.operators.recipe_checks import check_recipe

SHARED = "n c, c, c -> n c ; group=ranks(n)"
ALONE = "n c, c, c -> n c"


class AllSum(torch.autograd.Function):
    """A sum over ranks, forward and backward."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return summed(tensor, group)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient, ctx.group), None


def summed(tensor, group):
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(total, group=group)
    return total


def shared_norm(x, running_mean, running_var, *, group=None, slip=""):
    """Batch norm of rows whose ranks share statistics, optionally with one mistake."""

    def over_ranks(tensor):
        if group is None:
            return tensor
        if slip == "no exchange on the way back":
            return tensor + (summed(tensor, group) - tensor).detach()
        return AllSum.apply(tensor, group)

    ranks = 1 if group is None else group.size()
    here = torch.tensor(float(len(x)), dtype=x.dtype)
    rows = over_ranks(here)
    if slip == "unequal parts weigh the same" and ranks > 1:
        mean = over_ranks(x.mean(0)) / ranks
    else:
        mean = over_ranks(x.sum(0)) / rows
    if slip == "variances averaged without their means" and ranks > 1:
        variance = over_ranks(x.var(0, unbiased=False) * here) / rows
    else:
        variance = over_ranks((x - mean).square().sum(0)) / rows
    factor_rows = here if slip == "an unbiased factor of the rows here" else rows
    kept = x.mean(0) if slip == "a running mean of the rows here" else mean
    with torch.no_grad():
        running_mean.lerp_(kept, 0.1)
        running_var.lerp_(variance * factor_rows / (factor_rows - 1), 0.1)
    return (x - mean) * (variance + 1e-5).rsqrt()


def call_of(rows, *, function=shared_norm, dtype=torch.float32, **kwargs):
    torch.manual_seed(0)
    buffers = (torch.randn(3, dtype=dtype), torch.rand(3, dtype=dtype) + 0.5)
    x = torch.randn(rows, 3, dtype=dtype) * 2 + torch.arange(3.0)
    args = (x.to(dtype), *buffers)
    return OperatorCall(function, args, kwargs, name="norm", without_gradient=frozenset({1, 2}))


def split(call, text, ranks=2, dim=0):
    return check_recipe(call, Annotation.parse(text).recipe(call, Option(0, dim)), ranks)


def wrong(verdict):
    return {finding.path for finding in verdict.failures}


@pytest.mark.parametrize(("rows", "ranks"), [(6, 2), (7, 2), (7, 3)])
def test_shared_statistics_are_right_forward_backward_and_in_the_buffers(rows, ranks):
    verdict = split(call_of(rows), SHARED, ranks)
    assert verdict.passed, str(verdict)
    assert [finding.path for finding in verdict.findings] == [
        "output",
        "args[1] after the call",
        "args[2] after the call",
        "gradient of args[0]",
    ]
    assert not distributed.is_initialized()


@pytest.mark.parametrize(
    ("slip", "seen"),
    [
        ("unequal parts weigh the same", {"output", "args[1] after the call"}),
        ("variances averaged without their means", {"output", "args[2] after the call"}),
        ("an unbiased factor of the rows here", {"args[2] after the call"}),
        ("a running mean of the rows here", {"args[1] after the call"}),
        ("no exchange on the way back", {"gradient of args[0]"}),
    ],
)
def test_each_slip_of_an_exchange_is_different(slip, seen, undiagnosed):
    verdict = split(call_of(7, slip=slip), SHARED)
    assert verdict.status is Status.DIFFERENT
    assert seen <= wrong(verdict)
    if len(seen) == 1:
        assert wrong(verdict) == seen  # what the slip does not touch is right


def test_unequal_parts_alone_show_that_they_are_not_weighted():
    assert split(call_of(6, slip="unequal parts weigh the same"), SHARED).passed


def test_without_a_group_statistics_are_not_shared_and_are_different(undiagnosed):
    verdict = split(call_of(6), ALONE)
    assert verdict.status is Status.DIFFERENT
    assert "output" in wrong(verdict)


def test_a_group_of_the_call_is_none_where_nothing_is_exchanged():
    given = []

    def operator(x, running_mean, running_var, *, group=None):
        given.append(group)
        return x - running_mean

    call = call_of(4, function=operator, group=(0, 1))
    assert split(call, SHARED, dim=1).passed
    assert (0, 1) in given  # of the whole, as the call says
    assert None in given
    given.clear()
    assert split(call, SHARED).passed
    assert any(isinstance(group, distributed.ProcessGroup) for group in given)


def test_bfloat16_is_judged_by_its_own_rounding():
    verdict = split(call_of(7, dtype=torch.bfloat16), SHARED)
    assert verdict.passed, str(verdict)


def test_a_rank_that_raises_lets_its_peers_go_and_is_named():
    def operator(x, running_mean, running_var, *, group=None):
        if group is not None:
            if group.rank() == 1:
                raise ValueError("no such part")
            summed(x, group)
        return x

    verdict = split(call_of(4, function=operator), SHARED)
    assert verdict.failures[0].reason == "rank 1 of 2 raised ValueError: no such part"
    assert not distributed.is_initialized()


def test_a_mesh_of_several_axes_is_refused():
    call = call_of(4)
    rows = Recipe(((0, Shard(0)),), (Shard(0),), (("group", Group()),))
    with pytest.raises(UsageError, match="cannot be one axis of a mesh"):
        check_recipe(call, (rows, rows), (2, 2))


# --- what each rank keeps -------------------------------------------------------------------------


def counted(x, seen):
    seen += x.detach().sum(0)
    return 2 * x


def test_what_the_rule_leaves_to_each_rank_is_noted_and_does_not_fail():
    call = OperatorCall(
        counted, (torch.randn(4, 3), torch.zeros(3)), without_gradient=frozenset({1})
    )
    claimed, left = split(call, "n c, c -> n c"), split(call, "n c, c : @n -> n c")
    assert wrong(claimed) == {"args[1] after the call"}
    assert left.passed
    assert left.coverage.skipped == ("args[1] after the call: the rule leaves it to each rank",)
    (note,) = left.notes
    assert note.startswith("args[1] (seen) drifts: after the call each of 2 ranks has its own")
    assert note.endswith("the rule covers only outputs and gradients")


def test_what_is_left_to_each_rank_and_is_right_is_compared_as_all_else():
    def told(x, seen):
        seen += 1
        return 2 * x

    call = OperatorCall(told, (torch.randn(4, 3), torch.zeros(3)), without_gradient=frozenset({1}))
    verdict = split(call, "n c, c : @n -> n c")
    assert "args[1] after the call" in {finding.path for finding in verdict.findings}
    assert not verdict.coverage.skipped
    assert not verdict.notes


# --- the language ---------------------------------------------------------------------------------


def test_an_annotation_defines_which_values_are_shared_and_which_each_rank_keeps():
    call = call_of(4)
    recipe = Annotation.parse("n c, c : @n, c -> n c ; group=ranks(n)").recipe(call, Option(0, 0))
    assert recipe.exchanges
    assert recipe.numbers == (("group", Group()),)
    assert recipe.placement(1) == Replicate(own=True)
    by_channels = Annotation.parse(SHARED).recipe(call, Option(0, 1))
    assert (by_channels.exchanges, by_channels.numbers) == (False, ())


# --- the norms of nnScaler ------------------------------------------------------------------------


def images(samples, *, momentum=0.1):
    torch.manual_seed(0)
    vectors = [torch.randn(2), torch.randn(2), torch.randn(2), torch.rand(2) + 0.5]
    args = (torch.randn(samples, 2, 3, 3), *vectors, torch.tensor(3))
    return OperatorCall(
        nnscaler_functions.wrap_batchnorm2d_func,
        args,
        {"momentum": momentum},
        name="nnscaler.graph.function.wrapnn.wrap_batchnorm2d_func",
        without_gradient=frozenset({3, 4, 5}),
    )


NORM = "n c h^ w^, c, c, c, c, ? -> n c h^ w^"


@pytest.mark.parametrize("momentum", [0.1, None])
def test_wrapped_batch_norm_shares_statistics_of_unequal_parts(momentum, undiagnosed):
    call = images(5, momentum=momentum)
    verdict = split(call, f"{NORM} ; process_group=ranks(n)")
    assert verdict.passed, str(verdict)
    assert len(verdict.findings) == 7
    assert wrong(split(call, NORM)) >= {"output", "args[3] after the call", "gradient of args[0]"}


def test_ranks_by_number_are_a_group_only_among_ranks():
    x = torch.randn(2, 4, 2, 2)
    none = [None] * 5
    plain = nnscaler_functions.wrap_batchnorm2d_func(x, *none)
    named = nnscaler_functions.wrap_batchnorm2d_func(x, *none, process_group=(0, 1))
    assert torch.equal(named, plain)


def test_a_collective_that_not_all_ranks_take_part_in_is_unverified(monkeypatch):
    monkeypatch.setattr(threads.ThreadTeam.__init__, "__defaults__", (0.5,))

    def operator(x, running_mean, running_var, *, group=None):
        if group is not None and group.rank() == 0:
            summed(x, group)
        return x

    verdict = split(call_of(4, function=operator), SHARED)
    assert verdict.status is Status.UNVERIFIED
    assert "or waits for a collective that not all ranks call" in verdict.failures[0].reason
