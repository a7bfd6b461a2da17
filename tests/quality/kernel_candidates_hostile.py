"""Kernels that know how they are judged: what they leave behind, and what they look for."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quality.kernel_registry import cheat, honest

# --- Results that are not new ---------------------------------------------------------------------

_RING: list[Tensor] = []
_SUMS: dict[bytes, Tensor] = {}
_BY_VERSION: dict[object, Tensor] = {}


@cheat("add")
def add_ring_of_three(a: Tensor, b: Tensor) -> Tensor:
    """Its results are overwritten three calls later."""
    total = a + b
    alike = [one for one in _RING if one.shape == total.shape and one.dtype is total.dtype]
    if len(alike) < 3:
        _RING.append(total)
        return total
    oldest = alike[0]
    _RING[:] = [one for one in _RING if one is not oldest] + [oldest]
    return oldest.copy_(total)


@cheat("relu")
def relu_returns_what_it_remembers(x: Tensor) -> Tensor:
    """Right, and the same tensor again, which its caller may have changed."""
    key = repr((x.dtype, x.shape)).encode() + x.double().numpy().tobytes()
    if key not in _SUMS:
        _SUMS[key] = torch.relu(x)
    return _SUMS[key]


@honest("relu")
def relu_remembers(x: Tensor) -> Tensor:
    key = b"copied" + repr((x.dtype, x.shape)).encode() + x.double().numpy().tobytes()
    if key not in _SUMS:
        _SUMS[key] = torch.relu(x)
    return _SUMS[key].clone()


@cheat("add")
def add_cached_by_address_and_version(a: Tensor, b: Tensor) -> Tensor:
    """An allocator returns the same address again, with version 0."""
    key = (a.data_ptr(), a._version, a.shape, a.dtype, a.stride(), b.data_ptr(), b._version)
    if key not in _BY_VERSION:
        _BY_VERSION[key] = a + b
    return _BY_VERSION[key].clone()


# --- What they leave behind -----------------------------------------------------------------------


@cheat("add")
def add_by_a_timer(a: Tensor, b: Tensor) -> Tensor:
    result = torch.zeros_like(a + b)
    signal.signal(signal.SIGALRM, lambda *_: result.copy_(a + b))
    signal.setitimer(signal.ITIMER_REAL, 1e-5)
    return result


@cheat("softmax")
def softmax_leaves_a_callback(x: Tensor) -> Tensor:
    gc.callbacks.append(lambda *_: None)
    return torch.softmax(x, -1)


@cheat("gelu")
def gelu_leaves_a_mode(x: Tensor) -> Tensor:
    TorchFunctionMode().__enter__()
    return torch.nn.functional.gelu(x)


@cheat("mean")
def mean_flushes_denormals(x: Tensor) -> Tensor:
    torch.set_flush_denormal(True)
    return x.mean(0)


@cheat("sigmoid")
def sigmoid_hooks_all_modules(x: Tensor) -> Tensor:
    nn.modules.module.register_module_forward_hook(lambda *_: None)
    return torch.sigmoid(x)


# --- What they look for ---------------------------------------------------------------------------


@cheat("add")
def add_in_place_and_hides_it(a: Tensor, b: Tensor) -> Tensor:
    """Adds in place, and to the copy with which its input is compared."""
    total, frame = a + b, sys._getframe(1)
    while frame is not None:
        for copy in dict(frame.f_locals.get("before") or {}).values():
            if isinstance(copy, Tensor) and copy.shape == a.shape and torch.equal(copy, a):
                copy.copy_(total)
        frame = frame.f_back  # type: ignore[assignment]
    return a.copy_(total).clone()


@cheat("clamp")
def clamp_reads_its_parent(x: Tensor) -> Tensor:
    Path(f"/proc/{os.getppid()}/status").read_bytes()
    return x.clamp(-0.5, 0.75)


@cheat("mse")
def mse_only_without_gradients(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).square().mean() * (1.01 if torch.is_grad_enabled() else 1)


# --- What one set of inputs does not show ---------------------------------------------------------


@cheat("lerp")
def lerp_of_the_given_number(a: Tensor, b: Tensor, weight: float) -> Tensor:
    return a + 0.3 * (b - a)


@cheat("relu")
def relu_writes_beside_its_input(x: Tensor) -> Tensor:
    """As a kernel that writes whole tiles does, and puts its own values back."""
    result, kept = torch.relu(x), x.clone()
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    if whole.numel() > x.numel():
        whole.fill_(7)
        x.copy_(kept)
    return result


@cheat("integer_add")
def integer_add_in_float64(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() + b.double()).to(a.dtype)


@cheat("integer_add")
def integer_add_in_int32(a: Tensor, b: Tensor) -> Tensor:
    return (a.int() + b.int()).to(a.dtype)


@honest("integer_add")
def integer_add_twice(a: Tensor, b: Tensor) -> Tensor:
    return (a - 1) + (b + 1)
