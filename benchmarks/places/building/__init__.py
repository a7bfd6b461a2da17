"""Faults for building: look at them, run them, tune on them. Their figure is not published.

Each is what a wrong kernel or a wrong rewrite would compute, written with plain operators of torch.
"""

from __future__ import annotations

from benchmarks.places.building import (
    attending,
    gradients,
    losses,
    moving,
    norms,
    pointwise,
    products,
)
from benchmarks.places.building.edits import EDITS, KERNEL_EDITS, TRITON_EDITS
from benchmarks.places.calls import Catalogue

__all__ = ["EDITS", "FAULTS", "KERNEL_EDITS", "TRITON_EDITS"]

FAMILIES = (products, attending, norms, pointwise, moving, losses, gradients)
FAULTS = Catalogue()
for _family in FAMILIES:
    FAULTS.update(_family.FAULTS)
