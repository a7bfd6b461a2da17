"""Faults that have no word: whatever a pattern would call them is false, so none is stated."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drawing import normal
from paritas.core.diagnosis.diagnose import diagnose
from paritas.core.judging.failures import call_context

aten = torch.ops.aten


def whole_numbers(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(0))


def scrambled(x: Tensor, size: float) -> Tensor:
    """Like noise of this size, and the same for the same values."""
    return size * (977 * x.double()).sin().float()


def with_a_mixed_tail(y: Tensor) -> Tensor:
    return torch.cat([y[:, :15], 0.37 * y[:, 10:15] + 0.2 * y[:, 5:10]], 1)


def with_three_odd_values(y: Tensor) -> Tensor:
    places = torch.tensor([1, 5, 9]), torch.tensor([4, 4, 11])
    return y.index_put(places, torch.tensor([1.37, -2.2, 0.91]))


A, B = normal(12, 20), normal(12, 20, seed=1)
LEFT, RIGHT, SQUARE = normal(12, 24, seed=2), normal(24, 20, seed=3), normal(16, 16, seed=4)
OTHER = normal(16, 16, seed=5)
BIAS, WEIGHT = normal(20, seed=6), 1 + 0.2 * normal(20, seed=7)
TABLE, INDEX = normal(30, 8, seed=8), whole_numbers(30, 20)
IMAGE, KERNEL = normal(2, 4, 7, 7, seed=9), normal(5, 4, 3, 3, seed=10)
MASK = A > 0.3
POSITIVE = A.abs() + 0.1
FEW, MORE = normal(4, seed=11), normal(4, seed=12)
COUNTS, OTHER_COUNTS = whole_numbers(5, 40), whole_numbers(5, 40).flip(0)
LOGITS, TARGETS = normal(16, 10, seed=13), whole_numbers(10, 16)
SUM, PRODUCT, DOT = A + B, A * B, LEFT @ RIGHT
NORM, SHARES = F.layer_norm(A, (20,), WEIGHT, BIAS), A.softmax(-1)

FAULTS: dict[str, tuple[Tensor, tuple[Any, ...]]] = {
    "product mixed with an input": (
        SQUARE @ OTHER + 0.3 * SQUARE - 0.2 * OTHER,
        (aten.mm.default, SQUARE, OTHER),
    ),
    "two products mixed": (
        0.7 * (SQUARE @ OTHER) + 0.2 * (OTHER @ SQUARE),
        (aten.mm.default, SQUARE, OTHER),
    ),
    "product with noise": (DOT * (1 + scrambled(DOT, 0.01)), (aten.mm.default, LEFT, RIGHT)),
    "product with a mixed tail": (with_a_mixed_tail(DOT), (aten.mm.default, LEFT, RIGHT)),
    "product with three odd values": (with_three_odd_values(DOT), (aten.mm.default, LEFT, RIGHT)),
    "small product": (
        1.1 * (FEW[:, None] @ MORE[None]) + 0.2 * (MORE[:, None] @ FEW[None]),
        (aten.mm.default, FEW[:, None], MORE[None]),
    ),
    "other weight": (
        F.linear(LEFT, scrambled(RIGHT.T, 1.0), BIAS),
        (F.linear, LEFT, RIGHT.T, BIAS),
    ),
    "mixed rows of a weight": (
        F.linear(LEFT, 0.9 * RIGHT.T + 0.1 * RIGHT.T.roll(1, 0), BIAS),
        (F.linear, LEFT, RIGHT.T, BIAS),
    ),
    "sum and product": (SUM + 0.1 * PRODUCT, (aten.add.Tensor, A, B)),
    "weighted sum": (0.83 * A + 1.21 * B, (aten.add.Tensor, A, B)),
    "weighted sum of few": (0.83 * FEW + 1.3 * MORE, (aten.add.Tensor, FEW, MORE)),
    "sum of whole numbers": (
        COUNTS + OTHER_COUNTS + (3 * COUNTS + 7 * OTHER_COUNTS) % 5,
        (aten.add.Tensor, COUNTS, OTHER_COUNTS),
    ),
    "difference with a neighbour": (A - B + 0.2 * A.roll(1, 1) * B, (aten.sub.Tensor, A, B)),
    "mean of neighbours": ((PRODUCT + PRODUCT.roll(1, 1)) / 2, (aten.mul.Tensor, A, B)),
    "mixed with its transpose": (
        (SQUARE * OTHER + (SQUARE * OTHER).T) / 2,
        (aten.mul.Tensor, SQUARE, OTHER),
    ),
    "product of few, moved": (FEW * MORE + 0.3 * FEW - 0.1, (aten.mul.Tensor, FEW, MORE)),
    "another divisor": (A / (POSITIVE + 0.1 * B.abs()), (aten.div.Tensor, A, POSITIVE)),
    "relu with noise": (A.relu() * (1 + scrambled(A, 0.02)), (aten.relu.default, A)),
    "polynomial": (POSITIVE**2 + 0.7 * POSITIVE**3, (aten.pow.Tensor_Scalar, POSITIVE, 2)),
    "mixed branches": (
        torch.where(MASK, 0.9 * A + 0.1 * B, B),
        (aten.where.self, MASK, A, B),
    ),
    "other comparison": (A + scrambled(A, 0.3) > 0, (aten.gt.Scalar, A, 0.0)),
    "gradient of a curve": (
        A * (0.4 + 0.55 * (1.1 * B).tanh()),
        (aten.gelu_backward.default, A, B),
    ),
    "softmax of mixed rows": (
        0.8 * SHARES + 0.2 * SHARES.roll(1, 0),
        (aten._softmax.default, A, -1, False),
    ),
    "norm by absolute values": (
        (A - A.mean(-1, keepdim=True)) / A.abs().mean(-1, keepdim=True) * WEIGHT + BIAS,
        (F.layer_norm, A, (20,), WEIGHT, BIAS),
    ),
    "norm mixed with its input": (0.9 * NORM + 0.1 * A, (F.layer_norm, A, (20,), WEIGHT, BIAS)),
    "norm with a mixed tail": (
        with_a_mixed_tail(NORM),
        (F.layer_norm, A, (20,), WEIGHT, BIAS),
    ),
    "two rows of a table": (
        (TABLE[INDEX] + TABLE[(7 * INDEX + 3) % 30]) / 2,
        (aten.embedding.default, TABLE, INDEX),
    ),
    "mixed kernel": (
        F.conv2d(IMAGE, 0.8 * KERNEL + 0.2 * KERNEL.flip(2)),
        (F.conv2d, IMAGE, KERNEL),
    ),
    "blurred result": (
        F.conv2d(IMAGE, KERNEL) + 0.1 * F.conv2d(IMAGE, KERNEL).roll(1, 3),
        (F.conv2d, IMAGE, KERNEL),
    ),
    "weighted mean": (
        (A * (1 + 0.3 * scrambled(BIAS, 1.0))).mean(1),
        (aten.mean.dim, A, [1]),
    ),
    "mean of clipped values": (A.clamp(-1.5, 1.0).mean(1), (aten.mean.dim, A, [1])),
    "sum of powers": ((A.sign() * A.abs() ** 1.1).sum(1), (aten.sum.dim_IntList, A, [1])),
    "variance of neighbours": ((A + 0.1 * A.roll(1, 1)).var(1), (aten.var.correction, A, [1])),
    "decaying sums": (
        (A * (1 - 0.01 * torch.arange(20))).cumsum(1),
        (aten.cumsum.default, A, 1),
    ),
    "one number": (A.sum() + 0.37 * A.square().mean(), (aten.sum.default, A)),
    "power of a loss": ((A - B).abs().pow(1.7).mean(), (F.mse_loss, A, B)),
    "smoothed loss": (
        0.9 * F.cross_entropy(LOGITS, TARGETS) - 0.07 * LOGITS.mean(),
        (F.cross_entropy, LOGITS, TARGETS),
    ),
    "pooled both ways": (
        0.7 * F.max_pool2d(IMAGE, 2) + 0.3 * F.avg_pool2d(IMAGE, 2),
        (F.max_pool2d, IMAGE, 2),
    ),
    "mixed parts": (torch.cat([0.9 * A + 0.1 * B, B]), (torch.cat, [A, B])),
}


# Many mistakes are tried here.
WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
SLOW = {
    *("product mixed with an input", "two products mixed", "other weight"),
    *("mixed rows of a weight", "softmax of mixed rows", "norm by absolute values"),
    *("norm mixed with its input", "norm with a mixed tail", "mixed kernel", "blurred result"),
    *("power of a loss", "smoothed loss", "small product", "product with noise"),
}


# Each element is some function of the same operands: that much may be said, and no more.
OF_OPERANDS = {"sum and product", "weighted sum", "polynomial", "gradient of a curve"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fault", sorted(OF_OPERANDS))
def test_a_function_without_a_name_is_another_function(fault: str) -> None:
    candidate, (target, *args) = FAULTS[fault]
    right = target(*args)
    found = diagnose(candidate, right, context=call_context(target, tuple(args), {}))
    assert {one.kind for one in found.patterns} <= {"other function"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "fault",
    [name for name in FAULTS if name not in OF_OPERANDS and (WHOLE or name not in SLOW)],
)
def test_a_fault_without_a_word_gets_none(fault: str) -> None:
    candidate, (target, *args) = FAULTS[fault]
    right = target(*args)
    found = diagnose(candidate, right, context=call_context(target, tuple(args), {}))
    assert [(one.kind, one.sentence) for one in found.patterns] == []


def test_one_nan_is_not_put_down_to_another_function_that_would_give_it() -> None:
    """The power of a negative number is none."""
    candidate = PRODUCT.clone()
    place = int(((A < 0) & (B % 1 != 0)).flatten().nonzero()[0])
    candidate.view(-1)[place] = torch.nan
    found = diagnose(candidate, PRODUCT, context=call_context(aten.mul.Tensor, (A, B), {}))
    assert [one.kind for one in found.patterns] in ([], ["nonfinite"])


def test_a_negated_operand_is_a_sign() -> None:
    found = diagnose(-A - B, A - B, context=call_context(aten.sub.Tensor, (A, B), {}))
    assert found.best is not None
    assert (found.best.kind, found.best.sentence) == ("sign", "self is negated")


def test_a_factor_that_is_zero_everywhere_does_not_show_what_was_done_with_it() -> None:
    # Left out, added, or one plus it: all give the other factor.
    zeros = torch.zeros_like(A)
    context = call_context(aten.mul.Tensor, (A, zeros), {})
    found = diagnose(A * (1 + zeros), A * zeros, context=context)
    assert found.patterns == ()
    context = call_context(aten.mul.Tensor, (A, B), {})
    found = diagnose(A.clone(), A * B, context=context)
    assert found.best is not None
    assert found.best.kind == "missing operand"


@pytest.mark.parametrize("operator", [aten.var.correction, aten.std.correction])
def test_trying_mistakes_prints_no_warnings_of_torch(
    operator: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    x = A.reshape(-1)[:12].reshape(6, 1, 2)
    right = operator(x, [2])
    torch.set_warn_always(True)
    try:
        diagnose(1.7 * right, right, context=call_context(operator, (x, [2]), {}))
    finally:
        torch.set_warn_always(False)
    assert capfd.readouterr().err == ""


def test_an_operand_that_is_larger_everywhere_decides_nothing() -> None:
    """A minimum for a maximum gives the same as the larger operand left out."""
    larger = A.abs() + A
    for operands in ((larger + 1, A), (A, larger + 1)):
        context = call_context(aten.maximum.default, operands, {})
        found = diagnose(A.clone(), larger + 1, context=context)
        assert found.best is None


def test_a_function_that_is_1_everywhere_has_no_factor_on_its_argument() -> None:
    context = call_context(torch.cos, (A,), {})
    found = diagnose(torch.ones_like(A), A.cos(), context=context)
    assert found.best is None or found.best.kind == "constant"


def test_nothing_that_is_added_to_zeros_is_said_of_the_operator_and_not_of_the_zeros() -> None:
    zeros, rows = torch.zeros(6, 5), torch.randn(2, 5)
    added = (zeros, 0, torch.tensor([1, 4]), rows)
    context = call_context(aten.index_add.default, added, {})
    found = diagnose(zeros.clone(), aten.index_add.default(*added), context=context)
    assert found.best is not None
    assert found.best.sentence == "nothing is added"
    written = (zeros + 1, [torch.tensor([1, 4])], rows)
    context = call_context(aten.index_put.default, written, {})
    found = diagnose(zeros + 1, aten.index_put.default(*written), context=context)
    assert found.best is not None
    assert found.best.sentence == "nothing is written"


def kind_of(candidate: Tensor, target: Any, *args: Any) -> str:
    found = diagnose(candidate, target(*args), context=call_context(target, args, {}))
    return "" if found.best is None else found.best.kind


def test_a_row_with_one_chance_left_shows_no_mask() -> None:
    """The softmax of one element is 1, whichever others were masked."""
    scores = SQUARE + torch.full((16, 16), -torch.inf).triu(1)
    first = scores.softmax(-1)[:1].expand(16, 16).clone()
    assert kind_of(first, aten._softmax.default, scores, -1, False) == "copy"
    best = F.one_hot(A.argmax(-1), 20).float()
    assert kind_of(best, aten._softmax.default, A, -1, False) in ("", "other function")
    fewer = A.masked_fill(A.topk(3, -1).values[:, -1:] > A, -torch.inf).softmax(-1)
    assert kind_of(fewer, aten._softmax.default, A, -1, False) == "mask"


def test_one_row_for_all_is_a_copy_whatever_the_mask_lets_through() -> None:
    """Of the first position, a causal mask lets one key through, so its row is one value."""
    query, key, value = (normal(2, 2, 12, 8, seed=seed) for seed in range(3))
    mask = torch.full((12, 12), -torch.inf).triu(1)
    call = (F.scaled_dot_product_attention, query, key, value, mask)
    first = value[..., :1, :].expand(value.shape)
    assert kind_of(call[0](query, key, first, mask), *call) == "copy"


def test_with_one_result_the_input_and_the_kernel_cannot_be_told_apart() -> None:
    images, weight = normal(4, 6, 2, 2), normal(5, 6, 3, 3, seed=1)
    call = (aten.convolution.default, images, weight, None, [2, 2], [1, 1], [1, 1])
    rest = (False, [0, 0], 1)
    half = images.clone()
    half[:, :, 1] = 0
    wrong = call[0](half, *call[2:], *rest)
    assert wrong.shape[2:] == (1, 1)
    assert kind_of(wrong, *call, *rest) not in ("partial sum", "missing operand")


def test_a_block_of_zeros_is_not_a_mask() -> None:
    zeros = torch.zeros_like(A)
    block = torch.where(MASK, A, 0.0).index_fill(1, torch.arange(8, 12), 0.0)
    assert kind_of(block, aten.where.self, MASK, A, zeros) == "zeros"
    scattered = torch.where(MASK & (B < 0.5), A, 0.0)
    assert kind_of(scattered, aten.where.self, MASK, A, zeros) == "mask"


def test_a_limit_lets_something_through() -> None:
    assert kind_of(0 * A, aten.relu.default, A) == "zeros"
    assert kind_of(A.amax(1) * 0 + A.amax(), aten.amax.default, A, [1]) != "clipped"
    assert kind_of(A.clamp(max=0.7), aten.clone.default, A) == "clipped"


def test_one_operand_that_is_larger_along_rows_decides_nothing() -> None:
    row = A.amin(1, keepdim=True) - 1
    assert kind_of(torch.minimum(A, row), aten.maximum.default, A, row) == ""
    row = A.mean(1, keepdim=True)
    assert kind_of(torch.minimum(A, row), aten.maximum.default, A, row) == "other function"


def test_a_number_that_may_as_well_be_twice_as_large_is_not_stated() -> None:
    best = F.one_hot(A.argmax(-1), 20).float()
    assert kind_of(best, aten._softmax.default, A, -1, False) != "wrong factor"
    assert kind_of((3 * A).softmax(-1), aten._softmax.default, A, -1, False) == "wrong factor"


def test_whole_numbers_that_begin_again_are_not_an_offset() -> None:
    numbers = torch.arange(16)
    assert kind_of(numbers % 8, aten.arange.default, 16) == "wrapped"
    assert kind_of(numbers % 5, aten.arange.default, 16) == "wrapped"
    moved = torch.where(numbers < 8, numbers, numbers - 4)
    assert kind_of(moved, aten.arange.default, 16) == "offset"


def test_labels_taken_from_the_scores_are_told_from_a_score_left_out() -> None:
    """The best score less the largest one is 0, so both give the same loss."""
    targets = TARGETS.masked_fill(TARGETS == 3, -100)
    own = torch.where(targets < 0, targets, LOGITS.argmax(1))
    loss = F.cross_entropy(LOGITS, own)
    assert kind_of(loss, F.cross_entropy, LOGITS, targets) == "wrong index"


def test_channels_that_are_not_normalised_are_copied_and_have_no_other_statistics() -> None:
    images, weight, bias = 1 + 2 * normal(3, 6, 5, 5), normal(6, seed=1).exp(), normal(6, seed=2)
    call = (F.batch_norm, images, None, None, weight, bias, True)
    odd = (torch.arange(6) % 2 == 1).view(-1, 1, 1)
    assert kind_of(torch.where(odd, images, call[0](*call[1:])), *call) == "copy"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_a_rounded_deviation_is_less_precise_and_no_other_statistic(dtype: torch.dtype) -> None:
    rows, weight, bias = 1 + 2 * normal(4, 7, 16), normal(16, seed=1).exp(), normal(16, seed=2)
    deviation = (rows.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    coarse = (rows - rows.mean(-1, keepdim=True)) * (1 / deviation).to(dtype).float()
    call = (F.layer_norm, rows, [16], weight, bias)
    assert kind_of(coarse * weight + bias, *call) == "precision"


def test_a_branch_that_is_taken_everywhere_is_a_condition_not_read() -> None:
    causal = torch.ones(2, 1, 3, 9, dtype=torch.bool).tril()
    none, least = torch.zeros(()), torch.full((), torch.finfo(torch.float32).min)
    zeros = torch.zeros(2, 1, 3, 9)
    assert kind_of(zeros, torch.where, causal, none, least) == "mask"


def test_one_value_in_a_column_of_a_mask_is_copied_from_nowhere() -> None:
    places = torch.arange(16)
    call = torch.ops.aten.le.Tensor, places, places[:, None]
    assert kind_of(call[0](*call[1:]) & (places > 0), *call) == ""
