# mypy: ignore-errors
"""Triton kernels behind `device_pairs`: everything about a pair of tensors in one reading of them.

Both tensors are read as words of 32 bits: one float32, or two neighbours of 16 bits. Programs take
equal spans of words and write a row of figures each. What the fast kernel cannot tell by few
instructions it leaves to others, which look at few rows: `tally_carefully` takes the spans that end
early or hold a NaN or an infinity; `refine` finds the largest quotient among the rows in which an
approximate one came close to it. Sums are taken in float64, of numbers that float64 holds exactly.

Imported only where Triton is, hence nowhere at the top of a module.
"""

# ruff: noqa: PLR0913, PLR0917  (the names and lists of arguments of kernels)
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import triton
import triton.language as tl

# Columns of a row. Sums, among them counts; then what the largest is kept of; then the least.
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

# Turns in which the narrowest dtype can count two of each.
_COUNTABLE: tl.constexpr = tl.constexpr(128)
NOWHERE: tl.constexpr = tl.constexpr(9.0e15)
_SIGN: tl.constexpr = tl.constexpr(-2147483648)
# Above such a sum of squares an element may be so large that float32 cannot hold differences or
# reciprocals; quotients are then not trusted.
_EXTREME: tl.constexpr = tl.constexpr(2.0**248)
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
def _count_unequal(x, y, count, KIND: tl.constexpr):
    """Count unequal halves of words in the halves of words, as numbers of the dtype."""
    if KIND == "bf16":
        return tl.inline_asm_elementwise(
            "{.reg .b32 t; set.ne.bf16x2.bf16x2 t, $1, $2; add.rn.bf16x2 $0, $3, t;}",
            "=r,r,r,r", [x, y, count], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        "{.reg .b32 t; set.ne.f16x2.f16x2 t, $1, $2; add.rn.f16x2 $0, $3, t;}",
        "=r,r,r,r", [x, y, count], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


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
    """The second element of a word that has two."""
    if KIND == "bf16":
        return (word & -65536).to(tl.float32, bitcast=True)
    return (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def steps_apart(x, y, KIND: tl.constexpr):
    """Steps of the grid between the floats whose bits lead these words."""
    a = (x ^ ((x >> 31) | _SIGN)).to(tl.uint32, bitcast=True)
    b = (y ^ ((y >> 31) | _SIGN)).to(tl.uint32, bitcast=True)
    if KIND != "fp32":
        a = a >> 16
        b = b >> 16
    signs = (x ^ y).to(tl.uint32, bitcast=True) >> 31
    return tl.maximum(a, b) - tl.minimum(a, b) - signs


@triton.jit
def _quotient(r, c, KIND: tl.constexpr):
    """About |c - r| / |r|; 0 / 0 is not a number, which a maximum passes over."""
    if KIND == "bf16":
        return tl.abs(tl.fma(c, _reciprocal(r), -1.0))
    return tl.abs((c - r) * _reciprocal(r))


@triton.jit
def _add_up(r, c, a, b, s_r, s_c, rr, cc, rc, dd, absolute, SHIFTED: tl.constexpr):
    """Add one element to each of the sums; gives the difference, too."""
    R, C = r.to(tl.float64), c.to(tl.float64)
    D = C - R
    absolute += tl.abs(D)
    dd = tl.fma(D, D, dd)
    if SHIFTED:
        R -= a
        C -= b
        rc = tl.fma(R, C, rc)
    return s_r + R, s_c + C, tl.fma(R, R, rr), tl.fma(C, C, cc), rc, dd, absolute, D


@triton.jit
def _take_word(
    x, y, a, b, s_r, s_c, rr, cc, rc, dd, absolute, size, quotient, ulp, full_r, full_c, unequal,
    KIND: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Add what the words at one place hold to what a lane has found so far."""
    r, c = _low(x, KIND), _low(y, KIND)
    s_r, s_c, rr, cc, rc, dd, absolute, D = _add_up(
        r, c, a, b, s_r, s_c, rr, cc, rc, dd, absolute, SHIFTED
    )
    quotient = tl.maximum(quotient, _quotient(r, c, KIND))
    size = tl.where(tl.abs(D) > tl.abs(size), D, size)
    if KIND == "fp32":
        apart = tl.maximum(ulp.to(tl.uint32, bitcast=True), steps_apart(x, y, KIND))
        ulp = apart.to(tl.int32, bitcast=True)
        full_r += (r != 0).to(tl.int32)
        full_c += (c != 0).to(tl.int32)
        unequal += (r != c).to(tl.int32)
    else:
        r, c = _high(x, KIND), _high(y, KIND)
        s_r, s_c, rr, cc, rc, dd, absolute, D = _add_up(
            r, c, a, b, s_r, s_c, rr, cc, rc, dd, absolute, SHIFTED
        )
        quotient = tl.maximum(quotient, _quotient(r, c, KIND))
        size = tl.where(tl.abs(D) > tl.abs(size), D, size)
        ulp = tl.inline_asm_elementwise(
            _MAX_ULP_PAIR, "=r,r,r,r", [x, y, ulp], dtype=tl.int32, is_pure=True, pack=1
        )
        full_r = _count_unequal(x, x * 0, full_r, KIND)
        full_c = _count_unequal(y, x * 0, full_c, KIND)
        unequal = _count_unequal(x, y, unequal, KIND)
    return s_r, s_c, rr, cc, rc, dd, absolute, size, quotient, ulp, full_r, full_c, unequal


@triton.jit
def _whole(count, KIND: tl.constexpr):
    """What `_count_unequal` counted, or what was counted in integers anyway."""
    if KIND == "fp32":
        return count
    return (_low(count, KIND) + _high(count, KIND)).to(tl.int32)


@triton.jit
def _scan(
    r_ptr, c_ptr, a, b, turns, LANES: tl.constexpr, UNROLL: tl.constexpr,
    KIND: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """What every lane of a program finds in its share of a span, two words at a time."""
    lanes = tl.arange(0, LANES)
    zero = tl.zeros([LANES], tl.float64)
    s_r, s_c, rr, cc, rc, dd, absolute, worst = zero, zero, zero, zero, zero, zero, zero, zero
    quotient = tl.zeros([LANES], tl.float32)
    none = tl.zeros([LANES], tl.int32)
    turn, nonzero_r, nonzero_c, mismatched, ulp = none, none, none, none, none
    for begin in range(0, turns, _COUNTABLE):
        full_r, full_c, unequal = none, none, none
        for step in range(begin, tl.minimum(begin + _COUNTABLE, turns), UNROLL):
            for u in tl.static_range(UNROLL):
                place = (step + u) * LANES + lanes
                x = tl.load(r_ptr + place)
                y = tl.load(c_ptr + place)
                size = worst
                for half in tl.static_range(2):
                    (
                        s_r, s_c, rr, cc, rc, dd, absolute, size, quotient, ulp, full_r, full_c,
                        unequal,
                    ) = _take_word(
                        (x >> (32 * half)).to(tl.int32), (y >> (32 * half)).to(tl.int32), a, b,
                        s_r, s_c, rr, cc, rc, dd, absolute, size, quotient, ulp, full_r, full_c,
                        unequal, KIND, SHIFTED,
                    )  # fmt: skip
                turn = tl.where(tl.abs(size) > tl.abs(worst), step + u, turn)
                worst = size
        nonzero_r += _whole(full_r, KIND)
        nonzero_c += _whole(full_c, KIND)
        mismatched += _whole(unequal, KIND)
    if not SHIFTED:
        # Of the square of a difference, where both squares are known.
        rc = 0.5 * ((rr - dd) + cc)
    return (
        s_r, s_c, rr, cc, rc, dd, absolute, worst, turn, quotient, ulp, nonzero_r, nonzero_c,
        mismatched,
    )  # fmt: skip


# Not one kernel for each kind of number: to compile takes seconds.
@triton.jit(do_not_specialize=["pairs", "turns"])
def tally(
    r_ptr, c_ptr, anchors, rows, pairs, turns,
    KIND: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Fill the row of a whole span of finite numbers; others are marked to be done again.

    The tensors come as integers of 64 bits, `pairs` of words.
    """
    row = tl.program_id(0)
    height = tl.num_programs(0)
    start = row.to(tl.int64) * (turns * LANES)
    if start + turns * LANES > pairs:
        tl.store(rows + REDO_COLUMN * height + row, 1.0)
        return
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
    worst = tl.abs(worst)
    if KIND != "fp32":
        ulp = tl.maximum(ulp & 0xFFFF, (ulp >> 16) & 0xFFFF)
    total_rr, total_cc = tl.sum(rr), tl.sum(cc)
    # Not a number compares as nothing.
    fine = (total_rr + total_cc) < float("inf")
    most = tl.max(worst)
    places = start + turn.to(tl.int64) * LANES + tl.arange(0, LANES)
    places = (places * (2 if KIND == "fp32" else 4)).to(tl.float64)
    extreme = (total_rr + total_cc + a * a + b * b) > _EXTREME
    largest = tl.where(extreme, float("inf"), tl.max(quotient)).to(tl.float64)
    tl.store(rows + 0 * height + row, tl.sum(s_r))
    tl.store(rows + 1 * height + row, tl.sum(s_c))
    tl.store(rows + 2 * height + row, total_rr)
    tl.store(rows + 3 * height + row, total_cc)
    tl.store(rows + 4 * height + row, tl.sum(rc))
    tl.store(rows + 5 * height + row, tl.sum(dd))
    tl.store(rows + 6 * height + row, tl.sum(absolute))
    tl.store(rows + 7 * height + row, tl.sum(full_r).to(tl.float64))
    tl.store(rows + 8 * height + row, tl.sum(full_c).to(tl.float64))
    tl.store(rows + 9 * height + row, tl.sum(unequal).to(tl.float64))
    for column in tl.static_range(10, 18):
        tl.store(rows + column * height + row, 0.0)
    tl.store(rows + MAX_ABS_COLUMN * height + row, most)
    tl.store(rows + QUOTIENT_COLUMN * height + row, largest)
    steps = tl.max(ulp.to(tl.uint32, bitcast=True))
    tl.store(rows + ULP_COLUMN * height + row, steps.to(tl.float64))
    tl.store(rows + WHERE_COLUMN * height + row, tl.min(tl.where(worst == most, places, NOWHERE)))
    tl.store(rows + UNLIKE_COLUMN * height + row, NOWHERE)
    tl.store(rows + REDO_COLUMN * height + row, tl.where(fine, 0.0, 1.0))
