"""Single records of a dump, in plain text: there may be millions of them."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from paritas.results.wording import size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paritas.dumps.survey import ExaminedRecord
    from paritas.numerics.statistics import Statistics


def record_lines(examined: ExaminedRecord, width: int = 80) -> list[str]:
    """One record: where it is from, and what it holds."""
    record = examined.record
    lines = (f"rank {record.rank} step {record.step} {record.id}", f"  {_held(examined)}")
    return [
        part
        for line in lines
        for part in textwrap.wrap(
            line, width, subsequent_indent="    ", drop_whitespace=True, break_on_hyphens=False
        )
    ]


def _held(examined: ExaminedRecord) -> str:
    record = examined.record
    if not record.is_tensor:
        return str(record.value)
    words = [record.kind]
    words += ["no statistics"] if examined.statistics is None else _statistics(examined.statistics)
    if record.payload is not None:
        words.append(size(record.payload.nbytes))
    if record.alias_of is not None:
        words.append(f"shares memory with record {record.alias_of}")
    return "; ".join(words)


def _statistics(statistics: Statistics) -> Iterator[str]:
    names = {"minimum": "min", "maximum": "max", "mean": "mean", "l2": "l2"}
    yield " ".join(f"{name} {number(getattr(statistics, field))}" for field, name in names.items())
    infinities = statistics.positive_infinities + statistics.negative_infinities
    counts = (("zero", statistics.zeros), ("NaN", statistics.nans), ("Inf", infinities))
    counted = ", ".join(f"{count} {name}" for name, count in counts if count)
    if counted:
        yield counted


def number(value: float | None) -> str:
    """Four digits, or a dash where there is none."""
    return "-" if value is None else f"{value:.4g}"
