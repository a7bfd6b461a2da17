"""Where a check runs: a device that somebody asked for by name, looked at before the work."""

from __future__ import annotations

import torch

from paritas.errors import UsageError

__all__ = ["usable_device"]


def usable_device(name: str | torch.device, said: str = "--device ") -> torch.device:
    """A device on which a tensor with values can be made.

    Args:
        name: `cuda`, `cuda:1`.
        said: how the user said it, for the message: an option, or `device=` in Python.

    Raises:
        UsageError: it cannot be used; the message says why.
    """
    shown = f"{said}{str(name)!r}"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = str(error).splitlines()[0][:160]
        raise UsageError(f"{shown} cannot be used: {reason}") from error
    if device.type == "meta":
        raise UsageError(f"{shown} holds no values, so there is nothing to compare")
    return device
