"""Copies of values as they were at one moment, taken with as little delay as can be."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from paritas.dumps.dtypes import as_stored, digest
from paritas.dumps.records import TensorFacts

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from paritas.dumps.records import Placement

__all__ = ["Kind", "Pool", "Snapshot", "kind_of"]


class Kind(NamedTuple):
    """What many tensors of a program have in common, found out once.

    Attributes:
        facts: of each of them.
        differs: by what tensors of the same bytes may differ. What is repeated is stored once, and
            its bytes do not tell how often.
        on_host: whether they are where hashing them is cheap.
        simple: whether they are stored as they lie in memory, as far as the facts tell.
        extent: bytes of memory from its beginning to behind the last value, if they are simple.
    """

    facts: TensorFacts
    differs: Hashable
    on_host: bool
    simple: bool
    extent: int


def kind_of(tensor: Tensor) -> Kind:
    """What is to be known of a tensor besides its values."""
    is_strided = tensor.layout is torch.strided
    return _kind(
        tensor.dtype,
        tensor.shape,
        tensor.stride() if is_strided else None,
        tensor.storage_offset() if is_strided else 0,
        tensor.device,
        tensor.requires_grad,
    )


@functools.lru_cache(maxsize=1 << 14)
def _kind(
    dtype: torch.dtype,
    shape: torch.Size,
    stride: tuple[int, ...] | None,
    offset: int,
    device: torch.device,
    requires_grad: bool,  # noqa: FBT001  (a key of the cache)
) -> Kind:
    facts = TensorFacts(
        dtype=str(dtype).removeprefix("torch."),
        shape=tuple(shape),
        stride=tuple(stride or ()),
        offset=int(offset),
        device=str(device),
        requires_grad=requires_grad,
    )
    simple = dtype in _QUICK and device.type == "cpu" and _is_row_major(facts.shape, stride)
    return Kind(
        facts,
        (facts.dtype, facts.shape if 0 in facts.stride else None),
        device.type != "cuda",
        simple,
        (facts.offset + math.prod(facts.shape)) * dtype.itemsize,
    )


def _is_row_major(shape: tuple[int, ...], stride: tuple[int, ...] | None) -> bool:
    """Whether values lie in order without gaps, and are some."""
    if stride is None or 0 in shape or 0 in stride:
        return False
    expected = 1
    for extent, step in zip(reversed(shape), reversed(stride), strict=True):
        if extent != 1 and step != expected:
            return False
        expected *= extent
    return True


class Pool:
    """Memory of copies that were written, for the next ones of the same size.

    The system hands out fresh memory page by page, at the first touch of each: that takes longer
    than the copying.
    """

    def __init__(self, most_bytes: int) -> None:
        """Keep so many bytes for later, at most."""
        self._most = most_bytes
        self._bytes = 0
        self._free: dict[tuple[str, tuple[int, ...]], list[Tensor]] = {}

    def copy(self, tensor: Tensor, kind: Kind) -> Tensor:
        """Copy a tensor of a simple kind."""
        free = self._free.get((kind.facts.dtype, kind.facts.shape))
        try:
            room = free.pop() if free else None
        except IndexError:  # another thread was quicker
            room = None
        if room is None:
            return tensor.clone()
        self._bytes -= room.nbytes
        return room.copy_(tensor)

    def give(self, room: Tensor, kind: Kind) -> None:
        """Take the memory of a copy back."""
        if self._bytes + room.nbytes > self._most:
            # Sizes may have changed for good: what fits nobody would stay for ever.
            self._free = {}
            self._bytes = 0
            if room.nbytes > self._most:
                return
        self._bytes += room.nbytes
        self._free.setdefault((kind.facts.dtype, kind.facts.shape), []).append(room)


class Snapshot:
    """The values of a tensor at one moment, on their way to the host.

    A CPU tensor is hashed where it lies, and copied only if its bytes are not known yet. One on a
    GPU is copied there, so that the program may go on and write to it, and then brought over by a
    stream of its own.

    Attributes:
        nbytes: what it holds in the host's memory.
        digest: hash of the bytes; of a GPU's tensor not before `wait`.
    """

    # Of most values nothing but these two is set: their bytes were met before.
    digest = ""
    key: Hashable = None
    nbytes = 0
    _host: Tensor | None = None
    _arrived: Any = None
    _pool: Pool | None = None

    def __init__(
        self,
        tensor: Tensor,
        kind: Kind,
        part: Placement | None,
        known: set[Hashable],
        pool: Pool,
    ) -> None:
        """Take it, unless it is known.

        Args:
            tensor: detached.
            kind: what `kind_of` says of it.
            part: of which whole it is a part, and where.
            known: keys of what need not be copied again; it is added to.
            pool: memory for the copy.
        """
        if not kind.on_host:
            self._kind, self._part = kind, part
            self._fetch(tensor)
            return
        simple = kind.simple and _is_as_it_lies(tensor, kind)
        stored = tensor if simple else as_stored(tensor.cpu())
        self.digest = hashed = digest(stored)
        self.key = key = (hashed, kind.differs, part)
        if key in known:
            return
        known.add(key)
        if simple:
            self._host, self._kind, self._pool = pool.copy(tensor, kind), kind, pool
        else:
            self._host = _copied(stored) if _shares(stored, tensor) else stored
        self.nbytes = self._host.nbytes

    def wait(self) -> Tensor | None:
        """The values on the host; None where they were known."""
        if self._arrived is not None and self._host is not None:
            self._arrived.synchronize()
            self._arrived = None
            self.digest = digest(self._host)
            self.key = (self.digest, self._kind.differs, self._part)
        return self._host

    def release(self) -> None:
        """Give the memory back, once nobody looks at the values any more."""
        if self._pool is not None and self._host is not None:
            self._pool.give(self._host, self._kind)
        self._host = self._pool = None

    def _fetch(self, tensor: Tensor) -> None:
        stored = as_stored(tensor)
        if _shares(stored, tensor):
            stored = _copied(stored)
        stream = _copy_stream(stored.device)
        stream.wait_stream(torch.cuda.current_stream(stored.device))
        with torch.cuda.stream(stream):
            self._host = torch.empty(stored.shape, dtype=stored.dtype, pin_memory=True)
            self._host.copy_(stored, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(stream)
        stored.record_stream(stream)
        self.nbytes = self._host.nbytes


def _is_as_it_lies(tensor: Tensor, kind: Kind) -> bool:
    """Whether a tensor of a simple kind has its values in its own memory."""
    return (
        type(tensor) is torch.Tensor
        and not tensor.is_neg()
        # Memory may have been freed under a tensor that is not in use.
        and tensor.untyped_storage().nbytes() >= kind.extent
    )


_QUICK = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64})


def _copied(stored: Tensor) -> Tensor:
    """A copy, byte by byte: torch copies not every dtype, and makes ones of a bool's odd bytes."""
    # Strided anew: what was expanded once may say that its one value is 0 elements from the next.
    flat = stored.as_strided((stored.numel(),), (1,)).view(torch.uint8).clone()
    return flat.view(stored.dtype).view(stored.shape)


def _shares(stored: Tensor, tensor: Tensor) -> bool:
    return stored.data_ptr() == tensor.data_ptr()


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
