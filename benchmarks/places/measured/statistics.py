"""Faults for measuring: norms, statistics, running sums, orders."""

from __future__ import annotations

from benchmarks.places.calls import Catalogue

FAULTS = Catalogue()
