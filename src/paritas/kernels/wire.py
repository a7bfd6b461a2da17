"""Values between the judge and the process of a candidate, as parts of messages.

Nothing that comes from a candidate's process is unpickled: that would run its code in the judging
process. A tensor is bytes with a dtype, a shape and strides, which are checked before they are
used. Tensors that share memory are sent as views of one storage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paritas.core.numerics.bits import dtype_name
from paritas.kernels.messages import Encoded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_DTYPES = {
    dtype_name(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_NAMED_TORCH = (torch.dtype, torch.layout, torch.memory_format)
_LARGEST_INTEGER = 1 << 63


class WireError(ValueError):
    """A value cannot be sent, or what was sent is not one."""


def encode(value: Any) -> Encoded:
    """A tree of plain values and dense tensors, as data.

    Raises:
        WireError: it contains something else.
    """
    storages: list[bytes] = []
    places: dict[int, int] = {}
    return Encoded(_encode(value, storages, places), storages)


def _encode(  # noqa: PLR0911  (one for each kind)
    value: Any, storages: list[bytes], places: dict[int, int]
) -> list[Any]:
    match value:
        case torch.Tensor():
            return _encode_tensor(value, storages, places)
        case None | bool() | str() | float():
            return ["plain", value]
        case int():
            small = -_LARGEST_INTEGER <= value < _LARGEST_INTEGER
            return ["plain", value] if small else ["integer", str(value)]
        case complex():
            return ["complex", value.real, value.imag]
        case torch.device():
            return ["device", str(value)]
        case list() | tuple():
            kind = "list" if isinstance(value, list) else "tuple"
            return [kind, [_encode(element, storages, places) for element in value]]
        case slice():
            parts = [value.start, value.stop, value.step]
            return ["slice", [_encode(part, storages, places) for part in parts]]
        case dict():
            items = [
                [_encode(k, storages, places), _encode(v, storages, places)]
                for k, v in value.items()
            ]
            return ["dict", items]
    if isinstance(value, _NAMED_TORCH):
        return ["torch", str(value).removeprefix("torch.")]
    raise WireError(f"a value of type {type(value).__name__} cannot be sent to another process")


def _encode_tensor(tensor: Tensor, storages: list[bytes], places: dict[int, int]) -> list[Any]:
    plain = tensor.detach()
    if plain.layout is not torch.strided or plain.is_quantized or plain.is_nested or plain.is_meta:
        raise WireError(f"a tensor of layout {plain.layout} cannot be sent to another process")
    plain = plain.resolve_conj().resolve_neg()
    if plain.data_ptr() == 0 or plain.untyped_storage().nbytes() == 0:
        storage_index = len(storages)
        storages.append(b"")
        return [
            "tensor",
            storage_index,
            dtype_name(plain.dtype),
            list(plain.shape),
            list(plain.stride()),
            0,
            tensor.requires_grad,
            str(plain.device),
        ]
    storage = plain.untyped_storage()
    key = storage.data_ptr()
    if key not in places:
        places[key] = len(storages)
        storages.append(bytes_of(plain).cpu().numpy().tobytes())
    return [
        "tensor",
        places[key],
        dtype_name(plain.dtype),
        list(plain.shape),
        list(plain.stride()),
        plain.storage_offset(),
        tensor.requires_grad,
        str(plain.device),
    ]


def bytes_of(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage, as a view."""
    storage = tensor.detach().untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


def decode(content: Encoded, device: str | None = None) -> Any:
    """The value that was encoded; tensors are new ones, on `device` if it is given.

    Raises:
        WireError: it is not valid.
    """
    try:
        return _Decoder(content.storages, device).decode(content.tree)
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError, RecursionError) as error:
        raise WireError(f"not a value: {type(error).__name__}: {error}") from error


class _Decoder:
    def __init__(self, storages: Sequence[bytes], device: str | None) -> None:
        self._storages, self._device = storages, device
        self._made: dict[tuple[int, str], torch.UntypedStorage] = {}

    def decode(self, tree: Any) -> Any:  # noqa: PLR0911  (one for each kind)
        kind, *rest = tree
        match kind:
            case "plain":
                return rest[0]
            case "integer":
                return int(rest[0])
            case "complex":
                return complex(*rest)
            case "device":
                return torch.device(rest[0])
            case "torch":
                torch_constant = getattr(torch, rest[0])
                if not isinstance(torch_constant, _NAMED_TORCH):
                    raise WireError(f"{rest[0]!r} is not a constant of torch")
                return torch_constant
            case "list" | "tuple":
                items = [self.decode(encoded_item) for encoded_item in rest[0]]
                return items if kind == "list" else tuple(items)
            case "slice":
                return slice(*(self.decode(encoded_part) for encoded_part in rest[0]))
            case "dict":
                return {self.decode(key): self.decode(value) for key, value in rest[0]}
            case "tensor":
                return self._tensor(*rest)
        raise WireError(f"unknown kind {kind!r}")

    def _tensor(
        self,
        storage_index: int,
        name: str,
        shape: list[int],
        strides: list[int],
        offset: int,
        requires_grad: bool,  # noqa: FBT001
        device: str,
    ) -> Tensor:
        dtype, content = _DTYPES[name], self._storages[storage_index]
        device = self._device or device
        last = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        is_empty = 0 in shape
        valid = all(size >= 0 for size in shape) and all(step >= 0 for step in strides)
        fits = is_empty or (last + 1) * dtype.itemsize <= len(content)
        if not valid or offset < 0 or not fits:
            raise WireError(f"shape {shape}, strides {strides} do not fit {len(content)} bytes")
        if is_empty:
            tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        else:
            key = storage_index, device
            if key not in self._made:
                self._made[key] = _make_storage(content, device)
            tensor = torch.empty(0, dtype=dtype, device=device)
            tensor = tensor.set_(self._made[key], offset, shape, strides)
        return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def _make_storage(content: bytes, device: str) -> torch.UntypedStorage:
    flat = torch.empty(len(content), dtype=torch.uint8)
    flat.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    return flat.to(device).untyped_storage()
