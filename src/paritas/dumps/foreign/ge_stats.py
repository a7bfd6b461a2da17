"""Statistics in the place of tensors, in a dump of Ascend's graph engine.

The engine writes a table for each operator. A script that is handed around with msit replaces each
file by the least and the greatest value of its tensors, `{file}_min_max.npz`.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import re
from typing import TYPE_CHECKING

from paritas.dumps.foreign.array_archives import read_arrays
from paritas.dumps.foreign.ge_tensors import dtype_of_name, torch_dtype
from paritas.dumps.foreign.raw_values import Place, contiguous_stride, read_values
from paritas.dumps.records import TensorFacts
from paritas.errors import UsageError
from paritas.numerics.statistics import Statistics

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from paritas.dumps.foreign.ge_headers import Kind

__all__ = ["Summary", "read_min_max", "read_table"]

_LARGEST_TABLE = 16 << 20
_LARGEST_ARRAY = 1 << 20
_MOST_ROWS = 4096
_MOST_DIMS = 32
_NEEDED = {"inputoutput", "index"}


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """What is known of one tensor.

    Attributes:
        layout: of the device, whose padding the figures include; empty where it is not known.
        dtype: of a tensor whose shape is not known; empty where that is not known either.
    """

    kind: Kind
    index: int
    statistics: Statistics
    tensor: TensorFacts | None = None
    layout: str = ""
    dtype: str = ""


def read_table(path: Path) -> list[Summary]:
    """Read the table of an operator.

    Columns are found by their names: their order differs between the sets that can be asked for.

    Raises:
        UsageError: it is damaged.
    """
    if path.stat().st_size > _LARGEST_TABLE:
        raise UsageError(f"it is larger than {_LARGEST_TABLE} bytes")
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            rows = csv.reader(file)
            columns = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in next(rows, [])]
            if not set(columns) >= _NEEDED:
                raise UsageError(
                    f"its columns are {', '.join(columns[:20])}: no table of the engine"
                )
            return [_summary(dict(zip(columns, row, strict=False))) for row in _bounded(rows)]
    except csv.Error as error:
        raise UsageError(f"it is damaged: {error}") from error


def _bounded(rows: Iterator[list[str]]) -> Iterator[list[str]]:
    for number, row in enumerate(row for row in rows if any(row)):
        if number >= _MOST_ROWS:
            raise UsageError(f"it has more than {_MOST_ROWS} rows")
        yield row


def _summary(row: Mapping[str, str]) -> Summary:
    kind, index = row.get("inputoutput", "").strip().lower(), _integer(row.get("index"))
    if kind not in ("input", "output") or index is None:
        raise UsageError(f"a row is of {kind!r} {row.get('index')!r}")
    shape = _shape(row.get("shape", ""))
    counted = _integer(row.get("count"))
    return Summary(
        kind="input" if kind == "input" else "output",
        index=index,
        statistics=_statistics(
            count=math.prod(shape or (0,)) if counted is None else counted,
            minimum=_number(row.get("minvalue")),
            maximum=_number(row.get("maxvalue")),
            mean=_number(row.get("avgvalue")),
            l2=_number(row.get("l2norm")),
            nans=_integer(row.get("nancount")) or 0,
            positive_infinities=_integer(row.get("positiveinfcount")) or 0,
            negative_infinities=_integer(row.get("negativeinfcount")) or 0,
        ),
        tensor=_facts(row.get("datatype", ""), shape),
        layout=row.get("format", "").strip(),
    )


def _statistics(**figures: float | None) -> Statistics:
    """Of values that are not finite it is kept that there are some; the rest is of finite ones."""
    extremes = [figures.get(name) for name in ("minimum", "maximum", "mean", "l2")]
    seen = [value for value in extremes if value is not None]
    if any(math.isnan(value) for value in seen):
        figures["nans"] = figures.get("nans") or 1
    if figures.get("maximum") == math.inf:
        figures["positive_infinities"] = figures.get("positive_infinities") or 1
    if figures.get("minimum") == -math.inf:
        figures["negative_infinities"] = figures.get("negative_infinities") or 1
    finite = {
        name: value for name, value in figures.items() if value is None or math.isfinite(value)
    }
    return Statistics(**finite)  # type: ignore[arg-type]


def _facts(name: str, shape: tuple[int, ...] | None) -> TensorFacts | None:
    code = dtype_of_name(name.strip())
    if shape is None or code is None:
        return None
    try:
        return TensorFacts(dtype=torch_dtype(code), shape=shape, stride=contiguous_stride(shape))
    except UsageError:
        return None  # of strings there is nothing but their number


def _shape(text: str) -> tuple[int, ...] | None:
    """`2x3x4`; a dash for none."""
    parts = text.strip().split("x")
    if len(parts) > _MOST_DIMS or not all(re.fullmatch(r"[0-9]{1,15}", part) for part in parts):
        return () if text.strip() == "-" else None
    return tuple(map(int, parts))


def _integer(text: str | None) -> int | None:
    found = re.fullmatch(r"\s*([0-9]{1,18})\s*", text or "")
    return int(found[1]) if found else None


def _number(text: str | None) -> float | None:
    try:
        return float((text or "")[:64])
    except ValueError:
        return None  # the engine writes NA for what it does not compute


def read_min_max(path: Path) -> list[Summary]:
    """Read the extremes of the tensors of one file; how many values there were is not known.

    Raises:
        UsageError: it is damaged.
    """
    found: list[Summary] = []
    for key, place in read_arrays(path, path.name):
        kind = {"inputs": "input", "outputs": "output"}.get(key)
        if kind is None:
            continue
        if not isinstance(place, Place) or place.nbytes > _LARGEST_ARRAY:
            raise UsageError(f"{key} cannot be read: {getattr(place, 'reason', 'it is too large')}")
        values = read_values(path, place)
        if values.numel() and (values.shape[1:] != (2,) or values.is_complex()):
            raise UsageError(f"{key} has shape {tuple(values.shape)}: pairs were expected")
        # Several tensors are in one array, in a dtype that holds the values of all.
        dtype = place.dtype if len(values) == 1 else ""
        side: Kind = "input" if kind == "input" else "output"
        for index, (least, greatest) in enumerate(values.double().reshape(-1, 2).tolist()):
            figures = _statistics(count=0, minimum=least, maximum=greatest)
            found.append(Summary(side, index, figures, dtype=dtype))
    return found
