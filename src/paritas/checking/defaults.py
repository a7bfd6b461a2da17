"""Lifted runs and torch's default dtype, which is one for all threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch

from paritas._torch.default_dtypes import default_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas._torch.lifting import LiftMode

__all__ = ["WideDefault"]

_Seen = TypeVar("_Seen")


class WideDefault:
    """Float64 for whatever one program makes without stating a dtype.

    Under a lifting mode the mode sees to it, and other threads notice nothing. A program that asks
    the default where no mode looks (`torch.tensor(0.1)`, an operator from elsewhere) is run again
    under another default, as is from then on whatever it runs; without a mode, all programs are.
    """

    def __init__(self) -> None:
        """Nothing is known of the program yet."""
        self.is_asked = False

    def run(self, mode: LiftMode | None, once: Callable[[], _Seen]) -> _Seen:
        """What `once` gives, which can be called twice and runs the program under `mode`."""
        if mode is not None and mode.widths and not self.is_asked:
            seen = once()
            if not mode.asked_default:
                return seen
            self.is_asked = True
            mode.start_over()
        with default_dtype(torch.float64):
            return once()
