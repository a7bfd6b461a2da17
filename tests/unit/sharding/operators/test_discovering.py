"""Splits found by running an operator: all right ones, and no others."""

from __future__ import annotations

import re
import string

import pytest
import torch
import torch.nn.functional as F

from drawing import normal
from paritas.core.errors import UsageError
from paritas.core.operators.calls import OperatorCall
from paritas.core.placement.placement import Divided, Recipe
from paritas.core.results.items import Once, Partial, Replicate, Shard
from paritas.sharding.operators.annotation import Annotation
from paritas.sharding.operators.discovery import discover_partitions
from paritas.sharding.operators.recipe_checks import check_recipe


def integers(below, *shape, seed=0):
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def annotation(function, *args, **kwargs):
    """What was found, as one annotation; empty if nothing was found.

    Identifiers are called a, b, c in the order of their appearance.
    """
    texts = {found.annotation for found in discover_partitions(function, args, kwargs)}
    assert len(texts) <= 1
    text = texts.pop() if texts else ""
    names = dict.fromkeys(re.findall(r"\b[a-z]\b", text))
    renamed = dict(zip(names, string.ascii_lowercase, strict=False))
    return re.sub(r"\b[a-z]\b", lambda found: renamed[found[0]], text)


# --- products, convolutions, norms ----------------------------------------------------------------


def test_a_linear_layer_is_split_by_rows_columns_and_the_contracted_dimension():
    assert annotation(F.linear, normal(4, 6, 8), normal(10, 8)) == "a b c+, d c+ -> a b d"


def test_dimensions_of_equal_length_are_distinguished():
    assert annotation(torch.matmul, normal(6, 6), normal(6, 6)) == "a b+, b+ c -> a c"


@pytest.mark.parametrize("bias", [normal(10), torch.zeros(10)], ids=["random", "zeros"])
def test_a_bias_counts_once_where_the_contracted_dimension_is_split(bias):
    text = annotation(F.linear, normal(4, 8), normal(10, 8), bias)
    assert text == "a b+, c b+, c : !b -> a c"


def test_input_channels_of_a_convolution_are_terms_of_a_sum():
    text = annotation(F.conv2d, normal(2, 4, 6, 6), normal(8, 4, 3, 3))
    assert text == "a b+ c^ d^, e b+ f^ g^ -> a e h^ i^"


def test_groups_of_a_convolution_are_divided():
    args = (normal(4, 8, 6, 6), normal(12, 2, 3, 3), normal(12))
    found = discover_partitions(F.conv2d, args, {"groups": 4})
    assert [each.recipe.inputs for each in found] == [
        ((0, Shard(0)),),
        ((0, Shard(1, unit=2)), (1, Shard(0, unit=3)), (2, Shard(0, unit=3))),
    ]
    assert found[1].recipe.numbers == (("groups", Divided()),)
    assert found[1].recipe.outputs == (Shard(1),)


def test_batch_norm_in_training_is_split_by_channels_with_its_running_statistics():
    args = (normal(4, 6, 3, 3), torch.zeros(6), torch.ones(6), torch.ones(6), torch.zeros(6))
    [found] = discover_partitions(F.batch_norm, args, {"training": True})
    assert dict(found.recipe.inputs) == {0: Shard(1), **dict.fromkeys(range(1, 5), Shard(0))}
    assert found.backward is True
    assert args[1].count_nonzero() == 0  # what was given is not written to


def test_statistics_that_would_differ_between_ranks_refuse_a_split():
    args = (normal(4, 6, 5), torch.zeros(6), torch.ones(6))
    kwargs = {"use_input_stats": True}
    places = [
        dict(found.recipe.inputs) for found in discover_partitions(F.instance_norm, args, kwargs)
    ]
    assert places == [{0: Shard(1), 1: Shard(0), 2: Shard(0)}]  # and not the batch


def test_attention_is_split_by_batch_heads_queries_and_values():
    shape = (2, 4, 6, 8)
    tensors = [normal(*shape, seed=seed) for seed in range(3)]
    text = annotation(F.scaled_dot_product_attention, *tensors)
    assert text == "a b c d^, a b e^ f^, a b g^ h -> a b c h"


def test_grouped_heads_of_attention_are_split_in_groups():
    tensors = (normal(2, 8, 6, 4), normal(2, 2, 6, 4), normal(2, 2, 6, 4))
    found = discover_partitions(F.scaled_dot_product_attention, tensors, {"enable_gqa": True})
    heads = ((0, Shard(1, unit=4)), (1, Shard(1)), (2, Shard(1)))
    assert heads in [each.recipe.inputs for each in found]


# --- reductions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "tensor", "expected"),
    [
        (torch.sum, normal(6, 8), "sum"),
        (torch.mean, normal(6, 8), "avg"),
        (torch.amax, -normal(6, 8).abs(), "max"),
        (torch.amin, normal(6, 8), "min"),
        (torch.prod, normal(6, 8), "product"),
        (torch.any, normal(6, 8) > 0, "max"),
        (torch.all, normal(6, 8) > 0, "min"),
        (torch.any, normal(6, 8), "max"),
        (torch.count_nonzero, normal(6, 4), "sum"),
        (lambda x, dim: torch.relu(x).amin(dim), normal(6, 8), "min"),
        (lambda x, dim: (x > 100).any(dim), normal(6, 8), "max"),
        (lambda x, dim: x.isnan().sum(dim), normal(6, 8), "sum"),
    ],
)
def test_the_reduction_is_the_right_one(function, tensor, expected):
    found = discover_partitions(function, (tensor,), {"dim": 1})
    assert [each.recipe.outputs for each in found] == [(Shard(0),), (Partial(expected),)]


def test_a_mean_over_parts_of_unequal_length_is_not_claimed():
    found = discover_partitions(torch.mean, (normal(4, 9),), {"dim": 1})
    assert [each.recipe.outputs for each in found] == [(Shard(0),)]


def test_a_result_that_does_not_depend_on_what_is_split_is_the_same():
    found = discover_partitions(lambda x, y: (x * 2, y * 3), (normal(4), normal(6)))
    assert [each.recipe.outputs for each in found] == [
        (Shard(0), Replicate()),
        (Replicate(), Shard(0)),
    ]


# --- losses: what is right for some values only ---------------------------------------------------


def test_a_mean_loss_is_an_average_and_a_summed_one_a_sum():
    args = (normal(8, 6), integers(6, 8))
    assert annotation(F.cross_entropy, *args) == "a+avg b^, a+avg -> 1"
    assert annotation(F.cross_entropy, *args, reduction="sum") == "a+ b^, a+ -> 1"


def test_a_mean_over_targets_that_are_not_ignored_is_not_claimed_though_halves_are_even():
    targets = torch.tensor([0, 1, 2, 3, 4, 5, 1, 2])
    assert annotation(F.cross_entropy, normal(8, 6), targets, ignore_index=1) == ""
    assert annotation(F.cross_entropy, normal(8, 6), targets, torch.rand(6) + 0.1) == ""


def test_constant_targets_are_not_replaced_by_values_for_which_the_loss_vanishes():
    args = (normal(6, 4), normal(6, 4, seed=1), torch.ones(6))
    found = discover_partitions(F.cosine_embedding_loss, args, {"reduction": "sum"})
    assert [each.recipe.outputs for each in found] == [(Partial("sum"),)]
    assert dict(found[0].recipe.inputs) == dict.fromkeys(range(3), Shard(0))


# --- views ----------------------------------------------------------------------------------------


def test_sizes_of_a_view_are_divided():
    text = annotation(torch.Tensor.view, normal(1, 9, 12), size=(-1, 12))
    assert text == "a^ b c -> b c ; size[1]=c"


def test_a_view_that_takes_a_dimension_apart_is_split_in_whole_rows():
    [found] = discover_partitions(torch.Tensor.view, (normal(24), -1, 6))
    assert found.recipe.inputs == ((0, Shard(0, unit=6)),)
    [found] = discover_partitions(torch.Tensor.view, (normal(24, 3),), {"size": (4, 6, 3)})
    assert found.recipe.inputs == ((0, Shard(0, unit=6)),)
    assert found.recipe.numbers == (("size", Divided(0)),)


def test_parts_are_multiples_of_a_pooling_window_though_halves_are_not():
    found = discover_partitions(F.max_pool2d, (normal(1, 3, 12, 6), 2))
    assert [each.recipe.inputs for each in found] == [
        ((0, Shard(1)),),
        ((0, Shard(2, unit=2)),),
        ((0, Shard(3, unit=2)),),
    ]


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.flip(0),
        lambda x: x.roll(1, 0),
        lambda x: x.sort(0).values,
        lambda x: x.cumsum(0),
        lambda x: x.softmax(0),
        lambda x: x - x.mean(0),
        lambda x: x.var(0, keepdim=True) * x,
        lambda x: x + torch.arange(x.shape[0]).view(-1, 1),
    ],
)
def test_a_dimension_that_is_mixed_is_not_claimed(function):
    assert annotation(function, normal(6, 4)) == "a^ b -> c^ b"


def test_an_operator_that_draws_random_numbers_has_no_claim_and_leaves_the_generator_alone():
    before = torch.get_rng_state()
    assert discover_partitions(F.dropout, (normal(4, 6),)) == []
    assert torch.equal(torch.get_rng_state(), before)


def test_a_gradient_that_is_wrong_on_parts_is_reported():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.rows = x.shape[0]
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2 / ctx.rows

    found = discover_partitions(Scaled.apply, (normal(4, 6),))
    assert [(each.forward, each.backward) for each in found] == [(True, False), (True, True)]


def test_an_operator_without_gradients_has_backward_none():
    [found] = discover_partitions(torch.argmax, (normal(4, 6),), {"dim": 1})
    assert found.backward is None


def test_an_operator_that_itself_fails_is_refused_with_its_error():
    with pytest.raises(UsageError, match=r"the operator itself fails .*: RuntimeError: mat1 and"):
        discover_partitions(torch.matmul, (normal(4, 8), normal(9, 8)))


def test_one_rank_is_refused():
    with pytest.raises(UsageError, match="the number of ranks must be 2 or more, got 1"):
        discover_partitions(torch.relu, (normal(4),), ranks=1)


def test_a_result_that_is_nan_everywhere_is_not_claimed():
    assert discover_partitions(torch.log, (torch.full((4, 4), -1.0),)) == []


# --- the kinds of arguments -----------------------------------------------------------------------


def test_indices_are_split_and_arguments_by_name_as_well():
    found = discover_partitions(
        F.embedding, (), {"input": integers(12, 4, 6), "weight": normal(12, 8)}
    )
    assert [each.recipe.inputs for each in found] == [
        (("input", Shard(0)),),
        (("input", Shard(1)),),
        (("weight", Shard(1)),),
    ]


def test_the_tensors_of_a_list_are_split_in_the_same_way():
    found = discover_partitions(torch.cat, ([normal(4, 6), normal(4, 8)], 1))
    assert [(each.recipe.inputs, each.recipe.outputs) for each in found] == [
        (((0, Shard(0)),), (Shard(0),))
    ]
    assert found[0].backward is True
    assert found[0].annotation == "split by dim 0 of args[0] -> concat 0"


def test_a_module_that_cannot_be_run_in_float64_is_run_as_it_is():
    layer = torch.nn.Linear(6, 4)
    found = discover_partitions(layer, (normal(8, 6),))
    assert [each.recipe.outputs for each in found] == [(Shard(0),)]


def test_an_operator_that_works_in_place_is_found_and_leaves_its_argument_alone():
    given = normal(4, 6)
    kept = given.clone()
    found = discover_partitions(torch.Tensor.relu_, (given,))
    assert [each.recipe.outputs for each in found] == [(Shard(0),), (Shard(1),)]
    assert all(each.backward for each in found)
    assert torch.equal(given, kept)


@pytest.mark.parametrize("ranks", [3, 4])
def test_other_numbers_of_ranks(ranks):
    found = discover_partitions(F.linear, (normal(12, 8), normal(24, 8)), ranks=ranks)
    assert [each.recipe.outputs[0] for each in found] == [Shard(0), Shard(1), Partial("sum")]


# --- against the others ---------------------------------------------------------------------------

CALLS = [
    OperatorCall(F.linear, (normal(4, 8), normal(10, 8), normal(10))),
    OperatorCall(F.conv2d, (normal(4, 8, 5, 5), normal(12, 2, 3, 3)), {"groups": 4}),
    OperatorCall(torch.addmm, (normal(4, 6), normal(4, 8), normal(8, 6))),
    OperatorCall(F.group_norm, (normal(4, 8, 5), 4, normal(8), normal(8))),
    OperatorCall(torch.Tensor.view, (normal(4, 24), 4, 4, 6)),
    OperatorCall(F.max_pool2d, (normal(2, 4, 8, 8), 2)),
    OperatorCall(torch.gather, (normal(4, 6), 1, integers(6, 4, 6))),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.function.__name__)
def test_the_checker_agrees_and_the_annotation_gives_the_same_splits_back(call):
    found = discover_partitions(call.function, call.args, call.kwargs)
    assert found
    said = Annotation.parse(found[0].annotation)
    recipes = [said.recipe(call, option) for option in said.options(call)]
    for each in found:
        verdict = check_recipe(call, each.recipe)
        assert verdict.passed, verdict
        assert any(_is_same(each.recipe, recipe) for recipe in recipes)
    assert len(recipes) == len(found)


def _is_same(mine: Recipe, other: Recipe) -> bool:
    kinds = (Shard, Once)
    places = [{p: x for p, x in one.inputs if isinstance(x, kinds)} for one in (mine, other)]
    return places[0] == places[1] and (mine.outputs, mine.numbers) == (other.outputs, other.numbers)
