"""Faults for building: look at them, run them, tune on them. Their figure is not published.

Each is what a wrong kernel or a wrong rewrite would compute, written with plain operators of torch.
"""

from __future__ import annotations

from benchmarks.places.building import (
    attending,
    edits,
    eighth_attention,
    eighth_edits,
    eighth_gradients,
    eighth_layout,
    eighth_losses,
    eighth_products,
    eighth_statistics,
    eighth_values,
    fifth_attention,
    fifth_edits,
    fifth_gradients,
    fifth_layout,
    fifth_losses,
    fifth_products,
    fifth_statistics,
    fifth_values,
    fourth_attention,
    fourth_edits,
    fourth_gradients,
    fourth_layout,
    fourth_losses,
    fourth_products,
    fourth_statistics,
    fourth_values,
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
    seventh_attention,
    seventh_edits,
    seventh_gradients,
    seventh_layout,
    seventh_losses,
    seventh_products,
    seventh_statistics,
    seventh_values,
    sixth_attention,
    sixth_edits,
    sixth_gradients,
    sixth_layout,
    sixth_losses,
    sixth_products,
    sixth_statistics,
    sixth_values,
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
            third_losses, third_gradients,
            fourth_attention, fourth_products, fourth_statistics, fourth_values, fourth_layout,
            fourth_losses, fourth_gradients,
            fifth_attention, fifth_products, fifth_statistics, fifth_values, fifth_layout,
            fifth_losses, fifth_gradients,
            sixth_attention, sixth_products, sixth_statistics, sixth_values, sixth_layout,
            sixth_losses, sixth_gradients,
            seventh_attention, seventh_products, seventh_statistics, seventh_values,
            seventh_layout, seventh_losses, seventh_gradients,
            eighth_attention, eighth_products, eighth_statistics, eighth_values, eighth_layout,
            eighth_losses, eighth_gradients)  # fmt: skip
FAULTS = Catalogue()
for _family in FAMILIES:
    FAULTS.update(_family.FAULTS)
_EDITED = (edits, seen_edits, third_edits, fourth_edits, fifth_edits, sixth_edits, seventh_edits,
           eighth_edits)  # fmt: skip
EDITS = {name: one for home in _EDITED for name, one in home.EDITS.items()}
KERNEL_EDITS = {name: one for home in _EDITED for name, one in home.KERNEL_EDITS.items()}
TRITON_EDITS = {name: one for home in _EDITED for name, one in home.TRITON_EDITS.items()}
