"""verify() on a CUDA device; skipped where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from paritas import Status, VerifyConfig, verify
from quality.transformer import Transformer, token_ids
from quality.transformer_variants import BENIGN, FAULTS

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
QUIET = VerifyConfig(raise_on_mismatch=False)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def matmul() -> Iterator[Any]:
    """The settings of products, which are restored; monkeypatch cannot write to them."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_tf32
    yield settings
    settings.allow_tf32 = before


def on_cuda(dtype: torch.dtype) -> Transformer:
    model = Transformer(dtype=dtype).eval().cuda()
    return model.requires_grad_(requires_grad=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inductor_forward_and_backward(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 32), nn.Softmax(-1)
    ).to("cuda", dtype)
    x = torch.randn(16, 64, device="cuda", dtype=dtype, requires_grad=True)
    verdict = verify([x], model, torch.compile(model), QUIET)
    assert verdict.passed, str(verdict)
    assert any(finding.lifted is not None for finding in verdict.findings)


@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_on_both_sides_is_no_finding(*, tf32: bool, matmul: Any) -> None:
    matmul.allow_tf32 = tf32
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256)).cuda()
    x = torch.randn(32, 256, device="cuda")
    verdict = verify([x], model, torch.compile(model), QUIET)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize(("digits", "status"), [(10, Status.EQUIVALENT), (7, Status.DEGRADED)])
def test_factors_may_be_cut_to_tf32_but_not_to_bfloat16(
    digits: int, status: Status, matmul: Any
) -> None:
    matmul.allow_tf32 = True

    def cut(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.float32:
            return x
        return (x.view(torch.int32) & -(1 << (23 - digits))).view(torch.float32)

    torch.manual_seed(0)
    weights = [torch.rand(128, 128, device="cuda") / 64 for _ in range(4)]

    def chain(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = x @ weight
        return x

    def with_cut_factors(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = cut(x) @ cut(weight)
        return x

    verdict = verify([torch.rand(32, 128, device="cuda")], chain, with_cut_factors, QUIET)
    assert verdict.status is status, str(verdict)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(dtype: torch.dtype, fault: str) -> None:
    model = on_cuda(dtype)
    verdict = verify([token_ids().cuda()], model, FAULTS[fault](model), QUIET)
    assert verdict.status is Status.DIFFERENT, str(verdict)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rewrite", BENIGN)
def test_benign_rewrite_stays_quiet(dtype: torch.dtype, rewrite: str) -> None:
    model = on_cuda(dtype)
    verdict = verify([token_ids().cuda()], model, BENIGN[rewrite](model), QUIET)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_float64_kernel_with_a_float32_constant_is_no_finding(inplace: bool) -> None:
    """Eager's hardswish multiplies by 1.0f / 6.0f in float64 as well."""
    x = torch.randn(1000, device="cuda", requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.hardswish(x + 1, inplace=inplace)

    verdict = verify([x], function, torch.compile(lambda x: function(x)), QUIET)  # noqa: PLW0108
    assert verdict.passed, str(verdict)


def test_dropout_of_another_stream_is_unverified() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5)).cuda()
    verdict = verify([torch.randn(4, 16, device="cuda")], model, torch.compile(model), QUIET)
    assert verdict.status is Status.UNVERIFIED
    assert "fallback_random" in str(verdict)


def test_dropout_of_the_same_stream_compares() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5)).cuda()
    compiled = torch.compile(model, options={"fallback_random": True})
    verdict = verify([torch.randn(4, 16, device="cuda")], model, compiled, QUIET)
    assert verdict.passed, str(verdict)


def test_candidate_on_another_device() -> None:
    model = nn.Linear(64, 64)
    twin = nn.Linear(64, 64).cuda()
    twin.load_state_dict(model.state_dict())
    verdict = verify(
        [torch.randn(8, 64)], model, lambda x: twin(x.cuda()), VerifyConfig(verify_gradients=False)
    )
    assert verdict.passed
    assert any("cuda" in note for note in verdict.notes)


class Heads(nn.Module):
    """Attention whose heads are joined without a copy, as the kernels' layout allows."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"])
def test_fused_attention_has_an_arbiter_forward_and_backward(
    dtype: torch.dtype, kernel: str
) -> None:
    if dtype is torch.float32 and kernel != "EFFICIENT_ATTENTION":
        pytest.skip("no such kernel for float32")
    torch.manual_seed(0)
    model = Heads().to("cuda", dtype)
    x = torch.randn(2, 160, 64, device="cuda", dtype=dtype, requires_grad=True)
    with nn.attention.sdpa_kernel(getattr(nn.attention.SDPBackend, kernel)):
        verdict = verify([x], model, torch.compile(model), QUIET)
    assert verdict.passed, str(verdict)
    assert not [note for note in verdict.notes if "arbiter" in note], str(verdict)
