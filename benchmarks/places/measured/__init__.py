"""Faults for the published figure only. Nobody looks at them, or at their rows, while building.

Each is what a wrong kernel or a wrong rewrite would compute; part of them follow reported bugs of
real compilers, kernels and ports. None of them is in `building/`, under this name or another.
"""

from __future__ import annotations

from benchmarks.places.calls import Catalogue
from benchmarks.places.measured import (
    attention,
    gradients,
    layout,
    losses,
    products,
    statistics,
    values,
)
from benchmarks.places.measured.edits import EDITS, KERNEL_EDITS, TRITON_EDITS

__all__ = ["EDITS", "FAULTS", "KERNEL_EDITS", "TRITON_EDITS"]

FAMILIES = (attention, products, statistics, values, layout, losses, gradients)
FAULTS = Catalogue()
for _family in FAMILIES:
    FAULTS.update(_family.FAULTS)
