"""What reproduces a candidate by chance does not do so with other operands."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional

from paritas.core.diagnosis.diagnose import diagnose
from paritas.core.diagnosis.place_runs import PlaceRuns, vary_operands
from paritas.core.judging.failures import call_context

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_ATEN = torch.ops.aten


def _diagnose(
    reference: Callable[..., Any],
    candidate: Callable[..., Any],
    *operands: Any,
    again: bool = True,
    any_length: bool = False,
) -> tuple[str, str]:
    """The kind and the sentence.

    Args:
        again: whether both programs can be asked again.
        any_length: also with longer operands.
    """
    tensors = tuple(one for one in operands if isinstance(one, torch.Tensor))
    rest = [one for one in operands if not isinstance(one, torch.Tensor)]
    right, wrong = reference(*operands), candidate(*operands)
    call = lambda values: candidate(*values, *rest)  # noqa: E731
    runs = PlaceRuns(
        tensors,
        lambda values: reference(*values, *rest),
        lambda: call,
        right,
        wrong,
        remake_candidate=(lambda _: call) if any_length else None,
    )
    context = call_context(reference, operands, {})
    context = dataclasses.replace(context, runs=runs if again else None)
    patterns = diagnose(wrong, right, context=context).patterns
    return (str(patterns[0].kind), patterns[0].sentence) if patterns else ("", "")


@pytest.fixture
def rows() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(6, 8)


def test_a_factor_of_these_values_only_is_not_stated(rows: Tensor) -> None:
    ones = torch.ones(6, 8)
    more = lambda x, w: x * (w + 1)  # noqa: E731
    assert _diagnose(_ATEN.mul.Tensor, more, rows, ones, again=False)[0] == "scale"
    assert _diagnose(_ATEN.mul.Tensor, more, rows, ones)[0] != "scale"


def test_a_limit_that_follows_from_the_values_is_no_limit(rows: Tensor) -> None:
    lowest = lambda x, mask, _: torch.where(mask, x.masked_fill(mask, 9.0).min(), x)  # noqa: E731
    mask = rows > 0.5
    kind, _ = _diagnose(_ATEN.masked_fill.Scalar, lowest, rows, mask, -100.0)
    assert kind != "clipped"


def test_a_limit_that_stays_is_stated(rows: Tensor) -> None:
    limited = lambda x: functional.silu(x).clamp(max=0.5)  # noqa: E731
    kind, _ = _diagnose(_ATEN.silu.default, limited, rows)
    assert kind == "clipped"


def test_the_reverse_order_of_three_rows_is_no_shift() -> None:
    torch.manual_seed(0)
    # The first and the last row are alike: reversed and moved by one give the same rows here.
    images = torch.randn(2, 4, 3, 3)
    images[:, :, 1] = images[:, :, 2]
    flipped = lambda x: _ATEN.abs.default(x.flip(2))  # noqa: E731
    kind, _ = _diagnose(_ATEN.abs.default, flipped, images)
    assert kind in {"permutation", "wrong index", ""}


def test_rows_that_are_averaged_are_told_so_also_if_they_are_added_to_zeros(rows: Tensor) -> None:
    index = torch.tensor([0, 1, 1, 2, 2, 2])
    counts = torch.tensor([1.0, 2.0, 3.0, 1.0])[:, None]

    def add(into: Tensor, source: Tensor) -> Tensor:
        return _ATEN.index_add.default(into, 0, index, source)

    def average(into: Tensor, source: Tensor) -> Tensor:
        return into + add(torch.zeros_like(into), source) / counts

    operands = torch.zeros(4, 8), rows
    right, wrong = add(*operands), average(*operands)
    runs = PlaceRuns(
        operands, lambda values: add(*values), lambda: lambda values: average(*values), right, wrong
    )
    context = call_context(_ATEN.index_add.default, (operands[0], 0, index, rows), {})
    found = diagnose(wrong, right, context=dataclasses.replace(context, runs=runs))
    assert found.patterns[0].kind == "wrong reduction"
    assert "averaged and then added" in found.patterns[0].sentence


def test_other_operands_keep_shapes_dtypes_masks_and_signs() -> None:
    torch.manual_seed(0)
    shares = torch.softmax(torch.randn(4, 5), -1)
    mask = torch.zeros(3, 3).masked_fill(torch.eye(3) > 0, -torch.inf)
    operands = (shares, mask, torch.arange(4), torch.ones(7), torch.rand(9) + 2)
    varied = vary_operands(operands, 1)
    assert [(one.shape, one.dtype) for one in varied] == [(o.shape, o.dtype) for o in operands]
    assert bool(((varied[0] >= 0) & (varied[0] <= 1)).all())
    assert torch.equal(varied[1], mask)
    assert torch.equal(varied[2], operands[2])
    assert len(varied[3].unique()) == 7
    assert bool((varied[4] > 0).all())
    assert not torch.equal(varied[4], operands[4])


# --- What is true of the whole result comes before a step inside ----------------------------------


def test_the_sign_of_a_loss_comes_before_a_step_of_it() -> None:
    torch.manual_seed(0)
    scores, labels = torch.randn(6, 10), torch.randint(0, 10, (6,))
    loss = functional.cross_entropy
    kind, sentence = _diagnose(loss, lambda x, y: -loss(x, y), scores, labels)
    assert kind == "sign"
    assert "aten" not in sentence


def test_a_factor_comes_before_terms_that_count_twice(rows: Tensor) -> None:
    weight = torch.randn(5, 8)
    twice = lambda x, w: 2 * functional.linear(x, w)  # noqa: E731
    assert _diagnose(functional.linear, twice, rows, weight)[0] in {"scale", "wrong factor"}
    # Of every second term only, it is no factor of the result.
    some = lambda x, w: functional.linear(x * torch.tensor([2.0, 1.0] * 4), w)  # noqa: E731
    assert _diagnose(functional.linear, some, rows, weight)[0] != "scale"


def test_the_square_of_a_softmax_is_a_function_of_it(rows: Tensor) -> None:
    softmax = lambda x: torch.softmax(x, -1)  # noqa: E731
    assert _diagnose(softmax, lambda x: softmax(x).square(), rows)[0] == "other function"
    assert _diagnose(softmax, lambda x: softmax(2 * x), rows)[0] == "wrong factor"


# --- What is solved for is looked at twice --------------------------------------------------------


def test_a_weight_that_is_limited_is_stated_if_it_is_limited_again(rows: Tensor) -> None:
    weight = torch.randn(5, 8)
    limited = lambda x, w: functional.linear(x, w.clamp(-0.5, 0.5))  # noqa: E731
    assert _diagnose(functional.linear, limited, rows, weight)[0] == "clipped"


def test_a_weight_that_the_candidate_holds_itself_keeps_its_values(rows: Tensor) -> None:
    weight = torch.randn(4, 8)
    copied = torch.cat([weight[:2], weight[2:] / 2])

    def held(x: Tensor, w: Tensor) -> Tensor:
        return functional.linear(x, torch.cat([w[:2], copied[2:]]))

    kind, _ = _diagnose(functional.linear, held, rows, weight)
    assert kind in {"axis scale", "scale", "wrong factor"}


def test_signs_that_are_not_read_in_a_part_are_not_flipped_there(rows: Tensor) -> None:
    signs = torch.where(rows > 0.2, 1.0, -1.0)
    is_odd = torch.arange(8) % 2 == 1
    kept = lambda x, s: torch.where(is_odd, x, x * s)  # noqa: E731
    assert _diagnose(torch.mul, kept, rows.abs(), signs)[0] != "sign"


def test_the_first_of_two_rows_for_all_is_no_shift() -> None:
    torch.manual_seed(0)
    pair = torch.randn(2, 8)
    first = lambda x: _ATEN.tanh.default(x[:1].expand_as(x))  # noqa: E731
    assert _diagnose(_ATEN.tanh.default, first, pair)[0] in {"shift", "copy"}
    assert _diagnose(_ATEN.tanh.default, first, pair, any_length=True)[0] != "shift"


def test_a_divisor_that_is_one_too_large_is_no_factor_if_it_follows_the_length() -> None:
    torch.manual_seed(0)
    rows = torch.randn(5, 9)
    mean = lambda x, dims: x.sum(dims) / (x.shape[1] + 1)  # noqa: E731
    kind, _ = _diagnose(_ATEN.mean.dim, mean, rows, [1], any_length=True)
    assert kind in {"off by one reduction", "wrong statistics"}
    scaled = lambda x, dims: x.mean(dims) * 0.9  # noqa: E731
    kind, sentence = _diagnose(_ATEN.mean.dim, scaled, rows, [1], any_length=True)
    assert (kind, sentence) == ("scale", "scaled by 0.9")


def test_a_summand_that_is_rounded_to_nothing_here_is_not_left_out(rows: Tensor) -> None:
    small = torch.linspace(-0.4, 0.4, 8)
    rounded = lambda x, other: x + other.round()  # noqa: E731
    kind, _ = _diagnose(_ATEN.add.Tensor, rounded, rows, small)
    assert kind not in {"missing operand", "axis offset"}
    left_out = lambda x, other: x + 0 * other  # noqa: E731
    assert _diagnose(_ATEN.add.Tensor, left_out, rows, small)[0] == "missing operand"


def test_few_values_with_one_scale_each_are_no_quantisation() -> None:
    torch.manual_seed(0)
    column = torch.randn(6, 1)
    divided = lambda x, number: x / (number + 1)  # noqa: E731
    kind, _ = _diagnose(_ATEN.div.Tensor, divided, column, 127.0)
    assert kind != "precision"


def test_operands_with_the_same_values_are_told_apart_when_they_are_asked_again() -> None:
    """At first a norm has a mean and a bias of zeros, a variance and a weight of ones."""
    torch.manual_seed(0)
    images = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    zeros, ones = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    operands = (images, zeros, ones, ones.clone(), zeros.clone())

    def wider(x: Tensor, mean: Tensor, var: Tensor, *rest: Tensor) -> Tensor:
        return functional.batch_norm(x, mean, var * 128 / 127, *rest)

    kind, sentence = _diagnose(functional.batch_norm, wider, *operands)
    assert kind != "residual", sentence


def test_a_rounding_to_whole_numbers_is_no_zeros_though_all_values_are_small(rows: Tensor) -> None:
    assert _diagnose(torch.relu, lambda x: x.relu().round(), 0.02 * rows)[0] != "zeros"
    assert _diagnose(torch.relu, lambda x: x.relu() * 0, 0.02 * rows)[0] == "zeros"


def test_operands_that_follow_from_each_other_are_varied_together(rows: Tensor) -> None:
    runs = PlaceRuns(
        (rows, 2 * rows),
        lambda values: values[1],
        lambda: lambda values: values[0],
        2 * rows,
        rows,
        settle=lambda values: [values[0], 2 * values[0]],
    )
    for seed, growth in ((1, 1.0), (2, 16.0)):
        first, second = runs.vary(seed, growth=growth)
        assert not torch.equal(first, rows)
        assert torch.equal(second, 2 * first)


def test_a_number_that_is_added_is_stated_if_it_is_round_or_holds_again(rows: Tensor) -> None:
    total = lambda x: x.sum() + x  # noqa: E731
    mean = lambda x: 0.7 * x.sum() + x  # noqa: E731
    # Of this run alone, any share of the sum is one number for all elements.
    assert _diagnose(total, mean, rows, again=False)[0] != "offset"
    assert _diagnose(total, mean, rows)[0] != "offset"
    more = lambda x: x.sum() + x - 12.345  # noqa: E731
    assert _diagnose(total, more, rows)[0] == "offset"


def test_one_number_that_the_candidate_holds_is_no_constant() -> None:
    operand = torch.tensor([2.302585])
    held = lambda _: torch.tensor([9.0])  # noqa: E731
    assert _diagnose(_ATEN.exp.default, held, operand)[0] != "constant"


def test_an_odd_function_is_no_reading_of_other_elements(rows: Tensor) -> None:
    norm = lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)  # noqa: E731
    kind, sentence = _diagnose(norm, torch.clone, rows)
    assert kind in {"missing operand", "copy", "other function"}, sentence


def test_zeros_along_the_summed_axis_of_a_weight_are_terms_that_are_left_out() -> None:
    torch.manual_seed(0)
    operands = torch.randn(16, 64), torch.randn(8, 64), torch.randn(8)
    every_second = torch.arange(64) % 2 == 0
    loop = lambda x, weight, bias: functional.linear(x * every_second, weight, bias)  # noqa: E731
    kind, sentence = _diagnose(functional.linear, loop, *operands)
    assert kind == "partial sum"
    assert sentence.startswith("terms of each sum are left out: weight is read as zero")


def test_a_factor_that_follows_from_the_sizes_is_stated(rows: Tensor) -> None:
    doubled = lambda x: functional.normalize(x, dim=-1) * (x.shape[-1] + 1)  # noqa: E731
    call = lambda x: functional.normalize(x, dim=-1)  # noqa: E731
    kind, sentence = _diagnose(call, doubled, rows, any_length=True)
    assert (kind, sentence.partition(" (")[0]) == ("scale", "scaled by 9")


def test_an_argument_that_follows_from_the_sizes_is_solved_for_again(rows: Tensor) -> None:
    attend = functional.scaled_dot_product_attention
    wider = lambda q, k, v: attend(q, k, v, scale=(q.shape[-1] + 1) ** -0.5)  # noqa: E731
    heads = rows[None, None]
    operands = (heads, heads.flip(-1), heads.sin())
    kind, _ = _diagnose(attend, wider, *operands, any_length=True)
    assert kind == "wrong factor"


def test_a_limit_that_one_value_has_reached_is_seen_with_other_operands(rows: Tensor) -> None:
    limit = float(rows.abs().flatten().sort().values[-2]) - 1e-3
    limited = lambda x: x.exp().clamp(max=limit)  # noqa: E731
    kind, sentence = _diagnose(_ATEN.exp.default, limited, rows)
    assert kind == "clipped", sentence


def test_a_sort_in_a_part_is_no_argument_of_it() -> None:
    values = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    first = lambda x: torch.cat([x[:3].sort(-1, descending=True)[0], x[3:].sort(-1)[0]])  # noqa: E731
    _, sentence = _diagnose(lambda x: x.sort(-1)[0], first, values)
    assert "only in a part" not in sentence


def test_every_second_of_five_rows_is_a_region() -> None:
    values = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    skipped = lambda x: x.exp().index_copy(0, _ODD, x[_ODD])  # noqa: E731
    kind, sentence = _diagnose(_ATEN.exp.default, skipped, values)
    assert kind == "copy", sentence


_ODD = torch.tensor([1, 3])
