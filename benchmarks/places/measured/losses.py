"""Faults for measuring: losses."""

from __future__ import annotations

from benchmarks.places.calls import Catalogue

FAULTS = Catalogue()
