"""Memory that shows what a kernel does with it: poisoned, and beside the inputs."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.operators import DispatchMode
from paritas.execution.observation import input_tensors
from paritas.kernels.wire import bytes_of

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.execution.subjects import Inputs

# Two patterns, so that a value that happens to be right under one is wrong under the other.
PATTERNS = (float("nan"), -1.2345e30)
MOST_NAMES = 200


def poisoned(tensor: Tensor, pattern: int) -> Tensor:
    """Fill a tensor with a value that no kernel would compute."""
    if tensor.numel() == 0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        with contextlib.suppress(RuntimeError, NotImplementedError):
            info = torch.finfo(tensor.dtype)
            value = PATTERNS[pattern]
            return tensor.fill_(value if value != value else max(value, -info.max / 4))  # noqa: PLR0124
    with contextlib.suppress(RuntimeError, NotImplementedError):
        tensor.view(torch.uint8).fill_(0xA5 if pattern else 0x5A)
    return tensor


def poison_free_memory(sizes: set[int], device: str, pattern: int) -> None:
    """Leave poison in blocks of these sizes, which an allocator is likely to hand out again."""
    held = []
    for size in sorted(sizes)[-16:]:
        for _ in range(4):
            block = torch.empty((size + 7) // 8, dtype=torch.float64, device=device)
            held.append(poisoned(block, pattern))
    del held


class CallWatch(DispatchMode):
    """Poisons what `torch.empty` and its like return, and records which operators are called."""

    def __init__(self, pattern: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pattern = pattern
        self.names: dict[str, None] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator."""
        name = str(func)
        if len(self.names) < MOST_NAMES:
            self.names[name] = None
        result = func(*args, **(kwargs or {}))
        if "empty" in name and isinstance(result, torch.Tensor) and name.startswith("aten."):
            poisoned(result, self.pattern)
        return result


# --- Beside the inputs ----------------------------------------------------------------------------


class MemoryBeside:
    """The memory around inputs that are parts of larger ones: kernels must not write there."""

    def __init__(self, inputs: Inputs) -> None:
        storages: dict[int, list[tuple[str, Tensor]]] = {}
        for path, one in input_tensors(inputs):
            if one.layout is torch.strided and one.numel():
                storages.setdefault(one.untyped_storage().data_ptr(), []).append((path, one))
        self._parts = [
            (views, bytes_of(views[0][1]).clone())
            for views in storages.values()
            if views[0][1].untyped_storage().nbytes() > sum(one.nbytes for _, one in views)
        ]

    def changed(self) -> list[str]:
        """The inputs beside which something was written."""
        found = []
        for views, expected in self._parts:
            for _, one in views:  # what was written to the inputs themselves is another matter
                place = torch.empty(0, dtype=one.dtype, device=one.device)
                place.set_(
                    expected.untyped_storage(), one.storage_offset(), one.shape, one.stride()
                )
                _unrepeated(place).copy_(_unrepeated(one.detach()))
            if not torch.equal(expected, bytes_of(views[0][1])):
                found.append(views[0][0])
        return found


def _unrepeated(tensor: Tensor) -> Tensor:
    """One of the elements of an expanded dimension, which share memory."""
    for dim, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and not step:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
