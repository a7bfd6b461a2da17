"""Faults for measuring: products, convolutions, pooling, resizing."""

from __future__ import annotations

from benchmarks.places.calls import Catalogue

FAULTS = Catalogue()
