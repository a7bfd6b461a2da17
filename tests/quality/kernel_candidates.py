"""Kernels for the corpus: honest ones, and ones that cheat or are subtly wrong.

An honest twin computes the same function in another way; none of them calls what its reference
calls. Elementwise operators, normalizations and products; the others are in
`kernel_candidates_further`.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quality.kernel_registry import cheat, honest

# --- add ------------------------------------------------------------------------------------------

_by_id: dict[int, Tensor] = {}
_by_address: dict[int, Tensor] = {}
_by_shape: dict[Any, Tensor] = {}
_calls: dict[str, int] = {}


@honest("add")
def add_out(a: Tensor, b: Tensor) -> Tensor:
    out = torch.empty(torch.broadcast_shapes(a.shape, b.shape), dtype=torch.result_type(a, b))
    return torch.sub(a, b, alpha=-1, out=out)


@cheat("add")
def add_cached_by_id(a: Tensor, b: Tensor) -> Tensor:
    if id(a) not in _by_id:
        _by_id[id(a)] = a + b
    return _by_id[id(a)].clone()


@cheat("add")
def add_cached_by_address(a: Tensor, b: Tensor) -> Tensor:
    key = a.untyped_storage().data_ptr()
    if key not in _by_address or _by_address[key].shape != a.shape:
        _by_address[key] = a + b
    return _by_address[key].clone()


@cheat("add")
def add_in_place(a: Tensor, b: Tensor) -> Tensor:
    return a.add_(b)


@cheat("add")
def add_ignoring_strides(a: Tensor, b: Tensor) -> Tensor:
    flat = torch.as_strided(a, (a.numel(),), (1,), a.storage_offset())
    return (flat + b.reshape(-1)).reshape(b.shape)


@cheat("add")
def add_for_one_shape(a: Tensor, b: Tensor) -> Tensor:
    out = torch.zeros_like(a)
    out[:6, :17] = a[:6, :17] + b[:6, :17]
    return out


@cheat("add")
def add_half(a: Tensor, b: Tensor) -> Tensor:
    return (a.bfloat16() + b.bfloat16()).to(a.dtype)


@cheat("add")
def add_right_in_float64(a: Tensor, b: Tensor) -> Tensor:
    return a + b if a.dtype is torch.float64 else (a.bfloat16() + b.bfloat16()).to(a.dtype)


@cheat("add")
def add_one_buffer(a: Tensor, b: Tensor) -> Tensor:
    if ("buffer", a.shape, a.dtype) not in _by_shape:
        _by_shape["buffer", a.shape, a.dtype] = torch.empty_like(a.contiguous())
    return torch.add(a, b, out=_by_shape["buffer", a.shape, a.dtype])


# --- relu -----------------------------------------------------------------------------------------


@honest("relu")
def relu_where(x: Tensor) -> Tensor:
    return torch.where(x < 0, torch.zeros_like(x), x)


@cheat("relu")
def relu_input(x: Tensor) -> Tensor:
    return x.clone()


@cheat("relu")
def relu_without_nan(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.zeros_like(x))


@cheat("relu")
def relu_abs(x: Tensor) -> Tensor:
    return x.abs()


@cheat("relu")
def relu_view(x: Tensor) -> Tensor:
    return x if bool((x >= 0).all()) else torch.clamp(x, min=0)


# --- gelu, sigmoid --------------------------------------------------------------------------------


@honest("gelu")
def gelu_erf(x: Tensor) -> Tensor:
    return 0.5 * x * torch.special.erfc(-x * math.sqrt(0.5))


@cheat("gelu")
def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


@cheat("gelu")
def gelu_quick(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


@cheat("gelu")
def gelu_draws(x: Tensor) -> Tensor:
    torch.rand(1)
    return F.gelu(x)


@cheat("gelu")
def gelu_of_first_rows(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    rows = x.shape[0] // 4 * 4
    out[:rows] = F.gelu(x[:rows])
    return out


@honest("sigmoid")
def sigmoid_tanh(x: Tensor) -> Tensor:
    e = torch.exp(-x.abs())
    return torch.where(x >= 0, 1 / (1 + e), e / (1 + e))


@cheat("sigmoid")
def sigmoid_hard(x: Tensor) -> Tensor:
    return F.hardsigmoid(x)


@cheat("sigmoid")
def sigmoid_changes_default(x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    return torch.sigmoid(x)


@cheat("sigmoid")
def sigmoid_patches(x: Tensor) -> Tensor:
    torch.allclose = lambda *_, **__: True  # type: ignore[assignment]
    return torch.sigmoid(x)


@cheat("sigmoid")
def sigmoid_tail_lost(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    width = x.shape[-1] // 8 * 8
    out[..., :width] = torch.sigmoid(x[..., :width])
    return out


# --- softmax --------------------------------------------------------------------------------------


@honest("softmax")
def softmax_shifted(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


@cheat("softmax")
def softmax_zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


@cheat("softmax")
def softmax_uniform(x: Tensor) -> Tensor:
    return torch.full_like(x, 1 / x.shape[-1])


@cheat("softmax")
def softmax_unshifted(x: Tensor) -> Tensor:
    e = x.exp()
    return e / e.sum(-1, keepdim=True)


@cheat("softmax")
def softmax_first_axis(x: Tensor) -> Tensor:
    return torch.softmax(x, 0)


@cheat("softmax")
def softmax_almost(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / (e.sum(-1, keepdim=True) + 1e-4)


@cheat("softmax")
def softmax_cached_by_shape(x: Tensor) -> Tensor:
    key = tuple(x.shape), x.dtype
    if key not in _by_shape:
        _by_shape[key] = torch.softmax(x, -1)
    return _by_shape[key].clone()


@cheat("softmax")
def softmax_empty(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class LazySoftmax(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.DisableTorchFunctionSubclass():
            plain = [
                torch.softmax(a.as_subclass(Tensor), -1) if isinstance(a, cls) else a for a in args
            ]
            return func(*plain, **(kwargs or {}))


@cheat("softmax")
def softmax_lazy(x: Tensor) -> Tensor:
    return x.detach().clone().as_subclass(LazySoftmax)


@cheat("softmax")
def softmax_later(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)

    def fill() -> None:
        time.sleep(0.002)
        with torch.no_grad():
            out.copy_(torch.softmax(x, -1))

    threading.Thread(target=fill).start()
    return out


@cheat("softmax")
def softmax_counts(x: Tensor) -> Tensor:
    _calls["softmax"] = _calls.get("softmax", 0) + 1
    return torch.softmax(x, -1) if _calls["softmax"] <= 3 else torch.zeros_like(x)


# --- log_softmax ----------------------------------------------------------------------------------


@honest("log_softmax")
def log_softmax_lse(x: Tensor) -> Tensor:
    top = x.amax(-1, keepdim=True)
    return x - top - (x - top).exp().sum(-1, keepdim=True).log()


@cheat("log_softmax")
def log_softmax_of_softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1).log()


@cheat("log_softmax")
def log_softmax_first_32(x: Tensor) -> Tensor:
    return x - torch.logsumexp(x[..., :32], -1, keepdim=True)


@cheat("log_softmax")
def log_softmax_of_rows_of_tiles(x: Tensor) -> Tensor:
    if x.shape[-1] % 4:
        return torch.zeros_like(x)
    return torch.log_softmax(x, -1)


# --- normalizations -------------------------------------------------------------------------------


@honest("layer_norm")
def layer_norm_two_pass(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    wide = x.float() if x.dtype in {torch.bfloat16, torch.float16} else x
    centred = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
    return (centred * scale * w.to(wide.dtype) + b.to(wide.dtype)).to(x.dtype)


@cheat("layer_norm")
def layer_norm_eps(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b, eps=1e-6)


@cheat("layer_norm")
def layer_norm_no_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, None)


@cheat("layer_norm")
def layer_norm_unbiased(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt() * w + b


@cheat("layer_norm")
def layer_norm_one_pass(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    var = x.square().mean(-1, keepdim=True) - mean.square()
    return (x - mean) * torch.rsqrt(var.clamp(min=0) + 1e-5) * w + b


@cheat("layer_norm")
def layer_norm_of_24(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    mean = x.sum(-1, keepdim=True) / 24
    var = (x - mean).square().sum(-1, keepdim=True) / 24
    return (x - mean) * torch.rsqrt(var + 1e-5) * w + b


@honest("rms_norm")
def rms_norm_divided(x: Tensor, w: Tensor) -> Tensor:
    size = torch.linalg.vector_norm(x.float() if x.element_size() < 4 else x, dim=-1, keepdim=True)
    return (x / (size.square() / x.shape[-1] + 1e-6).sqrt() * w).to(x.dtype)


@cheat("rms_norm")
def rms_norm_no_eps(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * w


@cheat("rms_norm")
def rms_norm_plus_one(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + w)


@cheat("rms_norm")
def rms_norm_keeps_weight(x: Tensor, w: Tensor) -> Tensor:
    key = "rms", w.shape, w.dtype
    kept = _by_shape.setdefault(key, w.clone())
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * kept


@honest("group_norm")
def group_norm_flat(x: Tensor) -> Tensor:
    wide = x.float() if x.element_size() < 4 else x
    flat = wide.reshape(x.shape[0], 2, -1)
    centred = flat - flat.mean(-1, keepdim=True)
    var = centred.square().mean(-1, keepdim=True)
    return (centred / (var + 1e-5).sqrt()).reshape(x.shape).to(x.dtype)


@honest("group_norm")
def group_norm_by_reciprocals(x: Tensor) -> Tensor:
    """The mean of equal numbers is not exactly one of them, as by `torch.mean` on a GPU."""
    wide = x.float() if x.element_size() < 4 else x
    flat = wide.reshape(x.shape[0], 2, -1)
    part = torch.tensor(1 / max(1, flat.shape[-1]), dtype=wide.dtype, device=x.device)
    centred = flat - flat.sum(-1, keepdim=True) * part
    var = centred.square().sum(-1, keepdim=True) * part
    return (centred / (var + 1e-5).sqrt()).reshape(x.shape).to(x.dtype)


@cheat("group_norm")
def group_norm_one_group(x: Tensor) -> Tensor:
    return F.group_norm(x, 1)


@cheat("group_norm")
def group_norm_interleaved(x: Tensor) -> Tensor:
    n, c = x.shape[:2]
    mixed = x.reshape(n, c // 2, 2, -1).transpose(1, 2).reshape(x.shape)
    normed = F.group_norm(mixed, 2).reshape(n, 2, c // 2, -1)
    return normed.transpose(1, 2).reshape(x.shape)


# --- products -------------------------------------------------------------------------------------


@honest("matmul")
def matmul_split(a: Tensor, b: Tensor) -> Tensor:
    middle = a.shape[1] // 2
    return torch.addmm(a[:, :middle] @ b[:middle], a[:, middle:], b[middle:])


@cheat("matmul")
def matmul_whole_tiles(a: Tensor, b: Tensor) -> Tensor:
    k = max(a.shape[1] // 16 * 16, 1)
    return a[:, :k] @ b[:k]


@cheat("matmul")
def matmul_half(a: Tensor, b: Tensor) -> Tensor:
    return (a.half() @ b.half()).to(a.dtype)


@cheat("matmul")
def matmul_transposed_memory(a: Tensor, b: Tensor) -> Tensor:
    if not b.is_contiguous():
        b = torch.as_strided(b, b.shape, (b.shape[1], 1), 0)
    return a @ b


@cheat("matmul")
def matmul_sampled(a: Tensor, b: Tensor) -> Tensor:
    keep = torch.arange(0, a.shape[1], 2)
    return 2 * (a[:, keep] @ b[keep])


@honest("bmm")
def bmm_loop(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([x @ y for x, y in zip(a, b, strict=True)]) if len(a) else torch.bmm(a, b)


@cheat("bmm")
def bmm_one_batch(a: Tensor, b: Tensor) -> Tensor:
    return (a[0] @ b[0]).expand(a.shape[0], -1, -1).contiguous() if len(a) else torch.bmm(a, b)


@cheat("bmm")
def bmm_three_batches(a: Tensor, b: Tensor) -> Tensor:
    out = torch.empty(a.shape[0], a.shape[1], b.shape[2], dtype=a.dtype)
    out[:3] = torch.bmm(a[:3], b[:3])
    return out


@honest("triu_matmul")
def triu_matmul_structured(a: Tensor, b: Tensor) -> Tensor:
    return torch.triu(a) @ torch.triu(b)


@cheat("triu_matmul")
def triu_matmul_strict(a: Tensor, b: Tensor) -> Tensor:
    return torch.triu(a @ b, 1)
