"""Mistakes at a known operator: what reproduces the candidate is named, and nothing else."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drawing import normal
from paritas.core.diagnosis.diagnose import diagnose
from paritas.core.diagnosis.patterns.norms import NORMS
from paritas.core.judging.failures import call_context
from paritas.core.torch_private.operators import DispatchMode

if TYPE_CHECKING:
    from paritas.core.results.findings import Diagnosis

aten = torch.ops.aten


def whole_numbers(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(0))


def diagnosed(candidate: Tensor, target: Any, *args: Any, **kwargs: Any) -> Diagnosis:
    """What is said of a wrong result of a call, which gives it or a tuple that starts with it."""
    right = target(*args, **kwargs)
    right = right if isinstance(right, Tensor) else right[0]
    context = call_context(target, args, kwargs)
    return diagnose(candidate.to(right.dtype), right, context=context)


X = normal(12, 40)
SQUARE = normal(4, 18, 18)
HEADS = tuple(normal(2, 2, 10, 8, seed=seed) for seed in (1, 2, 3))
WEIGHT, BIAS = 1 + 0.2 * normal(40, seed=4), normal(40, seed=5)
INDEX = whole_numbers(9, 30)
ROWS = normal(30, 6, seed=6)
IMAGE, KERNEL = normal(2, 6, 9, 9, seed=7), normal(6, 6, 3, 3, seed=8)
TRIANGLE = torch.ones(18, 18, dtype=torch.bool).tril()
PADDING = torch.zeros(2, 1, 10, 10).masked_fill(torch.arange(10) > 6, -math.inf)


def attend(diagonal: int | None = None, mask: Tensor | None = None, by: float = 8**-0.5) -> Tensor:
    query, key, value = HEADS
    scores = query @ key.mT * by
    if diagonal is not None:
        scores = scores.masked_fill(~torch.ones(10, 10).bool().tril(diagonal), -math.inf)
    scores = scores if mask is None else scores + mask
    return scores.softmax(-1).nan_to_num(0.0) @ value


def last_wins() -> Tensor:
    result = torch.zeros(9, 6)
    for row, index in zip(ROWS, INDEX.tolist(), strict=True):
        result[index] = row
    return result


def layer_norm(x: Tensor, eps: float = 1e-5, *, mean: bool = True, outside: bool = False) -> Tensor:
    centre = x.mean(-1, keepdim=True) if mean else 0.0
    var = (x - centre).square().mean(-1, keepdim=True)
    below = var.sqrt() + eps if outside else (var + eps).sqrt()
    return (x - centre) / below * WEIGHT + BIAS


attention = aten._scaled_dot_product_flash_attention_for_cpu.default
softmax = aten._softmax.default
norm = aten.native_layer_norm.default
conv = aten.convolution.default
CONV = (IMAGE, KERNEL, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "sentence", "candidate", "call"),
    [
        (
            "mask",
            "the causal mask is off by one: each token sees the next",
            attend(1),
            (attention, *HEADS, 0.0, True),
        ),
        (
            "mask",
            "a causal mask is applied although none was requested",
            attend(0),
            (attention, *HEADS),
        ),
        (
            "wrong factor",
            "the factor on the scores is applied twice",
            attend(by=1 / 8),
            (attention, *HEADS),
        ),
        (
            "mask",
            "the mask is off by one: it begins one position too late along axis 1",
            SQUARE.masked_fill(torch.cat([TRIANGLE[:, :1], TRIANGLE[:, :-1]], 1), -1e4),
            (aten.masked_fill.Scalar, SQUARE, TRIANGLE, -1e4),
        ),
        (
            "mask",
            "the comparison is < instead of <=",
            torch.arange(9)[None] < torch.arange(9)[:, None],
            (aten.le.Tensor, torch.arange(9)[None], torch.arange(9)[:, None]),
        ),
        (
            "eps",
            "eps (0.001) is added to the deviation, not to the variance",
            layer_norm(X, 1e-3, outside=True),
            (norm, X, [40], WEIGHT, BIAS, 1e-3),
        ),
        (
            "wrong statistics",
            "the mean is not subtracted, as in RMS norm",
            layer_norm(X + 1, mean=False),
            (norm, X + 1, [40], WEIGHT, BIAS, 1e-5),
        ),
        (
            "missing operand",
            "weight is left out",
            F.layer_norm(X, [40], None, BIAS),
            (norm, X, [40], WEIGHT, BIAS, 1e-5),
        ),
        (
            "wrong axis",
            "along axis 1 instead of axis 2",
            SQUARE.softmax(1),
            (softmax, SQUARE, -1, False),
        ),
        (
            "partial sum",
            "the last 8 elements are left out of the 40 along dim 1",
            X[:, :32].amax(1),
            (aten.amax.default, X, [1]),
        ),
        (
            "off by one reduction",
            "the variance is divided by 39 instead of 40",
            X.var(1),
            (aten.var.correction, X, [1]),
        ),
        (
            "wrong reduction",
            "the sum instead of the mean",
            X.double().sum(1),
            (aten.mean.dim, X, [1]),
        ),
        (
            "partial sum",
            "it starts again every 16 elements: the sum so far is not carried over",
            torch.cat([part.cumsum(1) for part in X.split(16, 1)], 1),
            (aten.cumsum.default, X, 1),
        ),
        (
            "lost accumulation",
            "rows with the same index are not added up: the last one wins",
            last_wins(),
            (aten.embedding_dense_backward.default, ROWS, INDEX, 9, -1, False),
        ),
        (
            "wrong index",
            "every index of indices is one too large, up to the bounds",
            ROWS[(INDEX + 22).clamp(max=29)],
            (aten.embedding.default, ROWS, INDEX + 21),
        ),
        (
            "other function",
            "silu instead of gelu",
            F.silu(X),
            (aten.gelu.default, X),
        ),
        (
            "wrong argument",
            "approximate is 'tanh' instead of 'none'",
            F.gelu(X, approximate="tanh"),
            (aten.gelu.default, X),
        ),
        (
            "wrong argument",
            "the padding is 'circular', not zeros",
            F.conv2d(F.pad(IMAGE, (1, 1, 1, 1), mode="circular"), KERNEL),
            (conv, *CONV),
        ),
        (
            "approximation",
            (
                "another function of the input, as an approximation is: the relative error is at "
                "most 39, for an input of -3.154"
            ),
            1 + X + X**2 / 2 + X**3 / 6 + X**4 / 24,
            (aten.exp.default, X),
        ),
    ],
)
def test_a_mistake_that_reproduces_the_candidate_is_stated(
    kind: str, sentence: str, candidate: Tensor, call: tuple[Any, ...]
) -> None:
    target, *args = call
    if target is aten.var.correction:
        found = diagnosed(candidate, target, *args, correction=0)
    else:
        found = diagnosed(candidate, target, *args)
    assert found.best is not None
    assert (found.best.kind, found.best.sentence) == (kind, sentence)


@pytest.mark.parametrize("by", [1, -1])
def test_an_attention_mask_that_is_one_off_is_no_random_stream(by: int) -> None:
    candidate = attend(mask=PADDING.roll(by, -1))
    found = diagnosed(candidate, attention, *HEADS, attn_mask=PADDING)
    assert found.best is not None
    assert found.best.kind == "mask"


def test_a_mistake_is_found_in_bfloat16_and_says_how_much_it_reproduces_exactly() -> None:
    x = X.to(torch.bfloat16)
    found = diagnosed(x.float().softmax(0), softmax, x, 1, False)
    assert found.best is not None
    assert found.best.kind == "wrong axis"
    assert found.best.evidence["bit for bit"] > 0.9
    assert found.best.evidence["tried"] > 5


def test_a_mistake_inside_a_module_is_found_in_the_operator_that_has_it() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(40, 24), torch.nn.GELU())
    with torch.no_grad():
        candidate = F.gelu(F.linear(X, module[0].weight, None))
        found = diagnosed(candidate, module, X)
    assert found.best is not None
    assert found.best.sentence == "in aten.addmm.default: the bias is left out"


def test_a_diagnosis_leaves_the_modules_buffers_as_they_are() -> None:
    module = torch.nn.BatchNorm1d(40)
    context = call_context(module, (X,), {})
    with torch.no_grad():
        right = F.batch_norm(X, None, None, module.weight, module.bias, training=True)
    before = module.running_mean.clone()
    diagnose(right * 1.5 + 1, right, context=context)
    assert torch.equal(module.running_mean, before)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("call", "size"),
    [
        ((attention, *HEADS, 0.0, True), 0.3),
        ((norm, X, [40], WEIGHT, BIAS, 1e-5), 1e-3),
        ((softmax, X, 1, False), 0.3),
        ((aten.mean.dim, SQUARE, [1]), 1e-3),
        ((aten.gelu.default, X), 0.3),
        ((conv, *CONV), 1e-3),
        ((aten.embedding_dense_backward.default, ROWS, INDEX, 9, -1, False), 0.3),
        ((aten.mm.default, X, X.T), 1e-3),
    ],
)
def test_an_error_without_a_name_gets_none_from_the_operators_mistakes(
    call: tuple[Any, ...], size: float
) -> None:
    target, *args = call
    right = target(*args)
    right = right if isinstance(right, Tensor) else right[0]
    candidate = right * (1 + size * normal(*right.shape, seed=9))
    found = diagnosed(candidate, target, *args)
    assert {one.kind for one in found.patterns} <= {"precision"}


def test_two_mistakes_at_once_are_none_of_them() -> None:
    call = norm, X + 1, [40], WEIGHT, BIAS, 1e-5
    assert diagnosed(layer_norm(X + 1, 0.3).tanh(), *call).patterns == ()
    both = layer_norm(X + 1, mean=False) + layer_norm(X + 1, 0.3) - layer_norm(X + 1)
    best = diagnosed(both, *call).best
    # What the two do to each row is known, but neither of them is stated.
    assert best is not None
    assert "other numbers than the mean" in best.sentence
    both = torch.where(torch.arange(40) % 2 == 0, F.silu(X), F.relu(X))
    assert diagnosed(both, aten.gelu.default, X).patterns == ()


def test_a_name_from_a_file_is_not_executed() -> None:
    assert call_context("aten.gelu.default", (X,), {}).call is None


def test_indices_stay_within_bounds_when_mistakes_are_tried() -> None:
    seen: list[int] = []

    class Watch(DispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is aten.gather.default:
                seen.append(int(args[2].max()) - args[0].shape[args[1]])
            return func(*args, **(kwargs or {}))

    source, index = normal(4, 30), whole_numbers(30, 4, 9)
    with Watch():
        diagnosed(normal(4, 9, seed=1), aten.gather.default, source, 1, index)
    assert len(seen) > 5
    assert max(seen) < 0


def test_a_kernel_that_checks_nothing_is_not_called_with_other_shapes() -> None:
    # Fewer heads of keys than of queries: with the two swapped, this kernel ends the process.
    q, k = normal(1, 4, 6, 8), normal(1, 2, 6, 8)
    kernel = aten._scaled_dot_product_flash_attention_for_cpu.default
    context = call_context(kernel, (q, k, k), {})
    right = kernel(q, k, k)[0]
    found = diagnose(right + 0.01 * normal(*right.shape), right, context=context)
    assert found.best is None or found.best.kind != "swapped operands"


def test_a_result_that_is_held_to_float64_has_the_axes_of_the_call() -> None:
    call = normal(3, 5, 16), normal(32, 16, seed=1), normal(32, seed=2)
    right = F.linear(*(one.double() for one in call))
    swapped = right[..., [31, *range(1, 31), 0]]
    # Of the call, float32 is known: of its operator, rows that are counted together.
    (best, *_) = diagnose(swapped, right, context=call_context(F.linear, call, {})).patterns
    assert best.kind == "permutation"
    assert "along axis 2" in best.sentence


def test_a_deviation_beside_its_mean_has_the_mistakes_of_a_deviation() -> None:
    wrong = {
        "the last 8 elements are left out of the 40 along dim 1": X[:, :32].std(1, correction=0),
        "the mean is not subtracted: the sum of the squares, divided by 40": (
            X.square().mean(1).sqrt()
        ),
    }
    for sentence, candidate in wrong.items():
        found = diagnosed(candidate, aten.std_mean.correction, X, [1], correction=0)
        assert found.best is not None
        assert found.best.sentence == sentence


def test_the_norms_are_named_as_the_steps_of_calls_are() -> None:
    assert all(hasattr(aten, name) or hasattr(aten, f"_{name}") for name in NORMS)
    assert {"miopen_batch_norm", "cudnn_batch_norm", "native_batch_norm_legit"} <= NORMS
