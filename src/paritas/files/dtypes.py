"""How tensor values are stored in a file: every torch dtype, bit for bit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from paritas.errors import UsageError, first_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paritas.files.records import Payload

# Only names that safetensors 0.6 knows: it refuses a whole file because of one unknown dtype.
# Every other dtype is stored as pairs of real numbers or as bytes.
SAFETENSORS_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}
_PARTS_OF_COMPLEX = {torch.complex32: "F16", torch.complex64: "F32", torch.complex128: "F64"}
_FLOAT4 = torch.float4_e2m1fn_x2
_QUANTISED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
# Integer dtypes to copy through: torch copies integers of any width bit for bit.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Dtypes whose numpy buffer can be cast to bytes.
_IN_NUMPY = {
    dtype
    for dtype, name in SAFETENSORS_NAMES.items()
    if name != "BF16" and not name.startswith("F8")
}

_REAL = frozenset(_IN_NUMPY | {torch.bfloat16})


def known_dtype(name: str) -> torch.dtype:
    """The torch dtype of this name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(
            f"torch {torch.__version__} has no dtype {name!r}: read the dump with the version of "
            f"torch that wrote it"
        )
    return dtype


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the values in the file: float32 for a quantised dtype, otherwise the same.

    Quantised integers mean nothing without their scales, so the values they represent are stored.
    """
    return torch.float32 if dtype in _QUANTISED else dtype


def stored_shape(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The shape in the file: a dimension of stride 0 is stored once."""
    if 0 not in stride or 0 in shape:
        return tuple(shape)
    return tuple(1 if step == 0 else extent for extent, step in zip(shape, stride, strict=True))


def in_safetensors(dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, list[int]]:
    """The safetensors name and shape for values of a dtype.

    A dtype without a name is a view of the same bytes: complex numbers get a last dimension of
    real and imaginary parts, other dtypes a last dimension of bytes.
    """
    name = SAFETENSORS_NAMES.get(dtype)
    if name is not None:
        return name, list(shape)
    if dtype in _PARTS_OF_COMPLEX:
        return _PARTS_OF_COMPLEX[dtype], [*shape, 2]
    if dtype is _FLOAT4 and shape:
        # torch counts bytes, safetensors counts the two numbers in each.
        return "F4", [*shape[:-1], shape[-1] * 2]
    if dtype.itemsize == 1:
        return "U8", list(shape)
    return "U8", [*shape, dtype.itemsize]


def as_stored(tensor: Tensor) -> Tensor:
    """The values as written to a file: row-major, dimensions of stride 0 once.

    The result stays on its device and is a copy only where necessary.
    """
    if _is_stored_form(tensor):
        return tensor
    _refuse_unstorable(tensor)
    plain = tensor.detach() if tensor.requires_grad else tensor
    if type(plain) is not torch.Tensor:
        plain = plain.as_subclass(torch.Tensor)
    stride = plain.stride()
    if 0 in stride:
        shape = stored_shape(plain.shape, stride)
        plain = plain[tuple(slice(0, extent) for extent in shape)]
    if plain.is_quantized:
        return _dequantised(plain).contiguous()
    if plain.is_conj():
        plain = plain.resolve_conj()
    if plain.is_neg():
        plain = plain.resolve_neg()
    if plain.is_contiguous():
        return plain
    carrier = _CARRIERS.get(plain.dtype.itemsize)
    if carrier is None or not plain.dim():
        return plain.contiguous()
    return plain.view(carrier).contiguous().view(plain.dtype)


def _is_stored_form(tensor: Tensor) -> bool:
    """A quick test that accepts the common case; anything else takes the slow path."""
    if (
        type(tensor) is not torch.Tensor
        or tensor.dtype not in _REAL
        or not tensor.is_cpu
        or tensor.requires_grad
        or tensor.is_nested
        or not tensor.is_contiguous()
        or tensor.is_neg()
        or 0 in tensor.stride()
    ):
        return False
    try:
        held = tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # inside torch.func's transforms
        return False
    return bool(held >= (tensor.storage_offset() + tensor.numel()) * tensor.dtype.itemsize)


def _refuse_unstorable(tensor: Tensor) -> None:
    if type(tensor) is not torch.Tensor:
        _refuse_class(tensor)
    if tensor.is_nested:
        raise UsageError("cannot store a nested tensor: pass its components, or pad it")
    if tensor.layout is not torch.strided:
        raise UsageError(f"cannot store a tensor of layout {tensor.layout}: call to_dense() first")
    if tensor.is_meta:
        raise UsageError("a tensor on the meta device has no values")
    try:
        held = tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError) as error:
        # torch.vmap and torch.func.grad pass such tensors to the function they transform.
        raise UsageError(
            f"a tensor inside a torch.func transform has no values ({error}): record it outside "
            f"the transform"
        ) from error
    needed = _extent(tensor)
    if held < needed and not tensor.is_quantized:
        # Sharded training frees the memory of unused parameters.
        raise UsageError(
            f"a tensor of shape {tuple(tensor.shape)} needs {needed} bytes and its storage holds "
            f"{held}: its memory was freed"
        )


def _refuse_class(tensor: Tensor) -> None:
    kind = type(tensor)
    if isinstance(tensor, (UninitializedBuffer, UninitializedParameter)):
        raise UsageError(f"a {kind.__name__} has no values yet: run the module once first")
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise UsageError(
            f"cannot store a tensor of class {kind.__module__}.{kind.__qualname__}: pass the plain "
            f"tensors it consists of"
        )


def _extent(tensor: Tensor) -> int:
    """Bytes from the start of the storage to the end of the tensor's last value."""
    count = tensor.numel()
    if count == 0:
        return 0
    if not tensor.is_contiguous():
        reach = zip(tensor.shape, tensor.stride(), strict=True)
        count = 1 + sum((extent - 1) * step for extent, step in reach)
    return (int(tensor.storage_offset()) + count) * tensor.dtype.itemsize


def _dequantised(tensor: Tensor) -> Tensor:
    try:
        return tensor.dequantize()
    except RuntimeError as error:
        raise UsageError(
            f"cannot dequantise a tensor of {tensor.dtype}: {first_line(error, 1000)}"
        ) from error


def raw_bytes(tensor: Tensor) -> Any:
    """The memory of a contiguous CPU tensor, as a buffer, without a copy."""
    if tensor.dtype in _IN_NUMPY:
        return tensor.numpy()
    # A contiguous tensor of at most one value may have any stride.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()


def digest(tensor: Tensor) -> str:
    """XXH3 hash (128 bits, hexadecimal) of the bytes of a contiguous CPU tensor."""
    return digest_of(raw_bytes(tensor))


def digest_of(data: Any) -> str:
    """XXH3 hash (128 bits, hexadecimal) of a buffer."""
    return xxhash.xxh3_128_hexdigest(data)


def sketch_dtype(payload: Payload) -> torch.dtype:
    """The dtype of a stored sketch: float64 if float32 could not hold the sums."""
    return torch.float64 if payload.nbytes == 8 * math.prod(payload.shape) else torch.float32


def bytes_needed(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """The size of the values in bytes, computed without overflow."""
    return math.prod(shape) * dtype.itemsize
