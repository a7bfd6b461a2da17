"""Fused attention written out in float64 is attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paritas import verify
from paritas.core.torch_private.kernels import (
    FakeTensorMode,
    any_attention,
    float64_kernel,
    op_implementations_dict,
    true_sums_of_attention,
)

aten = torch.ops.aten
EMPTY = torch.zeros((), dtype=torch.int64)


def drawn(queries=5, keys=7):
    torch.manual_seed(0)
    shapes = [(2, 3, queries, 8), (2, 3, keys, 8), (2, 3, keys, 8)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_forward_and_backward_are_those_of_torch(kind, causal):
    tensors = drawn(keys=5 if causal else 7)
    y = F.scaled_dot_product_attention(*tensors, is_causal=causal)
    upstream = torch.randn_like(y)
    expected = torch.autograd.grad(y, tensors, upstream)
    q, k, v = (tensor.detach() for tensor in tensors)
    forward = getattr(aten, f"_scaled_dot_product_{kind}_attention").default
    backward = getattr(aten, f"_scaled_dot_product_{kind}_attention_backward").default
    bias = [] if kind == "flash" else [None, True]
    output, top, *_ = float64_kernel(forward, (q,))(q, k, v, *bias, 0.0, causal)
    torch.testing.assert_close(output, y.detach())
    scores = q @ k.mT / 8**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
    top_of_rows = top.squeeze(-1) if kind == "cudnn" else top[..., :5]
    torch.testing.assert_close(top_of_rows, scores.logsumexp(-1))
    given = {
        "flash": (output, top, None, None, 5, 7, 0.0, causal, EMPTY, EMPTY),
        "efficient": (None, output, top, EMPTY, EMPTY, 0.0, [True] * 4, causal),
        "cudnn": (output, top, EMPTY, EMPTY, None, None, None, 5, 7, 0.0, causal),
    }[kind]
    gradients = float64_kernel(backward, (q,))(upstream, q, k, v, *given)
    for found, wanted in zip(gradients[:3], expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_bias_has_its_gradient_summed_to_its_shape():
    q, k, v = (tensor.detach() for tensor in drawn())
    bias = torch.randn(1, 3, 5, 7, dtype=torch.float64, requires_grad=True)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    (expected,) = torch.autograd.grad(y.sum(), bias)
    op = aten._scaled_dot_product_efficient_attention_backward.default
    given = (torch.ones_like(y), q, k, v, bias.detach(), y, None, EMPTY, EMPTY, 0.0, [True] * 4)
    *_, found = float64_kernel(op, (q,))(*given)
    torch.testing.assert_close(found, expected)


def test_dropout_inside_the_kernel_is_refused():
    q, k, v = (tensor.detach() for tensor in drawn())
    op = aten._scaled_dot_product_flash_attention.default
    with pytest.raises(NotImplementedError, match="draws its dropout mask inside"):
        float64_kernel(op, (q,))(q, k, v, 0.5)


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_the_output_can_be_viewed_as_the_kernels_own_can(kind):
    """A model that joins its heads without a copy is lifted too."""
    joined = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    q, k, v = (joined.transpose(1, 2) for _ in range(3))
    bias = [] if kind == "flash" else [None, True]
    op = getattr(aten, f"_scaled_dot_product_{kind}_attention").default
    output, *_ = float64_kernel(op, (q,))(q, k, v, *bias, 0.0, False)
    assert output.transpose(1, 2).view(2, 5, 24).shape == (2, 5, 24)
    expected = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(output, expected)


def test_a_program_that_allows_flash_attention_alone_may_use_any_in_float64():
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        with any_attention():
            assert torch.backends.cuda.math_sdp_enabled()
        assert not torch.backends.cuda.math_sdp_enabled()


@pytest.fixture
def as_torch_2_11(monkeypatch):
    """Torch says that the sums of attention on a CPU are float32, in float64 too."""
    op = aten._scaled_dot_product_flash_attention_for_cpu.default

    def describe(mode, func, *args, **kwargs):
        with monkeypatch.context() as own, mode:
            own.delitem(op_implementations_dict, op)
            result, sums = func(*args, **kwargs)
            return result, sums.float()

    monkeypatch.setitem(op_implementations_dict, op, describe)
    FakeTensorMode.cache_clear()
    yield
    FakeTensorMode.cache_clear()


def dtype_of_sums(dtype):
    with FakeTensorMode():
        query = torch.empty(1, 2, 4, 8, dtype=dtype)
        return aten._scaled_dot_product_flash_attention_for_cpu(query, query, query)[1].dtype


@pytest.mark.usefixtures("as_torch_2_11")
def test_a_compiler_learns_the_true_dtype_of_the_sums():
    assert dtype_of_sums(torch.float64) is torch.float32
    with true_sums_of_attention():
        assert dtype_of_sums(torch.float64) is torch.float64
        assert dtype_of_sums(torch.bfloat16) is torch.float32
    assert dtype_of_sums(torch.float64) is torch.float32


@pytest.mark.usefixtures("as_torch_2_11")
def test_compiled_attention_is_lifted_with_its_gradients():
    def attention(x):
        return F.scaled_dot_product_attention(x, x, x)

    x = torch.randn(2, 2, 4, 8, requires_grad=True)
    verdict = verify([x], attention, torch.compile(attention))
    assert not [note for note in verdict.notes if "only the native run" in note], verdict


def test_torch_describes_the_sums_or_is_corrected():
    with true_sums_of_attention():
        assert dtype_of_sums(torch.float64) is torch.float64
