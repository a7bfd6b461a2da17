"""Faults for building: look at them, run them, tune on them. Their figure is not published.

Each is what a wrong kernel or a wrong rewrite would compute, written with plain operators of torch.
"""

from __future__ import annotations

from benchmarks.places.building import (
    attending,
    edits,
    gradients,
    losses,
    moving,
    norms,
    pointwise,
    products,
    seen_edits,
    seen_gradients,
    seen_kernels,
    seen_values,
    third_attention,
    third_edits,
    third_gradients,
    third_layout,
    third_losses,
    third_products,
    third_statistics,
    third_values,
)
from benchmarks.places.calls import Catalogue

__all__ = ["EDITS", "FAULTS", "KERNEL_EDITS", "TRITON_EDITS"]

FAMILIES = (products, attending, norms, pointwise, moving, losses, gradients,
            seen_kernels, seen_values, seen_gradients,
            third_attention, third_products, third_statistics, third_values, third_layout,
            third_losses, third_gradients)  # fmt: skip
FAULTS = Catalogue()
for _family in FAMILIES:
    FAULTS.update(_family.FAULTS)
EDITS = {**edits.EDITS, **seen_edits.EDITS, **third_edits.EDITS}
KERNEL_EDITS = {**edits.KERNEL_EDITS, **seen_edits.KERNEL_EDITS, **third_edits.KERNEL_EDITS}
TRITON_EDITS = {**edits.TRITON_EDITS, **seen_edits.TRITON_EDITS, **third_edits.TRITON_EDITS}
