"""Metrics in exact arithmetic, from fractions, and tensors of every kind to try them on."""

from __future__ import annotations

import math
from fractions import Fraction

import hypothesis.strategies as st
import msgspec
import pytest
import torch

from paritas.core.numerics.metrics import pair_metrics

INF, NAN = math.inf, math.nan
FLOAT8 = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, *FLOAT8)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *SIGNED, *UNSIGNED, *COMPLEX, torch.bool)
# Bit patterns of the same width.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# --- the oracle -----------------------------------------------------------------------------------


def elements(tensor, *, pairs):
    """In row-major order, each a tuple of its components: fractions, or NaN, or infinities."""
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    if flat.is_complex():
        numbers = torch.view_as_real(flat).double().tolist()
    else:
        exact = flat.double() if flat.is_floating_point() else flat
        numbers = [[number, 0][: 1 + pairs] for number in exact.tolist()]
    return [tuple(Fraction(x) if math.isfinite(x) else x for x in pair) for pair in numbers]


def kinds(element):
    return ["" if math.isfinite(x) else str(x) for x in element]


def root(square):
    """Square root, to more digits than a float has, of a fraction of any size."""
    shift = 2 * Fraction(square).denominator.bit_length() + 200
    return Fraction(math.isqrt(int(square * (1 << 2 * shift))), 1 << shift)


def size(element):
    return abs(element[0]) if len(element) == 1 else root(sum(x * x for x in element))


def as_float(fraction):
    try:
        return float(fraction)
    except OverflowError:
        return INF


def ratio(product, square, other):
    return float(product / root(square * other)) if square and other else NAN


def place(bits, dtype):
    """Where a bit pattern stands among its dtype's numbers, counted from zero."""
    half = 1 << (8 * dtype.itemsize - 1)
    bits %= 2 * half
    return half - bits if bits >= half and dtype is not torch.float8_e8m0fnu else bits


def steps(reference, candidate):
    dtype = reference.dtype
    flat = (side.resolve_neg().reshape(-1) for side in (reference, candidate))
    codes = (side.view(BITS[dtype.itemsize]).tolist() for side in flat)
    return [abs(place(a, dtype) - place(b, dtype)) for a, b in zip(*codes, strict=True)]


def oracle(reference, candidate):
    """Every metric by its definition, in exact arithmetic."""
    paired = reference.is_complex() or candidate.is_complex()
    r, c = (elements(side, pairs=paired) for side in (reference, candidate))
    positions = range(len(r))
    unlike = [i for i in positions if kinds(r[i]) != kinds(c[i])]
    finite = [i for i in positions if not any(kinds(r[i]) + kinds(c[i]))]
    d = {i: size([y - x for x, y in zip(r[i], c[i], strict=True)]) for i in finite}
    differing = [i for i in finite if d[i]]
    x, y = ([number for i in finite for number in side[i]] for side in (r, c))
    n, xx, yy = len(x) or 1, sum(v * v for v in x), sum(v * v for v in y)
    xy, dd = sum(a * b for a, b in zip(x, y, strict=True)), sum(d[i] ** 2 for i in finite)
    expected = {
        "numel": len(r),
        "mismatched": len(unlike) + len(differing),
        "max_abs": as_float(max(d.values(), default=0)),
        "max_rel": max(
            (as_float(d[i] / size(r[i])) if any(r[i]) else INF for i in differing), default=0.0
        ),
        "mean_abs": as_float(Fraction(sum(d.values()), len(finite) or 1)),
        "rmse": as_float(root(Fraction(dd, len(finite) or 1))),
        "rel_l2": (as_float(root(dd / xx)) if xx else INF) if dd else 0.0,
        "cosine": ratio(xy, xx, yy) if xx or yy else 1.0,
        "pcc": ratio(xy - sum(x) * sum(y) / n, xx - sum(x) ** 2 / n, yy - sum(y) ** 2 / n),
        "max_ulp": None,
        "nonfinite_mismatches": len(unlike),
    }
    if reference.dtype == candidate.dtype and reference.is_floating_point():
        distances = steps(reference, candidate)
        expected["max_ulp"] = float(max((distances[i] for i in finite), default=0))
    if unlike:
        expected |= dict.fromkeys(("max_abs", "max_rel", "mean_abs", "rmse", "rel_l2"), INF)
        expected |= {"cosine": NAN, "pcc": NAN}
        expected["max_ulp"] = None if expected["max_ulp"] is None else INF
    for name, side in (("reference", r), ("candidate", c)):
        for word, kind in (("nan", "nan"), ("posinf", "inf"), ("neginf", "-inf")):
            expected[f"{word}_{name}"] = sum(kind in kinds(element) for element in side)
        expected[f"zero_{name}"] = sum(not any(element) for element in side)
    return expected, (unlike[:1] or differing), d


def number(element):
    return float(element.to(torch.complex128).abs() if element.is_complex() else element.double())


def check(reference, candidate, measure=pair_metrics, **options):
    metrics = measure(reference, candidate, **options)
    expected, differing, distances = oracle(reference, candidate)
    got = msgspec.structs.asdict(metrics)
    index = got.pop("max_abs_index")
    at = [got.pop(f"max_abs_{side}") for side in ("reference", "candidate")]
    for name, value in expected.items():
        if isinstance(value, float):
            # A cosine is of order one; every other figure has a scale of its own to be right to.
            absolute = 1e-13 if name in {"cosine", "pcc"} else 0.0
            value = pytest.approx(value, rel=1e-12, abs=absolute, nan_ok=True)  # noqa: PLW2901
        assert got.pop(name) == value, name
    assert not got, "metrics that nobody checks"
    assert not any(abs(figure) > 1.0 for figure in (metrics.cosine, metrics.pcc))
    if not differing:
        assert (index, *at) == (None, None, None)
        return metrics
    flat = sum(i * math.prod(reference.shape[k + 1 :]) for k, i in enumerate(index))
    assert flat in differing
    assert metrics.max_abs == INF or as_float(distances[flat]) == pytest.approx(metrics.max_abs)
    assert at == pytest.approx([number(reference[index]), number(candidate[index])], nan_ok=True)
    return metrics


# --- tensors of every kind ------------------------------------------------------------------------


def from_bytes(raw, dtype, shape):
    """A tensor of any bit patterns; float64 of moderate size, lest its squares leave float64."""
    narrow = {torch.float64: torch.float16, torch.complex128: torch.complex32}.get(dtype)
    if narrow is not None:
        return from_bytes(raw, narrow, shape).to(dtype) / 3
    count = math.prod(shape) * dtype.itemsize
    octets = torch.tensor(list(raw[:count]), dtype=torch.uint8)
    octets = octets & 1 if dtype is torch.bool else octets
    return octets.view(dtype).reshape(shape)


def laid_out(tensor, layout):
    """The same values with other strides."""
    if layout == "permuted":
        backwards = list(range(tensor.ndim))[::-1]
        return tensor.permute(backwards).contiguous().permute(backwards)
    if layout == "stepped" and tensor.ndim:
        room = torch.empty(*tensor.shape[:-1], 2 * tensor.shape[-1] + 1, dtype=tensor.dtype)
        return room[..., 1::2].copy_(tensor)
    if layout == "unaligned":
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
        return room[1:].view(tensor.shape).copy_(tensor)
    return tensor


LAYOUTS = st.sampled_from(["contiguous", "permuted", "stepped", "unaligned"])
BLOCK_SIZES = st.sampled_from([1, 2, 7, 16, None])
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
SPECIALS = st.sampled_from([0.0, -0.0, 1.0, INF, -INF, NAN])


@st.composite
def arrays(draw, dtype, shape):
    size = math.prod(shape) * dtype.itemsize
    tensor = from_bytes(draw(st.binary(min_size=size, max_size=size)), dtype, shape)
    if tensor.numel() and dtype.is_floating_point:
        flat, positions = tensor.view(-1), st.integers(0, tensor.numel() - 1)
        for position, special in draw(st.lists(st.tuples(positions, SPECIALS), max_size=4)):
            flat[position] = special
    return tensor


@st.composite
def pairs(draw, dtypes=DTYPES):
    """A reference, and a candidate that is the same, partly the same or unrelated."""
    dtype, shape = draw(st.sampled_from(dtypes)), draw(SHAPES)
    reference, other = draw(arrays(dtype, shape)), draw(arrays(dtype, shape))
    if draw(st.booleans()):
        flat, donor = other.view(-1), reference.view(-1)
        for position in range(draw(st.integers(0, flat.numel()))):
            flat[position] = donor[position]
    return laid_out(reference, draw(LAYOUTS)), laid_out(other, draw(LAYOUTS))
