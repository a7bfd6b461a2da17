"""Operators that put tensors together, cut them up, pad them or move elements along a dimension.

The dimension they work along stays whole; all others can be split.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from paritas.partition.library.claims import Bound, Claim, letters, named, positive_dims
from paritas.partition.library.registry import everywhere, functional, rule


def along(bound: Bound, dims: Iterable[int], parameter: str = "x") -> tuple[list[str], list[str]]:
    """The dimensions of a tensor and of a result that is longer or shorter along some of them."""
    shape = bound.shape(parameter) or ()
    stay = set(dims)
    text = ["_" if i in stay else d for i, d in enumerate(_names(shape))]
    return text, list(text)


def _names(shape: tuple[int, ...]) -> list[str]:
    return named(shape, letters(len(shape))).split()


# --- lists of tensors -----------------------------------------------------------------------------


def _alike(tensors: Any, dim: Any, *, new: bool) -> tuple[list[str], int] | None:
    """The dimensions that the tensors of a list have in common."""
    if not isinstance(tensors, list | tuple) or not tensors or not isinstance(dim, int):
        return None
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return None
    shape = tuple(tensors[0].shape)
    if not shape or any(tensor.dim() != len(shape) for tensor in tensors):
        return None
    return _names(shape), dim % (len(shape) + new)


@rule("tensors dim", "torch.cat torch.concat torch.concatenate aten.cat")
def _cat(bound: Bound) -> Claim | None:
    found = _alike(bound.get("tensors"), bound.get("dim", 0), new=False)
    if found is None:
        return None
    dims, at = found
    dims[at] = "_"
    return Claim({"tensors": " ".join(dims)}, (" ".join(dims),))


@rule("tensors dim", "torch.stack aten.stack")
def _stack(bound: Bound) -> Claim | None:
    found = _alike(bound.get("tensors"), bound.get("dim", 0), new=True)
    if found is None:
        return None
    dims, at = found
    outside = [*dims[:at], str(len(bound.get("tensors"))), *dims[at:]]
    return Claim({"tensors": " ".join(dims)}, (" ".join(outside),))


@rule("tensors", "torch.hstack")
def _beside(bound: Bound) -> Claim | None:
    tensors = bound.get("tensors")
    first = tensors[0] if isinstance(tensors, list | tuple) and tensors else None
    dim = 0 if isinstance(first, torch.Tensor) and first.dim() == 1 else 1
    found = _alike(tensors, dim, new=False)
    if found is None:
        return None
    dims, at = found
    dims[at] = "_"
    return Claim({"tensors": " ".join(dims)}, (" ".join(dims),))


# --- cuts -----------------------------------------------------------------------------------------


@rule("x chunks dim", everywhere("chunk"))
@rule("x split_size dim", "torch.Tensor.split torch.functional.split aten.split")
@rule("x split_sizes dim", "torch.split_with_sizes aten.split_with_sizes")
@rule("x split_size_or_sections dim", "torch.split")
@rule("x indices_or_sections dim", everywhere("tensor_split"))
def _cut(bound: Bound) -> Claim | None:
    """As many results as the dimension gives: it stays whole, so their number does not change."""
    shape = bound.shape("x")
    at = positive_dims(bound.get("dim", 0), shape)
    how = next((value for name, value in bound.values.items() if name not in ("x", "dim")), None)
    if shape is None or at is None or how is None or isinstance(how, torch.Tensor):
        return None
    count = _pieces(bound, shape[at[0]], how)
    inside, outside = along(bound, at)
    return Claim({"x": " ".join(inside)}, (" ".join(outside),) * count)


def _pieces(bound: Bound, size: int, how: Any) -> int:
    if "indices_or_sections" in bound.values:
        return how if isinstance(how, int) else len(how) + 1
    if not isinstance(how, int):
        return len(how)
    width = -(-size // how) if "chunks" in bound.values else how
    return max(1, -(-size // width)) if width else 1


@rule("x dim", everywhere("unbind"))
def _unbind(bound: Bound) -> Claim | None:
    shape = bound.shape("x")
    at = positive_dims(bound.get("dim", 0), shape)
    if shape is None or at is None:
        return None
    inside, outside = along(bound, at)
    del outside[at[0]]
    return Claim({"x": " ".join(inside)}, (" ".join(outside),) * shape[at[0]])


@rule("x dim index", everywhere("select"))
def _select(bound: Bound) -> Claim | None:
    at = positive_dims(bound.get("dim"), bound.shape("x"))
    if at is None or bound.has("index"):
        return None
    inside, outside = along(bound, at)
    del outside[at[0]]
    return Claim({"x": " ".join(inside)}, (" ".join(outside),))


@rule("x dim start length", everywhere("narrow"))
@rule("x n dim", everywhere("diff"))
@rule("x dimension size step", "torch.Tensor.unfold aten.unfold")
def _shorter(bound: Bound) -> Claim | None:
    """A cut, or differences of neighbours; windows come as a last dimension."""
    at = positive_dims(bound.get("dimension", bound.get("dim", -1)), bound.shape("x"))
    if at is None or bound.has("start"):
        return None
    inside, outside = along(bound, at)
    windows = ["_"] if "dimension" in bound.values else []
    return Claim({"x": " ".join(inside)}, (" ".join([*outside, *windows]),))


@rule("x dim start end step", "aten.slice")
def _slice(bound: Bound) -> Claim | None:
    at = positive_dims(bound.get("dim", 0), bound.shape("x"))
    if at is None:
        return None
    inside, outside = along(bound, at)
    return Claim({"x": " ".join(inside)}, (" ".join(outside),))


@rule("x *dims", everywhere("flip"))
@rule("x shifts dims", everywhere("roll"))
@rule("x k dims", everywhere("rot90"))
def _moved(bound: Bound) -> Claim | None:
    """Elements change places within the dimensions."""
    given = bound.get("dims", (0, 1) if "k" in bound.values else None)
    at = positive_dims(given, bound.shape("x"))
    if at is None or ("k" in bound.values and len(at) != 2):  # noqa: PLR2004 - a plane
        return None
    inside, outside = along(bound, at)
    return Claim({"x": " ".join(inside)}, (" ".join(outside),))


@rule("x diagonal", everywhere("triu tril"))
def _triangle(bound: Bound) -> Claim | None:
    """A stack of triangles."""
    at = positive_dims((-2, -1), bound.shape("x"))
    if at is None:
        return None
    inside, outside = along(bound, at)
    return Claim({"x": " ".join(inside)}, (" ".join(outside),))


@rule("x offset dim1 dim2", everywhere("diagonal"))
def _diagonal(bound: Bound) -> Claim | None:
    at = positive_dims((bound.get("dim1", 0), bound.get("dim2", 1)), bound.shape("x"))
    if at is None:
        return None
    inside, _ = along(bound, at)
    outside = [d for i, d in enumerate(inside) if i not in at]
    return Claim({"x": " ".join(inside)}, (" ".join([*outside, "_"]),))


@rule("x pad mode value", functional("pad"))
@rule("x pad value", "torch.constant_pad_nd aten.constant_pad_nd")
def _pad(bound: Bound) -> Claim | None:
    """Pairs from the last dimension on; what gets no padding can be split."""
    shape, pad = bound.shape("x"), bound.get("pad")
    if not shape or not isinstance(pad, list | tuple):
        return None
    padded = [
        len(shape) - 1 - i for i in range(len(pad) // 2) if tuple(pad[2 * i : 2 * i + 2]) != (0, 0)
    ]
    inside, outside = along(bound, padded)
    return Claim({"x": " ".join(inside)}, (" ".join(outside),))


# --- transforms along dimensions ------------------------------------------------------------------


@rule("x n dim norm", "torch.fft.fft torch.fft.ifft torch.fft.rfft torch.fft.irfft torch.fft.hfft")
def _fourier(bound: Bound) -> Claim | None:
    at = positive_dims(bound.get("dim", -1), bound.shape("x"))
    if at is None:
        return None
    inside, outside = along(bound, at)
    return Claim({"x": " ".join(inside)}, (" ".join(outside),))


@rule("x other dim", "torch.linalg.cross")
def _cross(bound: Bound) -> Claim | None:
    shape, other = bound.shape("x"), bound.shape("other")
    at = positive_dims(bound.get("dim", -1), shape)
    if at is None or shape != other:
        return None
    inside, _ = along(bound, at)
    text = " ".join(inside)
    return Claim({"x": text, "other": text}, (text,))


@rule("A", "torch.linalg.inv torch.inverse torch.linalg.cholesky torch.linalg.matrix_exp")
def _of_matrices(bound: Bound) -> Claim | None:
    """A matrix for each matrix of a stack."""
    return _stacked(bound, of_matrix=["_", "_"])


@rule("A", "torch.linalg.det torch.det torch.logdet")
def _determinant(bound: Bound) -> Claim | None:
    """A number for each matrix of a stack."""
    return _stacked(bound, of_matrix=[])


def _stacked(bound: Bound, of_matrix: list[str]) -> Claim | None:
    at = positive_dims((-2, -1), bound.shape("A"))
    if at is None:
        return None
    inside, _ = along(bound, at, "A")
    return Claim({"A": " ".join(inside)}, (" ".join([*inside[:-2], *of_matrix]),))
