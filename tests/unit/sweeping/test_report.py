"""A sweep on a terminal, for CI and as a page."""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree as ET

from rich.console import Console

from paritas.core.reporting.annotations import junit_document
from paritas.core.results.findings import Status
from paritas.sweeping.report import sweep_account, sweep_page, sweep_report
from paritas.sweeping.rows import changes
from unit.sweeping.sweep_samples import crashed, report, row

ROWS = (
    row("pkg.models:fine", seconds=12.0),
    row("pkg.models:fine", Status.IDENTICAL, dtype="bfloat16"),
    row("pkg.models:wrong", Status.DIFFERENT),
    crashed("pkg.models:lost"),
    crashed("pkg.models:lost", dtype="bfloat16"),
)


def shown(found, remark=""):
    console = Console(file=io.StringIO(), width=80)
    console.print(sweep_report(found, remark), crop=False)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def test_the_table_has_the_gravest_first_and_the_verdict_last():
    found = report(*ROWS, notes=("2 of 5 rows are from before this sweep was resumed",))
    assert (
        shown(found, "written to out: report.html")
        == """\
all runs: cpu, eval, inductor

status      target            settings  time
────────────────────────────────────────────
different   pkg.models:wrong  float32    4 s
unverified  pkg.models:lost   float32    1 s
unverified  pkg.models:lost   bfloat16   1 s
equivalent  pkg.models:fine   float32   12 s
identical   pkg.models:fine   bfloat16   4 s

pkg.models:wrong (float32, cpu, eval, inductor)
  output: by 7 times
pkg.models:lost (float32, cpu, eval, inductor)
  the process crashed (killed by SIGSEGV)
  the same in pkg.models:lost (bfloat16, cpu, eval, inductor)

5 runs in 1 min 15 s; torch 2.13.0
  note: 2 of 5 rows are from before this sweep was resumed
written to out: report.html
different: 5 runs; 3 of 5 fail (1 different, 2 unverified)"""
    )


def test_many_rows_that_pass_are_folded_and_none_is_lost():
    lines = shown(report(*(row(f"m:net{at}", seconds=at) for at in range(40)))).splitlines()
    assert lines[4].split() == ["equivalent", "m:net39", "39", "s"]
    assert "equivalent  28 more runs" in lines
    assert max(map(len, lines)) <= 80


def test_changes_are_told():
    earlier = [row("pkg.models:wrong"), row("old:net")]
    found = report(*ROWS[2:3], against="before", changes=changes(ROWS[2:3], earlier, strict=False))
    assert (
        "newly different: 1 run\n"
        "  pkg.models:wrong (float32, cpu, eval, inductor): equivalent -> different\n"
        "gone: 1 run\n"
        "  old:net (float32, cpu, eval, inductor): equivalent\n"
    ) in shown(found)


def cases(found):
    document = junit_document(sweep_account(found, subject="targets.toml"))
    return {
        case.get("name").partition(" ")[0]: [child.tag for child in case]
        for case in ET.fromstring(document).iter("testcase")
    }


def test_every_run_is_a_case_of_junit():
    assert cases(report(*ROWS[1:4])) == {
        "pkg.models:fine": [],
        "pkg.models:wrong": ["failure"],
        "pkg.models:lost": ["error"],
    }


def test_a_case_of_junit_has_its_target_and_its_time():
    document = ET.fromstring(junit_document(sweep_account(report(*ROWS), subject="targets.toml")))
    found = [(case.get("classname"), case.get("time")) for case in document.iter("testcase")]
    assert found == [(f"paritas.sweep.{row.run.target}", f"{row.seconds:.3f}") for row in ROWS]
    assert document.get("time") == f"{sum(row.seconds for row in ROWS):.3f}"


def test_against_an_earlier_sweep_what_failed_then_is_no_failure_of_junit():
    found = report(*ROWS[2:4], against="x", changes=changes(ROWS[2:4], ROWS[2:3], strict=False))
    assert cases(found) == {"pkg.models:wrong": ["system-out"], "pkg.models:lost": ["error"]}


def test_a_crash_has_the_end_of_its_log_in_junit():
    account = sweep_account(report(*ROWS), subject="targets.toml")
    assert "Fatal Python error: <Segmentation fault>" in account.items[3].message


def test_the_page_has_a_cell_and_a_panel_for_each_run():
    page = sweep_page(report(*ROWS))
    assert re.findall(r'href="#run-(\d+)"', page) == ["0", "1", "2", "3", "4"]
    assert re.findall(r'<article class="run story s-(\w+)" id="run-(\d+)">', page) == [
        ("equivalent", "0"),
        ("identical", "1"),
        ("different", "2"),
        ("unverified", "3"),
        ("unverified", "4"),
    ]
    assert '<td class="faint">-</td>' in page  # wrong was not run in bfloat16
    assert "&lt;Segmentation fault&gt;" in page
    assert page.count("data-fails") == 5  # three cells, and the script and the style once each


def test_a_notebook_shows_the_rows():
    cell = report(*ROWS)._repr_html_()
    assert "different: 5 runs; 3 of 5 fail" in cell
    assert "the process crashed (killed by SIGSEGV)" in cell
    assert "unverified: pkg.models:lost (float32" in ROWS[3]._repr_html_()


def test_the_page_loads_nothing():
    page = sweep_page(report(*ROWS))
    assert "default-src 'none'" in page
    assert not re.search(r'(src|href)="(?!#)', page)
