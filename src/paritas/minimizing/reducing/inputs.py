"""Smaller and rounder inputs: shapes, then values, then dtypes."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from paritas.minimizing.oracle import runs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.minimizing.oracle import Oracle
    from paritas.minimizing.programs import Program, Signature

__all__ = ["reduce_dtypes", "reduce_shapes", "reduce_values"]

# Lengths to try, smallest first: a number or two, one vector of a CPU, a vector and a tail.
_LENGTHS = (2, 8, 16, 24)
# Queries that one length may cost by itself after all were shrunk together.
_PATIENCE = 3


def reduce_shapes(oracle: Oracle, program: Program, wanted: Signature) -> Program:
    """Shorter dimensions; those of one length are shrunk together, for the graph may tie them."""
    best = program
    for length in _LENGTHS:
        smaller = _resized(best, {size: length for size in _sizes(best) if size > length})
        if smaller is not None and oracle.shows(smaller, wanted, kind=True):
            best = smaller
            break
    tried = 0
    for size in sorted(_sizes(best), reverse=True):
        for length in _LENGTHS:
            if length >= size or tried >= _PATIENCE:
                break
            smaller = _resized(best, {size: length})
            if smaller is None:
                continue
            tried += 1
            if oracle.shows(smaller, wanted, kind=True):
                best = smaller
                break
    return best


def reduce_values(oracle: Oracle, program: Program, wanted: Signature) -> Program:
    """Values that a person can read, or that a line of code makes."""
    for rounder in (_small_numbers, _halves, _drawn, _two_digits):
        rounded = _with_values(program, rounder)
        if oracle.shows(rounded, wanted, kind=True):
            return rounded
    return program


def reduce_dtypes(oracle: Oracle, program: Program, wanted: Signature) -> Program:
    """float32 throughout, where that shows the same: what everybody can run."""
    floats = {v.dtype for v in program.inputs if _is_float(v)}
    if not floats or floats == {torch.float32}:
        return program

    def widened(value: Tensor, _: int) -> Tensor:
        return value.to(torch.float32) if _is_float(value) else value

    changed = _with_values(program, widened)
    if runs(changed) and oracle.shows(changed, wanted, kind=True):
        return changed
    return program


def _sizes(program: Program) -> set[int]:
    tensors = [value for value in program.inputs if isinstance(value, torch.Tensor)]
    return {size for tensor in tensors for size in tensor.shape if size > 1}


def _resized(program: Program, lengths: dict[int, int]) -> Program | None:
    """The program with every dimension of these lengths cut, if it runs then.

    Where numbers of the graph name the lengths, as in a view, they are cut as well.
    """
    if not lengths:
        return None
    inputs = tuple(_cut(value, lengths) for value in program.inputs)
    plain = dataclasses.replace(program, inputs=inputs)
    if runs(plain):
        return plain
    module = copy.deepcopy(program.graph)
    for node in module.graph.nodes:
        if node.op.startswith("call"):
            node.args = _renumbered(node.args, lengths)
            node.kwargs = _renumbered(node.kwargs, lengths)
    module.recompile()
    changed = dataclasses.replace(program, graph=module, inputs=inputs)
    return changed if runs(changed) else None


def _cut(value: Any, lengths: dict[int, int]) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return lengths.get(value, value)
    if not isinstance(value, torch.Tensor):
        return value
    part = value.detach()
    for dim, size in enumerate(value.shape):
        part = part.narrow(dim, 0, lengths.get(size, size))
    dense = part.clone() if _is_plain(value) else _as_laid_out(part, value)
    return dense.requires_grad_(value.requires_grad)


def _is_plain(value: Tensor) -> bool:
    return value.is_contiguous()


def _as_laid_out(part: Tensor, like: Tensor) -> Tensor:
    """Dense, with the dimensions in the order of memory that `like` has them in."""
    order = sorted(range(like.dim()), key=like.stride().__getitem__, reverse=True)
    back = sorted(range(like.dim()), key=order.__getitem__)
    return part.permute(order).contiguous().permute(back)


def _renumbered(value: Any, lengths: dict[int, int]) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return lengths.get(value, value)
    if isinstance(value, tuple | list):
        return type(value)(_renumbered(item, lengths) for item in value)
    if isinstance(value, dict):
        return {key: _renumbered(item, lengths) for key, item in value.items()}
    return value


def _with_values(program: Program, change: Callable[[Tensor, int], Tensor]) -> Program:
    def changed() -> Iterator[Any]:
        for position, value in enumerate(program.inputs):
            if not isinstance(value, torch.Tensor):
                yield value
                continue
            with torch.no_grad():
                new = change(value.detach(), position)
                # The layout is part of the failure.
                kept = torch.empty_like(value, dtype=new.dtype).copy_(new)
            yield kept.requires_grad_(value.requires_grad)

    return dataclasses.replace(program, inputs=tuple(changed()))


def _small_numbers(value: Tensor, position: int) -> Tensor:
    """-3, -2 ... 3 and again from the start; each input begins elsewhere."""
    if not _is_float(value):
        return value
    steps = torch.arange(value.numel(), dtype=torch.float64) + position
    return (steps % 7 - 3).reshape(value.shape).to(value.dtype)


def _halves(value: Tensor, position: int) -> Tensor:
    """The values it had, rounded to halves."""
    del position
    return (value.double() * 2).round().div(2).to(value.dtype) if _is_float(value) else value


def _drawn(value: Tensor, position: int) -> Tensor:
    """Normal numbers from a seed, which a line of code draws again."""
    if not _is_float(value) or value.is_complex():
        return value
    source = torch.Generator().manual_seed(position)
    return torch.randn(value.shape, generator=source, dtype=torch.float32).to(value.dtype)


def _two_digits(value: Tensor, position: int) -> Tensor:
    """The values it had, with two decimals."""
    del position
    return value.double().round(decimals=2).to(value.dtype) if _is_float(value) else value


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
