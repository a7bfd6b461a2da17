# mypy: ignore-errors
"""Triton kernels behind `device_pairs`: everything about a pair of tensors in one reading of them.

Both tensors are read as words of 32 bits: one float32, or two neighbours of 16 bits. Programs take
equal spans of words and write a row of figures each. What the fast kernel cannot tell by few
instructions it leaves to others, which look at few rows: `tally_carefully` takes the spans that end
early or hold a NaN or an infinity; `refine` finds the largest quotient among the rows in which an
approximate one came close to it. How sums are taken is told in `device_scans`.

Imported only where Triton is, hence nowhere at the top of a module.
"""

# ruff: noqa: PLR0913, PLR0917  (the names and lists of arguments of kernels)
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import triton
import triton.language as tl

from paritas.numerics.device_scans import scan_narrow, scan_wide

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
NOWHERE: tl.constexpr = tl.constexpr(9.0e15)
# Above such a sum of squares an element may be so large that float32 cannot hold differences or
# reciprocals; quotients are then not trusted.
_EXTREME: tl.constexpr = tl.constexpr(2.0**248)
# Below such a sum of squares float32 may have lost digits of them, or all. Numbers about an anchor
# that is not so small are not either.
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
    """Whether a sum of squares of so many numbers that are not zero is what it should be."""
    return (square >= _FADING) | (many == 0) | (tl.abs(anchor) >= _ANCHORED)


# Not one kernel for each kind of number: to compile takes seconds.
@triton.jit(do_not_specialize=["most_turns", "turns"])
def tally(
    r_ptr, c_ptr, anchors, rows, most_turns, turns,
    KIND: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Fill the row of a span of finite numbers; others, and what is left, are to be done again.

    The tensors come as integers of 64 bits; a turn takes one of each for every lane. The last of
    the spans may have fewer turns. A row behind it is for the few numbers that are no whole turns.
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
    # Not a number compares as nothing.
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
