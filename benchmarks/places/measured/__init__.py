"""Faults for the published figure only. Nobody looks at them, or at their rows, while building.

Each is what a wrong kernel or a wrong rewrite would compute; part of them follow reported bugs of
real compilers, kernels and ports. None of them is in `building/`, under this name or another.
"""

from __future__ import annotations

from benchmarks.places.calls import Catalogue, Edit

__all__ = ["EDITS", "FAULTS", "KERNEL_EDITS", "TRITON_EDITS"]

FAULTS = Catalogue()
EDITS: dict[str, Edit] = {}
KERNEL_EDITS: dict[str, Edit] = {}
TRITON_EDITS: dict[str, Edit] = {}
