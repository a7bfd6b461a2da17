"""Kernels that torch does not see: no false alarm, the place, and the kind."""

import copy
import ctypes
import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import paritas
from paritas.core.results.findings import PatternKind

CTYPES = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}


def as_array(tensor):
    values = (CTYPES[tensor.dtype] * tensor.numel()).from_address(tensor.data_ptr())
    return np.ctypeslib.as_array(values).reshape(tuple(tensor.shape))


def launch(kernel, out, *read):
    """Write to memory as a kernel in Triton does: by its address."""
    as_array(out)[...] = kernel(*(as_array(one) for one in read))


def in_float32(kernel):
    """The kernel with `.to(tl.float32)` behind every load."""
    return lambda *read: kernel(*(one.astype(np.float32) for one in read))


def norm(x, weight, bias, correction=0, eps=1e-5):
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).sum(-1, keepdims=True) / (x.shape[-1] - correction)
    return centred / np.sqrt(variance + eps) * weight + bias


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, kernel):
        ctx.save_for_backward(x, weight, bias)
        y = torch.empty_like(x).view(-1, x.shape[-1])
        launch(kernel, y, x.contiguous(), weight, bias)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        leaves = [one.detach().requires_grad_() for one in ctx.saved_tensors]
        with torch.enable_grad():
            y = functional.layer_norm(leaves[0], leaves[0].shape[-1:], *leaves[1:])
        return *torch.autograd.grad(y, leaves, gradient), None


class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        launch(np.tanh, y, x.contiguous())
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        result = torch.empty_like(x)
        launch(lambda x, g: g * (1 - np.tanh(x)), result, x.contiguous(), gradient.contiguous())
        return result


class KernelNorm(nn.LayerNorm):
    kernel = staticmethod(norm)

    def forward(self, x):
        return Norm.apply(x, self.weight, self.bias, self.kernel)


class KernelTanh(nn.Module):
    def forward(self, x):
        return Tanh.apply(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)
        self.tanh, self.last = nn.Tanh(), nn.Linear(16, 4)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x):
        return self.last(self.tanh(self.norm(self.first(x))))


def with_norm(kernel):
    candidate = Model()
    candidate.norm = copy.deepcopy(candidate.norm)
    candidate.norm.__class__ = KernelNorm
    candidate.norm.kernel = kernel
    return candidate


def doubled(x):
    y = torch.empty_like(x)
    launch(lambda x: 2 * x, y, x.contiguous())
    return y


def added_up(x):
    y = torch.zeros_like(x)
    launch(lambda x: x.cumsum(-1), y, x.contiguous())
    return y


def check(reference, candidate, x):
    config = paritas.VerifyConfig(raise_on_mismatch=False, locate_seconds=120)
    return paritas.verify([x], reference, candidate, config)


@pytest.mark.parametrize("kernel", [norm, in_float32(norm)], ids=["float64", "float32"])
def test_a_right_kernel_passes_in_whichever_precision_it_computes(kernel):
    verdict = check(Model(), with_norm(kernel), torch.randn(6, 8))
    assert verdict.passed
    in_float64 = kernel is norm
    assert in_float64 is not any("that torch does not see" in one for one in verdict.notes)


def test_a_kernel_that_computes_in_float64_is_held_to_that():
    verdict = check(Model(), with_norm(lambda *read: norm(*read, eps=1.1e-5)), torch.randn(6, 8))
    assert not verdict.passed


@pytest.mark.parametrize("wrap", [lambda kernel: kernel, in_float32], ids=["float64", "float32"])
def test_a_wrong_kernel_is_the_place_and_has_a_kind(wrap):
    kernel = wrap(lambda *read: norm(*read, correction=1))
    finding = check(Model(), with_norm(kernel), torch.randn(6, 8)).failures[0]
    assert finding.origin.module == "norm"
    assert "the candidate calls Norm (a kernel that torch does not see)" in finding.reason
    assert finding.diagnosis.best.kind == PatternKind.OFF_BY_ONE
    assert "15 instead of 16" in finding.diagnosis.best.sentence


def test_of_two_kernels_that_round_the_wrong_one_is_the_place():
    reference = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8))
    candidate = copy.deepcopy(reference)
    for layer, correction in ((candidate[0], 0), (candidate[2], 1)):
        layer.__class__ = KernelNorm
        wrong = functools.partial(norm, correction=correction)
        layer.kernel = in_float32(wrong)
    finding = check(reference, candidate, torch.randn(6, 8)).failures[0]
    assert finding.origin.module == "2"
    assert "7 instead of 8" in finding.diagnosis.best.sentence


def test_a_wrong_kernel_of_the_backward_pass_is_the_place():
    candidate = Model()
    candidate.tanh = KernelTanh()
    finding = check(Model(), candidate, torch.randn(6, 8)).failures[0]
    assert finding.origin.module == "tanh"
    assert "the candidate calls Tanh.backward" in finding.reason
    assert "1 - y instead of the derivative" in finding.diagnosis.best.sentence


def test_a_kernel_under_activation_checkpointing_is_the_place():
    class Checkpointed(nn.Module):
        def __init__(self, tanh):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.tanh = nn.Linear(8, 8), tanh

        def forward(self, x):
            # Its saved tensors may be read once only.
            return checkpoint(lambda x: self.tanh(self.first(x)), x, use_reentrant=False)

    pair = Checkpointed(nn.Tanh()), Checkpointed(KernelTanh())
    finding = check(*pair, torch.randn(6, 8, requires_grad=True)).failures[0]
    assert "the candidate calls Tanh.backward" in finding.reason


def test_memory_of_which_only_the_shape_is_read_is_no_kernel():
    def shaped(x):
        return torch.zeros_like(torch.empty_like(x)) + 2 * x

    finding = check(lambda x: 3 * x, shaped, torch.randn(4, 8)).failures[0]
    assert "torch does not see" not in finding.reason


@pytest.mark.parametrize("end", [lambda y: y, lambda y: y + 1], ids=["returned", "read"])
def test_a_function_that_launches_a_kernel_is_the_place(end):
    finding = check(lambda x: end(3 * x), lambda x: end(doubled(x)), torch.randn(4, 8)).failures[0]
    assert "the candidate calls doubled (a kernel that torch does not see)" in finding.reason
    assert finding.origin.source.endswith("in doubled")
    assert finding.diagnosis is not None, finding.reason
    assert finding.diagnosis.best.kind in {PatternKind.SCALE, PatternKind.FACTOR}


def test_zeros_that_a_kernel_writes_to_are_not_taken_for_zeros():
    reference, x = (lambda x: x.cumprod(-1) + 1), torch.rand(4, 8) + 0.5
    finding = check(reference, lambda x: added_up(x) + 1, x).failures[0]
    assert "the candidate calls added_up (a kernel that torch does not see)" in finding.reason
    assert finding.diagnosis.best.kind != PatternKind.ZEROS


def test_memory_that_an_operator_fills_is_no_kernel():
    def filled(x):
        y = torch.empty_like(x)
        y.copy_(2 * x)
        return y + 1

    finding = check(lambda x: 3 * x + 1, filled, torch.randn(4, 8)).failures[0]
    assert "torch does not see" not in finding.reason
