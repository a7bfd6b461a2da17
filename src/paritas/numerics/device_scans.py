# mypy: ignore-errors
"""What one lane of `device_kernels.tally` finds in its share of a pair of tensors.

Numbers of 32 bits are added up in float64, which holds their differences and products exactly or
nearly so. Numbers of 16 bits come twice as fast, too fast for that: to widen each of them takes
longer than to read it. Their products are exact in float32, however, so groups of 16 are added up
there, and those sums in float64. A group's sum is off by 16 * 2^-24 of the sum of its magnitudes
at most, and as that falls to either side, the sum of N numbers is mostly off by no more than
1e-7 / sqrt(N / 16). Where float32 cannot hold squares, `tally` has a span done again.

The largest difference of 16-bit numbers is found by its float32 value, too: among differences that
agree to 24 bits the first counts as the largest. It is told exactly all the same.
"""

# ruff: noqa: PLR0913, PLR0917  (the names and lists of arguments of kernels)
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import triton
import triton.language as tl

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
    """All bits of the halves of words that are unequal as numbers."""
    if KIND == "bf16":
        return tl.inline_asm_elementwise(
            "set.ne.u32.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.int32, is_pure=True, pack=1
        )
    return tl.inline_asm_elementwise(
        "set.ne.u32.f16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _counted(total):
    """How many halves were set in words whose sum, as integers, this is; below 2^16 of each."""
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
def scan_wide(
    r_ptr, c_ptr, a, b, turns, LANES: tl.constexpr, UNROLL: tl.constexpr, SHIFTED: tl.constexpr
):  # fmt: skip
    """Of numbers of 32 bits, two at a time."""
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
                # 0 / 0 is not a number, which a maximum passes over.
                quotient = tl.maximum(quotient, tl.abs((c - r) * _reciprocal(r)))
                ulp = tl.maximum(ulp, steps_apart(x, y, "fp32"))
                full_r += (r != 0).to(tl.int32)
                full_c += (c != 0).to(tl.int32)
                unequal += (r != c).to(tl.int32)
        turn = tl.where(tl.abs(size) > tl.abs(worst), step, turn)
        worst = size
    if not SHIFTED:
        # Of the square of a difference, where both squares are known.
        rc = 0.5 * ((rr - dd) + cc)
    return (
        s_r, s_c, rr, cc, rc, dd, absolute, tl.abs(worst), turn, quotient,
        ulp.to(tl.int32, bitcast=True), full_r, full_c, unequal,
    )  # fmt: skip


@triton.jit
def _sum_pair(
    r, c, a, b, s_r, s_c, rr, cc, rc, dd, absolute, FIRST: tl.constexpr, SHIFTED: tl.constexpr
):
    """Add two numbers of 16 bits, widened, to the sums of a group; `FIRST` starts them."""
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
    """Of numbers of 16 bits: a group is 4 of each of `UNROLL` turns."""
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
