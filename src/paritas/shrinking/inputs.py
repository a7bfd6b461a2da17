"""Smaller and simpler inputs: shapes, then values, then dtypes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from paritas.shrinking.programs import FailingProgram, FailureSignature, Oracle, reference_runs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


# Lengths to try, smallest first: below, at and above the length of a CPU vector.
_LENGTHS = (2, 8, 16, 24)
# How many queries single lengths may cost after all were shrunk together.
_PATIENCE = 3


def reduce_shapes(
    oracle: Oracle, program: FailingProgram, failure_signature: FailureSignature
) -> FailingProgram:
    """Shorten dimensions; equal lengths together, because the graph may require it."""
    best = program
    for length in _LENGTHS:
        smaller = _resize_program(best, {size: length for size in _lengths(best) if size > length})
        if smaller is not None and oracle.shows(smaller, failure_signature, kind=True):
            best = smaller
            break
    tried = 0
    for size in sorted(_lengths(best), reverse=True):
        for length in _LENGTHS:
            if length >= size or tried >= _PATIENCE:
                break
            smaller = _resize_program(best, {size: length})
            if smaller is None:
                continue
            tried += 1
            if oracle.shows(smaller, failure_signature, kind=True):
                best = smaller
                break
    return best


def reduce_values(
    oracle: Oracle, program: FailingProgram, failure_signature: FailureSignature
) -> FailingProgram:
    """Replace values by numbers that are easy to read or to draw again."""
    for rounder in (_small_numbers, _halves, _draw, _two_digits):
        rounded = _with_values(program, rounder)
        if oracle.shows(rounded, failure_signature, kind=True):
            return rounded
    return program


def reduce_dtypes(
    oracle: Oracle, program: FailingProgram, failure_signature: FailureSignature
) -> FailingProgram:
    """float32 everywhere, if it shows the same failure: everybody can run it."""
    floats = {v.dtype for v in program.inputs if _is_float(v)}
    if not floats or floats == {torch.float32}:
        return program
    changed = _with_dtype(program, torch.float32)
    if reference_runs(changed) and oracle.shows(changed, failure_signature, kind=True):
        return changed
    return program


def in_double(
    oracle: Oracle, program: FailingProgram, failure_signature: FailureSignature
) -> FailingProgram:
    """The program on float64 inputs, if it fails natively there: a script can show that."""
    wide = _with_dtype(program, torch.float64)
    return wide if oracle.becomes_native(wide, failure_signature) else program


def _with_dtype(program: FailingProgram, dtype: torch.dtype) -> FailingProgram:
    return _with_values(program, lambda value, _: value.to(dtype) if _is_float(value) else value)


def _lengths(program: FailingProgram) -> set[int]:
    tensors = [value for value in program.inputs if isinstance(value, torch.Tensor)]
    return {size for tensor in tensors for size in tensor.shape if size > 1}


def _resize_program(program: FailingProgram, lengths: dict[int, int]) -> FailingProgram | None:
    """The program with dimensions of these lengths cut, if it still runs.

    Equal numbers in the graph, as in a view, are changed too if that is needed.
    """
    if not lengths:
        return None
    inputs = tuple(_cut_value(value, lengths) for value in program.inputs)
    plain = dataclasses.replace(program, inputs=inputs)
    if reference_runs(plain):
        return plain
    module = copy.deepcopy(program.graph)
    for node in module.graph.nodes:
        if node.op.startswith("call"):
            node.args = _replace_lengths(node.args, lengths)
            node.kwargs = _replace_lengths(node.kwargs, lengths)
    module.recompile()
    changed = dataclasses.replace(program, graph=module, inputs=inputs)
    return changed if reference_runs(changed) else None


def _cut_value(value: Any, lengths: dict[int, int]) -> Any:
    if not isinstance(value, torch.Tensor):
        return _replace_lengths(value, lengths)
    part = value.detach()
    for dim, size in enumerate(value.shape):
        part = part.narrow(dim, 0, lengths.get(size, size))
    dense = part.clone() if value.is_contiguous() else _as_laid_out(part, value)
    return dense.requires_grad_(value.requires_grad)


def _as_laid_out(part: Tensor, like: Tensor) -> Tensor:
    """Dense, with the dimensions in the memory order of `like`."""
    order = sorted(range(like.dim()), key=like.stride().__getitem__, reverse=True)
    back = sorted(range(like.dim()), key=order.__getitem__)
    return part.permute(order).contiguous().permute(back)


def _replace_lengths(value: Any, lengths: dict[int, int]) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return lengths.get(value, value)
    if isinstance(value, tuple | list):
        return type(value)(_replace_lengths(item, lengths) for item in value)
    if isinstance(value, dict):
        return {key: _replace_lengths(item, lengths) for key, item in value.items()}
    return value


def _with_values(
    program: FailingProgram, change: Callable[[Tensor, int], Tensor]
) -> FailingProgram:
    def change_inputs() -> Iterator[Any]:
        for position, value in enumerate(program.inputs):
            if not isinstance(value, torch.Tensor):
                yield value
                continue
            with torch.no_grad():
                new = change(value.detach(), position)
                # The failure may depend on the layout.
                strided_copy = torch.empty_like(value, dtype=new.dtype).copy_(new)
            yield strided_copy.requires_grad_(value.requires_grad)

    return dataclasses.replace(program, inputs=tuple(change_inputs()))


def _small_numbers(value: Tensor, position: int) -> Tensor:
    """-3, -2 ... 3, repeated; each input starts at another number."""
    if not _is_float(value):
        return value
    steps = torch.arange(value.numel(), dtype=torch.float64) + position
    return (steps % 7 - 3).reshape(value.shape).to(value.dtype)


def _halves(value: Tensor, _: int) -> Tensor:
    """The original values, rounded to halves."""
    return (value.double() * 2).round().div(2).to(value.dtype) if _is_float(value) else value


def _draw(value: Tensor, position: int) -> Tensor:
    """Normal numbers from a seed, which one line of code can draw again."""
    if not _is_float(value) or value.is_complex():
        return value
    source = torch.Generator().manual_seed(position)
    return torch.randn(value.shape, generator=source, dtype=torch.float32).to(value.dtype)


def _two_digits(value: Tensor, _: int) -> Tensor:
    """The original values, rounded to two decimals."""
    return value.double().round(decimals=2).to(value.dtype) if _is_float(value) else value


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
