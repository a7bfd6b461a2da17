"""Faults for measuring: functions of single elements, sums, products and quotients of two."""

from __future__ import annotations

from benchmarks.places.calls import Catalogue

FAULTS = Catalogue()
