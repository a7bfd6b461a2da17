"""Flatten a result into a table of plain leaves that can be compared one by one.

Containers and objects are split into their parts, and so is a tensor that is not dense: a sparse
one into indices and values, a quantised one into codes, scales and zero points, a nested one into
sizes and values. The parts belong to the tensor itself: they can be differentiated, share its
memory, and are judged with the same evidence as any dense tensor.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paritas.core.errors import in_one_line
from paritas.core.numerics.bits import dtype_name
from paritas.core.numerics.contents import ContainerKind, Opaque, Parts, attributes, same_leaf, walk

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = [
    "STORED_ONLY",
    "Flat",
    "as_plain",
    "flatten_value",
    "is_dense",
    "same_parts",
    "tensor_parts",
]

_DENSE_CLASSES = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
# Dtypes that torch only stores and cannot compute with: their bytes are compared.
STORED_ONLY = {
    getattr(torch, name)
    for name in dir(torch)
    if re.fullmatch(r"float4_\w+|bits\w+|u?int[1-7]", name)
}


@dataclasses.dataclass(frozen=True)
class Flat:
    """A flattened result.

    Attributes:
        leaves: path -> dense tensor, plain Python value, or `Opaque`.
        kinds: path -> kind of the container or object, for everything that is not a leaf itself.
        cut_off: paths of tensors that require gradients while none of their parts does.
    """

    leaves: dict[str, Any] = dataclasses.field(default_factory=dict)
    kinds: dict[str, ContainerKind] = dataclasses.field(default_factory=dict)
    cut_off: list[str] = dataclasses.field(default_factory=list)


def flatten_value(value: Any, root: str = "") -> Flat:
    """All leaves of a value, and the kinds of everything that was split, by path."""
    flat = Flat()
    _flatten(value, root, flat)
    return flat


def _flatten(value: Any, root: str, flat: Flat) -> None:
    for path, node, below in walk(value, root):
        if below is not None:
            flat.kinds[path] = below.kind
            continue
        leaf = _wait_for(node)
        parts = _leaf_parts(leaf)
        if parts is None:
            flat.leaves[path] = leaf
            continue
        flat.kinds[path] = parts.kind
        tensors = [part for _, part in parts.items if isinstance(part, torch.Tensor)]
        if getattr(leaf, "requires_grad", False) and not any(t.requires_grad for t in tensors):
            flat.cut_off.append(path)
        for suffix, part in parts.items:
            if suffix:
                _flatten(part, path + suffix, flat)
            else:
                flat.leaves[path] = part


def as_plain(leaf: Any) -> Any:
    """A number or tensor of any kind as one dense tensor; other leaves unchanged.

    Layout information is lost, such as the sparsity pattern. It is meant for gradients, where the
    layout is not compared.
    """
    leaf = _wait_for(leaf)
    parts = _leaf_parts(leaf)
    if parts is None:
        return _resolve(leaf) if isinstance(leaf, torch.Tensor) else leaf
    by_suffix = dict(parts.items)
    if "" in by_suffix:
        return _resolve(by_suffix[""]) if isinstance(by_suffix[""], torch.Tensor) else by_suffix[""]
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        return _resolve(by_suffix[".values"])
    if leaf.is_quantized:
        return leaf.detach().dequantize()
    if leaf.layout is not torch.strided:
        return _resolve(leaf.detach().to_dense())
    return Opaque(leaf, f"{parts.kind.name} has no dense form")


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is of torch's own class, strided and of a dtype torch computes with."""
    return (
        type(tensor) in _DENSE_CLASSES
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
        and tensor.dtype not in STORED_ONLY
        and not _dimension_names(tensor)
    )


def same_parts(a: Tensor, b: Tensor, same: Callable[[Tensor, Tensor], bool]) -> bool:
    """Whether two tensors of any kind have the same kind, and parts that are equal by `same`."""
    if a.is_meta and b.is_meta:
        return a.shape == b.shape and a.dtype is b.dtype  # they hold nothing else
    left, right = flatten_value(a), flatten_value(b)
    if left.kinds != right.kinds or left.leaves.keys() != right.leaves.keys():
        return False
    for path, left_leaf in left.leaves.items():
        other = right.leaves[path]
        if isinstance(left_leaf, torch.Tensor) and isinstance(other, torch.Tensor):
            if not same(left_leaf, other):
                return False
        elif not same_leaf(left_leaf, other):
            return False
    return True


def tensor_parts(tensor: Tensor) -> Parts | None:
    """The parts of a tensor that is not dense; None for a dense one.

    A tensor that cannot be read becomes a single opaque part.
    """
    if is_dense(tensor):
        return None
    try:
        return _read_tensor(tensor)
    except Exception as error:  # noqa: BLE001  (a subclass may raise anything: it is unverified)
        text = in_one_line(error, 120, whole=True)
        return _opaque_parts(tensor, f"cannot be read: {text}")


def _read_tensor(tensor: Tensor) -> Parts | None:
    if tensor.is_meta:
        return _opaque_parts(tensor, "has no values")
    if tensor.is_nested:
        return _read_nested(tensor)
    if type(tensor) not in _DENSE_CLASSES:
        return _read_subclass(tensor)
    if tensor.is_quantized:
        return _read_quantised(tensor)
    if tensor.layout is not torch.strided:
        return _read_sparse(tensor)
    if _dimension_names(tensor):
        kind = _make_kind(f"tensor with names {_dimension_names(tensor)}")
        return Parts(kind, [("", tensor.rename(None))])  # type: ignore[attr-defined]
    kind = _make_kind(f"{dtype_name(tensor.dtype)} tensor")
    return Parts(kind, [(".view(torch.uint8)", tensor.view(torch.uint8))])


def _read_nested(tensor: Tensor) -> Parts:
    parts = list(tensor.unbind())
    sizes = [list(part.shape) for part in parts]
    if len({tuple(size[1:]) for size in sizes}) > 1 or not all(sizes):
        parts = [part.reshape(-1) for part in parts]
    values = torch.cat(parts) if parts else torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    kind = _make_kind(f"nested tensor ({dtype_name(tensor.layout)})")
    return Parts(kind, [(".sizes", torch.tensor(sizes)), (".values", values)])


def _read_quantised(tensor: Tensor) -> Parts:
    scheme = tensor.qscheme()
    codes = (".int_repr()", _read_codes(tensor))
    kind = _make_kind(f"{dtype_name(tensor.dtype)} tensor ({dtype_name(scheme)})")
    if scheme in {torch.per_tensor_affine, torch.per_tensor_symmetric}:
        # Scales are computed in float32 and only stored in a double.
        scale = torch.tensor(tensor.q_scale(), dtype=torch.float32)
        items = [codes, (".q_scale()", scale), (".q_zero_point()", tensor.q_zero_point())]
        return Parts(kind, items)
    return Parts(
        kind,
        [
            codes,
            (".q_per_channel_scales()", tensor.q_per_channel_scales().float()),
            (".q_per_channel_zero_points()", tensor.q_per_channel_zero_points()),
            (".q_per_channel_axis()", tensor.q_per_channel_axis()),
        ],
    )


def _read_codes(tensor: Tensor) -> Tensor:
    """The integers of a quantised tensor, as a view of its memory if each has its own bytes."""
    plain = _CODE_DTYPES.get(tensor.dtype)
    if plain is None:
        return tensor.int_repr()
    empty = torch.empty(0, dtype=plain, device=tensor.device)
    return empty.set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


_CODE_DTYPES = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}


def _read_sparse(tensor: Tensor) -> Parts:
    layout, shape = tensor.layout, list(tensor.shape)
    if layout is torch.sparse_coo:
        sparse_tensor = tensor.coalesce()
        state = "" if tensor.is_coalesced() else "uncoalesced "
        names = ["indices", "values"]
    else:
        sparse_tensor, state = tensor, ""
        rows = layout in {torch.sparse_csr, torch.sparse_bsr}
        names = ["crow_indices", "col_indices"] if rows else ["ccol_indices", "row_indices"]
        names.append("values")
    kind = _make_kind(f"{state}{dtype_name(layout)} tensor of shape {shape}")
    if layout not in _SPARSE:  # mkldnn
        return Parts(kind, [(".to_dense()", tensor.to_dense())])
    return Parts(kind, [(f".{name}()", getattr(sparse_tensor, name)()) for name in names])


_SPARSE = {
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
}


def _read_subclass(tensor: Any) -> Parts:
    cls = type(tensor)
    if isinstance(tensor, torch.masked.MaskedTensor):
        mask, data = tensor.get_mask(), tensor.get_data()
        if data.layout is torch.strided:  # masked values may be anything
            data = torch.where(mask, data, torch.zeros_like(data))
        return Parts(_make_kind(cls.__name__), [(".get_mask()", mask), (".get_data()", data)])
    if hasattr(tensor, "full_tensor"):  # a distributed tensor: assemble it
        name = f"{cls.__name__} {[str(placement) for placement in tensor.placements]}"
        return Parts(_make_kind(name, is_tensor=True), [("", tensor.full_tensor())])
    if hasattr(tensor, "__tensor_flatten__") and callable(tensor.__tensor_flatten__):
        names, context = tensor.__tensor_flatten__()
        items = [(f".{name}", getattr(tensor, name)) for name in names]
        kind = _make_kind(f"{cls.__name__} of shape {list(tensor.shape)}")
        attribute_items = [(".context", context), (".requires_grad", tensor.requires_grad)]
        return Parts(kind, [*items, *attribute_items])
    if cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return _opaque_parts(tensor, "cannot be read: it has no __tensor_flatten__")
    with torch.DisableTorchFunctionSubclass():
        plain = tensor.as_subclass(torch.Tensor)
    attribute_items = [(f".{name}", value) for name, value in attributes(tensor) if name != "grad"]
    return Parts(
        ContainerKind(cls.__name__, "tensor", is_tensor=True), [("", plain), *attribute_items]
    )


def _wait_for(leaf: Any) -> Any:
    """Wait for the result of a collective that may still be running."""
    is_tensor = isinstance(leaf, torch.Tensor) and type(leaf) not in _DENSE_CLASSES
    return leaf.trigger_wait() if is_tensor and hasattr(leaf, "trigger_wait") else leaf


def _leaf_parts(leaf: Any) -> Parts | None:
    if isinstance(leaf, torch.Tensor):
        return tensor_parts(leaf)
    if type(leaf) in {float, complex}:
        # A float is judged like a tensor, but is not interchangeable with one.
        wide = torch.complex128 if type(leaf) is complex else torch.float64
        number = torch.tensor(leaf, dtype=wide, device="cpu")
        return Parts(_make_kind(type(leaf).__name__), [("", number)])
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "biufc":
        native = np.array(leaf, dtype=leaf.dtype.newbyteorder("="))
        if native.dtype.itemsize <= _widest_bytes(native.dtype):
            return Parts(_make_kind(type(leaf).__name__), [("", torch.from_numpy(native))])
    return None


def _widest_bytes(dtype: np.dtype[Any]) -> int:
    """Bytes of the widest number of this kind that torch supports."""
    return 16 if dtype.kind == "c" else 8


def _opaque_parts(tensor: Tensor, reason: str) -> Parts:
    name = "meta tensor" if tensor.is_meta else type(tensor).__name__
    facts = f"{name} of {dtype_name(tensor.dtype)}"
    return Parts(_make_kind(facts), [("", Opaque(tensor, f"a {facts} {reason}"))])


def _make_kind(name: str, *, is_tensor: bool = False) -> ContainerKind:
    return ContainerKind(name, name, is_tensor)


def _dimension_names(tensor: Tensor) -> tuple[Any, ...]:
    """The names of its dimensions, which torch 2.13 no longer supports."""
    has_names = getattr(tensor, "has_names", None)
    return tuple(tensor.names) if has_names is not None and has_names() else ()  # type: ignore[attr-defined]


def _resolve(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg()
