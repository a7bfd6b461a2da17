"""What programs leave behind in torch that runs with everything later: modes, hooks, kernels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.modules.module as _modules
from torch import library
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import _pop_mode as _pop_function_mode
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode

# The kernels that eager programs run. Importing parts of torch registers others: for meta tensors.
_EAGER_KEYS = ("/CPU", "/CUDA", "/Autograd", "/AutogradCPU", "/AutogradCUDA")


def mode_depths() -> tuple[int, int]:
    """The number of dispatch modes and of function modes of this thread."""
    return torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()


def close_modes(depths: tuple[int, int]) -> None:
    """End the innermost modes, until as many are left."""
    while mode_depths()[0] > depths[0]:
        _pop_dispatch_mode()
    while mode_depths()[1] > depths[1]:
        _pop_function_mode()


def module_hooks() -> dict[str, dict[Any, Any]]:
    """The hooks that all modules call, by their kind: copies."""
    kinds = {name: one for name, one in vars(_modules).items() if name.startswith("_global_")}
    return {name: dict(one) for name, one in kinds.items() if isinstance(one, dict)}


def restore_module_hooks(hooks: dict[str, dict[Any, Any]]) -> None:
    """Make these the hooks that all modules call."""
    for name, kept in hooks.items():
        now = vars(_modules)[name]
        now.clear()
        now.update(kept)


def replaced_kernels() -> frozenset[str]:
    """The kernels of torch's own operators that `torch.library` has replaced: `sign/CPU`."""
    return frozenset(
        name.removeprefix("aten/")
        for name in library._impls
        if name.startswith("aten/") and name.endswith(_EAGER_KEYS)
    )


def loaded_operators() -> list[tuple[Any, Any]]:
    """The overloads of torch's own operators that were used so far, each with what it calls."""
    packets = [one for one in vars(torch.ops.aten).values() if isinstance(one, OpOverloadPacket)]
    overloads = [one for packet in packets for one in vars(packet).values()]
    return [(one, one._op) for one in overloads if isinstance(one, OpOverload)]


def put_back_operators(known: list[tuple[Any, Any]]) -> dict[str, str]:
    """Restore what these overloads call; returns name -> `replaced`."""
    changed = [(overload, call) for overload, call in known if overload._op is not call]
    for overload, call in changed:
        overload._op = call
    return {f"torch.ops.{overload}": "replaced" for overload, _ in changed}
