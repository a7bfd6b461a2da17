"""Which parameter of a candidate is which of the reference's."""

from __future__ import annotations

import torch

from paritas.kernels.weights import match_weights


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_parameters_are_matched_by_name_then_by_value() -> None:
    reference = {"linear.weight": drawn(3, 4), "linear.bias": drawn(3)}
    own = {"w": drawn(3, 4), "linear.bias": torch.zeros(3)}
    assert match_weights(reference, own) == {"w": "linear.weight", "linear.bias": "linear.bias"}


def test_a_parameter_may_be_kept_reshaped_or_transposed() -> None:
    reference = {"conv.weight": drawn(2, 3, 5, 1), "linear.weight": drawn(4, 6)}
    own = {"kernel": drawn(2, 3, 5, 1).squeeze(-1), "transposed": drawn(4, 6).mT.contiguous()}
    assert match_weights(reference, own) == {"kernel": "conv.weight", "transposed": "linear.weight"}
    assert match_weights(reference, own, reshapes=False) == {}
    square = {"linear.weight": drawn(4, 4)}
    assert match_weights(square, {"w": drawn(4, 4).mT.contiguous()}) == {"w": "linear.weight"}


def test_a_copy_of_a_parameter_is_not_the_parameter() -> None:
    reference = {"linear.weight": drawn(4, 6)}
    own = {"weight": drawn(4, 6), "transposed": drawn(4, 6).mT.contiguous()}
    assert match_weights(reference, own) == {"weight": "linear.weight"}


def test_equal_parameters_are_told_apart_by_their_last_name() -> None:
    ones = torch.ones(4)
    reference = {"norm.weight": ones, "norm.running_var": ones.clone()}
    own = {"weight": ones.clone(), "scale": ones.clone()}
    assert match_weights(reference, own) == {"weight": "norm.weight", "scale": "norm.running_var"}


def test_a_parameter_of_one_number_may_have_another_shape_under_its_own_name() -> None:
    reference = {"bias": torch.full((1, 1, 1), 0.5), "scale": torch.full((1,), 0.5)}
    assert match_weights(reference, {"bias": torch.full((1,), 0.5)}) == {"bias": "bias"}
    assert match_weights(reference, {"bias": torch.full((1,), 0.7)}) == {}
