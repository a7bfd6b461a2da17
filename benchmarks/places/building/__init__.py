"""Faults for building: look at them, run them, tune on them. Their figure is not published.

Each is what a wrong kernel or a wrong rewrite would compute, written with plain operators of torch.
A set that was measured and looked at lies here under its number; each file is found by itself.
"""

from __future__ import annotations

from benchmarks.places.sets import FaultSet

__all__ = ["EDITS", "FAULTS", "FILES", "KERNEL_EDITS", "TRITON_EDITS"]

_SET = FaultSet.of(__name__, __path__)
FILES, FAULTS = _SET.files, _SET.faults
EDITS, KERNEL_EDITS, TRITON_EDITS = _SET.edits, _SET.kernel_edits, _SET.triton_edits
