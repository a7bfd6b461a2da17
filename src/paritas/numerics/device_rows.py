# mypy: ignore-errors
"""Triton kernels that prepare and finish what `device_kernels.tally` does; see there.

They look at few elements, or at few rows of figures, and may take their time.
"""

# ruff: noqa: PLR0913, PLR0917, PLR2004  (the names and lists of arguments of kernels)
# ruff: noqa: ANN001, ANN201, ANN202, PLR0124, PLR0915

from __future__ import annotations

import triton
import triton.language as tl

from paritas.numerics.device_kernels import (
    MAX_ABS_COLUMN,
    NOWHERE,
    QUOTIENT_COLUMN,
    REDO_COLUMN,
    SUM_COLUMNS,
    SUMS,
    ULP_COLUMN,
    UNLIKE_COLUMN,
    WHERE_COLUMN,
)
from paritas.numerics.device_scans import steps_apart

# What `finish` and `refine` give.
RESULTS = (
    *SUMS,
    *("max_abs", "max_rel", "max_ulp", "where", "reference", "candidate", "quotient", "row"),
)
_FOUND_REL: tl.constexpr = tl.constexpr(19)
_FOUND_WHERE: tl.constexpr = tl.constexpr(21)
_FOUND_QUOTIENT: tl.constexpr = tl.constexpr(24)
_FOUND_ROW: tl.constexpr = tl.constexpr(25)
# A median so many times the spread about it is shifted away before anything is squared.
_FAR: tl.constexpr = tl.constexpr(4.0)
# Squares further apart than this are not added to find the product of their roots.
_UNEVEN: tl.constexpr = tl.constexpr(16.0)
_LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)
_LANES: tl.constexpr = tl.constexpr(1024)


@triton.jit
def _median(x, known, count):
    """The lower median of the known ones."""
    ordered = tl.sort(tl.where(known, x, float("inf")))
    middle = tl.arange(0, _LANES) == tl.maximum(count - 1, 0) // 2
    return tl.sum(tl.where(middle, ordered, 0.0))


@triton.jit(do_not_specialize=["numel", "step", "shift"])
def anchor(r_ptr, c_ptr, anchors, numel, step, shift):
    """A number amid each side's data, whether it is to be subtracted, and whether one was found.

    It is the median of a sample, hence no outlier, and an element, hence a constant side is
    exactly zero relative to it. Near zero it is better left alone: zero costs nothing.
    """
    places = tl.arange(0, _LANES).to(tl.int64) * step
    inside = places < numel
    r = tl.load(r_ptr + places, mask=inside, other=0).to(tl.float32)
    c = tl.load(c_ptr + places, mask=inside, other=0).to(tl.float32)
    known = inside & (tl.abs(r) <= _LARGEST) & (tl.abs(c) <= _LARGEST)
    count = tl.sum(known.to(tl.int32))
    a, b = _median(r, known, count), _median(c, known, count)
    spread_r = _median(tl.abs(r - a), known, count)
    spread_c = _median(tl.abs(c - b), known, count)
    R, C = tl.where(known, r, 0.0).to(tl.float64), tl.where(known, c, 0.0).to(tl.float64)
    rr, cc = tl.sum(R * R), tl.sum(C * C)
    uneven = (rr > _UNEVEN * cc) | (cc > _UNEVEN * rr)
    far = (tl.abs(a) > _FAR * spread_r) | (tl.abs(b) > _FAR * spread_c)
    shifted = uneven | far | (shift != 0)
    found = count > 0
    tl.store(anchors, tl.where(found & shifted, a, 0.0).to(tl.float64))
    tl.store(anchors + 1, tl.where(found & shifted, b, 0.0).to(tl.float64))
    tl.store(anchors + 2, shifted.to(tl.float64))
    tl.store(anchors + 3, found.to(tl.float64))


@triton.jit
def _bits(x, KIND: tl.constexpr):
    """The bits of a float, leading a word of 32."""
    if KIND == "fp32":
        found = x.to(tl.int32, bitcast=True)
    else:
        found = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return found


@triton.jit
def _kind(x):
    """0 of finite numbers, 1 of NaN, 2 and 3 of the infinities."""
    kind = tl.where(x == float("inf"), 2, 0) + tl.where(x == float("-inf"), 3, 0)
    return tl.where(x != x, 1, kind)


@triton.jit
def _span(row, span, covered, numel):
    """Where a row starts and stops; the last one has what the spans do not cover."""
    start = tl.minimum(row.to(tl.int64) * span, covered)
    return start, tl.where(start < covered, tl.minimum(start + span, covered), numel)


@triton.jit(do_not_specialize=["covered", "numel", "span"])
def tally_carefully(r_ptr, c_ptr, anchors, rows, covered, numel, span, KIND: tl.constexpr):
    """Fill the row of what is left over, or of a span in which some numbers are not finite."""
    row = tl.program_id(0)
    height = tl.num_programs(0)
    if tl.load(rows + REDO_COLUMN * height + row) == 0:
        return
    a, b = tl.load(anchors), tl.load(anchors + 1)
    start, stop = _span(row, span, covered, numel)
    lanes = tl.arange(0, _LANES)
    zero = tl.zeros([_LANES], tl.float64)
    s_r, s_c, rr, cc, rc, dd, absolute, worst = zero, zero, zero, zero, zero, zero, zero, zero
    quotient, where, unlike_at = zero, zero + NOWHERE, zero + NOWHERE
    none = tl.zeros([_LANES], tl.int32)
    nonzero_r, nonzero_c, mismatched, unlike, dropped = none, none, none, none, none
    nan_r, pos_r, neg_r, nan_c, pos_c, neg_c = none, none, none, none, none, none
    ulp = none.to(tl.uint32)
    for begin in range(start, stop, _LANES):
        place = begin + lanes
        inside = place < stop
        r = tl.load(r_ptr + place, mask=inside, other=0)
        c = tl.load(c_ptr + place, mask=inside, other=0)
        R, C = r.to(tl.float64), c.to(tl.float64)
        kind_r, kind_c = _kind(R), _kind(C)
        nan_r += (kind_r == 1).to(tl.int32)
        pos_r += (kind_r == 2).to(tl.int32)
        neg_r += (kind_r == 3).to(tl.int32)
        nan_c += (kind_c == 1).to(tl.int32)
        pos_c += (kind_c == 2).to(tl.int32)
        neg_c += (kind_c == 3).to(tl.int32)
        differ = kind_r != kind_c
        unlike += differ.to(tl.int32)
        drop = (kind_r != 0) | (kind_c != 0)
        dropped += drop.to(tl.int32)
        unlike_at = tl.minimum(unlike_at, tl.where(differ, place.to(tl.float64), NOWHERE))
        nonzero_r += (R != 0).to(tl.int32)
        nonzero_c += (C != 0).to(tl.int32)
        kept = inside & (drop == 0)
        D = tl.where(kept, C - R, 0.0)
        size = tl.abs(D)
        mismatched += (size != 0).to(tl.int32)
        share = size / tl.abs(R)
        quotient = tl.where(kept & (share > quotient), share, quotient)
        ulp = tl.maximum(ulp, tl.where(kept, steps_apart(_bits(r, KIND), _bits(c, KIND), KIND), 0))
        larger = size > worst
        worst = tl.where(larger, size, worst)
        where = tl.where(larger, place.to(tl.float64), where)
        R = tl.where(kept, R - a, 0.0)
        C = tl.where(kept, C - b, 0.0)
        s_r += R
        s_c += C
        rr += R * R
        cc += C * C
        rc += R * C
        dd += D * D
        absolute += size
    most = tl.max(worst)
    tl.store(rows + 0 * height + row, tl.sum(s_r))
    tl.store(rows + 1 * height + row, tl.sum(s_c))
    tl.store(rows + 2 * height + row, tl.sum(rr))
    tl.store(rows + 3 * height + row, tl.sum(cc))
    tl.store(rows + 4 * height + row, tl.sum(rc))
    tl.store(rows + 5 * height + row, tl.sum(dd))
    tl.store(rows + 6 * height + row, tl.sum(absolute))
    tl.store(rows + 7 * height + row, tl.sum(nonzero_r).to(tl.float64))
    tl.store(rows + 8 * height + row, tl.sum(nonzero_c).to(tl.float64))
    tl.store(rows + 9 * height + row, tl.sum(mismatched).to(tl.float64))
    tl.store(rows + 10 * height + row, tl.sum(nan_r).to(tl.float64))
    tl.store(rows + 11 * height + row, tl.sum(pos_r).to(tl.float64))
    tl.store(rows + 12 * height + row, tl.sum(neg_r).to(tl.float64))
    tl.store(rows + 13 * height + row, tl.sum(nan_c).to(tl.float64))
    tl.store(rows + 14 * height + row, tl.sum(pos_c).to(tl.float64))
    tl.store(rows + 15 * height + row, tl.sum(neg_c).to(tl.float64))
    tl.store(rows + 16 * height + row, tl.sum(unlike).to(tl.float64))
    tl.store(rows + 17 * height + row, tl.sum(dropped).to(tl.float64))
    tl.store(rows + MAX_ABS_COLUMN * height + row, most)
    tl.store(rows + QUOTIENT_COLUMN * height + row, tl.max(quotient))
    tl.store(rows + ULP_COLUMN * height + row, tl.max(ulp).to(tl.float64))
    tl.store(rows + WHERE_COLUMN * height + row, tl.min(tl.where(worst == most, where, NOWHERE)))
    tl.store(rows + UNLIKE_COLUMN * height + row, tl.min(unlike_at))


@triton.jit
def _reduce(column, height, MOST: tl.constexpr):
    """The sum of a column, or its maximum."""
    lanes = tl.arange(0, _LANES)
    found = tl.zeros([_LANES], tl.float64)
    for begin in range(0, height, _LANES):
        values = tl.load(column + begin + lanes, mask=begin + lanes < height, other=0.0)
        if MOST:
            found = tl.maximum(found, values)
        else:
            found += values
    if MOST:
        return tl.max(found)
    return tl.sum(found)


@triton.jit
def _least(column, other, wanted, height):
    """The least number of a column in the rows in which another column has a wanted number."""
    lanes = tl.arange(0, _LANES)
    found = tl.zeros([_LANES], tl.float64) + NOWHERE
    first = tl.zeros([_LANES], tl.float64) + NOWHERE
    for begin in range(0, height, _LANES):
        inside = begin + lanes < height
        values = tl.load(column + begin + lanes, mask=inside, other=NOWHERE)
        keys = tl.load(other + begin + lanes, mask=inside, other=-1.0)
        rows = (begin + lanes).to(tl.float64)
        found = tl.minimum(found, tl.where(keys == wanted, values, NOWHERE))
        first = tl.minimum(first, tl.where(keys == wanted, rows, NOWHERE))
    return tl.min(found), tl.min(first)


@triton.jit(do_not_specialize=["height", "numel"])
def finish(r_ptr, c_ptr, rows, out, height, numel, GROUP: tl.constexpr):
    """Put the rows together: a program for each sum, and one for what is not a sum."""
    column = tl.program_id(0)
    if column < SUM_COLUMNS:
        tl.store(out + column, _reduce(rows + column * height, height, False))
        return
    most = _reduce(rows + MAX_ABS_COLUMN * height, height, True)
    largest = _reduce(rows + QUOTIENT_COLUMN * height, height, True)
    where, _ = _least(rows + WHERE_COLUMN * height, rows + MAX_ABS_COLUMN * height, most, height)
    quotients = rows + QUOTIENT_COLUMN * height
    _, row = _least(quotients, quotients, largest, height)
    unlike, _ = _least(rows + UNLIKE_COLUMN * height, rows + REDO_COLUMN * height, 1.0, height)
    # A row tells among how many neighbours the largest difference is: which of them is it?
    start = tl.where(most > 0, where, 0.0).to(tl.int64)
    places = start + tl.arange(0, GROUP)
    inside = places < numel
    r = tl.load(r_ptr + places, mask=inside, other=0).to(tl.float64)
    c = tl.load(c_ptr + places, mask=inside, other=0).to(tl.float64)
    size = tl.abs(c - r)
    size = tl.where(inside & (size < float("inf")), size, 0.0)
    most = tl.max(size)
    hit = inside & (size == most)
    place = tl.min(tl.where(hit, places.to(tl.float64), NOWHERE))
    place = tl.where(unlike < NOWHERE, unlike, tl.where(most > 0, place, -1.0))
    index = tl.maximum(place, 0.0).to(tl.int64)
    tl.store(out + MAX_ABS_COLUMN, most)
    tl.store(out + _FOUND_REL, 0.0)
    tl.store(out + ULP_COLUMN, _reduce(rows + ULP_COLUMN * height, height, True))
    tl.store(out + _FOUND_WHERE, place)
    tl.store(out + _FOUND_WHERE + 1, tl.load(r_ptr + index).to(tl.float64))
    tl.store(out + _FOUND_WHERE + 2, tl.load(c_ptr + index).to(tl.float64))
    tl.store(out + _FOUND_QUOTIENT, largest)
    tl.store(out + _FOUND_ROW, row)


@triton.jit
def _settled(largest, KIND: tl.constexpr):
    """Whether quotients that look as large as the largest are equal to it.

    Quotients of numbers of few bits are far apart, and errors of float32 do not bridge that: of
    m / n and m' / n' with n and n' below 2^8 the difference is 0 or at least 2^-16.
    """
    if KIND == "bf16":
        return (largest < 0.5) | ((largest >= 2.0) & (largest <= 16.0))
    if KIND == "fp16":
        return largest < 0.125
    return False


@triton.jit(do_not_specialize=["height", "covered", "numel", "span"])
def refine(
    r_ptr, c_ptr, rows, out, height, covered, numel, span, PARTS: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """Find the largest quotient exactly, where those of float32 leave several to choose from.

    The row with the largest is taken first, in several parts; mostly there is no other.
    """
    part = tl.program_id(0)
    first = tl.load(out + _FOUND_ROW).to(tl.int32)
    largest = tl.load(out + _FOUND_QUOTIENT)
    row = part
    if PARTS > 1:
        start, stop = _span(first, span, covered, numel)
        piece = tl.cdiv(span, PARTS)
        start += part * piece
        stop = tl.minimum(stop, start + piece)
    else:
        mine = tl.load(rows + QUOTIENT_COLUMN * height + row)
        # In float32 quotients are off by less.
        near = largest - 2.0**-20 * (1.0 + largest) if KIND == "bf16" else largest * (1 - 2.0**-20)
        known = tl.load(out + _FOUND_REL)
        done = _settled(largest, KIND) | (known == float("inf")) | (row == first)
        if done | ((mine < near) & (largest < float("inf"))):
            return
        start, stop = _span(row, span, covered, numel)
    lanes = tl.arange(0, _LANES)
    found = tl.zeros([_LANES], tl.float64)
    for begin in range(start, stop, _LANES):
        inside = begin + lanes < stop
        r = tl.load(r_ptr + begin + lanes, mask=inside, other=0).to(tl.float64)
        c = tl.load(c_ptr + begin + lanes, mask=inside, other=0).to(tl.float64)
        finite = (tl.abs(r) <= _LARGEST) & (tl.abs(c) <= _LARGEST)
        share = tl.abs(c - r) / tl.abs(r)
        found = tl.where(finite & (share > found), share, found)
    # Of numbers that are not negative, the bits have the same order.
    bits = tl.max(found).to(tl.int64, bitcast=True)
    tl.atomic_max((out + _FOUND_REL).to(tl.pointer_type(tl.int64)), bits)
