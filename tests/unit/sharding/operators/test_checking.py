"""The verdict about one split."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from paritas.core.errors import UsageError
from paritas.core.operators.calls import OperatorCall
from paritas.core.placement.placement import Range, Recipe
from paritas.core.results.findings import Status
from paritas.core.results.items import Once, Partial, Replicate, Shard
from paritas.sharding.operators.recipe_checks import check_recipe


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows(*outputs):
    return Recipe(((0, Shard(0)),), outputs or (Shard(0),))


LINEAR = OperatorCall(functional.linear, (drawn(9, 12), drawn(10, 12, seed=1), drawn(10, seed=2)))
TERMS = Recipe(((0, Shard(1)), (1, Shard(1)), (2, Once())), (Partial(),))


def paths(verdict):
    return [finding.path for finding in verdict.findings]


def reasons(verdict):
    return [finding.reason for finding in verdict.failures]


def test_results_and_all_gradients_are_compared():
    verdict = check_recipe(LINEAR, rows())
    assert verdict.passed
    gradients = [f"gradient of args[{place}]" for place in range(3)]
    assert paths(verdict) == ["output", *gradients]
    assert verdict.coverage.compared == 7  # each gradient under two cotangents


def test_a_gradient_that_is_not_needed_is_not_compared():
    call = OperatorCall(functional.linear, LINEAR.args, without_gradient=frozenset({1}))
    assert "gradient of args[1]" not in paths(check_recipe(call, rows()))


def test_a_mesh_splits_twice():
    assert check_recipe(LINEAR, (rows(), TERMS), (2, 3)).passed
    assert check_recipe(LINEAR, (TERMS, rows()), (3, 2)).passed
    bias_on_each = Recipe(((0, Shard(1)), (1, Shard(1))), (Partial(),))
    verdict = check_recipe(LINEAR, (rows(), bias_on_each), (2, 2))
    assert verdict.status is Status.DIFFERENT


def test_an_operator_that_itself_fails_is_unverified():
    verdict = check_recipe(OperatorCall(torch.mm, (drawn(3, 4), drawn(3, 4))), rows())
    assert verdict.status is Status.UNVERIFIED
    assert reasons(verdict) == [
        (
            "the operator itself fails: RuntimeError: "
            "mat1 and mat2 shapes cannot be multiplied (3x4 and 3x4)"
        )
    ]


def test_an_operator_that_fails_on_a_rank_is_different():
    verdict = check_recipe(LINEAR, Recipe(((0, Shard(1)),), (Partial(),)))
    assert verdict.status is Status.DIFFERENT
    assert reasons(verdict) == [
        "rank 0 of 2 raised RuntimeError: mat1 and mat2 shapes cannot be multiplied (9x6 and 12x10)"
    ]


def test_a_dimension_too_small_for_the_ranks_is_unverified():
    verdict = check_recipe(LINEAR, rows(), 16)
    assert verdict.status is Status.UNVERIFIED
    assert verdict.exit_code == 3
    assert reasons(verdict) == [
        (
            "dimension 0 of args[0] has 9 parts, too few for 16 ranks; "
            "use fewer ranks or a larger shape"
        )
    ]


def test_an_operator_that_gives_nothing_is_unverified():
    verdict = check_recipe(OperatorCall(lambda x: (), (drawn(4),)), Recipe(((0, Shard(0)),), ()))
    assert verdict.status is Status.UNVERIFIED


@pytest.mark.parametrize(
    ("recipe", "ranks", "message"),
    [
        (Recipe(((5, Shard(0)),), (Shard(0),)), 2, "the recipe names args[5]"),
        (Recipe((("weight", Shard(0)),), (Shard(0),)), 2, "the recipe names kwargs['weight']"),
        (rows(), 0, "the number of ranks must be 1 or more, got 0"),
        (rows(), (2, 2), "got 1 recipes and 2 numbers of ranks"),
    ],
)
def test_a_recipe_that_does_not_fit_the_call_is_a_usage_error(recipe, ranks, message):
    with pytest.raises(UsageError) as caught:
        check_recipe(LINEAR, recipe, ranks)
    assert message in str(caught.value)


def test_a_fault_names_the_rank_of_the_worst_element():
    def scaled(x, start):
        return x * (1.01 if start else 1.0)

    recipe = Recipe(((0, Shard(0)),), (Shard(0),), (("start", Range(0, "begin")),))
    verdict = check_recipe(OperatorCall(scaled, (drawn(9, 4),), {"start": 0}), recipe)
    assert reasons(verdict)[0].endswith(
        "; worst in the part of rank 1 of 2 (5:9 along dimension 0)"
    )


def test_ranks_that_disagree_about_what_all_have_are_different():
    verdict = check_recipe(OperatorCall(torch.sum, (drawn(8, 3), 0)), rows(Replicate()))
    assert verdict.status is Status.DIFFERENT


def test_a_gradient_that_each_rank_claims_to_have_must_be_the_whole_gradient():
    own = Recipe(((0, Shard(0)), (1, Replicate(summed=False))), (Shard(0),))
    verdict = check_recipe(LINEAR, own)
    assert [finding.path for finding in verdict.failures] == ["gradient of args[1]"]


def test_running_statistics_are_compared():
    statistics = (torch.zeros(6), torch.ones(6))
    call = OperatorCall(
        functional.batch_norm,
        (drawn(8, 6, 4), *statistics),
        {"training": True},
        without_gradient=frozenset({1, 2}),
    )
    channels = Recipe(((0, Shard(1)), (1, Shard(0)), (2, Shard(0))), (Shard(1),))
    verdict = check_recipe(call, channels)
    assert verdict.passed
    assert {"args[1] after the call", "args[2] after the call"} <= {*paths(verdict)}
    failed = check_recipe(call, rows()).failures
    assert "args[1] after the call" in [finding.path for finding in failed]


def test_the_caller_s_tensors_and_random_state_are_left_alone():
    x = drawn(8, 6).requires_grad_()
    before, state = x.detach().clone(), torch.get_rng_state()
    call = OperatorCall(lambda x: functional.dropout(x.add_(1)), (x,))
    check_recipe(call, rows())
    assert torch.equal(x.detach(), before)
    assert x.grad is None
    assert torch.equal(state, torch.get_rng_state())


def test_a_rank_draws_its_part_of_what_the_whole_draws():
    verdict = check_recipe(OperatorCall(functional.dropout, (drawn(9, 6),)), rows(), 4)
    assert verdict.passed
    assert verdict.notes == (
        "the operator draws random numbers; each rank uses its part of the numbers of the whole",
    )


def test_the_mask_of_a_fused_dropout_is_what_a_rank_is_given_its_part_of():
    """This is `dropout` on a GPU."""
    call = OperatorCall(torch.native_dropout, (drawn(9, 6), 0.4, True))
    parts = Recipe(((0, Shard(0)),), (Shard(0), Shard(0)))
    verdict = check_recipe(call, parts, 4)
    assert verdict.passed, str(verdict)
    assert any(finding.path == "gradient of args[0]" for finding in verdict.findings)
    whole = Recipe((), (Replicate(), Replicate()))
    assert check_recipe(call, whole, 2).passed
    mirrored = OperatorCall(lambda x: torch.native_dropout(x, 0.4, True)[0].flip(0), (drawn(9, 6),))
    assert not check_recipe(mirrored, rows(), 3).passed


def test_draws_that_do_not_correspond_are_unverified():
    def noisy(x):
        return x + torch.randn(3 * len(x)).sum()

    verdict = check_recipe(OperatorCall(noisy, (drawn(8, 2),)), rows())
    assert verdict.status is Status.UNVERIFIED
    assert "a rank draws [12] where the whole draws [24]" in reasons(verdict)[0]


def test_nans_in_the_same_positions_pass():
    x = drawn(8, 4)
    x[5, 2] = torch.nan
    x[1, 1] = torch.inf
    assert check_recipe(OperatorCall(torch.exp, (x,)), rows()).passed


def test_a_gradient_that_does_not_arrive_is_different_unless_it_is_zero():
    def stops(x, start):
        return x.detach() + 0 * x.sum().detach() if start else x + 0

    recipe = Recipe(((0, Shard(0)),), (Shard(0),), (("start", Range(0, "begin")),))
    verdict = check_recipe(OperatorCall(stops, (drawn(8, 4),), {"start": 0}), recipe)
    assert [finding.path for finding in verdict.failures] == ["gradient of args[0]"]
    flat = OperatorCall(lambda x: (x > 0).to(x.dtype), (drawn(8, 4),))
    assert check_recipe(flat, rows()).passed


def test_a_rank_that_narrows_a_float64_operator_is_not_excused():
    def narrows(x, start):
        return x.sin().float().double() if start else x.sin()

    recipe = Recipe(((0, Shard(0)),), (Shard(0),), (("start", Range(0, "begin")),))
    call = OperatorCall(narrows, (drawn(8, 4, dtype=torch.float64),), {"start": 0})
    assert not check_recipe(call, recipe).passed


def test_many_terms_in_bfloat16_pass():
    x, w = (drawn(*shape, dtype=torch.bfloat16) for shape in ((4, 2048), (6, 2048)))
    recipe = Recipe(((0, Shard(1)), (1, Shard(1))), (Partial(),))
    assert check_recipe(OperatorCall(functional.linear, (x, w)), recipe, 8).passed


def test_an_operator_on_terms_must_be_linear_in_them():
    partial = Recipe(((0, Partial()),), (Partial(),))
    assert check_recipe(OperatorCall(torch.neg, (drawn(8, 4),)), partial).passed
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        call = OperatorCall(torch.relu, (drawn(8, 4, dtype=dtype),))
        assert check_recipe(call, partial).status is Status.DIFFERENT


def test_an_operator_that_narrows_inside_is_lifted_too():
    def mixed(x, w):
        return x @ w.to(torch.bfloat16)

    call = OperatorCall(mixed, (drawn(8, 4, dtype=torch.bfloat16), drawn(4, 6, seed=1)))
    assert check_recipe(call, rows()).passed
    verdict = check_recipe(call, Recipe(((0, Shard(1)), (1, Shard(0))), (Partial("avg"),)))
    assert verdict.status is Status.DIFFERENT


def test_a_result_that_is_none_needs_no_comparison():
    verdict = check_recipe(OperatorCall(lambda x: (x * 2, None), (drawn(8, 4),)), rows())
    assert verdict.passed
    assert verdict.coverage.skipped == ()


def test_an_argument_on_which_nothing_depends_is_reported_as_skipped():
    call = OperatorCall(lambda x, y: x * 2, (drawn(8, 4), drawn(3)))
    verdict = check_recipe(call, rows())
    assert verdict.passed
    assert verdict.coverage.skipped == ("gradient of args[1]: nothing depends on it",)


def test_complex_numbers_are_checked():
    x = torch.complex(drawn(8, 4), drawn(8, 4, seed=1))
    assert check_recipe(OperatorCall(torch.exp, (x,)), rows()).passed
    wrong = Recipe(((0, Shard(1)),), (Shard(1),))
    verdict = check_recipe(OperatorCall(torch.cumsum, (x, 1)), wrong)
    assert verdict.status is Status.DIFFERENT


class _Underived(torch.autograd.Function):
    """An operator without a derivative, which raises the same error as torch."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError("derivative for aten::thing is not implemented")


def test_an_operator_without_a_derivative_is_held_to_its_results():
    call = OperatorCall(_Underived.apply, (torch.randn(4, 6),))
    verdict = check_recipe(call, Recipe(((0, Shard(0)),), (Shard(0),)))
    assert verdict.passed
    assert "gradients: torch has no derivative for this operator" in verdict.coverage.skipped
    wrong = check_recipe(call, Recipe(((0, Shard(0)),), (Shard(1),)))
    assert not wrong.passed
