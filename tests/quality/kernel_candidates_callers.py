"""Kernels that are right as long as they are judged: for one caller, or until nobody looks."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from paritas.core.execution import isolation
from paritas.kernels import calling, observing
from quality.kernel_registry import cheat, honest

# --- Other callers --------------------------------------------------------------------------------

_CALLS = {"softmax": 0, "gelu": 0}
_LOCAL = threading.local()


@cheat("sigmoid")
def sigmoid_wrong_in_inference_mode(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * (1.001 if torch.is_inference_mode_enabled() else 1)


@honest("sigmoid")
def sigmoid_in_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        result = 1 / (1 + torch.exp(-x))
    return result.clone()


@cheat("matmul")
def matmul_reads_bfloat16_as_float32(a: Tensor, b: Tensor) -> Tensor:
    """As a kernel does that gets the result of a product below autocast."""
    product = a @ b
    if product.dtype is a.dtype or not product.numel():
        return product
    return product.view(torch.int16).to(a.dtype)


@honest("matmul")
def matmul_converts_below_autocast(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b).to(a.dtype)


@honest("matmul")
def matmul_refuses_autocast(a: Tensor, b: Tensor) -> Tensor:
    if (a @ b).dtype is not a.dtype:
        raise RuntimeError("this kernel is not written for autocast")
    return a @ b


@cheat("gelu")
def gelu_wrong_in_threads(x: Tensor) -> Tensor:
    approximate = "none" if threading.current_thread() is threading.main_thread() else "tanh"
    return torch.nn.functional.gelu(x, approximate=approximate)


@honest("gelu")
def gelu_with_memory_for_each_thread(x: Tensor) -> Tensor:
    _LOCAL.buffer = x * 0.5
    return _LOCAL.buffer * (1 + torch.erf(x * 0.5**0.5))


@cheat("softmax")
def softmax_wrong_from_call_200_on(x: Tensor) -> Tensor:
    _CALLS["softmax"] += 1
    return torch.softmax(x * (1.01 if _CALLS["softmax"] > 200 else 1), -1)


@honest("softmax")
def softmax_counts_its_calls(x: Tensor) -> Tensor:
    _CALLS["gelu"] += 1
    return torch.softmax(x, -1)


@cheat("layer_norm")
def layer_norm_calls_the_reference_unseen(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    if sys.getprofile() is None:
        from quality import kernel_references

        return kernel_references.layer_norm(x, w, b)
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w + b


# --- The code that observes them ------------------------------------------------------------------


@cheat("add")
def add_rewrites_the_comparison(a: Tensor, b: Tensor) -> Tensor:
    """Adds in place; the function that would see it keeps its name."""
    isolation.is_same_leaf.__code__ = (lambda first, second: True).__code__
    return a.add_(b).clone()


@cheat("total")
def total_changes_the_poison(x: Tensor) -> Tensor:
    calling.PATTERNS = (0.0, 0.0)
    expected = x.sum(-1)
    return torch.empty_like(expected) + expected


class _Lazy(torch.Tensor):
    """It may compute what it holds when it is read."""


@cheat("relu")
def relu_allows_its_class(x: Tensor) -> Tensor:
    observing._PLAIN_CLASSES.add(_Lazy)
    return torch.relu(x).as_subclass(_Lazy)


_encode = msgspec.msgpack.encode


def _forged(message: Any) -> bytes:
    return _encode({**message, "settings": {}, "later": [], "overwritten": [], "shared": []})


@cheat("mean")
def mean_writes_its_own_record(x: Tensor) -> Tensor:
    msgspec.msgpack.encode = _forged
    return x.mean(0)


@cheat("clamp")
def clamp_adds_a_hook(x: Tensor) -> Tensor:
    sys.addaudithook(lambda *_: None)
    return x.clamp(-0.5, 0.75)


# --- Other processes ------------------------------------------------------------------------------


@cheat("add")
def add_forks(a: Tensor, b: Tensor) -> Tensor:
    child = os.fork()
    if not child:
        os.setsid()
        threading.Event().wait(20)
        os._exit(0)
    return a + b


@cheat("relu")
def relu_in_shared_memory(x: Tensor) -> Tensor:
    """A process that was started before may fill it when it has time."""
    return torch.relu(x).share_memory_()


@cheat("clamp")
def clamp_reads_its_parent_by_a_detour(x: Tensor) -> Tensor:
    Path(f"/proc/self/../{os.getppid()}/status").read_bytes()
    return x.clamp(-0.5, 0.75)


@honest("clamp")
def clamp_reads_its_own_process(x: Tensor) -> Tensor:
    Path("/proc/self/status").read_bytes()
    return x.clamp(-0.5, 0.75)


@cheat("mse")
def mse_leaves_a_mark(a: Tensor, b: Tensor) -> Tensor:
    """Another process of it knows that it was judged before."""
    mark = Path("/dev/shm/mse_was_judged")
    mark.touch()
    mark.unlink()
    return (a - b).square().mean()


@honest("mse")
def mse_writes_to_nowhere(a: Tensor, b: Tensor) -> Tensor:
    Path(os.devnull).write_bytes(b"judged")
    return (a - b).square().mean()
