"""The weights in a `.pt2` archive: plain bytes with a description beside them."""

from __future__ import annotations

import io
import math
import pickle
import sys
import zipfile
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from paritas.errors import UsageError
from paritas.graphs.reading.exported_arguments import DTYPES
from paritas.graphs.reading.exported_schema import Payload, Payloads, TensorMeta, decode
from paritas.graphs.reading.exported_symbols import Symbols, Unknown

if TYPE_CHECKING:
    from paritas.graphs.reading.archives import Archive

__all__ = ["read_state"]


def read_state(archive: Archive, wanted: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Parameters, buffers and constants, as far as the archive holds them as plain tensors.

    Args:
        archive: where they are.
        wanted: name in the graph by name in the model.

    Raises:
        UsageError: a tensor's bytes are missing, or do not fit what is said of them.
    """
    try:
        with archive.kept_open():
            _check_order_of_bytes(archive)
            return _read_folders(archive, wanted)
    except (OSError, zipfile.BadZipFile) as error:
        raise UsageError(f"{archive.path} was changed while it was read: {error}") from None


def _read_folders(archive: Archive, wanted: Mapping[str, str]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for folder in ("weights", "constants"):
        name = f"data/{folder}/{archive.model}_{folder}_config.json"
        if name not in archive:
            continue
        payloads = decode(archive.text(name), Payloads, f"{archive.path}: {name}").config
        read: dict[str, bytearray] = {}  # tied weights share their bytes, as they did
        for key, payload in payloads.items():
            if key not in wanted:
                continue
            tensor = _tensor(archive, f"data/{folder}/{payload.path_name}", payload, read)
            if tensor is not None:
                found[wanted[key]] = tensor
    return found


def _tensor(
    archive: Archive, member: str, payload: Payload, read: dict[str, bytearray]
) -> torch.Tensor | None:
    meta = payload.tensor_meta
    if meta is None:
        return None  # no tensor, but an object that only its own code can make
    if payload.use_pickle:
        return _unpickled(archive.read(member))
    if member not in read:
        read[member] = bytearray(archive.read(member))
    try:
        return _strided(read[member], meta)
    except (Unknown, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise UsageError(
            f"{archive.path}: the bytes of {member} do not fit what is said of them ({error})"
        ) from None


def _strided(raw: bytearray, meta: TensorMeta) -> torch.Tensor:
    symbols = Symbols({})
    dtype = DTYPES[meta.dtype]
    shape = [symbols.size(one) for one in meta.sizes]
    stride = [symbols.size(one) for one in meta.strides]
    offset = symbols.size(meta.storage_offset)
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if (last + 1) * dtype.itemsize > len(raw):
        raise ValueError(f"{len(raw)} bytes are too few for {shape}")
    usable = len(raw) // dtype.itemsize * dtype.itemsize
    flat = torch.frombuffer(raw, dtype=torch.uint8)[:usable].view(dtype)
    return flat.as_strided(shape, stride, offset)


def _unpickled(raw: bytes) -> torch.Tensor | None:
    """A tensor of a class of its own, if torch can make it without running code of the file."""
    try:
        found = torch.load(io.BytesIO(raw), weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError):
        return None
    return found if type(found) in {torch.Tensor, torch.nn.Parameter} else None


def _check_order_of_bytes(archive: Archive) -> None:
    found = archive.text("byteorder").decode("ascii", "replace") if "byteorder" in archive else ""
    if found and found != sys.byteorder:
        raise UsageError(
            f"{archive.path} was written on a {found!r:.20}-endian machine, and this one is "
            f"{sys.byteorder}-endian: save it again here"
        )
