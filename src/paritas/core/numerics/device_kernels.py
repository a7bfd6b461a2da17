"""Triton kernels of `metrics`: all figures of a pair of tensors in one pass over them."""

from __future__ import annotations

import triton
import triton.language as tl

# --- The sums of one lane -------------------------------------------------------------------------

# 32-bit numbers are summed in float64, which holds their differences and products (almost) exactly.
# 16-bit numbers arrive twice as fast, too fast for that: widening one takes longer than reading it.
# But their products are exact in float32, so groups of 16 are summed there, and the group sums in
# float64. A group sum is off by at most 16 * 2^-24 of the sum of its magnitudes. These errors have
# random signs, so the sum of N numbers is usually off by no more than 1e-7 / sqrt(N / 16). If
# float32 cannot hold the squares, `tally` requests a second pass over the span.
#
# The largest difference of 16-bit numbers is also found by its float32 value: among differences
# that agree to 24 bits, the first counts as the largest. Its reported value is exact.

# mypy: ignore-errors

# ruff: noqa: PLR0913, PLR0917, PLR2004  (the names and lists of arguments of kernels)
# ruff: noqa: ANN001, ANN201, ANN202, PLR0124, PLR0915


_SIGN: tl.constexpr = tl.constexpr(-2147483648)
_MAX_ULP_PAIR: tl.constexpr = tl.constexpr("""{
.reg .b32 a, b, s, h, l;
prmt.b32 a, $1, 0, 0xBB99;
prmt.b32 b, $2, 0, 0xBB99;
lop3.b32 a, $1, a, 0x80008000, 0x1E;
lop3.b32 b, $2, b, 0x80008000, 0x1E;
max.u16x2 h, a, b;
min.u16x2 l, a, b;
lop3.b32 s, $1, $2, 0x80008000, 0x28;
shr.u32 s, s, 15;
sub.u32 h, h, l;
sub.u32 h, h, s;
max.u16x2 $0, $3, h;
}""")


@triton.jit
def _reciprocal(x):
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _unequal(x, y, KIND: tl.constexpr):
    """Words with all bits set in each half that differs as a number."""
    if KIND == "bf16":
        return tl.inline_asm_elementwise(
            "set.ne.u32.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.int32, is_pure=True, pack=1
        )
    return tl.inline_asm_elementwise(
        "set.ne.u32.f16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _counted(total):
    """The number of set halves, given the integer sum of their words; below 2^16 of each."""
    low = -total & 0xFFFF
    return low + (((low * 0xFFFF - total) >> 16) & 0xFFFF)


@triton.jit
def _low(word, KIND: tl.constexpr):
    """The first element of a word, as float32."""
    if KIND == "fp32":
        return word.to(tl.float32, bitcast=True)
    if KIND == "bf16":
        return (word << 16).to(tl.float32, bitcast=True)
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _high(word, KIND: tl.constexpr):
    """The second element of a word with two, as float32."""
    if KIND == "bf16":
        return (word & -65536).to(tl.float32, bitcast=True)
    return (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def steps_apart(x, y, KIND: tl.constexpr):
    """The distance in ulps of the floats in the upper bits of these words."""
    a = (x ^ ((x >> 31) | _SIGN)).to(tl.uint32, bitcast=True)
    b = (y ^ ((y >> 31) | _SIGN)).to(tl.uint32, bitcast=True)
    if KIND != "fp32":
        a = a >> 16
        b = b >> 16
    signs = (x ^ y).to(tl.uint32, bitcast=True) >> 31
    return tl.maximum(a, b) - tl.minimum(a, b) - signs


@triton.jit
def scan_wide(
    r_ptr, c_ptr, a, b, turns, LANES: tl.constexpr, UNROLL: tl.constexpr, SHIFTED: tl.constexpr
):  # fmt: skip
    """Scan 32-bit numbers, two at a time."""
    lanes = tl.arange(0, LANES)
    zero = tl.zeros([LANES], tl.float64)
    s_r, s_c, rr, cc, rc, dd, absolute, worst = zero, zero, zero, zero, zero, zero, zero, zero
    quotient = tl.zeros([LANES], tl.float32)
    none = tl.zeros([LANES], tl.int32)
    turn, full_r, full_c, unequal, ulp = none, none, none, none, none.to(tl.uint32)
    for step in range(0, turns, UNROLL):
        size = worst
        for u in tl.static_range(UNROLL):
            place = (step + u) * LANES + lanes
            wide_x = tl.load(r_ptr + place)
            wide_y = tl.load(c_ptr + place)
            for half in tl.static_range(2):
                x = (wide_x >> (32 * half)).to(tl.int32)
                y = (wide_y >> (32 * half)).to(tl.int32)
                r, c = _low(x, "fp32"), _low(y, "fp32")
                R, C = r.to(tl.float64), c.to(tl.float64)
                D = C - R
                absolute += tl.abs(D)
                dd = tl.fma(D, D, dd)
                size = tl.where(tl.abs(D) > tl.abs(size), D, size)
                if SHIFTED:
                    R -= a
                    C -= b
                    rc = tl.fma(R, C, rc)
                s_r += R
                s_c += C
                rr = tl.fma(R, R, rr)
                cc = tl.fma(C, C, cc)
                # 0 / 0 is NaN, which a maximum ignores.
                quotient = tl.maximum(quotient, tl.abs((c - r) * _reciprocal(r)))
                ulp = tl.maximum(ulp, steps_apart(x, y, "fp32"))
                full_r += (r != 0).to(tl.int32)
                full_c += (c != 0).to(tl.int32)
                unequal += (r != c).to(tl.int32)
        turn = tl.where(tl.abs(size) > tl.abs(worst), step, turn)
        worst = size
    if not SHIFTED:
        # From the square of the difference and both squares.
        rc = 0.5 * ((rr - dd) + cc)
    return (
        s_r, s_c, rr, cc, rc, dd, absolute, tl.abs(worst), turn, quotient,
        ulp.to(tl.int32, bitcast=True), full_r, full_c, unequal,
    )  # fmt: skip


@triton.jit
def _sum_pair(
    r, c, a, b, s_r, s_c, rr, cc, rc, dd, absolute, FIRST: tl.constexpr, SHIFTED: tl.constexpr
):
    """Add a pair of widened 16-bit numbers to the sums of a group; `FIRST` starts them."""
    d = c - r
    if SHIFTED:
        r -= a
        c -= b
    if FIRST:
        return r, c, r * r, c * c, r * c, d * d, tl.abs(d), d
    if SHIFTED:
        rc = tl.fma(r, c, rc)
    return (
        s_r + r, s_c + c, tl.fma(r, r, rr), tl.fma(c, c, cc), rc, tl.fma(d, d, dd),
        absolute + tl.abs(d), d,
    )  # fmt: skip


@triton.jit
def scan_narrow(
    r_ptr, c_ptr, a, b, turns, LANES: tl.constexpr, UNROLL: tl.constexpr,
    KIND: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Scan 16-bit numbers: a group is 4 of each of `UNROLL` turns."""
    lanes = tl.arange(0, LANES)
    a, b = a.to(tl.float32), b.to(tl.float32)
    zero = tl.zeros([LANES], tl.float64)
    s_r, s_c, rr, cc, rc, dd, absolute = zero, zero, zero, zero, zero, zero, zero
    worst = tl.zeros([LANES], tl.float32)
    quotient = worst
    none = tl.zeros([LANES], tl.int32)
    turn, full_r, full_c, unequal, ulp = none, none, none, none, none
    for step in range(0, turns, UNROLL):
        size = tl.zeros([LANES], tl.float32)
        g_r, g_c, g_rr, g_cc, g_rc, g_dd, g_absolute = size, size, size, size, size, size, size
        for u in tl.static_range(UNROLL):
            place = (step + u) * LANES + lanes
            wide_x = tl.load(r_ptr + place)
            wide_y = tl.load(c_ptr + place)
            for half in tl.static_range(2):
                x = (wide_x >> (32 * half)).to(tl.int32)
                y = (wide_y >> (32 * half)).to(tl.int32)
                ulp = tl.inline_asm_elementwise(
                    _MAX_ULP_PAIR, "=r,r,r,r", [x, y, ulp], dtype=tl.int32, is_pure=True, pack=1
                )
                full_r += _unequal(x, none, KIND)
                full_c += _unequal(y, none, KIND)
                unequal += _unequal(x, y, KIND)
                for part in tl.static_range(2):
                    if part == 0:
                        r, c = _low(x, KIND), _low(y, KIND)
                    else:
                        r, c = _high(x, KIND), _high(y, KIND)
                    g_r, g_c, g_rr, g_cc, g_rc, g_dd, g_absolute, d = _sum_pair(
                        r, c, a, b, g_r, g_c, g_rr, g_cc, g_rc, g_dd, g_absolute,
                        u + half + part == 0, SHIFTED,
                    )  # fmt: skip
                    size = tl.maximum(size, tl.abs(d))
                    quotient = tl.maximum(quotient, tl.abs(d * _reciprocal(r)))
        s_r += g_r.to(tl.float64)
        s_c += g_c.to(tl.float64)
        rr += g_rr.to(tl.float64)
        cc += g_cc.to(tl.float64)
        dd += g_dd.to(tl.float64)
        absolute += g_absolute.to(tl.float64)
        if SHIFTED:
            rc += g_rc.to(tl.float64)
        turn = tl.where(size > worst, step, turn)
        worst = tl.maximum(size, worst)
    if not SHIFTED:
        rc = 0.5 * ((rr - dd) + cc)
    ulp = tl.maximum(ulp & 0xFFFF, (ulp >> 16) & 0xFFFF)
    return (
        s_r, s_c, rr, cc, rc, dd, absolute, worst.to(tl.float64), turn, quotient, ulp,
        _counted(full_r), _counted(full_c), _counted(unequal),
    )  # fmt: skip


# --- The fast kernel: a row of figures for each span ----------------------------------------------

# Both tensors are read as 32-bit words: one float32, or two neighbouring 16-bit numbers. Programs
# process equal spans of words and write a row of figures each. Work that takes many instructions is
# left to other kernels, which process few rows: `tally_carefully` handles spans that end early or
# contain NaN or infinity; `refine` finds the largest quotient among the rows with an approximate
# quotient close to it.
#
# Triton may be missing, so no module imports this one at its top.

# Columns of a row: sums, including counts; then maxima; then minima.
SUMS = (
    *("r", "c", "rr", "cc", "rc", "dd", "absolute"),
    *("nonzero_reference", "nonzero_candidate", "mismatched"),
    *("nan_reference", "posinf_reference", "neginf_reference"),
    *("nan_candidate", "posinf_candidate", "neginf_candidate", "unlike", "dropped"),
)
SUM_COLUMNS: tl.constexpr = tl.constexpr(18)
MAX_ABS_COLUMN: tl.constexpr = tl.constexpr(18)
QUOTIENT_COLUMN: tl.constexpr = tl.constexpr(19)
ULP_COLUMN: tl.constexpr = tl.constexpr(20)
WHERE_COLUMN: tl.constexpr = tl.constexpr(21)
UNLIKE_COLUMN: tl.constexpr = tl.constexpr(22)
REDO_COLUMN: tl.constexpr = tl.constexpr(23)
COLUMNS = 24
NOWHERE: tl.constexpr = tl.constexpr(9.0e15)
# Above this sum of squares an element may be too large for differences or reciprocals in float32,
# and quotients are not trusted.
_EXTREME: tl.constexpr = tl.constexpr(2.0**248)
# Below this sum of squares float32 may have lost digits. Numbers around an anchor above the second
# bound are not that small.
_FADING: tl.constexpr = tl.constexpr(2.0**-100)
_ANCHORED: tl.constexpr = tl.constexpr(2.0**-40)


@triton.jit
def _scan(
    r_ptr, c_ptr, a, b, turns, LANES: tl.constexpr, UNROLL: tl.constexpr,
    KIND: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    if KIND == "fp32":
        return scan_wide(r_ptr, c_ptr, a, b, turns, LANES, UNROLL, SHIFTED)
    return scan_narrow(r_ptr, c_ptr, a, b, turns, LANES, UNROLL, KIND, SHIFTED)


@triton.jit
def _kept(square, many, anchor):
    """Whether a sum of squares of `many` nonzero numbers lost no digits."""
    return (square >= _FADING) | (many == 0) | (tl.abs(anchor) >= _ANCHORED)


# Not specialized by argument values: each compilation takes seconds.
@triton.jit(do_not_specialize=["most_turns", "turns"])
def tally(
    r_ptr, c_ptr, anchors, rows, most_turns, turns,
    KIND: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Fill the row of a span of finite numbers; other spans, and the rest, are marked for redoing.

    The tensors are given as 64-bit integers; a turn reads one of each per lane. The last span may
    have fewer turns. An extra row after it is for the rest that does not fill a turn.
    """
    row = tl.program_id(0)
    height = tl.num_programs(0)
    turns_before = row * turns
    if turns_before >= most_turns:
        tl.store(rows + REDO_COLUMN * height + row, 1.0)
        return
    start = turns_before.to(tl.int64) * LANES
    turns = tl.minimum(turns, most_turns - turns_before)
    a, b, shifted = tl.load(anchors), tl.load(anchors + 1), tl.load(anchors + 2)
    r_ptr += start
    c_ptr += start
    if shifted == 0:
        s_r, s_c, rr, cc, rc, dd, absolute, worst, turn, quotient, ulp, full_r, full_c, unequal = (
            _scan(r_ptr, c_ptr, a, b, turns, LANES, UNROLL, KIND, False)
        )
    else:
        s_r, s_c, rr, cc, rc, dd, absolute, worst, turn, quotient, ulp, full_r, full_c, unequal = (
            _scan(r_ptr, c_ptr, a, b, turns, LANES, UNROLL, KIND, True)
        )
    total_rr, total_cc, total_dd = tl.sum(rr), tl.sum(cc), tl.sum(dd)
    many_r, many_c, many = tl.sum(full_r), tl.sum(full_c), tl.sum(unequal)
    # False for NaN.
    fine = (total_rr + total_cc) < float("inf")
    if KIND != "fp32":
        fine &= _kept(total_rr, many_r, a) & _kept(total_cc, many_c, b) & _kept(total_dd, many, 0.0)
    most = tl.max(worst)
    places = start + turn.to(tl.int64) * LANES
    places = (places * (2 if KIND == "fp32" else 4)).to(tl.float64)
    extreme = (total_rr + total_cc + a * a + b * b) > _EXTREME
    largest = tl.where(extreme, float("inf"), tl.max(quotient)).to(tl.float64)
    tl.store(rows + 0 * height + row, tl.sum(s_r))
    tl.store(rows + 1 * height + row, tl.sum(s_c))
    tl.store(rows + 2 * height + row, total_rr)
    tl.store(rows + 3 * height + row, total_cc)
    tl.store(rows + 4 * height + row, tl.sum(rc))
    tl.store(rows + 5 * height + row, total_dd)
    tl.store(rows + 6 * height + row, tl.sum(absolute))
    tl.store(rows + 7 * height + row, many_r.to(tl.float64))
    tl.store(rows + 8 * height + row, many_c.to(tl.float64))
    tl.store(rows + 9 * height + row, many.to(tl.float64))
    for column in tl.static_range(10, 18):
        tl.store(rows + column * height + row, 0.0)
    tl.store(rows + MAX_ABS_COLUMN * height + row, most)
    tl.store(rows + QUOTIENT_COLUMN * height + row, largest)
    steps = tl.max(ulp.to(tl.uint32, bitcast=True))
    tl.store(rows + ULP_COLUMN * height + row, steps.to(tl.float64))
    tl.store(rows + WHERE_COLUMN * height + row, tl.min(tl.where(worst == most, places, NOWHERE)))
    tl.store(rows + UNLIKE_COLUMN * height + row, NOWHERE)
    tl.store(rows + REDO_COLUMN * height + row, tl.where(fine, 0.0, 1.0))


# --- Kernels that prepare and finish the rows -----------------------------------------------------

# They process few elements, or few rows of figures, so speed does not matter.

# The results of `finish` and `refine`.
RESULTS = (
    *SUMS,
    *("max_abs", "max_rel", "max_ulp", "where", "reference", "candidate", "quotient", "row"),
)
_FOUND_REL: tl.constexpr = tl.constexpr(19)
_FOUND_WHERE: tl.constexpr = tl.constexpr(21)
_FOUND_QUOTIENT: tl.constexpr = tl.constexpr(24)
_FOUND_ROW: tl.constexpr = tl.constexpr(25)
# A median above this many times the spread around it is subtracted before squaring.
_FAR: tl.constexpr = tl.constexpr(4.0)
# Above this ratio of the squares, products are not computed from a difference.
_UNEVEN: tl.constexpr = tl.constexpr(16.0)
_LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)
_LANES: tl.constexpr = tl.constexpr(1024)


@triton.jit
def _median(x, known, count):
    """The lower median of the known values."""
    ordered = tl.sort(tl.where(known, x, float("inf")))
    middle = tl.arange(0, _LANES) == tl.maximum(count - 1, 0) // 2
    return tl.sum(tl.where(middle, ordered, 0.0))


@triton.jit(do_not_specialize=["numel", "step", "shift"])
def anchor(r_ptr, c_ptr, anchors, numel, step, shift):
    """A typical number of each side, whether to subtract it, and whether one was found.

    It is the median of a sample, so not an outlier. It is an element, so a constant side is exactly
    zero relative to it. Near zero it is not subtracted, which is faster.
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
    """The bits of a float, in the upper bits of a 32-bit word."""
    if KIND == "fp32":
        found = x.to(tl.int32, bitcast=True)
    else:
        found = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return found


@triton.jit
def _kind(x):
    """0 for finite numbers, 1 for NaN, 2 and 3 for the infinities."""
    kind = tl.where(x == float("inf"), 2, 0) + tl.where(x == float("-inf"), 3, 0)
    return tl.where(x != x, 1, kind)


@triton.jit
def _span(row, span, covered, numel):
    """Start and stop of a row; the last row holds what the spans do not cover."""
    start = tl.minimum(row.to(tl.int64) * span, covered)
    return start, tl.where(start < covered, tl.minimum(start + span, covered), numel)


@triton.jit(do_not_specialize=["covered", "numel", "span"])
def tally_carefully(r_ptr, c_ptr, anchors, rows, covered, numel, span, KIND: tl.constexpr):
    """Fill the row of the rest, or of a span with numbers that are not finite."""
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
    """The minimum of a column over rows where another column has a wanted value; that row."""
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
    """Combine the rows: one program for each sum, and one for everything else."""
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
    # A row only gives the group of the largest difference: find the element.
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

    Quotients of numbers with few bits differ by more than float32 errors: for m / n and m' / n'
    with n and n' below 2^8 the difference is 0 or at least 2^-16.
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
    """Find the largest quotient exactly, if several are equally large in float32.

    The row with the largest is processed first, in several parts; usually there is no other.
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
        # Errors of float32 quotients are smaller than this.
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
    # Nonnegative floats have the same order as their bits.
    bits = tl.max(found).to(tl.int64, bitcast=True)
    tl.atomic_max((out + _FOUND_REL).to(tl.pointer_type(tl.int64)), bits)
