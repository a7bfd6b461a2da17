"""What norms and attention computed inside, solved for from their results."""

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
    from paritas.core.results.findings import Diagnosis


def diagnosed(candidate: Tensor, target: Any, *args: Any) -> Diagnosis:
    right = target(*args)
    noise = 1e-9 * (right.abs() + right.abs().mean())
    return diagnose(candidate, right, noise=noise, context=call_context(target, args, {}))


def stated(diagnosis: Diagnosis) -> tuple[str, str]:
    best = diagnosis.best
    return ("", "") if best is None else (best.kind, best.sentence)


# --- Norms ----------------------------------------------------------------------------------------

SIZES = 0.5 + 2 * torch.rand(3, 8, 1, generator=torch.Generator().manual_seed(1)).double()
X = normal64(3, 8, 16) * SIZES + 0.3 * normal64(3, 8, 1, seed=2)
WEIGHT, BIAS = 1 + 0.2 * normal64(16, seed=3), normal64(16, seed=4)
MEAN, VARIANCE = X.mean(-1, keepdim=True), X.var(-1, correction=0, keepdim=True)
LAYER = (F.layer_norm, X, [16], WEIGHT, BIAS)


def layer_norm(mean: Tensor = MEAN, variance: Tensor = VARIANCE) -> Tensor:
    return (X - mean) / (variance + 1e-5).sqrt() * WEIGHT + BIAS


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "words", "candidate"),
    [
        ("clipped", "at least 0.9", layer_norm(variance=VARIANCE.clamp(min=0.9))),
        ("wrong statistics", "the median", layer_norm(X.median(-1, keepdim=True).values)),
        (
            "wrong statistics",
            "the first of each 2",
            layer_norm(variance=VARIANCE[:, ::2].repeat_interleave(2, 1)),
        ),
        (
            "wrong statistics",
            "times their deviation",
            layer_norm(variance=VARIANCE.cumsum(1) / torch.arange(1, 9).reshape(1, -1, 1)),
        ),
        (
            "wrong statistics",
            "each of 2 parts of the row",
            F.layer_norm(X.unflatten(-1, (2, 8)), [8]).flatten(-2) * WEIGHT + BIAS,
        ),
    ],
)
def test_the_statistics_that_a_norm_used_are_named(
    kind: str, words: str, candidate: Tensor
) -> None:
    found = stated(diagnosed(candidate, *LAYER))
    assert found[0] == kind
    assert words in found[1]


def test_an_input_that_is_added_is_no_statistic() -> None:
    """Without a weight, a row of the sum is as linear in the input as one of the norm."""
    plain = F.layer_norm(X, [16])
    kind, sentence = stated(diagnosed(plain + 0.5 * X, F.layer_norm, X, [16]))
    assert kind == "residual"
    assert "0.5 times the input is added to the result" in sentence


@pytest.mark.parametrize("sizes", [(8, 8), (4, 4, 4, 4)])
def test_sums_of_parts_of_a_row_are_named(sizes: tuple[int, ...]) -> None:
    parts = [part.softmax(-1) / len(sizes) for part in X.split(sizes, -1)]
    kind, sentence = stated(diagnosed(torch.cat(parts, -1), torch.softmax, X, -1))
    assert kind == "wrong statistics"
    assert f"each of {len(sizes)} parts of the row is divided by its own sum" in sentence


def test_any_other_sums_are_not_those_of_parts() -> None:
    other = X.softmax(-1) * (1 + 0.2 * normal64(3, 8, 1, seed=7).abs())
    assert "parts" not in stated(diagnosed(other, torch.softmax, X, -1))[1]


def test_one_factor_for_all_rows_is_no_statistic_of_them() -> None:
    kind, _ = stated(diagnosed(1.3 * (layer_norm() - BIAS) + BIAS, *LAYER))
    assert kind != "wrong statistics"


def test_rows_with_noise_have_no_other_statistics() -> None:
    noisy = layer_norm() + 0.05 * normal64(*X.shape, seed=9)
    assert stated(diagnosed(noisy, *LAYER))[0] not in ("wrong statistics", "clipped")


# --- Attention ------------------------------------------------------------------------------------

QUERY, KEY, VALUE = (normal64(2, 3, 10, 6, seed=seed) for seed in (5, 6, 7))
SCORES = QUERY @ KEY.mT / 6**0.5
PLACES = torch.arange(10)
APART = (PLACES[:, None] - PLACES[None, :]).abs().double()
ATTENTION = (F.scaled_dot_product_attention, QUERY, KEY, VALUE)


def attend(scores: Tensor) -> Tensor:
    return scores.softmax(-1) @ VALUE


def with_zeros_at(place: int) -> Tensor:
    key, value = KEY.clone(), VALUE.clone()
    key[..., place, :] = 0
    value[..., place, :] = 0
    return F.scaled_dot_product_attention(QUERY, key, value)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "words", "candidate"),
    [
        ("mask", "-0.25 for each position", attend(SCORES - 0.25 * APART)),
        ("mask", "depends on the distance", attend(SCORES - APART.sqrt().sin())),
        ("mask", "a number for each of the 10 keys", attend(SCORES + normal64(10, seed=8))),
        (
            "mask",
            "6 further keys",
            torch.cat([SCORES, torch.zeros(2, 3, 10, 6)], -1).softmax(-1)[..., :10] @ VALUE,
        ),
        ("zeros", "at place 4 of 10", with_zeros_at(4)),
        (
            "wrong index",
            "weights of other heads",
            SCORES.softmax(-1)[:, :1].expand_as(SCORES) @ VALUE,
        ),
        (
            "wrong factor",
            "for each head",
            attend(SCORES * torch.tensor([1.0, 0.7, 1.4]).reshape(-1, 1, 1)),
        ),
        ("clipped", "limited to -0.8 and 0.8", attend(SCORES.clamp(-0.8, 0.8))),
    ],
)
def test_what_was_done_to_the_scores_is_named(kind: str, words: str, candidate: Tensor) -> None:
    found = stated(diagnosed(candidate, *ATTENTION))
    assert found[0] == kind
    assert words in found[1]


def test_scores_of_which_each_is_another_have_no_bias() -> None:
    candidate = attend(SCORES + 0.5 * normal64(2, 3, 10, 10, seed=11))
    assert stated(diagnosed(candidate, *ATTENTION))[0] == ""


def test_indices_of_one_row_for_all_are_a_copy_and_rounded_ones_are_not() -> None:
    right = normal64(12, 5, seed=12).topk(2).indices
    assert stated(diagnose(right[:1].expand_as(right).contiguous(), right))[0] == "copy"
    counted = torch.arange(24).reshape(12, 2)
    assert stated(diagnose(counted // 4 * 4, counted))[0] != "copy"
