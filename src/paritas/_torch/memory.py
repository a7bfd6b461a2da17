"""Memory: how much is free, errors that say there was not enough, and copies that share it."""

from __future__ import annotations

import copy
import ctypes
import re
import sys
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)

CONTAINER = Path("/sys/fs/cgroup")
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
        error = _cause_of(error)
    return False


def bytes_asked(error: BaseException | None) -> int | None:
    """The size of the allocation that failed, if the error names it."""
    while error is not None:
        found = _TRIED.search(str(error))
        if found is not None:
            return int(float(found[1]) * _UNITS[found[2]])
        error = _cause_of(error)
    return None


def _cause_of(error: BaseException) -> BaseException | None:
    """What caused an error; Inductor raises its own from nothing, with the cause inside."""
    inside = getattr(error, "inner_exception", None)
    return inside if isinstance(inside, BaseException) else error.__cause__


def free_bytes(device: torch.device) -> int | None:
    """The memory that new tensors can use on a device, or None if that is unknown."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + held)
    return _available_on_host() if device.type == "cpu" else None


def _available_on_host() -> int | None:
    """What a process can still use: the kernel's estimate, within the limits set for it."""
    known = (_available(Path("/proc/meminfo")), _left_to_container(CONTAINER), _left_to_process())
    return min((left for left in known if left is not None), default=None)


def _available(table: Path) -> int | None:
    """What the kernel estimates to be available without swapping."""
    try:
        lines = table.read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return None
    sizes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(sizes[0]) * 1024 if sizes else None


def _left_to_container(folder: Path) -> int | None:
    """What is left of the limit of the container (cgroup), if it has one."""
    try:
        most, used = (
            (folder / name).read_text("ascii") for name in ("memory.max", "memory.current")
        )
        lines = (folder / "memory.stat").read_text("ascii").splitlines()
        # Files in the cache count as used, and make room for anything else.
        cached = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
        return max(0, int(most) - int(used) + cached)
    except (OSError, ValueError):  # not Linux, another version of cgroups, or "max": no limit
        return None


def _left_to_process() -> int | None:
    """What is left of the limit of the address space (`ulimit -v`), if there is one."""
    try:
        import resource

        most = resource.getrlimit(resource.RLIMIT_AS)[0]
        if most == resource.RLIM_INFINITY:
            return None
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        return max(0, most - pages * resource.getpagesize())
    except (ImportError, OSError, ValueError):  # not Linux
        return None


# --- Copies that share memory until one of them is written to -------------------------------------


def copy_on_write(module: M) -> M:
    """A deep copy whose parameters take no memory until they, or the originals, change.

    Torch copies the memory when one side asks to write to it. A parameter for which it cannot do
    this is copied at once, and so is everything else.
    """
    lazy = ((id(one), _lazy_clone(one)) for one in module.parameters())
    memo: dict[int, Any] = {key: made for key, made in lazy if made is not None}
    return copy.deepcopy(module, memo)


def is_shared(tensor: Tensor) -> bool:
    """Whether the memory of a tensor is copied before it is written to."""
    bindings: Any = torch._C
    return bool(bindings._is_cow_tensor(tensor))


def _lazy_clone(parameter: nn.Parameter) -> nn.Parameter | None:
    """A copy that shares memory; None if torch cannot share it, such as that of a NumPy array."""
    if type(parameter) is not nn.Parameter or parameter.layout != torch.strided:
        return None
    size = parameter.numel() * parameter.element_size()
    if parameter.is_meta or size != parameter.untyped_storage().nbytes():
        return None  # of a part, all of the memory would be copied
    try:
        made = torch._lazy_clone(parameter.detach())
    except (AttributeError, RuntimeError):
        return None
    return nn.Parameter(made, requires_grad=parameter.requires_grad)


def return_free_memory() -> None:
    """Give the system back what the C library keeps of freed memory, which is much after threads.

    Nothing happens where the C library is not glibc.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
