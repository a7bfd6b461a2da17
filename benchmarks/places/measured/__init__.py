"""Faults for the published figure only. Nobody looks at them, or at their rows, while building.

Each is what a wrong kernel or a wrong rewrite would compute; part of them follow reported bugs of
real compilers, kernels and ports. None of them is in `building/`, under this name or another.
"""

from __future__ import annotations

from benchmarks.places.sets import FaultSet

__all__ = ["EDITS", "FAULTS", "FILES", "KERNEL_EDITS", "TRITON_EDITS"]

_SET = FaultSet.of(__name__, __path__)
FILES, FAULTS = _SET.files, _SET.faults
EDITS, KERNEL_EDITS, TRITON_EDITS = _SET.edits, _SET.kernel_edits, _SET.triton_edits
