"""Triton kernels for the tests on a GPU: right ones, wrong ones, and ones that cheat.

The references and their inputs are at the top. Each wrong kernel says what is wrong with it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import nn

# --- References -----------------------------------------------------------------------------------


def softmax(x):
    return torch.softmax(x, -1)


def softmax_inputs():
    return [torch.randn(37, 200)]


def matmul(a, b):
    return a @ b


def matmul_inputs():
    return [torch.randn(70, 50), torch.randn(50, 90)]


def scaled(x):
    return x * 3 + 1


def scaled_inputs():
    return [torch.randn(300, 1000)]


class Norm(nn.Module):
    def __init__(self, size=96):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        with torch.no_grad():
            self.norm.weight.add_(torch.randn(size) / 4)
            self.norm.bias.add_(torch.randn(size) / 4)

    def forward(self, x):
        return self.norm(x)


def norm_inputs():
    return [torch.randn(33, 96)]


# --- Softmax --------------------------------------------------------------------------------------


@triton.jit
def _softmax(x, out, columns, step, BLOCK: tl.constexpr, FILL: tl.constexpr, SHIFTED: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(x + row * step + at, mask=inside, other=FILL)
    if x.dtype.element_ty != tl.float64:
        values = values.to(tl.float32)
    if SHIFTED:
        values = values - tl.max(values, 0)
    powers = tl.exp(values)
    tl.store(out + row * columns + at, powers / tl.sum(powers, 0), mask=inside)


def _run_softmax(x, *, fill=float("-inf"), block=None, shifted=True):
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        rows = x.reshape(-1, x.shape[-1])
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        size = block or triton.next_power_of_2(rows.shape[1])
        _softmax[(rows.shape[0],)](
            rows, out, rows.shape[1], rows.stride(0), BLOCK=size, FILL=fill, SHIFTED=shifted
        )
    return out


def softmax_right(x):
    return _run_softmax(x)


def softmax_filled_with_zeros(x):
    """The masked part of a block counts as exp(0)."""
    return _run_softmax(x, fill=0.0)


def softmax_of_one_block(x):
    """Columns beyond 256 are never read."""
    return _run_softmax(x, block=256)


def softmax_unshifted(x):
    """Overflows."""
    return _run_softmax(x, shifted=False)


def softmax_of_contiguous(x):
    """Ignores strides."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        columns = x.shape[-1]
        _softmax[(x.numel() // columns,)](
            x,
            out,
            columns,
            columns,
            BLOCK=triton.next_power_of_2(columns),
            FILL=float("-inf"),
            SHIFTED=True,
        )
    return out


# --- Matrix product -------------------------------------------------------------------------------


@triton.jit
def _matmul(  # noqa: PLR0917  (as Triton kernels are)
    a,
    b,
    out,
    m,
    n,
    k,
    a0,
    a1,
    b0,
    b1,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
    NARROW: tl.constexpr,
):
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, k, TILE):
        inner = start + tl.arange(0, TILE)
        a_inside = rows[:, None] < m
        b_inside = columns[None, :] < n
        if MASKED:
            a_inside = a_inside & (inner[None, :] < k)
            b_inside = b_inside & (inner[:, None] < k)
        left = tl.load(a + rows[:, None] * a0 + inner[None, :] * a1, mask=a_inside, other=0.0)
        right = tl.load(b + inner[:, None] * b0 + columns[None, :] * b1, mask=b_inside, other=0.0)
        total += tl.dot(left, right, input_precision=PRECISION)
        if NARROW:
            total = total.to(tl.bfloat16).to(tl.float32)
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(out + rows[:, None] * n + columns[None, :], total, mask=inside)


def _run_matmul(a, b, *, precision="ieee", masked=True, narrow=False):
    (m, k), n = a.shape, b.shape[1]
    if a.dtype is torch.float64:  # Triton's products are of float32 here
        return (a[:, :, None] * b[None]).sum(1)
    out = torch.empty(m, n, dtype=a.dtype, device=a.device)
    tile = 32
    if out.numel():
        _matmul[(triton.cdiv(m, tile), triton.cdiv(n, tile))](
            a,
            b,
            out,
            m,
            n,
            k,
            *a.stride(),
            *b.stride(),
            TILE=tile,
            PRECISION=precision,
            MASKED=masked,
            NARROW=narrow,
        )
    return out


def matmul_right(a, b):
    return _run_matmul(a, b)


def matmul_in_tf32(a, b):
    """The default of tl.dot; torch's own product of float32 is exact to float32."""
    return _run_matmul(a, b, precision="tf32")


def matmul_past_the_end(a, b):
    """Reads beyond the last column of the inner dimension."""
    return _run_matmul(a, b, masked=False)


def matmul_with_narrow_sums(a, b):
    """Sums are rounded to bfloat16 after each tile."""
    return _run_matmul(a, b, narrow=True)


# --- Layer norm -----------------------------------------------------------------------------------


@triton.jit
def _norm(  # noqa: PLR0917  (as Triton kernels are)
    x, weight, bias, out, columns, BLOCK: tl.constexpr, EPS: tl.constexpr, CENTRED: tl.constexpr
):
    # A number that is given at run time would be rounded to float32.
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(x + row * columns + at, mask=inside, other=0.0)
    if x.dtype.element_ty != tl.float64:
        values = values.to(tl.float32)
    mean = tl.sum(values, 0) / columns
    centred = tl.where(inside, values - mean, 0.0)
    if CENTRED:
        variance = tl.sum(centred * centred, 0) / columns
    else:
        variance = tl.sum(values * values, 0) / columns - mean * mean
    scale = tl.load(weight + at, mask=inside, other=0.0).to(values.dtype)
    shift = tl.load(bias + at, mask=inside, other=0.0).to(values.dtype)
    result = centred / tl.sqrt(variance + EPS) * scale + shift
    tl.store(out + row * columns + at, result, mask=inside)


class NormRight(Norm):
    centred = True

    def forward(self, x):
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.numel():
            rows = x.contiguous().reshape(-1, x.shape[-1])
            _norm[(rows.shape[0],)](
                rows,
                self.norm.weight,
                self.norm.bias,
                out,
                rows.shape[1],
                BLOCK=triton.next_power_of_2(rows.shape[1]),
                EPS=self.norm.eps,
                CENTRED=self.centred,
            )
        return out


class NormUncentred(NormRight):
    """The mean of squares less the square of the mean: nothing is left far from zero."""

    centred = False


class NormOfFirstWeights(NormRight):
    """Keeps the weights of the first call."""

    def forward(self, x):
        if not hasattr(self, "kept"):
            self.kept = self.norm.weight.detach().clone(), self.norm.bias.detach().clone()
        weight, bias = self.kept
        return torch.nn.functional.layer_norm(
            x, (x.shape[-1],), weight.to(x.dtype), bias.to(x.dtype), self.norm.eps
        )


# --- Streams and memory ---------------------------------------------------------------------------


@triton.jit
def _scale(x, out, count, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    values = tl.load(x + at, mask=inside)
    # Some more work, so that the kernel is not done at once; it changes nothing.
    for _ in range(ROUNDS):
        values = values * 1.0
    tl.store(out + at, values * 3 + 1, mask=inside)


def _run_scale(x, share=1.0, rounds=1):
    source = x.contiguous()
    out = torch.empty_like(source)
    count = int(source.numel() * share)
    if count:
        _scale[(triton.cdiv(count, 1024),)](source, out, count, BLOCK=1024, ROUNDS=rounds)
    return out


def scaled_right(x):
    return _run_scale(x)


def scaled_on_a_stream(x):
    """On its own stream, and waits on both ends."""
    if x.device.type != "cuda":
        return _run_scale(x)
    own, callers = torch.cuda.Stream(), torch.cuda.current_stream()
    own.wait_stream(callers)
    with torch.cuda.stream(own):
        out = _run_scale(x)
    callers.wait_stream(own)
    out.record_stream(callers)
    return out


def scaled_without_waiting_for_the_inputs(x):
    """On its own stream, which does not wait for the caller's."""
    own, callers = torch.cuda.Stream(), torch.cuda.current_stream()
    with torch.cuda.stream(own):
        out = _run_scale(x)
    callers.wait_stream(own)
    return out


def scaled_without_waiting_for_the_result(x):
    """The caller gets a result that is still being computed."""
    own = torch.cuda.Stream()
    own.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(own):
        out = _run_scale(x, rounds=64)
        for _ in range(20):
            out = out * 1.0
    return out


def scaled_on_the_default_stream(x):
    """Right as long as that is the caller's."""
    with torch.cuda.stream(torch.cuda.default_stream()):
        return _run_scale(x)


def scaled_in_part(x):
    """The last elements of the result are what was in memory."""
    return _run_scale(x, share=0.99)


_results = {}


def scaled_by_address(x):
    """A result is kept by the address and the shape of its input."""
    key = x.data_ptr(), tuple(x.shape), x.dtype
    if key not in _results:
        _results[key] = _run_scale(x)
    return _results[key].clone()
