from __future__ import annotations

import pytest
import torch

from paritas.sharding.operators.library import annotation_for


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


F = "torch.nn.functional."


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "text"),
    [
        ("torch.add", (zeros(2, 1, 4), zeros(3, 1)), {}, "a 1 c, b 1 -> a b c"),
        ("torch.add", (zeros(2, 3), 2.0), {}, "a b, ? -> a b"),
        (F + "linear", (zeros(5, 4), zeros(3, 4), zeros(3)), {}, "m0 k+, n k+, n : !k -> m0 n"),
        (
            F + "linear",
            (zeros(5, 4), zeros(3, 4)),
            {"bias": zeros(3)},
            "m0 k+, n k+, bias=n : !k -> m0 n",
        ),
        (
            "torch.conv1d",
            (zeros(2, 4, 9), zeros(6, 2, 3)),
            {"groups": 2},
            "b (g c^) w^, (g o^) c^ kw^ -> b (g o^) wo^ ; groups=g",
        ),
        (
            "torch.conv1d",
            (zeros(4, 9), zeros(6, 4, 3), zeros(6)),
            {},
            "c+ w^, o c+ kw^, o : !c -> o wo^",
        ),
        ("torch.Tensor.to", (zeros(2, 3), zeros(4, 2, 3)), {}, "a b, ? -> a b"),
        ("torch.sum", (zeros(2, 3), 1), {}, "a b+, ? -> a"),
        ("torch.sum", (), {"input": zeros(2, 3), "dim": 1}, "input=a b+ -> a"),
        ("torch.mean", (zeros(2, 3),), {}, "a+avg b+avg -> 1"),
        ("torch.aminmax", (zeros(2, 3),), {"dim": 1}, "a b+min -> a, a : b+max"),
        ("torch.Tensor.view", (zeros(6, 4), -1, 2), {}, "a 4, ?, ? -> (a 2) 2"),
        ("torch.Tensor.view", (zeros(6, 4), 12, 2), {}, "a 4, ?, ? -> (a 2) 2 ; 1=(a 2)"),
        ("torch.Tensor.view", (zeros(6, 4), (12, 2)), {}, "a 4, ? -> (a 2) 2 ; 1[0]=(a 2)"),
        ("torch.Tensor.view", (zeros(1, 9, 8),), {"size": (-1, 8)}, "1 a b -> a b ; size[1]=b"),
        ("torch.flatten", (zeros(2, 3, 4), 1), {}, "a b 4, ? -> a (b 4)"),
        ("torch.squeeze", (zeros(2, 1, 4), 1), {}, "a 1 c, ? -> a c"),
        ("torch.cat", ([zeros(2, 3), zeros(2, 5)], 1), {}, "a _, ? -> a _"),
        (F + "embedding", (zeros(2, 3).long(), zeros(9, 4)), {}, "a b, v^ w -> a b w"),
        (
            "nnscaler.runtime.function.embedding",
            (zeros(2, 3).long(), zeros(9, 4)),
            {"padding_idx": None, "start": 0, "stop": 9},
            "a b, v+ w -> a b w ; start:stop=v",
        ),
        (F + "kl_div", (zeros(2, 3),) * 2, {"reduction": "batchmean"}, "a+avg b+, a+avg b+ -> 1"),
        (F + "max_pool1d", (zeros(2, 3, 8), 2), {}, "b c (w 2), ? -> b c w"),
        (F + "max_pool1d", (zeros(2, 3, 8), 3, 2), {}, "b c _, ?, ? -> b c _"),
    ],
)
def test_a_rule_speaks_for_the_shapes_and_keywords_of_the_call(
    name: str, args: tuple[object, ...], kwargs: dict[str, object], text: str
) -> None:
    annotation = annotation_for(name, args, kwargs)

    assert annotation is not None
    assert annotation.text == text


def test_keys_that_heads_share_go_with_their_queries() -> None:
    args = zeros(2, 8, 5, 4), zeros(2, 4, 6, 4), zeros(2, 4, 6, 3)

    annotation = annotation_for(F + "scaled_dot_product_attention", args, {"enable_gqa": True})

    assert annotation is not None
    assert annotation.text == "a (h 2) q e^, a h s^ e^, a h s^ v -> a (h 2) q v"


def test_queries_stay_together_under_a_causal_mask() -> None:
    args = zeros(5, 4), zeros(6, 4), zeros(6, 3)

    annotation = annotation_for(F + "scaled_dot_product_attention", args, {"is_causal": True})

    assert annotation is not None
    assert annotation.text == "q^ e^, s^ e^, s^ v -> q^ v"


@pytest.mark.parametrize(
    ("name", "args"),
    [
        (F + "linear", (zeros(5, 4), zeros(4))),
        (F + "multi_margin_loss", (zeros(4), torch.tensor(1))),
        ("torch.hstack", (zeros(2, 3),)),
    ],
)
def test_a_call_that_a_definition_is_not_about_has_no_rule(name, args):
    assert annotation_for(name, args) is None
