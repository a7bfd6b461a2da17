"""Compiled for a GPU, a softmax that masks its result in place has wrong gradients (torch 2.11)."""

import sys

import torch


class MaskedSoftmax(torch.autograd.Function):  # noqa: D101
    @staticmethod
    def forward(ctx, scores, mask, dim):  # noqa: D102
        out = ~(mask.to(torch.bool))
        filled = scores.masked_fill(out, torch.tensor(torch.finfo(scores.dtype).min))
        result = torch.softmax(filled, dim).masked_fill_(out, 0)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, gradient):  # noqa: D102
        result = ctx.saved_tensors[0]
        return torch._softmax_backward_data(gradient, result, -1, result.dtype), None, None  # noqa: SLF001


def gradients(compiled, dtype):
    def attention(query, key, value, mask):
        return MaskedSoftmax.apply(query @ key.transpose(-1, -2) / 8, mask, -1) @ value

    mask = (torch.arange(32).view(2, 1, 1, 16) < 28).long().to("cuda")
    drawn = torch.randn(4, 2, 4, 16, 8, generator=torch.Generator().manual_seed(0))
    *leaves, seed = drawn.to("cuda", dtype).requires_grad_().unbind()
    result = (torch.compile(attention) if compiled else attention)(*leaves, mask)
    return torch.stack(torch.autograd.grad(result, leaves, seed)).double().flatten(1)


if not torch.cuda.is_available():
    sys.exit(print("needs a CUDA device: nothing was tried"))
true = gradients(False, torch.float64)
errors = (gradients(True, torch.float32) - true).norm(dim=1) / true.norm(dim=1)
print("relative errors of the gradients of query, key and value:", errors.tolist())
sys.exit(bool(errors.max() > 0.01))
