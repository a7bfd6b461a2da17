"""How the values of a tensor lie in a file: every dtype torch has, bit for bit."""

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

# Only the names that safetensors 0.6 has: one tensor of a dtype it does not know would make the
# whole file unreadable to it. All else is stored as pairs of real numbers or as bytes.
_SAFETENSORS = {
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
# To copy by: torch moves integers of any width, and keeps every bit of them.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Those of which a buffer can be cast to bytes.
_IN_NUMPY = {
    dtype for dtype, name in _SAFETENSORS.items() if name != "BF16" and not name.startswith("F8")
}

_REAL = frozenset(_IN_NUMPY | {torch.bfloat16})


def known_dtype(name: str) -> torch.dtype:
    """The dtype that an index calls by that name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(
            f"torch {torch.__version__} has no dtype {name!r}: read the dump with the version of "
            f"torch that wrote it"
        )
    return dtype


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the values in the file: its own, but float32 for a quantised one.

    The integers of a quantised tensor mean nothing without scales, so what they stand for is kept.
    """
    return torch.float32 if dtype in _QUANTISED else dtype


def stored_shape(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The shape in the file, where what a stride of 0 repeats is stored once."""
    if 0 not in stride or 0 in shape:
        return tuple(shape)
    return tuple(1 if step == 0 else extent for extent, step in zip(shape, stride, strict=True))


def in_safetensors(dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, list[int]]:
    """The name and shape by which safetensors knows values of a dtype.

    What has no name there is a view of the same bytes: complex numbers have a last dimension of
    real and imaginary parts; other dtypes are bytes, several of them to a value along the last
    dimension.
    """
    name = _SAFETENSORS.get(dtype)
    if name is not None:
        return name, list(shape)
    if dtype in _PARTS_OF_COMPLEX:
        return _PARTS_OF_COMPLEX[dtype], [*shape, 2]
    if dtype is _FLOAT4 and shape:
        # Torch counts the bytes, safetensors the two numbers in each.
        return "F4", [*shape[:-1], shape[-1] * 2]
    if dtype.itemsize == 1:
        return "U8", list(shape)
    return "U8", [*shape, dtype.itemsize]


def as_stored(tensor: Tensor) -> Tensor:
    """The values as they go into a file: in row-major order, what a stride of 0 repeats once.

    It stays on its device, and is a copy only where it must be.

    Raises:
        UsageError: the tensor has no plain values of its own; the message says what it is.
    """
    if _lies_as_stored(tensor):
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


def _lies_as_stored(tensor: Tensor) -> bool:
    """Whether it is what most tensors are, by the fewest questions; the others are looked at."""
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
        raise UsageError("a nested tensor has no shape to store: give its parts, or pad it")
    if tensor.layout is not torch.strided:
        raise UsageError(f"a tensor of layout {tensor.layout} is not stored: give its to_dense()")
    if tensor.is_meta:
        raise UsageError("a tensor on the meta device has no values")
    try:
        held = tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError) as error:
        # What torch.vmap and torch.func.grad hand to the function they transform.
        raise UsageError(
            f"a tensor inside torch.func's transforms has no values of its own ({error}): look at "
            f"it outside"
        ) from error
    needed = _extent(tensor)
    if held < needed and not tensor.is_quantized:
        # Sharded training frees the memory of a parameter while it is not in use.
        raise UsageError(
            f"a tensor of shape {tuple(tensor.shape)} needs {needed} bytes and its storage holds "
            f"{held}: its memory was freed"
        )


def _refuse_class(tensor: Tensor) -> None:
    kind = type(tensor)
    if isinstance(tensor, (UninitializedBuffer, UninitializedParameter)):
        raise UsageError(f"a {kind.__name__} has no values yet: run the module once before")
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise UsageError(
            f"a tensor of class {kind.__module__}.{kind.__qualname__} keeps its values in its own "
            f"way: give the plain tensors that it consists of"
        )


def _extent(tensor: Tensor) -> int:
    """Bytes of storage from its beginning to behind the tensor's last value."""
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
            f"a tensor of {tensor.dtype} could not be dequantised: {first_line(error, 1000)}"
        ) from error


def raw_bytes(tensor: Tensor) -> Any:
    """The memory of a contiguous CPU tensor, as a buffer, without a copy."""
    if tensor.dtype in _IN_NUMPY:
        return tensor.numpy()
    # A contiguous tensor may have any stride where it has but one value, or none.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()


def digest(tensor: Tensor) -> str:
    """Hash of the bytes of a contiguous CPU tensor: XXH3 of 128 bits, in hexadecimal digits."""
    return digest_of(raw_bytes(tensor))


def digest_of(data: Any) -> str:
    """The same, of a buffer."""
    return xxhash.xxh3_128_hexdigest(data)


def sketch_dtype(payload: Payload) -> torch.dtype:
    """The dtype of a stored sketch: float64 where float32 could not hold the sums."""
    return torch.float64 if payload.nbytes == 8 * math.prod(payload.shape) else torch.float32


def bytes_needed(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """How many bytes values take, without the overflow that a tensor's own arithmetic has."""
    return math.prod(shape) * dtype.itemsize
