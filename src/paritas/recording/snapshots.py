"""Copies of values as they were at one moment, taken with as little delay as can be."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from paritas.dumps.dtypes import as_stored, digest

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

__all__ = ["Snapshot"]


class Snapshot:
    """The values of a tensor at one moment, on their way to the host.

    A CPU tensor is hashed where it lies, and copied only if its bytes are not known yet. One on a
    GPU is copied there, so that the program may go on and write to it, and then brought over by a
    stream of its own.

    Attributes:
        nbytes: what it holds in the host's memory.
        digest: hash of the bytes; of a GPU's tensor not before `wait`.
    """

    __slots__ = ("_arrived", "_host", "_kind", "digest", "nbytes")

    def __init__(self, tensor: Tensor, kind: Hashable, known: set[Hashable]) -> None:
        """Take it, unless it is known.

        Args:
            tensor: detached.
            kind: by what else equal bytes may differ.
            known: keys of what need not be copied again; it is added to.
        """
        self.digest = ""
        self.nbytes = 0
        self._kind = kind
        self._host: Tensor | None = None
        self._arrived: Any = None
        if tensor.is_cuda:
            self._fetch(tensor)
            return
        stored = tensor if _is_stored(tensor) else as_stored(tensor.cpu())
        self.digest = digest(stored)
        key = (self.digest, kind)
        if key in known:
            return
        known.add(key)
        self._host = stored.clone() if _shares(stored, tensor) else stored
        self.nbytes = self._host.nbytes

    @property
    def key(self) -> Hashable:
        """What two values have in common that need to be looked at but once."""
        return (self.digest, self._kind)

    def wait(self) -> Tensor | None:
        """The values on the host; None where they were known."""
        if self._arrived is not None and self._host is not None:
            self._arrived.synchronize()
            self._arrived = None
            self.digest = digest(self._host)
        return self._host

    def _fetch(self, tensor: Tensor) -> None:
        stored = as_stored(tensor)
        if _shares(stored, tensor):
            stored = stored.clone()
        stream = _copy_stream(stored.device)
        stream.wait_stream(torch.cuda.current_stream(stored.device))
        with torch.cuda.stream(stream):
            self._host = torch.empty(stored.shape, dtype=stored.dtype, pin_memory=True)
            self._host.copy_(stored, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(stream)
        stored.record_stream(stream)
        self.nbytes = self._host.nbytes


def _is_stored(tensor: Tensor) -> bool:
    """Whether a CPU tensor certainly is as it is stored: most are, and this is soon known."""
    return (
        tensor.dtype in _QUICK
        and type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not tensor.is_neg()
        # Memory may have been freed under a tensor that is not in use.
        and tensor.untyped_storage().nbytes() >= tensor.nbytes > 0
        and 0 not in tensor.stride()
    )


_QUICK = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool})


def _shares(stored: Tensor, tensor: Tensor) -> bool:
    return stored.data_ptr() == tensor.data_ptr()


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
