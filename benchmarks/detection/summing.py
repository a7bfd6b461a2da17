"""Outcomes counted: figures with their bars, tables rule by rule, and every miss by its name."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from benchmarks.detection.cases import HALVES
from benchmarks.detection.expected import EXPECTED
from benchmarks.detection.graded import GRADED
from benchmarks.detection.measuring import BENIGN, MUTANT, Outcome
from benchmarks.detection.programs import EVERY_DTYPE
from benchmarks.detection.rules import OURS, OURS_NATIVE, has_polygraphy
from benchmarks.lab.figures import Cell, Figure, Report, Table

from paritas.mutants.planting import MUTATIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

BANDS = ("clear", "moderate", "faint")
BARS = {"clear": 99.5, "moderate": 90.0}
FALSE_ALARMS = 0.2
EXACT, NEAR = 90.0, 98.0
MOST_LISTED = 60
# Faults that leave every value as it is: most rules do not look for them.
NO_VALUES = {"aliased_output", "output_dtype"}
WHAT = """\
Faults of {kinds} kinds and benign rewrites, planted one at a time in {programs} programs (models
and single operators, forward and backward): {mutants} visible faults and {benign} rewrites. A
fault's band is its effect in exact arithmetic divided by the program's own noise: clear above 8,
moderate 2 to 8, faint below. The judge was tuned on even seeds; odd seeds are held out. A benign
rewrite that a rule rejects is a false alarm. Location: the first wrong node, in a candidate in
which every operator rounds differently from the reference, over clear and moderate faults that
were caught.
"""


class Cases:
    """Outcomes that are cases: made, and of some effect."""

    def __init__(self, outcomes: Iterable[Outcome]) -> None:
        everything = list(outcomes)
        self.broken = [one for one in everything if one.error]
        self.equivalent = [one for one in everything if one.band == "none" and not one.error]
        good = [one for one in everything if not one.error and one.band != "none"]
        self.mutants = [one for one in good if one.kind == MUTANT]
        self.benign = [one for one in good if one.kind == BENIGN]
        self.rules = list(dict.fromkeys(rule for one in good for rule in one.alarms))

    def half(self, half: str) -> Cases:
        """Those of one half."""
        return self.where(lambda one: one.unit.half == half)

    def where(self, wanted: Callable[[Outcome], bool]) -> Cases:
        """Those for which it holds."""
        found = Cases([])
        found.mutants = [one for one in self.mutants if wanted(one)]
        found.benign = [one for one in self.benign if wanted(one)]
        found.rules = self.rules
        return found

    def band(self, band: str) -> list[Outcome]:
        """The mutants of one band."""
        return [one for one in self.mutants if one.band == band]

    @property
    def dtypes(self) -> list[str]:
        """Those that were tried."""
        tried = {one.unit.dtype for one in (*self.mutants, *self.benign)}
        return [dtype for dtype in EVERY_DTYPE if dtype in tried]

    @property
    def to_locate(self) -> list[Outcome]:
        """What a user would look for: caught, and more than a whisper."""
        return [one for one in self.mutants if one.caught and one.band != "faint"]


def alarmed(cases: list[Outcome], rule: str = OURS) -> float:
    """The share, in percent, of cases at which a rule alarms; NaN of none."""
    return percent(sum(one.alarms.get(rule) is True for one in cases), len(cases))


def percent(some: int, everything: int) -> float:
    """NaN of nothing, which meets no bar."""
    return 100 * some / everything if everything else float("nan")


def report(outcomes: Iterable[Outcome], script: str = "detection") -> Report:
    """All of it, to be written."""
    cases = Cases(outcomes)
    held_out = cases.half("held out")
    kinds = {one.change for one in cases.mutants}
    units = {(one.unit.name, one.unit.seed) for one in (*cases.mutants, *cases.benign)}
    what = WHAT.format(
        kinds=len(kinds),
        programs=len(units),
        mutants=f"{len(cases.mutants):,}",
        benign=f"{len(cases.benign):,}",
    )
    tables = [
        _sizes(cases),
        *(side_by_side(half, cases.half(half)) for half in HALVES),
        _ours_by_dtype(cases),
        _by(held_out, "program", lambda one: one.unit.name if one.unit.is_family else "operators"),
        _by(held_out, "mutation", lambda one: one.change, [*MUTATIONS, GRADED]),
        _rewrites(cases),
        _located(cases),
        _calibration(cases),
        *lists(cases),
    ]
    if not has_polygraphy():
        what += "Polygraphy is not installed, so its comparator was not used.\n"
    return Report(script, _figures(held_out), [table for table in tables if table.rows], what)


# --- figures --------------------------------------------------------------------------------------


def _figures(held_out: Cases) -> list[Figure]:
    figures = []
    for dtype in held_out.dtypes:
        mine = held_out.where(lambda one, dtype=dtype: one.unit.dtype == dtype)
        for band, bar in BARS.items():
            found = mine.band(band)
            name = f"{dtype}: {band} faults caught"
            figures.append(Figure(name, alarmed(found), "%", bar, "higher", f"of {len(found)}"))
        telling = [one for one in mine.benign if one.bits or one.alarms.get(OURS) is not False]
        note = f"of {len(telling)} rewrites with other bits ({len(mine.benign)} in all)"
        alarms = alarmed(telling)
        figures.append(Figure(f"{dtype}: false alarms", alarms, "%", FALSE_ALARMS, "lower", note))
    located = held_out.to_locate
    steps = [one.distance for one in located]
    exact = percent(sum(step == 0 for step in steps), len(steps))
    near = percent(sum(step is not None and step <= 2 for step in steps), len(steps))
    note = f"of {len(located)}"
    named = [one for one in located if one.distance == 0 and one.change in EXPECTED]
    right = percent(sum(one.pattern in EXPECTED[one.change] for one in named), len(named))
    undecided = [one for one in (*held_out.mutants, *held_out.benign) if _is_undecided(one)]
    return [
        *figures,
        Figure("first wrong node, exact", exact, "%", EXACT, "higher", note),
        Figure("first wrong node, within two edges", near, "%", NEAR, "higher", note),
        Figure("pattern named first is the planted one", right, "%", note=f"of {len(named)}"),
        Figure("cases on which ours came to no verdict", len(undecided), "", 0, "lower"),
    ]


def _is_undecided(one: Outcome) -> bool:
    return any(isinstance(one.alarms.get(rule), str) for rule in (OURS, OURS_NATIVE))


# --- tables ---------------------------------------------------------------------------------------


def _sizes(cases: Cases) -> Table:
    columns = ["half", *BANDS, "benign", "with other bits"]
    rows: list[list[Cell]] = []
    for half in HALVES:
        mine = cases.half(half)
        bits = sum(one.bits for one in mine.benign)
        rows.append([half, *(len(mine.band(band)) for band in BANDS), len(mine.benign), bits])
    aside = f"{len(cases.equivalent)} equivalent mutants and {len(cases.broken)} that do not apply"
    return Table(f"Cases ({aside} are left out)", columns, rows)


def side_by_side(half: str, cases: Cases) -> Table:
    """Every rule: faults caught by band, false alarms by dtype, and its time."""
    columns = ["rule", *(f"{band} %" for band in BANDS), "clear, values only %"]
    columns += [*(f"false alarms {dtype} %" for dtype in cases.dtypes), "no verdict", "ms a case"]
    rows: list[list[Cell]] = []
    everything = [*cases.mutants, *cases.benign]
    for rule in cases.rules:
        row: list[Cell] = [rule]
        row += [cell(alarmed(cases.band(band), rule)) for band in BANDS]
        values = [one for one in cases.band("clear") if one.change not in NO_VALUES]
        row.append(cell(alarmed(values, rule)))
        for dtype in cases.dtypes:
            benign = [one for one in cases.benign if one.unit.dtype == dtype]
            row.append(cell(alarmed(benign, rule)))
        row.append(sum(isinstance(one.alarms.get(rule), str) for one in everything))
        spent = sum(one.seconds.get(rule, 0.0) for one in everything)
        rows.append([*row, round(1000 * spent / max(1, len(everything)), 2)])
    return Table(f"Rules side by side, {half}", columns, rows)


def _ours_by_dtype(cases: Cases) -> Table:
    columns = ["half", "dtype", "rule", *(f"{band} %" for band in BANDS), "false alarms"]
    rows: list[list[Cell]] = []
    for half in HALVES:
        for dtype in cases.dtypes:
            mine = cases.half(half).where(lambda one, dtype=dtype: one.unit.dtype == dtype)
            for rule in (OURS, OURS_NATIVE):
                false = sum(one.alarms.get(rule) is True for one in mine.benign)
                caught = [cell(alarmed(mine.band(band), rule)) for band in BANDS]
                rows.append([half, dtype, rule, *caught, f"{false} of {len(mine.benign)}"])
    return Table("Ours, by half and dtype", columns, rows)


def _by(cases: Cases, what: str, key: Callable[[Outcome], str], order: Iterable[str] = ()) -> Table:
    """Ours, by something: caught of all, in every band."""
    found = [one for one in cases.mutants if one.alarms]
    keys = [*order] or sorted({key(one) for one in found})
    rows: list[list[Cell]] = []
    for name in keys:
        mine = [one for one in found if key(one) == name]
        if mine:
            rows.append([name, *(_of([one for one in mine if one.band == band]) for band in BANDS)])
    return Table(f"Faults caught by {what}, held out", [what, *BANDS], rows)


def _of(cases: list[Outcome]) -> str:
    return f"{sum(one.caught for one in cases)} of {len(cases)}" if cases else ""


def _rewrites(cases: Cases) -> Table:
    """False alarms of every rule by rewrite."""
    kinds = sorted({one.change for one in cases.benign})
    rows: list[list[Cell]] = []
    for kind in kinds:
        mine = [one for one in cases.benign if one.change == kind]
        alarms = [sum(one.alarms.get(rule) is True for one in mine) for rule in cases.rules]
        rows.append([kind, len(mine), *alarms])
    return Table("False alarms by rewrite, both halves", ["rewrite", "cases", *cases.rules], rows)


def _located(cases: Cases) -> Table:
    columns = ["half", "faults", "exact %", "within two %", "pattern %", "of named kinds", "ms"]
    rows: list[list[Cell]] = []
    for half in HALVES:
        found = cases.half(half).to_locate
        exact = sum(one.distance == 0 for one in found)
        near = sum(one.distance is not None and one.distance <= 2 for one in found)
        named = [one for one in found if one.distance == 0 and one.change in EXPECTED]
        right = sum(one.pattern in EXPECTED[one.change] for one in named)
        spent = 1000 * sum(one.seconds.get("locating", 0.0) for one in found)
        figures = [percent(exact, len(found)), percent(near, len(found))]
        figures.append(percent(right, len(named)))
        mean = round(spent / max(1, len(found)), 1)
        rows.append([half, len(found), *map(cell, figures), len(named), mean])
    return Table("Where it starts, and what it is called there", columns, rows)


def _calibration(cases: Cases) -> Table:
    """How often a stated confidence is right."""
    rows: list[list[Cell]] = []
    for half in HALVES:
        counts: dict[float, list[bool]] = collections.defaultdict(list)
        for one in cases.half(half).to_locate:
            if one.distance == 0 and one.pattern and one.change in EXPECTED:
                counts[one.confidence].append(one.pattern in EXPECTED[one.change])
        for stated in sorted(counts):
            right = counts[stated]
            rows.append([half, stated, len(right), cell(percent(sum(right), len(right)))])
    return Table("Confidence against truth", ["half", "stated", "statements", "right %"], rows)


def lists(cases: Cases, *, located: bool = True) -> list[Table]:
    """What ours gets wrong, by name; where it starts only if that was asked."""
    rows: dict[str, list[list[Cell]]] = collections.defaultdict(list)
    for one in cases.mutants:
        said = one.alarms.get(OURS)
        if one.band != "faint" and said is not True:
            why = said if isinstance(said, str) else ""
            rows["Misses"].append([one.unit.half, str(one), cell(one.over_noise), why])
    for one in cases.benign:
        for rule in (OURS, OURS_NATIVE):
            if one.alarms.get(rule) is not False:
                rows["False alarms"].append([one.unit.half, str(one), rule, _why(one, rule)])
    for one in cases.to_locate if located else ():
        if one.distance != 0:
            away = "nothing" if one.distance is None else f"{one.distance} edges off"
            rows["Not located exactly"].append([one.unit.half, str(one), one.said, away])
    heads = {
        "Misses": ["half", "case", "effect over noise", "why"],
        "False alarms": ["half", "case", "rule", "why"],
        "Not located exactly": ["half", "case", "said", "distance"],
    }
    return [
        Table(f"{name} ({len(found)}, the first {MOST_LISTED})", heads[name], found[:MOST_LISTED])
        for name, found in rows.items()
    ]


def _why(one: Outcome, rule: str) -> str:
    said = one.alarms.get(rule)
    return said if isinstance(said, str) else "alarm"


def cell(value: float) -> Cell:
    """None for NaN: there was nothing to count."""
    return None if value != value else round(value, 2)  # noqa: PLR0124
