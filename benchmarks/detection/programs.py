"""Programs by name, seed and dtype: the corpus in which faults and rewrites are planted."""

from __future__ import annotations

import functools

import torch
from benchmarks.detection.families import FAMILIES
from benchmarks.detection.operators import OPERATORS
from torch import Tensor, nn

from paritas.core.errors import UsageError
from paritas.mutants.programs import FlatProgram, trace_program

DTYPES = ("float32", "bfloat16", "float16", "autocast")
# float32 whose matrix products and convolutions may round their inputs to 11 bits: CUDA alone.
TF32 = "tf32"
EVERY_DTYPE = (*DTYPES, TF32)
WITHOUT_FLOATS = ("integer_wrap", "integer_count")
# The operators that autocast reaches; around any other it does nothing.
UNDER_AUTOCAST = (
    "mm",
    "mm_long",
    "bmm",
    "addmm",
    "linear",
    "einsum",
    "conv1d",
    "conv2d",
    "conv2d_strided",
    "conv2d_depthwise",
    "conv_transpose",
    "attention",
    "attention_fused",
    "swiglu",
    "argmax",
    "triangles",
    "dropout_mask",
)
# What is no case of its own: (program, dtype) -> the reason. Kernels are missing for none of them:
# torch 2.13 has all of these on the CPU in float16 and bfloat16, forward and backward.
IMPOSSIBLE: dict[tuple[str, str], str] = {
    **{
        (name, "autocast"): "autocast leaves it as it is in float32"
        for name in OPERATORS
        if name not in UNDER_AUTOCAST
    },
    **{
        (name, TF32): "it has no product of matrices, so it is the same program as in float32"
        for name in OPERATORS
        if name not in UNDER_AUTOCAST
    },
    **{
        (name, dtype): "it has no floats, so it is the same program as in float32"
        for name in WITHOUT_FLOATS
        for dtype in DTYPES[1:]
    },
}


def names() -> list[str]:
    """Every program's name: families first."""
    return [*FAMILIES, *OPERATORS]


def allow_tf32(dtype: str) -> None:
    """Let this process run programs of a dtype as it asks: torch has one setting for all."""
    torch.backends.cuda.matmul.allow_tf32 = dtype == TF32
    torch.backends.cudnn.allow_tf32 = dtype == TF32


def impossible(name: str, dtype: str) -> str | None:
    """Why this program is no case in this dtype, or None if it is one."""
    return IMPOSSIBLE.get((name, dtype))


@functools.lru_cache(maxsize=64)
def make_program(name: str, seed: int, dtype: str = "float32", device: str = "cpu") -> FlatProgram:
    """One program, forward and backward.

    Args:
        name: one of `names()`.
        seed: of weights, inputs, cotangents and a little of the structure.
        dtype: one of `EVERY_DTYPE`; `autocast` is a float32 model under bfloat16 autocast.
        device: where it runs.

    Raises:
        UsageError: no such program or dtype, or no case of its own.
    """
    if name not in names() or dtype not in EVERY_DTYPE:
        raise UsageError(f"no program {name!r} in {dtype!r}; names() and EVERY_DTYPE list them")
    if reason := impossible(name, dtype):
        raise UsageError(f"{name} in {dtype} is no case: {reason}; see IMPOSSIBLE")
    model, inputs = (FAMILIES if name in FAMILIES else OPERATORS)[name](seed)
    autocast = torch.bfloat16 if dtype == "autocast" else None
    kind = torch.float32 if autocast or dtype == TF32 else getattr(torch, dtype)
    if isinstance(model, nn.Module):
        model = model.to(device, kind)
    moved = [_moved(value, kind, device) for value in inputs]
    return trace_program(model, moved, autocast=autocast, seed=seed)


def _moved(value: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    """The same input elsewhere and in another precision, still asked for its gradient."""
    kind = dtype if value.is_floating_point() else value.dtype
    return value.detach().to(device, kind).requires_grad_(value.requires_grad)
