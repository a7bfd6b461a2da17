"""A closer look at one pair of tensors: where they differ, by how many ulp, what kind of wrong."""

from __future__ import annotations

import msgspec

from paritas.core.results.findings import (
    Diagnosis,
)


class WorstElement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An element that is far off; complex values are given by their modulus."""

    index: tuple[int, ...]
    my: float
    golden: float
    ulps: float | None = None


class HeatMap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where in a tensor the mismatches are, over its two most informative axes.

    Attributes:
        axes: the vertical and the horizontal axis; a single one if the tensor has only one.
        extents: their lengths.
        cells: row by row, the largest |my - golden| in each cell, over the largest of all.
        counts: row by row, the number of elements that differ in each cell.
    """

    axes: tuple[int, ...]
    extents: tuple[int, ...]
    cells: tuple[tuple[float, ...], ...]
    counts: tuple[tuple[int, ...], ...]


class Detail(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A closer look at one pair.

    Attributes:
        ulps: pairs (k, number of elements that differ by 2^k to 2^(k+1) ulp), ascending; k = -1 for
            equal elements. Empty if the dtypes have no common ulp.
        worst: the elements with the largest errors, worst first.
        region: the smallest box of indices that holds all mismatches, as begin and end per axis.
        diagnosis: what kind of wrong it is, for a pair that fails.
    """

    heat: HeatMap | None = None
    ulps: tuple[tuple[int, int], ...] = ()
    worst: tuple[WorstElement, ...] = ()
    region: tuple[tuple[int, int], ...] = ()
    diagnosis: Diagnosis | None = None
