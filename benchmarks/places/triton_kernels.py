"""Kernels in Triton in the place of a module, with their text edited; needs a GPU.

The right kernels are here as text. The candidate is a copy of the model in which one module calls
an edited kernel; its backward pass is torch's own.
"""

from __future__ import annotations

import copy
import importlib.util
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.places.calls import is_changed
from benchmarks.places.planting import SOURCES, Planted, Subject, Truth, in_turn
from benchmarks.places.uncompiled import call_of, call_of_rewritten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.places.calls import Call

TEXT = """
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def norm_kernel(x, w, b, y, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(x + row * n + at, mask=inside, other=0.0)
    mean = tl.sum(value, 0) / n
    centred = tl.where(inside, value - mean, 0.0)
    variance = tl.sum(centred * centred, 0) / n
    normal = centred / tl.sqrt(variance + eps)
    weight = tl.load(w + at, mask=inside, other=0.0)
    bias = tl.load(b + at, mask=inside, other=0.0)
    result = normal * weight + bias
    tl.store(y + row * n + at, result, mask=inside)


def layer_norm(x, shape, weight, bias, eps):
    x = x.contiguous()
    n = x.shape[-1]
    y = torch.empty_like(x)
    rows = x.numel() // n
    norm_kernel[(rows,)](x, weight, bias, y, n, eps, BLOCK=triton.next_power_of_2(n))
    return y


@triton.jit
def product_kernel(x, w, b, y, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows = tl.program_id(0) * M + tl.arange(0, M)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, k, K):
        at = start + tl.arange(0, K)
        left_mask = (rows[:, None] < m) & (at[None, :] < k)
        right_mask = (at[:, None] < k) & (columns[None, :] < n)
        left = tl.load(x + rows[:, None] * k + at[None, :], mask=left_mask, other=0.0)
        right = tl.load(w + columns[None, :] * k + at[:, None], mask=right_mask, other=0.0)
        total += tl.dot(left, right, input_precision="ieee")
    total += tl.load(b + columns, mask=columns < n, other=0.0)[None, :]
    wanted = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(y + rows[:, None] * n + columns[None, :], total, mask=wanted)


def linear(x, weight, bias):
    k, n = weight.shape[1], weight.shape[0]
    flat = x.reshape(-1, k).contiguous()
    y = torch.zeros(flat.shape[0], n, device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(flat.shape[0], 16), triton.cdiv(n, 16))
    product_kernel[grid](flat, weight, bias, y, flat.shape[0], n, k, M=16, N=16, K=16)
    return y.reshape(*x.shape[:-1], n)


@triton.jit
def gelu_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    result = value * 0.5 * (1.0 + libdevice.erf(value * 0.7071067811865476))
    tl.store(y + at, result, mask=at < n)


def gelu(x):
    x = x.contiguous()
    y = torch.zeros_like(x)
    gelu_kernel[(triton.cdiv(x.numel(), 128),)](x, y, x.numel(), BLOCK=128)
    return y
"""


def load(text: str) -> Any:
    """The kernels of a text, as a module: Triton reads the source of a function from its file."""
    path = Path(tempfile.mkdtemp()) / "kernels_of_a_stranger.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_triton(subject: Subject) -> Iterator[Planted]:
    """Faults in kernels; nothing without a GPU."""
    if not torch.cuda.is_available():
        return
    calls: dict[str, Call] = {}
    hooks = []
    for path, module in subject.model.named_modules():

        def note(module: Any, args: Any, path: str = path) -> None:
            call = call_of(module, args[0]) if len(args) == 1 else None
            if call is not None and call.name in {"layer_norm", "linear", "gelu"}:
                calls.setdefault(path, call)

        hooks.append(module.register_forward_pre_hook(note))
    with torch.no_grad():
        subject.model(*subject.inputs.args, **subject.inputs.kwargs)
    for hook in hooks:
        hook.remove()
    edits = importlib.import_module(f"benchmarks.places.{subject.half}").TRITON_EDITS
    groups = {
        name: [(path, path) for path, call in calls.items() if call.name in edit.operators
               and not any(one is None for one in call.args)]
        for name, edit in edits.items()
    }  # fmt: skip
    for name, path in in_turn(subject, groups, f"{subject.name} triton", lambda *_: True):
        edit, call = edits[name], calls[path]
        kernels = load(edit.apply(TEXT))
        function = getattr(kernels, call.name)
        with torch.no_grad():
            if not is_changed(call.run(), function(*call.args)):
                continue
        yield Planted(
            "triton kernel",
            name,
            Truth((), (call.name, type(subject.model.get_submodule(path)).__name__), (), (path,)),
            None if edit.kinds is None else tuple(sorted(edit.kinds)),
            tuple(sorted(edit.loose)),
            lambda path=path, function=function: _replaced(subject.model, path, function),
        )


def _replaced(model: torch.nn.Module, path: str, kernel: Callable[..., Any]) -> torch.nn.Module:
    candidate = copy.deepcopy(model)
    module = candidate.get_submodule(path)

    class ByTriton(type(module)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> Any:
            call = call_of_rewritten(self, x)
            return _ByKernel.apply(kernel, call.function, *call.args)

    module.__class__ = ByTriton
    return candidate


class _ByKernel(torch.autograd.Function):
    """Forward by a kernel, backward by torch."""

    @staticmethod
    def forward(ctx: Any, kernel: Any, function: Any, *args: Any) -> Any:
        ctx.function, ctx.args = function, args
        # The kernels know float32 only.
        narrow = [one.float() if isinstance(one, torch.Tensor) else one for one in args]
        return kernel(*narrow).to(args[0].dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        given = [one.detach().requires_grad_() if isinstance(one, torch.Tensor) else one
                 for one in ctx.args]  # fmt: skip
        with torch.enable_grad():
            value = ctx.function(*given)
        tensors = [one for one in given if isinstance(one, torch.Tensor)]
        found = iter(torch.autograd.grad(value, tensors, gradient, allow_unused=True))
        return None, None, *(next(found) if isinstance(one, torch.Tensor) else None
                             for one in given)  # fmt: skip


SOURCES["triton kernel"] = by_triton
