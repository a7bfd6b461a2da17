"""Faults for measuring: attention, softmax, masks, positions."""

from __future__ import annotations

from benchmarks.places.calls import Catalogue

FAULTS = Catalogue()
