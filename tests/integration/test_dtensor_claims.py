"""DTensor's own rules against the truth: the right ones pass, the faults of this torch are told."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import distributed
from torch.distributed.tensor.parallel import loss_parallel

from drawing import normal
from paritas.core.errors import UsageError
from paritas.core.placement.placement import split_tensor
from paritas.core.results.findings import Status
from paritas.core.results.items import Partial, Shard
from paritas.sharding.plans.dtensor import (
    ExactTerms,
    check_dtensor,
    examine_dtensor,
    roles_of,
    short_word,
)
from quality.dtensor_table import Example, RuleRow, examine_example, examples, make_table

# What DTensor claims, and where it is wrong, is another matter in every release.
this_torch = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="these claims are those of torch 2.13"
)


@this_torch
def test_true_rules_pass_and_what_is_moved_first_is_not_counted_as_a_rule():
    verdict = check_dtensor(torch.relu, (normal(4, 6),))
    assert verdict.passed, str(verdict)
    assert "7 ways to place the arguments, 5 of them claimed" in verdict.notes[-1]
    # relu of a sum is not the sum of relus: DTensor adds up first, and says so.
    assert "P(sum): redistributed" in verdict.coverage.skipped
    assert not distributed.is_initialized()


def test_tensors_given_by_name_are_placed_and_gradients_held_against_the_truth_as_well():
    named = {"input": normal(4), "tensor": normal(4, seed=1)}
    claims = {claim.words: claim for claim in examine_dtensor(torch.dot, (), named)}
    rows = claims["S(0), S(0) -> P(sum)"].verdict
    assert rows.passed
    assert rows.coverage.compared == 5  # the result, and two gradients of each argument


def test_a_function_of_several_operators_can_be_checked():
    def soft(x):
        return torch.softmax(x, -1).sum(0)

    assert check_dtensor(soft, (normal(4, 6),), ranks=3).passed


@this_torch
def test_a_convolution_of_sharded_channels_is_reported():
    image, weight = normal(2, 4, 4), normal(4, 4, 3, seed=1)
    row = examine_example(Example("conv1d", F.conv1d, (image, weight)))
    wrong = {claim.placements for claim in row.wrong}
    assert {("R", "S(0)"), ("S(1)", "S(1)")} <= wrong
    assert ("R", "R") not in wrong
    table = make_table([row])
    assert f"**{len(row.wrong)}**" in table
    assert "shape [2, 2, 2] instead of [2, 4, 2]" in table


def test_the_gradient_of_log_softmax_in_loss_parallel_is_reported():
    verdict = check_dtensor(F.log_softmax, (normal(4, 6), -1), within=loss_parallel)
    assert verdict.status is Status.DIFFERENT
    assert all("gradient of args[0]" in finding.path for finding in verdict.failures)
    assert check_dtensor(F.log_softmax, (normal(4, 6), -1)).passed


def test_an_operator_that_fails_by_itself_is_no_claim_of_dtensor():
    with pytest.raises(UsageError, match="itself fails"):
        check_dtensor(torch.mm, (normal(4, 6), normal(4, 6)))
    with pytest.raises(UsageError, match="has no tensor argument"):
        check_dtensor(torch.ones, (3,))


def test_nothing_claimed_is_unverified():
    def refuse(x):
        if type(x) is not torch.Tensor:
            raise TypeError("plain tensors only")
        return x

    verdict = check_dtensor(refuse, (normal(4),))
    assert verdict.status is Status.UNVERIFIED
    assert "refused (TypeError: plain tensors only)" in verdict.coverage.skipped[0]


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_parts_of_a_tensor_come_to_it_again(ranks):
    whole = normal(4, 6).double()
    ways = {"sum": torch.sum, "avg": torch.mean, "max": torch.amax, "min": torch.amin}
    for role in roles_of(whole, ranks):
        parts = split_tensor(whole, role, ranks, ExactTerms(1), "it")
        if isinstance(role, Shard):
            assert torch.equal(torch.cat(parts, role.dim), whole)
        elif isinstance(role, Partial):
            torch.testing.assert_close(ways[role.reduction](torch.stack(parts), dim=0), whole)
            assert not torch.equal(parts[0], parts[1])
        else:
            assert all(torch.equal(part, whole) for part in parts)


def test_indices_have_no_terms():
    assert [short_word(role) for role in roles_of(torch.arange(4), 2)] == ["R", "S(0)"]


def test_the_set_of_the_table_is_wide_and_a_row_tells_what_could_not_be_examined():
    names = [example.name for example in examples()]
    assert len(set(names)) == len(names) >= 40
    assert "not examined: broken" in make_table([RuleRow("x", failure="broken")])
