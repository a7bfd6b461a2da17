"""Memory: how much is free on a device, and which errors say that there was not enough."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pathlib import Path

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "bytes": 1}
# The words of torch's allocators: "Tried to allocate 2.00 GiB", "you tried to allocate 8 bytes".
_TRIED = re.compile(r"[Tt]ried to allocate ([0-9.]+) ?(B|KiB|MiB|GiB|bytes)")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, says that memory ran out."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        # The allocator of the CPU raises a plain RuntimeError.
        if isinstance(error, RuntimeError) and "DefaultCPUAllocator: " in str(error):
            return True
        error = error.__cause__
    return False


def bytes_asked(error: BaseException | None) -> int | None:
    """The size of the allocation that failed, if the error names it."""
    while error is not None:
        found = _TRIED.search(str(error))
        if found is not None:
            return int(float(found[1]) * _UNITS[found[2]])
        error = error.__cause__
    return None


def free_bytes(device: torch.device) -> int | None:
    """The memory that new tensors can use on a device, or None if that is unknown."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + held)
    return _available_on_host() if device.type == "cpu" else None


def _available_on_host(table: Path | None = None) -> int | None:
    """What the kernel estimates to be available without swapping."""
    from pathlib import Path

    try:
        lines = (table or Path("/proc/meminfo")).read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return None
    sizes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(sizes[0]) * 1024 if sizes else None
