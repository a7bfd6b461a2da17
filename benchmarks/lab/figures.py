"""A measured figure, its bar, and the file in which a script leaves what it measured.

A script ends with `write(Report(...))`, which leaves `benchmarks/results/<script>.json`; the page
`docs/benchmarks.md` is made of those files alone, so that no number in it was typed by hand.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import msgspec
from benchmarks.lab.conditions import Conditions, conditions

RESULTS = Path(__file__).parents[1] / "results"

Cell = str | int | float | None


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One number with its unit and, where one was promised, the bar it has to meet.

    `value` is None, as NaN becomes in the file, if it could not be measured: that meets no bar.
    """

    name: str
    value: float | None
    unit: str
    bar: float | None = None
    better: Literal["lower", "higher"] = "lower"
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None where there is none."""
        if self.bar is None:
            return None
        if self.value is None or math.isnan(self.value):
            return False
        return self.value <= self.bar if self.better == "lower" else self.value >= self.bar


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What does not fit one number, for people."""

    title: str
    columns: list[str]
    rows: list[list[Cell]]


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that a script measured in one run, and how it was measured, in `what`.

    `measured` is filled in by `write`.
    """

    script: str
    figures: list[Figure]
    tables: list[Table] = []
    what: str = ""
    measured: Conditions | None = None


def write(report: Report, folder: Path = RESULTS) -> Path:
    """Print every figure with its bar, and leave them with the machine, versions and date.

    Raises:
        ValueError: the report has neither figures nor tables, which would look like a success.
    """
    if not report.figures and not report.tables:
        raise ValueError(f"{report.script}: nothing was measured, so nothing is written")
    for figure in report.figures:
        print(line(figure))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report.script}.json"
    told = msgspec.structs.replace(report, measured=conditions())
    path.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n")
    return path


def read(folder: Path = RESULTS) -> list[Report]:
    """Every report of a folder, by the names of their files."""
    return [
        msgspec.json.decode(path.read_bytes(), type=Report)
        for path in sorted(folder.glob("*.json"))
    ]


def line(figure: Figure) -> str:
    """A figure in one line, for the terminal."""
    bar = ""
    if figure.bar is not None:
        sign = "at most" if figure.better == "lower" else "at least"
        bar = f"  ({sign} {number(figure.bar)}: {'met' if figure.met else 'MISSED'})"
    note = f"  {figure.note}" if figure.note else ""
    return f"  {figure.name:<56} {number(figure.value):>8} {figure.unit}{bar}{note}"


def number(value: float | None) -> str:
    """A number as a person reads it: three digits that count, none of them invented."""
    if value is None or math.isnan(value):
        return "not measured"
    if math.isinf(value) or (value == int(value) and abs(value) < 1e6):
        return f"{value:.0f}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
