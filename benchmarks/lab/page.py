"""docs/benchmarks.md, made of the files in benchmarks/results: `python -m benchmarks.lab.page`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.lab.figures import Cell, Figure, Report, Table, number, read

if TYPE_CHECKING:
    from benchmarks.lab.conditions import Conditions

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"

# What is asked most comes first; everything else follows by name.
ORDER = ("detection", "detection_compiled", "verify", "guard", "compare", "compare_tools")

HEAD = """# Benchmarks

<!-- Made by `make bench-page` from benchmarks/results/*.json. Change those, not this. -->

Every figure here was measured by a script of `benchmarks/` and is read from the file that it left;
`make bench` measures again, `make bench ONLY=verify` one of them. Ratios are taken within one run.
A bar is what was promised, or, where nothing was, what we set; where it is missed, that stays here.
"""


def page(reports: list[Report]) -> str:
    """The whole page."""
    ordered = sorted(reports, key=_place)
    parts = [HEAD, *_summary(ordered)]
    for report in ordered:
        parts += _section(report)
    return "\n".join(parts).rstrip("\n") + "\n"


def _place(report: Report) -> tuple[int, str]:
    named = ORDER.index(report.script) if report.script in ORDER else len(ORDER)
    # What was measured on an accelerator comes after what anybody can measure again.
    return named + len(ORDER) * report.script.startswith("cuda"), report.script


def title(script: str) -> str:
    """The heading of a script's section."""
    words = script.replace("_", " ")
    return words[:1].upper() + words[1:]


def _summary(reports: list[Report]) -> Iterator[str]:
    """How many bars are met, and which are not."""
    barred = [(r, f) for r in reports for f in r.figures if f.bar is not None]
    missed = [(r, f) for r, f in barred if not f.met]
    met = f"**{len(barred) - len(missed)} of {len(barred)} bars are met.**"
    yield f"{met} Missed:\n" if missed else met
    for report, figure in missed:
        where = f"[{title(report.script)}](#{title(report.script).lower().replace(' ', '-')})"
        yield f"- {where}: {figure.name}: {_value(figure)}, bar {_bar(figure)}"
    yield ""


def _section(report: Report) -> Iterator[str]:
    yield f"## {title(report.script)}\n"
    if report.what:
        yield report.what.strip() + "\n"
    if report.figures:
        yield "| figure | measured | bar | met | |"
        yield "| --- | ---: | ---: | --- | --- |"
        yield from (_row(figure) for figure in report.figures)
        yield ""
    for table in report.tables:
        yield from _table(table)
    if report.measured is not None:
        yield _told(report.measured) + "\n"


def _row(figure: Figure) -> str:
    met = {True: "yes", False: "**no**", None: ""}[figure.met]
    cells = [figure.name, _value(figure), _bar(figure), met, figure.note]
    return f"| {' | '.join(map(_escaped, cells))} |"


def _value(figure: Figure) -> str:
    return f"{number(figure.value)} {figure.unit}".strip()


def _bar(figure: Figure) -> str:
    if figure.bar is None:
        return ""
    return f"{'≤' if figure.better == 'lower' else '≥'} {number(figure.bar)}"


def _table(table: Table) -> Iterator[str]:
    yield f"**{table.title}**\n"
    # A column is of numbers if its first row says so; those are set to the right.
    first = table.rows[0] if table.rows else [""] * len(table.columns)
    yield f"| {' | '.join(map(_escaped, table.columns))} |"
    yield f"| {' | '.join('---' if isinstance(cell, str) else '---:' for cell in first)} |"
    for row in table.rows:
        yield f"| {' | '.join(_escaped(_cell(cell)) for cell in row)} |"
    yield ""


def _cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell
    return "" if cell is None else number(float(cell))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _told(measured: Conditions) -> str:
    """Machine, versions, date, and whether others disturbed it, in small print."""
    machine = measured.machine
    versions = ", ".join(f"{name} {version}" for name, version in measured.versions.items())
    where = f"{machine.processor}, {machine.cores} cores, {machine.memory_gib:g} GiB"
    where += f", {machine.accelerator}" if machine.accelerator else ""
    others = (
        "how busy others kept it is not known"
        if measured.others_cores is None
        else f"others kept {measured.others_cores:g} cores busy"
    )
    weather = f"load {measured.load_at_start:g} at the start, {others}"
    quiet = "quiet" if measured.quiet else "**not quiet: measure again**"
    return (
        f"<sub>{measured.date}, revision {measured.revision}; {where}; {versions}; "
        f"{measured.threads} threads; {measured.seconds:.0f} s; {weather}: {quiet}.</sub>"
    )


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(read()), encoding="utf-8")
    print(f"wrote docs/{PAGE.name}")


if __name__ == "__main__":
    main()
