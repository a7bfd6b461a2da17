"""Faults for measuring: backward operators."""

from __future__ import annotations

from benchmarks.places.calls import Catalogue

FAULTS = Catalogue()
