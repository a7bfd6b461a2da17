"""The kernels' arithmetic is that of attention, forward and backward."""

from __future__ import annotations

import pytest
import torch

from paritas.core.torch_private import kernels

ATEN = torch.ops.aten


def uniform(size, seed):
    return torch.rand(size, generator=torch.Generator().manual_seed(seed))


def tensors(*shape, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(count)]
    return [tensor.requires_grad_() for tensor in drawn]


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropped", [0.0, 0.3])
def test_a_twin_computes_attention_and_its_gradient(kind, causal, dropped):
    query, key, value = tensors(2, 3, 8, 4, count=3)
    biased = kind != "flash"
    bias = tensors(2, 3, 8, 8, count=1, seed=1)[0] if biased else None
    op = getattr(ATEN, f"_scaled_dot_product_{kind}_attention").default
    more = {"attn_bias": bias, "compute_log_sumexp": True} if biased else {}
    given = {"dropout_p": dropped, "is_causal": causal, **more}
    results = kernels.attend(op, (query, key, value), given, 7, uniform)
    named = dict(zip([result.name for result in op._schema.returns], results, strict=True))

    scores = query @ key.mT / 2
    scores = scores if bias is None else scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf)
    mask = (uniform([2, 3, 8, 8], 7) > dropped).double() / (1 - dropped)
    expected = (scores.softmax(-1) * mask) @ value
    assert torch.allclose(named["output"], expected, rtol=1e-12)

    inputs = [query, key, value]
    (gradient,) = tensors(2, 3, 8, 4, count=1, seed=2)
    slopes = torch.autograd.grad(expected, inputs, gradient)
    backward = getattr(ATEN, f"_scaled_dot_product_{kind}_attention_backward").default
    state = named.get("philox_seed", named.get("rng_state"))
    known = {
        **dict.fromkeys(("grad_out", "grad_out_"), gradient),
        "query": query,
        "key": key,
        "value": value,
        "attn_bias": bias,
        "out": results[0],
        "logsumexp": results[1],
        **dict.fromkeys(("philox_seed", "philox_offset"), state),
        **dict.fromkeys(("cum_seq_q", "cum_seq_k")),
        **dict.fromkeys(("max_q", "max_k"), 8),
        "dropout_p": dropped,
        "is_causal": causal,
        "grad_input_mask": [True, True, True, False],
        "scale": None,
    }
    given = {argument.name: known[argument.name] for argument in backward._schema.arguments}
    got = kernels.attend_backward(backward, (), given, uniform)
    for slope, own in zip(slopes, got, strict=False):
        assert torch.allclose(own, slope, rtol=1e-10, atol=1e-12)
