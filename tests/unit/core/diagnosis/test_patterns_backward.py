"""Backward kernels, terms of losses, saved tensors and dropout: which mistake reproduces them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drawing import normal64
from paritas.core.diagnosis.diagnose import diagnose
from paritas.core.judging.failures import call_context

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.core.results.findings import Pattern

aten = torch.ops.aten


def stated(
    candidate: Tensor, target: Callable[..., Any], *args: Any, output: int = 0
) -> Pattern | None:
    """The pattern that is stated first for one result of a call."""
    right = target(*args)
    right = right if isinstance(right, Tensor) else right[output]
    noise = 1e-9 * (right.abs() + right.abs().mean()) if right.is_floating_point() else None
    context = call_context(target, args, {})
    patterns = diagnose(candidate, right, noise=noise, context=context).patterns
    return patterns[0] if patterns else None


def kind_of(pattern: Pattern | None) -> str:
    return "" if pattern is None else str(pattern.kind)


GRAD, X = normal64(4, 6, 5, 5, seed=1), normal64(4, 6, 5, 5, seed=2)
WEIGHT = 1 + 0.2 * normal64(6, seed=3)
_, MEAN, ROOT = aten.native_group_norm(X, WEIGHT, None, 4, 6, 25, 3, 1e-5)
GROUPS = (aten.native_group_norm_backward.default, GRAD, X, MEAN, ROOT, WEIGHT, 4, 6, 25, 3)
GROUPS = (*GROUPS, [True, True, True])
NORMAL = F.group_norm(X, 3)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "candidate", "output"),
    [
        ("partial sum", (GRAD * NORMAL)[-1:].sum((0, 2, 3)), 1),
        ("missing operand", (GRAD * X).sum((0, 2, 3)), 1),
        ("copy", GRAD, 0),
        # A sum without its last row has one term less: nothing is shifted.
        ("partial sum", GRAD[:, :, :-2].sum((0, 2, 3)), 2),
        # Nothing in the formula gives these.
        ("", (GRAD * NORMAL).sum((0, 2, 3)).sinh(), 1),
        ("", normal64(4, 6, 5, 5, seed=9), 0),
    ],
)
def test_a_value_of_a_backward_kernel_in_the_place_of_another_is_told(
    kind: str, candidate: Tensor, output: int
) -> None:
    assert kind_of(stated(candidate, *GROUPS, output=output)) == kind


LINE, SLOPE = normal64(6, 9, seed=4), normal64(6, 9, seed=5)


def test_a_derivative_at_the_result_is_told_from_one_at_the_input() -> None:
    call = (aten.silu_backward.default, SLOPE, LINE)
    pattern = stated(aten.silu_backward(SLOPE, F.silu(LINE)), *call)
    assert kind_of(pattern) == "other function"
    assert pattern is not None
    assert pattern.sentence == "the derivative is taken at the result of silu, not at its input"
    assert kind_of(stated(aten.silu_backward(SLOPE, LINE.roll(1)), *call)) != "other function"


SCORES, LABELS = normal64(12, 7, seed=7), torch.tensor([0, 3, 6, 2, 5, 1, 4, 6, 0, -100, 2, 2])
GATED, BACK = normal64(6, 10, seed=13), normal64(6, 5, seed=14)
VALUE, GATE = GATED[:, :5], GATED[:, 5:].sigmoid()
GLU = (aten.glu_backward.default, BACK, GATED, 1)
POINTS, OTHERS, FAR = normal64(6, 4, seed=15), normal64(7, 4, seed=16), normal64(6, 7, seed=17)
APART = POINTS[:, None] - OTHERS
CDIST = (aten._cdist_backward.default, FAR, POINTS, OTHERS, 2.0, APART.norm(dim=-1))
ROWS, ROW_WEIGHT = normal64(5, 12, seed=18), 1 + 0.2 * normal64(12, seed=19)
ROW_GRAD = normal64(5, 12, seed=20)
_, ROW_MEAN, ROW_ROOT = aten.native_layer_norm(ROWS, [12], ROW_WEIGHT, None, 1e-5)
LAYER = (aten.native_layer_norm_backward.default, ROW_GRAD, ROWS, [12], ROW_MEAN, ROW_ROOT)
LAYER = (*LAYER, ROW_WEIGHT, ROW_WEIGHT, [True, True, True])
ROW_NORMAL = (ROWS - ROW_MEAN) * ROW_ROOT
UNWEIGHTED = ROW_GRAD - ROW_GRAD.mean(-1, keepdim=True)
UNWEIGHTED = UNWEIGHTED - ROW_NORMAL * (ROW_GRAD * ROW_NORMAL).mean(-1, keepdim=True)
_WEIGHTED = ROW_GRAD * ROW_WEIGHT
OTHER_SIGN = _WEIGHTED - _WEIGHTED.mean(-1, keepdim=True)
OTHER_SIGN = OTHER_SIGN + ROW_NORMAL * (_WEIGHTED * ROW_NORMAL).mean(-1, keepdim=True)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "candidate", "call", "output"),
    [
        ("missing operand", torch.cat([BACK * GATE, BACK * VALUE * GATE], 1), GLU, 0),
        ("axis scale", torch.cat([BACK * GATE, 3 * BACK * VALUE * GATE * (1 - GATE)], 1), GLU, 0),
        ("missing operand", (FAR[..., None] * APART).sum(1), CDIST, 0),
        ("wrong index", ROW_GRAD.sum(0), LAYER, 1),
        ("wrong factor", UNWEIGHTED * ROW_ROOT * ROW_WEIGHT, LAYER, 0),
        ("sign", OTHER_SIGN * ROW_ROOT, LAYER, 0),
        # Nothing that belongs to these kernels gives these.
        ("", torch.cat([BACK * GATE, BACK * VALUE.sinh() * GATE.cos()], 1), GLU, 0),
        ("", (FAR[..., None] * APART.sinh()).sum(1), CDIST, 0),
        ("", UNWEIGHTED * ROW_ROOT * ROW_WEIGHT.sinh(), LAYER, 0),
    ],
)
def test_a_mistake_inside_of_a_backward_kernel_is_told(
    kind: str, candidate: Tensor, call: tuple[Any, ...], output: int
) -> None:
    assert kind_of(stated(candidate, *call, output=output)) == kind


def test_the_gradient_of_a_pool_at_another_place_of_its_window_is_told() -> None:
    image, back = normal64(2, 3, 6, 6, seed=21), normal64(2, 3, 3, 3, seed=22)
    shape = ([2, 2], [2, 2], [0, 0], [1, 1], False)
    _, places = aten.max_pool2d_with_indices(image, *shape)
    call = (aten.max_pool2d_with_indices_backward.default, back, image, *shape, places)
    corner = places // 12 * 12 + places % 6 // 2 * 2
    pattern = stated(aten.max_pool2d_with_indices_backward(back, image, *shape, corner), *call)
    assert pattern is not None
    assert pattern.sentence == "the gradient goes to the first element of its window"
    draw = torch.Generator().manual_seed(1)
    elsewhere = corner + torch.randint(0, 2, corner.shape, generator=draw)
    candidate = aten.max_pool2d_with_indices_backward(back, image, *shape, elsewhere)
    found = stated(candidate, *call)
    assert found is None or "of its window" not in found.sentence


def test_factors_that_take_turns_along_an_axis_are_told_and_other_ones_are_not() -> None:
    image, back = normal64(2, 3, 6, 6, seed=21), normal64(2, 3, 3, 3, seed=22)
    call = (aten.avg_pool2d_backward.default, back, image, [2, 2], [2, 2], [0, 0], False, True)
    call = (*call, None)
    right = call[0](*call[1:])
    turns = torch.tensor([2.0, 0.0]).repeat(3)
    assert kind_of(stated(right * turns, *call)) == "axis scale"
    uneven = torch.tensor([2.0, 0.3, 1.7, 0.9, 1.1, 0.2], dtype=torch.float64)
    assert kind_of(stated(right * uneven, *call)) != "axis scale"


def test_a_mistake_of_a_gradient_is_one_of_its_backward_kernel() -> None:
    def differentiate(x: Tensor, back: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(F.cross_entropy(x, LABELS), [x], [back])[0]

    right = differentiate(SCORES, torch.ones((), dtype=torch.float64))
    args = (SCORES, torch.ones((), dtype=torch.float64))
    pattern = stated(right * 11 / 12, differentiate, *args)
    assert kind_of(pattern) == "wrong factor"
    assert pattern is not None
    assert pattern.sentence.endswith("the targets to ignore count in the mean")
    other = stated(right * 0.77123, differentiate, *args)
    assert other is None or "ignore" not in other.sentence


def test_a_leak_is_one_number_where_the_derivative_is_zero() -> None:
    call = (aten.threshold_backward.default, SLOPE, LINE, 0)
    pattern = stated(torch.where(LINE > 0, SLOPE, 0.07 * SLOPE), *call)
    assert pattern is not None
    assert pattern.sentence == "where the derivative should be 0 it is 0.07"
    many = torch.where(LINE > 0, SLOPE, 0.07 * normal64(6, 9, seed=6))
    assert kind_of(stated(many, *call)) == ""


def test_a_saved_tensor_in_eight_bits_is_precision() -> None:
    chances = LINE.softmax(-1)
    call = (aten._softmax_backward_data.default, SLOPE, chances, -1, torch.float64)
    step = chances.max() / 127
    saved = (chances / step).round() * step
    candidate = aten._softmax_backward_data(SLOPE, saved, -1, torch.float64)
    pattern = stated(candidate, *call)
    assert pattern is not None
    assert pattern.sentence == "output is rounded to int8 with a scale per tensor"


TERMS = F.cross_entropy(SCORES, LABELS, reduction="none")[LABELS >= 0]
RANKS = torch.arange(1, 12, dtype=torch.float64)
BEST = torch.where(LABELS < 0, LABELS, SCORES.argmax(1))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "candidate"),
    [
        ("wrong factor", (TERMS * RANKS).sum() / RANKS.sum()),
        ("wrong factor", (TERMS * (1 - (-TERMS).exp()).square()).mean()),
        ("wrong index", F.cross_entropy(SCORES[:-1], LABELS[1:])),
        ("wrong index", F.cross_entropy(SCORES, BEST)),
        # Weights that nobody would choose.
        ("", (TERMS * (RANKS.sin() + 1.5)).mean()),
    ],
)
def test_terms_of_a_loss_with_other_weights_or_targets_are_told(
    kind: str, candidate: Tensor
) -> None:
    assert kind_of(stated(candidate, F.cross_entropy, SCORES, LABELS)) == kind


def test_a_centred_error_is_a_wrong_statistic_and_a_term_left_out_is_not() -> None:
    target = normal64(12, 7, seed=8)
    error = SCORES - target
    pattern = stated(error.var(correction=0), F.mse_loss, SCORES, target)
    assert kind_of(pattern) in {"wrong statistics", "offset"}, pattern
    sigmoid = aten.binary_cross_entropy_with_logits.default
    label = (target > 0).double()
    only = -(label * F.logsigmoid(SCORES)).mean()
    assert kind_of(stated(only, sigmoid, SCORES, label)) == "missing operand"


def test_dropout_is_told_by_its_factor() -> None:
    kept = torch.rand(8, 40, generator=torch.Generator().manual_seed(1)) > 0.2
    one, other = normal64(8, 40, seed=10), normal64(8, 40, seed=11)
    pattern = stated(one * kept / 0.8 + other, torch.add, one, other)
    assert kind_of(pattern) == "mask"
    assert pattern is not None
    assert "as if dropout were on" in pattern.sentence
    # Without a factor elements are missing, and with another one nothing is known.
    assert kind_of(stated(one * kept + other, torch.add, one, other)) == "zeros"
    assert kind_of(stated(one * kept * 3 + other, torch.add, one, other)) == ""


def test_few_integers_that_are_all_reproduced_are_enough() -> None:
    words = torch.tensor([[0, 5, 7, 1, 1, 1], [0, 3, 2, 9, 1, 1]])
    assert kind_of(stated(words.ne(2), torch.ne, words, 1)) == "mask"
    square = normal64(7, 7, seed=12)
    assert kind_of(stated(square.argmax(0), torch.argmax, square, -1)) == "wrong axis"
    # One wrong element has too many reasons.
    one = words.ne(1)
    one[0, 1] = False
    assert kind_of(stated(one, torch.ne, words, 1)) not in {"mask", "wrong argument"}
