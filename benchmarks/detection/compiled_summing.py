"""Outcomes of compiled programs counted: figures with their bars, tables, every miss by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.detection.benign_compiled import VARIANTS
from benchmarks.detection.cases import HALVES
from benchmarks.detection.compiled_measuring import GUARD, GUARDED, PLANTED
from benchmarks.detection.rules import OURS, OURS_NATIVE
from benchmarks.detection.summing import (
    BARS,
    EXACT,
    FALSE_ALARMS,
    MOST_LISTED,
    NEAR,
    Cases,
    alarmed,
    cell,
    lists,
    percent,
    side_by_side,
)
from benchmarks.lab.figures import Cell, Figure, Report, Table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.detection.measuring import Outcome

WHAT = """\
{programs} programs of the `detection` corpus (models and single operators, forward and backward)
through `torch.compile`: unchanged, by Inductor with several options, by the AOT backends and on
two threads ({benign} variants, {bits} of them with bits other than eager's), and with a planted
fault, clear or moderate, compiled by Inductor ({mutants}); all against the eager program. Nothing
was tuned on any of these, so both halves count. Location: {planted} faults that a compiler
pass introduces, under `paritas.guard`, in programs of up to {most} calls; distances are edges of
the graph that Inductor gets, over clear and moderate faults that the guard caught. The guard
judges the code as it runs and compiles nothing in float64, so it may miss a moderate fault. Most
of our time per case is the compilation in float64.
"""


class CompiledCases(Cases):
    """Outcomes of compiled programs; those of the guard apart, since no other rule was asked."""

    def __init__(self, outcomes: Iterable[Outcome]) -> None:
        everything = list(outcomes)
        super().__init__(one for one in everything if one.kind != PLANTED and one.change != GUARDED)
        self.unbroken = [one for one in everything if not one.error]
        self.failed = [one for one in everything if one.error]
        self.guarded = [one for one in self.unbroken if one.change == GUARDED]
        self.planted = [one for one in self.unbroken if one.kind == PLANTED]

    @property
    def telling(self) -> list[Outcome]:
        """Variants that put a rule to the test: with other bits, or with an alarm all the same."""
        return [one for one in self.benign if one.bits or one.alarms.get(OURS) is not False]

    @property
    def named(self) -> list[Outcome]:
        """Faults of a pass that the guard caught."""
        return [one for one in self.planted if one.alarms.get(GUARD) is True]


def compiled_report(outcomes: Iterable[Outcome], most_calls: int) -> Report:
    """All of it, to be written."""
    cases = CompiledCases(outcomes)
    units = {(one.unit.name, one.unit.seed, one.unit.dtype) for one in cases.unbroken}
    what = WHAT.format(
        programs=len(units),
        benign=len(cases.benign),
        bits=sum(one.bits for one in cases.benign),
        mutants=len(cases.mutants),
        planted=len(cases.planted),
        most=most_calls,
    )
    telling = Cases([*cases.mutants, *cases.telling])
    tables = [
        _sizes(cases),
        side_by_side("variants with other bits", telling),
        _variants(cases),
        _by_program(cases),
        _guarded(cases),
        *lists(cases, located=False),
        _not_located(cases),
        _failed(cases),
    ]
    tables = [table for table in tables if table.rows]
    return Report("detection_compiled", _figures(cases), tables, what)


def _figures(cases: CompiledCases) -> list[Figure]:
    figures = []
    for dtype in cases.dtypes:
        telling = [one for one in cases.telling if one.unit.dtype == dtype]
        note = f"of {len(telling)} variants with other bits"
        name = f"{dtype}: false alarms on compiled programs"
        figures.append(Figure(name, alarmed(telling), "%", FALSE_ALARMS, "lower", note))
    for band, bar in BARS.items():
        found = cases.band(band)
        name, note = f"{band} faults caught, compiled", f"of {len(found)}"
        figures.append(Figure(name, alarmed(found), "%", bar, "higher", note))
    steps = [one.distance for one in cases.named]
    exact, near = (_within(steps, limit) for limit in (0, 2))
    note = f"of {len(steps)}"
    false = alarmed(cases.guarded, GUARD)
    asked = f"of {len(cases.guarded)} programs"
    undecided = [
        one
        for one in (*cases.mutants, *cases.benign, *cases.guarded, *cases.planted)
        if any(isinstance(one.alarms.get(rule), str) for rule in (OURS, OURS_NATIVE, GUARD))
    ]
    return [
        *figures,
        Figure("guard: false alarms", false, "%", FALSE_ALARMS, "lower", asked),
        Figure("guard: first wrong node, exact", exact, "%", EXACT, "higher", note),
        Figure("guard: first wrong node, within two edges", near, "%", NEAR, "higher", note),
        Figure("cases on which ours came to no verdict", len(undecided), "", 0, "lower"),
    ]


def _within(steps: list[int | None], limit: int) -> float:
    return percent(sum(step is not None and step <= limit for step in steps), len(steps))


# --- tables ---------------------------------------------------------------------------------------


def _sizes(cases: CompiledCases) -> Table:
    columns = ["half", "clear", "moderate", "variants", "with other bits", "faults of a pass"]
    rows: list[list[Cell]] = []
    for half in HALVES:
        mine = cases.half(half)
        planted = sum(one.unit.half == half for one in cases.planted)
        bits = sum(one.bits for one in mine.benign)
        counts = [len(mine.band(band)) for band in BARS]
        rows.append([half, *counts, len(mine.benign), bits, planted])
    return Table("Cases", columns, rows)


def _variants(cases: CompiledCases) -> Table:
    """False alarms of every rule by what was compiled how."""
    rows: list[list[Cell]] = []
    for name in VARIANTS:
        mine = [one for one in cases.benign if one.change == name]
        bits = sum(one.bits for one in mine)
        alarms = [sum(one.alarms.get(rule) is True for one in mine) for rule in cases.rules]
        if mine:
            rows.append([name, len(mine), bits, *alarms])
    columns = ["variant", "cases", "with other bits", *cases.rules]
    return Table("False alarms by variant", columns, rows)


def _by_program(cases: CompiledCases) -> Table:
    """Ours: what was tried of each family, and of all operators together."""
    found = [*cases.benign, *cases.mutants]
    names = dict.fromkeys(one.unit.name for one in found if one.unit.is_family)
    rows: list[list[Cell]] = []
    for name in [*sorted(names), "operators"]:
        mine = [
            one for one in found if (one.unit.name if one.unit.is_family else "operators") == name
        ]
        mutants = [one for one in mine if one.band]
        bits = [one for one in mine if not one.band and one.bits]
        caught = sum(one.caught for one in mutants)
        false = sum(one.caught for one in bits)
        rows.append([name, len(bits), false, f"{caught} of {len(mutants)}"])
    columns = ["program", "variants with other bits", "false alarms", "faults caught"]
    return Table("Ours by program", columns, rows)


def _kind_of(one: Outcome) -> str:
    return one.unit.name if one.unit.is_family else "operators"


def _guarded(cases: CompiledCases) -> Table:
    columns = ["dtype", "right programs", "false alarms", "clear caught", "moderate caught"]
    columns += ["exact %", "within two %", "s a fault"]
    rows: list[list[Cell]] = []
    for dtype in dict.fromkeys(one.unit.dtype for one in (*cases.guarded, *cases.planted)):
        right = [one for one in cases.guarded if one.unit.dtype == dtype]
        wrong = [one for one in cases.planted if one.unit.dtype == dtype]
        steps = [one.distance for one in cases.named if one.unit.dtype == dtype]
        spent = sum(one.seconds.get(GUARD, 0.0) for one in wrong)
        row: list[Cell] = [dtype, len(right)]
        row.append(sum(one.alarms.get(GUARD) is not False for one in right))
        for band in BARS:
            mine = [one for one in wrong if one.band == band]
            caught = sum(one.alarms.get(GUARD) is True for one in mine)
            row.append(f"{caught} of {len(mine)}")
        row += [cell(_within(steps, limit)) for limit in (0, 2)]
        rows.append([*row, round(spent / max(1, len(wrong)), 1)])
    return Table("The guard, and where it says that a fault starts", columns, rows)


def _not_located(cases: CompiledCases) -> Table:
    rows: list[list[Cell]] = []
    for one in cases.planted:
        said = one.alarms.get(GUARD)
        if said is not True:
            why = said if isinstance(said, str) else "not caught"
            rows.append([one.unit.half, str(one), cell(one.over_noise), "", why])
        elif one.distance != 0:
            away = "elsewhere" if one.distance is None else f"{one.distance} edges off"
            told = f"{one.how} {one.said}".strip()
            rows.append([one.unit.half, str(one), cell(one.over_noise), told, away])
    rows += [
        [one.unit.half, str(one), None, str(one.alarms.get(GUARD)), "false alarm"]
        for one in cases.guarded
        if one.alarms.get(GUARD) is not False
    ]
    title = f"The guard's misses ({len(rows)}, the first {MOST_LISTED})"
    columns = ["half", "case", "effect over noise", "said", "what"]
    return Table(title, columns, rows[:MOST_LISTED])


def _failed(cases: CompiledCases) -> Table:
    rows: list[list[Cell]] = [[one.kind, str(one), one.error] for one in cases.failed]
    title = f"Could not be compiled or run, and are no cases ({len(rows)}, the first {MOST_LISTED})"
    return Table(title, ["kind", "case", "why"], rows[:MOST_LISTED])
