"""Faults for the published figure only. Nobody looks at them, or at their rows, while building.

Each is what a wrong kernel or a wrong rewrite would compute. None of them is in `building`.
"""

from __future__ import annotations

from benchmarks.places.calls import Catalogue, Edit

FAULTS = Catalogue()
EDITS: dict[str, Edit] = {}
KERNEL_EDITS: dict[str, Edit] = {}
TRITON_EDITS: dict[str, Edit] = {}
