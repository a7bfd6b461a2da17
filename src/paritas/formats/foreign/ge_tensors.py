"""The values in files of Ascend's graph engine, or statistics in their place."""

from __future__ import annotations

import csv
import dataclasses
import functools
import math
import re
from typing import TYPE_CHECKING, Literal

import torch

from paritas.core.errors import UsageError
from paritas.core.numerics.statistics import Statistics
from paritas.formats.files.npy_files import read_arrays
from paritas.formats.files.records import TensorFacts
from paritas.formats.files.tensor_bytes import (
    FilePlace,
    OpenFiles,
    bools,
    contiguous_stride,
    known_dtype,
    values_at,
    view_as_dtype,
)
from paritas.formats.foreign.ge_layouts import plan_layout

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from paritas.formats.foreign.ge_files import GeTensor, GeTensorKind


# --- Values ---------------------------------------------------------------------------------------

# A dtype that torch lacks is widened to one that holds all its values: integers smaller than a byte
# to bytes, 4-bit floats and HiFloat8 to float32.


def read_ge_values(
    path: Path, tensor: GeTensor, size: int | None = None, files: OpenFiles | None = None
) -> Tensor:
    """The values of a tensor, in the dtype and shape of the program.

    Args:
        size: of the file when its header was read.
        files: map the values instead of reading them; widened or reordered values are copied.
    """
    coding = _find_coding(tensor.dtype)
    tensor = _with_plain_bytes(tensor)
    layout = plan_layout(tensor, tensor.nbytes * 8 // coding.bits)
    count = math.prod(layout.blocks)
    width = 1 if coding.widening else known_dtype(coding.dtype).itemsize
    present = path.stat().st_size
    if size not in (None, present):
        raise UsageError(
            f"{path.name} had {size} bytes and now has {present}: it changed after the dump was "
            f"opened"
        )
    location = (path, tensor.begin, -(-count * coding.bits // 8), path.name)
    raw = OpenFiles().read(*location) if files is None else files.view(*location, itemsize=width)
    if coding.widening:
        return layout.undo(_widen(raw, coding, count)).contiguous()
    dtype = known_dtype(coding.dtype)
    if dtype is torch.bool:
        return layout.undo(bools(raw) if count else raw.view(dtype)).contiguous()
    moved = layout.undo(raw.view(_CARRIERS[dtype.itemsize])).contiguous()
    return view_as_dtype(moved, dtype)


def facts_of(tensor: GeTensor) -> TensorFacts:
    """The tensor in the program: dtype and shape as `read_ge_values` returns them."""
    coding = _find_coding(tensor.dtype)
    shape = plan_layout(_with_plain_bytes(tensor), tensor.nbytes * 8 // coding.bits).shape
    return TensorFacts(dtype=coding.dtype, shape=shape, stride=contiguous_stride(shape))


@dataclasses.dataclass(frozen=True, slots=True)
class _Coding:
    """How elements are encoded.

    Attributes:
        name: the engine's, without `DT_`.
        dtype: torch's name of the dtype they become; empty if they are not supported.
        bits: of one element.
        widening: how they are converted to that dtype; empty if they have it.
    """

    name: str
    dtype: str = ""
    bits: int = 8
    widening: Literal["", "signed", "unsigned", "float4", "hifloat8"] = ""


_CODINGS = {
    0: _Coding("UNDEFINED", "int8"),
    1: _Coding("FLOAT", "float32", 32),
    2: _Coding("FLOAT16", "float16", 16),
    3: _Coding("INT8", "int8"),
    4: _Coding("UINT8", "uint8"),
    5: _Coding("INT16", "int16", 16),
    6: _Coding("UINT16", "uint16", 16),
    7: _Coding("INT32", "int32", 32),
    8: _Coding("INT64", "int64", 64),
    9: _Coding("UINT32", "uint32", 32),
    10: _Coding("UINT64", "uint64", 64),
    11: _Coding("BOOL", "bool"),
    12: _Coding("DOUBLE", "float64", 64),
    13: _Coding("STRING"),
    14: _Coding("DUAL_SUB_INT8", "int8"),
    15: _Coding("DUAL_SUB_UINT8", "uint8"),
    16: _Coding("COMPLEX64", "complex64", 64),
    17: _Coding("COMPLEX128", "complex128", 128),
    18: _Coding("QINT8", "int8"),
    19: _Coding("QINT16", "int16", 16),
    20: _Coding("QINT32", "int32", 32),
    21: _Coding("QUINT8", "uint8"),
    22: _Coding("QUINT16", "uint16", 16),
    23: _Coding("RESOURCE", "int64", 64),
    24: _Coding("STRING_REF"),
    25: _Coding("DUAL"),
    26: _Coding("VARIANT"),
    27: _Coding("BF16", "bfloat16", 16),
    28: _Coding("INT4", "int8", 4, "signed"),
    29: _Coding("UINT1", "uint8", 1, "unsigned"),
    30: _Coding("INT2", "int8", 2, "signed"),
    31: _Coding("UINT2", "uint8", 2, "unsigned"),
    32: _Coding("COMPLEX32", "complex32", 32),
    33: _Coding("HIFLOAT8", "float32", 8, "hifloat8"),
    34: _Coding("FLOAT8_E5M2", "float8_e5m2"),
    35: _Coding("FLOAT8_E4M3FN", "float8_e4m3fn"),
    36: _Coding("FLOAT8_E8M0", "float8_e8m0fnu"),
    37: _Coding("FLOAT6_E3M2"),
    38: _Coding("FLOAT6_E2M3"),
    39: _Coding("FLOAT4_E2M1", "float32", 4, "float4"),
    40: _Coding("FLOAT4_E1M2"),
    41: _Coding("HIFLOAT4"),
    42: _Coding("HIFLOAT4_SCALE"),
}
_BYTES = _Coding("BYTES", "uint8")
_CODES_BY_NAME = {f"DT_{coding.name}": code for code, coding in _CODINGS.items()}
# Stored as torch stores them.
_PLAIN_CODES: tuple[int, ...] = (*range(1, 13), 16, 17, 27, 32, 34, 35, 36)
_CODES_BY_DTYPE: dict[str, int] = {_CODINGS[code].dtype: code for code in _PLAIN_CODES} | {
    "float4_e2m1fn_x2": 39
}
FLOAT4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Dtypes to copy as: torch copies integers of any width bit for bit.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def name_of_dtype(dtype: str) -> str:
    """The engine's name of a torch dtype, for example `DT_FLOAT16`."""
    code = _CODES_BY_DTYPE.get(dtype)
    if code is None or code not in _PLAIN_CODES:
        return "DT_UNDEFINED"
    return f"DT_{_CODINGS[code].name}"


def code_of_dtype(dtype: torch.dtype) -> int:
    """The engine's number of a torch dtype."""
    code = _CODES_BY_DTYPE.get(str(dtype).removeprefix("torch."))
    if code is None:
        raise UsageError(f"{dtype} is not among the engine's dtypes: cast the tensor")
    return code


def _find_coding(code: int | None) -> _Coding:
    if code is None:
        return _BYTES
    coding = _CODINGS.get(code)
    if coding is None:
        raise UsageError(f"unknown dtype number {code}")
    if not coding.dtype:
        raise UsageError(f"its dtype DT_{coding.name} cannot be read as a tensor")
    return coding


def _with_plain_bytes(tensor: GeTensor) -> GeTensor:
    """Treat a tensor without a dtype as bytes; its shape is dropped if it does not match them."""
    if tensor.dtype == 0 and math.prod(tensor.shape) != tensor.nbytes:
        return dataclasses.replace(tensor, shape=(), original_shape=(), format=2)
    return tensor


def _widen(raw: Tensor, coding: _Coding, count: int) -> Tensor:
    """Convert elements smaller than a byte, or of a kind that torch lacks.

    The first element is in the lowest bits of a byte; but single bits count from the highest, as in
    the vendor's own reader.
    """
    if coding.widening == "hifloat8":
        return _hifloat8_values()[raw.int()]
    bits = coding.bits
    places = range(0, 8, bits) if bits > 1 else range(7, -1, -1)
    parts = torch.stack([(raw >> location) & (1 << bits) - 1 for location in places], -1)
    codes = parts.reshape(-1)[:count]
    if coding.widening == "float4":
        return torch.tensor([*FLOAT4_VALUES, *(-value for value in FLOAT4_VALUES)])[codes.int()]
    if coding.widening == "signed":
        remaining = 8 - bits
        return (codes << remaining).view(torch.int8) >> remaining
    return codes


@functools.cache
def _hifloat8_values() -> Tensor:
    """The value of each byte.

    After the sign, a prefix gives the number of exponent bits: 11 for 4, 10 for 3, 01 for 2, 001
    for 1, 0001 for none; the rest is the mantissa. The exponent has its own sign and an implicit
    leading one. Prefix 0000 encodes small powers of two.
    """
    values: list[float] = []
    for byte in range(128):
        for exponent_bits, width, prefix in ((4, 2, 3), (3, 2, 2), (2, 2, 1), (1, 3, 1), (0, 4, 1)):
            if byte >> 7 - width != prefix:
                continue
            mantissa_bits = 7 - width - exponent_bits
            field = byte >> mantissa_bits & (1 << exponent_bits) - 1
            mantissa = 1 + (byte & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
            half = 1 << exponent_bits >> 1
            exponent = half + (field & half - 1) if exponent_bits else 0
            is_negative = exponent_bits and field & half
            values.append(math.ldexp(mantissa, -exponent if is_negative else exponent))
            break
        else:
            values.append(math.ldexp(1, byte - 23))
    values[0] = 0.0
    values[0x6F] = math.inf
    return torch.tensor([*values, math.nan, *(-value for value in values[1:])])


# --- Statistics -----------------------------------------------------------------------------------

# The engine writes a table for each operator. A script distributed with msit replaces each file by
# the minimum and maximum of its tensors, `{file}_min_max.npz`.

_LARGEST_TABLE = 16 << 20
_LARGEST_ARRAY = 1 << 20
_MOST_ROWS = 4096
_MOST_DIMS = 32
_NEEDED = {"inputoutput", "index"}


@dataclasses.dataclass(frozen=True, slots=True)
class GeSummary:
    """The statistics of one tensor.

    Attributes:
        layout: of the device, whose padding the figures include; empty if unknown.
        dtype: of a tensor without known shape; empty if also unknown.
    """

    kind: GeTensorKind
    index: int
    statistics: Statistics
    tensor: TensorFacts | None = None
    layout: str = ""
    dtype: str = ""


def read_table(path: Path) -> list[GeSummary]:
    """Read the table of an operator.

    Columns are found by name: their order depends on which ones were selected.
    """
    if path.stat().st_size > _LARGEST_TABLE:
        raise UsageError(f"it is larger than {_LARGEST_TABLE} bytes")
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            rows = csv.reader(file)
            columns = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in next(rows, [])]
            if not set(columns) >= _NEEDED:
                raise UsageError(
                    f"not a table of the engine: its columns are {', '.join(columns[:20])}"
                )
            ge_summaries: list[GeSummary] = []
            for row in filter(any, rows):
                if len(ge_summaries) >= _MOST_ROWS:
                    raise UsageError(f"it has more than {_MOST_ROWS} rows")
                ge_summaries.append(_parse_summary(dict(zip(columns, row, strict=False))))
            return ge_summaries
    except csv.Error as error:
        raise UsageError(f"it is damaged: {error}") from error


def _parse_summary(row: Mapping[str, str]) -> GeSummary:
    kind, index = row.get("inputoutput", "").strip().lower(), _parse_integer(row.get("index"))
    if kind not in ("input", "output") or index is None:
        raise UsageError(f"a row describes {kind!r} {row.get('index')!r}")
    shape = _parse_shape(row.get("shape", ""))
    counted = _parse_integer(row.get("count"))
    return GeSummary(
        kind="input" if kind == "input" else "output",
        index=index,
        statistics=_make_statistics(
            count=math.prod(shape or (0,)) if counted is None else counted,
            minimum=_parse_number(row.get("minvalue")),
            maximum=_parse_number(row.get("maxvalue")),
            mean=_parse_number(row.get("avgvalue")),
            l2=_parse_number(row.get("l2norm")),
            nans=_parse_integer(row.get("nancount")) or 0,
            positive_infinities=_parse_integer(row.get("positiveinfcount")) or 0,
            negative_infinities=_parse_integer(row.get("negativeinfcount")) or 0,
        ),
        tensor=_make_facts(row.get("datatype", ""), shape),
        layout=row.get("format", "").strip(),
    )


def _make_statistics(**figures: float | None) -> Statistics:
    """Statistics of finite values; NaN and Inf are only counted."""
    extremes = [figures.get(name) for name in ("minimum", "maximum", "mean", "l2")]
    visited = [value for value in extremes if value is not None]
    if any(math.isnan(value) for value in visited):
        figures["nans"] = figures.get("nans") or 1
    if figures.get("maximum") == math.inf:
        figures["positive_infinities"] = figures.get("positive_infinities") or 1
    if figures.get("minimum") == -math.inf:
        figures["negative_infinities"] = figures.get("negative_infinities") or 1
    finite = {
        name: value for name, value in figures.items() if value is None or math.isfinite(value)
    }
    return Statistics(**finite)  # type: ignore[arg-type]


def _make_facts(name: str, shape: tuple[int, ...] | None) -> TensorFacts | None:
    code = _CODES_BY_NAME.get(name.strip())
    if shape is None or code is None or not _CODINGS[code].dtype:
        return None
    return TensorFacts(dtype=_CODINGS[code].dtype, shape=shape, stride=contiguous_stride(shape))


def _parse_shape(text: str) -> tuple[int, ...] | None:
    """Parse `2x3x4`; a dash means no dimensions."""
    parts = text.strip().split("x")
    if len(parts) > _MOST_DIMS or not all(re.fullmatch(r"[0-9]{1,15}", part) for part in parts):
        return () if text.strip() == "-" else None
    return tuple(map(int, parts))


def _parse_integer(text: str | None) -> int | None:
    match = re.fullmatch(r"\s*([0-9]{1,18})\s*", text or "")
    return int(match[1]) if match else None


def _parse_number(text: str | None) -> float | None:
    try:
        return float((text or "")[:64])
    except ValueError:
        return None  # the engine writes NA for a figure that it does not compute


def read_min_max(path: Path) -> list[GeSummary]:
    """Read the minima and maxima of the tensors of one file; the number of values is unknown."""
    ge_summaries: list[GeSummary] = []
    for key, location in read_arrays(path, path.name):
        kind = {"inputs": "input", "outputs": "output"}.get(key)
        if kind is None:
            continue
        if not isinstance(location, FilePlace) or location.nbytes > _LARGEST_ARRAY:
            raise UsageError(
                f"{key} cannot be read: {getattr(location, 'reason', 'it is too large')}"
            )
        values = values_at(path, location)
        if values.numel() and (values.shape[1:] != (2,) or values.is_complex()):
            raise UsageError(f"{key} has shape {tuple(values.shape)}: expected pairs")
        # Several tensors share one array, in a dtype that holds all their values.
        dtype = location.dtype if len(values) == 1 else ""
        side: GeTensorKind = "input" if kind == "input" else "output"
        for index, (low, high) in enumerate(values.double().reshape(-1, 2).tolist()):
            figures = _make_statistics(count=0, minimum=low, maximum=high)
            ge_summaries.append(GeSummary(side, index, figures, dtype=dtype))
    return ge_summaries
