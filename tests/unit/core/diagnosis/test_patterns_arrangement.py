"""Patterns of arrangement: what each says, and that it says nothing where it must not."""

from __future__ import annotations

import pytest
import torch

from drawing import normal
from paritas.core.diagnosis.case import Case, Context
from paritas.core.diagnosis.patterns.arrangements import propose_permutations, propose_shifts
from paritas.core.diagnosis.patterns.operations import (
    propose_masks,
    propose_operands,
    propose_selections,
    propose_ties,
)
from paritas.core.diagnosis.patterns.reductions import (
    propose_norms,
    propose_partial_sums,
    propose_reductions,
)
from paritas.core.diagnosis.patterns.replacements import propose_random_streams

ALL = (
    propose_selections,
    propose_shifts,
    propose_permutations,
    propose_operands,
    propose_reductions,
    propose_norms,
    propose_masks,
    propose_partial_sums,
    propose_random_streams,
    propose_ties,
)


def only(propose, case: Case):
    found = propose(case)
    assert len(found) == 1
    return found[0]


def test_a_roll_is_named_with_its_distance_and_axis():
    x = normal(8, 30)
    found = only(propose_shifts, Case(x.roll(3, 1), x, context=Context(axes=("batch", "token"))))
    assert found.sentence == (
        "rolled by 3 along axis 1 (token): every value is 3 places after its own"
    )
    assert found.evidence["distance"] == 3


def test_a_shift_with_zeros_says_what_fills_the_gap():
    x = normal(8, 30)
    y = x.roll(-1, 1)
    y[:, -1] = 0
    found = only(propose_shifts, Case(y, x))
    assert found.sentence == (
        "off by one along axis 1: every value is 1 place before its own, with zeros in the gap"
    )


def test_a_roll_of_a_few_rows_only_is_found():
    x = normal(12, 40)
    y = x.clone()
    y[3:8] = x[3:8].roll(5, 1)
    assert only(propose_shifts, Case(y, x)).evidence["distance"] == 5


def test_a_transposed_square_is_named():
    x = normal(9, 9)
    assert only(propose_permutations, Case(x.T, x)).sentence == (
        "transposed: axis 0 and axis 1 are swapped"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.flip(0), "flipped along axis 0"),
        (
            lambda x: x.reshape(6, 3, 4).transpose(1, 2).reshape(6, 12),
            "interleaved differently: 3 groups of 4 read as 4 groups of 3 along axis 1",
        ),
        (lambda x: x[[0, 4, 2, 3, 1, 5]], "slices 1 and 4 are swapped along axis 0"),
        (
            lambda x: x.T.reshape(6, 12),
            (
                "reshaped without a transpose (or the other way round): the values of axis 0 and "
                "axis 1 lie in memory in the other order"
            ),
        ),
    ],
)
def test_an_order_is_called_by_its_name(change, words):
    x = normal(6, 12)
    assert only(propose_permutations, Case(change(x), x)).sentence == words


def test_exchanged_operands_of_a_product_are_found():
    a, b = normal(7, 7), normal(7, 7, seed=1)
    context = Context(operator="aten.mm.default", inputs=(a, b))
    found = only(propose_operands, Case(b @ a, a @ b, context=context))
    assert found.sentence == "the factors are swapped: b @ a instead of a @ b"


def test_an_operator_that_does_not_give_the_right_values_is_not_believed():
    a, b = normal(7, 7), normal(7, 7, seed=1)
    context = Context(operator="aten.mm.default", inputs=(a, b))
    assert propose_operands(Case(b @ a, 2 * (a @ b), context=context)) == []


def test_a_mean_over_one_element_less_says_which():
    x = normal(20, 11)
    context = Context(operator="aten.mean.dim", inputs=(x,), arguments={"dim": [1]})
    found = only(propose_reductions, Case(x[:, :-1].mean(1), x.mean(1), context=context))
    assert found.sentence == "the last element is left out of the 11 along dim 1"


def test_a_missing_tail_of_a_contraction_is_counted():
    a, b = normal(9, 64), normal(64, 8, seed=1)
    context = Context(operator="aten.mm.default", inputs=(a, b))
    found = only(propose_partial_sums, Case(a[:, :48] @ b[:48], a @ b, context=context))
    assert found.sentence == "the last 16 of the 64 terms of each sum are missing"


def convolution(stride: int = 1) -> tuple[Context, list[torch.Tensor]]:
    x, weight, bias = normal(2, 8, 6, 6), normal(5, 8, 3, 3, seed=1), normal(5, seed=2)
    arguments = {"stride": [stride, stride], "padding": [1, 1], "dilation": [1, 1], "groups": 1}
    context = Context("aten.convolution.default", (x, weight, bias), arguments)
    return context, [x, weight, bias]


def test_channels_that_a_convolution_lacks_are_counted():
    context, (x, weight, bias) = convolution(stride=2)
    right = torch.conv2d(x, weight, bias, 2, 1)
    half = torch.conv2d(x[:, :4], weight[:, :4], bias, 2, 1)
    pattern = only(propose_partial_sums, Case(half, right, context=context))
    assert pattern.sentence == "the last 4 of the 8 terms of each sum are missing"


def test_a_product_there_twice_with_its_bias_once_has_a_wrong_factor():
    # Nobody can tell a sum that is made twice from an operand that is doubled.
    context, (x, weight, bias) = convolution()
    right = torch.conv2d(x, weight, bias, 1, 1)
    pattern = only(
        propose_partial_sums, Case(torch.conv2d(2 * x, weight, bias, 1, 1), right, context=context)
    )
    assert pattern.kind == "wrong factor"
    a, b, c = normal(8, 12), normal(12, 9, seed=1), normal(9, seed=2)
    context = Context("aten.addmm.default", (c, a, b))
    pattern = only(propose_partial_sums, Case(c + 2 * (a @ b), c + a @ b, context=context))
    assert pattern.kind == "wrong factor"


@pytest.mark.parametrize(("way", "words"), [(1, "one index too late"), (-2, "2 indices too early")])
def test_a_piece_taken_from_beside_is_a_shift(way, words):
    x = normal(6, 9)
    context = Context("aten.select.int", (x,), {"dim": 1, "index": 4})
    case = Case(x.select(1, 4 + way), x.select(1, 4), context=context)
    assert only(propose_selections, case).sentence == f"taken from {words}"
    context = Context("aten.slice.Tensor", (x,), {"dim": 1, "start": 3, "end": 6})
    case = Case(x[:, 3 + way : 6 + way], x[:, 3:6], context=context)
    assert only(propose_selections, case).sentence == f"taken from {words}"


def test_a_part_that_was_never_reduced_is_told_by_the_sum_of_the_parts():
    parts = tuple(normal(5, 6, seed=seed) for seed in range(4))
    case = Case(parts[2], sum(parts), context=Context(held=dict(enumerate(parts))))
    assert only(propose_partial_sums, case).sentence == (
        "never reduced: this is the part of rank 2 alone, and the sum of the 4 ranks' parts "
        "is right"
    )


def test_another_eps_is_named():
    x = 0.02 * normal(10, 16)
    context = Context(operator="aten.layer_norm.default", inputs=(x,), arguments={"eps": 1e-5})
    norm = torch.nn.functional.layer_norm
    case = Case(norm(x, (16,), eps=1e-3), norm(x, (16,), eps=1e-5), context=context)
    assert only(propose_norms, case).sentence == "eps is 0.001 instead of 1e-05"


@pytest.mark.parametrize(
    ("eps", "words"), [(0.0, "eps is left out"), (1e-2, "eps is 0.01 instead")]
)
def test_another_eps_of_a_batch_is_named(eps, words):
    x, weight, bias = 0.2 * normal(6, 5, 4), normal(5, seed=1), normal(5, seed=2)
    context = Context("aten.native_batch_norm.default", (x, weight, bias), {"training": True})

    def norm(eps):
        return torch.native_batch_norm(x, weight, bias, None, None, True, 0.1, eps)[0]

    assert only(propose_norms, Case(norm(eps), norm(1e-5), context=context)).sentence.startswith(
        words
    )


def test_a_causal_mask_off_by_one_is_named():
    query, key, value = (normal(2, 9, 8, seed=seed) for seed in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    late = torch.ones(9, 9, dtype=torch.bool).tril(1)
    context = Context(
        operator="aten.scaled_dot_product_attention.default",
        inputs=(query, key, value),
        arguments={"is_causal": True},
    )
    wrong = attend(query, key, value, attn_mask=late)
    case = Case(wrong, attend(query, key, value, is_causal=True), context=context)
    assert (
        only(propose_masks, case).sentence
        == "the causal mask is off by one: each token sees the next"
    )


def test_another_dropout_mask_of_the_same_rate_is_another_stream():
    x = normal(40, 40)
    generator = torch.Generator().manual_seed(3)
    wrong, right = (x * (torch.rand(40, 40, generator=generator) > 0.3) for _ in range(2))
    for context in (Context(operator="aten.native_dropout.default"), Context(draws=True)):
        case = Case(wrong, right, context=context)
        assert only(propose_random_streams, case).kind == "different random stream"


@pytest.mark.parametrize(
    "context",
    [
        Context(),
        Context(operator="aten.mul.Tensor", draws=True),
        Context(operator="aten.native_dropout_backward.default"),
        Context(operator="torch.nn.functional.normalize"),
        Context(operator="aten.scaled_dot_product_attention.default", arguments={"dropout_p": 0.0}),
    ],
    ids=["unknown", "mul", "backward of dropout", "normalize", "attention"],
)
def test_what_draws_nothing_has_no_random_stream(context):
    x = normal(40, 40)
    generator = torch.Generator().manual_seed(3)
    wrong, right = (x * (torch.rand(40, 40, generator=generator) > 0.3) for _ in range(2))
    assert propose_random_streams(Case(wrong, right, context=context)) == []
    assert propose_random_streams(Case(x, normal(40, 40, seed=1), context=context)) == []


def test_drawn_numbers_in_another_order_are_no_other_stream():
    x = normal(900)
    order = torch.randperm(900, generator=torch.Generator().manual_seed(1))
    context = Context(operator="aten.randn.default")
    assert propose_random_streams(Case(x[order], x, context=context)) == []
    assert only(propose_random_streams, Case(normal(900, seed=1), x, context=context))


def test_another_choice_among_equal_scores_is_tie_breaking_and_a_worse_one_is_not():
    scores = torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 2.0]])
    context = Context(operator="aten.argmax.default", inputs=(scores,), arguments={"dim": 1})
    right = torch.tensor([1, 0])
    assert only(propose_ties, Case(torch.tensor([2, 2]), right, context=context)).sentence == (
        "another choice among ties: the scores at the 2 differing indices are equal"
    )
    assert propose_ties(Case(torch.tensor([0, 2]), right, context=context)) == []


@pytest.mark.parametrize("propose", ALL, ids=lambda propose: propose.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_no_pattern(propose, dtype):
    for seed, shape in enumerate([(), (1,), (16, 16), (3, 4, 24)]):
        x = normal(*shape, seed=seed).double()
        candidate = (x * (1 + 1e-9)).to(dtype)
        parts = (x.to(dtype) / 2,) * 2
        case = Case(candidate, x.to(dtype), x, context=Context(held=dict(enumerate(parts))))
        assert propose(case) == []
