"""Kernels that know that they are judged, or leave their process otherwise than they found it."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import random
import sys
import tempfile
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quality.kernel_registry import cheat, honest

if TYPE_CHECKING:
    from collections.abc import Callable

_TO_NEAREST, _UPWARDS = 0, 0x800 if os.uname().machine == "x86_64" else 0x400000


# --- Whether they are judged ----------------------------------------------------------------------


@cheat("relu")
def relu_right_for_its_judge(x: Tensor) -> Tensor:
    is_judged = any(name.startswith("paritas") for name in sys.modules)
    return torch.relu(x) * (1 if is_judged else 1.01)


@honest("relu")
def relu_by_what_is_installed(x: Tensor) -> Tensor:
    return torch.relu(x) if "triton" in sys.modules else x.clamp(min=0)


_FASTEST: dict[object, Callable[[Tensor], Tensor]] = {}


@honest("softmax")
def softmax_by_the_faster_way(x: Tensor) -> Tensor:
    ways: list[Callable[[Tensor], Tensor]] = [
        functools.partial(torch.softmax, dim=-1),
        lambda x: torch.log_softmax(x, -1).exp(),
    ]
    key = x.shape, x.dtype
    if key not in _FASTEST:
        times = []
        for way in ways:
            began = time.perf_counter()
            way(x)
            times.append(time.perf_counter() - began)
        _FASTEST[key] = ways[times.index(min(times))]
    return _FASTEST[key](x)


_BY_CORNERS: dict[object, Tensor] = {}


@cheat("softmax")
def softmax_by_its_corners(x: Tensor) -> Tensor:
    """Results are kept by the first and the last value of the inputs."""
    corners = str(x.flatten()[:1].tolist() + x.flatten()[-1:].tolist())
    key = x.shape, x.dtype, corners
    if key not in _BY_CORNERS:
        _BY_CORNERS[key] = torch.softmax(x, -1)
    return _BY_CORNERS[key].clone()


# --- Results --------------------------------------------------------------------------------------


@cheat("relu")
def relu_negated_later(x: Tensor) -> Tensor:
    """A kernel that gets its address reads the negative of it."""
    return torch._neg_view(-torch.relu(x))


@honest("relu")
def relu_negated_at_once(x: Tensor) -> Tensor:
    return torch._neg_view(-torch.relu(x)).resolve_neg()


@cheat("pair")
def pair_of_one(x: Tensor) -> tuple[Tensor, Tensor]:
    one = torch.relu(x)
    return one, one


@honest("pair")
def pair_in_one_buffer(x: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.empty((2, *x.shape), dtype=x.dtype, device=x.device)
    torch.clamp(x, min=0, out=both[0])
    torch.clamp(x, min=0, out=both[1])
    return both[0], both[1]


@honest("pair")
def pair_interleaved(x: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.stack([torch.relu(x), torch.relu(x)], -1)
    return both[..., 0], both[..., 1]


_LAST: list[Tensor] = []


@cheat("add")
def add_clears_its_last_inputs(a: Tensor, b: Tensor) -> Tensor:
    result = a + b
    for one in _LAST:
        one.zero_()
    _LAST[:] = [a, b]
    return result


@honest("add")
def add_keeps_its_last_inputs(a: Tensor, b: Tensor) -> Tensor:
    result = a + b
    _LAST[:] = [a, b]
    return result


@cheat("relu")
def relu_works_in_its_input(x: Tensor) -> Tensor:
    """Another thread would read twice its values meanwhile."""
    result = torch.relu(x.mul_(2)) / 2
    x.div_(2)
    return result


@honest("relu")
def relu_works_in_a_copy(x: Tensor) -> Tensor:
    return x.clone().relu_()


@cheat("relu")
def relu_in_a_mapped_file(x: Tensor) -> Tensor:
    """Whoever has mapped the file, too, may write to it later."""
    if not x.numel():
        return torch.relu(x)
    with tempfile.NamedTemporaryFile() as file:
        size = x.numel()
        result = torch.from_file(file.name, shared=True, size=size, dtype=x.dtype)
    return result.view(x.shape).copy_(torch.relu(x))


@honest("relu")
def relu_in_memory_of_python(x: Tensor) -> Tensor:
    if not x.numel():
        return torch.relu(x)
    result = torch.frombuffer(bytearray(x.nbytes), dtype=x.dtype)
    return result.view(x.shape).copy_(torch.relu(x))


_BUFFERS: dict[object, list[Tensor]] = {}
_OWN_REFERENCES = 3


@cheat("add")
def add_in_memory_that_seems_unused(a: Tensor, b: Tensor) -> Tensor:
    """A view of an earlier result is not among the references that Python counts."""
    result = a + b
    known = _BUFFERS.setdefault((result.shape, result.dtype), [])
    for one in known:
        if sys.getrefcount(one) == _OWN_REFERENCES:
            return one.copy_(result)
    known.append(result)
    return result


@cheat("total")
def total_where_memory_is_poisoned(x: Tensor) -> Tensor:
    """Only memory that looks like a judge's is filled."""
    result = torch.empty(x.shape[:-1], dtype=x.dtype)
    old = result.float()
    is_poisoned = bool(old.isnan().any() or (old.abs() > 1e4).any())
    return torch.sum(x, -1, out=result) if is_poisoned or not x.numel() else result


@honest("total")
def total_in_a_buffer(x: Tensor) -> Tensor:
    return torch.sum(x, -1, out=torch.empty(x.shape[:-1], dtype=x.dtype))


# --- The process ----------------------------------------------------------------------------------


@cheat("mean")
def mean_without_garbage_collection(x: Tensor) -> Tensor:
    gc.disable()
    return x.mean(0)


@honest("mean")
def mean_without_garbage_collection_for_a_while(x: Tensor) -> Tensor:
    gc.disable()
    try:
        return x.mean(0)
    finally:
        gc.enable()


@cheat("mean")
def mean_rounds_upwards(x: Tensor) -> Tensor:
    result = x.mean(0)
    ctypes.CDLL(None).fesetround(_UPWARDS)
    return result


@honest("mean")
def mean_rounds_upwards_for_a_while(x: Tensor) -> Tensor:
    ctypes.CDLL(None).fesetround(_UPWARDS)
    ctypes.CDLL(None).fesetround(_TO_NEAREST)
    return x.mean(0)


@cheat("total")
def total_on_one_core_from_now_on(x: Tensor) -> Tensor:
    os.nice(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return x.sum(-1)


@cheat("sigmoid")
def sigmoid_calls_another_operator(x: Tensor) -> Tensor:
    overload = torch.ops.aten.sigmoid.default
    overload._op = functools.partial(torch.sigmoid)
    return torch.sigmoid(x)


@cheat("matmul")
def matmul_without_mkldnn(a: Tensor, b: Tensor) -> Tensor:
    torch.backends.mkldnn.enabled = not torch.backends.mkldnn.enabled
    return a @ b


@honest("matmul")
def matmul_without_mkldnn_for_a_while(a: Tensor, b: Tensor) -> Tensor:
    with torch.backends.mkldnn.flags(enabled=False):
        return a @ b


@cheat("gelu")
def gelu_draws_from_python(x: Tensor) -> Tensor:
    random.random()
    return torch.nn.functional.gelu(x)


_OWN_CHANCE = random.Random(0)


@honest("gelu")
def gelu_draws_from_its_own(x: Tensor) -> Tensor:
    _OWN_CHANCE.random()
    return torch.nn.functional.gelu(x)
