"""Faults for measuring: what moves values, tables, indices."""

from __future__ import annotations

from benchmarks.places.calls import Catalogue

FAULTS = Catalogue()
