"""Faults for building: look at them, run them, tune on them. Their figure is not published.

Each is what a wrong kernel or a wrong rewrite would compute, written with plain operators of torch.
A set that was measured and looked at lies here under its number; each file is found by itself.
"""

from __future__ import annotations

import importlib
import pkgutil

from benchmarks.places.calls import Catalogue

__all__ = ["EDITS", "FAULTS", "KERNEL_EDITS", "TRITON_EDITS"]

FILES = [
    importlib.import_module(f"{__name__}.{one.name}") for one in pkgutil.iter_modules(__path__)
]
FAULTS = Catalogue()
EDITS, KERNEL_EDITS, TRITON_EDITS = {}, {}, {}
for _file in FILES:
    if hasattr(_file, "FAULTS"):
        FAULTS.update(_file.FAULTS)
    else:
        EDITS |= _file.EDITS
        KERNEL_EDITS |= _file.KERNEL_EDITS
        TRITON_EDITS |= _file.TRITON_EDITS
